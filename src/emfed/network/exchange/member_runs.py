"""The runs of a member: one `MemberThread` each, over one connection."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import final

from emfed.core.errors import WireError
from emfed.network.exchange.followed import MemberStore
from emfed.network.exchange.frames import RunList, framed, framed_list, is_run, unframed
from emfed.network.exchange.member import Follower
from emfed.network.exchange.member_thread import MemberThread, Watcher

logger = logging.getLogger(__name__)
MOST_RUNS = 16
"""Runs that a member follows at the same time: each has a thread and a file."""


@final
@dataclass(frozen=True, eq=False)
class RunMember:
    """What a member needs in one run.

    Parameters
    ----------
    path : Path
        Its file, which no other run has.
    make : callable
        From what it keeps to its state machine.
    watcher : Watcher
        Who looks on.
    seal : bytes, optional
        A secret that encrypts the file.
    """

    path: Path
    make: Callable[[MemberStore], Follower]
    watcher: Watcher
    seal: bytes | None = None


@final
class MemberRuns:
    """Give it what came (`received`); it sends what is to be said, of whatever run.

    A site is told by the relay which runs there are, and `begin` decides about each of them, once;
    an analyst begins its own (`start`).

    Parameters
    ----------
    send : callable
        Takes messages on their way to the relay; it must not wait.
    begin : callable
        From the name of a run to what this member needs in it; None: it stays away. Whether the
        owner's rules accept the run's settings is known later, by `Follower`.
    """

    def __init__(
        self,
        send: Callable[[bytes], None],
        begin: Callable[[str], RunMember | None] = lambda run: None,
    ) -> None:
        self._send, self._begin = send, begin
        self._refused: set[str] = set()
        self._changing = threading.RLock()
        self.members: dict[str, MemberThread] = {}
        """All that were begun in this process, those that are over, too."""
        self.more = True
        """Whether the relay says that other runs follow."""
        self.here: tuple[str, ...] | None = None
        """To an analyst: the sites that are connected, once the relay has said so."""

    def start(self, run: str, member: RunMember) -> MemberThread:
        """Take part in a run from now on."""
        assert is_run(run)

        def make(store: MemberStore) -> Follower:
            follower = member.make(store)
            follower.run = run
            return follower

        def send(post: bytes) -> None:
            self._send(framed(run, post))

        with self._changing:
            thread = self.members[run] = MemberThread(
                member.path, make, send, member.watcher, member.seal
            )
        thread.start()
        return thread

    def received(self, data: bytes) -> None:
        """Something has come from the relay."""
        try:
            run, message = unframed(data)
            if not run:
                self._look_at(RunList.decode(message))
            elif run in self.members:
                self.members[run].received(message)
        except WireError as error:
            logger.warning("what a relay sent was ignored: %s", error)

    def connected(self) -> None:
        """There is a relay to speak to; it greets by telling which runs there are."""
        for thread in [*self.members.values()]:
            thread.connected()

    def _look_at(self, told: RunList) -> None:
        self.more, self.here = bool(told.more), told.here
        for run in told.runs:
            with self._changing:
                going = sum(not one.over.is_set() for one in self.members.values())
                new = is_run(run) and run not in self.members and run not in self._refused
                if not new or going >= MOST_RUNS:
                    continue
                member = self._begin(run)
                if member is None:
                    if len(self._refused) < 1 << 10:
                        self._refused.add(run)
                else:
                    self.start(run, member)

    def say_more(self, more: bool) -> None:
        """Tell the relay, as an analyst, whether other runs follow these."""
        self._send(framed_list(RunList(int(more), ())))

    @property
    def over(self) -> bool:
        """Whether all runs that were begun are over, and the relay says that no other follows."""
        members = [*self.members.values()]
        return bool(members) and not self.more and all(one.over.is_set() for one in members)

    def stop(self) -> None:
        """End soon, in all runs."""
        for thread in [*self.members.values()]:
            thread.stop()
