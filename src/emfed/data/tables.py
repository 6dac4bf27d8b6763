"""Who holds which rows: the contract of the in-process federations, and workers one table each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, final

import numpy as np
from array_api_compat import array_namespace, device

from emfed.core.errors import DataError
from emfed.core.protocols import FloatArray, IntArray
from emfed.data.reading import match_columns, read_table
from emfed.data.sources import Source, Stream, chunks
from emfed.models.devices import PassPrecision, Ragged, ragged
from emfed.models.mixture import to_numpy


def gather(rows: Any, indices: IntArray) -> Any:
    """``rows[indices]`` on any array namespace or source, for indices of any shape."""
    if isinstance(rows, Source):
        return rows.take(indices)
    xp = array_namespace(rows)
    flat = xp.asarray(indices.ravel(), device=device(rows))
    return xp.reshape(xp.take(rows, flat, axis=0), (*indices.shape, *rows.shape[1:]))


def _row_axis(block: Any, weights: Any, precision: PassPrecision) -> Any:
    """One worker's rows with a worker axis, on a device with the precision of passes there."""
    if isinstance(block, Ragged):
        return block
    if precision == "double":
        return block[None, ...]
    found = ragged(block, None if weights is None else weights[0])
    return block[None, ...] if found is None else replace(found, precision=precision)


class Piece(NamedTuple):
    """Rows of some workers, ``(positions, m, ...)``; a mean over them counts for ``share``."""

    positions: IntArray
    rows: Any
    padding: Any
    """Weights of the rows, 0 where they only fill up; None where all count alike."""
    share: float
    """The part of the workers' rows, by weight, that this is."""
    first: int
    """How many of their rows came before."""


