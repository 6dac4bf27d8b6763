"""A family from outside the package, in one file: counts that vary beyond Poisson.

The variance is mu + dispersion mu^2, with a dispersion that the user gives.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, final

import numpy as np
from scipy.stats import nbinom

import emfed
from emfed.core.protocols import FloatArray
from emfed.models.families import Examples, Scale, log_gamma, positive


@emfed.models.register_family
@final
@dataclass(frozen=True)
class NegativeBinomial(emfed.models.Family):
    """Counts with a mean and a known dispersion."""

    dispersion: float = 0.5
    name: ClassVar[str] = "negative_binomial"
    whole: ClassVar[bool] = True
    parameters: ClassVar[Mapping[str, Scale]] = {"mean": "positive"}
    examples: ClassVar[Examples] = ((1.5,), (12.0,))
    support: ClassVar[str] = "a whole number >= 0"
    stretch: ClassVar[float] = 0.5

    def _share(self, mean: FloatArray) -> FloatArray:
        """The probability of a success: mean / (mean + 1 / dispersion)."""
        return mean * self.dispersion / (1 + mean * self.dispersion)

    def allowed(self, xp: Any, y: Any) -> Any:
        return (y >= 0) & (y == xp.floor(y)) & (y < 2.0**53)

    def frame(self, mean: FloatArray, scatter: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Counts in units of their mean."""
        return np.zeros_like(mean), np.where(mean > 0, mean, 1.0)

    def natural(self, theta: FloatArray, scale: FloatArray) -> tuple[FloatArray, FloatArray]:
        mean = theta[..., 0] * scale
        a = np.log1p(self.dispersion * mean) / self.dispersion
        return a, (scale * np.log(self._share(mean)))[..., None]

    def base(self, xp: Any, y: Any, exposure: Any, scale: Any) -> Any:
        size = 1 / self.dispersion  # log_gamma asks for arguments of 1 at least
        start = float(log_gamma(np, np.array(size + 1)) - np.log(size))
        return log_gamma(xp, y + size + 1) - xp.log(y + size) - start - log_gamma(xp, y + 1)

    def possible(self, means: FloatArray, before: FloatArray) -> FloatArray:
        return positive(means, before)

    def covariance(self, theta: FloatArray, scale: FloatArray) -> FloatArray:
        mean = theta[..., 0]
        return (mean / scale + self.dispersion * mean**2)[..., None, None]

    def begin(self, draws: FloatArray, typical: FloatArray) -> FloatArray:
        return np.maximum(typical, 1e-3) * np.exp(self.stretch * draws)

    def proper(self, theta: FloatArray) -> bool:
        return bool(np.all(theta > 0))

    def draw(self, theta: FloatArray, exposure: FloatArray, u: FloatArray) -> FloatArray:
        size = 1 / self.dispersion
        return np.asarray(nbinom.ppf(u, size, 1 - self._share(theta[..., 0])))

    def cdf(self, theta: FloatArray, exposure: FloatArray, y: FloatArray) -> FloatArray:
        size = 1 / self.dispersion
        return np.asarray(nbinom.cdf(y, size, 1 - self._share(theta[..., 0])))
