"""Parameters and priors of Gaussian mixtures, and the frame their statistics live in."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from emfed.core.configuration import check_keys
from emfed.core.errors import DataError, EmfedWarning, SettingsError, check_range, check_type
from emfed.core.protocols import BoolArray, FloatArray, IntArray, Parameters
from emfed.core.registry import stored
from emfed.core.wording import Setting, Wording
from emfed.models.naming import column_name, counted

ROUNDING = 4e-15
"""Spreads below this share of a mean are rounding: eighteen times that of one double."""


@dataclass(frozen=True)
class GaussianParameters(Parameters):
    """The parameters of a Gaussian mixture, with covariances in scikit-learn's shapes.

    All arrays may share leading axes.

    Parameters
    ----------
    weights : array of shape (K,)
        The shares of the components.
    means : array of shape (K, d)
        Their means.
    covariances : array
        Their covariances: full (K, d, d), tied and known (d, d), diag (K, d), spherical (K,).

    Examples
    --------
    >>> from emfed.models import GaussianParameters
    >>> GaussianParameters([0.3, 0.7], [[0.0], [1.0]], [[1.0], [2.0]]).means.shape
    (2, 1)
    """

    weights: FloatArray
    means: FloatArray
    covariances: FloatArray

    def __post_init__(self) -> None:
        for name, value in self.arrays().items():
            object.__setattr__(self, name, np.asarray(value, dtype=np.float64))


@stored("inverse-wishart")
@dataclass(frozen=True)
class InverseWishart:
    """The prior exp(-((dof + d + 1) log det S + <scale, S^-1>) / 2) on covariances S.

    On ``diag`` and ``spherical`` it acts on each variance as in one dimension.

    Parameters
    ----------
    dof : float
        The degrees of freedom.
    scale : float or array of shape (d, d)
        A number, times the variances of the columns, or a matrix in the user's units.

    Examples
    --------
    >>> import emfed
    >>> prior = emfed.models.InverseWishart(dof=5)
    >>> emfed.gaussian_mixture(2, covariance_prior=prior).describe()["covariance_prior"]
    {'dof': 5, 'scale': 1.0}
    """

    dof: float
    scale: float | FloatArray = 1.0

    def __post_init__(self) -> None:
        check_range("InverseWishart dof", self.dof, 0, np.inf, open_high=True)
        scale = np.atleast_2d(np.asarray(self.scale, dtype=np.float64))
        square = scale.ndim == 2 and scale.shape[0] == scale.shape[1] and np.isfinite(scale).all()
        if not (
            square and np.allclose(scale, scale.T) and np.linalg.eigvalsh(scale).min() >= -1e-12
        ):
            raise SettingsError(
                "InverseWishart scale must be a non-negative number or a positive semi-definite "
                f"matrix; got {self.scale!r}."
            )

    @classmethod
    def read(cls, given: Any) -> Any:
        """A prior from the mapping that `describe` gives; anything else is left to be checked."""
        if not isinstance(given, Mapping):
            return given
        check_keys(given, ("dof", "scale"), "a prior")
        scale = given.get("scale", 1.0)
        return cls(given["dof"], np.array(scale) if isinstance(scale, list) else scale)

    def describe(self) -> dict[str, Any]:
        """Its numbers, as plain JSON types."""
        return {"dof": self.dof, "scale": np.asarray(self.scale).tolist()}


def check_noise_prior(prior: Any) -> None:
    """Refuse a prior on noise variances that is not of one dimension."""
    check_type("noise_prior", prior, InverseWishart, "InverseWishart(dof=5)")
    if np.ndim(prior.scale):
        raise SettingsError("noise_prior: the scale must be a number, of the variances.")


@stored("frame")
@dataclass(frozen=True)
class Frame:
    """The common origin and scale of all workers, from the opening exchange.

    Statistics are moments of (y - origin) / scale. The paper's are raw moments (Appendix F.1),
    which would cancel where means are large against spreads.
    """

    origin: FloatArray
    scale: FloatArray

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Frame:
        """The frame that describes itself so."""
        scale = [np.inf if value is None else value for value in given["scale"]]
        frame = cls(np.array(given["origin"], dtype=np.float64), np.array(scale, dtype=np.float64))
        if frame.origin.shape != frame.scale.shape or not np.all(frame.scale > 0):
            raise SettingsError("a frame has an origin and a positive scale for each column.")
        return frame

    def describe(self) -> dict[str, Any]:
        """Its numbers as JSON has them; None for the scale of a column that is left out."""
        scale = [value if np.isfinite(value) else None for value in self.scale.tolist()]
        return {"origin": self.origin.tolist(), "scale": scale}

    def enter(self, params: GaussianParameters, kind: str) -> GaussianParameters:
        """The user's units to the frame's."""
        means = (params.means - self.origin) / self.scale
        return GaussianParameters(params.weights, means, params.covariances / self._squares(kind))

    def leave(self, params: GaussianParameters, kind: str) -> GaussianParameters:
        """The frame's units to the user's."""
        means = params.means * self.scale + self.origin
        return GaussianParameters(params.weights, means, params.covariances * self._squares(kind))

    def _squares(self, kind: str) -> FloatArray | float:
        if kind in ("full", "tied", "known"):
            return np.outer(self.scale, self.scale)
        return self.scale**2 if kind == "diag" else float(self.scale[0] ** 2)


def check_sizes(means: FloatArray, variances: FloatArray) -> None:
    """Refuse columns with these moments whose squares doubles cannot tell."""
    largest = np.sqrt(variances) + np.abs(means)
    if not (np.all(largest < 1e140) and np.all((largest > 1e-140) | (largest == 0))):
        raise DataError(
            "some column is beyond 1e140 or all below 1e-140 in size, where doubles cannot "
            "square it: use other units."
        )


def common_frame(origin: FloatArray, variances: FloatArray, kind: str, floored: bool) -> Frame:
    """The frame of data with this mean and these variances; one scale for ``spherical``."""
    check_sizes(origin, variances)
    constant = is_constant(origin, variances)
    if constant.any():
        _complain_of_constant(np.flatnonzero(constant), floored or kind in ("known", "spherical"))
    if kind == "spherical":
        whole = variances.mean() if not constant.all() else 1.0
        return Frame(origin, np.full(len(origin), np.sqrt(whole)))
    return Frame(origin, np.sqrt(np.where(constant, 1.0, variances)))


def is_constant(origin: FloatArray, variances: FloatArray) -> BoolArray:
    """Which columns hold one single value, up to the rounding of means over many workers."""
    return np.asarray(np.sqrt(np.maximum(variances, 0.0)) <= ROUNDING * np.abs(origin))


def _complain_of_constant(columns: IntArray, bearable: bool) -> None:
    many = len(columns) > 1
    which = f"column{'s' if many else ''} {', '.join(map(column_name, columns.tolist()))}"
    problem = f"{which}{counted()} {'hold' if many else 'holds'} one single value"
    if not bearable:
        raise DataError(
            Wording(
                "{}: the variance is zero and {} forbids to raise it. Drop it, or set {} > 0.",
                *(problem, Setting("covariance_floor", 0), Setting("covariance_floor")),
            )
        )
    tail = "say nothing; consider dropping them" if many else "says nothing; consider dropping it"
    warnings.warn(f"{problem} and {tail}.", EmfedWarning, 4)


def check_shapes(params: Parameters, shapes: Mapping[str, tuple[int, ...]], what: str = "") -> None:
    """Refuse starting parameters whose arrays have other shapes, or numbers that are not finite."""
    for name, value in params.arrays().items():
        bad = value.size - int(np.isfinite(value).sum())
        if value.shape != shapes[name] or bad:
            tail = f", {bad} of them not finite" if bad else ""
            raise SettingsError(
                f"start {name}: expected finite numbers of shape {shapes[name]}{what}; got shape "
                f"{value.shape}{tail}."
            )


def check_start(params: GaussianParameters, k: int, d: int, kind: str) -> None:
    """Refuse starting parameters of the wrong shape, or weights that are none."""
    check_type("start", params, GaussianParameters, "GaussianParameters(weights, means, ...)")
    covariances = {"full": (k, d, d), "diag": (k, d), "spherical": (k,)}.get(kind, (d, d))
    shapes = {"weights": (k,), "means": (k, d), "covariances": covariances}
    check_shapes(params, shapes, f" for covariance={kind!r}")
    if np.any(params.weights <= 0) or abs(params.weights.sum() - 1) > 1e-6:
        raise SettingsError(
            f"start weights must be positive and sum to 1; got {params.weights.tolist()}."
        )
