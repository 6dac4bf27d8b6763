"""What a cell holds: one-parameter exponential families x -> rho(x) exp(x theta - psi(theta)).

theta is the mean (Gaussian), the log-intensity (Poisson) or the log-odds (Bernoulli); the paper
prints psi of the Gaussian with a minus sign and calls theta the intensity and the probability
(supplement, "Federated missing values imputation"), which are misprints.

A cell seen several times has a weight w (how often, or the total exposure) and a sum s of values:
its log-likelihood is s theta - w psi(theta).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Literal, final

import numpy as np
from scipy.special import expit, logit, ndtri, xlogy

from emfed.core.errors import SettingsError
from emfed.core.protocols import BoolArray, FloatArray

_LARGEST = 30.0
"""|theta| beyond which a log-intensity or log-odds is taken as this: e^30 is no count."""


class Family(ABC):
    """psi and what follows from it, entry by entry."""

    name: ClassVar[str]
    quadratic: ClassVar[bool] = False
    """Whether psi is quadratic, so that one Newton step is exact."""

    @abstractmethod
    def cumulant(self, theta: FloatArray) -> FloatArray:
        """psi."""

    @abstractmethod
    def mean(self, theta: FloatArray) -> FloatArray:
        """psi', the expected value of a cell seen once."""

    @abstractmethod
    def variance(self, theta: FloatArray) -> FloatArray:
        """psi'', its variance."""

    @abstractmethod
    def link(self, mean: float) -> float:
        """The theta of a mean, well inside the domain."""

    @abstractmethod
    def project(self, sums: FloatArray, weights: FloatArray) -> FloatArray:
        """Sums moved to where data could be: compression noise may leave it."""

    @abstractmethod
    def saturated(self, sums: FloatArray, weights: FloatArray) -> FloatArray:
        """The largest s theta - w psi(theta) over theta: what a perfect fit would reach."""

    @final
    def deviance(self, theta: FloatArray, sums: FloatArray, weights: FloatArray) -> FloatArray:
        """Half the deviance of each cell: for the Gaussian, half its weighted squared error."""
        reached = sums * theta - weights * self.cumulant(theta)
        return np.asarray(self.saturated(sums, weights) - reached)

    @abstractmethod
    def bad(self, values: FloatArray) -> BoolArray:
        """Which values cannot be observed."""

    expected: str
    """What values must be, in words."""

    def forward(self, values: FloatArray) -> FloatArray:
        """The user's values in the scale of the model."""
        return values

    def backward(self, values: FloatArray) -> FloatArray:
        """The inverse of `forward`."""
        return values

    @abstractmethod
    def draw(self, theta: FloatArray, dispersion: float, uniforms: FloatArray) -> FloatArray:
        """Values a new observer might record, in the user's scale."""

    def describe(self) -> dict[str, Any]:
        """The name."""
        return {"family": self.name}


@final
class Gaussian(Family):
    """Values, or log(1 + counts) with ``scale="log1p"``, about theta with a common variance."""

    name = "gaussian"
    quadratic = True

    def __init__(self, scale: Literal["identity", "log1p"] = "identity") -> None:
        if scale not in ("identity", "log1p"):
            raise SettingsError(f"scale must be 'identity' or 'log1p'; got {scale!r}.")
        self.scale = scale
        self.expected = "a number"
        if scale == "log1p":
            self.expected = "a number >= 0, for log(1 + count)"

    def __repr__(self) -> str:
        return f"Gaussian({self.scale!r})"

    def cumulant(self, theta: FloatArray) -> FloatArray:
        """theta^2 / 2."""
        return 0.5 * theta * theta

    def mean(self, theta: FloatArray) -> FloatArray:
        """Theta itself."""
        return theta

    def variance(self, theta: FloatArray) -> FloatArray:
        """One."""
        return np.ones_like(theta)

    def link(self, mean: float) -> float:
        """The mean."""
        return mean

    def project(self, sums: FloatArray, weights: FloatArray) -> FloatArray:
        """All sums are possible."""
        return sums

    def saturated(self, sums: FloatArray, weights: FloatArray) -> FloatArray:
        """s^2 / 2 w."""
        return sums**2 / (2 * weights)

    def bad(self, values: FloatArray) -> BoolArray:
        """Infinite or missing ones, and negative ones under log1p."""
        bad = ~np.isfinite(values)
        return bad | (values < 0) if self.scale == "log1p" else bad

    def forward(self, values: FloatArray) -> FloatArray:
        """log(1 + count), if that is the scale."""
        return np.log1p(values) if self.scale == "log1p" else values

    def backward(self, values: FloatArray) -> FloatArray:
        """exp(theta) - 1, never below 0, if that is the scale: the median count."""
        if self.scale == "identity":
            return values
        return np.expm1(np.clip(values, 0.0, _LARGEST))

    def draw(self, theta: FloatArray, dispersion: float, uniforms: FloatArray) -> FloatArray:
        """Normal about theta; under log1p rounded to counts."""
        inner = np.clip(uniforms, 1e-16, 1 - 1e-16)
        values = self.backward(theta + np.sqrt(dispersion) * np.asarray(ndtri(inner)))
        return np.rint(values) if self.scale == "log1p" else values

    def describe(self) -> dict[str, Any]:
        """Name and scale."""
        return {"family": self.name, "scale": self.scale}


