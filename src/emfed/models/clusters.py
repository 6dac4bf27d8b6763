"""k-means: rows count for the nearest centre alone, so only cluster sums and counts travel.

The statistics are ``mass`` (shares of rows) and ``first`` (their sums) of each cluster; T is the
mean of each. Lloyd's algorithm is then EM in expectation space with a hard E-step, so all
of the package's algorithms, compressors and federations run it.

`Buckets` are a k-means that grows: a sketch of all rows, from which a mixture can be started.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self, final

import numpy as np
from array_api_compat import array_namespace, device

from emfed.core.errors import check_count, check_type, known
from emfed.core.protocols import (
    BoolArray,
    FloatArray,
    IdentityMetric,
    IntArray,
    Layout,
    Metric,
    Model,
    ModelWords,
    Names,
    Parameters,
    Summaries,
    plural,
)
from emfed.core.registry import register_model, stored
from emfed.core.streams import Purpose, normal_row, normals, uniforms
from emfed.models.component_summaries import Portrait, centre_portrait
from emfed.models.components import (
    SMALLEST_MASS,
    check_rows_suffice,
    halved,
    keep_copies,
)
from emfed.models.devices import MOST_COMPONENTS, Features, Pass, labels, ragged, sweep
from emfed.models.metric import narrow_columns
from emfed.models.mixture import blocks, to_numpy
from emfed.models.parameters import Frame, check_shapes, common_frame
from emfed.models.rows import check_rows, combine_moments, mean_over_rows, moments, total_weight

TRIALS = 4
"""Centres tried at each step of the seeding, of which the best is kept."""
MOST_STEPS = 50
"""Steps of Lloyd's algorithm at most. Not tuned: from these seeds it ends after ten or so."""


@final
@dataclass(frozen=True)
class Centres(Parameters):
    """The centres of the clusters of k-means.

    Parameters
    ----------
    centres : array of shape (K, d)
        The centres, in the user's units in a result.

    Examples
    --------
    >>> from emfed.models import Centres
    >>> Centres([[0.0, 1.0], [2.0, 3.0]]).centres.shape
    (2, 2)
    """

    centres: FloatArray

    def __post_init__(self) -> None:
        object.__setattr__(self, "centres", np.asarray(self.centres, dtype=np.float64))


@final
@dataclass(frozen=True, eq=False)
class ColumnUnits(Metric):
    """Sums of rows in units of the columns; nothing else changes."""

    layout: Layout
    unit: FloatArray

    def whiten(self, vectors: FloatArray) -> FloatArray:
        parts = self.layout.split(vectors)
        return self.layout.join({**parts, "first": parts["first"] / self.unit})

    def unwhiten(self, vectors: FloatArray) -> FloatArray:
        parts = self.layout.split(vectors)
        return self.layout.join({**parts, "first": parts["first"] * self.unit})

    @property
    def in_nats(self) -> bool:
        return False


