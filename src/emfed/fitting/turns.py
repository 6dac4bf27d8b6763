"""Rounds that some workers miss: who is away stands for itself with what it sent last.

S is the mean of what all workers said last: the incremental EM of Neal and Hinton (1998). No term
is divided by a probability, so absence costs time and adds no noise, and fixed points are EM's. A
worker that was never heard stands for the start.

No round tells the likelihood at one place, so none is judged by it. A *turn* is as many rounds as
it takes to hear as many workers as there are. It moves S about as far as one step of EM does, so
two turns say what is left; where that is little, everyone is asked.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import final

import numpy as np

from emfed.algorithms.steps import shorten
from emfed.core.protocols import Metric, Model
from emfed.core.sums import Finish, Fit, FloatArray, LastSum, Sum
from emfed.fitting.ascent import Ascent, Cohort, GivesUp, Objective, are_many, on_lattice
from emfed.fitting.convergence import Convergence, length
from emfed.fitting.many import Tracked, Walk, ask_of
from emfed.fitting.stochastic import judged, left_of

SHARE = 0.3
"""The share of the last round in the running mean of |H|^2: rounds hear different workers."""


@final
@dataclass
class Turns:
    """What the turns of one ascent have said so far."""

    state: Convergence
    began: FloatArray
    """S where the present turn began."""
    heard: float = 0.0
    """Messages since then, divided by the number of workers."""
    before: FloatArray | None = None
    """What the last turn moved, in the metric where it led."""

    @property
    def length(self) -> float:
        """How far the last turn moved S, in the metric."""
        return 0.0 if self.before is None else length(self.before)

    def note(self, walk: Walk, share: float, metric: Metric) -> bool:
        """After a round that heard such a share of the workers; whether everyone is to be asked."""
        self.heard += share
        if self.heard < 1:
            return False
        moved = metric.whiten(walk.statistics - self.began)
        self.began, self.heard = walk.statistics, 0.0
        before, self.before = self.before, moved
        if before is None:
            return False
        self.state.note(0.0, before, moved, walk.moved)
        nats = self.state.tolerance.nats
        return self.state.field_is_small or (nats > 0 and (self.state.due or not moved.any()))


def in_turns(problem: Objective, start: FloatArray, gives_up: GivesUp | None = None) -> Fit[Ascent]:
    """Rounds of those who are there, until everyone says that little is left to gain."""
    model, cohort, memory = problem.model, problem.cohort, object()
    quiet = not are_many(cohort.workers, cohort.masked) or cohort.faithful
    walk = Walk(on_lattice(model, start))
    turns, last = Turns(Convergence(problem.tolerance), walk.statistics), LastSum(0, np.inf)
    try:
        while True:
            ask = replace(ask_of(model, cohort, walk, quiet), memory=memory, walks=False)
            ask = replace(ask, inner=replace(ask.inner, last=last))
            told = yield ask
            walk, hits = _moved(model, cohort, walk, ask, told)
            metric = model.metric(model.maximize(walk.statistics))
            little = turns.note(walk, 1 - told.missing / cohort.workers, metric)
            last = LastSum(hits, turns.state.left)
            if little:
                found = yield from judged(problem, None, walk.statistics, turns.length)
                if turns.state.field_is_small:
                    return replace(found, converged=True)
                left = yield from left_of(problem, found.point)
                if left <= problem.tolerance.nats:
                    return Ascent(found.point, True, left)
                turns.state.disturb()
    except Finish:
        return (yield from judged(problem, start, walk.statistics))


def _moved(model: Model, cohort: Cohort, walk: Walk, ask: Tracked, told: Sum) -> tuple[Walk, int]:
    """Take a sum: move S; how often the step was halved."""
    here = walk.statistics
    white = told.value[: len(here)] / cohort.rows  # who was never heard stands for S
    step = ask.inner.metric.unwhiten(white)
    there, _, hits = shorten(model, here, step)
    squared = float(white @ white)
    if walk.rounds:
        squared = (1 - SHARE) * walk.squared + SHARE * squared
    moved = float(step @ step)
    return Walk(on_lattice(model, there), squared, moved, rounds=walk.rounds + 1), hits
