"""The model under test with its data, bound and started, and what the checks ask of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from array_api_compat import array_namespace

from emfed.core.errors import DataError
from emfed.core.protocols import FloatArray, Model
from emfed.core.streams import Purpose, normals, uniforms
from emfed.data import as_workers
from emfed.data.sources import chunks
from emfed.data.summing import check_rows_held


class Broken(Exception):
    """A promise that is not kept, in words."""


def expect(kept: bool, words: str) -> None:
    """Raise `Broken` with these words unless the promise is kept."""
    if not kept:
        raise Broken(words)


def apart(left: Any, right: Any) -> float:
    """The largest difference of two arrays against the size of the first; inf for other shapes."""
    a, b = np.asarray(left, dtype=np.float64), np.asarray(right, dtype=np.float64)
    if a.shape != b.shape:
        return float("inf")
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return float("inf")
    return float(np.max(np.abs(a - b), initial=0.0) / (1.0 + np.max(np.abs(a), initial=0.0)))


@dataclass(frozen=True)
class Subject:
    """A bound model, all its rows in one array, and a seed."""

    model: Model
    rows: Any
    parts: list[Any]
    seed: int

    @classmethod
    def open(cls, model: Model, data: Any, seed: int) -> Subject:
        """The opening exchange, worker by worker, and the rows that each worker holds."""
        workers = as_workers(data)
        check_rows_held(model, workers)
        parts = [
            np.concatenate([np.asarray(block) for _, block in chunks(workers.worker(i))])
            for i in range(workers.size)
        ]
        told = [model.summary(part) for part in parts]
        summaries = {name: np.stack([one[name] for one in told]) for name in told[0]}
        bound = model.bind(summaries, workers.counts, workers.counts / workers.counts.sum())
        rows = np.concatenate(parts)
        if rows.shape[0] < 8:
            raise DataError(f"a check needs at least 8 rows; got {rows.shape[0]}.")
        return cls(bound, rows, parts, seed)

    @property
    def count(self) -> int:
        """All rows."""
        return int(self.rows.shape[0])

    @cached_property
    def start(self) -> Any:
        """Parameters that the model starts from."""
        return self.model.start(self.seed)

    @cached_property
    def statistics(self) -> FloatArray:
        """A first E-step over all rows."""
        return self.step(self.start)

    @cached_property
    def params(self) -> Any:
        """T of those statistics."""
        return self.model.maximize(self.statistics)

    def step(self, params: Any) -> FloatArray:
        """s-bar(theta) over all rows."""
        return self.model.expected_statistics(self.rows, params)

    def objective(self, params: Any) -> float:
        """What EM lowers: R minus the mean log-likelihood."""
        value = float(self.model.log_likelihood(self.rows, params))
        return float(self.model.penalty(params)) - value

    def draws(self, which: int, *shape: int) -> FloatArray:
        """Standard normal numbers, others for each ``which``."""
        size = int(np.prod(shape))
        return normals(self.seed, which, Purpose.TESTING, np.zeros(1, np.int64), size).reshape(
            shape
        )

    def uniform(self, which: int, *shape: int) -> FloatArray:
        """Uniform numbers, others for each ``which``."""
        size = int(np.prod(shape))
        zero = np.zeros(1, dtype=np.int64)
        return uniforms(self.seed, which, Purpose.TESTING, zero, size).reshape(shape)

    def directions(self, count: int) -> Iterator[FloatArray]:
        """Directions in R^q that keep to where statistics of data lie.

        Differences of statistics of parts of the rows, at several parameters, and noise.
        """
        half = self.count // 2
        for which in range(count):
            other = self.model.start(self.seed + 1 + which)
            part = self.rows[:half] if which % 2 else self.rows[half:]
            toward = self.model.expected_statistics(part, other) - self.statistics
            noise = self.draws(which, len(toward)) * np.abs(self.statistics)
            yield toward if which % 3 else noise

    def with_holes(self) -> Any:
        """The rows with one number in ten replaced by NaN, and one row without any."""
        holes = self.uniform(99, *self.rows.shape) < 0.1
        holes[0] = True
        return np.where(holes, np.nan, self.rows)


def blend(near: Any, far: Any, share: float) -> Any:
    """``(1 - share) near + share far``, array by array: parameters form a convex set."""
    other = far.arrays()
    mixed = {n: (1 - share) * v + share * other[n] for n, v in near.arrays().items()}
    return dataclasses.replace(near, **mixed)


def as_float32(rows: Any) -> Any:
    """The rows in single precision."""
    return array_namespace(rows).astype(rows, np.float32)
