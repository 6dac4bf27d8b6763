"""The fit, top to bottom: open, start, rounds, escape, choose, look back (docs/decisions/001).

It is a generator without I/O: it yields asks and is sent sums. A loop in one process and every
member of a federation between machines run this same program.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, final

import numpy as np

from emfed.algorithms import Everyone
from emfed.artifacts.errors import LEAST, Chart
from emfed.artifacts.facts import ByWorker
from emfed.artifacts.result import criterion
from emfed.core.errors import DataError, EmfedError, SettingsError
from emfed.core.protocols import MovesComponents, SplitsComponents, free_parameters
from emfed.core.sums import Finish, Fit, FloatArray, IntArray, Unmasked
from emfed.core.wording import Setting, Wording
from emfed.fitting.ascent import FIRST_MOVE, Ascent, Cohort, Objective, Point, Way, look
from emfed.fitting.asks import Exact
from emfed.fitting.convergence import Tolerance
from emfed.fitting.doubts import Doubts, doubted
from emfed.fitting.escape import TRIED_WITH_EMPTY, empty_put_to_use, escape
from emfed.fitting.many import climb
from emfed.fitting.opening import Pooled, pool
from emfed.fitting.parallel import together
from emfed.fitting.proposals import with_one_less, with_one_more
from emfed.fitting.race import Race, charged, owed
from emfed.fitting.selection import empty_as_copies, within_rows
from emfed.fitting.settings import FitSettings
from emfed.fitting.starting import LocalRows, optimum, start_at, starts
from emfed.fitting.stochastic import rounds_of
from emfed.fitting.turns import in_turns
from emfed.fitting.validation import validated
from emfed.network.scoring import Scores, ScoreSums, over_all
from emfed.network.self_check import Moments

MOST_GAIN = 0.5
"""Nats a row that proposals are granted to gain: a neighbouring number of components that needs
more to be chosen is left alone."""

NO_MAXIMUM = (
    "standard errors: the fit is no maximum in some direction, or the rows say nothing about it, "
    "so some errors are huge. Fit with fewer components or a smaller tol."
)


@final
@dataclass(frozen=True, eq=False)
class Candidate:
    """A model that was fitted, where its fit ended, and the criterion there; less is better."""

    position: int
    """Where it stands among `FitSettings.candidates`."""
    problem: Objective
    estimate: Ascent
    criterion: float

    @property
    def model(self) -> Any:
        """The bound model."""
        return self.problem.model


@final
@dataclass(frozen=True, eq=False)
class Conclusion:
    """What a fit came to."""

    pooled: Pooled
    candidates: list[Candidate]
    chosen: int
    final: Candidate
    """The chosen candidate; where values were held out, fitted to all of them."""
    uncertainty: FloatArray | None = None
    """A root of the covariance of the statistics, where the fit was asked for it."""
    scores: FloatArray | None = None
    """How well the model fits the rows of all together (`emfed.network.scoring`), if asked for."""
    held_out: FloatArray | None = None
    """What rows that were held out say (`emfed.fitting.validation`), if asked for."""
    by_worker: ByWorker | None = None
    """Both of each worker, where workers were heard one by one."""
    remarks: list[str] = field(default_factory=list)


def follow(
    settings: FitSettings,
    workers: int,
    shapes: Mapping[str, tuple[int, ...]],
    own: LocalRows | None = None,
    masked: bool = True,
    streams: bool = False,
    absent: bool = False,
) -> Fit[Conclusion]:
    """Fit what the settings say to the rows of so many workers.

    ``shapes`` are those of `Model.summary` of one worker's rows; ``own`` is of a driver that has
    all rows. Where sums are not ``masked`` workers may be heard one by one: so they are where the
    settings want it, or rows are ``streams``, others in each round; and some may be ``absent`` from
    a round.
    """
    way = way_of(settings, streams, absent or not isinstance(settings.who(), Everyone))
    if way is not None and masked:
        raise SettingsError(MASKS_FORBID)
    models = settings.candidates()
    pooled = yield from pool(models[0], shapes)
    remarks: list[str] = []
    if workers > 1 and (settings.doubts == "stop" or (masked and settings.doubts == "tell")):
        remarks += yield from _doubts(settings, pooled, workers)
    several = settings.numbers is not None and len(settings.numbers) > 1
    places = tuple(range(len(settings.numbers or (0,))))
    if several and settings.numbers is not None:
        places = within_rows(models, settings.numbers, pooled.count, remarks)
    heard = settings.masks is False and workers > 1
    cohort = Cohort(workers, pooled.rows, masked, settings.faithful, heard, settings.fine)
    problems = {j: _problem(settings, pooled, cohort, models[j], way) for j in places}
    begun = yield from _begin(settings, list(problems.values()), own)
    candidates = yield from _compete(settings, problems, begun)
    candidates = yield from _improve(settings, candidates)
    chosen = final = _best(candidates)
    if settings.held_out:
        position = len(places) + chosen.position
        final = yield from _seeing_all(
            chosen, position, _problem(settings, pooled, cohort, models[position], way)
        )
    found = Conclusion(pooled, candidates, candidates.index(chosen), final, remarks=remarks)
    if settings.errors:
        found = yield from _with_errors(found)
    if settings.scores or settings.validate:
        found = yield from _looked_back(settings, found, workers, hears=not masked and not streams)
    return found


def _doubts(settings: FitSettings, pooled: Pooled, workers: int) -> Fit[list[str]]:
    """How many workers doubt their units, before the rounds."""
    if Moments.read(pooled.summary) is None:
        return []
    answer = yield Doubts(pooled.summary, pooled.rows, workers)
    count = round(float(answer.value[0]))
    if count and settings.doubts == "stop":
        raise DataError(
            Wording(
                "{} Mend the rows there and begin again, or go on with {}.",
                *(doubted(count, workers), Setting("doubts", "tell")),
            )
        )
    return [doubted(count, workers)] if count else []


MASKS_FORBID: Wording = Wording(
    "this fit hears workers one by one, which masks forbid: use {} with everyone in every round, "
    "or {}.",
    *(Setting("algorithm", "auto"), Setting("masks", False)),
)


def way_of(settings: FitSettings, streams: bool, absent: bool) -> Way | None:
    """How rounds are made that are not sums of everyone's rows; None: they are."""
    if streams or not settings.on_sums:
        return rounds_of(settings)
    return in_turns if absent else None


