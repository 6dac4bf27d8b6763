"""Workers whose rows are in this process, and what they answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, final

import numpy as np

from emfed.core.sums import Answers, Ask, FloatArray, Gather, IntArray, OfWorkers, States
from emfed.data.each import EachRows
from emfed.data.summing import HeldRows
from emfed.data.tables import Workers
from emfed.data.workers import with_columns

T = TypeVar("T")


@final
class HeldWorkers:
    """The workers of a simulation, or some of them; see `emfed.core.sums.AskedWorkers`.

    Parameters
    ----------
    data : Workers
        The rows.
    counts_for : array, optional
        What each worker counts for, in rows; by default what its rows do.
    stacked : bool
        Whether sums take workers of equal size together; if not, one after the other.
    first : int
        The number of the first of them, where others come before.

    Examples
    --------
    >>> import numpy as np
    >>> from emfed.data import as_workers
    >>> HeldWorkers(as_workers([np.ones((3, 2)), np.zeros((5, 2))])).totals
    array([3., 5.])
    """

    def __init__(
        self,
        data: Workers,
        counts_for: FloatArray | None = None,
        stacked: bool = True,
        first: int = 0,
    ) -> None:
        self.data, self._stacked, self._first = data, stacked, first
        self.names, self.columns, self.streaming = data.names, data.columns, data.streaming
        self.totals = data.totals if counts_for is None else counts_for
        self.counts = data.positive_counts
        self._rows = HeldRows(data, counts_for, stacked)
        self._each = EachRows(data, counts_for, first)

    @classmethod
    def of(cls, rows: HeldRows, number: int) -> HeldWorkers:
        """The rows of one site as those of the worker of this number."""
        return cls(rows.data, first=number)

    def view(
        self, columns: tuple[str, ...] | None, counts_for: FloatArray | None = None
    ) -> HeldWorkers:
        """The same workers with these columns alone, who count for this; None: as they are."""
        data = self.data if columns is None else with_columns(self.data, columns)
        return HeldWorkers(data, counts_for, self._stacked, self._first)

    def everywhere(self, function: Callable[[Workers], T]) -> list[T]:
        """What a function of the rows gives."""
        return [function(self.data)]

    def sum(self, ask: Ask) -> FloatArray:
        """The exact sum of all parts."""
        return ask.part(self._rows)

    def each(self, ask: Ask, workers: IntArray) -> FloatArray:
        """The parts of these workers."""
        return np.stack([ask.part(self._each.one(worker)) for worker in workers.tolist()])

    def parts(self, ask: OfWorkers, workers: IntArray, states: States) -> FloatArray:
        """The parts of these workers, where they keep states; these are changed in place."""
        return ask.parts(self._each, workers, states)

    def answers(self, ask: Gather, workers: IntArray, states: States) -> Answers:
        """What these workers reply; their states are changed in place."""
        return ask.answer(self._each, workers, states)

    def encoded(
        self, ask: Gather, workers: IntArray, states: States
    ) -> tuple[Answers, list[bytes]]:
        """The same, with the message of each."""
        return ask.encoded(self._each, workers, states)
