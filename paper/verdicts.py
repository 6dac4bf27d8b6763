"""What is expected of an experiment, and whether it came so."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, final

import numpy as np

from emfed.core.configuration import check_keys
from emfed.core.errors import EmfedError
from paper.config import packaged

_BOUNDS = ("at_least", "at_most", "value", "tolerance")


@final
@dataclass(frozen=True)
class Verdict:
    """A claim, the value that came nearest to breaking it (over seeds), and whether it holds."""

    experiment: str
    name: str
    value: float
    expected: str
    holds: bool
    values: Sequence[float]
    """The measure for every seed: each of them must hold."""

    def plain(self) -> dict[str, Any]:
        """The verdict as JSON types; numbers that are not finite become None."""
        return {
            **asdict(self),
            "value": finite(self.value),
            "values": [finite(value) for value in self.values],
        }


def finite(value: float) -> float | None:
    """JSON has no infinities."""
    return float(value) if math.isfinite(value) else None


def judge(
    name: str, measures: Mapping[str, Iterable[float]], quick: bool, lenient: bool = False
) -> list[Verdict]:
    """The verdicts of ``expected.json``.

    Each entry names a measure and bounds: ``at_least``, ``at_most``, or a ``value`` with a relative
    ``tolerance``. ``quick`` has the bounds of quick runs, none if they are the same; without it the
    claim is about full runs alone, and with ``full = false`` about quick ones alone. A claim with
    ``optional`` is about data that may not be here (`not_judged`). ``lenient`` passes over claims
    on what was not measured, as with settings of the user's own.
    """
    out = []
    for entry in _claims(name, quick):
        if entry["measure"] not in measures:
            if lenient or entry.get("optional"):
                continue
            raise EmfedError(
                f"{name}/expected.json: no measure {entry['measure']!r} among {list(measures)}."
            )
        bounds = (entry["quick"] or entry) if quick else entry
        values = [float(value) for value in measures[entry["measure"]]]
        low, high = _interval(bounds)
        out.append(_verdict(name, entry["name"], values, low, high, _words(bounds)))
    return out


def not_judged(name: str, measures: Mapping[str, Iterable[float]], quick: bool) -> list[str]:
    """Claims about data that are not here."""
    claims = _claims(name, quick)
    return [c["name"] for c in claims if c.get("optional") and c["measure"] not in measures]


def _claims(name: str, quick: bool) -> list[dict[str, Any]]:
    """The entries of ``expected.json`` that are about this version."""
    where, keys = f"{name}/expected.json", ("name", "measure", "quick", "full", "optional")
    expected = json.loads(packaged(name, "expected.json"))
    check_keys(expected, ("seeds", "verdicts"), where)
    for entry in expected["verdicts"]:
        check_keys(entry, (*keys, *_BOUNDS), where)
        check_keys(entry.get("quick", {}), _BOUNDS, where)
    if quick:
        return [entry for entry in expected["verdicts"] if "quick" in entry]
    return [entry for entry in expected["verdicts"] if entry.get("full", True)]


def _verdict(
    experiment: str, name: str, values: list[float], low: float, high: float, expected: str
) -> Verdict:
    margins = [-math.inf if math.isnan(v) else min(v - low, high - v) for v in values]
    worst = int(np.argmin(margins))
    holds = all(low <= value <= high for value in values)  # False for NaN
    return Verdict(experiment, name, values[worst], expected, holds, values)


def _interval(bounds: Mapping[str, Any]) -> tuple[float, float]:
    if "value" in bounds:
        reach = abs(bounds["value"]) * bounds["tolerance"]
        return bounds["value"] - reach, bounds["value"] + reach
    return bounds.get("at_least", -math.inf), bounds.get("at_most", math.inf)


def _words(bounds: Mapping[str, Any]) -> str:
    if "value" in bounds:
        return f"{bounds['value']:g} within {bounds['tolerance']:.0%}"
    both = [
        f"{word.replace('_', ' ')} {bounds[word]:g}"
        for word in ("at_least", "at_most")
        if word in bounds
    ]
    return " and ".join(both)
