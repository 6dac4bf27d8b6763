"""All active workers in one set of array operations."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import final

import numpy as np

from emfed.core.protocols import IntArray
from emfed.data.tables import Piece, Workers
from emfed.network.inprocess import InProcessFederation

ACTIVE_ELEMENTS = 1 << 20
"""Statistics and picked rows of the workers driven at once: what stays in the cache is quick."""


@final
class StackedFederation(InProcessFederation):
    """Vectorised over the active workers; any number of rows per worker."""

    def batches(self, workers: IntArray) -> Iterator[IntArray]:
        """All at once, up to a bound on memory."""
        if len(workers) == 0:
            return
        row = prod(self.data.worker(int(workers[0]) - self.first).shape[1:])
        each = self._model.layout.size + self._algorithm.rows_at_once * row
        size = max(1, ACTIVE_ELEMENTS // max(1, each))
        for start in range(0, len(workers), size):
            yield np.arange(start, min(start + size, len(workers)))

    def pieces(self, data: Workers, workers: IntArray) -> Iterator[Piece]:
        """Grouped by size."""
        return data.stacks(workers)
