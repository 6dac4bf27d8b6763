"""Do bounds hold what they promise? Simulated tables with known means, every family.

``python -m benchmarks.field_bounds [TABLES] [KIND ...]``: 500 tables of each by default. The
fit is `impute` with nothing given, on exact messages. Counted is how often bounds at 50, 80, 90 and
95% hold the true mean of cells without a record, of sites (added over times) and of times (added
over sites).
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
from scipy.special import expit

import emfed
from emfed.compressors import Identity
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
    result = impute(table, seed=seed, compressor=Identity(), rounds=2, **options)
    missing = np.ones(size, dtype=bool)
    missing[table.pooled.sites, table.pooled.times] = False
    rows, columns = np.nonzero(missing)
    out: dict[str, list[float]] = {"cells": [], "sites": [], "trend": []}
    for level in LEVELS:
        trend, totals = result.trend(level=level), result.site_totals(level=level)
        for name, bounds, truth in (
            ("cells", result.intervals(rows, columns, level, of="mean"), mean[missing]),
            ("sites", (totals["lower"], totals["upper"]), mean.sum(axis=1)),
            ("trend", (trend["lower"], trend["upper"]), mean.sum(axis=0)),
        ):
            out[name].append(float(np.mean((bounds[0] <= truth) & (truth <= bounds[1]))))
    return out


def bench_field_bounds(
    tables: int = 500, kinds: tuple[str, ...] = tuple(KINDS)
) -> Iterator[dict[str, Any]]:
    """A row for each kind of table and quantity: coverage at each level, and standard errors."""
    warnings.simplefilter("ignore", emfed.EmfedWarning)
    for kind in kinds:
        runs = [covered(kind, seed) for seed in range(tables)]
        for name in ("cells", "sites", "trend"):
            values = np.array([run[name] for run in runs])
            error = values.std(axis=0, ddof=1) / np.sqrt(tables)
            within = np.abs(values.mean(axis=0) - LEVELS) <= 0.03 + 2 * error
            yield {
                "kind": kind,
                "of": name,
                "tables": tables,
                **{f"{level:.0%}": v for level, v in zip(LEVELS, values.mean(axis=0), strict=True)},
                "error": float(error.max()),
                "holds": bool(within.all()),
            }


if __name__ == "__main__":
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 500
    for row in bench_field_bounds(count, tuple(sys.argv[2:]) or tuple(KINDS)):
        shown = {k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}
        sys.stdout.write(f"{shown}\n")
        sys.stdout.flush()
