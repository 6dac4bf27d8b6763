"""FedEM and VR-FedEM on gathers go where Algorithms 1 and 2 lead, as printed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import emfed
from emfed.aggregation.unmasked import Present, UnmaskedWorkers
from emfed.algorithms import paper
from emfed.algorithms.steps import batch_indices
from emfed.core.streams import Purpose, uniforms
from emfed.core.sums import drive
from emfed.data import as_workers
from emfed.data.held import HeldWorkers
from tests.helpers import make_data, make_model
from tests.literal import literal_fedem, literal_vr_fedem

TABLES = make_data(8, sizes=(12, 20, 9, 15, 30))
WEIGHTS = np.array([12, 20, 9, 15, 30]) / 86
P = np.array([0.9, 0.5, 1.0, 0.7, 0.6])
DITHERING = emfed.Dithering(2, np.inf, block=4)


def begun(algorithm: Any, kind: str = "known", seed: int = 77) -> Any:
    return emfed.fitting.open_run(
        make_model(kind),
        TABLES,
        algorithm,
        seed=seed,
        start="moments",
        participation=emfed.algorithms.Bernoulli(P),
    )


def path(run: Any, workers: Any, rounds: int, seed: int = 77) -> tuple[paper.Server, list[Any]]:
    """Where the generator ends, and what it asked."""
    asked: list[Any] = []

    def answer(ask: Any) -> Any:
        asked.append(ask)
        return workers(ask)

    def stop(ask: Any) -> str | None:
        return "rounds" if ask.server.round > rounds else None

    return drive(fit_of(run, seed), answer, stop), asked


def fit_of(run: Any, seed: int) -> Any:
    """The rounds of a run, on gathers."""
    method = replace(run._innovations.method, seed=seed)
    return paper.rounds(method, paper.Server.begun(method, run.statistics))


@pytest.mark.parametrize("name", ["FedEM", "VR-FedEM"])
@pytest.mark.parametrize("replacement", [True, False])
def test_gathers_lead_where_the_paper_leads(name: str, replacement: bool) -> None:
    """A second implementation, written from the paper alone, gives the same trajectory."""
    seed, rounds, size, inner, k, d = 77, 20, 6, 4, 3, 2
    common: dict[str, Any] = {
        "compressor": DITHERING,
        "step_size": 0.2,
        "memory_rate": 0.4,
        "memory_start": "mean-field",
        "batch_size": size,
        "replacement": replacement,
    }
    reduced = name == "VR-FedEM"
    algorithm = emfed.VRFedEM(inner_rounds=inner, **common) if reduced else emfed.FedEM(**common)
    run = begun(algorithm)
    workers = UnmaskedWorkers(HeldWorkers(as_workers(TABLES)))
    ended, asked = path(run, workers, rounds)
    frame = run.model.constants.frame
    inside = [(table - frame.origin) / frame.scale for table in TABLES]
    s0 = run.statistics
    v0 = [run.model.expected_statistics(table, run.params) - s0 for table in TABLES]

    def quantise(round_: int, worker: int, x: Any) -> Any:
        u = uniforms(seed, round_, Purpose.COMPRESSION, np.array([worker]), len(x))
        return DITHERING.decompress(DITHERING.compress(x[None], u), u, len(x))[0]

    def batch(round_: int, worker: int) -> Any:
        rows = np.array([len(TABLES[worker])])
        picked, padding = batch_indices(seed, round_, np.array([worker]), rows, size, replacement)
        return picked[0] if padding is None else picked[0][padding[0] > 0]

    def active(round_: int) -> Any:
        return emfed.algorithms.Bernoulli(P).draw(seed, round_, 5).tolist()

    last = [batch, quantise]
    told = (inside, WEIGHTS, P, run.params.covariances, k, s0, v0, 0.2, 0.4, rounds)
    if reduced:
        want = literal_vr_fedem(*told, inner, active, *last)
    else:
        want = literal_fedem(*told, active, *last)
    assert d == TABLES[0].shape[1]
    got = [ask.server.statistics for ask in asked[2:]] + [ended.statistics]
    np.testing.assert_allclose(got, want["S"], rtol=0, atol=1e-11)
    np.testing.assert_allclose(workers.adder.memories["0"], want["V"][-1], rtol=0, atol=1e-11)


@pytest.mark.parametrize("seed", range(3))
def test_memories_are_what_was_counted_whatever_is_lost(seed: int) -> None:
    """V is the sum of all V_i, after lost messages, absences and a worker from an old backup."""
    rng = np.random.default_rng(seed)

    def present(ask: Any, exchange: int) -> Present:
        asked = np.flatnonzero(rng.random(5) < 0.8)
        return Present(asked, asked[rng.random(len(asked)) < 0.7])

    run = begun(emfed.VRFedEM(DITHERING, step_size=0.1, memory_rate=0.4, batch_size=5))
    workers = UnmaskedWorkers(HeldWorkers(as_workers(TABLES)), present=present)
    fit = fit_of(run, 5)
    ask = next(fit)
    backup: dict[str, Any] = {}
    generations = 0
    for step in range(58):
        if step == 20:
            backup = {name: column[2].copy() for name, column in workers.states["0"].items()}
        if step == 40:
            for name, column in workers.states["0"].items():
                column[2] = backup[name]
        ask = fit.send(workers(ask))
        server, states = ask.server, workers.states["0"]
        current = states["generation"] == server.generation
        waiting = (states["pending_at"] == server.counted) & (server.counted >= 0)
        waiting &= states["counted_at"] != server.counted
        believed = states["memory"] + np.where(waiting, 1.0, 0.0)[:, None] * states["pending"]
        if step < 40 or server.generation:
            total = (WEIGHTS * (current & (server.counted >= 0))) @ believed
            kept = workers.adder.memories["0"]
            np.testing.assert_allclose(kept, total, rtol=0, atol=1e-12)
        generations = server.generation
    assert generations == 1
