"""Is the default right on tables that nobody tuned on? How often it ends where EM ends."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import emfed

TABLES = {
    "nmes1988": "region",
    "gapminder": "continent",
    "diamonds_fifth": "cut",
    "storms": "year",
    "penguins": "island",
    "wdbc6": None,
}
"""Real tables on which fits went wrong once, and who holds which rows (None: five at random)."""


def tables() -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Numeric columns of complete rows, and the worker of each row; then synthetic ones."""
    import polars as pl

    folder = Path(os.environ.get("EMFED_DATA", ""))
    for name, key in TABLES.items():
        path = folder / f"{name}.csv.gz"
        if not path.is_file():
            continue
        frame = pl.read_csv(path, infer_schema_length=None)
        columns = [
            c for c in frame.columns if c != key and frame[c].dtype in (pl.Float64, pl.Int64)
        ]
        frame = frame.drop_nulls(columns)
        rows = frame.select(columns).to_numpy().astype(float)
        at_random = np.random.default_rng(0).integers(5, size=len(rows))
        yield name, rows, at_random if key is None else frame[key].to_numpy().astype(str)
    rng = np.random.default_rng(1)
    workers = rng.integers(6, size=800)
    yield "lognormal", rng.lognormal(0, 1.5, (800, 3)), workers
    yield "student, 1.5", rng.standard_t(1.5, (800, 3)), workers
    counts = rng.poisson(rng.gamma(0.3, 8, (800, 1)) * [1, 0.2, 0.05])
    yield "zero-inflated", counts.astype(float), workers


def models(name: str, k: int) -> Iterator[tuple[str, Any]]:
    """Gaussian mixtures of all kinds and, for counts, Poisson mixtures."""
    for kind in ("full", "tied", "diag", "spherical"):
        yield kind, emfed.gaussian_mixture(k, kind)
    if name in ("nmes1988", "zero-inflated"):
        yield "poisson", emfed.mixed_mixture(k, "poisson", missing=False)


def bench_right(k: int = 4, seeds: int = 5) -> Iterator[dict[str, Any]]:
    """One row per table and model: how the default ends, beside EM from the same start."""
    for name, rows, groups in tables():
        for kind, model in models(name, k):
            yield {"table": name, "model": kind, "k": k} | _ends(model, rows, groups, seeds)


def _ends(model: Any, rows: np.ndarray, groups: np.ndarray, seeds: int) -> dict[str, Any]:
    gaps, worse, crashed, falsely, rounds = [], 0, 0, 0, []
    for seed in range(seeds):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                ours = emfed.fit(model, rows, "auto", groups=groups, seed=seed, moves=0)
            except emfed.EmfedError:
                crashed += 1
                continue
            run = emfed.fitting.open_run(
                model, rows, "em", groups=groups, seed=seed, tol=1e-8, rounds=3000, moves=0
            )
            first = float(run.model.log_likelihood(rows, run.params))
            for _ in run:
                pass
            exact = float(run.model.log_likelihood(rows, run.params))
            ended = ours.log_likelihood(rows)
            bound, here = ours.model, ours.statistics
            for _ in range(100):
                here = bound.protect(here, bound.expected_statistics(rows, bound.maximize(here)))
            more = float(bound.log_likelihood(rows, bound.maximize(here))) - ended
        gaps.append(exact - ended)
        worse += ended < first - 1e-9
        falsely += ours.converged and more > 1e-3
        rounds.append(ours.rounds)
    return {
        "runs": seeds,
        "within_1e-3": int(np.sum(np.array(gaps) <= 1e-3)),
        "largest_gap": float(max(gaps, default=np.nan)),
        "worse_than_start": int(worse),
        "crashed": crashed,
        "falsely_converged": int(falsely),
        "rounds": float(np.median(rounds)) if rounds else np.nan,
    }
