"""An adaptive arithmetic code for small integers, exact and with a size known in advance.

Symbols of a quantised innovation are few, signed, centred at zero, and distributed differently in
every message. The code learns each message's own distribution while it goes, from a prior with
one parameter that the message carries: a discrete Laplace law worth 32 or more observations. In
Bayesian terms it is a Dirichlet-multinomial code. Two things follow:

* the cost is close to the empirical entropy of the message: the prior replaces the histogram that
  would otherwise have to be sent;
* the length of the code depends on the histogram alone, in closed form. A simulation can count
  bytes without encoding (`code_sizes`), and the count is the length that `encode_symbols` makes.

The arithmetic coder works on intervals of 128 bits in Python integers: rounding costs less than
1e-15 of a bit per symbol, so the closed form is the length, and every platform agrees. (Coders
with machine words, such as those of constriction, emit words of 4 bytes and a length that only
encoding tells; messages here are often 5 to 50 bytes.)

Where both ends know the dither u of a symbol (subtractive dithering), the law of the symbol given
u is much narrower than its law alone: symbols are then sorted into contexts by |u|, each with the
prior that u implies. docs/wire-format.md specifies the code for other implementations.

Decision: docs/decisions/016-compressors-and-the-codec.md
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from decimal import Decimal, localcontext
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from emfed.core.errors import WireError
from emfed.core.protocols import FloatArray, IntArray

CHUNK = 8192
"""Symbols coded at once; keeping what was seen in order costs time with the square of it."""
PARAMETERS = 64
"""Values of the parameter of the prior; they are part of the wire format."""
STRENGTH = 32
"""Observations that the prior is worth, times one more than the mean size of a symbol."""
CONTEXTS = 8
_FINE = 32
_ONE = 1 << 20
"""Part of the wire format: contexts of a dither, parts that a step is cut into where the prior of a
context is worked out, and the weight of a symbol 0 before rounding."""
_SHORT = 1 << 12
"""Histograms of so few cells are not worth picking the empty ones out of."""
_RATIO_BITS = 24
"""Bits of the ratio by which weights fall from symbol to symbol: part of the wire format."""
LONGEST_BITS = 13
"""A larger bound needs uncoded low bits, whatever the parameter: tables stay short."""
_WINDOW, _LOWEST, _WORD = 128, 1 << 96, 32
"""Bits of the interval, the width below which it is made longer, and bits that it grows by: part of
the wire format."""
_COARSE = 64
"""Beyond this mean size the low bits of symbols are noise, and sent as they are."""


class Prior(NamedTuple):
    """Integer weights of symbols ``-bound..bound`` in each context, and what follows from them."""

    weights: IntArray
    cumulative: list[list[int]]
    total: list[int]
    step: list[int]
    """What one observation adds to the weight of its symbol."""


def mean_size(parameter: int) -> Decimal:
    """The mean absolute symbol of a parameter: 2**(parameter / 3 - 8)."""
    with localcontext() as context:
        context.prec = 40
        return Decimal(2) ** (Decimal(parameter) / 3 - 8)


@lru_cache(maxsize=1024)
def shift_of(parameter: int, bound: int) -> int:
    """How many low bits of each symbol are sent uncoded."""
    size = int(mean_size(parameter))
    return max(0, size.bit_length() - _COARSE.bit_length(), bound.bit_length() - LONGEST_BITS)


def coded_bound(parameter: int, bound: int) -> int:
    """The largest coded symbol: low bits are gone, and a negative one rounds down."""
    shift = shift_of(parameter, bound)
    return (bound >> shift) + 1 if shift else bound


def _ratio(parameter: int, shift: int, fine: bool) -> int:
    """The Laplace law's decay per unit, or per 1/32, times 2**24, rounded down; exact decimals."""
    with localcontext() as context:
        context.prec = 40
        mean = mean_size(parameter) / (1 << shift)
        if fine:
            theta = (-1 / (_FINE * mean)).exp()
        else:
            theta = ((1 + mean * mean).sqrt() - 1) / mean
        return int(theta * (1 << _RATIO_BITS))


