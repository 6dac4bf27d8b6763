"""What a pass over rows computes, in mathematics: no word of where the rows are.

Rows in the frame are z = (y - origin) / scale, and column d of every row is 1. A feature is a
product of two columns, so f(z) may hold a column, a square, a product or a constant. Then

    logits_k = c_k + <B_k, f(z)>,   r = softmax(logits) (or 1 at the largest, where ``hard``),

and a pass returns the sums over rows of r_k and of r_k f(z) and, where asked, of the log of the sum
of exp(logits) and of the entropy of r.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple, final

import numpy as np

from emfed.core.protocols import FloatArray, IntArray

Second = Literal["none", "squares", "products"]


class Sums(NamedTuple):
    """Sums over the rows of each worker (the leading axes), weighted if rows have weights."""

    mass: FloatArray
    """r, ``(..., K)``."""
    moments: FloatArray
    """r times features, ``(..., K, F)``."""
    density: FloatArray
    """log sum exp(logits), ``(...)``; 0 if it was not asked for."""
    entropy: FloatArray
    """The entropy of r, ``(...)``; 0 if it was not asked for."""


@final
@dataclass(frozen=True, eq=False)
class Features:
    """Columns in their frame, and the pairs of them whose products are features."""

    origin: FloatArray
    scale: FloatArray
    second: Second
    """What follows the columns: nothing, their squares, or the products of all pairs of them."""

    @property
    def left(self) -> IntArray:
        """One column of each pair."""
        return _pairs(len(self.origin), self.second)[0]

    @property
    def right(self) -> IntArray:
        """The other."""
        return _pairs(len(self.origin), self.second)[1]


@lru_cache(maxsize=64)
def _pairs(d: int, second: Second) -> tuple[IntArray, IntArray]:
    """The two columns of each feature; column d is 1."""
    columns = np.arange(d)
    nothing = np.arange(0)
    more = {"none": (nothing, nothing), "squares": (columns, columns)}.get(second)
    first, other = np.triu_indices(d) if more is None else more
    return np.concatenate([columns, first]), np.concatenate([np.full(d, d), other])


@final
@dataclass(frozen=True, eq=False)
class Pass:
    """Intercepts c ``(..., K)`` and slopes B ``(..., K, F)`` of features; see above."""

    features: Features
    intercepts: FloatArray
    slopes: FloatArray
    hard: bool = False

    @property
    def components(self) -> int:
        """K."""
        return int(self.intercepts.shape[-1])
