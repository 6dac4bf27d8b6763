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
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, final

from emfed.core.storage import read_json_file

logger = logging.getLogger(__name__)
STATUS, LOCK = "status.json", "server.lock"
KEPT = ("round", "up", "down", "refusals", "began", "mark", "since", "untold")
"""What a program that goes on takes over from the status of the one before."""
LONGEST_LOG = 5_000_000
"""Bytes after which a log begins anew."""
OLDER_LOGS = 3
"""Older parts of a log that are kept."""
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
            self._content |= {"state": state, "time": time.time(), **more}
            beside = self._path.with_suffix(".new")
            with bearing_full_disks():
                beside.write_text(json.dumps(self._content) + "\n", encoding="utf-8")
                beside.replace(self._path)
            if self._report is not None:
                self._report(dict(self._content))

    def repeat(self) -> None:
        """Report where the run stands, once more."""
        if self._report is not None:
            self._report(dict(self._content))

    def tell(self, words: str) -> None:
        """Report words that are no state of the run."""
        logger.warning("%s", words)
        if self._report is not None:
            self._report({**self._content, "state": "told", "why": words})


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
def logging_to(path: Path, as_json: bool = False) -> Iterator[None]:
    """Within, what the library says goes to a file, which begins anew when it is long."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = _LogFile(path, maxBytes=LONGEST_LOG, backupCount=OLDER_LOGS, encoding="utf-8")
    plain = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(_AsJson() if as_json else plain)
    ours = logging.getLogger("emfed")
    ours.addHandler(handler)
    ours.setLevel(logging.INFO)
    try:
        yield
    finally:
        ours.removeHandler(handler)
        handler.close()
