"""What a driver draws from rows that it has itself."""

from __future__ import annotations

from typing import Any

import numpy as np

from emfed.core.streams import Purpose, uniforms
from emfed.core.sums import FloatArray
from emfed.fitting.starts.sketch import ROWS, Sketch
from emfed.models.devices import beside
from emfed.models.mixture import to_numpy


def own_sketch(data: Any, model: Any, seed: int) -> Sketch:
    """Some of the rows of one worker alone, who can hide nothing from itself.

    Weights count as repeated rows do: rows are drawn by weight, in their order, and equal ones
    become one, sorted, so that their number and order do not matter where there are few.
    """
    count, own = int(data.counts[0]), np.zeros(1, dtype=np.int64)
    at = (np.arange(ROWS) + uniforms(seed, 0, Purpose.SKETCH, own, ROWS)[0]) / ROWS
    if data.row_weights is None:
        picks, mass = np.arange(count) if count <= ROWS else (at * count).astype(np.int64), None
    else:
        weights = np.asarray(data.row_weights[0])
        picks = np.flatnonzero(weights > 0)
        mass = weights[picks]
        if len(picks) > ROWS:  # one of each stretch of equal weight
            below = np.cumsum(mass)
            picks, mass = picks[np.searchsorted(below[:-1], at * below[-1], side="right")], None
    rows = to_numpy(data.take(own, picks[None]))[0].astype(np.float64)
    keys = np.column_stack([np.nan_to_num(rows), np.isnan(rows)])
    _, first, which = np.unique(keys, axis=0, return_index=True, return_inverse=True)
    rows, mass = rows[first], np.bincount(which.ravel(), mass)
    frame = model.clusters(1).frame
    points = np.nan_to_num((rows - frame.origin) / frame.scale)
    return Sketch(points, rows, mass / mass.sum(), beside_of(data, rows))


def beside_of(data: Any, rows: FloatArray) -> Any:
    """Rows on the GPU where those of the workers are; None if they are elsewhere."""
    if data is None:
        return None
    holder = np.array([int(np.argmax(data.counts))])
    return beside(rows, data.take(holder, np.zeros((1, 1), dtype=np.int64)))
