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

import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Self, final

import numpy as np

from emfed.algorithms.auto import AutoEM
from emfed.algorithms.base import CompressedEM
from emfed.algorithms.em import EM
from emfed.algorithms.fed_em import FedEM
from emfed.algorithms.memories import NOT_COUNTED, columns, settle
from emfed.algorithms.steps import batch_indices, shorten, step_at
from emfed.algorithms.vr_fed_em import VRFedEM
from emfed.compressors import Identity, SubtractiveDithering
from emfed.core.errors import NumericalError, SettingsError, WireError
from emfed.core.protocols import (
    Algorithm,
    Compressed,
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
from emfed.core.wire import (
    decode_floats,
    decode_payload,
    encode_numbers,
    encode_payload,
    payload_sizes,
)

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
    patience : int or None
        Rounds in a row that a worker may miss before all memories begin again at zero, so that V
        has nothing of who is away; None: any number.
    """

    model: Model
    settings: CompressedEM
    participation: Participation
    workers: int
    rows: float
    seed: int = 0
    small: float = 0.0
    number: int = 0
    patience: int | None = None

    def late(self, server: Server, arrived: IntArray) -> bool:
        """Whether V holds the memory of a worker that has been away for too long.

        The more often memories have begun again the longer that is: where messages are lost by
        chance, some worker out of many misses a few rounds in a row all the time.
        """
        if self.patience is None or not len(arrived):
            return False
        missed = server.round - server.counted >= self.patience * (1 + server.generation)
        missed[arrived] = False
        return bool(missed[server.counted != NOT_COUNTED].any())


@final
@dataclass(frozen=True, eq=False)
class Server:
    """What the server says between rounds; V, the weighted sum of all V_i, it keeps to itself.

    Parameters
    ----------
    statistics : array of shape (q,)
        S.
    counted : array of int, shape (workers,)
        The last round in which each worker's message was counted; -1: none.
    round : int
        The number of the next round, from 1; 0: the exact uploads that memories start with.
    generation : int
        How often all memories have begun again at zero, because a worker had lost its own.
    calm : int
        Rounds in a row with a small |H|^2.
    last : LastSum, optional
        What the last round came to.
    """

    statistics: FloatArray
    counted: IntArray
    round: int = 1
    generation: int = 0
    calm: int = 0
    last: LastSum | None = None

    @classmethod
    def begun(cls, method: Method, start: FloatArray) -> Self:
        """The state before the first round."""
        none = np.full(method.workers, NOT_COUNTED)
        first = 0 if method.settings.needs_start_round else 1
        return cls(start, none, first)

    @property
    def converged(self) -> bool:
        """Whether |H|^2 has been small for long enough."""
        return self.calm >= SMALL_ROUNDS

    def arrays(self) -> dict[str, Any]:
        """All of it but what the last round came to."""
        numbers = np.array([self.round, self.generation, self.calm])
        return {"statistics": self.statistics, "counted": self.counted, "numbers": numbers}

    @classmethod
    def of(cls, arrays: Mapping[str, Any]) -> Self:
        """The inverse of `arrays`."""
        return cls(arrays["statistics"], arrays["counted"], *arrays["numbers"].tolist())


def compressed(algorithm: Algorithm) -> CompressedEM:
    """The settings of FedEM that are this algorithm, where rows come once; EM compresses nothing.

    A worker that does not answer then leaves its share of S as it is.
    """
    if isinstance(algorithm, EM):
        return FedEM(Identity(), step_size=1.0, memory_rate=0.0)
    if isinstance(algorithm, AutoEM):
        quantised = SubtractiveDithering(0.25)
        if algorithm.batch_size is None:
            return FedEM(quantised, in_metric=True)
        return VRFedEM(
            quantised,
            in_metric=True,
            batch_size=algorithm.batch_size,
            inner_rounds=algorithm.inner_rounds,
        )
    if not isinstance(algorithm, CompressedEM):
        name = type(algorithm).__name__
        raise SettingsError(f"{name} has no rounds in which workers are heard one by one.")
    return algorithm


def rounds(method: Method, server: Server) -> Unmasked[Server]:
    """FedEM (Algorithm 1), or VR-FedEM (Algorithm 2) where the settings are `VRFedEM`.

    They go on until |H|^2 is small or an exchange is refused.
    """
    n = method.workers
    while not server.converged:  # line 2
        k = server.round
        active = method.participation.draw(method.seed, k, n) if k else np.arange(n)  # line 3
        try:
            server = yield Innovations.asked(method, server, active)  # lines 4 to 17
        except Finish:
            return server
    yield Innovations.asked(method, server, NOBODY)  # who drives sees where the rounds have ended
    return server


@final
@dataclass(frozen=True)
class Step:
    """What a round says beside whom it counts, as it travels.

    Parameters
    ----------
    code : bytes
        The compressed step, or S where the broadcast is not compressed; empty: S stays.
    hits : int
        How often it was halved.
    squared, gain : float
        |H|^2 and what an EM step is worth; NaN where no round tells them.
    calm : int
        Rounds in a row with a small |H|^2.
    anew : bool
        Whether all memories begin again at zero.
    """

    code: bytes = b""
    hits: int = 0
    squared: float = np.nan
    gain: float = np.nan
    calm: int = 0
    anew: bool = False

    FORM = "<ddBB?"

    @property
    def factor(self) -> float:
        """What the step was shortened by."""
        return 0.5**self.hits if self.code else 0.0

    def encode(self) -> bytes:
        """The numbers, then the code."""
        about = (self.squared, self.gain, self.hits, self.calm, self.anew)
        return struct.pack(self.FORM, *about) + self.code

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """The inverse of `encode`."""
        size = struct.calcsize(cls.FORM)
        if len(data) < size:
            raise WireError(f"{len(data)} bytes cannot tell a round.")
        squared, gain, hits, calm, anew = struct.unpack(cls.FORM, data[:size])
        return cls(data[size:], hits, squared, gain, calm, anew)


def step_of(
    ask: Innovations, replies: Answers, memory: FloatArray | None
) -> tuple[Step, FloatArray]:
    """The server's side of a round, lines 13 to 17: what it says, and V.

    A worker that was drawn and whose reply is missing counts as not drawn, unless nobody replies:
    then nothing moves. Where one has lost its memory, or the server V, all begin at zero again.
    """
    method, server = ask.method, ask.server
    settings, k = method.settings, server.round
    if memory is None:
        return Step(anew=True), np.zeros_like(server.statistics)
    if len(ask.workers) and not len(replies.workers) and not len(replies.lost):
        return Step(), memory
    weights, p = replies.totals / method.rows, np.ones(len(replies.workers))
    if k:
        p = method.participation.probabilities(replies.workers, method.workers)
    values = replies.values if len(replies.workers) else np.zeros((0, len(memory)))
    field = memory + (weights / p) @ values  # line 14: H
    step = Step()
    if k:
        assert settings.step_size is not None
        gamma = step_at(settings.step_size, k)
        squared, gain = float(field @ field), np.nan
        if settings.in_metric:
            white = ask.metric.whiten(field)
            gain = float(white @ white) / 2
        code, hits = _moved(ask, gamma * field)  # line 15: S
        small = squared <= method.small and not hits
        calm = min(server.calm + 1, SMALL_ROUNDS) * (small and len(replies.workers) > 0)
        step = Step(code, hits, squared, gain, calm)
    memory = memory + (weights * replies.rates) @ values  # line 16: V
    if len(replies.lost) or method.late(server, replies.workers):
        step, memory = replace(step, anew=True), 0 * memory
    return step, memory


def _moved(ask: Innovations, step: FloatArray) -> tuple[bytes, int]:
    """The message of a step inside the domain of T, and how often it was halved.

    It has S, or the compressed step; nothing, where no part of it stays inside.
    """
    model, settings, here = ask.method.model, ask.method.settings, ask.server.statistics
    if settings.broadcast is None:
        moved, factor, hits = shorten(model, here, step)
        return encode_numbers(moved) if factor else b"", hits
    operator, q = settings.broadcast, len(step)
    u = ask.broadcast_uniforms
    message = operator.compress(ask.metric.whiten(step[None]), u).take(0)
    code = encode_payload(message, operator.form(q), _dither(operator, u, q))
    _, factor, hits = shorten(model, here, ask.broadcast_step(code))
    return code if factor else b"", hits


def _dither(operator: Compressor, u: FloatArray, q: int) -> FloatArray | None:
    dither = operator.dither(u, q)
    return None if dither is None else dither[0]


def _read(operator: Compressor, code: bytes, u: FloatArray, q: int) -> FloatArray:
    """The vector of a message."""
    message = decode_payload(code, operator.form(q), _dither(operator, u, q))
    stacked = Compressed(message.reals[None], message.symbols[None])
    return np.asarray(operator.decompress(stacked, u, q)[0])


@final
@dataclass(frozen=True, eq=False)
class _Sent:
    """Q of some vectors: the messages, and what says how they are read."""

    operator: Compressor
    message: Compressed
    u: FloatArray
    q: int

    @classmethod
    def of(cls, operator: Compressor, vectors: FloatArray, u: FloatArray) -> Self:
        """Compress."""
        return cls(operator, operator.compress(vectors, u), u, vectors.shape[-1])

    @property
    def values(self) -> FloatArray:
        """The vectors as they are decoded."""
        return self.operator.decompress(self.message, self.u, self.q)

    @property
    def sizes(self) -> IntArray:
        """The bytes of the messages."""
        form, dither = self.operator.form(self.q), self.operator.dither(self.u, self.q)
        return payload_sizes(self.message, form, dither)

    def encode(self, j: int) -> bytes:
        """One message."""
        dither = self.operator.dither(self.u, self.q)
        own = None if dither is None else dither[j]
        return encode_payload(self.message.take(j), self.operator.form(self.q), own)


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
    def broadcast_uniforms(self) -> FloatArray:
        """Of the message to everyone."""
        assert self.method.settings.broadcast is not None
        draws = self.method.settings.broadcast.draws(len(self.server.statistics))
        return uniforms(self.method.seed, self.server.round, Purpose.BROADCAST, SERVER, draws)

    def broadcast_step(self, code: bytes) -> FloatArray:
        """The step in the message to everyone, before it is shortened."""
        assert self.method.settings.broadcast is not None
        u, q = self.broadcast_uniforms, len(self.server.statistics)
        values = _read(self.method.settings.broadcast, code, u, q)
        return np.asarray(self.metric.unwhiten(values[None])[0])

    def concluded(
        self, answers: Answers, memory: FloatArray | None
    ) -> tuple[Server, bytes, FloatArray]:
        """The server after the round."""
        step, kept = step_of(self, answers, memory)
        code = step.encode()
        return self.told(code, answers.workers), code, kept

    def told(self, data: bytes, workers: IntArray) -> Server:
        """The same, as everyone knows it."""
        step, server = Step.decode(data), self.server
        moved = server.statistics
        if step.code and self.method.settings.broadcast is None:
            moved = decode_floats(step.code, len(moved))
        elif step.code:
            there = moved + step.factor * self.broadcast_step(step.code)
            moved = self.method.model.protect(moved, there)
        counted = server.counted.copy()
        counted[workers] = server.round
        generation = server.generation + step.anew
        last = LastSum(step.hits, np.inf, generation=server.generation)
        if server.round and np.isfinite(step.squared):
            assert self.method.settings.step_size is not None
            size = step.factor * step_at(self.method.settings.step_size, server.round)
            gain = step.gain if np.isfinite(step.gain) else None
            last = replace(last, squared=step.squared, gain=gain, step_size=size)
        if step.anew:
            counted = 0 * counted + NOT_COUNTED
        return Server(moved, counted, server.round + 1, generation, step.calm, last)

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
        return self._answered(rows, workers, states)[0]

    def encoded(
        self, rows: RowsOfWorkers, workers: IntArray, states: States
    ) -> tuple[Answers, list[bytes]]:
        """The same of workers that have not answered yet, with their messages."""
        found, sent = self._answered(rows, workers, states)
        if sent is None:
            return found, [b""] * len(found.workers)
        return found, [sent.encode(j) for j in range(len(found.workers))]

    def decoded(self, worker: int, data: bytes) -> tuple[FloatArray, float]:
        """Q(Delta_i)."""
        operator, rate, metric = self._operator
        q = len(self.server.statistics)
        u = self._uniforms(operator, np.array([worker]))
        return np.asarray(metric.unwhiten(_read(operator, data, u, q)[None])[0]), rate

    @property
    def _operator(self) -> tuple[Compressor, float, Metric]:
        """How workers compress, the rate of their memories, and in which metric."""
        settings = self.method.settings
        if not self.server.round:
            return Identity(), 1.0, IDENTITY  # memories begin exactly
        assert settings.memory_rate is not None
        return settings.compressor, settings.memory_rate, self.metric

    def _uniforms(self, operator: Compressor, workers: IntArray) -> FloatArray:
        draws = operator.draws(len(self.server.statistics))
        seed, k = self.method.seed, self.server.round
        return uniforms(seed, k, Purpose.COMPRESSION, workers, draws)

    def _answered(
        self, rows: RowsOfWorkers, workers: IntArray, states: States
    ) -> tuple[Answers, _Sent | None]:
        """What workers reply, and the messages of those that had not answered yet."""
        server = self.server
        lost = settle(states, server.counted[workers], server.generation)
        fresh = np.setdiff1d(np.flatnonzero(states["pending_at"] != server.round), lost)
        passes, sent = np.zeros(len(workers), dtype=np.int64), None
        if len(fresh) == len(workers) > 0:
            passes, sent = self._sent(rows, workers, states)
        elif len(fresh):
            mine = {name: column[fresh] for name, column in states.items()}
            passes[fresh], sent = self._sent(rows, workers[fresh], mine)
            for name, column in mine.items():
                states[name][fresh] = column
        told = (workers, states["sent"], states["rate"], states["size"])
        found = Answers(*told, workers[:0], rows.totals[workers], passes)
        return replace(found.of(np.delete(workers, lost)), lost=workers[lost]), sent

    def _sent(
        self, rows: RowsOfWorkers, workers: IntArray, states: States
    ) -> tuple[IntArray, _Sent]:
        """Estimate, subtract S and V_i, compress, keep pending; the rows and the messages."""
        server = self.server
        estimates, passes = self._estimates(rows, workers, states)  # line 5: S_i
        innovations = estimates - server.statistics - states["memory"]  # line 6: Delta_i
        if not np.isfinite(innovations).all():
            bad = int(workers[~np.isfinite(innovations).all(axis=1)][0])
            raise NumericalError(
                f"worker {bad}, round {server.round}: the E-step gave a number that is not finite."
            )
        operator, rate, metric = self._operator
        u = self._uniforms(operator, workers)
        sent = _Sent.of(operator, metric.whiten(innovations), u)
        states["sent"] = metric.unwhiten(sent.values)  # line 7: Q(Delta_i)
        states["pending"] = rate * states["sent"]  # line 8: V_i, once it is counted
        states["pending_at"] = np.full(len(workers), server.round)
        states["rate"], states["size"] = np.full(len(workers), rate), sent.sizes
        return passes, sent

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
