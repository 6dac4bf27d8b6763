"""Field counts beside what ecologists use, on pooled data: errors, totals, coverage, bytes.

The peers have all records in one place. ``additive`` is the log-linear model of sites and times
that rtrim fits; ``softimpute`` shrinks singular values of log(1 + count), its penalty chosen on
held-out cells; ``lori-like`` is a penalised low-rank Poisson fit with effects and covariates (the
season and a line along time; where a site lies, if that is known), its penalty chosen likewise.

Coverage of cells is that of held-out records, by the ranks they have among draws of new records
with ties broken at random: an interval of whole numbers holds more than its level.

``python -m benchmarks imputation [--keep FILE] [--minutes M]``: with a file, the same command goes
on from the tables that it holds.
"""

from __future__ import annotations

import json
import os
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import xlogy

import emfed
from benchmarks.field_bounds import simulate
from emfed.imputation import (
    FAMILIES,
    Cells,
    ColumnNames,
    FieldTable,
    Structure,
    impute,
    read_records,
)
from emfed.imputation.lowrank import Covariates
from emfed.imputation.simulate import simulated_totals
from emfed.imputation.sweeps import Solver

FAMILY = "poisson"
LEVEL = 0.9
SIMULATED = ("poisson", "overdispersed")
"""Kinds of `benchmarks.field_bounds` that are here, too, on larger tables."""
Peer = Callable[[Cells, Cells, Covariates], np.ndarray]


@dataclass(frozen=True)
class Subject:
    """A table, what is known of its sites and times, and the true totals by time if known."""

    name: str
    table: FieldTable
    covariates: Covariates
    truth: np.ndarray | None = None


def subjects(family: str = FAMILY, small: bool = True) -> Iterator[Subject]:
    """Simulated tables, and the real ones in the folder EMFED_DATA; ``small`` takes parts."""
    size = {"observers": 300, "sites": 200, "months": 96} if small else {}
    table = emfed.imputation.simulate_table(6000 if small else 12_185, family=family, **size)
    yield Subject("simulated birds", table, along_time(table), simulated_totals(table.shape, 0))
    for kind in SIMULATED:
        table, mean = simulate(kind, 0, (100, 40))
        table = replace(table, family=FAMILIES[family])
        yield Subject(f"simulated, {kind}", table, along_time(table), mean.sum(axis=0))
    folder = Path(os.environ.get("EMFED_DATA", ""))
    if not (folder / "oystercatcher_monthly.csv.gz").exists():
        return
    columns = ColumnNames(date=("year", "month"), observer=None)
    path = folder / "oystercatcher_monthly.csv.gz"
    table = read_records(path, columns, groups=10, family=family)
    yield Subject("oystercatcher", table, along_time(table))
    yield _thrush(folder, family, 300 if small else None)


def along_time(table: FieldTable, sites: np.ndarray | None = None) -> Covariates:
    """A line along time and, of months, the season; what is known of sites, standardised."""
    place = np.arange(table.bins.count)
    columns = [place - place.mean()]
    if table.bins.unit == "month":
        turn = 2 * np.pi * table.bins.seasons() / 12
        columns += [np.cos(turn), np.sin(turn)]
    parts = [np.empty((0, 0)) if sites is None else sites, np.stack(columns, axis=1)]
    return Covariates(*(x - x.mean(axis=0) if x.size else x for x in map(_scaled, parts)))


def _scaled(x: np.ndarray) -> np.ndarray:
    return x / x.std(axis=0) if x.size else x


