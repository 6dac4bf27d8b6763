"""What a cell holds: one-parameter exponential families x -> rho(x) exp(x theta - psi(theta)).

theta is the mean (Gaussian), the log-intensity (Poisson) or the log-odds (Bernoulli); the paper
prints psi of the Gaussian with a minus sign and calls theta the intensity and the probability
(Appendix F.2), which are misprints.

A cell seen several times has a weight w (how often, or the total exposure) and a sum s of values:
its log-likelihood is s theta - w psi(theta). The negative binomial, which is no such family in the
log-intensity, overrides what follows from that.

``spread`` is what a family knows besides theta: the variance of a record (Gaussian), or how far
counts vary beyond Poisson (variance mu + spread mu^2).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Literal, NamedTuple, final

import numpy as np
from scipy.special import digamma, expit, gammaln, logit, ndtr, ndtri, xlogy

from emfed.core.errors import SettingsError, check_choice
from emfed.core.protocols import BoolArray, FloatArray

_LARGEST = 30.0
"""|theta| beyond which a log-intensity or log-odds is taken as this: e^30 is no count."""
_FALLEN = 10.0
"""The largest logarithm of a count's spread, relative to that of a typical count."""


class CellMoments(NamedTuple):
    """What is known of cells: mean and variance of theta, and of the expected record."""

    theta: FloatArray
    variance: FloatArray
    value: FloatArray
    value_variance: FloatArray

    def ravel(self) -> CellMoments:
        """Each as one axis."""
        return CellMoments(*(part.ravel() for part in self))


