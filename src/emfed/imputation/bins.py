"""Dates to time bins and back: months, weeks (from Monday), years, or plain numbers, no gaps."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from typing import Any, Literal, final

import numpy as np

from emfed.core.errors import check_choice
from emfed.core.protocols import IntArray

Unit = Literal["month", "week", "year", "index"]
UNITS: tuple[Unit, ...] = ("month", "week", "year", "index")
EPOCH = datetime.date(1970, 1, 1)
"""With bins of an index, the number k is the k-th day from here on."""
_MONDAY = datetime.date(1970, 1, 5)


def check_unit(unit: str) -> None:
    """Refuse anything but the names."""
    check_choice("bins", unit, UNITS)


def ordinal(dates: Any, unit: Unit) -> Any:
    """The number of the bin of each date, as a polars expression."""
    if unit == "year":
        return dates.dt.year().cast(int)
    if unit == "month":
        return dates.dt.year().cast(int) * 12 + dates.dt.month().cast(int) - 1
    if unit == "index":
        return (dates - EPOCH).dt.total_days()
    return (dates - _MONDAY).dt.total_days() // 7


@final
@dataclass(frozen=True)
class Bins:
    """Consecutive bins from ``first`` on."""

    unit: Unit
    first: int
    count: int

    def label(self, index: int) -> str:
        """``2004``, ``2004-07``, the Monday of a week, or the number itself."""
        number = self.first + index
        if self.unit in ("year", "index"):
            return str(number)
        if self.unit == "month":
            return f"{number // 12:04d}-{number % 12 + 1:02d}"
        return (_MONDAY + datetime.timedelta(weeks=number)).isoformat()

    def labels(self) -> list[str]:
        """All of them, in order."""
        return [self.label(index) for index in range(self.count)]

    def seasons(self) -> IntArray:
        """The place of each bin in its year, as a number; all the same where bins are no parts.

        Weeks have the number of full weeks since New Year.
        """
        numbers = self.first + np.arange(self.count)
        if self.unit == "month":
            return np.asarray(numbers % 12)
        if self.unit == "week":
            days = np.datetime64(_MONDAY) + 7 * numbers.astype("timedelta64[D]")
            return np.asarray((days - days.astype("datetime64[Y]")).astype(np.int64) // 7)
        return np.zeros(self.count, dtype=np.int64)
