"""Sums in one process, rounded as masked sums between machines are."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

import numpy as np

from emfed.aggregation.lattice import FURTHER_ATTEMPTS, Lattice
from emfed.core.errors import NumericalError
from emfed.core.streams import Purpose, uniforms
from emfed.core.sums import Ask, FloatArray, Rows, Sum


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
        value = ask.part(self.rows)
        self.exchanges += 1
        if self.workers == 1:
            return Sum(value, self.rows.total)
        size = 0
        for attempt in range(1 + FURTHER_ATTEMPTS):
            lattice = Lattice.of(ask.precision, ask.size, attempt)
            size += 2 * self.workers * lattice.part_bytes
            rounded = lattice.round(value, self._roundings(attempt, ask.size))
            if rounded is not None:
                self.bytes += size
                return Sum(rounded, self.rows.total, lattice.noise(self.workers), 0, size)
            self.attempts += 1
        raise NumericalError(
            f"a sum is not finite, or far from what was expected: {ask.words()}. Look for values "
            "that stand for missing ones, and columns with a huge range."
        )

    def _roundings(self, attempt: int, size: int) -> FloatArray:
        """What the roundings of all workers but one add, in steps."""
        free = np.arange(self.workers - 1, dtype=np.int64) + attempt * self.workers
        drawn = uniforms(self.seed, self.exchanges, Purpose.COMPRESSION, free, size)
        return (drawn - 0.5).sum(axis=0)
