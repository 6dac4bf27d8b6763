"""Subtractive dither: both ends know the uniforms, so the noise is chosen, not bounded.

    delta = sqrt(12 omega |x|^2 / q),   k = floor(x / delta + u + 1/2),   Q(x) = delta (k - u)

with u uniform on [-1/2, 1/2). The error is uniform and independent of x (Schuchman 1964; Roberts
1962), so E|Q(x) - x|^2 = q delta^2 / 12 = omega |x|^2 exactly.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from emfed.compressors.precision import ULP, round_up
from emfed.core.errors import check_range
from emfed.core.protocols import Compressed, Compressor, FloatArray, Form


@final
@dataclass(frozen=True)
class SubtractiveDithering(Compressor):
    """Uniform quantisation with a dither that the receiver takes off.

    The noise is chosen, not bounded: E|Q(x) - x|^2 = noise |x|^2 for every x.

    Parameters
    ----------
    noise : float
        The constant omega.

    Examples
    --------
    >>> import emfed
    >>> round(emfed.SubtractiveDithering(0.5).omega(20), 4)
    0.5
    """

    noise: float = 0.25

    def __post_init__(self) -> None:
        # Below 1e-8 the symbols need more bits than the floats they stand for.
        check_range("noise", self.noise, 1e-8, 1e8)

    def draws(self, q: int) -> int:
        return q

    def compress(self, vectors: FloatArray, uniforms: FloatArray) -> Compressed:
        """The step delta, and one integer per coordinate."""
        q = max(1, vectors.shape[-1])
        top = np.abs(vectors).max(axis=-1, keepdims=True, initial=0.0)
        safe = np.where(top > 0, top, 1.0)
        length = safe * np.sqrt(((vectors / safe) ** 2).sum(axis=-1, keepdims=True))
        delta = np.where(top > 0, length * np.sqrt(12 * self.noise / q), 0.0)
        delta = round_up(delta, "float32")
        step = np.where(delta > 0, delta, 1.0)
        symbols = np.where(delta > 0, np.floor(vectors / step + uniforms), 0.0)
        return Compressed(delta, symbols.astype(np.int32))

    def decompress(self, message: Compressed, uniforms: FloatArray, q: int) -> FloatArray:
        return message.reals * (message.symbols - self.dither(uniforms, q))

    def omega(self, q: int) -> float:
        """The chosen noise, exactly but for the rounding of delta to float32."""
        return self.noise * (1 + ULP["float32"]) ** 2

    def form(self, q: int) -> Form:
        """One step, and symbols of at most |x|_inf / delta + 1 <= sqrt(q / (12 noise)) + 1."""
        return Form(1, q, int(np.sqrt(q / (12 * self.noise))) + 2)

    def dither(self, uniforms: FloatArray, q: int) -> FloatArray:
        return uniforms - 0.5

    def variance(self, vectors: FloatArray) -> FloatArray:
        """The chosen noise times |x|^2, but for the rounding of delta."""
        return np.asarray(self.noise * (vectors**2).sum(axis=-1))

    def describe(self) -> dict[str, Any]:
        return {"compressor": "subtractive-dithering", "noise": self.noise}

    @classmethod
    def examples(cls) -> Iterator[Compressor]:
        yield cls(0.01)
        yield cls(2.0)
