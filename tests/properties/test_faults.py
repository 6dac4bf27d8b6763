"""Memories are exact under faults, as `emfed.algorithms.memories` says, and what follows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import emfed
from emfed.algorithms.memories import columns, settle
from emfed.network import FEDERATIONS
from tests.helpers import PLAIN, first, make_data, make_model, memory_gap, plain_fit
from tests.paper.mutants import committed_on_send

TABLES = make_data(6, sizes=(12, 9, 15, 9, 11), spread=8.0)
QUANTISER = emfed.Dithering(3, block="row")
ALGORITHMS = {
    "FedEM": emfed.FedEM(QUANTISER, step_size=0.3, batch_size=5),
    "FedEM-full": emfed.FedEM(QUANTISER, step_size=0.5, memory_start="mean-field"),
    "VR-FedEM": emfed.VRFedEM(QUANTISER, step_size=0.3, batch_size=4, inner_rounds=5),
}
FAULTS = ("lose_request", "lose_reply")


def open_faulty(
    algorithm: Any,
    plan: emfed.network.FaultPlan,
    *,
    federation: str = "stacked",
    kind: str = "diag",
    **options: Any,
) -> emfed.fitting.Run:
    inner = FEDERATIONS[federation](emfed.data.as_workers(TABLES))
    faulty = emfed.network.FaultyFederation(inner, plan)
    told = PLAIN | {"seed": 9, "tol": 0, "rounds": 10_000} | options
    return emfed.fitting.open_run(make_model(kind), faulty, algorithm, **told)


def random_plan(seed: int) -> emfed.network.FaultPlan:
    rng = np.random.default_rng(seed)
    rates = {name: float(rng.choice([0, 0.1, 0.4])) for name in FAULTS}
    return emfed.network.FaultPlan(seed=seed, **rates)


@pytest.mark.parametrize("chunk", first(range(20)))
def test_invariant_under_a_thousand_fault_plans(chunk: int) -> None:
    names = list(ALGORITHMS)
    for seed in range(chunk * 50, (chunk + 1) * 50):
        rng = np.random.default_rng([1, seed])
        run = open_faulty(
            ALGORITHMS[names[seed % 3]],
            random_plan(seed),
            federation="loop" if seed % 10 == 0 else "stacked",
            kind=("diag", "tied", "full")[seed % 4 % 3],
            participation=emfed.algorithms.Bernoulli(float(rng.uniform(0.4, 1))),
            weights="uniform" if seed % 2 else "samples",
        )
        for round_ in range(14):
            run.step()
            assert memory_gap(run) < 1e-12, f"plan {seed}, round {round_}"


def test_the_check_of_the_invariant_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that commit on sending, not on acceptance, drift at the first lost reply."""
    committed_on_send(monkeypatch)
    run = open_faulty(ALGORITHMS["FedEM"], emfed.network.FaultPlan(seed=1, lose_reply=0.3))
    gaps = []
    for _ in range(20):
        run.step()
        gaps.append(memory_gap(run))
    assert max(gaps) > 1e-3


@pytest.mark.long
@pytest.mark.parametrize("name", first(["VR-FedEM", "FedEM-full"]))
def test_losses_act_as_absence_and_the_end_point_is_the_same(name: str) -> None:
    algorithm = replace(ALGORITHMS[name], step_size=0.2)
    plan = emfed.network.FaultPlan(seed=4, lose_request=0.2, lose_reply=0.2)
    start = plain_fit(make_model("tied"), TABLES, rounds=30, seed=9).params  # one attractor
    ends = []
    for faults in (emfed.network.FaultPlan(), plan):
        run = open_faulty(algorithm, faults, kind="tied", start=start)
        answered = [run.step().answered for _ in range(1500)]
        ends.append(run.statistics)
        if faults is plan:
            assert min(answered) < len(TABLES)
    np.testing.assert_allclose(ends[1], ends[0], atol=1e-8)


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_a_lost_disk_opens_a_new_generation(name: str) -> None:
    """Between the loss and its discovery V cannot be right; after it, it is exact again."""
    exact = discoveries = 0
    for seed in range(25):
        plan = replace(random_plan(seed), lose_disk=0.03)
        run = open_faulty(ALGORITHMS[name], plan, participation=emfed.algorithms.Bernoulli(0.8))
        for _ in range(25):
            generation = run.server.generation
            run.step()
            exact += memory_gap(run) < 1e-12
            if run.server.generation > generation:
                discoveries += 1
                assert memory_gap(run) == 0
    assert discoveries > 8
    assert exact > 125


def test_no_memory_moves_while_no_reply_arrives() -> None:
    run = open_faulty(ALGORITHMS["FedEM"], emfed.network.FaultPlan(seed=5, lose_reply=1.0))
    for _ in range(6):
        record = run.step()
        assert record.answered == 0
        assert record.bytes_up >= 0
    assert not run.memory.any()
    assert not run.memories.any()


def test_memory_transitions_one_by_one() -> None:
    """A worker adds, drops, begins again and reports exactly when it should."""
    sent = {
        "memory": np.array([[1.0, 1.0]]),
        "pending": np.array([[0.5, 0.5]]),
        "pending_at": np.array([2]),
        "counted_at": np.array([1]),
        "generation": np.array([0]),
    }

    def told(counted: int, generation: int = 0) -> tuple[list[int], Any]:
        states = {name: column.copy() for name, column in sent.items()}
        return settle(states, np.array([counted]), generation).tolist(), states

    lost, after = told(2)  # the exchange of the pending one was counted
    assert (lost, after["memory"].tolist(), after["counted_at"].tolist()) == ([], [[1.5, 1.5]], [2])
    assert not after["pending"].any()
    lost, after = told(1)  # it was not
    assert (lost, after["memory"].tolist(), after["counted_at"].tolist()) == ([], [[1.0, 1.0]], [1])
    assert told(4)[0] == [0]  # it never sent anything in exchange 4
    lost, after = told(-1, generation=1)  # all begin again at zero
    assert (lost, after["memory"].any(), after["generation"].tolist()) == ([], False, [1])
    blank = {name: np.stack([np.asarray(value)]) for name, value in columns(2).items()}
    assert settle(blank, np.array([2]), 0).tolist() == [0]  # an empty disk
