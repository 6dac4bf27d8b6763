"""What one column may be: the exponential families of mixed-type mixtures and Markov chains.

A family describes a group of c columns at once, in a frame in which z = (y - origin) / scale:

    log p(y) = <t(z), slopes(theta)> - A(theta) + base(y)

Moments are means of t, ``(..., K, c, width)``; ``mass`` is the share of samples that were seen,
``(..., K, c)``; parameters theta are ``(..., K, c, size)``. Estimates keep away from the boundary
by a relative ``floor``, as a constraint: they are the exact minimisers under it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, TypeVar, final, get_type_hints

import numpy as np

from emfed.core.configuration import check_keys
from emfed.core.errors import SettingsError
from emfed.core.protocols import BoolArray, FloatArray
from emfed.core.registry import stored
from emfed.models.components import NEAR_FLOOR
from emfed.models.parameters import is_constant


def log_gamma(xp: Any, x: Any) -> Any:
    """log Gamma(x) of x >= 1 to rounding, by Stirling's series at x + 8, in the array API."""
    product = x
    for step in range(1, 8):
        product = product * (x + step)
    y = x + 8.0
    inverse = 1 / (y * y)
    series = 1 / 156 * inverse
    for coefficient in (-691 / 360360, 1 / 1188, -1 / 1680, 1 / 1260, -1 / 360):
        series = (series + coefficient) * inverse
    series = (series + 1 / 12) / y
    return (y - 0.5) * xp.log(y) - y + 0.5 * float(np.log(2 * np.pi)) + series - xp.log(product)


def symmetric(first: FloatArray, off: FloatArray, second: FloatArray) -> FloatArray:
    """2 x 2 matrices from their entries."""
    rows = [np.stack([first, off], axis=-1), np.stack([off, second], axis=-1)]
    return np.stack(rows, axis=-2)


NORMAL_COUNTS = 1e6
"""The rate from which on counts are drawn by a normal quantile with its first correction (Cornish
and Fisher), which is then right to a count. The exact one takes milliseconds a number there, and a
server that named a rate of 1e250 kept a site busy for ever."""
IMPOSSIBLE = 1e-9
"""Sums over rows are exact to rounding: what lies further outside of the possible is noise."""


def positive(means: FloatArray, before: FloatArray) -> FloatArray:
    """Negative means replaced by a quarter of those before.

    Zero would be the nearest possible, but EM cannot leave it again.
    """
    return np.where(means < -IMPOSSIBLE, before / 4, means)


Examples = tuple[tuple[float, ...], ...]
Scale = Literal["any", "positive", "share"]
"""What a number can be: standard errors and bounds are on its own, the log or the logit scale."""
EXPOSURE = "exposure"
"""What a column is called that only says how much a count was exposed to."""


