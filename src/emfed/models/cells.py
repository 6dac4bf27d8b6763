"""Sums of the cells that each worker observed, of a table that nobody holds.

The statistics of a worker are the sums of its own cells and nothing else: there is no latent
variable left, so the E-step is the data, less what parameters explain where some are told. What the
sums are fitted by is the server's affair (`emfed.imputation`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn, Self, final

import numpy as np

from emfed.core.errors import DataError, SettingsError, check_count
from emfed.core.protocols import FloatArray, IntArray, Layout, Model, Names, Summaries
from emfed.core.registry import register_model, stored
from emfed.models.site_owner import COLUMNS


@stored("cells")
@final
@dataclass(frozen=True)
class CellSums(Model):
    """Sums of the cells that each worker observed, of a table that nobody holds.

    The rows of a worker have the columns `emfed.models.site_owner.COLUMNS`.

    Parameters
    ----------
    sites : int
        The number of rows of the table: the places where something is counted.
    times : int
        The number of columns of the table.
    centred : bool
        Whether workers tell the mean of their cells' sums in the opening.

    Examples
    --------
    >>> from emfed.models import CellSums
    >>> CellSums(sites=3, times=4).cells
    12
    """

    sites: int
    times: int
    centred: bool = False

    def __post_init__(self) -> None:
        check_count("sites", self.sites)
        check_count("times", self.times)

    @property
    def layout(self) -> Layout:
        """Empty: each worker has its own."""
        return Layout((("cells", (0,)),))

    @property
    def cells(self) -> int:
        """The number of cells of the whole table."""
        return self.sites * self.times

    def support(self, data: Any) -> tuple[IntArray, FloatArray]:
        """Positions in the table, row by row, and weights."""
        rows = np.asarray(data, dtype=np.float64)
        keys = rows[:, 0].astype(np.int64) * self.times + rows[:, 1].astype(np.int64)
        if np.any(np.diff(keys) <= 0):
            raise DataError(
                "the cells of a worker must come sorted by site and time, each once: add up the "
                "records of a cell (weight: how many, total: their sum)."
            )
        return keys, rows[:, 2]

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

    def summary(self, data: Any, weights: Any | None = None) -> dict[str, FloatArray]:
        """The mean of the sums, where it is asked for."""
        if not self.centred:
            return {}
        sums = np.asarray(data, dtype=np.float64)[..., 3]
        real = np.ones_like(sums) if weights is None else np.asarray(weights)
        return {"mean": ((sums * real).sum(axis=-1) / real.sum(axis=-1))[..., None]}

    def bind(self, summaries: Summaries, counts: IntArray, weights: FloatArray) -> Self:
        """Workers need nothing of the others."""
        return self

    def expected_statistics(self, data: Any, params: Any, weights: Any | None = None) -> FloatArray:
        """Sums of cells, less weight times theta where it is told."""
        rows = np.asarray(data, dtype=np.float64)
        return rows[..., 3] if params is None else rows[..., 3] - rows[..., 2] * params

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

    def describe(self) -> dict[str, Any]:
        about = {"model": "cells", "sites": self.sites, "times": self.times}
        return about | ({"centred": True} if self.centred else {})


@register_model("cells")
def cell_sums(sites: int, times: int, centred: bool = False) -> CellSums:
    """Sums of cells of a table of sites and time stamps; see `CellSums`."""
    return CellSums(sites, times, centred)
