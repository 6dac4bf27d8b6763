"""The one fit: from settings and a federation, wherever its rows are, to a result.

`run_fit` drives every fit. `fit`, the estimators, the command line and `serve` translate what they
are told into `FitSettings` and call it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, final

import numpy as np

from emfed.algorithms import EM, AutoEM, Everyone
from emfed.artifacts.errors import LEAST, Chart
from emfed.artifacts.facts import ByWorker, Facts
from emfed.artifacts.result import Result
from emfed.core.errors import (
    EmfedError,
    MembersChanged,
    ParticipationError,
    SettingsError,
    known,
)
from emfed.core.ledger import Ledger
from emfed.core.protocols import (
    WHOLE,
    Algorithm,
    Federation,
    FloatArray,
    SplitsComponents,
    View,
)
from emfed.core.records import Records, RoundRecord
from emfed.core.registry import plain
from emfed.core.storage import load_checkpoint
from emfed.core.sums import Sum, drive
from emfed.core.wording import ByFace, Setting, Wording
from emfed.fitting import private_in_process as in_process
from emfed.fitting.candidates import Candidates
from emfed.fitting.climbing import Climb
from emfed.fitting.fitted import NOBODY, Fitted, Watch
from emfed.fitting.folds import with_validation
from emfed.fitting.interrupting import interrupts
from emfed.fitting.moving import Moves, can_move
from emfed.fitting.private import PrivateFit, PrivatePlan
from emfed.fitting.private_result import PrivateChronicle, private_fitted
from emfed.fitting.remarks import FEWER_COMPONENTS, shortened, unconverged
from emfed.fitting.rounds import WAIT_SECONDS, WAITS, Run, remembered
from emfed.fitting.selection import (
    Selection,
    choose,
    empty_components,
    floor_remarks,
    with_setting,
    within_rows,
    without_empty,
)
from emfed.fitting.session import Session, digest, of_everyone, recast
from emfed.fitting.settings import TOL, FitSettings
from emfed.fitting.starts import NOT_INSIDE, search
from emfed.fitting.stopping import PATIENCE, Callback, Monitor, Stop, remaining
from emfed.models.binding import Bound
from emfed.models.bounded import check_private
from emfed.models.components import SMALLEST_COMPONENT
from emfed.models.side_by_side import MOST_PARTS, SideBySide, SideBySideParameters
from emfed.network import InProcessFederation, RayFederation
from emfed.network.scoring import over_all

T = TypeVar("T")
NUMBERS_AT_ONCE = 1 << 20
"""Statistics in one answer to a question about many parameters: 8 MB."""
RESEEDS = 3
"""How often components without rows are put to use again."""
POINTS = 64
"""Rounds whose statistics are remembered for a curve: memory does not grow with the fit."""


def run_fit(settings: FitSettings, federation: Federation, watch: Watch = NOBODY) -> Fitted:
    """Open the federation, find a start, make the rounds, choose, and look at the end."""
    if settings.epsilon is not None:
        return private_fit(settings, federation, watch)
    remarks: list[str] = []
    session, parts = open_session(settings, federation, remarks)
    if settings.held_out:
        course, parts, selection = _rounds_twice(settings, session, parts, watch, remarks)
    else:
        course = _make_rounds(settings, session, parts, watch, remarks)
        selection = None
    fitted = _finished(settings, session, course, parts, remarks, selection)
    run, stopped, tolerance = course.run, course.stopped, course.tolerance
    place, result = _place(fitted.selection, settings, parts), fitted.result
    if settings.validate and stopped != "interrupted":
        first = _start_of(place, course.begun, session.view(course.view), parts, result)
        fitted_so, nats = result, tolerance or TOL
        tried = _at_the_end(
            lambda: with_validation(fitted_so, session, place, first, nats, remarks),
            session,
            remarks,
        )
        result = result if tried is None else tried
    if course.curve is not None and stopped != "interrupted":
        result = course.curve.drawn(result, session, place)
    thrown_off, short = guard_ridden(run), shortfall(run, stopped, course.stop, tolerance)
    remarks += [*floor_remarks(result), *run_remarks(run, stopped)]
    remarks += [thrown_off] if thrown_off else []
    told = [*remarks, *([short] if short else [])]
    result = with_setting(result, "remarks", told) if told else result
    return replace(
        fitted, result=result, remarks=tuple(remarks), shortfall=short, thrown_off=thrown_off
    )


@final
@dataclass(frozen=True)
class _Course:
    """What the rounds of a fit leave: where they began and ended, and who looked on."""

    run: Run
    view: View
    begun: FloatArray | None
    """S_0; None where the fit went on from a checkpoint."""
    stop: Stop
    stopped: str
    tolerance: float
    climb: Climb | None
    candidates: Candidates
    curve: Curve | None
    told: FloatArray | None = None
    """Log-likelihood and entropy of each candidate that is left, where there are several."""


def _make_rounds(
    settings: FitSettings,
    session: Session,
    parts: tuple[int, ...],
    watch: Watch,
    remarks: list[str],
    given: FloatArray | None = None,
) -> _Course:
    """Find a start, and make rounds from it until a limit is met or little is left to gain.

    A start that is ``given`` makes rounds of a new phase, whatever a checkpoint holds.
    """
    goes_on = watch.goes_on and given is None
    size = session.federation.size
    algorithm, tolerance = settings.method(size), settings.tolerance
    watched = watches(settings, algorithm)
    view = main_view(session, parts, watched)
    begun = given
    if given is None and not goes_on:
        begun = start_at(settings, session, parts, view)
    run = begin_run(settings, session, view, begun, watch.monitor)
    stop = settings.stop(algorithm)
    climb = Climb(tolerance, settings.long_steps) if watched else None
    if climb is not None:  # it decides when EM has converged, part by part
        stop = replace(stop, nats=None)
    drops = settings.drop and not watched and settings.tol != 0 and not settings.held_out
    candidates = Candidates(settings.criterion, drops)
    curve = Curve() if watch.curve else None
    own: list[Any] = [hook for hook in (climb, candidates if len(parts) > 1 else None) if hook]
    moves = None
    leads_on = settings.leads_on or watch.leads_on
    if leads_on and can_move(session, parts, algorithm, settings.is_auto):
        moves = Moves(settings.moves)
        own.append(moves)
    hooks = _onlookers(run, own, curve, watch, goes_on)
    exact = begun is not None and isinstance(settings.start, str)
    with interrupts():  # between rounds, too: what they reached is there
        if tolerance and _nothing_left(session, climb, parts if exact else ()):
            stopped, run.confirmed = "nats", True
        elif moves is not None and moves.hopeless:  # so the checkpoint says
            stopped = "nats"
        else:
            stopped = _until(run, stop, hooks, watch, climb)
        course = _Course(run, view, begun, stop, stopped, tolerance, climb, candidates, curve)
        course = _settled_course(course, own, hooks, watch, remarks) if tolerance else course
        if len(parts) == 1:
            return course
        if moves is None or not tolerance:
            return _compared(course, hooks, watch)
        return _led_on(course, moves, own, hooks, watch)


CONVERGED = ("nats", "tolerance")


def _led_on(
    course: _Course, moves: Moves, own: Sequence[Any], hooks: Sequence[Callback], watch: Watch
) -> _Course:
    """Compare the candidates, then lead on the best and its neighbours, one after the other.

    Each is tried from where its neighbours ended, too. A limit that is met on the way ends that:
    all had converged before.
    """
    run, candidates, stopped = course.run, course.candidates, course.stopped
    while stopped in CONVERGED:
        if not candidates.led_on:
            course = _compared(replace(course, stopped=stopped), hooks, watch)
            stopped = course.stopped
            if stopped not in CONVERGED:
                return course
            candidates.settle(known(course.told))
        else:
            while stopped in CONVERGED and candidates.led_on and moves.move(run):
                stopped = _goes_on(course, own, hooks, watch)
            if not (candidates.led_on and stopped in CONVERGED):
                continue
            _settle_best(course, moves)
        place = candidates.turn()
        if place is None:
            break
        left = candidates.dropped[place]
        moves.begin(run, candidates.beside(place), left.values[None] if left.converged else None)
        if not left.converged:  # others had promised more
            run.restart(run.state.statistics)
            stopped = _goes_on(course, own, hooks, watch)
    if not candidates.led_on:
        return _compared(replace(course, stopped=stopped), hooks, watch)
    if stopped not in CONVERGED and run.kept is not None:
        _settle_best(course, moves)
    run.confirmed = True
    return replace(course, stopped=stopped if stopped in ("interrupted", "callback") else "nats")


def _goes_on(course: _Course, own: Sequence[Any], hooks: Sequence[Callback], watch: Watch) -> str:
    """Rounds from where the run stands now, until they end."""
    for hook in own:
        hook.attach(course.run)
    return _until(course.run, course.stop, hooks, watch, course.climb)


def _settle_best(course: _Course, moves: Moves) -> None:
    """End at the best place of the candidate that is led on, if everyone says what it is worth."""
    moves.go_back(course.run)
    with contextlib.suppress(ParticipationError):  # what it was worth before is known
        told = of_everyone(course.run.session, lambda: course.run.ask("values"))
        course.candidates.settle(told)


def _settled_course(
    course: _Course,
    own: Sequence[Any],
    hooks: list[Callback],
    watch: Watch,
    remarks: list[str],
) -> _Course:
    """Go on while a component can be put to better use; undo a run that did only harm."""
    run, climb, stopped = course.run, course.climb, course.stopped
    moves = next((hook for hook in own if isinstance(hook, Moves)), None)
    alone = all(hook is not course.candidates for hook in own)
    while alone and stopped in CONVERGED:
        if not (_reseed(run) or (moves is not None and moves.move(run))):
            break
        stopped = _goes_on(course, own, hooks, watch)
    if alone and moves is not None and moves.gained:
        course = replace(course, begun=None)  # validation goes on from the end
    if alone and moves is not None and moves.go_back(run):
        stopped = stopped if stopped == "interrupted" else "nats"
        if climb is not None:
            climb.go_back(run.state.statistics)
    looked_on = climb is not None or course.candidates.led_on
    if not looked_on and stopped != "interrupted" and run.settle():
        remarks.append(
            Wording(
                "the run ended worse than it began, so the start is kept: its noise was too much "
                "for this model. Use {}, a finer {}{}.",
                *(Setting("algorithm", "auto"), Setting("compressor")),
                ByFace(", or a smaller step_size", command=""),
            )
        )
    return replace(course, stopped=stopped)


def _compared(course: _Course, hooks: Sequence[Callback], watch: Watch) -> _Course:
    """Ask everyone how well the candidates fit; do without those who refuse that for good.

    Where too few answer, those who had left and are back may count again, by a round. Those who
    are here make rounds for a model of their own rows, as after anybody has left, and are asked
    again. A run that was told to end makes one round, which binds its model to them.
    """
    run, stopped, dropped = course.run, course.stopped, course.candidates.dropped
    back: set[int] = set()
    while True:
        try:
            for place in tuple(dropped):  # it remembers what it is told
                course.candidates.values(place)
            return replace(course, stopped=stopped, told=run.ask("values"))
        except ParticipationError:
            asked, back = back, set(run.federation.returned.tolist())
            if not (len(run.session.refusing) or back - asked):
                raise
        with _carrying_result(run):
            record = run.step()
        for hook in hooks:
            hook(record)
        if stopped not in ("interrupted", "callback"):
            stopped = _until(run, course.stop, hooks, watch, course.climb)


def private_fit(settings: FitSettings, federation: Federation, watch: Watch = NOBODY) -> Fitted:
    """A fit with an epsilon: its budget decides how many rounds there are."""
    if isinstance(federation, InProcessFederation | RayFederation):
        return in_process.private_fit(settings, federation.workers, watch)
    models: Sequence[Any] = settings.candidates()
    largest = max(models, key=lambda model: model.n_components)
    check_private(largest)
    opened = federation.open_private(
        largest, settings.columns, settings.privacy, settings.masks, settings.noise_seed
    )
    (width, columns, names), n = opened, federation.size
    plan = PrivatePlan.of(settings, n, federation.masks, simulated=False)
    fit = PrivateFit(models, plan, settings.rounds, settings.seed)
    ledger = Ledger(n, names)
    federation.attach(ledger)
    settings = settings.but(columns=columns)
    course = PrivateChronicle(settings, ledger, watch.callbacks, fit)

    def answer(ask: Any) -> Sum:
        found = Sum(federation.release(ask.about, ask.purpose, ask.number).astype(float), 0.0)
        course.note(ask, found, 0.0)
        return found

    drive(fit.follow(width), answer, course.refuses)
    return private_fitted(course)


def _rounds_twice(
    settings: FitSettings,
    session: Session,
    parts: tuple[int, ...],
    watch: Watch,
    remarks: list[str],
) -> tuple[_Course, tuple[int, ...], Selection | None]:
    """Rounds of candidates that do not see some values, and of the one with the least error there.

    The second rounds see everything, and go on from where the candidate was: their view names the
    same model without holes. Return their course and candidate, and what was compared.
    """
    assert settings.numbers is not None
    count = len(settings.numbers)
    if watch.goes_on:  # the checkpoint's view tells which rounds it was made in
        view = View.read(load_checkpoint(watch.checkpoint or "")[1]["view"])
        if view.parts is not None and min(view.parts) >= count:
            return _make_rounds(settings, session, view.parts, watch, remarks), view.parts, None
    course = _make_rounds(settings, session, parts, watch, remarks)
    whole = result_of(course.run, course.stopped, settings)
    selection = _chosen(settings, session, course, whole, remarks)[0]
    chosen = settings.numbers.index(selection.n_components)
    if course.stopped in ("interrupted", "callback"):
        # Nobody is asked for more: what is there has seen nine tenths of the values.
        return course, parts, None
    begun, final = selection.best.statistics, (count + chosen,)
    view = main_view(session, final, watches(settings, course.run.algorithm))
    if view.watched:
        begun = session.view(view).join([begun])
    return _make_rounds(settings, session, final, watch, remarks, begun), final, selection


def _onlookers(
    run: Run, own: Sequence[Any], curve: Curve | None, watch: Watch, goes_on: bool
) -> list[Callback]:
    """All who look at the rounds, each where the checkpoint left it, if they go on from one."""
    if goes_on:
        run.restore(watch.checkpoint or "")
    for hook in own:
        hook.attach(run)
    hooks = [*own, *([] if curve is None else [curve.watching(run)]), *watch.callbacks]
    if goes_on:
        run.recall(watch.checkpoint or "", remembered(hooks))
    return hooks


def _nothing_left(session: Session, climb: Climb | None, parts: tuple[int, ...]) -> bool:
    """Whether no round is needed: a climb that has ended, or optima that the opening told."""
    ended = climb is not None and climb.settled
    return ended or bool(parts and all(settled(session, j) is not None for j in parts))


def _start_of(
    place: int, begun: FloatArray | None, whole: Any, parts: tuple[int, ...], result: Result
) -> FloatArray:
    """S_0 of one candidate; where the fit ended, if it went on from a checkpoint."""
    if begun is None:
        return result.statistics
    return begun[whole.cuts[parts.index(place)]] if isinstance(whole, SideBySide) else begun


def watches(settings: FitSettings, algorithm: Algorithm) -> bool:
    """Whether log-likelihoods travel with the statistics: of EM by name, with everyone there.

    They decide whether long steps stand, and when little is left.
    """
    named = isinstance(settings.algorithm, str)
    return named and isinstance(algorithm, EM) and isinstance(settings.who(), Everyone)


def open_session(
    settings: FitSettings, federation: Federation, remarks: list[str], count_bytes: bool = True
) -> tuple[Session, tuple[int, ...]]:
    """The opening exchange, and which candidates the rows can have; ``remarks`` name the others."""
    models = settings.candidates()
    model = models[0] if len(models) == 1 else SideBySide(models, watched=False)
    session = Session(
        model,
        federation,
        weights=settings.weights,
        columns=settings.columns,
        seed=settings.seed,
        count_bytes=count_bytes,
        masks=settings.masks,
        rounded=settings.method(2).rounds_opening and not model.exact_opening,
        patience=settings.patience,
    )
    parts = tuple(range(len(models) // 2 if settings.held_out else len(models)))
    if len(parts) > 1 and settings.numbers is not None:
        parts = within_rows(models, settings.numbers, session.samples, remarks)
    return session, parts


def main_view(session: Session, parts: tuple[int, ...], watched: bool) -> View:
    """The view of the rounds: the model itself where it stands alone and nothing is watched."""
    alone = not isinstance(session.model, SideBySide)
    return WHOLE if alone and not watched else View(parts, watched=watched)


def settled(session: Session, part: int) -> FloatArray | None:
    """Statistics at the optimum of a candidate, where the opening exchange said all.

    So it is for one Gaussian, factor analysis, PPCA and one regression of complete rows. A stream's
    opening tells of its first rows alone.
    """
    network = session.federation
    if isinstance(network, InProcessFederation) and network.data.streaming:
        return None
    model = session.bound.part(part)
    found: FloatArray | None = model.closed_form()
    return found if found is not None and model.inside(found) else None  # else the search tells why


def start_at(
    settings: FitSettings, session: Session, parts: tuple[int, ...], view: View
) -> FloatArray:
    """S_0; searched anew where somebody leaves or comes back in the midst of it."""
    while True:
        try:
            return _start_at(settings, session, parts, view)
        except MembersChanged:
            continue
        except ParticipationError:
            if not session.part_with_refusers():
                raise


def _start_at(
    settings: FitSettings, session: Session, parts: tuple[int, ...], view: View
) -> FloatArray:
    model = session.view(view)
    start, mode = settings.start, settings.start_statistics
    if isinstance(start, str):
        known = {j: exact for j in parts if (exact := settled(session, j)) is not None}
        others = [j for j in parts if j not in known]
        found = search(session, others, start, settings.n_init)
        both = known | dict(zip(others, found, strict=True))
        own = [both[j] for j in parts]
        return model.join(own) if isinstance(model, SideBySide) else own[0]
    plain_model = session.view(main_view(session, parts, False))
    params = plain_model.from_user(start)
    if mode == "parameters":
        statistics = plain_model.statistics_of(params)
    else:
        where = main_view(session, parts, False)
        statistics = session.ask("statistics", where, params, "start", everyone=True)
        session.evaluations += session.samples
    if not plain_model.inside(statistics):
        raise SettingsError(f"{NOT_INSIDE}: choose other starting parameters.")
    if view.watched:
        assert isinstance(model, SideBySide)
        return model.join([statistics[cut] for cut in model.cuts])
    return statistics


def begin_run(
    settings: FitSettings,
    session: Session,
    view: View,
    statistics: FloatArray | None,
    monitor: Monitor | None = None,
) -> Run:
    """A run ready for its first round; without statistics, for a checkpoint."""
    algorithm = settings.method(session.federation.size)
    begun = np.zeros(session.view(view).layout.size) if statistics is None else statistics
    run = Run(
        session,
        view,
        algorithm,
        begun,
        participation=settings.who(),
        retries=settings.retries,
        monitor=monitor,
    )
    start = settings.start if isinstance(settings.start, str) else plain_start(settings.start)
    run.fingerprint = plain(
        {
            **session.fingerprint(),
            "algorithm": algorithm.describe(),
            "participation": settings.who().describe(),
            "seed": settings.seed,
            "start": [start, settings.n_init, settings.start_statistics],
        }
    )
    return run


def plain_start(params: Any) -> str:
    """Given parameters, in the digits of a checkpoint."""
    return digest(b"".join(np.ascontiguousarray(a).tobytes() for a in params.arrays().values()))


def _reseed(run: Run) -> bool:
    """Put components without rows to use, if there are any: the run goes on from halves of others.

    No message tells where rows are that the model describes badly; the server knows how wide the
    components are, and halves of a wide one lose next to nothing.
    """
    together = isinstance(run.model, SideBySide)
    model = run.model.models[0] if together else run.model
    cut = run.model.cuts[0] if together else slice(None)
    statistics = run.state.statistics.copy()
    empty = empty_components(model, statistics[cut], run.session.samples)
    if run.reseeds == RESEEDS or not empty.any() or empty.all():
        return False
    if not isinstance(model, SplitsComponents):
        return False
    statistics[cut] = model.split(statistics[cut], empty, run.reseeds)
    moved = not np.array_equal(statistics, run.state.statistics)
    if not (moved and run.model.inside(statistics)):
        return False
    run.reseeds += 1
    run.restart(statistics)
    return True


def _until(
    run: Run, stop: Stop, hooks: Sequence[Callback], watch: Watch, climb: Climb | None
) -> str:
    """The rounds; an error carries what they had reached.

    Those that a move alone gave up had converged before.
    """
    with _carrying_result(run):
        stopped = run.until(stop, hooks, watch.checkpoint, watch.checkpoint_every)
    if stopped == "callback" and climb is not None and climb.settled:
        stopped, run.confirmed = "nats", True  # EM's own steps are full passes
    given_up = all(isinstance(hook, Moves) for hook in run.ended_by)
    return "nats" if stopped == "callback" and given_up else stopped


@contextlib.contextmanager
def _carrying_result(run: Run) -> Iterator[None]:
    """Within, an error carries what the run had reached."""
    try:
        yield
    except Exception as error:
        if run.kept is not None:  # and not where it tries a move
            run.move(run.kept)
        with contextlib.suppress(Exception):  # the parameters may be what cannot be computed
            setattr(error, "result", result_of(run, "error"))  # noqa: B010 (any exception)
        raise


def _finished(
    settings: FitSettings,
    session: Session,
    course: _Course,
    parts: tuple[int, ...],
    remarks: list[str],
    earlier: Selection | None = None,
) -> Fitted:
    """The model, or the best candidate after one more question about all that are left.

    ``earlier`` is what was compared before the rounds of the one that was chosen.
    """
    run, climb, candidates = course.run, course.climb, course.candidates
    result = whole = result_of(run, course.stopped, settings)
    selection, likelihood = None, None
    if len(parts) > 1:
        selection, likelihood = _chosen(settings, session, course, whole, remarks)
        result = selection.best
    elif isinstance(run.model, SideBySide):
        result = part_of(whole, session, parts[0], run.state.statistics[run.model.cuts[0]])
        likelihood = climb.likelihoods[0] if climb is not None and climb.parts else None
    place = _place(selection, settings, parts)
    if place in candidates.dropped and not candidates.dropped[place].converged:
        result = replace(result, confirmed=False)
        remarks.append(
            Wording(
                "the number of components that was chosen had left the run early, as others "
                "promised more: fit it by itself, or compare fewer with {}.",
                Setting("drop", False),
            )
        )
    result = without_empty(result, session.samples, remarks)
    unscored = result
    if settings.scores:  # with masks the mean over all; each site looks at its own
        scored = _at_the_end(
            lambda: with_scores(unscored, session, place, remarks), session, remarks
        )
        result = unscored if scored is None else scored
    if settings.errors:
        result = with_errors(result, session, place, remarks)
    if likelihood is None and settings.likelihood:
        known = result
        likelihood = _at_the_end(lambda: _mean_likelihood(known, session, place), session, remarks)
    if earlier is not None and selection is None:
        k = earlier.n_components
        told = {"criterion": earlier.criterion, "tried": [dict(row) for row in earlier.table]}
        result = with_setting(result, "selection", told)
        selection = replace(earlier, best=result, results={**earlier.results, k: result})
    return Fitted(result, selection, likelihood)


def _at_the_end(ask: Callable[[], T], session: Session, remarks: list[str]) -> T | None:
    """What is asked about a model that is there; None where too few answer, with a remark.

    A masked sum needs everybody: it waits as long as a round does, and not for who is out of the
    run for good. Without masks, who does not answer is left out before. Who leaves while models
    without some workers are fitted ends that; the model itself was there before.
    """
    began, patience = time.monotonic(), session.patience or 1
    for attempt in range(WAITS * patience):
        try:
            return ask()
        except MembersChanged as error:  # in rounds of their own, such as those of validation
            why = str(error)
            break
        except ParticipationError as error:
            why = str(error)
            if not (session.masks or len(session.refusing)):
                raise
        late = attempt >= patience - 1 and time.monotonic() - began > WAIT_SECONDS
        if late or len(session.refusing):
            break
    remarks.append(f"the model is whole, and this was not told about it: {why}")
    return None


def _mean_likelihood(result: Result, session: Session, place: int) -> float:
    """The mean log-likelihood at the end, from the scores of all sites or by one more question."""
    known = None if result.facts is None else result.facts.log_likelihood
    if known is not None:
        return known
    view = main_view(session, (place,), False)
    return float(session.ask("values", view, result.statistics, "closing")[0, 0])


def _chosen(
    settings: FitSettings, session: Session, course: _Course, whole: Result, remarks: list[str]
) -> tuple[Selection, float]:
    """Make each candidate a result of its own; return them with the best one's log-likelihood."""
    assert settings.numbers is not None
    run, dropped = course.run, course.candidates.dropped
    results, values = {}, {}
    kept, places = run.view.parts, course.view.parts or ()
    told = course.told
    if told is None and not all(j in dropped for j in places):
        told = run.ask("values")
    for j in places:
        k = settings.numbers[j]
        if j in dropped:
            results[k] = part_of(whole, session, j, dropped[j].statistics)
            values[k] = course.candidates.values(j)
        else:
            place = kept.index(j) if kept is not None else j
            own = run.state.statistics[run.model.cuts[place]]
            results[k], values[k] = part_of(whole, session, j, own), known(told)[place]
    selection = choose(results, values, settings.criterion, remarks)
    return selection, float(values[selection.n_components][0])


