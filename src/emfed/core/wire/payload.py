"""Payloads: everything in a message that depends on data.

A compressed vector is its reals, in the shortest of bfloat16, float32 and float64 that holds them
all exactly (or in one byte each, where the operator takes them from `emfed.core.objects.GRID`),
then its symbols by the code of `emfed.core.wire.entropy`. How many of each there are both ends know
from the operator and the dimension, so it is not sent.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from emfed.core.errors import WireError
from emfed.core.objects import GRID
from emfed.core.protocols import Compressed, FloatArray, Form, IntArray
from emfed.core.wire.entropy import CHUNK, PARAMETERS, code_sizes, decode_symbols, encode_symbols

_WIDTHS = np.array([2, 4, 8, 1], dtype=np.int64)
_GRID = 3
"""The format of reals that lie on `GRID`, one byte each."""
_FORMAT_UNIT = PARAMETERS
"""The first byte is format * 64 + the parameter of the first chunk of symbols."""


def _formats(reals: FloatArray) -> IntArray:
    """0, 1 or 2 for each message: bfloat16, float32 or float64 holds its reals exactly."""
    with np.errstate(over="ignore", under="ignore"):
        single = reals.astype(np.float32)
    exact = (single == reals).all(axis=-1)
    short = exact & ((single.view(np.uint32) & 0xFFFF) == 0).all(axis=-1)
    return np.where(short, 0, np.where(exact, 1, 2))


def _places(reals: FloatArray) -> IntArray:
    """Where in the grid each number would stand."""
    return np.minimum(np.searchsorted(GRID, reals), len(GRID) - 1)


def payload_sizes(message: Compressed, form: Form, dither: FloatArray | None = None) -> IntArray:
    """Bytes of `encode_payload` for each message of a stack ``(messages, ...)``, not encoding."""
    formats = _GRID if form.on_grid else _formats(message.reals)
    sizes = _WIDTHS[formats] * np.full(len(message.reals), form.reals)
    if form.symbols == 0:
        return 1 + sizes
    code = code_sizes(message.symbols, form.bound, dither)
    return sizes + code + (1 if form.symbols > CHUNK else 0)


def encode_payload(message: Compressed, form: Form, dither: FloatArray | None = None) -> bytes:
    """One compressed vector as bytes."""
    if message.reals.shape != (form.reals,) or message.symbols.shape != (form.symbols,):
        raise WireError(
            f"expected {form.reals} reals and {form.symbols} symbols; got shapes "
            f"{message.reals.shape} and {message.symbols.shape}."
        )
    if not np.isfinite(message.reals).all():
        raise WireError("a real is not finite.")
    kind = _GRID if form.on_grid else int(_formats(message.reals))
    reals = _pack_reals(message.reals, kind)
    code = encode_symbols(message.symbols, form.bound, dither)
    if 0 < form.symbols <= CHUNK:
        return bytes([kind * _FORMAT_UNIT + code[0]]) + reals + code[1:]
    return bytes([kind * _FORMAT_UNIT]) + reals + code


def decode_payload(data: bytes, form: Form, dither: FloatArray | None = None) -> Compressed:
    """The compressed vector these bytes hold; raises `WireError` if they cannot."""
    if not data:
        raise WireError("an empty payload.")
    kind, parameter = divmod(data[0], _FORMAT_UNIT)
    if (kind == _GRID) != form.on_grid:
        raise WireError(f"format {kind} of the reals is not the one of this operator.")
    end = 1 + int(_WIDTHS[kind]) * form.reals
    if len(data) < end:
        raise WireError(f"expected {form.reals} reals; the payload has {len(data)} bytes.")
    reals = _unpack_reals(data[1:end], kind)
    if not np.isfinite(reals).all():
        raise WireError("a real is not finite.")
    if 0 < form.symbols <= CHUNK:
        code = bytes([parameter]) + data[end:]
    elif parameter:
        raise WireError(f"the first byte of this payload cannot be {data[0]}.")
    else:
        code = data[end:]
    return Compressed(reals, decode_symbols(code, form.symbols, form.bound, dither))


def _pack_reals(reals: FloatArray, kind: int) -> bytes:
    if kind == _GRID:
        return _places(reals).astype(np.uint8).tobytes()
    if kind == 2:
        return reals.astype("<f8").tobytes()
    single = reals.astype("<f4")
    return single.tobytes() if kind == 1 else (single.view("<u4") >> 16).astype("<u2").tobytes()


def _unpack_reals(data: bytes, kind: int) -> FloatArray:
    if kind == _GRID:
        return GRID[np.frombuffer(data, dtype=np.uint8)]
    if kind == 2:
        return np.frombuffer(data, dtype="<f8").astype(np.float64)
    if kind == 1:
        bits: NDArray[np.uint32] = np.frombuffer(data, dtype="<u4").astype(np.uint32)
    else:
        bits = np.frombuffer(data, dtype="<u2").astype(np.uint32) << np.uint32(16)
    with np.errstate(invalid="ignore"):  # a signalling NaN is refused by the caller
        return bits.view(np.float32).astype(np.float64)


FORMATS = {"bfloat16": 0, "float32": 1, "float64": 2}


def encode_floats(values: FloatArray, precision: str = "float64") -> bytes:
    """Numbers alone: summaries, constants, statistics. They must be exact in the precision."""
    flat, kind = np.ravel(values), FORMATS[precision]
    data = bytes([kind * _FORMAT_UNIT]) + _pack_reals(flat, kind)
    if kind < 2 and not np.array_equal(_unpack_reals(data[1:], kind), flat):
        raise WireError(f"some number is not exact in {precision}: round it first.")
    return data


def decode_floats(data: bytes, count: int | None = None) -> FloatArray:
    """The inverse of `encode_floats`, for ``count`` numbers or as many as there are."""
    if is_grid(data):
        return _decode_small(data, count)
    if count is None:
        width = int(_WIDTHS[data[0] // _FORMAT_UNIT]) if data else 1
        count, left = divmod(len(data) - 1, width)
        if left:
            raise WireError(f"{len(data) - 1} bytes are no numbers of {width} bytes.")
    return decode_payload(data, Form(count, 0)).reals


def floats_size(count: int, precision: str = "float64") -> int:
    """Bytes of `encode_floats` for ``count`` numbers."""
    return 1 + int(_WIDTHS[FORMATS[precision]]) * count


# Statistics that were rounded to multiples of a power of two, so that they take few bytes.

_SMALL, _FINEST, _MOST_BITS = 193, 40, 30
"""The first byte of numbers told as multiples of a step, the exponent of the finest step, and the
bits of the largest multiple."""


def _small(values: FloatArray) -> tuple[int, int, IntArray] | None:
    """Numbers as multiples of 2^-e: e, the bits of the largest, all; None: they are no such."""
    if (
        not len(values)
        or not np.abs(values).max() < 2.0**20
        or np.signbit(values[values == 0]).any()
    ):
        return None
    fine = values * 2.0**_FINEST
    if not np.array_equal(fine, np.rint(fine)):
        return None
    whole = fine.astype(np.int64)
    lowest = np.bitwise_or.reduce(whole)
    spare = min(_FINEST, int(lowest & -lowest).bit_length() - 1) if lowest else _FINEST
    multiples = whole >> spare
    bits = int(np.abs(multiples).max()).bit_length()
    return None if bits > _MOST_BITS else (_FINEST - spare, bits, multiples)


def encode_numbers(values: FloatArray) -> bytes:
    """`encode_floats`, or the numbers as small multiples of a power of two if that is shorter."""
    found = _small(values)
    if found is None:
        return encode_floats(values)
    exponent, bits, multiples = found
    code = encode_symbols(multiples.astype(np.int32), 1 << bits, None)
    small = bytes([_SMALL, exponent, bits]) + code
    return small if len(small) < floats_size(len(values)) else encode_floats(values)


def is_grid(data: bytes) -> bool:
    """Whether these are the bytes of multiples of a power of two."""
    return data[:1] == bytes([_SMALL])


def _decode_small(data: bytes, count: int | None) -> FloatArray:
    if count is None or len(data) < 3 or data[1] > _FINEST or data[2] > _MOST_BITS:
        raise WireError("multiples of a power of two that cannot be, or that nobody expects.")
    multiples = decode_symbols(data[3:], count, 1 << data[2], None).astype(np.float64)
    return multiples * float(0.5 ** data[1])
