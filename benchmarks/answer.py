"""Bytes to the pooled answer: `AutoEM` beside uncompressed federated EM, on real data.

Every set starts where federated k-means leads (`start="k-means"`), the same start for all runs, and
the target is the log-likelihood at which pooled EM ends from it. A run has reached 1e-3 (or 1e-5)
nats a sample when it stays within that to its end. Bytes are the ledger's payload, up, per worker,
in rounds; the opening exchange (summaries, S_0) and envelopes are told apart.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import emfed

SEEDS = 5
AIR = ("PM2.5", "PM10", "SO2", "NO2", "CO", "O3", "TEMP", "PRES", "DEWP", "WSPM")
HEART = ("age", "trestbps", "chol", "thalach", "oldpeak")


def _cut(rows: np.ndarray, groups: np.ndarray) -> emfed.data.WorkerData:
    order = np.argsort(groups, kind="stable")
    ends = np.flatnonzero(np.diff(groups[order])) + 1
    return emfed.data.WorkerData(rows[order], np.array([0, *ends.tolist(), len(rows)]))


def _digits() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """20 principal components of MNIST, 100 workers at random, and 100 sorted by label."""
    from emfed.theory.experiments.digits import load_mnist

    digits = load_mnist()
    centred = digits.rows / 255.0
    centred -= centred.mean(axis=0)
    _, vectors = np.linalg.eigh(centred.T @ centred)
    rows = centred @ vectors[:, ::-1][:, :20]
    n = len(rows)
    at_random = np.random.default_rng(5).permutation(n) % 100
    by_label = np.empty(n, dtype=np.int64)
    by_label[np.argsort(digits.labels, kind="stable")] = np.arange(n) * 100 // n
    return rows, at_random, by_label


def _table(name: str, columns: tuple[str, ...], group: str) -> tuple[np.ndarray, np.ndarray]:
    """Columns of a file of real data; rows of the air are complete, of the heart filled."""
    import polars as pl

    path = Path(os.environ["EMFED_DATA"]) / name
    if path.suffix == ".parquet":
        frame = pl.read_parquet(path, columns=[*columns, group])
        frame = frame.drop_nulls(list(columns)).drop_nans(list(columns))
    else:
        frame = pl.read_csv(path).with_columns(
            pl.col(c).cast(pl.Float64, strict=False) for c in columns
        )
        frame = frame.with_columns(pl.col(c).fill_null(pl.col(c).median()) for c in columns)
    _, groups = np.unique(frame[group].to_numpy().astype(str), return_inverse=True)
    return frame.select(columns).to_numpy().astype(float), groups


def sets() -> Iterator[tuple[str, Any, emfed.data.WorkerData, emfed.AutoEM, int]]:
    """Name, model, workers, algorithm and rounds."""
    rows, at_random, by_label = _digits()
    tied, diag = emfed.gaussian_mixture(10, "tied"), emfed.gaussian_mixture(10, "diag")
    yield "MNIST tied, random", tied, _cut(rows, at_random), emfed.AutoEM(), 150
    yield "MNIST tied, by label", tied, _cut(rows, by_label), emfed.AutoEM(), 150
    yield "MNIST diag, by label", diag, _cut(rows, by_label), emfed.AutoEM(), 150
    full = emfed.gaussian_mixture(5, "full")
    air = _cut(*_table("beijing_air_quality.parquet", AIR, "station"))
    yield "Beijing full", full, air, emfed.AutoEM(), 150
    heart = _cut(*_table("heart_disease_4hospitals.csv.gz", HEART, "hospital"))
    full = emfed.gaussian_mixture(3, "full")
    yield "Heart full, follow_em", full, heart, emfed.AutoEM(follow_em=True), 250


def _curve(
    model: Any, workers: Any, algorithm: Any, start: Any, target: float, rounds: int, seed: int
) -> dict[str, Any]:
    """Gaps to the target and bytes uploaded, round by round."""
    result = emfed.fit(
        model,
        workers,
        algorithm,
        start=start,
        rounds=rounds,
        seed=seed,
        monitor=emfed.fitting.Monitor(mean_field=False),
    )
    records, n = result.records[1:], workers.size
    sums = result.ledger.summary()
    return {
        "gap": records.column("objective") - target,
        "end": -result.log_likelihood(workers.rows) - target,
        "up": np.cumsum(records.column("payload_up")) / n,
        "down": np.cumsum(records.column("payload_down")) / n,
        "opening": sums["opening"]["up"]["payload"] / n,
        "envelope": sums["round"]["up"]["envelope"] / n / len(records),
        "guard_hits": result.guard_hits,
    }


def reached(curve: dict[str, Any], nats: float) -> dict[str, Any]:
    """The round after which the gap stays below, and the bytes until then; None if it does not.

    A bold step that is taken back, to find out whether anything is left, is one round and no end.
    """
    above = np.concatenate([[True], curve["gap"] > nats, [curve["end"] > nats]])
    far = np.flatnonzero(above[1:-1] & (above[:-2] | above[2:]))
    first = int(far[-1]) + 1 if len(far) else 0
    if first >= len(curve["gap"]):
        return {"rounds": None, "up": None, "down": None}
    before = max(0, first - 1)
    return {
        "rounds": first,
        "up": float(curve["up"][before]) if first else 0.0,
        "down": float(curve["down"][before]) if first else 0.0,
    }


def bench_answer() -> Iterator[dict[str, Any]]:
    """One row per set; medians over seeds of the dither."""
    exact = emfed.Identity("float32")
    plain = emfed.FedEM(exact, step_size=1.0, broadcast=exact)
    for name, model, workers, algorithm, rounds in sets():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", emfed.EmfedWarning)
            start = emfed.fit(model, workers, start="k-means", rounds=0).params
            pooled = emfed.fit(model, workers, start=start, tol=1e-9, rounds=1500)
            target = -pooled.log_likelihood(workers.rows)
            beside = _curve(model, workers, plain, start, target, 300, 0)
            curves = [
                _curve(model, workers, algorithm, start, target, rounds, seed)
                for seed in range(SEEDS)
            ]
        row: dict[str, Any] = {"set": name, "workers": workers.size, "pooled_rounds": pooled.rounds}
        for nats in (1e-3, 1e-5):
            found = [reached(curve, nats) for curve in curves]
            good = [f for f in found if f["rounds"] is not None]
            enough = len(good) > SEEDS // 2
            row[f"{nats:g}"] = {
                "runs": len(good),
                "float32": reached(beside, nats),
                **{k: median(f[k] for f in good) if enough else None for k in found[0]},
            }
        first = curves[0]
        row |= {k: first[k] for k in ("opening", "envelope")}
        row["guard_hits"] = [curve["guard_hits"] for curve in curves]
        yield row
