"""FedEM and VR-FedEM, Algorithms 1 and 2 of the paper, as generators of gathers.

Lines in comments are those of Algorithm 1; Algorithm 2 has the same, with another estimate S_i.
Where the paper has 1/n ours has the weight w_i of each worker, and where it has one p each worker
has its own. T is not defined everywhere, as A3 has it: a step that would leave its domain is
halved. A worker adds Q(Delta_i) to V_i (line 8) when it learns that its message was counted, which
is the same where none is lost (`emfed.algorithms.memories`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, final

import numpy as np

from emfed.algorithms.base import CompressedEM
from emfed.algorithms.fed_em import FedEM
from emfed.algorithms.memories import NOT_COUNTED, columns, settle
from emfed.algorithms.steps import batch_indices, shorten, step_at
from emfed.algorithms.vr_fed_em import VRFedEM
from emfed.compressors import Identity
from emfed.core.protocols import Compressor, IdentityMetric, Model, Participation, SimulatesLatents
from emfed.core.streams import Purpose, latent_uniforms, uniforms
from emfed.core.sums import (
    Answers,
    FloatArray,
    Gather,
    Gathering,
    IntArray,
    RowsOfWorkers,
    States,
)
from emfed.core.wire import numbers_size, payload_sizes

SERVER = np.zeros(1, dtype=np.int64)
"""The stream of the broadcast."""


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
    """

    statistics: FloatArray
    memory: FloatArray
    counted: IntArray
    round: int = 1
    generation: int = 0
    sent: int = 0


def fed_em(
    model: Model,
    settings: CompressedEM,
    weights: FloatArray,
    start: FloatArray,
    rounds: int,
    participation: Participation,
    seed: int = 0,
) -> Gathering[Server]:
    """FedEM (Algorithm 1), or VR-FedEM (Algorithm 2) where the settings are `VRFedEM`.

    ``settings`` are resolved: every field has a value.
    """
    n = len(weights)
    first = 0 if settings.needs_start_round else 1
    server = Server(
        start, np.zeros_like(start), np.full(n, NOT_COUNTED), first, sent=numbers_size(start)
    )
    while server.round <= rounds:  # line 2
        k = server.round
        active = participation.draw(seed, k, n) if k else np.arange(n)  # line 3
        replies = yield Innovations(model, settings, server, active, seed)  # lines 4 to 11
        p = participation.probabilities(replies.workers, n) if k else np.ones(len(replies.workers))
        server = after(model, settings, server, replies, weights[replies.workers], p, seed)
    return server


def after(
    model: Model,
    settings: CompressedEM,
    server: Server,
    replies: Answers,
    weights: FloatArray,
    probabilities: FloatArray,
    seed: int,
) -> Server:
    """The server's side of a round: lines 13 to 17.

    A worker that was drawn and whose reply is missing counts as not drawn.
    """
    if len(replies.lost):
        none = np.full_like(server.counted, NOT_COUNTED)
        zero = np.zeros_like(server.memory)
        anew = server.generation + 1
        return replace(server, memory=zero, counted=none, round=server.round + 1, generation=anew)
    field_ = server.memory + (weights / probabilities) @ replies.values  # line 14: H
    moved, sent = server.statistics, 0
    if server.round:
        assert settings.step_size is not None
        gamma = step_at(settings.step_size, server.round)
        moved, sent = _moved(model, settings, server, gamma * field_, seed)  # line 15: S
    memory = server.memory + (weights * replies.rates) @ replies.values  # line 16: V
    counted = server.counted.copy()
    counted[replies.workers] = server.round
    return Server(moved, memory, counted, server.round + 1, server.generation, sent)


def _moved(
    model: Model, settings: CompressedEM, server: Server, step: FloatArray, seed: int
) -> tuple[FloatArray, int]:
    """S after a step inside the domain of T, compressed where it is broadcast, and its bytes."""
    if settings.broadcast is None:
        moved, _, _ = shorten(model, server.statistics, step)
        return moved, numbers_size(moved)
    q, metric = len(step), _metric(model, settings, server.statistics)
    u = uniforms(seed, server.round, Purpose.BROADCAST, SERVER, settings.broadcast.draws(q))
    values, sizes = _sent(settings.broadcast, metric.whiten(step[None]), u)
    moved, factor, _ = shorten(model, server.statistics, metric.unwhiten(values)[0])
    return moved, int(sizes[0]) + 1 if factor else 0


