"""Rows of many workers in one tensor on a device, each worker's side by side."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal, final

import numpy as np

from emfed.core.protocols import FloatArray, IntArray

PassPrecision = Literal["double", "fast"]


@final
@dataclass(frozen=True, eq=False)
class Ragged:
    """Worker i of many holds ``rows[starts[i] : starts[i] + counts[i]]``; ``(workers, m, d)``."""

    rows: Any
    """A tensor ``(rows, columns)``."""
    starts: IntArray
    counts: IntArray
    weights: Any = None
    """A tensor of one number for each of the rows, or None."""
    precision: PassPrecision = "double"
    memo: dict[Any, Any] = field(default_factory=dict)
    """What was found out about these rows and does not change."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Workers, rows of the largest, columns."""
        return len(self.starts), int(self.counts.max(initial=0)), *self.rows.shape[1:]

    @property
    def fast(self) -> bool:
        """Whether products may be off by 2^-22."""
        return self.precision == "fast"

    @property
    def ndim(self) -> int:
        """A worker axis, rows and columns."""
        return 3

    @property
    def totals(self) -> Any:
        """Sums of the weights of each worker's rows."""
        if self.weights is None:
            return self.counts.astype(np.float64)
        if "totals" not in self.memo:
            self.memo["totals"] = replace(self, weights=None).sums_of(self.weights)
        return self.memo["totals"]

    def parts(self, most: int) -> Iterator[Ragged]:
        """The rows in parts that span at most so many of the tensor's, in its order.

        These rows themselves if that is all. Workers may be few and far apart: what kernels write
        for each row has room for all rows between the first and the last.
        """
        starts, counts = self.starts, self.counts
        low, end = self.span() if counts.any() else (0, 0)
        if end - low <= most:
            yield self
            return
        while counts.any():
            take = np.clip(starts[counts > 0].min() + most - starts, 0, counts)
            yield replace(self, starts=starts, counts=take, memo={})
            starts, counts = starts + take, counts - take

    def span(self) -> tuple[int, int]:
        """The first of these rows in the tensor, and the end of the last."""
        busy = self.counts > 0
        return int(self.starts[busy].min()), int((self.starts + self.counts)[busy].max())

    def sums_of(self, values: Any) -> FloatArray:
        """Weighted sums over each worker's rows of one number for each row of the tensor."""
        values = values if self.weights is None else values * self.weights
        ends = zip(self.starts.tolist(), (self.starts + self.counts).tolist(), strict=True)
        return np.array([float(values[a:b].sum()) for a, b in ends])

    def ranges(self, most: int, block: int) -> tuple[IntArray, IntArray]:
        """Ranges of rows ``(start, stop, worker)``, about ``most``, of whole blocks; and the first
        range of each worker, with the number of all at the end.
        """
        each = max(block, -(-int(self.counts.sum()) // (most * block)) * block)
        pieces = -(-self.counts // each)
        ends = np.concatenate([[0], np.cumsum(pieces)]).astype(np.int64)
        worker = np.repeat(np.arange(len(pieces)), pieces)
        own = -(-self.counts // (np.maximum(pieces, 1) * block)) * block  # of one size, or the
        first = self.starts[worker] + (np.arange(len(worker)) - ends[worker]) * own[worker]
        last = np.minimum(first + own[worker], (self.starts + self.counts)[worker])  # last is late
        return np.stack([first, last, worker], axis=1).astype(np.int64), ends

    def programs(self, most: int, block: int) -> tuple[Any, Any]:
        """`ranges`, beside the rows; found once."""
        key = ("programs", most, block)
        if key not in self.memo:
            table, ends = self.ranges(most, block)
            self.memo[key] = (self.put(table), self.put(ends))
        return self.memo[key]

    def put(self, array: Any) -> Any:
        """A numpy array beside the rows."""
        import torch

        return torch.as_tensor(np.ascontiguousarray(array), device=self.rows.device)
