"""Rows that are not an array: files larger than memory, and streams of fresh samples."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from emfed.core.errors import DataError, check_count
from emfed.core.protocols import IntArray, Names
from emfed.core.wording import Setting, Wording
from emfed.data.faults import Faults, TableFault
from emfed.models.devices.placing import read_ahead

BLOCK_ELEMENTS = 1 << 21
"""Numbers read at once: 16 MB as doubles."""


class Source(ABC):
    """A table of rows that is read in blocks, never as a whole.

    A subclass says its ``shape`` and reads a range of rows with ``read``.

    Examples
    --------
    >>> import numpy as np
    >>> import emfed
    >>> class Squares(emfed.data.Source):
    ...     shape = (100, 1)
    ...     def read(self, start, stop):
    ...         return np.arange(start, stop, dtype=float)[:, None] ** 2
    >>> emfed.fit(emfed.gaussian_mixture(1), [Squares()]).params.means
    array([[3283.5]])
    """

    columns: tuple[str, ...] | None = None
    dtype: Any = np.dtype(np.float64)
    """The type of the rows, float32 or float64."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""

    @abstractmethod
    def read(self, start: int, stop: int) -> NDArray[Any]:
        """Rows ``start`` to ``stop``, float32 or float64."""

    def blocks(self) -> Iterator[NDArray[Any]]:
        """All rows, in order, a block at a time."""
        for start, stop in self.cuts():
            yield self.read(start, stop)

    @final
    def cuts(self) -> list[tuple[int, int]]:
        """Where the blocks begin and end."""
        rows, columns = self.shape
        step = max(1, BLOCK_ELEMENTS // max(1, columns))
        return [(start, min(start + step, rows)) for start in range(0, rows, step)]

    def with_columns(self, columns: Sequence[str]) -> Source:
        """The same rows with other columns, or in another order."""
        return _Picked(self, columns)

    def take(self, indices: IntArray) -> NDArray[Any]:
        """Rows at ``indices``, ``(*indices.shape, columns)``; neighbours are read together."""
        flat, where = np.unique(indices, return_inverse=True)
        if len(flat) and not 0 <= flat[0] <= flat[-1] < self.shape[0]:
            raise DataError(f"rows {flat[0]} to {flat[-1]} asked of {self.shape[0]}.")
        step = max(1, BLOCK_ELEMENTS // 64 // max(1, self.shape[1]))
        parts, start = [], 0
        while start < len(flat):
            stop = int(np.searchsorted(flat, flat[start] + step))
            first, last = int(flat[start]), int(flat[stop - 1]) + 1
            parts.append(self.read(first, last)[flat[start:stop] - first])
            start = stop
        rows = np.concatenate(parts) if parts else np.empty((0, self.shape[1]))
        return rows[where].reshape(*indices.shape, self.shape[1])


@final
class _Picked(Source):
    """Some columns of another source, wherever its blocks are."""

    def __init__(self, whole: Source, columns: Sequence[str]) -> None:
        have = list(whole.columns or ())
        if missing := [name for name in columns if name not in have]:
            raise DataError(f"expected the columns {list(columns)}; missing {missing}.")
        self._whole, self._picks = whole, [have.index(name) for name in columns]
        self.columns, self.dtype = tuple(columns), whole.dtype

    @property
    def shape(self) -> tuple[int, int]:
        return self._whole.shape[0], len(self._picks)

    def read(self, start: int, stop: int) -> NDArray[Any]:
        return self._whole.read(start, stop)[:, self._picks]

    def blocks(self) -> Iterator[NDArray[Any]]:
        for block in self._whole.blocks():
            yield block[:, self._picks]

    def take(self, indices: IntArray) -> NDArray[Any]:
        return self._whole.take(indices)[..., self._picks]


MOST_COLUMNS = 100_000
"""Columns of a table: 3 MB of commas are a header of three million, at which polars aborts."""
BOMB_RATIO = 1000
"""Numbers of a Parquet file take so many times its bytes at most where they do not fit in memory: a
few kilobytes may claim billions of equal rows."""


def free_memory() -> int:
    """Bytes that this machine can give to a process now; where it does not tell, 8 GB."""
    try:
        with Path("/proc/meminfo").open(encoding="ascii") as file:
            found = dict(line.split(":", 1) for line in file)
        return 1024 * int(found["MemAvailable"].split()[0])
    except (OSError, KeyError, ValueError):
        return 8 << 30


def check_fits(needed: int, where: str, room: int | None = None) -> None:
    """Refuse what would not fit in memory, before any of it is taken."""
    room = free_memory() // 2 if room is None else room
    if needed > room:
        raise DataError(
            f"{where} unpacks to {needed / 1e9:.1f} GB or more, and {room / 1e9:.1f} GB may be "
            "used here: is it what it should be? Take fewer rows or columns, or more memory."
        )


def check_columns(count: int, where: str) -> None:
    """Refuse a table that is wider than any that is meant."""
    if count > MOST_COLUMNS:
        raise DataError(f"{where} has {count} columns; at most {MOST_COLUMNS} are read.")


def parquet_rows(path: Any) -> int:
    """Rows that a Parquet file claims, by its footer alone."""
    import polars as pl

    hive: Any = {"glob": False} if isinstance(path, Path) else {}
    return int(pl.scan_parquet(path, **hive).select(pl.len()).collect().item())


def parquet_schema(path: Path) -> Any:
    """Names and types of a file's columns."""
    import polars as pl

    if path.is_dir():
        raise DataError(f"{path} is a folder; give the path of a Parquet file, or a list of them.")
    try:
        schema = pl.scan_parquet(path, glob=False).collect_schema()
    except pl.exceptions.PolarsError as error:
        raise DataError(f"{path}: not a readable Parquet file ({error}).") from None
    check_columns(len(schema), str(path))
    return schema


def is_number(kind: Any) -> bool:
    """Whether a column of this type of polars holds numbers, or truth values."""
    return bool(kind.is_numeric()) or str(kind) == "Boolean"


def check_numbers(schema: Mapping[str, Any], where: str) -> None:
    """Refuse all columns that hold no numbers, by their types in polars."""
    faults = Faults()
    faults.add(
        TableFault(where, f"it holds {kind}, not numbers", "leave it out", column=name)
        for name, kind in schema.items()
        if not is_number(kind)
    )
    faults.check()


def _stamp(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


@final
class ParquetRows(Source):
    """Columns of a Parquet file, read row group by row group.

    Whole passes read the file once from end to end; mini-batches read the row groups they fall
    into, so they suit files with small row groups.

    Parameters
    ----------
    path : str or Path
        The path of the file.
    columns : sequence of str, optional
        The columns to read, in this order; all by default.
    ranges : sequence of pairs of int, optional
        The rows of the file that belong to this worker, (start, stop) each; all by default.

    Raises
    ------
    DataError
        If the file cannot be read, or a column is missing or holds no numbers.

    Examples
    --------
    >>> import polars as pl
    >>> import emfed
    >>> pl.DataFrame({"a": [1.0, 2.0, 4.0], "b": [1, 3, 5]}).write_parquet("rows.parquet")
    >>> emfed.data.ParquetRows("rows.parquet", ["a"], ranges=[(1, 3)]).read(0, 2)
    array([[2.],
           [4.]])
    """

    def __init__(
        self,
        path: str | Path,
        columns: Names = None,
        ranges: Sequence[tuple[int, int]] | IntArray | None = None,
    ) -> None:
        self.path = Path(path)
        schema = parquet_schema(self.path)
        if isinstance(columns, str):
            raise DataError(
                Wording("{} must be a list of names; got {!r}.", Setting("columns"), columns)
            )
        names = tuple(schema) if columns is None else tuple(columns)
        if len(set(names)) != len(names):
            raise DataError(f"{self.path}: some column is named twice in {list(names)}.")
        if absent := [name for name in names if name not in schema]:
            raise DataError(f"{self.path}: no column {absent[0]!r}; it has {list(schema)}.")
        check_numbers({name: schema[name] for name in names}, str(self.path))
        self.columns, self.dtype = names, _common(schema[name] for name in names)
        self._ranges = None if ranges is None else np.array(ranges, dtype=np.int64).reshape(-1, 2)
        self._stamp = _stamp(self.path)

    @cached_property
    def _spans(self) -> IntArray:
        """The rows of the file, ``(start, stop)`` each."""
        count = parquet_rows(self.path)
        needed = count * len(self.columns or ()) * self.dtype.itemsize
        if needed > BOMB_RATIO * self.path.stat().st_size:
            check_fits(needed, str(self.path))
        if self._ranges is None:
            return np.array([[0, count]], dtype=np.int64)
        edges = self._ranges
        if np.any((edges[:, 0] < 0) | (edges[:, 0] > edges[:, 1]) | (edges[:, 1] > count)):
            raise DataError(
                f"{self.path} has {count} rows; ranges must be (start, stop) within them."
            )
        return edges

    @cached_property
    def _starts(self) -> IntArray:
        """Where each range begins among the rows of this worker, and their number at the end."""
        sizes = self._spans[:, 1] - self._spans[:, 0]
        return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)

    def at(self, ranges: Sequence[tuple[int, int]]) -> ParquetRows:
        """The same file, with other rows; its schema is not read again."""
        other = copy.copy(self)
        other.__dict__.pop("_spans", None)
        other.__dict__.pop("_starts", None)
        other._ranges = np.array(ranges, dtype=np.int64).reshape(-1, 2)
        return other

    def with_columns(self, columns: Sequence[str]) -> ParquetRows:
        """The same rows with other columns, or in another order."""
        return ParquetRows(self.path, columns, self._ranges)

    @property
    def shape(self) -> tuple[int, int]:
        assert self.columns is not None
        return int(self._starts[-1]), len(self.columns)

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """These rows; nulls become NaN."""
        if not 0 <= start <= stop <= self.shape[0]:
            raise DataError(f"{self.path}: there are no rows {start} to {stop} of {self.shape[0]}.")
        if start == stop:
            return np.empty((0, self.shape[1]), dtype=self.dtype)
        first = int(np.searchsorted(self._starts, start, side="right")) - 1
        parts = []
        while start < stop:
            begin = int(self._spans[first, 0]) + start - int(self._starts[first])
            count = min(stop, int(self._starts[first + 1])) - start
            parts.append(self._slice(begin, count))
            start, first = start + count, first + 1
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def blocks(self) -> Iterator[NDArray[Any]]:
        """All rows, in order, the next block read while this one is used."""
        return read_ahead(self.read, self.cuts())

    def _slice(self, start: int, count: int) -> NDArray[Any]:
        import polars as pl

        scan = pl.scan_parquet(self.path, glob=False).slice(start, count)
        found = _numbers(scan, self.columns or (), self.dtype).collect(engine="streaming")
        if _stamp(self.path) != self._stamp or found.height != count:
            raise DataError(f"{self.path} was changed while it was being read: start anew.")
        return np.asarray(found.to_numpy())


def _common(kinds: Iterable[Any]) -> Any:
    """The type of rows whose columns have these types in a file: float32 if all have that."""
    import polars as pl

    return np.dtype(np.float32 if all(kind == pl.Float32 for kind in kinds) else np.float64)


def _numbers(frame: Any, names: Sequence[str], kind: Any) -> Any:
    """Columns of a lazy frame as numbers of one type, in this order; nulls become NaN."""
    import polars as pl

    target = pl.Float32 if kind == np.float32 else pl.Float64
    return pick_columns(frame, names).cast(target).fill_null(float("nan"))


def pick_columns(frame: Any, names: Sequence[str]) -> Any:
    """Columns of a lazy frame by their very names, in this order.

    They are taken by place: polars 1.35 reads ``*`` and ``^b$`` as patterns, also in ``by_name``.
    """
    from polars import selectors

    places = frame.collect_schema().names()
    return frame.select([selectors.by_index(places.index(name)) for name in names])


@contextmanager
def _worded() -> Iterator[None]:
    """Within, what polars cannot do with a lazy frame is a `DataError`."""
    import polars as pl

    try:
        yield
    except pl.exceptions.PolarsError as error:
        raise DataError(f"the lazy frame could not be read ({error}).") from None


@final
class LazyRows(Source):
    """What a lazy frame of polars gives, block by block; the frame is not collected.

    A pass runs the query once, from end to end. Picked rows run it again as far as they lie, so
    mini-batches suit a scan with a choice of columns.

    Parameters
    ----------
    frame : polars.LazyFrame
        The query. It must give the same rows in the same order each time.

    Raises
    ------
    DataError
        If a column holds no numbers.

    Examples
    --------
    >>> import polars as pl
    >>> import emfed
    >>> pl.DataFrame({"a": [1.0, 2.0, 4.0], "b": [1, 3, 5]}).write_parquet("lazy.parquet")
    >>> scan = pl.scan_parquet("lazy.parquet").filter(pl.col("b") > 1)
    >>> emfed.data.LazyRows(scan).read(0, 2)
    array([[2., 3.],
           [4., 5.]])
    """

    def __init__(self, frame: Any) -> None:
        schema = frame.collect_schema()
        check_columns(len(schema), "the lazy frame")
        check_numbers(schema, "the lazy frame")
        self._raw = frame
        self.columns, self.dtype = tuple(schema), _common(schema.values())
        self._frame = _numbers(frame, self.columns, self.dtype)

    @cached_property
    def _count(self) -> int:
        import polars as pl

        with _worded():
            return int(self._raw.select(pl.len()).collect(engine="streaming").item())

    def with_columns(self, columns: Sequence[str]) -> LazyRows:
        """The same rows with other columns, or in another order."""
        other = LazyRows(pick_columns(self._raw, columns))
        other.__dict__["_count"] = self._count
        return other

    @property
    def shape(self) -> tuple[int, int]:
        return self._count, len(self.columns or ())

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """These rows; nulls become NaN."""
        with _worded():
            found = self._frame.slice(start, stop - start).collect(engine="streaming")
        self._check(found.height, stop - start)
        return np.asarray(found.to_numpy())

    def blocks(self) -> Iterator[NDArray[Any]]:
        """All rows, in order, by one run of the query."""
        if not hasattr(self._frame, "collect_batches"):  # polars before 1.34
            yield from read_ahead(self.read, self.cuts())
            return
        step, held = self.cuts()[0][1] if self._count else 1, np.empty((0, self.shape[1]))
        done, batches = 0, self._frame.collect_batches(chunk_size=step, maintain_order=True)
        while True:
            with _worded():
                batch = next(batches, None)
            if batch is None:
                break
            done += batch.height
            held = np.concatenate([held, batch.to_numpy()]) if len(held) else batch.to_numpy()
            while len(held) >= step:  # blocks of one size, whatever the batches are
                yield held[:step]
                held = held[step:]
        self._check(done, self._count)
        if len(held):
            yield held

    def _check(self, found: int, wanted: int) -> None:
        if found != wanted:
            raise DataError(
                f"the lazy frame gave {found} rows where {wanted} were expected: what it reads was "
                "changed, or it gives others each time."
            )


@final
class Stream:
    """Fresh samples in each round, the paper's online setting.

    A stream has no second pass: algorithms that need one refuse it.

    Parameters
    ----------
    draw : callable
        A function from the round to a table of any positive number of rows. Round 0 is the
        opening: its rows set the origin and scale and the start, count as the worker's size, and
        stand for the distribution in diagnostics.

    Examples
    --------
    >>> import numpy as np
    >>> import emfed
    >>> def draw(round_):
    ...     return np.sin(np.arange(40.0) + round_).reshape(20, 2)
    >>> model = emfed.gaussian_mixture(2, "tied", second_moment="statistic")
    >>> algorithm = emfed.FedEM(step_size=emfed.algorithms.Decreasing())
    >>> emfed.fit(model, [emfed.data.Stream(draw)], algorithm, rounds=5).rounds
    5
    """

    def __init__(self, draw: Callable[[int], Any]) -> None:
        if not callable(draw):
            raise DataError("a Stream needs a function from the round to a table of fresh rows.")
        self._draw = draw
        self._opening: Any = None

    def rows(self, round_: int) -> Any:
        """The table of this round."""
        if round_ == 0:
            if self._opening is None:
                self._opening = self._draw(0)
            return self._opening
        return self._draw(check_count("round", round_))


def chunks(rows: Any) -> Iterator[tuple[int, Any]]:
    """A worker's rows as arrays, each with the number of rows before it."""
    if not isinstance(rows, Source):
        yield 0, rows
        return
    first = 0
    for block in rows.blocks():
        yield first, block
        first += block.shape[0]
