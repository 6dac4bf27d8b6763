"""A plain lossless packing: float64 reals, symbols at a fixed width chosen per message.

Message: magic ``FE``, format version (1 byte), bits per symbol (1 byte), number of reals and of
symbols (uint32 each), the reals as little-endian float64, then the symbols as unsigned integers
``symbol + offset`` in ``bits`` bits each, most significant bit first, zero-padded to whole bytes;
``offset = 2**(bits - 1)``, and 0 bits mean that all symbols are 0.

Around it, a request carries round, generation and last accepted round, a reply carries worker,
round and conditional expectations computed, each a little-endian 64-bit integer.
"""

from __future__ import annotations

import struct

import numpy as np
from numpy.typing import NDArray

from fedem.errors import WireError
from fedem.protocols import Compressed, FloatArray, IntArray

_HEADER = struct.Struct("<2sBBII")
_ENVELOPE = struct.Struct("<QQq")
_MAGIC = b"FE"
_VERSION = 1
_LARGEST = 1 << 28


def _bits(symbols: NDArray[np.int32]) -> IntArray:
    """The width of each message's symbols: -2**(b-1) <= symbol < 2**(b-1)."""
    if symbols.shape[-1] == 0:
        return np.zeros(symbols.shape[:-1], dtype=np.int64)
    high = symbols.max(axis=-1).astype(np.int64)
    low = symbols.min(axis=-1).astype(np.int64)
    reach = np.maximum(high + 1, -low)
    bits = np.ceil(np.log2(np.maximum(reach, 1))).astype(np.int64) + 1
    return np.where((high == 0) & (low == 0), 0, bits)


def encoded_sizes(message: Compressed) -> IntArray:
    """Bytes that `encode_compressed` makes of each message of a stack, without making them."""
    payload = -(-_bits(message.symbols) * message.symbols.shape[-1] // 8)
    return np.asarray(_HEADER.size + 8 * message.reals.shape[-1] + payload, dtype=np.int64)


def encode_compressed(message: Compressed) -> bytes:
    """One message (no leading axes) as bytes."""
    bits = int(_bits(message.symbols))
    header = _HEADER.pack(_MAGIC, _VERSION, bits, len(message.reals), len(message.symbols))
    reals = message.reals.astype("<f8").tobytes()
    if bits == 0:
        return header + reals
    shifted = (message.symbols.astype(np.int64) + (1 << (bits - 1))).astype(np.uint64)
    places = np.arange(bits - 1, -1, -1, dtype=np.uint64)
    digits = ((shifted[:, None] >> places) & np.uint64(1)).astype(np.uint8)
    return header + reals + np.packbits(digits.ravel()).tobytes()


def decode_compressed(data: bytes) -> Compressed:
    """The message these bytes hold; raises `WireError` for anything else."""
    if len(data) < _HEADER.size:
        raise WireError(f"expected at least {_HEADER.size} bytes; got {len(data)}.")
    magic, version, bits, n_reals, n_symbols = _HEADER.unpack_from(data)
    if magic != _MAGIC or version != _VERSION:
        raise WireError(f"not a fedem message of format {_VERSION}: it begins {data[:3].hex()}.")
    if bits > 32 or n_reals > _LARGEST or n_symbols > _LARGEST:
        raise WireError(f"impossible header: {bits} bits, {n_reals} reals, {n_symbols} symbols.")
    body = _HEADER.size + 8 * n_reals
    expected = body + -(-bits * n_symbols // 8)
    if len(data) != expected:
        raise WireError(f"expected {expected} bytes from the header; got {len(data)}.")
    reals = np.frombuffer(data, dtype="<f8", count=n_reals, offset=_HEADER.size)
    symbols = np.zeros(n_symbols, dtype=np.int32)
    if bits:
        digits = np.unpackbits(np.frombuffer(data, dtype=np.uint8, offset=body))
        places = np.left_shift(np.int64(1), np.arange(bits - 1, -1, -1, dtype=np.int64))
        values = digits[: bits * n_symbols].reshape(n_symbols, bits) @ places
        symbols = (values - (1 << (bits - 1))).astype(np.int32)
    return Compressed(reals.astype(np.float64), symbols)


def encode_floats(values: FloatArray) -> bytes:
    """A vector of float64: summaries, statistics."""
    return encode_compressed(Compressed(np.ravel(values), np.empty(0, dtype=np.int32)))


def decode_floats(data: bytes) -> FloatArray:
    """The inverse of `encode_floats`."""
    message = decode_compressed(data)
    if len(message.symbols):
        raise WireError(f"expected floats alone; got {len(message.symbols)} symbols too.")
    return message.reals


def encode_request(round_: int, generation: int, accepted: int, statistics: FloatArray) -> bytes:
    """A server's message to one worker; the worker derives the parameters by T."""
    return _ENVELOPE.pack(round_, generation, accepted) + encode_floats(statistics)


def encode_reply(worker: int, round_: int, evaluations: int, message: Compressed) -> bytes:
    """A worker's upload."""
    return _ENVELOPE.pack(worker, round_, evaluations) + encode_compressed(message)


def request_size(q: int) -> int:
    """Bytes of `encode_request` for statistics in R^q."""
    return _ENVELOPE.size + _HEADER.size + 8 * q


def reply_sizes(message: Compressed) -> IntArray:
    """Bytes of `encode_reply` for each message of a stack."""
    return _ENVELOPE.size + encoded_sizes(message)