@final
class Poisson(Family):
    """Counts with intensity exp(theta) per unit of exposure."""

    name = "poisson"
    expected = "a whole number >= 0"

    def cumulant(self, theta: FloatArray) -> FloatArray:
        """exp(theta)."""
        return np.exp(np.clip(theta, -_LARGEST, _LARGEST))

    def mean(self, theta: FloatArray) -> FloatArray:
        """exp(theta)."""
        return self.cumulant(theta)

    def variance(self, theta: FloatArray) -> FloatArray:
        """exp(theta)."""
        return self.cumulant(theta)

    def link(self, mean: float) -> float:
        """log."""
        return float(np.log(max(mean, 1e-6)))

    def project(self, sums: FloatArray, weights: FloatArray) -> FloatArray:
        """Not below zero."""
        return np.maximum(sums, 0.0)

    def saturated(self, sums: FloatArray, weights: FloatArray) -> FloatArray:
        """s log(s / w) - s."""
        return np.asarray(xlogy(sums, sums / weights) - sums)

    def bad(self, values: FloatArray) -> BoolArray:
        """Negative, fractional or not finite."""
        with np.errstate(invalid="ignore"):
            return ~np.isfinite(values) | (values < 0) | (values != np.rint(values))

    def draw(self, theta: FloatArray, dispersion: float, uniforms: FloatArray) -> FloatArray:
        """Poisson, or negative binomial where the dispersion is above 1 (variance phi mean)."""
        from scipy.stats import nbinom, poisson

        mean = np.maximum(self.mean(theta), 1e-12)
        if dispersion <= 1 + 1e-9:
            return np.asarray(poisson.ppf(uniforms, mean), dtype=np.float64)
        size = mean / (dispersion - 1)
        return np.asarray(nbinom.ppf(uniforms, size, 1 / dispersion), dtype=np.float64)


@final
class Bernoulli(Family):
    """Presence and absence, with log-odds theta."""

    name = "bernoulli"
    expected = "a number >= 0 (any above 0 is presence)"

    def cumulant(self, theta: FloatArray) -> FloatArray:
        """log(1 + exp(theta))."""
        return np.logaddexp(0.0, theta)

    def mean(self, theta: FloatArray) -> FloatArray:
        """The probability of presence."""
        return np.asarray(expit(theta))

    def variance(self, theta: FloatArray) -> FloatArray:
        """p (1 - p)."""
        p = self.mean(theta)
        return p * (1 - p)

    def link(self, mean: float) -> float:
        """Log-odds."""
        return float(logit(min(max(mean, 1e-6), 1 - 1e-6)))

    def project(self, sums: FloatArray, weights: FloatArray) -> FloatArray:
        """Between none and all."""
        return np.clip(sums, 0.0, weights)

    def saturated(self, sums: FloatArray, weights: FloatArray) -> FloatArray:
        """s log p + (w - s) log(1 - p) at p = s / w."""
        rest = weights - sums
        return np.asarray(xlogy(sums, sums / weights) + xlogy(rest, rest / weights))

    def bad(self, values: FloatArray) -> BoolArray:
        """Negative or not finite."""
        return ~np.isfinite(values) | (values < 0)

    def forward(self, values: FloatArray) -> FloatArray:
        """Presence: whether there is any."""
        return (values > 0).astype(np.float64)

    def draw(self, theta: FloatArray, dispersion: float, uniforms: FloatArray) -> FloatArray:
        """0 or 1."""
        return (uniforms < self.mean(theta)).astype(np.float64)


FAMILIES: dict[str, Family] = {
    "gaussian": Gaussian(),
    "log1p": Gaussian("log1p"),
    "poisson": Poisson(),
    "bernoulli": Bernoulli(),
}
"""Every family by name; ``log1p`` is the Gaussian on log(1 + count)."""


def as_family(family: str | Family) -> Family:
    """A family by its name, or itself."""
    if isinstance(family, Family):
        return family
    if family not in FAMILIES:
        raise SettingsError(f"family must be one of {', '.join(FAMILIES)}; got {family!r}.")
    return FAMILIES[family]
