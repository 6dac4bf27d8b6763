"""Drive a fit on sums in one process: from settings and rows to a result.

It is not yet what `emfed.fit` does (docs/decisions/007).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, final

import numpy as np

from emfed.aggregation.simulated import SimulatedSums
from emfed.artifacts.model_card import Facts
from emfed.artifacts.result import Result
from emfed.core.errors import SettingsError
from emfed.core.ledger import Ledger
from emfed.core.protocols import Model
from emfed.core.records import Records, RoundRecord
from emfed.core.registry import plain
from emfed.core.sums import Ask, Finish, FloatArray, Sum, drive
from emfed.data.summing import HeldRows, check_rows_held, summary_shapes
from emfed.data.tables import Workers
from emfed.data.workers import with_columns
from emfed.fitting.asks import Joint, LastSum, Statistics
from emfed.fitting.driver import NOBODY, Fitted, Watch
from emfed.fitting.following import Candidate, Conclusion, follow
from emfed.fitting.remarks import FEWER_COMPONENTS, shortened, unconverged
from emfed.fitting.replay import KnownSums
from emfed.fitting.rounds import interrupts
from emfed.fitting.selection import (
    choose,
    floor_remarks,
    with_setting,
    without_empty,
)
from emfed.fitting.settings import FitSettings, worker_weights
from emfed.fitting.starts.start_search import own_sketch
from emfed.fitting.stopping import Stop
from emfed.models.binding import of_columns
from emfed.models.naming import columns_named
from emfed.network.scoring import scores_of

INTERRUPTED = "interrupted"


def fit(settings: FitSettings, workers: Workers, watch: Watch = NOBODY) -> Fitted:
    """Fit what the settings say to the rows of these workers.

    Examples
    --------
    >>> import emfed
    >>> data = emfed.data.synthetic_federation(workers=4, rows_per_worker=50)
    >>> settings = FitSettings(emfed.gaussian_mixture(2, "tied"))
    >>> fit(settings, data).result.converged
    True
    """
    if workers.streaming:
        raise SettingsError("a stream has no sums over all of its rows: use FedEM or VR-FedEM.")
    if settings.columns is not None:
        workers = with_columns(workers, tuple(settings.columns))
    settings = _with_columns(settings, workers)
    models = settings.candidates()
    check_rows_held(models[0], workers)
    weights = worker_weights(settings.weights, workers.totals)
    own = settings.weights != "samples" if isinstance(settings.weights, str) else True
    rows = HeldRows(workers, weights * workers.totals.sum() if own else None)
    course = Course(settings, rows, watch)
    alone = workers.size == 1
    program = follow(
        settings,
        workers.size,
        summary_shapes(models[0], workers),
        (lambda model, seed: own_sketch(workers, model, seed)) if alone else None,
    )
    with columns_named(workers.columns), interrupts() as interrupted:
        course.interrupted = interrupted
        try:
            outcome = drive(program, course.answer, course.refuses)
        except Finish as finish:
            if course.stopped == INTERRUPTED:
                raise KeyboardInterrupt from finish
            raise
        course.complete(LastSum(0, outcome.final.estimate.left))
    course.save()
    return _fitted(settings, workers, weights, course, outcome)


def _with_columns(settings: FitSettings, workers: Workers) -> FitSettings:
    """Settings whose model knows the names of the table's columns."""
    model = settings.model
    if isinstance(model, Model):
        return settings.but(model=of_columns(model, workers.columns))
    return settings.but(model=lambda k: of_columns(model(k), workers.columns))