def _place(selection: Selection | None, settings: FitSettings, parts: tuple[int, ...]) -> int:
    """Where the chosen candidate stands in the run's model."""
    if selection is None or settings.numbers is None:
        return parts[0]
    return settings.numbers.index(selection.n_components)


def part_of(whole: Result, session: Session, part: int, statistics: FloatArray) -> Result:
    """One of the models that were fitted side by side, as a result of its own."""
    model = session.bound.part(part)
    params = model.to_user(model.maximize(statistics))
    return replace(whole, model=model, params=params, statistics=statistics)


def with_scores(result: Result, session: Session, part: int, remarks: list[str]) -> Result:
    """The result with how well it fits each worker: parameters to everyone, four numbers back."""
    assert result.facts is not None
    told = session.scores(main_view(session, (part,), False), result.statistics)
    silent = np.flatnonzero(session.attendance.here & np.isnan(told[:, 0]))
    if len(silent):
        remarks.append(
            f"{', '.join(map(session.name_of, silent.tolist()))} did not say how well the model "
            "fits its rows: its scores are NaN. Ask it again with score(...) at that worker."
        )
    facts, heard = result.facts, np.isfinite(told[:, 0])
    whole = over_all(told[heard], session.weights[heard]) if heard.all() else None
    known = None if facts.by_worker is None else replace(facts.by_worker, scores=told)
    return replace(result, facts=replace(facts, scores=whole, by_worker=known))


