"""The case of many workers: coarse innovations, memories, local steps or momentum, rounded sums.

A sum over many workers needs little of each. While steps are long, workers send what changed
against their memory on a coarse lattice, and the sum is rounded once more on its way down. Where
workers are alike they go on by themselves before they answer: Q <- s-bar_i(Q) + d_i, from Q = S.
The drift d_i = S - c_i, with c_i what the worker saw last, corrects for how it differs from all,
since S is the mean of all c_i; averaged over as many rounds as there are steps it cannot oscillate.
Where nothing moves any more Q = S: fixed points are EM's (docs/decisions/008).

Where workers differ, nobody goes on alone. Nesterov's momentum adds steps up, so sums stay coarse
with it; what looks at differences of steps, as SQUAREM does, would be misled by noise.

When steps are short, `emfed.fitting.ascent` goes on with quiet sums.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import Any, final

import numpy as np

from emfed.algorithms.steps import shorten
from emfed.core.objects import GRID
from emfed.core.protocols import Model
from emfed.core.sums import (
    Ask,
    Finish,
    Fit,
    FloatArray,
    IntArray,
    Precision,
    Rows,
    RowsOfWorkers,
    Stated,
    States,
    Sum,
    T,
    finished,
)
from emfed.fitting import ascent
from emfed.fitting.ascent import Ascent, Cohort, GivesUp, Objective, Point, ascend
from emfed.fitting.asks import Statistics

NOISE, NOISE_NATS, FIRST_NATS = 0.05, 1e-3, 1e-2
"""Squared noise of a sum over the squared move that is expected, in the metric; and at most, since
noise in S is noise in every drift. In the first round there are no drifts yet."""
DOWN, QUIET_DOWN = 0.05, 1e-3
"""Squared noise of a rounded sum that goes down, as a share: while sums are coarse, and in quiet
ones. MNIST at random to 1e-3 nats, medians of six seeds: 10.5 rounds and 1.00 kB down with it, 9.5
and 1.08 kB with 0.02."""
LIKELIHOOD_NATS = 1e-3
"""The standard deviation of the noise of a log-likelihood, while steps are long."""
LARGEST_DRIFT = 1.0
"""The mean of |d_i|^2 in the metric from which on workers make no local steps."""
STEPS, FAR_STEPS, MOST_STEPS = 2.0, 3.0, 7
"""Local steps after the first, times the mean |d_i|^(1/2); while S moves by more than `FAR`; and at
most."""
FAR = 0.02
"""The squared move of S in the metric above which it is far from an optimum."""
STALLED, LATE = 0.75, 0.01
"""Local steps end where |H|^2 is more than this share of its running mean; or where that is less
than this share of the mean |d_i|^2."""
QUIET = 1e-4
"""The running mean of |H|^2 in the metric, twice the nats a row that a step gains, below which
quiet sums go on where workers differ. MNIST by label to 1e-3 nats, medians of six seeds: 17 rounds
and 1.3 kB up, 20.5 and 1.8 kB with ten times as much."""


@final
@dataclass(frozen=True, eq=False)
class Tracked(Ask):
    """Statistics at S, or after local steps, told against what a worker sent before.

    Parameters
    ----------
    inner : Statistics
        What is asked: statistics in the metric at S, the log-likelihood there and one more value.
    steps : int
        The EM steps that a worker makes; 1: none by itself.
    walks : bool
        Whether workers keep their drifts for local steps, and tell |d_i|^2 in place of the entropy.
    memory : hashable
        Which memories the parts are told against.
    """

    inner: Statistics
    steps: int = 1
    walks: bool = False
    memory: Hashable = None

    @property
    def purpose(self) -> str:  # type: ignore[override]
        """That of the statistics."""
        return self.inner.purpose

    @property
    def precision(self) -> Precision:  # type: ignore[override]
        """That of the statistics."""
        return self.inner.precision

    @property
    def size(self) -> int:
        """The statistics, and two values."""
        return self.inner.size

    def fields(self) -> dict[str, Any]:
        """The memory; what the worker saw last, its drift, and the steps that it made."""
        q = self.size - 2
        return {
            "memory": np.zeros(self.size),
            "seen": np.zeros(q),
            "drift": np.zeros(q),
            "walked": np.array(0),
        }

    def parts(self, rows: RowsOfWorkers, workers: IntArray, states: States) -> FloatArray:
        """The parts of these workers."""
        model, q = self.inner.model, self.size - 2

        def mean(block: Any, weights: Any, which: IntArray, first: int) -> FloatArray:
            found, likelihood, entropy = model.evaluate(block, self.inner.params, weights)
            return np.concatenate([found, likelihood[:, None], entropy[:, None]], axis=1)

        told = np.array(rows.means(mean, workers))
        if self.walks:
            told[:, :q], told[:, q + 1] = self._walked(rows, workers, states, told[:, :q])
        white = self.inner.metric.whiten(told[:, :q] - self.inner.statistics)
        return rows.totals[workers][:, None] * np.concatenate([white, told[:, q:]], axis=1)

    def _walked(
        self, rows: RowsOfWorkers, workers: IntArray, states: States, seen: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        """What each worker sees at the end of its local steps, and its squared drift."""
        model, here = self.inner.model, self.inner.statistics
        now = here - states["seen"]
        first = (states["walked"] == 0)[:, None]
        drift = np.where((states["walked"] > 1)[:, None], states["drift"], now)
        drift = np.where(first, here - seen, drift + (now - drift) / self.steps)
        for _ in range(1, self.steps):
            there = seen + drift
            able = np.flatnonzero([model.inside(point) for point in there])
            params = model.maximize(there[able])

            def mean(
                block: Any, weights: Any, which: IntArray, first: int, params: Any = params
            ) -> Any:
                return model.expected_statistics(block, params.take(which), weights)

            if len(able):
                seen[able] = rows.means(mean, workers[able])
        states["seen"], states["drift"] = seen.copy(), drift
        states["walked"] = np.full(len(workers), self.steps)
        return seen, (self.inner.metric.whiten(drift) ** 2).sum(axis=1)

    def origin(self, totals: FloatArray) -> FloatArray:
        """S and the expected values, times the rows."""
        q, precision = self.size - 2, self.inner.precision
        values = np.broadcast_to(precision.centre, (self.size,))[q:]
        return totals[:, None] * np.concatenate([self.inner.statistics, values])

    def foretold(self, memories: FloatArray, totals: FloatArray) -> FloatArray:
        """Statistics as they were, in the metric at S."""
        q = self.size - 2
        away = memories[:, :q] - totals[:, None] * self.inner.statistics
        return np.concatenate([self.inner.metric.whiten(away), memories[:, q:]], axis=1)

    def kept(self, parts: FloatArray) -> FloatArray:
        """The change of statistics."""
        q = self.size - 2
        return np.concatenate([self.inner.metric.unwhiten(parts[:, :q]), parts[:, q:]], axis=1)

    def part(self, rows: Rows) -> FloatArray:
        """Statistics at S; local steps are made by workers that are known apart."""
        return self.inner.part(rows)

    def words(self) -> str:
        """What is asked, for the owner's journal."""
        more = f", after {self.steps} steps" if self.steps > 1 else ""
        return self.inner.words() + more

    def about(self) -> tuple[Stated, ...]:
        """S."""
        return self.inner.about()


