"""Factor analysis, probabilistic PCA, and mixtures of them.

    y = mu + L z + e,   z ~ N(0, I_r),   e ~ N(0, diag(psi))     (PCA: all psi equal)

in each component. Statistics are, times responsibility: ``mass``, ``latent`` (z z^T), ``factor``
(z), ``first`` (y), ``cross`` (y z^T) and ``squares`` (y^2). T is the regression of y on (z, 1):

    [L mu] = [cross first] G^-1,   G = [[latent, factor], [factor^T, mass]],
    psi = (squares - diag([L mu] [cross first]^T)) / mass.

Factors are known up to a rotation. In the user's units L^T psi^-1 L is diagonal and falling, and
the largest loading of each factor is positive; the statistics keep the rotation they started with.
"""

from __future__ import annotations

import dataclasses
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
    ModelWords,
    Names,
    Summaries,
    plural,
)
from emfed.core.registry import register_model, stored
from emfed.core.streams import Purpose, normal_row
from emfed.core.wording import Setting, Wording
from emfed.models.component_summaries import Portrait, factor_portrait
from emfed.models.components import (
    NEAR_FLOOR,
    SMALLEST_MASS,
    check_rows_suffice,
    held_in,
    keep_dying,
    normalised,
    split_leaning,
)
from emfed.models.devices import (
    MOST_COMPONENTS,
    Features,
    Pass,
    Sums,
)
from emfed.models.factor_metric import FactorMetric
from emfed.models.factor_solver import Penalty, fit_components, fit_factors
from emfed.models.loadings import FactorParameters, FactorPosterior, rotate
from emfed.models.matrices import is_positive_definite, outer, pack, triangle, unpack
from emfed.models.mixture import MixtureEStep, blocks, to_numpy
from emfed.models.parameters import (
    Frame,
    GaussianParameters,
    InverseWishart,
    check_noise_prior,
    check_shapes,
    common_frame,
    is_constant,
)
from emfed.models.rows import check_rows, combine_moments, moments
from emfed.models.sampling import sample_gaussian

LEAST_FACTOR, LEAST_EXPANSION = 1e-6, 1e-5
"""The least variance of a factor that is made 1 (less is rounding, or noise), and the nats a row
that doing so must gain."""


