"""What the algorithms share: step sizes, mini-batches, the innovation, and the server's update."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import fsum
from typing import Any, final

import numpy as np

from emfed.algorithms import memory
from emfed.compressors import Identity
from emfed.core.errors import NumericalError, check_range
from emfed.core.messages import ENERGY_UNIT
from emfed.core.protocols import (
    Compressed,
    Compressor,
    FloatArray,
    Heard,
    IdentityMetric,
    IntArray,
    Lattice,
    Model,
    Replies,
    Request,
    ServerState,
    StepInfo,
    Task,
    WorkerStates,
)
from emfed.core.streams import Purpose, choose, choose_distinct, uniforms
from emfed.core.wire import decode_payload, encode_payload, floats_size, payload_sizes

logger = logging.getLogger(__name__)
_WORD = (1 << 64) - 1
StepSize = float | Callable[[int], float]
"""gamma: one number, or a function of the round (which counts from 1)."""

FULL_LOSS, FULL_SHARE = 1e-8, 1e-3
"""Nats per row that rounding may cost where statistics are told in full: a hundredth of the usual
tolerance, and a quarter of the bytes of 64-bit floats; and its square beside that of the move.
Where EM crawls, rounding of the first kind alone was as long as the steps, and hid where they led:
on a plateau of storms .018 nats were missed."""
_STEP_HINT = "EM itself is step 1; beyond 2 even a linear problem diverges."


@final
@dataclass(frozen=True)
class Decreasing:
    """A step that falls with the round k: first * (offset / (offset + k - 1)) ** power.

    Parameters
    ----------
    first : float
        The step of the first round.
    power : float
        How fast steps fall; online EM takes a power in (1/2, 1].
    offset : float
        After about so many rounds steps begin to fall.

    Examples
    --------
    >>> from emfed.algorithms import Decreasing
    >>> step = Decreasing(first=1.0, power=0.5, offset=1.0)
    >>> step(1), step(4)
    (1.0, 0.5)
    """

    first: float = 1.0
    power: float = 0.6
    offset: float = 10.0

    def __post_init__(self) -> None:
        check_range("Decreasing first", self.first, 0, 2, open_low=True, open_high=True)
        check_range("Decreasing power", self.power, 0, 1)
        check_range("Decreasing offset", self.offset, 0, np.inf, open_low=True)

    def __call__(self, round_: int) -> float:
        """The step of this round."""
        return float(self.first * (self.offset / (self.offset + round_ - 1)) ** self.power)


def check_step_size(step_size: StepSize) -> None:
    """Refuse a constant step outside (0, 2)."""
    if not callable(step_size):
        check_range("step_size", step_size, 0, 2, open_low=True, open_high=True, hint=_STEP_HINT)


def step_at(step_size: StepSize, round_: int) -> float:
    """gamma of a round, checked."""
    if not callable(step_size):
        return float(step_size)
    return check_range(
        f"step_size({round_})",
        step_size(round_),
        0,
        2,
        open_low=True,
        open_high=True,
        hint=_STEP_HINT,
    )


def describe_step(step_size: StepSize) -> Any:
    """A number, the settings of `Decreasing`, or a function's name and some of its values."""
    if isinstance(step_size, Decreasing):
        return {"first": step_size.first, "power": step_size.power, "offset": step_size.offset}
    if callable(step_size):
        name = getattr(step_size, "__qualname__", type(step_size).__qualname__)
        return {"function": name, "values": [float(step_size(k)) for k in (1, 2, 10, 100, 1000)]}
    return float(step_size)


@dataclass(frozen=True)
class Batch:
    """A mini-batch of each worker: rows, 0/1 weights where some only pad, and what it costs."""

    data: Any
    weights: FloatArray | None
    evaluations: IntArray


def draw_batch(task: Task, positions: IntArray, size: int, replacement: bool) -> Batch:
    """Local rows drawn at random; without replacement, a worker with too few takes them all."""
    request, oracle = task.request, task.oracle
    workers, counts = request.workers[positions], oracle.counts[positions]
    seed = task.seed if oracle.own_seed is None else oracle.own_seed
    indices, weights = batch_indices(seed, request.round, workers, counts, size, replacement)
    cost = np.full(len(counts), size) if replacement else np.minimum(counts, size)
    return Batch(oracle.take(indices, positions), weights, cost)