@stored("k-means")
@final
@dataclass(frozen=True, eq=False)
class Clusters(Model):
    """The model k-means, which has a hard E-step; `emfed.k_means` makes one and says what it takes.

    Examples
    --------
    >>> import emfed
    >>> emfed.k_means(3).n_components
    3
    """

    n_components: int
    standardised: bool = False
    fill: bool = False
    """Whether NaN counts as the common mean: rough, but enough to start other models."""
    smallest: int = 1
    """Clusters with fewer of a worker's rows are left out of what it says."""
    # Binding fills in what follows, but the frame of another model.
    frame: Frame | None = None
    samples: int = 0
    variance: float = 0.0
    """The mean squared distance to the common mean, in the frame."""
    framed: bool = False
    """Whether the frame is that of another model."""
    spreads: FloatArray | None = None
    """The variances of the columns in the frame, if they are not all 1."""

    def __post_init__(self) -> None:
        check_count("n_clusters", self.n_components)

    @property
    def _frame(self) -> Frame:
        return known(self.frame)

    @property
    def n_features(self) -> int:
        return len(self._frame.origin)

    @cached_property
    def layout(self) -> Layout:
        k, d = self.n_components, self.n_features
        return Layout((("mass", (k,)), ("first", (k, d))))

    def check(self, data: Any, where: str, columns: Names = None, first: int = 0) -> None:
        check_rows(data, where, columns, None if self.frame is None else self.n_features, first)

    def evaluate(
        self, data: Any, params: Centres, weights: Any | None = None
    ) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Statistics, minus the mean squared distance to the centres, and no entropy.

        Up to the spread of a worker's rows, which over all workers is a known constant, the
        distance follows from the statistics: one pass is enough.
        """
        statistics = self.expected_statistics(data, params, weights)
        value = -2 * self.surrogate(statistics, params) - self.variance
        return statistics, value, np.zeros_like(value)

    def summary(self, data: Any, weights: Any | None = None) -> dict[str, FloatArray]:
        mean, scatter = moments(data, weights, full=False)
        return {"mean": mean, "scatter": scatter}

    def combine(self, summaries: Summaries, shares: FloatArray) -> dict[str, FloatArray]:
        return combine_moments(summaries, shares)

    def bind(self, summaries: Summaries, counts: IntArray, weights: FloatArray) -> Self:
        """Common origin and scale: one for all columns unless they are standardised."""
        if self.framed:
            return self
        samples = check_rows_suffice(self.n_components, counts, "clusters")
        whole = self.combine(summaries, weights)
        kind = "diag" if self.standardised else "spherical"
        frame = common_frame(whole["mean"], whole["scatter"], kind, floored=True)
        spreads = whole["scatter"] / frame.scale**2
        bound: dict[str, Any] = {
            "frame": frame,
            "samples": samples,
            "variance": float(spreads.sum()),
        }
        return dataclasses.replace(self, **bound, spreads=None if self.standardised else spreads)

    @classmethod
    def within(
        cls, frame: Frame, count: int, samples: int, spreads: FloatArray | None = None
    ) -> Clusters:
        """Clusters in a frame that another model has already been bound to."""
        one_scale = bool(np.all(frame.scale == frame.scale[0]))
        d = float(len(frame.origin))
        own: dict[str, Any] = {"frame": frame, "samples": samples, "variance": d, "framed": True}
        return cls(count, not one_scale, **own, spreads=spreads)

    @property
    def column_variances(self) -> FloatArray:
        """Those of all rows, in the frame."""
        return np.ones(self.n_features) if self.spreads is None else self.spreads

    def silent_below(self, rows: int) -> Clusters:
        """The same, with no word about clusters that hold fewer of a worker's rows."""
        return dataclasses.replace(self, smallest=max(rows, self.smallest))

    def clusters(self, count: int) -> Clusters:
        """Itself, with so many clusters."""
        return dataclasses.replace(self, n_components=count)

    def start_at(self, mass: FloatArray, centres: FloatArray, spread: FloatArray) -> Centres:
        return Centres(centres)

    @property
    def moment_of_rows(self) -> FloatArray | None:
        return self.spreads

    def rows_at(self, points: FloatArray) -> FloatArray:
        return points * self._frame.scale + self._frame.origin

    # The E-step.

    def _assigned(
        self, data: Any, params: Centres, weights: Any | None
    ) -> Iterator[tuple[Any, Any, Any]]:
        """Blocks of rows in the frame ``(..., m, d)``, scores ``(..., m, K)``, and weights.

        The score <z, c> - |c|^2 / 2 is largest at the nearest centre.
        """
        xp, where = array_namespace(data), device(data)
        origin = xp.asarray(self._frame.origin, device=where)
        inverse = xp.asarray(1 / self._frame.scale, device=where)
        centres = xp.asarray(np.swapaxes(params.centres, -1, -2), device=where)
        half = xp.asarray(0.5 * (params.centres**2).sum(axis=-1)[..., None, :], device=where)
        for rows, w in blocks(data, weights, self.n_features + self.n_components):
            z = (xp.astype(rows, xp.float64) - origin) * inverse
            z = xp.where(xp.isnan(z), 0.0, z) if self.fill else z
            yield z, z @ centres - half, w

    def expected_statistics(
        self, data: Any, params: Centres, weights: Any | None = None
    ) -> FloatArray:
        """Shares and sums of each cluster."""
        swept = self._swept(data, params, weights)
        if swept is not None:
            return swept
        xp, mass, sums, rows = array_namespace(data), 0.0, 0.0, 0.0
        clusters = xp.arange(self.n_components, device=device(data))
        for z, scores, w in self._assigned(data, params, weights):
            nearest = xp.argmax(scores, axis=-1)
            member = xp.astype(nearest[..., None, :] == clusters[:, None], xp.float64)
            if self.smallest > 1:
                real = member if w is None else member * xp.astype(w > 0, xp.float64)[..., None, :]
                rows = rows + xp.sum(real, axis=-1)
            member = member if w is None else member * w[..., None, :]
            mass = mass + xp.sum(member, axis=-1)
            sums = sums + member @ z
        count = total_weight(data, weights)[..., None]
        parts = {"mass": to_numpy(mass) / count, "first": to_numpy(sums) / count[..., None]}
        if self.smallest > 1:
            kept = to_numpy(rows) >= self.smallest
            parts = {"mass": parts["mass"] * kept, "first": parts["first"] * kept[..., None]}
        return self.layout.join(parts)

    @property
    def sweeps(self) -> bool:
        """Whether a kernel takes rows of this model, whatever their weights."""
        return not self.fill and self.smallest <= 1 and self.n_components <= MOST_COMPONENTS

    def _swept(self, data: Any, params: Centres, weights: Any | None) -> FloatArray | None:
        """The statistics by a kernel, or None where there is none."""
        rows = ragged(data, weights)
        counted = self.smallest <= 1 or (rows is not None and rows.weights is None)
        if rows is None or self.fill or not counted or self.n_components > MOST_COMPONENTS:
            return None
        sums = sweep(rows, self._pass(params))
        kept = sums.mass >= self.smallest if self.smallest > 1 else np.ones_like(sums.mass)
        count, first = rows.totals[:, None], slice(None) if data.ndim == 3 else 0
        mass, moments = sums.mass * kept / count, sums.moments * kept[..., None] / count[..., None]
        return self.layout.join({"mass": mass[first], "first": moments[first]})

    def _pass(self, params: Centres) -> Pass:
        features, c = Features(self._frame.origin, self._frame.scale, "none"), params.centres
        return Pass(features, -0.5 * (c**2).sum(axis=-1), c, hard=True)

    def labels(self, data: Any, params: Centres) -> IntArray:
        """The nearest centre of each row, ``(..., samples)``."""
        rows = None if self.fill else ragged(data)
        if rows is not None and self.n_components <= MOST_COMPONENTS:
            return labels(rows, self._pass(params)).reshape(data.shape[:-1])
        xp = array_namespace(data)
        found = [to_numpy(xp.argmax(s, axis=-1)) for _, s, _ in self._assigned(data, params, None)]
        return np.concatenate(found, axis=-1).astype(np.int64)

    def responsibilities(self, data: Any, params: Centres) -> FloatArray:
        """1 for the nearest centre."""
        return np.eye(self.n_components)[self.labels(data, params)]

    def distances(self, data: Any, params: Centres) -> FloatArray:
        """Distances from each row to each centre, in the frame, ``(..., rows, K)``.

        By differences: products would lose half the digits of small distances.
        """
        parts = []
        for z, _, _ in self._assigned(data, params, None):
            away = to_numpy(z)[..., None] - np.swapaxes(params.centres, -1, -2)[..., None, :, :]
            parts.append(np.sqrt((away * away).sum(axis=-2)))
        return np.concatenate(parts, axis=-2)

    def score_samples(self, data: Any, params: Centres) -> FloatArray:
        """Minus the squared distance to the nearest centre, in the frame."""
        return -(self.distances(data, params).min(axis=-1) ** 2)

    def log_likelihood(self, data: Any, params: Centres, weights: Any | None = None) -> FloatArray:
        """Minus the (weighted) mean squared distance: not a likelihood, but what rises."""
        return mean_over_rows(self.score_samples(data, params), weights)

    # The M-step.

    def maximize(self, statistics: FloatArray) -> Centres:
        parts = self.layout.split(np.asarray(statistics, dtype=np.float64))
        return Centres(parts["first"] / parts["mass"][..., None])

    def surrogate(self, statistics: FloatArray, params: Centres) -> FloatArray:
        """Half the mean squared distance, up to a constant."""
        parts = self.layout.split(np.asarray(statistics, dtype=np.float64))
        squares = 0.5 * parts["mass"] * (params.centres**2).sum(axis=-1)
        return (squares - (parts["first"] * params.centres).sum(axis=-1)).sum(axis=-1)

    def inertia(self, statistics: FloatArray) -> float:
        """The mean squared distance of rows to the means of their clusters, in the frame."""
        parts = self.layout.split(np.asarray(statistics, dtype=np.float64))
        between = (parts["first"] ** 2).sum(axis=-1) / parts["mass"]
        return self.variance - float(between.sum())

    def inside(self, statistics: FloatArray) -> bool:
        finite = np.all(np.isfinite(statistics))
        return bool(finite and np.all(statistics[..., : self.n_components] >= SMALLEST_MASS))

    def protect(self, before: FloatArray, after: FloatArray) -> FloatArray:
        """A cluster without rows stays where it is, with a trace of mass."""
        after = keep_copies(self.layout, before, after)
        gone = after[self.layout.slices["mass"]] < 2 * SMALLEST_MASS
        if not gone.any():
            return after
        old, new = self.layout.split(before), self.layout.split(after.copy())
        share = 2 * SMALLEST_MASS / old["mass"][gone]
        for name, value in new.items():
            value[gone] = old[name][gone] * share[(..., *(None,) * (value.ndim - 1))]
        return self.layout.join(new)

    def split(self, statistics: FloatArray, empty: BoolArray, attempt: int) -> FloatArray:
        """New centres beside those of the heaviest clusters, which stay: no row is farther then."""
        parts = {n: value.copy() for n, value in self.layout.split(statistics).items()}
        mass, first = parts["mass"], parts["first"]
        within = self.column_variances - (first**2 / mass[:, None])[~empty].sum(axis=0)
        widest = int(np.argmax(within))
        step = np.sqrt(max(float(within[widest]), 0.0)) * np.eye(self.n_features)[widest]
        for new, old in zip(*halved(mass, empty, attempt), strict=True):
            mass[old], first[old] = mass[old] / 2, first[old] / 2
            mass[new], first[new] = mass[old], first[old] + mass[old] * (-1) ** attempt * step
        return self.layout.join(parts)

    def moved(self, statistics: FloatArray, attempt: int) -> FloatArray | None:
        """The two clusters that lose least become one; the free one goes beside one that is wide.

        The width of a cluster is not known. One with much mass, far from its neighbour, has most to
        gain; the new centre is on its other side, where a long tail has its rows.
        """
        parts = {n: value.copy() for n, value in self.layout.split(statistics).items()}
        mass, first, k = parts["mass"], parts["first"], self.n_components
        if k < 3:
            return None
        centres = first / mass[:, None]
        apart = ((centres[:, None] - centres) ** 2).sum(axis=-1)
        np.fill_diagonal(apart, np.inf)
        near = apart.argmin(axis=1)
        wide = int(np.argsort(-mass * apart.min(axis=1), kind="stable")[attempt % k])
        lost = mass[:, None] * mass / (mass[:, None] + mass) * apart
        lost[wide], lost[:, wide] = np.inf, np.inf
        one, free = np.unravel_index(np.argmin(lost), lost.shape)
        mass[one], first[one] = mass[one] + mass[free], first[one] + first[free]
        mass[wide], first[wide] = mass[wide] / 2, first[wide] / 2
        mass[free] = mass[wide]
        away = centres[wide] - centres[near[wide]]
        first[free] = mass[wide] * (centres[wide] + MOVE_REACH * away)
        return self.layout.join(parts)

    def cost(self, statistics: FloatArray) -> float:
        return self.inertia(statistics)

    # Starts, metric and units.

    def metric(self, params: Centres) -> Metric:
        """Distances, with narrow columns in units of their own: no centre leaves the rows."""
        narrow = narrow_columns(self.column_variances)
        return IdentityMetric() if np.all(narrow == 1) else ColumnUnits(self.layout, narrow)

    def start(self, seed: int) -> Centres:
        """Drawn around the common mean with the spread of all data."""
        k, d = self.n_components, self.n_features
        draws = normal_row(seed, 0, Purpose.START, k * d)
        spread = np.sqrt(self.variance / d) * narrow_columns(self.column_variances)
        return Centres(draws.reshape(k, d) * spread)

    def statistics_of(self, params: Centres) -> FloatArray:
        """Clusters of equal mass."""
        k = params.centres.shape[-2]
        mass = np.full(params.centres.shape[:-1], 1 / k)
        return self.layout.join({"mass": mass, "first": params.centres / k})

    def to_user(self, params: Centres) -> Centres:
        return Centres(params.centres * self._frame.scale + self._frame.origin)

    def from_user(self, params: Centres) -> Centres:
        """Checked centres in the frame's units."""
        check_type("start", params, Centres, "Centres(centres)")
        check_shapes(params, {"centres": (self.n_components, self.n_features)})
        return Centres((params.centres - self._frame.origin) / self._frame.scale)

    def portrait(self, params: Centres, names: Sequence[str]) -> Portrait:
        return centre_portrait(params.centres, names)

    def words(self) -> ModelWords:
        units, scale = "units of the data", 1.0
        if self.standardised:
            units = "standard deviations of the columns"
        elif self.frame is not None:
            scale = float(self.frame.scale[0])  # one for all columns
        return ModelWords(
            f"k-means clustering with {plural(self.n_components, 'cluster')}",
            part="cluster",
            score="squared distance",
            unit="",
            meaning=f"that from a row to the nearest centre, in {units}; lower is better",
            factor=-(scale**2),
        )

    def describe(self) -> dict[str, Any]:
        return {
            "model": "k-means",
            "n_components": self.n_components,
            "standardised": self.standardised,
            "fill": self.fill,
            "smallest": self.smallest,
            **({"frame": self._frame.describe(), "samples": self.samples} if self.framed else {}),
            **(
                {"spreads": self.spreads.tolist()}
                if self.framed and self.spreads is not None
                else {}
            ),
        }


