"""The one round loop: plan, exchange, update, record."""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Protocol, final, runtime_checkable

import numpy as np

from emfed.algorithms import EM, Everyone
from emfed.algorithms.memory import gap
from emfed.algorithms.steps import energy_of, held, rounded_statistics, settled
from emfed.core.errors import (
    CheckpointError,
    MembersChanged,
    NumericalError,
    ParticipationError,
    ServerCrash,
    SettingsError,
    check_count,
    check_type,
)
from emfed.core.ledger import Ledger
from emfed.core.protocols import (
    Algorithm,
    BoolArray,
    Crowd,
    Federation,
    FloatArray,
    Heard,
    IntArray,
    Participation,
    Phase,
    Replies,
    Request,
    ServerState,
    View,
    at_origin,
)
from emfed.core.records import Records, RoundRecord
from emfed.core.storage import DISK, Disk, load_checkpoint, save_checkpoint
from emfed.core.wire import count_sizes, numbers_size
from emfed.fitting.interrupting import interrupts
from emfed.fitting.session import Session, of_everyone, recast
from emfed.fitting.stopping import PATIENCE, Callback, Monitor, Stop
from emfed.fitting.verifying import better, lifted, verify
from emfed.models.side_by_side import leave_out_thin

LEFT_BY_WORD = 100.0
"""A run that says it converged to so many nats has at most so many times as many left: the promise
of docs/automatic.md. An estimate from a few rounds is good to an order of magnitude or two."""


MOST_LIFTS = 3
"""How often a run raises shares near zero. Not tuned: once is enough where it was needed."""
START_LOSS = 1e-5
"""Nats per row that rounding of a start may cost, times the number of workers up to 100: few are
held to their start. EM's first steps on MNIST gain 0.1 and more."""


