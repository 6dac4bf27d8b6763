"""Sums with noise: in one process to the sum of all, at a site to its own part.

Whoever asks is given what has noise and nothing else: the layers here answer a `NoisyAsk` alone,
and say that rows weigh nothing. What noise follows from is in docs/decisions/005.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import final

import numpy as np

from emfed.core.errors import FederationError, SettingsError
from emfed.core.noise import NoiseKey, NoisyAsk, PlainRows
from emfed.core.privacy import discrete_gaussian
from emfed.core.sums import Ask, FloatArray, IntArray, Mean, Rows, Stated, SummedWorkers

PRIVATE = "this fit is private: every answer in it has noise."


@final
class WithoutNoise(Ask):
    """A noisy ask before its noise: for whoever adds that, where the rows are."""

    precision = None

    def __init__(self, ask: NoisyAsk) -> None:
        self.ask, self.purpose = ask, ask.purpose

    @property
    def size(self) -> int:
        """As many numbers."""
        return self.ask.size

    def part(self, rows: Rows) -> FloatArray:
        """The exact sum over these rows."""
        if not isinstance(rows, PlainRows):
            raise SettingsError("a private fit needs rows that are there again for each sum.")
        total = np.zeros(self.size, dtype=np.int64)
        for blocks in rows.blocks():
            total += self.ask.whole(blocks)
        return total.astype(np.float64)

    def words(self) -> str:
        """In words."""
        return self.ask.words()

    def about(self) -> tuple[Stated, ...]:
        """What the ask is about."""
        return self.ask.about()


@final
@dataclass(frozen=True, eq=False)
class NoisyWorkers:
    """The workers of one private fit in one process: each adds its noise to the sum.

    The noise follows from the key, the ask and the exact sum, which is all that an answer says of
    the rows. So an answer that is given again is the same.

    Parameters
    ----------
    workers : SummedWorkers
        All workers.
    key : NoiseKey
        The key of this fit, and of no other.
    """

    workers: SummedWorkers
    key: NoiseKey

    @property
    def totals(self) -> FloatArray:
        """How many rows there are is an answer like others."""
        return np.zeros(len(self.workers.totals))

    def sum(self, ask: Ask) -> FloatArray:
        """The sum of all parts with their noise."""
        if not isinstance(ask, NoisyAsk):
            raise FederationError(PRIVATE)
        exact = self.workers.sum(WithoutNoise(ask)).astype(np.int64)
        about = hashlib.sha256(ask.digest() + exact.astype("<i8").tobytes()).digest()
        for worker in range(len(self.totals)):
            exact = exact + _noise(ask, self.key, about + worker.to_bytes(8, "little"))
        return exact.astype(np.float64)


@final
@dataclass(frozen=True, eq=False)
class SiteNoise:
    """The rows of a site as a private fit sees them at one place.

    Parameters
    ----------
    rows : PlainRows
        The rows.
    key : NoiseKey
        The site's key.
    place : bytes
        The digest of settings, row commitment, set and exchange.
    charge : callable
        Takes mu squared of an answer and the answer's name, and keeps on disk that it was given;
        False where it may not be. An answer with a known name costs nothing more.
    """

    rows: PlainRows
    key: NoiseKey = field(repr=False)
    place: bytes
    charge: Callable[[float, str], bool]
    total: float = field(default=0.0, init=False)
    count: int = field(default=0, init=False)
    squares: float = field(default=0.0, init=False)

    def sum(self, mean: Mean, ragged: bool = False) -> FloatArray:
        """Nothing is told without noise."""
        raise FederationError(PRIVATE)

    def noisy(self, ask: NoisyAsk) -> FloatArray:
        """This site's part; what it costs is on the disk before it is worked out."""
        about = hashlib.sha256(self.place + ask.digest()).digest()
        if not self.charge(ask.cost, about.hex()[:16]):
            raise FederationError("the budget of this private fit is used up.")
        exact = WithoutNoise(ask).part(self.rows)
        return exact + _noise(ask, self.key, about)


def _noise(ask: NoisyAsk, key: NoiseKey, about: bytes) -> IntArray:
    return discrete_gaussian(ask.size, key.words(about))
