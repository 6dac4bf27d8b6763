"""Moves of components after a run has converged: k-means that ended far from its best is led on.

Buckets follow the mass of rows, and a worker is silent about one with a single row. So a start of
k-means misses a few rows far out, which may have most of the inertia. When Lloyd's algorithm has
ended, the server knows which two clusters lose least as one, and where a centre may be worth more.
It moves one there and makes more rounds; what gains is kept. No message tells more than before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

from emfed.algorithms import EM
from emfed.core.protocols import FloatArray, MovesComponents
from emfed.core.records import RoundRecord
from emfed.fitting.rounds import Run
from emfed.fitting.session import Session
from emfed.models.side_by_side import SideBySide

IDLE_MOVES, LEAST_GAIN = 2, 1e-4
"""Moves of a component in a row that may gain nothing before a fit ends; and the share of its cost
that is a gain. k-means by workers, 11 tables with K=3 or 8, three seeds: inertia is 1.21 times the
best of five starts of scikit-learn without moves, on average, 1.03, 1.01 and 1.01 times with 1, 2
and 3, for 12, 24 and 33 rounds more (a trial that is not kept; `benchmarks k-means` measures 2)."""
ROUNDS_OF_HOPE = 3
"""Rounds that a move has at least; and how many like the last one may bring it below what is kept.
With 6 or without end inertia is the same, for up to four times the bytes."""


@final
class Moves:
    """Moves of a run; as a callback it ends rounds after a move that will not gain."""

    name = "moves"

    def __init__(self) -> None:
        self.costs: list[float] = []
        self.hopeless = False

    def attach(self, run: Run) -> None:
        """Look at the rounds of this run, from here on."""
        self.run, self.costs, self.hopeless = run, [], False

    def __call__(self, record: RoundRecord) -> bool:
        """After each round; True where the cost falls too slowly to get below what is kept.

        Noise in S makes any cost of it, until the run has converged.
        """
        kept = self.run.kept
        if kept is None or not isinstance(self.run.algorithm, EM):
            return False
        self.costs.append(_cost(self.run, self.run.state.statistics))
        if len(self.costs) > ROUNDS_OF_HOPE:
            before, now = self.costs[-2:]
            above = now - _cost(self.run, kept)
            self.hopeless = above > ROUNDS_OF_HOPE * max(before - now, 0.0)
        return self.hopeless

    def save(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """What the rounds since the last move have cost."""
        return {}, {"costs": self.costs, "hopeless": self.hopeless}

    def load(self, arrays: dict[str, Any], about: dict[str, Any]) -> None:
        """Go on from there."""
        self.costs, self.hopeless = list(about["costs"]), about["hopeless"]

    def move(self, run: Run) -> bool:
        """Go on from the best place so far with a component elsewhere, if the model knows where to.

        After some moves in a row that gained nothing there is none.
        """
        together, here = isinstance(run.model, SideBySide), run.state.statistics
        model = run.model.models[0] if together else run.model
        if run.kept is None or _cost(run, here) < (1 - LEAST_GAIN) * _cost(run, run.kept):
            run.kept, run.idle_moves = here.copy(), 0
        else:
            run.idle_moves += 1
        if run.idle_moves == IDLE_MOVES:
            return False
        cut = run.model.cuts[0] if together else slice(None)
        statistics = run.kept.copy()
        moved = model.moved(statistics[cut], run.idle_moves)
        if moved is None or not model.inside(moved):
            return False
        statistics[cut] = moved
        run.restart(statistics)
        return True

    def go_back(self, run: Run) -> bool:
        """Whether the best place was another than the last: the run then ends there."""
        if run.kept is None or _cost(run, run.kept) > _cost(run, run.state.statistics):
            return False
        run.move(run.kept)
        run.confirmed = True
        return True


def can_move(session: Session, parts: Sequence[int]) -> bool:
    """Whether a run is of one model that knows where to move components."""
    return len(parts) == 1 and isinstance(session.bound.part(parts[0]), MovesComponents)


def _cost(run: Run, statistics: FloatArray) -> float:
    """What a model that moves components has not explained."""
    if isinstance(run.model, SideBySide):
        return float(run.model.models[0].cost(statistics[run.model.cuts[0]]))
    return float(run.model.cost(statistics))
