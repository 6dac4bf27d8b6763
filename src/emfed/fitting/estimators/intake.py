"""X of a scikit-learn call as the rows of workers, checked in scikit-learn's words."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.utils.validation import check_array, validate_data

from emfed.core.errors import DataError
from emfed.core.protocols import FloatArray
from emfed.data.faults import FaultReport, Faults, FaultyTable, TableFault
from emfed.data.placing import Streamed
from emfed.data.reading import (
    ENCODE,
    Categories,
    check_columns_differ,
    check_kind,
    codes,
    column_order,
    column_values,
    frame_values,
    is_frame,
    levels,
    not_numbers,
)
from emfed.data.sources import ParquetRows, Source
from emfed.data.tables import Workers
from emfed.data.workers import WorkerData, as_workers, open_table, to_device, with_columns
from emfed.models.devices import is_here
from emfed.models.devices.placing import check_device, fits, place, stream
from emfed.models.rows import check_rows, check_seen, check_table

MANY_CATEGORIES = 20
"""Values of a column, if they are half as many as rows, from which on they are no categories."""


def is_tables(X: Any) -> bool:
    """Whether X is a dict or list of tables, one per worker, rather than one table."""
    if isinstance(X, Mapping):
        return not hasattr(X, "shape")  # some sparse matrices are dicts
    return (
        isinstance(X, (list, tuple))
        and len(X) > 0
        and all(len(getattr(table, "shape", ())) == 2 or _is_elsewhere(table) for table in X)
    )


def _is_elsewhere(table: Any) -> bool:
    """Whether a table is a file, a source or a query: something that is opened first."""
    return isinstance(table, (str, Path, Source)) or type(table).__name__ == "LazyFrame"


def tables_of(X: Any) -> list[Any]:
    """The tables of the workers, or the one table."""
    if not is_tables(X):
        return [X]
    return list(X.values()) if isinstance(X, Mapping) else list(X)


def _at_hand(X: Any) -> Any:
    """X with files opened and small queries collected; groupings and dicts of columns are refused.

    If one worker's table is left where it is, a `Source`, those of the others are as well.
    """
    if not is_tables(X):
        return open_table(X, "X")
    if not isinstance(X, Mapping):
        return [open_table(table, f"worker '{k}'") for k, table in enumerate(X)]
    if X and all(not _is_elsewhere(t) and np.ndim(t) == 1 and not is_frame(t) for t in X.values()):
        raise DataError("a dict is one table per worker, and this one holds columns: give a frame.")
    return {name: open_table(table, f"worker {str(name)!r}") for name, table in X.items()}


def read_one_table(estimator: Any, X: Any, *, missing: bool) -> Any:
    """Rows to answer for, in memory or a `Source`: one table, not one for each worker."""
    if is_tables(X):
        raise DataError(
            f"expected one table of rows; got a {type(X).__name__} of tables: ask for each of them "
            "by itself."
        )
    known = getattr(estimator, "feature_names_in_", None)
    if isinstance(X, (str, Path)):  # other columns, such as the workers' names, are left out
        return ParquetRows(X, None if known is None else [str(name) for name in known])
    table = _at_hand(X)
    if isinstance(table, Source):
        return _known(estimator, table, reset=False)
    return read_rows(estimator, table, reset=False, missing=missing)


def _known(estimator: Any, rows: Any, *, reset: bool) -> Any:
    """A source, or workers, whose columns scikit-learn's attributes tell, or are told."""
    names = rows.columns
    width = (rows.worker(0) if isinstance(rows, Workers) else rows).shape[1]
    known = getattr(estimator, "feature_names_in_", None)
    if not reset:
        if names is not None and known is not None and list(names) != list(known):
            pick = with_columns if isinstance(rows, Workers) else type(rows).with_columns
            return pick(rows, tuple(str(name) for name in known))
        if width != (wanted := estimator.n_features_in_):
            raise DataError(f"X: expected {wanted} columns, as in the fit; got {width}.")
        return rows
    estimator.n_features_in_ = width
    if names is not None:
        estimator.feature_names_in_ = np.array(names, dtype=object)
    elif known is not None:
        del estimator.feature_names_in_
    return rows


