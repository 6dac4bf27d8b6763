"""When a run stops, and what it looks at on the way."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from emfed.core.errors import SettingsError, check_count, check_range
from emfed.core.records import Records, RoundRecord

PATIENCE = 1000
"""Rounds without any answer, or crashes in one round, after which a run gives up."""
SMALL = 1e-5
"""Nats that may be left where the user gave none, but a tolerance of the mean field."""
Callback = Callable[[RoundRecord], bool | None]
"""Called after every round; returning True ends the run."""


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
