"""How many workers doubt their units, codes or columns: asked at the opening, before the rounds.

Each looks at its own rows beside the summary of all, which everybody knows by then
(`emfed.network.self_check`). What it finds it tells its own operator. Others learn how many doubt,
as a sum: whoever reads the model must know that something may be wrong in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np

from emfed.core.protocols import Names
from emfed.core.sums import Ask, FloatArray, HoldsTables, Precision, Rows, Stated, Sum
from emfed.network.self_check import suspicions_of


@final
@dataclass(frozen=True, eq=False)
class Doubts(Ask):
    """How many workers doubt.

    Parameters
    ----------
    summary : mapping from str to array
        That of all rows together.
    rows : float
        How many these are.
    workers : int
        How many workers there are.
    """

    summary: Mapping[str, FloatArray]
    rows: float
    workers: int
    purpose: str = field(default="opening")

    @property
    def size(self) -> int:
        """One number."""
        return 1

    @property
    def precision(self) -> Precision:  # type: ignore[override]
        """Whole numbers up to the number of workers."""
        return Precision(np.array(2.0**-10), np.zeros(1), np.array(float(self.workers + 1)))

    def part(self, rows: Rows) -> FloatArray:
        """How many of these workers doubt."""
        return np.array([float(sum(bool(words) for words in self.words_of(rows)))])

    def words_of(self, rows: Any, columns: Names = None) -> list[list[str]]:
        """What each of these workers should look at, for its own operator."""
        if not isinstance(rows, HoldsTables):
            return []
        return [
            suspicions_of(some, count, self.summary, self.rows, columns)
            for count, some in rows.tables()
        ]

    def words(self) -> str:
        """What is asked, for the owner's journal."""
        return "whether this site doubts its units, codes or columns"

    def about(self) -> tuple[Stated, ...]:
        """What everybody knows of all rows."""
        known = [np.asarray(self.summary[name]) for name in sorted(self.summary)]
        return str((self.rows, self.workers)).encode(), *known


def doubted(count: int, workers: int) -> str:
    """The doubts of sites in a sentence."""
    one = count == 1
    return (
        f"{count} of {workers} sites doubt{'s' if one else ''} {'its' if one else 'their'} units, "
        f"codes or columns: the output of `emfed join` there says which and why."
    )


def analyst_hears(ask: Any, answer: Sum, say: Callable[[str], None]) -> None:
    """Tell how many sites doubt, before the rounds begin."""
    if isinstance(ask, Doubts) and (count := round(float(answer.value[0]))):
        say(doubted(count, ask.workers))
