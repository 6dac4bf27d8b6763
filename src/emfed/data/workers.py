"""The rows of all workers of a simulation, checked and laid out worker by worker."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import numpy as np
from array_api_compat import array_namespace, is_numpy_array

from emfed.core.errors import DataError, SettingsError
from emfed.core.protocols import FloatArray, IntArray, Names
from emfed.core.sums import Pick
from emfed.core.wording import Setting, Wording
from emfed.data.faults import Faults
from emfed.data.files import parquet_labels, parquet_workers
from emfed.data.placing import Streamed, check_precision, n_bytes
from emfed.data.reading import check_kind, column_order, match_columns, read_table
from emfed.data.sources import (
    LazyRows,
    ParquetRows,
    Source,
    Stream,
    is_number,
    parquet_schema,
)
from emfed.data.tables import Piece, Workers, WorkerTables, gather
from emfed.data.weights import check_row_weights, group_order
from emfed.models.devices import PassPrecision, Ragged, is_here
from emfed.models.devices.placing import fits, place, place_blocks

LARGE = 4096
"""A worker with this many rows is not stacked with others."""
SMALL_BYTES = 1 << 26
"""Files up to this size are read once; a table beyond it is not copied to lie beside others."""
STACK_ROWS = 1 << 16
"""Rows stacked at once, so that memory does not grow with the number of workers."""


@final
@dataclass(frozen=True, eq=False)
class WorkerData(Workers):
    """All rows in one array, worker by worker: worker i holds ``rows[offsets[i]:offsets[i + 1]]``.

    Examples
    --------
    >>> import numpy as np
    >>> from emfed.data import WorkerData
    >>> WorkerData(np.zeros((8, 2)), np.array([0, 3, 8])).counts
    array([3, 5])
    """

    rows: Any
    """The rows of all workers, ``(rows, ...)``."""
    offsets: IntArray
    """Where the rows of each worker begin, and their number at the end, ``(workers + 1,)``."""
    names: Sequence[str] | None = None
    """The names of the workers."""
    columns: tuple[str, ...] | None = None
    """The names of the columns."""
    row_weights: Sequence[FloatArray] | None = None
    """How much each row counts, worker by worker."""
    precision: PassPrecision = "double"
    """The precision of passes over rows on a device."""
    order: IntArray | range | None = None
    """Where all are rows of one table, which row of it each was."""
    first_line: int | None = None
    """Where rows came from a text file, the line of the first: messages then speak of lines."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Columns of a file that hold no numbers, and why."""
    memo: dict[str, Any] = field(default_factory=dict, repr=False)
    """The rows as kernels take them, with what was found out about them."""

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
        self.check_names()

    @property
    def size(self) -> int:
        return len(self.offsets) - 1

    @property
    def counts(self) -> IntArray:
        return np.diff(self.offsets)

    def place(self, worker: int, row: int) -> int:
        """The place of a worker's row in the table it came from, counting from 0."""
        return row if self.order is None else int(self.order[self.offsets[worker] + row])

    def counts_of(self, workers: IntArray) -> IntArray:
        return self.offsets[workers + 1] - self.offsets[workers]

    def worker(self, worker: int) -> Any:
        """One worker's rows, not copied."""
        return self.rows[int(self.offsets[worker]) : int(self.offsets[worker + 1]), ...]

    def stacks(self, workers: IntArray) -> Iterator[Piece]:
        """All rows of the workers, grouped by size so that padding wastes at most a quarter.

        On a device all are one piece, whatever their sizes: slices of one tensor.
        """
        if is_here(self.rows) and len(workers):
            yield Piece(np.arange(len(workers)), self._slices(workers), None, 1.0, 0)
            return
        counts = self.counts_of(workers)
        order = np.argsort(counts, kind="stable")
        ordered = counts[order]
        start = 0
        while start < len(order):
            first = int(ordered[start])
            if first >= LARGE:
                stop = start + 1
            else:
                widest = np.searchsorted(ordered, first + first // 4, side="right")
                stop = min(int(widest), start + max(1, STACK_ROWS // max(1, first)))
            positions = order[start:stop]
            rows, padding = self._stack(workers[positions], counts[positions])
            if self.row_weights is not None:
                padding = np.zeros(rows.shape[:2])
                for row, worker in zip(padding, workers[positions].tolist(), strict=True):
                    row[: len(self.row_weights[worker])] = self.row_weights[worker]
            yield Piece(positions, rows, padding, 1.0, 0)
            start = stop

    def _slices(self, workers: IntArray) -> Ragged:
        """These workers' rows on the device; those of everybody are remembered."""
        everybody = len(workers) == self.size
        if everybody and "rows" in self.memo:
            return self.memo["rows"]
        whole = self.memo.get("rows")
        weights = None if whole is None else whole.weights
        if self.row_weights is not None and weights is None:
            weights = place(np.concatenate(self.row_weights), self.rows.device)
        starts, counts = self.offsets[workers], self.counts_of(workers)
        found = Ragged(self.rows, starts, counts, weights, self.precision)
        if everybody:
            self.memo["rows"] = found
        return found

    def _stack(self, workers: IntArray, counts: IntArray) -> tuple[Any, Any]:
        """Rows ``(workers, m, ...)`` and padding; a view where the rows lie side by side."""
        starts, m = self.offsets[workers], int(counts.max())
        if np.all(counts == m):
            if np.all(np.diff(workers) == 1):
                first = int(starts[0])
                block = self.rows[first : first + m * len(workers), ...]
                xp = array_namespace(block)
                return xp.reshape(block, (len(workers), m, *block.shape[1:])), None
            return gather(self.rows, starts[:, None] + np.arange(m)), None
        inside = np.arange(m) < counts[:, None]
        rows = gather(self.rows, starts[:, None] + np.where(inside, np.arange(m), 0))
        return rows, inside.astype(np.float64)

    def take(self, workers: IntArray, indices: IntArray) -> Any:
        return gather(self.rows, self.offsets[workers][:, None] + indices)


def from_groups(table: Any, groups: Any) -> WorkerData:
    """Rows of one table; ``groups`` names the worker of each row. Sorted rows are not copied."""
    rows, columns = read_table(table, "the data")
    labels = _labels(groups, rows.shape[0])
    values, order, counts = group_order(labels)
    if order is not None:
        rows = gather(rows, order)
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    places = range(len(labels)) if order is None else order
    return WorkerData(rows, offsets, [str(v) for v in values], columns, order=places)


def of_file(
    workers: Workers, first_line: int | None, left_out: Mapping[str, str] | None = None
) -> Workers:
    """The same rows, with the line of the first and why columns of their file were left out."""
    about: dict[str, Any] = {"first_line": first_line, "left_out": left_out or {}}
    if isinstance(workers, WorkerData):
        return dataclasses.replace(workers, **about)
    for name, value in about.items():
        setattr(workers, name, value)
    return workers


def _from_file(data: str | Path | ParquetRows, groups: Any) -> Workers:
    """One Parquet file and its column ``groups``: read if it is small, else left where it is."""
    path = data.path if isinstance(data, ParquetRows) else Path(data)
    labels = parquet_labels(path, groups)
    if isinstance(data, ParquetRows):
        whole = data
    else:
        whole = ParquetRows(path, [n for n in parquet_schema(path) if n != groups])
    if 8 * whole.shape[0] * whole.shape[1] > SMALL_BYTES:
        return WorkerTables(*parquet_workers(whole, groups, labels))
    found = from_groups(whole.read(0, whole.shape[0]), labels)
    return dataclasses.replace(found, columns=whole.columns)


def from_workers(tables: Sequence[Any], names: Sequence[Any] | None = None) -> Workers:
    """One table per worker; columns of data frames are matched by name.

    Small tables are put together, so that many workers cost one array operation; large ones, files
    and streams stay where they are.
    """
    labels = None if names is None else [str(name) for name in names]
    if len(tables) == 0:
        raise DataError("a federation needs at least one worker; got none.")
    opened, faults = list[tuple[str, Any, Any]](), Faults()
    for index, table in enumerate(tables):
        where = f"worker {str(index) if labels is None else labels[index]!r}"
        with faults.collecting():
            opened.append((where, *_open(table, where)))
    faults.check()
    parts: list[Any] = []
    _, first, columns = opened[0]
    for (where, rows, these), table in zip(opened, tables, strict=True):
        rows = _in_order(rows, these, columns, where)
        if rows.shape[1:] != first.shape[1:]:
            raise DataError(
                f"{where} has rows of shape {tuple(rows.shape[1:])}, the first worker "
                f"{tuple(first.shape[1:])}: all workers need the same columns."
            )
        parts.append(table if isinstance(table, Stream) else rows)
    if _stay_apart(parts):
        return WorkerTables(parts, labels, columns)
    return stack_tables([_in_memory(part) for part in parts], labels, columns)


def _in_order(rows: Any, these: Names, columns: Names, where: str) -> Any:
    """Rows with ``these`` columns in the order of the first worker's."""
    if these is None or columns is None:
        if these is not columns:
            raise DataError(f"{where}: some workers name their columns, others do not.")
        return rows
    if not isinstance(rows, Source) or these == columns:
        return match_columns(rows, tuple(these), tuple(columns), where)
    column_order(these, columns, where)
    return rows.with_columns(columns)


def _stay_apart(parts: Sequence[Any]) -> bool:
    """Whether the tables are left where they are: streams, and what is large."""
    if any(isinstance(part, Stream) for part in parts):
        return True
    sizes = [8 * part.shape[0] * part.shape[1] for part in parts if len(part.shape) == 2]
    if any(isinstance(part, Source) for part in parts):
        return sum(sizes) > SMALL_BYTES
    many = len(parts) > 1
    return many and (
        max(sizes, default=0) > SMALL_BYTES or min(part.shape[0] for part in parts) >= LARGE
    )


def _in_memory(part: Any) -> Any:
    return part.read(0, part.shape[0]) if isinstance(part, Source) else part


def stack_tables(
    tables: Sequence[Any],
    names: Sequence[str] | None = None,
    columns: tuple[str, ...] | None = None,
) -> WorkerData:
    """Arrays of equal width put together; one alone is not copied."""
    offsets = np.concatenate([[0], np.cumsum([t.shape[0] for t in tables])]).astype(np.int64)
    rows = tables[0] if len(tables) == 1 else array_namespace(*tables).concat(tables)
    return WorkerData(rows, offsets, names, columns)


def open_table(table: Any, where: str) -> Any:
    """A path as a `Source`; a lazy frame too if it is large and holds numbers, else collected."""
    if isinstance(table, (str, Path)):
        return ParquetRows(table)
    if type(table).__name__ == "LazyFrame" and all(map(is_number, table.collect_schema().dtypes())):
        rows = LazyRows(table)
        if 8 * rows.shape[0] * rows.shape[1] > SMALL_BYTES:
            return rows
    return check_kind(table, where)


def _open(table: Any, where: str) -> tuple[Any, tuple[str, ...] | None]:
    """An array or a `Source`, and its columns; of a stream, the rows of its opening."""
    table = open_table(table, where)
    if isinstance(table, Source):
        return table, table.columns
    return read_table(table.rows(0) if isinstance(table, Stream) else table, where)


def _labels(groups: Any, count: int) -> Any:
    """One label per row, all of one kind and none missing."""
    values = groups.to_numpy() if hasattr(groups, "to_numpy") else groups
    labels = np.asarray(values)
    if labels.shape != (count,):
        raise DataError(
            Wording(
                "{} must name one worker per row: expected {} values, got shape {}.",
                *(Setting("groups"), count, labels.shape),
            )
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


def row_weights(
    found: Workers, data: Any, groups: Any | None, sample_weight: Any
) -> list[FloatArray]:
    """Weights of the rows of each worker, in the order in which they lie."""
    if found.streaming or isinstance(data, (str, Path)):
        raise DataError("sample_weight goes with tables in memory: read the file, or leave it out.")
    if isinstance(data, Mapping):
        if not isinstance(sample_weight, Mapping) or set(sample_weight) != set(data):
            raise DataError(
                "sample_weight must be a dict with the workers of the data, one number per row."
            )
        parts = [sample_weight[name] for name in data]
    elif isinstance(data, (list, tuple)) and found.size > 1 and groups is None:
        if len(sample_weight) != found.size:
            raise DataError(
                f"sample_weight must be a list of {found.size}, one per worker; got "
                f"{len(sample_weight)}."
            )
        parts = list(sample_weight)
    else:
        whole = check_row_weights(sample_weight, int(found.counts.sum()), "sample_weight")
        if groups is not None:
            names = data[groups] if isinstance(groups, str) else groups
            _, order, _ = group_order(_labels(names, len(whole)))
            whole = whole if order is None else whole[order]
        parts = np.split(whole, np.cumsum(found.counts)[:-1])
    return [
        check_row_weights(part, int(count), f"worker {found.name(i)!r}: sample_weight", some=True)
        for i, (part, count) in enumerate(zip(parts, found.counts, strict=True))
    ]


def picked(data: Workers, pick: Pick) -> Workers:
    """The same workers, where rows that are not picked have no weight."""
    own = data.row_weights
    weights = [
        pick(count) * (np.ones(count) if own is None else own[worker])
        for worker, count in enumerate(data.counts.tolist())
    ]
    if isinstance(data, WorkerData):
        return dataclasses.replace(data, row_weights=weights, memo={})
    tables = [data.worker(worker) for worker in range(data.size)]
    return WorkerTables(tables, data.names, data.columns, weights, data.precision)


def weigh(found: Workers, weights: list[FloatArray]) -> Workers:
    """The same rows, with weights."""
    if isinstance(found, WorkerData):
        return dataclasses.replace(found, row_weights=weights, memo={})
    assert isinstance(found, WorkerTables)
    return WorkerTables(found.tables, found.names, found.columns, weights)


def as_workers(
    data: Any,
    groups: Any | None = None,
    sample_weight: Any | None = None,
    *,
    device: Any | None = None,
    precision: PassPrecision = "double",
) -> Workers:
    """Read whatever rows a user may hold.

    Parameters
    ----------
    data : table, path, dict, list or Workers
        A dict or list of tables, one for each worker, or one table. A table is an array, a data
        frame, the path of a Parquet file, a `Source` or a `Stream`. Files and lazy frames of polars
        that are large are read block by block in every pass.
    groups : array or str, optional
        The worker of each row of one table: values, or the name of a column. With the path of one
        file it names a column by which the file is sorted.
    sample_weight : array or sequence of arrays, optional
        How much each row counts, in the shape of the data.
    device : str, optional
        A device such as "cuda" where the rows are put, or streamed to where they do not fit.
    precision : {"double", "fast"}
        Whether passes on the device are exact, or good to six digits.

    Returns
    -------
    Workers
        The rows, worker by worker.

    Raises
    ------
    DataError
        If the data cannot be read, or contradict each other.

    Examples
    --------
    >>> import numpy as np
    >>> import emfed
    >>> rows = np.arange(10.0).reshape(5, 2)
    >>> emfed.data.as_workers(rows, groups=["a", "b", "a", "a", "b"]).counts
    array([3, 2])
    """
    found = _workers(data, groups)
    if sample_weight is not None:
        found = weigh(found, row_weights(found, data, groups, sample_weight))
    return to_device(found, device, precision)


def to_device(found: Workers, device: Any, precision: PassPrecision = "double") -> Workers:
    """The same workers with their rows on the device; None leaves them where they are."""
    where = check_precision(device, precision)
    if where is None or where.type == "cpu":
        return found
    if isinstance(found, WorkerData):
        if fits(n_bytes(found.rows), where):
            return dataclasses.replace(
                found, rows=place(found.rows, where), precision=precision, memo={}
            )
        cuts = zip(found.offsets[:-1].tolist(), found.offsets[1:].tolist(), strict=True)
        tables: list[Any] = [found.rows[a:b] for a, b in cuts]
    elif isinstance(found, WorkerTables):
        tables = list(found.tables)
    else:
        raise SettingsError(f"device={device!r}: {type(found).__name__} keeps its rows elsewhere.")
    stay = fits(sum(n_bytes(t) for t in tables if not isinstance(t, Stream)), where)
    placed: list[Any] = []
    for table in tables:
        if isinstance(table, Stream):
            placed.append(_drawn(table, where))
        elif not stay and (isinstance(table, Source) or not is_here(table)):
            placed.append(Streamed(table, where))
        elif isinstance(table, Source):  # block by block: it may fit the card and not the host
            placed.append(place_blocks(Streamed(table, where).blocks(), table.shape, where))
        else:
            placed.append(place(table, where))
    return WorkerTables(placed, found.names, found.columns, found.row_weights, precision)


def _drawn(table: Stream, where: Any) -> Stream:
    """A stream whose rows are put on the device as they are drawn."""
    return Stream(lambda round_: place(read_table(table.rows(round_), "a stream")[0], where))


def _workers(data: Any, groups: Any | None) -> Workers:
    if isinstance(data, Workers):
        if groups is not None:
            raise DataError("the data already say whose each row is: leave groups out.")
        return data
    if groups is not None:
        return _grouped(check_kind(data, "the data"), groups)
    data = open_table(data, "the data")
    if isinstance(data, Mapping):
        return from_workers(list(data.values()), list(data))
    tables = (Stream, Source, str, Path)
    if isinstance(data, (list, tuple)) and any(
        hasattr(table, "shape") or isinstance(table, tables) for table in data
    ):
        return from_workers(data)
    return from_workers([data])


def _grouped(data: Any, groups: Any) -> Workers:
    """One table, whose rows ``groups`` names the workers of."""
    if isinstance(data, (Mapping, list, tuple)):
        raise DataError(
            "groups go with one table; a dict or list says by itself whose rows are whose."
        )
    if isinstance(data, (str, Path, ParquetRows)):
        return _from_file(data, groups)
    if not isinstance(groups, str):
        return from_groups(data, groups)
    names = list(getattr(data, "columns", ()))
    if groups not in names:
        raise DataError(f"groups={groups!r} is not a column of the data, which has {names}.")
    return from_groups(data[[name for name in names if name != groups]], data[groups])


def with_columns(workers: Workers, columns: tuple[str, ...]) -> Workers:
    """Pick columns of all workers, in this order; others that they may have are left out.

    Parameters
    ----------
    workers : Workers
        The rows of all workers.
    columns : tuple of str
        The names of the columns.

    Returns
    -------
    Workers
        The same workers with these columns.

    Raises
    ------
    DataError
        If the rows have no names of columns, or lack one of these.

    Examples
    --------
    >>> import polars as pl
    >>> import emfed
    >>> workers = emfed.data.as_workers([pl.DataFrame({"a": [1.0], "b": [2.0]})])
    >>> emfed.data.with_columns(workers, ("b", "a")).columns
    ('b', 'a')
    """
    have = workers.columns
    if have == columns:
        return workers
    if have is None:
        raise DataError(f"the run names its columns {list(columns)}; these data name none.")
    missing = [name for name in columns if name not in have]
    if missing:
        why = "".join(f" ({workers.left_out[n]})" for n in missing if n in workers.left_out)
        raise DataError(f"expected the columns {list(columns)}; missing {missing}{why}.")
    if isinstance(workers, WorkerData):
        picked = workers.rows[:, [have.index(name) for name in columns]]
        return dataclasses.replace(workers, rows=picked, columns=columns)
    assert isinstance(workers, WorkerTables)
    tables = [_with_columns(table, have, columns) for table in workers.tables]
    found = WorkerTables(tables, workers.names, columns, workers.row_weights, workers.precision)
    return of_file(found, workers.first_line, workers.left_out)


def _with_columns(table: Any, have: tuple[str, ...], columns: tuple[str, ...]) -> Any:
    if isinstance(table, Source):
        return table.with_columns(columns)
    if isinstance(table, Stream):
        if set(have) == set(columns):  # rows are put in order as they are drawn
            return table
        raise DataError(f"the columns {list(columns)} cannot be picked from a stream.")
    return table[:, [have.index(name) for name in columns]]
