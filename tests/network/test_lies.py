"""A relay that lies: whatever it does, no mask covers two messages, and no two models are final."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from emfed.core.errors import WireError
from emfed.network.exchange.records import MemoryRecords
from emfed.network.exchange.relay import Relay
from emfed.network.exchange.statements import (
    Added,
    Agreement,
    Entry,
    HandOut,
    Post,
    Statement,
    StatementKind,
)
from emfed.network.exchange.virtual import RELAY
from tests.network.attacker import Attacker, last_sum, sums_in, until_sums
from tests.network.exchanges import NAMES, READER, Federation, Toy

Lie = Callable[[str, HandOut], Iterable[HandOut]]


def lied_to(lie: Lie, **options: Any) -> Federation:
    """A federation whose relay's hand-outs pass through a lie."""

    def fate(sender: str, receiver: str, data: bytes) -> list[tuple[float, bytes]]:
        if sender != RELAY:
            return [(0.01, data)]
        return [(0.01, out.encode()) for out in lie(receiver, HandOut.decode(data))]

    return Federation(fate=fate, **options)


def with_sums(out: HandOut, change: Callable[[Added], Added]) -> HandOut:
    """The hand-out with other sums."""
    entries = []
    for data in out.entries:
        entry = Entry.decode(data)
        entries.append(
            Entry.sum(change(Added.decode(entry.added))).encode() if entry.added else data
        )
    return replace(out, entries=tuple(entries))


def forged(added: Added) -> Added:
    """The last number is another one."""
    return replace(added, part=added.part[:-1] + bytes([added.part[-1] ^ 1]))


def asked_honestly(federation: Federation) -> None:
    """What sites made parts of is what the fit asks for, and nothing else."""
    honest = Federation(federation.sites, federation.masked, federation.program)
    honest.run()
    for name in federation.names:
        assert set(federation.made[name]) <= set(honest.made[name])


class Forger(Relay):
    """Adds something to every sum."""

    def _added(self) -> Entry:
        entry = super()._added()
        return Entry.sum(forged(Added.decode(entry.added)))


class Repeater(Relay):
    """Gives the first sum again."""

    def _added(self) -> Entry:
        added = Added.decode(super()._added().added)
        first = next((e for e in map(Entry.decode, self.transcript.entries) if e.added), None)
        part = added.part if first is None else Added.decode(first.added).part
        return Entry.sum(replace(added, part=part))


@pytest.mark.parametrize("masked", [False, True])
def test_sums_that_are_forged_for_all_end_the_fit(masked: bool) -> None:
    federation = Federation(masked=masked, relay=Forger)
    federation.run(600)
    for name in federation.names:
        assert "forged" in federation.ends[name].words
    assert {exchange for made in federation.made.values() for exchange, _ in made} == {0}


@pytest.mark.parametrize("masked", [False, True])
def test_an_old_sum_is_no_new_one(masked: bool) -> None:
    federation = Federation(masked=masked, relay=Repeater)
    federation.run(600)
    for name in federation.names:
        assert "forged" in federation.ends[name].words
    assert {exchange for made in federation.made.values() for exchange, _ in made} == {0, 1}


def test_a_forged_sum_for_one_site_parts_nobody() -> None:
    def lie(name: str, out: HandOut) -> list[HandOut]:
        return [with_sums(out, forged) if name == "bert" else out]

    federation = lied_to(lie, masked=False)
    federation.run(60)
    asked_honestly(federation)
    assert not any(end.final for end in federation.ends.values())
    assert {exchange for exchange, _ in federation.made["bert"]} == {0}


def test_a_forged_sum_that_was_shown_once_is_forgotten() -> None:
    shown = []

    def lie(name: str, out: HandOut) -> list[HandOut]:
        found = with_sums(out, forged)
        if name == "bert" and found != out and not shown:
            shown.append(found)
            return [found]
        return [out]

    federation = lied_to(lie)
    assert federation.run(60) < 60
    assert shown
    assert all(end.final for end in federation.ends.values())


