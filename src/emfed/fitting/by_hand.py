"""A fit that is driven by hand, round by round."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, final

import numpy as np

from emfed.algorithms.memories import believed
from emfed.algorithms.paper import Innovations, Server
from emfed.artifacts.result import Result
from emfed.core.errors import SettingsError
from emfed.core.ledger import Ledger
from emfed.core.protocols import Model
from emfed.core.records import Records, RoundRecord
from emfed.core.sums import AskedWorkers, Finish, Fit, FloatArray, LastSum
from emfed.core.wording import Setting, Wording
from emfed.data.held import HeldWorkers
from emfed.data.summing import check_rows_held
from emfed.data.workers import as_workers
from emfed.fitting.ascent import Cohort, Objective
from emfed.fitting.chronicle import joined, last_of, looks
from emfed.fitting.convergence import Tolerance
from emfed.fitting.fitted import NOBODY, Watch
from emfed.fitting.following import Candidate, Conclusion
from emfed.fitting.in_process import Begun, Course, begin, ending
from emfed.fitting.opening import Pooled
from emfed.fitting.settings import FitSettings
from emfed.fitting.stochastic import check_suits, rounds_of
from emfed.fitting.stopping import Monitor
from emfed.models.naming import columns_named
from emfed.network import Federation


@final
class Run(Iterator[RoundRecord]):
    """A fit in this process before its next round; `open_run` makes one.

    It is an iterator: each step makes a round and gives its record, until the fit has converged or
    met a limit. A round in which workers raise an error may be made again. With several starts or
    candidates ``model``, ``statistics`` and ``params`` are those of the first.

    Parameters
    ----------
    begun : Begun
        A fit that has asked for nothing yet.

    Examples
    --------
    >>> import emfed
    >>> data = emfed.data.synthetic_federation(workers=4, rows_per_worker=50)
    >>> model = emfed.gaussian_mixture(2, "tied")
    >>> run = emfed.fitting.open_run(model, data, emfed.FedEM(emfed.Dithering(4)), rounds=3)
    >>> [record.round for record in run]
    [1, 2, 3]
    >>> run.result.rounds
    3
    """

    def __init__(self, begun: Begun) -> None:
        self._begun, self._course = begun, begun.course
        self._ask: Any = None
        self._heard: Innovations | None = None
        """What FedEM or VR-FedEM asked last."""
        self._outcome: Conclusion | None = None
        self._go_on(partial(next, begun.program))
        self._until_round()

    @property
    def records(self) -> Records:
        """The opening's record and those of all rounds so far."""
        self._course.open_records()
        return self._course.records

    @property
    def ledger(self) -> Ledger:
        """All bytes so far."""
        return self._course.ledger

    @property
    def result(self) -> Result:
        """What the fit has come to so far: without remarks and what is asked at the end."""
        stopped, outcome = self._course.stopped, self._outcome
        if outcome is not None:
            stopped = ending(self._course, outcome)
        records = self.records  # with the opening's
        found = self._begun.result(self.model, self.statistics, stopped or "rounds")
        confirmed = outcome is not None and outcome.final.estimate.converged
        return replace(found, records=Records(records), confirmed=confirmed)

    @property
    def weights(self) -> FloatArray:
        """w_i, what each worker counts for."""
        return self._begun.weights

    @property
    def model(self) -> Model:
        """The model, bound to the summaries of all rows."""
        if self._outcome is not None:
            return self._outcome.final.model
        return next(looks(self._ask)).model

    @property
    def statistics(self) -> FloatArray:
        """S, which the next round is about."""
        if self._outcome is not None:
            return self._outcome.final.estimate.point.statistics
        return next(looks(self._ask)).statistics

    @property
    def params(self) -> Any:
        """T(S), in the units of the statistics."""
        return self.model.maximize(self.statistics)

    @property
    def server(self) -> Server:
        """What the server of FedEM or VR-FedEM says between rounds."""
        return self._innovations.server

    @property
    def memory(self) -> FloatArray:
        """V, which the server of FedEM or VR-FedEM keeps to itself."""
        ask, course = self._innovations, self._course
        known = course.unmasked.adder.memories
        return known.get(str(ask.memory), np.zeros_like(ask.server.statistics))

    @property
    def memories(self) -> FloatArray:
        """V_i of every worker of FedEM or VR-FedEM, with what the server counts already."""
        ask = self._innovations
        kept = self._course.unmasked.states.get(str(ask.memory))
        if kept is None:  # nobody was asked yet
            return np.zeros((len(self.weights), len(ask.server.statistics)))
        return believed(kept, ask.server.counted, ask.server.generation)

    @property
    def _innovations(self) -> Innovations:
        if self._heard is None:
            raise SettingsError("only the rounds of FedEM and VR-FedEM have memories to look at.")
        return self._heard

    def step(self) -> RoundRecord:
        """Make a round; an error if the fit has ended."""
        for record in self:
            return record
        raise SettingsError(
            Wording(
                "the fit has ended ({}): give other limits, or {} for rounds without an end.",
                *(self._course.stopped or "it has converged", Setting("tol", 0)),
            )
        )

    def __next__(self) -> RoundRecord:
        """Make a round, unless the fit has ended."""
        made = len(self.records)
        while self._outcome is None and len(self.records) == made:
            self._exchange()
        if len(self.records) == made:
            raise StopIteration
        record = self.records[-1]
        self._until_round()
        return record

    def _until_round(self) -> None:
        """Make the exchanges before the next round."""
        while self._outcome is None and self._ask.purpose != "round":
            self._exchange()

    def _exchange(self) -> None:
        """Answer an ask, or refuse it where a limit is met."""
        course, program = self._course, self._begun.program
        reason = course.refuses(self._ask)
        if reason is not None:
            self._go_on(partial(program.throw, Finish(reason)))
            return
        with columns_named(self._begun.workers.columns):
            found = course.answer(self._ask)
            self._go_on(partial(program.send, found))

    def _go_on(self, step: Callable[[], Any]) -> None:
        """To the next ask, or the end; what was answered is recorded."""
        try:
            self._ask = step()
        except StopIteration as end:
            self._ask, self._outcome = None, end.value
            self._course.complete(LastSum(0, end.value.final.estimate.left))
        else:
            self._course.complete(last_of(self._ask))
            heard = (one for one in joined(self._ask) if isinstance(one, Innovations))
            self._heard = next(heard, self._heard)


