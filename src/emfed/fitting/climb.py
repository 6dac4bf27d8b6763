"""EM on sums, with long steps that are kept where the likelihood says so.

Every sum tells the mean field at S and the log-likelihood there. Three points in a row, x0, x1 =
EM(x0) and x2 = EM(x1), give the extrapolation of SQUAREM (Varadhan and Roland, 2008),
x0 + 2 a r + a^2 v with r = x1 - x0 and v = x2 - 2 x1 + x0. The next sum says whether it gained; if
not, the climb goes on from x1, whose image is known. So a step that is accepted never lowers the
objective by more than the unit of the log-likelihood, and fixed points are EM's.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, final

import numpy as np

from emfed.algorithms.steps import shorten
from emfed.core.sums import Finish, Fit, FloatArray, Precision
from emfed.fitting import convergence
from emfed.fitting.asks import LIKELIHOOD_REACH, LIKELIHOOD_STEP, Statistics, power_of_two

NOISE, NOISE_NATS = 1e-3, 1e-5
"""Squared noise of a sum over the squared move that is expected, in the metric; and at most. Then
the path is EM's, for 8 to 9 bits a number late and some more while moves are long."""
FIRST_MOVE = 4.0
"""The expected move, in the metric, where nothing is known: a start may be far from EM's image."""
REACH = 8.0
"""The room of a sum, in units of the expected move in one coordinate; at least the whole move."""
EARLY = 1e-2
"""Gains above this, in nats a row, are left to EM's own steps, so that a fit stays in the basin of
its start."""
GROWS = 4.0
"""By how much the longest step grows where one was kept, and shrinks where one was not: the
`mstep` of SQUAREM."""


@final
@dataclass(frozen=True)
class Company:
    """What a fit knows of its workers: how many they are, and the weight of all rows."""

    workers: int
    rows: float

    def precision(self, size: int, move: float, noise: float = NOISE_NATS) -> Precision:
        """The precision of a sum of statistics that will move by so much in the metric.

        ``noise`` bounds its squared noise there.
        """
        noise = min(NOISE * move**2, noise)
        step = self.rows * np.sqrt(12 * noise / (self.workers * size))
        step = power_of_two(max(float(step), 2.0**-40 * self.rows))
        reach = self.rows * move * max(REACH / np.sqrt(size), 1.0)
        return Precision(step, np.zeros(1), np.array(reach))

    def with_values(self, precision: Precision, size: int, expected: FloatArray) -> Precision:
        """The same, with the log-likelihood and the entropy at the end."""
        unit = power_of_two(self.rows * LIKELIHOOD_STEP)
        steps = np.concatenate([np.full(size, float(precision.step)), np.full(2, float(unit))])
        reach = np.concatenate(
            [np.full(size, float(precision.reach)), np.full(2, self.rows * LIKELIHOOD_REACH)]
        )
        return Precision(steps, np.concatenate([np.zeros(size), self.rows * expected]), reach)


@final
@dataclass(frozen=True, eq=False)
class Point:
    """One place, and what the sum there said."""

    statistics: FloatArray
    image: FloatArray
    """Where EM leads from here."""
    field: FloatArray
    """The mean field in the metric."""
    objective: float
    """Log-likelihood a row less the penalty: what EM never lowers."""
    values: FloatArray
    """Log-likelihood and entropy a row."""
    hits: int = 0
    """How often the step to the image was halved to stay where the model is defined."""


NO_VALUES = np.zeros(2)


def look(
    model: Any,
    company: Company,
    statistics: FloatArray,
    move: float,
    expected: FloatArray = NO_VALUES,
    purpose: str = "round",
) -> Fit[Point]:
    """Ask for the mean field and the log-likelihood at S, which is put on its lattice."""
    statistics, size = on_lattice(model, statistics), len(statistics)
    precision = company.with_values(company.precision(size, move), size, expected)
    ask = Statistics(model, statistics, precision, purpose)
    told = yield ask
    mean = told.value / told.rows
    field, values = mean[:size], mean[size:]
    image, _, hits = shorten(model, statistics, ask.metric.unwhiten(field))
    objective = float(values[0]) - float(model.penalty(ask.params))
    return Point(statistics, image, field, objective, values, hits)


LATTICE = 2.0**-40
"""The unit of S, in units of the model's frame."""


def on_lattice(model: Any, statistics: FloatArray) -> FloatArray:
    """S rounded to `LATTICE`, so that members whose arithmetic differs in the last bits agree.

    Where the domain is so narrow that rounding leaves it, S stays as it is.
    """
    rounded = np.rint(statistics / LATTICE) * LATTICE
    return rounded if model.inside(rounded) else statistics


@final
@dataclass(frozen=True, eq=False)
class Climbed:
    """Where a climb ended."""

    point: Point
    converged: bool
    rounds: int
    left: float
    """Nats a row that may be left."""


