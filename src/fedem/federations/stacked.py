"""All active workers in one set of array operations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, final

import numpy as np
from array_api_compat import array_namespace

from fedem.datasets.workers import WorkerData, gather
from fedem.federations.inprocess import InProcessFederation
from fedem.protocols import FloatArray, IntArray, Model, Oracle

LARGE = 4096
"""A worker with this many rows gains nothing from company."""
STACK_ROWS = 1 << 16
"""Rows stacked at once, so that memory does not grow with the number of workers."""
ACTIVE_ELEMENTS = 1 << 22
"""Statistics of the workers driven at once, likewise."""


@final
class _Stack(Oracle):
    """Rows of a batch of workers inside one table."""

    def __init__(self, model: Model, data: WorkerData, workers: IntArray) -> None:
        self._model, self._data, self._workers = model, data, workers
        self.counts = data.offsets[workers + 1] - data.offsets[workers]

    def full(self, params: Any, subset: IntArray) -> FloatArray:
        """s-bar_i(theta), stack by stack."""
        workers = self._workers[subset]
        out = np.empty((len(workers), self._model.layout.size))
        for positions, rows, padding in stacks(self._data, workers):
            out[positions] = self._model.expected_statistics(rows, params, padding)
        return out

    def take(self, indices: IntArray, subset: IntArray) -> Any:
        """Picked rows, one gather for all workers."""
        starts = self._data.offsets[self._workers[subset]]
        return gather(self._data.rows, starts[:, None] + indices)


def stacks(data: WorkerData, workers: IntArray) -> Iterator[tuple[IntArray, Any, Any]]:
    """All rows of the workers, grouped by size so that padding wastes at most a quarter."""
    counts = data.offsets[workers + 1] - data.offsets[workers]
    order = np.argsort(counts, kind="stable")
    ordered = counts[order]
    start = 0
    while start < len(order):
        first = int(ordered[start])
        if first >= LARGE:
            stop = start + 1
        else:
            widest = np.searchsorted(ordered, first + first // 4, side="right")
            stop = min(int(widest), start + max(1, STACK_ROWS // max(1, first)))
        positions = order[start:stop]
        yield (positions, *_stack(data, workers[positions], counts[positions]))
        start = stop


def _stack(data: WorkerData, workers: IntArray, counts: IntArray) -> tuple[Any, Any]:
    """Rows ``(workers, m, ...)`` and padding weights; a view where the rows lie side by side."""
    starts, m = data.offsets[workers], int(counts.max())
    if np.all(counts == m):
        if np.all(np.diff(workers) == 1):
            first = int(starts[0])
            block = data.rows[first : first + m * len(workers), ...]
            xp = array_namespace(block)
            return xp.reshape(block, (len(workers), m, *block.shape[1:])), None
        return gather(data.rows, starts[:, None] + np.arange(m)), None
    inside = np.arange(m) < counts[:, None]
    rows = gather(data.rows, starts[:, None] + np.where(inside, np.arange(m), 0))
    return rows, inside.astype(np.float64)


@final
class StackedFederation(InProcessFederation):
    """Vectorised over the active workers; any number of rows per worker."""

    def batches(self, workers: IntArray) -> Iterator[IntArray]:
        """All at once, up to a bound on memory."""
        size = max(1, ACTIVE_ELEMENTS // self._model.layout.size)
        for start in range(0, len(workers), size):
            yield np.arange(start, min(start + size, len(workers)))

    def oracle(self, workers: IntArray) -> Oracle:
        """Their rows."""
        return _Stack(self._model, self.data, workers)

    def stacks(self, workers: IntArray) -> Iterator[tuple[IntArray, Any, Any]]:
        """Grouped by size."""
        return stacks(self.data, workers)
