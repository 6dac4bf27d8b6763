"""Memories are exact under faults: the invariant of `emfed.algorithms.memory`, and what follows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import emfed
import emfed.core.protocols
from emfed.algorithms import memory
from emfed.core.errors import ServerCrash
from emfed.network import FEDERATIONS
from tests.helpers import PLAIN, first, make_data, make_model, plain_fit

TABLES = make_data(6, sizes=(12, 9, 15, 9, 11), spread=8.0)
QUANTISER = emfed.Dithering(3, block="row")
ALGORITHMS = {
    "FedEM": emfed.FedEM(QUANTISER, step_size=0.3, batch_size=5),
    "FedEM-full": emfed.FedEM(QUANTISER, step_size=0.5, memory_start="mean-field"),
    "VR-FedEM": emfed.VRFedEM(QUANTISER, step_size=0.3, batch_size=4, inner_rounds=5),
    "em": emfed.EM(),
}
FAULTS = (
    "lose_request",
    "delay_request",
    "repeat_request",
    "crash_before_answer",
    "crash_after_persist",
    "lose_reply",
    "delay_reply",
    "repeat_reply",
)


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
    return emfed.fitting.open_run(
        make_model(kind),
        None,
        algorithm,
        federation=faulty,
        **(PLAIN | {"seed": 9, "patience": None} | options),
    )


def step_through_crashes(run: emfed.fitting.Run) -> emfed.fitting.RoundRecord:
    """A crashed server comes back with what it had persisted, and repeats the round."""
    while True:
        try:
            return run.step()
        except ServerCrash:
            continue


def random_plan(seed: int) -> emfed.network.FaultPlan:
    rng = np.random.default_rng(seed)
    rates = {name: float(rng.choice([0, 0.1, 0.4])) for name in FAULTS}
    return emfed.network.FaultPlan(
        seed=seed,
        **rates,
        crash_server=float(rng.choice([0, 0.2])),
        reorder=bool(rng.integers(2)),
        longest_delay=int(rng.integers(1, 6)),
    )


@pytest.mark.parametrize("chunk", first(range(20)))
def test_invariant_under_a_thousand_fault_plans(chunk: int) -> None:
    names = list(ALGORITHMS)
    for seed in range(chunk * 50, (chunk + 1) * 50):
        rng = np.random.default_rng([1, seed])
        run = open_faulty(
            ALGORITHMS[names[seed % 4]],
            random_plan(seed),
            federation="loop" if seed % 10 == 0 else "stacked",
            kind=("diag", "tied", "full")[seed % 3],
            participation=emfed.algorithms.Bernoulli(float(rng.uniform(0.4, 1))),
            weights="uniform" if seed % 2 else "samples",
            retries=int(rng.integers(3)),
        )
        for _ in range(14):
            step_through_crashes(run)
            assert run.memory_gap < 1e-12, f"plan {seed}, round {run.state.round}"


def test_the_check_of_the_invariant_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that commit on sending, not on acceptance, drift at the first lost reply."""
    plan = emfed.network.FaultPlan(seed=1, lose_reply=0.3)
    stage = memory.hold

    def commit_on_send(
        rows: Any, fresh: Any, round_: int, values: Any, rate: Any, *rest: Any
    ) -> Any:
        staged = stage(rows, fresh, round_, values, rate, *rest)
        control = staged["memory"].copy()
        control[fresh] += np.reshape(rate, (-1, 1)) * values
        return staged | {"memory": control, "pending_rate": 0 * staged["pending_rate"]}

    monkeypatch.setattr(memory, "hold", commit_on_send)
    run = open_faulty(ALGORITHMS["FedEM"], plan)
    gaps = []
    for _ in range(20):
        run.step()
        gaps.append(run.memory_gap)
    assert max(gaps) > 1e-3


@pytest.mark.parametrize("federation", ["loop", "stacked"])
@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_repeats_reordering_and_crashes_change_nothing(name: str, federation: str) -> None:
    """Given enough retries the trajectory is the fault-free one, to the last bit.

    (Worker by worker. Stacked, rounding depends on who is computed together.)
    """
    plan = emfed.network.FaultPlan(
        seed=3,
        repeat_request=0.4,
        repeat_reply=0.4,
        crash_before_answer=0.3,
        crash_after_persist=0.3,
        delay_reply=0.2,
        crash_server=0.3,
        reorder=True,
    )
    participation = emfed.algorithms.Bernoulli(0.7)
    common: dict[str, Any] = {"participation": participation, "federation": federation}
    clean = open_faulty(ALGORITHMS[name], emfed.network.FaultPlan(), **common)
    faulty = open_faulty(ALGORITHMS[name], plan, retries=200, **common)
    atol = 0.0 if federation == "loop" else 1e-10
    for _ in range(30):
        a, b = clean.step(), step_through_crashes(faulty)
        for x, y in zip(
            (clean.state.statistics, clean.state.memory),
            (faulty.state.statistics, faulty.state.memory),
            strict=True,
        ):
            np.testing.assert_allclose(x, y, rtol=0, atol=atol)
        assert a.answered == b.answered == a.asked


