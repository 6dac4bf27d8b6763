"""Where a fit begins: starts that are tried on a sketch of all rows.

A growing k-means of all rows costs a few sums. Rows drawn from its buckets are a sketch, on which
every member tries as many starts as it likes, at no message (`emfed.fitting.starts.sketch`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np

from emfed.core.errors import SettingsError
from emfed.core.protocols import StartsFromClusters
from emfed.core.sums import Fit, FloatArray, Unmasked
from emfed.core.wording import Setting, Wording
from emfed.fitting.ascent import Cohort, Objective
from emfed.fitting.asks import Exact, Statistics
from emfed.fitting.selection import FLOORS
from emfed.fitting.starts.merging import MOST_MERGED, merged_starts, told_start
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
BUCKET_MOVE = 2.0
"""How far a round is expected to move all buckets, in the metric: at most 1.6 in the first sums of
16 models of the contract tests. What moves farther is asked again."""
SKETCHED = ("k-means", "merge")
"""Starts that are tried on a sketch."""
SEEDS = 0x9E3779B97F4A7C15
"""An odd number without pattern: the seeds of several starts differ."""


class LocalRows(Protocol):
    """What a driver that has all rows may draw from them."""

    def sketch(self, model: Any, seed: int) -> Sketch | None:
        """Rows of one worker alone, who can hide nothing from itself; None: there are several."""


def starts(
    problems: Sequence[Objective],
    method: str,
    count: int,
    seed: int,
    rows: LocalRows | None = None,
) -> Fit[list[list[FloatArray]]]:
    """The statistics that each model may start from, ``count`` for each, the best first.

    Without a sketch of one worker's own ``rows`` sums give one. A model that the opening says all
    of starts at its optimum.
    """
    seeds = [(seed + SEEDS * j) % 2**64 for j in range(count)]
    found: dict[int, list[FloatArray]] = {}
    by_clusters: list[int] = []
    for j, one in enumerate(problems):
        exact = optimum(one.model)
        if exact is not None:
            found[j] = [exact]
        elif _resolved(one.model, method) in SKETCHED:
            by_clusters.append(j)
        else:
            found[j] = [_inside(one.model, one.model.start(own)) for own in seeds]
    if by_clusters:
        widest = max((problems[j] for j in by_clusters), key=lambda one: one.model.n_components)
        models = [problems[j].model for j in by_clusters]
        known = None if rows is None else rows.sketch(widest.model, seed)
        if known is not None:
            begun = _tried(known, models, count, seed)
        elif merges(widest.cohort, method):
            begun = yield from _merged(widest, models, count, seed)
        else:
            sketch = yield from sketched(widest, seed)
            begun = _tried(sketch, models, count, seed)
        found |= zip(by_clusters, begun, strict=True)
    return [found[j] for j in range(len(problems))]


def merges(cohort: Cohort, method: str) -> bool:
    """Whether workers tell clusters of their own rows: many do, unless a start is named.

    They cannot under masks.
    """
    if method == "merge" and cohort.masked:
        raise SettingsError(
            Wording(
                "{} asks workers one by one, which masks forbid: use {}.",
                *(Setting("start", "merge"), Setting("start", "k-means")),
            )
        )
    few_enough = cohort.workers <= MOST_MERGED
    return method == "merge" or (method == "auto" and cohort.many and few_enough)


def _tried(sketch: Sketch, models: Sequence[Any], count: int, seed: int) -> list[list[FloatArray]]:
    """The best starts of each model on a sketch."""
    starts = sketch.starts(models, count, seed)
    return [
        [_inside(model, params) for params in own]
        for model, own in zip(models, starts, strict=True)
    ]


def _merged(
    problem: Objective, models: Sequence[Any], count: int, seed: int
) -> Unmasked[list[list[FloatArray]]]:
    """The best starts of each model on a sketch of workers' own clusters, as the adder tells them.

    All workers together tell enough for chance to have no room: the sketch has the moment of all.
    """
    begin = partial(_begun, problem.model, models, count, seed)
    n, widths = problem.cohort.workers, tuple(m.layout.size for m in models for _ in range(count))
    told = yield from merged_starts(problem.model, n, seed, begin, widths)
    return [told[place : place + count] for place in range(0, len(told), count)]


def _begun(
    widest: Any,
    models: Sequence[Any],
    count: int,
    seed: int,
    mass: FloatArray,
    means: FloatArray,
) -> list[FloatArray]:
    """The best starts of all models, one model's after the other's."""
    found = _tried(_drawn(widest, mass, means, True, seed), models, count, seed)
    pairs = zip(models, found, strict=True)
    return [told_start(model, one) for model, own in pairs for one in own]


def start_at(problem: Objective, params: Any, expected: bool) -> Fit[FloatArray]:
    """Statistics of a start at parameters: what rows say there, or what the parameters imply."""
    model = problem.model
    if not expected:
        return _inside(model, params)
    answer = yield Exact(model, (params,), "start")
    statistics = answer.value / answer.rows
    if not model.inside(statistics):
        raise SettingsError(f"{NOT_INSIDE}: choose other starting parameters.")
    return statistics


def optimum(model: Any) -> FloatArray | None:
    """Statistics at the optimum of a model, where the opening says all of its rows."""
    exact: FloatArray | None = model.closed_form()
    return exact if exact is not None and model.inside(exact) else None


def _resolved(model: Any, method: str) -> str:
    """What "auto" means for a model, and whether it can start so."""
    able = isinstance(model, StartsFromClusters) and model.clusters(1) is not None
    if method == "auto":
        return "k-means" if able and model.n_components > 1 else "moments"
    if method in SKETCHED and not able:
        raise SettingsError(
            Wording(
                "{} has no clusters: use {}.",
                *(type(model).__name__, Setting("start", "moments")),
            )
        )
    return method


NOT_INSIDE = "at this start some component has no mass or no positive definite covariance"


def _inside(model: Any, params: Any) -> FloatArray:
    statistics = np.asarray(model.statistics_of(params))
    if not model.inside(statistics):
        described = model.describe()
        floor = next((name for name in ("ridge", *FLOORS) if name in described), "floor")
        raise SettingsError(
            f"{NOT_INSIDE}: some columns are combinations of others. Drop them, or set {floor} > 0."
        )
    return statistics


def sketched(problem: Objective, seed: int) -> Fit[Sketch]:
    """Rows that stand for all, drawn from buckets."""
    model = problem.model
    mass, means = yield from buckets(problem, seed)
    return _drawn(model, mass, means, model.fixed_data, seed)


def _drawn(model: Any, mass: FloatArray, means: FloatArray, matched: bool, seed: int) -> Sketch:
    narrowest = NARROWEST_OF_CLUSTERS if isinstance(model, Clusters) else NARROWEST
    points, weights = drawn(mass, means, model.moment_of_rows, seed, matched, narrowest)
    return Sketch(points, model.rows_at(points), weights)


def buckets(problem: Objective, seed: int) -> Fit[tuple[FloatArray, FloatArray]]:
    """Shares and means of buckets of all rows.

    There are so few that each holds several rows of every worker, if that leaves some for every
    component.
    """
    model, cohort = problem.model, problem.cohort
    k, d = model.n_components, model.clusters(1).n_features
    most = min(
        BUCKETS_PER_COMPONENT * k,
        max(FEWEST, NUMBERS // (d + 1)),
        int(cohort.rows / cohort.workers) // ROWS_PER_BUCKET,
    )
    most = max(most, FEWEST_PER_COMPONENT * k, 2)
    growing = Buckets(model.clusters(most), seed % 2**16, SMALLEST_COMPONENT)
    statistics = growing.origin()
    precision = cohort.precision(len(statistics), BUCKET_MOVE, BUCKET_NOISE)
    for _ in range(growing.rounds + SETTLING):
        ask = Statistics(growing, statistics, precision, "start", values=False)
        answer = yield ask
        moved = statistics + ask.metric.unwhiten(answer.value / answer.rows)
        statistics = growing.protect(statistics, moved)
    mass, means, _ = growing.held(statistics)
    return mass, means