@register_model("k-means")
def _clusters(
    n_components: int,
    standardised: bool = False,
    fill: bool = False,
    smallest: int = 1,
    frame: Mapping[str, Any] | None = None,
    samples: int = 0,
    spreads: Sequence[float] | None = None,
) -> Clusters:
    """k-means from its description, in the frame of another model if that has one."""
    if frame is None:
        return Clusters(n_components, standardised, fill, smallest)
    known = None if spreads is None else np.asarray(spreads, dtype=np.float64)
    found = Clusters.within(Frame.read(frame), n_components, samples, known)
    return dataclasses.replace(found, standardised=standardised, fill=fill, smallest=smallest)


def k_means(n_clusters: int, *, standardised: bool = False) -> Clusters:
    """Make k-means, which is fitted like any model: by `EM` (Lloyd's algorithm) or compressed.

    Only cluster sums and counts leave a worker.

    Parameters
    ----------
    n_clusters : int
        The number of clusters.
    standardised : bool
        Whether distances are in standard deviations of each column, not in the user's units.

    Returns
    -------
    Clusters
        The model, not bound to data.

    Examples
    --------
    >>> import numpy as np
    >>> import emfed
    >>> rows = np.array([[0.0, 1.0], [0.2, 0.8], [0.1, 1.1], [4.0, 5.2], [4.1, 5.0], [4.3, 4.9]])
    >>> result = emfed.fit(emfed.k_means(2), [rows[::2], rows[1::2]], "em", seed=0)
    >>> np.sort(result.params.centres[:, 0]).round(2)
    array([0.1 , 4.13])
    """
    return Clusters(n_clusters, standardised)


