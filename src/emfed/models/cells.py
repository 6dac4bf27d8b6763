"""Sums of the cells that each worker observed, of a table that nobody holds.

A worker tells the weight and the sum of each of its cells, once, in the opening: without its latent
variables a table's likelihood depends on nothing else, so no round is left to make. What is fitted
to the sums is the affair of `emfed.imputation`.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any, NoReturn, Self, final

import numpy as np

from emfed.core.errors import DataError, SettingsError, check_count
from emfed.core.protocols import (
    FloatArray,
    IntArray,
    Layout,
    Model,
    Names,
    Summaries,
    WorkerCells,
)
from emfed.core.registry import register_model, stored
from emfed.models.site_owner import COLUMNS


@dataclass(frozen=True)
class _Table(Model):
    """What models of the cells of a table have in common; parameters are the server's affair."""

    sites: int
    times: int

    def __post_init__(self) -> None:
        check_count("sites", self.sites)
        check_count("times", self.times)

    @property
    def layout(self) -> Layout:
        """Empty: all is told in the opening."""
        return Layout((("cells", (0,)),))

    @property
    def cells(self) -> int:
        """The number of cells of the whole table."""
        return self.sites * self.times

    def check(self, data: Any, where: str, columns: Names = None, first: int = 0) -> None:
        """Four columns of finite numbers, cells inside the table, positive weights."""
        rows = np.asarray(data)
        if rows.ndim != 2 or rows.shape[1] != len(COLUMNS) or not np.isfinite(rows).all():
            raise DataError(f"{where}: expected finite columns {COLUMNS}; got {rows.shape}.")
        low, high = rows[:, :2].min(axis=0), rows[:, :2].max(axis=0)
        if low.min() < 0 or high[0] >= self.sites or high[1] >= self.times or rows[:, 2].min() <= 0:
            raise DataError(
                f"{where}: sites must lie below {self.sites}, times below {self.times}, weights "
                "above 0."
            )

    def bind(self, summaries: Summaries, counts: IntArray, weights: FloatArray) -> Self:
        """Workers need nothing of the others."""
        return self

    def expected_statistics(self, data: Any, params: Any, weights: Any | None = None) -> FloatArray:
        """There are none: all is told in the opening."""
        return np.empty((*np.asarray(data).shape[:-2], 0))

    def maximize(self, statistics: FloatArray) -> Any:
        """The model has no parameters of its own."""
        return None

    def _not_here(self) -> NoReturn:
        raise SettingsError("sums of cells are fitted by emfed.impute, which has the parameters.")

    def surrogate(self, statistics: FloatArray, params: Any) -> FloatArray:
        self._not_here()

    def log_likelihood(self, data: Any, params: Any, weights: Any | None = None) -> FloatArray:
        self._not_here()

    def penalty(self, params: Any) -> float:
        self._not_here()

    def inside(self, statistics: FloatArray) -> bool:
        """Everywhere."""
        return True

    def start(self, seed: int) -> Any:
        self._not_here()

    def statistics_of(self, params: Any) -> FloatArray:
        self._not_here()


@stored("cells")
@final
@dataclass(frozen=True)
class CellSums(_Table):
    """The cells that each worker observed, told in the opening: which, how often, and their sums.

    The rows of a worker have the columns `emfed.models.site_owner.COLUMNS`.

    Parameters
    ----------
    sites : int
        The number of rows of the table: the places where something is counted.
    times : int
        The number of columns of the table.

    Examples
    --------
    >>> from emfed.models import CellSums
    >>> CellSums(sites=3, times=4).cells
    12
    """

    def own_cells(self, data: Any) -> WorkerCells:
        """The cells that these rows are of, row by row of the table."""
        rows = np.asarray(data, dtype=np.float64)
        keys = _keys(rows, self.times)
        if np.any(np.diff(keys) <= 0):
            raise DataError(
                "the cells of a worker must come sorted by site and time, each once: add up the "
                "records of a cell (weight: how many, total: their sum)."
            )
        return WorkerCells(keys, rows[:, 2], rows[:, 3])

    def summary(self, data: Any, weights: Any | None = None) -> dict[str, FloatArray]:
        """Nothing: cells are told by themselves."""
        return {}

    def describe(self) -> dict[str, Any]:
        return {"model": "cells", "sites": self.sites, "times": self.times}


