"""Rows with missing values, grouped by which of their columns were seen."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from emfed.core.protocols import BoolArray, FloatArray, IntArray
from emfed.models.mixture import to_numpy

BLOCK_ELEMENTS = 1 << 22
"""Numbers looked at together, so that memory is flat in the number of rows."""
STACK_ELEMENTS = 1 << 20
"""Doubles in the parameters of the patterns that run together."""


class Stack(NamedTuple):
    """Patterns of similar size that run together."""

    owners: IntArray
    """The worker of each, ``(u,)``."""
    seen: BoolArray
    """Which columns were seen, ``(u, d)``."""
    rows: FloatArray
    """Rows in the user's units, the origin for what is missing, ``(u, m, d)``."""
    weights: FloatArray | None
    """``(u, m)``, zero where a row only fills up; None if all are one."""
    positions: IntArray
    """The number of each row among all of all workers, ``(u, m)``."""


def _units(seen: BoolArray, owners: IntArray) -> tuple[IntArray, IntArray]:
    """Rows in an order in which (worker, pattern) are together, and where each such unit begins."""
    d = seen.shape[1]
    codes = np.packbits(seen, axis=1)
    padded = np.zeros((len(seen), -(-codes.shape[1] // 8) * 8), dtype=np.uint8)
    padded[:, : codes.shape[1]] = codes
    keys = padded.view(np.uint64)
    if d <= 64 and owners[0] == owners[-1]:
        order = np.argsort(keys[:, 0], kind="stable")
    else:
        order = np.lexsort((*keys.T, owners))
    sorted_keys, sorted_owners = keys[order], owners[order]
    new = np.any(sorted_keys[1:] != sorted_keys[:-1], axis=1)
    new |= sorted_owners[1:] != sorted_owners[:-1]
    return order, np.concatenate([[0], np.flatnonzero(new) + 1])


def stacks(
    rows: FloatArray, weights: FloatArray | None, owners: IntArray, origin: FloatArray, cost: int
) -> Iterator[Stack]:
    """All rows ``(n, d)`` by pattern and worker (owners rise); ``cost`` doubles per pattern."""
    positions = np.arange(len(rows))
    if not np.isnan(rows.sum()):  # all complete
        seen = np.ones(rows.shape, dtype=np.bool_)
        order, begins = positions, np.flatnonzero(np.diff(owners, prepend=-1))
    else:
        seen = ~np.isnan(rows)
        order, begins = _units(seen, owners)
    counts = np.diff(np.append(begins, len(rows)))
    by_size = np.argsort(counts, kind="stable")
    ordered = counts[by_size]
    start = 0
    while start < len(by_size):
        first = int(ordered[start])
        widest = int(np.searchsorted(ordered, first + first // 4, side="right"))
        most = max(1, min(STACK_ELEMENTS // cost, BLOCK_ELEMENTS // (first * rows.shape[1])))
        stop = min(widest, start + most)
        units = by_size[start:stop]
        m = int(counts[units].max())
        inside = np.arange(m) < counts[units][:, None]
        where = order[begins[units][:, None] + np.where(inside, np.arange(m), 0)]
        mask = seen[where[:, 0]]
        filled = np.where(mask[:, None, :], rows[where], origin)
        w = None if inside.all() else inside.astype(np.float64)
        if weights is not None:
            w = weights[where] * inside
        yield Stack(owners[where[:, 0]], mask, filled, w, positions[where])
        start = stop


def row_stacks(data: Any, weights: Any | None, origin: FloatArray, cost: int) -> Iterator[Stack]:
    """Blocks of rows ``(..., rows, d)`` of all workers, by pattern; see `stacks`."""
    rows = np.asarray(data) if isinstance(data, np.ndarray) else to_numpy(data)
    m, d = rows.shape[-2:]
    flat = rows.reshape(-1, d)
    w = None if weights is None else np.broadcast_to(to_numpy(weights), rows.shape[:-1]).ravel()
    step = max(1, BLOCK_ELEMENTS // d)
    for start in range(0, len(flat), step):
        part = np.asarray(flat[start : start + step], dtype=np.float64)
        owners = (start + np.arange(len(part))) // m
        mine = None if w is None else w[start : start + step]
        for stack in stacks(part, mine, owners, origin, cost):
            yield stack._replace(positions=stack.positions + start)


def sizes(stack: Stack) -> FloatArray:
    """The rows, or their weights, of each pattern."""
    if stack.weights is None:
        return np.full(len(stack.owners), float(stack.rows.shape[1]))
    return stack.weights.sum(axis=-1)


def add_by_owner(total: FloatArray, owners: IntArray, values: FloatArray) -> None:
    """total[owners[i]] += values[i]: what np.add.at does, several times as fast for long rows."""
    order = np.argsort(owners, kind="stable")
    mine = owners[order]
    begins = np.flatnonzero(np.diff(mine, prepend=-1))
    rows = values if len(begins) == 1 else values[order]
    total[mine[begins]] += np.add.reduceat(rows, begins, axis=0)