@final
@dataclass
class Course:
    """The exchanges of one fit: who answers, what is kept of them, and when they end."""

    settings: FitSettings
    rows: HeldRows
    watch: Watch
    records: Records = field(default_factory=Records)
    stopped: str = ""
    """The limit that was met, "callback" or "interrupted"."""
    seconds: float = 0.0

    def __post_init__(self) -> None:
        data = self.rows.data
        self.ledger = Ledger(data.size, data.names)
        self.sums = SimulatedSums(self.rows, data.size, self.settings.seed, self.ledger)
        self.stop: Stop = self.settings.stop(self.settings.method(data.size))
        self.known_sums = KnownSums(self._about())
        self.interrupted: Callable[[], bool] = bool
        self._known = 0
        """Sums that came from a file."""
        self._place = self._evaluations = 0
        self._pending: tuple[Ask, Sum, float] | None = None
        self._before = RoundRecord(
            0, 0, data.size, data.size, None, 0.0, 0, 0, 0, 0, 0, 0, 0.0, 0.0
        )
        if self.watch.goes_on and self.watch.checkpoint is not None:
            self.known_sums.load(self.watch.checkpoint)
            self._known = len(self.known_sums.entries)

    def _about(self) -> dict[str, Any]:
        """What a checkpoint must agree with."""
        settings, data = self.settings, self.rows.data
        start = settings.start
        named = start if isinstance(start, str) else [a.tolist() for a in start.arrays().values()]
        told: dict[str, Any] = plain(
            {
                "model": [model.describe() for model in settings.candidates()],
                "start": [named, settings.n_init, settings.start_statistics],
                "seed": settings.seed,
                "workers": [data.name(worker) for worker in range(data.size)],
            }
        )
        return told

    def answer(self, ask: Ask) -> Sum:
        """The sum over all workers, or the one that a checkpoint has."""
        began = time.perf_counter()
        replays = self._place < self._known
        if replays and self._place:
            entry = self.known_sums.expect(self._place, ask)
            found, seconds = self.sums.repeat(ask, entry.sum), entry.seconds
        else:
            found = self.sums(ask)
            seconds = time.perf_counter() - began
        if replays and not self._place:
            self.known_sums.check_rows(ask, found)
        elif not replays and ask.purpose != "closing":
            self.known_sums.add(ask, found, seconds)
        self._place += 1
        self._evaluations += self.rows.count * sum(1 for _ in looks(ask))
        self._pending = (ask, found, seconds)
        return found

    def refuses(self, ask: Ask) -> str | None:
        """Look back at the last exchange; tell why this one is not made, if it is not."""
        self.complete(next((one.last for one in looks(ask) if one.last), None))
        if self.interrupted():
            self.stopped = INTERRUPTED
            return INTERRUPTED
        if ask.purpose != "round":
            return None
        self._open_records()
        self.stopped = self.stopped or self._limit()
        return self.stopped or None

    def complete(self, last: LastSum | None) -> None:
        """Make the record of the last exchange, and show it."""
        if self._pending is None:
            return
        ask, found, seconds = self._pending
        self._pending = None
        self.seconds += seconds
        if ask.purpose != "round":
            return
        self._open_records()
        self._append(self._record(ask, found, seconds, last))
        new = self._place > self._known
        shown = [callback(self.records[-1]) for callback in self.watch.callbacks if new]
        if any(word is True for word in shown):
            self.stopped = self.stopped or "callback"
        if new and self.records[-1].round % self.watch.checkpoint_every == 0:
            self.save()

    def save(self) -> None:
        """Write the checkpoint, if there is one."""
        if self.watch.checkpoint is not None:
            self.known_sums.save(self.watch.checkpoint)

    def _open_records(self) -> None:
        """The record of all that came before the rounds."""
        if not self.records:
            self._append(replace(self._before, seconds=self.seconds))

    def _append(self, record: RoundRecord) -> None:
        ledger, before = self.ledger, self.records
        spent = {
            f"{what}_{direction}": ledger.total(direction, part)
            - sum(getattr(r, f"{what}_{direction}") for r in before)
            for what, part in (("bytes", None), ("payload", "payload"))
            for direction in ("up", "down")
        }
        known = int(sum(r.evaluations for r in before))
        self.records.append(
            replace(
                record,
                **spent,
                evaluations=self._evaluations - known,
                epochs=self._evaluations / self.rows.count,
            )
        )

    def _record(self, ask: Ask, found: Sum, seconds: float, last: LastSum | None) -> RoundRecord:
        seen = [
            _seen(one, value) for one, value in zip(looks(ask), _values(ask, found), strict=True)
        ]
        gains = [one.gain for one in seen if one.gain is not None]
        number = len(self.records)
        monitor, exact = self.watch.monitor, None
        if monitor is not None and monitor.mean_field and number % monitor.every == 0:
            truth = replace(found, value=ask.part(self.rows))
            exact = sum(
                _seen(one, value).squared
                for one, value in zip(looks(ask), _values(ask, truth), strict=True)
            )
        left = None if last is None or not np.isfinite(last.left) else last.left
        return replace(
            self._before,
            round=number,
            squared_H=sum(one.squared for one in seen),
            step_size=1.0,
            guard_hits=0 if last is None else last.hits,
            seconds=seconds,
            squared_h=exact,
            objective=seen[0].objective if len(seen) == 1 else None,
            gain=sum(gains) if gains else None,
            left=left,
        )

    def _limit(self) -> str:
        """The limit that has been met, if any."""
        stop, made = self.stop, self.records[-1]
        spent = self.ledger.total("up") + self.ledger.total("down")
        met = {
            "rounds": (stop.rounds, made.round),
            "epochs": (stop.epochs, made.epochs),
            "bytes": (stop.bytes, spent),
            "seconds": (stop.seconds, self.seconds),
        }
        for name, (limit, value) in met.items():
            if limit is not None and value >= limit:
                return name
        return ""


def looks(ask: Ask) -> Iterator[Statistics]:
    """The asks for statistics and values that share an exchange."""
    for one in ask.asks if isinstance(ask, Joint) else (ask,):
        if isinstance(one, Statistics):
            yield one