def read_rows(estimator: Any, X: Any, *, reset: bool, missing: bool, where: str = "X") -> Any:
    """One table as an array of doubles (or floats), row by row in memory.

    The order in memory is fixed, or data frames and arrays would differ in the last bits.
    """
    named = getattr(estimator, "groups_column_", None)
    if not reset and named is not None and named in getattr(X, "columns", ()):
        X = X[[name for name in X.columns if name != named]]
    if is_here(X):
        return _read_tensor(estimator, X, reset=reset, missing=missing)
    options: Any = {
        "dtype": (np.float64, np.float32),
        "order": "C",
        "ensure_all_finite": "allow-nan" if missing else True,
    }
    known: Categories = getattr(estimator, "categories_", {})
    try:
        if not (is_frame(X) or known):
            return validate_data(estimator, X, reset=reset, **options)
        values = X
        if is_frame(X):
            values = frame_values(X, where, known, _advice(estimator))
        elif np.ndim(X) == 2:
            values = _array_values(X, where, known)
        validate_data(estimator, X, reset=reset, skip_check_array=True)  # names and their number
        return check_array(values, estimator=estimator, input_name="X", **options)
    except ValueError as error:
        report = _report(estimator, X, str(error), where)
        if not report.total:
            raise
        raise FaultyTable(report) from None


def _advice(estimator: Any) -> str:
    """What to do about a column that holds no numbers, in the estimator's words."""
    if "families" not in estimator.get_params():
        return ENCODE
    return "say families={{{name!r}: 'categorical'}}, " + ENCODE


def _report(estimator: Any, X: Any, told: str, where: str) -> FaultReport:
    """What scikit-learn complains of by row and column, and what to do about it."""
    faults = Faults()
    missing = "missing" in estimator.get_params()
    if "contains infinity" in told:
        remedy = "drop such rows or columns"
        if missing:
            remedy += ", or put NaN there and say missing=True if the value is not known"
        faults.add(_not_finite(X, where, np.isinf, "infinity", remedy))
    elif "contains NaN" in told:
        remedy = "fill them in first, by FederatedImputer for one"
        if missing:
            remedy = "say missing=True if they are missing at random"
            if getattr(estimator, "covariance_type", "full") not in ("full", "diag"):
                remedy += " (with covariance_type 'full' or 'diag')"
        faults.add(_not_finite(X, where, np.isnan, "NaN", remedy))
    elif "could not convert string" in told and np.ndim(X) == 2:
        for column, values in enumerate(np.asarray(X, dtype=object).T):
            numbers = np.array([_as_number(value) for value in values], dtype=object)
            report = not_numbers(numbers, where, column, _advice(estimator))
            faults.add(report.faults)
    return faults.report()


