"""What a worker tells of the cells of a table that it observed: sent once, and exactly.

Three columns: the gaps between the cells' positions, how often each was seen, and the sums of their
values. Every column takes the shortest of a few codes. Positions of scattered cells and small
counts are shortest by the symbol code of `emfed.core.wire.entropy`, runs and repeated patterns
deflated, and numbers with a fraction, which often are functions of small counts, as a list of the
values that occur and their places in it.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from emfed.core.errors import WireError
from emfed.core.protocols import FloatArray, IntArray, WorkerCells
from emfed.core.wire.counts import count_sizes, decode_count, encode_count
from emfed.core.wire.entropy import code_sizes, decode_symbols, encode_symbols

_U32 = struct.Struct("<I")
_FOLDED, _SIGNED, _DISTINCT = 0, 1, 7
"""Kinds of a column: whole numbers that are not negative, and any, as symbols; a list of values."""
_TYPES = {2: "<i1", 3: "<i2", 4: "<i4", 5: "<f4", 6: "<f8"}
"""Kinds that are deflated, and the type of their numbers."""
_MOST_SYMBOL = 2**31 - 2
"""The largest whole number that is coded as a symbol; larger ones are deflated."""


class _Coded(NamedTuple):
    """A column in one of the codes: how long it is, and its bytes when they are asked for."""

    size: int
    make: Callable[[], bytes]


def encode_cells(cells: WorkerCells, size: int) -> bytes:
    """One worker's cells, of a table with so many."""
    if len(cells.keys) and (np.any(np.diff(cells.keys) <= 0) or cells.keys[-1] >= size):
        raise WireError(f"cells must have increasing positions below {size}.")
    columns = (column.make() for column in _columns(cells))
    told = b"".join(encode_count(len(column)) + column for column in columns)
    return _U32.pack(len(cells.keys)) + told


def cells_size(cells: WorkerCells) -> int:
    """Bytes of `encode_cells`."""
    sizes = np.array([column.size for column in _columns(cells)])
    return _U32.size + int((count_sizes(sizes) + sizes).sum())


def decode_cells(data: bytes, size: int) -> WorkerCells:
    """The inverse of `encode_cells`; raises `WireError` for anything else."""
    if len(data) < _U32.size:
        raise WireError(f"observed cells take at least {_U32.size} bytes; got {len(data)}.")
    count, position = _U32.unpack_from(data)[0], _U32.size
    if not 0 < count <= size:
        raise WireError(f"a worker cannot have observed {count} of {size} cells.")
    columns = []
    for _ in range(3):
        length, start = decode_count(data, position)
        position = start + length
        if position > len(data):
            raise WireError("observed cells end inside a column.")
        columns.append(_decoded(data[start:position], count))
    gaps, weights, sums = columns
    if position != len(data):
        raise WireError("bytes follow the observed cells.")
    whole = np.all(gaps >= 0) and np.all(gaps == np.floor(gaps))
    if not whole or gaps.sum() + count > size:
        raise WireError(f"positions of cells are not increasing, or not below {size}.")
    if not np.all(weights > 0):
        raise WireError("a worker has cells, and each counts for more than nothing.")
    return WorkerCells(np.cumsum(gaps.astype(np.int64) + 1) - 1, weights, sums)


def _columns(cells: WorkerCells) -> list[_Coded]:
    gaps = np.diff(np.concatenate([[-1], cells.keys])) - 1
    return [_column(np.asarray(c, np.float64)) for c in (gaps, cells.weights, cells.sums)]


def _column(values: FloatArray) -> _Coded:
    """Numbers in their shortest code."""
    if np.array_equal(values, np.rint(values)) and np.abs(values).max(initial=0) <= _MOST_SYMBOL:
        return _whole(values.astype(np.int64))
    found, places = np.unique(values, return_inverse=True)
    listed, rest = _deflated(found).make(), _whole(places.reshape(-1))
    front = bytes([_DISTINCT]) + _U32.pack(len(found)) + encode_count(len(listed)) + listed
    return min(
        (_deflated(values), _Coded(len(front) + rest.size, lambda: front + rest.make())),
        key=lambda coded: coded.size,
    )


