"""What the fit of a table asks of its workers: which cells each has seen, and their sums.

The paper's latent variables are all cells that a worker has not observed. They carry no
information: integrating them out leaves, for each worker, the weight and the sum of each cell that
it observed, and no latent variable. These numbers depend on no parameters, so they are asked for
once, and what is left of FedMissEM is T(S), a penalised low-rank fit of the pooled sums
(`emfed.imputation.sweeps`), which needs no further exchange.

Sums need one list of cells for all workers, so who has not seen a cell adds zero to it. Where
nothing is masked each worker sends its own cells alone, which is much shorter.

Decision: docs/decisions/020-imputation.md
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, final

import numpy as np

from emfed.core.errors import DataError, SettingsError
from emfed.core.protocols import WorkerCells
from emfed.core.sums import (
    Answers,
    Ask,
    Fit,
    FloatArray,
    Gather,
    IntArray,
    Precision,
    Rows,
    RowsOfWorkers,
    Stated,
    States,
)
from emfed.core.wire import cells_size
from emfed.core.wording import Setting, Wording
from emfed.data.sources import chunks
from emfed.data.tables import Workers
from emfed.imputation.lowrank import Cells
from emfed.models.site_owner import COLUMNS

MOST_CELLS = 1 << 20
"""Cells of a table whose sums are asked for: a part with two numbers of each has room in a
message."""
DIGITS = 40
"""Sums of cells are sent in a unit so many binary places below the size of all values: whole
numbers stay whole."""
TableShape = tuple[int, int]
"""Sites and times."""


def pooled_cells(shape: TableShape, workers: int, observers: int) -> Fit[Cells]:
    """The cells that at least so many workers have seen, with weights and sums over all of them.

    Examples
    --------
    >>> from emfed.aggregation.simulated import SimulatedSums
    >>> from emfed.core.sums import drive
    >>> from emfed.data import as_workers
    >>> from emfed.data.held import HeldWorkers
    >>> rows = [np.array([[0.0, 1, 1, 5]]), np.array([[0.0, 1, 2, 7], [1, 0, 1, 3]])]
    >>> sums = SimulatedSums(HeldWorkers(as_workers(rows)), 2)
    >>> drive(pooled_cells((2, 2), 2, observers=2), sums).sums
    array([12.])
    """
    check_masked(shape)
    weight, size = (yield Totals()).value
    seen = np.rint((yield Observers(shape, workers)).value)
    chosen = seen >= observers
    if not chosen.any():
        most = int(seen.max(initial=0))
        raise DataError(f"no cell was seen by {observers} workers; by {most} at most.")
    ask = ObservedSums.of(shape, np.flatnonzero(chosen), workers, (float(weight), float(size)))
    weights, sums = np.split(np.rint((yield ask).value / ask.multiples) * ask.multiples, 2)
    return Cells(ask.keys // shape[1], ask.keys % shape[1], weights, sums, shape)


def check_masked(shape: TableShape) -> None:
    """Refuse tables of which no message could hold a number for each cell."""
    cells = shape[0] * shape[1]
    if cells > MOST_CELLS:
        raise SettingsError(
            Wording(
                "masked sums need a number of every cell from every site, and this table has {:,} "
                "cells; at most {:,} have room in a message. Choose coarser bins or fewer places, "
                "or fit with {}, which every site must allow.",
                *(cells, MOST_CELLS, Setting("masks", False)),
            )
        )


def check_cells(shape: TableShape, data: Workers) -> None:
    """Refuse rows that are no cells of a table, each once, and name whose they are."""
    for worker in range(data.size):
        where, before = f"worker {data.name(worker)!r}", -1
        for _, block in chunks(data.worker(worker)):
            rows = np.asarray(block)
            if rows.ndim != 2 or rows.shape[1] != len(COLUMNS) or not np.isfinite(rows).all():
                raise DataError(f"{where}: expected finite columns {COLUMNS}; got {rows.shape}.")
            low, high = rows[:, :2].min(axis=0), rows[:, :2].max(axis=0)
            if low.min() < 0 or np.any(high >= shape) or rows[:, 2].min() <= 0:
                raise DataError(
                    f"{where}: sites must lie below {shape[0]}, times below {shape[1]}, weights "
                    "above 0."
                )
            keys = _keys(rows, shape)
            if np.any(np.diff(keys, prepend=before) <= 0):
                raise DataError(
                    f"{where}: the cells of a worker must come sorted by site and time, each once: "
                    "add up the records of a cell (weight: how many, total: their sum)."
                )
            before = int(keys[-1])


def _keys(rows: FloatArray, shape: TableShape) -> IntArray:
    return rows[..., 0].astype(np.int64) * shape[1] + rows[..., 1].astype(np.int64)


def _unit(size: float) -> float:
    return float(2.0 ** (np.floor(np.log2(size or 1.0)) - DIGITS))


def _exact(units: Any, workers: int, centre: Any, reach: Any) -> Precision:
    """A lattice on which sums of these units are exact: it is finer by more than all roundings."""
    finer = 2.0 ** np.ceil(np.log2(workers + 1))
    steps = np.asarray(units / finer)
    return Precision(steps, np.asarray(centre), np.asarray(reach + units))


@final
@dataclass(frozen=True, eq=False)
class Totals(Ask):
    """The weight of all records, and the size of all values: how large a sum of cells may be."""

    purpose: str = "opening"
    precision: Precision | None = None

    @property
    def size(self) -> int:
        return 2

    def part(self, rows: Rows) -> FloatArray:
        """The sums over these rows."""

        def mean(block: Any, weights: Any) -> FloatArray:
            real = _weights(block, weights)
            weighted = real[..., None] * np.abs(np.asarray(block)[..., 2:])
            return np.asarray(weighted.sum(axis=1) / real.sum(axis=1)[:, None])

        return rows.sum(mean)

    def words(self) -> str:
        return "the number of records and the sum of their values"

    def about(self) -> tuple[Stated, ...]:
        return ()


def _weights(block: Any, weights: Any) -> FloatArray:
    shape = np.shape(block)[:2]
    return np.ones(shape) if weights is None else np.asarray(weights)


@final
@dataclass(frozen=True, eq=False)
class Observers(Ask):
    """How many workers have seen each cell of a table."""

    shape: TableShape
    workers: int
    purpose: str = "opening"

    @property
    def precision(self) -> Precision:  # type: ignore[override]
        """From 0 to the number of workers, exactly."""
        half = self.workers / 2
        return _exact(1.0, self.workers, half, half)

    @property
    def size(self) -> int:
        return self.shape[0] * self.shape[1]

    def part(self, rows: Rows) -> FloatArray:
        return rows.sum(partial(_added, self.shape, None, ()))

    def words(self) -> str:
        return f"which of {self.size} cells were observed"

    def about(self) -> tuple[Stated, ...]:
        return (repr(self.shape).encode(),)


@final
@dataclass(frozen=True, eq=False)
class ObservedSums(Ask):
    """Weights of some cells, then the sums of their values."""

    shape: TableShape
    keys: IntArray
    """Positions of the cells in the table, row by row."""
    multiples: FloatArray
    """What each number is a multiple of, once it is rounded."""
    precision: Precision
    purpose: str = "opening"

    @classmethod
    def of(
        cls, shape: TableShape, keys: IntArray, workers: int, totals: tuple[float, float]
    ) -> Any:
        """The ask where all records have this weight, and all values this size."""
        each = np.repeat([[_unit(total), total] for total in totals], len(keys), axis=0).T
        units, reach = each
        weighs = np.arange(len(units)) < len(keys)  # weights are above 0
        centre, reach = np.where(weighs, reach / 2, 0.0), np.where(weighs, reach / 2, reach)
        return cls(shape, keys, units, _exact(units, workers, centre, reach))

    @property
    def size(self) -> int:
        return 2 * len(self.keys)

    def part(self, rows: Rows) -> FloatArray:
        return rows.sum(partial(_added, self.shape, self.keys, (2, 3)))

    def words(self) -> str:
        return f"how often {len(self.keys)} cells were observed, and the sums of their values"

    def about(self) -> tuple[Stated, ...]:
        """Which cells, and how exactly."""
        return self.keys.astype("<i8"), self.multiples


def _added(
    shape: TableShape, keys: IntArray | None, columns: tuple[int, ...], block: Any, weights: Any
) -> FloatArray:
    """Columns of the rows of each worker, or ones, added up by cell: divided by its rows.

    ``keys`` are the cells that are sent; None: all.
    """
    rows, count = np.asarray(block), shape[0] * shape[1]
    real, places = _weights(block, weights), _keys(rows, shape)
    values = [rows[..., column] * real for column in columns] or [real]
    out = []
    for worker, own in enumerate(places):
        dense = [np.bincount(own, value[worker], count) for value in values]
        picked = dense if keys is None else [one[keys] for one in dense]
        out.append(np.concatenate(picked) / real[worker].sum())
    return np.stack(out)


@final
@dataclass(frozen=True, eq=False)
class OwnCells(Gather):
    """The cells of each worker, as it observed them: exactly, and never masked."""

    shape: TableShape
    workers: IntArray
    purpose: str = "opening"

    def fields(self) -> dict[str, Any]:
        return {}

    def answer(self, rows: RowsOfWorkers, workers: IntArray, states: States) -> Answers:
        """`WorkerCells` of these workers."""
        counts, table = rows.counts[workers], self.shape[0] * self.shape[1]
        values = np.empty(len(workers), dtype=object)
        for place, worker in enumerate(workers.tolist()):
            own = rows.some(worker, int(counts[place]))[0]
            values[place] = WorkerCells(_keys(own, self.shape), own[:, 2], own[:, 3])
        sizes = np.array([cells_size(own) for own in values], dtype=np.int64)
        if any(own.keys[-1] >= table for own in values):
            raise DataError(f"a cell lies outside a table of {table}.")
        nothing = np.zeros(len(workers))
        return Answers(workers, values, nothing, sizes, workers[:0], rows.totals[workers], counts)

    def concluded(
        self, answers: Answers, memory: FloatArray | None
    ) -> tuple[list[WorkerCells], bytes, FloatArray]:
        """The cells of each worker: the adder keeps them to itself."""
        return answers.values.tolist(), b"", np.zeros(0)
