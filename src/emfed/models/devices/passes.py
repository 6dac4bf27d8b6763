"""What a pass over rows computes, in mathematics: no word of where the rows are.

Rows in the frame are z = (y - origin) / scale, and column d of every row is 1. A feature is a
product of two columns, so f(z) may hold a column, a square, a product or a constant. Then

    logits_k = c_k + <B_k, f(z)>,   r = softmax(logits) (or 1 at the largest, where ``hard``),

and a pass returns the sums over rows of r_k and of r_k f(z) and, where asked, of the log of the sum
of exp(logits) and of the entropy of r.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, final

import numpy as np

from emfed.core.protocols import FloatArray, IntArray


class Sums(NamedTuple):
    """Sums over the rows of each worker (the leading axes), weighted if rows have weights."""

    mass: FloatArray
    """r, ``(..., K)``."""
    moments: FloatArray
    """r times features, ``(..., K, F)``."""
    density: FloatArray
    """log sum exp(logits), ``(...)``; 0 where nobody asked for it."""
    entropy: FloatArray
    """The entropy of r, ``(...)``; 0 where nobody asked for it."""


@final
@dataclass(frozen=True, eq=False)
class Features:
    """Columns in their frame, and the pairs of them whose products are features."""

    origin: FloatArray
    scale: FloatArray
    left: IntArray
    right: IntArray

    @classmethod
    def of(cls, origin: FloatArray, scale: FloatArray, second: str) -> Features:
        """The columns, then their ``second`` moments: ``"none"``, ``"squares"``, ``"products"``."""
        d = len(origin)
        columns, ones = np.arange(d), np.full(d, d)
        if second == "none":
            return cls(origin, scale, columns, ones)
        if second == "squares":
            more = (columns, columns)
        else:
            more = np.triu_indices(d)
        return cls(
            origin, scale, np.concatenate([columns, more[0]]), np.concatenate([ones, more[1]])
        )

    @property
    def linear(self) -> bool:
        """Whether features are the columns and nothing else."""
        d = len(self.origin)
        return np.array_equal(self.left, np.arange(d)) and bool(np.all(self.right == d))

    @property
    def squared(self) -> bool:
        """Whether features are the columns and then their squares."""
        d = len(self.origin)
        twice = np.concatenate([np.arange(d)] * 2)
        ones = np.concatenate([np.full(d, d), np.arange(d)])
        return np.array_equal(self.left, twice) and np.array_equal(self.right, ones)


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
