"""Half a sweep: all sites at once given the times, or all times given the sites.

Each row solves a small ridge regression (Gaussian) or takes one damped Newton step of it; with
smoothing along time the rows of the times are one banded system. Memory is one number per cell and
rank^2 per row: the normal equations are added up pair by pair, never as outer products of cells.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np
from scipy.linalg import cholesky_banded, solve_banded, solveh_banded

from emfed.core.protocols import FloatArray, IntArray
from emfed.imputation.families import Family
from emfed.imputation.lowrank import Structure, add_up

SEASON = 12
"""The lag of the seasonal penalty: months of a year."""


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
    lags: tuple[tuple[int, float], ...] = ()
    """Penalised differences between rows: (lag, penalty)."""

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
        """Of the penalised log-likelihood, by row."""
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
            out[lag:] += 0.5 * strength * ((rows[lag:] - rows[:-lag]) ** 2).sum(axis=1)
        return np.asarray(out)

    def solve(
        self, information: FloatArray, right: FloatArray, noise: FloatArray | None = None
    ) -> FloatArray:
        """(information + penalty)^-1 right; with standard normal ``noise``, a draw about it."""
        width = right.shape[-1]
        if self.lags:
            return _solve_banded(information, right, self.ridge, self.lags, noise)
        system = information + np.diag(self.ridge)
        size = np.einsum("...ii->...i", system).max(axis=-1)[..., None, None]
        system = system + (1e-12 + 1e-10 * size) * np.eye(width)
        out = np.linalg.solve(system, right[..., None])[..., 0]
        if noise is not None:
            factor = np.linalg.cholesky(system)
            out = out + np.linalg.solve(factor.transpose(0, 2, 1), noise[..., None])[..., 0]
        return np.asarray(out)


def site_side(
    structure: Structure, sites: IntArray, times: IntArray, time_rows: FloatArray
) -> Side:
    """Sites move, times are fixed."""
    ridge = structure.ridge(structure.site_penalty)
    return Side(sites, times, time_rows, structure.effects, ridge)


def time_side(
    structure: Structure, sites: IntArray, times: IntArray, site_rows: FloatArray, count: int
) -> Side:
    """Times move, sites are fixed."""
    lags = ((1, structure.smoothing), (SEASON, structure.seasonality))
    used = tuple((lag, k) for lag, k in lags if k > 0 and lag < count)
    ridge = structure.ridge(structure.time_penalty)
    return Side(times, sites, site_rows, structure.effects, ridge, used)


def newton(
    side: Side,
    family: Family,
    rows: FloatArray,
    rest: FloatArray,
    weights: FloatArray,
    sums: FloatArray,
) -> FloatArray:
    """One step of every row, halved where it would not lower the row's objective.

    ``rest`` is what the rows do not move of theta. For the Gaussian the step is the solution.
    """
    theta = rest + side.contribution(rows)
    score = sums - weights * family.mean(theta)
    information = side.information(weights * family.variance(theta), len(rows))
    step = side.solve(information, side.gradient(score, rows))
    if family.quadratic:
        return rows + step
    before = _objective(side, family, rows, theta, weights, sums)
    length = np.ones(len(rows))
    for _ in range(30):
        moved = rows + length[:, None] * step
        after = _objective(side, family, moved, rest + side.contribution(moved), weights, sums)
        if side.lags:  # rows hang together: one length for all
            worse = np.full(len(rows), after.sum() > before.sum() + 1e-12 * abs(before.sum()))
        else:
            worse = after > before + 1e-12 * np.abs(before)
        if not worse.any():
            return moved
        length = np.where(worse, length / 2, length)
    return np.where(worse[:, None], rows, moved)


def _objective(
    side: Side,
    family: Family,
    rows: FloatArray,
    theta: FloatArray,
    weights: FloatArray,
    sums: FloatArray,
) -> FloatArray:
    """The penalised negative log-likelihood of each row."""
    loss = weights * family.cumulant(theta) - sums * theta
    return add_up(side.index, loss, len(rows)) + side.price(rows)


def _solve_banded(
    information: FloatArray,
    right: FloatArray,
    ridge: FloatArray,
    lags: tuple[tuple[int, float], ...],
    noise: FloatArray | None,
) -> FloatArray:
    """The rows as one system: blocks on the diagonal, the penalties of differences beside it."""
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
        band[upper - lag * width, lag * width :] -= strength
    if noise is None:
        return np.asarray(solveh_banded(band, right.ravel())).reshape(count, width)
    factor = cholesky_banded(band)
    flat = solveh_banded(band, right.ravel())
    return np.asarray(flat + solve_banded((0, upper), factor, noise.ravel())).reshape(count, width)
