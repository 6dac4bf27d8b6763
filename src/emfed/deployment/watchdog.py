"""Words to systemd, where it started the program: it is ready, and its loop still turns."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from typing import final

LIVES_SECONDS = 10.0
"""Between two words; the units wait for 120 s."""


@final
class Watchdog:
    """Tells systemd that a loop turns; without systemd it says nothing.

    Call it in each turn of the loop that does the work: one that hangs is then started again.
    """

    def __init__(self) -> None:
        self._told = -LIVES_SECONDS
        say("READY=1")

    def __call__(self) -> None:
        """The loop has come round."""
        now = time.monotonic()
        if now - self._told >= LIVES_SECONDS:
            self._told = now
            say("WATCHDOG=1")


def say(words: str) -> None:
    """Send a word as sd_notify(3) does; whether it is heard changes nothing here."""
    place = os.environ.get("NOTIFY_SOCKET", "")
    if not place:
        return
    address = "\0" + place[1:] if place.startswith("@") else place
    with (
        contextlib.suppress(OSError, AttributeError),  # other systems have no such sockets
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line,
    ):
        line.sendto(words.encode(), address)
