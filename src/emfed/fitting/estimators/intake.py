"""X of a scikit-learn call as the rows of workers, checked in scikit-learn's words."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from sklearn.utils.validation import validate_data

from emfed.core.errors import DataError
from emfed.data.placing import to_device
from emfed.data.tables import Workers
from emfed.data.workers import WorkerData, as_workers
from emfed.models.devices import is_here
from emfed.models.devices.placing import check_device, fits, place, stream
from emfed.models.mixture import to_numpy
from emfed.models.rows import check_rows, check_seen, check_table


def is_tables(X: Any) -> bool:
    """Whether X is a dict or list of tables, one per worker, rather than one table."""
    if isinstance(X, Mapping):
        return not hasattr(X, "shape")  # some sparse matrices are dicts
    return (
        isinstance(X, (list, tuple))
        and len(X) > 0
        and all(len(getattr(table, "shape", ())) == 2 for table in X)
    )


def read_one_table(estimator: Any, X: Any, *, missing: bool) -> Any:
    """Rows to answer for: one table, not one for each worker."""
    if is_tables(X):
        raise DataError(
            f"expected one table of rows; got a {type(X).__name__} of tables: ask for each of them "
            "by itself."
        )
    return read_rows(estimator, X, reset=False, missing=missing)


def read_rows(estimator: Any, X: Any, *, reset: bool, missing: bool) -> Any:
    """One table as an array of doubles (or floats), row by row in memory.

    The order in memory is fixed, or data frames and arrays would differ in the last bits.
    """
    named = getattr(estimator, "groups_column_", None)
    if not reset and named is not None and named in getattr(X, "columns", ()):
        X = X[[name for name in X.columns if name != named]]
    if is_here(X):
        return _read_tensor(estimator, X, reset=reset, missing=missing)
    return validate_data(
        estimator,
        X,
        reset=reset,
        dtype=(np.float64, np.float32),
        order="C",
        ensure_all_finite="allow-nan" if missing else True,
    )


def _read_tensor(estimator: Any, X: Any, *, reset: bool, missing: bool) -> Any:
    """A table on a GPU, checked there."""
    where, rows = f"{type(estimator).__name__}: X", place(X, X.device)
    check_table(rows, where, None if reset else estimator.n_features_in_)
    (check_seen if missing else check_rows)(rows, where)
    if reset:
        estimator.n_features_in_ = rows.shape[1]
    return rows


def _same_columns(table: Any, first: Any, where: str) -> Any:
    """A worker's data frame with its columns in the order of the first worker's."""
    names, these = (getattr(t, "columns", None) for t in (first, table))
    if (names is None) != (these is None):
        raise DataError(f"{where}: some workers name their columns, others do not.")
    if names is None or these is None or list(names) == list(these):
        return table
    missing = [name for name in names if name not in list(these)]
    extra = [name for name in these if name not in list(names)]
    if missing or extra:
        raise DataError(
            f"{where}: expected the columns {list(names)}; missing {missing}, extra {extra}."
        )
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
    if reset:
        estimator.groups_column_ = None
    if not is_tables(X):
        if isinstance(groups, str):
            X, groups = _split_groups(estimator, X, groups)
        rows = read_rows(estimator, X, reset=reset, missing=missing)
        workers = as_workers(rows, groups, sample_weight)
        workers = _placed(estimator, workers)
        return _named(estimator, workers, missing=reset and missing)
    if groups is not None:
        raise DataError("groups go with one table; a dict or list says whose rows are whose.")
    tables = list(X.values()) if isinstance(X, Mapping) else list(X)
    if not tables:
        raise DataError("a federation needs at least one worker; got none.")
    labels = list(X) if isinstance(X, Mapping) else list(range(len(tables)))
    rows = {}
    for position, (label, table) in enumerate(zip(labels, tables, strict=True)):
        where = f"worker {str(label)!r}"
        table = _same_columns(table, tables[0], where)
        if getattr(table, "shape", (1,))[0] == 0:
            raise DataError(f"{where} has no rows; expected at least one: leave out what is empty.")
        first = reset and position == 0
        try:
            rows[label] = read_rows(estimator, table, reset=first, missing=missing)
        except ValueError as error:  # scikit-learn's words, which know no workers
            raise DataError(f"{where}: {error}") from error
    if sample_weight is not None and not isinstance(X, Mapping):
        sample_weight = dict(zip(labels, sample_weight, strict=True))
    workers = _placed(estimator, as_workers(rows, None, sample_weight))
    return _named(estimator, workers, missing=reset and missing)


def _placed(estimator: Any, workers: Workers) -> Workers:
    """On the estimator's device; rows that are on one already stay there."""
    device = getattr(estimator, "device", None)
    if device is None and isinstance(workers, WorkerData) and is_here(workers.rows):
        device = workers.rows.device
    return to_device(workers, device, getattr(estimator, "precision", "double"))


def on_device(estimator: Any, rows: Any, *, by_row: bool) -> Iterator[Any]:
    """Rows to answer for on the estimator's device: whole, or in parts where they do not fit."""
    device = getattr(estimator, "device", None)
    where = None if device is None or is_here(rows) else check_device(device)
    if where is None or where.type == "cpu" or len(rows) == 0:
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


def _named(estimator: Any, workers: Workers, *, missing: bool) -> Workers:
    """With the columns' names, for messages and results.

    With ``missing`` every column must have been seen by somebody: a model would say so too, but
    it knows no names.
    """
    names = getattr(estimator, "feature_names_in_", None)
    if missing:
        seen = np.zeros(estimator.n_features_in_, dtype=np.bool_)
        for worker in range(workers.size):
            seen |= ~np.isnan(to_numpy(workers.worker(worker))).all(axis=0)
            if seen.all():
                break
        else:
            column = int(np.flatnonzero(~seen)[0])
            name = str(column) if names is None else repr(str(names[column]))
            raise DataError(f"nobody has a single value in column {name}: leave it out.")
    if names is None or not isinstance(workers, WorkerData):
        return workers
    return dataclasses.replace(workers, columns=tuple(str(name) for name in names))
