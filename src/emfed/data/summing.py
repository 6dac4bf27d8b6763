"""Rows that a driver holds, as a fit's asks see them: something to sum over."""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

import numpy as np

from emfed.core.sums import FloatArray, Mean
from emfed.data.tables import Piece, Workers, apart


@final
class HeldRows:
    """The rows of one site, or of all workers of a simulation.

    Parameters
    ----------
    data : Workers
        The rows.
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

    def __init__(self, data: Workers, stacked: bool = True) -> None:
        self.data, self._stacked = data, stacked
        self._totals = data.totals

    @property
    def total(self) -> float:
        """The sum of the rows' weights."""
        return float(self._totals.sum())

    def sum(self, mean: Mean, ragged: bool = False) -> FloatArray:
        """The weighted sum over all rows of a function that gives means over blocks of rows."""
        total = np.zeros(())
        for piece in self._pieces(ragged):
            values = mean(piece.rows, piece.padding)
            total = total + (piece.share * self._totals[piece.positions]) @ values
        return np.asarray(total)

    def _pieces(self, ragged: bool) -> Iterator[Piece]:
        workers = np.arange(self.data.size, dtype=np.int64)
        pieces = self.data.stacks(workers) if self._stacked else self.data.pieces(workers)
        for piece in pieces:
            yield from [piece] if ragged else apart(piece)
