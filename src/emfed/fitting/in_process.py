"""Drive a fit on sums in one process: from settings and rows to a result."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, final

import numpy as np

from emfed.aggregation.coded import DIGEST_BYTES
from emfed.aggregation.simulated import SimulatedSums
from emfed.aggregation.unmasked import Presence, Present, UnmaskedWorkers
from emfed.algorithms import Everyone
from emfed.artifacts.facts import ByWorker, Facts
from emfed.artifacts.result import Result
from emfed.core.ledger import DIRECTIONS, Ledger
from emfed.core.protocols import Model
from emfed.core.records import Records, RoundRecord
from emfed.core.registry import plain
from emfed.core.sums import (
    Ask,
    AskedWorkers,
    Finish,
    Fit,
    FloatArray,
    Gather,
    Gathers,
    LastSum,
    OfWorkers,
    Sum,
    drive,
    finished,
)
from emfed.core.wire import floats_size
from emfed.core.wording import Setting, Wording
from emfed.data.summing import check_rows_held, summary_shapes
from emfed.fitting.ascent import are_many
from emfed.fitting.asks import Statistics
from emfed.fitting.chronicle import INTERRUPTED, Chronicle, joined, looks, seen_at, seen_in
from emfed.fitting.curve import ObjectiveCurve
from emfed.fitting.fitted import NOBODY, Fitted, Watch
from emfed.fitting.following import Candidate, Conclusion, follow
from emfed.fitting.interrupting import interrupts
from emfed.fitting.remarks import remedy, shortened, unconverged
from emfed.fitting.replay import KnownSums
from emfed.fitting.selection import (
    choose,
    floor_remarks,
    with_setting,
    without_empty,
)
from emfed.fitting.settings import FitSettings, worker_weights
from emfed.fitting.starts.own import own_sketch
from emfed.fitting.starts.sketch import Sketch
from emfed.fitting.stochastic import KEPT_START, check_suits, described
from emfed.fitting.stopping import PATIENCE
from emfed.models.binding import of_columns
from emfed.models.naming import columns_named
from emfed.network.self_check import of_workers

NOBODY_ANSWERED = f"nobody answered for {PATIENCE} rounds; the run gave up."
LATER = ("question", "closing")
"""Sums that are asked for when rounds have ended: a fit that goes on makes them again."""


def fit(
    settings: FitSettings,
    workers: AskedWorkers,
    watch: Watch = NOBODY,
    present: Presence | None = None,
) -> Fitted:
    """Fit what the settings say to the rows of these workers.

    ``present`` says whose messages arrive; None: everyone's.

    Examples
    --------
    >>> import emfed
    >>> from emfed.data.held import HeldWorkers
    >>> data = emfed.data.synthetic_federation(workers=4, rows_per_worker=50)
    >>> settings = FitSettings(emfed.gaussian_mixture(2, "tied"))
    >>> fit(settings, HeldWorkers(data)).result.converged
    True
    """
    begun = begin(settings, workers, watch, present)
    course, program = begun.course, begun.program
    with columns_named(begun.workers.columns), interrupts() as interrupted:
        course.interrupted = interrupted
        try:
            outcome = drive(program, course.answer, course.refuses)
        except Finish as finish:
            if course.stopped == INTERRUPTED:
                raise KeyboardInterrupt from finish
            raise
        except Exception as error:
            course.stopped = "error"
            with suppress(Exception):  # what is reached may be what cannot be computed
                reached = finished(program, Finish("error"))
                told = begun.fitted(reached)
                setattr(error, "result", told.result)  # noqa: B010 (any exception)
            raise
        course.complete(LastSum(0, outcome.final.estimate.left))
    course.save()
    return begun.fitted(outcome)


@final
@dataclass(frozen=True, eq=False)
class Begun:
    """A fit that has asked for nothing yet, and who answers it."""

    settings: FitSettings
    workers: AskedWorkers
    weights: FloatArray
    """w_i."""
    course: Course
    program: Fit[Conclusion]

    def fitted(self, outcome: Conclusion) -> Fitted:
        """What the fit came to, with remarks and what everyone is asked at the end."""
        return _fitted(self, outcome)

    def result(self, model: Any, statistics: FloatArray, stopped: str) -> Result:
        """What the fit has come to, at these statistics."""
        settings, workers, course = self.settings, self.workers, self.course
        said = {
            "algorithm": described(settings, model, workers.totals),
            "participation": settings.who().describe(),
            "limits": {name: v for name, v in vars(course.stop).items() if v is not None},
            "masks": bool(settings.masks),
        }
        return Result(
            model=model,
            params=model.to_user(model.maximize(statistics)),
            records=course.records,
            stopped=stopped,
            seed=settings.seed,
            statistics=statistics,
            ledger=course.ledger,
            columns=workers.columns,
            worker_weights=None if settings.masks else self.weights,
            samples=float(workers.totals.sum()),
            facts=Facts(
                len(self.weights),
                int(workers.counts.sum()),
                plain(said),
                by_worker=None if settings.masks else ByWorker(workers.counts),
            ),
        )


def begin(
    settings: FitSettings,
    workers: AskedWorkers,
    watch: Watch = NOBODY,
    present: Presence | None = None,
) -> Begun:
    """Check that settings and rows go together; ``present`` says whose messages arrive."""
    check_suits(settings, workers)
    columns = None if settings.columns is None else tuple(settings.columns)
    workers = workers.view(columns)
    settings = of_named_columns(settings, workers.columns)
    models = settings.candidates()
    workers.everywhere(partial(check_rows_held, models[0]))
    weights = worker_weights(settings.weights, workers.totals)
    own = settings.weights != "samples" if isinstance(settings.weights, str) else True
    if own:
        workers = workers.view(columns, weights * workers.totals.sum())
    n = len(workers.totals)
    course = Course(settings, workers, watch, present)
    program = follow(
        settings,
        n,
        workers.everywhere(partial(summary_shapes, models[0]))[0],
        _Own(workers),
        bool(settings.masks),
        workers.streaming,
        present is not None,
    )
    return Begun(settings, workers, weights, course, program)


@final
@dataclass(frozen=True, eq=False)
class _Own:
    """What is drawn from rows that are here."""

    workers: AskedWorkers

    def sketch(self, model: Any, seed: int) -> Sketch | None:
        if len(self.workers.totals) > 1 or self.workers.streaming:
            return None
        return self.workers.everywhere(lambda data: own_sketch(data, model, seed))[0]


def of_named_columns(settings: FitSettings, columns: tuple[str, ...] | None) -> FitSettings:
    """Settings whose model knows the names of the table's columns."""
    model = settings.model
    if isinstance(model, Model):
        return settings.but(model=of_columns(model, columns))
    return settings.but(model=lambda k: of_columns(model(k), columns))