def _problem(
    settings: FitSettings, pooled: Pooled, cohort: Cohort, model: Any, way: Way | None
) -> Objective:
    tolerance = Tolerance(settings.tolerance, settings.field_tol)
    return Objective(pooled.bind(model), cohort, tolerance, settings.long_steps, way)


def _begin(
    settings: FitSettings, problems: Sequence[Objective], own: LocalRows | None
) -> Fit[list[list[FloatArray]]]:
    """Where each candidate starts: one place or several that compete."""
    start = settings.start
    if isinstance(start, str):
        count, seed = settings.n_init, settings.seed
        return (yield from starts(problems, start, count, seed, own))
    expected = settings.start_statistics != "parameters"
    given = [start_at(one, one.model.from_user(start), expected) for one in problems]
    return [[place] for place in (yield from together(given))]


def _compete(
    settings: FitSettings, problems: Mapping[int, Objective], begun: Sequence[Sequence[FloatArray]]
) -> Fit[list[Candidate]]:
    """All candidates and all their starts in the same rounds; the best start of each candidate.

    A candidate that cannot be chosen any more is given up, and so is a start that cannot win.
    """
    common = Race() if settings.drop and settings.criterion in ("aic", "bic") else None
    fits, owners = list[Fit[Ascent]](), list[int]()
    for (j, problem), own in zip(problems.items(), begun, strict=True):
        race = common or Race()
        compared = common is not None and len(problems) > 1
        charge = _charge(settings, problem) if compared else 0.0
        competes = settings.tol != 0 and (len(own) > 1 or compared)  # 0: all rounds are wanted
        for start in own:
            owners.append(j)
            if isinstance(settings.start, str) and optimum(problem.model) is not None:
                fits.append(_known(problem, start, seen=len(problems) > 1 or settings.likelihood))
            else:
                gives_up = race.competitor(problem, charge) if competes else None
                fits.append(climb(problem, start, gives_up))
    ended = yield from together(fits)
    return [
        _judged(
            settings,
            j,
            problem,
            max(
                (one for one, owner in zip(ended, owners, strict=True) if owner == j),
                key=lambda one: charged(problem, one),
            ),
        )
        for j, problem in problems.items()
    ]


