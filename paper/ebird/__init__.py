"""Figure 2 of the paper: national trends of counts, and the cells that were never seen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from emfed.artifacts import Figure, Panel, Series, Table
from emfed.core.protocols import FloatArray
from paper.findings import Findings
from paper.smoothing import loess
from paper.tables import TableSettings
from paper.traces import Trace, Traces, each

BATCHES = {"grid": "", "observations": ", own cells", "rescaled": ", own cells rescaled"}
"""What is told of a run's batches."""
FAR = 20.0
"""Medians above which one point would press all others onto the axis."""


def analyse(traces: Traces) -> Findings:
    """Errors of every run, and the trends of those that were fitted in earnest."""
    measures: dict[str, FloatArray] = {}
    figures: dict[str, Figure] = {}
    rows = []
    for run in dict.fromkeys(trace.job.run for trace in traces.all):
        group = [trace for trace in traces.all if trace.job.run == run]
        rmse, start, additive = (
            each(group, _last(n)) for n in ("rmse", "start_rmse", "additive_rmse")
        )
        sent = each(group, _last("busiest_bytes_up"))
        scored = bool(np.isfinite(rmse).all())
        if _settings(group[0]).mode == "paper" and scored:
            measures[f"{run}: error left of the start's"] = rmse / start
        elif _settings(group[0]).mode != "paper":
            if scored:
                measures[f"{run}: percent better than additive"] = 100 * (1 - rmse / additive)
            measures[f"{run}: kB up, busiest worker"] = sent / 1000
            slug = "-".join("".join(c if c.isalnum() else " " for c in run.lower()).split())
            figures[slug] = trend_figure(run, group[0])
        if _settings(group[0]).mode == "observed" and scored:
            measures[f"{run}: percent above the pooled error"] = 100 * (
                rmse / each(group, _last("pooled_rmse")) - 1
            )
        rows.append(_row(run, group, rmse, start, additive, sent))
    table = Table(
        "Held-out error (RMSE in the family's scale, 10% of observed cells), medians over seeds",
        ("run", "mode", "family", "rounds", "rank", "error", "at the start", "additive", "kB up"),
        rows,
    )
    return Findings(measures, figures, (table,))


def _settings(trace: Trace) -> TableSettings:
    settings = trace.job.settings
    assert isinstance(settings, TableSettings)
    return settings


def _last(name: str) -> Callable[[Trace], float]:
    return lambda trace: float(trace[name][-1])


def trend_figure(run: str, trace: Trace) -> Figure:
    """The sum of estimates over sites, and the cells without a record, each with its LOESS."""
    monthly = _settings(trace).data != "wood-thrush"
    years = trace.extra["time"] / 12 if monthly else trace.extra["time"]
    nothing = np.zeros(len(years))  # runs of older versions do not tell
    seen = trace.extra.get("empty", nothing) == 0
    estimate = trace.extra["estimate"][seen]
    far = bool(estimate.min() > 0 and estimate.max() > FAR * np.median(estimate))
    panels = []
    for name, title, axis in (
        ("estimate", "Estimated counts, all sites", "sum of estimates"),
        ("missing", "Missing values", "cells without a record"),
    ):
        log = far and name == "estimate"
        values = trace.extra[name]
        # Times without a record have an estimate that rests on others alone: no part in the curve.
        used = seen if name == "estimate" else np.ones_like(seen)
        at, by = years[used], "by month" if monthly else "by year"
        series = [
            Series("LOESS", at, smooth(at, values[used], log)),
            Series(by, at, values[used], points=True, line=False),
        ]
        if not used.all():
            rest = Series("no record", years[~used], values[~used], reference=True)
            series.append(replace(rest, points=True, line=False))
        if name == "estimate" and np.isfinite(trace.extra["lower"]).all():
            low, high = (smooth(at, trace.extra[side][used], log) for side in ("lower", "upper"))
            series[0] = replace(series[0], low=low, high=high)
        if name == "estimate" and np.isfinite(trace.extra["truth"]).all():
            truth = smooth(at, trace.extra["truth"][used], log)
            series.append(Series("simulated truth", at, truth, reference=True))
        if _settings(trace).data == "simulated":
            title += ", simulated"
        ticks = whole_years(years)
        panels.append(Panel(series, "year", axis, title, log="y" if log else "", ticks=ticks))
    caption = f"{run}: the sum of estimated counts over all sites, and the cells without a record, "
    caption += "each with its LOESS; the band holds 90% bounds of the sum."
    if far:
        caption += " One estimate is far above the others, so counts are drawn, and smoothed, as "
        caption += "logarithms."
    if _settings(trace).holdout:
        caption += " The fit has not seen the held-out cells."
    return Figure(caption, panels)


def smooth(years: FloatArray, values: FloatArray, log: bool) -> FloatArray:
    """LOESS, of logarithms where they are drawn; bounds of a sum may be 0, which has none."""
    if not log:
        return loess(years, values)
    return np.exp(loess(years, np.log(np.maximum(values, 1.0))))


def whole_years(years: FloatArray) -> list[float]:
    """Round years to mark, six at most."""
    first, last = float(years.min()), float(years.max())
    step = next(k for k in (1, 2, 5, 10, 20, 50, 100, 1000) if (last - first) / k <= 6)
    return np.arange(np.ceil(first / step) * step, last + 0.01, step).tolist()


def _row(
    run: str,
    group: list[Trace],
    rmse: FloatArray,
    start: FloatArray,
    additive: FloatArray,
    sent: FloatArray,
) -> list[str]:
    settings = _settings(group[0])
    mode = settings.mode + BATCHES[settings.batch]
    rounds, rank = each(group, _last("round")), each(group, _last("rank"))
    return [
        run,
        mode,
        settings.family,
        f"{np.median(rounds):.0f}",
        f"{np.median(rank):.0f}",
        *(f"{np.median(values):.4f}" for values in (rmse, start, additive)),
        f"{np.median(sent) / 1000:.1f}",
    ]
