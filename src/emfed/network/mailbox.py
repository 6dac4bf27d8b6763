"""Messages as files, for platforms that carry them: what is in a folder here appears in one there.

A platform for federated analyses (Flower, NVFlare, vantage6) starts programs that come from its
server, so what it starts at a site should see neither rows nor keys. A courier is all that it runs:
it moves files between a site's mailbox and the server's. Whoever has keys and rows is a process of
an account of its own, on the other side of the mailbox.

A mailbox has two folders, ``up`` for what goes to the relay and ``down`` for what comes from it;
the server has one mailbox for each site. Messages may be lost, late or repeated: a member says
again what was not followed by anything.

Decision: docs/decisions/024-engines-are-transports.md
"""

from __future__ import annotations

import contextlib
import itertools
import os
import stat
import threading
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, final

from emfed.network.exchange.statements import LARGEST_MESSAGE

if TYPE_CHECKING:
    from emfed.network.exchange.relay_server import RelayServer

UP, DOWN = "up", "down"
LOOK_SECONDS = 0.1
"""Between two looks into a folder."""
ANSWER_SECONDS = 2.0
"""For which a courier at a site waits for something to take along."""
MOST_WAITING = 64
"""Messages that wait in a folder: the oldest are lost first, and said again if they matter."""
GREETING = bytes(8)
"""Asks a relay which runs there are: a message of no run."""
GREETING_SECONDS = 5.0
"""Between two of them: a relay may have begun anew."""
SILENCE_SECONDS = 60.0
"""After so long without a message the next one is a new connection."""
OVER = "over"
"""The file beside the mailboxes of a server that says that nothing more is to be carried."""
_WHOLE = ".message"


@final
class Letters:
    """The messages of one folder, in order; whoever takes one takes it away.

    Parameters
    ----------
    folder : Path
        It is made if it is not there.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self._count = folder, itertools.count()
        folder.mkdir(parents=True, exist_ok=True)

    def put(self, messages: Iterable[bytes]) -> None:
        """Let messages wait; each is there as a whole or not at all."""
        for message in messages:
            for old in self._waiting()[: 1 - MOST_WAITING]:
                old.unlink(missing_ok=True)
            name = f"{time.time_ns():020}-{os.getpid()}-{next(self._count)}"
            beside = self.folder / f"{name}.new"
            beside.write_bytes(message)
            with contextlib.suppress(PermissionError):
                beside.chmod(0o660)  # a courier of the same group takes it
            beside.rename(beside.with_suffix(_WHOLE))

    def take(self) -> list[bytes]:
        """All messages that wait; what is no file of ours is thrown away."""
        found = []
        for path in self._waiting():
            message = _content(path)
            path.unlink(missing_ok=True)
            if message is not None:
                found.append(message)
        return found

    def wait(self, seconds: float) -> list[bytes]:
        """The same, once something is there or the time is over."""
        end = time.monotonic() + seconds
        while not self._waiting() and time.monotonic() < end:
            time.sleep(LOOK_SECONDS)
        return self.take()

    def _waiting(self) -> list[Path]:
        return sorted(self.folder.glob(f"*{_WHOLE}"))


def _content(path: Path) -> bytes | None:
    """What a file holds, if it is one: not what a link of the courier's leads to."""
    flags = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        handle = os.open(path, os.O_RDONLY | flags)
    except OSError:
        return None
    with os.fdopen(handle, "rb") as file:
        about = os.fstat(file.fileno())
        if not stat.S_ISREG(about.st_mode) or about.st_size > LARGEST_MESSAGE:
            return None
        return file.read(LARGEST_MESSAGE + 1)


@final
class MailboxLine:
    """A member's side of a mailbox, in place of a connection.

    Parameters
    ----------
    folder : Path
        The mailbox.
    received : callable
        Takes what comes; it must not wait.
    connected : callable
        Called when there is something to speak to.
    """

    def __init__(
        self, folder: Path, received: Callable[[bytes], None], connected: Callable[[], None]
    ) -> None:
        self._up, self._down = Letters(folder / UP), Letters(folder / DOWN)
        self._received, self._connected = received, connected

    def send(self, post: bytes) -> None:
        """Send soon; called from any thread."""
        self._up.put([post])

    def run(self, leave: threading.Event, report: Callable[[str, str], None]) -> None:
        """Carry messages until this member leaves."""
        report("state", f"messages wait in {self._up.folder.parent} for who carries them")
        greeted = heard = -SILENCE_SECONDS
        while not leave.wait(LOOK_SECONDS):
            now = time.monotonic()
            if now - greeted >= GREETING_SECONDS:
                greeted = now
                self.send(GREETING)
            for message in self._down.take():
                self._received(message)
                if now - heard >= SILENCE_SECONDS:
                    self._connected()
                heard = now


@final
class MailboxHost:
    """The mailboxes of a relay's sites, in a folder each.

    Parameters
    ----------
    server : RelayServer
        The relay.
    folder : Path
        Where the mailboxes are, by the names of sites.
    sites : collection of str
        Who may take part.
    """

    def __init__(self, server: RelayServer, folder: Path, sites: Collection[str]) -> None:
        self._leave, self._over = threading.Event(), folder / OVER
        self._over.unlink(missing_ok=True)
        self._boxes = []
        for name in sorted(sites):
            down = Letters(folder / name / DOWN)
            take = server.attach(name, lambda message, down=down: down.put([message]))  # type: ignore[misc]
            self._boxes.append((Letters(folder / name / UP), take))
        self._thread = threading.Thread(target=self._run, name="emfed-mailbox", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._leave.wait(LOOK_SECONDS):
            for up, take in self._boxes:
                for message in up.take():
                    take(message)

    def close(self) -> None:
        """Look no more, and tell couriers so."""
        self._leave.set()
        self._thread.join()
        self._over.touch()


@final
class Courier:
    """What a platform's program at the server has of the mailboxes there.

    Parameters
    ----------
    folder : str or Path
        Where the mailboxes are.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)

    @property
    def over(self) -> bool:
        """Whether nothing more is to be carried."""
        return (self._folder / OVER).exists()

    @property
    def sites(self) -> list[str]:
        """Whose mailboxes there are."""
        return sorted(path.name for path in self._folder.iterdir() if path.is_dir())

    def down(self, site: str) -> list[bytes]:
        """What waits for a site; nothing for one that is not known."""
        return Letters(self._folder / site / DOWN).take() if site in self.sites else []

    def up(self, site: str, messages: Iterable[bytes]) -> None:
        """Leave what a site said; what others say is lost."""
        if site in self.sites:
            Letters(self._folder / site / UP).put(messages)


def exchange(folder: str | Path, messages: Iterable[bytes]) -> list[bytes]:
    """What a platform's program does at a site's mailbox: leave what came, take what is said."""
    Letters(Path(folder) / DOWN).put(messages)
    return Letters(Path(folder) / UP).wait(ANSWER_SECONDS)
