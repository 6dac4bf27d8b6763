"""The lattice that parts of a sum are rounded to, and the bytes that they take.

Only the sum needs room: each number takes the bits that the sum may be away from the value that
the fit expects, however large the parts of single sites are.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import final

import numpy as np
from numpy.typing import NDArray

from emfed.aggregation.integers import WORD, Integers, fixed_point
from emfed.core.errors import NumericalError, WireError
from emfed.core.sums import Ask, FloatArray, Precision
from emfed.core.wire.counts import decode_count, encode_count

FRACTION = 32
"""Least binary places below the step, in bits: two tables with equal sums differ in what others
see with a probability of at most 2^-32 a site and number."""
EXACT_BITS, EXACT_STEP = 128, -72
"""Bits, and the power of two of the step, where a fit knows nothing of a sum. A sum up to 8e12
has room; a larger one is noticed and asked again, but a step that is too coarse would not be."""
FURTHER_ATTEMPTS = 2
"""How often a sum without room is asked again. The last time it has 2^60 times the room."""
WIDER = 20
"""Bits that a further attempt has more, at least; else twice as many as the one before."""
GUARD = 12
"""Bits below `EXACT_STEP` that take up the roundings of two thousand sites, so that counts and
zeros are exact."""
MOST_BITS = 4096
"""Bits of one number, at most: any sum of doubles has room in 2,200."""
FARTHEST = 2.0**900
"""Steps that a sum may be expected away from 0, and from where it is expected: in a third attempt
it has less than `MOST_BITS`."""
MOST_ROOM = 1 << 28
"""Bytes of memory that reading a part takes, at most."""
SMALLEST_SET = 3
"""Sites in a masked sum, at least: of two, each knows the other's part."""
TAG_BYTES, DIGEST_BYTES = 16, 8
"""What a part has besides its numbers: a tag, and a digest of the state that it is about."""


