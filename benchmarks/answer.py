"""Bytes to the pooled answer: `AutoEM` beside uncompressed federated EM, on real data.

Every set starts where federated k-means leads (`start="k-means"`), the same start for all runs, and
the target is the log-likelihood at which pooled EM ends from it. A run has reached 1e-3 (or 1e-5)
nats a sample when it stays within that to its end, which is after `CALM` rounds there. Bytes are
the ledger's payload, up, per worker, in rounds; the opening exchange (summaries, S_0) and envelopes
are told apart.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import emfed

SEEDS = 5
NATS = (1e-3, 1e-5)
CALM = 10
"""Rounds in a row at the least mark after which a run is taken to stay there."""
AIR = ("PM2.5", "PM10", "SO2", "NO2", "CO", "O3", "TEMP", "PRES", "DEWP", "WSPM")
HEART = ("age", "trestbps", "chol", "thalach", "oldpeak")


def _cut(rows: np.ndarray, groups: np.ndarray) -> emfed.data.WorkerData:
    order = np.argsort(groups, kind="stable")
    ends = np.flatnonzero(np.diff(groups[order])) + 1
    return emfed.data.WorkerData(rows[order], np.array([0, *ends.tolist(), len(rows)]))


def _digits() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """20 principal components of MNIST, 100 workers at random, and 100 sorted by label."""
    from paper.digits import load_mnist

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


Case = tuple[str, Any, emfed.data.WorkerData, emfed.AutoEM, int]
"""Name, model, workers, algorithm and rounds."""


def sets(names: tuple[str, ...] = ()) -> Iterator[Case]:
    """All sets, or those whose name holds one of these words."""

    def wanted(name: str) -> bool:
        return not names or any(part in name for part in names)

    digits = ("MNIST tied, random", "MNIST tied, by label", "MNIST diag, by label")
    if any(map(wanted, digits)):
        rows, *ways = _digits()
        for name, covariance, groups in zip(
            digits, ("tied", "tied", "diag"), ways + ways[1:], strict=True
        ):
            if wanted(name):
                model = emfed.gaussian_mixture(10, covariance)
                yield name, model, _cut(rows, groups), emfed.AutoEM(), 150
    if wanted("Beijing full"):
        air = _cut(*_table("beijing_air_quality.parquet", AIR, "station"))
        yield "Beijing full", emfed.gaussian_mixture(5, "full"), air, emfed.AutoEM(), 150
    if wanted("Heart full, follow_em"):
        heart = _cut(*_table("heart_disease_4hospitals.csv.gz", HEART, "hospital"))
        model, algorithm = emfed.gaussian_mixture(3, "full"), emfed.AutoEM(follow_em=True)
        yield "Heart full, follow_em", model, heart, algorithm, 250


class Arrived:
    """Ends a run that has been at the least mark for some rounds: the others tell nothing more."""

    def __init__(self, mark: float) -> None:
        self._mark, self._calm = mark, 0

    def __call__(self, record: Any) -> bool:
        self._calm = self._calm + 1 if record.objective <= self._mark else 0
        return self._calm >= CALM


class Runs:
    """What was run, by name, in a file to go on from; and a time after which nothing is begun."""

    def __init__(self, path: Path | None = None, minutes: float = np.inf) -> None:
        self._path, self._until = path, time.monotonic() + 60 * minutes
        self.found: dict[str, Any] = {}
        if path is not None and path.exists():
            self.found = json.loads(path.read_text(encoding="utf-8"))

    def lacks(self, name: str) -> bool:
        """Whether this is to be run now."""
        return name not in self.found and time.monotonic() < self._until

    def keep(self, name: str, found: Any) -> None:
        """Keep what a run found, and of which commit it is."""
        self.found |= {name: found, f"{name}/commit": commit()}
        if self._path is not None:
            self._path.write_text(json.dumps(self.found, default=float) + "\n", encoding="utf-8")


def commit() -> str:
    """The commit of this checkout, with a word where it was changed."""
    words = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    return subprocess.run(words, capture_output=True, text=True).stdout.strip()


def curve_of(
    model: Any,
    workers: Any,
    algorithm: Any,
    start: Any,
    target: float,
    rounds: int,
    seed: int,
    masks: bool = False,
) -> dict[str, Any]:
    """Gaps to the target and bytes uploaded, round by round."""
    result = emfed.fit(
        model,
        workers,
        algorithm,
        start=start,
        rounds=rounds,
        seed=seed,
        masks=masks,
        monitor=emfed.fitting.Monitor(mean_field=False),
        callbacks=[Arrived(target + NATS[-1])],
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


def _start(model: Any, workers: Any) -> dict[str, Any]:
    """Where pooled EM ends from the start of all runs of a set."""
    start = emfed.fit(model, workers, start="k-means", rounds=0).params
    pooled = emfed.fit(model, workers, start=start, tol=1e-9, rounds=1500)
    target = -pooled.log_likelihood(workers.rows)
    return {"target": target, "pooled_rounds": pooled.rounds}


def _float32(model: Any, workers: Any, target: float) -> dict[str, Any]:
    """Uncompressed federated EM from there."""
    exact = emfed.Identity("float32")
    plain = emfed.FedEM(exact, step_size=1.0, broadcast=exact)
    start = emfed.fit(model, workers, start="k-means", rounds=0).params
    beside = curve_of(model, workers, plain, start, target, 300, 0)
    return {f"{nats:g}": reached(beside, nats) for nats in NATS}


def _seed(
    model: Any, workers: Any, algorithm: Any, target: float, rounds: int, seed: int
) -> dict[str, Any]:
    """One seed of the dither."""
    start = emfed.fit(model, workers, start="k-means", rounds=0).params
    curve = curve_of(model, workers, algorithm, start, target, rounds, seed)
    told = {name: curve[name] for name in ("opening", "envelope", "guard_hits")}
    return told | {f"{nats:g}": reached(curve, nats) for nats in NATS}


def bench_answer(
    names: tuple[str, ...] = (),
    seeds: int = SEEDS,
    keep: Path | None = None,
    minutes: float = np.inf,
) -> Iterator[dict[str, Any]]:
    """One row per set; medians over seeds of the dither.

    What is in the file ``keep`` is not run again, and nothing begins after so many minutes: calls
    add up to the whole.
    """
    runs = Runs(keep, minutes)
    warnings.simplefilter("ignore", emfed.EmfedWarning)
    for name, model, workers, algorithm, rounds in sets(names):
        if runs.lacks(name):
            runs.keep(name, _start(model, workers))
        if name not in runs.found:
            continue
        first = runs.found[name]
        for seed in range(seeds):
            if runs.lacks(f"{name}/{seed}"):
                found = _seed(model, workers, algorithm, first["target"], rounds, seed)
                runs.keep(f"{name}/{seed}", found)
        if runs.lacks(f"{name}/float32"):
            runs.keep(f"{name}/float32", _float32(model, workers, first["target"]))
        beside = runs.found.get(f"{name}/float32", {})
        keys = [f"{name}/{seed}" for seed in range(seeds) if f"{name}/{seed}" in runs.found]
        own = [runs.found[key] for key in keys]
        yield {
            "set": name,
            "workers": workers.size,
            "pooled_rounds": first["pooled_rounds"],
            "seeds": len(own),
            "commits": sorted({runs.found[f"{key}/commit"] for key in keys}),
            "opening": own[0]["opening"] if own else 0.0,
            "envelope": own[0]["envelope"] if own else 0.0,
            "guard_hits": [run["guard_hits"] for run in own],
            **{f"{nats:g}": _middle(own, f"{nats:g}", beside) for nats in NATS},
        }


def _middle(own: list[dict[str, Any]], nats: str, beside: dict[str, Any]) -> dict[str, Any]:
    """Medians over the seeds that arrived, where most of them did; and each one's rounds."""
    good = [run[nats] for run in own if run[nats]["rounds"] is not None]
    enough = len(good) > len(own) // 2
    return {
        "runs": len(good),
        "float32": beside.get(nats, {"rounds": None}),
        "each": [run[nats]["rounds"] for run in own],
        **{k: median(f[k] for f in good) if enough else None for k in ("rounds", "up", "down")},
    }