@final
class Course(Chronicle):
    """The exchanges of a fit in this process: who answers, and what a checkpoint has of them."""

    def __init__(
        self,
        settings: FitSettings,
        workers: AskedWorkers,
        watch: Watch,
        present: Presence | None = None,
    ) -> None:
        n, count = len(workers.totals), int(workers.counts.sum())
        super().__init__(settings, Ledger(n, workers.names), watch.callbacks, count=count)
        self.workers, self.watch = workers, watch
        self._present, self._drawn, self._asked = present, settings.who(), n
        everyone = isinstance(self._drawn, Everyone)
        self.unmasked = UnmaskedWorkers(
            workers,
            settings.seed,
            None if everyone and present is None else self._presence,
            self.ledger,
            settings.patience if everyone else None,  # who is not drawn is not away
        )
        """Workers that tell what changed, or that are heard one by one."""
        masked = bool(settings.masks)
        self.sums: SimulatedSums | UnmaskedWorkers = (
            self.unmasked
            if n > 1 and (settings.masks is False or present is not None or are_many(n, masked))
            else SimulatedSums(workers, n, settings.seed, self.ledger, masked)
        )
        self.known_sums = KnownSums(self._about())
        self._known = 0
        """Sums that came from a file."""
        self._place = 0
        self.curve = ObjectiveCurve() if watch.curve else None
        self._anew = False
        """Whether workers were heard in rounds that no file has."""
        if watch.goes_on and watch.checkpoint is not None:
            self.known_sums.load(watch.checkpoint)
            self._known = len(self.known_sums.entries)

    def _about(self) -> dict[str, Any]:
        """What a checkpoint must agree with."""
        settings, workers = self.settings, self.workers
        start, models = settings.start, [model.describe() for model in settings.candidates()]
        named = start if isinstance(start, str) else [a.tolist() for a in start.arrays().values()]
        told: dict[str, Any] = plain(
            {
                "model": models[0] if len(models) == 1 else models,
                "start": [named, settings.n_init, settings.start_statistics],
                "seed": settings.seed,
                "algorithm": settings.method(len(workers.totals)).describe(),
                "participation": settings.who().describe(),
                "workers": list(workers.names or map(str, range(len(workers.totals)))),
            }
        )
        return told

    def _presence(self, ask: Any, exchange: int) -> Present:
        """Who is there: in a round, those of the drawn workers whom messages reach."""
        n = len(self.workers.totals)
        everyone = np.arange(n, dtype=np.int64)
        who = Present(everyone, everyone)
        if self._present is not None:
            who = self._present(ask, exchange)
        if isinstance(ask, (Gather, Gathers)):  # who is drawn is part of what is asked
            return who
        drawn = everyone
        if ask.purpose == "round":
            drawn = self._drawn.draw(self.settings.seed, len(self.records), n)
        self._asked = len(drawn)
        asked, arrived = (np.intersect1d(one, drawn) for one in (who.asked, who.arrived))
        return replace(who, asked=asked, arrived=arrived)

    def _record(self, ask: Ask, found: Sum, last: LastSum | None) -> RoundRecord:
        record = replace(super()._record(ask, found, last), asked=self._asked)
        if self.curve is not None and record.objective is None:
            self.curve.note(len(self.records), looks(ask))
        return record

    def answer(self, ask: Any) -> Any:
        """What workers reply one by one, or their sum."""
        heard = isinstance(ask, (Gather, Gathers))
        return self._gathered(ask) if heard else self._summed(ask)

    def refuses(self, ask: Any) -> str | None:
        """The same; what rounds have come to is kept before something else is asked."""
        heard = isinstance(ask, (Gather, Gathers))
        if heard:
            self.known_sums.rounds.see(ask)
        reason = super().refuses(ask)
        if heard and (reason is not None or ask.purpose == "question"):
            self._keep()
        return reason

    def _gathered(self, ask: Gather | Gathers) -> Any:
        """Replies of single workers, or the states that a checkpoint has in their place.

        What came before the rounds is asked again.
        """
        states = self.known_sums.rounds.known(ask)
        if states is not None:
            self._go_on()
            return states if isinstance(ask, Gathers) else states[0]
        self._anew = self._anew or ask.purpose == "round"
        began = time.perf_counter()
        found = self.unmasked.heard(ask)
        self.note_heard(ask, found, time.perf_counter() - began)
        return found.told

    def _keep(self) -> None:
        """What rounds in which workers are heard have come to, for the checkpoint."""
        if self.watch.checkpoint is not None:
            records, ledger = self.records.to_arrays(), {"ledger": self.ledger.counts}
            self.known_sums.rounds.keep(ledger | records | self.unmasked.save())

    def _go_on(self) -> None:
        """Go on from the rounds of a checkpoint."""
        kept = self.known_sums.rounds.taken()
        if kept:
            self.recall(Records.from_arrays(kept))
            self.ledger.restore(kept["ledger"])
            self.unmasked.restore(kept)

    def _summed(self, ask: Ask) -> Sum:
        """The sum over all workers, or the one that a checkpoint has."""
        began = time.perf_counter()
        told_apart = any(isinstance(one, OfWorkers) for one in joined(ask))
        sums = self.unmasked if told_apart else self.sums
        replays = self._place < self._known
        if replays and self._place:
            entry = self.known_sums.expect(self._place, ask)
            found, seconds = sums.repeat(ask, entry.sum), entry.seconds
        else:
            found = sums(ask)
            seconds = time.perf_counter() - began
        if replays and not self._place:
            found = self.known_sums.first(ask, found)
        elif not replays and ask.purpose not in LATER:
            self.known_sums.add(ask, found, seconds)
        self._place += ask.purpose not in LATER
        self.note(ask, found, seconds)
        return found

    def save(self) -> None:
        """Write the checkpoint, if there is one."""
        if self.watch.checkpoint is not None:
            self.known_sums.save(self.watch.checkpoint, len(self.records))

    def _show(self, record: RoundRecord) -> None:
        """Show what is new; a checkpoint has been shown before."""
        if self._place <= self._known and not self._anew:
            return
        super()._show(record)
        if record.round % self.watch.checkpoint_every == 0:
            self._keep()
            self.save()

    def mean(self, ask: Statistics) -> FloatArray:
        """The exact mean over all rows, of which the ledger says that it was looked at."""
        return self._monitored(ask) / float(self.workers.totals.sum())

    def _monitored(self, ask: Ask) -> FloatArray:
        workers, size = np.arange(len(self.workers.totals)), floats_size(ask.size)
        for way in DIRECTIONS:
            self.ledger.add("monitor", way, workers, size, DIGEST_BYTES)
        return self.workers.sum(ask)

    def _exactly(self, ask: Ask, found: Sum) -> float | None:
        monitor = self.watch.monitor
        if monitor is None or not monitor.mean_field or len(self.records) % monitor.every:
            return None
        truth = replace(found, value=self._monitored(ask))
        return sum(one.squared for one in seen_in(ask, truth))

    def _looked(self, ask: Gather | Gathers) -> tuple[float | None, float | None]:
        monitor = self.watch.monitor
        if self.curve is not None:
            self.curve.note(len(self.records), looks(ask))
        if monitor is None or (len(self.records) - 1) % monitor.every:
            return None, None
        seen = [seen_at(one, self.mean(one)) for one in looks(ask)]
        squared = sum(one.squared for one in seen) if monitor.mean_field else None
        told = [one.objective for one in seen if one.objective is not None]
        return squared, sum(told) if monitor.objective else None


