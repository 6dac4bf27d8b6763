"""A network that misbehaves from a seeded plan, around any federation.

It loses, repeats, delays and reorders requests and replies, lets workers crash before or after
they have persisted their answer, wipes disks, and crashes the server. Everything above it must
not care: the tests run on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, final

import numpy as np

from emfed.aggregation.unmasked import Presence, Present
from emfed.core.errors import (
    ParticipationError,
    ServerCrash,
    SettingsError,
    check_count,
    check_range,
    check_type,
)
from emfed.core.protocols import (
    BoolArray,
    Federation,
    FloatArray,
    IntArray,
    Model,
    Names,
    Opening,
    Phase,
    Question,
    Replies,
    Request,
    StateField,
    WorkerStates,
)
from emfed.core.streams import Purpose, check_seed, uniforms
from emfed.core.sums import AskedWorkers


@final
@dataclass(frozen=True)
class FaultPlan:
    """What goes wrong in a simulated network, and how often; all of it follows from one seed.

    Probabilities are those of a message or, for ``crash_server``, of an exchange.

    Parameters
    ----------
    seed : int
        The seed.
    lose_request : float
        The probability that a request is lost.
    delay_request : float
        The probability that a request is delayed.
    repeat_request : float
        The probability that a request arrives twice.
    crash_before_answer : float
        The probability that the worker dies before anything is persisted: as if it had never been
        asked.
    crash_after_persist : float
        The probability that the worker dies between persisting its upload and sending it.
    lose_reply : float
        The probability that a reply is lost.
    delay_reply : float
        The probability that a reply is delayed.
    repeat_reply : float
        The probability that a reply arrives twice.
    lose_disk : float
        The probability that the worker loses its disk.
    crash_server : float
        The probability that the server dies in an exchange.
    reorder : bool
        Whether replies arrive in another order.
    longest_delay : int
        The longest delay, in exchanges.
    away : mapping from int to pairs
        Workers that are not there from one exchange of the whole fit (they count from 1) until
        another; with None they never come back.

    Examples
    --------
    >>> from emfed.network import FaultPlan
    >>> FaultPlan(seed=1, lose_reply=0.1).lose_reply
    0.1
    """

    seed: int = 0
    lose_request: float = 0.0
    delay_request: float = 0.0
    repeat_request: float = 0.0
    crash_before_answer: float = 0.0
    crash_after_persist: float = 0.0
    lose_reply: float = 0.0
    delay_reply: float = 0.0
    repeat_reply: float = 0.0
    lose_disk: float = 0.0
    crash_server: float = 0.0
    reorder: bool = False
    longest_delay: int = 3
    away: Mapping[int, tuple[int, int | None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_seed(self.seed)
        for f in fields(self):
            if f.type == "float":
                check_range(f.name, getattr(self, f.name), 0, 1)
        check_count("longest_delay", self.longest_delay)
        for worker, (first, last) in self.away.items():
            check_count("away worker", worker, 0)
            check_count("away from exchange", first)
            if last is not None:
                check_count("away until exchange", last, first)

    def presence(self, workers: int) -> Presence:
        """Whose messages arrive, of so many workers.

        Faults strike rounds: all else is repeated until it is whole. What is late has missed its
        exchange. What is said twice, and a server that begins again, change nothing.
        """
        everyone = np.arange(workers, dtype=np.int64)

        def present(ask: Any, exchange: int) -> Present:
            if ask.purpose != "round":
                return Present(everyone, everyone)
            u = uniforms(self.seed, exchange, Purpose.FAULTS, everyone, len(_PER_WORKER))
            struck = {name: u[:, j] < getattr(self, name) for j, name in enumerate(_PER_WORKER)}
            deaf = struck["lose_request"] | struck["delay_request"] | struck["crash_before_answer"]
            mute = struck["crash_after_persist"] | struck["lose_reply"] | struck["delay_reply"]
            for worker, (first, last) in self.away.items():
                deaf[worker] |= first <= exchange and (last is None or exchange < last)
            return Present(
                np.flatnonzero(~deaf),
                np.flatnonzero(~(deaf | mute)),
                np.flatnonzero(struck["lose_disk"]),
            )

        return present


_NETWORK = np.zeros(1, dtype=np.int64)
_PER_WORKER = (
    "lose_request",
    "delay_request",
    "repeat_request",
    "crash_before_answer",
    "crash_after_persist",
    "lose_reply",
    "delay_reply",
    "repeat_reply",
    "lose_disk",
)


@final
class FaultyFederation(Federation):
    """Another federation behind a faulty network.

    Parameters
    ----------
    inner : Federation
        The federation whose messages are lost, delayed and repeated.
    plan : FaultPlan
        What goes wrong, and how often.

    Examples
    --------
    >>> import emfed
    >>> data = emfed.data.synthetic_federation(workers=4, rows_per_worker=50)
    >>> model = emfed.gaussian_mixture(2, "tied")
    >>> inner = emfed.network.StackedFederation(data)
    >>> faulty = emfed.network.FaultyFederation(inner, emfed.network.FaultPlan(lose_reply=0.2))
    >>> emfed.fit(model, faulty, "FedEM", rounds=20).rounds
    20
    """

    def __init__(self, inner: Federation, plan: FaultPlan) -> None:
        check_type("inner", inner, Federation, "StackedFederation(as_workers(data))")
        check_type("plan", plan, FaultPlan, "FaultPlan(lose_reply=0.1)")
        if inner.carries_bytes:
            raise SettingsError("a network has its faults in its Transport: wrap that instead.")
        self.inner, self.plan = inner, plan
        self._columns: dict[str, StateField] = {}
        self._clock = 0
        """Exchanges of all phases."""
        self._missed: IntArray = np.empty(0, dtype=np.int64)
        self._reset()

    def _reset(self) -> None:
        """A new run meets the plan from its beginning (a resumed one too: the plan is a test's)."""
        self._exchanges = 0
        self._late_requests: list[tuple[int, Request]] = []
        self._late_replies: list[tuple[int, Replies]] = []

    def _faults(self, workers: IntArray) -> tuple[dict[str, BoolArray], FloatArray]:
        """Which fault strikes whom in this exchange, and numbers for delays and order."""
        count = len(_PER_WORKER) + 3
        u = uniforms(self.plan.seed, self._exchanges, Purpose.FAULTS, workers, count)
        struck = {name: u[:, j] < getattr(self.plan, name) for j, name in enumerate(_PER_WORKER)}
        return struck, u[:, len(_PER_WORKER) :]

    def exchange(self, request: Request) -> Replies:
        """The inner exchange, spoiled according to the plan."""
        self._exchanges += 1
        self._clock += 1
        q, now = len(request.statistics), self._exchanges
        struck, u = self._faults(request.workers)
        self._wipe(request.workers[struck["lose_disk"]])
        arrived = [self.inner.exchange(old) for old in self._due(self._late_requests, now)]
        self._hold(self._late_requests, request, struck["delay_request"], u[:, 0], now)
        stopped = struck["lose_request"] | struck["delay_request"] | struck["crash_before_answer"]
        stopped |= ~self._there(request.workers)
        replies = self._ask(request, ~stopped, q)
        again = self._ask(request, ~stopped & struck["repeat_request"], q)
        spoiled = self._spoil(replies, request, struck, u[:, 1], now)
        arrived += self._due(self._late_replies, now)
        arrived += [spoiled, again]
        twice = request.workers[struck["repeat_reply"]]
        copies = replace(
            spoiled.take(np.isin(spoiled.workers, twice)),
            lost_memory=spoiled.lost_memory[np.isin(spoiled.lost_memory, twice)],
        )
        joined = Replies.join([*arrived, copies], q)
        if self.plan.reorder and len(joined.workers):
            keys = uniforms(self.plan.seed, now, Purpose.REORDERING, _NETWORK, len(joined.workers))
            joined = joined.take(np.argsort(keys[0], kind="stable"))
        if self._server_crashes(now):
            raise ServerCrash(f"the server crashed in round {request.round}")
        return joined

    def _there(self, workers: IntArray) -> BoolArray:
        now, nothing = self._clock, (0, 0)
        spans = [self.plan.away.get(worker, nothing) for worker in workers.tolist()]
        return np.array(
            [not (0 < first <= now and (last is None or now < last)) for first, last in spans],
            dtype=np.bool_,
        )

    def _ask(self, request: Request, who: BoolArray, q: int) -> Replies:
        if not who.any():
            return Replies.empty(q)
        return self.inner.exchange(request.take(np.flatnonzero(who)))

    def _spoil(
        self,
        replies: Replies,
        request: Request,
        struck: dict[str, BoolArray],
        u: FloatArray,
        now: int,
    ) -> Replies:
        """Replies that are lost or late leave the batch."""
        position = np.searchsorted(request.workers, replies.workers)
        late = struck["delay_reply"][position]
        lost = (struck["lose_reply"] | struck["crash_after_persist"])[position]
        self._hold(self._late_replies, replies, late & ~lost, u[position], now)
        silent = np.isin(
            replies.lost_memory,
            request.workers[struck["lose_reply"] | struck["crash_after_persist"]],
        )
        kept = replies.take(np.flatnonzero(~late & ~lost))
        return replace(kept, lost_memory=replies.lost_memory[~silent])

    def _hold(
        self, queue: list[tuple[int, Any]], batch: Any, who: BoolArray, u: FloatArray, now: int
    ) -> None:
        """Keep messages back for one or more exchanges."""
        for position in np.flatnonzero(who):
            due = now + 1 + int(u[position] * self.plan.longest_delay)
            message = batch.take(np.array([position]))
            if isinstance(message, Replies):
                message = replace(message, lost_memory=message.lost_memory[:0])
            queue.append((due, message))

    @staticmethod
    def _due(queue: list[tuple[int, Any]], now: int) -> list[Any]:
        """Messages whose time has come, taken off the queue."""
        ready = [message for due, message in queue if due <= now]
        queue[:] = [item for item in queue if item[0] > now]
        return ready

    def _wipe(self, workers: IntArray) -> None:
        """These workers come back with an empty disk."""
        if len(workers):
            blank = {
                name: np.full((len(workers), *c.shape), c.fill, dtype=c.dtype)
                for name, c in self._columns.items()
            }
            self.inner.restore_states(workers, blank)

    def _server_crashes(self, now: int) -> bool:
        u = uniforms(self.plan.seed, now, Purpose.CRASHES, _NETWORK, 1)
        return bool(u[0, 0] < self.plan.crash_server)

    @property
    def workers(self) -> AskedWorkers:
        """Those of the federation inside."""
        workers: AskedWorkers = getattr(self.inner, "workers")  # noqa: B009
        return workers

    @property
    def present(self) -> Presence:
        """Whose messages arrive."""
        return self.plan.presence(self.size)

    @property
    def size(self) -> int:
        return self.inner.size

    def open(self, model: Model, columns: Names = None, rounded: bool = False) -> Opening:
        """The opening exchange is repeated until it is whole: no fault is seen."""
        self._clock = 0
        return self.inner.open(model, columns, rounded)

    def bind(self, bound: Any) -> None:
        self._bound = bound
        self.inner.bind(bound)

    def begin(self, phase: Phase) -> None:
        self._columns = phase.algorithm.state_fields(self._bound.view(phase.view).layout.size)
        self._reset()
        self.inner.begin(phase)

    def ask(self, question: Question, weights: FloatArray) -> FloatArray:
        there = self._there(np.arange(self.size))
        self._missed = np.flatnonzero(~there)
        if there[weights > 0].all():
            return self.inner.ask(question, weights)
        if question.everyone or not there[weights > 0].any():
            raise ParticipationError(f"workers {self._missed.tolist()} did not answer a question.")
        shares = weights * there
        return self.inner.ask(question, shares / shares.sum())

    @property
    def missed(self) -> IntArray:
        return self._missed

    def scores(self, question: Question) -> FloatArray:
        there = self._there(np.arange(self.size))
        self._missed = np.flatnonzero(~there)
        return np.where(there[:, None], self.inner.scores(question), np.nan)

    def worker_states(self) -> tuple[IntArray, WorkerStates]:
        return self.inner.worker_states()

    def restore_states(self, workers: IntArray, rows: WorkerStates) -> None:
        self.inner.restore_states(workers, rows)

    def close(self) -> None:
        self.inner.close()
