"""Counts: seven bits a byte, the lowest first; the high bit says that more follow (LEB128)."""

from __future__ import annotations

import numpy as np

from emfed.core.errors import WireError
from emfed.core.protocols import IntArray

LARGEST_PAYLOAD = 1 << 28
"""The bytes of the largest message that is read: 256 MB."""
_COUNT_ENDS = 1 << 7 * np.arange(1, 9, dtype=np.int64)
"""Numbers from which on a count takes a byte more: seven bits each."""


def encode_count(number: int) -> bytes:
    """A number from 0, in as few bytes as it needs."""
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def decode_count(data: bytes, position: int = 0) -> tuple[int, int]:
    """The inverse of `encode_count`, below 2**63; and where the next field begins."""
    number = 0
    for place, byte in enumerate(data[position : position + 9]):
        number |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return number, position + place + 1
    raise WireError("a message ends inside a count, or a count has more than nine bytes.")


def count_sizes(numbers: IntArray) -> IntArray:
    """Bytes of `encode_count` for each."""
    return 1 + np.searchsorted(_COUNT_ENDS, numbers, side="right")