def test_entries_in_another_order_are_not_taken() -> None:
    federation = lied_to(lambda _, out: [replace(out, entries=out.entries[::-1])], masked=False)
    federation.run(120)
    assert not any(end.final for end in federation.ends.values())
    asked_honestly(federation)


def test_a_relay_that_withholds_gets_nothing() -> None:
    federation = lied_to(lambda name, out: [out] if name == "anna" else [])
    federation.run(120)
    assert federation.ends == {}
    assert federation.parts == {}


def test_sites_with_different_settings_share_no_sum() -> None:
    """The analyst is in league with the relay, and signs two documents."""
    federation = Federation(masked=False)
    signer = federation.keys[READER]
    other = replace(federation.settings, program={"exchanges": 1})
    document = Entry.of(Statement.by(signer, other.document())).encode()

    def lie(name: str, out: HandOut) -> list[HandOut]:
        if name != "bert" or out.first or not out.entries:
            return [out]
        return [replace(out, entries=(document, *out.entries[1:]))]

    network = federation.network

    def fate(sender: str, receiver: str, data: bytes) -> list[tuple[float, bytes]]:
        if sender != RELAY:
            return [(0.01, data)]
        return [(0.01, out.encode()) for out in lie(receiver, HandOut.decode(data))]

    network.fate = fate
    federation.run(60)
    assert federation.parts == {}


def test_dropping_a_site_is_counted_and_an_owner_may_refuse_it() -> None:
    """The relay says that a site is silent which speaks; its posts do not arrive."""
    consents = {name: {"largest_changes": 0} for name in NAMES[:4]}
    federation = Federation(sites=4, consents=consents)

    def fate(sender: str, receiver: str, data: bytes) -> list[tuple[float, bytes]]:
        lost = "dora" in (sender, receiver) and federation.network.now > 0.2
        return [] if lost else [(0.01, data)]

    federation.network.fate = fate
    federation.run(400)
    assert "largest_changes" in " ".join(f.words for f in federation.ends.values()) or not any(
        end.final for end in federation.ends.values()
    )
    rounds = {exchange for made in federation.made.values() for exchange, _ in made}
    assert rounds <= {0, 1, 2, 3, 4}


def test_an_order_of_another_fit_is_none_of_this_one() -> None:
    federation, other = (Federation(masked=False) for _ in range(2))
    other.settings = replace(other.settings, program={"exchanges": 2})
    other.network.at(0.05, lambda: other.network.follower(READER).order("finish"))
    other.run(60)
    orders = [
        data
        for data in other.network.processes[RELAY].machine.transcript.entries
        if Entry.decode(data).kind == StatementKind.ORDER
    ]
    assert orders
    transcript = federation.network
    federation.run(60)
    honest = federation.network.processes[RELAY].machine.transcript
    replayed = type(honest)(federation.roster)
    for data in honest.entries[:-1]:
        replayed.append(data)
    with pytest.raises(WireError, match="another fit"):
        replayed.append(orders[0])
    assert transcript.now > 0


