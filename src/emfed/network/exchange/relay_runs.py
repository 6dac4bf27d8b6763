"""The runs of a relay: one `Relay` each, over the same connections; a state machine without I/O.

A run begins when an analyst speaks of it, and is announced to the members that its settings name.
Which of them a member follows is its own affair.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import final

from emfed.core.errors import CheckpointError, WireError
from emfed.network.exchange.frames import RunList, framed, framed_list, is_run, unframed
from emfed.network.exchange.records import RecordFile
from emfed.network.exchange.relay import EntryStore, Relay
from emfed.network.exchange.statements import Roster, is_post_of
from emfed.network.exchange.transcript import Stage

logger = logging.getLogger(__name__)
MOST_RUNS = 64
"""Runs that a relay keeps: one more takes the place of the oldest that is over."""
MakeRelay = Callable[[Roster, EntryStore, float], Relay]
Messages = list[tuple[str, bytes]]
"""Members, and what is on its way to them."""


@final
class RunFiles:
    """The files of a relay's runs, ``NAME.sqlite`` in a folder; the oldest first.

    Parameters
    ----------
    folder : Path
        It is made if it is not there.
    homes : mapping from str to Path
        Runs that have a folder of their own, in its place.
    """

    def __init__(self, folder: Path, homes: Mapping[str, Path] | None = None) -> None:
        self._folder, self._homes, self._open = folder, dict(homes or {}), dict[str, RecordFile]()
        for place in self._places():
            place.mkdir(parents=True, exist_ok=True, mode=0o700)

    def _places(self) -> set[Path]:
        return {self._folder, *self._homes.values()}

    def names(self) -> list[str]:
        """All runs that are kept."""
        kept = (path for place in self._places() for path in place.glob("*.sqlite"))
        found = [path for path in kept if is_run(path.stem)]
        return [path.stem for path in sorted(found, key=lambda path: path.stat().st_mtime)]

    def __call__(self, run: str) -> EntryStore:
        """The file of a run."""
        self._open[run] = RecordFile(self._homes.get(run, self._folder) / f"{run}.sqlite")
        return self._open[run]

    def drop(self, run: str) -> None:
        """Forget a run."""
        if run in self._open:
            self._open.pop(run).close()
        for path in self._homes.get(run, self._folder).glob(f"{run}.sqlite*"):
            path.unlink()

    def close(self) -> None:
        """Let go of all files."""
        for file in self._open.values():
            file.close()
        self._open = {}


@final
class RelayRuns:
    """Give it what members send, and send what it returns; `greet` whoever comes.

    Parameters
    ----------
    roster : Roster
        Public keys of all members.
    analysts : collection of str
        Who may begin a run.
    store : callable
        From a run's name to where its entries are kept.
    known : iterable of str
        Runs that are kept already, the oldest first.
    drop : callable
        Forgets a run's entries.
    now : float
        Seconds of any clock that does not go back.
    make : callable
        The state machine of one run; others are for tests.
    """

    def __init__(
        self,
        roster: Roster,
        analysts: Iterable[str],
        store: Callable[[str], EntryStore],
        known: Iterable[str],
        drop: Callable[[str], None],
        now: float,
        make: MakeRelay = Relay,
    ) -> None:
        self._roster, self._analysts, self._store = roster, set(analysts), store
        self._drop, self._make = drop, make
        self.more = False
        """Whether other runs follow, so that members stay: by an analyst's word."""
        self.here: tuple[str, ...] = ()
        """The sites that are connected; see `announce`."""
        self.relays: dict[str, Relay] = {}
        for run in known:
            try:
                self._open(run, now)
            except CheckpointError as error:  # the others go on
                logger.error("%s", error)

    def _open(self, run: str, now: float) -> Relay:
        relay = self.relays[run] = self._make(self._roster, self._store(run), now)
        return relay

    def receive(self, member: str, data: bytes, now: float) -> Messages:
        """Take what a member sent; raises `WireError` where it is no post of its own."""
        run, post = unframed(data)
        if not run:
            return self._hear(member, post)
        if not is_post_of(member, post):
            raise WireError("sent no post of its own")
        relay = self.relays.get(run)
        if relay is None:
            if member not in self._analysts:
                return [(member, self.greet(member))]
            self._make_room()
            relay = self._open(run, now)
        return self._act(run, relay, lambda: relay.receive(post, now))

    def _hear(self, member: str, message: bytes) -> Messages:
        """Greet a member; an analyst may say whether other runs follow."""
        if message and member in self._analysts:
            self.more = bool(RunList.decode(message).more)
            return self.announce(self.here)
        return [(member, self.greet(member))]

    def tick(self, now: float) -> Messages:
        """What follows from time alone."""
        said: Messages = []
        for run, relay in self.relays.items():
            said += self._act(run, relay, lambda relay=relay: relay.tick(now))  # type: ignore[misc]
        return said

    def _act(self, run: str, relay: Relay, act: Callable[[], Messages]) -> Messages:
        begins = relay.transcript.stage is Stage.EMPTY
        said = [(name, framed(run, message)) for name, message in act()]
        if begins and relay.transcript.stage is not Stage.EMPTY:
            said += self.announce(relay.transcript.agreement.sites)
        return said

    def _make_room(self) -> None:
        over = (Stage.FINAL, Stage.ENDED, Stage.EMPTY)
        if len(self.relays) >= MOST_RUNS:
            ended = (run for run, one in self.relays.items() if one.transcript.stage in over)
            run = next(ended, None)
            if run is None:
                raise WireError(f"{MOST_RUNS} runs are under way here: another cannot begin.")
            del self.relays[run]
            self._drop(run)

    def greet(self, member: str) -> bytes:
        """What a member hears first, and when it asks: the runs that name it."""
        runs = [run for run, one in self.relays.items() if member in one.transcript.agreement.sites]
        here = self.here if member in self._analysts else ()
        return framed_list(RunList(int(self.more), tuple(runs), here))

    def announce(self, members: Iterable[str]) -> Messages:
        """Tell members which runs there are."""
        return [(name, self.greet(name)) for name in members]

    def meet(self, here: Iterable[str]) -> Messages:
        """Tell analysts which sites are connected now."""
        self.here = tuple(sorted({*here} - self._analysts))
        return self.announce(self._analysts)

    def untold(self, run: str) -> tuple[str, ...]:
        """Members of the last set that do not know yet how the run ended."""
        relay = self.relays.get(run)
        return () if relay is None else relay.untold