def _as_number(value: Any) -> Any:
    """Text as the number that it is written for; what is none stays."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return value


def _not_finite(
    X: Any, where: str, wrong: Callable[[Any], Any], what: str, remedy: str
) -> Iterator[TableFault]:
    """The first value of each column that is ``wrong``, and how many there are."""
    for name in getattr(X, "columns", range(np.shape(X)[1] if np.ndim(X) == 2 else 0)):
        values = column_values(X[name], where) if is_frame(X) else np.asarray(X)[:, name]
        found = np.flatnonzero(wrong(np.asarray(values, dtype=np.float64)))
        if len(found):
            column = str(name) if is_frame(X) else int(name)
            row, times = int(found[0]), len(found)
            yield TableFault(where, f"it contains {what}", remedy, None, row, column, None, times)


def _array_values(X: Any, where: str, known: Categories) -> Any:
    """An array with its columns of categories as codes, the others as they are."""
    out, faults = np.array(X, dtype=object), Faults()
    for column, names in known.items():
        with faults.collecting():
            out[:, column] = codes(out[:, column], names, where, column)
    faults.check()
    return out


def find_categories(tables: list[Any], names: Sequence[Any]) -> dict[Any, list[Any]]:
    """The categories of the columns whose family is the word "categorical", from all tables."""
    found: dict[Any, list[Any]] = {}
    for name in names:
        found[name] = levels([t[name] if is_frame(t) else np.asarray(t)[:, name] for t in tables])
        count, rows = len(found[name]), sum(len(t) for t in tables)
        if count < 2 and rows:  # without rows scikit-learn has the better words
            raise DataError(f"column {name!r} has one category only: leave it out.")
        if count > max(MANY_CATEGORIES, rows / 2):
            raise DataError(
                f"column {name!r} has {count} different values in {rows} rows, which are no "
                "categories: give it another family (gaussian for numbers), or leave it out."
            )
    return found


def _read_tensor(estimator: Any, X: Any, *, reset: bool, missing: bool) -> Any:
    """A table on a GPU, checked there."""
    where, rows = f"{type(estimator).__name__}: X", place(X)
    check_table(rows, where, None if reset else estimator.n_features_in_)
    (check_seen if missing else check_rows)(rows, where)
    if reset:
        estimator.n_features_in_ = rows.shape[1]
    return rows


def same_columns(table: Any, first: Any, where: str) -> Any:
    """A worker's data frame with its columns in the order of the first worker's."""
    names, these = (getattr(t, "columns", None) for t in (first, table))
    if (names is None) != (these is None):
        raise DataError(f"{where}: some workers name their columns, others do not.")
    if names is None or these is None or list(names) == list(these):
        return table
    column_order(list(these), list(names), where)
    return table[list(names)]


def read_workers(
    estimator: Any,
    X: Any,
    groups: Any | None,
    sample_weight: Any | None,
    *,
    reset: bool,
    missing: bool,
) -> Workers:
    """The rows of each worker: X is one table, with ``groups`` or alone, or one for each."""
    if (device := getattr(estimator, "device", None)) is not None:
        check_device(device)  # before anything is read
    X = _at_hand(X) if groups is None else _grouped(X)
    if reset:
        estimator.groups_column_ = None
    if any(isinstance(table, (Source, Path)) for table in tables_of(X)):
        return _read_sources(estimator, X, groups, sample_weight, reset=reset)
    if is_tables(X):
        if groups is not None:
            raise DataError("groups go with one table; a dict or list says whose rows are whose.")
        rows: Any = _read_tables(estimator, X, reset, missing)
        if sample_weight is not None and not isinstance(X, Mapping):
            sample_weight = dict(zip(rows, sample_weight, strict=True))
    else:
        if is_frame(X):
            check_columns_differ(list(X.columns), "X")
        if isinstance(groups, str):
            X, groups = _split_groups(estimator, X, groups)
        estimator._read_families([X], reset)
        rows = read_rows(estimator, X, reset=reset, missing=missing)
    return _named(estimator, _placed(estimator, as_workers(rows, groups, sample_weight)))


def _grouped(X: Any) -> Any:
    """One table with a column of workers: the path of a file, or a table that is at hand."""
    if isinstance(X, (str, Path)):
        return Path(X)
    return _at_hand(X) if is_tables(X) or isinstance(X, Source) else check_kind(X, "X")


def _read_sources(
    estimator: Any,
    X: Any,
    groups: Any | None,
    sample_weight: Any | None,
    *,
    reset: bool,
) -> Workers:
    """Tables of numbers that are read in each pass; what is small is read once."""
    workers = _known(estimator, as_workers(X, groups, sample_weight), reset=reset)
    if reset:
        estimator.groups_column_ = groups
        estimator._read_families([workers], reset)
    return _named(estimator, _placed(estimator, workers))


def _read_tables(estimator: Any, X: Any, reset: bool, missing: bool) -> dict[Any, Any]:
    """Read the rows of each table in the columns of the first; errors name the worker."""
    tables = tables_of(X)
    if not tables:
        raise DataError("a federation needs at least one worker; got none.")
    labels = list(X) if isinstance(X, Mapping) else list(range(len(tables)))
    for label, table in zip(labels, tables, strict=True):
        if is_frame(table):
            check_columns_differ(list(table.columns), f"worker {str(label)!r}")
    tables = [
        same_columns(table, tables[0], f"worker {str(label)!r}")
        for label, table in zip(labels, tables, strict=True)
    ]
    estimator._read_families(tables, reset)
    rows, faults = {}, Faults()
    for position, (label, table) in enumerate(zip(labels, tables, strict=True)):
        where = f"worker {str(label)!r}"
        if getattr(table, "shape", (1,))[0] == 0:
            raise DataError(f"{where} has no rows; expected at least one: leave out what is empty.")
        first = reset and position == 0
        try:
            with faults.collecting():
                rows[label] = read_rows(estimator, table, reset=first, missing=missing, where=where)
        except ValueError as error:  # scikit-learn's words, which know no workers
            told = str(error)
            raise DataError(told if told.startswith(where) else f"{where}: {told}") from error
    faults.check()
    return rows


def framed(estimator: Any, X: Any, values: FloatArray, names: Sequence[str]) -> Any:
    """Numbers for each row of X as a frame like X, unless the user chose another output.

    Categories are words again, and a column in which nothing was missing comes back as it was.
    """
    chosen = getattr(estimator, "_sklearn_output_config", {}).get("transform", "default")
    X, kind = check_kind(X, "X"), type(X).__module__.partition(".")[0]
    if chosen != "default" or kind not in ("pandas", "polars") or not is_frame(X):
        return values
    columns: dict[str, Any] = {}
    for name, own in zip(names, values.T, strict=True):
        if name in X.columns and not np.isnan(_codes(estimator, X, name)).any():
            columns[name] = X[name]
        elif name in (known := getattr(estimator, "categories_", {})):
            columns[name] = [known[name][int(code)] for code in own]
        else:
            columns[name] = own
    return type(X)(columns, index=X.index) if kind == "pandas" else type(X)(columns)


def frames_of(X: Any) -> Any:
    """The class of the data frames that the rows came in; None: they came otherwise."""
    kind = type(next(iter(tables_of(X)), None))
    library = kind.__module__.partition(".")[0]
    frame = library in ("pandas", "polars") and kind.__name__ in ("DataFrame", "LazyFrame")
    return sys.modules[library].DataFrame if frame else None


def as_frame(estimator: Any, rows: FloatArray) -> Any:
    """Rows that a fitted model drew, as a frame of the kind that it was fitted on."""
    kind, names = estimator._frames, getattr(estimator, "feature_names_in_", None)
    if kind is None or names is None:
        return rows
    known = getattr(estimator, "categories_", {})
    return kind(
        {
            name: [known[name][int(code)] for code in own] if name in known else own
            for name, own in zip(names.tolist(), rows.T, strict=True)
        }
    )


def _codes(estimator: Any, X: Any, name: str) -> FloatArray:
    known = getattr(estimator, "categories_", {})
    return frame_values(X[[name]], "X", known)[:, 0].astype(np.float64)


def _placed(estimator: Any, workers: Workers) -> Workers:
    """Put rows on the estimator's device; those that are on one already stay there."""
    device = getattr(estimator, "device", None)
    if device is None and isinstance(workers, WorkerData) and is_here(workers.rows):
        device = workers.rows.device
    return to_device(workers, device, getattr(estimator, "precision", "double"))


