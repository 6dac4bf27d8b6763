"""Attacks on the exchange of sums that once worked; each test holds what they all relied on."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Any

import pytest

from emfed.core.errors import FederationError, NumericalError, WireError
from emfed.core.sums import Fit
from emfed.network.exchange.records import MemoryRecords
from emfed.network.exchange.statements import (
    Agreement,
    Confirmation,
    Entry,
    Hello,
    Offer,
    Post,
    Statement,
    StatementKind,
)
from emfed.network.exchange.transcript import Stage
from emfed.network.exchange.virtual import RELAY
from tests.network.attacker import Attacker, Careless, last_sum, sums_in, until_sums
from tests.network.exchanges import NAMES, READER, Federation, Toy


def refuses_without_masks(agreement: Agreement) -> Any:
    if not agreement.masked:
        raise FederationError("masks are what this owner accepted.")
    return Toy(exchanges=3)


def test_settings_that_replace_others_are_asked_about_again() -> None:
    """An analyst has its settings accepted; then the relay goes on from others, without masks."""
    attack = Attacker.of(accept=refuses_without_masks)
    while attack.members["anna"][0].fit.program is None:
        attack.run_all(0, 4)
    attack.branches = [Careless(attack.federation.roster, MemoryRecords(), attack.now)]
    attack.append(0, attack.signed_settings(replace(attack.federation.settings, masked=False)))
    for _ in range(6):
        attack.run_all(0)
    assert attack.federation.plain == set()
    for name in NAMES[:3]:
        ended = attack.members[name][0].ended
        assert ended is not None
        assert "what this owner accepted" in ended.words


@pytest.mark.parametrize(
    ("rule", "least"), [({"smallest_set": 4}, 4), ({"largest_changes": 0}, 4), ({}, 3)]
)
def test_an_owner_that_leaves_gives_no_part_though_nobody_takes_its_order(
    rule: dict[str, Any], least: int
) -> None:
    attack = Attacker.of(4, consents=dict.fromkeys(NAMES[:4], rule))
    attack.branches[0].deaf = frozenset([StatementKind.ORDER])
    until_sums(attack, 1)
    attack.silence(0, "dora", 20)
    assert attack.branches[0].transcript.members == NAMES[:3]
    given = {members for sets in attack.federation.sets.values() for _, members in sets}
    assert min(map(len, given)) == least


def test_a_leaver_gives_no_part_and_ends() -> None:
    federation = Federation(sites=4, program=Toy(exchanges=100))
    network, given = federation.network, federation.made["dora"]
    seen: list[int] = []

    def leave() -> None:
        network.follower("dora").order("leave")
        seen.append(len(given))

    network.at(1.0, leave)
    assert federation.run(60) < 60
    assert len(given) == seen[0]
    assert "has left" in federation.ends["dora"].words
    assert all(federation.ends[name].final for name in NAMES[:3])


def test_changes_count_though_the_relay_goes_back() -> None:
    """It drops the change, which holds no sum, and makes another one: one site at a time."""
    attack = Attacker.of(5)
    until_sums(attack, 1)
    for name in ("emil", "dora", "cleo"):
        attack.silence(0, name, 6)
        if StatementKind.CHANGE in kinds(attack.branches[0]):
            attack.fork(0, attack.until(0, StatementKind.CHANGE))
            attack.branches = attack.branches[-1:]
    attack.check()
    assert any(sets for sets in attack.federation.sets.values())


def test_a_change_is_not_made_again_at_another_sum() -> None:
    attack = Attacker.of(4, program=Toy(exchanges=8))
    until_sums(attack, 2)
    attack.silence(0, "dora", 1)
    attack.fork(0, attack.until(0, StatementKind.CHANGE))
    attack.branches = attack.branches[-1:]
    for _ in range(30):
        attack.run_all(0, 6)
    attack.silence(0, "dora", 8)
    attack.check()
    for name in NAMES[:3]:
        marks = attack.disks[name].states()[b"path"]
        assert len(marks) <= 64


def test_a_first_set_is_one_set() -> None:
    """The relay keeps a newcomer back, has parts of the others, and lets it come as the first."""
    attack = Attacker.of(4)
    three = {*NAMES[:3], READER}
    attack.run(0, three)
    attack.append(0, attack.said_by_analyst(0, "begin"))
    assert attack.branches[0].transcript.members == NAMES[:3]
    begun = attack.until(0, StatementKind.ORDER)
    for _ in range(4):
        attack.run(0, three, 9)
    attack.fork(0, begun)
    attack.fork(0, len(attack.branches[0].transcript) - last_sum(attack.branches[0]))
    for at in (1, 2):
        for _ in range(6):
            attack.run_all(at)
    attack.check()


def test_a_fit_begins_with_more_than_half_of_its_sites() -> None:
    """Else a relay lets two halves finish with two models, by one order of an honest analyst."""
    attack = Attacker.of(2, masked=False)
    attack.branches.append(Careless(attack.federation.roster, MemoryRecords(), 0.0))
    attack.run(0, {READER})
    entry = attack.branches[0].transcript.entries[0]
    attack.branches[1]._append(Entry.decode(entry))
    for at, name in enumerate(("anna", "bert")):
        for _ in range(8):
            attack.run(at, {name})
            attack.append(at, attack.said_by_analyst(at, "begin"))
    attack.check()
    assert attack.final == set()


@pytest.mark.parametrize("disk", ["same", "none"])
def test_rows_that_change_behind_a_hello_that_is_dropped_add_to_no_sum(disk: str) -> None:
    """Nobody has taken a sum yet; a relay has seen the parts, and shows a list without hellos."""
    attack = Attacker.of(3)
    attack.run_all(0, 30)
    assert attack.federation.parts
    before = {name: len(sets) for name, sets in attack.federation.sets.items()}
    if disk == "none":
        attack.disks["cleo"] = MemoryRecords()
    attack.crash("cleo")
    attack.members["cleo"][0]._commitment = hashlib.sha256(b"other rows").digest()
    attack.fork(0, len(attack.branches[0].transcript) - 1)
    attack.branches = attack.branches[-1:]
    for _ in range(6):
        attack.run_all(0)
    given = {n: len(sets) - before[n] for n, sets in attack.federation.sets.items()}
    honest = NAMES[:2] if disk == "none" else NAMES[:3]
    assert {name: given[name] for name in honest} == dict.fromkeys(honest, 0)


def test_a_model_that_all_signed_is_the_only_one() -> None:
    """The relay keeps the confirmations of four, and has three of them change the set."""
    attack = Attacker.of(4)
    until_sums(attack, 4)
    relay = attack.branches[0]
    relay.deaf = frozenset([StatementKind.CONFIRM])
    signed: dict[str, Statement] = {}

    def take(post: Post, kind: StatementKind, now: float) -> None:
        if kind is StatementKind.CONFIRM:
            signed[post.author] = post.statement
        Careless._take(relay, post, kind, now)

    relay._take = take  # type: ignore[method-assign]
    attack.run_all(0)
    assert set(signed) == set(NAMES[:4])
    length = len(relay.transcript)
    attack.silence(0, "dora", 20)
    attack.fork(0, len(relay.transcript) - length)
    attack.branches[1]._append(Entry.of(*(signed[name] for name in NAMES[:4])))
    relay.deaf = frozenset()
    for _ in range(5):
        attack.run(0, {*NAMES[:3], READER})
        attack.run(1, {"dora"})
    attack.check()
    assert len(attack.final) == 1
    words = attack.members["anna"][0].ended
    assert words is not None
    assert "dora did not sign" in words.words


def test_a_result_that_one_site_signed_alone_is_not_final_in_another_set() -> None:
    """A site signs, is left behind before the others do, and starts again when all is over."""
    attack = Attacker.of(4)
    until_sums(attack, 3)
    attack.run(0, {*NAMES[:3], READER})
    attack.run(0, {"dora"})
    assert sums_in(attack.branches[0]) == 4
    assert any(name.startswith(b"result") for name in attack.disks["dora"].states())
    attack.fork(0, len(attack.branches[0].transcript) - last_sum(attack.branches[0]))
    attack.branches = attack.branches[-1:]
    attack.silence(0, "dora", 0)
    for _ in range(5):
        attack.run(0, {*NAMES[:3], READER})
    attack.crash("dora")
    for _ in range(5):
        attack.run_all(0)
    attack.check()
    assert attack.branches[0].transcript.stage is Stage.FINAL
    assert len(attack.final) == 1


def test_a_site_that_was_left_behind_reads_that_all_is_over() -> None:
    federation = Federation(sites=4)
    network = federation.network
    network.at(0.25, lambda: network.kill("dora"))
    network.at(400.0, lambda: network.start("dora"))
    assert federation.run(500) < 420
    assert not federation.ends["dora"].final
    assert "not in the last set" in federation.ends["dora"].words


@dataclass(frozen=True)
class Slanted(Toy):
    """The same fit where products come out a little otherwise, as under another BLAS."""

    by: float = 1e-9

    def digest(self, reached: Any) -> bytes:
        return super().digest(reached + self.by)

    def state(self, reached: Any) -> bytes:
        return super().state(None if reached is None else reached + self.by)


def test_an_analyst_that_came_to_another_model_says_so() -> None:
    federation = Federation()
    make = federation.network.processes[READER].make

    def slanted(disk: MemoryRecords) -> Any:
        federation.program = Slanted()
        found = make(disk)
        found._me.consent = replace(found._me.consent, make=lambda _: Slanted())
        federation.program = Toy()
        return found

    federation.network.processes[READER].make = slanted
    federation.run(60)
    assert not federation.ends[READER].final
    assert "another model" in federation.ends[READER].words
    assert all(federation.ends[name].final for name in NAMES[:3])


@pytest.mark.parametrize("masked", [False, True])
def test_what_is_signed_at_the_end_can_be_compared_with_no_guess(masked: bool) -> None:
    """A relay that knows all but a few counts of a small table must not try them out."""
    federation = Federation(masked=masked)
    federation.run()
    transcript = federation.network.processes[RELAY].machine.transcript
    last = Entry.decode(transcript.entries[-1])
    signed = {Confirmation.decode(one.body).result for one in last.statements}
    guess = federation.program.digest(federation.ends["anna"].result)
    assert len(signed) == 1
    assert guess not in signed


def test_a_run_key_that_gives_equal_secrets_is_refused_by_name() -> None:
    federation = Federation()
    network = federation.network

    def spoil() -> None:
        network.follower("cleo")._me.run.public = bytes(32)

    network.at(0.0, lambda: network.at(0.0, spoil))
    federation.run(30)
    relay = network.processes[RELAY].machine
    assert relay.transcript.stage is Stage.GATHERING
    assert "cleo" not in relay.transcript.hellos
    assert {name for name, end in federation.ends.items()} == {"cleo"}
    assert "run key" in federation.ends["cleo"].words


@pytest.mark.parametrize("late", NAMES[:4])
def test_any_site_may_come_late(late: str) -> None:
    """The first by name has no state of the fit, and another one draws the secrets."""
    federation = Federation(sites=4, program=Toy(exchanges=60), late=(late,))
    network = federation.network
    network.at(1.0, lambda: network.follower(READER).order("begin"))
    network.at(13.0, lambda: network.start(late))
    everyone = {*NAMES[:4], READER}
    assert federation.run(60, lambda: (federation.over(), set(federation.ends) >= everyone)[1]) < 60
    assert all(end.final for end in federation.ends.values())
    assert len({end.state for end in federation.ends.values()}) == 1


def test_an_epoch_whose_secrets_nobody_drew_is_left_behind() -> None:
    """The first site dies for good once the set has begun, before it seals its secrets."""
    federation = Federation(sites=4)
    network = federation.network

    def fate(sender: str, receiver: str, data: bytes) -> list[tuple[float, bytes]]:
        if sender == "anna" and Post.decode(data).kind == StatementKind.SECRETS:
            network.doomed.add("anna")
            network.kill("anna")
            return []
        return [(0.01, data)]

    network.fate = fate
    rest = {*NAMES[1:4], READER}
    assert federation.run(400, lambda: (federation.over(), set(federation.ends) >= rest)[1]) < 220
    assert all(federation.ends[name].final for name in rest)


@dataclass(frozen=True)
class Breaking(Toy):
    """A fit that cannot go on after some sums."""

    def _fit(self, at: Any) -> Fit[Any]:
        inner = super()._fit(at)
        told = yield next(inner)
        yield inner.send(told)
        raise NumericalError("a covariance that is singular.")


def test_a_fit_that_breaks_ends_all_in_words() -> None:
    federation = Federation(program=Breaking())
    federation.run(60)
    for name in (*NAMES[:3], READER):
        assert "singular" in federation.ends[name].words


@pytest.mark.parametrize(
    "change",
    [
        *({"wait": wait} for wait in ("soon", True, -1.0, None)),
        *({"masked": masked} for masked in ("", 1)),
        *({"newcomers": []}, {"run": 3}, {"program": "words"}),
    ],
)
def test_settings_of_other_kinds_are_refused(change: dict[str, Any]) -> None:
    federation = Federation()
    with pytest.raises(WireError, match="settings that are not"):
        Agreement.read(replace(federation.settings, **change).document())


def test_a_member_that_begins_again_and_again_is_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("emfed.network.exchange.transcript.MOST_HELLOS", 5)
    attack = Attacker.of(3, program=Toy(exchanges=1000))
    for _ in range(20):
        attack.crash(READER)
        attack.run_all(0, 20)
    hellos = [
        Hello.decode(entry.statements[0].body)
        for entry in map(Entry.decode, attack.branches[0].transcript.entries)
        if entry.kind == StatementKind.HELLO and entry.statements[0].author == READER
    ]
    assert len(hellos) == 5


def test_a_stranger_hands_a_relay_no_entries() -> None:
    federation = Federation()
    federation.run(0.2, lambda: False)
    relay = federation.network.processes[RELAY].machine
    length = len(relay.transcript)
    relay._roster["mallory"] = federation.keys["anna"].public
    forged = Entry.decode(relay.transcript.entries[-1])
    offer = Offer(length, (forged.encode(),)).encode()
    post = Post("mallory", length, relay.transcript.head[:8], StatementKind.OFFER, offer, b"")
    with pytest.raises(WireError, match="not in the set"):
        relay._take(post, StatementKind.OFFER, 1.0)


def kinds(relay: Careless) -> list[int]:
    return [Entry.decode(data).kind for data in relay.transcript.entries]
