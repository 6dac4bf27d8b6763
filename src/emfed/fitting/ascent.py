"""EM on sums, with long steps that are kept where the likelihood says so.

Every sum tells the mean field at S and the log-likelihood there. Three points in a row, x0, x1 =
EM(x0) and x2 = EM(x1), give the extrapolation of SQUAREM (Varadhan and Roland, 2008),
x0 + 2 a r + a^2 v with r = x1 - x0 and v = x2 - 2 x1 + x0. The next sum says whether it gained; if
not, the ascent goes on from x2. So a step that is accepted never lowers the objective by more than
the unit of the log-likelihood (`Cohort.unit`), and fixed points are EM's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, final

import numpy as np

from emfed.algorithms.steps import shorten
from emfed.core.protocols import Reduces
from emfed.core.sums import Finish, Fit, FloatArray, LastSum, Precision
from emfed.fitting.asks import LIKELIHOOD_REACH, LIKELIHOOD_STEP, Statistics, power_of_two
from emfed.fitting.convergence import Convergence, Tolerance, length

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
HARMLESS = 2.0**-20
"""How far rounding may move S in the metric: 2^-41 nats a row."""
LATTICE = 2.0**-40
"""The unit of S, in units of the model's frame; also the finest step of a sum over the rows."""


FEWEST_OF_MANY = 50
"""Workers from which on a fit without masks is one of many. Not tuned: starts are merged from so
many on, too."""


def are_many(workers: int, masked: bool) -> bool:
    """Tell which case a fit is: many workers, or few and quiet sums alone.

    What only workers can do, and memories, are not for masked sums.
    """
    return not masked and workers >= FEWEST_OF_MANY


@final
@dataclass(frozen=True)
class Cohort:
    """The workers of a fit: how many, the weight of all their rows, and whether they mask.

    A ``faithful`` fit takes EM's own path, however many they are; where sums are ``fine``, too,
    they are as fine as S itself. Where workers are ``heard`` one by one they keep memories, however
    few they are: who is absent stands for itself with what it sent last.
    """

    workers: int
    rows: float
    masked: bool = True
    faithful: bool = False
    heard: bool = False
    fine: bool = False

    @property
    def many(self) -> bool:
        """Whether workers keep memories and go on alone (`emfed.fitting.many`)."""
        return are_many(self.workers, self.masked) and not self.faithful

    @property
    def unit(self) -> float:
        """Nats a row that two log-likelihoods must differ by to be told apart.

        All workers round, so their difference has a deviation of sqrt(workers / 6) steps.
        """
        return (LATTICE if self.fine else LIKELIHOOD_STEP) * float(np.sqrt(self.workers))

    def precision(self, size: int, move: float, noise: float = NOISE_NATS) -> Precision:
        """The precision of a sum of statistics that will move by so much in the metric.

        ``noise`` bounds its squared noise there.
        """
        noise = 0.0 if self.fine else min(NOISE * move**2, noise)
        step = self.rows * np.sqrt(12 * noise / (self.workers * size))
        step = power_of_two(max(float(step), LATTICE * self.rows))
        reach = self.rows * move * max(REACH / np.sqrt(size), 1.0)
        return Precision(step, np.zeros(1), np.array(reach))

    def with_values(self, precision: Precision, size: int, expected: FloatArray) -> Precision:
        """The same, with the log-likelihood and the entropy at the end."""
        unit = power_of_two(self.rows * (LATTICE if self.fine else LIKELIHOOD_STEP))
        steps = np.concatenate([np.full(size, float(precision.step)), np.full(2, float(unit))])
        reach = np.concatenate(
            [np.full(size, float(precision.reach)), np.full(2, self.rows * LIKELIHOOD_REACH)]
        )
        return Precision(steps, np.concatenate([np.zeros(size), self.rows * expected]), reach)


@final
@dataclass(frozen=True, eq=False)
class Objective:
    """What is maximised: a model's likelihood of the rows of a cohort, and how far."""

    model: Any
    cohort: Cohort
    tolerance: Tolerance
    accelerate: bool = True
    way: Way | None = None
    """How rounds are made; None: by `ascend`."""

    def climb(self, start: FloatArray, gives_up: GivesUp | None = None) -> Fit[Ascent]:
        """Rounds from a start, until little is left to gain or they are given up."""
        return (self.way or ascend)(self, start, gives_up)


@final
@dataclass(frozen=True, eq=False)
class Point:
    """One place, and what the sum there said."""

    statistics: FloatArray
    image: FloatArray
    """Where EM leads from here."""
    field: FloatArray
    """The step to the image in the metric: the mean field, but for what the model holds back."""
    squared_field: float
    """The square of the mean field itself."""
    objective: float
    """Log-likelihood a row less the penalty: what EM never lowers."""
    values: FloatArray
    """Log-likelihood and entropy a row."""
    hits: int = 0
    """How often the step to the image was halved to stay where the model is defined."""

    @classmethod
    def unseen(cls, statistics: FloatArray) -> Point:
        """A place that no sum has told of."""
        nothing = np.zeros_like(statistics)
        return cls(statistics, statistics, nothing, 0.0, -np.inf, np.full(2, np.nan))


@final
@dataclass(frozen=True, eq=False)
class Ascent:
    """Where an ascent ended."""

    point: Point
    converged: bool
    left: float
    """Nats a row that may be left."""
    kept_start: bool = False
    """Whether the rounds ended worse than they began, and the start was kept."""


NO_VALUES = np.zeros(2)


