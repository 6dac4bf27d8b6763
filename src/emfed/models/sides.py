"""Ridge regressions of many rows at once, alone or tied to their neighbours.

Each row solves a small regression on the rows of the other side of a table; with penalties on
differences between rows they are one banded system. Memory is one number per cell and rank^2 per
row: the normal equations are added up pair by pair, never as outer products of cells.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np

from emfed.core.protocols import FloatArray, IntArray

Strength = float | FloatArray
SEASON = 12
"""The lag of the seasonal penalty: months of a year."""


def add_up(index: IntArray, values: FloatArray, size: int) -> FloatArray:
    """Values added by index: out[index[i]] += values[i]."""
    return np.asarray(np.bincount(index, values, minlength=size), dtype=np.float64)


def lags_of(smoothing: float, seasonality: float, count: int) -> tuple[tuple[int, float], ...]:
    """The penalised differences between ``count`` time stamps."""
    lags = ((1, smoothing), (SEASON, seasonality))
    return tuple((lag, strength) for lag, strength in lags if strength > 0 and lag < count)


@final
@dataclass(frozen=True, eq=False)
class Side:
    """One side of the table during half a sweep: whose rows move, and what they are tied to."""

    index: IntArray
    """The row of each cell."""
    other: IntArray
    """The fixed row of each cell."""
    design: FloatArray
    """The fixed side's rows."""
    effects: bool
    ridge: FloatArray
    lags: tuple[tuple[int, Strength], ...] = ()
    """Penalised differences between rows: (lag, penalty), one penalty or one for each column."""

    @classmethod
    def penalty(cls, ridge: FloatArray, lags: tuple[tuple[int, Strength], ...] = ()) -> Side:
        """What rows are tied to, without cells: for normal equations that come from elsewhere."""
        none: IntArray = np.empty(0, dtype=np.int64)
        return cls(none, none, np.zeros((1, len(ridge))), True, ridge, lags)

    def column(self, k: int) -> FloatArray | float:
        """The k-th regressor of each cell; an effect's is 1."""
        if self.effects and k == self.design.shape[1] - 1:
            return 1.0
        return self.design[self.other, k]

    def contribution(self, rows: FloatArray) -> FloatArray:
        """What the moving rows add to theta at each cell."""
        out = np.zeros(len(self.index))
        for k in range(rows.shape[1]):
            out += rows[self.index, k] * self.column(k)
        return out

    def gradient(self, score: FloatArray, rows: FloatArray) -> FloatArray:
        """The gradient of the penalised log-likelihood, by row."""
        out = np.empty_like(rows)
        for k in range(rows.shape[1]):
            out[:, k] = add_up(self.index, score * self.column(k), len(rows))
        return out - self.pull(rows)

    def information(self, weight: FloatArray, count: int) -> FloatArray:
        """Sum of weight times outer products of regressors, by row: ``(count, k, k)``."""
        width = self.design.shape[1]
        out = np.empty((count, width, width))
        for i in range(width):
            left = weight * self.column(i)
            for j in range(i, width):
                out[:, i, j] = add_up(self.index, left * self.column(j), count)
                out[:, j, i] = out[:, i, j]
        return out

    def pull(self, rows: FloatArray) -> FloatArray:
        """The gradient of the penalty."""
        out = rows * self.ridge
        for lag, strength in self.lags:
            difference = strength * (rows[lag:] - rows[:-lag])
            out[lag:] += difference
            out[:-lag] -= difference
        return out

    def price(self, rows: FloatArray) -> FloatArray:
        """The penalty of each row; a difference counts at its later row."""
        out = 0.5 * (rows * rows) @ self.ridge
        for lag, strength in self.lags:
            out[lag:] += 0.5 * (strength * (rows[lag:] - rows[:-lag]) ** 2).sum(axis=1)
        return np.asarray(out)

    def solve(
        self, information: FloatArray, right: FloatArray, noise: FloatArray | None = None
    ) -> FloatArray:
        """(information + penalty)^-1 right; with standard normal ``noise``, a draw about it."""
        width = right.shape[-1]
        if self.lags:
            return _solve_banded(information, right, self.ridge, self.lags, noise)
        system = information + np.diag(self.ridge)
        # Relative to each unknown's own size: one that is held by a large penalty (the effects of
        # sites in mode site-owner, 1e9) must not shrink the others.
        size = np.einsum("...ii->...i", system)[..., None]
        system = system + (1e-12 + 1e-10 * size) * np.eye(width)
        out = np.linalg.solve(system, right[..., None])[..., 0]
        if noise is not None:
            factor = np.linalg.cholesky(system)
            out = out + np.linalg.solve(factor.transpose(0, 2, 1), noise[..., None])[..., 0]
        return np.asarray(out)


def _solve_banded(
    information: FloatArray,
    right: FloatArray,
    ridge: FloatArray,
    lags: tuple[tuple[int, Strength], ...],
    noise: FloatArray | None,
) -> FloatArray:
    """The rows as one system: blocks on the diagonal, the penalties of differences beside it."""
    from scipy.linalg import cholesky_banded, solve_banded, solveh_banded

    count, width = right.shape
    upper = max([width - 1, *(lag * width for lag, _ in lags)])
    band = np.zeros((upper + 1, count * width))
    for i in range(width):
        for j in range(i, width):
            band[upper + i - j, j::width] += information[:, i, j]
    band[upper].reshape(count, width)[:] += ridge + 1e-12 + 1e-10 * band[upper].max()
    for lag, strength in lags:
        diagonal = band[upper].reshape(count, width)
        diagonal[lag:] += strength
        diagonal[:-lag] += strength
        band[upper - lag * width].reshape(count, width)[lag:] -= strength
    if noise is None:
        return np.asarray(solveh_banded(band, right.ravel())).reshape(count, width)
    factor = cholesky_banded(band)
    flat = solveh_banded(band, right.ravel())
    return np.asarray(flat + solve_banded((0, upper), factor, noise.ravel())).reshape(count, width)
