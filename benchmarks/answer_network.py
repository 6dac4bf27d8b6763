"""All bytes to the pooled answer over a real network, TLS and handshake included.

Sites are real ones, a quarter of them in each of four processes, and every byte between them and
the server passes a proxy that counts it. A fit knows nothing before it begins: opening, start and
rounds are its own. The same fit in one process, which has the same trajectory and the same ledger,
says after which round it is within so many nats of pooled EM from its start; bytes are those until
then. What no column holds: TCP/IP headers and acknowledgements, and what a lost connection repeats.
"""

from __future__ import annotations

import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import polars as pl

import emfed
from benchmarks.answer import SEEDS, reached, sets
from benchmarks.network import Counter, make_keys, peers
from emfed.network.websocket.server import WebSocketTransport

PROCESSES = 4
NATS = (1e-3, 1e-5)
PARTS = ("opening", "start", "rounds", "envelopes", "transport")


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
    with tempfile.TemporaryDirectory(prefix="emfed-answer-") as name:
        folder = Path(name)
        names = make_keys(folder, workers.size)
        for number, site in enumerate(sorted(names)):  # as the server numbers them
            table = workers.rows[workers.offsets[number] : workers.offsets[number + 1]]
            pl.DataFrame(table).write_parquet(folder / f"{site}.parquet")
        groups = [names[i::PROCESSES] for i in range(PROCESSES)]
        with WebSocketTransport("127.0.0.1", 0, folder / "keys") as server:
            counter = Counter(server.port)
            with peers("sites", counter.port, folder, groups):
                server.wait_for(len(names), 300)
                time.sleep(0.5)
                wire = [(counter.up, counter.down)]
                federation = emfed.network.RemoteFederation(
                    server, minimum=len(names), deadline=300
                )
                fitted = emfed.fit(
                    model,
                    None,
                    algorithm,
                    federation=federation,
                    rounds=rounds,
                    tol=0,
                    seed=seed,
                    callbacks=[lambda record: wire.append((counter.up, counter.down))],
                )
    return fitted, wire


def followed(model: Any, workers: Any, algorithm: Any, rounds: int, seed: int) -> dict[str, Any]:
    """The same fit in one process: how far it is after each round, and its ledger."""
    common: dict[str, Any] = {"tol": 0, "seed": seed}
    start = emfed.fit(model, workers, algorithm, rounds=0, **common).params
    pooled = emfed.fit(model, workers, emfed.EM(), start=start, tol=1e-9, rounds=1500)
    target = -pooled.log_likelihood(workers.rows)
    monitor = emfed.fitting.Monitor(mean_field=False)
    fitted = emfed.fit(model, workers, algorithm, rounds=rounds, monitor=monitor, **common)
    records, n = fitted.records[1:], workers.size
    sums = fitted.ledger.summary()["start"]
    begun = {way: sums[way]["payload"] + sums[way]["envelope"] for way in ("up", "down")}
    return {
        "pooled": pooled,
        "gap": records.column("objective") - target,
        "end": -fitted.log_likelihood(workers.rows) - target,
        **{way: np.cumsum(records.column(f"payload_{way}")) / n for way in ("up", "down")},
        **{f"all_{way}": np.cumsum(records.column(f"bytes_{way}")) / n for way in ("up", "down")},
        **{f"start_{way}": start / n for way, start in begun.items()},
        **{
            f"opening_{way}": (getattr(fitted.records[0], f"bytes_{way}") - start) / n
            for way, start in begun.items()
        },
    }


def bench_answer_network(
    names: tuple[str, ...] = (), seeds: int = SEEDS
) -> Iterator[dict[str, Any]]:
    """One row for each set, tolerance and direction; medians over seeds."""
    exact = emfed.Identity("float32")
    plain = emfed.FedEM(exact, step_size=1.0, broadcast=exact)
    warnings.simplefilter("ignore", emfed.EmfedWarning)
    for name, model, workers, algorithm, rounds in sets():
        if names and not any(part in name for part in names):
            continue
        beside = followed(model, workers, plain, 300, 0)
        found: dict[tuple[float, str], list[dict[str, Any]]] = {}
        for seed in range(seeds):
            curve = followed(model, workers, algorithm, rounds, seed)
            needed = {nats: reached(curve, nats)["rounds"] for nats in NATS}
            last = max((r for r in needed.values() if r is not None), default=0)
            _, wire = over_the_wire(model, workers, algorithm, max(1, last), seed)
            for nats in NATS:
                if needed[nats] is None:
                    continue
                at = max(0, needed[nats] - 1)
                for way, side in (("up", 0), ("down", 1)):
                    first = wire[0][side] / workers.size
                    whole = wire[min(at + 1, len(wire) - 1)][side] / workers.size
                    told = {p: curve[f"{p}_{way}"] for p in ("opening", "start")}
                    told["rounds"] = float(curve[way][at])
                    told["envelopes"] = float(curve[f"all_{way}"][at] - curve[way][at])
                    told["transport"] = whole - sum(told.values())
                    told |= {"handshake": first, "wire": whole, "number": needed[nats]}
                    found.setdefault((nats, way), []).append(told)
        for (nats, way), runs in found.items():
            other = reached(beside, nats)["rounds"]
            yield {
                "set": name,
                "nats": nats,
                "way": way,
                "runs": len(runs),
                **{key: median(run[key] for run in runs) for key in runs[0]},
                "float32": None
                if other is None
                else float(beside[f"all_{way}"][other - 1])
                + beside[f"opening_{way}"]
                + beside[f"start_{way}"],
                "float32_rounds": other,
                "bound": lower_bound(curve["pooled"], workers, nats) if way == "up" else None,
            }
