"""Subtractive dither whose noise is chosen for each vector.

The quantiser is that of `emfed.compressors.subtractive`; its step is rounded to a power of
2**(1/4), which takes one byte (`emfed.core.objects.GRID`). The noise need not be sent: the message
holds E|Q|^2 = |x|^2 + noise, and the noise follows from the step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from emfed.core.errors import check_range
from emfed.core.objects import GRID
from emfed.core.protocols import Compressed, Compressor, FloatArray, Form

_HALF_STEP = 2.0**0.125
"""Half the distance of neighbours on the grid, as a ratio."""
LEAST_RATE = 0.1
"""The smallest memory rate. Not tuned: at 0 a memory under much noise would never move."""


@final
@dataclass(frozen=True, eq=False)
class ChosenDithering(Compressor):
    """Uniform quantisation, its dither taken off again, with the noise chosen for each vector.

    E|Q(x) - x|^2 is ``noise`` |x|^2, but at most ``budget``, if there is one, and at least
    ``finest`` |x|^2; rounding the step may add or take a fifth. `AutoEM` compresses with it.

    Parameters
    ----------
    noise : float or array
        The noise as a share of |x|^2, one number or one for each vector.
    budget : float or None
        The largest noise of a vector, in the units of |x|^2.
    finest : float
        The smallest noise as a share of |x|^2, which bounds the symbols.

    Examples
    --------
    >>> from emfed.compressors import ChosenDithering
    >>> round(ChosenDithering(0.5).omega(20), 4)
    0.5946
    """

    noise: float | FloatArray = 0.25
    budget: float | None = None
    finest: float = 2e-3

    def __post_init__(self) -> None:
        check_range("finest", self.finest, 1e-8, 1e4)
        if self.budget is not None:
            check_range("budget", self.budget, 0, np.inf, open_low=True)
        check_range("noise", float(np.min(self.noise, initial=1.0)), 0, np.inf, open_low=True)

    def draws(self, q: int) -> int:
        return q

    def _steps(self, vectors: FloatArray) -> FloatArray:
        """delta of each vector, ``(..., 1)``; 0 for the zero vector."""
        q = max(1, vectors.shape[-1])
        top = np.abs(vectors).max(axis=-1, keepdims=True, initial=0.0)
        safe = np.where(top > 0, top, 1.0)
        squared = safe**2 * ((vectors / safe) ** 2).sum(axis=-1, keepdims=True)
        noise = np.asarray(self.noise)[..., None] * squared
        if self.budget is not None:
            noise = np.minimum(noise, self.budget)
        wanted = np.sqrt(12 * np.maximum(noise, self.finest * squared) / q)
        place = np.searchsorted(GRID, wanted / _HALF_STEP)
        return np.where(top > 0, GRID[np.clip(place, 1, len(GRID) - 1)], 0.0)

    def compress(self, vectors: FloatArray, uniforms: FloatArray) -> Compressed:
        """The step, and one integer per coordinate."""
        delta = self._steps(vectors)
        step = np.where(delta > 0, delta, 1.0)
        limit = self.form(vectors.shape[-1]).bound  # reached only where the grid ends
        symbols = np.where(delta > 0, np.floor(vectors / step + uniforms), 0.0)
        return Compressed(delta, np.clip(symbols, -limit, limit).astype(np.int32))

    def decompress(self, message: Compressed, uniforms: FloatArray, q: int) -> FloatArray:
        return message.reals * (message.symbols - self.dither(uniforms, q))

    def omega(self, q: int) -> float:
        return float(np.max(self.noise)) * _HALF_STEP**2

    def form(self, q: int) -> Form:
        return Form(1, q, int(np.sqrt(q * _HALF_STEP**2 / (12 * self.finest))) + 2, on_grid=True)

    def dither(self, uniforms: FloatArray, q: int) -> FloatArray:
        return uniforms - 0.5

    def variance(self, vectors: FloatArray) -> FloatArray:
        return vectors.shape[-1] * self._steps(vectors)[..., 0] ** 2 / 12

    def rate(self, message: Compressed, uniforms: FloatArray, q: int) -> FloatArray:
        """1 - noise / |Q|^2, about 1 / (1 + omega): what both ends see of a good memory rate."""
        values = self.decompress(message, uniforms, q)
        received = (values**2).sum(axis=-1)
        noise = q * message.reals[..., 0] ** 2 / 12
        share = np.divide(noise, received, out=np.ones_like(noise), where=received > 0)
        return np.clip(1 - share, LEAST_RATE, 1.0)

    def describe(self) -> dict[str, Any]:
        return {
            "compressor": "chosen-dithering",
            "noise": self.noise,
            "budget": self.budget,
            "finest": self.finest,
        }

    @classmethod
    def examples(cls) -> Iterator[Compressor]:
        """Fine, coarse, and with a bound."""
        yield cls(0.01)
        yield cls(2.0)
        yield cls(1.0, budget=0.3)