# From the outcome to a result.


def _fitted(begun: Begun, outcome: Conclusion) -> Fitted:
    """What the fit came to, with remarks and what everyone is asked at the end."""
    course, final = begun.course, outcome.final
    stopped = ending(course, outcome)
    course.open_records()
    if course.curve is not None and stopped != INTERRUPTED:
        course.records = course.curve.drawn(course.records, final.model, course.mean)
    base = begun.result(final.model, final.estimate.point.statistics, stopped)
    pooled = outcome.pooled
    base = replace(base, samples=pooled.rows, pooled_summary=pooled.summary)

    settings = begun.settings
    if settings.doubts == "tell" and not settings.masks and len(begun.weights) > 1:
        look = partial(of_workers, whole=pooled.summary, total=pooled.rows)
        told = [words for some in begun.workers.everywhere(look) for words in some]
        outcome = replace(outcome, remarks=[*outcome.remarks, *told])
    return concluded(course, outcome, base)


def concluded(course: Chronicle, outcome: Conclusion, base: Result) -> Fitted:
    """A fit with its remarks; ``base`` is all of its result but the model."""
    settings, stopped = course.settings, base.stopped
    remarks, final = list(outcome.remarks), outcome.final
    remarks += [KEPT_START] if final.estimate.kept_start else []
    remarks += [NOBODY_ANSWERED] if stopped == "silence" else []
    if stopped == "bytes" and course.records[-1].round == 0:
        spent = course.ledger.total("up") + course.ledger.total("down")
        remarks.append(
            Wording(
                "the opening and the start took {} bytes, so {} left none for a round: allow more, "
                "or use {}, which costs nothing.",
                *(spent, Setting("max_bytes"), Setting("start", "moments")),
            )
        )
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
    result = replace(_looked_at(result, outcome), uncertainty=outcome.uncertainty)
    result = without_empty(result, outcome.pooled.count, remarks)
    left, tolerance = final.estimate.left, settings.tolerance
    thrown_off = shortened(course.records, remedy(settings.method(2)))
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


def _looked_at(result: Result, outcome: Conclusion) -> Result:
    """The result with what workers told at the end."""
    assert result.facts is not None
    known = result.facts.by_worker if outcome.by_worker is None else outcome.by_worker
    told = replace(result.facts, scores=outcome.scores, held_out=outcome.held_out, by_worker=known)
    return replace(result, facts=told)


def ending(course: Chronicle, outcome: Conclusion) -> str:
    """Why the fit ended."""
    if course.stopped in (INTERRUPTED, "error"):
        return course.stopped
    if outcome.final.estimate.converged or not course.stopped:
        return "nats" if course.stop.nats else "tolerance"
    return course.stopped


def _with(base: Result, candidate: Candidate, confirmed: bool) -> Result:
    """The result of one candidate."""
    model, statistics = candidate.model, candidate.estimate.point.statistics
    params = model.to_user(model.maximize(statistics))
    return replace(base, model=model, params=params, statistics=statistics, confirmed=confirmed)
