"""Rounds in which workers are heard one by one: compressed, on mini-batches, of some of them.

The algorithm makes the rounds (`emfed.algorithms.paper`); before and after them the fit is that of
everyone (`emfed.fitting.following`). Since no round tells the likelihood, everyone is asked for it
at the end, there and at the start: rounds that did harm are left out. That |H|^2 is small may be
chance, so a few exact EM steps find out what is left.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, final

import numpy as np

from emfed.algorithms import Everyone, paper
from emfed.algorithms.base import CompressedEM
from emfed.algorithms.vr_fed_em import VRFedEM
from emfed.core.errors import SettingsError
from emfed.core.protocols import Crowd
from emfed.core.sums import (
    Answers,
    AskedWorkers,
    Finish,
    Fit,
    FloatArray,
    Gather,
    IntArray,
    RowsOfWorkers,
    States,
    Unmasked,
)
from emfed.core.wire import decode_floats, encode_floats, floats_size
from emfed.core.wording import ByFace, Setting, Wording
from emfed.data.tables import Workers
from emfed.fitting.ascent import FIRST_MOVE, Ascent, GivesUp, Objective, Point, Way, look
from emfed.fitting.convergence import Convergence, Tolerance, length
from emfed.fitting.parallel import together
from emfed.fitting.settings import FitSettings
from emfed.fitting.stopping import SMALL

EXACT_STEPS = 5
"""EM steps that look at what is left: after that the slow direction of a plateau is alone to a per
mille (storms)."""
STREAMED = (
    "this model needs a constant of the data that a stream does not have: use "
    "gaussian_mixture(..., 'tied', second_moment='statistic')."
)
LEFT_BY_WORD = 100.0
"""A fit that says it converged to so many nats has at most so many times as many left: an estimate
from a few rounds is good to an order of magnitude or two."""
KEPT_START: Wording = Wording(
    "the run ended worse than it began, so the start is kept: its noise was too much for this "
    "model. Use {}, a finer {}{}.",
    *(Setting("algorithm", "auto"), Setting("compressor")),
    ByFace(", or a smaller step_size", command=""),
)


@final
@dataclass(frozen=True, eq=False)
class Sizes(Gather):
    """What each worker counts for, which decides how long steps may be."""

    workers: IntArray
    purpose: str = "start"
    memory: Hashable = None

    def fields(self) -> dict[str, Any]:
        """Nothing is kept."""
        return {}

    def answer(self, rows: RowsOfWorkers, workers: IntArray, states: States) -> Answers:
        """Nothing: the adder knows how much each worker counts for."""
        n = len(workers)
        nothing, size = np.zeros(n, dtype=np.int64), np.full(n, floats_size(0))
        values, totals = np.zeros((n, 0)), rows.totals[workers]
        return Answers(workers, values, np.ones(n), size, workers[:0], totals, nothing)

    def concluded(
        self, answers: Answers, memory: FloatArray | None
    ) -> tuple[float, bytes, FloatArray]:
        """The sum of the squared shares."""
        shares = answers.totals / answers.totals.sum()
        data = encode_floats(np.array([shares @ shares]))
        return self.told(data, answers.workers), data, np.zeros(0)

    def told(self, data: bytes, workers: IntArray) -> float:
        """The same."""
        return float(decode_floats(data, 1)[0])


def check_suits(settings: FitSettings, workers: AskedWorkers) -> None:
    """Refuse an algorithm that these rows cannot serve."""
    if not workers.streaming and settings.on_sums:
        return
    algorithm = paper.compressed(settings.method(len(workers.totals)))
    if workers.streaming and isinstance(algorithm, VRFedEM):
        raise SettingsError(
            "a Stream gives each row once, and this algorithm needs rows again: use FedEM."
        )
    if workers.streaming and any(model.fixed_data for model in settings.candidates()):
        raise SettingsError(STREAMED)
    if algorithm.batch_size and any(workers.everywhere(_weighted)):
        raise SettingsError(
            Wording(
                "sample_weight goes with full passes: leave {} out, or the weights.",
                Setting("batch_size"),
            )
        )


def _weighted(data: Workers) -> bool:
    return data.row_weights is not None


def resolved(settings: FitSettings, model: Any, n: int, squares: float) -> CompressedEM:
    """The algorithm with everything that was left open filled in.

    ``squares`` is the sum of the squared shares of the ``n`` workers.
    """
    algorithm, drawn = paper.compressed(settings.method(n)), settings.who()
    probabilities = drawn.probabilities(np.arange(n), n)
    return algorithm.resolve(model.layout, Crowd(1 / squares, float(probabilities.min())))


def described(settings: FitSettings, model: Any, totals: FloatArray) -> dict[str, Any]:
    """What was chosen, with what follows from the workers."""
    algorithm = settings.method(len(totals))
    if isinstance(algorithm, CompressedEM):
        shares = totals / totals.sum()
        return resolved(settings, model, len(totals), float(shares @ shares)).describe()
    return algorithm.describe()


def rounds_of(settings: FitSettings) -> Way:
    """How the rounds are made of fits that are no sums of everyone's rows."""
    numbers = count()
    several = settings.n_init > 1 or len(settings.candidates()) > 1
    compared = settings.tolerance > 0 or several or settings.likelihood

    def climb(
        problem: Objective, start: FloatArray, gives_up: GivesUp | None = None
    ) -> Unmasked[Ascent]:
        """Rounds until |H|^2 is small, or a limit; and what they were worth."""
        cohort, number = problem.cohort, next(numbers)
        squares = yield Sizes(np.arange(cohort.workers))
        small = settings.stop(settings.method(cohort.workers)).tolerance or 0.0
        method = paper.Method(
            problem.model,
            resolved(settings, problem.model, cohort.workers, squares),
            settings.who(),
            cohort.workers,
            cohort.rows,
            settings.seed,
            small,
            number,
            settings.patience if isinstance(settings.who(), Everyone) else None,
        )
        ended = yield from paper.rounds(method, paper.Server.begun(method, start))
        here = ended.statistics
        if not (compared or ended.converged):
            return Ascent(Point.unseen(here), False, np.inf)
        found = yield from judged(problem, start if settings.tolerance else None, here)
        if found.kept_start or not ended.converged:
            return found
        left = yield from left_of(problem, found.point)
        return Ascent(found.point, left <= LEFT_BY_WORD * SMALL, left)

    return climb


