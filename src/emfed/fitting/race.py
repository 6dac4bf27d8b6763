"""Climbs that compete: one that cannot win any more is given up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

import numpy as np

HOPE = 20.0
"""Times what its gains let expect that a climb may still gain before it is given up. EM may leave a
plateau on which it gained next to nothing, so this is generous: with 3, proposals on nmes1988 are
given up that gain 2.6 nats a row."""


@final
@dataclass
class Race:
    """What competitors have reached so far, each less what its size costs.

    Parameters
    ----------
    charges : sequence of float
        Nats a row by which the objective of each is judged lower: half of its BIC charge over the
        rows, or 0 for starts of one model.
    """

    charges: Sequence[float]
    best: float = field(default=-np.inf, init=False)

    def hopeless(self, place: int, objective: float, left: float) -> bool:
        """Note what a competitor has reached; tell whether it cannot win any more."""
        reached = objective - self.charges[place]
        self.best = max(self.best, reached)
        return reached + HOPE * left < self.best


@final
@dataclass(frozen=True)
class Target:
    """What a trial must reach to be worth its rounds."""

    objective: float

    def hopeless(self, place: int, objective: float, left: float) -> bool:
        """Tell whether a trial will not reach the target."""
        return objective + HOPE * left < self.objective