def _known(problem: Objective, start: FloatArray, seen: bool) -> Fit[Ascent]:
    """An optimum that the opening told; the rows are asked for no more than its likelihood."""
    point = Point.unseen(start)
    if seen:
        with suppress(Finish):
            point = yield from look(problem, start, FIRST_MOVE)
    return Ascent(point, True, 0.0)


def _charge(settings: FitSettings, problem: Objective) -> float:
    """Nats a row by which the criterion judges a candidate lower for its size."""
    rows, free = problem.cohort.rows, free_parameters(problem.model)
    return criterion(settings.criterion, 0.0, 0.0, rows, free) / (2 * rows)


def _judged(settings: FitSettings, j: int, problem: Objective, estimate: Ascent) -> Candidate:
    """A candidate with its criterion, where components on few rows owe what the floor gave."""
    likelihood, entropy = estimate.point.values.tolist()
    if settings.held_out:  # the error of values that were hidden is told in the entropy's place
        return Candidate(j, problem, estimate, entropy)
    if settings.numbers is None or len(settings.numbers) == 1:
        return Candidate(j, problem, estimate, 0.0)
    likelihood -= owed(problem, estimate.point.statistics)
    rows, free = problem.cohort.rows, free_parameters(problem.model)
    value = criterion(settings.criterion, likelihood, entropy, rows, free)
    return Candidate(j, problem, estimate, value)


def _best(candidates: Sequence[Candidate]) -> Candidate:
    return min(candidates, key=lambda one: one.criterion)


def tries(settings: FitSettings, candidates: Sequence[Candidate]) -> int:
    """How many proposals are tried at once; 0: a fit ends where its start leads.

    One worker's start has seen its rows; but numbers of components that it compares may differ by
    less than starts do.
    """
    alone = candidates[0].problem.cohort.workers == 1
    several = len(candidates) > 1
    if not settings.leads_on or candidates[0].problem.way is not None:
        return 0
    if all(isinstance(one.model, MovesComponents) for one in candidates):
        return 0 if alone or several else settings.moves
    if settings.faithful or candidates[0].problem.cohort.many:
        return 0
    able = all(isinstance(one.model, SplitsComponents) for one in candidates)
    return settings.moves if able and (several or not alone) else 0


def _improve(settings: FitSettings, candidates: list[Candidate]) -> Fit[list[Candidate]]:
    """Escape from local optima: the best candidate, then its neighbours, each once.

    Where a fit is to end where its start leads, components without rows alone are put to use.
    """
    count = tries(settings, candidates)
    if not count and len(candidates) == 1:
        one = candidates[0]
        estimate = yield from escape(
            one.problem, one.estimate, TRIED_WITH_EMPTY, proposed_at=empty_put_to_use
        )
        return [_judged(settings, one.position, one.problem, estimate)]
    done: set[int] = set()
    room = 2 * MOST_GAIN * candidates[0].problem.cohort.rows
    while count:
        best = _best(candidates)
        near = candidates.index(best)
        order = [j for j in (near, near + 1, near - 1) if 0 <= j < len(candidates)]
        left = [
            j for j in order if j not in done and candidates[j].criterion <= best.criterion + room
        ]
        if not left:
            break
        done.add(left[0])
        one = candidates[left[0]]
        estimate = one.estimate
        if not estimate.converged:  # others had promised more
            estimate = yield from _on(one.problem, estimate)
        beside = list(_beside(candidates, left[0]))
        estimate = yield from escape(one.problem, estimate, count, beside)
        candidates = [*candidates]
        candidates[left[0]] = _judged(settings, one.position, one.problem, estimate)
    return candidates