@register_model("cells")
def cell_sums(sites: int, times: int) -> CellSums:
    """Sums of cells of a table of sites and time stamps; see `CellSums`."""
    return CellSums(sites, times)


@stored("padded-cells")
@final
@dataclass(frozen=True)
class PaddedCells(_Table):
    """Sums of the cells of a table in the opening, on a support that is the same for all workers.

    A worker tells zeros for what it has not seen, so that masks can hide who saw what. Without
    ``listed`` it tells which cells of the whole table it has seen; the sum is how many have. With
    it, the weights and the sums of the cells that are listed. Nothing is left to ask afterwards:
    sums of cells depend on no parameters.

    Parameters
    ----------
    sites : int
        The number of rows of the table.
    times : int
        The number of columns of the table.
    observers : int
        How many workers have seen each cell that is listed, at least.
    listed : str
        The cells whose sums are asked for (`listed_cells`).

    Examples
    --------
    >>> from emfed.models.cells import PaddedCells, listed_cells
    >>> PaddedCells(3, 4, 2, listed_cells([True, False, True])).told.tolist()
    [0, 2]
    """

    observers: int = 1
    listed: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("observers", self.observers)
        if self.told.max(initial=-1) >= self.cells:
            raise SettingsError(f"a table of {self.cells} cells has none of a number above that.")

    @property
    def told(self) -> IntArray:
        """The cells that are told of."""
        if not self.listed:
            return np.arange(self.cells)
        try:
            packed = bytes.fromhex(self.listed.translate(_FROM_LETTERS))
            packed = zlib.decompressobj().decompress(packed, self.cells // 8 + 1)
        except (ValueError, zlib.error):
            raise SettingsError("a list of cells that cannot be read.") from None
        return np.flatnonzero(np.unpackbits(np.frombuffer(packed, dtype=np.uint8)))

    def summary(self, data: Any, weights: Any | None = None) -> dict[str, FloatArray]:
        """Means over the rows, so that what is pooled by rows is the sum over the workers."""
        rows = np.asarray(data, dtype=np.float64)
        real = np.ones(rows.shape[:-1]) if weights is None else np.asarray(weights)
        parts = {"cell_observers": real}
        if self.listed:
            parts = {"cell_weights": real * rows[..., 2], "cell_sums": real * rows[..., 3]}
        keys, support = _keys(rows, self.times), self.told
        return {
            name: np.stack(
                [
                    np.bincount(own, value, self.cells)[support] / count
                    for own, value, count in zip(
                        np.atleast_2d(keys),
                        np.atleast_2d(values),
                        np.atleast_1d(real.sum(axis=-1)),
                        strict=True,
                    )
                ]
            ).reshape(*rows.shape[:-2], len(support))
            for name, values in parts.items()
        }

    def group_shares(self, statistics: FloatArray) -> FloatArray:
        """All rows: there is nothing else to tell of; the opening counts observers."""
        return np.ones((*statistics.shape[:-1], 1))

    def describe(self) -> dict[str, Any]:
        about: dict[str, Any] = {"model": "padded-cells", "sites": self.sites, "times": self.times}
        return about | ({"observers": self.observers, "listed": self.listed} if self.listed else {})


_LETTERS = "abcdefghijklmnop"
_FROM_LETTERS = str.maketrans(_LETTERS, "0123456789abcdef")
"""Lists are in letters: a site reads digits of a description as counts, which it limits."""


def listed_cells(chosen: Any) -> str:
    """Some cells of a table, row by row, as text that `PaddedCells` takes."""
    packed = zlib.compress(np.packbits(np.asarray(chosen, dtype=np.bool_)).tobytes(), 9)
    return packed.hex().translate(str.maketrans("0123456789abcdef", _LETTERS))


def _keys(rows: FloatArray, times: int) -> IntArray:
    """Positions in the table, row by row."""
    return rows[..., 0].astype(np.int64) * times + rows[..., 1].astype(np.int64)


@register_model("padded-cells")
def padded_cells(sites: int, times: int, observers: int = 1, listed: str = "") -> PaddedCells:
    """Sums of cells on a support that all workers share; see `PaddedCells`."""
    return PaddedCells(sites, times, observers, listed)
