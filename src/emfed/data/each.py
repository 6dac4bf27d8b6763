"""Rows that a driver knows worker by worker, for what is not masked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, final

import numpy as np

from emfed.core.protocols import Model
from emfed.core.sums import FloatArray, IntArray, Mean, Pick
from emfed.data.tables import Workers, apart, gather, tables
from emfed.data.workers import picked


@final
class EachRows:
    """The rows of all workers of a simulation, one worker apart from the other.

    Parameters
    ----------
    data : Workers
        The rows.
    weights : array, optional
        What each worker counts for, in rows; by default what its rows do.
    first : int
        The number of the first of them, where others come before.

    Examples
    --------
    >>> import numpy as np
    >>> from emfed.data import as_workers
    >>> rows = EachRows(as_workers([np.ones((3, 2)), np.zeros((5, 2))]))
    >>> rows.one(0).sum(lambda block, weights: block.mean(axis=1))
    array([3., 3.])
    >>> rows.means(lambda block, weights, which, first: block.mean(axis=1), np.array([0, 1]))
    array([[1., 1.],
           [0., 0.]])
    """

    def __init__(self, data: Workers, weights: FloatArray | None = None, first: int = 0) -> None:
        self.data, self.first = data, first
        counts_for = data.totals if weights is None else weights
        self._picked: dict[Pick, EachRows] = {}
        self.totals: FloatArray = np.concatenate([np.zeros(first), counts_for])
        self.counts: IntArray = np.concatenate([np.zeros(first, dtype=np.int64), data.counts])

    def one(self, worker: int) -> OneWorker:
        """The rows of one worker."""
        return OneWorker(self, worker)

    def picked(self, pick: Pick) -> EachRows:
        """Some of the rows of each worker."""
        if pick not in self._picked:
            data, own = picked(self.data, pick), self.data.totals
            counts_for = self.totals[self.first :]
            each = np.divide(counts_for, own, out=np.zeros_like(own), where=own > 0)
            self._picked[pick] = EachRows(data, each * data.totals, self.first)
        return self._picked[pick]

    def _weights(self, worker: int) -> FloatArray:
        held = self.data.row_weights
        own = np.ones(self.counts[worker]) if held is None else held[worker - self.first]
        return np.asarray(own)

    def which(self, worker: int, most: int) -> IntArray:
        """Numbers of so many rows of a worker at most, evenly spread over those with a weight."""
        numbers = np.flatnonzero(self._weights(worker) > 0)
        return numbers[:: max(1, -(-len(numbers) // most))]

    def some(self, worker: int, most: int) -> tuple[Any, FloatArray]:
        """So many rows of a worker at most, evenly spread over those with a weight, and weights."""
        numbers = self.which(worker, most)
        rows = gather(self.data.worker(worker - self.first), numbers)
        return rows, self._weights(worker)[numbers]

    def means(
        self, mean: Callable[[Any, Any, IntArray, int], FloatArray], workers: IntArray
    ) -> FloatArray:
        """Weighted means over the rows of these workers."""
        out: FloatArray | None = None
        for piece in self.data.stacks(workers - self.first):
            for own in apart(piece):
                values = own.share * mean(own.rows, own.padding, own.positions, own.first)
                if out is None:
                    out = np.zeros((len(workers), values.shape[-1]))
                out[own.positions] += values
        return np.zeros((0, 0)) if out is None else out

    def take(self, workers: IntArray, indices: IntArray) -> Any:
        """Rows at each worker's own indices."""
        return self.data.take(workers - self.first, indices)

    def fresh(self, model: Model, round_: int, workers: IntArray) -> EachRows:
        """The rows of a round; those of streams are others each time, and are looked at first."""
        places = workers - self.first
        data = self.data.fresh(round_, places)
        if data is self.data:
            return self
        for worker in places.tolist():
            where = f"worker {data.name(worker)!r}, round {round_}"
            model.check(data.worker(worker), where, data.columns)
        return EachRows(data, self.totals[self.first :], self.first)


@final
class OneWorker:
    """The rows of one worker, as a fit's asks see them."""

    def __init__(self, among: EachRows, worker: int) -> None:
        self._among, self._worker = among, worker
        data, place = among.data, worker - among.first
        self.total = float(among.totals[worker])
        own = float(data.totals[place])
        self.squares = self.total**2 / own if own else 0.0
        self.count = int(data.positive_counts[place])

    def sum(self, mean: Mean, ragged: bool = False) -> FloatArray:
        """The weighted sum over the rows."""
        total = np.zeros(())
        for piece in self._among.data.pieces(np.array([self._worker - self._among.first])):
            for own in [piece] if ragged else apart(piece):
                total = total + own.share * self.total * mean(own.rows, own.padding)[0]
        return np.asarray(total)

    def tables(self) -> Iterator[tuple[int, FloatArray]]:
        """The number of rows, and some of them."""
        return tables(self._among.data, [self._worker - self._among.first])

    def picked(self, pick: Pick) -> OneWorker:
        """Some of the rows."""
        return OneWorker(self._among.picked(pick), self._worker)
