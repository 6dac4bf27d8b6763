"""What both ends share: an event loop in a thread, and connections that know when they heard."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, final

from websockets.asyncio.client import ClientConnection
from websockets.asyncio.connection import Connection
from websockets.asyncio.server import ServerConnection

from emfed.network.websocket.greeting import LARGEST_GREETING, LARGEST_MESSAGE

logger = logging.getLogger(__name__)
library_logger = logging.getLogger(f"{__name__}.library")
library_logger.setLevel(logging.CRITICAL)
"""What websockets itself would log has tracebacks for every stranger; we say it in words."""


T = TypeVar("T")


@final
class Background:
    """An event loop in a daemon thread, for callers that are not asynchronous."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self.loop.set_exception_handler(_log_error)
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the loop runs."""
        return self._thread.is_alive()

    def run(self, work: Coroutine[Any, Any, T], seconds: float | None = None) -> T:
        """Run a coroutine there, and wait for its result."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(seconds)

    def call(self, function: Callable[..., object], *arguments: Any) -> None:
        """Call a function there, without waiting; nothing happens once the loop has ended."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(function, *arguments)

    def stop(self) -> None:
        """End all tasks, and the thread."""

        async def cancel() -> None:
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        with contextlib.suppress(TimeoutError):
            self.run(cancel(), 5.0)
        self.call(self.loop.stop)
        self._thread.join(5.0)
        if not self.alive:
            self.loop.close()


REPEAT_SECONDS = 60.0
"""The same trouble is logged once in so long: asyncio tells of a port out of descriptors a thousand
times a second."""
_told: dict[str, float] = {}


def _log_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """One line for what asyncio has nobody else to tell (a port out of descriptors, say)."""
    message, now = str(context.get("message")), time.monotonic()
    if now - _told.get(message, -REPEAT_SECONDS) >= REPEAT_SECONDS:
        _told[message] = now
        logger.warning("%s: %s", message, context.get("exception"))


@final
class ClockWatch:
    """Notices that this machine's clock was set: logs and certificates go by it, rounds do not."""

    def __init__(self) -> None:
        self._apart = time.time() - time.monotonic()

    def look(self) -> None:
        """Log a jump since the last look."""
        apart = time.time() - time.monotonic()
        if abs(apart - self._apart) > JUMP_SECONDS:
            words = "the clock here jumped by %+.0f s: times in logs jump with it, the run goes on"
            logger.warning(words, apart - self._apart)
        self._apart = apart


JUMP_SECONDS = 5.0
"""NTP slews smaller differences; logs of two machines still compare."""


class _Heard(Connection):
    """A connection that knows when something last came, and bounds what waits to go out.

    Any byte is a sign of life. The library's own keepalive wants a pong in time, and would end a
    connection on which a large message is under way over a slow line: the pong waits behind it.
    """

    heard = 0.0
    _most_waiting = 1 << 16
    """Bytes that may wait to go out: at first, to a stranger, next to nothing."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.heard = self.loop.time()
        self.protocol.max_message_size = LARGEST_GREETING
        super().connection_made(transport)

    def trust(self) -> None:
        """The other end has shown who it is: messages may be large from now on."""
        self.protocol.max_message_size = LARGEST_MESSAGE
        self._most_waiting = 2 * LARGEST_MESSAGE

    def data_received(self, data: bytes) -> None:
        self.heard = self.loop.time()
        super().data_received(data)
        # Somebody who pings and never reads would have us keep every pong.
        if self.transport.get_write_buffer_size() > self._most_waiting:
            self.transport.abort()

    def silent(self, seconds: float) -> bool:
        """Whether nothing came for so long."""
        return self.loop.time() - self.heard > seconds

    async def poke(self) -> None:
        """Send a ping, without waiting for a line that is full."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.1):
                await self.ping()


@final
class SiteLine(_Heard, ClientConnection):
    """A site's end of a connection."""


@final
class ServerLine(_Heard, ServerConnection):
    """The server's end of a connection."""