@stored("factor-mixture")
@final
@dataclass(frozen=True, eq=False)
class FactorMixture(MixtureEStep):
    """A mixture of factor analysers.

    `emfed.factor_analysis` and `emfed.ppca` make one, and say what it takes.

    Examples
    --------
    >>> import emfed
    >>> emfed.factor_analysis(2).isotropic, emfed.ppca(2).isotropic
    (False, True)
    """

    n_factors: int
    n_components: int = 1
    isotropic: bool = False
    noise_floor: float = 1e-6
    weight_concentration: float = 1.0
    noise_prior: InverseWishart | None = None
    # Binding fills in what follows.
    frame: Frame | None = None
    samples: int = 0
    second_moment: FloatArray = dataclasses.field(default_factory=lambda: np.empty(0))
    """That of all rows about the mean, in the frame: all that one analyser needs."""

    def __post_init__(self) -> None:
        check_count("n_factors", self.n_factors)
        check_count("n_components", self.n_components)
        check_range("noise_floor", self.noise_floor, 0, 1, open_high=True)
        check_range("weight_concentration", self.weight_concentration, 1, np.inf, open_high=True)
        if self.noise_prior is not None:
            check_noise_prior(self.noise_prior)

    @property
    def _frame(self) -> Frame:
        return known(self.frame)

    @property
    def n_features(self) -> int:
        return len(self._frame.origin)

    @cached_property
    def layout(self) -> Layout:
        """mass, latent, factor, first, cross, squares."""
        k, d, r = self.n_components, self.n_features, self.n_factors
        return Layout(
            (
                ("mass", (k,)),
                ("latent", (k, r * (r + 1) // 2)),
                ("factor", (k, r)),
                ("first", (k, d)),
                ("cross", (k, r, d)),
                ("squares", (k, d)),
            )
        )

    def check(self, data: Any, where: str, columns: Names = None, first: int = 0) -> None:
        """Finite numbers, and more columns than factors."""
        expected = None if self.frame is None else self.n_features
        check_rows(data, where, columns, expected, first)
        if self.n_factors >= data.shape[1]:
            raise DataError(
                Wording(
                    "{}: {} needs more columns than that; got {}.",
                    *(where, Setting("n_factors", self.n_factors), data.shape[1]),
                )
            )

    def summary(self, data: Any, weights: Any | None = None) -> dict[str, FloatArray]:
        """Mean and variances; of one analyser alone also covariances, which say all."""
        products = self.n_components == 1 and (self.frame is None or self.second_moment.size > 0)
        mean, scatter = moments(data, weights, full=products)
        return {"mean": mean, "scatter": scatter}

    def combine(self, summaries: Summaries, shares: FloatArray) -> dict[str, FloatArray]:
        return combine_moments(summaries, shares)

    def bind(self, summaries: Summaries, counts: IntArray, weights: FloatArray) -> Self:
        """Common origin and scale: one scale for all columns where the noise is isotropic."""
        samples = check_rows_suffice(self.n_components, counts)
        whole = self.combine(summaries, weights)
        d, kind = len(whole["mean"]), "spherical" if self.isotropic else "diag"
        products = len(whole["scatter"]) != d
        moment = unpack(whole["scatter"], d) if products else whole["scatter"]
        spread = np.diagonal(moment) if products else moment
        frame = common_frame(whole["mean"], spread, kind, floored=self.noise_floor > 0)
        moment = moment / np.outer(frame.scale, frame.scale) if products else np.empty(0)
        return dataclasses.replace(self, frame=frame, samples=samples, second_moment=moment)

    # The E-step.

    @property
    def row_width(self) -> int:
        """Columns, and the factors and the logit of each component."""
        return self.n_features + self.n_components * (self.n_factors + 1)

    def logits(
        self, xp: Any, data: Any, params: FactorParameters
    ) -> Callable[[Any], tuple[Any, Any]]:
        """Features are rows in the frame ``(..., d, m)`` and v = U y - u ``(..., K, r, m)``.

        Logits are those of log p(y, component) in the frame.
        """
        where, at = device(data), FactorPosterior.at(params)
        k, r, d = self.n_components, self.n_factors, self.n_features
        origin = xp.asarray(self._frame.origin[:, None], device=where)
        inverse = xp.asarray(1 / self._frame.scale[:, None], device=where)
        flat = at.white.reshape(*at.white.shape[:-3], k * r, d)
        white = xp.asarray(flat, device=where)
        offset = xp.asarray(at.offset[..., None], device=where)
        precision = 1 / params.noise
        linear = xp.asarray(params.means * precision, device=where)
        quadratic = xp.asarray(-0.5 * precision, device=where)
        constant = np.log(params.weights) - 0.5 * (
            at.log_det + (params.means**2 * precision).sum(axis=-1) + d * np.log(2 * np.pi)
        )
        constants = xp.asarray(constant[..., None], device=where)

        def joint(rows: Any) -> tuple[Any, Any]:
            y = (xp.matrix_transpose(xp.astype(rows, xp.float64)) - origin) * inverse
            v = white @ y
            v = xp.reshape(v, (*v.shape[:-2], k, r, v.shape[-1])) - offset
            logits = linear @ y + quadratic @ (y * y) + constants + 0.5 * xp.sum(v * v, axis=-2)
            return (y, v), logits

        return joint

    def carrier(self, params: FactorParameters) -> Callable[[Any, Any], Any]:
        """The frame's units to the user's."""
        constant = float(-np.log(self._frame.scale).sum())
        return lambda xp, features: constant

    def moments(self, xp: Any, shares: Any, features: Any) -> Any:
        """Sums of v v^T, v, y, v y^T and y^2, flat."""
        y, v = features
        rows, weighted = xp.matrix_transpose(y), v * shares[..., None, :]
        flat = xp.reshape(weighted, (*weighted.shape[:-3], -1, weighted.shape[-1])) @ rows
        lead = shares.shape[:-1]
        parts = (
            xp.reshape(weighted @ xp.matrix_transpose(v), (*lead, -1)),
            xp.sum(weighted, axis=-1),
            shares @ rows,
            xp.reshape(flat, (*lead, -1)),
            shares @ (rows * rows),
        )
        return xp.concat(parts, axis=-1)

    def assemble(self, mass: FloatArray, moments: FloatArray, extra: Any = None) -> FloatArray:
        """The layout of the statistics, with v in place of z."""
        d, r, lead = self.n_features, self.n_factors, mass.shape
        ends = np.cumsum([r * r, r, d, r * d])
        latent, factor, first, cross, squares = np.split(moments, ends, axis=-1)
        return self.layout.join(
            {
                "mass": mass,
                "latent": pack(latent.reshape(*lead, r, r)),
                "factor": factor,
                "first": first,
                "cross": cross.reshape(*lead, r, d),
                "squares": squares,
            }
        )

    def _statistics(
        self,
        data: Any,
        params: FactorParameters,
        weights: Any | None,
        uniforms: FloatArray | None,
        tally: Any = None,
    ) -> FloatArray:
        """Moments of v turned into those of z = R v, whose covariance is R R^T."""
        statistics = super()._statistics(data, params, weights, uniforms, tally)
        root, parts = FactorPosterior.at(params).root, self.layout.split(statistics)
        turned = np.swapaxes(root, -1, -2)
        latent = root @ unpack(parts["latent"], self.n_factors) @ turned
        latent = latent + parts["mass"][..., None, None] * (root @ turned)
        factor = (root @ parts["factor"][..., None])[..., 0]
        moved = {"latent": pack(latent), "factor": factor, "cross": root @ parts["cross"]}
        return self.layout.join({**parts, **moved})

    # Rows on a GPU: the E-step of a Gaussian mixture with covariances L L^T + psi.

    @property
    def sweeps(self) -> bool:
        return self.n_components <= MOST_COMPONENTS

    def as_pass(self, params: FactorParameters, whole: bool = False) -> Pass:
        """Columns and their products, with the natural parameters of the Gaussian of y."""
        precision: FloatArray = np.asarray(np.linalg.inv(params.covariances()), dtype=np.float64)
        linear = (precision @ params.means[..., None])[..., 0]
        c = np.log(params.weights) - 0.5 * (
            FactorPosterior.at(params).log_det
            + (linear * params.means).sum(axis=-1)
            + self.n_features * np.log(2 * np.pi)
        )
        _, _, diagonal = triangle(self.n_features)
        quadratic = pack(precision) * np.where(diagonal, -0.5, -1.0)
        features = Features(self._frame.origin, self._frame.scale, "products")
        return Pass(features, c, np.concatenate([linear, quadratic], axis=-1))

    def folded(self, sums: Sums, params: FactorParameters) -> FloatArray:
        """Moments of v = U y - u from those of y and y y^T."""
        at, d, mass = FactorPosterior.at(params), self.n_features, sums.mass
        first, second = sums.moments[..., :d], unpack(sums.moments[..., d:], d)
        u, across = at.offset, np.swapaxes(at.white, -1, -2)
        moved = (at.white @ first[..., None])[..., 0]
        mixed = outer(moved, u)
        latent = at.white @ second @ across - mixed - np.swapaxes(mixed, -1, -2)
        latent = latent + mass[..., None, None] * outer(u, u)
        cross = at.white @ second - outer(np.broadcast_to(u, moved.shape), first)
        squares = np.diagonal(second, axis1=-2, axis2=-1)
        lead = mass.shape
        factor = moved - mass[..., None] * u
        parts = (latent.reshape(*lead, -1), factor, first, cross.reshape(*lead, -1), squares)
        return np.concatenate(parts, axis=-1)

    def factors(self, data: Any, params: FactorParameters) -> FloatArray:
        """E[z | row, component] in the rotation of `to_user`, ``(..., rows, K, r)``."""
        loadings = self.to_user(params).loadings / self._frame.scale[:, None]
        turned = dataclasses.replace(params, loadings=loadings)
        root, logits = FactorPosterior.at(turned).root, self.logits(np, data, turned)
        parts = []
        for rows, _ in blocks(to_numpy(data), None, self.row_width):
            (_, v), _ = logits(rows)
            parts.append(np.moveaxis(root @ v, -1, -3))
        return np.concatenate(parts, axis=-3)

    # The M-step.

    def _regression(
        self, statistics: FloatArray
    ) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
        """mass, G, [cross first] ``(..., K, r + 1, d)`` and squares."""
        parts = self.layout.split(np.asarray(statistics, dtype=np.float64))
        factor = parts["factor"][..., None]
        top = np.concatenate([unpack(parts["latent"], self.n_factors), factor], axis=-1)
        last = np.concatenate([np.swapaxes(factor, -1, -2), parts["mass"][..., None, None]], -1)
        gram = np.concatenate([top, last], axis=-2)
        both = np.concatenate([parts["cross"], parts["first"][..., None, :]], axis=-2)
        return parts["mass"], gram, both, parts["squares"]

    @cached_property
    def _floor(self) -> float:
        """The least noise variance in the frame.

        One scale serves all columns of PCA: a share of their mean variance would be more than the
        whole variance of a column beside one in units a thousand times as large.
        """
        if not self.isotropic or self.second_moment.size == 0:
            return self.noise_floor
        spread = np.diagonal(self.second_moment)
        varies = spread[~is_constant(self._frame.origin / self._frame.scale, spread)]
        return self.noise_floor * float(varies.min(initial=1.0))

    def _prior(self) -> tuple[float, float]:
        """What the prior adds to the count and to the scatter of each noise variance; over N."""
        if self.noise_prior is None:
            return 0.0, 0.0
        scale = float(self.noise_prior.scale)
        return (self.noise_prior.dof + 2) / self.samples, scale / self.samples

    def _raw(self, statistics: FloatArray) -> tuple[FloatArray, FloatArray]:
        """[L mu]^T and noise before the floor."""
        mass, gram, both, squares = self._regression(statistics)
        solution: FloatArray = np.asarray(np.linalg.solve(gram, both), dtype=np.float64)
        scatter = squares - (solution * both).sum(axis=-2)
        count, extra = self._prior()
        if not self.isotropic:
            return solution, (scatter + extra) / (mass + count)[..., None]
        d = self.n_features
        whole = (scatter.sum(axis=-1) + extra) / (mass * d + count)
        return solution, np.repeat(whole[..., None], d, axis=-1)

    def maximize(self, statistics: FloatArray) -> FactorParameters:
        """T(s): a regression, exact."""
        mass = statistics[..., : self.n_components]
        solution, noise = self._raw(statistics)
        r = self.n_factors
        loadings = np.swapaxes(solution[..., :r, :], -1, -2)
        weights = normalised(mass, (self.weight_concentration - 1) / self.samples)
        noise = np.maximum(noise, self._floor) if self.noise_floor else noise
        return FactorParameters(weights, solution[..., r, :], loadings, noise)

    def inside(self, statistics: FloatArray) -> bool:
        """Positive masses, G positive definite, and no noise below minus the floor."""
        if not np.all(np.isfinite(statistics)):
            return False
        if np.any(statistics[..., : self.n_components] < SMALLEST_MASS):
            return False
        mass, gram, _, _ = self._regression(statistics)
        if not is_positive_definite(gram / mass[..., None, None] - 1e-12 * np.eye(gram.shape[-1])):
            return False
        _, noise = self._raw(statistics)
        return bool(np.all(noise > (-self._floor or 1e-14)))

    def protect(self, before: FloatArray, after: FloatArray) -> FloatArray:
        """Components that explain less than one sample do not hold up the others."""
        return keep_dying(self.layout, before, after, self.samples)

    def reduced(self, statistics: FloatArray) -> FloatArray:
        """The same rows with factors of mean 0 and covariance I in every component.

        T of it is the M-step of parameter-expanded EM (Liu, Rubin and Wu 1998): where noise is
        small, rows tell their factors, and EM alone hardly moves what scales them.
        """
        parts = self.layout.split(statistics)
        mass, mean = parts["mass"], parts["factor"] / parts["mass"][:, None]
        spread = unpack(parts["latent"], self.n_factors) / mass[:, None, None] - outer(mean, mean)
        values, vectors = np.linalg.eigh(spread)
        if not np.all(values > LEAST_FACTOR):
            return statistics
        gain = 0.5 * mass @ ((values - 1 - np.log(values)).sum(axis=-1) + (mean**2).sum(axis=-1))
        if gain < LEAST_EXPANSION:
            return statistics
        root = (vectors / np.sqrt(values)[:, None, :]) @ np.swapaxes(vectors, -1, -2)
        moved = {
            "latent": pack(np.eye(self.n_factors) * mass[:, None, None]),
            "factor": np.zeros_like(mean),
            "cross": root @ (parts["cross"] - outer(mean, parts["first"])),
        }
        return self.layout.join({**parts, **moved})

    def split(self, statistics: FloatArray, empty: BoolArray, attempt: int) -> FloatArray:
        return split_leaning(self.layout, statistics, empty, attempt, self.inside)

    def held_up(self, params: FactorParameters) -> tuple[HeldUp, ...]:
        """Components without spread in some direction, if there are several.

        Noise at the floor alone is none: factors explain the column there (a Heywood case).
        """
        if self.n_components == 1 or not self.noise_floor:
            return ()
        means, low = self.to_user(params).means, NEAR_FLOOR * self.noise_floor
        return held_in(params.weights, means, self._frame.scale, params.covariances(), low)

    def surrogate(self, statistics: FloatArray, params: FactorParameters) -> FloatArray:
        """psi + R - <s, phi> in the frame's units, up to a constant."""
        mass, gram, both, squares = self._regression(statistics)
        w = np.concatenate([params.loadings, params.means[..., None]], axis=-1)  # (..., K, d, r+1)
        crossed = (w * np.swapaxes(both, -1, -2)).sum(axis=-1)
        scatter = squares - 2 * crossed + ((w @ gram) * w).sum(axis=-1)
        value = (mass[..., None] * np.log(params.noise) + scatter / params.noise).sum(axis=(-1, -2))
        return 0.5 * value - (mass * np.log(params.weights)).sum(axis=-1) + self.penalty(params)

    def penalty(self, params: FactorParameters) -> float:
        """Dirichlet on the weights, inverse-Wishart in one dimension on each noise variance."""
        pseudo = (self.weight_concentration - 1) / self.samples
        count, extra = self._prior()
        noise = params.noise[..., :1] if self.isotropic else params.noise
        value = 0.5 * float((count * np.log(noise) + extra / noise).sum())
        return value - pseudo * float(np.log(params.weights).sum())

    def metric(self, params: FactorParameters) -> FactorMetric:
        return FactorMetric.at(params, self.layout, self.samples)

    def closed_form(self) -> FloatArray | None:
        """One analyser: fitted to the covariance, then its E-step from the covariance."""
        if self.n_components > 1 or self.second_moment.size == 0:
            return None
        whole, r = self.second_moment, self.n_factors
        solve = fit_components if self.isotropic else fit_factors
        loadings, noise = solve(whole, r, self._floor, Penalty(*self._prior()))
        spread = loadings @ loadings.T + np.diag(noise)
        gain = np.linalg.solve(spread, loadings).T  # E[z | y] = gain y
        cross = gain @ whole
        parts = {
            "mass": np.ones(1),
            "latent": pack(np.eye(r) - gain @ loadings + cross @ gain.T)[None],
            "factor": np.zeros((1, r)),
            "first": np.zeros((1, self.n_features)),
            "cross": cross[None],
            "squares": np.diagonal(whole)[None],
        }
        return self.layout.join(parts)

    # Starts and units.

    def start(self, seed: int) -> FactorParameters:
        """Random loadings that explain half of the variances; means spread if there are several."""
        k, d, r = self.n_components, self.n_features, self.n_factors
        draws = normal_row(seed, 0, Purpose.START, k * d * (r + 1))
        means, loadings = draws[: k * d].reshape(k, d), draws[k * d :].reshape(k, d, r)
        means = means if k > 1 else np.zeros_like(means)
        noise = np.full((k, d), 0.5)
        return FactorParameters(np.full(k, 1 / k), means, loadings * np.sqrt(0.5 / r), noise)

    def statistics_of(self, params: FactorParameters) -> FloatArray:
        """E[s(y, z)]: y z^T has mean L, z z^T the identity."""
        weights, r = params.weights, self.n_factors
        w = weights[..., None]
        squares = params.means**2 + (params.loadings**2).sum(axis=-1) + params.noise
        identity = np.broadcast_to(pack(np.eye(r)), (*weights.shape, r * (r + 1) // 2))
        parts = {
            "mass": weights,
            "latent": w * identity,
            "factor": np.zeros((*weights.shape, r)),
            "first": w * params.means,
            "cross": w[..., None] * np.swapaxes(params.loadings, -1, -2),
            "squares": w * squares,
        }
        return self.layout.join(parts)

    def to_user(self, params: FactorParameters) -> FactorParameters:
        """The user's units, and the documented rotation."""
        origin, scale = self._frame.origin, self._frame.scale
        loadings = rotate(params.loadings * scale[:, None], params.noise * scale**2)
        means = params.means * scale + origin
        return FactorParameters(params.weights, means, loadings, params.noise * scale**2)

    def from_user(self, params: FactorParameters) -> FactorParameters:
        """Check parameters given in the user's units and bring them into the frame."""
        check_type("start", params, FactorParameters, "FactorParameters(weights, means, ...)")
        k, d, r = self.n_components, self.n_features, self.n_factors
        shapes = {"weights": (k,), "means": (k, d), "loadings": (k, d, r), "noise": (k, d)}
        check_shapes(params, shapes)
        if np.any(params.noise <= 0) or np.any(params.weights <= 0):
            raise SettingsError("start: weights and noise variances must be positive.")
        origin, scale = self._frame.origin, self._frame.scale
        noise = params.noise / scale**2
        if self.isotropic:
            noise = np.repeat(noise.mean(axis=-1, keepdims=True), d, axis=-1)
        loadings = params.loadings / scale[:, None]
        return FactorParameters(params.weights, (params.means - origin) / scale, loadings, noise)

    def free_parameters(self) -> int:
        """Weights, means, loadings up to a rotation, and noise."""
        k, d, r = self.n_components, self.n_features, self.n_factors
        loadings = d * r - r * (r - 1) // 2
        return k - 1 + k * (d + loadings + (1 if self.isotropic else d))

    def sample(
        self, params: FactorParameters, count: int, seed: int
    ) -> tuple[FloatArray, IntArray]:
        """Rows of the Gaussian mixture that this is once the factors are integrated out."""
        user = self.to_user(params)
        whole = GaussianParameters(user.weights, user.means, user.covariances())
        return sample_gaussian(whole, "full", count, seed)

    def portrait(self, params: FactorParameters, names: Sequence[str]) -> Portrait:
        return factor_portrait(params, names)

    def words(self) -> ModelWords:
        factors, parts = plural(self.n_factors, "factor"), self.n_components
        if parts == 1:
            one = "probabilistic PCA" if self.isotropic else "factor analysis"
            return ModelWords(f"{one} with {factors}")
        several = "probabilistic PCA" if self.isotropic else "factor analyser"
        return ModelWords(f"mixture of {plural(parts, several)} with {factors} each")

    def describe(self) -> dict[str, Any]:
        prior = self.noise_prior
        return {
            "model": "ppca" if self.isotropic else "factor-analysis",
            "n_factors": self.n_factors,
            "n_components": self.n_components,
            "noise_floor": self.noise_floor,
            "weight_concentration": self.weight_concentration,
            "noise_prior": prior and prior.describe(),
        }


@register_model("factor-analysis")
def factor_analysis(
    n_factors: int,
    n_components: int = 1,
    *,
    noise_floor: float = 1e-6,
    weight_concentration: float = 1.0,
    noise_prior: InverseWishart | None = None,
) -> FactorMixture:
    """Make factor analysis, or with ``n_components`` > 1 a mixture of factor analysers.

    Parameters
    ----------
    n_factors : int
        The number of factors, fewer than columns.
    n_components : int
        The number of components.
    noise_floor : float
        The least noise variance, as a share of the variance of its column.
    weight_concentration : float
        The concentration, at least 1, of a symmetric Dirichlet prior on the weights; 1 is none.
    noise_prior : InverseWishart or None
        A prior, in one dimension, on each noise variance; its scale is a number.

    Returns
    -------
    FactorMixture
        The model, not bound to data.

    Examples
    --------
    >>> import numpy as np
    >>> import emfed
    >>> rows = np.sin(np.outer(np.arange(40), [1, 2, 5])) @ [[2, 1, 0], [0, 1, 0], [0, 0, 1]]
    >>> result = emfed.fit(emfed.factor_analysis(1), [rows[:20], rows[20:]])
    >>> result.params.loadings.shape
    (1, 3, 1)
    """
    options = (noise_floor, weight_concentration, InverseWishart.read(noise_prior))
    return FactorMixture(n_factors, n_components, False, *options)


@register_model("ppca")
def ppca(
    n_factors: int,
    n_components: int = 1,
    *,
    noise_floor: float = 1e-6,
    weight_concentration: float = 1.0,
    noise_prior: InverseWishart | None = None,
) -> FactorMixture:
    """Make probabilistic PCA, or a mixture of them: factors and one noise variance for all.

    Parameters
    ----------
    n_factors : int
        The number of factors, fewer than columns.
    n_components : int
        The number of components.
    noise_floor : float
        The least noise variance, as a share of the variance of its column.
    weight_concentration : float
        The concentration, at least 1, of a symmetric Dirichlet prior on the weights; 1 is none.
    noise_prior : InverseWishart or None
        A prior, in one dimension, on each noise variance; its scale is a number.

    Returns
    -------
    FactorMixture
        The model, not bound to data.

    Examples
    --------
    >>> import emfed
    >>> emfed.ppca(2).describe()["model"]
    'ppca'
    """
    options = (noise_floor, weight_concentration, InverseWishart.read(noise_prior))
    return FactorMixture(n_factors, n_components, True, *options)