def batch_indices(
    seed: int, round_: int, workers: IntArray, counts: IntArray, size: int, replacement: bool
) -> tuple[IntArray, FloatArray | None]:
    """Row indices ``(workers, b)``, and 0/1 weights if some workers have fewer rows than others."""
    if replacement:
        return choose(uniforms(seed, round_, Purpose.BATCH, workers, size), counts), None
    width = min(size, int(counts.max()))
    indices = np.broadcast_to(np.arange(width), (len(workers), width)).copy()
    large = np.flatnonzero(counts > size)
    if len(large):
        u = uniforms(seed, round_, Purpose.BATCH, workers[large], size)
        indices[large] = choose_distinct(u, counts[large])
    if np.all(counts >= width):
        return indices, None
    real = np.arange(width) < counts[:, None]
    return np.where(real, indices, 0), real.astype(np.float64)


@dataclass(frozen=True)
class Channel:
    """How an innovation leaves a worker."""

    compressor: Compressor
    memory_rate: float | None
    """alpha; None takes the operator's, message by message."""
    in_metric: bool
    """Whether vectors are compressed in the model's metric; the paper compresses in the Euclidean
    one."""

    def uniforms(
        self, seed: int, round_: int, purpose: Purpose, workers: IntArray, q: int
    ) -> FloatArray:
        """The randomness of these workers' messages."""
        return uniforms(seed, round_, purpose, workers, self.compressor.draws(q))


@dataclass(frozen=True)
class Sent:
    """A batch of vectors as both ends know them after they were sent."""

    values: FloatArray
    rates: FloatArray
    sizes: IntArray
    """Payload bytes of each, if they are counted."""
    payload: bytes = b""
    """The payload itself, where the request asks for bytes: then there is one vector."""
    energies: FloatArray | None = None
    """What `to_lattice` tells of their lengths."""


def hold_upload(
    task: Task, channel: Channel, fresh: IntArray, targets: FloatArray, evaluations: IntArray
) -> WorkerStates:
    """Delta_i, what V_i lacks of its target, compressed and pending (Algorithm 1, lines 7 to 9).

    The target is S_i - S, or whatever else the memories are to follow.
    """
    model, seed, request = task.model, task.seed, task.request
    workers = request.workers[fresh]
    innovations = targets - task.states["memory"][fresh]
    if not np.isfinite(innovations).all():
        bad = int(workers[~np.isfinite(innovations).all(axis=1)][0])
        words = f"worker {bad}, round {request.round}: the E-step gave a number that is not finite."
        if request.lattice is None or not request.encode:
            raise NumericalError(words)
        # A masked site that refused would tell that a row of its own is beyond some bound.
        logger.error("%s Random numbers take its place in the masked sum, which is lost.", words)
    if request.lattice is not None:
        sent = to_lattice(model, seed, request, fresh, innovations)
    else:
        channel = _channel_of(channel, request)
        purpose = Purpose.COMPRESSION
        sent = transmit(model, channel, seed, request, purpose, workers, innovations)
    kept = (sent.values, sent.rates, evaluations, sent.sizes, sent.energies)
    states = memory.hold(task.states, fresh, request.round, *kept)
    if not request.encode:
        return states
    return states | {"payload": np.frombuffer(sent.payload, dtype=np.uint8)[None]}


SETTLED_BITS = 34
"""Binary digits of S at which masked answers are worked out. Sites that followed quantised steps on
machines of their own differ from the 50th on, and in the 34th hardly ever."""


def settled(statistics: FloatArray) -> FloatArray:
    """S to so many digits that all workers have the same, whichever way they were told.

    Masks depend on every digit of it, and answers on no other: a worker that was told slightly
    different statistics would else have an answer of its own in the sum.
    """
    digits, powers = np.frexp(statistics)
    # Where numbers of few binary digits, as steps lead to, are far from the places of the cuts.
    whole = np.floor(np.ldexp(digits, SETTLED_BITS) + 0.381966)
    return np.asarray(np.ldexp(whole, powers - SETTLED_BITS))


