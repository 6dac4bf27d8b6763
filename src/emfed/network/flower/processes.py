"""Processes that we start: quiet towards the outside, and gone when we are gone."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path

from emfed.core.errors import EmfedError, FederationError

GRACE = 8.0
"""Seconds from asking a process to end to ending it."""
LONGEST_LOG = 20_000_000
"""Bytes after which a log begins anew: Flower writes a line for every look for work."""
SETTINGS = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
    "PYTHONUNBUFFERED": "1",
}
"""For every process of Flower: it calls no one but the SuperLink, and starts tasks promptly."""


def environment(home: Path, **more: str) -> dict[str, str]:
    """The environment of Flower's processes, with a home that is not the user's."""
    home.mkdir(parents=True, exist_ok=True)
    home_of_flower = {"FLWR_HOME": str(home.resolve())}
    return {**os.environ, **SETTINGS, **home_of_flower, **without_proxy(), **more}


def without_proxy(*hosts: str) -> dict[str, str]:
    """Variables by which this machine is reached directly: a proxy is for the world outside."""
    names = ["localhost", "127.0.0.1", "::1", *hosts]
    return {
        name: ",".join(dict.fromkeys([*filter(None, os.environ.get(name, "").split(",")), *names]))
        for name in ("NO_PROXY", "no_proxy")
    }


def flower_command(name: str) -> list[str]:
    """A command of Flower's, run by this interpreter, wherever scripts were installed."""
    return [sys.executable, "-P", "-c", _call(console_script(name))]


def _call(reference: str) -> str:
    """A program that calls ``module:function``."""
    module, _, function = reference.partition(":")
    return f"import sys; from {module} import {function} as f; sys.exit(f())"


def make_tools(folder: Path, commands: Mapping[str, str]) -> Path:
    """A folder of programs by name, each a ``module:function``.

    Flower starts its task processes by name. With this folder as the whole search path it finds
    those listed and no other.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, reference in commands.items():
        line = " ".join(
            shlex.quote(word) for word in [sys.executable, "-P", "-c", _call(reference)]
        )
        path = folder / name
        path.write_text(f'#!/bin/sh\nexec {line} "$@"\n', encoding="utf-8")
        path.chmod(0o755)
    return folder


def console_script(name: str) -> str:
    """``module:function`` of one of Flower's commands."""
    for point in entry_points(group="console_scripts"):
        if point.name == name:
            return point.value
    raise EmfedError(f"this installation of Flower has no command {name}; see emfed[flower].")


@dataclass
class Child:
    """A process of ours, in a group of its own, that ends when this process does."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    log: Path
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)
    _from: int = field(default=0, init=False)
    """Where in the log this start begins."""
    _told: int = field(default=0, init=False)

    def start(self) -> None:
        """Start it; what it says goes to the log."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._from = log.tell()
            self.process = subprocess.Popen(
                self.command,
                env=dict(self.environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_die_with_parent if sys.platform == "linux" else None,
            )

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self.process is not None and self.process.poll() is None

    @property
    def code(self) -> int | None:
        """How it ended; None while it runs."""
        return None if self.process is None else self.process.poll()

    def stop(self, grace: float = GRACE) -> None:
        """Ask it to end, wait, and then end whatever is left of its group."""
        if self.process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(grace)
        self.kill()

    def kill(self) -> None:
        """End it and all of its group at once."""
        if self.process is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def words(self) -> str:
        """What it has said since it was last started."""
        with contextlib.suppress(OSError), self.log.open("rb") as file:
            file.seek(self._from)
            return file.read().decode(errors="replace")
        return ""

    def news(self) -> str:
        """What it has said since this was last called; whole lines."""
        with contextlib.suppress(OSError), self.log.open("rb") as file:
            file.seek(max(self._told, self._from))
            new = file.read()
            whole = new[: new.rfind(b"\n") + 1]
            self._told = max(self._told, self._from) + len(whole)
            return whole.decode(errors="replace")
        return ""

    def trim(self, most: int = LONGEST_LOG) -> None:
        """Begin the log anew when it is long, and keep one older part: writers append."""
        if self.log.exists() and self.log.stat().st_size > most:
            shutil.copyfile(self.log, self.log.with_suffix(".old"))
            os.truncate(self.log, 0)
            self._from = self._told = 0

    def tail(self, lines: int = 5) -> str:
        """Its last words, on one line."""
        return " ".join([line for line in self.words().splitlines() if line.strip()][-lines:])


def _die_with_parent() -> None:
    """In the child, on Linux: a SIGTERM when the parent is gone, even by kill -9."""
    death_signal = 1
    ctypes.CDLL(None).prctl(death_signal, signal.SIGTERM)


def check_platform() -> None:
    """Refuse a system on which groups of processes cannot be ended together."""
    if sys.platform == "win32":
        raise FederationError(
            'the engine flower does not run on Windows: use engine = "websocket" in [server], and '
            "--engine websocket at the sites."
        )


def stop_all(children: Sequence[Child], grace: float = GRACE) -> None:
    """End them together, the last started first."""
    for child in reversed(children):
        if child.alive and child.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.process.pid, signal.SIGTERM)
    end = time.monotonic() + grace
    for child in reversed(children):
        child.stop(max(0.1, end - time.monotonic()))


def wait_until(
    ready: Callable[[], bool], children: Sequence[Child], seconds: float, what: str
) -> None:
    """Wait for a condition; an error tells which process ended first, and its last words."""
    end = time.monotonic() + seconds
    while not ready():
        for child in children:
            if not child.alive:
                raise EmfedError(
                    f"{child.name} ended with code {child.code} before {what}: "
                    f"{child.tail(3)} (all of it in {child.log})"
                )
        if time.monotonic() > end:
            logs = ", ".join(str(child.log) for child in children)
            raise EmfedError(f"waited {seconds:.0f} s for {what}; see {logs or 'nothing'}.")
        time.sleep(0.1)


def port_open(host: str, port: int) -> bool:
    """Whether something listens there."""
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=1):
        return True
    return False
