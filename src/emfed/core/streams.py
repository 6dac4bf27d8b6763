"""Randomness as a function of (seed, round, worker, purpose).

There is no generator object to carry around: every number is read from a fixed place of a
counter-based stream, so order, batching and restarts cannot change it, and both ends of a link
can derive the same number. The stream is Philox4x64-10 (Salmon et al., SC'11):

* key     = (seed, purpose * 2**48 + round)
* counter = worker * ceil(words / 4) + j // 4 + 1, of which word ``j % 4`` is the j-th word

numpy promises the raw stream of its bit generators (NEP 19), not the conversions of `Generator`;
the conversions below are therefore our own.

Decision: docs/decisions/015-randomness-by-address.md
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from emfed.core.errors import SettingsError, check_count
from emfed.core.protocols import FloatArray, IntArray

_ROUND_BITS = 48
"""Bits of an address that hold the round; the purpose has those above."""


class Purpose(IntEnum):
    """What a stream is for; part of its address, so streams never overlap."""

    PARTICIPATION = 1
    BATCH = 2
    COMPRESSION = 3
    START = 4
    FAULTS = 5
    DATA = 6
    BROADCAST = 7
    REORDERING = 8
    CRASHES = 9
    OPENING = 10
    PILOT = 11
    LATENT = 12
    HOLDOUT = 20
    GROUPING = 21
    IMPUTATION = 22
    SIMULATION = 23
    CELLS = 24
    FIELD_RECORDS = 25
    TESTING = 30
    COMPLETION = 31
    SAMPLE = 40
    CELLS_SPLIT = 41
    SEEDING = 42
    SKETCH = 44
    CLUSTERS = 45
    PROBE = 47
    NETWORK_FAULTS = 60


def check_seed(seed: int, name: str = "seed") -> int:
    """Return the seed, or say which values can be one."""
    number = check_count(name, seed, 0)
    if number >= 2**64:
        raise SettingsError(f"{name} must be below 2**64; got {number}.")
    return number


def words(
    seed: int, round_: int, purpose: Purpose, workers: IntArray, count: int
) -> NDArray[np.uint64]:
    """Raw 64-bit words, ``(len(workers), count)``; row r belongs to ``workers[r]``."""
    blocks = -(-count // 4)
    rows = len(workers)
    if rows == 0 or count == 0:
        return np.empty((rows, count), dtype=np.uint64)
    key = np.array([seed, (int(purpose) << _ROUND_BITS) + round_], dtype=np.uint64)
    low, high = int(workers.min()), int(workers.max())
    if high - low < 2 * rows:  # dense: one call over the whole range, then pick the rows
        stream = np.random.Philox(key=key, counter=low * blocks)
        block = stream.random_raw((high - low + 1) * blocks * 4).reshape(-1, blocks * 4)
        return (
            block[workers - low, :count]
            if high - low + 1 != rows
            else _reorder(block[:, :count], workers, low)
        )
    out = np.empty((rows, count), dtype=np.uint64)
    stream = np.random.Philox(key=key, counter=0)
    position = 0
    for row in np.argsort(workers, kind="stable"):
        target = int(workers[row]) * blocks
        if target < position:  # a repeated worker: read its place again
            stream = np.random.Philox(key=key, counter=0)
            position = 0
        if target > position:
            stream.advance(target - position)
        out[row] = stream.random_raw(blocks * 4)[:count]
        position = target + blocks
    return out


def word_source(
    seed: int, round_: int, purpose: Purpose, worker: int
) -> Callable[[int], NDArray[np.uint64]]:
    """Words without end, some at a time: for what draws as many as it happens to need.

    A worker's stream begins 2**96 blocks after that of the one before.
    """
    key = np.array([seed, (int(purpose) << _ROUND_BITS) + round_], dtype=np.uint64)
    stream = np.random.Philox(key=key, counter=worker << 96)
    return lambda count: np.asarray(stream.random_raw(count))


def _reorder(block: NDArray[np.uint64], workers: IntArray, low: int) -> NDArray[np.uint64]:
    return block if np.all(workers[1:] > workers[:-1]) else block[workers - low]


def to_uniforms(raw: NDArray[np.uint64]) -> FloatArray:
    """Words to doubles in [0, 1): the top 53 bits times 2**-53, exact on every platform."""
    return np.multiply(raw >> np.uint64(11), 2.0**-53, dtype=np.float64)


def uniforms(seed: int, round_: int, purpose: Purpose, workers: IntArray, count: int) -> FloatArray:
    """Uniform numbers in [0, 1), ``(len(workers), count)``."""
    return to_uniforms(words(seed, round_, purpose, workers, count))


def normals(seed: int, round_: int, purpose: Purpose, workers: IntArray, count: int) -> FloatArray:
    """Standard normal numbers by inversion, ``(len(workers), count)``."""
    return to_normals(words(seed, round_, purpose, workers, count))


def uniform_row(seed: int, round_: int, purpose: Purpose, count: int) -> FloatArray:
    """Uniform numbers of a stream that all share, ``(count,)``."""
    return to_uniforms(word_source(seed, round_, purpose, 0)(count))


def normal_row(seed: int, round_: int, purpose: Purpose, count: int) -> FloatArray:
    """Standard normal numbers of a stream that all share, ``(count,)``."""
    return to_normals(word_source(seed, round_, purpose, 0)(count))


def to_normals(raw: NDArray[np.uint64]) -> FloatArray:
    """Words to standard normal numbers by inversion."""
    from scipy.special import ndtri

    return np.asarray(ndtri(((raw >> np.uint64(12)) + 0.5) * 2.0**-52), dtype=np.float64)


def latent_uniforms(
    seed: int, round_: int, draws: int, workers: IntArray, first: int, count: int
) -> FloatArray:
    """Uniforms of simulated E-steps, ``(workers, count, draws)``: each row has a stream of its own.

    The stream of row j of worker i is that of "worker" i * 2**32 + j.
    """
    rows = first + np.arange(count, dtype=np.int64)
    parts = [
        uniforms(seed, round_, Purpose.LATENT, (int(worker) << 32) + rows, draws)
        for worker in workers
    ]
    return np.stack(parts) if parts else np.empty((0, count, draws))


def choose(uniform: FloatArray, bounds: IntArray) -> IntArray:
    """Indices drawn with replacement: ``floor(u * bound)``; bias below ``bound * 2**-53``."""
    return np.minimum((uniform * bounds[:, None]).astype(np.int64), bounds[:, None] - 1)


def choose_distinct(uniform: FloatArray, bounds: IntArray) -> IntArray:
    """Distinct indices below ``bounds``, one row each, by Floyd's algorithm (CACM 1987).

    ``uniform`` has one column per index; each row needs ``bounds[row] >= columns``. Every subset
    is equally likely. Rows whose first draws happen to be distinct need no repair, so the common
    case is one vectorised expression.
    """
    k = uniform.shape[1]
    top = bounds[:, None] - k + np.arange(k)  # Floyd: the j-th draw is from 0..top_j
    drawn = np.minimum((uniform * (top + 1)).astype(np.int64), top)
    ordered = np.sort(drawn, axis=1)
    for row in np.flatnonzero((ordered[:, 1:] == ordered[:, :-1]).any(axis=1)):
        seen: set[int] = set()
        fixed = []
        for value, last in zip(drawn[row].tolist(), top[row].tolist(), strict=True):
            pick = last if value in seen else value
            seen.add(pick)
            fixed.append(pick)
        drawn[row] = fixed
    return drawn
