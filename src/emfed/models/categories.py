"""Families of codes: Bernoulli and categorical."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

import numpy as np

from emfed.core.errors import check_count
from emfed.core.protocols import FloatArray
from emfed.models.families import IMPOSSIBLE, Examples, Family, Scale, positive, register_family

ROUNDING = 1e-12
"""A share that a difference may leave of nothing."""


def clip_simplex(p: FloatArray, floor: float) -> FloatArray:
    """Probabilities with those below the floor raised to it and the others scaled: exact."""
    low = floor / p.shape[-1]
    raised = p <= low
    for _ in range(p.shape[-1]):
        free = np.where(raised, 0.0, p)
        left = 1 - low * raised.sum(axis=-1, keepdims=True)
        total = free.sum(axis=-1, keepdims=True)
        p = np.where(raised, low, free * left / np.where(total > 0, total, 1.0))
        again = raised | (p <= low)
        if np.array_equal(again, raised):
            break
        raised = again
    return p


@register_family
@final
@dataclass(frozen=True)
class BernoulliColumn(Family):
    """0 or 1: the probability of 1."""

    name: ClassVar[str] = "bernoulli"
    title: ClassVar[str] = "Bernoulli"
    whole: ClassVar[bool] = True
    parameters: ClassVar[Mapping[str, Scale]] = {"probability": "share"}
    examples: ClassVar[Examples] = ((0.2,), (0.8,))
    support: ClassVar[str] = "0 or 1"

    def nearest(self, y: FloatArray, mean: FloatArray) -> FloatArray:
        return np.clip(np.round(y), 0, 1)

    def allowed(self, xp: Any, y: Any) -> Any:
        return (y == 0) | (y == 1)

    def natural(self, theta: FloatArray, scale: FloatArray) -> tuple[FloatArray, FloatArray]:
        return -np.log1p(-theta[..., 0]), np.log(theta / (1 - theta))

    def base(self, xp: Any, y: Any, exposure: Any, scale: Any) -> Any:
        return xp.zeros_like(y)

    def estimate(self, mass: FloatArray, moments: FloatArray, floor: float) -> FloatArray:
        return np.clip(moments / mass[..., None], floor / 2, 1 - floor / 2)

    def possible(self, means: FloatArray, before: FloatArray) -> FloatArray:
        low = positive(means, before)
        return np.where(low > 1 + IMPOSSIBLE, 1 - (1 - before) / 4, low)

    def covariance(self, theta: FloatArray, scale: FloatArray) -> FloatArray:
        """p (1 - p), not too small."""
        return np.maximum(theta * (1 - theta), 0.01)[..., None]

    def begin(self, draws: FloatArray, typical: FloatArray) -> FloatArray:
        share = np.clip(typical, 0.01, 0.99)
        return 1 / (1 + np.exp(-np.log(share / (1 - share)) - draws[..., :1]))

    def code_shares(self, mass: FloatArray, moments: FloatArray) -> FloatArray:
        rest = mass[..., None] - moments
        return np.concatenate([moments, np.where(np.abs(rest) < ROUNDING, 0.0, rest)], axis=-1)

    def proper(self, theta: FloatArray) -> bool:
        return bool(np.all((theta > 0) & (theta < 1)))

    def variance(self, theta: FloatArray) -> FloatArray:
        return theta[..., 0] * (1 - theta[..., 0])

    def draw(self, theta: FloatArray, exposure: FloatArray, u: FloatArray) -> FloatArray:
        return (u > 1 - theta[..., 0]).astype(np.float64)

    def cdf(self, theta: FloatArray, exposure: FloatArray, y: FloatArray) -> FloatArray:
        return np.where(y < 0, 0.0, np.where(y < 1, 1 - theta[..., 0], 1.0))


@register_family
@final
@dataclass(frozen=True)
class Categorical(Family):
    """The family of a column that holds one of several codes 0, 1, ...

    Parameters
    ----------
    categories : int
        The number of codes.

    Examples
    --------
    >>> import emfed
    >>> emfed.mixed_mixture(2, ["gaussian", emfed.models.Categorical(3)]).describe()["families"]
    ['gaussian', {'family': 'categorical', 'categories': 3}]
    """

    categories: int
    name: ClassVar[str] = "categorical"
    nominal: ClassVar[bool] = True
    whole: ClassVar[bool] = True
    filler: ClassVar[float] = -1.0
    parameters: ClassVar[Mapping[str, Scale]] = {"probabilities": "share"}
    examples: ClassVar[Examples] = ((0.6, 0.3, 0.1), (0.1, 0.2, 0.7))
    support: ClassVar[str] = "a code 0, 1, ... below the number of categories"

    def __post_init__(self) -> None:
        check_count("categories", self.categories, 2)

    @property
    def divides(self) -> bool:
        return False

    @property
    def width(self) -> int:
        return self.categories

    @property
    def size(self) -> int:
        return self.categories

    def nearest(self, y: FloatArray, mean: FloatArray) -> FloatArray:
        return np.clip(np.round(y), 0, self.categories - 1)

    def allowed(self, xp: Any, y: Any) -> Any:
        return (y >= 0) & (y < self.categories) & (y == xp.floor(y))

    def extra(self, xp: Any, y: Any) -> Any | None:
        return xp.stack([xp.astype(y == code, xp.float64) for code in range(self.categories)])

    def typical(self, mean: FloatArray, extra: FloatArray, scale: FloatArray) -> FloatArray:
        return extra

    def expand(self, xp: Any, z: Any, exposure: Any) -> Sequence[Any]:
        return [xp.astype(z == code, xp.float64) for code in range(self.categories)]

    def natural(self, theta: FloatArray, scale: FloatArray) -> tuple[FloatArray, FloatArray]:
        return np.zeros(theta.shape[:-1]), np.log(theta)

    def base(self, xp: Any, y: Any, exposure: Any, scale: Any) -> Any:
        return xp.zeros_like(y)

    def estimate(self, mass: FloatArray, moments: FloatArray, floor: float) -> FloatArray:
        shares = moments / np.maximum(moments.sum(axis=-1, keepdims=True), 1e-300)
        return clip_simplex(shares, floor) if floor > 0 else shares

    def possible(self, means: FloatArray, before: FloatArray) -> FloatArray:
        """Shares are not negative."""
        return positive(means, before)

    def valid(self, mass: FloatArray, moments: FloatArray, floor: float) -> bool:
        """Some mass, and without a floor in every category."""
        if floor == 0 and np.any(moments <= 0):
            return False
        return bool(np.all(moments.sum(axis=-1) > 1e-12))

    def expected(self, theta: FloatArray) -> FloatArray:
        return theta

    def covariance(self, theta: FloatArray, scale: FloatArray) -> FloatArray:
        """The diagonal alone, not too small: counts sum to the mass, the whole is singular."""
        return np.maximum(theta, 0.01)[..., None] * np.eye(self.categories)

    def begin(self, draws: FloatArray, typical: FloatArray) -> FloatArray:
        p = np.maximum(typical, 0.01) * np.exp(0.7 * draws)
        return p / p.sum(axis=-1, keepdims=True)

    def begin_at(
        self, centres: FloatArray, variances: FloatArray, typical: FloatArray
    ) -> FloatArray:
        """Tilted towards the codes on the centre's side."""
        codes = np.arange(self.categories)
        away = codes - (typical @ codes)[:, None]
        spread = np.sqrt((typical * away**2).sum(axis=-1, keepdims=True))
        return self.begin(centres[..., None] * away / np.where(spread > 0, spread, 1.0), typical)

    def code_shares(self, mass: FloatArray, moments: FloatArray) -> FloatArray:
        return moments

    def proper(self, theta: FloatArray) -> bool:
        return bool(np.all(theta > 0) and np.allclose(theta.sum(axis=-1), 1, atol=1e-6))

    def mean(self, theta: FloatArray, exposure: FloatArray) -> FloatArray:
        return np.argmax(theta, axis=-1).astype(np.float64)

    def draw(self, theta: FloatArray, exposure: FloatArray, u: FloatArray) -> FloatArray:
        below = np.cumsum(theta, axis=-1)[..., :-1]
        return (u[..., None] > below).sum(axis=-1).astype(np.float64)

    def cdf(self, theta: FloatArray, exposure: FloatArray, y: FloatArray) -> FloatArray:
        reached = np.arange(self.categories) <= y[..., None]
        return np.asarray((theta * reached).sum(axis=-1))
