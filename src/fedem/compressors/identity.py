"""No compression: omega = 0."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from fedem.protocols import Compressed, Compressor, FloatArray


def no_symbols(vectors: FloatArray) -> Any:
    """An empty array of symbols with the vectors' leading axes."""
    return np.empty((*vectors.shape[:-1], 0), dtype=np.int32)


@final
@dataclass(frozen=True)
class Identity(Compressor):
    """Sends every number as it is."""

    def draws(self, q: int) -> int:
        """No randomness."""
        return 0

    def compress(self, vectors: FloatArray, uniforms: FloatArray) -> Compressed:
        """The numbers themselves."""
        return Compressed(vectors, no_symbols(vectors))

    def decompress(self, message: Compressed, uniforms: FloatArray, q: int) -> FloatArray:
        """The numbers themselves."""
        return message.reals

    def omega(self, q: int) -> float:
        """Zero, exactly."""
        return 0.0

    def variance(self, vectors: FloatArray) -> FloatArray:
        """Zero, exactly."""
        return np.zeros(vectors.shape[:-1])

    def describe(self) -> dict[str, Any]:
        """The name."""
        return {"compressor": "identity"}

    @classmethod
    def examples(cls) -> Iterator[Compressor]:
        """The one there is."""
        yield cls()
