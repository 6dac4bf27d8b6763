"""Effort: how long, how far and by how many a record was made, with fitted coefficients.

A record's expected count is exp(theta of its cell + x . beta) for its effort x. Given beta the
cells need only their sum and their exposure, the sum of exp(x . beta). So beta is fitted first, by
a Poisson regression with a constant for each site and each time, and effort enters every fit and
every federation as exposure. Effects of sites and times are swept out of x (Frisch, Waugh and
Lovell), so beta and its errors rest on differences of effort within sites and times.

Under Bernoulli the log-odds of a record are theta + x . beta, and beta is fitted likewise by a
logistic regression. With p0 and p1 the rates of the record's site and time at central effort and at
its own, a record that reports the species is worth (1 - p1) / (1 - p0) records of central effort
that do, and one that does not is worth p1 / p0 that do not. The score is then that of the record at
p0, its expected curvature, too, and the likeliest theta is right whatever p0 is: odds of those sums
are e^theta. So a cell is a weight and a sum here as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

import numpy as np
from scipy.special import expit, logit

from emfed.core.errors import DataError
from emfed.core.protocols import FloatArray, IntArray
from emfed.models.sides import add_up

_STEPS, _PASSES, _TOLERANCE = 50, 30, 1e-8
"""Newton steps and passes of scaling at most, and the step that is small enough: limits, reached
only where something is wrong."""
_LARGEST = 3.0
"""The longest Newton step, in units of the coefficient: covariates have unit spread."""
_RIDGES = (0.1, 100.0)
"""Precisions of log-odds of sites and of times, from loose to all alike: they follow from the
records, and these bounds hold only where a side has too few of them to tell."""


@final
@dataclass(frozen=True)
class Effort:
    """The coefficients of effort, with their errors.

    Sites of a network that read their own records hand the same one to `read_records`: it is what
    they agree on, like the grid.

    Examples
    --------
    >>> import numpy as np
    >>> from emfed.imputation import Effort
    >>> effort = Effort(("log(minutes)",), (0.5,), (0.1,), (0.0,))
    >>> effort.exposure(np.log([[1.0], [4.0]]))
    array([1., 2.])
    """

    names: tuple[str, ...]
    """The names of the covariates."""
    coefficients: tuple[float, ...]
    """Their coefficients."""
    errors: tuple[float, ...]
    """Their standard errors."""
    centre: tuple[float, ...]
    """The effort that estimates refer to."""
    overdispersion: float = 1.0
    """The multiple of the Poisson variance, which the errors include; 1 for rates."""
    correlations: tuple[tuple[float, ...], ...] = ()
    """The correlations of the coefficients' errors, row by row; none where it is empty."""

    def describe(self) -> list[dict[str, Any]]:
        """One row per covariate that varies."""
        keys = ("name", "coefficient", "error", "centre")
        columns = (self.names, self.coefficients, self.errors, self.centre)
        rows = (row for row in zip(*columns, strict=True) if row[2] > 0)
        return [dict(zip(keys, row, strict=True)) for row in rows]

    def exposure(self, values: FloatArray) -> FloatArray:
        """How many records of the central effort each record of counts is worth."""
        return np.exp(self._above(values))

    def worth(
        self, values: FloatArray, reports: FloatArray, site: IntArray, time: IntArray
    ) -> FloatArray:
        """How many records of the central effort each record of 0 or 1 is worth."""
        above = self._above(values)
        theta = logit(_Rates(site, time).fit(reports, above)) - above
        ratio = np.exp(np.logaddexp(0.0, theta) - np.logaddexp(0.0, theta + above))
        return np.asarray(np.where(reports > 0, ratio, ratio * np.exp(above)))

    @property
    def covariance(self) -> FloatArray:
        """That of the coefficients."""
        errors = np.array(self.errors)
        shape = np.array(self.correlations) if self.correlations else np.eye(len(errors))
        return np.asarray(errors[:, None] * shape * errors)

    def _above(self, values: FloatArray) -> FloatArray:
        """What effort adds to theta beyond that of central effort."""
        return np.clip((values - np.array(self.centre)) @ np.array(self.coefficients), -10.0, 10.0)


def fit_effort(
    names: Sequence[str],
    values: FloatArray,
    counts: FloatArray,
    site: IntArray,
    time: IntArray,
    *,
    rates: bool = False,
) -> Effort:
    """beta by Newton steps on covariates without their site and time parts.

    ``counts`` are 0 or 1 where ``rates``.
    """
    centre, spread = np.median(values, axis=0), values.std(axis=0)
    keep = spread > 1e-9 * (1 + np.abs(centre))  # what does not vary has rounding for a spread
    x = (values[:, keep] - centre[keep]) / np.where(keep, spread, 1.0)[keep]
    beta, effects = np.zeros(x.shape[1]), (_Rates if rates else _Effects)(site, time)
    if counts.sum() == 0:
        raise DataError("no record counts anything: the effort has nothing to be fitted to.")
    if rates and counts.min() > 0:
        raise DataError(
            "every record reports the species: the effort has nothing to be fitted to. Add visits "
            "that found none, with a count of 0."
        )
    mean = effects.fit(counts, x @ beta)
    for _ in range(_STEPS):
        weights = effects.variance(mean)
        plain = effects.sweep_out(x, weights)
        precision = plain.T @ (weights[:, None] * plain) + 1e-9 * np.eye(x.shape[1])
        step = np.clip(np.linalg.solve(precision, plain.T @ (counts - mean)), -_LARGEST, _LARGEST)
        beta = beta + step
        mean = effects.fit(counts, x @ beta)
        if np.abs(step).max(initial=0.0) < effects.tolerance:
            break
    freedom = max(1, len(counts) - len(beta) - effects.count)
    pearson = float(((counts - mean) ** 2 / np.maximum(mean, 1e-9)).sum()) / freedom
    over = 1.0 if rates else max(1.0, pearson)  # the variance of 0 and 1 follows from their mean
    inverse = over * np.linalg.inv(precision)
    errors = np.sqrt(np.diag(inverse))
    full, error, shape = np.zeros(len(names)), np.zeros(len(names)), np.eye(len(names))
    full[keep], error[keep] = beta / spread[keep], errors / spread[keep]
    shape[np.ix_(keep, keep)] = inverse / np.outer(errors, errors)
    return Effort(
        tuple(names),
        tuple(full.tolist()),
        tuple(error.tolist()),
        tuple(centre.tolist()),
        over,
        tuple(map(tuple, shape.tolist())),
    )


