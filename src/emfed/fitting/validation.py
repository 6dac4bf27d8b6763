"""Fits that hold rows out: how well the model fits what it has not seen, and whom it serves.

Five models are fitted side by side from where the fit ended, each without a fifth of everyone's
rows. Each worker knows by itself which rows these are, so nothing about parts is sent. Then all
tell the log-likelihood of their rows, each under the fit that has not seen it: a sum. Workers that
are not masked also tell what models of their own would gain them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar, final

import numpy as np

from emfed.core.protocols import Model
from emfed.core.sums import Finish, Fit, FloatArray, Unmasked, finished
from emfed.fitting.ascent import Ascent, Cohort, Objective
from emfed.fitting.asks import Exact
from emfed.fitting.opening import Pooled
from emfed.fitting.parallel import together
from emfed.fitting.settings import without_constants
from emfed.models.clusters import Clusters
from emfed.network.holding_out import (
    HeldOutScores,
    HeldPart,
    Kept,
    KeptTotals,
    OwnGains,
)

T = TypeVar("T")
MOST_ROUNDS = 100
"""Exchanges of the fits that hold rows out. They begin where the fit ended, so few are needed."""


@final
@dataclass(frozen=True, eq=False)
class Validated:
    """What rows that were held out say.

    Parameters
    ----------
    held_out : array of shape (2,), optional
        Mean log-likelihoods of all rows by fits that have not seen them, and by the one that has.
    by_worker : array, optional
        What each worker told (`OwnGains`), where workers are heard one by one.
    remarks : sequence of str
        What a user should know.
    """

    held_out: FloatArray | None = None
    by_worker: FloatArray | None = None
    remarks: Sequence[str] = ()


def validated(
    problem: Objective, plain: Model, statistics: FloatArray, pooled: Pooled, hears: bool, seed: int
) -> Unmasked[Validated]:
    """Hold rows out of a fit that has ended at these statistics.

    ``plain`` is the model before it was bound to all rows; ``hears`` says whether workers may be
    asked one by one.
    """
    if isinstance(problem.model, Clusters):
        return Validated(remarks=["validation: this model has no likelihood to compare."])
    kept = (yield KeptTotals(seed)).value
    if kept.min() <= 0:
        return Validated(remarks=["validation: there are too few rows to hold some out."])
    model, start = pooled.bind(without_constants(plain)), statistics
    final = problem.model.maximize(statistics)
    if plain.fixed_data:
        own = model.from_user(problem.model.to_user(final))
        answer = yield Exact(model, (own,))
        start = answer.value / answer.rows
    fits = [
        _without(replace(problem, model=model), HeldPart(part, seed, inside=False), start, rows)
        for part, rows in enumerate(kept.tolist())
    ]
    found = yield from together(fits)
    remarks = []
    if not all(one.converged for one in found):
        remarks.append(
            f"validation: fits that hold rows out had not converged after {MOST_ROUNDS} rounds; "
            "their scores may be a little too low."
        )
    without = [model.maximize(one.point.statistics) for one in found]
    told = yield HeldOutScores(model, without, problem.model, final, seed)
    by_worker = None
    if hears:
        everyone = np.arange(problem.cohort.workers)
        by_worker = yield OwnGains(model, without, seed, everyone)
    return Validated(told.value / told.rows, by_worker, remarks)


def _without(problem: Objective, pick: HeldPart, start: FloatArray, rows: float) -> Fit[Ascent]:
    """The fit to the rows that a part leaves, from where the fit to all rows ended."""
    cohort = Cohort(problem.cohort.workers, rows, faithful=problem.cohort.faithful)
    fit = replace(problem, cohort=cohort, way=None).climb(start)
    made = 0
    try:
        ask = next(fit)
        while made < MOST_ROUNDS:
            try:
                answer = yield Kept(ask, pick)
            except Finish as finish:
                ask = fit.throw(finish)
                continue
            ask = fit.send(replace(answer, rows=rows))
            made += 1
        return finished(fit, Finish("enough"))
    except StopIteration as end:
        found: Ascent = end.value
        return found
