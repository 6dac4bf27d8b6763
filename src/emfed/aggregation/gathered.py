"""Answers of single workers, in one process: what is not masked and does not add up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import final

import numpy as np

from emfed.aggregation.coded import ENVELOPE_DOWN, ENVELOPE_UP, Present
from emfed.core.ledger import Ledger
from emfed.core.sums import Answers, AskedWorkers, Gather, IntArray, States


@final
@dataclass
class GatheredAnswers:
    """The workers of a simulation, asked one by one.

    Parameters
    ----------
    rows : AskedWorkers
        All workers.
    present : callable, optional
        From the number of the exchange to who is there; None: always everyone.
    ledger : Ledger, optional
        What counts the bytes; None: a new one.
    """

    rows: AskedWorkers
    present: Callable[[int], Present] | None = None
    ledger: Ledger | None = None
    exchanges: int = field(default=0, init=False)
    states: States = field(default_factory=dict, init=False)
    """What the workers keep."""
    _sizes: list[int] = field(default_factory=list, init=False)
    _heard: IntArray = field(init=False)
    counted: Ledger = field(init=False)
    """The ledger."""

    def __post_init__(self) -> None:
        self._heard = np.full(len(self.rows.totals), -1, dtype=np.int64)
        self.counted = self.ledger or Ledger(len(self.rows.totals))

    def __call__(self, ask: Gather) -> Answers:
        """What the asked workers reply."""
        self.exchanges += 1
        asked = arrived = ask.workers
        if self.present is not None:
            who = self.present(self.exchanges)
            asked = np.intersect1d(asked, who.asked)
            arrived = np.intersect1d(asked, who.arrived)
        if not self.states:
            n = len(self.rows.totals)
            fields = ask.fields()
            self.states = {name: np.stack([np.asarray(v)] * n) for name, v in fields.items()}
        mine = {name: column[asked] for name, column in self.states.items()}
        replies = self.rows.answers(ask, asked, mine)
        for name, column in mine.items():
            self.states[name][asked] = column
        kept = np.isin(replies.workers, arrived)
        told, own = replies.workers[kept], replies.sizes[kept]
        self.counted.add(ask.purpose, "up", told, own, ENVELOPE_UP)
        self.counted.add(ask.purpose, "down", asked, self._down(ask, asked), ENVELOPE_DOWN)
        lost = np.intersect1d(replies.lost, arrived)
        return Answers(
            replies.workers[kept],
            replies.values[kept],
            replies.rates[kept],
            replies.sizes[kept],
            lost,
        )

    def _down(self, ask: Gather, asked: IntArray) -> IntArray:
        """Bytes down: the steps that a worker has missed, or all anew where that is shorter."""
        self._sizes.append(ask.bytes_down)
        ends = np.cumsum([0, *self._sizes])
        last = self._heard[asked]
        missed = ends[-1] - ends[last + 1]
        each = np.where(last < 0, ask.bytes_anew, np.minimum(missed, ask.bytes_anew))
        self._heard[asked] = len(self._sizes) - 1
        return np.asarray(each)