def effort_parts(
    values: FloatArray, weights: FloatArray, site: IntArray, time: IntArray, shape: tuple[int, int]
) -> tuple[FloatArray, FloatArray]:
    """What of effort is a site's, and what a time's: ``(sites, k)`` and ``(times, k)``.

    Sums of the two are closest to the effort of cells. By them theta would move if the coefficients
    did, so draws move by them as far as the coefficients are not known.
    """
    parts = [np.zeros((size, values.shape[1])) for size in shape]
    index = (site, time)
    for _ in range(_PASSES):
        moved = 0.0
        for side, size in enumerate(shape):
            mass = np.maximum(np.bincount(index[side], weights, size), 1e-12)
            rest = values - parts[1 - side][index[1 - side]]
            for k in range(values.shape[1]):
                new = np.bincount(index[side], weights * rest[:, k], size) / mass
                moved = max(moved, float(np.abs(new - parts[side][:, k]).max()))
                parts[side][:, k] = new
        if moved < 1e-6:
            break
    return parts[0], parts[1]


class _Effects:
    """A constant for each site and each time, of counts."""

    tolerance: ClassVar[float] = _TOLERANCE

    def __init__(self, site: IntArray, time: IntArray) -> None:
        self.index = tuple(np.unique(i, return_inverse=True)[1] for i in (site, time))
        self.sizes = tuple(int(i.max()) + 1 for i in self.index)
        self.count = sum(self.sizes) - 1
        self._logs = [np.zeros(size) for size in self.sizes]

    def fit(self, counts: FloatArray, offset: FloatArray) -> FloatArray:
        """Means whose totals of sites and of times are those counted (iterative scaling)."""
        for _ in range(_PASSES):
            moved = 0.0
            for side, (index, size) in enumerate(zip(self.index, self.sizes, strict=True)):
                rest = offset + self._logs[1 - side][self.index[1 - side]]
                expected = add_up(index, np.exp(np.clip(rest, -30.0, 30.0)), size)
                # A place where none was seen stays finite.
                new = np.log(np.maximum(add_up(index, counts, size), 1e-3) / expected)
                moved = max(moved, float(np.abs(new - self._logs[side]).max()))
                self._logs[side] = new
            if moved < 1e-7:
                break
        total = offset + sum(log[i] for log, i in zip(self._logs, self.index, strict=True))
        return np.exp(np.clip(total, -30.0, 30.0))

    def variance(self, mean: FloatArray) -> FloatArray:
        return mean

    def sweep_out(self, x: FloatArray, weights: FloatArray) -> FloatArray:
        """Covariates less their weighted means by site and by time, over and over."""
        out = x.copy()
        masses = [
            np.maximum(add_up(index, weights, size), 1e-12)
            for index, size in zip(self.index, self.sizes, strict=True)
        ]
        for _ in range(_PASSES):
            moved = 0.0
            for index, size, mass in zip(self.index, self.sizes, masses, strict=True):
                for k in range(x.shape[1]):
                    mean = (add_up(index, weights * out[:, k], size) / mass)[index]
                    out[:, k] -= mean
                    moved = max(moved, float(np.abs(mean).max()))
            if moved < 1e-7:
                break
        return out


@final
class _Rates(_Effects):
    """The same for log-odds, which are normal about a common one, with a variance that is fitted.

    Constants that are free would be infinite at a site that never or always reported the species,
    and coefficients of effort too large.
    """

    tolerance = 1e-5

    def __init__(self, site: IntArray, time: IntArray) -> None:
        super().__init__(site, time)
        self._common, self._ridges = 0.0, [1.0, 1.0]

    def fit(self, counts: FloatArray, offset: FloatArray) -> FloatArray:
        """The rate of each record: Newton's steps of one side after the other."""
        for _ in range(_PASSES):
            mean = self._mean(offset)
            step = float((counts - mean).sum() / self.variance(mean).sum())
            self._common += float(np.clip(step, -1.0, 1.0))
            moved = abs(step)
            for side, (index, size) in enumerate(zip(self.index, self.sizes, strict=True)):
                mean, ridge = self._mean(offset), self._ridges[side]
                precision = add_up(index, self.variance(mean), size) + ridge
                slope = add_up(index, counts - mean, size) - ridge * self._logs[side]
                steps = np.clip(slope / precision, -1.0, 1.0)
                self._logs[side] = self._logs[side] + steps
                moved = max(moved, float(np.abs(steps).max()))
                spread = float(np.mean(self._logs[side] ** 2 + 1 / precision))
                self._ridges[side] = float(np.clip(1 / spread, *_RIDGES))
            if moved < 0.1 * self.tolerance:
                break
        return self._mean(offset)

    def variance(self, mean: FloatArray) -> FloatArray:
        return mean * (1 - mean)

    def _mean(self, offset: FloatArray) -> FloatArray:
        logs = sum(log[i] for log, i in zip(self._logs, self.index, strict=True))
        return np.asarray(expit(np.clip(self._common + logs + offset, -30.0, 30.0)))