def to_lattice(
    model: Model, seed: int, request: Request, fresh: IntArray, vectors: FloatArray
) -> Sent:
    """Vectors rounded to the common lattice, weights folded in; payloads are integers, unmasked.

    The last four of them are the squared length of what was rounded, in units of the lattice, and
    `wrap_check`, in two words each. Nothing is clipped: a server that names a narrow lattice would
    have all workers clipped but one, and read that one off the sum. Modulo a power of two a sum is
    still a sum. Vectors that are not finite are random numbers in it, so that it shows no room.
    """
    lattice, q = request.lattice, vectors.shape[-1]
    assert lattice is not None
    assert request.weights is not None
    metric, weights = model.metric(request.params), request.weights[fresh][:, None]
    u = uniforms(seed, request.round, Purpose.COMPRESSION, request.workers[fresh], q)
    lost = np.logical_not(np.isfinite(vectors).all(axis=1))
    scaled = metric.whiten(np.where(lost[:, None], 0.0, vectors)) * (weights / lattice.step)
    symbols = np.floor(scaled + u)
    values = metric.unwhiten((symbols - (u - 0.5)) * lattice.step) / weights
    energies = np.ceil((scaled**2).sum(axis=1) / (q * ENERGY_UNIT))
    rates, sizes = np.full(len(fresh), lattice.rate), np.full(len(fresh), lattice_size(lattice, q))
    if not request.encode:
        return Sent(values, rates, sizes, energies=energies)
    words, high = _modular(symbols), np.floor(energies / 2.0**64)
    checks = [wrap_check(map(int, np.nan_to_num(row).tolist()), lattice) for row in symbols]
    split = np.array([(c & _WORD, c >> 64) for c in checks], dtype=np.uint64).view(np.int64)
    told = np.column_stack([words, _modular(energies), _modular(high), split])
    told[lost] = np.frombuffer(os.urandom(told[lost].nbytes), np.int64).reshape(told[lost].shape)
    return Sent(values, rates, sizes, told.tobytes(), energies)


def split_upload(words: IntArray) -> tuple[IntArray, int, int]:
    """Symbols, squared length and `wrap_check` of one worker's payload."""
    low, high, check, more = words[-4:].view(np.uint64).tolist()
    return words[:-4], low + (high << 64), check + (more << 64)


def _modular(numbers: FloatArray) -> IntArray:
    """Whole numbers of any size modulo 2^64, exactly; the sign is that of a machine word."""
    left = np.nan_to_num(np.fmod(numbers, 2.0**64))
    left = np.where(left >= 2.0**63, left - 2.0**64, left)
    return np.asarray(np.where(left < -(2.0**63), left + 2.0**64, left).astype(np.int64))


def check_bits(lattice: Lattice) -> int:
    """Bits of `wrap_check`: a sum that wrapped is off by a multiple of 2^bits, which 64 less show.

    So 40 bits at least tell it. With 64 for every lattice and consecutive odd weights, a sum of two
    symbols of 62 bits that both wrapped once passed: 1 + 3 is 0 modulo 4.
    """
    return 64 if lattice.bits <= 24 else 128


def wrap_check(symbols: Iterable[int], lattice: Lattice) -> int:
    """A weighted sum of whole numbers of any size, modulo 2^`check_bits`.

    It is linear, so the server learns nothing by it but whether the sum of all workers' words had
    room: the check of the sum is then the sum of the checks.
    """
    total = sum(weight * symbol for weight, symbol in zip(_check_weights(), symbols, strict=False))
    return total % (1 << check_bits(lattice))


def _check_weights() -> Iterator[int]:
    """Odd numbers of 64 bits without a pattern, by which wraps might cancel: splitmix64's."""
    state = 0
    while True:
        state = (state + 0x9E3779B97F4A7C15) & _WORD
        z = ((state ^ state >> 30) * 0xBF58476D1CE4E5B9) & _WORD
        z = ((z ^ z >> 27) * 0x94D049BB133111EB) & _WORD
        yield (z ^ z >> 31) | 1


