"""Doors between a site and a server: every byte passes, and may be counted, delayed or kept."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable

Bytes = Callable[[bytes], None]


class Door:
    """A TCP port that leads to another one.

    ``delay`` is in seconds, ``rate`` in bytes a second and each way. `stall` keeps all bytes back
    without closing anything, as a router does that was switched off. `cut_after` closes the
    connections when so many more bytes have gone up. With ``proxy`` it is an HTTP proxy that knows
    CONNECT, and leads to the target whatever name it is given.
    """

    def __init__(
        self,
        port: int,
        *,
        delay: float = 0.0,
        rate: float | None = None,
        proxy: str | None = None,
    ) -> None:
        self.delay, self.rate, self._target, self._proxy = delay, rate, port, proxy
        self.up = self.down = self.connections = 0
        self.asked: list[str] = []
        self._left: int | None = None
        self._flowing = threading.Event()
        self._flowing.set()
        self._sockets: list[socket.socket] = []
        self._door = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._door.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def stall(self) -> None:
        self._flowing.clear()

    def flow(self) -> None:
        self._flowing.set()

    def cut_after(self, up: int) -> None:
        self._left = up

    def cut(self) -> None:
        for end in self._sockets:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        self._sockets.clear()

    def close(self) -> None:
        self._door.close()
        self.cut()
        self.flow()

    def __enter__(self) -> Door:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._door.accept()
                threading.Thread(target=self._lead, args=(near,), daemon=True).start()

    def _lead(self, near: socket.socket) -> None:
        self.connections += 1
        if self._proxy is not None:
            request = b""
            while b"\r\n\r\n" not in request:
                request += near.recv(4096)
            self.asked.append(request.decode().splitlines()[0])
            near.sendall(f"HTTP/1.1 {self._proxy}\r\n\r\n".encode())
            if not self._proxy.startswith("200"):
                near.close()
                return
        try:
            far = socket.create_connection(("127.0.0.1", self._target))
        except OSError:
            near.close()
            return
        self._sockets += [near, far]
        threading.Thread(target=self._copy, args=(far, near, "down"), daemon=True).start()
        self._copy(near, far, "up")

    def _copy(self, source: socket.socket, sink: socket.socket, way: str) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 14):
                self._flowing.wait()
                setattr(self, way, getattr(self, way) + len(data))
                if self.delay:
                    time.sleep(self.delay)
                if self.rate:
                    time.sleep(len(data) / self.rate)
                if way == "up" and self._left is not None:
                    self._left -= len(data)
                    if self._left < 0:
                        self._left = None
                        sink.sendall(data[: len(data) // 2])
                        break
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