def _thrush(folder: Path, family: str, routes: int | None) -> Subject:
    import polars as pl

    frame = pl.read_csv(folder / "bbs_wood_thrush.csv.gz", infer_schema=False)
    if routes is not None:
        names = (
            frame["site"].unique().sort().gather_every(max(1, frame["site"].n_unique() // routes))
        )
        frame = frame.filter(pl.col("site").is_in(names.implode()))
    table = read_records(frame, ColumnNames(date="year"), bins="year", groups=40, family=family)
    lies = frame.group_by("site").agg(pl.col("latitude", "longitude").first().cast(pl.Float64))
    found = {site: (north, east) for site, north, east in lies.iter_rows()}
    where = np.array([found[name] for name in table.sites])
    return Subject(
        "wood thrush", table, along_time(table, np.concatenate([where, where**2], axis=1))
    )


def counts_of(cells: Cells, family: str) -> np.ndarray:
    """Mean counts of cells; under log1p their geometric kind, which is all that is known."""
    mean = cells.sums / cells.weights
    return np.expm1(mean) if family == "log1p" else mean


def measures(guess: np.ndarray, held: Cells, seen: np.ndarray) -> dict[str, float]:
    """RMSE and mean Poisson deviance of held-out counts; the ratio of totals and its error."""
    mean = np.maximum(guess, 1e-3)
    deviance = 2 * (xlogy(seen, seen / mean) - (seen - mean))
    w = held.weights
    return {
        "rmse": float(np.sqrt(np.average((seen - guess) ** 2, weights=w))),
        "deviance": float(np.average(deviance, weights=w)),
        "totals": float((w * guess).sum() / (w * seen).sum()),
        "totals_error": float(np.sqrt(((w * (seen - guess)) ** 2).sum()) / (w * seen).sum()),
    }


def additive(train: Cells, held: Cells, covariates: Covariates | None = None) -> np.ndarray:
    """Site plus time on the log scale, by Poisson likelihood, all but unpenalised."""
    solver = Solver(FAMILIES["poisson"], Structure(0, 1.0, 1e-3, 1e-3), sweeps=300, tolerance=1e-8)
    return np.exp(solver.fit(train).theta(held.sites, held.times))


def lori_like(train: Cells, held: Cells, covariates: Covariates) -> np.ndarray:
    """Effects, covariates and a low-rank part by Poisson likelihood; its penalty by hold-out."""
    inner, out = _split(train)

    def fit(some: Cells, penalty: float) -> Any:
        structure = Structure(5, penalty, 1e-2, 1e-2)
        poisson = FAMILIES["poisson"]
        return Solver(poisson, structure, covariates, sweeps=60, tolerance=1e-6).fit(some)

    def error(penalty: float) -> float:
        theta = fit(inner, penalty).theta(out.sites, out.times)
        return float(FAMILIES["poisson"].deviance(theta, out.sums, out.weights).sum())

    best = min((3.0, 10.0, 30.0, 100.0, 300.0), key=error)
    return np.exp(fit(train, best).theta(held.sites, held.times))


def softimpute(train: Cells, held: Cells, covariates: Covariates | None = None) -> np.ndarray:
    """Shrunk singular values of log(1 + count), the threshold chosen on held-out cells."""
    inner, out = _split(train)

    def fit(some: Cells, threshold: float) -> np.ndarray:
        values = np.log1p(some.sums / some.weights)
        centre, full = values.mean(), np.zeros(some.shape)
        for _ in range(60):
            full[some.sites, some.times] = values - centre
            u, d, v = np.linalg.svd(full, full_matrices=False)
            full = (u * np.maximum(d - threshold, 0)) @ v
        return full + centre

    def error(threshold: float) -> float:
        guess = fit(inner, threshold)[out.sites, out.times]
        return float(np.mean((guess - np.log1p(out.sums / out.weights)) ** 2))

    best = min((1.0, 3.0, 8.0, 20.0), key=error)
    return np.asarray(np.expm1(np.maximum(fit(train, best)[held.sites, held.times], 0.0)))


PEERS: dict[str, Peer] = {"additive": additive, "softimpute": softimpute, "lori-like": lori_like}


def _split(cells: Cells) -> tuple[Cells, Cells]:
    hidden = np.random.default_rng(0).random(cells.size) < 0.15
    return cells.take(np.flatnonzero(~hidden)), cells.take(np.flatnonzero(hidden))


def ours(table: FieldTable, held: Cells, seed: int, **options: Any) -> dict[str, Any]:
    """`impute` in its default mode: measures, coverage of new records, bytes, seconds."""
    began = time.perf_counter()
    result = impute(table, seed=seed, **options)
    name = table.family.describe().get("scale", table.family.name)
    seen = counts_of(held, str(name))
    guess = result.predict(held.sites, held.times)
    once = held.weights == 1
    found = {
        **measures(guess, held, seen),
        "rank": result.params.rank,
        "bytes_up_per_worker": result.bytes_up / len(table.workers),
        "seconds": time.perf_counter() - began,
        "result": result,
    }
    if once.any():
        place = held.sites[once], held.times[once]
        inside = ranked(result, *place, np.rint(seen[once]), seed)
        found |= {
            "cells": float(inside.mean()),
            "cells_error": (LEVEL * (1 - LEVEL) / inside.size) ** 0.5,
        }
    return found


def ranked(
    result: Any, sites: np.ndarray, times: np.ndarray, seen: np.ndarray, seed: int
) -> np.ndarray:
    """Whether each record lies within the central draws of new records; ties fall at random."""
    draws = result.draws(sites, times, result.posterior.count)
    below, equal = (draws < seen).sum(axis=0), (draws == seen).sum(axis=0)
    chance = np.random.default_rng(seed).random(len(seen))
    rank = (below + chance * (equal + 1)) / (len(draws) + 1)
    return np.asarray(np.abs(rank - 0.5) < LEVEL / 2)


class Kept:
    """Rows by what they are of, in a file to go on from, and a time after which none is begun."""

    def __init__(self, path: Path | None = None, minutes: float = np.inf) -> None:
        self.path, self.until = path, time.monotonic() + 60 * minutes
        there = path is not None and path.exists()
        self.found: dict[str, Any] = json.loads(path.read_text()) if path and there else {}

    def rows(self, key: str, make: Callable[[], list[dict[str, Any]]]) -> list[dict[str, Any]]:
        """The rows of the file, or those that are made now, or none where time is over."""
        if key not in self.found:
            if time.monotonic() >= self.until:
                return []
            self.found[key] = make()
            if self.path is not None:
                self.path.write_text(json.dumps(self.found))
        return list(self.found[key])


def bench_imputation(
    seeds: tuple[int, ...] = (0,),
    small: bool = True,
    families: tuple[str, ...] = (FAMILY,),
    kept: Kept | None = None,
) -> Iterator[dict[str, Any]]:
    """A row for each table, seed and method, as tables are done."""
    warnings.simplefilter("ignore", emfed.EmfedWarning)
    kept = kept or Kept()
    for family in families:
        peers = PEERS if family == families[0] and family != "log1p" else {}
        for subject in subjects(family, small):
            for seed in seeds:
                key = f"{subject.name}, {family}, {seed}"
                yield from kept.rows(key, partial(_compared, subject, family, seed, peers))


def _compared(
    subject: Subject, family: str, seed: int, peers: dict[str, Peer]
) -> list[dict[str, Any]]:
    """One table by `impute` and by its peers."""
    table, held = subject.table.split(0.1, seed)
    about = {"table": subject.name, "seed": seed}
    row = ours(table, held, seed)
    trend = row.pop("result").trend(level=LEVEL)
    if subject.truth is not None:
        inside = (trend["lower"] <= subject.truth) & (subject.truth <= trend["upper"])
        row["trend"] = float(inside.mean())
    rows = [{**about, "method": f"emfed, {family}", **row}]
    for peer, fit in peers.items():
        found = measures(fit(table.pooled, held, subject.covariates), held, counts_of(held, family))
        rows.append({**about, "method": peer, **found})
    return rows


def goals(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """For each table, the deviance beside the best peer's, totals, coverage; whether they hold."""
    for row in rows:
        if not row["method"].startswith("emfed"):
            continue
        peers = [r for r in rows if r["table"] == row["table"] and r["method"] in PEERS]
        best = min(peers, key=lambda r: r["deviance"])
        beside, off = row["deviance"] / best["deviance"], row.get("cells", LEVEL) - LEVEL
        yield {
            "table": row["table"],
            "best": best["method"],
            "deviance": beside,
            "totals": row["totals"],
            "totals_error": row["totals_error"],
            "cells": row.get("cells", np.nan),
            "cells_error": row.get("cells_error", np.nan),
            "holds": (
                beside <= 1.03,
                abs(row["totals"] - 1) <= 0.05 + 2 * row["totals_error"],
                abs(off) <= 0.03 + 2 * row.get("cells_error", 0.0),
            ),
        }


def masked_series(
    counts: np.ndarray, seed: int, growing: bool = False, share: float = 0.6
) -> FieldTable:
    """A complete series of sites x years with a share masked, early years more if ``growing``."""
    from emfed.imputation.bins import Bins
    from emfed.imputation.families import as_family
    from emfed.imputation.table import Grid, IntakeReport, build_table

    sites, years = counts.shape
    chance = np.full(years, 1 - share)
    if growing:
        chance = (1 - share) * np.linspace(0.3, 1.7, years)
    seen = np.random.default_rng(seed).random(counts.shape) < chance
    seen[np.arange(sites), np.random.default_rng(seed + 1).integers(0, years, sites)] = True
    site, year = np.nonzero(seen)
    grid = Grid([f"s{j}" for j in range(sites)], Bins("year", 1990, years), as_family(FAMILY))
    ones = np.ones(len(site))
    told = IntakeReport(len(site), len(site))
    return build_table(
        grid, [f"w{k}" for k in range(4)], site % 4, site, year, ones, counts[seen], told
    )


def complete_series(folder: Path, least: int = 25) -> np.ndarray:
    """Routes of the wood thrush that were run in every year of the longest common span."""
    import polars as pl

    frame = pl.read_csv(folder / "bbs_wood_thrush.csv.gz")
    wide = (
        frame.group_by("site", "year")
        .agg(pl.col("count").mean())
        .pivot("year", index="site", values="count")
        .sort("site")  # groups come in any order, and a seed must mask the same cells
    )
    years = sorted((c for c in wide.columns if c != "site"), key=int)[-least:]
    return wide.select(years).drop_nulls().to_numpy().astype(np.float64).round()


def bench_index(
    seeds: tuple[int, ...] = tuple(range(40)), kept: Kept | None = None
) -> Iterator[dict[str, Any]]:
    """Yearly totals of complete real series with 60% masked: error of the index, coverage."""
    warnings.simplefilter("ignore", emfed.EmfedWarning)
    folder = Path(os.environ.get("EMFED_DATA", ""))
    counts = complete_series(folder)
    kept = kept or Kept()
    for seed in seeds:
        for growing in (False, True):
            key = f"index, {growing}, {seed}"
            yield from kept.rows(key, partial(_index_of_masked, counts, growing, seed))


def _index_of_masked(counts: np.ndarray, growing: bool, seed: int) -> list[dict[str, Any]]:
    """One masked table: the error of its index, that of the additive model's, and coverage."""
    table = masked_series(counts, seed, growing)
    index, cells = impute(table, seed=seed).index(level=LEVEL), table.pooled
    everywhere = np.indices(counts.shape).reshape(2, -1)
    all_cells = Cells(*everywhere, np.ones(counts.size), np.zeros(counts.size), counts.shape)
    guess = additive(cells, all_cells).reshape(counts.shape)
    guess[cells.sites, cells.times] = cells.sums
    truth = counts.sum(axis=0)
    true = 100 * truth / truth[0]
    mine, theirs = np.asarray(index["index"]), 100 * guess.sum(axis=0) / guess[:, 0].sum()
    inside = (index["lower"] <= true) & (true <= index["upper"])
    row = {
        "masked": "early years more" if growing else "at random",
        "seed": seed,
        "sites": len(counts),
        "error": float(np.mean(np.abs(mine - true)[1:])),
        "additive": float(np.mean(np.abs(theirs - true)[1:])),
        "covered": float(inside[1:].mean()),
    }
    return [row]