def held(model: Model, seed: int, request: Request, replies: Replies) -> Replies:
    """What a server learns of workers' uploads in a simulation: nothing, if their sum has no room.

    Where the network finds it out by `wrap_check`, the numbers themselves tell it here.
    """
    lattice, workers = request.lattice, replies.workers
    if lattice is None or not len(workers) or replies.energies is None:
        return replies
    assert request.weights is not None
    weights = request.weights[np.searchsorted(request.workers, workers)]
    total = model.metric(request.params).whiten(weights @ replies.values) / lattice.step
    half = 2.0 ** (lattice.bits - 1)
    if np.abs(total).max(initial=0.0) + len(workers) < half:
        return replies
    u = uniforms(seed, request.round, Purpose.COMPRESSION, workers, len(total))
    whole = np.rint(total + (u - 0.5).sum(axis=0))
    if (whole < half).all() and (whole >= -half).all():
        return replies
    return no_room(request, len(total), fsum(replies.energies), replies.lost_memory)


def no_room(request: Request, q: int, energy: float, lost: IntArray) -> Replies:
    """A round whose sum had no room: nobody was heard, and the next lattice is wide enough."""
    return replace(
        Replies.empty(q), lost_memory=lost, energies=np.empty(0), overflow=max(energy, 1.0)
    )


def from_lattice(
    model: Model, seed: int, request: Request, workers: IntArray, total: IntArray
) -> FloatArray:
    """sum w_i Q_i, from the sum of what these workers told."""
    lattice = request.lattice
    assert lattice is not None
    u = uniforms(seed, request.round, Purpose.COMPRESSION, workers, len(total))
    values = (total - (u - 0.5).sum(axis=0)) * lattice.step
    return np.asarray(model.metric(request.params).unwhiten(values))


