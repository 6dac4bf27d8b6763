"""Rows that a driver holds, as a fit's asks see them: something to sum over."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import final

import numpy as np

from emfed.core.errors import DataError, SettingsError
from emfed.core.protocols import Model
from emfed.core.sums import FloatArray, Mean, Pick
from emfed.core.wording import Setting, Wording
from emfed.data.sources import chunks
from emfed.data.tables import Piece, Workers, apart, tables
from emfed.data.workers import WorkerData, picked
from emfed.models.mixture import to_numpy
from emfed.models.naming import rows_named


@final
class HeldRows:
    """The rows of one site, or of all workers of a simulation.

    Parameters
    ----------
    data : Workers
        The rows.
    weights : array, optional
        What each worker counts for, in rows; by default what its rows do.
    stacked : bool
        Whether workers of equal size are computed together; if not, one after the other.

    Examples
    --------
    >>> import numpy as np
    >>> from emfed.data import as_workers
    >>> rows = HeldRows(as_workers([np.ones((3, 2)), np.zeros((5, 2))]))
    >>> rows.total, rows.sum(lambda block, weights: block.mean(axis=1))
    (8.0, array([3., 3.]))
    """

    def __init__(
        self, data: Workers, weights: FloatArray | None = None, stacked: bool = True
    ) -> None:
        self.data, self._stacked = data, stacked
        self._own = data.totals
        self._counts_for = self._own if weights is None else weights
        self._picked: dict[Pick, HeldRows] = {}

    @property
    def held(self) -> HeldRows:
        """Itself: rows that are looked at in another way say so."""
        return self

    @property
    def total(self) -> float:
        """The sum of the rows' weights."""
        return float(self._counts_for.sum())

    @property
    def count(self) -> int:
        """How many rows have a weight."""
        return int(self.data.positive_counts.sum())

    @property
    def squares(self) -> float:
        """The sum over workers of what they count for, squared, over what their rows do."""
        held = self._own > 0
        return float((self._counts_for[held] ** 2 / self._own[held]).sum())

    def sum(self, mean: Mean, ragged: bool = False) -> FloatArray:
        """The weighted sum over all rows of a function that gives means over blocks of rows."""
        total = np.zeros(())
        for piece in self._pieces(ragged):
            values = mean(piece.rows, piece.padding)
            total = total + (piece.share * self._counts_for[piece.positions]) @ values
        return np.asarray(total)

    def tables(self) -> Iterator[tuple[int, FloatArray]]:
        """The number of rows of each worker, and some of them."""
        return tables(self.data, range(self.data.size))

    def picked(self, pick: Pick) -> HeldRows:
        """Some of these rows."""
        if pick not in self._picked:
            data = picked(self.data, pick)
            each = np.divide(
                self._counts_for, self._own, out=np.zeros_like(self._own), where=self._own > 0
            )
            self._picked[pick] = HeldRows(data, each * data.totals, self._stacked)
        return self._picked[pick]

    def blocks(self) -> Iterator[Iterator[FloatArray]]:
        """The rows of each worker, some at a time, where each counts once and is all there."""
        check_plain(self.data)
        return (plain_rows(self.data, worker) for worker in range(self.data.size))

    def _pieces(self, ragged: bool) -> Iterator[Piece]:
        workers = np.flatnonzero(self._own > 0)
        pieces = self.data.stacks(workers) if self._stacked else self.data.pieces(workers)
        for piece in pieces:
            piece = piece._replace(positions=workers[piece.positions])
            yield from [piece] if ragged else apart(piece)


def plain_rows(data: Workers, worker: int, refuse: bool = True) -> Iterator[FloatArray]:
    """A worker's rows, some at a time, where each counts once and is all there.

    Rows with a missing value are an error where all rows are at hand. At a site they are
    left out: an error would tell others that there is one.
    """
    check_plain(data)
    for _, block in chunks(data.worker(worker)):
        rows = to_numpy(block)
        if rows.ndim != 2:
            raise DataError("a private answer is about a table of rows and columns.")
        whole = np.isfinite(rows).all(axis=1)
        if refuse and not whole.all():
            raise DataError("a private answer needs rows without missing values: fill them in.")
        yield rows if whole.all() else rows[whole]


def rows_with_gaps(data: Workers) -> int:
    """How many rows of the only worker have a missing value."""
    blocks = (to_numpy(block) for _, block in chunks(data.worker(0)))
    return sum(int((~np.isfinite(rows).all(axis=1)).sum()) for rows in blocks)


def check_plain(data: Workers) -> None:
    """Refuse rows that have weights, or that come once: a row must have one vote, always."""
    if data.row_weights is not None or data.streaming:
        raise SettingsError(
            Wording(
                "{} goes with plain rows: leave out sample_weight and streams.",
                Setting("epsilon"),
            )
        )


def check_rows_held(model: Model, data: Workers) -> None:
    """Refuse rows that the model cannot use, and name whose they are."""
    if isinstance(data, WorkerData) and data.counts.all():
        with suppress(DataError):  # or find whose fault it is, for the message
            model.check(data.rows, "the data", data.columns)
            return
    for worker in range(data.size):
        rows, where = data.worker(worker), f"worker {data.name(worker)!r}"
        if rows.shape[0] == 0:
            raise DataError(f"{where} has no rows; expected at least one: leave out what is empty.")
        for first, block in chunks(rows):
            with rows_named(partial(data.row_name, worker)):
                model.check(block, where, data.columns, first)


def summary_shapes(model: Model, data: Workers) -> dict[str, tuple[int, ...]]:
    """The shapes of a model's summary of one worker's rows."""
    piece = next(iter(data.pieces(np.zeros(1, dtype=np.int64))))
    rows = next(iter(apart(piece))).rows
    return {name: values.shape[1:] for name, values in model.summary(rows).items()}
