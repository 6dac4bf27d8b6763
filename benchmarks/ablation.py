"""Ablation of the case of many workers: every mechanism off in turn, beside other methods.

Each variant starts where the others start (clusters of workers, merged) and makes rounds until it
says that it has converged ("all"). Rounds and bytes are those until the log-likelihood stays within
1e-3 nats a row of where the variant itself ends; "below" is how far that end is below the best one
that any variant reached. `emfed.fit` with FedEM at its best step, as coarse up and down, is beside.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np

import emfed
from emfed.aggregation import coded
from emfed.aggregation.unmasked import UnmaskedWorkers
from emfed.core.ledger import DIRECTIONS
from emfed.core.sums import Ask, Sum, drive
from emfed.data.held import HeldWorkers
from emfed.data.summing import HeldRows
from emfed.fitting import many
from emfed.fitting.ascent import Cohort, Objective
from emfed.fitting.convergence import Tolerance
from emfed.fitting.opening import pool

NEAR = 1e-3
"""Nats a row from the end at which rounds and bytes are counted."""
STEPS = (1.0, 0.5, 0.25)
"""Steps of FedEM: the one that ends highest counts."""
ALL = "all mechanisms"
WITHOUT: dict[str, list[tuple[Any, str, Any]]] = {
    ALL: [],
    "local steps": [(many, "LARGEST_DRIFT", 0.0)],
    "coarse innovations": [(many, "NOISE", 1e-3), (many, "NOISE_NATS", 1e-5)],
    "rounded sums down": [(many, "DOWN", 0.0), (many, "QUIET_DOWN", 0.0)],
    "momentum": [(many, "with_momentum", lambda model, walk, ask, led: (0, led))],
    "memories": [],
    "slow memories": [(coded, "LEAST_RATE", 1.0)],
}
"""What is switched off, and how."""


@dataclass(frozen=True)
class Table:
    """A model and the workers that it is fitted to."""

    title: str
    model: Any
    data: emfed.data.WorkerData


def tables(quick: bool = False) -> Iterator[Table]:
    """Synthetic workers, alike and not; and MNIST where EMFED_DATA is set."""
    rng = np.random.default_rng(0)
    n, rows = (40, 40) if quick else (100, 200)
    centres = rng.normal(0, 1.6, size=(5, 4))
    for title, unlike in (("alike", 0.0), ("unlike", 3.0)):
        shares = rng.dirichlet(np.full(5, 1 / max(unlike, 0.02)), size=n)
        own = [
            centres[rng.choice(5, size=rows, p=share)] + rng.normal(size=(rows, 4))
            for share in shares
        ]
        data = emfed.data.as_workers(own)
        assert isinstance(data, emfed.data.WorkerData)
        yield Table(f"synthetic, {title}", emfed.gaussian_mixture(5, "tied"), data)
    if not quick and os.environ.get("EMFED_DATA"):
        from benchmarks.answer import sets

        for title, model, data, *_ in sets(("MNIST tied",)):
            yield Table(title, model, data)


def run(table: Table, without: str, start: Any, seed: int) -> dict[str, Any]:
    """One fit without a mechanism: log-likelihoods and bytes a worker, round by round."""
    data = table.data
    sums, held = UnmaskedWorkers(HeldWorkers(data), seed), HeldRows(data)
    found: list[tuple[float, float, float]] = []

    def answer(ask: Ask) -> Sum:
        if isinstance(ask, many.Tracked):
            inner = ask.inner

            def likelihood(block: Any, weights: Any) -> Any:
                return inner.model.log_likelihood(block, inner.params, weights)[:, None]

            value = float(held.sum(likelihood)[0]) / held.total
            up, down = (sums.counted.total(way) / data.size for way in DIRECTIONS)
            found.append((value, up, down))
            if without == "memories":
                sums.states.clear()
                sums.books.begin_anew()
                sums.adder.memories.clear()
        return sums(ask)

    def fit() -> Any:
        summary = table.model.summary(data.worker(0)[None])
        shapes = {name: value.shape[1:] for name, value in summary.items()}
        told = yield from pool(table.model, shapes)
        model, cohort = told.bind(table.model), Cohort(data.size, told.rows)
        begun = model.statistics_of(model.from_user(start))
        problem = Objective(model, cohort, Tolerance(1e-6))
        return (yield from many.ascend_with_many(problem, begun))

    with ExitStack() as stack:
        for where, name, value in WITHOUT[without]:
            stack.enter_context(patch.object(where, name, value))
        drive(fit(), answer)
    return summed_up(np.array(found))


def summed_up(found: np.ndarray) -> dict[str, Any]:
    """Rounds and bytes until all that follows, single trials aside, is near the end."""
    values = found[:, 0]
    end = float(np.median(values[-6:]))
    far = np.append(values < end - NEAR, False)
    last = np.flatnonzero(far[:-1] & (far[1:] | np.append(True, far[:-2])))
    first = min(int(last[-1]) + 1 if len(last) else 0, len(values) - 1)
    near = {"rounds": first, "up": found[first, 1], "down": found[first, 2]}
    return near | {"end": end, "all": len(values), "all up": found[-1, 1], "all down": found[-1, 2]}


def fed_em(table: Table, start: Any, seed: int, rounds: int = 100) -> dict[str, Any]:
    """FedEM at its best step, its noise in the metric and its broadcast as coarse as ours."""
    best: dict[str, Any] = {"end": -np.inf}
    for step in STEPS:
        algorithm = emfed.FedEM(
            emfed.SubtractiveDithering(1.0),
            step_size=step,
            in_metric=True,
            broadcast=emfed.SubtractiveDithering(many.DOWN),
        )
        monitor = emfed.fitting.Monitor(mean_field=False)
        result = emfed.fit(
            table.model,
            table.data,
            algorithm,
            start=start,
            seed=seed,
            rounds=rounds,
            tol=0,
            moves=0,
            monitor=monitor,
        )
        records = result.records[1:]
        columns = [-records.column("objective")]
        columns += [
            np.cumsum(records.column(f"bytes_{way}")) / table.data.size for way in ("up", "down")
        ]
        told = summed_up(np.stack(columns, axis=1))
        if told["end"] > best["end"]:
            best = told | {"step": step}
    return best


def bench_ablation(quick: bool = False, seeds: int = 3) -> Iterator[dict[str, Any]]:
    """One row for each table and variant: medians over seeds."""
    warnings.simplefilter("ignore", emfed.EmfedWarning)
    for table in tables(quick):
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in (*WITHOUT, "FedEM")}
        for seed in range(seeds):
            start = emfed.fit(table.model, table.data, rounds=0, seed=seed).params
            own = {name: run(table, name, start, seed) for name in WITHOUT}
            own["FedEM"] = fed_em(table, start, seed, 30 if quick else 100)
            best = max(one["end"] for one in own.values())
            for name, one in own.items():
                found[name].append(one | {"below": best - one["end"]})
        for name, all_seeds in found.items():
            counts = ("rounds", "up", "down", "all", "all up", "all down")
            middle = {k: float(np.median([one[k] for one in all_seeds])) for k in counts}
            below = max(one["below"] for one in all_seeds)
            yield {"table": table.title, "without": name, "seeds": seeds, "worst": below} | middle
