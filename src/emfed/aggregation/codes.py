"""Codes of unmasked parts and sums: integers on a common lattice, and short floats.

Lengths are those of the codec: `emfed.core.wire.entropy` knows the length of a code in closed form,
and a test encodes what is counted here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from emfed.core.errors import WireError
from emfed.core.sums import FloatArray, IntArray
from emfed.core.wire.counts import count_sizes, decode_count, encode_count
from emfed.core.wire.entropy import code_sizes, decode_symbols, encode_symbols

RAW = 31
"""Bits from which on symbols are told as they are, in 8 bytes each."""

ZERO = -1100
"""The exponent that stands for the number 0: that of no double."""
LARGEST_EXPONENT = 1024
"""That of the largest double."""


class Coded(NamedTuple):
    """Vectors as the receiver decodes them, the bytes of each, and what makes the bytes of one."""

    values: FloatArray
    sizes: IntArray
    encode: Callable[[int], bytes]


def framed(pieces: Sequence[bytes]) -> bytes:
    """Pieces behind each other: all but the last have their length before them."""
    return b"".join(encode_count(len(one)) + one for one in pieces[:-1]) + pieces[-1]


def framed_sizes(sizes: Sequence[IntArray]) -> IntArray:
    """Bytes of `framed`, from those of the pieces of each message."""
    lengths = [one + count_sizes(one) for one in sizes[:-1]]
    return np.asarray(np.sum([*lengths, sizes[-1]], axis=0, dtype=np.int64))


def apart(data: bytes, count: int) -> list[bytes]:
    """The inverse of `framed`, for so many pieces."""
    found, at = list[bytes](), 0
    for _ in range(count - 1):
        length, at = decode_count(data, at)
        if length > len(data) - at:
            raise WireError("a message ends inside one of its pieces.")
        found.append(data[at : at + length])
        at += length
    return [*found, data[at:]]


def on_lattice(vectors: FloatArray, step: FloatArray, uniforms: FloatArray) -> Coded:
    """Vectors ``(messages, n)`` on a lattice of these steps, ``(n,)``; the dither is taken off.

    The error of each number is uniform, and independent of the number and of all others.
    """
    symbols = np.floor(vectors / step + uniforms)
    dither, parts = uniforms - 0.5, cuts(step)
    sizes = framed_sizes([symbol_sizes(symbols[:, cut], dither[:, cut]) for cut in parts])

    def bytes_of(j: int) -> bytes:
        return framed([encode(symbols[j, cut], dither[j, cut]) for cut in parts])

    return Coded((symbols - dither) * step, sizes, bytes_of)


def off_lattice(data: bytes, step: FloatArray, uniforms: FloatArray) -> FloatArray:
    """The values of one message of `on_lattice`."""
    dither, parts = uniforms - 0.5, cuts(step)
    pieces = zip(apart(data, len(parts)), parts, strict=True)
    found = [decode(one, cut.stop - cut.start, dither[cut]) for one, cut in pieces]
    return np.asarray((np.concatenate(found) - dither) * step)


def cuts(step: FloatArray) -> list[slice]:
    """Stretches of numbers with one step: each has a code of its own."""
    ends = np.flatnonzero(step[1:] != step[:-1]) + 1
    edges = [0, *ends.tolist(), len(step)]
    return [slice(*pair) for pair in pairwise(edges)]


def _bits(symbols: FloatArray) -> IntArray:
    """Bits of the largest symbol of each message."""
    return np.frexp(np.abs(symbols).max(axis=-1, initial=1.0))[1].astype(np.int64)


def symbol_sizes(symbols: FloatArray, dither: FloatArray) -> IntArray:
    """Bytes that `encode` makes of each row."""
    bits, n = _bits(symbols), symbols.shape[1]
    sizes = np.full(len(symbols), 1 + 8 * n, dtype=np.int64)
    for each in np.unique(bits[bits < RAW]).tolist():
        rows = np.flatnonzero(bits == each)
        whole = symbols[rows].astype(np.int32)
        sizes[rows] = 1 + code_sizes(whole, 1 << each, dither[rows])
    return sizes


def encode(symbols: FloatArray, dither: FloatArray) -> bytes:
    """One message: the bits of its largest symbol, then the code."""
    bits = int(_bits(symbols[None])[0])
    if bits >= RAW:
        return bytes([RAW]) + np.asarray(symbols, dtype="<f8").tobytes()
    return bytes([bits]) + encode_symbols(symbols.astype(np.int32), 1 << bits, dither)


def decode(data: bytes, n: int, dither: FloatArray) -> FloatArray:
    """The symbols of a message; raises `WireError` where these bytes are none."""
    if not data or data[0] > RAW:
        raise WireError("expected the number of bits of a part's symbols, at most 31.")
    if data[0] == RAW:
        if len(data) != 1 + 8 * n:
            raise WireError(f"expected {n} numbers of 8 bytes; got {len(data) - 1} bytes.")
        symbols = np.frombuffer(data, "<f8", offset=1).astype(np.float64)
        if not np.isfinite(symbols).all():
            raise WireError("a part has a number that is not finite.")
        return symbols
    return decode_symbols(data[1:], n, 1 << data[0], dither).astype(np.float64)


def short_floats(numbers: FloatArray, bits: int, uniforms: FloatArray | None = None) -> FloatArray:
    """Numbers with so many binary digits after the first; with ``uniforms`` rounded at random."""
    _, exponents = np.frexp(numbers)
    unit = np.ldexp(1.0, exponents - 1 - bits)
    if uniforms is None:
        return np.asarray(np.rint(numbers / unit) * unit)
    return np.asarray(np.floor(numbers / unit + uniforms) * unit)


def encode_floats(numbers: FloatArray, bits: int) -> bytes:
    """Numbers of so many digits: which equal the one before, exponents, then signs and digits."""
    before = np.concatenate([[0.0], numbers[:-1]])
    fresh = numbers != before
    mantissa, exponents = _parts(numbers[fresh])
    digits = np.rint(np.abs(mantissa) * 2.0 ** (bits + 1)).astype(np.int64) - (1 << bits)
    words = np.where(mantissa < 0, 1 << bits, 0) + digits
    raw = 0
    for word in words.tolist():
        raw = raw << (bits + 1) | word
    flags = np.packbits(fresh).tobytes()
    first = int(exponents[0]) if len(exponents) else 0
    steps = np.diff(exponents, prepend=first).astype(np.int32)
    code = encode_symbols(steps, 1 << 12, None)
    size = -(-len(words) * (bits + 1) // 8)
    head = bytes([bits]) + (first & 0xFFFF).to_bytes(2, "little")
    return head + flags + len(code).to_bytes(2, "little") + code + raw.to_bytes(size, "big")


def _parts(numbers: FloatArray) -> tuple[FloatArray, IntArray]:
    """Mantissas of at least 1/2, and exponents; 0 is half of the smallest power."""
    mantissa, exponents = np.frexp(numbers)
    zero = numbers == 0
    return np.where(zero, 0.5, mantissa), np.where(zero, ZERO, exponents).astype(np.int64)


def decode_floats(data: bytes, n: int) -> FloatArray:
    """The inverse of `encode_floats`."""
    end = 3 + -(-n // 8)
    if len(data) < end + 2 or data[0] > 52:
        raise WireError(f"{len(data)} bytes cannot hold {n} numbers.")
    bits = data[0]
    fresh = np.unpackbits(np.frombuffer(data[3:end], np.uint8), count=n).astype(bool)
    count, size = int(fresh.sum()), int.from_bytes(data[end : end + 2], "little")
    steps = decode_symbols(data[end + 2 : end + 2 + size], count, 1 << 12, None)
    exponents = np.cumsum(steps) + int.from_bytes(data[1:3], "little", signed=True)
    if (exponents > LARGEST_EXPONENT).any():
        raise WireError("a number that is larger than any double.")
    rest = data[end + 2 + size :]
    if len(rest) != -(-count * (bits + 1) // 8):
        raise WireError(f"expected the digits of {count} numbers; got {len(rest)} bytes.")
    raw, mask = int.from_bytes(rest, "big"), (1 << (bits + 1)) - 1
    words = [(raw >> (bits + 1) * (count - 1 - j)) & mask for j in range(count)]
    told = np.array(words, dtype=np.int64)
    digits = ((told & ((1 << bits) - 1)) + (1 << bits)) * 2.0 ** -(bits + 1)
    values = np.ldexp(np.where(told >> bits, -digits, digits), exponents.astype(np.int64))
    values[exponents == ZERO] = 0.0
    places = np.cumsum(fresh) - 1
    return np.where(places >= 0, values[np.maximum(places, 0)], 0.0) if count else np.zeros(n)


def floats_size(numbers: FloatArray, bits: int) -> int:
    """Bytes of `encode_floats`, without encoding."""
    fresh = numbers != np.concatenate([[0.0], numbers[:-1]])
    _, exponents = _parts(numbers[fresh])
    steps = np.diff(exponents, prepend=exponents[:1]).astype(np.int32)
    code = int(code_sizes(steps[None], 1 << 12, None)[0])
    return 5 + -(-len(numbers) // 8) + code + -(-len(steps) * (bits + 1) // 8)


HEAD_BITS = 3
"""Digits that numbers which give others their units have beyond those."""
Units = Callable[[FloatArray], FloatArray]


def floats(numbers: FloatArray, bits: int, u: FloatArray | None) -> Coded:
    """One vector as short floats; with ``u`` rounded at random."""
    value = short_floats(numbers, bits, u)
    size = np.array([floats_size(value, bits)])
    return Coded(value[None], size, lambda j: encode_floats(value, bits))


def scaled(numbers: FloatArray, heads: IntArray, units: Units, bits: int, u: FloatArray) -> Coded:
    """Some numbers as short floats, and the others on a lattice in the units that these give."""
    out = short_floats(numbers, bits + HEAD_BITS, u)
    first, rest = out[heads], np.delete(np.arange(len(numbers)), heads)
    step = _scale(units(first), bits)
    told = on_lattice((numbers[rest] / step)[None], np.ones(len(rest)), u[None, rest])
    out[rest] = told.values[0] * step
    sizes = framed_sizes([np.array([floats_size(first, bits + HEAD_BITS)]), told.sizes])

    def bytes_of(j: int) -> bytes:
        return framed([encode_floats(first, bits + HEAD_BITS), told.encode(0)])

    return Coded(out[None], sizes, bytes_of)


def scaled_values(
    numbers: FloatArray, heads: IntArray, units: Units, bits: int, u: FloatArray
) -> FloatArray:
    """The values of `scaled`, without its bytes."""
    out, rest = (
        short_floats(numbers, bits + HEAD_BITS, u),
        np.delete(np.arange(len(numbers)), heads),
    )
    step = _scale(units(out[heads]), bits)
    out[rest] = (np.floor(numbers[rest] / step + u[rest]) - (u[rest] - 0.5)) * step
    return out


def unscaled(data: bytes, n: int, heads: IntArray, units: Units, u: FloatArray) -> FloatArray:
    """The inverse of `scaled`, but for the noise."""
    head, body = apart(data, 2)
    out, rest = np.empty(n), np.delete(np.arange(n), heads)
    out[heads] = decode_floats(head, len(heads))
    step = _scale(units(out[heads]), head[0] - HEAD_BITS)
    out[rest] = off_lattice(body, np.ones(len(rest)), u[rest]) * step
    return out


def _scale(unit: FloatArray, bits: int) -> FloatArray:
    return np.asarray(np.where(unit > 0, unit, 1.0) * 0.5**bits)
