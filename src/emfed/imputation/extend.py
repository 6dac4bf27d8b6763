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
from emfed.imputation.table import FieldTable, build_table

_STEPS = 20
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
    if params.covariates.count:
        raise SettingsError("a fit with covariates cannot be carried to other sites or dates.")
    table, known = _merge(fitted, other)
    params = _more_times(solver, params, fitted.bins, table.bins)
    rows = np.zeros((len(table.sites), params.sites.shape[1]))
    rows[known] = params.sites
    params = replace(params, sites=_more_sites(solver, replace(params, sites=rows), table, known))
    return params, table


def _merge(fitted: FieldTable, other: FieldTable) -> tuple[FieldTable, IntArray]:
    """Both tables as one, and where the fitted sites are in it.

    Of sites that the fit knows, the fitted records count: the others would come twice.
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
    new = site >= len(fitted.sites)
    if not new.all():
        warnings.warn(
            f"{int((~new).sum())} cells of sites that the fit knows were left out: of those the "
            "fitted records count. Fit again to use them.",
            EmfedWarning,
            stacklevel=4,
        )
    workers = [*fitted.workers, *(f"{name} (new)" for name in other.workers)]
    owner = [
        np.repeat(np.arange(len(t.workers)), np.diff(t.offsets)) + shift
        for t, shift in ((fitted, 0), (other, len(fitted.workers)))
    ]
    table = build_table(
        fitted.family,
        names,
        bins,
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
    return table, np.arange(len(fitted.sites))


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
    """Rows of sites the fit does not know, from their records; the others stay."""
    cells = table.pooled
    cells = cells.take(np.flatnonzero(~np.isin(cells.sites, known)))
    if cells.size == 0:
        return params.sites
    side = site_side(solver.structure, cells.sites, cells.times, params.times)
    rest = params.base(cells.sites, cells.times)
    if params.effects:
        rest = rest + params.times[cells.times, params.rank]
    rows = params.sites
    for _ in range(1 if solver.family.quadratic else _STEPS):
        rows = newton(side, solver.family, rows, rest, cells.weights, cells.sums)
    rows[known] = params.sites[known]
    return rows
