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
from emfed.network.owner_rules import SiteRules
from emfed.network.spending import Allowance

LAST_MESSAGES = 100
"""Messages that a site's page shows; the journal has them all."""


def status_line(status: Mapping[str, Any]) -> str:
    """Where a run stands, in one line."""
    state, why = status.get("state"), status.get("why", "")
    if state in ("waiting", "paused"):
        after = f" after round {status['round']}" if state == "paused" and "round" in status else ""
        return f"{state}{after}: {why}"
    if state == "failed":
        return f"failed: {status.get('error', '')}"
    if state == "told":
        return str(why)
    if state == "running" and "round" not in status:
        return "the run begins"
    if state not in ("running", "finished"):
        return ""
    sent = f"{status.get('up', 0) / 1000:.1f} kB up, {status.get('down', 0) / 1000:.1f} kB down"
    if raw := status.get("raw"):
        sent += f" (the rows themselves are {raw / 1000:,.1f} kB)"
    if state == "running":
        return f"{_round(status)}, {sent}"
    parts = [_ending(status), f"{sent}, start included", _counted(status)]
    if status.get("chosen"):
        parts.append(f"{status['chosen']} components were chosen")
    return "; ".join([", ".join(parts[:2]), *filter(None, [*parts[2:], why])])


def _round(status: Mapping[str, Any]) -> str:
    """The last round; nothing of it is sure before all sites have signed the end."""
    gain, left = status.get("gain"), status.get("left")
    words = f"round {status.get('round', 0)} of {status.get('rounds', '?')}"
    words += "" if gain is None else f", EM gains {gain:.2g} {status.get('per_row', '')}"
    return words + ("" if left is None else f", about {left:.1g} left")


def _ending(status: Mapping[str, Any]) -> str:
    """How a run that is over ended."""
    rounds, good = status.get("round"), not status.get("doubts")
    if rounds is None:
        return "finished"
    if status.get("converged") and good:
        return f"finished: converged after {rounds} rounds"
    ended = "finished" if good else "finished, but not well"
    whose = "ended by the operator, " if status.get("stopped") == "callback" else ""
    return f"{ended}: {whose}round {rounds} of {status.get('rounds', '?')}"


def _counted(status: Mapping[str, Any]) -> str:
    """Who of those that began is in the model, where that is not everybody."""
    began, counted = status.get("began") or {}, status.get("counted") or {}
    if not began or began == counted:
        return ""
    whom = ", ".join(f"{name}: {why}" for name, why in (status.get("refusals") or {}).items())
    return (
        f"{counted.get('sites')} sites with {counted.get('rows')} rows are in the model, of "
        f"{began['sites']} with {began['rows']} that began" + (f" ({whom})" if whom else "")
    )


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
