"""All bytes to the pooled answer over a real network, TLS and handshake included.

Sites are real ones, a quarter of them in each of four processes, and every byte between them and
the server passes a line that counts it. A fit knows nothing before it begins: opening, start and
rounds are its own. The same fit in one process, which has the same trajectory and the same ledger,
says after which round it is within so many nats of pooled EM from its start; bytes are those until
then. Rows "converged" are the ledger of a run with all defaults until it says so. Float32 EM has
its own ledger and the handshake and transport a message that were measured here. What no column
holds: TCP/IP headers and acknowledgements, and what a lost connection repeats.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import polars as pl

import emfed
from benchmarks.answer import NATS, SEEDS, Arrived, Runs, reached, sets
from benchmarks.network import real_sites

PROCESSES = 4
WAYS = {"up": 0, "down": 1}


def spectrum_of_workers(fitted: emfed.Result, workers: emfed.data.WorkerData) -> Any:
    """Eigenvalues of the covariance of the workers' statistics at the optimum, in its metric.

    With fewer workers than statistics their own covariance has not the rank. Were workers alike, it
    would be that of rows within a worker, divided by their number; what differs beyond (eigenvalues
    above the Marchenko-Pastur edge) is added.
    """
    model, n, rng = fitted.model, workers.size, np.random.default_rng(0)
    params = model.maximize(fitted.statistics)
    metric, parts = model.metric(params), np.split(workers.rows, workers.offsets[1:-1])
    means = [model.expected_statistics(part, params) for part in parts]
    picked = [part[rng.integers(len(part), size=max(1, 6000 // n))] for part in parts]
    apart = [
        model.expected_statistics(part[:, None, :], params) - mean
        for part, mean in zip(picked, means, strict=True)
    ]
    within = np.cov(metric.whiten(np.concatenate(apart)).T, bias=True)
    within /= np.median([len(part) for part in parts])
    values, vectors = np.linalg.eigh(within)
    used = values > 1e-9 * values[-1]
    root = vectors[:, used] * np.sqrt(values[used])
    inverse = vectors[:, used] / np.sqrt(values[used])
    between = metric.whiten(np.stack(means) - np.mean(means, axis=0)) @ inverse
    _, sizes, ways = np.linalg.svd(between / np.sqrt(n - 1), full_matrices=False)
    real = sizes**2 > (1 + np.sqrt(used.sum() / n)) ** 2
    more = ways[real].T * (sizes[real] ** 2 - 1) @ ways[real]
    return np.linalg.eigvalsh(root @ (np.eye(used.sum()) + more) @ root.T)


def lower_bound(fitted: emfed.Result, workers: emfed.data.WorkerData, nats: float) -> float:
    """Bytes that a worker must send at least, once, for a mean that is good to so many nats.

    Assumptions: at the optimum the workers' statistics are independent draws of one Gaussian, with
    the covariance of `spectrum_of_workers`; the server knows that law and where EM would end but
    for them; workers count alike; messages may be of any length (reverse water-filling). An error e
    of the mean costs |e|^2 / 2 nats, so each worker may have n times as much.
    """
    spectrum, allowed = spectrum_of_workers(fitted, workers), 2 * nats * workers.size
    if spectrum.sum() <= allowed:
        return 0.0
    low, high = 0.0, float(spectrum.max())
    for _ in range(200):
        level = (low + high) / 2
        low, high = (level, high) if np.minimum(spectrum, level).sum() < allowed else (low, level)
    return float(np.log2(np.maximum(spectrum / level, 1)).sum() / 2 / 8)


def over_the_wire(
    model: Any, workers: emfed.data.WorkerData, algorithm: Any, rounds: int, seed: int
) -> tuple[emfed.Result, list[tuple[int, int]]]:
    """A fit whose sites are real, and all bytes up and down when each round was made."""
    pieces = np.split(workers.rows, workers.offsets[1:-1])
    tables = {str(number): pl.DataFrame(piece) for number, piece in enumerate(pieces)}
    with real_sites(tables, PROCESSES, tables["0"].columns) as (sites, line, _):
        wire = [(line.up, line.down)]
        fitted = emfed.fit(
            model,
            sites,
            algorithm,
            rounds=rounds,
            tol=0,
            seed=seed,
            masks=False,
            callbacks=[lambda record: wire.append((line.up, line.down))],
        )
    return fitted, wire


def followed(
    model: Any, workers: Any, algorithm: Any, rounds: int, seed: int, masks: bool = False
) -> dict[str, Any]:
    """The same fit in one process: how far it is after each round, and its ledger."""
    common: dict[str, Any] = {"tol": 0, "seed": seed, "masks": masks}
    start = emfed.fit(model, workers, algorithm, rounds=0, **common).params
    pooled = emfed.fit(model, workers, emfed.EM(), start=start, tol=1e-9, rounds=1500)
    target = -pooled.log_likelihood(workers.rows)
    fitted = emfed.fit(
        model,
        workers,
        algorithm,
        rounds=rounds,
        monitor=emfed.fitting.Monitor(mean_field=False),
        callbacks=[Arrived(target + NATS[-1])],
        **common,
    )
    return told_by(fitted, workers.size) | {
        "pooled": pooled,
        "gap": fitted.records[1:].column("objective") - target,
        "end": -fitted.log_likelihood(workers.rows) - target,
    }


def told_by(fitted: emfed.Result, n: int) -> dict[str, Any]:
    """Bytes a worker in the ledger: before the rounds, and after each of them."""
    records, sums = fitted.records[1:], fitted.ledger.summary()["start"]
    begun = {way: sums[way]["payload"] + sums[way]["envelope"] for way in WAYS}
    return {
        **{way: np.cumsum(records.column(f"payload_{way}")) / n for way in WAYS},
        **{f"all_{way}": np.cumsum(records.column(f"bytes_{way}")) / n for way in WAYS},
        **{f"start_{way}": start / n for way, start in begun.items()},
        **{
            f"opening_{way}": (getattr(fitted.records[0], f"bytes_{way}") - start) / n
            for way, start in begun.items()
        },
        "messages": sums["up"]["messages"] / n + 1,
    }


def columns(told: dict[str, Any], rounds: int, way: str) -> dict[str, float]:
    """Opening, start, rounds and envelopes until so many rounds are made."""
    at = max(0, rounds - 1)
    return {
        "opening": told[f"opening_{way}"],
        "start": told[f"start_{way}"],
        "rounds": float(told[way][at]),
        "envelopes": float(told[f"all_{way}"][at] - told[way][at]),
    }


def seed_rows(
    model: Any, workers: Any, algorithm: Any, rounds: int, seed: int
) -> list[dict[str, Any]]:
    """One seed: a row for each tolerance and direction, until converged, and under masks."""
    out: list[dict[str, Any]] = []
    curve = followed(model, workers, algorithm, rounds, seed)
    needed = {nats: reached(curve, nats)["rounds"] for nats in NATS}
    last = max((r for r in needed.values() if r is not None), default=0)
    fitted, wire = over_the_wire(model, workers, algorithm, max(1, last), seed)
    told = told_by(fitted, workers.size)
    whole = emfed.fit(model, workers, algorithm, seed=seed, moves=0)
    masked = followed(model, workers, algorithm, rounds, seed, masks=True)
    for way, side in WAYS.items():
        for nats in NATS:
            if needed[nats] is not None:
                row = columns(told, needed[nats], way)
                counted = wire[min(needed[nats], len(wire) - 1)][side] / workers.size
                first = wire[0][side] / workers.size
                row |= {"ledger": sum(row.values()), "transport": counted - sum(row.values())}
                row |= {"handshake": first, "wire": counted, "number": needed[nats]}
                messages = needed[nats] + told["messages"]
                row["a message"] = (row["transport"] - first) / messages
                if way == "up":
                    row["bound"] = lower_bound(curve["pooled"], workers, nats)
                out.append(row | {"nats": nats, "way": way})
            rounds_masked = reached(masked, nats)["rounds"]
            if rounds_masked is not None:
                out.append(_counted(masked, rounds_masked, f"{nats:g}, masked", way))
        out.append(_counted(told_by(whole, workers.size), whole.rounds, "converged", way))
    return out


def _counted(told: dict[str, Any], rounds: int, name: str, way: str) -> dict[str, Any]:
    """A row of the ledger alone."""
    row = columns(told, rounds, way)
    return row | {"ledger": sum(row.values()), "number": rounds, "nats": name, "way": way}


def bench_answer_network(
    names: tuple[str, ...] = (),
    seeds: int = SEEDS,
    keep: Path | None = None,
    minutes: float = np.inf,
) -> Iterator[dict[str, Any]]:
    """One row for each set, tolerance and direction; medians over seeds.

    What is in the file ``keep`` is not run again, and nothing begins after so many minutes: calls
    add up to the whole.
    """
    runs = Runs(keep, minutes)
    warnings.simplefilter("ignore", emfed.EmfedWarning)
    chosen = list(sets(names))
    for seed in range(seeds):  # every set has a first seed before one has a second
        for name, model, workers, algorithm, rounds in chosen:
            if runs.lacks(f"{name}/{seed}"):
                found = seed_rows(model, workers, algorithm, rounds, seed)
                runs.keep(f"{name}/{seed}", found)
    for seed in range(seeds):
        for name, model, workers, *_ in chosen:
            if runs.lacks(f"{name}/{seed}/float32"):
                runs.keep(f"{name}/{seed}/float32", _float32(model, workers, seed))
    for name, *_ in chosen:
        keys = [f"{name}/{seed}" for seed in range(seeds) if f"{name}/{seed}" in runs.found]
        commits = sorted({runs.found[f"{key}/commit"] for key in keys})
        plain = [runs.found.get(f"{name}/{seed}/float32", {}) for seed in range(seeds)]
        found: dict[tuple[Any, str], list[dict[str, Any]]] = {}
        for run in (run for seed in range(seeds) for run in runs.found.get(f"{name}/{seed}", [])):
            found.setdefault((run["nats"], run["way"]), []).append(run)
        for (nats, way), own in found.items():
            numbers = [key for key in own[0] if key not in ("nats", "way")]
            yield {
                "set": name,
                "nats": nats,
                "way": way,
                "runs": len(own),
                "commits": commits,
                **{key: median(run[key] for run in own) for key in numbers},
                **_beside([one[at] for one in plain if one.get(at := f"{nats}/{way}")], own),
            }


def _float32(model: Any, workers: Any, seed: int) -> dict[str, Any]:
    """Uncompressed federated EM, at each mark and in each direction."""
    exact = emfed.Identity("float32")
    plain = emfed.FedEM(exact, step_size=1.0, broadcast=exact)
    beside = followed(model, workers, plain, 300, seed)
    return {
        f"{nats}/{way}": _spent(beside, reached(beside, nats)["rounds"], way)
        for nats in NATS
        for way in WAYS
    }


def _spent(beside: dict[str, Any], rounds: int | None, way: str) -> Any:
    """Rounds, messages and bytes of the ledger."""
    if rounds is None:
        return None
    return [rounds, beside["messages"] + rounds, sum(columns(beside, rounds, way).values())]


def _beside(plain: list[Any], ours: list[dict[str, Any]]) -> dict[str, Any]:
    """Float32 EM from its own starts over the same wire, whose messages cost what ours did."""
    if not plain:
        return {"float32": None, "float32 rounds": None}
    rounds, messages, ledger = map(median, zip(*plain, strict=True))
    first, each = (median(run[key] for run in ours) for key in ("handshake", "a message"))
    return {"float32": ledger + first + each * messages, "float32 rounds": rounds}