def _values(ask: Ask, found: Sum) -> list[FloatArray]:
    """What the sum says to each of `looks`, a row."""
    parts = ask.split(found) if isinstance(ask, Joint) else [found]
    return [part.value / part.rows for part in parts]


@final
@dataclass(frozen=True)
class _Seen:
    """What a sum says of one place."""

    squared: float
    gain: float | None
    objective: float | None


def _seen(ask: Statistics, mean: FloatArray) -> _Seen:
    size = len(ask.statistics)
    step = ask.metric.unwhiten(mean[:size])
    gain = float(mean[:size] @ mean[:size]) / 2 if ask.metric.in_nats else None
    objective = float(ask.model.penalty(ask.params)) - float(mean[size]) if ask.values else None
    return _Seen(float(step @ step), gain, objective)


# From the outcome to a result.


def _fitted(
    settings: FitSettings,
    workers: Workers,
    weights: FloatArray,
    course: Course,
    outcome: Conclusion,
) -> Fitted:
    """What the fit came to, with remarks and what everyone is asked at the end."""
    remarks = list(outcome.remarks)
    final, stopped = outcome.final, _ending(settings, course, outcome)
    course._open_records()
    base = _result(settings, workers, weights, course, outcome, stopped)
    results = {one.position: _with(base, one, one.estimate.converged) for one in outcome.candidates}
    selection = None
    if settings.numbers is not None and len(outcome.candidates) > 1:
        numbers = settings.numbers
        values = {numbers[one.position]: one.estimate.point.values for one in outcome.candidates}
        own = {numbers[j]: one for j, one in results.items()}
        selection = choose(own, values, settings.criterion, remarks)
    result = _with(base, final, final.estimate.converged)
    if selection is not None and selection.best.facts is not None:
        result = replace(result, facts=selection.best.facts)
    result = replace(result, uncertainty=outcome.uncertainty)
    result = without_empty(result, outcome.pooled.count, remarks)
    if settings.scores and course.stopped != INTERRUPTED:
        result = _with_scores(settings, result, workers, weights)
    left, tolerance = final.estimate.left, settings.tolerance
    thrown_off = shortened(course.records, FEWER_COMPONENTS)
    short = unconverged(final.model, stopped, course.stop, tolerance, left)
    remarks += [*floor_remarks(result), *([thrown_off] if thrown_off else [])]
    said = [*remarks, *([short] if short else [])]
    result = with_setting(result, "remarks", said) if said else result
    if selection is not None:
        k = selection.n_components
        selection = replace(selection, best=result, results={**selection.results, k: result})
    likelihood = float(final.estimate.point.values[0])
    known = None if np.isnan(likelihood) else likelihood
    return Fitted(result, selection, known, tuple(remarks), short, thrown_off)


def _ending(settings: FitSettings, course: Course, outcome: Conclusion) -> str:
    """Why the fit ended."""
    if course.stopped == INTERRUPTED:
        return INTERRUPTED
    if outcome.final.estimate.converged or not course.stopped:
        return "nats" if settings.tolerance else "tolerance"
    return course.stopped


def _result(
    settings: FitSettings,
    workers: Workers,
    weights: FloatArray,
    course: Course,
    outcome: Conclusion,
    stopped: str,
) -> Result:
    """All of a result but its model."""
    algorithm = settings.method(workers.size)
    said = {
        "algorithm": algorithm.describe(),
        "participation": settings.who().describe(),
        "limits": {name: v for name, v in vars(course.stop).items() if v is not None},
        "masks": bool(settings.masks),
    }
    model = outcome.final.model
    statistics = outcome.final.estimate.point.statistics
    return Result(
        model=model,
        params=model.to_user(model.maximize(statistics)),
        records=course.records,
        stopped=stopped,
        seed=settings.seed,
        statistics=statistics,
        ledger=course.ledger,
        columns=workers.columns,
        worker_weights=weights,
        samples=outcome.pooled.rows,
        facts=Facts(workers.positive_counts, plain(said)),
        pooled_summary=outcome.pooled.summary,
    )


def _with(base: Result, candidate: Candidate, confirmed: bool) -> Result:
    """The result of one candidate."""
    model, statistics = candidate.model, candidate.estimate.point.statistics
    params = model.to_user(model.maximize(statistics))
    return replace(base, model=model, params=params, statistics=statistics, confirmed=confirmed)


def _with_scores(
    settings: FitSettings, result: Result, workers: Workers, weights: FloatArray
) -> Result:
    """How well the model fits each worker's rows; where sums alone are told, the mean over all."""
    everyone = np.arange(workers.size)
    params = result.model.maximize(result.statistics)
    scores = scores_of(result.model, params, workers.pieces(everyone), workers.size)
    if settings.masks:
        scores = np.tile(weights @ scores, (len(scores), 1))
    assert result.facts is not None
    return replace(result, facts=replace(result.facts, scores=scores))
