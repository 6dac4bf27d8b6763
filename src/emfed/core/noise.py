"""Asks whose sums have noise, and what noise follows from: a key that nothing shows.

In one process a fit has a key of its own. Between machines every site draws its noise itself, from
a key on its own disk (`emfed.network.spending.noise_key`).
"""

from __future__ import annotations

import hashlib
import os
from abc import abstractmethod
from collections.abc import Iterable
from typing import Any, ClassVar, Protocol, Self, final, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from emfed.core.privacy import DEVIATION, Bits
from emfed.core.sums import Ask, FloatArray, IntArray, LastSum, Precision, Rows
from emfed.core.wording import Setting, Wording

KEY_BYTES = 32
"""Bytes of a key: nobody tries out 2^256 of them."""
SITES_DRAW = Wording(
    "{} is for fits in one process: between machines every site draws its noise from a secret of "
    "its own. Leave {} out.",
    *(Setting("noise_seed"), Setting("noise_seed")),
)


ROOM_BITS = 46
"""Bits that a sum may be away from 0: room for 100 million rows on any lattice. So messages are
equally long whatever rows say."""
GUARD_BITS = 12
"""Bits below that take up the roundings of two thousand sites: whole sums are exact. So a sum that
is made again after a crash is the same, and so is all that is asked after it."""


class NoisyAsk(Ask):
    """An ask whose sum has noise, so that it tells little of any one row.

    What it sums over rows are whole numbers, and the noise that each worker adds is whole, too, and
    always the same: the lattice of the ask says what it covers. Nobody gives more than a part with
    noise, and the weight of the rows is not told either.
    """

    counted: ClassVar[bool] = False
    noise: ClassVar[float] = float(DEVIATION << GUARD_BITS) ** 2
    precision = Precision(np.array(2.0**-GUARD_BITS), np.array(0.0), np.array(2.0**ROOM_BITS))
    last: LastSum | None = None
    """What the last sum said to the fit that asks."""

    @property
    @abstractmethod
    def cost(self) -> float:
        """Mu squared of the answer: what it tells of any one row."""

    @abstractmethod
    def whole(self, blocks: Iterable[FloatArray]) -> IntArray:
        """The sum over the rows of one worker, without noise."""

    @final
    def part(self, rows: Rows) -> FloatArray:
        """The sum over these rows with noise, which is all that they give."""
        assert isinstance(rows, NoisyRows)
        return rows.noisy(self)


@runtime_checkable
class NoisyRows(Protocol):
    """Rows of which sums with noise are told and no others."""

    def noisy(self, ask: NoisyAsk) -> FloatArray:
        """The sum over the rows with noise, in whole numbers."""


@runtime_checkable
class PlainRows(Rows, Protocol):
    """Rows that count once each and are there again for each ask."""

    def blocks(self) -> Iterable[Iterable[FloatArray]]:
        """The rows of each worker, some at a time; raises where some have weights."""


@final
class NoiseKey:
    """The key of one fit's noise: the operating system drew it, and it is in no file or message.

    With a ``seed`` it follows from that number instead: then noise can be repeated, and taken off
    by everybody who knows the number. A copy, in a file too, holds no key of the operating
    system's, but draws another.

    Noise is a pseudo-random function of the key and of all that an answer depends on. So an answer
    that is given again has the same noise, which tells nothing new, and any other answer has other
    noise.
    """

    __slots__ = ("_key", "seed")

    def __init__(self, seed: int | None = None) -> None:
        told = b"" if seed is None else seed.to_bytes(8, "little")
        self.seed = seed
        self._key = os.urandom(KEY_BYTES) if seed is None else hashlib.sha256(told).digest()

    @classmethod
    def of(cls, key: bytes) -> Self:
        """The key of a site, from its disk."""
        found = cls()
        found._key = key
        return found

    def commitment(self) -> bytes:
        """32 bytes that others may see: they tell whether it is the same key, and no more."""
        return hashlib.sha256(b"emfed noise commitment\0" + self._key).digest()

    def __repr__(self) -> str:
        return f"NoiseKey({'' if self.seed is None else self.seed})"

    def __reduce__(self) -> tuple[Any, ...]:
        return NoiseKey, (self.seed,)

    def words(self, about: bytes) -> Bits:
        """Random words for the answer that ``about`` describes: SHAKE-256 of key and description.

        Each call of what is returned reads a stream of its own.
        """
        whole = hashlib.shake_256(self._key + hashlib.sha256(about).digest())
        calls = 0

        def draw(count: int) -> NDArray[np.uint64]:
            nonlocal calls
            stream, calls = whole.copy(), calls + 1
            stream.update(calls.to_bytes(8, "little"))
            return np.frombuffer(stream.digest(8 * count), dtype="<u8").astype(np.uint64)

        return draw
