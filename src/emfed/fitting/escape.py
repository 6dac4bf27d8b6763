"""Ways out of a local optimum: proposals that are tried, and kept where they gain.

EM ends at the optimum that its start leads to. Two components may share what one describes as well,
while another covers what needs two. So two are merged and another is split (SMEM: Ueda, Nakano,
Ghahramani and Hinton, 2000), components without rows are put to use, and what gains is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from typing import Any

import numpy as np

from emfed.core.protocols import FloatArray, MovesComponents, SplitsComponents
from emfed.core.sums import Finish, Fit
from emfed.fitting.ascent import Ascent, Cohort, Objective
from emfed.fitting.many import quietly
from emfed.fitting.parallel import together
from emfed.fitting.proposals import merged_and_split
from emfed.fitting.race import charged, towards
from emfed.fitting.selection import empty_components
from emfed.models.components import thin

TRIED_WITH_EMPTY = 3
"""Halvings of other components that are tried where some component has no rows."""
LEAST_NATS, LEAST_SHARE = 1e-3, 1e-4
"""What counts as a gain: nats a row; of a model without a likelihood, a share of its cost."""

Proposed = Callable[[Any, Cohort, FloatArray], Iterator[FloatArray]]
"""From a model, who has the rows, and where an ascent ended, to statistics to try."""


def escape(
    problem: Objective,
    best: Ascent,
    tries: int,
    others: Sequence[FloatArray] = (),
    proposed_at: Proposed | None = None,
) -> Fit[Ascent]:
    """Try some proposals side by side, and go on from the best of them as long as one gains.

    ``others`` are places from elsewhere that are tried with the first proposals.
    """
    proposed_at = proposed_at or proposals
    while tries and best.converged:
        found = proposed_at(problem.model, problem.cohort, best.point.statistics)
        proposed = chain(others, found)
        places = list(islice(proposed, tries + len(others)))
        if not places:
            break
        others = ()
        likelihood = problem.model.words().likelihood
        least = LEAST_NATS if likelihood else LEAST_SHARE * -best.point.objective
        goal = charged(problem, best) + least
        try:
            tried = yield from together([_trial(problem, at, goal) for at in places])
        except Finish:
            break
        good = [one for one in tried if one.converged and not thinner(problem, best, one)]
        values = [charged(problem, found) for found in good]
        if not values or max(values) < goal:
            break
        best = good[int(np.argmax(values))]
    return best


def _trial(problem: Objective, start: FloatArray, goal: float) -> Fit[Ascent]:
    """An ascent towards a goal; components that lose all rows on the way are put to use."""
    found = yield from quietly(problem, start, towards(goal))
    for attempt in range(TRIED_WITH_EMPTY):
        here = found.point.statistics
        used = islice(empty_put_to_use(problem.model, problem.cohort, here), attempt, None)
        there = next(used, None) if found.converged else None
        if there is None:
            break
        again = yield from quietly(problem, there, towards(goal))
        found = again if again.point.objective > found.point.objective else found
    return found


def proposals(model: Any, cohort: Cohort, statistics: FloatArray) -> Iterator[FloatArray]:
    """Statistics to try: empty components put to use, then components merged and split."""
    if isinstance(model, MovesComponents):
        attempt = 0
        while (moved := model.moved(statistics, attempt)) is not None:
            yield moved
            attempt += 1
    else:
        yield from empty_put_to_use(model, cohort, statistics)
        if _splits(model):
            yield from merged_and_split(model, statistics)


def empty_put_to_use(model: Any, cohort: Cohort, statistics: FloatArray) -> Iterator[FloatArray]:
    """Statistics where components without rows are halves of others."""
    if not _splits(model):
        return
    empty = empty_components(model, statistics, cohort.rows)
    if empty.any() and not empty.all():
        for attempt in range(model.n_components):
            used = model.split(statistics, empty, attempt)
            if model.inside(used):
                yield used


def thinner(problem: Objective, before: Ascent, after: Ascent) -> bool:
    """Whether more components than before have so few rows that their means tell of single ones.

    Clusters may: where rows lie far out that is what lowers the cost.
    """
    if not problem.model.words().likelihood:
        return False
    few = [
        thin(problem.model.component_shares(one.point.statistics), problem.cohort.rows).sum()
        for one in (before, after)
    ]
    return bool(few[1] > few[0])


def _splits(model: Any) -> bool:
    """Whether there are components to merge and to split."""
    several = bool(model.describe().get("n_components", 1) > 1)
    return several and isinstance(model, SplitsComponents)
