"""A relay that lies, message by message, with an analyst and its signature on its side."""

from __future__ import annotations

from typing import Any

from emfed.core.errors import WireError
from emfed.network.exchange.member import Follower
from emfed.network.exchange.records import MemoryRecords
from emfed.network.exchange.relay import Relay
from emfed.network.exchange.statements import (
    Agreement,
    Entry,
    Offer,
    Post,
    SignedOrder,
    Statement,
    StatementKind,
)
from tests.network.exchanges import READER, Federation, Toy


class Careless(Relay):
    """Appends whatever is signed, and takes nothing that members have more."""

    deaf: frozenset[StatementKind] = frozenset()
    """Kinds of posts that it does not take."""

    def _ready(self, now: float) -> bool:
        return True

    def _restore(self, offer: Offer) -> None:
        pass

    def _take(self, post: Post, kind: StatementKind, now: float) -> None:
        if kind not in self.deaf:
            super()._take(post, kind, now)


class Attacker:
    """Several lists, shown to whom the attacker likes, while members crash and lose disks."""

    @classmethod
    def of(cls, sites: int = 3, masked: bool = True, **options: Any) -> Attacker:
        """One over a small fit, whose members wait ten seconds for others."""
        about = {"options": {"wait": 10.0}, "program": Toy(exchanges=3), **options}
        made = cls()
        made.start(Federation(sites, masked, **about))
        return made

    def start(self, federation: Federation) -> None:
        self.federation = federation
        self.now = 0.0
        self.disks = {name: MemoryRecords() for name in (*federation.names, READER)}
        self.old = {name: [MemoryRecords()] for name in self.disks}
        self.members: dict[str, list[Follower]] = {n: [self.process(n)] for n in self.disks}
        self.branches = [Careless(federation.roster, MemoryRecords(), 0.0)]
        self.final: set[bytes] = set()
        self.forgetful = ""
        self.copied: set[str] = set()

    def process(self, name: str) -> Follower:
        make = self.federation.network.processes[name].make
        found: Follower = make(self.disks[name])
        return found

    def site(self, number: int) -> str:
        return self.federation.names[number % len(self.federation.names)]

    def branch(self, at: int) -> Careless:
        return self.branches[at % len(self.branches)]

    def run(self, at: int, names: set[str], messages: int = 200) -> None:
        """One of the lists and some members, for so many messages."""
        relay = self.branch(at)
        self.now += 6.0
        posts = [p for n in sorted(names) for m in self.members[n] for p in self._say(m)]
        while posts and messages:
            messages -= 1
            for receiver, data in relay.receive(posts.pop(0), self.now):
                for member in self.members[receiver] if receiver in names else []:
                    posts += member.receive(data, self.now)
                    posts += self._work(member)
        for name in self.disks:
            self.old[name].append(MemoryRecords(self.disks[name]))

    def run_all(self, at: int, messages: int = 200) -> None:
        self.run(at, set(self.disks), messages)

    def silence(self, at: int, name: str, turns: int = 10) -> None:
        """Run all but one site until the others change the set, and for so many turns more."""
        epoch = self.branch(at).transcript.epoch
        for _ in range(12):
            self.run(at, set(self.disks) - {name}, 40)
            if self.branch(at).transcript.epoch > epoch:
                break
        for _ in range(turns):
            self.run(at, set(self.disks) - {name}, 2)

    def _say(self, member: Follower) -> list[bytes]:
        return [*member.tick(self.now), *self._work(member)]

    def _work(self, member: Follower) -> list[bytes]:
        job = member.job()
        return [] if job is None else member.done(job, job(), self.now)

    def fork(self, at: int, drop: int) -> None:
        """Another list that begins like one of these, perhaps without its last entries."""
        entries = self.branch(at).transcript.entries
        records = MemoryRecords()
        records.write(0, entries[: len(entries) - drop])
        self.branches = [*self.branches[-2:], Careless(self.federation.roster, records, self.now)]

    def until(self, at: int, kind: StatementKind) -> int:
        """How many entries a list has from the last one of a kind on."""
        kinds = [Entry.decode(data).kind for data in self.branch(at).transcript.entries]
        return kinds[::-1].index(kind) + 1

    def append(self, at: int, entry: Entry) -> None:
        """Add an entry of the attacker's to a list, if it can stand there."""
        try:
            self.branch(at)._append(entry)
        except WireError:
            return

    def said_by_analyst(self, at: int, word: str, argument: str = "") -> Entry:
        about = self.branch(at).transcript
        number = about.numbers.get(READER, -1) + 1
        body = SignedOrder(about.settings, number, word, argument)
        return Entry.of(Statement.by(self.federation.keys[READER], body))

    def signed_settings(self, agreement: Agreement) -> Entry:
        return Entry.of(Statement.by(self.federation.keys[READER], agreement.document()))

    def crash(self, name: str) -> None:
        """All processes of a member end, and one starts."""
        self.members[name] = [self.process(name)]

    def lose(self, name: str, back: int = 0) -> None:
        """A disk is lost, or an old backup; and the process ends."""
        self.forgetful = name
        self.disks[name] = MemoryRecords(self.old[name][-1 - back % len(self.old[name])])
        self.crash(name)

    def twin(self, name: str) -> None:
        """A second process, with a copy of the disk."""
        if len(self.members[name]) < 2:
            make = self.federation.network.processes[name].make
            self.members[name].append(make(MemoryRecords(self.disks[name])))
            self.copied.add(name)

    def check(self) -> None:
        """What no relay may reach."""
        federation = self.federation
        assert all(len(plain) == 1 for plain in federation.parts.values())
        assert not (federation.masked and federation.plain)
        for name, sets in federation.sets.items():
            if name != self.forgetful and name not in self.copied:
                assert len(set(sets)) == len({epoch for epoch, _ in sets}), f"{name}: {set(sets)}"
        for processes in self.members.values():
            ends = (one.ended for one in processes)
            self.final |= {end.state for end in ends if end is not None and end.final}
        assert len(self.final) <= 1
        self.check_followed()

    def check_followed(self) -> None:
        """Without masks sums are exact: what the first set was asked is what the fit asks."""
        federation = self.federation
        if federation.masked:
            return
        if not hasattr(self, "honest"):
            quiet = Federation(federation.sites, False, federation.program)
            quiet.run()
            self.honest = quiet.made
        for name in federation.names:
            given = zip(federation.sets[name], federation.made[name], strict=True)
            for (epoch, members), part in given:
                assert epoch or members != federation.names or part in self.honest[name]


def sums_in(relay: Relay) -> int:
    """How many sums a list has."""
    return sum(Entry.decode(data).kind == StatementKind.SUM for data in relay.transcript.entries)


def until_sums(machine: Attacker, count: int) -> None:
    """Let all go on until the first list has so many sums."""
    for _ in range(400):
        if sums_in(machine.branches[0]) >= count:
            return
        machine.run_all(0, len(machine.disks))
    raise AssertionError("the fit does not go on")


def last_sum(relay: Relay) -> int:
    """The place of the last sum."""
    kinds = [Entry.decode(data).kind for data in relay.transcript.entries]
    return len(kinds) - 1 - kinds[::-1].index(StatementKind.SUM)
