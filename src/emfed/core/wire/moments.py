"""Means and second moments in few bits: what a worker tells of its rows before the first round.

Numbers are rounded in units of the worker's own spread. Variances go as logarithms, means in
standard deviations, products of columns as correlations, all on one grid with a step of 2^-e. The
step follows from what an error may cost: a tied covariance S + D in place of S costs |D|^2 / 4
nats a row, D in the metric of S, so the squared errors of a worker's numbers add up to at most the
``loss`` that it is told, in the metric of its own correlations. S may be far narrower than all rows
(clusters far apart, outliers, columns with few values), and then D is that much more: few workers,
whose bytes are few anyway, tell numbers that stay in the model so finely that it does not matter.
Where squares alone are told they only make a common frame, which no answer depends on, and a step
of 2^-6 does.

Rounding is random, so that errors of many workers average out, and its random numbers follow from
the summary itself: a worker says the same each time, wherever it runs. What is not a mean and
positive variances goes as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np

from emfed.core.errors import WireError
from emfed.core.protocols import BoolArray, FloatArray, IntArray
from emfed.core.streams import Purpose, uniforms
from emfed.core.wire.entropy import code_sizes, decode_symbols, encode_symbols
from emfed.core.wire.messages import count_sizes, decode_count, encode_count, fingerprint
from emfed.core.wire.payload import decode_floats, encode_floats, floats_size

FEWEST = 32
"""Numbers from which on a summary is rounded: of fewer there is little to save."""
MOST = 1 << 20
"""Numbers up to which it is: a few bytes must not make a receiver take much memory."""
_FRAME_STEP, _FINEST_STEP = 6, 40
"""Exponents of the step, as negative powers of two: that of a frame, and the finest."""
_CODED, _LARGEST = 192, 2**30
"""The first byte of a rounded summary, and the largest multiple of a step that is told."""
_MANY, _NARROW = 10, 0.3
"""Workers from which on their loss is common, and the least variance for which a step is chosen
then. Not tuned: a larger first number means finer summaries of few workers."""
LOSS, FEW_LOSS, FEW = 1e-6, 1e-14, 75
"""Squared errors that the combined summary may have: about a millionth of a nat, as the tied
covariances of `python -m benchmarks answer` are half as wide as those of all rows. Where it stays a
part of the model and workers are few, the second, which takes 13 bits more a number: with 1e-6 a
tied mixture of nine columns (statsmodels' randhie, K=8) stopped 4.2 nats below its best, at a
covariance that the rows did not have."""


def whole_loss(workers: int, lasting: bool) -> float:
    """What the combined summary of so many may have; ``lasting`` ones stay a part of the model."""
    return FEW_LOSS if lasting and workers < FEW else LOSS


def worker_loss(workers: int, lasting: bool = False) -> float:
    """What each of so many may add: errors average out, though weights may be very unequal."""
    return round(min(workers, 10 * _MANY) * whole_loss(workers, lasting), 17)


def _width(count: int, dimension: int) -> int | None:
    """How many products or squares go with a mean of this dimension, None if it cannot be."""
    left = count - dimension
    return left if left in (dimension, dimension * (dimension + 1) // 2) else None


def _worth(count: int, d: int, loss: float) -> bool:
    """Whether a summary is rounded."""
    return loss > 0 and FEWEST <= count <= MOST and _width(count, d) is not None


def _diagonal(d: int) -> IntArray:
    """Where the squares lie among the products of columns, the upper triangle by rows."""
    return np.concatenate([[0], np.cumsum(np.arange(d, 1, -1))])


@final
@dataclass(frozen=True)
class _Rounded:
    """Rows of symbols: logarithms of variances, means, correlations; and the steps' exponents."""

    d: int
    exponents: IntArray
    symbols: IntArray
    exact: BoolArray
    """Rows that cannot be rounded."""

    @property
    def groups(self) -> list[IntArray]:
        return np.split(self.symbols, [self.d, 2 * self.d], axis=1)

    def values(self) -> FloatArray:
        """Means and second moments again."""
        step = 0.5 ** self.exponents[:, None]
        logs, means, rest = (group * step for group in self.groups)
        spread = np.exp2(logs / 2)
        second = spread * spread
        if rest.shape[1]:
            rows, columns = np.triu_indices(self.d)
            whole = np.ones((len(rest), len(rows)))
            whole[:, rows != columns] = rest
            second = whole * spread[:, rows] * spread[:, columns]
        return np.concatenate([means * spread, second], axis=1)

    def sizes(self) -> IntArray:
        """Bytes of each row as `encode_moments` makes it."""
        total = np.full(len(self.symbols), 2 + int(count_sizes(np.array(self.d))))
        for group in self.groups:
            bits = _bits(group)
            for number in np.unique(bits):
                same = np.flatnonzero(bits == number)
                code = code_sizes(group[same].astype(np.int32), 1 << int(number), None)
                total[same] += 1 + count_sizes(code) + code
        return np.where(self.exact, floats_size(self.symbols.shape[1]), total)


def _bits(symbols: IntArray) -> IntArray:
    """The smallest power of two that bounds each row's symbols."""
    largest = np.abs(symbols).max(axis=1, initial=0)
    return np.ceil(np.log2(np.maximum(largest, 1))).astype(np.int64)


def _round(values: FloatArray, d: int, loss: float, at_random: bool) -> _Rounded:
    full = values.shape[1] != 2 * d
    squares = d + (_diagonal(d) if full else np.arange(d))
    usable = np.isfinite(values).all(axis=1) & (values[:, squares] > 0).all(axis=1)
    good: BoolArray = np.asarray(usable)
    values = np.where(good[:, None], values, 1.0)
    u = np.full(values.shape, 0.5)
    if at_random:
        single = values.astype(np.float32)  # sums in another order have other last bits
        own = np.array([fingerprint(row.tobytes()) >> 33 for row in single], dtype=np.int64)
        u = uniforms(0, 0, Purpose.OPENING, own, values.shape[1])
    exponents = _steps(values, d, loss) if full else np.full(len(values), float(_FRAME_STEP))
    good = good & (exponents <= _FINEST_STEP)
    exponents = np.where(good, exponents, _FRAME_STEP).astype(np.int64)
    unit = 2.0 ** exponents[:, None]
    logs = np.floor(np.log2(values[:, squares]) * unit + u[:, :d])
    spread = np.exp2(logs / unit / 2)  # as the receiver has it
    parts = [logs, np.floor(values[:, :d] / spread * unit + u[:, d : 2 * d])]
    if full:
        rows, columns = np.triu_indices(d, 1)
        products = np.delete(values, squares, axis=1)[:, d:]
        parts.append(
            np.floor(products / (spread[:, rows] * spread[:, columns]) * unit + u[:, 2 * d :])
        )
    told = np.concatenate(parts, axis=1)
    good = good & np.asarray((np.abs(told) < _LARGEST).all(axis=1))
    return _Rounded(d, exponents, np.where(good[:, None], told, 0).astype(np.int64), ~good)


def _steps(values: FloatArray, d: int, loss: float) -> FloatArray:
    """The exponents of the steps that keep to the loss."""
    rows, columns = np.triu_indices(d)
    whole = np.empty((len(values), d, d))
    whole[:, rows, columns] = whole[:, columns, rows] = values[:, d:]
    spread = np.sqrt(np.diagonal(whole, axis1=1, axis2=2))
    correlations = whole / (spread[:, :, None] * spread[:, None, :])
    # Of many, each sees less than all: what is narrow in its rows alone counts for little.
    least = _NARROW if loss >= _MANY * LOSS else 1e-300
    narrowest = np.clip(np.linalg.eigvalsh(correlations)[:, 0], least, 1.0)
    # A step of h has a squared error of at most h^2 / 6, on average, in each of d^2 numbers.
    steps = np.ceil(-np.log2(narrowest * np.sqrt(6 * loss) / d))
    return np.asarray(np.maximum(steps, _FRAME_STEP))


def rounded_moments(
    values: FloatArray, d: int, loss: float, at_random: bool = True
) -> tuple[FloatArray, IntArray]:
    """What the receiver of each row has, and its bytes; ``loss`` 0 rounds nothing."""
    count = values.shape[1]
    if not _worth(count, d, loss):
        return values, np.full(len(values), floats_size(count))
    rounded = _round(values, d, loss, at_random)
    return np.where(rounded.exact[:, None], values, rounded.values()), rounded.sizes()


def encode_moments(values: FloatArray, d: int, loss: float, at_random: bool = True) -> bytes:
    """One worker's mean and second moments, by name one after the other."""
    if not _worth(len(values), d, loss):
        return encode_floats(values)
    rounded = _round(values[None], d, loss, at_random)
    if rounded.exact[0]:
        return encode_floats(values)
    out = bytes([_CODED, int(rounded.exponents[0])]) + encode_count(d)
    for group in rounded.groups:
        bits = int(_bits(group)[0])
        code = encode_symbols(group[0].astype(np.int32), 1 << bits, None)
        out += bytes([bits]) + encode_count(len(code)) + code
    return out


def decode_moments(data: bytes, count: int | None = None) -> FloatArray:
    """The inverse of `encode_moments`, for so many numbers; raises `WireError` if it cannot be."""
    if not data or data[0] != _CODED:
        return decode_floats(data, count)
    if count is None or count > MOST or len(data) < 3:
        raise WireError("rounded moments where none are expected.")
    d, position = decode_count(data, 2)
    width = _width(count, d)
    if width is None or not d or data[1] > _FINEST_STEP:
        raise WireError(f"rounded moments of {d} columns cannot be {count} numbers.")
    groups = []
    for size in (d, d, width - d):
        if position >= len(data) or data[position] > 30:
            raise WireError("rounded moments end early, or have a bound that cannot be.")
        bound = 1 << data[position]
        length, position = decode_count(data, position + 1)
        groups.append(decode_symbols(data[position : position + length], size, bound, None))
        position += length
    if position != len(data):
        raise WireError(f"rounded moments of {position} bytes; got {len(data)}.")
    symbols = np.concatenate(groups).astype(np.int64)[None]
    rounded = _Rounded(d, np.array([data[1]]), symbols, np.zeros(1, dtype=np.bool_))
    with np.errstate(over="ignore", invalid="ignore"):
        values = rounded.values()[0]
    if not np.isfinite(values).all():
        raise WireError("rounded moments that are not finite.")
    return values