@lru_cache(maxsize=128)
def prior(parameter: int, bound: int, contexts: int) -> Prior:
    """The prior of a parameter for symbols of at most ``bound``, in one context or in eight."""
    shift, bound = shift_of(parameter, bound), coded_bound(parameter, bound)
    if contexts == 1:
        side = _decay(_ratio(parameter, shift, fine=False), bound + 1)
        weights = np.concatenate([side[:0:-1], side])[None]
    else:
        # Cells of 1/32 on either side of zero; a symbol is 32 of them, moved by its dither.
        fine = _decay(_ratio(parameter, shift, fine=True), _FINE * (bound + 2))
        running = np.concatenate([[0], np.cumsum(np.concatenate([fine[::-1], fine]))])
        middle = len(fine) + _FINE * np.arange(-bound, bound + 1) - _FINE // 2
        starts = middle - (2 * np.arange(contexts)[:, None] + 1)
        weights = running[starts + _FINE] - running[starts]
    totals = weights.sum(axis=1).tolist()
    with localcontext() as context:
        context.prec = 40
        strength = int(STRENGTH * (1 + mean_size(parameter) / (1 << shift)))
    return Prior(
        weights,
        [[0, *np.cumsum(row).tolist()] for row in weights],
        totals,
        [max(1, total // strength) for total in totals],
    )


def _decay(ratio: int, count: int) -> IntArray:
    """2**20, then each number the ratio times the one before, rounded down, at least 1."""
    out = np.ones(count, dtype=np.int64)
    value, position = _ONE, 0
    while position < count and value > 1:
        out[position] = value
        value, position = value * ratio >> _RATIO_BITS, position + 1
    return out


# Choosing the parameter: the encoder's business, so floats will do.


@lru_cache(maxsize=2)
def _boundaries(fine: bool) -> FloatArray:
    """Mean sizes half-way between neighbouring parameters, as they would be observed."""
    centres = 2.0 ** ((np.arange(PARAMETERS - 1) + 0.5) / 3 - 8)
    if not fine:
        return centres
    # With x Laplace of mean b and e uniform on [-1/2, 1/2]: E|x + e| = 1/4 + 2 b^2 (1 - e^(-1/2b)).
    return np.asarray(0.25 - 2 * centres**2 * np.expm1(-0.5 / centres))


def choose_parameters(symbols: NDArray[np.int32], dither: FloatArray | None) -> IntArray:
    """The parameter for each message ``(..., n)``, from the mean size of its symbols."""
    values = symbols if dither is None else symbols - dither
    means = np.abs(values).mean(axis=-1)
    return np.searchsorted(_boundaries(dither is not None), means).astype(np.int64)


def _contexts(
    symbols: NDArray[np.int32], dither: FloatArray | None
) -> tuple[NDArray[np.int32], NDArray[np.int32] | None]:
    """Symbols, reflected so that their dither is positive, and the context of each."""
    if dither is None:
        return symbols, None
    contexts = (np.abs(dither) * (2 * CONTEXTS)).astype(np.int32)
    return np.where(dither < 0, -symbols, symbols), np.minimum(contexts, CONTEXTS - 1)


def code_sizes(symbols: NDArray[np.int32], bound: int, dither: FloatArray | None) -> IntArray:
    """Bytes that `encode_symbols` makes of each row of ``(messages, n)``, without encoding."""
    count, n = symbols.shape
    if n == 0 or count == 0:
        return np.zeros(count, dtype=np.int64)
    total = np.zeros(count, dtype=np.int64)
    for start in range(0, n, CHUNK):
        part = symbols[:, start : start + CHUNK]
        u = None if dither is None else dither[:, start : start + CHUNK]
        parameters = choose_parameters(part, u)
        total += 1 + _code_bytes(part, bound, u, parameters)
        if n > CHUNK:
            total += 2  # the length of each chunk
    return total


def _code_bytes(
    symbols: NDArray[np.int32], bound: int, dither: FloatArray | None, parameters: IntArray
) -> IntArray:
    """Whole bytes for the arithmetic code and the uncoded low bits of one chunk per row."""
    values, contexts = _contexts(symbols, dither)
    n, groups = symbols.shape[1], 1 if contexts is None else CONTEXTS
    used, which = np.unique(parameters, return_inverse=True)
    shifts = np.array([shift_of(p, bound) for p in used.tolist()])
    out = np.empty(len(symbols), dtype=np.int64)
    for shift in np.unique(shifts).tolist():  # tables of one shift have one width
        rows = np.flatnonzero(shifts[which] == shift)
        chosen = np.flatnonzero(shifts == shift)
        tables = _tables(tuple(used[chosen].tolist()), bound, groups)
        table = np.searchsorted(chosen, which[rows])
        all_rows = len(rows) == len(symbols)
        coded = (values if all_rows else values[rows]) >> shift
        where = contexts if all_rows or contexts is None else contexts[rows]
        bits = _information(coded, where, tables, table)
        out[rows] = np.ceil((bits + 1e-6) / 8).astype(np.int64) + -(-shift * n // 8)
    return out


class _Tables(NamedTuple):
    """Priors of several parameters in observations, and the logarithms of their gammas."""

    weights: FloatArray
    total: FloatArray
    log_weights: FloatArray
    log_total: FloatArray


@lru_cache(maxsize=256)
def _tables(parameters: tuple[int, ...], bound: int, groups: int) -> _Tables:
    """Priors side by side; runs use the same few again and again."""
    from scipy.special import gammaln

    priors = [prior(p, bound, groups) for p in parameters]
    step = np.array([t.step for t in priors], dtype=np.float64)
    total = np.array([t.total for t in priors], dtype=np.float64) / step
    weights = np.stack([t.weights for t in priors]) / step[:, :, None]
    return _Tables(weights, total, gammaln(weights), gammaln(total))


def _information(
    values: NDArray[np.int32],
    contexts: NDArray[np.int32] | None,
    tables: _Tables,
    table: IntArray,
) -> FloatArray:
    """Bits of each row under the adaptive code: a ratio of gamma functions of its histogram.

    ``table`` says which prior is each row's.
    """
    from scipy.special import gammaln

    messages = len(values)
    _, groups, width = tables.weights.shape
    row = np.arange(messages)[:, None] * groups
    cell = (row if contexts is None else row + contexts) * width + values + (width - 1) // 2
    size = messages * groups * width
    if size <= _SHORT:
        counts = np.bincount(cell.ravel(), minlength=size).reshape(messages, groups, width)
        seen, weights = counts.sum(axis=2), tables.weights[table]
        gained = gammaln(weights + counts) - tables.log_weights[table]
        saved = gained.sum(axis=(1, 2))
    else:
        if size <= 8 * values.size + (1 << 16):
            counts = np.bincount(cell.ravel(), minlength=size)
            cells = np.flatnonzero(counts)
            counts = counts[cells]
        else:
            cells, counts = np.unique(cell, return_counts=True)
        group = cells // width
        place = table[group // groups], group % groups, cells % width
        seen = np.bincount(group, weights=counts, minlength=messages * groups)
        gained = gammaln(tables.weights[place] + counts) - tables.log_weights[place]
        saved = np.bincount(group // groups, weights=gained, minlength=messages)
    whole = tables.total[table] + seen.reshape(messages, groups)
    spent = (gammaln(whole) - tables.log_total[table]).sum(axis=1)
    return np.asarray((spent - saved) / np.log(2))


# Encoding and decoding one message.


class _Model:
    """Frequencies of one chunk: the prior plus what has been seen, per context."""

    def __init__(self, table: Prior) -> None:
        self._table = table
        self._seen: list[list[int]] = [[] for _ in table.total]

    def interval(self, context: int, index: int) -> tuple[int, int, int]:
        """Where a symbol's interval begins, its width, and the width of all."""
        table, seen = self._table, self._seen[context]
        below = bisect_left(seen, index)
        same = bisect_right(seen, index, below) - below
        running, step = table.cumulative[context], table.step[context]
        low = running[index] + step * below
        width = running[index + 1] - running[index] + step * same
        return low, width, table.total[context] + step * len(seen)

    def find(self, context: int, target: int) -> int:
        """The symbol whose interval holds ``target``."""
        table, seen = self._table, self._seen[context]
        running, step = table.cumulative[context], table.step[context]
        low, high = 0, len(running) - 1
        while high - low > 1:
            middle = (low + high) // 2
            if running[middle] + step * bisect_left(seen, middle) <= target:
                low = middle
            else:
                high = middle
        return low

    def total(self, context: int) -> int:
        """The width of all intervals."""
        return self._table.total[context] + self._table.step[context] * len(self._seen[context])

    def learn(self, context: int, index: int) -> None:
        """Count a symbol."""
        insort(self._seen[context], index)


def encode_symbols(symbols: NDArray[np.int32], bound: int, dither: FloatArray | None) -> bytes:
    """One message's symbols as bytes: per chunk the parameter, the code, the low bits."""
    n = len(symbols)
    if n and int(np.abs(symbols.astype(np.int64)).max()) > bound:
        raise WireError(f"a symbol exceeds the bound {bound} that both ends agreed on.")
    out = []
    for start in range(0, n, CHUNK):
        u = None if dither is None else dither[None, start : start + CHUNK]
        chunk = _encode_chunk(symbols[None, start : start + CHUNK], bound, u)
        if n > CHUNK:
            out.append((len(chunk) - 1).to_bytes(2, "little"))
        out.append(chunk)
    return b"".join(out)


def _encode_chunk(symbols: NDArray[np.int32], bound: int, dither: FloatArray | None) -> bytes:
    parameters = choose_parameters(symbols, dither)
    parameter = int(parameters[0])
    shift, coded = shift_of(parameter, bound), coded_bound(parameter, bound)
    values, contexts = _contexts(symbols, dither)
    model = _Model(prior(parameter, bound, 1 if contexts is None else CONTEXTS))
    where = [0] * values.shape[1] if contexts is None else contexts[0].tolist()
    low, width, shifted = (
        0,
        1 << _WINDOW,
        _WINDOW,
    )  # the interval is [low, low + width) / 2**shifted
    for value, context in zip((values[0] >> shift).tolist(), where, strict=True):
        start, share, total = model.interval(context, value + coded)
        unit = width // total
        low, width = low + unit * start, unit * share
        while width < _LOWEST:
            low, width, shifted = low << _WORD, width << _WORD, shifted + _WORD
        model.learn(context, value + coded)
    raw_bytes = -(-shift * values.shape[1] // 8)
    size = int(_code_bytes(symbols, bound, dither, parameters)[0]) - raw_bytes
    # The first multiple of 256**-size in the interval, which is wide enough to hold one.
    code = -(-low >> shifted - 8 * size) if shifted > 8 * size else low << 8 * size - shifted
    raw = 0
    for value in (values[0] & ((1 << shift) - 1)).tolist() if shift else ():
        raw = raw << shift | value
    return bytes([parameter]) + code.to_bytes(size, "big") + raw.to_bytes(raw_bytes, "big")


def decode_symbols(data: bytes, n: int, bound: int, dither: FloatArray | None) -> NDArray[np.int32]:
    """The ``n`` symbols these bytes hold; raises `WireError` if they cannot."""
    out = np.empty(n, dtype=np.int32)
    position = 0
    for start in range(0, n, CHUNK):
        stop = min(n, start + CHUNK)
        u = None if dither is None else dither[start:stop]
        if n > CHUNK:
            if len(data) < position + 2:
                raise WireError("the symbols end before their chunk does.")
            size = int.from_bytes(data[position : position + 2], "little") + 1
            position += 2
        else:
            size = len(data)
        if len(data) < position + size or size == 0:
            raise WireError("the symbols end before their chunk does.")
        out[start:stop] = _decode_chunk(data[position : position + size], stop - start, bound, u)
        position += size
    if position != len(data):
        raise WireError(f"{len(data) - position} bytes follow the symbols.")
    return out


def _decode_chunk(data: bytes, n: int, bound: int, dither: FloatArray | None) -> IntArray:
    parameter = data[0]
    if parameter >= PARAMETERS:
        raise WireError(f"parameter {parameter} of the symbol code is out of range.")
    shift, coded = shift_of(parameter, bound), coded_bound(parameter, bound)
    raw_bytes = -(-shift * n // 8)
    size = len(data) - 1 - raw_bytes
    if not 0 <= size <= 8 * n + 8:
        raise WireError(f"{len(data)} bytes cannot hold {n} symbols with parameter {parameter}.")
    stream = int.from_bytes(data[1 : 1 + size], "big")
    unread = 8 * size - _WINDOW  # bits of the stream below the window; negative: zeros follow
    offset, width = (stream >> unread if unread > 0 else stream << -unread), 1 << _WINDOW
    _, contexts = _contexts(np.zeros(n, dtype=np.int32), dither)
    model = _Model(prior(parameter, bound, 1 if contexts is None else CONTEXTS))
    values = []
    for context in [0] * n if contexts is None else contexts.tolist():
        total = model.total(context)
        unit = width // total
        index = model.find(context, min(offset // unit, total - 1))
        start, share, _ = model.interval(context, index)
        offset, width = offset - unit * start, unit * share
        while width < _LOWEST:
            unread -= _WORD
            word = (stream >> unread if unread >= 0 else stream << -unread) & ((1 << _WORD) - 1)
            offset, width = (offset << _WORD) | word, width << _WORD
        model.learn(context, index)
        values.append(index - coded)
    symbols = np.array(values, dtype=np.int64)
    if shift:
        raw = int.from_bytes(data[1 + size :], "big")
        low_bits = [(raw >> shift * (n - 1 - j)) & ((1 << shift) - 1) for j in range(n)]
        symbols = (symbols << shift) | np.array(low_bits, dtype=np.int64)
    if np.abs(symbols).max(initial=0) > bound:
        raise WireError(f"a decoded symbol exceeds the bound {bound}.")
    return symbols if dither is None else np.where(dither < 0, -symbols, symbols)
