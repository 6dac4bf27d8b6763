"""The relay on WebSockets: posts come in, hand-outs leave. It needs no model code."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import final

from websockets.exceptions import ConnectionClosed

from emfed.network.exchange.records import DiskTrouble, RecordFile
from emfed.network.exchange.relay import Relay
from emfed.network.exchange.statements import LARGEST_MESSAGE, Roster, is_post_of
from emfed.network.websocket.background import ServerLine
from emfed.network.websocket.greeting import MISUSE, Refused
from emfed.network.websocket.reception import Reception, SiteCall

logger = logging.getLogger(__name__)
TICK = 0.5
"""Seconds between two looks at the clock."""
MOST_WAITING = 4
"""Hand-outs that wait for a slow line: a member asks again for what it has not got."""
DISK_PAUSE = 10.0
"""Seconds before a relay that could not write tries again."""


@final
class _MemberLink(SiteCall):
    """A member's connection, and what is on its way to it."""

    def __init__(self, name: str, process: bytes, digest: bytes, line: ServerLine) -> None:
        super().__init__(name, process, digest, line)
        self.waiting: asyncio.Queue[bytes] = asyncio.Queue(MOST_WAITING)


@final
class RelayServer(Reception[_MemberLink]):
    """A relay that members call.

    Parameters
    ----------
    host, port : str, int
        Where to listen; port 0 takes a free one.
    keys : Path
        The folder of keys: `sites` may call.
    roster : Roster
        Public keys of all members, those in this process, too.
    path : Path
        The relay's file.
    make : callable
        The relay's state machine; others are for tests.
    """

    def __init__(
        self,
        host: str,
        port: int,
        keys: Path,
        roster: Roster,
        path: Path,
        make: Callable[[Roster, RecordFile, float], Relay] = Relay,
    ) -> None:
        self._roster, self._path, self._make = roster, path, make
        self._here: dict[str, Callable[[bytes], None]] = {}
        self._relay: Relay | None = None
        self._file: RecordFile | None = None
        self._again = 0.0
        self.trouble = ""
        """What must be mended here, in words."""
        super().__init__(host, port, keys)
        self._background.call(self._begin)

    # For members in this process.

    def attach(self, name: str, deliver: Callable[[bytes], None]) -> Callable[[bytes], None]:
        """Let a member of this process take part; gives what takes its posts."""
        self._here[name] = deliver
        return lambda post: self._background.call(self._receive, post)

    # In the loop.

    def _begin(self) -> None:
        self._open_file()
        self._ticking = asyncio.get_running_loop().create_task(self._tick())

    def _open_file(self) -> None:
        """Begin with what is on the disk; where that fails, it is tried again."""
        try:
            self._file = RecordFile(self._path)
            self._relay = self._make(self._roster, self._file, time.monotonic())
            self.trouble = ""
        except DiskTrouble as error:
            self._fail(error)

    def _fail(self, error: DiskTrouble) -> None:
        """What is in memory may be more than what is on the disk: begin again from there."""
        logger.warning("%s", error)
        self.trouble, self._relay = str(error), None
        self._again = time.monotonic() + DISK_PAUSE
        if self._file is not None:
            self._file.close()
            self._file = None

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK)
            if self._relay is None and time.monotonic() >= self._again:
                self._open_file()
            self._act(lambda relay: relay.tick(time.monotonic()))

    def _receive(self, post: bytes) -> None:
        self._act(lambda relay: relay.receive(post, time.monotonic()))

    def _act(self, act: Callable[[Relay], list[tuple[str, bytes]]]) -> None:
        if self._relay is None:
            return
        try:
            said = act(self._relay)
        except DiskTrouble as error:
            self._fail(error)
            return
        for name, data in said:
            link = self._links.get(name)
            if name in self._here:
                self._here[name](data)
            elif link is not None:
                with contextlib.suppress(asyncio.QueueFull):
                    link.waiting.put_nowait(data)

    def _meet(self, name: str, process: bytes, digest: bytes, line: ServerLine) -> _MemberLink:
        return _MemberLink(name, process, digest, line)

    async def _converse(self, link: _MemberLink) -> None:
        sending = asyncio.get_running_loop().create_task(self._send(link))
        try:
            async for post in link.line:
                if self._links.get(link.name) is not link:
                    return
                if not isinstance(post, bytes) or len(post) > LARGEST_MESSAGE:
                    raise Refused(MISUSE, "sent what is no post")
                if not is_post_of(link.name, post):
                    raise Refused(MISUSE, "sent no post of its own")
                self._receive(post)
                await asyncio.sleep(0)  # whoever posts without end takes turns with the others
        finally:
            sending.cancel()

    async def _send(self, link: _MemberLink) -> None:
        with contextlib.suppress(ConnectionClosed):
            while True:
                await link.line.send(await link.waiting.get())
