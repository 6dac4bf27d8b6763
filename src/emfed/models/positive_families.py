"""Families of positive numbers: exponential and gamma."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

import numpy as np

from emfed.core.protocols import BoolArray, FloatArray
from emfed.models.components import NEAR_FLOOR
from emfed.models.families import Examples, Family, Scale, positive, register_family, symmetric


class _Positive(Family):
    """Numbers in units of their mean."""

    filler: ClassVar[float] = 1.0

    def frame(self, mean: FloatArray, scatter: FloatArray) -> tuple[FloatArray, FloatArray]:
        """There is no origin; the mean is the scale."""
        return np.zeros_like(mean), np.where(mean > 0, mean, 1.0)

    def base(self, xp: Any, y: Any, exposure: Any, scale: Any) -> Any:
        return xp.zeros_like(y) - xp.log(scale)

    def nearest(self, y: FloatArray, mean: FloatArray) -> FloatArray:
        return np.maximum(y, 0.01 * np.where(mean > 0, mean, 1.0))

    def proper(self, theta: FloatArray) -> bool:
        return bool(np.all(theta > 0))


@register_family
@final
@dataclass(frozen=True)
class Exponential(_Positive):
    """Waiting times: their mean."""

    name: ClassVar[str] = "exponential"
    parameters: ClassVar[Mapping[str, Scale]] = {"mean": "positive"}
    examples: ClassVar[Examples] = ((1.0,), (8.0,))
    support: ClassVar[str] = "a finite number >= 0"
    stretch: ClassVar[float] = 0.7

    def allowed(self, xp: Any, y: Any) -> Any:
        return (y >= 0) & (y <= 1e140)

    def natural(self, theta: FloatArray, scale: FloatArray) -> tuple[FloatArray, FloatArray]:
        return np.log(theta[..., 0]), -1 / theta

    def possible(self, means: FloatArray, before: FloatArray) -> FloatArray:
        """Times are not negative."""
        return positive(means, before)

    def valid(self, mass: FloatArray, moments: FloatArray, floor: float) -> bool:
        return bool(np.all(moments[..., 0] / mass > (-floor or 1e-14)))

    def at_floor(self, theta: FloatArray, floor: float) -> BoolArray:
        return theta[..., 0] <= NEAR_FLOOR * floor

    def covariance(self, theta: FloatArray, scale: FloatArray) -> FloatArray:
        return theta[..., None] ** 2

    def begin(self, draws: FloatArray, typical: FloatArray) -> FloatArray:
        """Means within a factor of about two."""
        return np.exp(self.stretch * draws[..., :1])

    def draw(self, theta: FloatArray, exposure: FloatArray, u: FloatArray) -> FloatArray:
        return -theta[..., 0] * np.log1p(-u)

    def cdf(self, theta: FloatArray, exposure: FloatArray, y: FloatArray) -> FloatArray:
        return -np.expm1(-np.maximum(y, 0) / theta[..., 0])


def _shape(gap: FloatArray) -> FloatArray:
    """The shape a with log a - digamma(a) = gap > 0: a start in closed form, then Newton's steps.

    Minka (2002), generalised Newton in 1 / a: quadratic from anywhere, five steps reach rounding.
    """
    from scipy.special import digamma, polygamma

    a = (3 - gap + np.sqrt((gap - 3) ** 2 + 24 * gap)) / (12 * gap)
    for _ in range(6):
        slope = 1 / a - polygamma(1, a)
        a = 1 / (1 / a + (np.log(a) - digamma(a) - gap) / (a**2 * slope))
    return np.asarray(a, dtype=np.float64)


@register_family
@final
@dataclass(frozen=True)
class Gamma(_Positive):
    """Positive numbers: shape and mean. T solves one equation in one unknown per column."""

    name: ClassVar[str] = "gamma"
    parameters: ClassVar[Mapping[str, Scale]] = {"shape": "positive", "mean": "positive"}
    examples: ClassVar[Examples] = ((2.0, 1.0), (4.0, 6.0))
    support: ClassVar[str] = "a finite number > 0"
    stretch: ClassVar[float] = 0.5

    @property
    def width(self) -> int:
        return 2

    def allowed(self, xp: Any, y: Any) -> Any:
        return (y > 0) & (y <= 1e140)

    def extra(self, xp: Any, y: Any) -> Any | None:
        return xp.log(y)[None, ...]

    def typical(self, mean: FloatArray, extra: FloatArray, scale: FloatArray) -> FloatArray:
        return np.stack([mean, extra[..., 0] - np.log(scale)], axis=-1)

    def expand(self, xp: Any, z: Any, exposure: Any) -> Sequence[Any]:
        return z, xp.log(z)

    def natural(self, theta: FloatArray, scale: FloatArray) -> tuple[FloatArray, FloatArray]:
        """-a / mean and a - 1."""
        from scipy.special import gammaln

        a, mean = theta[..., 0], theta[..., 1]
        return gammaln(a) - a * np.log(a / mean), np.stack([-a / mean, a - 1], axis=-1)

    def _gap(self, mass: FloatArray, moments: FloatArray) -> FloatArray:
        """log of the mean less mean of the log: positive where values differ."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.log(moments[..., 0] / mass) - moments[..., 1] / mass

    def estimate(self, mass: FloatArray, moments: FloatArray, floor: float) -> FloatArray:
        """The mean, and the shape whose log a - digamma(a) is the gap; at most 1 / (2 floor)."""
        gap = np.maximum(self._gap(mass, moments), max(floor, 1e-12))
        return np.stack([_shape(gap), moments[..., 0] / mass], axis=-1)

    def valid(self, mass: FloatArray, moments: FloatArray, floor: float) -> bool:
        positive = np.all(moments[..., 0] / mass > 1e-14)
        return bool(positive and np.all(self._gap(mass, moments) > (-floor or 1e-12)))

    def at_floor(self, theta: FloatArray, floor: float) -> BoolArray:
        return theta[..., 0] >= _shape(np.array(NEAR_FLOOR * floor)) if floor else theta[..., 0] < 0

    def expected(self, theta: FloatArray) -> FloatArray:
        """mean, and digamma(a) - log(a / mean)."""
        from scipy.special import digamma

        a, mean = theta[..., 0], theta[..., 1]
        return np.stack([mean, digamma(a) - np.log(a / mean)], axis=-1)

    def covariance(self, theta: FloatArray, scale: FloatArray) -> FloatArray:
        from scipy.special import polygamma

        a, mean = theta[..., 0], theta[..., 1]
        return symmetric(mean**2 / a, mean / a, np.asarray(polygamma(1, a)))

    def begin(self, draws: FloatArray, typical: FloatArray) -> FloatArray:
        """The shape of all data, means within a factor of about two."""
        gap = np.maximum(np.log(typical[..., 0]) - typical[..., 1], 1e-6)
        mean = np.exp(self.stretch * draws[..., 0])
        return np.stack([np.broadcast_to(_shape(gap), mean.shape), mean], axis=-1)

    def leave(self, theta: FloatArray, origin: FloatArray, scale: FloatArray) -> FloatArray:
        return np.stack([theta[..., 0], theta[..., 1] * scale], axis=-1)

    def enter(self, theta: FloatArray, origin: FloatArray, scale: FloatArray) -> FloatArray:
        return np.stack([theta[..., 0], theta[..., 1] / scale], axis=-1)

    def mean(self, theta: FloatArray, exposure: FloatArray) -> FloatArray:
        return theta[..., 1]

    def draw(self, theta: FloatArray, exposure: FloatArray, u: FloatArray) -> FloatArray:
        from scipy.special import gammaincinv

        # Where the shape is small, what is drawn may be less than a double holds, and 0 is none.
        share = np.maximum(gammaincinv(theta[..., 0], u) / theta[..., 0], 1e-150)
        return np.asarray(theta[..., 1] * share)

    def cdf(self, theta: FloatArray, exposure: FloatArray, y: FloatArray) -> FloatArray:
        from scipy.special import gammainc

        a, mean = theta[..., 0], theta[..., 1]
        return np.asarray(gammainc(a, np.maximum(y, 0) * a / mean))