def judged(
    problem: Objective, start: FloatArray | None, here: FloatArray, move: float = FIRST_MOVE
) -> Fit[Ascent]:
    """Where rounds have led, if everyone says that it is no worse than the start.

    EM is expected to ``move`` it so far in the metric.
    """
    places = [here] if start is None or np.array_equal(here, start) else [here, start]
    try:
        seen = yield from together([_seen(problem, place, move) for place in places])
    except Finish:
        return Ascent(Point.unseen(here), False, np.inf)
    last, first = seen[0], seen[-1]
    if not last.objective >= first.objective - problem.cohort.unit:
        return Ascent(first, False, np.inf, kept_start=True)
    return Ascent(last, False, np.inf)


def _seen(problem: Objective, statistics: FloatArray, move: float) -> Fit[Point]:
    """What everyone says of a place, which stays where it is."""
    point = yield from look(problem, statistics, move, purpose="question")
    return replace(point, statistics=statistics)


def left_of(problem: Objective, first: Point) -> Fit[float]:
    """Nats a row that EM would still gain: those of some steps, and what these let expect.

    Fast errors die in them. In the direction that is left one bold step tells whether EM crawls.
    Infinite where an exchange was refused.
    """
    try:
        return (yield from _left(problem, first))
    except Finish:
        return np.inf


def _left(problem: Objective, first: Point) -> Fit[float]:
    state, here = Convergence(Tolerance(SMALL)), first
    for _ in range(EXACT_STEPS):
        before = here
        move = length(here.field)
        here = yield from look(problem, here.image, move, here.values, purpose="question")
        gain = here.objective - before.objective
        state.note(gain, before.field, here.field, here.squared_field)
        if not here.field.any():
            return here.objective - first.objective
    gained = here.objective - first.objective
    times = state.bold(here.field)
    there = here.image + times * (here.image - here.statistics)
    if not problem.model.inside(there):
        return gained + state.left
    back = (1 + times) * length(here.field)
    tried = yield from look(problem, there, back, here.values, purpose="question")
    return max(gained + state.left, tried.objective - first.objective)