@final
@dataclass(frozen=True)
class BucketParameters(Parameters):
    """Shares of rows that buckets should hold ``(M,)``, and their centres ``(M, d)``.

    An unused bucket has no share, and its centre is far from every row.
    """

    mass: FloatArray
    centres: FloatArray


BUCKETS_PER_COMPONENT = 16
"""Buckets for a component of a start, at most. Not tuned: more describe clusters better and cost as
many statistics more in each round of the start."""
BRANCHES = 4
"""Buckets that one is split into, on average."""
ENOUGH = 0.7
"""The share of all buckets in use from which on none is split any more: some are always empty."""
LEAST = 0.2
"""A bucket with less than this share of an even one is given up: its mean would be noise."""
REACH = 0.7
"""How far from their bucket's centre new ones begin, in standard deviations within buckets."""
MOVE_REACH = 0.25
"""How far from a cluster a centre that moves begins, in the distance to its neighbour. Farther out
it may have no rows. `ccard` and `anes96`, K=8 by workers, inertia over the best of five starts of
scikit-learn, two seeds: 1.4 and 1.6, 1.0 and 1.0 with 0.5; 1.05 and 1.04, 1.02 and 1.0 with it."""
FAR = 1e6
"""A coordinate that no row in the frame has."""
NARROWEST = 0.05
"""The least variance within buckets, in that of all rows."""