@runtime_checkable
class Hook(Protocol):
    """A callback that a checkpoint remembers."""

    name: str

    def __call__(self, record: RoundRecord) -> bool | None:
        """Look at a round that was made."""

    def save(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Arrays and plain JSON types: all that it knows."""

    def load(self, arrays: dict[str, Any], about: dict[str, Any]) -> None:
        """The inverse of `save`."""


WIDENED = 3
"""How many sums in a row may have no room. One is enough where the next lattice follows from what
was told; a run whose lattice never changes ends after these."""


def opening_record(workers: int, evaluations: int = 0) -> RoundRecord:
    """Round 0, where it makes no step."""
    return RoundRecord(0, 0, workers, workers, None, 0.0, 0, 0, 0, 0, 0, evaluations, 0.0, 0.0)


class Rounds(ABC):
    """Rounds one after the other: the loop around `step`, limits, Ctrl-C, and records."""

    state: ServerState

    def __init__(self, ledger: Ledger, samples: int) -> None:
        self.ledger, self.samples = ledger, samples
        """Every byte; rows of all workers."""
        self.records = Records()
        self.evaluations, self.seconds = 0, 0.0
        self._charged = np.zeros(4, dtype=np.int64)
        self.ended_by: list[Callback] = []
        """Callbacks that have said, of the last round, that the run is to end."""

    @abstractmethod
    def step(self) -> RoundRecord:
        """One round."""

    def reason(self, stop: Stop) -> str | None:
        """The limit that has been met, if any."""
        return stop.reason(self)

    def save(self, path: str | Path, disk: Disk = DISK, hooks: Sequence[Hook] = ()) -> None:
        """Write a checkpoint."""
        raise CheckpointError("these rounds leave no checkpoint.")

    @property
    def always_saved(self) -> bool:
        """Whether a checkpoint must be written every round."""
        return False

    def _record(self, record: RoundRecord) -> RoundRecord:
        """Complete a record with what the ledger has gained, add up, and keep it."""
        ledger = self.ledger
        totals = np.array(
            [
                ledger.total("up"),
                ledger.total("down"),
                ledger.total("up", "payload"),
                ledger.total("down", "payload"),
            ]
        )
        gained, self._charged = (totals - self._charged).tolist(), totals
        self.evaluations += record.evaluations
        self.seconds += record.seconds
        record = replace(
            record,
            bytes_up=gained[0],
            bytes_down=gained[1],
            payload_up=gained[2],
            payload_down=gained[3],
            epochs=self.evaluations / self.samples,
        )
        self.records.append(record)
        return record

    def until(
        self,
        stop: Stop,
        callbacks: Iterable[Callback] = (),
        checkpoint: str | Path | None = None,
        checkpoint_every: int = 100,
    ) -> str:
        """Rounds until a limit is met, a callback says so, or Ctrl-C; returns which.

        ``silence`` means that nobody has answered for `PATIENCE` rounds. Where workers keep their
        own memories the checkpoint is written every round: before a request tells any of them
        what was accepted.
        """
        check_count("checkpoint_every", checkpoint_every)
        if self.always_saved:
            checkpoint_every = 1
        callbacks = tuple(callbacks)
        reason = self.reason(stop)
        idle = crashes = 0
        with interrupts() as interrupted:
            while reason is None:
                try:
                    record = self.step()
                except ServerCrash:  # it comes back with the state of the round's beginning
                    crashes += 1
                    if crashes > PATIENCE:
                        raise
                    continue
                crashes = 0
                idle = 0 if record.answered else idle + 1
                self.ended_by = [hook for hook in callbacks if hook(record) is True]
                if interrupted():
                    reason = "interrupted"
                elif self.ended_by:
                    reason = "callback"
                else:
                    reason = "silence" if idle >= PATIENCE else self.reason(stop)
                if checkpoint is not None and (
                    reason is not None or record.round % checkpoint_every == 0
                ):
                    self.save(checkpoint, hooks=remembered(callbacks))
        return reason


WAITS, WAIT_SECONDS = 10, 420.0
"""Who left a masked run cannot come back to it, so it is waited for longer: ten times as many
exchanges, but no more than ``patience`` of them after seven minutes, in which a machine restarts.
The pauses of a default deployment are 1, 2, 4 and 8 s an exchange, so both come to the same."""


@final
class Run(Rounds):
    """A run in progress: the server's state, who was accepted when, and the records so far.

    `step` makes one round. Everything it changes here it changes at its end, so an exception in the
    middle of a round (a crash of the server) leaves the state of the round's beginning. A run is
    one phase of a session, and several where its model is narrowed on the way. `open_run` makes
    one.

    Parameters
    ----------
    session : Session
        The opened federation.
    view : View
        The part of the session's model that the rounds are about.
    algorithm : Algorithm
        The algorithm; what it leaves open is filled in.
    statistics : array of shape (q,)
        Where the run starts, S_0.
    participation : Participation, optional
        Who takes part in a round; by default everyone.
    purpose : str
        What the ledger calls the messages of the rounds.
    seed : int, optional
        The seed of noise, batches and participation; by default that of the session.
    retries : int
        How often a worker that stays silent is asked again in a round.
    monitor : Monitor, optional
        What records |h|^2 and the objective, at the cost of full passes.
    extras : mapping from str to array, optional
        What the algorithm's server remembers besides S and V.

    Examples
    --------
    >>> import emfed
    >>> data = emfed.data.synthetic_federation(workers=4, rows_per_worker=50)
    >>> model = emfed.gaussian_mixture(2, "tied")
    >>> run = emfed.fitting.open_run(model, data, emfed.FedEM(emfed.Dithering(4), step_size=0.5))
    >>> record = run.step()
    >>> run.memory_gap < 1e-12
    True
    """

    def __init__(
        self,
        session: Session,
        view: View,
        algorithm: Algorithm,
        statistics: FloatArray,
        *,
        participation: Participation | None = None,
        purpose: str = "round",
        seed: int | None = None,
        retries: int = 0,
        monitor: Monitor | None = None,
        extras: Mapping[str, FloatArray] | None = None,
    ) -> None:
        super().__init__(session.ledger, session.samples)
        self.session, self.view, self.purpose = session, view, purpose
        self.model, self._given = session.view(view), algorithm
        self.participation = Everyone() if participation is None else participation
        self.seed = session.seed if seed is None else seed
        if monitor is not None:
            check_type("monitor", monitor, Monitor, "Monitor(every=10)")
        self.retries, self.monitor = check_count("retries", retries, 0), monitor
        self.algorithm = self._resolved()
        rounds = self.algorithm.rounds_opening and not self.model.exact_opening
        if rounds and statistics.any():  # zeros wait for a checkpoint
            loss = START_LOSS * min(100.0, session.effective)
            statistics = rounded_statistics(self.model, statistics, loss)
        self.fingerprint: dict[str, Any] = {}
        """What a checkpoint must agree with."""
        n = self.federation.size
        self.accepted: IntArray = np.full(n, -1, dtype=np.int64)
        self.state = ServerState(
            round=0 if self.algorithm.needs_start_round else 1,
            generation=0,
            statistics=statistics,
            memory=np.zeros(len(statistics)),
            extras={} if extras is None else extras,
        )
        self._params: Any = None
        self.first = statistics
        """Where it began: what it must not be worse than at its end."""
        self.confirmed = False
        """Whether a full pass, or a bold step, has found that little is left to gain."""
        self._verify_from = 0
        self.reseeds = 0
        """How often components without rows were put to use."""
        self.lifts = 0
        """How often shares near zero were raised, which EM would have brought back."""
        self.thinned = 0
        """How often components with too few rows for a masked sum were left out."""
        self.kept: FloatArray | None = None
        """The best place where the run converged, while it looks for a better one."""
        self.kept_cost = np.inf
        """What is not explained there."""
        self.idle_moves = 0
        """Moves of a component in a row that gained nothing."""
        self.phase = self.since = session.phase + 1
        self._begin_phase()
        self._step_sizes: list[int] = []
        """Bytes of each round's quantised step."""
        self._followed = 0
        """The first round from whose statistics steps lead on."""
        self._widened = 0
        """How many sums in a row had no room."""
        if not self.algorithm.needs_start_round:
            self._step_sizes.append(0)
            self._record(opening_record(n, session.evaluations))

    def _begin_phase(self, since: int = 0) -> None:
        self.session.begin(Phase(self.view, self.algorithm, self.seed, self.phase, since))

    def _resolved(self) -> Algorithm:
        """The algorithm with everything that was left open filled in."""
        n = self.federation.size
        p = self.participation.probabilities(np.arange(n), n)
        if self.session.masks and self.federation.carries_bytes and p.min() < 1:
            raise SettingsError(
                "a masked sum is that of all sites, or differences of sums would tell of single "
                "ones: leave participation out, or run without masks, which every site must allow "
                "in its rules."
            )
        crowd = Crowd(self.session.effective, float(p.min()))
        return self._given.resolve(self.model.layout, crowd)

    @property
    def federation(self) -> Federation:
        """Where messages travel."""
        return self.session.federation

    @property
    def weights(self) -> FloatArray:
        """w_i."""
        return self.session.weights

    @property
    def always_saved(self) -> bool:
        """Workers that keep their own memories must not be ahead of the server."""
        return self.federation.carries_bytes

    @property
    def params(self) -> Any:
        """T(S), in the units of the statistics."""
        if self._params is None:
            self._params = self.model.maximize(self.state.statistics)
        return self._params

    @property
    def memory_gap(self) -> float:
        """The relative violation of V = sum w_i (V_i + accepted pending): zero up to rounding."""
        workers, rows = self.federation.worker_states()
        return gap(
            self.state.memory, self.state.generation, self.accepted, self.weights, workers, rows
        )

    def move(self, statistics: FloatArray) -> None:
        """Go on from other statistics: the server may choose any that it sends in full."""
        self.state, self._params = replace(self.state, statistics=statistics), None

    def narrow(self, view: View) -> None:
        """Go on with some parts of the model; memories stay exact, and rounds count on."""
        places = self.session.bound.kept(self.view, view)
        q, state = self.model.layout.size, self.state
        extras = {n: a[places] if a.shape == (q,) else a for n, a in state.extras.items()}
        self.state = replace(
            state,
            statistics=state.statistics[places],
            memory=state.memory[places],
            extras=extras,
        )
        self.first = self.first[places]
        self.view, self.model, self._params = view, self.session.view(view), None
        self.algorithm = self._resolved()
        self.phase = self.session.phase + 1
        self._followed = state.round
        self._begin_phase(self.since)

    def turn_to(self, view: View, parts: Sequence[FloatArray]) -> None:
        """Stand at these statistics of other parts of the model; rounds then follow a `restart`."""
        self.view, self.model, self._params = view, self.session.view(view), None
        statistics = self.model.join(parts)
        nothing = np.zeros(len(statistics))
        self.state = replace(self.state, statistics=statistics, memory=nothing, extras={})
        self.first, self.algorithm = statistics, self._resolved()
        self.kept, self.kept_cost, self.idle_moves = None, np.inf, 0

    def ask(self, kind: Literal["statistics", "values"], purpose: str = "question") -> FloatArray:
        """What everyone says at T(S): exact statistics, or values of each part."""
        exact = self.view.watched or kind == "statistics" or purpose == "monitor"
        at = self.params if exact else self.state.statistics
        return self.session.ask(kind, self.view, at, purpose)

    def ask_before(self, statistics: FloatArray) -> FloatArray:
        """Values of each part at the statistics of the last round, which who answered it knows."""
        informed = np.flatnonzero(self.accepted == self.state.round - 1)
        params = self.model.maximize(statistics)
        return self.session.ask("values", self.view, params, informed=informed)

    def plan(self, more: IntArray | None = None) -> Request:
        """Who is asked in the next round, ``more`` among them, and what."""
        state, n = self.state, self.federation.size
        start = state.round == 0
        drawn = (
            np.arange(n, dtype=np.int64)
            if start
            else self.participation.draw(self.seed, state.round, n)
        )
        workers = self.session.attendance.asked(drawn, look=self.purpose == "round")
        workers = workers if more is None else np.union1d(workers, more)
        told, masks = state.statistics, self.session.masks
        params = self.model.maximize(settled(told)) if masks else self.params
        return Request(
            round=state.round,
            generation=state.generation,
            kind="start" if start else self.algorithm.asks(state),
            statistics=told,
            params=params,
            workers=workers,
            accepted=self.accepted[workers],
            count_bytes=self.session.count_bytes,
            purpose="start" if start else self.purpose,
            phase=self.phase,
            lattice=self.algorithm.lattice(state, n) if masks else None,
            weights=self.weights[workers] if masks else None,
            encode=self.federation.carries_bytes,
        )

    def payloads(self, workers: IntArray) -> IntArray:
        """Bytes of a request's payload now: the statistics, or the steps since a worker was there.

        A worker whose upload of round r was accepted had the statistics of round r.
        """
        derived = at_origin(self.model, self.state.statistics)
        size = 0 if derived else numbers_size(self.state.statistics)
        full = np.full(len(workers), size)
        if derived or not self.algorithm.broadcasts_steps:
            return full
        sizes = np.array(self._step_sizes, dtype=np.int64)
        frames = count_sizes(sizes)
        before = np.concatenate([[0], np.cumsum(sizes + frames)])
        here = before[self.state.round] - (frames[-1] if len(frames) else 0)  # the last has none
        accepted = self.accepted[workers].tolist()
        first = self._followed
        steps = [here - before[r] if r >= first else full[0] for r in accepted]
        return np.minimum(full, np.array(steps, dtype=np.int64))

    def gather(self, request: Request) -> Replies:
        """Replies of this round, each worker once, sorted; every message is charged.

        Replies to closed rounds and second copies are refused. Those who stay silent are asked
        again as often as ``retries`` says, then count as absent.
        """
        q, missing = len(self.state.memory), request
        batches: list[Replies] = []
        for _ in range(1 + self.retries):
            if len(missing.workers) == 0:
                break
            arrived = self._exchanged(missing, request)
            batches.append(arrived)
            if len(arrived.workers) == len(missing.workers):
                break
            heard = np.union1d(arrived.workers, arrived.lost_memory)
            missing = missing.take(np.flatnonzero(~np.isin(missing.workers, heard)))
        taken = batches[0] if len(batches) == 1 else Replies.join(batches, q)
        if np.any(taken.workers[1:] < taken.workers[:-1]):
            taken = taken.take(np.argsort(taken.workers, kind="stable"))
        return taken

    def _gathered(self) -> tuple[Request, Replies]:
        """A round and its replies. Where too few answer, who left and is back is asked, too.

        Else a run waits for one who has just gone, beside others who are there and may count.
        """
        request = self.plan()
        try:
            return request, self.gather(request)
        except ParticipationError:
            wider = self.plan(more=self.federation.returned)
            if len(wider.workers) == len(request.workers):
                raise
        return wider, self.gather(wider)

    def _exchanged(self, asked: Request, request: Request) -> Replies:
        """What comes of one exchange with some of those whom the round asks."""
        prices = self.session.prices
        if prices is not None:
            prices.request(asked, self.payloads(asked.workers))
        arrived = self.federation.exchange(asked)
        if prices is not None:
            prices.reply(request, arrived)
        current = arrived.rounds == request.round
        if current.all() and np.array_equal(arrived.workers, asked.workers):
            return arrived
        valid = np.flatnonzero(current & np.isin(arrived.workers, asked.workers))
        _, first = np.unique(arrived.workers[valid], return_index=True)
        return arrived.take(valid[first])

    def gather_sum(self, request: Request) -> tuple[Replies, IntArray]:
        """The sum that a masked round tells, and who was heard of.

        While some are missing there is no sum: everyone is asked again, as often as ``patience``
        says and for some minutes, and then those who are missing have left. Who refused for good
        has left at once.
        """
        patience, q = self.session.patience, len(self.state.memory)
        began = time.monotonic()
        for attempt in range(1 if patience is None else WAITS * patience):
            if attempt >= (patience or 1) and time.monotonic() - began > WAIT_SECONDS:
                break
            arrived = self._exchanged(request, request)
            heard = np.union1d(arrived.workers, arrived.lost_memory)
            if self.federation.carries_bytes:  # it tells a sum of all, or of nobody
                heard = np.setdiff1d(request.workers, self.federation.missed)
            else:
                arrived = held(self.model, self.seed, request, arrived)
            silent = np.setdiff1d(request.workers, heard)
            if len(silent) == 0 or self.federation.overtaken:
                return arrived, heard
            if np.isin(silent, self.federation.gone).all():  # who refused for good never answers
                return replace(Replies.empty(q), lost_memory=arrived.lost_memory), heard
        if patience is None:
            names = ", ".join(map(self.session.name_of, silent.tolist()))
            raise ParticipationError(
                f"round {request.round}: a masked sum waits for {names}. The run can be resumed."
            )
        return replace(Replies.empty(q), lost_memory=arrived.lost_memory), heard

    def step(self) -> RoundRecord:
        """One round."""
        self._leave_out_thin()
        record = self._round()
        self._leave_out_thin()  # a run may end here, and its result is for all to see
        return record

    def _leave_out_thin(self) -> None:
        """Under masks a component with fewer rows of all workers than owners tell of is none.

        A site would not go on from there, and what it told would be those rows. As a copy of the
        heaviest a component tells nothing, see `as_copies`; all memories start at zero.
        """
        if not self.session.counts_components:
            return
        statistics = leave_out_thin(self.model, self.state.statistics, self.samples)
        if statistics is self.state.statistics or not self.model.inside(statistics):
            return
        self.thinned += 1
        self.first = leave_out_thin(self.model, self.first, self.samples)
        self.restart(statistics)

    def _round(self) -> RoundRecord:
        looked = self._diagnose(self.state)
        began = time.perf_counter()
        state = self.state
        if self.session.masks:
            request = self.plan()
            replies, heard = self.gather_sum(request)
            if replies.overflow and not len(replies.lost_memory):
                return self._widen(request, replies, looked, time.perf_counter() - began)
            self._widened = 0
        else:
            request, replies = self._gathered()
            heard = np.union1d(replies.workers, replies.lost_memory)
        lost = replies.lost_memory
        if self.federation.overtaken:
            self.session.rebind()
            return self._rebind(request, replies, time.perf_counter() - began)
        if self.session.attend(request.workers, heard, lost):
            return self._rebind(request, replies, time.perf_counter() - began)
        probabilities = self.participation.probabilities(replies.workers, self.federation.size)
        if self.session.masks:
            request = replace(request, params=self.params)  # steps are followed from S itself
        told = Heard(request, replies, self.weights[replies.workers], probabilities)
        new, info = self.algorithm.server_step(self.model, self.seed, state, told)
        if len(lost):  # memories start anew for all; see emfed.algorithms.memory
            self.session.announce_lost(lost)
            new = self.algorithm.forget(new)
        seconds = time.perf_counter() - began
        record = self._record(
            RoundRecord(
                round=state.round,
                generation=state.generation,
                asked=len(request.workers),
                answered=len(replies.workers),
                squared_H=info.squared_mean_field,
                step_size=info.step_size,
                guard_hits=info.guard_hits,
                bytes_up=0,
                bytes_down=0,
                payload_up=0,
                payload_down=0,
                evaluations=int(replies.evaluations.sum())
                + (0 if state.round else self.session.evaluations),
                epochs=0.0,
                seconds=seconds,
                squared_h=looked[0],
                objective=looked[1] if info.objective is None else info.objective,
                gain=info.gain,
            )
        )
        self._step_sizes.append(info.broadcast_bytes)
        self.federation.keep_step(state.round, info.broadcast)
        if len(lost):
            self.accepted[:] = -1
        else:
            self.accepted[replies.workers] = state.round
        self.state, self._params = new, None
        return record

    def _widen(
        self,
        request: Request,
        replies: Replies,
        looked: tuple[float | None, float | None],
        seconds: float,
    ) -> RoundRecord:
        """A round whose sum had no room: nothing moves, and the next lattice is wide enough.

        What ``looked`` at S found is true of this round as of any other.
        """
        self._widened += 1
        if self._widened > WIDENED or request.kind == "start":
            raise NumericalError(
                "the statistics are too large for masked sums of this algorithm, or not finite at "
                "some site, whose log says so: use other units of the columns."
            )
        state = self.state
        told = replace(
            opening_record(len(request.workers), self.samples),
            round=state.round,
            generation=state.generation,
            answered=0,
            seconds=seconds,
            squared_h=looked[0],
            objective=looked[1],
        )
        extras = energy_of(request, replies, state, state.memory)
        self.state = replace(state, round=state.round + 1, extras={**state.extras, **extras})
        self._step_sizes.append(0)
        self.federation.keep_step(state.round, b"")
        return self._record(told)

    def _rebind(self, request: Request, replies: Replies, seconds: float) -> RoundRecord:
        """A round that makes no step: who is here has changed, and the model is bound to them.

        What came was computed for the model before, so nothing of it is taken. The run goes on at
        the parameters reached (the best, while it tries others), and memories start at zero, at
        both ends: the server need not know any V_i to be rid of it. A search for a start begins
        anew instead, by `MembersChanged`.
        """
        if self.purpose != "round":
            raise MembersChanged(f"who is here changed in round {request.round} of a search.")
        before, model = self.model, self.session.view(self.view)
        reached = self.state.statistics if self.kept is None else self.kept
        statistics = recast(before, model, reached)
        if not model.inside(statistics):  # the parameters fit these rows so badly: begin anew
            statistics = model.statistics_of(model.start(self.seed))
        self.first = statistics  # of other rows, what it was before does not compare
        self.kept, self.kept_cost, self.idle_moves = None, np.inf, 0
        self.model, self.samples = model, self.session.samples
        self.algorithm = self._resolved()
        nothing = opening_record(len(request.workers), int(replies.evaluations.sum()))
        return self.restart(
            statistics, replace(nothing, answered=len(replies.workers), seconds=seconds)
        )

    def restart(self, statistics: FloatArray, record: RoundRecord | None = None) -> RoundRecord:
        """A round without a step: all memories start at zero, in a new phase from these statistics.

        ``record`` is what the round cost, if it asked anybody.
        """
        record = opening_record(0, 0) if record is None else record
        told = replace(record, round=self.state.round, generation=self.state.generation)
        state = replace(self.state, statistics=statistics, round=self.state.round + 1)
        self._params, self.confirmed = None, False
        self.state = self.algorithm.forget(state)
        self.accepted[:] = -1
        self.phase = self.since = self.session.phase + 1
        self._followed = state.round
        self._step_sizes.append(0)
        self._begin_phase()
        return self._record(told)

    def _diagnose(self, state: ServerState) -> tuple[float | None, float | None]:
        """|h(S)|^2 and the objective at T(S), when the monitor asks for them in this round."""
        monitor = self.monitor
        if monitor is None or state.round == 0 or (state.round - 1) % monitor.every:
            return None, None
        squared_h = objective = None
        with contextlib.suppress(ParticipationError):  # it looks on: no answer is no failure
            squared_h, objective = self._looked_at(monitor)
        return squared_h, objective

    def _looked_at(self, monitor: Monitor) -> tuple[float | None, float | None]:
        squared_h = objective = None
        if monitor.mean_field:
            field = self.ask("statistics", "monitor") - self.state.statistics
            squared_h = float(field @ field)
        if monitor.objective:
            likelihood = float(self.ask("values", "monitor")[:, 0].sum())
            objective = self.model.penalty(self.params) - likelihood
        return squared_h, objective

    def reason(self, stop: Stop) -> str | None:
        """The limit that has been met, if any; that a run has converged must be confirmed.

        A tolerance of |H|^2 ends the run all the same, and `confirmed` says what it is worth. What
        little seems to be left to gain is confirmed by the algorithm in a few more rounds, or
        everyone is asked (`verify`): again only when a quarter more rounds were made, from the
        best point seen if it can be sent. Where somebody refuses for good instead, the next round
        goes on without it.
        """
        others = replace(stop, nats=None, tolerance=None)
        if stop.nats is not None and self.algorithm.sure(self.state):
            if self._lift():
                return others.reason(self)
            self.confirmed = True
            return "nats"
        found = stop.reason(self)
        try:
            if found == "tolerance":
                self.confirmed = verify(self, stop.left).left <= LEFT_BY_WORD * stop.left
            elif found == "nats" and not self._confirm(stop.left):
                return others.reason(self)
        except ParticipationError:
            if not len(self.session.refusing):
                raise
            return others.reason(self)
        return found

    def _lift(self) -> bool:
        """Go on without shares near zero that EM would bring back, if there are any."""
        if self.lifts == MOST_LIFTS:
            return False
        with contextlib.suppress(ParticipationError):  # who is not there cannot tell
            if (there := of_everyone(self.session, lambda: lifted(self))) is not None:
                self.lifts += 1
                self.restart(there)
                return True
        return False

    def settle(self) -> bool:
        """Go back to the start, part by part, where rounds that nobody looked at ended below it.

        EM with everyone never does, and an algorithm that sees everyone finds out by itself.
        """
        exact = isinstance(self.algorithm, EM) and isinstance(self.participation, Everyone)
        watched = exact or self.algorithm.sure(self.state) is not None
        there = np.array_equal(self.first, self.state.statistics)
        if watched or there:
            return False
        with contextlib.suppress(ParticipationError):  # who is not there cannot tell
            settled = better(self, self.first)
            if not np.array_equal(settled, self.state.statistics):
                self.move(settled)
                self.confirmed = False
                return True
        return False

    def _confirm(self, nats: float) -> bool:
        sure = self.algorithm.sure(self.state)
        if sure is None and self.state.round >= self._verify_from:
            verdict = verify(self, nats)
            sure = verdict.left <= LEFT_BY_WORD * nats
            self._verify_from = self.state.round + max(10, self.state.round // 4)
            if not (sure or self.algorithm.broadcasts_steps):
                self.move(verdict.best)
        elif sure is False:
            self.state = self.algorithm.confirm(self.state, nats)
        self.confirmed = bool(sure)
        return self.confirmed

    def save(self, path: str | Path, disk: Disk = DISK, hooks: Sequence[Hook] = ()) -> None:
        """Write a checkpoint, atomically; ``hooks`` are what must go on with the run."""
        workers, rows = self.federation.worker_states()
        arrays = {
            "statistics": self.state.statistics,
            "memory": self.state.memory,
            "first": self.first,
            "accepted": self.accepted,
            "ledger": self.ledger.counts,
            "step_sizes": np.array(self._step_sizes, dtype=np.int64),
            "workers": workers,
            **({} if self.kept is None else {"kept": self.kept}),
            **{f"attendance/{n}": a for n, a in self.session.attendance.arrays().items()},
            **{f"extras/{name}": array for name, array in self.state.extras.items()},
            **{f"rows/{name}": array for name, array in rows.items()},
            **{f"prices/{name}": array for name, array in self._told().items()},
            **{f"records/{name}": array for name, array in self.records.to_arrays().items()},
        }
        known = {}
        for hook in hooks:
            own, known[hook.name] = hook.save()
            arrays |= {f"hooks/{hook.name}/{name}": array for name, array in own.items()}
        description = {
            "fingerprint": self.fingerprint,
            "hooks": known,
            "view": self.view.describe(),
            "phase": self.phase,
            "since": self.since,
            "followed": self._followed,
            "verify_from": self._verify_from,
            "reseeds": self.reseeds,
            "thinned": self.thinned,
            "lifts": self.lifts,
            "idle_moves": self.idle_moves,
            "kept_cost": None if self.kept is None else self.kept_cost,
            "round": self.state.round,
            "generation": self.state.generation,
            "evaluations": self.evaluations,
            "seconds": self.seconds,
        }
        save_checkpoint(path, arrays, description, disk)

    def _told(self) -> dict[str, BoolArray]:
        """Who was told what already, where a simulation prices its messages."""
        return {} if self.session.prices is None else self.session.prices.state()

    def restore(self, path: str | Path, disk: Disk = DISK) -> None:
        """Continue from a checkpoint of the same run, bit for bit."""
        arrays, description = load_checkpoint(path, disk)
        disk.settle(Path(path))
        differing = sorted(
            name
            for name in {*self.fingerprint, *description["fingerprint"]}
            if self.fingerprint.get(name) != description["fingerprint"].get(name)
        )
        if differing:
            raise CheckpointError(
                f"{path} belongs to another run, with other {', '.join(differing)}. Use the "
                "settings and data it was made with, or start anew."
            )
        self.state = ServerState(
            description["round"],
            description["generation"],
            arrays["statistics"],
            arrays["memory"],
            under("extras/", arrays),
        )
        self.first = arrays["first"]
        self.session.restore(under("attendance/", arrays))
        self.samples = self.session.samples
        self.view, self._params = View.read(description["view"]), None
        self.model, self._followed = self.session.view(self.view), description["followed"]
        self._verify_from, self.reseeds = description["verify_from"], description["reseeds"]
        self.idle_moves, self.kept = description.get("idle_moves", 0), arrays.get("kept")
        cost = description.get("kept_cost")
        self.kept_cost = np.inf if cost is None else cost
        self.thinned, self.lifts = description.get("thinned", 0), description.get("lifts", 0)
        self.algorithm = self._resolved()
        self.phase, self.since = description["phase"], description["since"]
        self.accepted = arrays["accepted"]
        self.evaluations, self.seconds = description["evaluations"], description["seconds"]
        self.records = Records.from_arrays(under("records/", arrays))
        self.ledger.restore(arrays["ledger"])
        self._step_sizes = arrays["step_sizes"].tolist()
        self._charged = np.array(
            [
                self.records.column(name).sum()
                for name in ("bytes_up", "bytes_down", "payload_up", "payload_down")
            ],
            dtype=np.int64,
        )
        self._begin_phase(0 if self.since == self.phase else self.since)
        if self.session.prices is not None:
            self.session.prices.restore(under("prices/", arrays))
        self.federation.restore_states(arrays["workers"], under("rows/", arrays))

    @staticmethod
    def recall(path: str | Path, hooks: Sequence[Hook]) -> None:
        """Let callbacks that a checkpoint remembers go on from it too."""
        arrays, description = load_checkpoint(path)
        for hook in hooks:
            hook.load(under(f"hooks/{hook.name}/", arrays), description["hooks"][hook.name])


def remembered(callbacks: Iterable[Callback]) -> list[Any]:
    """The callbacks that a checkpoint remembers."""
    return [hook for hook in callbacks if isinstance(hook, Hook)]


def under(prefix: str, arrays: dict[str, Any]) -> dict[str, Any]:
    """Arrays whose name begins with the prefix, by the rest of their name."""
    return {n.removeprefix(prefix): a for n, a in arrays.items() if n.startswith(prefix)}
