"""What people see of a run or a site: one dictionary for the page, a terminal and monitoring."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

from emfed.core.errors import EmfedError
from emfed.core.privacy import epsilon_of
from emfed.deployment.approval import pending_fits
from emfed.deployment.console import health, page_address
from emfed.deployment.site import JOURNAL, MEMORY, read_about
from emfed.deployment.status import LOCK, read_status
from emfed.network.addresses import alone
from emfed.network.rules import SiteRules
from emfed.network.spending import Allowance

LAST_MESSAGES = 100
"""Messages that a site's page shows; the journal has them all."""


def status_line(status: Mapping[str, Any]) -> str:
    """Where a run stands, in one line."""
    line, late = _line(status), status.get("late")
    return f"{line}; {late}" if line and late else line


def _line(status: Mapping[str, Any]) -> str:
    state = status.get("state")
    if state in ("waiting", "paused"):
        after = f" after round {status['round']}" if state == "paused" and "round" in status else ""
        return f"{state}{after}: {status.get('why', '')}"
    if state == "failed":
        return f"failed: {status.get('error', '')}"
    if state == "running" and "round" not in status:
        return "the run begins"
    if state not in ("running", "finished"):
        return ""
    sent = f"{status.get('up', 0) / 1000:.1f} kB up, {status.get('down', 0) / 1000:.1f} kB down"
    if raw := status.get("raw"):
        sent += f" (the rows themselves are {raw / 1000:,.1f} kB)"
    stages = status.get("stages", 1)
    tail = f", in {stages} stages" if stages > 1 else ""
    tail += f"; {status['chosen']} components were chosen" if status.get("chosen") else ""
    if state == "finished" and status.get("why"):  # who is still to be told, or was not
        tail += f"; {status['why']}"
    if state == "finished" and status.get("converged") and not status.get("doubts"):
        # Without |H|²: the last round is often a step that only looked whether more is to be had.
        rounds = status.get("round", 0)
        return f"finished: converged after {rounds} rounds, {sent}, start included{tail}"
    squared = status.get("squared_H")
    size = "" if squared is None else f", |H|² {squared:.2e}"
    ended = "finished, but not well" if status.get("doubts") else "finished"
    head = f"{ended}: " if state == "finished" else ""
    if state == "finished" and status.get("stopped") == "callback":
        head += "ended by the operator, "
    asked = status.get("asked")  # not known just after a resumption
    answers = f"{status.get('answered', 0)} of {asked} sites answered, " if asked else ""
    where = f"round {status.get('round', 0)} of {status.get('rounds', '?')}"
    return f"{head}{where}{size}, {answers}{sent}{tail}"


def run_view(folder: Path, title: str = "", **about: Any) -> dict[str, Any]:
    """A server's folder, with what else is known about it."""
    found = read_status(folder)
    with alone(folder / LOCK) as gone:
        pass
    about |= {"title": title or folder.name, "working": not gone}
    state = {**found, **about, "line": status_line(found)}
    return state | {"reasons": health(state)[1]}


@final
class SiteView:
    """A site's folder; the journal is read on from where it was read before."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._at = folder, 0
        self._last: deque[dict[str, Any]] = deque(maxlen=LAST_MESSAGES)
        self.kinds: dict[str, list[int]] = {}
        self.warnings: list[str] = []

    def read(self) -> None:
        """Take in what the journal has gained; it may have begun anew."""
        path = self._folder / JOURNAL
        if not path.exists() or path.stat().st_size < self._at:
            self._at, self.kinds, self.warnings = 0, {}, []
            self._last.clear()
        if not path.exists():
            return
        with path.open("rb") as file:
            file.seek(self._at)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._at += len(whole)
        for line in whole.decode(errors="replace").splitlines():
            try:
                entry = json.loads(line)
                kind, size, content = entry["kind"], int(entry.get("bytes", 0)), entry["content"]
            except (ValueError, KeyError, TypeError):
                continue
            if kind == "warning":
                self.warnings.append(str(content))
                continue
            row = self.kinds.setdefault(kind, [0, 0])
            row[0] += 1
            row[1] += size
            self._last.append(entry)

    @property
    def last(self) -> dict[str, Any] | None:
        """The last message that left."""
        return self._last[-1] if self._last else None

    def __call__(self) -> dict[str, Any]:
        """All that the page shows."""
        self.read()
        status = read_status(self._folder)
        try:
            rules = read_about(self._folder)["rules"]
        except (EmfedError, OSError, KeyError):
            rules = {}
        number = sum(row[0] for row in self.kinds.values())
        epsilon = _given_away(self._folder, rules)
        given = "" if epsilon is None else f"; epsilon {epsilon:.3g} given away over all runs"
        return {
            "title": self._folder.name,
            "state": "site",
            "time": status.get("time", time.time()),
            "page": page_address(self._folder),
            "line": f"{status.get('why', '')}; {number} messages left so far{given}",
            "epsilon": epsilon,
            "reasons": [f"look at your rows: {words}" for words in self.warnings],
            "traffic": {"up": self.kinds},
            "messages": list(reversed(self._last)),
            "rules": rules,
            "pending": pending_fits(self._folder),
        }


def _given_away(folder: Path, rules: Mapping[str, Any]) -> float | None:
    """Epsilon at the owner's delta over all private runs; None if there was none."""
    second = rules.get("second_ledger")
    spent = Allowance(folder / MEMORY, copies=[] if second is None else [Path(second)]).read()[0]
    return epsilon_of(spent, rules.get("delta", SiteRules.delta)) if spent else None
