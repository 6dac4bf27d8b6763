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

from emfed.core.protocols import BoolArray, FloatArray, MovesComponents, SplitsComponents
from emfed.core.sums import Finish, Fit
from emfed.fitting.climb import Climbed, Company, climb
from emfed.fitting.joining import together
from emfed.fitting.moving import merged_and_split
from emfed.fitting.race import Target
from emfed.fitting.selection import debt
from emfed.models.components import thin

LEAST_NATS, LEAST_SHARE = 1e-3, 1e-4
"""What counts as a gain: nats a row; of a model without a likelihood, a share of its cost."""


def charged(model: Any, company: Company, found: Climbed) -> float:
    """The objective less what components on few rows owe to the floor of the variance."""
    params = model.maximize(found.point.statistics)
    return found.point.objective - debt(model, params, company.rows) / company.rows


def escaped(
    model: Any,
    company: Company,
    best: Climbed,
    tolerance: float,
    tries: int,
    others: Sequence[FloatArray] = (),
    rounds: int = 1000,
) -> Fit[Climbed]:
    """Try proposals side by side, and go on from the best of them as long as one gains.

    ``others`` are places from elsewhere that are tried with the first proposals.
    """
    made = best.rounds
    while tries and made < rounds:
        proposed = chain(others, proposals(model, company, best.point.statistics))
        places = list(islice(proposed, tries + len(others)))
        if not places:
            break
        others = ()
        least = LEAST_NATS if model.words().likelihood else LEAST_SHARE * -best.point.objective
        goal = charged(model, company, best) + least
        judge = Target(goal)
        climbs = [climb(model, company, place, tolerance, rounds - made, judge) for place in places]
        try:
            tried = yield from together(climbs)
        except Finish:
            break
        made += max(found.rounds for found in tried)
        good = [found for found in tried if not thinner(model, company, best, found)]
        values = [charged(model, company, found) for found in good]
        if not values or max(values) < goal:
            break
        best = good[int(np.argmax(values))]
    return Climbed(best.point, best.converged, made, best.left)


def proposals(model: Any, company: Company, statistics: FloatArray) -> Iterator[FloatArray]:
    """Statistics to try: empty components put to use, then components merged and split."""
    if isinstance(model, MovesComponents):
        attempt = 0
        while (moved := model.moved(statistics, attempt)) is not None:
            yield moved
            attempt += 1
        return
    if isinstance(model, SplitsComponents):
        yield from _put_to_use(model, company, statistics)


def _put_to_use(model: Any, company: Company, statistics: FloatArray) -> Iterator[FloatArray]:
    if model.n_components == 1:
        return
    empty = empty_components(model, company, statistics)
    if empty.any() and not empty.all():
        for attempt in range(model.n_components):
            used = model.split(statistics, empty, attempt)
            if model.inside(used):
                yield used
    yield from merged_and_split(model, statistics)


def empty_components(model: Any, company: Company, statistics: FloatArray) -> BoolArray:
    """Which components explain less than half a row."""
    return np.asarray(model.component_shares(statistics) * company.rows < 0.5)


def thinner(model: Any, company: Company, before: Climbed, after: Climbed) -> bool:
    """Whether more components than before have so few rows that their means tell of single ones."""
    few = [
        thin(model.component_shares(found.point.statistics), company.rows).sum()
        for found in (before, after)
    ]
    return bool(few[1] > few[0])