@final
@dataclass(frozen=True, eq=False)
class Lattice:
    """How the numbers of one sum become integers of few bits.

    Parameters
    ----------
    bits : array of int
        The bits that each number of the sum takes.
    exponents : array of int
        The powers of two that the steps are.
    centre : array
        The value that the fit expects for each number.
    guard : int
        The lowest bits of the sum that are not part of the answer: what roundings added is in
        them.

    Examples
    --------
    >>> from emfed.core.sums import Precision
    >>> precision = Precision(np.array([0.25]), np.array([10.0]), np.array([4.0]))
    >>> lattice = Lattice.of(precision, size=3)
    >>> lattice.bits.tolist(), lattice.part_bytes
    ([6, 6, 6], 30)
    """

    bits: NDArray[np.int64]
    exponents: NDArray[np.int64]
    centre: FloatArray
    guard: int = 0

    @classmethod
    def of(cls, precision: Precision | None, size: int, attempt: int = 0) -> Lattice:
        """The lattice of a sum of so many numbers; each further attempt has twice the bits."""
        if precision is None:
            bits, exponents = np.full(size, EXACT_BITS), np.full(size, EXACT_STEP - GUARD)
            return cls(_widened(bits, attempt), exponents, np.zeros(size), GUARD)
        step, centre, reach = (
            np.broadcast_to(np.asarray(values, dtype=np.float64), (size,))
            for values in (precision.step, precision.centre, precision.reach)
        )
        fractions, powers = np.frexp(step)
        if not (fractions == 0.5).all():
            raise NumericalError("the step of a sum must be a power of two.")
        if not (np.abs([centre, reach]) < FARTHEST * step).all():
            raise NumericalError("a sum is expected so far away that its step means nothing.")
        bits = np.broadcast_to(precision.bits, (size,))
        return cls(_widened(bits, attempt), powers.astype(np.int64) - 1, centre)

    @classmethod
    def placed(cls, ask: Ask, exchange: int, attempt: int = 0) -> Lattice:
        """The lattice of a sum in its place of a fit.

        The first sum has one more number, the rows' weight, and is exact, where that may be told.
        """
        if exchange == 0 and ask.counted:
            return cls.of(None, ask.size + 1, attempt)
        return cls.of(ask.precision, ask.size, attempt)

    @property
    def size(self) -> int:
        """How many numbers the sum has."""
        return len(self.bits)

    @cached_property
    def words(self) -> int:
        """The words of 64 bits that a masked number has: its bits and binary places below."""
        return -(-(int(self.bits.max(initial=1)) + FRACTION) // WORD)

    @cached_property
    def fraction(self) -> NDArray[np.int64]:
        """The binary places of each number below its step."""
        return WORD * self.words - self.bits

    @property
    def shape(self) -> Shape:
        """What a relay must know to add."""
        return Shape.of(self.bits)

    @property
    def part_bytes(self) -> int:
        """Bytes of one site's part, and of the sum."""
        return self.shape.part_bytes

    def integers(self, values: FloatArray) -> Integers:
        """Finite values in units of the step's last binary place, exactly rounded."""
        return fixed_point(values, self.fraction - self.exponents, self.words)

    @cached_property
    def middle(self) -> Integers:
        """The expected sum, rounded to the step, in the units of `integers`."""
        steps = np.rint(np.ldexp(self.centre, -self.exponents))
        return fixed_point(steps, self.fraction, self.words)

    def round(self, values: FloatArray, roundings: FloatArray | float = 0.0) -> FloatArray | None:
        """A sum in doubles, with what the roundings of sites add in steps; None: it has no room.

        The same as masking, adding and opening do in integers.
        """
        steps = np.rint(np.ldexp(values, -self.exponents) + roundings)
        away = steps - np.rint(np.ldexp(self.centre, -self.exponents))
        half = np.ldexp(1.0, self.bits - 1)
        if not np.all((-half <= away) & (away < half)):
            return None
        return np.ldexp(np.rint(np.ldexp(steps, -self.guard)), self.exponents + self.guard)

    def noise(self, workers: int) -> float:
        """The variance of the roundings of so many workers in the sum, in steps squared."""
        return 0.0 if self.guard else workers / 12

    def digest(self) -> bytes:
        """Bits and steps, for the context of keys."""
        about = np.stack([self.bits, self.exponents]).astype("<i8")
        return hashlib.sha256(about.tobytes()).digest()


def _widened(bits: NDArray[np.int64], attempt: int) -> NDArray[np.int64]:
    return bits + np.maximum(bits, WIDER) * (2**attempt - 1)


@final
@dataclass(frozen=True)
class Shape:
    """Runs of numbers with equal bits: all that a relay knows of a part's numbers.

    Parameters
    ----------
    runs : tuple of (int, int)
        How many numbers there are in each run, and the bits of each of them.
    """

    runs: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, bits: NDArray[np.int64]) -> Shape:
        """The shape of numbers of so many bits."""
        return cls(tuple((len(list(same)), bit) for bit, same in groupby(bits.tolist())))

    @property
    def bits(self) -> NDArray[np.int64]:
        """The bits of each number."""
        counts, bits = zip(*self.runs, strict=True)
        return np.repeat(np.array(bits, dtype=np.int64), counts)

    @property
    def numbers_bytes(self) -> int:
        """Bytes of the numbers."""
        return -(-sum(count * bits for count, bits in self.runs) // 8)

    @property
    def part_bytes(self) -> int:
        """Bytes of a part: shape, numbers, tag and digest."""
        return len(self.encode()) + self.numbers_bytes + TAG_BYTES + DIGEST_BYTES

    def encode(self) -> bytes:
        """How many runs there are, then the numbers and bits of each."""
        flat = [len(self.runs), *(number for run in self.runs for number in run)]
        return b"".join(encode_count(number) for number in flat)

    @classmethod
    def decode(cls, data: bytes) -> tuple[Shape, bytes]:
        """The inverse of `encode`, and what follows; raises `WireError` for anything else."""
        count, at = decode_count(data)
        if not 0 < 2 * count <= len(data):
            raise WireError(f"a part cannot have {count} runs of numbers.")
        runs = []
        for _ in range(count):
            numbers, at = decode_count(data, at)
            bits, at = decode_count(data, at)
            runs.append((numbers, bits))
        if not all(numbers and 0 < bits <= MOST_BITS for numbers, bits in runs):
            raise WireError("a part has a run without numbers, or numbers of impossible bits.")
        words = -(-max(bits for _, bits in runs) // WORD)
        if sum(numbers for numbers, _ in runs) * WORD * words > MOST_ROOM:
            raise WireError("a part has too many numbers.")
        return cls(tuple(runs)), data[at:]