def with_errors(result: Result, session: Session, part: int, remarks: list[str]) -> Result:
    """The result with its uncertainty: exact statistics of everyone a step along each direction."""
    totals = session.counts if session.opening.totals is None else session.opening.totals
    # Rows that count unequally are worth fewer: Var = sum w_i^2 / n_i of one row's.
    samples = float(1 / (session.weights**2 / totals).sum())
    try:
        chart = Chart.at(result.model, result.statistics, samples)
        answers = _exact(session, part, chart.questions(), result.model.layout.size)
    except EmfedError as error:  # a fit is not lost for want of its errors
        remarks.append(str(error))
        return result
    root, least = chart.root(answers, samples)
    if least < LEAST:
        remarks.append(
            Wording(
                "standard errors: the fit is no maximum in some direction, or the rows say nothing "
                "about it, so some errors are huge. Fit with fewer components or a smaller {}.",
                Setting("tol"),
            )
        )
    return replace(result, uncertainty=root)


def _exact(session: Session, part: int, params: list[Any], width: int) -> FloatArray:
    """Everyone's statistics at each of some parameters, ``(parameters, q)``."""
    at_once = max(1, min(MOST_PARTS, NUMBERS_AT_ONCE // width))
    found = []
    for first in range(0, len(params), at_once):
        asked = tuple(params[first : first + at_once])
        view = View((part,) * len(asked))
        told = session.ask("statistics", view, SideBySideParameters(asked), "closing")
        found.append(told.reshape(len(asked), width))
    return np.concatenate(found)


def result_of(run: Run, stopped: str, settings: FitSettings | None = None) -> Result:
    """What a run has reached so far."""
    session = run.session
    stop = None if settings is None else settings.stop(run.algorithm)
    told = {
        "algorithm": run.algorithm.describe(),
        "participation": run.participation.describe(),
        "limits": {} if stop is None else {k: v for k, v in vars(stop).items() if v is not None},
        "masks": session.masks,
    }
    return Result(
        model=run.model,
        params=run.model.to_user(run.params),
        records=run.records,
        stopped=stopped,
        seed=run.seed,
        statistics=run.state.statistics,
        ledger=run.ledger,
        columns=session.columns,
        worker_weights=run.weights,
        samples=session.total,
        facts=Facts(
            len(session.counts),
            int(session.counts.sum()),
            plain(told),
            not run.federation.carries_bytes,
            None if session.masks else ByWorker(session.counts),
        ),
        pooled_summary=session.summary,
        confirmed=run.confirmed,
    )


@final
class Curve:
    """The statistics at the beginning of evenly spread rounds, for the course of the objective.

    A monitor would ask in every round, and of candidates side by side only for all together.
    """

    def __init__(self) -> None:
        self.kept: dict[int, tuple[Bound, tuple[int, ...], FloatArray]] = {}
        self._every = 1

    def watching(self, run: Run) -> Callback:
        """A callback that remembers where rounds of this run began."""
        here = self._point(run)

        def look(record: RoundRecord) -> None:
            nonlocal here
            if record.round > 0 and (record.round - 1) % self._every == 0:
                self.kept[record.round] = here
                if len(self.kept) > POINTS:
                    self._every *= 2
                    kept = self.kept.items()
                    self.kept = {r: point for r, point in kept if (r - 1) % self._every == 0}
            here = self._point(run)

        return look

    @staticmethod
    def _point(run: Run) -> tuple[Bound, tuple[int, ...], FloatArray]:
        bound = run.session.bound
        return bound, bound.parts_of(run.view), run.state.statistics

    def drawn(self, result: Result, session: Session, part: int) -> Result:
        """The result with the objective in the records of the rounds that were remembered."""
        view = main_view(session, (part,), False)
        model, whole, found = session.bound.part(part), session.view(view), {}
        for round_, (bound, parts, statistics) in self.kept.items():
            if part not in parts:
                continue
            sizes = np.cumsum([0, *(bound.part(j).layout.size for j in parts)])
            start = int(sizes[parts.index(part)])
            own = statistics[start : start + model.layout.size]
            if bound is not session.bound:  # it was another's rows, too
                own = recast(bound.part(part), model, own)
            params = whole.maximize(own)
            told = session.ask("values", view, params, "monitor")
            found[round_] = whole.penalty(params) - float(told[0, 0])
        records = [replace(r, objective=found.get(r.round, r.objective)) for r in result.records]
        return replace(result, records=Records(records))


def run_remarks(run: Run, stopped: str) -> list[str]:
    """What a user should know of how the rounds went."""
    session, remarks = run.session, []
    here = session.attendance.here
    if not here.all():
        left = ", ".join(session.name_of(n) for n in np.flatnonzero(~here).tolist())
        remarks.append(
            f"{left} left before the end and does not count: the model is that of the other "
            f"{int(here.sum())}, with {session.samples} rows."
        )
    if run.thinned:
        remarks.append(
            f"a component had fewer than {SMALLEST_COMPONENT} rows of all sites together, of which "
            "owners do not tell by default: its rows went to another one, so the fit is another "
            "than without masks. Fewer components, or outliers treated first, avoid it."
        )
    if stopped == "bytes" and run.records[-1].round == 0:
        spent = run.ledger.total("up") + run.ledger.total("down")
        remarks.append(
            Wording(
                "the opening and the start took {} bytes, so {} left none for a round: allow more, "
                "or use {}, which costs nothing.",
                *(spent, Setting("max_bytes"), Setting("start", "moments")),
            )
        )
    if stopped == "silence":
        remarks.append(f"nobody answered for {PATIENCE} rounds; the run gave up.")
    return remarks


def guard_ridden(run: Run) -> str:
    """Words about steps that had to be shortened, if there were many."""
    remedy: str = FEWER_COMPONENTS
    if not isinstance(run.algorithm, AutoEM):  # it has none of these settings
        metric = "" if getattr(run.algorithm, "in_metric", False) else "in_metric=True, "
        own = ByFace(f"{metric}a smaller step_size, ", command="")
        remedy = Wording("{}a finer {}, or fewer components", own, Setting("compressor"))
    return shortened(run.records, remedy)


def shortfall(run: Run, stopped: str, stop: Stop, tolerance: float) -> str:
    """What a run that met another limit lacks to convergence, in words."""
    model = run.model.models[-1] if isinstance(run.model, SideBySide) else run.model
    return unconverged(model, stopped, stop, tolerance, remaining(run.records))
