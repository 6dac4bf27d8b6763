"""Crashes between any two writes, and a network that does everything wrong."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import emfed
from emfed.algorithms import memory
from emfed.core.storage import Disk, write_atomic
from emfed.network.store import SiteStore
from tests.helpers import first
from tests.network.disks import Killed, SimulatedDisk
from tests.network.networks import (
    Case,
    Dice,
    FaultyTransport,
    NetworkPlan,
    Trial,
    try_plan,
)

pytestmark = pytest.mark.filterwarnings("ignore::emfed.EmfedWarning")
TABLES = {f"w{i}": np.arange(6.0).reshape(3, 2) * (i + 1) - i for i in range(3)}
QUANTISER = emfed.Dithering(2)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("chunk", first(range(8), 2))
def test_random_fault_plans(chunk: int) -> None:
    """`make faults` tries ten thousand."""
    outcomes = [try_plan(seed) for seed in range(20_000 + 20 * chunk, 20_000 + 20 * (chunk + 1))]
    assert [o for o in outcomes if not o.good] == []
    assert sum(o.kills for o in outcomes) > 10


def trial(algorithm: Any, plan: NetworkPlan | None = None, rounds: int = 4, **case: Any) -> Trial:
    settings = {"participation": emfed.algorithms.Everyone(), "everyone": True} | case
    given = Case(emfed.models.LinearGaussian(0.8), TABLES, algorithm, rounds=rounds, **settings)
    return Trial(5, given, FaultyTransport(TABLES, plan or NetworkPlan(), Dice(5)))


ALGORITHMS = {
    "FedEM": emfed.FedEM(QUANTISER, memory_start="mean-field"),
    "auto": emfed.AutoEM(),
    "vr": emfed.VRFedEM(QUANTISER, batch_size=2, inner_rounds=3),
    "broadcast": emfed.FedEM(QUANTISER, broadcast=emfed.Identity("float32")),
}


@pytest.mark.parametrize("power", first([True, False]))
@pytest.mark.parametrize("name", first(ALGORITHMS, 2))
def test_a_worker_may_die_between_any_two_writes(name: str, power: bool) -> None:
    clean = trial(ALGORITHMS[name])
    clean.go()
    writes = clean.transport.disks["w1"].calls
    assert writes > 15
    for fuse in range(writes):
        disturbed = trial(ALGORITHMS[name], NetworkPlan(power=float(power)))
        disturbed.transport.disks["w1"].fuse = fuse
        disturbed.transport.keep_fuses = True
        disturbed.go()
        assert disturbed.transport.kills == 1
        assert disturbed.gap < 1e-12
        assert disturbed.generations == 0
        np.testing.assert_allclose(disturbed.statistics, clean.statistics, rtol=0, atol=1e-12)


@pytest.mark.parametrize("power", first([True, False]))
@pytest.mark.parametrize("name", first(ALGORITHMS, 2))
def test_the_server_may_die_between_any_two_writes(name: str, power: bool) -> None:
    clean = trial(ALGORITHMS[name])
    clean.go()
    writes = clean.disk.calls
    assert writes > 15
    for fuse in range(writes):
        disturbed = trial(ALGORITHMS[name], NetworkPlan(power=float(power)))
        disturbed.disk.fuse = fuse
        disturbed.keep_fuse = True
        disturbed.go()
        assert disturbed.crashes == 1
        assert disturbed.gap < 1e-12
        assert disturbed.generations == 0
        np.testing.assert_allclose(disturbed.statistics, clean.statistics, rtol=0, atol=1e-12)


def some_plan_fails() -> bool:
    """Whether one of a few plans breaks a promise, or never ends."""
    for seed in range(40):
        try:
            if not try_plan(seed).good:
                return True
        except emfed.EmfedError:
            return True
    return False


def test_the_plans_find_workers_that_commit_on_sending(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = memory.hold

    def commit(rows: Any, fresh: Any, round_: int, values: Any, rate: Any, *rest: Any) -> Any:
        staged = stage(rows, fresh, round_, values, rate, *rest)
        control = staged["memory"] + np.asarray(rate).reshape(-1, 1) * values
        return staged | {"memory": control, "pending_rate": 0 * staged["pending_rate"]}

    monkeypatch.setattr(memory, "hold", commit)
    assert some_plan_fails()


def test_the_plans_find_files_that_are_not_synced(monkeypatch: pytest.MonkeyPatch) -> None:
    def hasty(path: Path, data: bytes, disk: Disk) -> None:
        disk.replace(disk.create(path, data), path)

    monkeypatch.setattr("emfed.core.storage.sealed.write_atomic", hasty)
    assert some_plan_fails()


def test_the_plans_find_workers_that_answer_before_they_write(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    put = SiteStore.put
    late: dict[Path, Any] = {}

    def delayed(store: SiteStore, state: Any) -> None:
        """Write the state of the round before: what a worker that writes too late leaves."""
        before = late.get(store.directory)
        late[store.directory] = state
        if before is not None:
            put(store, before)

    monkeypatch.setattr(SiteStore, "put", delayed)
    assert some_plan_fails()


def test_the_plans_find_a_server_that_speaks_before_it_writes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    save = emfed.fitting.Run.save

    def rarely(run: emfed.fitting.Run, path: Any, disk: Any) -> None:
        if run.state.round % 3 == 0:
            save(run, path, disk)

    monkeypatch.setattr(emfed.fitting.Run, "save", rarely)
    assert some_plan_fails()


# The simulated disk is as bad as it claims, and not worse.


def test_a_power_cut_leaves_the_old_file_or_the_new_one() -> None:
    path, seen = Path("d/f"), set()
    for seed in range(200):
        dice = Dice(seed)
        disk = SimulatedDisk(dice)
        write_atomic(path, b"old" * 5, disk)
        disk.fuse = seed % 5
        with contextlib.suppress(Killed):
            write_atomic(path, b"new" * 5, disk)
        disk.crash(power=True)
        seen.add(disk.read(path))
        assert disk.read(path) in (b"old" * 5, b"new" * 5)
    assert len(seen) == 2


def test_a_power_cut_takes_what_was_not_synced() -> None:
    seen = set()
    for seed in range(100):
        disk = SimulatedDisk(Dice(seed))
        disk.replace(disk.create(Path("d/f"), b"abcdefgh"), Path("d/f"))
        disk.crash(power=True)
        seen.add(disk.read(Path("d/f")))
    assert None in seen
    assert any(data is not None and data != b"abcdefgh" for data in seen)


def test_a_kill_leaves_all_that_was_written() -> None:
    disk = SimulatedDisk(Dice(1))
    disk.replace(disk.create(Path("d/f"), b"abc"), Path("d/f"))
    disk.crash(power=False)
    assert disk.read(Path("d/f")) == b"abc"
