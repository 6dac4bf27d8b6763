"""Half a sweep: all sites at once given the times, or all times given the sites.

Each row solves a small ridge regression (Gaussian) or takes one damped Newton step of it; see
`emfed.models.sides`.
"""

from __future__ import annotations

import numpy as np

from emfed.core.protocols import FloatArray, IntArray
from emfed.imputation.families import CellFamily
from emfed.imputation.lowrank import Structure
from emfed.models.sides import Graph, Side, add_up, drift_of, lags_of


def site_side(
    structure: Structure,
    sites: IntArray,
    times: IntArray,
    time_rows: FloatArray,
    graph: Graph | None = None,
) -> Side:
    """Sites move, times are fixed; ``graph`` says which sites are neighbours."""
    ridge = structure.ridge(structure.site_penalty)
    tied = graph if structure.spatial > 0 else None
    known = (sites, times, time_rows, structure.effects, ridge)
    return Side(*known, graph=tied, tie=structure.spatial)


def time_side(
    structure: Structure, sites: IntArray, times: IntArray, site_rows: FloatArray, count: int
) -> Side:
    """Times move, sites are fixed."""
    lags = lags_of(structure.smoothing, structure.seasonality, count)
    ridge = structure.ridge(structure.time_penalty)
    drift = drift_of(structure.effects, count)
    return Side(times, sites, site_rows, structure.effects, ridge, lags, drift)


def newton(
    side: Side,
    family: CellFamily,
    rows: FloatArray,
    rest: FloatArray,
    weights: FloatArray,
    sums: FloatArray,
) -> FloatArray:
    """One step of every row, halved where it would not lower the row's objective.

    ``rest`` is what the rows do not move of theta. For the Gaussian the step is the solution.
    """
    theta = rest + side.contribution(rows)
    score, gain = family.slopes(theta, sums, weights)
    information = side.information(gain, len(rows))
    step = side.solve(information, side.gradient(score, rows))
    if family.quadratic:
        return rows + step
    return damped(side, family, rows, step, rest, weights, sums)


def damped(
    side: Side,
    family: CellFamily,
    rows: FloatArray,
    step: FloatArray,
    rest: FloatArray,
    weights: FloatArray,
    sums: FloatArray,
) -> FloatArray:
    """Rows moved by a step, halved where it would not lower the row's objective."""
    before = objective(side, family, rows, rest + side.contribution(rows), weights, sums)
    length = np.ones(len(rows))
    for _ in range(30):
        moved = rows + length[:, None] * step
        after = objective(side, family, moved, rest + side.contribution(moved), weights, sums)
        if side.tied:  # rows hang together: one length for all
            worse = np.full(len(rows), after.sum() > before.sum() + 1e-12 * abs(before.sum()))
        else:
            worse = after > before + 1e-12 * np.abs(before)
        if not worse.any():
            return moved
        length = np.where(worse, length / 2, length)
    return np.where(worse[:, None], rows, moved)


def objective(
    side: Side,
    family: CellFamily,
    rows: FloatArray,
    theta: FloatArray,
    weights: FloatArray,
    sums: FloatArray,
) -> FloatArray:
    """The penalised negative log-likelihood of each row."""
    loss = family.loss(theta, sums, weights)
    return add_up(side.index, loss, len(rows)) + side.price(rows)
