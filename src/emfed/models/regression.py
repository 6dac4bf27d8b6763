"""Mixtures of linear regressions: each component has its own line and noise.

    y = b_k . (1, x) + e,   e ~ N(0, v_k)

One column is the target y, all others are x, which is given and not modelled. Statistics are
``mass`` and ``moments``, responsibility times the products of (1, x, y): everything T needs for
weighted least squares. The likelihood is that of y given x.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self, final

import numpy as np
from array_api_compat import device

from emfed.core.errors import DataError, SettingsError, check_count, check_range, check_type, known
from emfed.core.protocols import (
    BoolArray,
    FloatArray,
    HeldUp,
    IntArray,
    Layout,
    Metric,
    ModelWords,
    Names,
    Parameters,
    Summaries,
    plural,
)
from emfed.core.registry import register_model, stored
from emfed.core.streams import Purpose, normal_row
from emfed.models.component_summaries import Portrait, alike
from emfed.models.components import (
    NEAR_FLOOR,
    SMALLEST_MASS,
    check_rows_suffice,
    keep_dying,
    normalised,
    split_leaning,
)
from emfed.models.factor_metric import FactorMetric
from emfed.models.loadings import FactorParameters
from emfed.models.matrices import (
    is_positive_definite,
    outer,
    pack,
    raise_eigenvalues,
    triangle,
    unpack,
)
from emfed.models.mixture import MixtureModel
from emfed.models.naming import column_name, counted
from emfed.models.parameters import (
    Frame,
    InverseWishart,
    check_noise_prior,
    check_shapes,
    common_frame,
    is_constant,
)
from emfed.models.rows import check_rows, combine_moments, moments

LEAST_SPREAD = 1e-9
"""The least variance of the inputs in a direction: less is taken for a combination of others."""


@final
@dataclass(frozen=True)
class RegressionParameters(Parameters):
    """The parameters of a mixture of linear regressions.

    Parameters
    ----------
    weights : array of shape (K,)
        The shares of the components.
    intercepts : array of shape (K,)
        The intercepts.
    coefficients : array of shape (K, p)
        The coefficients of the inputs.
    noise : array of shape (K,)
        The noise variances.

    Examples
    --------
    >>> from emfed.models import RegressionParameters
    >>> RegressionParameters([1.0], [0.5], [[2.0]], [0.1]).lines()
    array([[0.5, 2. ]])
    """

    weights: FloatArray
    intercepts: FloatArray
    coefficients: FloatArray
    noise: FloatArray

    def __post_init__(self) -> None:
        for name, value in self.arrays().items():
            object.__setattr__(self, name, np.asarray(value, dtype=np.float64))

    def lines(self) -> FloatArray:
        """b: intercept and coefficients, ``(..., K, 1 + p)``."""
        return np.concatenate([self.intercepts[..., None], self.coefficients], axis=-1)


@stored("regression-mixture/bound")
@final
@dataclass(frozen=True, eq=False)
class RegressionBound:
    """What is known from the opening exchange; columns in the order of x, then y."""

    frame: Frame
    samples: int
    products: FloatArray
    """The mean of (1, x, y)(1, x, y)^T in the frame."""


@final
@dataclass(frozen=True, eq=False)
class RegressionMetric(Metric):
    """The metric of one column on factors, which are the standardised inputs."""

    layout: Layout
    root: FloatArray
    """L of the covariance L L^T of the inputs of all data."""
    inner: FactorMetric

    @classmethod
    def at(
        cls, params: RegressionParameters, layout: Layout, gram: FloatArray, samples: float
    ) -> Self:
        """At these parameters, with the products of (1, x) of all data."""
        spread = raise_eigenvalues(gram[1:, 1:], LEAST_SPREAD)
        root = np.asarray(np.linalg.cholesky(spread), dtype=np.float64)
        (k, p), column = params.coefficients.shape, (..., None)
        as_factors = FactorParameters(
            params.weights,
            params.intercepts[column],
            (params.coefficients @ root)[:, None, :],
            params.noise[column],
        )
        pieces = {"mass": (), "latent": (p * (p + 1) // 2,), "factor": (p,), "first": (1,)}
        pieces |= {"cross": (p, 1), "squares": (1,)}
        own = Layout(tuple((name, (k, *shape)) for name, shape in pieces.items()))
        return cls(layout, root, FactorMetric.at(as_factors, own, samples))

    @property
    def lightest(self) -> float:
        return self.inner.lightest

    def whiten(self, vectors: FloatArray) -> FloatArray:
        parts = self.layout.split(vectors)
        mass, turn = parts["mass"], np.linalg.inv(self.root)
        packed = np.concatenate([mass[..., None], parts["moments"]], axis=-1)
        products = unpack(packed, len(turn) + 2)
        x, turned = products[..., 1:-1, 1:-1], np.swapaxes(turn, -1, -2)
        parts = {
            "mass": mass,
            "latent": pack(turn @ x @ turned),
            "factor": products[..., 0, 1:-1] @ turned,
            "first": products[..., :1, -1],
            "cross": (products[..., 1:-1, -1] @ turned)[..., None],
            "squares": products[..., -1:, -1],
        }
        return self.inner.whiten(self.inner.layout.join(parts))

    def unwhiten(self, vectors: FloatArray) -> FloatArray:
        parts, turn = self.inner.layout.split(self.inner.unwhiten(vectors)), self.root
        mass, size = parts["mass"], len(turn) + 2
        turned = np.swapaxes(turn, -1, -2)
        products = np.empty((*mass.shape, size, size))
        products[..., 0, 0], products[..., -1, -1] = mass, parts["squares"][..., 0]
        products[..., 1:-1, 1:-1] = turn @ unpack(parts["latent"], size - 2) @ turned
        products[..., 0, 1:-1] = products[..., 1:-1, 0] = parts["factor"] @ turned
        products[..., 0, -1] = products[..., -1, 0] = parts["first"][..., 0]
        cross = parts["cross"][..., 0] @ turned
        products[..., 1:-1, -1] = products[..., -1, 1:-1] = cross
        return self.layout.join({"mass": mass, "moments": pack(products)[..., 1:]})


@stored("regression-mixture")
@final
@dataclass(frozen=True, eq=False)
class RegressionMixture(MixtureModel):
    """A mixture of linear regressions.

    `emfed.regression_mixture` makes one, and says what it takes.

    Examples
    --------
    >>> import emfed
    >>> emfed.regression_mixture(2, target=0).target
    0
    """

    n_components: int
    target: int | str = -1
    noise_floor: float = 1e-6
    weight_concentration: float = 1.0
    ridge: float = 0.0
    noise_prior: InverseWishart | None = None
    bound: RegressionBound | None = None

    def __post_init__(self) -> None:
        check_count("n_components", self.n_components)
        check_range("noise_floor", self.noise_floor, 0, 1, open_high=True)
        check_range("weight_concentration", self.weight_concentration, 1, np.inf, open_high=True)
        check_range("ridge", self.ridge, 0, np.inf, open_high=True)
        if self.noise_prior is not None:
            check_noise_prior(self.noise_prior)

    def among(self, names: Sequence[str]) -> Self:
        """The model for a table with these columns, one of which ``target`` may name."""
        if not isinstance(self.target, str):
            return self
        if self.target not in names:
            raise SettingsError(f"target {self.target!r} is not among the columns {list(names)}.")
        return dataclasses.replace(self, target=list(names).index(self.target))

    @property
    def _place(self) -> int:
        if isinstance(self.target, str):
            raise SettingsError(
                f"target {self.target!r} is the name of a column, and these rows have no names: "
                "give its position."
            )
        return self.target

    @property
    def _known(self) -> RegressionBound:
        return known(self.bound)

    @property
    def n_inputs(self) -> int:
        """The number of columns of x."""
        return len(self._known.frame.origin) - 1

    @property
    def n_features(self) -> int:
        return self.n_inputs + 1

    @cached_property
    def layout(self) -> Layout:
        """``mass``, and ``moments``: the products of (1, x, y) but the first, 1."""
        k = self.n_components
        return Layout((("mass", (k,)), ("moments", (k, self.feature_count))))

    def _order(self, d: int) -> IntArray:
        return np.append(np.delete(np.arange(d), self._place), self._place % d).astype(np.int64)

    def check(self, data: Any, where: str, columns: Names = None, first: int = 0) -> None:
        """Finite numbers in at least two columns, one of them the target."""
        expected = None if self.bound is None else self.n_inputs + 1
        check_rows(data, where, columns, expected, first)
        d = data.shape[1]
        if d < 2 or not -d <= self._place < d:
            raise DataError(
                f"{where}: expected columns of x and a target at position {self.target}; got "
                f"{d} column{'s' if d > 1 else ''}."
            )

    def summary(self, data: Any, weights: Any | None = None) -> dict[str, FloatArray]:
        mean, scatter = moments(data, weights, full=True)
        return {"mean": mean, "scatter": scatter}

    def combine(self, summaries: Summaries, shares: FloatArray) -> dict[str, FloatArray]:
        return combine_moments(summaries, shares)

    def bind(self, summaries: Summaries, counts: IntArray, weights: FloatArray) -> Self:
        """Origin and scale of every column, and the products of all data."""
        samples = check_rows_suffice(self.n_components, counts)
        whole = self.combine(summaries, weights)
        d = len(whole["mean"])
        order = self._order(d)
        scatter = unpack(whole["scatter"], d)
        self._check_inputs(is_constant(whole["mean"], np.diagonal(scatter)))
        frame = common_frame(whole["mean"], np.diagonal(scatter), "diag", self.noise_floor > 0)
        frame = Frame(frame.origin[order], frame.scale[order])  # named in the order of the table
        scatter = scatter[np.ix_(order, order)]
        products = np.zeros((d + 1, d + 1))
        products[0, 0] = 1.0
        products[1:, 1:] = scatter / np.outer(frame.scale, frame.scale)
        bound = RegressionBound(frame, samples, products)
        return dataclasses.replace(self, bound=bound)

    def _check_inputs(self, constant: BoolArray) -> None:
        """Refuse columns of x that the intercept already is, unless a ridge separates them."""
        columns = [j for j in np.flatnonzero(constant).tolist() if j != self._place % len(constant)]
        if columns and not self.ridge:
            many = len(columns) > 1
            raise DataError(
                f"column{'s' * many} {', '.join(map(column_name, columns))}{counted()} "
                f"{'hold' if many else 'holds'} one single value, as the intercept does: drop "
                f"{'them' if many else 'it'}, or set ridge > 0."
            )

    # The E-step.

    @property
    def feature_count(self) -> int:
        width = self.n_inputs + 2
        return width * (width + 1) // 2 - 1

    def features(self, xp: Any, rows: Any) -> Any:
        """x, y and their products, ``(features, m)``."""
        frame = self._known.frame
        order = xp.asarray(self._order(rows.shape[-1]), device=device(rows))
        z = xp.astype(xp.take(xp.matrix_transpose(rows), order, axis=0), xp.float64, copy=False)
        origin = xp.asarray(frame.origin[:, None], device=device(rows))
        z = (z - origin) * xp.asarray(1 / frame.scale[:, None], device=device(rows))
        z = xp.reshape(xp.reshape(z, (-1,)), z.shape)  # row-major: products of whole rows follow
        return xp.concat([z, *(z[j : j + 1, :] * z[j:, :] for j in range(z.shape[0]))], axis=0)

    def natural(self, params: RegressionParameters) -> tuple[FloatArray, FloatArray]:
        """The coefficients of -(y - b . (1, x))^2 / 2v, product by product."""
        lines = params.lines()
        contrast = np.concatenate([-lines, np.ones((*lines.shape[:-1], 1))], axis=-1)
        _, _, diagonal = triangle(contrast.shape[-1])
        quadratic = pack(outer(contrast, contrast)) * np.where(diagonal, -0.5, -1.0)
        quadratic = quadratic / params.noise[..., None]
        constant = np.log(params.weights) - 0.5 * np.log(params.noise) + quadratic[..., 0]
        return constant, quadratic[..., 1:]

    def carrier(self, params: RegressionParameters) -> Callable[[Any, Any], Any]:
        constant = float(-0.5 * np.log(2 * np.pi) - np.log(self._known.frame.scale[-1]))
        return lambda xp, features: constant

    def assemble(self, mass: FloatArray, moments: FloatArray, extra: Any = None) -> FloatArray:
        return self.layout.join({"mass": mass, "moments": moments})

    # The M-step.

    def _products(self, statistics: FloatArray) -> tuple[FloatArray, FloatArray]:
        """mass and the matrices of products, ``(..., K, p + 2, p + 2)``."""
        parts = self.layout.split(np.asarray(statistics, dtype=np.float64))
        mass = parts["mass"]
        packed = np.concatenate([mass[..., None], parts["moments"]], axis=-1)
        return mass, unpack(packed, self.n_inputs + 2)

    def _penalties(self) -> tuple[FloatArray, float, float]:
        """The ridge on each coefficient, and what priors add to count and scatter; over N."""
        n, p = self._known.samples, self.n_inputs
        ridge = np.append(0.0, np.full(p, self.ridge / n))
        count = p / n if self.ridge else 0.0
        if self.noise_prior is None:
            return ridge, count, 0.0
        scale = float(self.noise_prior.scale)
        return ridge, count + (self.noise_prior.dof + 2) / n, scale / n

    def _raw(self, statistics: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Lines and noise before the floor."""
        mass, products = self._products(statistics)
        ridge, count, extra = self._penalties()
        gram = products[..., :-1, :-1] + np.diag(ridge)
        cross = products[..., :-1, -1]
        lines: FloatArray = np.asarray(np.linalg.solve(gram, cross[..., None])[..., 0])
        scatter = products[..., -1, -1] - (lines * cross).sum(axis=-1)
        return lines, (scatter + extra) / (mass + count)

    def maximize(self, statistics: FloatArray) -> RegressionParameters:
        """T(s): least squares in each component."""
        lines, noise = self._raw(statistics)
        pseudo = (self.weight_concentration - 1) / self._known.samples
        weights = normalised(statistics[..., : self.n_components], pseudo)
        noise = np.maximum(noise, self.noise_floor) if self.noise_floor else noise
        return RegressionParameters(weights, lines[..., 0], lines[..., 1:], noise)

    def inside(self, statistics: FloatArray) -> bool:
        """Positive masses, x that vary in every direction, no noise below minus the floor."""
        if not np.all(np.isfinite(statistics)):
            return False
        mass, products = self._products(statistics)
        if np.any(mass < SMALLEST_MASS):
            return False
        ridge, *_ = self._penalties()
        gram = (products[..., :-1, :-1] + np.diag(ridge)) / mass[..., None, None]
        if not is_positive_definite(gram - 1e-12 * np.eye(gram.shape[-1])):
            return False
        _, noise = self._raw(statistics)
        return bool(np.all(noise > (-self.noise_floor or 1e-14)))

    def protect(self, before: FloatArray, after: FloatArray) -> FloatArray:
        """Components that explain less than one sample do not hold up the others."""
        return keep_dying(self.layout, before, after, self._known.samples)

    def split(self, statistics: FloatArray, empty: BoolArray, attempt: int) -> FloatArray:
        return split_leaning(self.layout, statistics, empty, attempt, self.inside)

    def held_up(self, params: RegressionParameters) -> tuple[HeldUp, ...]:
        """Components whose rows lie on their line."""
        low = np.flatnonzero(params.noise <= NEAR_FLOOR * self.noise_floor).tolist()
        column = (int(self._order(self.n_features)[-1]),)
        return tuple(HeldUp((k,), float(params.weights[k]), column, on_a_line=True) for k in low)

    def metric(self, params: RegressionParameters) -> RegressionMetric:
        known = self._known
        return RegressionMetric.at(params, self.layout, known.products[:-1, :-1], known.samples)

    def surrogate(self, statistics: FloatArray, params: RegressionParameters) -> FloatArray:
        """psi + R - <s, phi> in the frame's units."""
        parts = self.layout.split(np.asarray(statistics, dtype=np.float64))
        constant, slopes = self.natural(params)
        value = -(parts["mass"] * constant).sum(axis=-1)
        return value - (parts["moments"] * slopes).sum(axis=(-1, -2)) + self.penalty(params)

    def penalty(self, params: RegressionParameters) -> float:
        """Dirichlet on weights, normal on coefficients given the noise, inverse-Wishart on that."""
        pseudo = (self.weight_concentration - 1) / self._known.samples
        ridge, count, extra = self._penalties()
        pull = (ridge * params.lines() ** 2).sum(axis=-1)
        value = 0.5 * float((count * np.log(params.noise) + (pull + extra) / params.noise).sum())
        return value - pseudo * float(np.log(params.weights).sum())

    def closed_form(self) -> FloatArray | None:
        """One regression is least squares, which the products of all rows say."""
        if self.n_components > 1:
            return None
        packed = pack(self._known.products)[None]
        return self.layout.join({"mass": np.ones(1), "moments": packed[:, 1:]})

    # Starts and units.

    def start(self, seed: int) -> RegressionParameters:
        """Lines around that of least squares on all data; equal weights."""
        k, p = self.n_components, self.n_inputs
        products = self._known.products
        pooled = np.linalg.lstsq(products[:-1, :-1], products[:-1, -1], rcond=None)[0]
        draws = normal_row(seed, 0, Purpose.START, k * (p + 1))
        lines = pooled + 0.5 * draws.reshape(k, p + 1)
        return RegressionParameters(np.full(k, 1 / k), lines[:, 0], lines[:, 1:], np.ones(k))

    def statistics_of(self, params: RegressionParameters) -> FloatArray:
        """Every component is taken to see the x of all data."""
        gram = self._known.products[:-1, :-1]
        lines = params.lines()
        fitted = lines @ gram
        size = self.n_inputs + 2
        products = np.empty((*lines.shape[:-1], size, size))
        products[..., :-1, :-1] = gram
        products[..., :-1, -1] = products[..., -1, :-1] = fitted
        products[..., -1, -1] = (fitted * lines).sum(axis=-1) + params.noise
        packed = params.weights[..., None] * pack(products)
        return self.layout.join({"mass": params.weights, "moments": packed[..., 1:]})

    def to_user(self, params: RegressionParameters) -> RegressionParameters:
        """Coefficients in units of y per unit of x."""
        origin, scale = self._known.frame.origin, self._known.frame.scale
        slopes = params.coefficients * (scale[-1] / scale[:-1])
        shift = origin[-1] - (slopes * origin[:-1]).sum(axis=-1)
        intercepts = params.intercepts * scale[-1] + shift
        return RegressionParameters(
            params.weights, intercepts, slopes, params.noise * scale[-1] ** 2
        )

    def from_user(self, params: RegressionParameters) -> RegressionParameters:
        """Check parameters given in the user's units and bring them into the frame."""
        check_type("start", params, RegressionParameters, "RegressionParameters(weights, ...)")
        k, p = self.n_components, self.n_inputs
        shapes = {"weights": (k,), "intercepts": (k,), "coefficients": (k, p), "noise": (k,)}
        check_shapes(params, shapes)
        if np.any(params.noise <= 0) or np.any(params.weights <= 0):
            raise SettingsError("start: weights and noise variances must be positive.")
        origin, scale = self._known.frame.origin, self._known.frame.scale
        shift = origin[-1] - (params.coefficients * origin[:-1]).sum(axis=-1)
        intercepts = (params.intercepts - shift) / scale[-1]
        slopes = params.coefficients * (scale[:-1] / scale[-1])
        return RegressionParameters(
            params.weights, intercepts, slopes, params.noise / scale[-1] ** 2
        )

    def free_parameters(self) -> int:
        """Weights, and a line and a noise variance for each component; x has no distribution."""
        return self.n_components - 1 + self.n_components * (self.n_inputs + 2)

    def portrait(self, params: RegressionParameters, names: Sequence[str]) -> Portrait:
        rest = list(names)
        what = rest.pop(self._place)
        rows = [params.intercepts, *params.coefficients.T, np.sqrt(params.noise)]
        labels = [f"{what}: intercept", *(f"per unit of {n}" for n in rest), "noise (sd)"]
        cells = [alike(np.ravel(row)) for row in rows]
        return Portrait(params.weights, labels, cells, np.empty(0, dtype=np.int64))

    def words(self) -> ModelWords:
        if self.n_components == 1:
            return ModelWords("linear regression")
        return ModelWords(f"mixture of {plural(self.n_components, 'linear regression')}")

    def describe(self) -> dict[str, Any]:
        prior = self.noise_prior
        return {
            "model": "regression-mixture",
            "n_components": self.n_components,
            "target": self.target,
            "noise_floor": self.noise_floor,
            "weight_concentration": self.weight_concentration,
            "ridge": self.ridge,
            "noise_prior": prior and prior.describe(),
        }


