"""Imputation beside its peers on pooled data: error on held-out cells, time, bytes."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import emfed
from benchmarks.softimpute_peer import softimpute
from emfed.imputation import Cells, FieldTable, Structure, impute
from emfed.imputation.sweeps import Solver

SEEDS = (0, 1, 2)
PEER_SEED = 0
"""Soft-impute works on dense tables and takes minutes: one seed of it."""
PENALTIES = (0.1, 0.5, 2.0, 8.0)


def tables() -> Iterator[tuple[str, FieldTable]]:
    """Simulated ones of the paper's size, and the real ones in the folder EMFED_DATA."""
    yield "simulated, 5,980", emfed.imputation.simulate_table(5980)
    yield "simulated, 12,185", emfed.imputation.simulate_table(12_185)
    folder = Path(os.environ.get("EMFED_DATA", ""))
    if (folder / "oystercatcher_monthly.csv.gz").exists():
        columns = emfed.imputation.Columns(date=("year", "month"), observer=None)
        path = folder / "oystercatcher_monthly.csv.gz"
        yield "oystercatcher", emfed.imputation.read_records(path, columns, groups=10)
        path = folder / "bbs_wood_thrush.csv.gz"
        birds = emfed.imputation.read_records(
            path, emfed.imputation.Columns(date="year"), bins="year", groups=40
        )
        yield "wood thrush", birds


def rmse(estimates: np.ndarray, held: Cells) -> float:
    error = estimates - held.sums / held.weights
    return float(np.sqrt((held.weights * error**2).sum() / held.weights.sum()))


def plain_als(train: Cells, held: Cells, rank: int = 2, sweeps: int = 30) -> np.ndarray:
    """Textbook alternating least squares, row by row, penalty by hold-out."""
    rng = np.random.default_rng(0)
    centre = train.sums.sum() / train.weights.sum()
    values = train.sums / train.weights - centre

    def fit(some: np.ndarray, penalty: float) -> tuple[np.ndarray, np.ndarray]:
        u, v = (0.1 * rng.normal(size=(n, rank)) for n in train.shape)
        sides = ((u, v, train.sites, train.times), (v, u, train.times, train.sites))
        lists = [
            {row: some[index[some] == row] for row in np.unique(index[some])}
            for _, _, index, _ in sides
        ]
        for _ in range(sweeps):
            for (moving, fixed, _, other), members in zip(sides, lists, strict=True):
                for row, cells in members.items():
                    x = fixed[other[cells]]
                    gram = x.T @ x + penalty * np.eye(rank)
                    moving[row] = np.linalg.solve(gram, x.T @ values[cells])
        return u, v

    hidden = np.zeros(train.size, dtype=bool)
    hidden[rng.choice(train.size, train.size // 10, replace=False)] = True
    scores = []
    for penalty in PENALTIES:
        u, v = fit(np.flatnonzero(~hidden), penalty)
        guess = (u[train.sites[hidden]] * v[train.times[hidden]]).sum(axis=1)
        scores.append(np.mean((guess - values[hidden]) ** 2))
    u, v = fit(np.arange(train.size), PENALTIES[int(np.argmin(scores))])
    return np.asarray(centre + (u[held.sites] * v[held.times]).sum(axis=1))


def additive(train: Cells, held: Cells, table: FieldTable) -> float:
    """Site plus time, with the best of several penalties."""
    fits = (
        Solver(table.family, Structure(0, 1.0, e, e), sweeps=300, tolerance=1e-8).fit(train)
        for e in PENALTIES
    )
    return min(rmse(params.theta(held.sites, held.times), held) for params in fits)


def bench_imputation(seeds: tuple[int, ...] = SEEDS) -> Iterator[dict[str, Any]]:
    """A row for each table and seed, as they are done."""
    warnings.simplefilter("ignore", emfed.EmfedWarning)
    for name, table in tables():
        for seed in seeds:
            yield _row(name, table, seed)


def _row(name: str, whole: FieldTable, seed: int) -> dict[str, Any]:
    table, held = whole.split(0.1, seed)
    train = table.pooled
    began = time.perf_counter()
    result = impute(table, rounds=8, seed=seed)
    ours = time.perf_counter() - began
    structure = result.solver.structure
    twenty = impute(table, rounds=20, seed=seed, structure=structure)
    half = impute(
        table,
        rounds=20,
        seed=seed,
        structure=structure,
        participation=emfed.algorithms.Bernoulli(0.5),
    )
    pooled = Solver(table.family, structure, sweeps=1000, tolerance=1e-9).fit(train)
    best = rmse(pooled.theta(held.sites, held.times), held)
    began = time.perf_counter()
    als = rmse(plain_als(train, held), held)
    als_seconds = time.perf_counter() - began
    row = {
        "table": name,
        "seed": seed,
        "rank": structure.rank,
        "rmse": result.score(held),
        "pooled": best,
        "gap_8": result.score(held) / best - 1,
        "gap_20": twenty.score(held) / best - 1,
        "gap_half": half.score(held) / best - 1,
        "additive": additive(train, held, table),
        "bytes_up_per_worker": result.bytes_up / len(table.workers),
        "bytes_up_of_busiest": int(result.ledger.counts[:, 0, 1:].sum(axis=(0, 1)).max()),
        "seconds": ours,
        "als": als,
        "als_seconds": als_seconds,
    }
    peer = softimpute(train, held) if seed == PEER_SEED else None
    if peer is not None:
        row |= {"softimpute": rmse(peer[0], held), "softimpute_seconds": peer[1]}
    return row