@final
@dataclass(frozen=True)
class BucketMetric(Metric):
    """Sums in units of what the sums of one row's bucket vary by; unused buckets say nothing."""

    layout: Layout
    roots: FloatArray
    centres: FloatArray
    spread: FloatArray
    used: FloatArray

    def whiten(self, vectors: FloatArray) -> FloatArray:
        parts = self.layout.split(vectors)
        mass = parts["mass"]
        first = (parts["first"] - self.centres * mass[..., None]) / self.spread
        scale = self.used / self.roots
        return self.layout.join({"mass": mass * scale, "first": first * scale[:, None]})

    def unwhiten(self, vectors: FloatArray) -> FloatArray:
        parts, scale = self.layout.split(vectors), self.used * self.roots
        mass = parts["mass"] * scale
        first = parts["first"] * scale[:, None] * self.spread + self.centres * mass[..., None]
        return self.layout.join({"mass": mass, "first": first})


@final
@dataclass(frozen=True, eq=False)
class Buckets(Model):
    """At most so many clusters, which begin as one and split where rows are.

    S holds what was measured. T puts a bucket's children around its mean, in directions that
    follow from the seed, as long as buckets are unused; so both ends compute the same splits, and
    none is ever sent. A round is one of Lloyd's algorithm on all of them.
    """

    inner: Clusters
    seed: int = 0
    least: int = 0
    """Buckets with fewer rows of all workers are unused."""

    @property
    def most(self) -> int:
        """Buckets at most."""
        return self.inner.n_components

    @property
    def n_features(self) -> int:
        return self.inner.n_features

    @cached_property
    def layout(self) -> Layout:
        return self.inner.layout

    @property
    def rounds(self) -> int:
        """Rounds until all buckets are in use, if rows are everywhere."""
        return max(1, int(np.ceil(np.log(self.most) / np.log(BRANCHES) - 1e-9)))

    @property
    def sweeps(self) -> bool:
        return self.inner.sweeps

    @property
    def allows_missing(self) -> bool:
        return self.inner.fill

    def silent_below(self, rows: int) -> Buckets:
        """The same, with no word about buckets that hold fewer of a worker's rows."""
        return dataclasses.replace(self, inner=self.inner.silent_below(rows))

    def check(self, data: Any, where: str, columns: Names = None, first: int = 0) -> None:
        self.inner.check(data, where, columns, first)

    def summary(self, data: Any, weights: Any | None = None) -> dict[str, FloatArray]:
        return self.inner.summary(data, weights)

    def combine(self, summaries: Summaries, shares: FloatArray) -> dict[str, FloatArray]:
        return self.inner.combine(summaries, shares)

    def bind(self, summaries: Summaries, counts: IntArray, weights: FloatArray) -> Self:
        return dataclasses.replace(self, inner=self.inner.bind(summaries, counts, weights))

    def expected_statistics(
        self, data: Any, params: BucketParameters, weights: Any | None = None
    ) -> FloatArray:
        return self.inner.expected_statistics(data, Centres(params.centres), weights)

    def log_likelihood(
        self, data: Any, params: BucketParameters, weights: Any | None = None
    ) -> FloatArray:
        return self.inner.log_likelihood(data, Centres(params.centres), weights)

    def held(self, statistics: FloatArray) -> tuple[FloatArray, FloatArray, IntArray]:
        """Shares and means of the buckets in use, and their positions."""
        parts = self.layout.split(np.asarray(statistics, dtype=np.float64))
        used = np.flatnonzero(parts["mass"] > 0)
        mass = parts["mass"][used]
        return mass / mass.sum(), parts["first"][used] / mass[:, None], used

    def maximize(self, statistics: FloatArray) -> BucketParameters:
        """Means of the buckets in use; their children, where there is room."""
        mass, means, used = self.held(statistics)
        shares, centres = np.zeros(self.most), np.full((self.most, self.n_features), FAR)
        shares[used], centres[used] = mass, means
        if len(used) < ENOUGH * self.most:
            each = self._children(mass)
            spread = self._spread(mass, means)
            steps = self._steps(len(used), int(each.sum())) * spread
            parent = np.repeat(np.arange(len(used)), each)
            steps[each[parent] == 1] = 0.0
            free = np.setdiff1d(np.arange(self.most), used)
            place, first = np.empty(len(parent), dtype=np.int64), np.cumsum(each) - each
            place[first] = used  # the eldest takes its parent's place
            younger = np.setdiff1d(np.arange(len(parent)), first)
            place[younger] = free[: len(younger)]
            shares[place], centres[place] = (mass / each)[parent], means[parent] + steps
        return BucketParameters(shares, centres)

    def _children(self, mass: FloatArray) -> IntArray:
        """How many each is split into: more where there is more mass, all of them at most."""
        wanted = min(self.most, BRANCHES * len(mass))
        each = np.clip(np.round(wanted * mass), 1, 2 * BRANCHES).astype(np.int64)
        while each.sum() > self.most:
            each[np.argmax(each)] -= 1
        return each

    def _steps(self, used: int, count: int) -> FloatArray:
        """Where children begin, in units of the spread; each number of parents has its own.

        Shorter in many columns than a row's distance, or no child would be nearest to any row.
        """
        d, address = self.n_features, np.array([used], dtype=np.int64)
        if d == 1:  # there are two directions, and children in one place would never part
            turn = np.arange(count)
            return (REACH * (-1.0) ** turn * (1 + turn // 2 % 4 / 2))[:, None]
        draws = normals(self.seed, 0, Purpose.CELLS_SPLIT, address, count * d).reshape(count, d)
        return REACH * d**0.25 * draws / np.sqrt((draws**2).sum(axis=1, keepdims=True))

    def _spread(self, mass: FloatArray, centres: FloatArray) -> FloatArray:
        """Standard deviations within buckets, by column."""
        whole = self.inner.column_variances
        whole = np.where(whole > 0, whole, 1.0)
        return np.sqrt(np.maximum(whole - mass @ centres**2, NARROWEST * whole))

    def metric(self, params: BucketParameters) -> BucketMetric:
        used = params.mass > 0
        centres = np.where(used[:, None], params.centres, 0.0)
        roots = np.sqrt(np.maximum(params.mass, LEAST / self.most))
        spread = self._spread(params.mass, centres)
        return BucketMetric(self.layout, roots, centres, spread, used.astype(np.float64))

    def surrogate(self, statistics: FloatArray, params: BucketParameters) -> FloatArray:
        return self.inner.surrogate(statistics, Centres(params.centres))

    def inside(self, statistics: FloatArray) -> bool:
        mass = self.layout.split(np.asarray(statistics))["mass"]
        return bool(np.isfinite(statistics).all() and np.all(mass.max(axis=-1) > 0))

    def protect(self, before: FloatArray, after: FloatArray) -> FloatArray:
        """Buckets of hardly any rows are unused from now on; if all are, nothing has changed."""
        parts = self.layout.split(after)
        kept = parts["mass"] > max(LEAST / self.most, self.least / max(self.inner.samples, 1))
        if not kept.any():
            return before
        return self.layout.join(
            {"mass": parts["mass"] * kept, "first": parts["first"] * kept[:, None]}
        )

    def start(self, seed: int) -> BucketParameters:
        return self.maximize(self.origin())

    def origin(self) -> FloatArray:
        """All rows in one bucket, whose mean is the origin of the frame."""
        statistics = np.zeros(self.layout.size)
        statistics[0] = 1.0
        return statistics

    def statistics_of(self, params: BucketParameters) -> FloatArray:
        first = params.mass[:, None] * params.centres
        return self.layout.join({"mass": params.mass, "first": first})

    def describe(self) -> dict[str, Any]:
        return {"model": "buckets", "inner": self.inner.describe(), "seed": self.seed}


# k-means of weighted points.


def seed_centres(
    mass: FloatArray, points: FloatArray, count: int, seed: int, attempts: Sequence[int]
) -> FloatArray:
    """k-means++ (Arthur, Vassilvitskii 2007), greedy: ``count`` of the points, far from each other.

    A point is drawn with probability proportional to its mass times its squared distance to the
    centres so far; of a few drawn the one that lowers the distances most is taken. All attempts go
    on at once, each with its own random numbers: ``(attempts, count, columns)``.
    """
    address = np.array(attempts, dtype=np.int64)
    draws = uniforms(seed, 0, Purpose.SEEDING, address, 1 + TRIALS * (count - 1))
    chosen = np.zeros((len(address), count), dtype=np.int64)
    chosen[:, 0] = np.searchsorted(np.cumsum(mass)[:-1], draws[:, 0] * mass.sum(), side="right")
    squares, turn = (points**2).sum(axis=-1), np.arange(len(address))

    def apart(picks: IntArray) -> FloatArray:
        """Squared distances by products, six times as fast as by differences at 2,000 x 20.

        What rounding leaves of the distance between equal points is never drawn.
        """
        products = points[picks] @ points.T
        return np.maximum(squares[picks][..., None] + squares - 2 * products, 0.0)

    distances = apart(chosen[:, :1])[:, 0]
    for step in range(1, count):
        below = np.cumsum(mass * distances, axis=-1)
        u = draws[:, 1 + TRIALS * (step - 1) : 1 + TRIALS * step] * below[:, -1:]
        found = [np.searchsorted(*pair, side="right") for pair in zip(below, u, strict=True)]
        picks = np.minimum(found, len(points) - 1)
        tried = np.minimum(apart(picks), distances[:, None])
        best = np.argmin(tried @ mass, axis=-1)
        chosen[:, step], distances = picks[turn, best], tried[turn, best]
    return points[chosen]


def lloyd(
    mass: FloatArray, points: FloatArray, centres: FloatArray, steps: int = MOST_STEPS
) -> tuple[IntArray, FloatArray, float]:
    """Labels, centres and weighted inertia where Lloyd's algorithm ends."""
    count, labels = len(centres), np.full(len(points), -1, dtype=np.int64)
    for _ in range(steps):
        scores = points @ centres.T - 0.5 * (centres**2).sum(axis=-1)
        nearest = np.argmax(scores, axis=-1).astype(np.int64)
        if np.array_equal(nearest, labels):
            break
        labels = nearest
        member = np.zeros((count, len(points)))
        member[labels, np.arange(len(points))] = mass
        total = member.sum(axis=-1)
        held = total > 0
        centres = centres.copy()
        centres[held] = (member[held] @ points) / total[held, None]
    distances = ((points - centres[labels]) ** 2).sum(axis=-1)
    return labels, centres, float(mass @ distances)
