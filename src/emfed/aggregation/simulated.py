"""Sums in one process, rounded as masked sums between machines are."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

import numpy as np

from emfed.aggregation.lattice import DIGEST_BYTES, FURTHER_ATTEMPTS, TAG_BYTES, Lattice
from emfed.core.errors import NumericalError
from emfed.core.ledger import DIRECTIONS, KINDS, Ledger
from emfed.core.streams import Purpose, uniforms
from emfed.core.sums import Ask, FloatArray, Sum, SummedWorkers


@final
@dataclass
class SimulatedSums:
    """The sums that a fit of so many workers would be sent between machines.

    Each worker masks its part and then rounds it, so what the roundings add is a sum of uniform
    variables: all but one are free, and the last brings the sum to the lattice
    (docs/decisions/003). One pass over the rows of all workers is enough for that.

    Parameters
    ----------
    rows : SummedWorkers
        All workers.
    workers : int
        How many they are; one alone rounds nothing.
    seed : int
        The seed of the roundings.
    ledger : Ledger, optional
        What counts the bytes that messages between machines would have.
    masked : bool
        Whether workers mask. If not, numbers of which nothing is foreseen are told as 64-bit
        floats, so that columns may have any unit.
    """

    rows: SummedWorkers
    workers: int
    seed: int = 0
    ledger: Ledger | None = None
    masked: bool = True
    exchanges: int = field(default=0, init=False)
    attempts: int = field(default=0, init=False)
    """Exchanges that were made again, because a sum had no room."""
    bytes: int = field(default=0, init=False)

    def __call__(self, ask: Ask) -> Sum:
        """The sum over all workers."""
        value, total = self.rows.sum(ask), float(self.rows.totals.sum())
        exchange, self.exchanges = self.exchanges, self.exchanges + 1
        if self.workers == 1 and np.isfinite(value).all():
            return Sum(value, total, ask.noise)
        values = np.append(value, total) if exchange == 0 and ask.counted else value
        size = 0
        if ask.precision is None and not self.masked and np.isfinite(value).all():
            size = 2 * self.workers * (values.nbytes + TAG_BYTES + DIGEST_BYTES)
            self._count(ask, size)
            return Sum(value, total, ask.noise, 0, size)
        for attempt in range(1 + FURTHER_ATTEMPTS):
            lattice = Lattice.placed(ask, exchange, attempt)
            size += 2 * self.workers * lattice.part_bytes
            rounded = lattice.round(values, self._roundings(attempt, len(values)))
            if rounded is not None:
                self._count(ask, size)
                noise = lattice.noise(self.workers) + self.workers * ask.noise
                return Sum(rounded[: ask.size], total, noise, 0, size)
            self.attempts += 1
        raise NumericalError(
            f"a sum is not finite, or far from what was expected: {ask.words()}. Look for values "
            "that stand for missing ones, and columns with a huge range."
        )

    def repeat(self, ask: Ask, known: Sum) -> Sum:
        """A sum that was made before: it is counted, and nothing is computed."""
        self.exchanges += 1
        self._count(ask, known.bytes)
        return known

    def _count(self, ask: Ask, size: int) -> None:
        """Count the bytes of an exchange, of which all workers send and are sent the same."""
        self.bytes += size
        if self.ledger is not None and size:
            charge(self.ledger, ask.purpose, self.workers, size)

    def _roundings(self, attempt: int, size: int) -> FloatArray:
        """What the roundings of all workers but one add, in steps."""
        free = np.arange(self.workers - 1, dtype=np.int64) + attempt * self.workers
        drawn = uniforms(self.seed, self.exchanges, Purpose.COMPRESSION, free, size)
        return (drawn - 0.5).sum(axis=0)


def charge(ledger: Ledger, purpose: str, workers: int, size: int) -> None:
    """Count so many bytes of an exchange that all workers made alike."""
    everyone, envelope = np.arange(workers), TAG_BYTES + DIGEST_BYTES
    kind, payload = purpose if purpose in KINDS else "question", size // (2 * workers) - envelope
    for direction in DIRECTIONS:
        ledger.add(kind, direction, everyone, payload, envelope)