class CellFamily(ABC):
    """What a cell holds: an exponential family, entry by entry; `FAMILIES` has them by name.

    Examples
    --------
    >>> import numpy as np
    >>> from emfed.imputation import FAMILIES
    >>> FAMILIES["poisson"].mean(np.zeros(2))
    array([1., 1.])
    """

    name: ClassVar[str]
    quadratic: ClassVar[bool] = False
    """Whether psi is quadratic, so that one Newton step is exact."""
    counts: ClassVar[bool] = False
    """Whether records are counts, with long tails and a spread beyond Poisson."""

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
        """The largest log-likelihood of each cell: what a perfect fit would reach."""

    def loss(self, theta: FloatArray, sums: FloatArray, weights: FloatArray) -> FloatArray:
        """The negative log-likelihood of each cell, up to what does not depend on theta."""
        return np.asarray(weights * self.cumulant(theta) - sums * theta)

    def score(self, theta: FloatArray, sums: FloatArray, weights: FloatArray) -> FloatArray:
        """Minus the derivative of `loss`."""
        return np.asarray(sums - weights * self.mean(theta))

    def gain(self, theta: FloatArray, sums: FloatArray, weights: FloatArray) -> FloatArray:
        """The second derivative of `loss`."""
        return np.asarray(weights * self.variance(theta))

    def slopes(
        self, theta: FloatArray, sums: FloatArray, weights: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        """`score`, and a curvature for steps and proposals: `gain`, or an approximation of it."""
        return self.score(theta, sums, weights), self.gain(theta, sums, weights)

    @final
    def deviance(self, theta: FloatArray, sums: FloatArray, weights: FloatArray) -> FloatArray:
        """Half the deviance of each cell: for the Gaussian, half its weighted squared error."""
        return np.asarray(self.saturated(sums, weights) + self.loss(theta, sums, weights))

    def value(self, theta: FloatArray, spread: float | FloatArray) -> FloatArray:
        """The expected record given theta, in the user's scale."""
        return self.mean(theta)

    def record_variance(self, theta: FloatArray, spread: float | FloatArray) -> FloatArray:
        """The variance of a record given theta, in the user's scale."""
        return self.variance(theta)

    @abstractmethod
    def quantiles(
        self, at: CellMoments, spread: float | FloatArray, tails: tuple[float, float]
    ) -> tuple[FloatArray, FloatArray]:
        """Quantiles of a new record, by what is known of its cell."""

    def widen(self, total: FloatArray) -> FloatArray:
        """The scale on which a sum of values has a symmetric error: counts have a log."""
        return total

    def narrow(self, total: FloatArray) -> FloatArray:
        """The inverse of `widen`."""
        return total

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
    def draw(
        self, theta: FloatArray, spread: float | FloatArray, uniforms: FloatArray
    ) -> FloatArray:
        """Values a new observer might record, in the user's scale."""

    def describe(self) -> dict[str, Any]:
        """The name."""
        return {"family": self.name}


@final
class GaussianCells(CellFamily):
    """Values, or the logarithm of counts plus one, about theta with a common variance.

    Parameters
    ----------
    scale : {"identity", "log1p"}
        Whether values are taken as they are, or as log(1 + count).

    Examples
    --------
    >>> import numpy as np
    >>> from emfed.imputation import GaussianCells
    >>> GaussianCells("log1p").forward(np.array([0.0]))
    array([0.])
    """

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
        return f"GaussianCells({self.scale!r})"

    def cumulant(self, theta: FloatArray) -> FloatArray:
        return 0.5 * theta * theta

    def mean(self, theta: FloatArray) -> FloatArray:
        return theta

    def variance(self, theta: FloatArray) -> FloatArray:
        return np.ones_like(theta)

    def link(self, mean: float) -> float:
        return mean

    def project(self, sums: FloatArray, weights: FloatArray) -> FloatArray:
        return sums

    def saturated(self, sums: FloatArray, weights: FloatArray) -> FloatArray:
        return sums**2 / (2 * weights)

    def bad(self, values: FloatArray) -> BoolArray:
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

    def value(self, theta: FloatArray, spread: float | FloatArray) -> FloatArray:
        """Theta; under log1p the mean of a count, which lies above the median exp(theta) - 1."""
        if self.scale == "identity":
            return theta
        # E max(exp(z) - 1, 0) of a normal z with mean theta and this variance.
        theta, root = np.clip(theta, -_LARGEST, _LARGEST), np.sqrt(np.maximum(spread, 1e-12))
        above = np.exp(theta + spread / 2) * ndtr((theta + spread) / root)
        return np.asarray(above - ndtr(theta / root))

    def quantiles(
        self, at: CellMoments, spread: float | FloatArray, tails: tuple[float, float]
    ) -> tuple[FloatArray, FloatArray]:
        root = np.sqrt(at.variance + spread)
        low, high = (self.backward(at.theta + float(ndtri(tail)) * root) for tail in tails)
        return low, high

    def record_variance(self, theta: FloatArray, spread: float | FloatArray) -> FloatArray:
        """The variance of a record: that of the log-normal, where the scale is a log."""
        if self.scale == "identity":
            return np.full_like(theta, spread, dtype=np.float64)
        theta = np.clip(theta, -_LARGEST, _LARGEST)
        return np.asarray(np.exp(2 * theta + spread) * np.expm1(spread))

    def widen(self, total: FloatArray) -> FloatArray:
        return total if self.scale == "identity" else _log(total)

    def narrow(self, total: FloatArray) -> FloatArray:
        return total if self.scale == "identity" else np.exp(total)

    def draw(
        self, theta: FloatArray, spread: float | FloatArray, uniforms: FloatArray
    ) -> FloatArray:
        """Normal about theta; under log1p rounded to counts."""
        inner = np.clip(uniforms, 1e-16, 1 - 1e-16)
        values = self.backward(theta + np.sqrt(spread) * np.asarray(ndtri(inner)))
        return np.rint(values) if self.scale == "log1p" else values

    def describe(self) -> dict[str, Any]:
        return {"family": self.name, "scale": self.scale}


class Counts(CellFamily):
    """Counts with intensity exp(theta) per unit of exposure."""

    counts = True
    share = 0.0
    """The share of cells that are zero whatever theta is."""
    expected = "a whole number >= 0"

    even_spread = True
    """Whether the spread is the same however large the count; else draws find out how it falls."""

    def in_chain(
        self, spread: float, power: float, fall: float, typical: float
    ) -> NegativeBinomialCells | ZeroInflatedCells:
        """The likelihood of counts that vary beyond Poisson."""
        return NegativeBinomialCells(spread, power, fall, typical)

    def value(self, theta: FloatArray, spread: float | FloatArray) -> FloatArray:
        return np.asarray((1 - self.share) * self.mean(theta))

    def record_variance(self, theta: FloatArray, spread: float | FloatArray) -> FloatArray:
        mean, share = self.mean(theta), self.share
        return np.asarray((1 - share) * (mean + (spread + share) * mean**2))

    def _beyond_zeros(self, tail: float) -> float:
        """The quantile of the counts that is that of counts and sure zeros together."""
        return max(0.0, (tail - self.share) / (1 - self.share))

    def cumulant(self, theta: FloatArray) -> FloatArray:
        return np.exp(np.minimum(np.maximum(theta, -_LARGEST), _LARGEST))

    def mean(self, theta: FloatArray) -> FloatArray:
        return self.cumulant(theta)

    def variance(self, theta: FloatArray) -> FloatArray:
        return self.cumulant(theta)

    def link(self, mean: float) -> float:
        return float(np.log(max(mean, 1e-6)))

    def project(self, sums: FloatArray, weights: FloatArray) -> FloatArray:
        return np.maximum(sums, 0.0)

    def saturated(self, sums: FloatArray, weights: FloatArray) -> FloatArray:
        return np.asarray(xlogy(sums, sums / weights) - sums)

    def bad(self, values: FloatArray) -> BoolArray:
        """Negative, fractional or not finite."""
        with np.errstate(invalid="ignore"):
            return ~np.isfinite(values) | (values < 0) | (values != np.rint(values))

    def quantiles(
        self, at: CellMoments, spread: float | FloatArray, tails: tuple[float, float]
    ) -> tuple[FloatArray, FloatArray]:
        """The quantiles of the negative binomial with the mean and variance of the mixture.

        Cells whose logarithms agree to half a percent share one: scipy's quantiles take 7 us each.
        """
        from scipy.stats import nbinom, poisson

        mean = np.maximum(at.value / (1 - self.share), 1e-9)
        # Var mu + E(mu + spread mu^2), less the mean, in units of the mean's square.
        variance = at.value_variance / (1 - self.share) ** 2
        extra = spread + (1 + spread) * variance / mean**2
        grid = [np.rint(200 * np.log(mean)), np.rint(50 * np.log(np.clip(extra, 1e-6, 1e6)))]
        # The second lies within 2^15 of zero: one integer holds the pair.
        code, place = np.unique(grid[0] * 2**16 + grid[1], return_inverse=True)
        mean = np.exp(np.rint(code / 2**16) / 200)
        extra = np.exp((code - np.rint(code / 2**16) * 2**16) / 50)
        out = []
        for tail in (self._beyond_zeros(tail) for tail in tails):
            wide = nbinom.ppf(tail, 1 / extra, 1 / (1 + extra * mean))
            plain = poisson.ppf(tail, mean)
            # scipy has -1 for the quantile at 0.
            out.append(np.maximum(np.where(extra * mean > 1e-4, wide, plain), 0.0)[place])
        return out[0], out[1]

    def widen(self, total: FloatArray) -> FloatArray:
        return _log(total)

    def narrow(self, total: FloatArray) -> FloatArray:
        return np.exp(total)

    def draw(
        self, theta: FloatArray, spread: float | FloatArray, uniforms: FloatArray
    ) -> FloatArray:
        """Negative binomial, which a spread of 1e-6 or less makes Poisson."""
        from scipy.stats import nbinom

        mean, spread = np.maximum(self.mean(theta), 1e-12), np.maximum(spread, 1e-6)
        uniforms = np.maximum(0.0, (uniforms - self.share) / (1 - self.share))
        return np.maximum(nbinom.ppf(uniforms, 1 / spread, 1 / (1 + spread * mean)), 0.0)


@final
class PoissonCells(Counts):
    """Counts fitted by the Poisson likelihood, whose fitted totals are the observed ones.

    Draws have the variance mu + spread mu^(2 - fall), so that large counts may vary less in
    proportion: with a fall of 1 it is a multiple of Poisson's, with 0 the negative binomial's.
    """

    name = "poisson"
    even_spread = False


@final
class NegativeBinomialCells(Counts):
    """Counts with variance mu + spread mu^2: large ones weigh less than under Poisson.

    A cell of weight w has mean w mu and size w^power / spread: with power 1 its records vary one by
    one, with power 0 all of them together, as where the table has more structure than the fit.

    With a fall f the spread is that of counts exp(typical), and the spread of others is in
    proportion to mu^-f: the variance is mu + a mu^(2 - f), with f = 1 a multiple of Poisson's
    (Greene 2008 calls it NB-P).
    """

    name = "negative-binomial"

    def __init__(
        self, spread: float = 1.0, power: float = 1.0, fall: float = 0.0, typical: float = 0.0
    ) -> None:
        self.spread, self.power = max(spread, 1e-6), power
        self.fall, self.typical = fall, typical
        self._sized: tuple[FloatArray, FloatArray] | None = None

    def __repr__(self) -> str:
        return f"NegativeBinomial({self.spread:g}, {self.power:g}, {self.fall:g})"

    def _size(self, theta: FloatArray, weights: FloatArray) -> FloatArray:
        # Sweeps ask for the same cells many times.
        if self._sized is None or self._sized[0] is not weights:
            self._sized = weights, weights**self.power / self.spread
        size = self._sized[1]
        if self.fall:
            size = size / fallen(self.fall, theta - self.typical)
        return np.asarray(size)

    def loss(self, theta: FloatArray, sums: FloatArray, weights: FloatArray) -> FloatArray:
        size = self._size(theta, weights)
        # Not through the mean, which is clipped: a bounded loss would send Newton's steps far out.
        ratio = np.logaddexp(0.0, theta + np.log(weights / size))
        loss = (sums + size) * ratio - sums * theta
        return np.asarray(loss - _rising(sums, weights, size) if self.fall else loss)

    def score(self, theta: FloatArray, sums: FloatArray, weights: FloatArray) -> FloatArray:
        return self.slopes(theta, sums, weights)[0]

    def gain(self, theta: FloatArray, sums: FloatArray, weights: FloatArray) -> FloatArray:
        return self.slopes(theta, sums, weights)[1]

    def slopes(
        self, theta: FloatArray, sums: FloatArray, weights: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        """With a fall the expected curvature of the mean: the loss need not be convex."""
        size = self._size(theta, weights)
        log = theta + np.log(weights / size)
        share = expit(log)
        score = sums - (sums + size) * share
        if not self.fall:
            return score, np.asarray((sums + size) * share * (1 - share))
        inner = digamma(sums + size) - digamma(size) - np.logaddexp(0.0, log)
        score += self.fall * size * (inner + share - sums / size * (1 - share))
        return score, np.asarray(size * share)

    def saturated(self, sums: FloatArray, weights: FloatArray) -> FloatArray:
        size, mean = self._size(np.zeros_like(sums), weights), sums / weights
        return np.asarray(xlogy(sums, mean) - (sums + size) * np.log1p(sums / size))

    def normaliser(self, sums: FloatArray, weights: FloatArray) -> float:
        """What the log-likelihood of all cells has besides minus `loss`, for choosing a spread."""
        if self.fall:
            return 0.0
        return float(_rising(sums, weights, self._size(sums, weights)).sum())

    def likeliest(
        self, theta: FloatArray, sums: FloatArray, weights: FloatArray
    ) -> NegativeBinomialCells:
        """The same with the likeliest spread where theta is known."""
        from scipy.optimize import minimize_scalar

        def value(log: float) -> float:
            family = NegativeBinomialCells(float(np.exp(log)))
            loss = float(family.loss(theta, sums, weights).sum())
            return loss - family.normaliser(sums, weights)

        return NegativeBinomialCells(float(np.exp(minimize_scalar(value, bounds=(-10, 4)).x)))


@final
class ZeroInflatedCells(Counts):
    """Negative binomial counts, and a share of cells that are zero whatever theta is.

    A zero is a sure one with a probability that follows; the others weigh in as counts do (the
    E-step of a mixture), so Newton's steps have a positive curvature.
    """

    name = "zero-inflated"

    def __init__(self, spread: float = 1.0, power: float = 1.0, share: float = 0.1) -> None:
        self.base, self.share = NegativeBinomialCells(spread, power), min(max(share, 1e-6), 0.99)

    def __repr__(self) -> str:
        return f"ZeroInflated({self.base.spread:g}, {self.base.power:g}, {self.share:g})"

    def in_chain(
        self, spread: float, power: float, fall: float, typical: float
    ) -> ZeroInflatedCells:
        return ZeroInflatedCells(spread, power, self.share)

    def _counted(self, theta: FloatArray, sums: FloatArray, weights: FloatArray) -> FloatArray:
        """The probability that a cell is no sure zero."""
        none = np.exp(-self.base.loss(theta, np.zeros_like(sums), weights))
        inside = (1 - self.share) * none
        return np.where(sums > 0, 1.0, inside / (self.share + inside))

    def loss(self, theta: FloatArray, sums: FloatArray, weights: FloatArray) -> FloatArray:
        plain = self.base.loss(theta, sums, weights) - np.log(1 - self.share)
        return np.where(sums > 0, plain, -np.logaddexp(np.log(self.share), -plain))

    def score(self, theta: FloatArray, sums: FloatArray, weights: FloatArray) -> FloatArray:
        return self._counted(theta, sums, weights) * self.base.score(theta, sums, weights)

    def gain(self, theta: FloatArray, sums: FloatArray, weights: FloatArray) -> FloatArray:
        return self._counted(theta, sums, weights) * self.base.gain(theta, sums, weights)

    def slopes(
        self, theta: FloatArray, sums: FloatArray, weights: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        counted = self._counted(theta, sums, weights)
        score, gain = self.base.slopes(theta, sums, weights)
        return counted * score, counted * gain

    def saturated(self, sums: FloatArray, weights: FloatArray) -> FloatArray:
        plain = self.base.saturated(sums, weights) + np.log(1 - self.share)
        return np.where(sums > 0, plain, 0.0)

    def normaliser(self, sums: FloatArray, weights: FloatArray) -> float:
        return self.base.normaliser(sums, weights)

    def likeliest(
        self, theta: FloatArray, sums: FloatArray, weights: FloatArray
    ) -> ZeroInflatedCells:
        """The same with the likeliest spread and share where theta is known."""
        from scipy.optimize import minimize

        def family(point: FloatArray) -> ZeroInflatedCells:
            return ZeroInflatedCells(float(np.exp(point[0])), 1.0, float(expit(point[1])))

        def value(point: FloatArray) -> float:
            one = family(point)
            return float(one.loss(theta, sums, weights).sum()) - one.normaliser(sums, weights)

        first = np.array([np.log(self.base.spread), logit(self.share)])
        bounds = ((-10, 4), (-8, 4))
        return family(minimize(value, first, method="Nelder-Mead", bounds=bounds).x)


@final
class BernoulliCells(CellFamily):
    """Whether a record reports the species: its mean is a reporting rate, with log-odds theta.

    It is no probability of presence: who is there may go unreported.
    """

    name = "bernoulli"
    expected = "a number >= 0 (any above 0 is presence)"

    def cumulant(self, theta: FloatArray) -> FloatArray:
        return np.logaddexp(0.0, theta)

    def mean(self, theta: FloatArray) -> FloatArray:
        return np.asarray(expit(theta))

    def variance(self, theta: FloatArray) -> FloatArray:
        p = self.mean(theta)
        return p * (1 - p)

    def link(self, mean: float) -> float:
        return float(logit(min(max(mean, 1e-6), 1 - 1e-6)))

    def project(self, sums: FloatArray, weights: FloatArray) -> FloatArray:
        return np.clip(sums, 0.0, weights)

    def saturated(self, sums: FloatArray, weights: FloatArray) -> FloatArray:
        rest = weights - sums
        return np.asarray(xlogy(sums, sums / weights) + xlogy(rest, rest / weights))

    def bad(self, values: FloatArray) -> BoolArray:
        """Negative or not finite."""
        return ~np.isfinite(values) | (values < 0)

    def forward(self, values: FloatArray) -> FloatArray:
        """Presence: whether there is any."""
        return (values > 0).astype(np.float64)

    def quantiles(
        self, at: CellMoments, spread: float | FloatArray, tails: tuple[float, float]
    ) -> tuple[FloatArray, FloatArray]:
        low, high = ((at.value > 1 - tail).astype(np.float64) for tail in tails)
        return low, high

    def widen(self, total: FloatArray) -> FloatArray:
        return _log(total)

    def narrow(self, total: FloatArray) -> FloatArray:
        return np.exp(total)

    def draw(
        self, theta: FloatArray, spread: float | FloatArray, uniforms: FloatArray
    ) -> FloatArray:
        return (uniforms < self.mean(theta)).astype(np.float64)


def fallen(fall: float, above: FloatArray) -> FloatArray:
    """The spread of counts whose theta lies so far above the typical one, in units of its own."""
    return np.exp(np.minimum(np.maximum(-fall * above, -_FALLEN), _FALLEN))


def _rising(sums: FloatArray, weights: FloatArray, size: FloatArray) -> FloatArray:
    return np.asarray(gammaln(sums + size) - gammaln(size) + sums * np.log(weights / size))


def _log(values: FloatArray) -> FloatArray:
    return np.log(np.maximum(values, 1e-300))


FAMILIES: dict[str, CellFamily] = {
    "gaussian": GaussianCells(),
    "log1p": GaussianCells("log1p"),
    "poisson": PoissonCells(),
    "negative-binomial": NegativeBinomialCells(),
    "zero-inflated": ZeroInflatedCells(),
    "bernoulli": BernoulliCells(),
}
"""Every family by name; ``log1p`` is the Gaussian on log(1 + count)."""


DEFAULT_FAMILY = "poisson"
"""The default of counts. On one split of the oystercatcher its deviance on held-out cells was 597,
the negative binomial's 655, when draws had one spread for all counts; that of `posterior.py` grows
with the mean. `python -m benchmarks imputation` compares families on more tables."""


def as_family(family: str | CellFamily) -> CellFamily:
    """A family by its name, or itself."""
    if isinstance(family, CellFamily):
        return family
    check_choice("family", family, FAMILIES)
    return FAMILIES[family]
