"""FedEM and VR-FedEM, Algorithms 1 and 2 of the paper, as generators of gathers.

Lines in comments are those of Algorithm 1; Algorithm 2 has the same, with another estimate S_i.
Where the paper has 1/n ours has the weight w_i of each worker, and where it has one p each worker
has its own. T is not defined everywhere, as A3 has it: a step that would leave its domain is
halved. A worker adds Q(Delta_i) to V_i (line 8) when it learns that its message was counted, which
is the same where none is lost (`emfed.algorithms.memories`).

Algorithm 2 has no workers that are away, and makes a full pass at the end of an outer loop (line
20). In the next round it adds a difference that is zero, because both of its terms are at the same
parameters (line 8 with S_{t,0} = S_{t,-1}, line 17). Ours makes the pass in that round and leaves
out the difference: the estimates are the same. The pair (S_i, theta_ref) of a worker changes once
in each round that it answers, and stands even if that answer is lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Self, final

import numpy as np

from emfed.algorithms.base import CompressedEM
from emfed.algorithms.em import EM
from emfed.algorithms.fed_em import FedEM
from emfed.algorithms.memories import NOT_COUNTED, columns, settle
from emfed.algorithms.steps import batch_indices, shorten, step_at
from emfed.algorithms.vr_fed_em import VRFedEM
from emfed.compressors import Identity
from emfed.core.errors import NumericalError, SettingsError
from emfed.core.protocols import (
    Algorithm,
    Compressor,
    FloatArray,
    IdentityMetric,
    Latent,
    Metric,
    Model,
    Participation,
    SimulatesLatents,
)
from emfed.core.streams import Purpose, latent_uniforms, uniforms
from emfed.core.sums import (
    Answers,
    Finish,
    Gather,
    IntArray,
    LastSum,
    RowsOfWorkers,
    States,
    Unmasked,
)
from emfed.core.wire import numbers_size, payload_sizes

SERVER = np.zeros(1, dtype=np.int64)
"""The stream of the broadcast."""
IDENTITY: Metric = IdentityMetric()
NOBODY = np.zeros(0, dtype=np.int64)
SMALL_ROUNDS = 3
"""Rounds in a row, in which somebody answered and no step was halved, with a small |H|^2."""
SIMULATED_ROWS = 1 << 14
"""Rows whose latent variables are drawn at once."""


@final
@dataclass(frozen=True, eq=False)
class Method:
    """What does not change in the rounds of one fit.

    Parameters
    ----------
    model : Model
        The bound model.
    settings : CompressedEM
        The algorithm; every field has a value (`CompressedEM.resolve`).
    participation : Participation
        Who takes part in a round.
    workers : int
        How many there are.
    rows : float
        The weight of all their rows.
    seed : int
        The seed of compression, batches and participation.
    small : float
        |H|^2 below which a fit has converged; 0: it never has.
    number : int
        Which ascent of the fit these rounds are: workers keep a memory for each.
    """

    model: Model
    settings: CompressedEM
    participation: Participation
    workers: int
    rows: float
    seed: int = 0
    small: float = 0.0
    number: int = 0


@final
@dataclass(frozen=True, eq=False)
class Server:
    """What the server keeps between rounds.

    Parameters
    ----------
    statistics : array of shape (q,)
        S.
    memory : array of shape (q,)
        V, the weighted sum of all V_i.
    counted : array of int, shape (workers,)
        The last round in which each worker's message was counted; -1: none.
    round : int
        The number of the next round, from 1; 0: the exact uploads that memories start with.
    generation : int
        How often all memories have begun again at zero, because a worker had lost its own.
    sent : int
        Bytes of the last broadcast.
    calm : int
        Rounds in a row with a small |H|^2.
    last : LastSum, optional
        What the last round came to.
    """

    statistics: FloatArray
    memory: FloatArray
    counted: IntArray
    round: int = 1
    generation: int = 0
    sent: int = 0
    calm: int = 0
    last: LastSum | None = None

    @classmethod
    def begun(cls, method: Method, start: FloatArray) -> Self:
        """The state before the first round."""
        none = np.full(method.workers, NOT_COUNTED)
        first = 0 if method.settings.needs_start_round else 1
        return cls(start, np.zeros_like(start), none, first, sent=numbers_size(start))

    @property
    def converged(self) -> bool:
        """Whether |H|^2 has been small for long enough."""
        return self.calm >= SMALL_ROUNDS

    def arrays(self) -> dict[str, Any]:
        """All of it but what the last round came to."""
        numbers = np.array([self.round, self.generation, self.sent, self.calm])
        return {
            "statistics": self.statistics,
            "memory": self.memory,
            "counted": self.counted,
            "numbers": numbers,
        }

    @classmethod
    def of(cls, arrays: Mapping[str, Any]) -> Self:
        """The inverse of `arrays`."""
        vectors = (arrays[name] for name in ("statistics", "memory", "counted"))
        return cls(*vectors, *arrays["numbers"].tolist())


def compressed(algorithm: Algorithm) -> CompressedEM:
    """The settings of FedEM that are this algorithm: those of EM compress nothing.

    A worker that does not answer then leaves its share of S as it is.
    """
    if isinstance(algorithm, EM):
        return FedEM(Identity(), step_size=1.0, memory_rate=0.0)
    if not isinstance(algorithm, CompressedEM):
        name = type(algorithm).__name__
        raise SettingsError(f"{name} has no rounds in which workers are heard one by one.")
    return algorithm


def rounds(method: Method, server: Server) -> Unmasked[Server]:
    """FedEM (Algorithm 1), or VR-FedEM (Algorithm 2) where the settings are `VRFedEM`.

    They go on until |H|^2 is small or an exchange is refused. Sent a `Server` in place of replies,
    they go on from there.
    """
    n = method.workers
    while not server.converged:  # line 2
        k = server.round
        active = method.participation.draw(method.seed, k, n) if k else np.arange(n)  # line 3
        ask = Innovations.asked(method, server, active)
        try:
            replies = yield ask  # lines 4 to 11
        except Finish:
            return server
        server = after(ask, replies) if isinstance(replies, Answers) else replies
    yield Innovations.asked(method, server, NOBODY)  # who drives sees where the rounds have ended
    return server


def after(ask: Innovations, replies: Answers) -> Server:
    """The server's side of a round: lines 13 to 17.

    A worker that was drawn and whose reply is missing counts as not drawn. Where one has lost its
    memory, all begin at zero again.
    """
    method, server = ask.method, ask.server
    settings, k = method.settings, server.round
    weights, p = replies.totals / method.rows, np.ones(len(replies.workers))
    if k:
        p = method.participation.probabilities(replies.workers, method.workers)
    field = server.memory + (weights / p) @ replies.values  # line 14: H
    moved, sent, last = server.statistics, 0, LastSum(0, np.inf, generation=server.generation)
    if k:
        assert settings.step_size is not None
        gamma = step_at(settings.step_size, k)
        moved, sent, factor, hits = _moved(ask, gamma * field)  # line 15: S
        gain = None
        if settings.in_metric:
            white = ask.metric.whiten(field)
            gain = float(white @ white) / 2
        squared = float(field @ field)
        last = replace(last, hits=hits, squared=squared, step_size=factor * gamma, gain=gain)
    calm = 0
    if last.squared is not None and last.squared <= method.small and not last.hits:
        calm = (server.calm + 1) * bool(len(replies.workers))
    memory = server.memory + (weights * replies.rates) @ replies.values  # line 16: V
    counted = server.counted.copy()
    counted[replies.workers] = k
    generation = server.generation
    if len(replies.lost):
        generation, memory, counted = generation + 1, 0 * memory, 0 * counted + NOT_COUNTED
    return Server(moved, memory, counted, k + 1, generation, sent, calm, last)


def _moved(ask: Innovations, step: FloatArray) -> tuple[FloatArray, int, float, int]:
    """S after a step inside the domain of T, which is compressed where it is broadcast.

    The bytes of the broadcast, the factor that the step was shortened by, and how often.
    """
    model, settings, here = ask.method.model, ask.method.settings, ask.server.statistics
    if settings.broadcast is None:
        moved, factor, hits = shorten(model, here, step)
        return moved, numbers_size(moved), factor, hits
    draws = settings.broadcast.draws(len(step))
    u = uniforms(ask.method.seed, ask.server.round, Purpose.BROADCAST, SERVER, draws)
    values, sizes = _sent(settings.broadcast, ask.metric.whiten(step[None]), u)
    moved, factor, hits = shorten(model, here, ask.metric.unwhiten(values)[0])
    return moved, int(sizes[0]) + 1 if factor else 0, factor, hits


def _sent(operator: Compressor, vectors: FloatArray, u: FloatArray) -> tuple[FloatArray, IntArray]:
    """Q of each vector, as it is decoded, and the bytes of the messages."""
    q = vectors.shape[-1]
    message = operator.compress(vectors, u)
    sizes = payload_sizes(message, operator.form(q), operator.dither(u, q))
    return operator.decompress(message, u, q), sizes


@final
@dataclass(frozen=True, eq=False)
class Innovations(Gather):
    """What workers send in a round: Q(Delta_i), lines 4 to 11."""

    method: Method
    server: Server
    workers: IntArray
    purpose: str
    last: LastSum | None
    memory: int

    @classmethod
    def asked(cls, method: Method, server: Server, workers: IntArray) -> Self:
        """Of workers in the next round; of nobody once the rounds have ended."""
        purpose = "question" if server.converged else "round" if server.round else "start"
        return cls(method, server, workers, purpose, server.last, method.number)

    @property
    def state(self) -> Server:
        """All that the server knows."""
        return self.server

    @cached_property
    def params(self) -> Any:
        """T(S)."""
        return self.method.model.maximize(self.server.statistics)

    @cached_property
    def metric(self) -> Metric:
        """The metric that vectors are compressed in: the paper's is Euclidean."""
        in_metric = self.method.settings.in_metric
        return self.method.model.metric(self.params) if in_metric else IDENTITY

    @property
    def bytes_down(self) -> int:
        """The statistics in full, or the quantised step that led to them."""
        return self.server.sent

    @property
    def bytes_anew(self) -> int:
        """The statistics in full, for a worker that missed steps."""
        return numbers_size(self.server.statistics)

    def fields(self) -> dict[str, Any]:
        """V_i and what is pending; of Algorithm 2, the pair (S_i, theta_ref) and its outer loop."""
        q = len(self.server.statistics)
        found = columns(q) | {"sent": np.zeros(q), "rate": np.array(0.0), "size": np.array(0)}
        if not isinstance(self.method.settings, VRFedEM):
            return found
        pair = {"estimate": np.zeros(q), "reference": np.zeros(q)}
        return found | pair | {"reference_round": np.array(-1), "outer": np.array(-1)}

    def answer(self, rows: RowsOfWorkers, workers: IntArray, states: States) -> Answers:
        """One round of some workers; what was sent before is sent again."""
        server = self.server
        lost = settle(states, server.counted[workers], server.generation)
        fresh = np.setdiff1d(np.flatnonzero(states["pending_at"] != server.round), lost)
        passes = np.zeros(len(workers), dtype=np.int64)
        if len(fresh) == len(workers) > 0:
            passes = self._sent(rows, workers, states)
        elif len(fresh):
            mine = {name: column[fresh] for name, column in states.items()}
            passes[fresh] = self._sent(rows, workers[fresh], mine)
            for name, column in mine.items():
                states[name][fresh] = column
        told = (workers, states["sent"], states["rate"], states["size"])
        found = Answers(*told, workers[:0], rows.totals[workers], passes)
        return replace(found.of(np.delete(workers, lost)), lost=workers[lost])

    def _sent(self, rows: RowsOfWorkers, workers: IntArray, states: States) -> IntArray:
        """Estimate, subtract S and V_i, compress, keep pending; return the rows evaluated."""
        server, settings = self.server, self.method.settings
        estimates, passes = self._estimates(rows, workers, states)  # line 5: S_i
        innovations = estimates - server.statistics - states["memory"]  # line 6: Delta_i
        if not np.isfinite(innovations).all():
            bad = int(workers[~np.isfinite(innovations).all(axis=1)][0])
            raise NumericalError(
                f"worker {bad}, round {server.round}: the E-step gave a number that is not finite."
            )
        operator: Compressor = Identity()  # memories begin exactly
        rate, metric = 1.0, IDENTITY
        if server.round:
            assert settings.memory_rate is not None
            operator, rate, metric = settings.compressor, settings.memory_rate, self.metric
        draws = operator.draws(innovations.shape[1])
        u = uniforms(self.method.seed, server.round, Purpose.COMPRESSION, workers, draws)
        values, sizes = _sent(operator, metric.whiten(innovations), u)
        states["sent"] = metric.unwhiten(values)  # line 7: Q(Delta_i)
        states["pending"] = rate * states["sent"]  # line 8: V_i, once it is counted
        states["pending_at"] = np.full(len(workers), server.round)
        states["rate"], states["size"] = np.full(len(workers), rate), sizes
        return passes

    def _estimates(
        self, rows: RowsOfWorkers, workers: IntArray, states: States
    ) -> tuple[FloatArray, IntArray]:
        """S_i, an unbiased estimate or that of SPIDER, and the rows that it takes."""
        settings, server = self.method.settings, self.server
        rows = rows.fresh(self.method.model, server.round, workers)
        if isinstance(settings, VRFedEM) and server.round:
            return self._spider(settings, rows, workers, states)
        latent = self._latent()
        if settings.batch_size is not None and server.round:
            return self._on_batch(rows, workers, self.params, latent)
        return self._full(rows, workers, latent)

    def _full(
        self, rows: RowsOfWorkers, workers: IntArray, latent: Latent | None = None
    ) -> tuple[FloatArray, IntArray]:
        """The mean over all rows of each worker."""
        model, params = self.method.model, self.params

        def mean(block: Any, weights: Any, which: IntArray, first: int) -> FloatArray:
            if latent is None:
                return model.expected_statistics(block, params, weights)
            return _simulated(model, params, partial(latent, workers[which]), block, weights, first)

        return np.asarray(rows.means(mean, workers)), rows.counts[workers]

    def _latent(self) -> Latent | None:
        """The uniforms of a simulated E-step, by worker and row; None: it is exact."""
        settings, model = self.method.settings, self.method.model
        draws = settings.simulations if isinstance(settings, FedEM) else None
        if draws is None:
            return None
        if not isinstance(model, SimulatesLatents):
            raise SettingsError(
                f"{type(model).__name__} has no E-step by simulation: leave simulations out."
            )
        size = draws * model.latent_size
        return partial(latent_uniforms, self.method.seed, self.server.round, size)

    def _on_batch(
        self, rows: RowsOfWorkers, workers: IntArray, params: Any, latent: Latent | None = None
    ) -> tuple[FloatArray, IntArray]:
        """The mean over a mini-batch of each worker."""
        model, settings = self.method.model, self.method.settings
        size, k, counts = settings.batch_size, self.server.round, rows.counts[workers]
        assert size is not None
        drawn = (workers, counts, size, settings.replacement)
        indices, weights = batch_indices(self.method.seed, k, *drawn)
        block = rows.take(workers, indices)
        passes = np.full(len(counts), size) if settings.replacement else np.minimum(counts, size)
        if latent is None:
            return model.expected_statistics(block, params, weights), passes
        u = latent(workers, 0, block.shape[1])
        assert isinstance(model, SimulatesLatents)  # or there would be no uniforms
        return model.simulated_statistics(block, params, u, weights), passes

    def _spider(
        self, settings: VRFedEM, rows: RowsOfWorkers, workers: IntArray, states: States
    ) -> tuple[FloatArray, IntArray]:
        """Algorithm 2, line 8; in the first round of an outer loop a full pass (line 20)."""
        k, n = self.server.round, len(workers)
        outer = (k - 1) // settings.inner_rounds
        new = (states["outer"] != outer) | (states["counted_at"] == NOT_COUNTED)
        estimates, passes = np.empty_like(states["estimate"]), np.zeros(n, dtype=np.int64)
        if new.any():
            estimates[new], passes[new] = self._full(rows, workers[new])
        old = np.flatnonzero(~new)
        if len(old):
            now, seen = self._on_batch(rows, workers[old], self.params)
            then, _ = self._on_batch(rows, workers[old], self._references(states, old))
            estimates[old], passes[old] = states["estimate"][old] + (now - then), 2 * seen
        states["estimate"], states["outer"] = estimates, np.full(n, outer)
        states["reference"] = np.tile(self.server.statistics, (n, 1))
        states["reference_round"] = np.full(n, k)
        return estimates, passes

    def _references(self, states: States, at: IntArray) -> Any:
        """theta_ref of each of these workers, worked out once for all that were asked together."""
        model = self.method.model
        told = np.unique(states["reference_round"][at], return_index=True, return_inverse=True)
        references = states["reference"][at[told[1]]]
        if len(references) == 1:
            return model.maximize(references[0])
        return model.maximize(references).take(np.ravel(told[2]))


def _simulated(
    model: Any, params: Any, latent: Any, block: Any, weights: Any, first: int
) -> FloatArray:
    """The E-step by simulation, some rows at a time: uniforms are never all there."""
    total, rows = np.zeros(()), block.shape[1]
    step = max(1, SIMULATED_ROWS // len(block))
    for start in range(0, rows, step):
        some = block[:, start : start + step, ...]
        count = some.shape[1]
        u = latent(first + start, count)
        if weights is None:
            total = total + count / rows * model.simulated_statistics(some, params, u)
            continue
        own = weights[:, start : start + step]
        share = (own.sum(axis=1) / weights.sum(axis=1))[:, None]
        own = np.where(share > 0, own, 1.0)  # of workers without rows here nothing counts
        total = total + share * model.simulated_statistics(some, params, u, own)
    return np.asarray(total)