def open_run(
    model: Any,
    data: Any,
    algorithm: Any = None,
    *,
    groups: Any | None = None,
    sample_weight: Any | None = None,
    monitor: Monitor | None = None,
    **settings: Any,
) -> Run:
    """Open a fit and find its start: a `Run` before its first round, to drive by hand.

    Parameters
    ----------
    model : Model
        The model.
    data : table, dict, list or Federation
        The rows, as in `fit`, or a federation in processes of this machine.
    algorithm : Algorithm or str, optional
        The algorithm, as in `fit`.
    groups : array or str, optional
        The worker of each row of one table.
    sample_weight : array or sequence of arrays, optional
        How much each row counts, in the shape of the data.
    monitor : Monitor, optional
        What records |h|^2 and the objective, at the cost of full passes.
    **settings : object
        All other fields of `FitSettings`; with ``tol=0`` rounds do not end by themselves.

    Returns
    -------
    Run
        The run.

    Examples
    --------
    >>> import emfed
    >>> data = emfed.data.synthetic_federation(workers=4, rows_per_worker=50)
    >>> model = emfed.gaussian_mixture(2, "tied")
    >>> run = emfed.fitting.open_run(model, data, emfed.FedEM(emfed.Dithering(4)), tol=0)
    >>> [run.step().round for _ in range(3)]
    [1, 2, 3]
    >>> bool(abs(run.weights @ run.memories - run.memory).max() < 1e-12)
    True
    """
    given = FitSettings.read(model, algorithm, **settings)
    if given.epsilon is not None:
        raise SettingsError("a private fit is not driven by hand: use fit.")
    present = data.present if isinstance(data, Federation) else None
    workers = workers_of(data, groups, sample_weight)
    return Run(begin(given, workers, Watch(monitor=monitor), present))


def go_on(
    model: Model, statistics: FloatArray, workers: AskedWorkers, algorithm: Any, seed: int = 0
) -> Run:
    """A run from these statistics of a model that is bound to other rows."""
    settings = FitSettings(model, algorithm=algorithm, tol=0, seed=seed)
    check_suits(settings, workers)
    workers.everywhere(partial(check_rows_held, model))
    course = Course(settings, workers, NOBODY)
    weights = workers.totals / workers.totals.sum()
    return Run(Begun(settings, workers, weights, course, _rounds(settings, statistics, workers)))


def _rounds(
    settings: FitSettings, statistics: FloatArray, workers: AskedWorkers
) -> Fit[Conclusion]:
    rows = float(workers.totals.sum())
    cohort = Cohort(len(workers.totals), rows, masked=False)
    problem = Objective(settings.model, cohort, Tolerance(0.0), way=rounds_of(settings))
    ended = yield from problem.climb(statistics)
    found = Candidate(0, problem, ended, 0.0)
    return Conclusion(Pooled({}, rows, int(workers.counts.sum()), rows), [found], 0, found)


def workers_of(data: Any, groups: Any = None, sample_weight: Any = None) -> AskedWorkers:
    """Workers of a table in any form, or those of a federation on this machine."""
    if isinstance(data, Federation):
        return data.workers
    return HeldWorkers(as_workers(data, groups, sample_weight))
