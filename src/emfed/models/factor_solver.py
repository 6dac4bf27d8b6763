"""Factor analysis and PCA from a covariance matrix: what one server does alone.

Mean and covariance of all rows are sufficient for one factor analyser, so nothing needs to travel
in rounds. Given the noise variances psi the best loadings are known (Lawley 1940): with
eigenvalues l_1 >= l_2 >= ... and vectors u_j of psi^-1/2 C psi^-1/2,

    L = psi^1/2 [u_j sqrt(l_j - 1)]  over the j <= r with l_j > 1,

and the log-likelihood that is left is a smooth function of log psi, which L-BFGS maximises above
the floor. With one noise variance for all columns (PCA) that too is known (Tipping, Bishop 1999).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from emfed.core.protocols import FloatArray

SMALLEST_NOISE = 1e-10
"""Relative to the variance of a column: where no floor is set, noise stays above."""
SMALLEST_SHARE = 1e-13
"""The same of PCA, relative to the largest variance in any direction: less is rounding."""


class Penalty(NamedTuple):
    """R of one noise variance is (rows log v + extra / v) / 2."""

    rows: float
    extra: float


def _loadings(covariance: FloatArray, factors: int, noise: FloatArray) -> FloatArray:
    root = np.sqrt(noise)
    values, vectors = np.linalg.eigh(covariance / np.outer(root, root))
    top, turn = values[::-1][:factors], vectors[:, ::-1][:, :factors]
    return np.asarray(root[:, None] * turn * np.sqrt(np.maximum(top - 1, 0.0)))


def _loss(
    logs: FloatArray, covariance: FloatArray, factors: int, penalty: Penalty
) -> tuple[float, FloatArray]:
    """Minus twice the log-likelihood at the best loadings (up to a constant), and its gradient."""
    noise = np.exp(logs)
    root = np.sqrt(noise)
    values, vectors = np.linalg.eigh(covariance / np.outer(root, root))
    explained = np.zeros(len(values), dtype=bool)
    explained[len(values) - factors :] = values[len(values) - factors :] > 1
    rest = np.where(explained, 0.0, values)
    value = logs.sum() + (np.log(np.where(explained, values, 1.0)) + explained).sum() + rest.sum()
    value += (penalty.rows * logs + penalty.extra / noise).sum()
    # d/d log psi: each eigenvalue falls by itself times its vector's share of the column.
    slope = 1 - (vectors**2) @ np.where(explained, 1.0, rest)
    slope = slope + penalty.rows - penalty.extra / noise
    return float(value), slope


def fit_factors(
    covariance: FloatArray, factors: int, floor: float, penalty: Penalty
) -> tuple[FloatArray, FloatArray]:
    """Loadings ``(d, r)`` and noise variances ``(d,)`` of the largest likelihood.

    The likelihood may have several maxima; the best from three usual starts is kept.
    """
    from scipy.optimize import minimize

    spread = np.maximum(np.diagonal(covariance), SMALLEST_NOISE)
    low = np.maximum(floor, SMALLEST_NOISE * spread)
    ridged = covariance + np.diag(1e-9 * spread)
    unique = 1 / np.maximum(np.diagonal(np.linalg.inv(ridged)), 1 / spread)
    starts = (unique, 0.5 * spread, 0.5 * (1 - 0.5 * factors / len(spread)) * unique)
    bounds = list(zip(np.log(low), np.log(np.maximum(2 * spread, 2 * low)), strict=True))
    best: tuple[float, FloatArray] | None = None
    for start in starts:
        found = minimize(
            _loss,
            np.clip(np.log(start), [b[0] for b in bounds], [b[1] for b in bounds]),
            args=(covariance, factors, penalty),
            jac=True,
            method="L-BFGS-B",
            bounds=bounds,
            options={"maxiter": 5000, "maxfun": 20000, "ftol": 1e-14, "gtol": 1e-9},
        )
        if best is None or found.fun < best[0] - 1e-12:
            best = (float(found.fun), np.exp(found.x))
    assert best is not None
    return _loadings(covariance, factors, best[1]), best[1]


def fit_components(
    covariance: FloatArray, factors: int, floor: float, penalty: Penalty
) -> tuple[FloatArray, FloatArray]:
    """The same with one noise variance for all columns, in closed form."""
    d = len(covariance)
    values = np.linalg.eigvalsh(covariance)
    left = np.maximum(values[: d - factors], 0.0).sum()
    noise = (left + penalty.extra) / (d - factors + penalty.rows)
    whole = np.full(d, max(noise, floor, SMALLEST_SHARE * max(float(values[-1]), 1e-300)))
    return _loadings(covariance, factors, whole), whole
