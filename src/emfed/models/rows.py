"""Looking at a worker's rows before the first round: are they usable, where do they lie?"""

from __future__ import annotations

from typing import Any

import numpy as np
from array_api_compat import array_namespace, device

from emfed.core.errors import DataError
from emfed.core.protocols import FloatArray, Names, Summaries
from emfed.core.wording import Setting, Wording
from emfed.models.devices import Ragged
from emfed.models.matrices import pack, triangle
from emfed.models.mixture import blocks, to_numpy
from emfed.models.naming import row_name
from emfed.models.parameters import is_constant

LARGEST = 1e140
"""Larger numbers cannot be squared in doubles with room to spare."""


def check_table(data: Any, where: str, expected: int | None = None) -> None:
    """Raise `DataError`, naming ``where``, unless this has rows and (so many) columns."""
    if data.ndim != 2 or data.shape[1] == 0:
        raise DataError(
            f"{where}: expected a table (rows, columns) with at least one column; "
            f"got shape {tuple(data.shape)}."
        )
    if data.shape[0] == 0:
        raise DataError(f"{where} has no rows; expected at least one: leave out what is empty.")
    if expected is not None and data.shape[1] != expected:
        raise DataError(f"{where}: expected {expected} columns; got {data.shape[1]}.")


def check_rows(
    data: Any,
    where: str,
    columns: Names = None,
    expected: int | None = None,
    first: int = 0,
) -> None:
    """Raise `DataError`, naming ``where``, unless this is a table of finite numbers.

    ``first`` is the number of the first row, where this is a part of a table.
    """
    check_table(data, where, expected)
    xp = array_namespace(data)
    for rows, _ in blocks(data, None, data.shape[1]):
        # NaN is the least and the largest. Two reductions, and nothing is written: four times as
        # fast as to ask every number (1,000,000 x 20 doubles).
        if not (float(xp.min(rows)) >= -LARGEST and float(xp.max(rows)) <= LARGEST):
            bad = np.argwhere(~(np.abs(to_numpy(rows)) <= LARGEST))
            row, column = int(bad[0, 0]), int(bad[0, 1])
            name = repr(columns[column]) if columns is not None else str(column)
            value = float(rows[row, column])
            hole: str = ""
            if value != value:
                missing = Setting("missing", True)
                hole = Wording(" (a Gaussian mixture takes missing values with {})", missing)
            raise DataError(
                Wording(
                    "{}: {}, column {} is {}; this model needs finite numbers (of at most 1e140). "
                    "Drop or impute such rows first{}.",
                    *(where, row_name(first + row), name, value, hole),
                )
            )
        first += rows.shape[0]


def check_seen(
    data: Any,
    where: str,
    columns: Names = None,
    expected: int | None = None,
    first: int = 0,
) -> None:
    """Raise `DataError` unless this is a table of finite numbers, or NaN for what is missing."""
    check_table(data, where, expected)
    for rows, _ in blocks(data, None, data.shape[1]):
        values = to_numpy(rows)
        bad = ~(np.isnan(values) | (np.abs(values) <= LARGEST))
        if bad.any():
            row, column = np.argwhere(bad)[0].tolist()
            name = str(column) if columns is None else repr(columns[column])
            raise DataError(
                f"{where}: {row_name(first + row)}, column {name} is {values[row, column]}; "
                "expected a finite number (of at most 1e140), or NaN for a missing value."
            )
        first += len(values)


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


def mean_length(summary: Summaries) -> float:
    """Return the steps of a row, on average: 1, except where rows are sequences."""
    return float(np.ravel(summary["length"])[0]) if "length" in summary else 1.0


def combine_moments(summaries: Summaries, shares: FloatArray) -> dict[str, FloatArray]:
    """``mean`` and ``scatter`` (squares or packed products) of a union from those of its parts.

    The scatter within the parts, and that of their means about the common one.
    """
    means = summaries["mean"]
    full = summaries["scatter"].shape[-1] != means.shape[-1]
    mean = shares @ means
    away = means - mean
    between = pack((away.T * shares) @ away) if full else shares @ away**2
    scatter = shares @ summaries["scatter"] + between
    return {"mean": mean, "scatter": without_rounding(mean, scatter)}


def without_rounding(mean: FloatArray, scatter: FloatArray) -> FloatArray:
    """Squares, or packed products, with zeros for columns that hold one value.

    What rounding leaves of their variance (1e-31) would be a unit to start from.
    """
    d = len(mean)
    rows, columns, diagonal = triangle(d)
    full = len(scatter) != d
    constant = is_constant(mean, scatter[diagonal] if full else scatter)
    return np.where(constant[rows] | constant[columns] if full else constant, 0.0, scatter)


def total_weight(data: Any, weights: Any | None) -> FloatArray:
    """The sum of the weights."""
    if isinstance(data, Ragged):
        return np.asarray(data.totals)
    if weights is None:
        return np.full(data.shape[:-2], float(data.shape[-2]))
    return to_numpy(weights).sum(axis=-1)


def mean_over_rows(values: FloatArray, weights: Any | None) -> FloatArray:
    """The (weighted) mean of numbers ``(..., rows)``."""
    if weights is None:
        return np.asarray(values.mean(axis=-1))
    w = to_numpy(weights)
    return np.asarray((values * w).sum(axis=-1) / w.sum(axis=-1))


def seen_moments(data: Any, weights: Any | None) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Share of values seen, their mean and, about it, mean square: ``(..., d)`` each.

    Two passes, like `moments`; where nothing was seen, mean and square are 0.
    """
    xp = array_namespace(data)
    counts: Any = 0.0
    sums: Any = 0.0
    for rows, w in blocks(data, weights, data.shape[-1]):
        seen = ~xp.isnan(rows)
        y = xp.where(seen, xp.astype(rows, xp.float64), 0.0)
        there = xp.astype(seen, xp.float64)
        counts = counts + xp.sum(there if w is None else there * w[..., None], axis=-2)
        sums = sums + xp.sum(y if w is None else y * w[..., None], axis=-2)
    some = xp.where(counts > 0, counts, 1.0)
    mean = sums / some
    squares: Any = 0.0
    for rows, w in blocks(data, weights, data.shape[-1]):
        y = xp.astype(rows, xp.float64) - mean[..., None, :]
        y = xp.where(xp.isnan(y), 0.0, y)
        squares = squares + xp.sum(y * y if w is None else y * y * w[..., None], axis=-2)
    shares = to_numpy(counts) / total_weight(data, weights)[..., None]
    return shares, to_numpy(mean), to_numpy(squares / some)


def combine_seen(summaries: Summaries, shares: FloatArray) -> dict[str, FloatArray]:
    """``observed``, ``mean`` and ``scatter`` of a union: parts count by what they saw."""
    seen = shares[:, None] * summaries["observed"]
    total = seen.sum(axis=0)
    part = seen / np.where(total > 0, total, 1.0)
    mean = (part * summaries["mean"]).sum(axis=0)
    scatter = (part * (summaries["scatter"] + (summaries["mean"] - mean) ** 2)).sum(axis=0)
    return {"observed": total, "mean": mean, "scatter": without_rounding(mean, scatter)}
