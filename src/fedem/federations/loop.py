"""The readable twin: one worker after the other, as a network would run them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, final

import numpy as np

from fedem.datasets.workers import gather
from fedem.federations.inprocess import InProcessFederation
from fedem.protocols import FloatArray, IntArray, Model, Oracle


@final
class _OneWorker(Oracle):
    """One worker's rows."""

    def __init__(self, model: Model, rows: Any) -> None:
        self._model, self._rows = model, rows
        self.counts = np.array([rows.shape[0]], dtype=np.int64)

    def full(self, params: Any, subset: IntArray) -> FloatArray:
        """s-bar_i(theta)."""
        return self._model.expected_statistics(self._rows, params)[None]

    def take(self, indices: IntArray, subset: IntArray) -> Any:
        """Picked rows."""
        return gather(self._rows, indices)


@final
class LoopFederation(InProcessFederation):
    """Drives workers one by one; slow, simple, and it names the worker that fails."""

    def batches(self, workers: IntArray) -> Iterator[IntArray]:
        """One at a time."""
        for position in range(len(workers)):
            yield np.array([position])

    def oracle(self, workers: IntArray) -> Oracle:
        """Its rows."""
        return _OneWorker(self._model, self.data.worker(int(workers[0])))

    def stacks(self, workers: IntArray) -> Iterator[tuple[IntArray, Any, Any]]:
        """One at a time."""
        for position, worker in enumerate(workers):
            yield np.array([position]), self.data.worker(int(worker))[None, ...], None
