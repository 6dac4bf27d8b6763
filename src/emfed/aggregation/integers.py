"""Integers of any size in numpy: exact fixed point, sums modulo powers of two, bits to bytes.

An array of integers has one row a number: 64-bit words in two's complement, the lowest word first.
Every finite double times a power of two is such an integer, whatever its exponent.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from emfed.core.errors import WireError
from emfed.core.sums import FloatArray

Integers = NDArray[np.uint64]
"""Integers, ``(numbers, words)``."""
WORD = 64
"""Bits of a word."""
LIMB = 16
"""Bits of a limb in `inner`: products of two limbs, a million of them, are exact in a double."""
MOST_PRODUCTS = 1 << 20
"""Products of limbs that are added in doubles: 2^52 at most."""


def fixed_point(values: ArrayLike, exponents: ArrayLike, words: int = 1) -> Integers:
    """The integers ``rint(values * 2^exponents)`` of finite doubles, exactly.

    They have at least so many words, and as many as the largest needs.
    """
    fractions, powers = np.frexp(np.asarray(values, dtype=np.float64))
    shift = powers + np.asarray(exponents, dtype=np.int64) - 53
    # Below the point: halves go to even, as rint does. Above it nothing is rounded.
    numbers = np.rint(np.ldexp(fractions, 53 + np.minimum(shift, 0))).astype(np.int64)
    shift = np.where(numbers == 0, 0, np.maximum(shift, 0))
    return _shifted(numbers, shift, max(words, int(shift.max(initial=0)) // WORD + 2))


def _shifted(numbers: NDArray[np.int64], shift: NDArray[np.int64], words: int) -> Integers:
    """The integers ``numbers * 2^shift``, modulo ``2^(64 words)``."""
    first, by = np.divmod(shift, WORD)
    low = numbers.view(np.uint64) << by.astype(np.uint64)
    # A shift by all 64 bits is not defined, one by 1 and 63 is.
    high = ((numbers >> 1) >> (WORD - 1 - by)).view(np.uint64)
    sign = (numbers >> (WORD - 1)).view(np.uint64)
    out = np.empty((len(numbers), words), dtype=np.uint64)
    for word in range(words):
        out[:, word] = np.where(
            word < first, 0, np.where(word == first, low, np.where(word == first + 1, high, sign))
        )
    return out


def add(one: Integers, other: Integers) -> Integers:
    """Sums modulo ``2^(64 words)``."""
    total = one + other
    if total.shape[1] == 1:
        return total
    carry = np.zeros(len(total), dtype=np.uint64)
    for word in range(total.shape[1]):
        wrapped = total[:, word] < one[:, word]
        total[:, word] += carry
        carry = (wrapped | (total[:, word] < carry)).astype(np.uint64)
    return total


def negative(integers: Integers) -> Integers:
    """Negatives modulo ``2^(64 words)``."""
    one = np.zeros_like(integers)
    one[:, 0] = 1
    return add(~integers, one)


def extended(integers: Integers, words: int) -> Integers:
    """The same signed integers in at least so many words."""
    more = words - integers.shape[1]
    if more <= 0:
        return integers
    sign = (integers[:, -1:].view(np.int64) >> (WORD - 1)).view(np.uint64)
    return np.concatenate([integers, np.repeat(sign, more, axis=1)], axis=1)


def to_floats(integers: Integers, exponents: ArrayLike) -> FloatArray:
    """The doubles nearest to ``integers * 2^exponents``, to a unit in the last place.

    They depend on nothing but the integers.
    """
    below = (integers[:, -1].view(np.int64) < 0)[:, None]
    size = np.where(below, negative(integers), integers)
    exponents = np.asarray(exponents, dtype=np.int64)
    total = np.zeros(len(size))
    for word in range(size.shape[1]):
        total += np.ldexp(size[:, word].astype(np.float64), WORD * word + exponents)
    return np.where(below[:, 0], -total, total)


def limbs(integers: Integers) -> FloatArray:
    """Limbs of `LIMB` bits, the lowest first and the highest signed, for `inner`."""
    flat = np.ascontiguousarray(integers).astype("<u8", copy=False)
    out = flat.view("<u2").astype(np.float64)
    out[:, -1] = flat.view("<i2")[:, -1]
    return out


def inner(one: FloatArray, other: FloatArray) -> int:
    """The sum of products of two vectors of integers in limbs, exactly."""
    total = 0
    for at in range(0, len(one), MOST_PRODUCTS):
        products = one[at : at + MOST_PRODUCTS].T @ other[at : at + MOST_PRODUCTS]
        total += sum(int(x) << (LIMB * (i + j)) for (i, j), x in np.ndenumerate(products))
    return total


# The highest bits of each number, which is where the bits of a part are.


def high_bits(words: int, bits: NDArray[np.int64]) -> Integers:
    """Ones in the highest ``bits`` of each number, zeros below."""
    ones = np.full(len(bits), -1, dtype=np.int64)
    return _shifted(ones, WORD * words - bits, words)


def _kept(words: int, bits: NDArray[np.int64]) -> NDArray[np.bool_]:
    return np.arange(WORD * words) >= (WORD * words - bits)[:, None]


def pack(integers: Integers, bits: NDArray[np.int64]) -> bytes:
    """The highest bits of each number, one number after the other, the lowest bit first."""
    flat = np.ascontiguousarray(integers).astype("<u8", copy=False).view(np.uint8)
    spread = np.unpackbits(flat, axis=1, bitorder="little")
    kept = spread[_kept(integers.shape[1], bits)]
    return np.packbits(kept, bitorder="little").tobytes()


def unpack(data: bytes, bits: NDArray[np.int64], words: int) -> Integers:
    """The inverse of `pack`; the bits below are 0."""
    total = int(bits.sum())
    if len(data) != -(-total // 8):
        raise WireError(
            f"{len(bits)} numbers of {total} bits take {-(-total // 8)} bytes; got {len(data)}."
        )
    told = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")
    if told[total:].any():
        raise WireError("bits after the last number are not 0.")
    spread = np.zeros((len(bits), WORD * words), dtype=np.uint8)
    spread[_kept(words, bits)] = told[:total]
    packed = np.packbits(spread, axis=1, bitorder="little")
    return packed.view("<u8").astype(np.uint64, copy=False)
