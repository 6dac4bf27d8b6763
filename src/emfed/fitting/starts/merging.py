"""A start from what workers' rows fall into by themselves: for many workers without masks.

Each worker tells clusters of its own rows once (`emfed.network.own_clusters`). The adder draws a
sketch from all of them, tries starts on it, and tells everyone where the fit begins.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np

from emfed.aggregation.codes import apart, framed
from emfed.algorithms.steps import rounded_statistics
from emfed.core.errors import SettingsError
from emfed.core.sums import Answers, FloatArray, Gather, Gathering, IntArray, RowsOfWorkers, States
from emfed.core.wire import decode_floats, encode_numbers
from emfed.models.clusters import BUCKETS_PER_COMPONENT, Buckets
from emfed.network.own_clusters import (
    MOST_ROWS,
    SMALLEST,
    clusters_width,
    decode_clusters,
    encoded_clusters,
)

MERGED, MOST_MERGED = 200, 1000
"""Clusters that all workers together tell of their own rows, at least, if a worker need not tell
more than sixteen for a component; and those of them that the sketch is drawn from."""
LOSS = 1e-3
"""Nats a row that rounding S_0 may cost: EM goes a long way from there."""


Begin = Callable[[FloatArray, FloatArray], list[FloatArray]]
"""From shares of all rows and means of clusters to statistics that fits begin at."""


@final
@dataclass(frozen=True, eq=False)
class OwnClusters(Gather):
    """Shares and means of the clusters that each worker's rows fall into.

    The adder draws a sketch from all of them, tries starts on it, and tells where fits begin.
    """

    model: Buckets
    workers: IntArray
    begin: Begin
    widths: tuple[int, ...]
    """How many numbers each of the places has where fits begin."""
    purpose: str = field(default="start")

    def fields(self) -> dict[str, Any]:
        """Workers keep nothing."""
        return {}

    def answer(self, rows: RowsOfWorkers, workers: IntArray, states: States) -> Answers:
        """What each of these workers tells, as it is decoded."""
        return self.encoded(rows, workers, states)[0]

    def encoded(
        self, rows: RowsOfWorkers, workers: IntArray, states: States
    ) -> tuple[Answers, list[bytes]]:
        """The same, with the messages."""
        told = [
            encoded_clusters(self.model, *rows.some(worker, MOST_ROWS), worker, SMALLEST)
            for worker in workers.tolist()
        ]
        read = [self.decoded(w, one)[0] for w, one in zip(workers.tolist(), told, strict=True)]
        values = np.reshape(read, (len(workers), clusters_width(self.model)))
        sizes = np.array([len(one) for one in told], dtype=np.int64)
        none, nothing = np.zeros(0, dtype=np.int64), np.zeros(len(workers))
        totals = rows.totals[workers]
        return Answers(workers, values, nothing, sizes, none, totals, 1 + 0 * sizes), told

    def decoded(self, worker: int, data: bytes) -> tuple[FloatArray, float]:
        """The inverse, but for the noise."""
        return decode_clusters(data, self.model, worker), 0.0

    def concluded(
        self, answers: Answers, memory: FloatArray | None
    ) -> tuple[list[FloatArray], bytes, FloatArray]:
        """Where fits begin: each on a grid of a power of two, behind each other."""
        if len(answers.workers) == 0:
            raise SettingsError("no worker tells clusters of its rows: use start='k-means'.")
        begun = self.begin(*merged(self.model, answers))
        return begun, framed([encode_numbers(one) for one in begun]), np.zeros(0)

    def told(self, data: bytes, workers: IntArray) -> list[FloatArray]:
        """Where fits begin."""
        pieces = apart(data, len(self.widths))
        return [decode_floats(one, n) for one, n in zip(pieces, self.widths, strict=True)]


def merged(grown: Buckets, replies: Answers) -> tuple[FloatArray, FloatArray]:
    """Shares of all rows and means of all workers' own clusters."""
    most, told, rows = grown.most, replies.values, replies.totals
    shares = np.maximum(told[:, :most], 1e-3)  # noise may lead below zero
    shares *= (rows / rows.sum() / shares.sum(axis=1))[:, None]
    mass, means = np.ravel(shares), told[:, most:].reshape(-1, grown.n_features)
    if len(mass) <= MOST_MERGED:
        return mass, means
    below = np.cumsum(mass)  # one of each stretch of equal share
    at = (np.arange(MOST_MERGED) + 0.5) / MOST_MERGED
    picks = np.searchsorted(below[:-1], at * below[-1], side="right")
    return np.full(MOST_MERGED, 1 / MOST_MERGED), means[picks]


def merged_starts(
    model: Any, n: int, seed: int, begin: Begin, widths: tuple[int, ...]
) -> Gathering[list[FloatArray]]:
    """The statistics that fits begin at, by clusters of all workers' own rows."""
    most = min(-(-MERGED // n), BUCKETS_PER_COMPONENT * model.n_components)
    most = max(model.n_components, most)
    grown = Buckets(model.clusters(most), seed % 2**16, SMALLEST)
    return list((yield OwnClusters(grown, np.arange(n, dtype=np.int64), begin, widths)))


def told_start(model: Any, statistics: FloatArray) -> FloatArray:
    """Statistics that a fit of a model begins at, as everyone is told them."""
    return np.asarray(rounded_statistics(model, statistics, LOSS))