@final
@dataclass(frozen=True, eq=False)
class Walk:
    """Where local steps have led.

    Parameters
    ----------
    statistics : array
        S.
    squared : float
        |H|^2 in the metric at the last S, twice the nats a row that an EM step gains; infinite
        before the first sum.
    moved : float
        The squared last move of S, in the metric where it led.
    running : float
        The running mean of ``squared``.
    apart : float
        The mean of |d_i|^2 in the metric.
    values : array of shape (2,)
        The log-likelihood a row at the last S, and ``apart`` as it was told.
    rounds : int
        Sums so far.
    ended : bool
        Whether quiet sums are to go on.
    led : array, optional
        Where the last step led, without momentum.
    age : int
        Steps with momentum in a row.
    """

    statistics: FloatArray
    squared: float = np.inf
    moved: float = np.inf
    running: float = np.inf
    apart: float = np.inf
    values: FloatArray = field(default_factory=lambda: np.zeros(2))
    rounds: int = 0
    ended: bool = False
    led: FloatArray | None = None
    age: int = 0

    @property
    def steps(self) -> int:
        """EM steps that a worker makes before it answers: fewer where workers differ."""
        if not self.apart < LARGEST_DRIFT:
            return 1
        most = FAR_STEPS if self.moved > FAR else STEPS
        return 1 + int(min(most / max(self.apart, 1e-12) ** 0.25, MOST_STEPS))


def ask_of(model: Model, cohort: Cohort, walk: Walk, quiet: bool = False) -> Tracked:
    """What is asked next: statistics as finely as the next move needs them.

    ``quiet`` sums are those of a few workers, whose path is EM's.
    """
    q, n = len(walk.statistics), cohort.workers
    noise = min(NOISE * walk.squared, NOISE_NATS if walk.rounds else FIRST_NATS)
    if quiet:
        noise = min(ascent.NOISE * walk.squared, ascent.NOISE_NATS)
    step = _on_grid(np.sqrt(12 * noise / (n * q))) * cohort.rows
    unit = LIKELIHOOD_NATS * np.sqrt(12 / n) * cohort.rows
    steps = np.concatenate([np.full(q, step), [unit, unit]])
    centre = np.concatenate([np.zeros(q), cohort.rows * walk.values])
    down = QUIET_DOWN if quiet else DOWN
    precision = Precision(steps, centre, np.full(q + 2, np.inf), down)
    return Tracked(Statistics(model, walk.statistics, precision), walk.steps, True)


