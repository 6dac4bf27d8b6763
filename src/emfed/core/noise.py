"""What the noise of a private fit in one process follows from: a key that nothing shows.

Between machines every site draws its noise itself, from a secret on its own disk
(`emfed.network.spending.Secret`).
"""

from __future__ import annotations

import hashlib
import os
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from emfed.core.privacy import Bits
from emfed.core.wording import Setting, Wording

KEY_BYTES = 32
"""Bytes of a key: nobody tries out 2^256 of them."""
SITES_DRAW = Wording(
    "{} is for fits in one process: between machines every site draws its noise from a secret of "
    "its own. Leave {} out.",
    *(Setting("noise_seed"), Setting("noise_seed")),
)


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
