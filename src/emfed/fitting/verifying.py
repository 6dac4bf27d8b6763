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
from emfed.core.protocols import BoolArray, FloatArray
from emfed.models.side_by_side import SideBySide

if TYPE_CHECKING:
    from emfed.fitting.rounds import Run

SHARES = ("initial", "transitions", "moments")
"""Pieces of statistics in which shares, rates and probabilities are."""
NEAR_ZERO, RISES = 1e-3, 0.02
"""The share of the largest number of its piece below which one is near zero; and by how much of
itself it grows in an EM step if EM is to bring it back. Not tuned."""
LIFTS = (1e-2, 1e-3, 1e-4)
"""What it is then raised to, in the largest of its piece: the first that lowers no likelihood."""
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


def lifted(run: Run) -> FloatArray | None:
    """Statistics without shares near zero that EM would bring back; None where there are none.

    Noise may push a small probability to next to nothing. EM then multiplies it by a little more
    than one in each step: its steps, and what they seem to be worth, are tiny for a hundred rounds.
    No bold step sees it beside the others. Exact statistics tell, and are only asked for where some
    number that no rows make negative is near zero.
    """
    model, here = run.model, run.state.statistics
    small = _near_zero(model, here)
    if not small.any():
        return None
    params = model.maximize(here)
    known = np.maximum(here, model.statistics_of(params))  # T has a floor
    rises = small & (_ask(run, params) > (1 + RISES) * known)
    if not rises.any():
        return None
    before, large = _value(run, params), _largest(model, here)
    for lift in LIFTS:
        there = np.where(rises, np.maximum(here, lift * large), here)
        if model.inside(there) and _value(run, model.maximize(there)) > before:
            return there
    return None


def _near_zero(model: Any, statistics: FloatArray) -> BoolArray:
    """Which numbers are near zero beside others of their piece, and below it nothing at all."""
    small = statistics < NEAR_ZERO * _largest(model, statistics)
    if not small.any():
        return small
    below = np.where(small, -np.abs(statistics) - 1e-6, statistics)
    return np.asarray(small & (model.protect(statistics, below) > below))


def _largest(model: Any, statistics: FloatArray) -> FloatArray:
    """The largest number of its piece, for those that may be shares; elsewhere nothing."""
    parts = zip(model.models, model.cuts, strict=True) if isinstance(model, SideBySide) else ()
    out = np.full(len(statistics), -np.inf)
    for part, cut in parts or [(model, slice(None))]:
        own = out[cut]
        for name, where in part.layout.slices.items():
            if name in SHARES and where.stop > where.start:
                own[where] = statistics[cut][where].max()
    return out


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
