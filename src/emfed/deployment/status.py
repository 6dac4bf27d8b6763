"""What a server leaves in its folder for people and for ``emfed status``; and its log."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import logging.handlers
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from datetime import UTC, datetime
from math import inf
from pathlib import Path
from typing import Any, final

from emfed.core.errors import OtherRelease, WireError
from emfed.core.storage import read_json_file
from emfed.core.wire import SAME_RELEASE, Kind, Reason, decode_refusal, kind_of, open_refusal
from emfed.deployment.orders import Door
from emfed.network import Transport
from emfed.network.addresses import printable

logger = logging.getLogger(__name__)
STATUS, LOCK, HOST_LOCK = "status.json", "server.lock", "host.lock"
KEPT = ("round", "up", "down", "refusals")
"""What a program that goes on takes over from the status of the one before."""
LONGEST_LOG = 5_000_000
"""Bytes after which a log begins anew."""
OLDER_LOGS = 3
"""Older parts of a log that are kept."""
SLOW_SECONDS, REPEAT_SECONDS = 3.0, 60.0
"""An answer that took so long is logged, and how often of one site. Rounds take milliseconds
besides what is computed; nothing was measured to choose it."""
BEAT_SECONDS, LATE_SECONDS = 10.0, 5.0
"""Between two words about answers that are still to come, and after how long there are any: well
within the minute after which `health` takes a run for stalled."""
MOST_NAMED = 8
"""Sites that a line names."""
NO_ROOM = errno.ENOSPC, errno.EDQUOT, errno.EFBIG
StatusReport = Callable[[dict[str, Any]], None]


@contextlib.contextmanager
def bearing_full_disks() -> Iterator[None]:
    """Within, words for people are lost where a disk has no room for them; nothing ends."""
    try:
        yield
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise


@final
class Status:
    """Where the run stands, in a file that is always whole; ``emfed status`` reads it."""

    def __init__(self, folder: Path, report: StatusReport | None = None) -> None:
        self._path, self._report = folder / STATUS, report
        self._content: dict[str, Any]
        before = read_status(folder)
        kept = before if before.get("state") == "finished" else KEPT
        self._content = {name: before[name] for name in kept if name in before}
        self._content["pid"] = os.getpid()
        self._saying = threading.RLock()

    def __getitem__(self, name: str) -> Any:
        return self._content.get(name, 0)

    def say(self, state: str, **more: Any) -> None:
        """Write what changed, and report it."""
        with self._saying:
            self._content |= {"state": state, "time": time.time(), "late": "", **more}
            beside = self._path.with_suffix(".new")
            beside.write_text(json.dumps(self._content) + "\n", encoding="utf-8")
            beside.replace(self._path)
            if self._report is not None:
                self._report(dict(self._content))

    @contextlib.contextmanager
    def while_waiting(self, transport: Noted) -> Iterator[None]:
        """Within, say every some seconds which answers are still to come: a step may take long."""
        over = threading.Event()

        def watch() -> None:
            while not over.wait(BEAT_SECONDS):
                late = transport.late()
                if late and self["state"] in ("running", "waiting"):
                    with contextlib.suppress(OSError):  # of a full disk: the run meets it, too
                        # `health` goes by the time of what happened last, which this is not.
                        now = time.time()
                        self.say(self["state"], late=late, time=self["time"], beat=now)

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def read_status(folder: Path) -> dict[str, Any]:
    """What the server's program last said; nothing if it never spoke."""
    try:
        content = read_json_file(folder / STATUS)
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


class _AsJson(logging.Formatter):
    """A line of JSON for each record."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


class _LogFile(logging.handlers.RotatingFileHandler):
    """A log that says once, in words, that it cannot be written: a full disk is no traceback.

    The first line that can be written again says how many could not.
    """

    lost, why = 0, ""

    def emit(self, record: logging.LogRecord) -> None:
        if lost := self.lost:
            self.lost = 0
            words = f"{lost} lines before this one could not be written: {self.why}"
            super().emit(logger.makeRecord(__name__, logging.WARNING, "", 0, words, (), None))
            self.lost = lost if self.lost else 0
        super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exception()
        if not isinstance(error, OSError):
            super().handleError(record)
            return
        if not self.why:
            words = f"emfed: {self.baseFilename} cannot be written: {error.strerror}"
            with contextlib.suppress(OSError):
                sys.stderr.write(f"{words}. Make room: until then nothing is logged.\n")
        self.lost, self.why = self.lost + 1, str(error.strerror)


@contextlib.contextmanager
def logging_to(
    path: Path, as_json: bool = False, leave_out: Collection[str] = ()
) -> Iterator[None]:
    """Within, what the library says goes to a file, which begins anew when it is long.

    ``leave_out`` names threads whose lines belong elsewhere.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = _LogFile(path, maxBytes=LONGEST_LOG, backupCount=OLDER_LOGS, encoding="utf-8")
    plain = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(_AsJson() if as_json else plain)
    handler.addFilter(lambda record: record.threadName not in leave_out)
    ours = logging.getLogger("emfed")
    ours.addHandler(handler)
    ours.setLevel(logging.INFO)
    try:
        yield
    finally:
        ours.removeHandler(handler)
        handler.close()


