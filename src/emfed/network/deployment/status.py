"""What a server leaves in its folder for people and for ``emfed status``; and its log."""

from __future__ import annotations

import json
import logging
import logging.handlers
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, final

from emfed.core.errors import WireError
from emfed.core.wire import Kind, Reason, decode_refusal, kind_of, open_refusal
from emfed.network import Transport
from emfed.network.addresses import printable

STATUS, LOCK, HOST_LOCK = "status.json", "server.lock", "host.lock"
KEPT = ("round", "up", "down", "refusals")
"""What a program that goes on takes over from the status of the one before."""
LONGEST_LOG = 5_000_000
"""Bytes after which a log begins anew; one older part is kept."""
Report = Callable[[dict[str, Any]], None]


@final
class Status:
    """Where the run stands, in a file that is always whole; ``emfed status`` reads it."""

    def __init__(self, folder: Path, report: Report | None = None) -> None:
        self._path, self._report = folder / STATUS, report
        self._content: dict[str, Any]
        before = read_status(folder)
        kept = before if before.get("state") == "finished" else KEPT
        self._content = {name: before[name] for name in kept if name in before}
        self._content["pid"] = os.getpid()

    def __getitem__(self, name: str) -> Any:
        return self._content.get(name, 0)

    def say(self, state: str, **more: Any) -> None:
        """Write what changed, and report it."""
        self._content |= {"state": state, "time": time.time(), **more}
        beside = self._path.with_suffix(".new")
        beside.write_text(json.dumps(self._content) + "\n", encoding="utf-8")
        beside.replace(self._path)
        if self._report is not None:
            self._report(dict(self._content))


def read_status(folder: Path) -> dict[str, Any]:
    """What the server's program last said; nothing if it never spoke."""
    try:
        content = json.loads((folder / STATUS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def log_to(path: Path) -> None:
    """What the library says goes to a file, which begins anew when it is long."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.handlers.RotatingFileHandler(
        path, maxBytes=LONGEST_LOG, backupCount=1, encoding="utf-8"
    )
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    ours = logging.getLogger("emfed")
    ours.addHandler(handler)
    ours.setLevel(logging.INFO)


@final
class Noted(Transport):
    """A transport that keeps the words of refusals, for people; what follows is decided elsewhere.

    ``refusals`` has the workers whose last answer was that they will not take part, or not now.
    """

    def __init__(self, inner: Transport) -> None:
        self._inner = inner
        self.refusals: dict[str, str] = {}

    @property
    def between_machines(self) -> bool:
        return self._inner.between_machines

    def workers(self) -> list[str]:
        return self._inner.workers()

    def deliver(
        self, messages: Mapping[str, bytes], deadline: float
    ) -> Iterator[tuple[str, bytes]]:
        for key, answer in self._inner.deliver(messages, deadline):
            self.note(key, answer)
            yield key, answer

    def note(self, key: str, answer: bytes) -> None:
        """Keep or forget a refusal; its words come from elsewhere and may hold anything."""
        self.refusals.pop(key, None)
        try:
            if kind_of(answer) is Kind.REFUSAL:
                reason, words, _ = decode_refusal(open_refusal(answer)[1])
                if reason in (Reason.REFUSED, Reason.NOT_NOW):
                    self.refusals[key] = printable(words)
        except WireError:
            return
