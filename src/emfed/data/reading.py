"""Whatever a user calls a table, as an array of numbers with named columns."""

from __future__ import annotations

from typing import Any

import numpy as np
from array_api_compat import is_array_api_obj, is_numpy_array

from emfed.core.errors import DataError


def read_table(table: Any, where: str) -> tuple[Any, tuple[str, ...] | None]:
    """A table as an array of float32 or float64, not copied if it is one, and its columns."""
    columns = None
    if hasattr(table, "columns") and hasattr(table, "to_numpy"):
        columns = tuple(str(name) for name in table.columns)
        if len(set(columns)) != len(columns):
            raise DataError(f"{where} has two columns of one name: {list(columns)}.")
        table = _frame_values(table, where)
    if is_array_api_obj(table) and not is_numpy_array(table):
        return table, columns
    if isinstance(table, np.ma.MaskedArray):
        raise DataError(f"{where}: masked arrays are not taken; fill or drop what is masked.")
    try:
        rows = np.asarray(table)
    except ValueError:
        raise DataError(
            f"{where}: expected a table (rows, columns); rows differ in length."
        ) from None
    if rows.dtype.kind not in "biuf":
        raise DataError(f"{where}: expected numbers; got {_kind_of(table, rows)}.")
    if rows.dtype not in (np.float64, np.float32):
        rows = rows.astype(np.float64)
    if rows.ndim < 2:
        raise DataError(
            f"{where}: expected a table (rows, columns); got shape {rows.shape}. "
            "Use x.reshape(-1, 1) for a single column, x.reshape(1, -1) for a single row."
        )
    return rows, columns


def _kind_of(table: Any, rows: Any) -> str:
    """What a table that is none seems to be."""
    if rows.ndim == 0:
        return f"an object of type {type(table).__name__}"
    return f"dtype {rows.dtype}"


def _frame_values(frame: Any, where: str) -> Any:
    """A data frame's numbers; a column of anything else is named."""
    parts = []
    for name in frame.columns:
        series = frame[name]
        kind = str(series.dtype)
        values = series.to_numpy()
        if values.dtype.kind == "O" and kind.startswith(("Int", "UInt", "Float", "boolean")):
            values = np.array([np.nan if v is None or v != v else v for v in _plain(series)], float)
        if values.dtype.kind not in "biuf":
            raise DataError(
                f"{where}: column {str(name)!r} holds {kind}, not numbers; encode or drop it "
                "first, or, if it names the workers, give it as groups."
            )
        parts.append(values)
    if all(p.dtype == np.float32 for p in parts) and parts:
        return np.stack(parts, axis=1)
    whole = [p.astype(np.float64) for p in parts]
    return np.stack(whole, axis=1) if parts else np.empty((len(frame), 0))


def _plain(series: Any) -> Any:
    """A nullable column's values with None where there is none."""
    return [
        None if missing else value for value, missing in zip(series, series.isna(), strict=True)
    ]


def match_columns(rows: Any, these: tuple[str, ...], columns: tuple[str, ...], where: str) -> Any:
    """Rows with ``these`` columns in the order of ``columns``; refuse other names."""
    if these == columns:
        return rows
    missing = [c for c in columns if c not in these]
    extra = [c for c in these if c not in columns]
    if missing or extra:
        raise DataError(
            f"{where}: expected the columns {list(columns)}; missing {missing}, extra {extra}."
        )
    return rows[:, [these.index(c) for c in columns]]
