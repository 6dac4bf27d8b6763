"""Where a fit begins: starts that are tried on a sketch of all rows.

A growing k-means of all rows costs a few sums. Rows drawn from its buckets are a sketch, on which
every member tries as many starts as it likes, at no message (`emfed.fitting.starts.sketch`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from emfed.core.errors import SettingsError
from emfed.core.protocols import StartsFromClusters
from emfed.core.sums import Fit, FloatArray
from emfed.fitting.asks import Statistics
from emfed.fitting.climb import Company
from emfed.fitting.starts.sketch import NARROWEST, NARROWEST_OF_CLUSTERS, Sketch, drawn
from emfed.models.clusters import BUCKETS_PER_COMPONENT, Buckets, Clusters
from emfed.models.components import SMALLEST_COMPONENT

NUMBERS, FEWEST, FEWEST_PER_COMPONENT, ROWS_PER_BUCKET = 840, 32, 4, 5
"""Numbers of a sum of buckets that are worth their bytes; buckets at least, whatever the number of
columns; buckets for a component; and rows for a bucket."""
SETTLING = 2
"""Rounds of Lloyd's algorithm on all buckets, once they are there."""
BUCKET_NOISE = 2e-3
"""Squared noise of a sum of buckets in its metric: where buckets lie need not be exact."""
SEEDS = 0x9E3779B97F4A7C15
"""An odd number without pattern: the seeds of several starts differ."""


def starts(
    models: Sequence[Any],
    company: Company,
    method: str,
    count: int,
    seed: int,
    sketch: Sketch | None = None,
) -> Fit[list[list[FloatArray]]]:
    """The statistics that each model may start from, ``count`` for each, the best first.

    A driver that has the rows of one worker alone gives the ``sketch``; else sums give it.
    """
    chosen = [_resolved(model, method) for model in models]
    by_clusters = [model for model, how in zip(models, chosen, strict=True) if how == "k-means"]
    found: dict[int, list[Any]] = {}
    if by_clusters:
        widest = max(by_clusters, key=lambda model: model.n_components)
        if sketch is None:
            sketch = yield from sketched(widest, company, seed)
        tried = iter(sketch.starts(by_clusters, count, seed))
        found = {j: next(tried) for j, how in enumerate(chosen) if how == "k-means"}
    seeds = [(seed + SEEDS * j) % 2**64 for j in range(count)]
    return [
        [_inside(model, params) for params in found.get(j) or [model.start(s) for s in seeds]]
        for j, model in enumerate(models)
    ]


def _resolved(model: Any, method: str) -> str:
    """What "auto" means for a model, and whether it can start so."""
    able = isinstance(model, StartsFromClusters) and model.clusters(1) is not None
    if method == "auto":
        return "k-means" if able and model.n_components > 1 else "moments"
    if method == "k-means" and not able:
        raise SettingsError(f"{type(model).__name__} has no clusters: use start='moments'.")
    return method


def _inside(model: Any, params: Any) -> FloatArray:
    statistics = np.asarray(model.statistics_of(params))
    if not model.inside(statistics):
        raise SettingsError(
            "at this start some component has no mass or no positive definite covariance: some "
            "columns are combinations of others. Leave them out, or set a larger floor."
        )
    return statistics


def sketched(model: Any, company: Company, seed: int) -> Fit[Sketch]:
    """Rows that stand for all, drawn from buckets."""
    mass, means = yield from buckets(model, company, seed)
    narrowest = NARROWEST_OF_CLUSTERS if isinstance(model, Clusters) else NARROWEST
    points, weights = drawn(mass, means, model.moment_of_rows, seed, model.fixed_data, narrowest)
    return Sketch(points, model.rows_at(points), weights)


def buckets(model: Any, company: Company, seed: int) -> Fit[tuple[FloatArray, FloatArray]]:
    """Shares and means of buckets of all rows.

    There are so few that each holds several rows of every worker, if that leaves some for every
    component.
    """
    k, d = model.n_components, model.clusters(1).n_features
    most = min(
        BUCKETS_PER_COMPONENT * k,
        max(FEWEST, NUMBERS // (d + 1)),
        int(company.rows / company.workers) // ROWS_PER_BUCKET,
    )
    most = max(most, FEWEST_PER_COMPONENT * k, 2)
    growing = Buckets(model.clusters(most), seed % 2**16, SMALLEST_COMPONENT)
    statistics = growing.origin()
    precision = company.precision(len(statistics), 1.0, BUCKET_NOISE)
    for _ in range(growing.rounds + SETTLING):
        ask = Statistics(growing, statistics, precision, "start", values=False)
        told = yield ask
        moved = statistics + ask.metric.unwhiten(told.value / told.rows)
        statistics = growing.protect(statistics, moved)
    mass, means, _ = growing.held(statistics)
    return mass, means