@pytest.mark.long
@pytest.mark.parametrize("name", first(["VR-FedEM", "FedEM-full"]))
def test_losses_act_as_absence_and_the_end_point_is_the_same(name: str) -> None:
    algorithm = replace(ALGORITHMS[name], step_size=0.2)
    plan = emfed.network.FaultPlan(seed=4, lose_request=0.1, lose_reply=0.2, delay_request=0.1)
    start = plain_fit(make_model("tied"), TABLES, rounds=30, seed=9).params  # one attractor
    ends = []
    for faults in (emfed.network.FaultPlan(), plan):
        run = open_faulty(algorithm, faults, kind="tied", start=start)
        answered = [run.step().answered for _ in range(1500)]
        ends.append(run.state.statistics)
        if faults is plan:
            assert min(answered) < len(TABLES)
    np.testing.assert_allclose(ends[1], ends[0], atol=1e-8)


@pytest.mark.parametrize("name", ["FedEM", "FedEM-full", "VR-FedEM"])
def test_a_lost_disk_opens_a_new_generation(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the loss and its discovery V cannot be right; after it, it is exact again."""
    wiped: list[tuple[int, int]] = []
    wipe = emfed.network.FaultyFederation._wipe

    def watch(self: Any, workers: Any) -> None:
        wiped.extend((int(w), run.state.generation) for w in workers)
        wipe(self, workers)

    exact = discoveries = 0
    for seed in range(25):
        plan = replace(random_plan(seed), lose_disk=0.03)
        run = open_faulty(ALGORITHMS[name], plan, participation=emfed.algorithms.Bernoulli(0.8))
        monkeypatch.setattr(emfed.network.FaultyFederation, "_wipe", watch)
        wiped.clear()
        for _ in range(25):
            generation = run.state.generation
            step_through_crashes(run)
            if run.memory_gap > 1e-12:
                assert any(g == run.state.generation for _, g in wiped)
            else:
                exact += 1
            if run.state.generation > generation:
                discoveries += 1
                assert run.memory_gap == 0
        run.federation.plan = (
            emfed.network.FaultPlan()
        )  # the network heals; every loss is found out
        run.participation = emfed.algorithms.Everyone()
        for _ in range(8):
            run.step()
        assert run.memory_gap < 1e-12, f"plan {seed}"
    assert discoveries > 8
    assert exact > 125


def test_a_reply_to_a_closed_round_is_refused() -> None:
    run = open_faulty(
        ALGORITHMS["FedEM"], emfed.network.FaultPlan(seed=5, delay_reply=1.0, longest_delay=1)
    )
    for _ in range(6):
        record = run.step()
        assert record.answered == 0
        assert record.bytes_up >= 0
    assert not run.state.memory.any()
    assert run.memory_gap == 0


def test_memory_transitions_one_by_one() -> None:
    """A worker commits, drops, repeats, ignores and reports exactly when it should."""
    columns = memory.state_fields(2)
    rows = {n: np.full((1, *c.shape), c.fill, dtype=c.dtype) for n, c in columns.items()}

    def ask(round_: int, accepted: int, generation: int = 0) -> emfed.core.protocols.Request:
        return emfed.core.protocols.Request(
            round_, generation, "round", np.zeros(2), None, np.array([0]), np.array([accepted])
        )

    def answer(rows: Any, request: Any, value: float) -> Any:
        got = memory.receive(rows, request)
        assert got.fresh.tolist() == [0]
        one = np.array([1])
        return memory.hold(
            got.states, got.fresh, request.round, np.full((1, 2), value), 0.5, one, one
        )

    rows = answer(rows, ask(1, -1), 1.0)
    assert memory.receive(rows, ask(1, -1)).again.tolist() == [0]  # the same round again
    kept = answer(rows, ask(2, 1), 10.0)
    assert kept["memory"].tolist() == [[0.5, 0.5]]  # round 1 was accepted
    dropped = answer(rows, ask(2, -1), 10.0)
    assert dropped["memory"].tolist() == [[0.0, 0.0]]  # it was not
    old = memory.receive(kept, ask(1, -1))
    assert not len(old.fresh) + len(old.again) + len(old.lost)  # an old request is ignored
    assert memory.receive(kept, ask(5, 4)).lost.tolist() == [0]  # never sent round 4
    blank = {n: np.full((1, *c.shape), c.fill, dtype=c.dtype) for n, c in columns.items()}
    assert memory.receive(blank, ask(5, 2)).lost.tolist() == [0]  # an empty disk
    fresh = memory.receive(kept, ask(5, -1, generation=1))
    assert fresh.fresh.tolist() == [0]
    assert fresh.states["memory"].tolist() == [[0.0, 0.0]]  # a new generation starts at zero
