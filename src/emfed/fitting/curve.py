"""The course of the objective, where rounds do not tell it: asked for at the end, for some."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, final

from emfed.core.records import Records
from emfed.core.sums import FloatArray
from emfed.fitting.asks import Statistics
from emfed.fitting.chronicle import seen_at

POINTS = 64
"""Rounds whose statistics are remembered for a curve: memory does not grow with the fit."""


@final
@dataclass
class ObjectiveCurve:
    """The places of evenly spread rounds."""

    kept: dict[int, tuple[Statistics, ...]] = field(default_factory=dict)
    _every: int = 1

    def note(self, round_: int, places: Iterable[Statistics]) -> None:
        """Remember where a round was made, if it is its turn."""
        if (round_ - 1) % self._every:
            return
        self.kept[round_] = tuple(places)
        if len(self.kept) > POINTS:
            self._every *= 2
            self.kept = {r: own for r, own in self.kept.items() if (r - 1) % self._every == 0}

    def drawn(
        self, records: Records, model: Any, mean: Callable[[Statistics], FloatArray]
    ) -> Records:
        """The records with the objective of one model in those that were remembered."""
        found = {
            round_: seen_at(place, mean(place)).objective
            for round_, places in self.kept.items()
            for place in places
            if place.model is model
        }
        return Records(replace(r, objective=found.get(r.round, r.objective)) for r in records)
