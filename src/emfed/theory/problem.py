"""The constants of assumptions A4 to A7: what the theorems must know of a model and its data."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import sqrt
from typing import Any, Self, final

import numpy as np

from emfed.core.errors import SettingsError, check_count, check_range
from emfed.core.protocols import Compressor, FloatArray, Layout

PerWorker = float | Sequence[float] | FloatArray


@final
@dataclass(frozen=True, eq=False)
class Problem:
    """The constants that the theorems ask for: L_i, L_W, v_min, v_max, the gap and sigma_i^2.

    All are measured in one norm, that of ``norm``; omega must hold in the same.

    Parameters
    ----------
    workers : int or sequence of float
        The number of workers, each with the paper's weight 1/n, or their weights.
    lipschitz : float or sequence of float
        L_i of A5, one number or one for each worker.
    smoothness : float
        The Lipschitz constant L_W of the gradient of W (A4).
    gap : float
        W(S_0) - min W.
    v_min : float
        A lower bound of the spectrum of B (A4).
    v_max : float or None
        An upper bound of the spectrum of B (A4); None stands for ``v_min``.
    variance : float or sequence of float
        The variance sigma_i^2 of a worker's oracle (A7), one number or one for each worker; 0
        for full local passes.
    sample_lipschitz : float or sequence of float, optional
        The root mean square over the rows j of L_ij (A8), which VR-FedEM needs; by default L_i.
    norm : str
        The norm of all these constants, "euclidean" or "metric".

    Examples
    --------
    >>> from emfed.theory import Problem
    >>> problem = Problem(workers=[1, 1, 2], lipschitz=1.0, smoothness=2.0, gap=1.0)
    >>> problem.weights
    array([0.25, 0.25, 0.5 ])
    """

    workers: int | Sequence[float] | FloatArray
    lipschitz: PerWorker
    smoothness: float
    gap: float
    v_min: float = 1.0
    v_max: float | None = None
    variance: PerWorker = 0.0
    sample_lipschitz: PerWorker | None = None
    norm: str = "euclidean"

    def __post_init__(self) -> None:
        for name in ("smoothness", "v_min"):
            check_range(name, getattr(self, name), 0, np.inf, open_low=True, open_high=True)
        check_range("gap", self.gap, 0, np.inf, open_high=True)
        if self.v_max is not None:
            check_range("v_max", self.v_max, self.v_min, np.inf, open_high=True)
        for name in ("lipschitz", "variance", "sample_lipschitz"):
            if getattr(self, name) is not None:
                self._per_worker(name)

    @cached_property
    def weights(self) -> FloatArray:
        """w_i, summing to one."""
        if isinstance(self.workers, (int, np.integer)):
            n = check_count("workers", int(self.workers))
            return np.full(n, 1 / n)
        weights = np.asarray(self.workers, dtype=np.float64)
        if weights.ndim != 1 or not np.all(np.isfinite(weights) & (weights > 0)):
            raise SettingsError("workers must be their number, or one positive weight for each.")
        return weights / weights.sum()

    def _per_worker(self, name: str) -> FloatArray:
        """The named constant, once per worker."""
        values = np.asarray(getattr(self, name), dtype=np.float64)
        if values.ndim and values.shape != self.weights.shape:
            raise SettingsError(
                f"{name} must be one number or {len(self.weights)}, one per worker; got shape "
                f"{values.shape}."
            )
        if not np.all(np.isfinite(values) & (values >= 0)):
            raise SettingsError(f"{name} must be finite and not negative.")
        return np.broadcast_to(values, self.weights.shape)

    @cached_property
    def spread_lipschitz(self) -> float:
        """(sum w_i^2 L_i^2)^(1/2), which is L / sqrt(n) for equal workers."""
        return float(np.sqrt((self.weights**2 * self._per_worker("lipschitz") ** 2).sum()))

    @cached_property
    def spread_sample_lipschitz(self) -> float:
        """The same over samples: L / sqrt(n) of Theorem 3."""
        if self.sample_lipschitz is None:
            return self.spread_lipschitz
        return float(np.sqrt((self.weights**2 * self._per_worker("sample_lipschitz") ** 2).sum()))

    @cached_property
    def spread_variance(self) -> float:
        """sum w_i^2 sigma_i^2, which is sigma^2 / n for equal workers."""
        return float((self.weights**2 * self._per_worker("variance")).sum())

    @property
    def largest_eigenvalue(self) -> float:
        """v_max, by default v_min."""
        return self.v_min if self.v_max is None else self.v_max

    def with_batch(self, batch: int, sample_variance: PerWorker) -> Self:
        """The same with sigma_i^2 of mini-batches drawn with replacement: variance / b."""
        variance = np.asarray(sample_variance, dtype=np.float64) / check_count("batch", batch)
        return dataclasses.replace(self, variance=variance)


@final
@dataclass(frozen=True)
class Omega:
    """The constant omega of an operator (A6), the norm it holds in, and whether it is exact.

    Parameters
    ----------
    value : float
        The number omega.
    norm : str
        The norm it holds in, "euclidean" or "metric".
    exact : bool
        Whether E|Q(x) - x|^2 = omega |x|^2, or omega is only a bound.

    Examples
    --------
    >>> from emfed.compressors import Identity
    >>> from emfed.theory import omega_of
    >>> omega_of(Identity(), 10)
    Omega(value=0.0, norm='euclidean', exact=True)
    """

    value: float
    norm: str
    exact: bool


def omega_of(compressor: Compressor, layout: Layout | int, in_metric: bool = False) -> Omega:
    """Compute omega of the compression assumption (A6) for statistics of this layout or dimension.

    Omega counts as exact where E|Q(x) - x|^2 = omega |x|^2 for a vector of one coordinate and for
    one of equal coordinates alike.

    Parameters
    ----------
    compressor : Compressor
        The compression operator.
    layout : Layout or int
        The layout of the statistics, or their number q.
    in_metric : bool
        Whether the operator acts on whitened vectors; omega then holds in the norm of the metric.

    Returns
    -------
    Omega
        The constant, its norm, and whether it is exact.

    Examples
    --------
    >>> from emfed.compressors import block_quantization
    >>> from emfed.theory import omega_of
    >>> omega_of(block_quantization(4), 20)
    Omega(value=1.0000007152557373, norm='euclidean', exact=False)
    """
    q = layout if isinstance(layout, int) else layout.size
    if not isinstance(layout, int):
        compressor = compressor.resolve(layout)
    probes = np.stack([np.eye(1, q)[0], np.full(q, 1 / sqrt(q))])
    value, variance = compressor.omega(q), compressor.variance(probes)
    exact = variance is not None and bool(np.allclose(variance, value, rtol=1e-6, atol=1e-12))
    return Omega(value, "metric" if in_metric else "euclidean", exact)


def participating(omega: float, p: float) -> float:
    """Compute omega_p = omega + (1 - p)(1 + omega) / p: silence as more compression (Theorem 4).

    Parameters
    ----------
    omega : float
        The constant of the compression operator (A6); 0 for no compression.
    p : float
        The probability that a worker takes part in a round.

    Returns
    -------
    float
        The constant omega_p.

    Examples
    --------
    >>> from emfed.theory import participating
    >>> participating(omega=1.0, p=0.5)
    3.0
    """
    check_range("omega", omega, 0, np.inf, open_high=True)
    check_range("p", p, 0, 1, open_low=True)
    return (1 + omega) / p - 1


def memory_error(weights: FloatArray, mean_fields: FloatArray, memories: Any = 0.0) -> float:
    """Compute the error of the first memories, sum w_i^2 |V_i - h_i(S_0)|^2, the paper's G_0 / n.

    Parameters
    ----------
    weights : array of shape (workers,)
        The weights w_i of the workers.
    mean_fields : array of shape (workers, q)
        The mean field h_i(S_0) of each worker.
    memories : array of shape (workers, q) or float
        The first memories V_i.

    Returns
    -------
    float
        The error; zero for memories that start at h_i.

    Examples
    --------
    >>> import numpy as np
    >>> from emfed.theory import memory_error
    >>> memory_error(np.array([0.5, 0.5]), np.array([[1.0, 0.0], [0.0, 2.0]]))
    1.25
    """
    return float(weights**2 @ ((memories - mean_fields) ** 2).sum(axis=-1))
