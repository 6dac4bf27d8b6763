"""Effort: how long, how far and by how many a record was made, with fitted coefficients.

A record's expected count is exp(theta of its cell + x . beta) for its effort x. Given beta the
cells need only their sum and their exposure, the sum of exp(x . beta). So beta is fitted first, by
a Poisson regression with a constant for each site and each time, and effort enters every fit and
every federation as exposure. Effects of sites and times are swept out of x (Frisch, Waugh and
Lovell), so beta and its errors rest on differences of effort within sites and times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from emfed.core.errors import DataError
from emfed.core.protocols import FloatArray, IntArray
from emfed.models.sides import add_up

_STEPS, _PASSES, _TOLERANCE = 50, 30, 1e-8
"""Newton steps and passes of scaling at most, and the step that is small enough: limits, reached
only where something is wrong."""
_LARGEST = 3.0
"""The longest Newton step, in units of the coefficient: covariates have unit spread."""


@final
@dataclass(frozen=True)
class Effort:
    """The coefficients of effort, with their errors.

    Sites of a network that read their own records hand the same one to `read_records`: it is what
    they agree on, like the grid.

    Parameters
    ----------
    names : tuple of str
        The names of the covariates.
    coefficients : tuple of float
        Their coefficients.
    errors : tuple of float
        Their standard errors.
    centre : tuple of float
        The effort that estimates refer to.
    overdispersion : float
        The multiple of the Poisson variance, which the errors include.

    Examples
    --------
    >>> import numpy as np
    >>> from emfed.imputation import Effort
    >>> effort = Effort(("log(minutes)",), (0.5,), (0.1,), (0.0,))
    >>> effort.exposure(np.log([[1.0], [4.0]]))
    array([1., 2.])
    """

    names: tuple[str, ...]
    coefficients: tuple[float, ...]
    errors: tuple[float, ...]
    centre: tuple[float, ...]
    overdispersion: float = 1.0

    def describe(self) -> list[dict[str, Any]]:
        """One row per covariate that varies."""
        keys = ("name", "coefficient", "error", "centre")
        columns = (self.names, self.coefficients, self.errors, self.centre)
        rows = (row for row in zip(*columns, strict=True) if row[2] > 0)
        return [dict(zip(keys, row, strict=True)) for row in rows]

    def exposure(self, values: FloatArray) -> FloatArray:
        """How many records of the central effort each record is worth."""
        theta = (values - np.array(self.centre)) @ np.array(self.coefficients)
        return np.exp(np.clip(theta, -10.0, 10.0))


def fit_effort(
    names: Sequence[str], values: FloatArray, counts: FloatArray, site: IntArray, time: IntArray
) -> Effort:
    """beta by Newton steps on covariates without their site and time parts."""
    centre, spread = np.median(values, axis=0), values.std(axis=0)
    keep = spread > 1e-9 * (1 + np.abs(centre))  # what does not vary has rounding for a spread
    x = (values[:, keep] - centre[keep]) / np.where(keep, spread, 1.0)[keep]
    beta, effects = np.zeros(x.shape[1]), _Effects(site, time)
    if counts.sum() == 0:
        raise DataError("no record counts anything: the effort has nothing to be fitted to.")
    mean = effects.fit(counts, x @ beta)
    for _ in range(_STEPS):
        plain = effects.sweep_out(x, mean)
        precision = plain.T @ (mean[:, None] * plain) + 1e-9 * np.eye(x.shape[1])
        step = np.clip(np.linalg.solve(precision, plain.T @ (counts - mean)), -_LARGEST, _LARGEST)
        beta = beta + step
        mean = effects.fit(counts, x @ beta)
        if np.abs(step).max(initial=0.0) < _TOLERANCE:
            break
    freedom = max(1, len(counts) - len(beta) - effects.count)
    pearson = float(((counts - mean) ** 2 / np.maximum(mean, 1e-9)).sum()) / freedom
    over = max(1.0, pearson)
    errors = np.sqrt(over * np.diag(np.linalg.inv(precision))) if len(beta) else beta
    full, error = np.zeros(len(names)), np.zeros(len(names))
    full[keep], error[keep] = beta / spread[keep], errors / spread[keep]
    return Effort(
        tuple(names),
        tuple(full.tolist()),
        tuple(error.tolist()),
        tuple(centre.tolist()),
        over,
    )


class _Effects:
    """A constant for each site and each time."""

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
