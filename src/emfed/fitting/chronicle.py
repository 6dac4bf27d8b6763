"""The rounds of a fit on sums, as whoever drives it sees them: records, bytes and limits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

import numpy as np

from emfed.algorithms.paper import Innovations
from emfed.core.ledger import Ledger
from emfed.core.records import Records, RoundRecord
from emfed.core.sums import (
    Ask,
    FloatArray,
    Gather,
    Gathers,
    Heard,
    LastSum,
    Precision,
    Sum,
)
from emfed.fitting.asks import Exact, Joint, Statistics
from emfed.fitting.many import Tracked
from emfed.fitting.settings import FitSettings
from emfed.fitting.stopping import PATIENCE, Callback, Stop

INTERRUPTED = "interrupted"
EXACT = Precision(np.ones(1), np.zeros(1), np.ones(1))
"""Of sums that nobody rounds."""


@dataclass
class Chronicle:
    """What is kept of the exchanges of one fit, and whether a limit is met.

    Parameters
    ----------
    settings : FitSettings
        What is fitted.
    ledger : Ledger
        Bytes by worker.
    callbacks : sequence of callable
        Called with each record.
    """

    settings: FitSettings
    ledger: Ledger
    callbacks: tuple[Callback, ...] = ()
    records: Records = field(default_factory=Records)
    stopped: str = ""
    """The limit that was met, "callback" or "interrupted"."""
    seconds: float = 0.0
    count: int = 0
    """Rows in all, once they are known."""
    interrupted: Callable[[], bool] = bool

    def __post_init__(self) -> None:
        workers = self.ledger.counts.shape[-1]
        self.stop: Stop = self.settings.stop(self.settings.method(workers))
        self._evaluations = 0
        self._silent = 0
        """Rounds in a row in which nobody answered."""
        self._told: dict[str, int] = {}
        """Bytes and evaluations in the records."""
        self._pending: tuple[Any, Any, float] | None = None
        self._before = RoundRecord(0, 0, workers, workers, None, 0.0, 0, 0, 0, 0, 0, 0, 0.0, 0.0)

    def note(self, ask: Ask, found: Sum, seconds: float) -> None:
        """Keep an exchange until the fit has looked at it."""
        self._evaluations += self.count * sum(_passes(one) for one in joined(ask))
        self._pending = (ask, found, seconds)

    def note_heard(self, ask: Gather | Gathers, found: Heard, seconds: float) -> None:
        """The same of an exchange in which workers were heard one by one."""
        self._evaluations += found.passes
        self._pending = (ask, found, seconds)

    def refuses(self, ask: Any) -> str | None:
        """Look back at the last exchange; tell why this one is not made, if it is not."""
        self.complete(last_of(ask))
        if self.interrupted():
            self.stopped = INTERRUPTED
            return INTERRUPTED
        if ask.purpose != "round":
            return None
        self.open_records()
        self.stopped = self.stopped or self._limit()
        return self.stopped or None

    def complete(self, last: LastSum | None) -> None:
        """Make the record of the last exchange, and show it."""
        if self._pending is None:
            return
        ask, found, seconds = self._pending
        self._pending = None
        self.seconds += seconds
        if ask.purpose != "round":
            return
        self.open_records()
        if isinstance(ask, (Gather, Gathers)):
            record = self._heard(ask, found, last)
        else:
            record = self._record(ask, found, last)
        self._append(replace(record, round=len(self.records), seconds=seconds))
        self._show(self.records[-1])

    def _show(self, record: RoundRecord) -> None:
        if any(callback(record) is True for callback in self.callbacks):
            self.stopped = self.stopped or "callback"

    def _exactly(self, ask: Ask, found: Sum) -> float | None:
        """The true |h(S)|^2, where somebody can tell."""
        return None

    def _looked(self, ask: Gather | Gathers) -> tuple[float | None, float | None]:
        """The true |h(S)|^2 and the objective at S, where somebody can tell."""
        return None, None

    def open_records(self) -> None:
        """The record of all that came before the rounds."""
        if not self.records:
            self._append(replace(self._before, seconds=self.seconds))

    def _append(self, record: RoundRecord) -> None:
        ledger = self.ledger
        totals = {
            f"{what}_{direction}": ledger.total(direction, part)
            for what, part in (("bytes", None), ("payload", "payload"))
            for direction in ("up", "down")
        } | {"evaluations": self._evaluations}
        spent = {name: total - self._told.get(name, 0) for name, total in totals.items()}
        self._told = totals
        epochs = self._evaluations / max(self.count, 1)
        self.records.append(replace(record, **spent, epochs=epochs))

    def recall(self, records: Records) -> None:
        """Go on from records of a checkpoint, with the ledger that it has."""
        self.records, self._pending, self._told = records, None, {}
        for name in ("bytes_up", "bytes_down", "payload_up", "payload_down", "evaluations"):
            self._told[name] = int(sum(getattr(record, name) for record in records))
        self._evaluations = self._told["evaluations"]
        self.seconds = sum(record.seconds for record in records)

    def _heard(self, ask: Gather | Gathers, found: Heard, last: LastSum | None) -> RoundRecord:
        assert last is not None  # a gather says what the one before came to
        squared, objective = self._looked(ask)
        answered = len(found.workers)
        self._silent = 0 if answered else self._silent + 1
        return replace(
            self._before,
            generation=last.generation,
            asked=len(ask.workers),
            answered=answered,
            squared_H=last.squared,
            step_size=last.step_size,
            guard_hits=last.hits,
            squared_h=squared,
            objective=objective,
            gain=last.gain,
        )

    def _record(self, ask: Ask, found: Sum, last: LastSum | None) -> RoundRecord:
        seen, answered = seen_in(ask, found), self._before.answered - found.missing
        gains = [one.gain for one in seen if one.gain is not None and not found.missing]
        self._silent = 0 if answered else self._silent + 1
        left = None if last is None or not np.isfinite(last.left) else last.left
        return replace(
            self._before,
            answered=answered,
            squared_H=sum(one.squared for one in seen),
            step_size=1.0,
            guard_hits=0 if last is None else last.hits,
            squared_h=self._exactly(ask, found),
            objective=seen[0].objective if len(seen) == 1 and not found.missing else None,
            gain=sum(gains) if gains else None,
            left=left,
        )

    def _limit(self) -> str:
        spent = self.ledger.total("up") + self.ledger.total("down")
        if met := self.stop.limit(self.records[-1], spent, self.seconds):
            return met
        return "silence" if self._silent >= PATIENCE else ""


def last_of(ask: Any) -> LastSum | None:
    """What the exchange before this ask came to."""
    if isinstance(ask, (Gather, Gathers)):
        return ask.last
    return next((one.last for one in looks(ask) if one.last), None)


def looks(ask: Any) -> Iterator[Statistics]:
    """The asks for statistics and values that share an exchange.

    Of rounds in which workers are heard one by one, what would tell the same of everyone.
    """
    for one in joined(ask):
        if isinstance(one, Innovations):
            yield Statistics(one.method.model, one.server.statistics, EXACT)
        elif isinstance(one, Tracked):
            yield one.inner
        elif isinstance(one, Statistics):
            yield one


def joined(ask: Any) -> Sequence[Any]:
    """All that share an exchange."""
    if isinstance(ask, Gathers):
        return ask.gathers
    return ask.asks if isinstance(ask, Joint) else (ask,)


def _passes(ask: Ask) -> int:
    """Passes over the rows: each local step is one."""
    if isinstance(ask, Exact):
        return len(ask.params)
    return ask.steps if isinstance(ask, Tracked) else isinstance(ask, Statistics)


@final
@dataclass(frozen=True)
class _Seen:
    """What a sum says of one place."""

    squared: float
    gain: float | None
    objective: float | None


def seen_in(ask: Ask, found: Sum) -> list[_Seen]:
    """What a sum says to each of `looks`."""
    parts = ask.split(found) if isinstance(ask, Joint) else [found]
    return [
        seen_at(one, p.value / (p.rows or 1.0)) for one, p in zip(looks(ask), parts, strict=True)
    ]


def seen_at(ask: Statistics, mean: FloatArray) -> _Seen:
    """What the mean over all rows says of the place of an ask."""
    size = len(ask.statistics)
    step = ask.metric.unwhiten(mean[:size])
    gain = float(mean[:size] @ mean[:size]) / 2 if ask.metric.in_nats else None
    objective = float(ask.model.penalty(ask.params)) - float(mean[size]) if ask.values else None
    return _Seen(float(step @ step), gain, objective)
