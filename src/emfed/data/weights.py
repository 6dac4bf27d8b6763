"""Weights of rows, and the order that groups put rows in."""

from __future__ import annotations

from typing import Any

import numpy as np

from emfed.core.errors import DataError
from emfed.core.protocols import FloatArray, IntArray


def check_row_weights(given: Any, count: int, where: str, some: bool = False) -> FloatArray:
    """Numbers >= 0, one per row; with ``some``, not all of them 0."""
    values = given.to_numpy() if hasattr(given, "to_numpy") else given
    try:
        weights = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError):
        raise DataError(f"{where} must be numbers, one per row.") from None
    if weights.shape != (count,):
        raise DataError(
            f"{where} must have one number per row: expected {count}, got shape {weights.shape}."
        )
    bad = np.flatnonzero(~(np.isfinite(weights) & (weights >= 0)))
    if len(bad):
        raise DataError(
            f"{where}: row {bad[0]} has {weights[bad[0]]}; expected finite numbers >= 0."
        )
    if some and not weights.any():
        raise DataError(f"{where}: all weights are zero; leave out a worker that does not count.")
    return weights


def group_order(labels: Any) -> tuple[Any, IntArray | None, IntArray]:
    """The groups, the order that brings their rows together (None: they are), and their sizes."""
    values, which, counts = np.unique(labels, return_inverse=True, return_counts=True)
    if not np.any(which[1:] < which[:-1]):
        return values, None, counts
    return values, np.argsort(which, kind="stable"), counts