class Judge(Protocol):
    """Who decides whether a climb is worth more rounds."""

    def hopeless(self, place: int, objective: float, left: float) -> bool:
        """Tell whether the climb at this place should end."""


def climb(
    model: Any,
    company: Company,
    start: FloatArray,
    tolerance: float,
    rounds: int = 1000,
    judge: Judge | None = None,
    place: int = 0,
    accelerate: bool = True,
    purpose: str = "round",
) -> Fit[Climbed]:
    """EM with long steps, until little is left to gain or a judge finds it hopeless."""
    state = _Climbing(model, company, tolerance, judge, place, accelerate)
    ask = partial(look, model, company, purpose=purpose)
    here = yield from ask(start, FIRST_MOVE)
    made, about = 1, np.inf
    try:
        while made < rounds:
            there = yield from ask(here.image, length(here.field), here.values)
            made += 1
            about = convergence.left(there.objective - here.objective, here.field, there.field)
            trial = state.next(here, there, about)
            if trial.ends:
                return Climbed(there, trial.converged, made, about)
            here = there
            if trial.statistics is None:
                continue
            tried = yield from ask(trial.statistics, trial.move, there.values)
            made += 1
            if state.keeps(trial, tried):
                here = tried
            elif trial.bold:
                return Climbed(there, True, made, about)
    except Finish:
        pass
    return Climbed(here, False, made, about)


@final
@dataclass(frozen=True, eq=False)
class Trial:
    """What comes after an EM step: nothing special, a long step to try, or the end."""

    statistics: FloatArray | None = None
    """Where to look next; None: at EM's own image."""
    move: float = 0.0
    """How far EM may lead from there, in the metric."""
    least: float = 0.0
    """The objective that keeps it."""
    times: float = 0.0
    """SQUAREM's step length; 0 for a bold step."""
    ends: bool = False
    converged: bool = False

    @property
    def bold(self) -> bool:
        """Whether it tests convergence."""
        return self.statistics is not None and not self.times


@final
@dataclass
class _Climbing:
    """What a climb remembers from one pair of points to the next."""

    model: Any
    company: Company
    tolerance: float
    judge: Judge | None
    place: int
    accelerate: bool
    calm: int = 0
    """EM steps in a row after which little seemed to be left."""
    longest: float = 1.0
    """The longest step of SQUAREM that is tried."""

    def next(self, here: Point, there: Point, about: float) -> Trial:
        """Decide what follows the EM step from ``here`` to ``there``."""
        if not (here.field.any() and there.field.any()):
            return Trial(ends=True, converged=True)
        if self.judge is not None and self.judge.hopeless(self.place, there.objective, about):
            return Trial(ends=True)
        self.calm = self.calm + 1 if about <= self.tolerance else 0
        if self.calm > PLAIN and (self.calm > MOST_PLAIN or straight(here.field, there.field)):
            return self._bold(there)
        gain = there.objective - here.objective
        if self.calm or not self.accelerate or gain > EARLY:
            return Trial()
        return self._long(here, there)

    def _bold(self, there: Point) -> Trial:
        times = convergence.bold(there.field, self.tolerance)
        trial = there.image + times * (there.image - there.statistics)
        if not self.model.inside(trial):
            return Trial(ends=True, converged=True)
        least = there.objective + convergence.WORTH * self.tolerance / 2
        return Trial(trial, 2 * length(there.field), least)

    def _long(self, here: Point, there: Point) -> Trial:
        times = min(curved(here.field, there.field), self.longest)
        if times <= 1:
            self.longest *= GROWS
            return Trial()
        step = here.image - here.statistics
        bend = there.image - 2 * here.image + here.statistics
        trial = here.statistics + 2 * times * step + times**2 * bend
        if not self.model.inside(trial):
            self.longest = max(self.longest / GROWS, 1.0)
            return Trial()
        move = 2 * length(there.field) * times
        return Trial(trial, move, there.objective - LIKELIHOOD_STEP, times)

    def keeps(self, trial: Trial, tried: Point) -> bool:
        """Tell whether a long step stays, and adapt the longest one."""
        kept = tried.objective >= trial.least
        self.calm = 0
        if not kept:
            self.longest = max(self.longest / GROWS, 1.0)
        elif trial.times == self.longest:
            self.longest *= GROWS
        return kept


PLAIN, MOST_PLAIN, STRAIGHT = 2, 12, 0.99
"""EM steps before the bold one, which leave the slowest direction alone: so many, and more while
the cosine between two of them is less."""


def straight(before: FloatArray, after: FloatArray) -> bool:
    """Whether EM's steps have stopped turning."""
    return float(before @ after) >= STRAIGHT * length(before) * length(after)


def length(white: FloatArray) -> float:
    """The length of a vector in the metric."""
    return float(np.sqrt(white @ white))


def curved(before: FloatArray, after: FloatArray) -> float:
    """SQUAREM's step: the length of an EM step over that of its change."""
    change = length(after - before)
    return length(before) / change if change > 0 else np.inf
