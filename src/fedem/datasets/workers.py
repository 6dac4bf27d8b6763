"""The rows of all workers of a simulation, checked and laid out worker by worker."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from array_api_compat import array_namespace, device, is_array_api_obj, is_numpy_array

from fedem.errors import DataError
from fedem.protocols import IntArray


def gather(rows: Any, indices: IntArray) -> Any:
    """``rows[indices]`` on any array namespace, for indices of any shape."""
    xp = array_namespace(rows)
    flat = xp.asarray(indices.ravel(), device=device(rows))
    return xp.reshape(xp.take(rows, flat, axis=0), (*indices.shape, *rows.shape[1:]))


@dataclass(frozen=True, eq=False)
class WorkerData:
    """All rows, worker by worker: worker i holds ``rows[offsets[i]:offsets[i + 1]]``."""

    rows: Any
    offsets: IntArray
    names: Sequence[str] | None = None
    columns: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.size <= 0:
            raise DataError("a federation needs at least one worker; got none.")
        if (
            self.offsets[0] != 0
            or self.offsets[-1] != self.rows.shape[0]
            or np.any(np.diff(self.offsets) < 0)
        ):
            raise DataError(
                f"offsets must rise from 0 to the number of rows, {self.rows.shape[0]}; got "
                f"{self.offsets[0]} to {self.offsets[-1]}."
            )
        if self.names is not None:
            if len(self.names) != self.size:
                raise DataError(f"got {len(self.names)} worker names for {self.size} workers.")
            if len(set(self.names)) != self.size:
                twice = next(name for name, k in Counter(self.names).items() if k > 1)
                raise DataError(f"two workers are called {twice!r}: names must be unique.")

    @property
    def size(self) -> int:
        """The number of workers."""
        return len(self.offsets) - 1

    @property
    def counts(self) -> IntArray:
        """Rows of each worker."""
        return np.diff(self.offsets)

    def name(self, worker: int) -> str:
        """A worker's name, its index if it has none."""
        return str(worker) if self.names is None else self.names[worker]

    def worker(self, worker: int) -> Any:
        """One worker's rows, not copied."""
        return self.rows[int(self.offsets[worker]) : int(self.offsets[worker + 1]), ...]

    @classmethod
    def from_groups(cls, table: Any, groups: Any) -> Self:
        """Rows of one table; ``groups`` names the worker of each row."""
        rows, columns = read_table(table, "the data")
        labels = _labels(groups, rows.shape[0])
        values, which, counts = np.unique(labels, return_inverse=True, return_counts=True)
        order = np.argsort(which, kind="stable")
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        return cls(gather(rows, order), offsets, [str(v) for v in values], columns)

    @classmethod
    def from_workers(cls, tables: Sequence[Any], names: Sequence[Any] | None = None) -> Self:
        """One table per worker; columns of data frames are matched by name."""
        labels = None if names is None else [str(name) for name in names]
        if len(tables) == 0:
            raise DataError("a federation needs at least one worker; got none.")
        parts: list[Any] = []
        columns: tuple[str, ...] | None = None
        for index, table in enumerate(tables):
            where = f"worker {str(index) if labels is None else labels[index]!r}"
            rows, these = read_table(table, where)
            if index == 0:
                columns = these
            elif these is None or columns is None:
                if these is not columns:
                    raise DataError(f"{where}: some workers name their columns, others do not.")
            else:
                rows = match_columns(rows, these, columns, where)
            if index and rows.shape[1:] != parts[0].shape[1:]:
                raise DataError(
                    f"{where} has rows of shape {rows.shape[1:]}, the first worker "
                    f"{parts[0].shape[1:]}: all workers need the same columns."
                )
            parts.append(rows)
        offsets = np.concatenate([[0], np.cumsum([p.shape[0] for p in parts])]).astype(np.int64)
        rows = parts[0] if len(parts) == 1 else array_namespace(*parts).concat(parts)
        return cls(rows, offsets, labels, columns)


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
                f"{where}: column {str(name)!r} holds {kind}, not numbers; encode or drop it first."
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


def _labels(groups: Any, count: int) -> Any:
    """One label per row, all of one kind and none missing."""
    values = groups.to_numpy() if hasattr(groups, "to_numpy") else groups
    labels = np.asarray(values)
    if labels.shape != (count,):
        raise DataError(
            f"groups must name one worker per row: expected {count} values, got shape "
            f"{labels.shape}."
        )
    if not is_numpy_array(values) or labels.dtype.kind == "O":
        kinds = {type(v).__name__ for v in values}
        missing = [i for i, v in enumerate(values) if v is None or v != v]
        if missing:
            raise DataError(f"groups: row {missing[0]} has no worker ({values[missing[0]]}).")
        if len(kinds) > 1 and "str" in kinds:
            raise DataError(f"groups mix {' and '.join(sorted(kinds))}: use one kind of name.")
    elif labels.dtype.kind == "f" and np.isnan(labels).any():
        raise DataError(f"groups: row {int(np.flatnonzero(np.isnan(labels))[0])} has no worker.")
    return labels


def as_workers(data: Any, groups: Any | None = None) -> WorkerData:
    """Whatever a user may hold: a dict or list of tables, or one table, with groups or alone."""
    if isinstance(data, WorkerData):
        if groups is not None:
            raise DataError("WorkerData already says whose each row is: leave groups out.")
        return data
    if groups is not None and isinstance(data, (Mapping, list, tuple)):
        raise DataError(
            "groups go with one table; a dict or list says by itself whose rows are whose."
        )
    if isinstance(groups, str):
        if groups not in getattr(data, "columns", ()):
            raise DataError(f"groups={groups!r} is not a column of the data.")
        rest = [name for name in data.columns if name != groups]
        return WorkerData.from_groups(data[rest], data[groups])
    if groups is not None:
        return WorkerData.from_groups(data, groups)
    if isinstance(data, Mapping):
        return WorkerData.from_workers(list(data.values()), list(data))
    if isinstance(data, (list, tuple)) and any(hasattr(table, "shape") for table in data):
        return WorkerData.from_workers(data)
    return WorkerData.from_workers([data])
