"""Addresses, ports and folders: what every engine checks before it listens or calls."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from emfed.core.errors import SettingsError

GLANCE_SECONDS = 1.0
"""Others hold a lock for a moment, to see whether its owner lives: that is not worth a word."""


def split_address(address: str, smallest_port: int = 1) -> tuple[str, int]:
    """``host:port`` or ``[v6]:port``."""
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdigit() or not smallest_port <= int(port) < 65536:
        raise SettingsError(
            f"an address looks like em.example.org:9400 or [::1]:9400; got {address!r}."
        )
    return host, int(port)


def join_address(host: str, port: int) -> str:
    """The inverse of `split_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether an address is this machine's to itself."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def printable(words: str) -> str:
    """Words of the other end, without what could command a terminal."""
    return "".join(c if c.isprintable() else "?" for c in words)


def free_port() -> int:
    """A port of this machine that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def check_insecure_server(host: str) -> None:
    """Without TLS a server listens on this machine's own address only."""
    if not is_loopback(host):
        raise SettingsError(
            "without TLS the server binds this machine's own address only: use --host "
            f"127.0.0.1, or make keys with `emfed keys server`; got {host}."
        )


def check_insecure_site(address: str) -> None:
    """Without TLS a site calls this machine only."""
    if not is_loopback(split_address(address)[0]):
        raise SettingsError(
            "without TLS a site joins a server on its own machine only: give --ca and --key "
            f"instead of --insecure; got {address}."
        )


@contextlib.contextmanager
def alone(
    path: Path, patience: float = 0.0, waiting: Callable[[], None] | None = None
) -> Iterator[bool]:
    """Whether nobody else holds this lock, after so many seconds at most; if so, hold it.

    ``waiting`` is called once, if somebody holds it for more than a glance. The lock dies with
    its holder, however that ends.
    """
    began = time.monotonic()
    with path.open("a+b") as file:
        while not _lock(file.fileno()):
            waited = time.monotonic() - began
            if waited >= patience:
                yield False
                return
            if waiting is not None and waited > GLANCE_SECONDS:
                waiting()
                waiting = None
            time.sleep(0.1)
        yield True


def _lock(handle: int) -> bool:
    """Lock an open file for this process, or say that another has it."""
    try:
        if sys.platform == "win32":
            import msvcrt

            os.lseek(handle, 1 << 30, os.SEEK_SET)  # beyond the text: locked bytes can't be read
            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # so say Linux and macOS, and so says Windows
        return False
    return True


REPEAT_SECONDS = 0.05
"""Before a signal that a destructor swallowed is raised again: it has ended by then."""


class Terminated(KeyboardInterrupt):
    """SIGTERM, where Ctrl-C means something else."""


@contextlib.contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """Within, SIGTERM and Ctrl-C both raise KeyboardInterrupt at once, and every ``finally`` runs.

    SIGTERM raises `Terminated`, which is one.

    (`fit` would take Ctrl-C as the wish to end well after the round; a run over a network is rather
    to be gone on with.) Only the main thread hears signals; elsewhere this does nothing.
    """

    last = signal.SIGTERM

    def interrupt(number: int, _: object) -> None:
        nonlocal last
        last = signal.Signals(number)
        raise Terminated if last is signal.SIGTERM else KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    hook = sys.unraisablehook

    def again(lost: Any) -> None:
        """Raise once more what a destructor swallowed: that of a generator left early, say."""
        if not issubclass(lost.exc_type, KeyboardInterrupt):
            hook(lost)
            return
        timer = threading.Timer(REPEAT_SECONDS, signal.raise_signal, (last,))
        timer.daemon = True
        timer.start()

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:  # as a shell has it for jobs in the background
            signal.signal(number, interrupt)
    sys.unraisablehook = again
    try:
        yield
    finally:
        sys.unraisablehook = hook
        for number, handler in before.items():
            signal.signal(number, handler)
