"""The round loop of the modes that exchange cells: records, limits, Ctrl-C."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import final

import numpy as np

from emfed.core.ledger import Ledger
from emfed.core.protocols import FloatArray, ServerState
from emfed.core.records import Records, RoundRecord
from emfed.fitting.rounds import interrupts
from emfed.fitting.stopping import Callback, Stop
from emfed.imputation.lowrank import Cells, TableParameters
from emfed.imputation.sweeps import Solver


@final
@dataclass(frozen=True)
class Step:
    """What one round did, for its record."""

    asked: int
    mean_field: FloatArray
    step_size: float
    evaluations: int
    objective: float | None = None
    guarded: int = 0
    """Cells whose sum had to be moved to where data could be."""


class TableRun(ABC):
    """A run in progress; what `Stop` looks at, and the loop around `advance`."""

    def __init__(self, ledger: Ledger, samples: int, statistics: FloatArray) -> None:
        self.ledger, self.samples = ledger, samples
        self.records, self.seconds, self.evaluations = Records(), 0.0, 0
        self.state = ServerState(1, 0, statistics, np.zeros_like(statistics))
        self._charged = np.zeros(4, dtype=np.int64)

    @abstractmethod
    def advance(self, round_: int) -> Step:
        """One round: exchange and update; sets ``state``."""

    @abstractmethod
    def finish(self) -> TableParameters:
        """The parameters reached."""

    @abstractmethod
    def seen(self) -> Cells:
        """What the server knows of the cells: their weights, and its estimate of their sums."""

    @final
    def opened(self, workers: int) -> None:
        """Record the opening exchange, once it is charged."""
        self._record(0, Step(workers, np.empty(0), 0.0, 0), 0.0)

    @final
    def step(self) -> RoundRecord:
        """One round and its record."""
        began, round_ = time.perf_counter(), self.state.round
        done = self.advance(round_)
        return self._record(round_, done, time.perf_counter() - began)

    @final
    def until(self, stop: Stop, callbacks: Iterable[Callback] = ()) -> str:
        """Rounds until a limit is met, a callback says so, or Ctrl-C; returns which."""
        hooks, reason = tuple(callbacks), stop.reason(self)
        with interrupts() as interrupted:
            while reason is None:
                record = self.step()
                asked = [hook(record) for hook in hooks]
                if interrupted():
                    reason = "interrupted"
                elif any(answer is True for answer in asked):
                    reason = "callback"
                else:
                    reason = stop.reason(self)
        return reason

    def _record(self, round_: int, done: Step, seconds: float) -> RoundRecord:
        totals = np.array(
            [
                self.ledger.total(direction, part)
                for part in (None, "payload")
                for direction in ("up", "down")
            ]
        )
        gained, self._charged = (totals - self._charged).tolist(), totals
        self.evaluations += done.evaluations
        self.seconds += seconds
        field = done.mean_field
        record = RoundRecord(
            round=round_,
            generation=0,
            asked=done.asked,
            answered=done.asked,
            squared_H=float(field @ field) if round_ else None,
            step_size=done.step_size,
            guard_hits=done.guarded,
            bytes_up=gained[0],
            bytes_down=gained[1],
            payload_up=gained[2],
            payload_down=gained[3],
            evaluations=done.evaluations,
            epochs=self.evaluations / self.samples,
            seconds=seconds,
            objective=done.objective,
        )
        self.records.append(record)
        return record


def best_of(solver: Solver, cells: Cells, candidates: Iterable[TableParameters]) -> TableParameters:
    """The parameters with the lowest objective; the first among equals."""
    return min(candidates, key=lambda params: solver.objective(cells, params))
