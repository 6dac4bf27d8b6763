"""What the in-process federations share: the store of worker rows, and driving the workers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from fedem.datasets.workers import WorkerData
from fedem.errors import DataError
from fedem.protocols import (
    Algorithm,
    Column,
    Federation,
    FloatArray,
    IntArray,
    Model,
    Opening,
    Oracle,
    Replies,
    Request,
    Rows,
)


@final
class RowStore:
    """Columns of state for every registered worker.

    Columns that start at zero are backed by memory the system hands out on first touch, so a
    million registered workers cost what the active ones use.
    """

    def __init__(self, columns: dict[str, Column], n: int) -> None:
        self._arrays: Rows = {
            name: np.full((n, *c.shape), c.fill, dtype=c.dtype)
            if c.fill
            else np.zeros((n, *c.shape), dtype=c.dtype)
            for name, c in columns.items()
        }
        self._touched: NDArray[np.bool_] = np.zeros(n, dtype=np.bool_)

    def take(self, workers: IntArray) -> Rows:
        """Rows of these workers (sorted, each once); treat them as read-only."""
        if len(workers) == len(self._touched):
            return dict(self._arrays)
        return {name: array[workers] for name, array in self._arrays.items()}

    def put(self, workers: IntArray, rows: Rows) -> None:
        """Write rows back."""
        self._touched[workers] = True
        index = slice(None) if len(workers) == len(self._touched) else workers
        for name, array in self._arrays.items():
            if rows[name] is not array:
                array[index] = rows[name]

    def export(self) -> tuple[IntArray, Rows]:
        """All rows ever written, with their workers."""
        workers = np.flatnonzero(self._touched).astype(np.int64)
        return workers, {name: array[workers] for name, array in self._arrays.items()}


class InProcessFederation(Federation):
    """All workers' data and state in this process."""

    def __init__(self, data: WorkerData) -> None:
        self.data = data

    @abstractmethod
    def batches(self, workers: IntArray) -> Iterator[IntArray]:
        """Positions of the workers that are driven together."""

    @abstractmethod
    def oracle(self, workers: IntArray) -> Oracle:
        """The data of these workers."""

    @abstractmethod
    def stacks(self, workers: IntArray) -> Iterator[tuple[IntArray, Any, Any]]:
        """All rows of these workers: positions, ``(positions, m, ...)`` rows, padding weights."""

    @property
    @final
    def size(self) -> int:
        """The number of workers."""
        return self.data.size

    @property
    @final
    def everyone(self) -> IntArray:
        """All workers."""
        return np.arange(self.size, dtype=np.int64)

    @final
    def open(self, model: Model) -> Opening:
        """Check the data and gather the summaries."""
        counts = self.data.counts
        for worker in np.flatnonzero(counts == 0)[:1]:
            model.check(self.data.worker(int(worker)), self._where(int(worker)), self.data.columns)
        try:
            model.check(self.data.rows, "the data", self.data.columns)
        except DataError:  # find whose fault it is, for the message
            for worker in range(self.size):
                model.check(self.data.worker(worker), self._where(worker), self.data.columns)
            raise
        gathered: dict[str, FloatArray] = {}
        for positions, rows, weights in self.stacks(self.everyone):
            for name, values in model.summary(rows, weights).items():
                if name not in gathered:
                    gathered[name] = np.empty((self.size, *values.shape[1:]))
                gathered[name][positions] = values
        return Opening(counts, gathered, self.data.columns, self.data.names)

    def _where(self, worker: int) -> str:
        return f"worker {self.data.name(worker)!r}"

    @final
    def begin(self, model: Model, algorithm: Algorithm, seed: int) -> None:
        """Fresh state for everyone."""
        self._model, self._algorithm, self._seed = model, algorithm, seed
        self._store = RowStore(algorithm.columns(model.layout.size), self.size)

    @final
    def exchange(self, request: Request) -> Replies:
        """Drive the asked workers and write their rows back."""
        out = []
        for positions in self.batches(request.workers):
            part = request if len(positions) == len(request.workers) else request.take(positions)
            rows = self._store.take(part.workers)
            oracle = self.oracle(part.workers)
            try:
                rows, replies = self._algorithm.worker_step(
                    self._model, self._seed, rows, part, oracle
                )
            except Exception as error:
                if len(positions) == 1:
                    error.add_note(f"while driving {self._where(int(part.workers[0]))}")
                raise
            self._store.put(part.workers, rows)
            out.append(replies)
        return out[0] if len(out) == 1 else Replies.join(out, len(request.statistics))

    @final
    def mean_statistics(self, model: Model, params: Any, weights: FloatArray) -> FloatArray:
        """sum_i w_i s-bar_i(theta)."""
        total = np.zeros(model.layout.size)
        for positions, rows, padding in self.stacks(self.everyone):
            total += weights[positions] @ model.expected_statistics(rows, params, padding)
        return total

    @final
    def mean_log_likelihood(self, model: Model, params: Any, weights: FloatArray) -> float:
        """sum_i w_i times worker i's mean log-likelihood."""
        total = 0.0
        for positions, rows, padding in self.stacks(self.everyone):
            values = model.log_likelihood(rows, params, padding)
            total += float(weights[positions] @ values)
        return total

    @final
    def worker_rows(self) -> tuple[IntArray, Rows]:
        """State of every worker that has been active."""
        return self._store.export()

    @final
    def restore_rows(self, workers: IntArray, rows: Rows) -> None:
        """Put back what `worker_rows` gave."""
        self._store.put(workers, rows)
