"""Some of a federation's workers, in a process of their own: what a cluster's processes run.

No engine is imported here. A shard holds consecutive workers, which keep the numbers that they have
in the whole; so the same seed gives the same answers, whoever computes them. It keeps nothing
between two asks: what workers keep travels with the ask and comes back with the answer.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, final

import numpy as np
from array_api_compat import is_numpy_array
from numpy.typing import NDArray

from emfed.core.errors import DataError
from emfed.core.sums import Answers, Ask, FloatArray, Gather, IntArray, OfWorkers, States
from emfed.core.version import __version__
from emfed.data.held import HeldWorkers
from emfed.data.sources import ParquetRows
from emfed.data.tables import Workers, WorkerTables
from emfed.data.workers import WorkerData, as_workers, from_workers

T = TypeVar("T")


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


class ShardView(NamedTuple):
    """Some of their columns, and what each counts for; None: as they are."""

    columns: tuple[str, ...] | None = None
    counts_for: FloatArray | None = None


@final
class Shard:
    """Answers for the workers of one portion; every public method may be called from afar."""

    def __init__(self, first: int, data: Workers | Files | Mapped) -> None:
        self._first, self._data = first, data
        self._seen: tuple[Any, HeldWorkers] | None = None
        """The last view."""

    def ready(self, columns: tuple[str, ...] | None = None) -> dict[str, Any]:
        """Open the data, with the columns in this order; tell what both ends must agree on."""
        data = self._data
        if isinstance(data, Files):
            data = _open(data, columns)
        elif isinstance(data, Mapped):
            rows = np.memmap(data.path, data.dtype, "r", data.start, data.shape)
            data = WorkerData(rows, data.offsets, data.names, data.columns)
        self.workers = HeldWorkers(data, first=self._first)
        self._seen = None
        return {
            "version": __version__,
            "process": os.getpid(),
            "columns": data.columns,
            "totals": self.workers.totals,
            "counts": self.workers.counts,
            "streaming": data.streaming,
        }

    def ask(self, view: ShardView, method: str, *arguments: Any) -> Any:
        """What a method of `HeldWorkers` gives."""
        return getattr(self._viewed(view), method)(*arguments)

    def ask_keeping(
        self, view: ShardView, method: str, ask: Any, workers: IntArray, states: States
    ) -> tuple[Any, States]:
        """The same for workers that keep states, and these as they are then."""
        changed = {name: np.array(column) for name, column in states.items()}  # may be read-only
        return getattr(self._viewed(view), method)(ask, workers, changed), changed

    def _viewed(self, view: ShardView) -> HeldWorkers:
        """The workers as they are seen."""
        counts = view.counts_for
        about = (view.columns, None if counts is None else counts.tobytes())
        if self._seen is None or self._seen[0] != about:
            self._seen = about, self.workers.view(*view)
        return self._seen[1]


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


@dataclass(frozen=True)
class WorkerFacts:
    """What all shards together say of their workers."""

    edges: IntArray
    """Where each shard begins, and the number of workers at the end."""
    names: Sequence[str] | None
    columns: tuple[str, ...] | None
    totals: FloatArray
    counts: IntArray
    streaming: bool


ShardCalls = Iterable[tuple[int, tuple[Any, ...]]]
"""What shards are called with, by their number."""


@final
class ShardedWorkers:
    """Workers whose rows are in shards; see `emfed.core.sums.AskedWorkers`.

    Parameters
    ----------
    told : WorkerFacts
        What the shards say of their workers.
    call : callable
        From the name of a method of `Shard`, and what each shard is called with, to the answers.
    view : ShardView
        What is seen of the workers.

    Examples
    --------
    >>> shards = [Shard(0, as_workers([np.ones((3, 2))])), Shard(1, as_workers([np.ones((5, 2))]))]
    >>> words = [shard.ready() for shard in shards]
    >>> def call(method, calls):
    ...     return [getattr(shards[shard], method)(*given) for shard, given in calls]
    >>> workers = ShardedWorkers(told_by(words, np.array([0, 1, 2]), None), call)
    >>> workers.totals, workers.everywhere(lambda data: data.size)
    (array([3., 5.]), [1, 1])
    """

    def __init__(
        self,
        told: WorkerFacts,
        call: Callable[[str, ShardCalls], list[Any]],
        view: ShardView | None = None,
    ) -> None:
        self._told, self._call, self._view = told, call, view or ShardView()
        self.names, self.streaming, self.counts = told.names, told.streaming, told.counts
        columns, counts_for = self._view
        self.columns = told.columns if columns is None else columns
        self.totals = told.totals if counts_for is None else counts_for

    def view(
        self, columns: tuple[str, ...] | None, counts_for: FloatArray | None = None
    ) -> ShardedWorkers:
        """The same workers with these columns alone, who count for this; None: as they are."""
        return ShardedWorkers(self._told, self._call, ShardView(columns, counts_for))

    def everywhere(self, function: Callable[[Workers], T]) -> list[T]:
        """What a function of the rows gives in each shard."""
        told = self._asked([(j, ("everywhere", function)) for j in range(self._shards)])
        return [value for (value,) in told]

    def sum(self, ask: Ask) -> FloatArray:
        """The exact sum of all parts."""
        parts: list[FloatArray] = self._asked([(j, ("sum", ask)) for j in range(self._shards)])
        return np.sum(parts, axis=0)

    def each(self, ask: Ask, workers: IntArray) -> FloatArray:
        """The parts of these workers."""
        return np.concatenate(self._asked([(j, ("each", ask, m)) for j, m, _ in self._of(workers)]))

    def parts(self, ask: OfWorkers, workers: IntArray, states: States) -> FloatArray:
        """The parts of these workers, where they keep states; these are changed."""
        return np.concatenate(self._keeping("parts", ask, workers, states))

    def answers(self, ask: Gather, workers: IntArray, states: States) -> Answers:
        """What these workers reply; their states are changed."""
        return joined(self._keeping("answers", ask, workers, states))

    def _keeping(self, method: str, ask: Any, workers: IntArray, states: States) -> list[Any]:
        """Answers of all shards that have some of these workers; states as they are then."""
        calls = [
            (shard, (method, ask, mine, {name: column[at] for name, column in states.items()}))
            for shard, mine, at in self._of(workers)
        ]
        answers, kept = zip(*self._asked(calls, "ask_keeping"), strict=True)
        for name in kept[0]:
            states[name] = np.concatenate([own[name] for own in kept])
        return list(answers)

    @property
    def _shards(self) -> int:
        return len(self._told.edges) - 1

    def _of(self, workers: IntArray) -> list[tuple[int, IntArray, slice]]:
        """Shards with those of the workers that they have, and where these are; one at least."""
        cuts = np.searchsorted(workers, self._told.edges).tolist()
        found = [
            (shard, workers[first:end], slice(first, end))
            for shard, (first, end) in enumerate(pairwise(cuts))
            if first < end
        ]
        return found or [(0, workers, slice(0, 0))]

    def _asked(self, calls: ShardCalls, method: str = "ask") -> list[Any]:
        """What the shards answer about the view."""
        edges, (columns, counts_for) = self._told.edges.tolist(), self._view
        return self._call(
            method,
            [
                (j, (ShardView(columns, _slice(counts_for, edges[j], edges[j + 1])), *given))
                for j, given in calls
            ],
        )


def _slice(values: FloatArray | None, first: int, end: int) -> FloatArray | None:
    return None if values is None else values[first:end]


def told_by(
    words: Sequence[Mapping[str, Any]], edges: IntArray, names: Sequence[str] | None
) -> WorkerFacts:
    """What shards that are ready say together."""
    return WorkerFacts(
        edges,
        names,
        words[0]["columns"],
        np.concatenate([word["totals"] for word in words]),
        np.concatenate([word["counts"] for word in words]),
        any(word["streaming"] for word in words),
    )


def joined(found: Sequence[Answers]) -> Answers:
    """Answers of several shards as one."""
    if len(found) == 1:
        return found[0]
    told = {
        field.name: np.concatenate([getattr(own, field.name) for own in found])
        for field in fields(Answers)
    }
    return Answers(**told)