def _whole(values: IntArray) -> _Coded:
    """Whole numbers as symbols or deflated."""
    kind, symbols = _SIGNED, values
    if values.min(initial=0) >= 0:
        kind, symbols = _FOLDED, np.where(values % 2, -(values + 1) // 2, values // 2)
    bound, narrow = max(1, int(np.abs(symbols).max(initial=1))), symbols.astype(np.int32)
    front = bytes([kind]) + _U32.pack(bound)
    length = len(front) + int(code_sizes(narrow[None], bound, None)[0])
    coded = _Coded(length, lambda: front + encode_symbols(narrow, bound, None))
    return min((coded, _deflated(values.astype(np.float64))), key=lambda one: one.size)


def _deflated(values: FloatArray) -> _Coded:
    """Numbers in the narrowest type that holds them all, deflated."""
    with np.errstate(all="ignore"):
        kind, told = next(
            (kind, told)
            for kind, name in _TYPES.items()
            if np.array_equal((told := values.astype(name)).astype(np.float64), values)
        )
    planes = told.view(np.uint8).reshape(len(told), -1).T  # all first bytes, then all second ones
    coder = zlib.compressobj(9, wbits=-15)
    data = bytes([kind]) + coder.compress(planes.tobytes()) + coder.flush()
    return _Coded(len(data), lambda: data)


def _decoded(data: bytes, count: int) -> FloatArray:
    """So many finite numbers from one column."""
    if not data:
        raise WireError("a column of cells is empty.")
    kind, rest = data[0], data[1:]
    if kind in _TYPES:
        values = _inflated(rest, np.dtype(_TYPES[kind]), count)
    elif kind in (_FOLDED, _SIGNED):
        values = _symbols(rest, kind, count)
    elif kind == _DISTINCT:
        values = _listed(rest, count)
    else:
        raise WireError(f"unknown kind {kind} of a column of cells.")
    if not np.isfinite(values).all():
        raise WireError("a number of a cell is not finite.")
    return values


def _inflated(data: bytes, kind: np.dtype, count: int) -> FloatArray:
    coder = zlib.decompressobj(wbits=-15)
    try:
        told = coder.decompress(data, count * kind.itemsize)
    except zlib.error as error:
        raise WireError(f"a column of cells that cannot be read ({error}).") from None
    if len(told) != count * kind.itemsize or not coder.eof or coder.unused_data:
        raise WireError(f"a column of cells has not {count} numbers.")
    planes = np.frombuffer(told, dtype=np.uint8).reshape(kind.itemsize, count)
    return np.ascontiguousarray(planes.T).view(kind)[:, 0].astype(np.float64)


def _symbols(data: bytes, kind: int, count: int) -> FloatArray:
    if len(data) < _U32.size:
        raise WireError("a column of cells ends inside its bound.")
    bound = _U32.unpack_from(data)[0]
    if not 0 < bound <= _MOST_SYMBOL:
        raise WireError(f"symbols of cells cannot reach {bound}.")
    told = decode_symbols(data[_U32.size :], count, bound, None).astype(np.int64)
    if kind == _FOLDED:
        told = np.where(told < 0, -2 * told - 1, 2 * told)
    return told.astype(np.float64)


def _listed(data: bytes, count: int) -> FloatArray:
    if len(data) < _U32.size:
        raise WireError("a list of values of cells is cut short.")
    found = _U32.unpack_from(data)[0]
    length, start = decode_count(data, _U32.size)
    if not 0 < found <= count or data[start : start + 1] == bytes([_DISTINCT]):
        raise WireError(f"{found} values cannot be those of {count} cells.")
    values = _decoded(data[start : start + length], found)
    rest = data[start + length :]
    if rest[:1] == bytes([_DISTINCT]):
        raise WireError("places in a list of values are whole numbers.")
    places = _decoded(rest, count)
    if np.any(places != np.floor(places)) or places.min() < 0 or places.max() >= found:
        raise WireError("a cell has a value that is not in the list.")
    return values[places.astype(np.int64)]
