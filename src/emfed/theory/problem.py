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
    """L_i, L_W, v_min, v_max, W(S_0) - min W and sigma_i^2, with the weights w_i of the workers.

    ``workers`` is their number (the paper's 1/n) or their weights; ``lipschitz`` (L_i, A5),
    ``variance`` (sigma_i^2 of a worker's oracle, A7; 0 for full local passes) and
    ``sample_lipschitz`` (the root mean square over j of L_ij, A8; VR-FedEM needs it, by
    default L_i) are numbers or one per worker. ``smoothness`` is L of the gradient of W, ``v_min``
    and ``v_max`` bound the spectrum of B (A4), ``gap`` is W(S_0) - min W.

    All are measured in one norm, that of `norm`; omega must hold in the same.
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
        """The same over samples: L / sqrt(n) of Theorem 2."""
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
    """omega of an operator, the norm it holds in, and whether it is exact or a bound."""

    value: float
    norm: str
    exact: bool


def omega_of(compressor: Compressor, layout: Layout | int, in_metric: bool = False) -> Omega:
    """omega of the compression assumption (A6) for statistics of this layout or dimension.

    With ``in_metric`` the operator acts on whitened vectors, and omega holds in the metric's norm.
    It is exact where E|Q(x) - x|^2 = omega |x|^2 for a vector of one coordinate and for one of
    equal coordinates alike.
    """
    q = layout if isinstance(layout, int) else layout.size
    if not isinstance(layout, int):
        compressor = compressor.resolve(layout)
    probes = np.stack([np.eye(1, q)[0], np.full(q, 1 / sqrt(q))])
    value, variance = compressor.omega(q), compressor.variance(probes)
    exact = variance is not None and bool(np.allclose(variance, value, rtol=1e-6, atol=1e-12))
    return Omega(value, "metric" if in_metric else "euclidean", exact)


def participating(omega: float, p: float) -> float:
    """omega_p = omega + (1 - p)(1 + omega) / p: silence as a further compression (Theorem 3)."""
    check_range("omega", omega, 0, np.inf, open_high=True)
    check_range("p", p, 0, 1, open_low=True)
    return (1 + omega) / p - 1


def memory_error(weights: FloatArray, mean_fields: FloatArray, memories: Any = 0.0) -> float:
    """sum w_i^2 |V_i - h_i(S_0)|^2, the paper's G_0 / n: zero for memories started at h_i."""
    return float(weights**2 @ ((memories - mean_fields) ** 2).sum(axis=-1))