def on_device(estimator: Any, rows: Any, *, by_row: bool) -> Iterator[Any]:
    """Rows to answer for on the estimator's device: whole, or in parts where they do not fit.

    A source stays one, and its blocks come from the device.
    """
    device = getattr(estimator, "device", None)
    where = None if device is None or is_here(rows) else check_device(device)
    if where is None or where.type == "cpu":
        yield rows
    elif isinstance(rows, Source):
        yield Streamed(rows, where)
    elif len(rows) == 0:
        yield rows
    elif fits(4 * rows.nbytes, where):
        yield place(rows, where)
    elif not by_row:
        yield rows
    else:
        count, width = rows.shape
        yield from stream(lambda a, b: rows[a:b], count, width, rows.itemsize, where)


def _split_groups(estimator: Any, X: Any, groups: str) -> tuple[Any, Any]:
    """A column of a data frame names the workers; it is no feature."""
    columns = list(getattr(X, "columns", ()))
    if groups not in columns:
        raise DataError(f"groups={groups!r} is not a column of the data, which has {columns}.")
    estimator.groups_column_ = groups
    return X[[name for name in columns if name != groups]], X[groups]


def _named(estimator: Any, workers: Workers) -> Workers:
    """With the columns' names, for messages and results."""
    names = getattr(estimator, "feature_names_in_", None)
    if names is None or not isinstance(workers, WorkerData):
        return workers
    return dataclasses.replace(workers, columns=tuple(str(name) for name in names))
