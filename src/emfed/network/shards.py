"""Some of a federation's workers, in a process of their own: what a cluster's processes run.

No engine is imported here. A shard is a stacked federation over consecutive workers that keep the
numbers they have in the whole; so the same seed gives the same uploads, whoever computes them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np
from array_api_compat import is_numpy_array
from numpy.typing import NDArray

from emfed.core.errors import DataError
from emfed.core.protocols import IntArray
from emfed.core.version import __version__
from emfed.data.sources import ParquetRows
from emfed.data.tables import Workers, WorkerTables
from emfed.data.workers import WorkerData, as_workers, from_workers
from emfed.network.inprocess import StackedFederation


class Files(NamedTuple):
    """Workers whose rows lie in files that their shard opens itself."""

    paths: Sequence[Path]
    names: Sequence[str]


class Mapped(NamedTuple):
    """Rows of a memory-mapped array: their shard maps the file itself, so nothing is copied."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    """Bytes before the first of these rows."""
    offsets: IntArray
    names: Sequence[str]
    columns: tuple[str, ...] | None


class Portion(NamedTuple):
    """What one shard is given."""

    first: int
    """The number of its first worker."""
    size: int
    data: Workers | Files | Mapped


@final
@dataclass(frozen=True)
class Portions:
    """All workers in consecutive portions."""

    parts: Sequence[Portion]
    names: Sequence[str] | None
    """Names of all workers, where they have any."""

    @property
    def edges(self) -> IntArray:
        """Where each portion begins, and the number of workers at the end."""
        return np.array([*(p.first for p in self.parts), self.size], dtype=np.int64)

    @property
    def size(self) -> int:
        return self.parts[-1].first + self.parts[-1].size


def divide(data: Any, groups: Any | None, count: int, sample_weight: Any | None = None) -> Portions:
    """At most ``count`` portions of about equal work; files named by paths are not opened here."""
    paths, names = _paths(data, groups)
    if paths is not None and sample_weight is None:
        cuts = _cuts(np.ones(len(paths), dtype=np.int64), count)
        labels = _labels(names, len(paths))
        parts = [Portion(a, b - a, Files(paths[a:b], labels[a:b])) for a, b in cuts]
        return Portions(parts, names)
    workers = as_workers(data, groups, sample_weight)
    labels = _labels(workers.names, workers.size)
    cuts = _cuts(workers.counts, count)
    parts = [Portion(a, b - a, _between(workers, a, b, labels[a:b])) for a, b in cuts]
    return Portions(parts, workers.names)


def _paths(data: Any, groups: Any | None) -> tuple[list[Path] | None, list[str] | None]:
    """The files and names of the workers, where every worker's table is a path."""
    names = [str(name) for name in data] if isinstance(data, Mapping) else None
    tables = list(data.values()) if isinstance(data, Mapping) else data
    if groups is not None or not isinstance(tables, (list, tuple)) or not tables:
        return None, None
    if not all(isinstance(table, (str, Path)) for table in tables):
        return None, None
    return [Path(table) for table in tables], names


def _labels(names: Sequence[str] | None, count: int) -> Sequence[str]:
    """A worker without a name is called by its number in the whole."""
    return [str(i) for i in range(count)] if names is None else names


def _cuts(sizes: IntArray, count: int) -> list[tuple[int, int]]:
    """Consecutive ranges of workers with about equal rows, none of them empty."""
    n, count = len(sizes), min(count, len(sizes))
    total = np.cumsum(sizes)
    inner = np.searchsorted(total, total[-1] * np.arange(1, count) / count) + 1
    edges = [0]
    for place, edge in enumerate(inner.tolist(), start=1):
        edges.append(min(max(edge, edges[-1] + 1), n - (count - place)))
    edges.append(n)
    return list(pairwise(edges))


def _between(data: Workers, start: int, stop: int, names: Sequence[str]) -> Workers | Mapped:
    """The workers ``start`` to ``stop``; rows are not copied where they lie in one piece."""
    weights = None if data.row_weights is None else data.row_weights[start:stop]
    if isinstance(data, WorkerData):
        offsets = data.offsets[start : stop + 1]
        rows = data.rows[int(offsets[0]) : int(offsets[-1]), ...]
        local = offsets - offsets[0]
        if is_numpy_array(rows):
            found = _file_of(rows) if weights is None else None
            if found is not None:
                kind, shape = rows.dtype.str, rows.shape
                return Mapped(found[0], kind, shape, found[1], local, names, data.columns)
            rows = np.ascontiguousarray(rows)
        return WorkerData(rows, local, names, data.columns, weights)
    if isinstance(data, WorkerTables):
        return WorkerTables(data.tables[start:stop], names, data.columns, weights)
    tables = [data.worker(i) for i in range(start, stop)]
    return WorkerTables(tables, names, data.columns, weights)


def _file_of(rows: NDArray[Any]) -> tuple[str, int] | None:
    """The file that rows are mapped from and where they begin in it; None where they are not."""
    base: Any = rows
    while base is not None and getattr(base, "_mmap", None) is None:
        base = getattr(base, "base", None)
    if not isinstance(base, np.memmap) or base.filename is None or base.mode == "c":
        return None
    while isinstance(base.base, np.memmap):  # of slices, the whole
        base = base.base
    if not rows.flags.c_contiguous or not rows.size:
        return None
    return str(base.filename), base.offset + rows.ctypes.data - base.ctypes.data


@final
class Shard:
    """Drives the workers of one portion; every public method may be called from afar."""

    def __init__(self, first: int, data: Workers | Files | Mapped) -> None:
        self._first, self._data = first, data

    def ready(self, columns: tuple[str, ...] | None = None) -> dict[str, Any]:
        """Open the data, with the columns in this order; tell what both ends must agree on."""
        data = self._data
        if isinstance(data, Files):
            data = _open(data, columns)
        elif isinstance(data, Mapped):
            rows = np.memmap(data.path, data.dtype, "r", data.start, data.shape)
            data = WorkerData(rows, data.offsets, data.names, data.columns)
        self.federation = StackedFederation(data, self._first)
        return {"version": __version__, "columns": data.columns, "process": os.getpid()}

    def call(self, method: str, *arguments: Any) -> Any:
        """A method of the federation."""
        return getattr(self.federation, method)(*arguments)


def _open(files: Files, columns: tuple[str, ...] | None) -> Workers:
    """The files, with their columns in the order of the first worker of all, where it is known."""
    found = from_workers(files.paths, files.names)
    if columns is None or found.columns == columns:
        return found
    if found.columns is None or set(found.columns) != set(columns):
        raise DataError(
            f"worker {files.names[0]!r}: expected the columns {list(columns)}; got "
            f"{list(found.columns or ())}."
        )
    return from_workers([ParquetRows(path, columns) for path in files.paths], files.names)
