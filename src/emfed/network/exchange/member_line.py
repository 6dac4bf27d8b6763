"""A member's connection to the relay: hand-outs come in, posts leave."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, final

from websockets.exceptions import ConnectionClosed

from emfed.network.websocket.background import SiteLine
from emfed.network.websocket.client import Caller, StateReport

MOST_WAITING = 64
"""Posts that wait for a slow line: the oldest is lost first, and said again if it still matters."""


@final
class MemberLine(Caller):
    """Stays connected, and carries bytes; other options are those of `Caller`.

    Parameters
    ----------
    address : str
        The relay's.
    received : callable
        Takes what comes; it must not wait.
    connected : callable
        Called when there is a connection.
    """

    def __init__(
        self,
        address: str,
        received: Callable[[bytes], None],
        connected: Callable[[], None],
        **options: Any,
    ) -> None:
        super().__init__(address, **options)
        self._received, self._connected = received, connected
        self._loop: asyncio.AbstractEventLoop | None = None
        self._posts: asyncio.Queue[bytes] = asyncio.Queue(MOST_WAITING)

    def send(self, post: bytes) -> None:
        """Send soon; called from any thread. Without a connection it is lost."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._put, post)

    def _put(self, post: bytes) -> None:
        if self._posts.full():
            self._posts.get_nowait()
        self._posts.put_nowait(post)

    async def _converse(self, line: SiteLine, report: StateReport) -> None:
        while not self._posts.empty():
            self._posts.get_nowait()
        self._loop = asyncio.get_running_loop()
        sending = self._loop.create_task(self._send_all(line))
        self._connected()
        try:
            async for data in line:
                if isinstance(data, bytes):
                    self._received(data)
        finally:
            sending.cancel()

    async def _send_all(self, line: SiteLine) -> None:
        with contextlib.suppress(ConnectionClosed):
            while True:
                await line.send(await self._posts.get())
