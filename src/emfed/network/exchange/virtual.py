"""A network in memory with a clock of its own: a fit of an hour takes a second.

Everything that happens follows from the seed. Messages are late, lost, repeated and out of order;
processes are killed, also between writing and sending, and start again with their disk, with none,
or with an old one.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from emfed.core.errors import EmfedError
from emfed.network.exchange.member import Follower
from emfed.network.exchange.records import MemoryRecords
from emfed.network.exchange.relay import Relay

TICK = 1.0
"""Seconds between two looks at the clock."""
RELAY, COPY = "", "#"
"""The relay's name among processes, and what stands before the number of a second process of one
member."""


@final
class IdentityKey:
    """A member's identity, from a seed of 32 bytes."""

    def __init__(self, name: str, seed: bytes) -> None:
        self._name, self._seed = name, seed
        self._key = Ed25519PrivateKey.from_private_bytes(seed)

    @property
    def name(self) -> str:
        """The member's name."""
        return self._name

    @property
    def public(self) -> Ed25519PublicKey:
        """What others know of it."""
        return self._key.public_key()

    def sign(self, message: bytes) -> bytes:
        """A signature."""
        return self._key.sign(message)

    def secret(self, purpose: bytes) -> bytes:
        """32 bytes that follow from the key."""
        return HKDF(hashes.SHA256(), 32, None, b"emfed identity\0" + purpose).derive(self._seed)


@final
class KnownKeys(dict[str, Ed25519PublicKey]):
    """Public keys by name."""

    def verify(self, name: str, message: bytes, signature: bytes) -> bool:
        """Whether the member of this name signed the message."""
        try:
            self[name].verify(signature, message)
        except (InvalidSignature, KeyError):
            return False
        return True


Fate = Callable[[str, str, bytes], list[tuple[float, bytes]]]
"""From sender, receiver and message to what arrives, each after so many seconds."""


def at_once(sender: str, receiver: str, data: bytes) -> list[tuple[float, bytes]]:
    """A network without faults, with round trips of 20 ms."""
    return [(0.01, data)]


@dataclass
class _Running:
    make: Callable[[MemoryRecords], Any]
    disk: Any = field(default_factory=MemoryRecords)
    machine: Any = None
    life: int = 0
    """Counts starts: what a killed process would have done does not happen."""
    working: Any = None


@final
class VirtualNetwork:
    """Relay and members, and all that happens between them.

    Parameters
    ----------
    relay : callable
        From a disk and the time to the relay.
    members : mapping
        From names to functions from a disk to the member.
    fate : callable
        What becomes of a message.
    computing : float
        Seconds that a pass over rows takes.
    """

    def __init__(
        self,
        relay: Callable[[MemoryRecords, float], Relay],
        members: dict[str, Callable[[MemoryRecords], Follower]],
        fate: Fate = at_once,
        computing: float = 0.02,
    ) -> None:
        self.now, self.fate, self.computing = 0.0, fate, computing
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self.processes = {RELAY: _Running(lambda disk: relay(disk, self.now))}
        self.processes |= {name: _Running(make) for name, make in members.items()}
        self.sent: list[tuple[str, bytes]] = []
        """All that members sent, in order."""
        self.doomed: set[str] = set()
        """Processes that are killed when they have written next, before they send."""

    def at(self, when: float, do: Callable[[], None]) -> None:
        """Let something happen at a time."""
        heapq.heappush(self._queue, (when, next(self._count), do))

    def start(self, name: str, disk: Any = None) -> None:
        """Start a process, with its disk as it is or with another one."""
        process = self.processes[name]
        process.life += 1
        process.disk = process.disk if disk is None else disk
        process.machine = process.make(process.disk)
        process.working = None
        life = process.life

        def look() -> None:
            if process.life == life:
                self._act(name, lambda: process.machine.tick(self.now))
                self.at(self.now + TICK, look)

        self.at(self.now, look)

    def copy(self, name: str) -> str:
        """Start a second process of a member, with a copy of its disk."""
        process = self.processes[name]
        twin = f"{name}{COPY}{next(self._count)}"
        self.processes[twin] = _Running(process.make, MemoryRecords(process.disk))
        self.start(twin)
        return twin

    def kill(self, name: str) -> None:
        """End a process; its disk stays."""
        process = self.processes[name]
        process.machine, process.working = None, None
        process.life += 1

    def follower(self, name: str) -> Follower:
        """A member that runs."""
        found: Follower = self.processes[name].machine
        return found

    def run(self, until: float, done: Callable[[], bool]) -> float:
        """Let things happen until all is done, or until a time; gives the time."""
        while self._queue and self._queue[0][0] <= until:
            self.now, _, do = heapq.heappop(self._queue)
            do()
            if done():
                break
        return self.now

    def _act(self, name: str, act: Callable[[], list[Any]]) -> None:
        """Let a process act, and carry what it says."""
        process = self.processes[name]
        if process.machine is None:
            return
        life = process.life
        said = act()
        if name in self.doomed:
            self.doomed.discard(name)
            self.kill(name)
        if process.life != life:
            return
        for one in said:
            receiver, data = one if name == RELAY else (RELAY, one)
            if name != RELAY:
                self.sent.append((name, data))
            self._carry(name.partition(COPY)[0], receiver, data)
        if name != RELAY:
            self._work(name)

    def _carry(self, sender: str, receiver: str, data: bytes) -> None:
        for delay, what in self.fate(sender, receiver, data):
            self.at(self.now + delay, lambda what=what: self._arrive(receiver, what))  # type: ignore[misc]

    def _arrive(self, receiver: str, data: bytes) -> None:
        for name, process in [*self.processes.items()]:
            if name.partition(COPY)[0] == receiver:
                self._act(name, partial(self._receive, process, data))

    def _receive(self, process: _Running, data: bytes) -> list[Any]:
        received: list[Any] = process.machine.receive(data, self.now)
        return received

    def _work(self, name: str) -> None:
        """Begin a pass over rows that is due."""
        process = self.processes[name]
        if process.machine is None or (job := process.machine.job()) is None:
            return
        if process.working is job.ask:
            return
        process.working, life = job.ask, process.life

        def finish() -> None:
            if process.life != life:
                return
            try:
                values = job()
            except EmfedError as error:
                words = str(error)
                self._act(name, lambda: process.machine.fail(words, self.now))
                return
            self._act(name, lambda: process.machine.done(job, values, self.now))

        self.at(self.now + self.computing, finish)