class Lies(Attacker, RuleBasedStateMachine):
    """A relay that keeps several lists, shows whom it likes what it likes, while members crash."""

    def __init__(self) -> None:
        RuleBasedStateMachine.__init__(self)

    @initialize(masked=st.booleans(), sites=st.sampled_from([3, 4, 5]))
    def begin(self, masked: bool, sites: int) -> None:
        options = {"wait": 10.0}
        self.start(Federation(sites, masked, Toy(exchanges=3), options=options))

    @rule(
        at=st.integers(0, 2), names=st.sets(st.integers(0, 5), min_size=1), most=st.integers(1, 40)
    )
    def some(self, at: int, names: set[int], most: int) -> None:
        """One of the lists and some members, for so many messages."""
        everyone = list(self.disks)
        self.run(at, {everyone[name % len(everyone)] for name in names}, most)

    @rule(at=st.integers(0, 2), messages=st.integers(1, 200))
    def all(self, at: int, messages: int) -> None:
        self.run_all(at, messages)

    @rule(at=st.integers(0, 2), name=st.integers(0, 4), turns=st.integers(1, 6))
    def leave_out(self, at: int, name: int, turns: int) -> None:
        """A site is called silent until the others change the set, and go on for some turns."""
        self.silence(at, self.site(name), turns)

    @rule(at=st.integers(0, 2), drop=st.integers(0, 6))
    def forks(self, at: int, drop: int) -> None:
        self.fork(at, drop)

    @rule(at=st.integers(0, 2))
    def begins(self, at: int) -> None:
        """An analyst in league with the relay lets the fit begin with those who are there."""
        self.append(at, self.said_by_analyst(at, "begin"))

    @rule(name=st.integers(0, 5))
    def crashes(self, name: int) -> None:
        self.crash([*self.federation.names, READER][name % (len(self.federation.names) + 1)])

    @rule(name=st.integers(0, 4), back=st.integers(0, 20))
    def loses(self, name: int, back: int) -> None:
        """One site's disk is lost, or an old backup. (Two of three could confirm two models.)"""
        self.forgetful = self.forgetful or self.site(name)
        if self.site(name) == self.forgetful:
            self.lose(self.forgetful, back)

    @rule(name=st.integers(0, 4))
    def twins(self, name: int) -> None:
        self.twin(self.site(name))

    @invariant()
    def promises(self) -> None:
        if hasattr(self, "federation"):
            self.check()


Lies.TestCase.settings = settings(
    max_examples=25,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    derandomize=True,
)
TestLies = Lies.TestCase


def test_hostile_bytes_get_a_clear_error() -> None:
    federation = Federation()
    federation.run()
    honest = federation.network.processes[RELAY].machine
    for data in honest.transcript.entries:
        for cut in range(0, len(data), 7):
            with pytest.raises(WireError):
                Entry.decode(data[:cut])
        with pytest.raises(WireError):
            Entry.decode(data + b"\0")
    before = len(honest.transcript)
    for name, post in federation.network.sent[:40]:
        assert honest.receive(post[:-1], 1.0) == []
        broken = Post.decode(post)
        wrong = replace(broken, signature=bytes(len(broken.signature)))
        honest.receive(wrong.encode(), 1.0)
        assert name in federation.roster
    assert len(honest.transcript) == before
    with pytest.raises(WireError):
        Agreement.read(replace(federation.settings.document(), text=b'{"release":2}'))


@pytest.mark.parametrize("masked", [False, True])
def test_what_was_confirmed_is_not_dropped(masked: bool) -> None:
    """All confirm, the relay forgets the last sum, and one site its disk: the others do not."""
    machine = Attacker.of(masked=masked)
    until_sums(machine, 4)
    machine.run(0, {"anna"}, 20)
    assert machine.members["anna"][0].result is not None
    assert machine.final == set()
    machine.fork(0, 1)
    machine.lose("anna", len(machine.old["anna"]) - 1)
    for _ in range(20):
        machine.run_all(1, 100)
    machine.check()
    assert machine.final == set()
    assert "another list" in machine.members["bert"][0].ended.words


def test_a_sum_that_a_relay_lost_is_dropped_once() -> None:
    """All have taken a sum; the list goes on without it, with another hello in its place."""
    machine = Attacker.of()
    until_sums(machine, 2)
    before = sums_in(machine.branches[0])
    machine.fork(0, len(machine.branches[0].transcript) - last_sum(machine.branches[0]))
    machine.disks[READER] = MemoryRecords()
    machine.crash(READER)
    for _ in range(20):
        machine.run_all(1, 100)
    machine.check()
    assert before >= 2
    assert [machine.members[name][0]._dropped for name in NAMES[:3]] == [1, 1, 1]
    assert len(machine.final) == 1
