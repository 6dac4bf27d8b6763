"""Drawing rows from fitted mixtures, counting their parameters, and how sure they are."""

from __future__ import annotations

from typing import Any

import numpy as np

from emfed.core.protocols import FloatArray, IntArray
from emfed.core.streams import Purpose, normals, uniforms
from emfed.models.parameters import GaussianParameters


def covariance_parameters(kind: str, k: int, d: int) -> int:
    """Free numbers in the covariances of k components over d columns."""
    one = d * (d + 1) // 2
    return {"full": k * one, "diag": k * d, "spherical": k, "tied": one, "known": 0}[kind]


def draw_components(weights: FloatArray, count: int, seed: int) -> IntArray:
    """A component for each row; each row has a stream of its own."""
    rows = np.arange(count, dtype=np.int64)
    u = uniforms(seed, 0, Purpose.SAMPLE, rows, 1)[:, 0]
    below = np.cumsum(weights)[:-1]
    return np.searchsorted(below, u, side="right").astype(np.int64)


def sample_gaussian(
    params: GaussianParameters, kind: str, count: int, seed: int
) -> tuple[FloatArray, IntArray]:
    """Rows and components of a Gaussian mixture, in the units of its parameters."""
    labels = draw_components(params.weights, count, seed)
    k, d = params.means.shape
    noise = normals(seed, 1, Purpose.SAMPLE, np.arange(count, dtype=np.int64), d)
    rows = np.empty((count, d))
    for component in range(k):
        mine = labels == component
        if kind == "diag" or kind == "spherical":
            moved = noise[mine] * np.sqrt(params.covariances[component])
        else:
            shared = kind in ("tied", "known")
            matrix = params.covariances if shared else params.covariances[component]
            moved = noise[mine] @ np.linalg.cholesky(matrix).T
        rows[mine] = params.means[component] + moved
    return rows, labels


def entropy(shares: FloatArray, weights: Any | None = None) -> FloatArray:
    """The (weighted) mean over rows of -sum r log r, ``(..., rows, K) -> (...)``."""
    safe = np.where(shares > 0, shares, 1.0)
    values = -(shares * np.log(safe)).sum(axis=-1)
    if weights is None:
        return np.asarray(values.mean(axis=-1))
    return np.asarray((values * weights).sum(axis=-1) / np.asarray(weights).sum(axis=-1))
