"""Everyone follows the fit: whole fits over a network in memory, with faults, leavers and lies."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import emfed
from emfed.core.errors import FederationError
from emfed.core.sums import Fit
from emfed.fitting.following import Conclusion, follow
from emfed.fitting.settings import FitSettings
from emfed.network.exchange.followed import EVERYONE, Comings
from emfed.network.exchange.records import MemoryRecords, RecordFile
from emfed.network.exchange.statements import Added, Agreement, Entry, StatementKind
from emfed.network.exchange.transcript import Stage
from emfed.network.exchange.virtual import RELAY
from tests.network.exchanges import NAMES, READER, Federation, Toy, try_plan

STEP = 2.0**-12
"""The unit of the toy's sums."""


@dataclass(frozen=True)
class Mixture:
    """A whole fit of a mixture: opening, start, rounds, escapes."""

    def begin(
        self, sites: tuple[str, ...], state: bytes, place: bytes, comings: Comings = EVERYONE
    ) -> Fit[Conclusion]:
        settings = FitSettings(emfed.gaussian_mixture(3), seed=3)
        return follow(settings, len(sites), {"mean": (2,), "scatter": (2,)})

    def extend(self, rounds: int | None) -> None: ...

    def state(self, reached: Conclusion | None) -> bytes:
        return b"" if reached is None else reached.final.estimate.point.statistics.tobytes()

    def digest(self, reached: Conclusion) -> bytes:
        return hashlib.sha256(self.state(reached)).digest()


def three_groups() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    groups = [((60, 2), 1.0, (0, 0)), ((40, 2), 1.0, (4, 1)), ((30, 2), 0.5, (0, 5))]
    return {
        name: np.concatenate([scale * rng.normal(size=size) + at for size, scale, at in groups])
        for name in NAMES[:3]
    }


def kinds(federation: Federation) -> list[StatementKind]:
    """The kinds of all entries."""
    return [StatementKind(Entry.decode(data).kind) for data in entries(federation)]


def entries(federation: Federation) -> list[bytes]:
    found: list[bytes] = federation.network.processes[RELAY].machine.transcript.entries
    return found


def all_final(federation: Federation) -> bytes:
    """All members have the same final model; its state."""
    assert {n: e.words for n, e in federation.ends.items() if not e.final} == {}
    (state,) = {end.state for end in federation.ends.values()}
    return state


@pytest.mark.parametrize("masked", [False, True])
def test_a_mixture_over_the_network_is_that_of_one_process(masked: bool) -> None:
    federation = Federation(masked=masked, program=Mixture(), tables=three_groups())
    assert federation.run() < 60
    alone = federation.exact()
    found = all_final(federation)
    if masked:  # other roundings: the same place to the tolerance of the fit
        end = federation.ends["anna"].result.final.estimate.point.objective
        assert end == pytest.approx(alone.final.estimate.point.objective, abs=2e-6)
    else:
        assert found == alone.final.estimate.point.statistics.tobytes()


@pytest.mark.parametrize("masked", [False, True])
def test_every_sum_is_the_sum_to_the_roundings(masked: bool) -> None:
    federation = Federation(masked=masked)
    federation.run()
    found, alone = np.frombuffer(all_final(federation)), federation.exact()
    total = sum(rows.total for rows in federation.rows.values())
    most = 3 * STEP / total if masked else 0.0
    # The state of the next ask is rounded to 6 digits: only the last sum's roundings are seen.
    assert np.abs(found - alone).max() <= most + 1e-5 * masked


def test_two_sites_add_up_without_masks_and_three_may() -> None:
    federation = Federation(sites=2, masked=False)
    federation.run()
    assert np.array_equal(np.frombuffer(all_final(federation)), federation.exact())


def test_masked_sums_of_two_sites_are_refused() -> None:
    federation = Federation(sites=2, masked=True)
    federation.run(30)
    assert entries(federation) == []


def test_a_sum_without_room_is_asked_again_with_twice_the_bits() -> None:
    federation = Federation(program=Toy(small=2))
    federation.run()
    all_final(federation)
    sums = [Added.decode(e.added) for e in map(Entry.decode, entries(federation)) if e.added]
    assert [(s.exchange, s.attempt) for s in sums if s.exchange == 3] == [(3, 0), (3, 1)]
    assert kinds(federation).count(StatementKind.NOSUM) == 1


