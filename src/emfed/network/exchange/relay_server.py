"""The relay on WebSockets: posts come in, hand-outs leave. It needs no model code."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import final

from websockets.exceptions import ConnectionClosed

from emfed.core.errors import WireError
from emfed.network.exchange.records import DiskTrouble
from emfed.network.exchange.relay import Relay
from emfed.network.exchange.relay_runs import MakeRelay, Messages, RelayRuns, RunFiles
from emfed.network.exchange.statements import LARGEST_MESSAGE, Roster
from emfed.network.keys import ANALYST
from emfed.network.websocket.background import ServerLine
from emfed.network.websocket.greeting import IN_USE, MISUSE, SILENCE_SECONDS, Refused
from emfed.network.websocket.reception import Reception, SiteCall

logger = logging.getLogger(__name__)
TICK = 0.5
"""Seconds between two looks at the clock."""
MOST_WAITING = 4
"""Messages of one run that wait for a slow line: a member asks again for what it has not got."""
DISK_PAUSE = 10.0
"""Seconds before a relay that could not write tries again."""
_NAME = 8
"""Bytes of a message that name its run."""


@final
class _MemberLink(SiteCall):
    """A member's connection, and what is on its way to it."""

    def __init__(self, name: str, process: bytes, digest: bytes, line: ServerLine) -> None:
        super().__init__(name, process, digest, line)
        self._waiting: deque[bytes] = deque()
        self._there = asyncio.Event()

    def put(self, data: bytes) -> None:
        """Let a message wait, where not too many of its run do: the newest are lost."""
        if sum(one.startswith(data[:_NAME]) for one in self._waiting) < MOST_WAITING:
            self._waiting.append(data)
            self._there.set()

    async def next(self) -> bytes:
        """The message that has waited longest."""
        while not self._waiting:
            self._there.clear()
            await self._there.wait()
        return self._waiting.popleft()


@final
class RelayServer(Reception[_MemberLink]):
    """A relay that members call, for any number of runs.

    Members of this process are attached (`attach`); others call. Whoever of them may be an analyst
    begins runs by speaking of them. All that crosses is `RelayRuns`' bytes: an engine other than
    WebSockets carries the same.

    Parameters
    ----------
    host, port : str, int
        Where to listen; port 0 takes a free one.
    keys : Path or None
        The folder of keys: `sites` may call. None: everybody of this machine, without TLS.
    roster : Roster
        Public keys of all members, those in this process, too.
    folder : Path
        Where the files of all runs are.
    homes : mapping from str to Path
        Runs whose files are in folders of their own.
    more : bool
        Whether other runs follow, until an analyst says otherwise.
    make : callable
        The relay's state machine of one run; others are for tests.
    """

    def __init__(
        self,
        host: str,
        port: int,
        keys: Path | None,
        roster: Roster,
        folder: Path,
        make: MakeRelay = Relay,
        *,
        homes: Mapping[str, Path] | None = None,
        more: bool = False,
        silence: float = SILENCE_SECONDS,
    ) -> None:
        self._roster, self._make = roster, make
        self._places = partial(RunFiles, folder, homes)
        self._here: dict[str, Callable[[bytes], None]] = {}
        self._runs: RelayRuns | None = None
        self._files: RunFiles | None = None
        self._more = more
        self._again = 0.0
        self.trouble = ""
        """What must be mended here, in words."""
        self.contacts: dict[str, float] = {}
        """When members last said anything, in seconds since 1970."""
        self.received = self.sent = 0
        """Bytes of all messages of members that call."""
        super().__init__(host, port, keys, silence=silence)
        self._background.call(self._begin)

    # For this process.

    def attach(self, name: str, deliver: Callable[[bytes], None]) -> Callable[[bytes], None]:
        """Let a member of this process take part; gives what takes its messages."""
        self._here[name] = deliver
        self._background.call(self._act, lambda runs: runs.announce([name]))
        return lambda data: self._background.call(self._take, name, data)

    def untold(self, run: str) -> tuple[str, ...]:
        """Members of the last set of a run that do not know yet how it ended."""
        return () if self._runs is None else self._runs.untold(run)

    # In the loop.

    def _begin(self) -> None:
        self._open_files()
        self._ticking = asyncio.get_running_loop().create_task(self._tick())

    def _open_files(self) -> None:
        """Begin with what is on the disk; where that fails, it is tried again."""
        try:
            self._files = files = self._places()
            known, now = files.names(), time.monotonic()
            self._runs = RelayRuns(
                self._roster, [ANALYST], files, known, files.drop, now, self._make
            )
            self._runs.more, self.trouble = self._more, ""
            self._send(self._runs.meet(self._present))
        except DiskTrouble as error:
            self._fail(error)

    def _fail(self, error: DiskTrouble) -> None:
        """What is in memory may be more than what is on the disk: begin again from there."""
        logger.warning("%s", error)
        self.trouble, self._runs = str(error), None
        self._again = time.monotonic() + DISK_PAUSE
        if self._files is not None:
            self._files.close()
            self._files = None

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK)
            if self._runs is None and time.monotonic() >= self._again:
                self._open_files()
            self._act(lambda runs: runs.tick(time.monotonic()))

    @property
    def _present(self) -> list[str]:
        """Who calls, and who of this process has said anything."""
        return [*self._links, *(name for name in self._here if name in self.contacts)]

    def _take(self, name: str, data: bytes) -> None:
        new = name in self._here and name not in self.contacts
        self.contacts[name] = time.time()
        if new:
            self._act(lambda runs: runs.meet(self._present))
        try:
            self._act(lambda runs: runs.receive(name, data, time.monotonic()))
        except WireError as error:
            raise Refused(MISUSE, str(error)) from None

    def _act(self, act: Callable[[RelayRuns], Messages]) -> None:
        if self._runs is None:
            return
        try:
            said, self._more = act(self._runs), self._runs.more
        except DiskTrouble as error:
            self._fail(error)
            return
        self._send(said)

    def _send(self, said: Messages) -> None:
        for name, data in said:
            link = self._links.get(name)
            if name in self._here:
                self._here[name](data)
            elif link is not None:
                link.put(data)

    def _meet(self, name: str, process: bytes, digest: bytes, line: ServerLine) -> _MemberLink:
        if name in self._here:
            raise Refused(IN_USE, f"called as {name}, who works at the relay")
        return _MemberLink(name, process, digest, line)

    def _lost(self, link: _MemberLink) -> None:
        self._act(lambda runs: runs.meet(self._present))

    async def _converse(self, link: _MemberLink) -> None:
        sending = asyncio.get_running_loop().create_task(self._send_all(link))
        self._act(lambda runs: [*runs.meet(self._present), *runs.announce([link.name])])
        try:
            async for data in link.line:
                if self._links.get(link.name) is not link:
                    return
                if not isinstance(data, bytes) or len(data) > LARGEST_MESSAGE:
                    raise Refused(MISUSE, "sent what is no post")
                self.received += len(data)
                self._take(link.name, data)
                await asyncio.sleep(0)  # whoever posts without end takes turns with the others
        finally:
            sending.cancel()

    async def _send_all(self, link: _MemberLink) -> None:
        with contextlib.suppress(ConnectionClosed):
            while True:
                data = await link.next()
                self.sent += len(data)
                await link.line.send(data)

    async def _shut(self, code: int) -> None:
        self._ticking.cancel()
        await super()._shut(code)
        if self._files is not None:
            self._files.close()