@final
class Noted(Transport):
    """A transport that keeps, for people, what went through it; and leaves out who is shut out.

    ``refusals`` has the workers whose last answer was that they will not take part, or not now.
    ``contacts`` has for each worker when it last answered and how many seconds that took, and
    ``traffic`` messages and bytes by direction and kind.
    """

    def __init__(self, inner: Transport, door: Door | None = None) -> None:
        self._inner, self._door = inner, Door(None, None) if door is None else door
        self.refusals: dict[str, str] = {}
        self.objections: dict[str, str] = {}
        """What else the last answers of workers were that told nothing, in words."""
        self.contacts: dict[str, tuple[float, float]] = {}
        self.traffic: dict[str, dict[str, list[int]]] = {"up": {}, "down": {}}
        self._known: set[str] = set()
        self._slow: dict[str, float] = {}
        """When slow answers were last logged."""
        self.on_silence: Callable[[list[str]], None] | None = None
        """Is told who did not answer, or not now, when that was waited for in vain."""
        self._asked: tuple[float, set[str]] = (0.0, set())
        """When messages were sent, and whose answers are still to come."""
        self.wait_until = 0.0
        """Until when, by `time.monotonic`, an opening waits for those who are not ready."""

    @property
    def between_machines(self) -> bool:
        return self._inner.between_machines

    def workers(self) -> list[str]:
        here = self._inner.workers()
        self._known |= {*here}
        out = self.shut_out()
        return [key for key in here if key not in out]

    def shut_out(self) -> Mapping[str, str]:
        return self._door.out(self._known)

    def everybody(self) -> set[str]:
        """Whose key the server has, and who was here."""
        return self._door.may_join() | self._known

    def away(self) -> str:
        """Who could be here and is not, in words; empty if nobody."""
        gone = sorted(self.everybody() - {*self._inner.workers()})
        names = [
            f"{name} ({'left' if name in self._known else 'has not called yet'})"
            for name in gone
            if name not in self.shut_out()
        ]
        more = len(names) - MOST_NAMED
        return ", ".join([*names[:MOST_NAMED], *([f"and {more} more"] if more > 0 else [])])

    def waits(self) -> bool:
        return time.monotonic() < self.wait_until

    def deliver(
        self, messages: Mapping[str, bytes], deadline: float
    ) -> Iterator[tuple[str, bytes]]:
        self._known |= {*messages}
        out, began, heard = self.shut_out(), time.monotonic(), set[str]()
        sent = {key: message for key, message in messages.items() if key not in out}
        for message in sent.values():
            self._count("down", message)
        self._asked = began, {*sent}
        waited = False
        try:
            for key, answer in self._inner.deliver(sent, deadline):
                self._asked[1].discard(key)
                self.contacts[key] = time.time(), (seconds := time.monotonic() - began)
                self._note_slow(key, seconds)
                self._count("up", answer)
                self.note(key, answer)
                heard.add(key)
                yield key, answer
            waited = True
        finally:  # who takes the answers may have heard enough
            self._asked = began, set()
            silent = sent.keys() & (self.refusals | self.objections).keys()
            silent |= sent.keys() - heard if waited else set()
            if silent and self.on_silence is not None:
                self.on_silence(sorted(silent))

    def late(self) -> str:
        """Who was asked some time ago and has not answered, in words; empty if nobody."""
        began, missing = self._asked
        seconds, names = time.monotonic() - began, ", ".join(sorted(missing.copy()))
        return (
            f"no answer for {seconds:.0f} s from {names}"
            if names and seconds > LATE_SECONDS
            else ""
        )

    def _note_slow(self, key: str, seconds: float) -> None:
        """Log an answer that was long in coming, the same site's once a minute."""
        now = time.monotonic()
        if seconds > SLOW_SECONDS and now - self._slow.get(key, -inf) > REPEAT_SECONDS:
            self._slow[key] = now
            logger.warning("%s took %.1f s to answer", key, seconds)

    def _count(self, direction: str, message: bytes) -> None:
        try:
            kind = kind_of(message).name.lower().replace("_", " ")
        except WireError:
            kind = "unreadable"
        row = self.traffic[direction].setdefault(kind, [0, 0])
        row[0] += 1
        row[1] += len(message)

    def note(self, key: str, answer: bytes) -> None:
        """Keep or forget a refusal; its words come from elsewhere and may hold anything."""
        self.refusals.pop(key, None)
        self.objections.pop(key, None)
        try:
            if kind_of(answer) is Kind.REFUSAL:
                reason, words, _ = decode_refusal(open_refusal(answer)[1])
                if reason in (Reason.REFUSED, Reason.NOT_NOW):
                    self.refusals[key] = printable(words)
                elif reason is Reason.DAMAGED:
                    words = f"it does not understand a message ({printable(words)})"
                    self.refusals[key] = f"{words}: if that stays so, {SAME_RELEASE}."
                else:
                    self.objections[key] = printable(words)
        except OtherRelease as error:
            self.refusals[key] = str(error)
        except WireError:
            return
