"""Whatever a user calls a table, as an array of numbers with named columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from decimal import Decimal
from numbers import Real
from typing import Any

import numpy as np
from array_api_compat import is_array_api_obj, is_numpy_array

from emfed.core.errors import DataError
from emfed.core.protocols import FloatArray
from emfed.models.devices import as_tensor

Categories = Mapping[Any, Sequence[Any]]
"""The values of columns that hold categories, by the column's name or number, in order of codes."""
ENCODE = "encode or drop it first, or, if it names the workers, give it as groups"
MISSING = ("NAType", "NaTType", "NoneType")
"""Types of what data frames hold for no value."""


def is_frame(table: Any) -> bool:
    """Whether this is a data frame, of pandas or polars."""
    return hasattr(table, "columns") and hasattr(table, "to_numpy")


def check_kind(table: Any, where: str) -> Any:
    """A table that is at hand: a lazy frame is collected, a grouping or a mask refused."""
    kind = type(table).__name__
    if kind == "LazyFrame":
        return table.collect()
    if kind.endswith("GroupBy"):
        raise DataError(
            f"{where}: got a {kind}; give the data frame itself, and the column that it is grouped "
            "by as groups."
        )
    if isinstance(table, np.ma.MaskedArray):  # numpy would go on without the mask
        raise DataError(f"{where}: masked arrays are not taken; fill or drop what is masked.")
    return table


def check_columns_differ(columns: Sequence[Any], where: str) -> None:
    """Refuse two columns of one name."""
    twice = [name for name in columns if list(columns).count(name) > 1]
    if twice:
        raise DataError(f"{where} has two columns of one name, {str(twice[0])!r}: rename one.")


def read_table(
    table: Any, where: str, categories: Categories | None = None
) -> tuple[Any, tuple[str, ...] | None]:
    """A table as an array of float32 or float64, not copied if it is one, and its columns."""
    columns, table = None, check_kind(table, where)
    if is_frame(table):
        columns = tuple(str(name) for name in table.columns)
        table = frame_values(table, where, categories)
    if is_array_api_obj(table) and not is_numpy_array(table):
        return as_tensor(table), columns
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
    if rows.dtype.kind in "OUS" and rows.ndim == 2:
        for column in range(rows.shape[1]):
            if (word := _first_word(rows[:, column])) is not None:
                return f"dtype {rows.dtype}, column {column} (counting from 0) holds {word!r}"
    return f"dtype {rows.dtype}"


def frame_values(
    frame: Any, where: str, categories: Categories | None = None, advice: str = ""
) -> Any:
    """A data frame's numbers; a column of anything else is named."""
    check_columns_differ(list(frame.columns), where)
    known = categories or {}
    parts = [
        codes(frame[name], known[name], f"{where}: column {str(name)!r}")
        if name in known
        else column_values(frame[name], f"{where}: column {str(name)!r}", advice)
        for name in frame.columns
    ]
    if all(p.dtype == np.float32 for p in parts) and parts:
        return np.stack(parts, axis=1)
    whole = [p.astype(np.float64) for p in parts]
    return np.stack(whole, axis=1) if parts else np.empty((len(frame), 0))


def column_values(series: Any, where: str, advice: str = "") -> Any:
    """One column's numbers: also truth values, and whatever holds numbers and None."""
    kind = str(series.dtype)
    named = kind.startswith(("category", "Categorical", "Enum"))
    values = np.empty(0, dtype=object) if named else series.to_numpy()
    if not named and values.dtype.kind == "O":
        values = _numbers(values)
    if named or values.dtype.kind not in "biuf" or values.ndim > 1:
        if kind == "object":  # of Python: what they are says more
            kind = next((type(v).__name__ for v in values if type(v).__name__ not in MISSING), kind)
        if kind.lower().startswith(("date", "time", "duration", "period")):
            what = "turn it into a number, such as days since a date, or drop it"
        else:
            what = advice or ENCODE
        word = None if named else _first_word(np.asarray(series))
        told = kind if word is None else f"{kind} ({word!r})"
        raise DataError(f"{where} holds {told}, not numbers; {what}.")
    return values


def _numbers(values: Any) -> Any:
    """Objects as doubles if all are numbers or missing; else as they are."""
    if not all(
        isinstance(v, (Real, Decimal, np.bool_)) or type(v).__name__ in MISSING for v in values
    ):
        return values
    return np.array([np.nan if type(v).__name__ in MISSING else float(v) for v in values])


def _first_word(values: Any) -> str | None:
    return next((str(v)[:40] for v in values if isinstance(v, str)), None)


def label(value: Any) -> str | None:
    """A category as text, the same for 3 and 3.0; None where it is missing."""
    if type(value).__name__ in MISSING or value != value:
        return None
    if isinstance(value, (float, np.floating)) and float(value).is_integer():
        return str(int(value))
    return str(value)


def levels(columns: Sequence[Any]) -> list[Any]:
    """The categories of one column at all workers: as its type declares, else what it holds.

    Numbers stand in their order, then words in theirs.
    """
    kind = columns[0].dtype
    declared = getattr(kind, "categories", None)
    if declared is not None and str(kind).startswith(("category", "Enum")):
        return [v for v in declared if label(v) is not None]
    found: dict[str, Any] = {}
    for column in columns:
        for value in _listed(column):
            if (name := label(value)) is not None:
                found.setdefault(name, value)
    return sorted(found.values(), key=_order)


def _order(value: Any) -> tuple[int, float, str]:
    try:
        return 0, float(value), str(value)
    except (TypeError, ValueError):
        return 1, 0.0, str(value)


def _listed(column: Any) -> list[Any]:
    return list(column.to_list() if hasattr(column, "to_list") else np.asarray(column).tolist())


def codes(
    column: Any, categories: Sequence[Any], where: str, first_line: int | None = None
) -> FloatArray:
    """A column of categories as their codes, NaN where one is missing."""
    place = {label(value): code for code, value in enumerate(categories)}
    values = _listed(column)
    out = np.full(len(values), np.nan)
    for row, value in enumerate(values):
        if (name := label(value)) is None:
            continue
        if name not in place:
            told = ", ".join(repr(str(v)) for v in categories[:12])
            place_words = f"row {row}" if first_line is None else f"line {row + first_line}"
            raise DataError(
                f"{where}, {place_words}: the model does not know {name!r}; it knows {told}."
            )
        out[row] = place[name]
    return out


def in_words(table: Any, categories: Categories) -> dict[Any, Sequence[Any]]:
    """The categories of a model that the table tells by name: numbers are codes of words."""
    return {
        name: values
        for name, values in categories.items()
        if name in getattr(table, "columns", ())
        and (all(_order(v)[0] == 0 for v in values) or not is_numeric(table[name]))
    }


def is_numeric(series: Any) -> bool:
    """Whether a column holds numbers."""
    try:
        column_values(series, "")
    except DataError:
        return False
    return True


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