def lattice_size(lattice: Lattice, q: int) -> int:
    """Bytes of a masked upload: symbols, their length, and the checks of room and of masks."""
    return -(-q * lattice.bits // 8) + 24 + check_bits(lattice) // 8


def energy_of(
    request: Request, replies: Replies, state: ServerState, white: FloatArray
) -> dict[str, FloatArray]:
    """What `next_lattice` must know of this round; of a round that told nothing, what was before.

    ``white`` is the sum that was told, in the metric. ``innovation`` is sum |w_i Delta_i|^2, and
    ``room`` what the next lattice has for a sum, as a multiple of the standard deviation of a
    symbol times the number of workers. A single coordinate may be most of an innovation: room is
    made for twice the largest, and after a sum without room for all of it in one coordinate.
    """
    lattice = request.lattice
    # Exactly, as the network adds them up in integers.
    told = replies.overflow or (0.0 if replies.energies is None else fsum(replies.energies))
    if lattice is None or not told > 0 or request.kind == "start":
        return {n: a for n, a in state.extras.items() if n in ("innovation", "room", "growth")}
    q, n = len(state.statistics), len(request.workers)
    total = float(told) * q * ENERGY_UNIT
    deviation = max(1.0, float(np.sqrt(total / (n * q))))
    needed = 2 * np.sqrt(q)
    if not replies.overflow:
        needed = 2 * float(np.abs(white).max(initial=0.0)) / (lattice.step * n * deviation)
    room = max(ROOM, needed, ROOM_KEPT * float(state.extras.get("room", ROOM)))
    length = np.array(total * lattice.step**2)
    return {"innovation": length, "room": np.array(room), "growth": np.zeros(())}


def _energy(model: Model, state: ServerState, heard: Heard) -> dict[str, FloatArray]:
    request, replies = heard.request, heard.replies
    if request.lattice is None:
        return energy_of(request, replies, state, state.memory)
    white = model.metric(request.params).whiten(heard.weights @ replies.values)
    return energy_of(request, replies, state, white)


def foreseen(
    model: Model, state: ServerState, moved: Moved, share: float, extras: Mapping[str, FloatArray]
) -> dict[str, FloatArray]:
    """Bits by which the next innovations will be longer than the last, so that there is room.

    Innovations follow S: sum |w_i Delta_i|^2 is about ``share``, the sum of w_i^2, times |move|^2
    in the metric of the next round, or the part of it (``response``) that answered the last move.
    That metric may be another by far in the first rounds, and a bold step is hundreds of times as
    long as the one before. Without this 60 of 1,443 rounds of 36 masked fits were made again, one
    after each bold step; with it none of 1,373.
    """
    told, before = float(extras.get("innovation", 0.0)), float(extras.get("foreseen", 0.0))
    response = min(1.0, told / before) if before > 0 else float(extras.get("response", 1.0))
    metric = model.metric(model.maximize(moved.statistics))
    white = metric.whiten(moved.statistics - state.statistics)
    ahead = share * float(white @ white)
    growth = np.log2(max(response * ahead / told, 1.0)) / 2 if told > 0 else 0.0
    found = {"foreseen": ahead, "response": response, "growth": np.ceil(min(growth, MOST_BITS))}
    return {name: np.array(value) for name, value in found.items()}


def lattice_noise(request: Request) -> float:
    """The variance of H's noise in each coordinate of the metric: everybody's roundings."""
    assert request.lattice is not None
    return len(request.workers) / 12 * request.lattice.step**2


def next_lattice(
    state: ServerState, workers: int, noise: float, most: float, rate: float | None
) -> Lattice:
    """The lattice of the next round: its noise is a share of the last innovations, within a bound.

    ``most`` bounds the noise of H in all, summed over coordinates in the metric. In the first round
    nobody knows how long innovations are, and the lattice is fine and wide.
    """
    q, known = len(state.statistics), state.extras.get("innovation")
    if known is None or not float(known) > 0:
        step = min(2.0**-16, float(np.sqrt(12 * most / (workers * q))))
        return Lattice(step, 40, 1.0 if rate is None else rate)
    total = min(noise * float(known), most)
    step = max(float(np.sqrt(12 * total / (workers * q))), 2.0**-60)
    alpha = 1 / (1 + total / float(known)) if rate is None else rate
    deviation = np.sqrt(float(known) / (workers * q)) / step
    least = int(np.ceil(float(state.extras.get("room", ROOM)) * max(deviation, 1.0)))
    bits = int(2 * workers * least + 1).bit_length()
    coarser = max(0, bits - MOST_BITS)
    more = int(state.extras.get("growth", 0))
    return Lattice(step * 2.0**coarser, min(bits - coarser + more, MOST_BITS), alpha)


MOST_BITS = 62
"""Bits of a number of a lattice, so that sums are machine integers: one that would need more is
coarser."""
ROOM, ROOM_KEPT = 5.0, 0.7
"""Standard deviations of a symbol, times the workers, that the lattice has room for at least, and
the part of more room that the next round keeps. A sum without room costs a round. With 5 alone a
masked run on Beijing's air (full covariances) had no room for two of 3,960 numbers, which were most
of the innovation."""


def _channel_of(channel: Channel, request: Request) -> Channel:
    """In the start round h_i(S_0) itself goes up, as floats."""
    return Channel(Identity(), 1.0, False) if request.kind == "start" else channel


def read_upload(
    model: Model,
    channel: Channel,
    seed: int,
    request: Request,
    evaluations: int,
    payload: bytes,
) -> Replies:
    """The inverse of `hold_upload` for the one worker of a request: what the server reads."""
    channel, workers = _channel_of(channel, request), request.workers
    sent = receive(model, channel, seed, request, Purpose.COMPRESSION, workers, payload)
    return Replies(
        workers=request.workers,
        rounds=np.array([request.round]),
        values=sent.values,
        rates=sent.rates,
        evaluations=np.array([evaluations]),
        bytes_up=np.array([len(payload)]),
    )


def transmit(
    model: Model,
    channel: Channel,
    seed: int,
    request: Request,
    purpose: Purpose,
    streams: IntArray,
    vectors: FloatArray,
) -> Sent:
    """Compress and send a batch of vectors."""
    q, operator = vectors.shape[-1], channel.compressor
    metric = model.metric(request.params) if channel.in_metric else IdentityMetric()
    u = channel.uniforms(seed, request.round, purpose, streams, q)
    message = operator.compress(metric.whiten(vectors), u)
    values = metric.unwhiten(operator.decompress(message, u, q))
    rates = _rates(channel, message, u, q)
    form, dither = operator.form(q), operator.dither(u, q)
    if request.encode:
        payload = encode_payload(message.take(0), form, None if dither is None else dither[0])
        return Sent(values, rates, np.array([len(payload)]), payload)
    if not request.count_bytes:
        return Sent(values, rates, np.zeros(len(vectors), dtype=np.int64))
    return Sent(values, rates, payload_sizes(message, form, dither))


def _rates(channel: Channel, message: Compressed, u: FloatArray, q: int) -> FloatArray:
    if channel.memory_rate is None:
        return channel.compressor.rate(message, u, q)
    return np.full(len(message.reals), channel.memory_rate)


def receive(
    model: Model,
    channel: Channel,
    seed: int,
    request: Request,
    purpose: Purpose,
    streams: IntArray,
    payload: bytes,
) -> Sent:
    """One vector from the payload that `transmit` made of it."""
    q, operator = len(request.statistics), channel.compressor
    u = channel.uniforms(seed, request.round, purpose, streams, q)
    dither = operator.dither(u, q)
    message = decode_payload(payload, operator.form(q), None if dither is None else dither[0])
    metric = model.metric(request.params) if channel.in_metric else IdentityMetric()
    whole = Compressed(message.reals[None], message.symbols[None].astype(np.int32))
    values = metric.unwhiten(operator.decompress(whole, u, q))
    rates = _rates(channel, whole, u, q)
    return Sent(values, rates, np.array([len(payload)]))


SERVER = np.zeros(1, dtype=np.int64)
"""The stream of the broadcast."""


def follow(
    model: Model, channel: Channel, seed: int, round_: int, statistics: FloatArray, step: bytes
) -> FloatArray:
    """S after a round from S before it: a worker's side of the broadcast in `advance`."""
    if not step:
        return statistics
    params = model.maximize(statistics) if channel.in_metric else None
    request = Request(round_, 0, "round", statistics, params, SERVER, SERVER)
    sent = receive(model, channel, seed, request, Purpose.BROADCAST, SERVER, step[1:])
    return model.protect(statistics, statistics + 0.5 ** step[0] * sent.values[0])


@dataclass(frozen=True)
class Moved:
    """Where a step led: the statistics, by which factor it was shortened, and what it costs."""

    statistics: FloatArray
    factor: float
    hits: int
    sent: int = 0
    """Bytes of the broadcast, with one for how often the guard halved the step."""
    wire: bytes = b""


def move_by(
    model: Model,
    seed: int,
    state: ServerState,
    request: Request,
    move: FloatArray,
    broadcast: Channel | None,
) -> Moved:
    """Move S inside the domain.

    With a broadcast channel the step itself is compressed, and S moves by what workers will decode:
    S is then known to them exactly, and there is no second memory to keep.
    """
    if broadcast is None:
        return Moved(*shorten(model, state.statistics, move))
    sent = transmit(model, broadcast, seed, request, Purpose.BROADCAST, SERVER, move[None])
    statistics, factor, hits = shorten(model, state.statistics, sent.values[0])
    if factor == 0:  # nothing moved, and nothing is sent
        return Moved(statistics, factor, hits)
    wire = bytes([hits]) + sent.payload if sent.payload else b""
    return Moved(statistics, factor, hits, int(sent.sizes[0]) + 1, wire)


def rounded_statistics(model: Model, statistics: FloatArray, loss: float) -> FloatArray:
    """Statistics on a grid so coarse that telling them takes few bytes, and no fit cares.

    The error is worth ``loss`` nats at most. Where no grid serves (the domain is narrow there) they
    stay as they are.
    """
    metric = model.metric(model.maximize(statistics))
    for exponent in range(4, 30):
        coarse = np.rint(statistics * 2.0**exponent) * 0.5**exponent + 0.0  # no -0
        white = metric.whiten(coarse - statistics)
        if float(white @ white) / 2 <= loss and model.inside(coarse):
            return np.asarray(coarse)
    return statistics


def in_full(
    model: Model,
    statistics: FloatArray,
    request: Request,
    factor: float,
    hits: int,
    loss: float = FULL_LOSS,
) -> Moved:
    """A move that no step tells: a step longer than the statistics makes them be sent instead."""
    statistics = rounded_statistics(model, statistics, loss)
    size = floats_size(len(statistics)) + 1
    return Moved(statistics, factor, hits, size, bytes(size) if request.encode else b"")


def move_in_full(model: Model, state: ServerState, request: Request, move: FloatArray) -> Moved:
    """`move_by` without noise: for moves so long that the finest step would be a coarse one."""
    statistics, factor, hits = shorten(model, state.statistics, move)
    white = model.metric(request.params).whiten(statistics - state.statistics)
    loss = min(FULL_LOSS, FULL_SHARE * float(white @ white) / 2)
    return in_full(model, statistics, request, factor, hits, loss)


def advance(
    model: Model,
    seed: int,
    state: ServerState,
    heard: Heard,
    step: float,
    broadcast: Channel | None = None,
    gauge: bool = False,
) -> tuple[ServerState, StepInfo]:
    """H = V + sum (w_i / p_i) Q_i, S += gamma H, V += sum w_i alpha_i Q_i (Algorithm 1, 14-16).

    A chosen worker that did not answer counts as not drawn: its term is absent and p_i is not
    corrected. Its memory is where it was on both sides, so the fixed point stays h = 0. V moves
    even when the guard shortens the step.

    Not as printed: the paper has w_i = 1/n and one p for all workers, everyone who is drawn
    answers, and T is defined everywhere (A3), so that it needs no guard.
    """
    request, replies, weights = heard.request, heard.replies, heard.weights
    probabilities = heard.probabilities
    if request.kind == "start":  # V_i = h_i(S_0); S does not move
        probabilities, step = np.ones(len(weights)), 0.0
    mean_field = state.memory + (weights / probabilities) @ replies.values
    moved = Moved(state.statistics, 1.0, 0)
    if step:
        moved = move_by(model, seed, state, request, step * mean_field, broadcast)
    new = replace(
        state,
        round=state.round + 1,
        statistics=moved.statistics,
        memory=state.memory + (weights * replies.rates) @ replies.values,
        extras={**state.extras, **_energy(model, state, heard)},
    )
    gain = worth(model, request, mean_field) if gauge and step else None
    return new, StepInfo(
        float(mean_field @ mean_field),
        moved.factor * step,
        moved.hits,
        moved.sent,
        moved.wire,
        gain,
    )


def worth(model: Model, request: Request, mean_field: FloatArray) -> float:
    """What an EM step is worth, in nats per sample and to second order: |H|^2 / 2 in the metric."""
    white = model.metric(request.params).whiten(mean_field)
    return float(white @ white) / 2


def shorten(
    model: Model, statistics: FloatArray, move: FloatArray
) -> tuple[FloatArray, float, int]:
    """Where the move leads inside the model's domain, the factor it was shortened by, and halvings.

    The domain is open and the statistics are inside, so halving ends; once inside, one more
    halving keeps a distance from the boundary. What the model can keep alive by itself (a mixture:
    a component that explains less than one sample) does not hold up the rest. A move so hostile
    that 2**-60 of it still leaves the domain is not made at all.
    """
    with np.errstate(all="ignore"):  # outside the domain, numbers may be anything
        for hits in range(61):
            factor = 0.5**hits
            after = model.protect(statistics, statistics + factor * move)
            if model.inside(after):
                break
        else:
            return statistics, 0.0, 61
        if hits:
            closer = model.protect(statistics, statistics + factor / 2 * move)
            if model.inside(closer):
                return closer, factor / 2, hits + 1
    return after, factor, hits