@pytest.mark.parametrize("block", range(6))
def test_random_faults_break_no_promise(block: int) -> None:
    tried = [try_plan(seed) for seed in range(20 * block, 20 * block + 20)]
    assert [one for one in tried if one.wrong] == []
    assert sum(one.kills for one in tried) > 20


def test_a_site_that_is_back_in_time_changes_nothing() -> None:
    federation = Federation(sites=4)
    network = federation.network
    network.at(0.25, lambda: network.kill("bert"))
    network.at(150.0, lambda: network.start("bert"))
    assert federation.run() < 160
    all_final(federation)
    assert StatementKind.CHANGE not in kinds(federation)


def test_others_go_on_without_a_site_that_stays_away() -> None:
    federation = Federation(sites=4)
    network = federation.network
    network.at(0.25, lambda: network.kill("dora"))

    def over() -> bool:
        federation.over()
        return {"anna", "bert", "cleo", READER} <= set(federation.ends)

    seconds = federation.run(done=over)
    assert 180 <= seconds <= 195
    all_final(federation)
    assert kinds(federation).count(StatementKind.CHANGE) == 1
    # It comes back when all is over: it reads the end, and is told that it was left behind.
    assert federation.network.processes["anna"].machine.transcript.members == NAMES[:3]


def test_a_site_whose_owner_does_not_spare_it_is_waited_for() -> None:
    federation = Federation(sites=4, consents={"dora": {"spares": False}})
    network = federation.network
    network.at(0.25, lambda: network.kill("dora"))
    network.at(400.0, lambda: network.start("dora"))
    assert 400 < federation.run() < 420
    all_final(federation)


def test_a_newcomer_begins_where_the_others_are() -> None:
    federation = Federation(sites=4, program=Toy(exchanges=60), late=("cleo",))
    network = federation.network
    network.at(1.0, lambda: network.follower(READER).order("begin"))
    network.at(13.0, lambda: network.start("cleo"))
    federation.late = ("cleo",)

    def over() -> bool:
        federation.over()
        return set(federation.ends) >= {*NAMES[:4], READER}

    assert federation.run(60, over) < 60
    all_final(federation)
    assert kinds(federation).count(StatementKind.CHANGE) == 1


def test_an_order_to_finish_ends_all_with_what_was_reached() -> None:
    federation = Federation(program=Toy(exchanges=100_000))
    network = federation.network
    network.at(1.0, lambda: network.follower(READER).order("finish"))
    assert federation.run(60) < 10
    all_final(federation)


def test_an_order_to_pause_holds_until_it_is_taken_back() -> None:
    federation = Federation()
    network = federation.network
    network.at(0.2, lambda: network.follower(READER).order("pause"))
    network.at(500.0, lambda: network.follower(READER).order("resume"))
    assert 500 < federation.run() < 510
    all_final(federation)


def test_who_is_expelled_and_readmitted_is_in_again() -> None:
    federation = Federation(sites=4, program=Toy(exchanges=400))
    network = federation.network
    network.at(0.5, lambda: network.follower(READER).order("expel", "dora"))
    sets = []

    def readmit() -> None:
        sets.append(network.follower("anna").transcript.members)
        network.follower(READER).order("readmit", "dora")

    network.at(5.0, readmit)
    assert federation.run(120) < 120
    all_final(federation)
    assert sets == [NAMES[:3]]
    assert network.follower("anna").transcript.members == NAMES[:4]


def test_an_owner_that_refuses_says_why_and_others_may_begin_without() -> None:
    def accept(agreement: Agreement) -> Toy:
        asked.append(agreement)
        if len(asked) == 2:  # the analyst is the first
            raise FederationError("the owner wants no cosines.")
        return program

    asked: list[Agreement] = []
    said: list[str] = []
    program = Toy(exchanges=12)
    federation = Federation(sites=4, program=program, accept=accept)
    network = federation.network

    def begin() -> None:
        about = network.follower(READER).transcript
        said.extend(about.refusals.values())
        network.follower(READER).order("begin")

    network.at(5.0, begin)
    federation.run(60, lambda: federation.over())
    final = [name for name, end in federation.ends.items() if end.final]
    assert len(final) == 4
    assert said == ["the owner wants no cosines."]
    (refused,) = {end.words for end in federation.ends.values() if not end.final}
    assert refused == "the owner wants no cosines."


