"""One page about a fitted table: index and trend, the table itself, how far it can be trusted."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from emfed.artifacts.figures import Figure, Panel, Series
from emfed.artifacts.page import Highlight, Page, Section, Table, render_page
from emfed.core.protocols import FloatArray, IntArray
from emfed.imputation.families import CellMoments
from emfed.imputation.index import Index, axis_place
from emfed.imputation.result import Imputation

ROWS = 120
"""Sites that a heat map shows: those with the most records."""
_SLOPE = ("slope", "error", "lower", "upper")
LEVELS = np.array([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99])


def write_report(
    fit: Imputation,
    path: str | Path,
    level: float = 0.9,
    *,
    index: Index | None = None,
    places: Mapping[str, tuple[float, float]] | None = None,
    title: str = "Field counts",
) -> None:
    """A self-contained HTML page about a fit.

    ``index`` is one that was made already; ``places`` gives longitude and latitude of sites, for a
    map.
    """
    sections = [_trend(fit, level)]
    if index is not None:
        sections.append(_index(index))
    sections += [_heat_maps(fit), _trust(fit)]
    if places:
        sections.append(_map(fit, places))
    table = fit.table
    rows, columns = fit.params.shape
    page = Page(
        title,
        text=[
            f"{rows} sites x {columns} times, {fit.cells.size} cells observed by "
            f"{len(table.workers)} workers. Estimates are means of what a new record may be."
        ],
        facts={
            "family": str(table.family.describe().get("scale", table.family.name)),
            "mode": fit.mode,
            "rank": str(fit.params.rank),
            "rounds": str(fit.rounds),
            "draws": "0" if fit.plain else str(fit.posterior.count),
            "seed": str(fit.seed),
        },
        highlights=[] if index is None else [_verdict(index)],
        sections=sections,
        tables=_coefficients(fit),
    )
    Path(path).write_text(render_page(page), encoding="utf-8")


def _verdict(index: Index) -> Highlight:
    slope = index.slopes[0]
    return Highlight("overall", slope["class"], index.words(slope).partition(", ")[2])


def _coefficients(fit: Imputation) -> list[Table]:
    """Coefficients of effort and of covariates, with errors."""
    effort = [] if fit.table.effort is None else fit.table.effort.describe()
    known = effort + ([] if fit.plain else fit.coefficients())
    rows = [[r["name"], f"{r['coefficient']:.4g}", f"{r['error']:.2g}"] for r in known]
    return [Table("Coefficients", ("covariate", "coefficient", "error"), rows)] if rows else []


def _trend(fit: Imputation, level: float) -> Section:
    trend = fit.trend(level=level)
    x = np.array([axis_place(label) for label in trend["time"]])
    empty, low, high = trend["empty"], trend.get("lower"), trend.get("upper")
    seen = np.where(empty, np.nan, trend["estimate"])
    bounds = (None, None) if low is None or high is None else _without(empty, low, high)
    series = [Series("sum of estimates", x, seen, *bounds)]
    if empty.any():
        grey = trend["estimate"][empty]
        series.append(Series("no record", x[empty], grey, points=True, line=False, reference=True))
    unit = fit.table.bins.unit
    along = "time" if unit == "index" else "year"
    panel = Panel(series, along, "sum over all sites", log="", whole="x")
    caption = f"The sum of estimates over all sites, with bounds at {level:.0%}."
    if empty.any():
        caption += " Grey: times without any record, whose estimates rest on their neighbours."
    return Section("Trend", figures=[Figure(caption, [panel])])


def _without(empty: Any, *bounds: FloatArray) -> tuple[FloatArray, ...]:
    return tuple(np.where(empty, np.nan, bound) for bound in bounds)


def _index(index: Index) -> Section:
    rows = [
        [s["stratum"], s["class"], str(s["sites"]), *(_number(s[k]) for k in _SLOPE)]
        for s in index.slopes
    ]
    factor = f"factor a {index.per}"
    # The word first: a narrow page shows the left of a table.
    columns = ("stratum", "class", "sites", factor, "error", "lower 95%", "upper 95%")
    return Section("Index", figures=[index.figure()], tables=[Table("Slopes", columns, rows)])


def _number(value: float) -> str:
    return f"{value:.4f}" if np.isfinite(value) else "-"


def _heat_maps(fit: Imputation) -> Section:
    """What was observed, the estimate, and its error relative to it, of the busiest sites."""
    rows = _busiest(fit, ROWS)
    own = fit.cells.take(np.flatnonzero(np.isin(fit.cells.sites, rows)))
    place = np.full(fit.params.shape[0], -1)
    place[rows] = np.arange(len(rows))
    observed = np.full((len(rows), fit.params.shape[1]), np.nan)
    mean = fit.solver.family.backward(own.sums / own.weights)
    observed[place[own.sites], own.times] = mean
    at = fit.moments_of(rows)
    error = np.sqrt(at.value_variance) / np.maximum(np.abs(at.value), 1e-9)
    counts = not (fit.solver.family.quadratic and fit.solver.family.widen(np.ones(1))[0] == 1)
    scale = np.log1p if counts else np.asarray
    name = "log(1 + {})" if counts else "{}"
    labels = fit.table.bins.labels()
    first, last = axis_place(labels[0]), axis_place(labels[-1])
    step = (last - first) / max(1, len(labels) - 1) or 1.0
    extent = (first, last + step, float(len(rows)), 0.0)
    seen, mean = scale(observed), scale(at.value)
    both = float(min(np.nanmin(seen), mean.min())), float(max(np.nanmax(seen), mean.max()))
    panels = [
        Panel((), "time", "site", title, "", whole="x", image=image, extent=extent, colours=colours)
        for title, image, colours in (
            (name.format("observed"), seen, both),
            (name.format("estimate"), mean, both),
            ("relative error of the mean", np.minimum(error, 2.0), None),
        )
    ]
    caption = f"The {len(rows)} sites with the most records, grey where there is no record."
    return Section("The table", figures=[Figure(caption, panels, apart=True)])


def _busiest(fit: Imputation, most: int) -> IntArray:
    records = np.bincount(fit.cells.sites, fit.cells.weights, minlength=fit.params.shape[0])
    return np.sort(np.argsort(-records, kind="stable")[:most])


def _trust(fit: Imputation) -> Section:
    """Calibration and residuals at the observed cells."""
    family, cells = fit.solver.family, fit.cells
    cells = cells.take(np.flatnonzero(cells.weights > 0 if family.counts else cells.weights == 1))
    if fit.plain or cells.size == 0:
        return Section("Trust", text=["Bounds were not drawn, or no cell has a single record."])
    at = fit.posterior.moments(cells.sites, cells.times)
    spread, value = fit.posterior.spread_at(at.theta), family.backward(cells.sums / cells.weights)
    if family.counts:  # several records, or more effort: their sum
        w, value = cells.weights, cells.sums
        at = CellMoments(at.theta + np.log(w), at.variance, w * at.value, w**2 * at.value_variance)
        spread = spread / w
    held = []
    for level in LEVELS:
        tails = ((1 - level) / 2, (1 + level) / 2)
        low, high = family.quantiles(at, spread, tails)
        held.append(float(np.mean((low <= value + 1e-9) & (value <= high + 1e-9))))
    variance = family.record_variance(at.theta, spread)
    residual = (value - at.value) / np.sqrt(np.maximum(variance + at.value_variance, 1e-12))
    some = np.linspace(0, cells.size - 1, min(cells.size, 3000)).astype(np.int64)
    panels = [
        Panel(
            [
                Series("records within their interval", LEVELS, np.array(held), points=True),
                Series("as promised", LEVELS, LEVELS, reference=True),
            ],
            "level",
            "share within",
            "Calibration",
            log="",
        ),
        Panel(
            [Series("records", at.value[some], residual[some], points=True, line=False)],
            "estimate",
            "standardised residual",
            "Residuals",
            log="",
        ),
    ]
    what = "Sums of the records of a cell" if family.counts else "Cells with one record"
    caption = f"{what}, which the fit has seen"
    if family.counts:
        caption += (
            ": intervals are whole numbers, so they hold more than promised where counts are "
        )
        caption += "small"
    return Section("Trust", figures=[Figure(f"{caption}.", panels, apart=True)])


def _map(fit: Imputation, places: Mapping[str, tuple[float, float]]) -> Section:
    """Mean estimates of sites where they lie, in four classes."""
    totals = fit.site_totals()
    known = [k for k, name in enumerate(totals["site"]) if name in places]
    where = np.array([places[totals["site"][k]] for k in known], dtype=np.float64)
    values = np.asarray(totals["estimate"])[known]
    cuts = np.quantile(values, (0.25, 0.5, 0.75))
    group = np.searchsorted(cuts, values)
    names = ("lowest quarter", "second", "third", "highest quarter")
    series = [
        Series(name, where[group == k, 0], where[group == k, 1], points=True, line=False)
        for k, name in enumerate(names)
        if (group == k).any()
    ]
    panel = Panel(series, "longitude", "latitude", log="")
    return Section("Map", figures=[Figure("Sites by their total, in four quarters.", [panel])])
