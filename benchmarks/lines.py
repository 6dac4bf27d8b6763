"""A line to a server that counts and delays what passes, in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Self

PIECE = 1 << 16
"""Bytes that are read at once."""


class Line:
    """A TCP port that leads to another one; a context that ends its process.

    All bytes are held for ``delay`` seconds, each way, however many are under way: so a round trip
    takes twice that longer, and a burst no more than one byte. ``up`` and ``down`` count bytes.
    """

    def __init__(self, port: int, delay: float = 0.0) -> None:
        start = multiprocessing.get_context("spawn")
        self._counts = start.Array("q", 2, lock=False)
        door = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.port = int(door.getsockname()[1])
        self._process = start.Process(
            target=_lead, args=(door, port, delay, self._counts), daemon=True
        )
        self._process.start()
        door.close()

    @property
    def up(self) -> int:
        return int(self._counts[0])

    @property
    def down(self) -> int:
        return int(self._counts[1])

    @contextlib.contextmanager
    def watched(self, every: float = 0.005) -> Iterator[list[tuple[float, int, int]]]:
        """What has passed, and when, on the clock of this machine."""
        seen, over = list[tuple[float, int, int]](), threading.Event()

        def look() -> None:
            while True:
                seen.append((time.perf_counter(), self.up, self.down))
                if over.wait(every):
                    return

        watching = threading.Thread(target=look)
        watching.start()
        try:
            yield seen
        finally:
            over.set()
            watching.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.join()


def _lead(door: socket.socket, port: int, delay: float, counts: Any) -> None:
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(door, port, delay, counts))


async def _serve(door: socket.socket, port: int, delay: float, counts: Any) -> None:
    loop = asyncio.get_running_loop()

    async def copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter, way: int) -> None:
        def later(act: Callable[..., Any], *arguments: Any) -> None:
            if delay:
                loop.call_later(delay, act, *arguments)
            else:
                act(*arguments)

        with contextlib.suppress(OSError):
            while data := await source.read(PIECE):
                counts[way] += len(data)
                later(sink.write, data)
        later(sink.close)

    async def lead(near: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        try:
            far, on = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            back.close()
            return
        for writer in (back, on):
            raw = writer.get_extra_info("socket")
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await asyncio.gather(copy(near, on, 0), copy(far, back, 1))

    server = await asyncio.start_server(lead, sock=door, backlog=1024)
    async with server:
        await server.serve_forever()
