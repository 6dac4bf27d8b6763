"""Ways out of a local optimum: proposals that are tried, and kept where they gain.

EM ends at the optimum that its start leads to. Two components may share what one describes as well,
while another covers what needs two. So two are merged and another is split (SMEM: Ueda, Nakano,
Ghahramani and Hinton, 2000), components without rows are put to use, and what gains is kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Any

import numpy as np

from emfed.core.protocols import FloatArray, MovesComponents, SplitsComponents
from emfed.core.sums import Finish, Fit
from emfed.fitting.ascent import Ascent, Cohort, Objective
from emfed.fitting.many import quietly
from emfed.fitting.moving import merged_and_split
from emfed.fitting.parallel import together
from emfed.fitting.race import charged, towards
from emfed.fitting.selection import empty_components
from emfed.models.components import thin

LEAST_NATS, LEAST_SHARE = 1e-3, 1e-4
"""What counts as a gain: nats a row; of a model without a likelihood, a share of its cost."""


def escape(
    problem: Objective, best: Ascent, tries: int, others: Sequence[FloatArray] = ()
) -> Fit[Ascent]:
    """Try some proposals side by side, and go on from the best of them as long as one gains.

    ``others`` are places from elsewhere that are tried with the first proposals.
    """
    while tries and best.converged:
        proposed = chain(others, proposals(problem.model, problem.cohort, best.point.statistics))
        places = list(islice(proposed, tries + len(others)))
        if not places:
            break
        others = ()
        likelihood = problem.model.words().likelihood
        least = LEAST_NATS if likelihood else LEAST_SHARE * -best.point.objective
        goal = charged(problem, best) + least
        try:
            tried = yield from together([quietly(problem, at, towards(goal)) for at in places])
        except Finish:
            break
        good = [found for found in tried if not thinner(problem, best, found)]
        values = [charged(problem, found) for found in good]
        if not values or max(values) < goal:
            break
        best = good[int(np.argmax(values))]
    return best


def proposals(model: Any, cohort: Cohort, statistics: FloatArray) -> Iterator[FloatArray]:
    """Statistics to try: empty components put to use, then components merged and split."""
    if isinstance(model, MovesComponents):
        attempt = 0
        while (moved := model.moved(statistics, attempt)) is not None:
            yield moved
            attempt += 1
    elif _splits(model):
        empty = empty_components(model, statistics, cohort.rows)
        if empty.any() and not empty.all():
            for attempt in range(model.n_components):
                used = model.split(statistics, empty, attempt)
                if model.inside(used):
                    yield used
        yield from merged_and_split(model, statistics)


def thinner(problem: Objective, before: Ascent, after: Ascent) -> bool:
    """Whether more components than before have so few rows that their means tell of single ones."""
    few = [
        thin(problem.model.component_shares(one.point.statistics), problem.cohort.rows).sum()
        for one in (before, after)
    ]
    return bool(few[1] > few[0])


def _splits(model: Any) -> bool:
    """Whether there are components to merge and to split."""
    several = bool(model.describe().get("n_components", 1) > 1)
    return several and isinstance(model, SplitsComponents)
