"""Whatever a user calls a table, as an array of numbers with named columns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from decimal import Decimal
from numbers import Real
from typing import Any

import numpy as np
from array_api_compat import is_array_api_obj, is_numpy_array

from emfed.core.errors import DataError
from emfed.core.protocols import FloatArray
from emfed.data.faults import WIDEST, FaultReport, Faults, FaultyTable, TableFault, refuse, repeated
from emfed.models.devices import as_tensor

Categories = Mapping[Any, Sequence[Any]]
"""The values of columns that hold categories, by the column's name or number, in order of codes."""
ENCODE = "encode or drop it first, or, if it names the workers, give it as groups"
DATES = "turn it into a number, such as days since a date, or drop it"
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
    faults = Faults()
    faults.add(
        TableFault(where, f"two columns of one name, {str(name)!r}", "rename one", column=str(name))
        for name, times in Counter(columns).items()
        if times > 1
    )
    faults.check()


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
    frame: Any, where: str, categories: Categories | None = None, advice: str = ENCODE
) -> Any:
    """A data frame's numbers; all cells and columns that hold anything else are in one report.

    ``advice`` says what to do about such a column, with ``{name!r}`` for its name.
    """
    check_columns_differ(list(frame.columns), where)
    known, faults, parts = categories or {}, Faults(), list[Any]()
    for name in frame.columns:
        with faults.collecting():
            if name in known:
                parts.append(codes(frame[name], known[name], where, name))
            else:
                parts.append(column_values(frame[name], where, str(name), advice))
    faults.check()
    if all(p.dtype == np.float32 for p in parts) and parts:
        return np.stack(parts, axis=1)
    whole = [p.astype(np.float64) for p in parts]
    return np.stack(whole, axis=1) if parts else np.empty((len(frame), 0))


def column_values(series: Any, where: str, name: str | int = "", advice: str = ENCODE) -> Any:
    """One column's numbers: also truth values, and whatever holds numbers and None."""
    kind = str(series.dtype)
    named = kind.startswith(("category", "Categorical", "Enum"))
    values = np.empty(0, dtype=object) if named else series.to_numpy()
    if not named and values.dtype.kind == "O":
        found = _numbers(values)
        if found.dtype.kind == "O" and kind == "object":  # of Python: what they are says more
            raise FaultyTable(not_numbers(values, where, name, advice))
        values = found
    if named or values.dtype.kind not in "biuf" or values.ndim > 1:
        word = None if named else _first_word(np.asarray(series))
        holds = kind if word is None else f"{kind} ({word!r})"
        hint = DATES if _is_date(kind) else advice.format(name=name)
        raise refuse(where, f"it holds {holds}, not numbers", hint, column=name)
    return values


def not_numbers(values: Any, where: str, name: str | int, advice: str) -> FaultReport:
    """The faults of a column of Python's objects, some of which are no numbers."""

    def fault(row: int, cell: str, times: int, most: bool) -> TableFault:
        kind = type(values[row]).__name__
        if not most:
            hint = DATES if _is_date(kind) else "write it as a number, or as NaN if not known"
            return TableFault(where, "is no number", hint, None, row, name, cell, times)
        holds = f"{kind} ({cell[:WIDEST]!r})" if kind == "str" else kind
        hint = DATES if _is_date(kind) else advice.format(name=name)
        return TableFault(where, f"it holds {holds}, not numbers", hint, None, row, name)

    bad = [(row, str(value)) for row, value in enumerate(values) if not _is_number(value)]
    empty = sum(type(value).__name__ in MISSING for value in values)
    faults = Faults()
    faults.add(repeated(bad, len(values) - len(bad) - empty, fault))
    return faults.report()


def _is_date(kind: str) -> bool:
    return kind.lower().startswith(("date", "time", "duration", "period"))


def _is_number(value: Any) -> bool:
    """Whether an object of Python is a number, or missing."""
    return isinstance(value, (Real, Decimal, np.bool_)) or type(value).__name__ in MISSING


def _numbers(values: Any) -> Any:
    """Objects as doubles if all are numbers or missing; else as they are."""
    if not all(map(_is_number, values)):
        return values
    return np.array([np.nan if type(v).__name__ in MISSING else float(v) for v in values])


def _first_word(values: Any) -> str | None:
    return next((str(v)[:WIDEST] for v in values if isinstance(v, str)), None)


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


def codes(column: Any, categories: Sequence[Any], where: str, name: str | int) -> FloatArray:
    """A column of categories as their codes, NaN where one is missing."""
    place = {label(value): code for code, value in enumerate(categories)}
    place[None] = np.nan  # type: ignore[assignment]
    words = [label(value) for value in _listed(column)]
    bad = [(row, str(word)) for row, word in enumerate(words) if word not in place]

    def fault(row: int, cell: str, times: int, most: bool) -> TableFault:
        return TableFault(where, *unknown_category(categories), None, row, name, cell, times)

    faults = Faults()
    faults.add(repeated(bad, np.inf, fault))
    faults.check()
    return np.array([place[word] for word in words], dtype=np.float64)


def unknown_category(known: Sequence[Any]) -> tuple[str, str]:
    """What is wrong with a word that is no category, and what to do."""
    some = ", ".join(repr(str(word)) for word in known[:12])
    return (
        f"is none of the categories that are known, {some}",
        "write one of these, or leave it empty if it is not known",
    )


def in_words(table: Any, categories: Categories) -> dict[Any, Sequence[Any]]:
    """The categories of a model that the table has by name: numbers are codes of words."""
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


def column_order(these: Sequence[Any], columns: Sequence[Any], where: str) -> list[int]:
    """The places of ``columns`` among ``these``, which are the same in any order."""
    missing = [c for c in columns if c not in these]
    extra = [c for c in these if c not in columns]
    if missing or extra:
        raise DataError(
            f"{where}: expected the columns {list(columns)}; missing {missing}, extra {extra}."
        )
    return [list(these).index(c) for c in columns]


def match_columns(rows: Any, these: tuple[str, ...], columns: tuple[str, ...], where: str) -> Any:
    """Rows with ``these`` columns in the order of ``columns``; refuse other names."""
    return rows if these == columns else rows[:, column_order(these, columns, where)]