def moved(model: Model, walk: Walk, ask: Tracked, told: Sum) -> Walk:
    """Take a sum: move S, and decide whether coarse sums still pay."""
    q, mean = len(walk.statistics), told.value / told.rows
    change, values = mean[:q], mean[q:]
    squared = float(change @ change)
    apart = float(values[1])
    if not walk.rounds:
        apart -= squared
    before = walk.running
    if walk.rounds < 2:  # H of several steps is longer than of one
        before = squared * (2 if walk.rounds else 1)
    running = 0.7 * before + 0.3 * squared
    led, _, _ = shorten(model, walk.statistics, ask.inner.metric.unwhiten(change))
    alike, age, statistics = apart < LARGEST_DRIFT, 0, led
    if alike:
        ended = running < LATE * apart or (walk.rounds > 1 and squared > STALLED * running)
    else:
        ended = running < QUIET
        age, statistics = with_momentum(model, walk, ask, led)
    white = model.metric(model.maximize(statistics)).whiten(statistics - walk.statistics)
    return Walk(
        statistics,
        squared,
        float(white @ white),
        running,
        apart,
        values,
        walk.rounds + 1,
        ended or told.missing > 0,
        led,
        age,
    )


def with_momentum(
    model: Model, walk: Walk, ask: Tracked, led: FloatArray
) -> tuple[int, FloatArray]:
    """Some of the way from where the last step led, on from where this one does.

    Begun anew where it points against H (O'Donoghue and Candes, 2015), or leads out of the domain.
    """
    if walk.led is None:
        return 0, led
    here, run = walk.statistics, led - walk.led
    whiten = ask.inner.metric.whiten
    if float(whiten(run) @ whiten(led - here)) <= 0:
        return 0, led
    age = walk.age + 1
    there = led + age / (age + 3) * run
    return (age, there) if model.inside(there) else (0, led)


def walked(model: Model, cohort: Cohort, start: FloatArray, memory: Hashable = None) -> Fit[Walk]:
    """Coarse rounds: until they do not pay any more, and it has ended, or until the fit is over."""
    walk = Walk(start)
    try:
        while not walk.ended:
            ask = replace(ask_of(model, cohort, walk), memory=memory)
            walk = moved(model, walk, ask, (yield ask))
    except Finish:
        return walk
    return walk


def climb(problem: Objective, start: FloatArray, gives_up: GivesUp | None = None) -> Fit[Ascent]:
    """Climb from a start as the case of the fit asks for: with quiet sums, or as many do."""
    if problem.way is None and problem.cohort.many:
        return ascend_with_many(problem, start, gives_up)
    return quietly(problem, start, gives_up)


def quietly(problem: Objective, start: FloatArray, gives_up: GivesUp | None = None) -> Fit[Ascent]:
    """Climb with quiet sums alone, told against memories where workers are heard one by one."""
    found = problem.climb(start, gives_up)
    told = problem.way is None and problem.cohort.heard
    down = 0.0 if problem.cohort.fine else QUIET_DOWN
    return tracked(found, object(), down) if told else found


def ascend_with_many(
    problem: Objective, start: FloatArray, gives_up: GivesUp | None = None
) -> Fit[Ascent]:
    """`emfed.fitting.ascent.ascend` for many workers: coarse sums first, then quiet ones."""
    memory = object()
    walk = yield from walked(problem.model, problem.cohort, start, memory)
    if not walk.ended:
        return Ascent(Point.unseen(start if walk.led is None else walk.led), False, np.inf)
    return (yield from tracked(ascend(problem, walk.statistics, gives_up), memory))


def tracked(quiet: Fit[T], memory: Hashable, down: float = QUIET_DOWN) -> Fit[T]:
    """A fit whose statistics are told against memories, and whose sums are rounded."""
    try:
        ask = next(quiet)
        while True:
            if isinstance(ask, Statistics) and ask.precision is not None:
                precision = replace(ask.precision, down=down)
                ask = Tracked(replace(ask, precision=precision), memory=memory)
            try:
                told = yield ask
            except Finish as finish:
                return finished(quiet, finish)
            ask = quiet.send(told)
    except StopIteration as end:
        result: T = end.value
        return result


def _on_grid(value: float) -> float:
    """The nearest power of 2^(1/4) that is not larger."""
    return float(GRID[max(1, int(np.searchsorted(GRID, value, side="right")) - 1)])
