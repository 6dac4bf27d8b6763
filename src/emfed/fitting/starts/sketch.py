"""A sketch of all rows, on which the server tries as many starts as it likes, at no message.

One worker alone in this process is its own sketch: some of its rows. Otherwise buckets with their
shares and means are all that was told (`emfed.models.clusters.Buckets`), and rows are drawn from
them: a bucket's rows lie around its mean, the wider the farther its neighbours are. On the sketch a
start is a few steps of the model's own EM, so starts are judged by what they are for, and fits of
one more component can begin at a split of the last. Where the workers' rows are on a GPU, so are
those of the sketch, and a step of all starts is one pass.

Decision: docs/decisions/018-starts-and-sketches.md
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from emfed.algorithms.steps import shorten
from emfed.core.protocols import FloatArray, IntArray
from emfed.core.streams import Purpose, normals
from emfed.fitting.selection import debt
from emfed.models.clusters import MOST_STEPS, lloyd, seed_centres
from emfed.models.devices import Features, Pass, Ragged, copies, sweep

ROWS = 2000
"""Rows of a sketch: so many tell starts apart on all open tables; more cost time."""
ROWS_PER_BUCKET, MOST_ROWS = 8, 8000
"""Where buckets are many, a sketch has more rows. From 1,000 buckets of MNIST, tied, EM ends at
-29.767 nats on average where 2,000 rows are drawn, at -29.723 where 8,000 are (three seeds)."""
NEIGHBOURS = 3
"""Neighbours whose distance says how wide a bucket is. Not tuned: one alone is noisy."""
NARROWEST = 0.01
"""The least variance within buckets, in any direction, in that of all rows."""
NARROWEST_OF_CLUSTERS = 1e-4
"""The same for k-means, which has no variance that could get too narrow, and whose columns share
one unit: one with heavy tails may be all there is. Inertia over the best of five starts of
scikit-learn, K=8 by workers, on `ccard` and `anes96`: 2.5 and 2.6 with 0.01, 1.9 and 1.8 with it.
Spherical mixtures of `wine` with K=5 and 6 end 2.2 and 1.5 nats below with it, 0.4 at most without.
"""
ATTEMPTS, KEPT = 10, 3
"""Starts tried on a sketch for each number of components, and those that go on to the end."""
SPLITS = 4
"""Splits of the fit with fewer components that are tried as well."""
FIRST_STEPS, STEPS = 6, 25
"""EM steps of every start, and of those that are kept."""
WORK = 5e8
"""Statistics of rows that are evaluated at most for all candidates: about a second."""
STILL = 1e-6
"""The largest move of a statistic, in the frame, below which EM on the sketch has ended: what it is
worth is then right to 1e-9 nats unless EM crawls, and a start need not be an optimum."""
HARDNESS = 0.2
"""First variances over those within clusters: rows then belong almost to the nearest centre."""
DIGITS = 9
"""Nats that log-likelihoods are rounded to when they are ranked: starts that lead to one place are
equal, whatever rounding says, or it would decide about the order of the components."""


@final
@dataclass(frozen=True, eq=False)
class Sketch:
    """Rows that stand for all, in the frame of k-means and as the model reads them."""

    points: FloatArray
    """The rows in the frame; 0 where a value is missing."""
    rows: FloatArray
    """The rows in the user's units."""
    weights: FloatArray
    there: Any = None
    """The rows once more, on the GPU where the workers' are; None: theirs are here."""

    def starts(self, models: Sequence[Any], count: int, seed: int) -> list[list[Any]]:
        """``count`` starting parameters of each model, the best of the sketch first."""
        found: dict[int, list[Any]] = {}
        cost = len(self.rows) * sum(model.layout.size for model in models)
        passes = int(WORK / max(cost, 1))
        order = sorted(range(len(models)), key=lambda j: models[j].n_components)
        before: tuple[Any, Any] | None = None
        for j in order:
            found[j] = self._best(models[j], before, max(count, KEPT), passes, seed)[:count]
            before = models[j], found[j][0]
        return [found[j] for j in range(len(models))]

    def _best(
        self, model: Any, before: tuple[Any, Any] | None, kept: int, passes: int, seed: int
    ) -> list[Any]:
        """Parameters after EM on the sketch, best first; as many as ``kept`` or more."""
        k = model.n_components
        tries = int(np.clip(passes // (2 * FIRST_STEPS), kept, max(ATTEMPTS, kept)))
        pairs = self.partitions(model, seed, tries)
        if before is not None and before[0].n_components < k:
            pairs += self._splits(*before, k, seed)
        begun = [self._begin(model, *pair) for pair in pairs]
        if passes < 2 * FIRST_STEPS:  # too large for that: the first partition is what it is
            return [model.maximize(s) for s in begun[:kept]]
        tried = self._climb(model, begun, FIRST_STEPS)
        ended = self._climb(model, tried[:kept], min(STEPS, passes // 4))
        return [model.maximize(s) for s in ended]

    def _begin(self, model: Any, shares: FloatArray, centres: FloatArray) -> FloatArray:
        """Statistics of a start at these clusters."""
        shares = np.maximum(shares, 0.1 / len(shares))
        shares = shares / shares.sum()
        whole = self.weights @ self.points**2 / self.weights.sum()
        within = HARDNESS * np.maximum(whole - shares @ centres**2, 0.05 * whole)
        within = np.where(within > 0, within, HARDNESS)
        return np.asarray(model.statistics_of(model.start_at(shares, centres, within)))

    def _climb(self, model: Any, begun: list[FloatArray], steps: int) -> list[FloatArray]:
        """Where EM on the sketch leads from each of these statistics, best first."""
        beside = self._copies(len(begun)) if model.sweeps else None
        for _ in range(steps):
            if beside is None:
                params = [model.maximize(s) for s in begun]
                led = [model.expected_statistics(self.rows, p, self.weights) for p in params]
            else:
                # The rounds of a fit evaluate, too: one kernel serves both and is compiled once.
                led = model.evaluate(beside, model.maximize(np.stack(begun)))[0]
            moves = [to - s for s, to in zip(begun, led, strict=True)]
            begun = [shorten(model, s, m)[0] for s, m in zip(begun, moves, strict=True)]
            if max(float(np.abs(m).max()) for m in moves) < STILL:
                break
        params = [model.maximize(s) for s in begun]
        if beside is None:
            values = [model.log_likelihood(self.rows, p, self.weights) for p in params]
        else:
            values = model.evaluate(beside, model.maximize(np.stack(begun)))[1]
        return self._ranked(model, begun, params, values)

    def _copies(self, count: int) -> Ragged | None:
        """The sketch on the GPU so many times, as workers with parameters of their own.

        A step of all starts is then one pass, whose launch costs 0.1 to 0.2 ms; by numpy a step of
        one start takes 0.5 ms (tied) to 3 ms (full) at 2,000 x 20, K=10. None: rows are here.
        """
        if self.there is None:
            return None
        even = bool(np.all(self.weights == self.weights[0]))
        return copies(self.there, None if even else self.weights, count)

    def _ranked(
        self, model: Any, ended: list[FloatArray], params: list[Any], values: Sequence[Any]
    ) -> list[FloatArray]:
        """Best first, judged as candidates are: see `emfed.fitting.selection.debt`."""
        keys, rows = [], float(len(self.rows))
        for position, (own, value) in enumerate(zip(params, values, strict=True)):
            value = float(value) - debt(model, own, rows) / rows
            fine = np.isfinite(value) and model.inside(model.statistics_of(own))
            keys.append((-round(value, DIGITS) if fine else np.inf, position))
        return [ended[position] for _, position in sorted(keys)]

    def _splits(
        self, model: Any, params: Any, k: int, seed: int
    ) -> list[tuple[FloatArray, FloatArray]]:
        """Clusters of a fit with fewer components, of which those that gain most are split."""
        labels = np.argmax(model.responsibilities(self.rows, params), axis=-1)
        groups = [np.flatnonzero(labels == j) for j in range(model.n_components)]
        groups = [own for own in groups if len(own)]
        out = []
        for turn in range(SPLITS):
            own, parts = list(groups), len(groups)
            for step in range(k - parts):
                halves = [self._halved(g, seed, turn) if len(g) > 3 else None for g in own]
                gains = [-1.0 if h is None else h[0] for h in halves]
                rank = np.argsort(gains, kind="stable")[::-1]
                which = int(rank[min(turn if step == 0 else 0, len(own) - 1)])
                half = halves[which]
                if half is None:
                    break
                own[which : which + 1] = half[1:]
            if len(own) == k:
                out.append(self._of_groups(own))
        return out

    def _halved(self, own: IntArray, seed: int, turn: int) -> tuple[float, IntArray, IntArray]:
        """A group in two by k-means, and by how much that lowers the inertia."""
        points, w = self.points[own], self.weights[own]
        labels, _, inertia = lloyd(w, points, seed_centres(w, points, 2, seed, [turn])[0])
        mean = w @ points / w.sum()
        gain = float(w @ ((points - mean) ** 2).sum(axis=-1)) - inertia
        return gain, own[labels == 0], own[labels == 1]

    def _of_groups(self, groups: Sequence[IntArray]) -> tuple[FloatArray, FloatArray]:
        mass = np.array([self.weights[own].sum() for own in groups])
        means = [self.weights[own] @ self.points[own] for own in groups]
        return mass / mass.sum(), np.array(means) / np.maximum(mass, 1e-300)[:, None]

    def partitions(self, model: Any, seed: int, tries: int) -> list[tuple[FloatArray, FloatArray]]:
        """Shares and centres of as many clusters of the sketch as there are components."""
        k, points, mass = model.n_components, self.points, self.weights
        if short := max(0, k - len(points)):  # fewer rows than components
            points = np.concatenate([points, np.repeat(points[:1], short, axis=0) + 0.1])
            mass = np.concatenate([mass, np.full(short, mass.min())])
        seeds = seed_centres(mass, points, k, seed, range(tries))
        beside = None if short or np.isnan(self.rows).any() else self._copies(tries)
        if beside is not None:
            return _lloyd_beside(beside, model.clusters(1).frame, seeds)
        out = []
        for centres in seeds:
            labels, centres, _ = lloyd(mass, points, centres)
            member = labels == np.arange(k)[:, None]
            shares = np.where(member, mass, 0.0).sum(axis=-1)
            out.append((shares / shares.sum(), centres))
        return out


def _lloyd_beside(
    rows: Ragged, frame: Any, centres: FloatArray
) -> list[tuple[FloatArray, FloatArray]]:
    """`lloyd` from all of these centres at once: each step is one pass over rows on the GPU."""
    features, mass = Features(frame.origin, frame.scale, "none"), np.zeros(centres.shape[:2])
    for _ in range(MOST_STEPS):
        given = Pass(features, -0.5 * (centres**2).sum(axis=-1), centres, hard=True)
        before, (mass, moments, *_) = mass, sweep(rows, given)
        held = mass > 0
        after = np.where(held[..., None], moments / np.where(held, mass, 1.0)[..., None], centres)
        still = np.array_equal(mass, before) and np.array_equal(after, centres)
        centres = after
        if still:  # equal labels have equal sums, to the bit
            break
    return list(zip(mass / mass.sum(axis=-1, keepdims=True), centres, strict=True))


def _power(moment: FloatArray, exponent: float) -> FloatArray:
    """A power of a symmetric matrix, of one that is nearly singular, too."""
    values, vectors = np.linalg.eigh(moment)
    least = max(1e-18 * float(values[-1]), 1e-30)
    return np.asarray((vectors * np.maximum(values, least) ** exponent) @ vectors.T)


def _root(moment: FloatArray, narrowest: float) -> FloatArray:
    """The symmetric root of a matrix whose eigenvalues are at least so large.

    Any other root would turn with the directions of equal eigenvalues, which are of chance: what
    is drawn would differ between processors.
    """
    values, vectors = np.linalg.eigh(moment)
    return np.asarray((vectors * np.sqrt(np.maximum(values, narrowest))) @ vectors.T)


NARROW_COLUMN = 1e-4
"""The variance of a column beside that of the widest from which on all are drawn in units of their
own: eigenvalues are right to 1e-16 of the largest, and columns of seconds stand beside hours."""


def _unit_of(whole: FloatArray) -> FloatArray | None:
    """The spread of each column; None where they are about alike."""
    variances = np.diagonal(whole) if whole.ndim == 2 else whole
    varies = variances > 0
    if not varies.any() or variances[varies].min() >= NARROW_COLUMN * variances.max():
        return None
    return np.where(varies, np.sqrt(np.where(varies, variances, 1.0)), 1.0)


def drawn(
    mass: FloatArray,
    means: FloatArray,
    whole: FloatArray | None,
    seed: int,
    matched: bool = False,
    narrowest: float = NARROWEST,
) -> tuple[FloatArray, FloatArray]:
    """Points in the frame, drawn from buckets with these shares and means, and their weights.

    Their covariance is that of all rows, ``whole``, to the last digit if it is ``matched``; of
    columns alone, their variances are; where nobody knows them, they are 1.
    """
    if whole is not None and (unit := _unit_of(whole)) is not None:
        inner = whole / (np.outer(unit, unit) if whole.ndim == 2 else unit**2)
        points, weights = drawn(mass, means / unit, inner, seed, matched, narrowest)
        return points * unit, weights
    rows = min(max(ROWS, ROWS_PER_BUCKET * len(mass)), MOST_ROWS)
    counts = np.maximum(1, np.round(rows * mass)).astype(np.int64)
    bucket, d = np.repeat(np.arange(len(mass)), counts), means.shape[1]
    between = (mass[:, None] * means).T @ means
    values = 1 - np.diagonal(between)
    within = np.diag(np.sqrt(np.maximum(values, narrowest)))
    if whole is not None and whole.ndim == 1:
        # Spreads of columns alone: how columns go together is known of the buckets, and not of all.
        spread = np.sqrt(whole)
        varies = spread > 0
        values = np.where(varies, 1 - np.diagonal(between) / np.where(varies, spread**2, 1.0), 0.0)
        within = np.diag(spread * np.sqrt(np.maximum(values, narrowest)))
    elif whole is not None:  # in units of the spread of all rows in that direction
        inverse = _power(whole, -0.5)
        within = _power(whole, 0.5) @ _root(np.eye(d) - inverse @ between @ inverse, narrowest)
    wide = np.ones(len(mass))
    if len(mass) > 1:
        apart = ((means[:, None] - means) ** 2).sum(axis=-1)
        near = np.sort(apart, axis=1)[:, 1 : 1 + NEIGHBOURS].mean(axis=1)
        wide = np.sqrt(near / max(float(mass @ near), 1e-300))
    address = np.zeros(1, dtype=np.int64)
    draws = normals(seed, 0, Purpose.SKETCH, address, len(bucket) * d).reshape(-1, d)
    points = means[bucket] + wide[bucket][:, None] * draws @ within.T
    weights = (mass / counts)[bucket]
    if matched and whole is not None:  # a common covariance of components leaves chance no room
        points = points - weights @ points / weights.sum()
        now = (weights[:, None] * points).T @ points / weights.sum()
        if whole.ndim == 2:
            points = points @ _power(now, -0.5) @ _power(whole, 0.5)
        else:
            points = points * np.sqrt(whole / np.maximum(np.diagonal(now), 1e-300))
    return points, weights
