"""What the in-process federations share: the store of worker rows, and driving the workers."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from emfed.core.errors import DataError, SettingsError
from emfed.core.protocols import (
    Algorithm,
    Column,
    Federation,
    FloatArray,
    IntArray,
    Latent,
    Model,
    Opening,
    Oracle,
    Replies,
    Request,
    Rows,
)
from emfed.data.sources import chunks
from emfed.data.tables import Piece, Workers, apart
from emfed.data.workers import WorkerData
from emfed.models.devices import Ragged
from emfed.network.scoring import expectation, means_and_spreads, score


@final
class RowStore:
    """Columns of state for every worker that has been active.

    A worker gets its place when its rows are first written, so a million registered workers cost
    what the active ones use, and rows written together lie together.
    """

    def __init__(self, columns: dict[str, Column], n: int) -> None:
        self._columns = columns
        self._places: IntArray = np.full(n, -1, dtype=np.int64)
        self._owners: IntArray = np.empty(0, dtype=np.int64)
        self._room = 0
        self._arrays: Rows = {name: self._fresh(column, 0) for name, column in columns.items()}
        self._complete = False
        """Whether row i of the arrays is worker i."""

    @staticmethod
    def _fresh(column: Column, count: int) -> NDArray[Any]:
        shape = (count, *column.shape)
        if column.fill == 0:
            return np.zeros(shape, dtype=column.dtype)
        return np.full(shape, column.fill, dtype=column.dtype)

    def take(self, workers: IntArray) -> Rows:
        """Rows of these workers (sorted, each once); treat them as read-only."""
        if self._complete and len(workers) == len(self._places):
            return dict(self._arrays)
        places = self._places[workers]
        known = places >= 0
        if known.all():
            return {name: array[places] for name, array in self._arrays.items()}
        out = {name: self._fresh(column, len(workers)) for name, column in self._columns.items()}
        for name, array in self._arrays.items():
            out[name][known] = array[places[known]]
        return out

    def put(self, workers: IntArray, rows: Rows) -> None:
        """Write rows back."""
        self._settle(workers)
        whole = self._complete and len(workers) == len(self._places)
        index = slice(None) if whole else self._places[workers]
        for name, array in self._arrays.items():
            if rows[name] is not array:
                array[index] = rows[name]

    def _settle(self, workers: IntArray) -> None:
        """Give those who have none a place."""
        new = workers[self._places[workers] < 0]
        if len(new) == 0:
            return
        used, n = len(self._owners), len(self._places)
        needed = used + len(new)
        if needed > self._room:
            self._room = min(max(needed, 2 * used), n)
            for name, column in self._columns.items():
                grown = self._fresh(column, self._room)
                grown[:used] = self._arrays[name][:used]
                self._arrays[name] = grown
        self._places[new] = np.arange(used, needed)
        self._owners = np.concatenate([self._owners, new])
        self._complete = needed == n and bool(np.all(self._owners[1:] > self._owners[:-1]))

    def export(self) -> tuple[IntArray, Rows]:
        """All rows ever written, with their workers."""
        workers = np.sort(self._owners)
        return workers, {name: array[self._places[workers]] for name, array in self._arrays.items()}


@final
class _Rows(Oracle):
    """Rows of a batch of workers; ``streams`` are their numbers where random numbers are drawn."""

    def __init__(
        self, model: Model, data: Workers, workers: IntArray, pieces: Any, streams: IntArray
    ) -> None:
        self._model, self._data, self._workers, self._pieces = model, data, workers, pieces
        self._streams = streams
        self.counts = data.counts_of(workers)

    def full(self, params: Any, subset: IntArray, latent: Latent | None = None) -> FloatArray:
        """s-bar_i(theta), piece by piece."""
        workers = self._workers[subset]
        out = np.zeros((len(workers), self._model.layout.size))
        sweeps = latent is None and takes_slices(self._model)
        for piece in _whole(self._pieces(self._data, workers), sweeps):
            if latent is None:
                values = self._model.expected_statistics(piece.rows, params, piece.padding)
            else:
                streams = self._streams[subset][piece.positions]
                values = self._simulate(params, piece, streams, latent)
            out[piece.positions] += piece.share * values
        return out

    def _simulate(self, params: Any, piece: Piece, workers: IntArray, latent: Latent) -> FloatArray:
        """The E-step by simulation, a block of rows at a time: uniforms are never all there."""
        m = piece.rows.shape[1]
        block = max(1, SIMULATED_ROWS // len(workers))
        total: Any = 0.0
        for start in range(0, m, block):
            part = slice(start, min(start + block, m))
            rows = piece.rows[:, part, ...]
            u = latent(workers, piece.first + start, rows.shape[1])
            if piece.padding is None:
                share: Any = rows.shape[1] / m
                values = self._model.simulated_statistics(rows, params, u)
            else:  # of workers without rows in this block nothing counts
                padding = piece.padding[:, part]
                share = (padding.sum(axis=1) / piece.padding.sum(axis=1))[:, None]
                padding = np.where(share > 0, padding, 1.0)
                values = self._model.simulated_statistics(rows, params, u, padding)
            total = total + share * values
        return np.asarray(total)

    def take(self, indices: IntArray, subset: IntArray) -> Any:
        """Picked rows."""
        return self._data.take(self._workers[subset], indices)


SIMULATED_ROWS = 1 << 14
"""Rows whose latent variables are drawn at once."""


def takes_slices(model: Model) -> bool:
    """Whether a model takes rows of many workers as slices of one tensor."""
    return bool(getattr(model, "sweeps", False))


def _whole(pieces: Iterable[Piece], sweeps: bool) -> Iterator[Piece]:
    """Pieces as they are, or those of ragged rows one worker at a time."""
    for piece in pieces:
        yield from [piece] if sweeps else apart(piece)


def _summaries(
    model: Model, pieces: Iterable[Piece]
) -> Iterator[tuple[IntArray, float, dict[str, FloatArray]]]:
    """Positions, share and summary of each piece."""
    for piece in pieces:
        yield piece.positions, piece.share, model.summary(piece.rows, piece.padding)


class InProcessFederation(Federation):
    """All workers' data and state in this process.

    The worker of row 0 is number ``first``: a shard of a larger federation keeps its workers'
    numbers, and with them their random numbers.
    """

    def __init__(self, data: Workers, first: int = 0) -> None:
        self.data, self.first = data, first

    @abstractmethod
    def batches(self, workers: IntArray) -> Iterator[IntArray]:
        """Positions of the workers that are driven together."""

    @abstractmethod
    def pieces(self, data: Workers, workers: IntArray) -> Iterator[Piece]:
        """All rows of these workers, as many at a time as the federation likes."""

    @property
    @final
    def size(self) -> int:
        """The number of workers."""
        return self.data.size

    @property
    @final
    def everyone(self) -> IntArray:
        """All workers, by their places in the data."""
        return np.arange(self.size, dtype=np.int64)

    @final
    def open(self, model: Model) -> Opening:
        """Check the data and gather the summaries."""
        data = self.data
        if data.streaming and model.fixed_data:
            raise SettingsError(
                "this model needs a constant of the data that a stream does not have: use "
                "gaussian_mixture(..., 'tied', second_moment='statistic')."
            )
        self._check(model, data)
        gathered: dict[str, FloatArray] = {}
        found = _whole(self.pieces(data, self.everyone), False)
        for _, group in groupby(found, key=lambda piece: int(piece.positions[0])):
            parts = list(_summaries(model, group))
            positions, _, summary = parts[0]
            if len(parts) > 1:
                shares = np.array([share for _, share, _ in parts])
                whole = {
                    name: np.concatenate([part[name] for *_, part in parts]) for name in summary
                }
                summary = {name: v[None] for name, v in model.combine(whole, shares).items()}
            for name, values in summary.items():
                if name not in gathered:
                    gathered[name] = np.empty((self.size, *values.shape[1:]))
                gathered[name][positions] = values
        totals = None if data.row_weights is None else data.totals
        return Opening(data.positive_counts, gathered, data.columns, data.names, totals)

    def _check(self, model: Model, data: Workers) -> None:
        """Refuse rows that the model cannot use, and name whose they are."""
        if isinstance(data, WorkerData) and data.counts.all():
            with contextlib.suppress(DataError):  # or find whose fault it is, for the message
                model.check(data.rows, "the data", data.columns)
                return
        for worker in range(data.size):
            rows = data.worker(worker)
            if rows.shape[0] == 0:
                raise DataError(
                    f"{self._where(worker)} has no rows; expected at least one: leave out what is "
                    "empty."
                )
            for first, block in chunks(rows):
                block = block.rows if isinstance(block, Ragged) else block
                model.check(block, self._where(worker), data.columns, first)

    def oracle(self, request: Request, streams: IntArray | None = None) -> Oracle:
        """The data of the asked workers; what is fresh in this round is looked at first.

        ``streams`` are the workers' numbers in the whole federation, if others than they go by.
        """
        places = request.workers - self.first
        data = self.data.fresh(request.round, places)
        if data is not self.data:
            for worker in places.tolist():
                where = f"{self._where(worker)}, round {request.round}"
                self._model.check(data.worker(worker), where, data.columns)
        numbers = request.workers if streams is None else streams
        return _Rows(self._model, data, places, self.pieces, numbers)

    def _where(self, place: int) -> str:
        return f"worker {self.data.name(place)!r}"

    @final
    def begin(self, model: Model, algorithm: Algorithm, seed: int) -> None:
        """Fresh state for everyone."""
        if self.data.streaming and algorithm.revisits_rows:
            raise SettingsError(
                "a Stream gives each row once, and this algorithm needs rows again: use FedEM."
            )
        if self.data.row_weights is not None and getattr(algorithm, "batch_size", None):
            raise SettingsError(
                "sample_weight goes with full passes: leave batch_size out, or the weights."
            )
        self._model, self._algorithm, self._seed = model, algorithm, seed
        self._store = RowStore(algorithm.columns(model.layout.size), self.size)

    @final
    def narrow(self, model: Model, places: IntArray) -> None:
        """Go on with these of the statistics: every worker's state keeps what belongs to them."""
        q = self._model.layout.size
        columns = self._algorithm.columns(q)
        workers, rows = self._store.export()
        kept = {n: a[:, places] if columns[n].shape == (q,) else a for n, a in rows.items()}
        self.begin(model, self._algorithm, self._seed)
        self._store.put(workers, kept)

    @final
    def exchange(self, request: Request) -> Replies:
        """Drive the asked workers and write their rows back."""
        out = []
        for positions in self.batches(request.workers):
            part = request if len(positions) == len(request.workers) else request.take(positions)
            places = part.workers - self.first
            rows = self._store.take(places)
            try:
                oracle = self.oracle(part)
                rows, replies = self._algorithm.worker_step(
                    self._model, self._seed, rows, part, oracle
                )
            except Exception as error:
                if len(positions) == 1:
                    error.add_note(f"while driving {self._where(int(places[0]))}")
                raise
            self._store.put(places, rows)
            out.append(replies)
        return out[0] if len(out) == 1 else Replies.join(out, len(request.statistics))

    @final
    def mean_statistics(self, model: Model, params: Any, weights: FloatArray) -> FloatArray:
        """sum_i w_i s-bar_i(theta)."""
        total = np.zeros(model.layout.size)
        for piece in _whole(self.pieces(self.data, self.everyone), takes_slices(model)):
            values = model.expected_statistics(piece.rows, params, piece.padding)
            total += piece.share * (weights[piece.positions] @ values)
        return total

    @final
    def mean_log_likelihood(self, model: Model, params: Any, weights: FloatArray) -> float:
        """sum_i w_i times worker i's mean log-likelihood."""
        total = 0.0
        for piece in _whole(self.pieces(self.data, self.everyone), takes_slices(model)):
            values = model.log_likelihood(piece.rows, params, piece.padding)
            total += piece.share * float(weights[piece.positions] @ values)
        return total

    @final
    def scores(self, model: Model, params: Any) -> FloatArray:
        """Mean and spread of the log-likelihood of each worker's rows, and what was expected."""
        expected, total = expectation(model, params), np.zeros((self.size, 4))
        for piece in _whole(self.pieces(self.data, self.everyone), False):
            total[piece.positions] += piece.share * score(model, params, piece, expected)
        return means_and_spreads(total)

    @final
    def worker_rows(self) -> tuple[IntArray, Rows]:
        """State of every worker that has been active."""
        places, rows = self._store.export()
        return places + self.first, rows

    @final
    def restore_rows(self, workers: IntArray, rows: Rows) -> None:
        """Put back what `worker_rows` gave."""
        self._store.put(workers - self.first, rows)
