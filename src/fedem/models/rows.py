"""Looking at a worker's rows before the first round: are they usable, where do they lie?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from array_api_compat import array_namespace, device

from fedem.errors import DataError
from fedem.models.matrices import pack
from fedem.models.mixture import blocks, to_numpy
from fedem.protocols import FloatArray

LARGEST = 1e140
"""Larger numbers cannot be squared in doubles with room to spare."""


def check_rows(
    data: Any,
    where: str,
    columns: Sequence[str] | None = None,
    expected: int | None = None,
    first: int = 0,
) -> None:
    """Raise `DataError`, naming ``where``, unless this is a table of finite numbers.

    ``first`` is the number of the first row, where this is a part of a table.
    """
    if data.ndim != 2 or data.shape[1] == 0:
        raise DataError(
            f"{where}: expected a table (rows, columns) with at least one column; "
            f"got shape {tuple(data.shape)}."
        )
    if data.shape[0] == 0:
        raise DataError(f"{where} has no rows; expected at least one: leave out what is empty.")
    if expected is not None and data.shape[1] != expected:
        raise DataError(f"{where}: expected {expected} columns; got {data.shape[1]}.")
    xp = array_namespace(data)
    for rows, _ in blocks(data, None, data.shape[1]):
        good = xp.isfinite(rows)
        if rows.dtype == xp.float64:
            good = good & (xp.abs(rows) <= LARGEST)
        if not bool(xp.all(good)):
            bad = np.argwhere(to_numpy(good) == 0)
            row, column = int(bad[0, 0]), int(bad[0, 1])
            name = repr(columns[column]) if columns is not None else str(column)
            raise DataError(
                f"{where}: row {first + row}, column {name} is {float(rows[row, column])}; this "
                "model needs finite numbers (of at most 1e140). Drop or impute such rows first."
            )
        first += rows.shape[0]


def moments(data: Any, weights: Any | None, full: bool) -> tuple[FloatArray, FloatArray]:
    """Mean ``(..., d)`` and, about it, mean squares ``(..., d)`` or packed products.

    Two passes in blocks: centred sums do not cancel where means are large against spreads.
    """
    xp = array_namespace(data)
    if weights is not None:
        weights = xp.asarray(weights, device=device(data))
    total = data.shape[-2] if weights is None else xp.sum(weights, axis=-1)[..., None]
    mean: Any = 0.0
    for rows, w in blocks(data, weights, data.shape[-1]):
        rows = xp.astype(rows, xp.float64)
        mean = mean + xp.sum(rows if w is None else rows * w[..., None], axis=-2)
    mean = mean / total
    scatter: Any = 0.0
    for rows, w in blocks(data, weights, data.shape[-1]):
        centred = xp.astype(rows, xp.float64) - mean[..., None, :]
        weighted = centred if w is None else centred * w[..., None]
        if full:
            scatter = scatter + xp.matrix_transpose(weighted) @ centred
        else:
            scatter = scatter + xp.sum(weighted * centred, axis=-2)
    if full and weights is not None:
        total = total[..., None]
    spread = to_numpy(scatter / total)
    return to_numpy(mean), pack(spread) if full else spread


def combine_moments(
    summaries: Mapping[str, FloatArray], shares: FloatArray, full: bool
) -> dict[str, FloatArray]:
    """``mean`` and ``scatter`` of a union of rows from those of its parts.

    The scatter within the parts, and that of their means about the common one.
    """
    means = summaries["mean"]
    mean = shares @ means
    away = means - mean
    between = pack((away.T * shares) @ away) if full else shares @ away**2
    return {"mean": mean, "scatter": shares @ summaries["scatter"] + between}
