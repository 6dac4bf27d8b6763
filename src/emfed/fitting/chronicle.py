"""The rounds of a fit on sums, as whoever drives it sees them: records, bytes and limits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import final

import numpy as np

from emfed.core.ledger import Ledger
from emfed.core.records import Records, RoundRecord
from emfed.core.sums import Ask, FloatArray, LastSum, Sum
from emfed.fitting.asks import Joint, Statistics
from emfed.fitting.many import Tracked
from emfed.fitting.settings import FitSettings
from emfed.fitting.stopping import Callback, Stop

INTERRUPTED = "interrupted"


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
        self._pending: tuple[Ask, Sum, float] | None = None
        self._before = RoundRecord(0, 0, workers, workers, None, 0.0, 0, 0, 0, 0, 0, 0, 0.0, 0.0)

    def note(self, ask: Ask, found: Sum, seconds: float) -> None:
        """Keep an exchange until the fit has looked at it."""
        self._evaluations += self.count * sum(_passes(one) for one in _joined(ask))
        self._pending = (ask, found, seconds)

    def refuses(self, ask: Ask) -> str | None:
        """Look back at the last exchange; tell why this one is not made, if it is not."""
        self.complete(next((one.last for one in looks(ask) if one.last), None))
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
        self._append(self._record(ask, found, seconds, last))
        self._show(self.records[-1])

    def _show(self, record: RoundRecord) -> None:
        if any(callback(record) is True for callback in self.callbacks):
            self.stopped = self.stopped or "callback"

    def _exactly(self, ask: Ask, found: Sum) -> float | None:
        """The true |h(S)|^2, where somebody can tell."""
        return None

    def open_records(self) -> None:
        """The record of all that came before the rounds."""
        if not self.records:
            self._append(replace(self._before, seconds=self.seconds))

    def _append(self, record: RoundRecord) -> None:
        ledger, before = self.ledger, self.records
        spent = {
            f"{what}_{direction}": ledger.total(direction, part)
            - sum(getattr(r, f"{what}_{direction}") for r in before)
            for what, part in (("bytes", None), ("payload", "payload"))
            for direction in ("up", "down")
        }
        known = int(sum(r.evaluations for r in before))
        self.records.append(
            replace(
                record,
                **spent,
                evaluations=self._evaluations - known,
                epochs=self._evaluations / max(self.count, 1),
            )
        )

    def _record(self, ask: Ask, found: Sum, seconds: float, last: LastSum | None) -> RoundRecord:
        seen = seen_in(ask, found)
        gains = [one.gain for one in seen if one.gain is not None]
        number = len(self.records)
        left = None if last is None or not np.isfinite(last.left) else last.left
        return replace(
            self._before,
            round=number,
            squared_H=sum(one.squared for one in seen),
            step_size=1.0,
            guard_hits=0 if last is None else last.hits,
            seconds=seconds,
            squared_h=self._exactly(ask, found),
            objective=seen[0].objective if len(seen) == 1 else None,
            gain=sum(gains) if gains else None,
            left=left,
        )

    def _limit(self) -> str:
        stop, made = self.stop, self.records[-1]
        spent = self.ledger.total("up") + self.ledger.total("down")
        met = {
            "rounds": (stop.rounds, made.round),
            "epochs": (stop.epochs, made.epochs),
            "bytes": (stop.bytes, spent),
            "seconds": (stop.seconds, self.seconds),
        }
        for name, (limit, value) in met.items():
            if limit is not None and value >= limit:
                return name
        return ""


def looks(ask: Ask) -> Iterator[Statistics]:
    """The asks for statistics and values that share an exchange."""
    for one in _joined(ask):
        if isinstance(one, Tracked):
            yield one.inner
        elif isinstance(one, Statistics):
            yield one


def _joined(ask: Ask) -> tuple[Ask, ...]:
    return ask.asks if isinstance(ask, Joint) else (ask,)


def _passes(ask: Ask) -> int:
    """Passes over the rows: each local step is one."""
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
    return [_seen(one, p.value / p.rows) for one, p in zip(looks(ask), parts, strict=True)]


def _seen(ask: Statistics, mean: FloatArray) -> _Seen:
    size = len(ask.statistics)
    step = ask.metric.unwhiten(mean[:size])
    gain = float(mean[:size] @ mean[:size]) / 2 if ask.metric.in_nats else None
    objective = float(ask.model.penalty(ask.params)) - float(mean[size]) if ask.values else None
    return _Seen(float(step @ step), gain, objective)
