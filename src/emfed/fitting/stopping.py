"""When a run stops, and what it looks at on the way."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, final

from emfed.core import series
from emfed.core.errors import SettingsError, check_count, check_range
from emfed.core.ledger import Ledger
from emfed.core.protocols import ServerState
from emfed.core.records import Records, RoundRecord

PATIENCE = 1000
"""Rounds without any answer, or crashes in one round, after which a run gives up."""
SMALL = 1e-5
"""Nats that may be left where the user gave none, but a tolerance of the mean field."""
WINDOW = 6
"""Rounds through which the rate is read."""
Callback = Callable[[RoundRecord], bool | None]
"""Called after every round; returning True ends the run."""


class Progress(Protocol):
    """What a limit looks at."""

    records: Records
    state: ServerState
    seconds: float

    @property
    def ledger(self) -> Ledger:
        """Every byte so far."""


@final
@dataclass(frozen=True)
class Stop:
    """When a run stops: at whichever limit is met first.

    Parameters
    ----------
    rounds : int or None
        The largest number of rounds.
    epochs : float or None
        The most conditional expectations that are computed, in units of all samples.
    tolerance : float or None
        A bound on |H|^2 in three rounds in a row without the guard.
    bytes : int or None
        The most bytes that all workers send and are sent.
    seconds : float or None
        The most seconds of computing.
    nats : float or None
        A bound on what the log-likelihood per sample may still gain, as the last rounds tell it.

    Raises
    ------
    SettingsError
        If there is no limit on rounds, epochs, bytes or seconds.

    Examples
    --------
    >>> from emfed.fitting import Stop
    >>> Stop(rounds=100, nats=1e-6).left
    1e-06
    """

    rounds: int | None = None
    epochs: float | None = None
    tolerance: float | None = None
    bytes: int | None = None
    seconds: float | None = None
    nats: float | None = None

    def __post_init__(self) -> None:
        limits = {n: getattr(self, n) for n in ("rounds", "epochs", "bytes", "seconds")}
        if self.rounds is not None:
            check_count("rounds", self.rounds, 0)
        for name, value in (
            *limits.items(),
            ("tolerance", self.tolerance),
            ("nats", self.nats),
        ):
            if value is not None:
                check_range(name, value, 0, math.inf, open_high=True)
        if all(value is None for value in limits.values()):
            raise SettingsError(
                "give at least one of rounds, epochs, bytes or seconds: a tolerance alone may "
                "never be met."
            )

    @property
    def left(self) -> float:
        """Nats a sample that a run may have left when it says that it has converged."""
        return SMALL if self.nats is None else max(self.nats, 1e-9)

    def reason(self, run: Progress) -> str | None:
        """The limit that has been met, if any."""
        last = run.records[-1] if run.records else None
        if self.tolerance is not None and self.settled(run.records, self.tolerance):
            return "tolerance"
        if self.nats is not None and remaining(run.records) <= self.nats:
            return "nats"
        if self.rounds is not None and run.state.round > self.rounds:
            return "rounds"
        if last is not None and self.epochs is not None and last.epochs >= self.epochs:
            return "epochs"
        if (
            self.bytes is not None
            and run.ledger.total("up") + run.ledger.total("down") >= self.bytes
        ):
            return "bytes"
        if self.seconds is not None and run.seconds >= self.seconds:
            return "seconds"
        return None

    def limit(self, made: RoundRecord, spent: int, seconds: float) -> str:
        """The limit that is met after this round, these bytes and seconds; empty if none is."""
        met = {
            "rounds": (self.rounds, made.round),
            "epochs": (self.epochs, made.epochs),
            "bytes": (self.bytes, spent),
            "seconds": (self.seconds, seconds),
        }
        for name, (limit, value) in met.items():
            if limit is not None and value >= limit:
                return name
        return ""

    @staticmethod
    def settled(records: Records, tolerance: float) -> bool:
        """Whether |H|^2 was small in the last three rounds, without the guard."""
        last = records[-3:]
        return len(last) == 3 and all(
            r.round > 0
            and r.answered > 0
            and r.guard_hits == 0
            and r.squared_H is not None
            and r.squared_H <= tolerance
            for r in last
        )


def remaining(records: Records) -> float:
    """Nats per sample that EM may still gain, as the gains of the last rounds tell (`series`).

    A round's gain is |H|^2 / 2 in the model's metric, the value of an EM step to second order.
    Where not all are asked, the window reaches back until everyone has been asked `WINDOW` times
    on average, and the rate is per turn of all. Infinite where a round of the window had no gain to
    tell, or a shortened step, or where nobody answered in any of it.
    """
    everyone = max((r.asked for r in records), default=0)
    asked, length = 0, 0
    while asked < WINDOW * everyone and length < len(records):
        length += 1
        asked += records[-length].asked
    last = records[-length:] if length else records[:0]
    if everyone == 0 or asked < WINDOW * everyone or any(_untold(r) for r in last):
        return math.inf
    told = {j: r.gain for j, r in enumerate(last) if r.answered and r.gain is not None}
    if len(told) < min(length, WINDOW):
        return math.inf
    rate = series.rate(list(told.values()), list(told)) ** (length / WINDOW)
    recent = [gain for j, gain in told.items() if j >= length - max(3, length // 2)]
    now = max(recent) if length == WINDOW else sum(recent) / len(recent)
    return series.left(now, rate)


def _untold(record: RoundRecord) -> bool:
    """Whether a round says nothing of what is left; one without an answer is only passed over."""
    return record.round == 0 or record.guard_hits > 0 or (record.gain is None)


@final
@dataclass(frozen=True)
class Monitor:
    """Diagnostics of a simulation: full passes over all data every so many rounds.

    Parameters
    ----------
    every : int
        The rounds from one look to the next.
    mean_field : bool
        Whether to compute |h|^2.
    objective : bool
        Whether to compute the penalised negative log-likelihood.

    Examples
    --------
    >>> import emfed
    >>> data = emfed.data.synthetic_federation(workers=4, rows_per_worker=50)
    >>> model = emfed.gaussian_mixture(2, "tied")
    >>> result = emfed.fit(model, data, "em", rounds=3, monitor=emfed.fitting.Monitor())
    >>> result.records[-1].squared_h < result.records[1].squared_h
    True
    """

    every: int = 1
    mean_field: bool = True
    objective: bool = True

    def __post_init__(self) -> None:
        check_count("Monitor every", self.every)
