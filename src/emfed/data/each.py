"""Rows that a driver knows worker by worker, for what is not masked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import numpy as np

from emfed.core.protocols import Model
from emfed.core.sums import FloatArray, IntArray, Mean
from emfed.data.tables import Workers, apart, gather


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
        self.data, self._first = data, first
        counts_for = data.totals if weights is None else weights
        self.totals: FloatArray = np.concatenate([np.zeros(first), counts_for])
        self.counts: IntArray = np.concatenate([np.zeros(first, dtype=np.int64), data.counts])

    def one(self, worker: int) -> OneWorker:
        """The rows of one worker."""
        return OneWorker(self.data, worker - self._first, float(self.totals[worker]))

    def some(self, worker: int, most: int) -> tuple[Any, FloatArray]:
        """So many rows of a worker at most, evenly spread over those with a weight, and weights."""
        held, place = self.data.row_weights, worker - self._first
        weights = np.ones(self.counts[worker]) if held is None else np.asarray(held[place])
        picked = np.flatnonzero(weights > 0)
        picked = picked[:: -(-len(picked) // most)]
        return gather(self.data.worker(place), picked), weights[picked]

    def means(
        self, mean: Callable[[Any, Any, IntArray, int], FloatArray], workers: IntArray
    ) -> FloatArray:
        """Weighted means over the rows of these workers."""
        out: FloatArray | None = None
        for piece in self.data.stacks(workers - self._first):
            for own in apart(piece):
                values = own.share * mean(own.rows, own.padding, own.positions, own.first)
                if out is None:
                    out = np.zeros((len(workers), values.shape[-1]))
                out[own.positions] += values
        return np.zeros((0, 0)) if out is None else out

    def take(self, workers: IntArray, indices: IntArray) -> Any:
        """Rows at each worker's own indices."""
        return self.data.take(workers - self._first, indices)

    def fresh(self, model: Model, round_: int, workers: IntArray) -> EachRows:
        """The rows of a round; those of streams are others each time, and are looked at first."""
        places = workers - self._first
        data = self.data.fresh(round_, places)
        if data is self.data:
            return self
        for worker in places.tolist():
            where = f"worker {data.name(worker)!r}, round {round_}"
            model.check(data.worker(worker), where, data.columns)
        return EachRows(data, self.totals[self._first :], self._first)


@final
class OneWorker:
    """The rows of one worker, as a fit's asks see them."""

    def __init__(self, data: Workers, worker: int, total: float) -> None:
        self._data, self._worker = data, np.array([worker])
        self.total = total
        self.squares = total**2 / float(data.totals[worker])
        self.count = int(data.positive_counts[worker])

    def sum(self, mean: Mean, ragged: bool = False) -> FloatArray:
        """The weighted sum over the rows."""
        total = np.zeros(())
        for piece in self._data.pieces(self._worker):
            for own in [piece] if ragged else apart(piece):
                total = total + own.share * self.total * mean(own.rows, own.padding)[0]
        return np.asarray(total)