def _on(problem: Objective, estimate: Ascent) -> Fit[Ascent]:
    """Go on from where an ascent was given up."""
    found = yield from climb(problem, estimate.point.statistics)
    return found if found.point.objective >= estimate.point.objective else estimate


def _beside(candidates: Sequence[Candidate], j: int) -> list[FloatArray]:
    """Where a candidate may go on from: its neighbours with a component more, or less."""
    model, out = candidates[j].model, list[FloatArray]()
    components = [candidate.model.describe().get("n_components", 1) for candidate in candidates]
    for other, count in zip(candidates, components, strict=True):
        more = count - components[j]
        if more == -1:
            out += with_one_more(model, other.model, other.estimate.point.statistics)
        elif more == 1:
            out += with_one_less(model, other.model, other.estimate.point.statistics)
    return out


def _seeing_all(chosen: Candidate, position: int, problem: Objective) -> Fit[Candidate]:
    """The chosen candidate, fitted to values that were hidden, too."""
    estimate = yield from climb(problem, chosen.estimate.point.statistics)
    if not np.isfinite(estimate.point.objective):  # nothing more was asked for
        return chosen
    return Candidate(position, problem, estimate, chosen.criterion)


def _with_errors(found: Conclusion) -> Fit[Conclusion]:
    """Standard errors: exact statistics a step along each direction (`emfed.artifacts.errors`)."""
    problem, pooled = found.final.problem, found.pooled
    at = empty_as_copies(problem.model, found.final.estimate.point.statistics, pooled.count)
    try:
        chart = Chart.at(problem.model, at, pooled.effective)
        params = tuple(chart.questions())
        answer = yield Exact(problem.model, params)
    except EmfedError as error:  # a fit is not lost for want of its errors
        return replace(found, remarks=[*found.remarks, str(error)])
    except Finish as finish:
        return replace(found, remarks=[*found.remarks, f"no standard errors: {finish}."])
    sums = answer.value.reshape(len(params), -1) / answer.rows
    root, least = chart.root(sums, pooled.effective)
    if least < LEAST:
        found = replace(found, remarks=[*found.remarks, NO_MAXIMUM])
    return replace(found, uncertainty=root)


def _looked_back(
    settings: FitSettings, found: Conclusion, workers: int, hears: bool
) -> Unmasked[Conclusion]:
    """How well the model fits the rows, and rows that were held out."""
    problem, pooled = found.final.problem, found.pooled
    at = empty_as_copies(problem.model, found.final.estimate.point.statistics, pooled.count)
    try:
        if settings.scores:
            found = yield from _scored(found, problem.model, at, workers, hears)
        if settings.validate:
            plain = settings.candidates()[found.final.position]
            told = yield from validated(
                problem, plain, at, pooled, hears and workers > 1, settings.seed
            )
            known = found.by_worker
            if told.by_worker is not None:
                known = ByWorker(
                    _counts(told.by_worker), known and known.scores, told.by_worker[:, 2:]
                )
            remarks = [*found.remarks, *told.remarks]
            found = replace(found, held_out=told.held_out, by_worker=known, remarks=remarks)
    except Finish:  # the model is whole
        pass
    return found


def _scored(
    found: Conclusion, model: Any, at: FloatArray, workers: int, hears: bool
) -> Unmasked[Conclusion]:
    params = model.maximize(at)
    if not hears:
        ask = ScoreSums(model, params)
        return replace(found, scores=ask.scores((yield ask)))
    told = yield Scores(model, params, np.arange(workers))
    heard = np.isfinite(told[:, 0])
    remarks = list(found.remarks)
    if not heard.all():
        remarks.append(f"{(~heard).sum()} workers did not say how well the model fits their rows.")
    whole = over_all(told[heard, 2:], told[heard, 0]) if heard.all() else None
    known = ByWorker(_counts(told), told[:, 2:])
    return replace(found, scores=whole, by_worker=known, remarks=remarks)


def _counts(told: FloatArray) -> IntArray:
    """Rows of each worker that replied."""
    return np.nan_to_num(told[:, 1]).astype(np.int64)
