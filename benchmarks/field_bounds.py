"""Do bounds hold what they promise? Simulated tables with known means, every family.

``python -m benchmarks field-bounds [--keep FILE] [--minutes M] [--part I/N]``: 500 tables of each
kind, in turn; with a file, the same command goes on from the tables that it holds. Several
processes may share the work: the I-th of N has every N-th table and a file of its own beside
FILE, and the command without ``--part`` reads all of them. The fit is `impute` with
nothing given, on exact messages. Counted is how often bounds at 50, 80, 90 and 95% hold the true
mean of cells without a record, of sites (added over times) and of times (added over sites); and of
times that lie ahead of all records, which a fit with smoothing is carried on to: smoothing is
chosen with the rest of the structure, and set to 10 where none was chosen.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import expit

import emfed
from emfed.imputation import FieldTable, impute
from emfed.imputation.bins import Bins
from emfed.imputation.families import as_family
from emfed.imputation.table import Grid, IntakeReport, build_table

LEVELS = (0.5, 0.8, 0.9, 0.95)
SITES, TIMES, SHARE = 40, 30, 0.4
KINDS = {
    "gaussian": ("gaussian", 0.0),
    "log1p": ("log1p", 2.0),
    "poisson": ("poisson", 1.0),
    "overdispersed": ("negative-binomial", 1.0),
    "overdispersed, fitted as poisson": ("poisson", 1.0),
    "bernoulli": ("bernoulli", -0.3),
}
"""What is simulated: the family that is fitted, and the offset."""
FORECAST, LEAD = "overdispersed, ahead of records", 8
"""The last times of such a table are not shown to the fit."""


def simulate(
    kind: str, seed: int, shape: tuple[int, int] = (SITES, TIMES)
) -> tuple[FieldTable, np.ndarray]:
    """A table of rank 1 with effects, a random walk along time, 60% missing; and its means."""
    name, offset = KINDS[kind]
    rng, (sites, times) = np.random.default_rng(seed), shape
    walk = np.cumsum(0.12 * rng.normal(size=times))
    theta = offset + 0.7 * rng.normal(size=sites)[:, None] + walk
    theta = theta + np.outer(0.6 * rng.normal(size=sites), 0.6 * rng.normal(size=times))
    family, noise = as_family(name), rng.normal(size=shape)
    if name == "gaussian":
        mean, values = theta, theta + 0.7 * noise
    elif name == "log1p":
        mean = family.value(theta, 0.36)
        values = np.log1p(np.maximum(np.rint(np.expm1(theta + 0.6 * noise)), 0))
    elif name == "bernoulli":
        mean = expit(theta)
        values = (rng.random(shape) < mean).astype(float)
    else:
        mean = np.exp(theta)
        extra = rng.gamma(2.0, 0.5, shape) if kind.startswith("over") else 1.0
        values = rng.poisson(mean * extra).astype(float)
    seen = rng.random(shape) < SHARE
    seen[rng.integers(0, sites, times), np.arange(times)] = True
    site, time = np.nonzero(seen)
    grid = Grid([f"s{j}" for j in range(sites)], Bins("year", 1990, times), family)
    told = IntakeReport(len(site), len(site))
    ones = np.ones(len(site))
    workers = [f"w{c}" for c in range(4)]
    return build_table(grid, workers, site % 4, site, time, ones, values[seen], told), mean


def covered(kind: str, seed: int, **options: Any) -> dict[str, list[float]]:
    """The share of truths within their bounds, at each level."""
    size = options.pop("shape", (SITES, TIMES))
    table, mean = simulate(kind, seed, size)
    result = impute(table, seed=seed, **options)
    missing = np.ones(size, dtype=bool)
    missing[table.pooled.sites, table.pooled.times] = False
    rows, columns = np.nonzero(missing)
    out: dict[str, list[float]] = {"cells": [], "sites": [], "trend": []}
    for level in LEVELS:
        trend, totals = result.trend(level=level), result.site_totals(level=level)
        cells = result.intervals(rows, columns, level, of="mean")
        out["cells"].append(_inside({"lower": cells[0], "upper": cells[1]}, mean[missing]))
        out["sites"].append(_inside(totals, mean.sum(axis=1)))
        out["trend"].append(_inside(trend, mean.sum(axis=0)))
    return out


def _inside(bounds: Any, truth: np.ndarray, places: Any = slice(None)) -> float:
    held = (bounds["lower"] <= truth) & (truth <= bounds["upper"])
    return float(np.mean(held[places]))


def forecast(seed: int, **options: Any) -> dict[str, list[float]]:
    """The same of totals by time, up to `LEAD` times ahead of the last record that was shown."""
    table, mean = simulate("overdispersed", seed)
    known = TIMES - LEAD
    early = table.keep(table.time < known)
    early = replace(early, bins=replace(table.bins, count=known))
    fitted = impute(early, seed=seed, **options)
    if not fitted.solver.structure.smooth:  # nothing would say how times go on
        fitted = impute(early, seed=seed, smoothing=10.0, **options)
    result = fitted.transform(table)
    trends = [result.trend(level=level) for level in LEVELS]
    truth = mean.sum(axis=0)
    return {
        "trend, leads 1 to 8": [_inside(trend, truth, slice(known, None)) for trend in trends],
        "trend, lead 8": [_inside(trend, truth, slice(-1, None)) for trend in trends],
    }


Runs = dict[str, dict[int, dict[str, list[float]]]]
"""Coverage of each table: kind, seed, quantity, levels."""


def _kept(keep: Path | None) -> Runs:
    """The tables that this file and the files of its parts hold."""
    out: Runs = {kind: {} for kind in (*KINDS, FORECAST)}
    for path in sorted(keep.parent.glob(f"{keep.stem}*{keep.suffix}")) if keep else ():
        for kind, runs in json.loads(path.read_text()).items():
            out[kind] |= {int(seed): run for seed, run in runs.items()}
    return out


def bench_field_bounds(
    tables: int = 500, keep: Path | None = None, minutes: float = np.inf, part: str = "1/1"
) -> Iterator[dict[str, Any]]:
    """A row for each kind of table and quantity: coverage at each level, and standard errors.

    ``keep`` is a file of tables to go on from; no table is begun after so many ``minutes``.
    """
    warnings.simplefilter("ignore", emfed.EmfedWarning)
    began, (number, parts) = time.monotonic(), map(int, part.split("/"))
    found = _kept(keep)
    if keep is not None and parts > 1:
        keep = keep.with_stem(f"{keep.stem}-{number}-of-{parts}")
    mine = _kept(keep) if parts > 1 else found
    for seed in range(number - 1, tables, parts):
        for kind in found:
            if seed not in found[kind] and time.monotonic() - began < 60 * minutes:
                mine[kind][seed] = forecast(seed) if kind == FORECAST else covered(kind, seed)
                if keep is not None:
                    keep.write_text(json.dumps(mine))
    for kind, runs in ((kind, [*(found[kind] | mine[kind]).values()]) for kind in found):
        for name in runs[0] if len(runs) > 1 else ():
            values = np.array([run[name] for run in runs])
            error = values.std(axis=0, ddof=1) / np.sqrt(len(runs))
            within = np.abs(values.mean(axis=0) - LEVELS) <= 0.03 + 2 * error
            yield {
                "kind": kind,
                "of": name,
                "tables": len(runs),
                **{f"{level:.0%}": v for level, v in zip(LEVELS, values.mean(axis=0), strict=True)},
                "error": float(error.max()),
                "holds": bool(within.all()),
            }
