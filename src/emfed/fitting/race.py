"""Ascents that compete: one that cannot win any more is given up."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

import numpy as np

from emfed.core.sums import FloatArray
from emfed.fitting.ascent import Ascent, GivesUp, Objective, Point
from emfed.fitting.selection import debt

GRANTED = 20.0
"""Times what its last gains let expect that an ascent may still gain before it is given up. EM may
leave a plateau on which it gained next to nothing, so this is generous: with 3, proposals on
nmes1988 are given up that gain 2.6 nats a row."""


@final
@dataclass
class Race:
    """What competitors have reached so far, each less what its size costs."""

    best: float = field(default=-np.inf, init=False)

    def competitor(self, problem: Objective, charge: float = 0.0) -> GivesUp:
        """When one gives up whose objective is judged lower by a charge, in nats a row."""

        def gives_up(point: Point, left: float) -> bool:
            reached = point.objective - charge
            if reached > self.best:
                self.best = max(self.best, reached - owed(problem, point.statistics))
            return reached + GRANTED * left < self.best

        return gives_up


def towards(objective: float) -> GivesUp:
    """When a trial gives up that must reach an objective to be worth its rounds."""
    return lambda point, left: point.objective + GRANTED * left < objective


def owed(problem: Objective, statistics: FloatArray) -> float:
    """Nats a row that components on few rows owe to the floor of the variance."""
    rows = problem.cohort.rows
    return debt(problem.model, problem.model.maximize(statistics), rows) / rows


def charged(problem: Objective, estimate: Ascent) -> float:
    """The objective less what components on few rows owe to the floor."""
    return estimate.point.objective - owed(problem, estimate.point.statistics)
