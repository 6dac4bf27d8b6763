"""Sequences of unequal length as one array."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from emfed.core.errors import DataError


def pad_sequences(data: Any) -> Any:
    """Make sequences of unequal length one array, their ends filled up with NaN.

    Parameters
    ----------
    data : list of arrays, or dict or list of such lists
        Sequences of shape (time, columns): those of one worker, or those of each.

    Returns
    -------
    array, or dict or list of arrays
        Arrays of shape (sequences, time, columns) in the form of ``data``, all as long as the
        longest.

    Raises
    ------
    DataError
        If something is not a sequence, or sequences differ in their columns.

    Examples
    --------
    >>> import numpy as np
    >>> import emfed
    >>> emfed.data.pad_sequences([np.ones((2, 1)), np.ones((4, 1))]).shape
    (2, 4, 1)
    """
    if isinstance(data, Mapping):
        return dict(zip(data, _padded(list(data.values())), strict=True))
    if not isinstance(data, (list, tuple)) or not len(data):
        raise DataError("pad_sequences: expected a list of sequences, or a dict or list of those.")
    if isinstance(data[0], (list, tuple)):
        return _padded(list(data))
    return _padded([list(data)])[0]


def _padded(workers: list[Any]) -> list[Any]:
    """One array per worker, all of the same length in time."""
    tables = [[np.asarray(s, dtype=np.float64) for s in worker] for worker in workers]
    shapes = sorted({s.shape for worker in tables for s in worker})
    if not shapes or any(len(shape) != 2 or 0 in shape for shape in shapes):
        raise DataError(
            f"pad_sequences: expected sequences (time, columns); got shapes {shapes[:3]}."
        )
    widths = sorted({width for _, width in shapes})
    if len(widths) > 1:
        raise DataError(f"pad_sequences: sequences have different numbers of columns, {widths}.")
    longest, width = max(length for length, _ in shapes), widths[0]
    out = []
    for worker in tables:
        array = np.full((len(worker), longest, width), np.nan)
        for row, sequence in zip(array, worker, strict=True):
            row[: len(sequence)] = sequence
        out.append(array)
    return out
