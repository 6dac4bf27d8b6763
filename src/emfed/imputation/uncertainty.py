"""How sure an estimate is: dispersion, variances of theta, draws from the posterior.

The penalties are read as a prior: rows of sites and times are Gaussian with the penalty as
precision, in units of the dispersion.
"""

from __future__ import annotations

from dataclasses import replace
from typing import final

import numpy as np

from emfed.core.protocols import FloatArray, IntArray
from emfed.core.streams import Purpose, normals
from emfed.imputation.lowrank import Cells, TableParameters
from emfed.imputation.rows import newton
from emfed.imputation.sweeps import Solver
from emfed.models.sides import Side

_ZERO = np.zeros(1, dtype=np.int64)
GIBBS = 5
"""Sweeps between draws."""
NEWTON = 3
"""Damped steps to the mode that a draw is made about."""


@final
class Uncertainty:
    """Of one fit: what the cells say about each row, given the rows of the other side."""

    def __init__(self, solver: Solver, cells: Cells, params: TableParameters) -> None:
        self.solver, self.cells, self.params = solver, cells, params
        theta = params.theta(cells.sites, cells.times)
        gain = cells.weights * solver.family.variance(theta)
        freedom = 1.0
        blocks = []
        sides = solver.sides(cells, params)
        for side, rows in zip(sides, (params.sites, params.times), strict=True):
            information = side.information(gain, len(rows))
            precision = information + np.diag(side.ridge + 1e-9)
            for lag, strength in side.lags:  # neighbours held fixed
                tied = np.zeros(len(rows))
                tied[lag:] += strength
                tied[:-lag] += strength
                precision = precision + tied[:, None, None] * np.eye(rows.shape[1])
            covariance = np.linalg.inv(precision) if rows.shape[1] else precision
            freedom += float(np.einsum("jik,jki->", covariance, information))
            blocks.append(covariance)
        self._sites, self._times = blocks
        score = cells.sums - cells.weights * solver.family.mean(theta)
        left = max(cells.size - freedom, 0.1 * cells.size)
        pearson = float((score**2 / np.maximum(gain, 1e-12)).sum() / left)
        self.dispersion = self._clean(pearson)

    def _clean(self, pearson: float) -> float:
        """A Bernoulli cell has none of its own; a Poisson one is not below 1."""
        if self.solver.family.name == "bernoulli":
            return 1.0
        return pearson if self.solver.family.quadratic else max(1.0, pearson)

    def variance(self, sites: IntArray, times: IntArray) -> FloatArray:
        """The variance of theta at these cells, each side given the other."""
        left = _regressors(self.params.times, self.params.effects)[times]
        right = _regressors(self.params.sites, self.params.effects)[sites]
        total = np.einsum("ni,nij,nj->n", left, self._sites[sites], left)
        total += np.einsum("ni,nij,nj->n", right, self._times[times], right)
        return self.dispersion * total

    def draw(self, params: TableParameters, seed: int, index: int) -> TableParameters:
        """Further Gibbs sweeps from ``params``: for the Gaussian, exact conditional draws."""
        for sweep in range(GIBBS):
            place = 2 * (GIBBS * index + sweep)
            site, _ = self.solver.sides(self.cells, params)
            params = replace(params, sites=self._conditional(site, params, True, seed, place))
            _, time = self.solver.sides(self.cells, params)
            params = replace(params, times=self._conditional(time, params, False, seed, place + 1))
        return params

    def _conditional(
        self, side: Side, params: TableParameters, of_sites: bool, seed: int, place: int
    ) -> FloatArray:
        """One side's rows drawn given the other's: about their mode, with its curvature."""
        cells, family = self.cells, self.solver.family
        rows = params.sites if of_sites else params.times
        theta = params.theta(cells.sites, cells.times)
        if not family.quadratic:  # an undamped step from a draw far out would run away
            rest = theta - side.contribution(rows)
            for _ in range(NEWTON):
                rows = newton(side, family, rows, rest, cells.weights, cells.sums)
            theta = rest + side.contribution(rows)
        score = cells.sums - cells.weights * family.mean(theta)
        information = side.information(cells.weights * family.variance(theta), len(rows))
        step = side.gradient(score, rows) if family.quadratic else np.zeros_like(rows)
        noise = normals(seed, place, Purpose.IMPUTATION, _ZERO, max(1, rows.size))[0]
        noise = np.sqrt(self.dispersion) * noise[: rows.size].reshape(rows.shape)
        return rows + side.solve(information, step, noise)


def _regressors(rows: FloatArray, effects: bool) -> FloatArray:
    """What the other side's rows are multiplied by: factors, and 1 for the effect."""
    out = rows.copy()
    if effects:
        out[:, -1] = 1.0
    return out
