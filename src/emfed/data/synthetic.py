"""Synthetic mixtures, among them the one of the paper's first experiment (section 4).

The paper prints sizes but not the parameters; ours are below, and are the same in every report.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from emfed.core.errors import SettingsError, check_count
from emfed.core.protocols import FloatArray, IntArray
from emfed.core.streams import Purpose, normals, uniforms
from emfed.data.workers import WorkerData
from emfed.models.parameters import GaussianParameters

TRUTH = GaussianParameters(
    weights=np.array([0.3, 0.7]),
    means=np.array([[-1.0, 0.0], [1.5, 1.0]]),
    covariances=np.array([[1.0, 0.3], [0.3, 0.8]]),
)
"""The mixture the synthetic experiment draws from; its covariance is known to the model."""

START = GaussianParameters(
    weights=np.array([0.5, 0.5]),
    means=np.array([[-0.5, -0.5], [0.5, 0.5]]),
    covariances=TRUTH.covariances,
)
"""Where the synthetic experiment starts."""


def sample_mixture(params: GaussianParameters, size: int, seed: int) -> tuple[FloatArray, IntArray]:
    """Draw rows from a Gaussian mixture with full, tied or known covariance.

    Parameters
    ----------
    params : GaussianParameters
        The mixture.
    size : int
        The number of rows.
    seed : int
        The seed.

    Returns
    -------
    tuple of two arrays
        The rows, of shape (size, d), and the component of each.

    Examples
    --------
    >>> import numpy as np
    >>> import emfed
    >>> params = emfed.models.GaussianParameters([0.5, 0.5], [[0.0], [9.0]], [[1.0]])
    >>> rows, labels = emfed.data.sample_mixture(params, 100, seed=0)
    >>> rows.shape, np.array_equal(labels, (rows[:, 0] > 4.5).astype(int))
    ((100, 1), True)
    """
    k, d = params.means.shape
    draw = np.arange(size, dtype=np.int64)
    u = uniforms(seed, 0, Purpose.DATA, draw, 1)[:, 0]
    labels = np.minimum(np.searchsorted(np.cumsum(params.weights), u, side="right"), k - 1)
    noise = normals(seed, 1, Purpose.DATA, draw, d)
    root = np.linalg.cholesky(params.covariances)
    if root.ndim == 2:
        rows = noise @ root.T
    else:
        rows = np.einsum("nij,nj->ni", root[labels], noise)
    return rows + params.means[labels], labels


def synthetic_federation(
    seed: int = 0,
    *,
    workers: int = 100,
    rows_per_worker: int = 100,
    split: Literal["random", "sorted"] = "random",
) -> WorkerData:
    """Draw the synthetic data of the paper (section 4): two components in the plane.

    The paper prints sizes but no parameters; ours are in `emfed.data.synthetic`.

    Parameters
    ----------
    seed : int
        The seed.
    workers : int
        The number of workers.
    rows_per_worker : int
        The number of rows of each.
    split : {"random", "sorted"}
        Whether rows are given out at random, or by component, the most heterogeneous way.

    Returns
    -------
    WorkerData
        The rows of all workers.

    Examples
    --------
    >>> import emfed
    >>> emfed.data.synthetic_federation(workers=3, rows_per_worker=10).counts
    array([10, 10, 10])
    """
    if split not in ("random", "sorted"):
        raise SettingsError(f"split must be 'random' or 'sorted'; got {split!r}.")
    n, m = check_count("workers", workers), check_count("rows_per_worker", rows_per_worker)
    rows, labels = sample_mixture(TRUTH, n * m, seed)
    if split == "sorted":
        rows = rows[np.argsort(labels, kind="stable")]
    return WorkerData(rows, np.arange(0, n * m + 1, m, dtype=np.int64))


def linear_federation(
    seed: int, *, workers: int, rows_per_worker: int, dimension: int
) -> WorkerData:
    """Rows for `LinearGaussian`: workers' centres are N(1, I), rows N(centre, I)."""
    n, m = check_count("workers", workers), check_count("rows_per_worker", rows_per_worker)
    d = check_count("dimension", dimension)
    centres = 1 + normals(seed, 3, Purpose.DATA, np.arange(n, dtype=np.int64), d)
    noise = normals(seed, 4, Purpose.DATA, np.arange(n * m, dtype=np.int64), d)
    rows = np.repeat(centres, m, axis=0) + noise
    return WorkerData(rows, np.arange(0, n * m + 1, m, dtype=np.int64))