def tables(data: Workers, workers: Iterable[int]) -> Iterator[tuple[int, FloatArray]]:
    """The number of rows of these workers, and some of the rows: evenly spread ones, or of files
    the first. Nothing where rows have weights, or are others each time.
    """
    plain = data.row_weights is None and not data.streaming
    for worker in workers if plain else ():
        rows = data.worker(worker)
        count = int(rows.shape[0])
        stride = 1 if isinstance(rows, Source) else max(1, -(-count // SOME))
        numbers = np.arange(0, count, stride, dtype=np.int64)[:SOME]
        yield count, np.asarray(to_numpy(gather(rows, numbers)))


SOME = 10_000
"""Rows of a worker that are some."""


def apart(piece: Piece) -> Iterator[Piece]:
    """A piece of ragged rows as pieces of one worker each, for what takes arrays alone."""
    if not isinstance(piece.rows, Ragged):
        yield piece
        return
    found = piece.rows
    for place, start, count in zip(
        piece.positions.tolist(), found.starts.tolist(), found.counts.tolist(), strict=True
    ):
        own = slice(start, start + count)
        padding = piece.padding
        if found.weights is not None:
            padding = found.weights[own].cpu().numpy()[None]
        yield Piece(np.array([place]), found.rows[own][None], padding, piece.share, piece.first)


class Workers(ABC):
    """The rows of all workers of a simulation; `as_workers` makes one from what a user holds.

    Examples
    --------
    >>> import numpy as np
    >>> import emfed
    >>> workers = emfed.data.as_workers({"north": np.zeros((3, 2)), "south": np.ones((5, 2))})
    >>> workers.size, workers.counts, workers.name(1)
    (2, array([3, 5]), 'south')
    """

    names: Sequence[str] | None
    columns: tuple[str, ...] | None
    row_weights: Sequence[FloatArray] | None = None
    """Weights of the rows, worker by worker; None where all count alike."""
    precision: PassPrecision = "double"
    """The precision of passes over rows on a device."""
    first_line: int | None = None
    """Where rows came from text files: the line of the first. Messages then speak of lines."""
    left_out: Mapping[str, str] = {}
    """Columns of a file that hold no numbers, and why."""

    def row_name(self, worker: int, row: int) -> str:
        """What the user's table calls a worker's row: messages say it."""
        place = self.place(worker, row)
        return f"row {place}" if self.first_line is None else f"line {place + self.first_line}"

    def place(self, worker: int, row: int) -> int:
        """The place of a worker's row in the table it came from, counting from 0."""
        return row

    @property
    @final
    def totals(self) -> FloatArray:
        """What each worker counts for: the sum of its rows' weights."""
        if self.row_weights is None:
            return self.counts.astype(np.float64)
        return np.array([w.sum() for w in self.row_weights])

    @property
    @final
    def positive_counts(self) -> IntArray:
        """Rows of each worker that have some weight."""
        if self.row_weights is None:
            return self.counts
        return np.array([np.count_nonzero(w) for w in self.row_weights], dtype=np.int64)

    @property
    @abstractmethod
    def counts(self) -> IntArray:
        """Rows of each worker."""

    @property
    @abstractmethod
    def size(self) -> int:
        """The number of workers."""

    @abstractmethod
    def counts_of(self, workers: IntArray) -> IntArray:
        """Rows of these workers."""

    @abstractmethod
    def worker(self, worker: int) -> Any:
        """One worker's rows, not copied: an array or a `Source`."""

    @abstractmethod
    def stacks(self, workers: IntArray) -> Iterator[Piece]:
        """All rows of these workers, several workers at a time where that pays."""

    @abstractmethod
    def take(self, workers: IntArray, indices: IntArray) -> Any:
        """Rows ``(len(workers), b, ...)`` at local ``indices`` ``(len(workers), b)``."""

    @property
    def streaming(self) -> bool:
        """Whether some worker gives fresh rows each round."""
        return False

    def fresh(self, round_: int, workers: IntArray) -> Workers:
        """The same workers, with what the streams of these give in this round."""
        return self

    @final
    def pieces(self, workers: IntArray) -> Iterator[Piece]:
        """All rows of these workers, one worker at a time."""
        for position, worker in enumerate(workers.tolist()):
            rows = self.worker(worker)
            total = max(1, rows.shape[0])
            own = None if self.row_weights is None else self.row_weights[worker]
            for first, block in chunks(rows):
                share, part = block.shape[0] / total, None
                if own is not None:
                    part = own[None, first : first + block.shape[0]]
                    share = float(part.sum() / own.sum())
                    if share == 0:
                        continue
                rows = _row_axis(block, part, self.precision)
                kept = None if isinstance(rows, Ragged) and rows.weights is not None else part
                yield Piece(np.array([position]), rows, kept, share, first)

    @final
    def name(self, worker: int) -> str:
        """A worker's name, its index if it has none."""
        return str(worker) if self.names is None else self.names[worker]

    @final
    def check_names(self) -> None:
        """Refuse names that are not one per worker, and those given twice."""
        if self.names is None:
            return
        if len(self.names) != self.size:
            raise DataError(f"got {len(self.names)} worker names for {self.size} workers.")
        if len(set(self.names)) != self.size:
            twice = next(name for name, k in Counter(self.names).items() if k > 1)
            raise DataError(f"two workers are called {twice!r}: names must be unique.")


@final
class WorkerTables(Workers):
    """One table for each worker, each where it is: an array, a `Source` or a `Stream`.

    Parameters
    ----------
    tables : sequence
        The tables.
    names : sequence of str, optional
        The names of the workers.
    columns : tuple of str, optional
        The names of the columns.
    row_weights : sequence of arrays, optional
        How much each row counts, worker by worker.
    precision : {"double", "fast"}
        The precision of passes over rows on a device.

    Examples
    --------
    >>> import numpy as np
    >>> from emfed.data import WorkerTables
    >>> WorkerTables([np.zeros((3, 2)), np.ones((5, 2))]).counts
    array([3, 5])
    """

    def __init__(
        self,
        tables: Sequence[Any],
        names: Sequence[str] | None = None,
        columns: tuple[str, ...] | None = None,
        row_weights: Sequence[FloatArray] | None = None,
        precision: PassPrecision = "double",
    ) -> None:
        self.tables, self.names, self.columns = list(tables), names, columns
        self.row_weights, self.precision = row_weights, precision
        self.check_names()

    @property
    def size(self) -> int:
        return len(self.tables)

    @property
    def streaming(self) -> bool:
        return any(isinstance(table, Stream) for table in self.tables)

    @property
    def counts(self) -> IntArray:
        """Rows of each worker; of a stream, those of its opening."""
        return self.counts_of(np.arange(self.size))

    def counts_of(self, workers: IntArray) -> IntArray:
        return np.array([self.worker(i).shape[0] for i in workers.tolist()], dtype=np.int64)

    def worker(self, worker: int) -> Any:
        """One worker's table; of a stream, that of its opening."""
        table = self.tables[worker]
        return self._draw(worker, 0) if isinstance(table, Stream) else table

    def stacks(self, workers: IntArray) -> Iterator[Piece]:
        """One worker at a time: they are large, or not in memory."""
        return self.pieces(workers)

    def take(self, workers: IntArray, indices: IntArray) -> Any:
        """Picked rows of each worker, stacked."""
        parts = [
            gather(self.worker(int(worker)), picks)
            for worker, picks in zip(workers, indices, strict=True)
        ]
        return array_namespace(*parts).stack(parts)

    def fresh(self, round_: int, workers: IntArray) -> Workers:
        """The tables, with the streams of these workers drawn for this round."""
        if not self.streaming:
            return self
        tables = list(self.tables)
        for worker in workers.tolist():
            if isinstance(tables[worker], Stream):
                tables[worker] = self._draw(worker, round_)
        return WorkerTables(tables, self.names, self.columns, precision=self.precision)

    def _draw(self, worker: int, round_: int) -> Any:
        """The rows of a stream in this round, in the common columns."""
        where = f"worker {self.name(worker)!r}, round {round_}"
        rows, columns = read_table(self.tables[worker].rows(round_), where)
        if (columns is None) != (self.columns is None):
            raise DataError(f"{where}: some tables name their columns, others do not.")
        if columns is not None and self.columns is not None:
            rows = match_columns(rows, columns, self.columns, where)
        return rows
