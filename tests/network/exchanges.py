"""Small federations over a network in memory, and random faults for them."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emfed.aggregation.keys import MemberKeys
from emfed.aggregation.masks import Part
from emfed.core.sums import Ask, Finish, Fit, Precision, Rows, Sum
from emfed.data import as_workers
from emfed.data.summing import HeldRows
from emfed.network.exchange.adding import EpochKeys, PlacedAsk
from emfed.network.exchange.followed import EVERYONE, Comings, Consent, Ended
from emfed.network.exchange.member import Follower
from emfed.network.exchange.records import MemoryRecords
from emfed.network.exchange.relay import Relay
from emfed.network.exchange.statements import Agreement
from emfed.network.exchange.transcript import Transcript
from emfed.network.exchange.virtual import (
    COPY,
    RELAY,
    Fate,
    IdentityKey,
    KnownKeys,
    VirtualNetwork,
    at_once,
)

FloatArray = NDArray[np.float64]


class Waves(Ask):
    """Sums of cosines of the rows: what is asked depends on all sums so far."""

    purpose = "round"

    def __init__(self, state: FloatArray, precision: Precision | None) -> None:
        self.state, self.precision = state, precision

    @property
    def size(self) -> int:
        return len(self.state)

    def part(self, rows: Rows) -> FloatArray:
        def mean(block: Any, weights: Any) -> FloatArray:
            return np.cos(block @ np.outer(np.ones(block.shape[-1]), self.state)).mean(axis=1)

        return rows.sum(mean)

    def words(self) -> str:
        return "cosines"

    def about(self) -> tuple[FloatArray]:
        return (self.state,)


class Parted(Waves):
    """The same, of a member that finds itself alone at the first place."""

    first = b""

    def digest(self, place: bytes = b"") -> bytes:
        self.first = self.first or place
        return bytes(16) if place and place == self.first else super().digest(place)


@dataclass(frozen=True)
class Toy:
    """A fit of so many exchanges; ``small`` gives one of them too little room.

    A member with ``dust`` has other roundings of what it asks; for one that is ``parted`` there is
    a cut between its numbers and all others', at the first place where they are compared.
    """

    exchanges: int = 6
    small: int = -1
    size: int = 4
    dust: float = 0.0
    parted: int = -1

    def begin(
        self, sites: tuple[str, ...], state: bytes, place: bytes, comings: Comings = EVERYONE
    ) -> Fit[FloatArray]:
        return self._fit(np.frombuffer(state) if state else np.arange(1.0, self.size + 1))

    def _fit(self, at: FloatArray) -> Fit[FloatArray]:
        opened = yield Waves(at, None)
        total = opened.rows
        reached = opened.value / total
        try:
            for exchange in range(self.exchanges):
                reach = 2e-3 if exchange == self.small else 1.0
                precision = Precision(np.array(2.0**-12), total * reached, np.array(total * reach))
                kind = Parted if exchange == self.parted else Waves
                told = yield kind(np.round(at + reached, 6) * (1 + self.dust), precision)
                reached = told.value / told.rows
        except Finish:
            pass
        return np.asarray(reached)

    def extend(self, rounds: int | None) -> None: ...

    def state(self, reached: FloatArray | None) -> bytes:
        return b"" if reached is None else reached.tobytes()

    def digest(self, reached: FloatArray) -> bytes:
        return hashlib.sha256(reached.tobytes()).digest()


SUPERSEDED = "taken this one's place"
"""A process that ended with these words is no end of its member."""


def masks(keys: EpochKeys, about: Transcript, question: PlacedAsk) -> Any:
    """The masks of the part that a process makes now."""
    hellos = about.hellos_at(len(about))
    pairs = {n: keys.run.pair(hellos[n].key) for n in keys.members if n != keys.name}
    own = MemberKeys(keys.name, keys.group, pairs)
    make = own.masking if about.agreement.masked else own.plain
    return make(keys._context(about, question, len(about)), question.lattice).masks


Made = Callable[[EpochKeys, Transcript, PlacedAsk, FloatArray], None]
WATCHED: dict[bytes, Made] = {}
"""Who looks at the parts that a process makes, by its run key."""


def _part(
    keys: EpochKeys,
    about: Transcript,
    question: PlacedAsk,
    values: FloatArray,
    make: Callable[..., Part] = EpochKeys.part,
) -> Part:
    if keys.run.public in WATCHED:
        WATCHED[keys.run.public](keys, about, question, values)
    return make(keys, about, question, values)


EpochKeys.part = _part  # type: ignore[method-assign]


NAMES = ("anna", "bert", "cleo", "dora", "emil")
READER = "zoe"


@dataclass
class Federation:
    """Sites with rows, an analyst, a relay, and the network between them."""

    sites: int = 3
    masked: bool = True
    program: Any = field(default_factory=Toy)
    fate: Fate = at_once
    tables: Mapping[str, FloatArray] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    consents: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    accept: Callable[[Agreement], Any] | None = None
    """What owners make of settings; None: the program, whatever they say."""
    relay: type[Relay] = Relay
    late: tuple[str, ...] = ()
    """Sites that are in the settings and do not start with the others."""

    def __post_init__(self) -> None:
        self.names = NAMES[: self.sites]
        self.keys = keys = {
            n: IdentityKey(n, hashlib.sha256(n.encode()).digest()) for n in (*self.names, READER)
        }
        self.roster = KnownKeys({name: key.public for name, key in keys.items()})
        rng = np.random.default_rng(7)
        self.rows = {
            name: HeldRows(as_workers([self.tables.get(name, rng.normal(size=(20 + j, 2)))]))
            for j, name in enumerate(self.names)
        }
        self.settings = Agreement(
            self.names, (READER,), self.masked, program={"exchanges": 6}, **self.options
        )
        self.ends: dict[str, Ended] = {}
        self.parts: dict[bytes, set[bytes]] = {}
        """Every plaintext that was put under a mask."""
        self.made: dict[str, list[tuple[int, bytes]]] = {name: [] for name in self.names}
        self.sets: dict[str, list[tuple[int, tuple[str, ...]]]] = {name: [] for name in self.names}
        """In which epochs and sets each site gave parts."""
        self.plain: set[str] = set()
        """Who gave a part without masks."""

        def member(name: str) -> Callable[[MemoryRecords], Follower]:
            def make(disk: MemoryRecords) -> Follower:
                rows = self.rows.get(name)
                commitment = hashlib.sha256(b"rows" + name.encode()).digest()
                accept = self.accept or (lambda _: self.program)
                consent = Consent(accept, **self.consents.get(name, {}))
                found = Follower(
                    keys[name],
                    self.roster,
                    disk,
                    consent,
                    rows=rows,
                    commitment=bytes(32) if rows is None else commitment,
                    settings=self.settings if name == READER else None,
                )
                self.watch(found)
                return found

            return make

        everyone = {name: member(name) for name in (*self.names, READER)}
        self.network = VirtualNetwork(
            lambda disk, now: self.relay(self.roster, disk, now), everyone, self.fate
        )

    def watch(self, member: Follower) -> None:
        """Keep the numbers of every part that a process makes, by what its masks depend on."""

        def made(
            keys: EpochKeys, about: Transcript, question: PlacedAsk, values: FloatArray
        ) -> None:
            plain = values.tobytes() + question.ask.digest()
            mask = masks(keys, about, question)
            if mask.any():
                self.parts.setdefault(mask.tobytes(), set()).add(plain)
            else:
                self.plain.add(member.name)
            self.made[member.name].append((question.exchange, plain))
            self.sets[member.name].append((about.epoch, about.members))

        WATCHED[member._me.run.public] = made

    def start(self) -> None:
        for name in (RELAY, READER, *self.names):
            if name not in self.late:
                self.network.start(name)

    def over(self) -> bool:
        """Keep how members ended; whether all have."""
        for name, process in self.network.processes.items():
            machine = process.machine
            ended = None if name == RELAY or machine is None else machine.ended
            if ended is not None and SUPERSEDED not in ended.words:
                self.ends.setdefault(name.partition(COPY)[0], ended)
        return set(self.ends) >= {*self.names, READER} - set(self.late)

    def run(self, until: float = 3600.0, done: Callable[[], bool] | None = None) -> float:
        self.start()
        return self.network.run(until, self.over if done is None else done)

    def exact(self, program: Any = None) -> Any:
        """The same fit in one process, of exact integer sums."""
        fit = (program or self.program).begin(self.names, b"", bytes(32))
        ask, exchange = next(fit), 0
        total = float(sum(rows.total for rows in self.rows.values()))
        while True:
            values = [ask.part(rows) for rows in self.rows.values()]
            if ask.precision is None or exchange == 0:
                step = 2.0**-80
            else:
                step = ask.precision.step
            told = sum(np.rint(value / step) for value in values) * step
            try:
                ask = fit.send(Sum(told, total, 0.0, 0, 0))
            except StopIteration as end:
                return end.value
            exchange += 1


# Random faults.

DOWN = (0.05, 1.0, 8.0, 60.0, 150.0)
"""Seconds that a killed process stays away: less than others wait."""


@dataclass(frozen=True)
class Plan:
    """What goes wrong in one run; it follows from the seed."""

    seed: int
    masked: bool
    sites: int
    loss: float
    repeat: float
    late: float
    events: tuple[tuple[float, str, str, float, str], ...]
    """Seconds, what, to whom, how long, with which disk."""

    @classmethod
    def of(cls, seed: int, down: Sequence[float] = DOWN) -> Plan:
        rng = random.Random(seed)
        sites = rng.choice((2, 3, 3, 4, 5))
        masked = sites > 2 and rng.random() < 0.7
        late = rng.choice((0.0, 0.0, 0.3, 3.0))
        names = (*NAMES[:sites], *NAMES[:sites], READER, RELAY)
        events = []
        for _ in range(rng.choice((0, 1, 2, 3, 6, 10))):
            what = rng.choice(("kill", "kill", "doom", "doom", "copy"))
            who = rng.choice(names)
            if who == RELAY and what == "copy":
                what = "kill"
            disk = rng.choice(("same", "same", "same", "none", "old"))
            when = rng.random() * (0.6 + 15 * late) * rng.choice((1, 1, 20))
            events.append((when, what, who, rng.choice(down), disk))
        loss, repeat = rng.choice((0.0, 0.05, 0.25)), rng.choice((0.0, 0.1, 0.5))
        return cls(seed, masked, sites, loss, repeat, late, tuple(events))

    def fate(self) -> Fate:
        rng = random.Random(self.seed + 1)

        def fate(sender: str, receiver: str, data: bytes) -> list[tuple[float, bytes]]:
            copies = 0 if rng.random() < self.loss else 1 + (rng.random() < self.repeat)
            return [(0.01 + self.late * rng.random(), data) for _ in range(copies)]

        return fate


@dataclass(frozen=True)
class Tried:
    """What became of a plan."""

    seed: int
    wrong: tuple[str, ...]
    seconds: float
    entries: int
    kills: int
    largest_gap: float
    error: float


class Trial:
    """A plan under way."""

    down: Sequence[float] = DOWN

    def __init__(self, seed: int) -> None:
        self.plan = plan = Plan.of(seed, self.down)
        self.federation = self.made(plan)
        self.network, self._rng = self.federation.network, random.Random(seed + 2)
        self._old = {name: [MemoryRecords()] for name in self.network.processes}
        self.kills, self.gap, self.length, self._last = 0, 0.0, 0, 0.0

    def made(self, plan: Plan) -> Federation:
        return Federation(plan.sites, plan.masked, fate=plan.fate())

    def run(self, until: float) -> Tried:
        for when, what, who, down, disk in self.plan.events:
            self.network.at(when, partial(self._strike, what, who, down, disk))
        self.network.at(0.1, self._supervise)
        seconds = self.federation.run(until, self._done)
        wrong, error = self.wrong()
        return Tried(
            self.plan.seed, tuple(wrong), seconds, self.length, self.kills, self.gap, error
        )

    def _strike(self, what: str, who: str, down: float, disk: str) -> None:
        if who in self.federation.ends or self.federation.over():
            return
        self.kills += 1
        if what == "copy":
            self.network.copy(who)
            return
        if what == "kill":
            self.network.kill(who)
        else:
            self.network.doomed.add(who)
        self.network.at(self.network.now + down, partial(self._revive, who, disk))

    def _revive(self, who: str, disk: str) -> None:
        self.network.doomed.discard(who)
        self.network.kill(who)
        self._again(who, disk)

    def _again(self, name: str, disk: str) -> None:
        process = self.network.processes[name]
        if process.machine is None:
            old = MemoryRecords(self._rng.choice(self._old[name]))
            disks = {"same": process.disk, "none": MemoryRecords(), "old": old}
            self.network.start(name, disks[disk])
            self._last = self.network.now  # what was down is no stall

    def _supervise(self) -> None:
        """Keep old disks, and start what ended because a second process of its member began."""
        for name, process in [*self.network.processes.items()]:
            self._old.setdefault(name, []).append(MemoryRecords(process.disk))
            ended = None if name == RELAY or process.machine is None else process.machine.ended
            if ended is not None and SUPERSEDED in ended.words:
                self.network.kill(name)
                member = name.partition(COPY)[0]
                alive = (p for n, p in self.network.processes.items() if n.startswith(member))
                if member and not any(one.machine for one in alive):
                    self.network.at(self.network.now + 1.0, partial(self._again, name, "same"))
        self.network.at(self.network.now + 0.2 + self.plan.late, self._supervise)

    def _done(self) -> bool:
        relay = self.network.processes[RELAY].machine
        if relay is not None and len(relay.transcript) > self.length:
            self.gap = max(self.gap, self.network.now - self._last)
            self._last, self.length = self.network.now, len(relay.transcript)
        return self.federation.over()

    def wrong(self) -> tuple[list[str], float]:
        federation, ends = self.federation, self.federation.ends
        wrong = [f"{name}: {end.words}" for name, end in ends.items() if not end.final]
        wrong += [f"{n} never ended" for n in (*federation.names, READER) if n not in ends]
        states = {end.state for end in ends.values() if end.final}
        if len(states) > 1:
            wrong.append("two models are final")
        if any(len(plain) > 1 for plain in federation.parts.values()):
            wrong.append("one mask covered two messages")
        error, good = self.error(states.pop()) if states else (0.0, True)
        if not good:
            wrong.append(f"the model is {error} off")
        if self.gap > federation.settings.wait + 15:
            wrong.append(f"nothing happened for {self.gap} s")
        return wrong, error

    def error(self, state: bytes) -> tuple[float, bool]:
        """How far the model is from that of one process, and whether it may be."""
        error = float(np.abs(np.frombuffer(state) - self.federation.exact()).max())
        return error, error <= (2e-4 if self.plan.masked else 0.0)


def try_plan(seed: int, until: float = 7200.0) -> Tried:
    """Run a plan, and say what broke a promise."""
    return Trial(seed).run(until)