def test_a_second_process_with_the_same_key_ends_the_first() -> None:
    federation = Federation(program=Toy(exchanges=40))
    network = federation.network
    network.at(0.4, lambda: network.copy("bert"))
    federation.run(60)
    all_final(federation)
    words = network.follower("bert").ended
    assert words is not None
    assert "same key" in words.words


def test_a_site_with_other_rows_stays_out() -> None:
    federation = Federation(sites=4)
    network = federation.network

    def other_rows() -> None:
        network.kill("dora")
        network.start("dora")
        network.follower("dora")._commitment = bytes(31) + b"x"

    network.at(0.25, other_rows)

    assert 180 < federation.run(600) < 200
    out = federation.ends.pop("dora")
    assert not out.final
    assert "other rows" in out.words
    all_final(federation)


def test_a_fit_over_files_is_there_after_the_power_failed(tmp_path: Path) -> None:
    """All processes end at once, twice; every disk is a file of SQLite."""
    federation = Federation(sites=3)
    network = federation.network
    files: list[RecordFile] = []

    def open_all() -> None:
        for file in files:
            file.close()
        files.clear()
        for name in (RELAY, READER, *NAMES[:3]):
            network.kill(name)
            files.append(RecordFile(tmp_path / f"{name or 'relay'}.sqlite"))
            network.start(name, files[-1])

    network.at(0.25, open_all)
    network.at(0.55, open_all)
    network.run(0.1, lambda: False)
    open_all()
    network.run(60.0, federation.over)
    all_final(federation)
    assert kinds(federation).count(StatementKind.HELLO) >= 8
    for file in files:
        file.close()


def test_a_damaged_file_is_refused_and_two_messages_at_one_place_are(tmp_path: Path) -> None:
    path = tmp_path / "site.sqlite"
    path.write_bytes(b"no database" * 100)
    with pytest.raises(emfed.CheckpointError, match="move it away"):
        RecordFile(path)
    for store in (RecordFile(tmp_path / "other.sqlite"), MemoryRecords()):
        store.sent(b"place", b"message")
        store.sent(b"place", b"message")
        with pytest.raises(emfed.FederationError, match="already"):
            store.sent(b"place", b"another")
        with pytest.raises(ZeroDivisionError):
            write_and_fail(store)
        assert store.entries() == []


def write_and_fail(store: RecordFile | MemoryRecords) -> None:
    with store.transaction():
        store.write(0, [b"entry"])
        raise ZeroDivisionError


@pytest.mark.parametrize("relay", [False, True])
def test_an_analyst_that_is_killed_at_the_end_has_the_model_though_all_sites_are_gone(
    relay: bool,
) -> None:
    federation = Federation()
    network = federation.network

    def signed() -> bool:
        machine = network.processes[RELAY].machine
        return machine is not None and machine.transcript.stage is Stage.FINAL

    network.at(0.05, lambda: network.kill(READER))
    network.at(0.06, lambda: network.start(READER))
    federation.run(done=signed)
    network.kill(READER)
    network.run(network.now + 5.0, lambda: set(federation.ends) >= {*NAMES[:3]})
    federation.over()
    for name in NAMES[:3]:
        network.kill(name)
    if relay:
        network.kill(RELAY)
        network.start(RELAY)
    network.start(READER)
    network.run(network.now + 600.0, federation.over)
    assert federation.ends[READER].final
    np.testing.assert_allclose(
        np.frombuffer(federation.ends[READER].state), federation.exact(), atol=2e-4
    )


@pytest.mark.parametrize("seed", range(3))
def test_a_component_of_few_rows_is_left_out_and_the_sites_stay(seed: int) -> None:
    """Tied covariances and heavy tails: EM puts a component on a few rows far out."""
    rng = np.random.default_rng(seed)
    rows = rng.standard_t(2, size=(400, 4))
    with emfed.network.LocalSites({n: rows[j::4] for j, n in enumerate(NAMES[:4])}) as sites:
        result = emfed.fit(emfed.gaussian_mixture(5, "tied"), sites)
    assert result.converged
    shares = result.params.weights * len(rows)
    assert np.all((shares > 3 - 1e-6) | (shares < 1e-3))
