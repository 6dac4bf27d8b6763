"""Sums in one process: exact, or rounded as masked sums between machines are."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

import numpy as np

from emfed.core.streams import Purpose, uniforms
from emfed.core.sums import Ask, Precision, Rows, Sum

EXACT_BYTES = 16
"""A number of an exact sum: words of 128 bits, so that any double has room."""
TAG_BYTES, DIGEST_BYTES = 16, 8
"""What a part has besides its numbers."""


@final
@dataclass
class SimulatedSums:
    """The sums that a fit of so many workers would be sent between machines.

    Each worker masks its part and then rounds it, so what the roundings add is a sum of uniform
    variables: all but one are free, and the last brings the sum to the lattice
    (docs/decisions/003). One pass over the rows of all workers is enough for that.

    Parameters
    ----------
    rows : Rows
        The rows of all workers.
    workers : int
        How many they are; one alone rounds nothing.
    seed : int
        The seed of the roundings.
    """

    rows: Rows
    workers: int
    seed: int = 0
    exchanges: int = field(default=0, init=False)
    attempts: int = field(default=0, init=False)
    """Exchanges that were made again, because a sum had no room."""
    bytes: int = field(default=0, init=False)

    def __call__(self, ask: Ask) -> Sum:
        """The sum over all workers."""
        value, precision = ask.part(self.rows), ask.precision
        self.exchanges += 1
        if precision is None or self.workers == 1:
            return self._sum(ask, value, 8 * EXACT_BYTES * ask.size, 0.0)
        step = np.broadcast_to(precision.step, value.shape)
        free = np.arange(self.workers - 1, dtype=np.int64)
        drawn = uniforms(self.seed, self.exchanges, Purpose.COMPRESSION, free, ask.size) - 0.5
        rounded = np.rint(value / step + drawn.sum(axis=0)) * step
        bits = int(np.broadcast_to(precision.bits, value.shape).sum())
        while not _fits(rounded, precision):
            self.attempts += 1
            precision = Precision(precision.step, precision.centre, precision.reach**2 / step)
            bits *= 3  # those of both attempts
        return self._sum(ask, rounded, bits, self.workers / 12)

    def _sum(self, ask: Ask, value: np.ndarray, bits: int, noise: float) -> Sum:
        up = -(-bits // 8) + TAG_BYTES + DIGEST_BYTES
        size = 2 * self.workers * up if self.workers > 1 else 0
        self.bytes += size
        return Sum(value, self.rows.total, noise, 0, size)


def _fits(value: np.ndarray, precision: Precision) -> bool:
    return bool(np.all(np.abs(value - precision.centre) <= np.abs(precision.reach)))
