"""Who takes part in a round.

Theorem 4, on partial participation, assumes independent Bernoulli draws (A9); p_i is
the probability that worker i is included, and H divides by it. A round costs time in proportion
to the workers drawn, not to those registered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log1p
from typing import Any, final

import numpy as np

from emfed.core.errors import SettingsError, check_count, check_range
from emfed.core.protocols import FloatArray, IntArray, Participation
from emfed.core.streams import Purpose, choose_distinct, uniforms

_SERVER = np.zeros(1, dtype=np.int64)


@final
@dataclass(frozen=True)
class Everyone(Participation):
    """All workers take part in every round.

    Examples
    --------
    >>> from emfed.algorithms import Everyone
    >>> Everyone().draw(seed=0, round_=1, n=3)
    array([0, 1, 2])
    """

    def draw(self, seed: int, round_: int, n: int) -> IntArray:
        return np.arange(n, dtype=np.int64)

    def probabilities(self, workers: IntArray, n: int) -> FloatArray:
        return np.ones(len(workers))

    def describe(self) -> dict[str, Any]:
        return {"participation": "everyone"}


@final
@dataclass(frozen=True, eq=False)
class Bernoulli(Participation):
    """Each worker takes part on its own with probability p (A9).

    Parameters
    ----------
    p : float or sequence of float
        The probability, one number or one for each worker.

    Examples
    --------
    >>> from emfed.algorithms import Bernoulli
    >>> Bernoulli(0.5).draw(seed=0, round_=1, n=8)
    array([0, 3, 7])
    """

    p: float | Sequence[float] | FloatArray

    def __post_init__(self) -> None:
        try:
            values = np.atleast_1d(np.asarray(self.p, dtype=np.float64))
        except (TypeError, ValueError):
            values = np.empty(0)
        if values.ndim != 1 or values.size == 0 or not np.all((values > 0) & (values <= 1)):
            raise SettingsError(
                "participation probabilities must lie in (0, 1], one number or one per worker; "
                f"got {self.p!r}."
            )

    def _all(self, n: int) -> FloatArray:
        values = np.atleast_1d(np.asarray(self.p, dtype=np.float64))
        if values.size not in (1, n):
            raise SettingsError(f"got {values.size} participation probabilities for {n} workers.")
        return values

    def draw(self, seed: int, round_: int, n: int) -> IntArray:
        """Gaps between those drawn with the largest p are geometric; the rest is thinning."""
        values = self._all(n)
        p = float(values.max())
        if p < 1:
            drawn = _skip(seed, round_, n, p)
        else:
            drawn = np.arange(n, dtype=np.int64)
        if values.size == 1:
            return drawn
        # Thinning reads the second half of the round's stream, past any skip.
        u = uniforms(seed, round_, Purpose.PARTICIPATION, drawn + (1 << 32), 1)[:, 0]
        return drawn[u < values[drawn] / p]

    def probabilities(self, workers: IntArray, n: int) -> FloatArray:
        values = self._all(n)
        return np.full(len(workers), values[0]) if values.size == 1 else values[workers]

    def describe(self) -> dict[str, Any]:
        return {"participation": "bernoulli", "p": np.asarray(self.p).tolist()}


def _skip(seed: int, round_: int, n: int, p: float) -> IntArray:
    """Successes of n Bernoulli(p) trials, by geometric gaps."""
    ahead = int(n * p + 6 * np.sqrt(n * p * (1 - p)) + 16)
    while True:
        u = uniforms(seed, round_, Purpose.PARTICIPATION, _SERVER, ahead)[0]
        gaps = np.minimum(np.floor(np.log1p(-u) / log1p(-p)), n)  # log1p(-u): u may be 0, not 1
        positions = np.cumsum(gaps.astype(np.int64) + 1) - 1
        if positions[-1] >= n:
            return positions[positions < n]
        ahead *= 2  # rare: the same stream, read further


@final
@dataclass(frozen=True)
class FixedSize(Participation):
    """Exactly ``count`` workers take part in a round, every subset equally likely.

    Theorem 4 assumes independent draws (A9), which these are not.

    Parameters
    ----------
    count : int
        The number of workers; p_i = count / n.

    Examples
    --------
    >>> from emfed.algorithms import FixedSize
    >>> len(FixedSize(3).draw(seed=0, round_=1, n=8))
    3
    """

    count: int

    def __post_init__(self) -> None:
        check_count("FixedSize count", self.count)

    def draw(self, seed: int, round_: int, n: int) -> IntArray:
        if self.count > n:
            raise SettingsError(f"FixedSize asks for {self.count} workers; there are {n}.")
        u = uniforms(seed, round_, Purpose.PARTICIPATION, _SERVER, self.count)
        return np.sort(choose_distinct(u, np.array([n]))[0])

    def probabilities(self, workers: IntArray, n: int) -> FloatArray:
        return np.full(len(workers), self.count / n)

    def describe(self) -> dict[str, Any]:
        return {"participation": "fixed-size", "count": self.count}


@final
@dataclass(frozen=True, eq=False)
class Schedule(Participation):
    """Given workers take part in each round; the list is repeated when it runs out.

    Parameters
    ----------
    rounds : sequence of sequences of int
        The workers of each round, counted from 0.
    p : float or sequence of float
        How often each worker is included in the long run, one number or one for each worker: H is
        unbiased only if that is true.

    Examples
    --------
    >>> from emfed.algorithms import Schedule
    >>> Schedule([[0, 1], [2, 3]], p=0.5).draw(seed=0, round_=2, n=4)
    array([2, 3])
    """

    rounds: Sequence[Sequence[int]]
    p: float | Sequence[float] | FloatArray

    def __post_init__(self) -> None:
        if not len(self.rounds):
            raise SettingsError("a schedule needs at least one round.")
        for p in np.unique(self.p)[[0, -1]]:
            check_range("schedule p", p, 0, 1, open_low=True)
        for number, ids in enumerate(self.rounds):
            if len(set(ids)) != len(ids):
                raise SettingsError(f"schedule round {number} names a worker twice: {list(ids)}.")

    def draw(self, seed: int, round_: int, n: int) -> IntArray:
        """The workers of this round (rounds count from 1)."""
        ids = np.sort(np.asarray(self.rounds[(round_ - 1) % len(self.rounds)], dtype=np.int64))
        if len(ids) and (ids[0] < 0 or ids[-1] >= n):
            raise SettingsError(f"schedule names worker {ids[-1]}; there are {n} (from 0).")
        return ids

    def probabilities(self, workers: IntArray, n: int) -> FloatArray:
        p = np.atleast_1d(np.asarray(self.p, dtype=np.float64))
        if p.size not in (1, n):
            raise SettingsError(f"got {p.size} schedule probabilities for {n} workers.")
        return np.full(len(workers), p[0]) if p.size == 1 else p[workers]

    def describe(self) -> dict[str, Any]:
        rounds = [list(map(int, ids)) for ids in self.rounds]
        return {"participation": "schedule", "rounds": rounds, "p": np.asarray(self.p).tolist()}


PARTICIPATIONS: dict[str, type[Participation]] = {
    "everyone": Everyone,
    "bernoulli": Bernoulli,
    "fixed-size": FixedSize,
    "schedule": Schedule,
}
"""Every participation scheme by name."""
