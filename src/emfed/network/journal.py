"""The record of what left a site: lines of JSON in a chain, which shows what was altered."""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, final

GENESIS = "0" * 32
"""What the first link of a journal's chain follows."""


def link(before: str, line: str) -> str:
    """The link of a line of the journal, as it is without a link, to the one before it."""
    return hashlib.sha256(f"{before}\n{line}".encode()).hexdigest()[:32]


@final
class Journal:
    """Every message that left, one JSON object a line: when, what, how large, and its content.

    Lines are a chain: ``chain`` is a digest of the line and of the one before. The file ``.head``
    beside it has how many lines there are, and the last link. So a line that was changed, put in or
    taken out is noticed, at the end, too (`check_journal`). Only the owner may read them.
    """

    def __init__(self, path: Path | None) -> None:
        self._path, self._lock = path, threading.Lock()
        self._lines, self._last = -1, GENESIS

    def write(self, **entry: Any) -> None:
        """Add a line; it is there before the message leaves."""
        if self._path is None:
            return
        stamp = datetime.now(UTC).isoformat(timespec="milliseconds")
        line = json.dumps({"time": stamp, **entry}, allow_nan=False)
        with self._lock:
            if self._lines < 0 or not self._path.exists():
                self._open(self._path)
            self._last, self._lines = link(self._last, line), self._lines + 1
            with self._path.open("a", encoding="utf-8") as file:
                file.write(f'{line[:-1]}, "chain": "{self._last}"}}\n')
            _head(self._path).write_text(f"{self._lines} {self._last}\n", encoding="ascii")

    def _open(self, path: Path) -> None:
        """Go on after the last whole line; one that a crash cut short belongs to no message."""
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
        data = path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):
            os.truncate(path, len(whole))
        lines = whole.decode(errors="replace").splitlines()
        self._lines, self._last = len(lines), _link_of(lines[-1])[1] if lines else GENESIS


def _head(path: Path) -> Path:
    return path.with_name(path.name + ".head")


def _link_of(text: str) -> tuple[str, str]:
    """A line of the journal without its link, and its link; the first one's where it has none."""
    found = re.fullmatch(r'(.*), "chain": "([0-9a-f]{32})"\}', text)
    return (text, GENESIS) if found is None else (found[1] + "}", found[2])


def check_journal(path: Path) -> tuple[int, str]:
    """How many lines a journal has, and what is wrong with it in words; empty if nothing is."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    last, begun = GENESIS, False
    for number, text in enumerate(lines, 1):
        line, mine = _link_of(text)
        if mine == GENESIS and not begun:  # written before journals were chains
            continue
        begun = True
        if mine != link(last, line):
            return len(
                lines
            ), f"line {number} does not follow the one before: one of them was altered"
        last = mine
    head = _head(path)
    if not head.exists():
        return len(lines), f"{head} is missing" if begun else ""
    count, _, told = head.read_text(encoding="ascii", errors="replace").strip().partition(" ")
    if not re.fullmatch("[0-9]{1,18}", count):
        return len(lines), f"{head} is damaged"
    if int(count) > len(lines):
        return len(lines), f"{count} lines were written and {len(lines)} are there: some were cut"
    # A crash between the two files leaves the head one line behind.
    known = [_link_of(text)[1] for text in lines[-2:]] or [GENESIS]
    if told not in known or len(lines) - int(count) > 1:
        return len(lines), "the last line is not the one that was written last"
    return len(lines), ""


def audit(path: Path) -> list[str]:
    """What a journal says of each run, for a person: the sums that this site was a part of."""
    runs: dict[str, list[dict[str, Any]]] = {}
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            entry = json.loads(text)
        except ValueError:
            continue
        if isinstance(entry, dict) and entry.get("kind") == "part" and "set" in entry:
            runs.setdefault(str(entry["run"]), []).append(entry)
    return [words for run, parts in runs.items() for words in _audited(run, parts)]


def _audited(run: str, parts: list[dict[str, Any]]) -> list[str]:
    """A line on the run, and one for each kind of sum in each set of sites."""
    size, begun, last = sum(one["bytes"] for one in parts), parts[0]["time"], parts[-1]["time"]
    told = {(one["exchange"], one["about"]) for one in parts}
    found = [f"run {run}, {begun} to {last}: in {len(told)} sums, {size:,} bytes"]
    kinds: dict[tuple[str, str, bool], set[tuple[int, str]]] = {}
    for one in parts:
        key = (one["content"], ", ".join(one["set"]), one["masked"])
        kinds.setdefault(key, set()).add((one["exchange"], one["about"]))
    for (words, sites, masked), which in kinds.items():
        how = "masked" if masked else "not masked"
        found.append(f"  {len(which)} times {words}; {how}, over {sites}")
    return found