@dataclass(frozen=True)
class Family(ABC):
    """One exponential family, for a group of columns: a frozen dataclass of its settings.

    Everything that a table, a report, a plot or the command line needs to know of a family is
    here; `register_family` makes it known. What is not abstract is right where the only statistic
    is the value and the only parameter its mean.

    Examples
    --------
    >>> import emfed
    >>> gamma = emfed.models.FAMILIES["gamma"]()
    >>> gamma.describe(), gamma.names, gamma.support
    ('gamma', ('shape', 'mean'), 'a finite number > 0')
    """

    name: ClassVar[str]
    """What users write: a name as in Python."""
    title: ClassVar[str] = ""
    """The name as a sentence has it, where that is not the name itself."""
    parameters: ClassVar[Mapping[str, Scale]]
    """What the parameters are called, and what each can be. One name is a single number, or one
    for each category."""
    examples: ClassVar[Examples]
    """Parameters of two components that differ, which tests draw from; settings are the defaults,
    categories as many as there are probabilities."""
    nominal: ClassVar[bool] = False
    """Whether values are categories: codes without an order, mean or variance. Words can stand for
    them, and the number of categories is then the first setting."""
    whole: ClassVar[bool] = False
    """Whether values are whole numbers."""
    filler: ClassVar[float] = 0.0
    """A value that `expand` can take in place of a missing one."""
    support: ClassVar[str]
    """Which values are allowed, in words."""
    stretch: ClassVar[float] = 0.0
    """The logarithm of the factor by which `begin` goes for a draw of one; 0: it does not."""

    @property
    def width(self) -> int:
        """The length of t(z)."""
        return 1

    @property
    def exposure(self) -> str | int | None:
        """The column of a count's exposure, for families with such a setting."""
        return None

    @property
    def names(self) -> tuple[str, ...]:
        """What the parameters are called."""
        return tuple(self.parameters)

    @property
    def size(self) -> int:
        """The number of parameters of a column."""
        return len(self.parameters)

    @property
    def extra_width(self) -> int:
        """How many numbers `extra` gives a value."""
        found = self.extra(np, np.full((1, 1), self.filler))
        return 0 if found is None else len(found)

    def describe(self) -> str | dict[str, Any]:
        """The name, with the settings where it has any: plain JSON types."""
        settings = {f.name: getattr(self, f.name) for f in fields(self)}
        return {"family": self.name, **settings} if settings else self.name

    @property
    def divides(self) -> bool:
        """Whether T divides by the mass: whether A is not zero."""
        return True

    @abstractmethod
    def allowed(self, xp: Any, y: Any) -> Any:
        """Which finite values the family can give."""

    def nearest(self, y: FloatArray, mean: FloatArray) -> FloatArray:
        """Values that the family can give, near others; ``mean`` is that of each column."""
        return np.maximum(np.round(y), 0) if self.whole else y

    def extra(self, xp: Any, y: Any) -> Any | None:
        """What `typical` needs the mean of besides y, ``(e, c, m)``."""
        return None

    def frame(self, mean: FloatArray, scatter: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Origin and scale of columns with this mean and variance."""
        return np.zeros_like(mean), np.ones_like(mean)

    def typical(self, mean: FloatArray, extra: FloatArray, scale: FloatArray) -> FloatArray:
        """The mean of t(z) over all data, ``(c, width)``, given those of z and `extra`."""
        return mean[..., None]

    def expand(self, xp: Any, z: Any, exposure: Any) -> Sequence[Any]:
        """t(z) of ``(c, m)`` values: ``width`` arrays of that shape, the value first."""
        return (z,)

    @abstractmethod
    def natural(self, theta: FloatArray, scale: FloatArray) -> tuple[FloatArray, FloatArray]:
        """A(theta) ``(..., K, c)`` and slopes ``(..., K, c, width)``."""

    @abstractmethod
    def base(self, xp: Any, y: Any, exposure: Any, scale: Any) -> Any:
        """The part of log p(y) that no parameter changes; scale is ``(c, 1)``."""

    def estimate(self, mass: FloatArray, moments: FloatArray, floor: float) -> FloatArray:
        """T: the parameters that fit mean statistics best."""
        return np.maximum(moments / mass[..., None], floor)

    def valid(self, mass: FloatArray, moments: FloatArray, floor: float) -> bool:
        """Whether `estimate` is at home here; masses are known to be positive."""
        return True

    def at_floor(self, theta: FloatArray, floor: float) -> BoolArray:
        """Where the floor alone bounds the density, ``(..., K, c)``."""
        return np.zeros(theta.shape[:-1], dtype=np.bool_)

    def possible(self, means: FloatArray, before: FloatArray) -> FloatArray:
        """Means of t(z), where no values have them replaced by ones nearer to those ``before``."""
        return means

    def expected(self, theta: FloatArray) -> FloatArray:
        """E[t(z)] at these parameters, for a typical exposure."""
        return theta

    @abstractmethod
    def covariance(self, theta: FloatArray, scale: FloatArray) -> FloatArray:
        """Cov[t(z)], ``(..., K, c, width, width)``: positive definite, for the metric."""

    @abstractmethod
    def begin(self, draws: FloatArray, typical: FloatArray) -> FloatArray:
        """Starting parameters around the typical ones; draws are normal, ``(K, c, width)``."""

    def begin_at(
        self, centres: FloatArray, variances: FloatArray, typical: FloatArray
    ) -> FloatArray:
        """Starting parameters near centres ``(K, c)`` of clusters, in standard deviations."""
        return self.begin(np.repeat(centres[..., None], self.width, axis=-1), typical)

    def code_shares(self, mass: FloatArray, moments: FloatArray) -> FloatArray | None:
        """The share of rows with each code, ``(..., c, codes)``; None where values are no codes.

        The rule on small groups looks at these, which are counts of rows.
        """
        return None

    def leave(self, theta: FloatArray, origin: FloatArray, scale: FloatArray) -> FloatArray:
        """The frame's units to the user's."""
        return theta * scale[..., None]

    def enter(self, theta: FloatArray, origin: FloatArray, scale: FloatArray) -> FloatArray:
        """The user's units to the frame's."""
        return theta / scale[..., None]

    @abstractmethod
    def proper(self, theta: FloatArray) -> bool:
        """Whether these are parameters at all."""

    def mean(self, theta: FloatArray, exposure: FloatArray) -> FloatArray:
        """E[y] in the user's units, ``(...)`` for ``(..., size)``; of categories, the likeliest."""
        return theta[..., 0]

    def variance(self, theta: FloatArray) -> FloatArray:
        """The variance of y in the user's units, at exposure one; categories have none."""
        return self.covariance(theta, np.ones(()))[..., 0, 0]

    @abstractmethod
    def draw(self, theta: FloatArray, exposure: FloatArray, u: FloatArray) -> FloatArray:
        """The quantile u in the user's units, for each of ``(..., size)`` parameters."""

    @abstractmethod
    def cdf(self, theta: FloatArray, exposure: FloatArray, y: FloatArray) -> FloatArray:
        """The distribution function, whose inverse is `draw`."""


FAMILIES: dict[str, type[Family]] = {}
"""Every family by its name."""
Registered = TypeVar("Registered", bound=type[Family])


def register_family(family: Registered) -> Registered:
    """Make a family known by its name: in models, model files, run.toml and on the command line.

    Use it as a decorator of the family's class, a frozen dataclass of its settings. Every party
    must have imported the module that does this. `emfed.models.FAMILIES` holds what is registered.

    Parameters
    ----------
    family : type
        The class: a `Family`.

    Returns
    -------
    type
        The class.

    Raises
    ------
    SettingsError
        If something is missing, or another family has the name.

    Examples
    --------
    >>> import emfed
    >>> "poisson" in emfed.models.FAMILIES
    True
    """
    name = getattr(family, "name", "")
    lacking = sorted(getattr(family, "__abstractmethods__", ()))
    lacking += [what for what in ("parameters", "support", "examples") if not hasattr(family, what)]
    if not name.isidentifier() or name == EXPOSURE or lacking:
        want = f"{', '.join(lacking)} is missing" if lacking else f"{name!r} is no name for it"
        raise SettingsError(f"the family {family.__name__} cannot be registered: {want}.")
    stored(f"family/{name}")(family)
    FAMILIES[name] = family
    return family


def make_family(name: str, settings: Mapping[str, Any], what: str) -> Family:
    """The family of this name with these settings; ``what`` it is for is said in errors."""
    cls: Any = FAMILIES[name]
    check_keys(settings, [f.name for f in fields(cls)], what)
    try:
        made: Family = cls(**settings)
    except TypeError:
        needed = ", ".join(f.name for f in fields(cls))
        raise SettingsError(
            f"{what}: {name} needs its settings, as in {cls.__name__}({needed})."
        ) from None
    return made


def read_family(text: str) -> Family | str:
    """The family that ``poisson:days`` says, settings after the name; of categories the name.

    The number of categories is read off the data.
    """
    name, *given = text.split(":")
    cls: Any = FAMILIES.get(name)
    known = [] if cls is None or cls.nominal else [f.name for f in fields(cls)]
    if (cls is None and name != EXPOSURE) or len(given) > len(known):
        raise SettingsError(f"expected one of {', '.join(written())}; got {text!r}.")
    if cls is None or cls.nominal:
        return name
    hints, settings = get_type_hints(cls), dict(zip(known, given, strict=False))
    for key, value in settings.items():
        if hints[key] in (int, float):
            try:
                settings[key] = hints[key](value)
            except ValueError:
                raise SettingsError(f"{key} of {name} is a number; got {value!r}.") from None
    return make_family(name, settings, text)


def written() -> list[str]:
    """Every family as `read_family` takes it, with its settings in brackets."""
    found = []
    for name, cls in FAMILIES.items():
        settings = [] if cls.nominal else [f.name for f in fields(cls)]
        found.append(name + "".join(f"[:{setting}]" for setting in settings))
    return [*found, EXPOSURE]


@register_family
@final
@dataclass(frozen=True)
class Gaussian(Family):
    """Real numbers: mean and variance."""

    name: ClassVar[str] = "gaussian"
    title: ClassVar[str] = "Gaussian"
    parameters: ClassVar[Mapping[str, Scale]] = {"mean": "any", "variance": "positive"}
    examples: ClassVar[Examples] = ((-1.0, 0.5), (3.0, 1.5))
    support: ClassVar[str] = "a finite number of at most 1e140"

    @property
    def width(self) -> int:
        return 2

    def allowed(self, xp: Any, y: Any) -> Any:
        return xp.abs(y) <= 1e140

    def frame(self, mean: FloatArray, scatter: FloatArray) -> tuple[FloatArray, FloatArray]:
        return mean, np.sqrt(np.where(is_constant(mean, scatter), 1.0, scatter))

    def typical(self, mean: FloatArray, extra: FloatArray, scale: FloatArray) -> FloatArray:
        """Mean zero, square one: that is the frame."""
        return np.stack([mean, np.ones_like(mean)], axis=-1)

    def expand(self, xp: Any, z: Any, exposure: Any) -> Sequence[Any]:
        return z, z * z

    def natural(self, theta: FloatArray, scale: FloatArray) -> tuple[FloatArray, FloatArray]:
        """mu / v and -1 / 2v."""
        mean, variance = theta[..., 0], theta[..., 1]
        a = 0.5 * (mean**2 / variance + np.log(variance))
        return a, np.stack([mean / variance, -0.5 / variance], axis=-1)

    def base(self, xp: Any, y: Any, exposure: Any, scale: Any) -> Any:
        return xp.zeros_like(y) - 0.5 * float(np.log(2 * np.pi)) - xp.log(scale)

    def estimate(self, mass: FloatArray, moments: FloatArray, floor: float) -> FloatArray:
        mean = moments[..., 0] / mass
        return np.stack([mean, np.maximum(moments[..., 1] / mass - mean**2, floor)], axis=-1)

    def valid(self, mass: FloatArray, moments: FloatArray, floor: float) -> bool:
        mean = moments[..., 0] / mass
        return bool(np.all(moments[..., 1] / mass - mean**2 > (-floor or 1e-14)))

    def at_floor(self, theta: FloatArray, floor: float) -> BoolArray:
        return theta[..., 1] <= NEAR_FLOOR * floor

    def expected(self, theta: FloatArray) -> FloatArray:
        return np.stack([theta[..., 0], theta[..., 0] ** 2 + theta[..., 1]], axis=-1)

    def covariance(self, theta: FloatArray, scale: FloatArray) -> FloatArray:
        mean, v = theta[..., 0], theta[..., 1]
        return symmetric(v, 2 * mean * v, 2 * v**2 + 4 * mean**2 * v)

    def begin(self, draws: FloatArray, typical: FloatArray) -> FloatArray:
        return np.stack([draws[..., 0], np.ones(draws.shape[:-1])], axis=-1)

    def begin_at(
        self, centres: FloatArray, variances: FloatArray, typical: FloatArray
    ) -> FloatArray:
        return np.stack([centres, np.broadcast_to(variances, centres.shape)], axis=-1)

    def leave(self, theta: FloatArray, origin: FloatArray, scale: FloatArray) -> FloatArray:
        return np.stack([theta[..., 0] * scale + origin, theta[..., 1] * scale**2], axis=-1)

    def enter(self, theta: FloatArray, origin: FloatArray, scale: FloatArray) -> FloatArray:
        return np.stack([(theta[..., 0] - origin) / scale, theta[..., 1] / scale**2], axis=-1)

    def proper(self, theta: FloatArray) -> bool:
        return bool(np.all(theta[..., 1] > 0))

    def mean(self, theta: FloatArray, exposure: FloatArray) -> FloatArray:
        return theta[..., 0]

    def draw(self, theta: FloatArray, exposure: FloatArray, u: FloatArray) -> FloatArray:
        from scipy.special import ndtri

        return theta[..., 0] + np.sqrt(theta[..., 1]) * ndtri(u)

    def cdf(self, theta: FloatArray, exposure: FloatArray, y: FloatArray) -> FloatArray:
        from scipy.special import ndtr

        return np.asarray(ndtr((y - theta[..., 0]) / np.sqrt(theta[..., 1])))


@register_family
@final
@dataclass(frozen=True)
class Poisson(Family):
    """The family of a column of counts, perhaps per unit of another column.

    Parameters
    ----------
    exposure : str, int or None
        The name or position of the column that holds the exposure; None where there is none.

    Examples
    --------
    >>> import emfed
    >>> model = emfed.mixed_mixture(2, [emfed.models.Poisson(exposure=1), "exposure"])
    >>> model.describe()["families"]
    [{'family': 'poisson', 'exposure': 1}, 'exposure']
    """

    exposure: str | int | None = None
    name: ClassVar[str] = "poisson"
    title: ClassVar[str] = "Poisson"
    whole: ClassVar[bool] = True
    parameters: ClassVar[Mapping[str, Scale]] = {"rate": "positive"}
    examples: ClassVar[Examples] = ((2.0,), (9.0,))
    support: ClassVar[str] = "a whole number >= 0"
    stretch: ClassVar[float] = 0.5

    @property
    def width(self) -> int:
        """The count and, where there is one, the exposure."""
        return 1 if self.exposure is None else 2

    @property
    def divides(self) -> bool:
        return self.exposure is None

    def allowed(self, xp: Any, y: Any) -> Any:
        return (y >= 0) & (y == xp.floor(y)) & (y < 2.0**53)

    def frame(self, mean: FloatArray, scatter: FloatArray) -> tuple[FloatArray, FloatArray]:
        return np.zeros_like(mean), np.where(mean > 0, mean, 1.0)

    def typical(self, mean: FloatArray, extra: FloatArray, scale: FloatArray) -> FloatArray:
        """The mean; a typical exposure is one."""
        pair = [mean] if self.exposure is None else [mean, np.ones_like(mean)]
        return np.stack(pair, axis=-1)

    def expand(self, xp: Any, z: Any, exposure: Any) -> Sequence[Any]:
        return (z,) if self.exposure is None else (z, exposure)

    def natural(self, theta: FloatArray, scale: FloatArray) -> tuple[FloatArray, FloatArray]:
        """log rate, with the rate as A or times the exposure."""
        rate = theta[..., 0]
        log = scale * np.log(rate)
        if self.exposure is None:
            return scale * rate, log[..., None]
        return np.zeros_like(rate), np.stack([log, -scale * rate], axis=-1)

    def base(self, xp: Any, y: Any, exposure: Any, scale: Any) -> Any:
        unit = xp.log(scale) if self.exposure is None else xp.log(scale * exposure)
        return y * unit - log_gamma(xp, y + 1)

    def estimate(self, mass: FloatArray, moments: FloatArray, floor: float) -> FloatArray:
        below = mass if self.exposure is None else moments[..., 1]
        return np.maximum(moments[..., :1] / below[..., None], floor)

    def possible(self, means: FloatArray, before: FloatArray) -> FloatArray:
        """Counts and exposures are not negative."""
        return positive(means, before)

    def valid(self, mass: FloatArray, moments: FloatArray, floor: float) -> bool:
        return self.exposure is None or bool(np.all(moments[..., 1] > 1e-12))

    def expected(self, theta: FloatArray) -> FloatArray:
        """The rate, at exposure one."""
        if self.exposure is None:
            return theta
        return np.concatenate([theta, np.ones_like(theta)], axis=-1)

    def covariance(self, theta: FloatArray, scale: FloatArray) -> FloatArray:
        """The covariance of the count in units of its mean; exposures vary by about one."""
        spread = theta[..., 0] / scale
        if self.exposure is None:
            return spread[..., None, None]
        return symmetric(spread, np.zeros_like(spread), np.ones_like(spread))

    def begin(self, draws: FloatArray, typical: FloatArray) -> FloatArray:
        """Rates within a factor of about two of the mean."""
        return np.maximum(typical[:, :1], 1e-3) * np.exp(self.stretch * draws[..., :1])

    def proper(self, theta: FloatArray) -> bool:
        return bool(np.all(theta > 0))

    def mean(self, theta: FloatArray, exposure: FloatArray) -> FloatArray:
        return theta[..., 0] * exposure

    def draw(self, theta: FloatArray, exposure: FloatArray, u: FloatArray) -> FloatArray:
        """Draw by inversion: the smallest count whose distribution function reaches u."""
        from scipy.special import ndtri, pdtr, pdtrik

        wanted = theta[..., 0] * exposure
        rate = np.where(wanted < NORMAL_COUNTS, wanted, 1.0)
        count = np.maximum(np.ceil(pdtrik(u, rate)), 0.0)
        count = np.where(pdtr(count, rate) < u, count + 1, count)
        less = (count > 0) & (pdtr(np.maximum(count - 1, 0), rate) >= u)
        z = ndtri(u)
        with np.errstate(invalid="ignore"):  # of an infinite rate there is no count
            large = np.rint(wanted + np.sqrt(np.maximum(wanted, 0.0)) * z + (z**2 - 1) / 6)
        return np.where(wanted < NORMAL_COUNTS, np.where(less, count - 1, count), large)

    def cdf(self, theta: FloatArray, exposure: FloatArray, y: FloatArray) -> FloatArray:
        from scipy.special import pdtr

        return np.where(y < 0, 0.0, pdtr(np.floor(np.maximum(y, 0)), theta[..., 0] * exposure))
