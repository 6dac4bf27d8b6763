"""A start from what workers' rows fall into by themselves: for many workers without masks.

Each worker tells clusters of its own rows once (`emfed.network.own_clusters`). The adder draws a
sketch from all of them, tries starts on it, and tells everyone where the fit begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np

from emfed.aggregation.codes import symbol_sizes
from emfed.algorithms.steps import rounded_statistics
from emfed.core.errors import SettingsError
from emfed.core.sums import Answers, FloatArray, Gather, Gathering, IntArray, RowsOfWorkers, States
from emfed.models.clusters import BUCKETS_PER_COMPONENT, Buckets
from emfed.network.own_clusters import MOST_ROWS, SMALLEST, clusters_width, told_clusters

MERGED, MOST_MERGED = 200, 1000
"""Clusters that all workers together tell of their own rows, at least, if a worker need not tell
more than sixteen for a component; and those of them that the sketch is drawn from."""
WEIGHT_BYTES = 4
"""Bytes of the number of a worker's rows, as a 32-bit float."""
LOSS = 1e-3
"""Nats a row that rounding S_0 may cost: EM goes a long way from there."""


@final
@dataclass(frozen=True, eq=False)
class OwnClusters(Gather):
    """How many rows each worker has, and shares and means of the clusters that they fall into."""

    model: Buckets
    workers: IntArray
    purpose: str = field(default="start")

    bytes_down = bytes_anew = 2
    """The number of clusters."""

    def fields(self) -> dict[str, Any]:
        """Workers keep nothing."""
        return {}

    def answer(self, rows: RowsOfWorkers, workers: IntArray, states: States) -> Answers:
        """What each of these workers tells, as it is decoded."""
        values = np.zeros((len(workers), 1 + clusters_width(self.model)))
        sizes = np.zeros(len(workers), dtype=np.int64)
        for place, worker in enumerate(workers.tolist()):
            own = rows.some(worker, MOST_ROWS)
            values[place, 1:], sizes[place] = told_clusters(self.model, *own, worker, SMALLEST)
        values[:, 0] = rows.totals[workers]
        none, nothing = np.zeros(0, dtype=np.int64), np.zeros(len(workers))
        told = sizes + WEIGHT_BYTES
        return Answers(workers, values, nothing, told, none, rows.totals[workers], 1 + 0 * sizes)


@final
@dataclass(frozen=True, eq=False)
class Told(Gather):
    """Where a fit begins, told by the adder, who alone knows it; nobody replies."""

    statistics: FloatArray
    """On a grid of a power of two."""
    workers: IntArray
    purpose: str = field(default="start")

    def fields(self) -> dict[str, Any]:
        """Workers keep nothing."""
        return {}

    def answer(self, rows: RowsOfWorkers, workers: IntArray, states: States) -> Answers:
        """No reply."""
        none = np.zeros(0, dtype=np.int64)
        return Answers(none, np.zeros((0, 0)), np.zeros(0), none, none, np.zeros(0), none)

    @property
    def bytes_down(self) -> int:
        """The grid, and the entropy code of what stands on it."""
        unit = 1.0
        while (np.rint(self.statistics / unit) * unit != self.statistics).any():
            unit /= 2
        symbols = (self.statistics / unit)[None]
        return 1 + int(symbol_sizes(symbols, np.zeros_like(symbols))[0])

    @property
    def bytes_anew(self) -> int:
        """The same."""
        return self.bytes_down


def merged(model: Any, n: int, seed: int) -> Gathering[tuple[FloatArray, FloatArray]]:
    """Shares of all rows and means of all workers' own clusters."""
    most = min(-(-MERGED // n), BUCKETS_PER_COMPONENT * model.n_components)
    most = max(model.n_components, most)
    grown = Buckets(model.clusters(most), seed % 2**16, SMALLEST)
    replies = yield OwnClusters(grown, np.arange(n, dtype=np.int64))
    if len(replies.workers) == 0:
        raise SettingsError("no worker tells clusters of its rows: use start='k-means'.")
    rows, told = replies.values[:, 0], replies.values[:, 1:]
    shares = np.maximum(told[:, :most], 1e-3)  # noise may lead below zero
    shares *= (rows / rows.sum() / shares.sum(axis=1))[:, None]
    mass, means = np.ravel(shares), told[:, most:].reshape(-1, grown.n_features)
    if len(mass) <= MOST_MERGED:
        return mass, means
    below = np.cumsum(mass)  # one of each stretch of equal share
    at = (np.arange(MOST_MERGED) + 0.5) / MOST_MERGED
    picks = np.searchsorted(below[:-1], at * below[-1], side="right")
    return np.full(MOST_MERGED, 1 / MOST_MERGED), means[picks]


def told_start(
    model: Any, begun: Sequence[FloatArray], workers: int
) -> Gathering[list[FloatArray]]:
    """The statistics that fits of a model begin at, as everyone is told them."""
    told = []
    for statistics in begun:
        told.append(rounded_statistics(model, statistics, LOSS))
        yield Told(told[-1], np.arange(workers, dtype=np.int64))
    return told