@register_model("regression-mixture")
def regression_mixture(
    n_components: int,
    target: int | str = -1,
    *,
    noise_floor: float = 1e-6,
    weight_concentration: float = 1.0,
    ridge: float = 0.0,
    noise_prior: InverseWishart | None = None,
) -> RegressionMixture:
    """Make a mixture of linear regressions of one column on all others.

    Parameters
    ----------
    n_components : int
        The number of components.
    target : int or str
        The column that is explained: its position, or its name where rows have names.
    noise_floor : float
        The least noise variance, as a share of the variance of the target.
    weight_concentration : float
        The concentration, at least 1, of a symmetric Dirichlet prior on the weights; 1 is none.
    ridge : float
        A normal prior of variance noise / ridge on each standardised coefficient; 0 is none.
    noise_prior : InverseWishart or None
        A prior, in one dimension, on the noise; its scale is a number.

    Returns
    -------
    RegressionMixture
        The model, not bound to data.

    Examples
    --------
    >>> import numpy as np
    >>> import emfed
    >>> x = np.arange(12.0)
    >>> rows = np.column_stack([x, 1 + 2 * x + np.tile([0.1, -0.1], 6)])
    >>> result = emfed.fit(emfed.regression_mixture(1), [rows[:6], rows[6:]])
    >>> result.params.coefficients.round(1)
    array([[2.]])
    """
    options = (noise_floor, weight_concentration, ridge, InverseWishart.read(noise_prior))
    place = target if isinstance(target, str) else operator.index(target)
    return RegressionMixture(n_components, place, *options)
