"""EM on sums, with momentum that is kept where the likelihood says so.

Every sum tells the mean field at S and the log-likelihood there. Near an optimum EM crawls along
few directions. Where its steps gain little, the next sum is asked for beyond EM's image, by a share
of what the image has moved (Nesterov, 1983). It says whether that gained; if not, the ascent goes
on from the image itself, with no momentum. So a step that is accepted never lowers the objective by
more than the unit of the log-likelihood (`Cohort.unit`), and fixed points are EM's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, final

import numpy as np

from emfed.algorithms.steps import shorten
from emfed.core.protocols import Reduces, SplitsComponents
from emfed.core.sums import Finish, Fit, FloatArray, LastSum, Precision
from emfed.fitting.asks import LIKELIHOOD_REACH, LIKELIHOOD_STEP, Statistics, power_of_two
from emfed.fitting.convergence import Convergence, Tolerance, length
from emfed.models.components import thin, without_thin

NOISE, NOISE_NATS = 1e-3, 1e-5
"""Squared noise of a sum over the squared move that is expected, in the metric; and at most. Then
the path is EM's, for 8 to 9 bits a number late and some more while moves are long."""
FIRST_MOVE = 4.0
"""The expected move, in the metric, where nothing is known: a start may be far from EM's image."""
REACH = 8.0
"""The room of a sum, in units of the expected move in one coordinate; at least the whole move."""
EARLY = 1e-2
"""Gains above this, in nats a row, are not those of an end: models keep to EM's own M-step."""
FAR = 0.1
"""Gains above this are left to EM's own steps, so that a fit stays in the basin of its start. Of 30
fits of `benchmarks right` with 0.1 all end where those with 0.01 do, in 0.93 of the rounds, and one
with 10 ends elsewhere (a trial that is not kept)."""
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
    statistics, size = on_lattice(model, _supported(problem, statistics)), len(statistics)
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


def _supported(problem: Objective, statistics: FloatArray) -> FloatArray:
    """S whose components have the rows that owners tell of, where sums are masked; or none.

    Else every site would leave: under default rules none looks at its rows for fewer.
    """
    model, cohort = problem.model, problem.cohort
    if not (cohort.masked and isinstance(problem.model, SplitsComponents)):
        return statistics
    few = thin(model.component_shares(statistics), cohort.rows)
    if not few.any():
        return statistics
    there = without_thin(model.layout, statistics, few)
    return there if model.inside(there) else statistics


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
    """EM with momentum, until little is left to gain or the ascent is given up."""
    momentum, unit = Momentum(problem), problem.cohort.unit
    state = Convergence(problem.tolerance)
    here, converged = Point.unseen(start), False

    def ask(statistics: FloatArray, move: float, expected: FloatArray = NO_VALUES) -> Fit[Point]:
        return look(problem, statistics, move, expected, LastSum(here.hits, state.left))

    try:
        here = yield from ask(start, FIRST_MOVE)
        while not converged:
            before, kept = here, False
            there = momentum.beyond(before, calm=state.calm > 0)
            if there is not None:
                tried = yield from ask(there, 2 * length(before.field), before.values)
                kept = tried.objective >= before.objective - unit
                here = tried if kept else before
            if not kept:
                momentum.age = 0
                here = yield from ask(before.image, length(before.field), before.values)
            gain = here.objective - before.objective
            gain = momentum.gain = gain if gain > unit else 0.0
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
                        here, momentum = tried, Momentum(problem)
                        state.disturb()
                        continue
                converged = True
    except Finish:  # the last sum says where EM leads
        here = replace(here, statistics=here.image)
    return Ascent(here, converged, state.left)


@final
@dataclass
class Momentum:
    """Where to look beyond EM's image: so far as EM's images moved last, times age / (age + 3)."""

    problem: Objective
    age: int = field(default=0, init=False)
    """Steps with momentum in a row."""
    gain: float = field(default=np.inf, init=False)
    """What the last step gained."""
    _last: FloatArray | None = field(default=None, init=False)

    def beyond(self, point: Point, calm: bool) -> FloatArray | None:
        """The next place; None: EM's image is, since gains are large, or it seems to be the end."""
        last, self._last = self._last, point.image
        if last is None or calm or self.gain > FAR or not self.problem.accelerate:
            self.age = 0
            return None
        self.age += 1
        there = point.image + self.age / (self.age + 3) * (point.image - last)
        return there if self.problem.model.inside(there) else None