def look(
    problem: Objective,
    statistics: FloatArray,
    move: float,
    expected: FloatArray = NO_VALUES,
    last: LastSum | None = None,
    purpose: str = "round",
) -> Fit[Point]:
    """Ask for the mean field and the log-likelihood at S, which is put on its lattice.

    EM is expected to ``move`` it so far in the metric, and ``expected`` are the values there.
    """
    model, cohort = problem.model, problem.cohort
    statistics, size = on_lattice(model, statistics), len(statistics)
    precision = cohort.with_values(cohort.precision(size, move), size, expected)
    ask = Statistics(model, statistics, precision, purpose, last=last)
    answer = yield ask
    mean = answer.value / answer.rows
    white, values = mean[:size], mean[size:]
    step = ask.metric.unwhiten(white)
    image, _, hits = shorten(model, statistics, step)
    image = _expanded(model, image, white)
    if not hits:  # the model may keep alive what would die: then less moves than the rows say
        white = ask.metric.whiten(image - statistics)
    objective = float(values[0]) - float(model.penalty(ask.params))
    return Point(statistics, image, white, float(step @ step), objective, values, hits)


def _expanded(model: Any, image: FloatArray, white: FloatArray) -> FloatArray:
    """EM's image; late, that of parameter-expanded EM (Liu, Rubin and Wu, 1998).

    Its likelihood never falls, its fixed points are EM's, and it does not crawl where the latent
    variables of a model are known nearly exactly.
    """
    farther = image
    if isinstance(model, Reduces) and float(white @ white) / 2 <= EARLY:
        farther = np.asarray(model.reduced(image))
    return farther if model.inside(farther) else image


def on_lattice(model: Any, statistics: FloatArray) -> FloatArray:
    """S rounded to `LATTICE`, so that members whose arithmetic differs in the last bits agree.

    Where that moves S in the metric, since a column is narrow beside others, as many bits of each
    number are kept as one of size 1 has. Where the domain is so narrow that rounding leaves it, S
    stays as it is.
    """
    metric = model.metric(model.maximize(statistics))
    sizes = np.abs(statistics)
    places = 2.0 ** np.ceil(np.log2(np.where(sizes > 0, sizes, 1.0)))
    for unit in (LATTICE, LATTICE * np.minimum(places, 1.0)):
        rounded = np.rint(statistics / unit) * unit
        if model.inside(rounded) and length(metric.whiten(rounded - statistics)) <= HARMLESS:
            return rounded
    return statistics


GivesUp = Callable[[Point, float], bool]
"""From what an ascent has reached, and nats a row that EM will still gain, to whether it ends."""
Way = Callable[[Objective, FloatArray, GivesUp | None], Fit[Ascent]]
"""How the rounds of a fit are made."""


def ascend(problem: Objective, start: FloatArray, gives_up: GivesUp | None = None) -> Fit[Ascent]:
    """EM with long steps, until little is left to gain or the ascent is given up."""
    steps, unit = LongSteps(problem), problem.cohort.unit
    state = Convergence(problem.tolerance)
    here, converged = Point.unseen(start), False

    def ask(statistics: FloatArray, move: float, expected: FloatArray = NO_VALUES) -> Fit[Point]:
        return look(problem, statistics, move, expected, LastSum(here.hits, state.left))

    try:
        here = yield from ask(start, FIRST_MOVE)
        while not converged:
            before = here
            here = yield from ask(here.image, length(here.field), here.values)
            gain = here.objective - before.objective
            gain = gain if gain > unit else 0.0
            state.note(gain, before.field, here.field, here.squared_field)
            if gives_up is not None and gives_up(here, state.expected):
                break
            if state.field_is_small or (problem.tolerance.nats and not here.field.any()):
                converged = True
            elif state.due:
                times = state.bold(here.field)
                there = here.image + times * (here.image - here.statistics)
                if problem.model.inside(there):
                    # Where nothing is left EM leads all the way back from there.
                    back = (1 + times) * length(here.field)
                    tried = yield from ask(there, back, here.values)
                    if tried.objective >= here.objective + state.least_gain:
                        here = tried
                        state.disturb()
                        continue
                converged = True
            elif state.calm == 0 and gain <= EARLY and (far := steps.after(before, here)):
                tried = yield from ask(far.statistics, far.move, here.values)
                kept = tried.objective >= here.objective - unit
                steps.adapt(kept)
                here = tried if kept else here
    except Finish:  # the last sum says where EM leads
        here = replace(here, statistics=here.image)
    return Ascent(here, converged, state.left)


@final
@dataclass(frozen=True, eq=False)
class LongStep:
    """Where SQUAREM leads, and how far EM may lead from there, in the metric."""

    statistics: FloatArray
    move: float


@final
@dataclass
class LongSteps:
    """SQUAREM's steps, and the longest that is tried."""

    problem: Objective
    longest: float = field(default=1.0, init=False)
    _last: float = field(default=0.0, init=False)

    def after(self, first: Point, second: Point) -> LongStep | None:
        """The step after two of EM's from ``first``; None: EM's own is as long, or it leaves."""
        if not (self.problem.accelerate and second.field.any()):
            return None
        self._last = times = min(curved(first.field, second.field), self.longest)
        if times <= 1:
            self.longest *= GROWS
            return None
        step = first.image - first.statistics
        bend = second.image - 2 * first.image + first.statistics
        there = first.statistics + 2 * times * step + times**2 * bend
        if not self.problem.model.inside(there):
            self.adapt(kept=False)
            return None
        return LongStep(there, 2 * length(second.field) * times)

    def adapt(self, kept: bool) -> None:
        """Longer steps follow the longest one, if it was kept; else shorter ones do."""
        if not kept:
            self.longest = max(self.longest / GROWS, 1.0)
        elif self._last == self.longest:
            self.longest *= GROWS


def curved(before: FloatArray, after: FloatArray) -> float:
    """SQUAREM's step: the length of an EM step over that of its change."""
    change = length(after - before)
    return length(before) / change if change > 0 else np.inf
