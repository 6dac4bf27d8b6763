"""Is a run where it says it is? Exact answers, asked of everyone once.

An algorithm that sees all workers in every round finds out by itself (`Algorithm.sure`). For all
others, whose H may be small by chance, `verify` makes a few exact EM steps from S. Fast errors die
in them; what is left is the slowest direction, in which one bold step then tells whether EM crawls
(`emfed.algorithms.safeguards` says more). Each step costs an exchange in which every worker gets
parameters and answers with its exact statistics: `STEPS` + 3 times about 8 q bytes up and as many
down, q being the number of statistics.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING, Any, final

import numpy as np

from emfed.algorithms.safeguards import WORTH, factor
from emfed.algorithms.steps import shorten
from emfed.core import series
from emfed.core.protocols import FloatArray
from emfed.models.side_by_side import SideBySide

if TYPE_CHECKING:
    from emfed.fitting.rounds import Run

STEPS = 5
"""Exact EM steps: after that the slow direction of a plateau is alone to a per mille (storms)."""


@final
@dataclass(frozen=True)
class Verification:
    """What a full pass found."""

    left: float
    """Nats a sample that EM would still gain: those of the steps made, and a series beyond."""
    best: FloatArray
    """Statistics of the best point seen; the run may go on from there."""


def verify(run: Run, nats: float) -> Verification:
    """What EM would still gain from where the run stands, told by exact steps.

    Answers of other workers do not compare: where one is missing, much may be left.
    """
    missed = run.session.missed
    verdict = _verdict(run, nats)
    return verdict if run.session.missed == missed else replace(verdict, left=inf)


def _verdict(run: Run, nats: float) -> Verification:
    first = run.state.statistics
    points, whites, values = [first], [], [_value(run, run.model.maximize(first))]
    for _ in range(STEPS):
        here = run.model.maximize(points[-1])
        points.append(shorten(run.model, points[-1], _ask(run, here) - points[-1])[0])
        whites.append(run.model.metric(here).whiten(points[-1] - points[-2]))
    values.append(_value(run, run.model.maximize(points[-1])))
    gained = values[-1] - values[0]
    squares = [float(white @ white) for white in whites[-2:]]
    rate = series.rate(squares)
    left = gained + series.left(min(rate, 1.0) * squares[-1] / 2, rate, series.EXACT)
    there = points[-1] + factor(whites[-1], WORTH * nats) * (points[-1] - points[-2])
    if not (squares[-1] > 0 and run.model.inside(there)):
        return Verification(left, points[-1])
    risen = _value(run, run.model.maximize(there)) - values[-1]
    if risen < WORTH * nats / 4:
        return Verification(left, points[-1])
    return Verification(max(left, gained + risen), there)


def _ask(run: Run, params: Any) -> FloatArray:
    """Everyone's exact statistics."""
    run.evaluations += run.session.samples
    return run.session.ask("statistics", run.view, params)


def _value(run: Run, params: Any) -> float:
    """What EM never lowers: the mean log-likelihood less the penalty."""
    return float(_values(run, params).sum())


def _values(run: Run, params: Any) -> FloatArray:
    """The same of each part of a model."""
    run.evaluations += run.session.samples
    told = run.session.ask("values", run.view, params)[:, 0]
    model = run.model
    if not isinstance(model, SideBySide):
        return np.asarray(told - float(model.penalty(params)))
    pairs = zip(model.models, params.parts, strict=True)
    return np.asarray(told - [float(part.penalty(own)) for part, own in pairs])


def better(run: Run, first: FloatArray) -> FloatArray:
    """The statistics of ``first`` in the parts that the run has left worse; its own elsewhere."""
    last = run.state.statistics
    with np.errstate(all="ignore"):  # a run may have led anywhere
        told = [_values(run, run.model.maximize(point)) for point in (first, last)]
    out = last.copy()
    cuts = run.model.cuts if isinstance(run.model, SideBySide) else [slice(None)]
    for cut, before, after in zip(cuts, *told, strict=True):
        if not before <= after:
            out[cut] = first[cut]
    return out
