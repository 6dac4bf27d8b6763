"""Other sites and other dates, given a fit that does not move."""

from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np

from emfed.core.errors import DataError, EmfedWarning, SettingsError
from emfed.core.protocols import FloatArray, IntArray
from emfed.imputation.bins import Bins
from emfed.imputation.lowrank import TableParameters
from emfed.imputation.rows import newton, site_side, time_side
from emfed.imputation.sweeps import Solver
from emfed.imputation.table import FieldTable, Grid, build_table

_STEPS = 20
"""Newton steps for the rows of new sites: twice what counts need."""
_FIXED = 1e9
"""The weight with which fitted times hold still while their neighbours follow."""


def extend(
    solver: Solver, params: TableParameters, fitted: FieldTable, other: FieldTable
) -> tuple[TableParameters, FieldTable]:
    """Parameters for the sites and dates of both tables, and the table of both."""
    if other.bins.unit != fitted.bins.unit:
        raise DataError(
            f"the fit has one column a {fitted.bins.unit}, these records one a {other.bins.unit}."
        )
    if other.family.describe() != fitted.family.describe():
        raise DataError(
            f"the fit has {fitted.family.describe()}, these records {other.family.describe()}: "
            "read them with the family of the fit."
        )
    if params.covariates.count or solver.covariates.graph is not None:
        raise SettingsError(
            "a fit with covariates or coordinates cannot be carried to other sites or dates."
        )
    table, known = _merge(fitted, other)
    params = _more_times(solver, params, fitted.bins, table.bins)
    rows = np.zeros((len(table.sites), params.sites.shape[1]))
    rows[: len(params.sites)] = params.sites
    params = replace(params, sites=_more_sites(solver, replace(params, sites=rows), table, known))
    return params, table


def _merge(fitted: FieldTable, other: FieldTable) -> tuple[FieldTable, IntArray]:
    """Both tables as one, and the sites in it that the fit has records of.

    Of those the fitted records count: the others would come twice.
    """
    places = {name: index for index, name in enumerate(fitted.sites)}
    names = list(fitted.sites)
    for name in other.sites:
        if name not in places:
            places[name] = len(names)
            names.append(name)
    first = min(fitted.bins.first, other.bins.first)
    last = max(fitted.bins.first + fitted.bins.count, other.bins.first + other.bins.count)
    bins = Bins(fitted.bins.unit, first, last - first)
    site = np.array([places[name] for name in other.sites], dtype=np.int64)[other.site]
    known = np.unique(fitted.site)
    new = ~np.isin(site, known)
    if not new.all():
        warnings.warn(
            f"{int((~new).sum())} cells of sites that the fit has records of were left out: of "
            "those the fitted records count. Fit again to use them.",
            EmfedWarning,
            stacklevel=4,
        )
    workers = [*fitted.workers, *(f"{name} (new)" for name in other.workers)]
    owner = [
        np.repeat(np.arange(len(t.workers)), np.diff(t.offsets)) + shift
        for t, shift in ((fitted, 0), (other, len(fitted.workers)))
    ]
    table = build_table(
        Grid(names, bins, fitted.family),
        workers,
        np.concatenate([owner[0], owner[1][new]]),
        np.concatenate([fitted.site, site[new]]),
        np.concatenate(
            [
                fitted.time + fitted.bins.first - first,
                other.time[new] + other.bins.first - first,
            ]
        ),
        np.concatenate([fitted.weights, other.weights[new]]),
        np.concatenate([fitted.values, other.values[new]]),
        replace(fitted.intake, used=fitted.intake.used + int(new.sum())),
    )
    return table, known


def _more_times(solver: Solver, params: TableParameters, old: Bins, new: Bins) -> TableParameters:
    """Rows of further times: where the penalties along time put them, the fitted ones fixed."""
    if old == new:
        return params
    if not solver.structure.smooth:
        raise SettingsError(
            f"dates outside {old.label(0)} to {old.label(old.count - 1)} need a fit with smoothing "
            "or seasonality: nothing else says how times go on."
        )
    width, shift = params.times.shape[1], old.first - new.first
    held, right = np.zeros((new.count, width, width)), np.zeros((new.count, width))
    inside = slice(shift, shift + old.count)
    held[inside] = _FIXED * np.eye(width)
    right[inside] = _FIXED * params.times
    none: IntArray = np.empty(0, dtype=np.int64)
    side = time_side(solver.structure, none, none, params.sites, new.count)
    rows = side.solve(held, right)
    rows[inside] = params.times
    return replace(params, times=rows)


def _more_sites(
    solver: Solver, params: TableParameters, table: FieldTable, known: IntArray
) -> FloatArray:
    """Rows of sites that the fit has no records of, from those of now; the others stay."""
    cells = table.pooled
    cells = cells.take(np.flatnonzero(~np.isin(cells.sites, known)))
    if cells.size == 0:
        return params.sites
    side = site_side(solver.structure, cells.sites, cells.times, params.times)
    rest = params.base(cells.sites, cells.times)
    if params.effects:
        rest = rest + params.times[cells.times, params.rank]
    rows, others = params.sites, np.setdiff1d(np.arange(len(params.sites)), cells.sites)
    for _ in range(1 if solver.family.quadratic else _STEPS):
        rows = newton(side, solver.family, rows, rest, cells.weights, cells.sums)
    rows[others] = params.sites[others]
    return rows