def _metric(model: Model, settings: CompressedEM, statistics: FloatArray) -> Any:
    """The metric that vectors are compressed in: the paper's is Euclidean."""
    return model.metric(model.maximize(statistics)) if settings.in_metric else IdentityMetric()


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

    model: Model
    settings: CompressedEM
    server: Server
    workers: IntArray
    seed: int
    purpose: str = field(default="round")

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
        found = columns(q) | {"rate": np.array(0.0)}
        if not isinstance(self.settings, VRFedEM):
            return found
        pair = {"estimate": np.zeros(q), "reference": np.zeros(q)}
        return found | pair | {"outer": np.array(-1)}

    def answer(self, rows: RowsOfWorkers, workers: IntArray, states: States) -> Answers:
        """One round of some workers; what was sent before is sent again."""
        server, q = self.server, len(self.server.statistics)
        lost = settle(states, server.counted[workers], server.generation)
        fresh = np.setdiff1d(np.flatnonzero(states["pending_at"] != server.round), lost)
        told = np.setdiff1d(np.arange(len(workers)), lost)
        sizes = np.zeros(len(workers), dtype=np.int64)
        values = np.zeros((len(workers), q))
        if len(fresh):
            mine = {name: column[fresh] for name, column in states.items()}
            values[fresh], sizes[fresh] = self._fresh(rows, workers[fresh], mine)
            for name, column in mine.items():
                states[name][fresh] = column
        again = np.setdiff1d(told, fresh)
        rates = states["rate"]
        values[again] = states["pending"][again] / np.where(rates > 0, rates, 1.0)[again, None]
        return Answers(workers[told], values[told], rates[told], sizes[told], workers[lost])

    def _fresh(
        self, rows: RowsOfWorkers, workers: IntArray, states: States
    ) -> tuple[FloatArray, IntArray]:
        server, settings = self.server, self.settings
        estimates = self._estimates(rows, workers, states)  # line 5: S_i
        innovations = estimates - server.statistics - states["memory"]  # line 6: Delta_i
        operator: Compressor = Identity()  # memories begin exactly
        rate, metric = 1.0, IdentityMetric()
        if server.round:
            assert settings.memory_rate is not None
            operator, rate = settings.compressor, settings.memory_rate
            metric = _metric(self.model, settings, server.statistics)
        draws = operator.draws(innovations.shape[1])
        u = uniforms(self.seed, server.round, Purpose.COMPRESSION, workers, draws)
        values, sizes = _sent(operator, metric.whiten(innovations), u)
        values = metric.unwhiten(values)  # line 7: Q(Delta_i)
        states["pending"] = rate * values  # line 8: V_i, once it is counted
        states["pending_at"] = np.full(len(workers), server.round)
        states["rate"] = np.full(len(workers), rate)
        return values, sizes

    def _estimates(self, rows: RowsOfWorkers, workers: IntArray, states: States) -> FloatArray:
        """S_i: an unbiased estimate, or that of SPIDER."""
        settings, server = self.settings, self.server
        if isinstance(settings, VRFedEM):
            return self._spider(settings, rows, workers, states)
        params, latent = self.model.maximize(server.statistics), self._latent()
        if settings.batch_size is not None and server.round:
            return self._on_batch(rows, workers, params, latent)
        if latent is None:
            return self._full(rows, workers, params)
        model = self.model
        assert isinstance(model, SimulatesLatents)

        def mean(block: Any, padding: Any, which: IntArray) -> FloatArray:
            u = latent(workers[which], 0, block.shape[1])
            return model.simulated_statistics(block, params, u, padding)

        return np.asarray(rows.means(mean, workers))

    def _full(self, rows: RowsOfWorkers, workers: IntArray, params: Any) -> FloatArray:
        def mean(block: Any, padding: Any, which: IntArray) -> FloatArray:
            return self.model.expected_statistics(block, params, padding)

        return np.asarray(rows.means(mean, workers))

    def _latent(self) -> Any:
        """The uniforms of a simulated E-step, by worker and row; None: it is exact."""
        draws = self.settings.simulations if isinstance(self.settings, FedEM) else None
        if draws is None:
            return None
        assert isinstance(self.model, SimulatesLatents)
        return partial(
            latent_uniforms, self.seed, self.server.round, draws * self.model.latent_size
        )

    def _on_batch(
        self, rows: RowsOfWorkers, workers: IntArray, params: Any, latent: Any = None
    ) -> FloatArray:
        """The mean over a mini-batch of each worker."""
        size, k = self.settings.batch_size, self.server.round
        assert size is not None
        counts = rows.counts[workers]
        indices, padding = batch_indices(
            self.seed, k, workers, counts, size, self.settings.replacement
        )
        block = rows.take(workers, indices)
        if latent is None:
            return self.model.expected_statistics(block, params, padding)
        assert isinstance(self.model, SimulatesLatents)
        u = latent(workers, 0, block.shape[1])
        return self.model.simulated_statistics(block, params, u, padding)

    def _spider(
        self, settings: VRFedEM, rows: RowsOfWorkers, workers: IntArray, states: States
    ) -> FloatArray:
        """Algorithm 2, line 8; in the first round of an outer loop a full pass (line 20)."""
        model, server = self.model, self.server
        params = model.maximize(server.statistics)
        outer = (server.round - 1) // settings.inner_rounds
        new = (states["outer"] != outer) | (states["counted_at"] == NOT_COUNTED)
        estimates = np.empty_like(states["estimate"])
        if new.any():
            estimates[new] = self._full(rows, workers[new], params)
        if not new.all():
            old = np.flatnonzero(~new)
            now = self._on_batch(rows, workers[old], params)
            references, which = np.unique(states["reference"][old], axis=0, return_inverse=True)
            if len(references) == 1:
                then = self._on_batch(rows, workers[old], model.maximize(references[0]))
            else:
                each = model.maximize(references).take(np.ravel(which))
                then = self._on_batch(rows, workers[old], each)
            estimates[old] = states["estimate"][old] + (now - then)
        if server.round:
            states["estimate"] = estimates
            states["reference"] = np.tile(server.statistics, (len(workers), 1))
            states["outer"] = np.full(len(workers), outer)
        return estimates
