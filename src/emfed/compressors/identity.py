"""No compression, or merely shorter floats."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from emfed.compressors.precision import ULP, FloatPrecision, check_precision, round_randomly
from emfed.core.protocols import Compressed, Compressor, FloatArray, Form


@final
@dataclass(frozen=True)
class Identity(Compressor):
    """Send every number: as float64, or rounded at random to float32 or bfloat16.

    Parameters
    ----------
    precision : {"float64", "float32", "bfloat16"}
        The numbers that are sent. Rounding is up or down at random, so that it has no bias.

    Examples
    --------
    >>> import emfed
    >>> emfed.Identity().omega(10)
    0.0
    >>> emfed.Identity("float32").omega(10) < 1e-14
    True
    """

    precision: FloatPrecision = "float64"

    def __post_init__(self) -> None:
        check_precision("precision", self.precision)

    def draws(self, q: int) -> int:
        """One uniform per number where there is something to round."""
        return 0 if self.precision == "float64" else q

    def compress(self, vectors: FloatArray, uniforms: FloatArray) -> Compressed:
        symbols = np.empty((*vectors.shape[:-1], 0), dtype=np.int32)
        return Compressed(round_randomly(vectors, self.precision, uniforms), symbols)

    def decompress(self, message: Compressed, uniforms: FloatArray, q: int) -> FloatArray:
        return message.reals

    def form(self, q: int) -> Form:
        return Form(q, 0)

    def omega(self, q: int) -> float:
        """Zero, or a quarter of the squared distance of neighbours."""
        return ULP[self.precision] ** 2 / 4

    def variance(self, vectors: FloatArray) -> FloatArray | None:
        return np.zeros(vectors.shape[:-1]) if self.precision == "float64" else None

    def describe(self) -> dict[str, Any]:
        return {"compressor": "identity", "precision": self.precision}

    @classmethod
    def examples(cls) -> Iterator[Compressor]:
        yield cls()
        yield cls("float32")
        yield cls("bfloat16")
