"""Answers of single workers, in one process: what is not masked and does not add up."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np

from emfed.aggregation.coded import ENVELOPE_DOWN, ENVELOPE_UP, Presence, Present
from emfed.core.ledger import Ledger
from emfed.core.sums import Answers, AskedWorkers, Gather, Gathers, IntArray, States


@final
@dataclass
class GatheredAnswers:
    """The workers of a simulation, asked one by one.

    Parameters
    ----------
    rows : AskedWorkers
        All workers.
    present : callable, optional
        From an ask and the number of the exchange to who is there; None: always everyone.
    ledger : Ledger, optional
        What counts the bytes; None: a new one.
    """

    rows: AskedWorkers
    present: Presence | None = None
    ledger: Ledger | None = None
    exchanges: int = field(default=0, init=False)
    states: dict[Hashable, States] = field(default_factory=dict, init=False)
    """What the workers keep, by the memory that asks name."""
    _sent: int = field(default=0, init=False)
    """Bytes of all steps so far."""
    _heard: IntArray = field(init=False)
    """Those up to the last that each worker heard; -1: none."""
    counted: Ledger = field(init=False)
    """The ledger."""

    def __post_init__(self) -> None:
        self._heard = np.full(len(self.rows.totals), -1, dtype=np.int64)
        self.counted = self.ledger or Ledger(len(self.rows.totals))

    def __call__(self, ask: Gather | Gathers) -> Any:
        """What the asked workers reply; a list, where several gathers share the exchange.

        An adder that crashes comes back as it was before the exchange, and makes it again.
        """
        asks = ask.gathers if isinstance(ask, Gathers) else [ask]
        while True:
            self.exchanges += 1
            who = self._who(ask)
            replies = [self._replied(one, who) for one in asks]
            self._count(ask, asks, replies, who)
            if not who.crashed:
                break
        found = [one.of(who.arrived) for one in replies]
        return found if isinstance(ask, Gathers) else found[0]

    def _who(self, ask: Gather | Gathers) -> Present:
        if self.present is None:
            return Present(ask.workers, ask.workers)
        who = self.present(ask, self.exchanges)
        asked = np.intersect1d(ask.workers, who.asked)
        return Present(asked, np.intersect1d(asked, who.arrived), who.wiped, who.again, who.crashed)

    def _replied(self, ask: Gather, who: Present) -> Answers:
        """What workers sent, whether it arrives or not; who is asked again sends the same."""
        fields = ask.fields()
        if ask.memory not in self.states:
            n = len(self.rows.totals)
            self.states[ask.memory] = {v: np.stack([np.asarray(a)] * n) for v, a in fields.items()}
        states = self.states[ask.memory]
        if len(who.wiped):
            for name, blank in fields.items():
                states[name][who.wiped] = blank
        if len(who.again):
            self._asked(ask, states, np.intersect1d(ask.workers, who.again))
        return self._asked(ask, states, np.intersect1d(ask.workers, who.asked))

    def _asked(self, ask: Gather, states: States, workers: IntArray) -> Answers:
        mine = {name: column[workers] for name, column in states.items()}
        replies = self.rows.answers(ask, workers, mine)
        for name, column in mine.items():
            states[name][workers] = column
        return replies

    def _count(
        self, ask: Gather | Gathers, asks: Any, replies: list[Answers], who: Present
    ) -> None:
        """Count the bytes: one message to each worker, and one from each that replies."""
        up = np.zeros(len(self.rows.totals), dtype=np.int64)
        for one in replies:
            up[one.workers] += one.sizes
        told = np.unique(np.concatenate([one.workers for one in replies]))
        told = told[np.isin(told, who.arrived)]
        down = self._down(asks, who.asked)
        self.counted.add(ask.purpose, "up", told, up[told], ENVELOPE_UP)
        self.counted.add(ask.purpose, "down", who.asked, down, ENVELOPE_DOWN)

    def _down(self, asks: list[Gather], asked: IntArray) -> IntArray:
        """Bytes down: the steps that a worker has missed, or all anew where that is shorter."""
        anew = sum(one.bytes_anew for one in asks)
        self._sent += sum(one.bytes_down for one in asks)
        before = self._heard[asked]
        self._heard[asked] = self._sent
        return np.where(before < 0, anew, np.minimum(self._sent - before, anew))

    # Checkpoints.

    def save(self) -> dict[str, Any]:
        """All that workers keep, and who was told what, as arrays by name."""
        kept = {
            f"states/{memory}/{name}": column
            for memory, states in self.states.items()
            if memory is not None
            for name, column in states.items()
        }
        numbers = np.array([self.exchanges, self._sent])
        return kept | {"numbers": numbers, "heard": self._heard}

    def restore(self, arrays: Mapping[str, Any]) -> None:
        """The inverse of `save`."""
        self.exchanges, self._sent = arrays["numbers"].tolist()
        self._heard = arrays["heard"]
        for name, column in arrays.items():
            if name.startswith("states/"):
                _, memory, field_ = name.split("/")
                self.states.setdefault(int(memory), {})[field_] = column
