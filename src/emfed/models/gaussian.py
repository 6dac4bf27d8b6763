"""Gaussian mixtures: what the five covariance types share (Appendix F.1).

Statistics are ``mass`` (mean responsibilities), ``first`` (responsibility times y) and, except
for ``known`` and ``tied``, ``second`` (responsibility times the squares or products of y). T
follows from them alone, with two constants from the opening exchange: the number of samples,
which scales priors, and for ``tied`` the weighted second moment of all data (reading: the same
w_i as everywhere, or the covariance may leave the positive cone).
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Self

import numpy as np
from array_api_compat import device

from emfed.core.errors import SettingsError, check_count, check_range, check_type, known
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
from emfed.core.registry import stored
from emfed.core.streams import Purpose, normal_row
from emfed.models.clusters import Clusters
from emfed.models.component_summaries import Portrait, normal_portrait
from emfed.models.components import (
    NEAR_FLOOR,
    SMALLEST_MASS,
    check_rows_suffice,
    halved,
    keep_dying,
)
from emfed.models.devices import MOST_COMPONENTS, Features, Pass, Ragged, Second, sweep
from emfed.models.matrices import axes, outer, pack, triangle, unpack
from emfed.models.metric import GaussianMetric
from emfed.models.mixture import MixtureModel
from emfed.models.parameters import (
    Frame,
    GaussianParameters,
    InverseWishart,
    check_start,
    common_frame,
)
from emfed.models.rows import check_rows, combine_moments, moments
from emfed.models.sampling import covariance_parameters, sample_gaussian

APART = 0.6
"""How far halves of a component lie from its mean, in its standard deviations: of a component that
is Gaussian they lose less than a thousandth of a nat for each of its rows."""


@stored("gaussian-mixture/bound")
@dataclass(frozen=True, eq=False)
class BoundGaussian:
    """What is known from the opening exchange."""

    frame: Frame
    samples: int
    second_moment: FloatArray


@dataclass(frozen=True, eq=False)
class GaussianMixture(MixtureModel):
    """A Gaussian mixture: what the covariance types share.

    `emfed.gaussian_mixture` makes one, and says what it takes.

    Examples
    --------
    >>> import emfed
    >>> model = emfed.gaussian_mixture(2, "full")
    >>> isinstance(model, emfed.models.GaussianMixture), model.bound
    (True, None)
    """

    n_components: int
    covariance_floor: float = 1e-6
    weight_concentration: float = 1.0
    covariance_prior: InverseWishart | None = None
    bound: BoundGaussian | None = None

    kind: ClassVar[str]
    products: ClassVar[bool] = False
    """Whether its covariances need products of columns, not squares alone."""

    def __post_init__(self) -> None:
        check_count("n_components", self.n_components)
        check_range("covariance_floor", self.covariance_floor, 0, 1, open_high=True)
        if 0 < self.covariance_floor < 1e-12:
            least = "be 0 or at least 1e-12, where doubles can tell it from 0"
            raise SettingsError(setting="covariance_floor", must=least, got=self.covariance_floor)
        if self.covariance_prior is not None:
            check_type(
                "covariance_prior", self.covariance_prior, InverseWishart, "InverseWishart(dof=5)"
            )
        check_range("weight_concentration", self.weight_concentration, 1, np.inf, open_high=True)

    # What a covariance type says of itself.

    @abstractmethod
    def second_shape(self, d: int) -> tuple[int, ...] | None:
        """The shape of ``second`` for one component, None where second moments do not travel."""

    @abstractmethod
    def covariances_from(self, mass: FloatArray, means: FloatArray, second: Any) -> FloatArray:
        """The covariances of T before the floor; ``second`` is None where none travels."""

    @abstractmethod
    def lift(self, covariances: FloatArray) -> FloatArray:
        """The covariances with the floor applied."""

    @abstractmethod
    def all_positive(self, covariances: FloatArray, slack: float = 0.0) -> bool:
        """Whether all eigenvalues of all covariances exceed ``-slack``."""

    @abstractmethod
    def precisions(self, params: GaussianParameters) -> tuple[FloatArray, FloatArray]:
        """Inverse covariances, in the covariances' shape, and log determinants of covariances."""

    @abstractmethod
    def prior_terms(self, params: GaussianParameters) -> float:
        """The inverse-Wishart part of R(theta)."""

    @abstractmethod
    def start_from(self, draws: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Means and covariances to start from, given standard normal draws ``(K, d)``.

        Their `statistics_of` must lie inside the domain.
        """

    @abstractmethod
    def of_moment(self, moment: FloatArray) -> FloatArray:
        """The covariance of one component whose rows have this second moment about its mean.

        A vector is the diagonal of a moment whose columns are not correlated.
        """

    @abstractmethod
    def by_component(self, params: GaussianParameters) -> FloatArray:
        """Each component's own covariance: matrices ``(K, d, d)``, or variances ``(K, d)``."""

    @abstractmethod
    def at_floor(self, params: GaussianParameters, low: float) -> tuple[HeldUp, ...]:
        """Components whose covariance has an eigenvalue of at most ``low``."""

    @property
    def told_products(self) -> bool:
        """Whether the opening has products of columns."""
        return False

    def kept_of(self, moment: FloatArray) -> FloatArray:
        """What several components need of the second moment of all rows; most need nothing."""
        return np.empty(0)

    @property
    def column_moments(self) -> FloatArray:
        """Second moments of the columns where all columns share one spread; else none."""
        return np.empty(0)

    def moment_in(self, parts: dict[str, FloatArray]) -> FloatArray | None:
        """The second moment of all rows, where T takes the covariance from it."""
        return None

    # Binding.

    @cached_property
    def constants(self) -> BoundGaussian:
        """What `bind` found."""
        return known(self.bound)

    @property
    def n_features(self) -> int:
        return len(self.constants.frame.origin)

    @cached_property
    def layout(self) -> Layout:
        """``mass``, ``first`` and, where second moments travel, ``second``."""
        k, d = self.n_components, self.n_features
        fields: list[tuple[str, tuple[int, ...]]] = [("mass", (k,)), ("first", (k, d))]
        second = self.second_shape(d)
        if second is not None:
            fields.append(("second", (k, *second)))
        return Layout(tuple(fields))

    def check(self, data: Any, where: str, columns: Names = None, first: int = 0) -> None:
        """Raise `DataError` where rows are missing, misshapen or not finite."""
        expected = None if self.bound is None else self.n_features
        check_rows(data, where, columns, expected, first)

    def summary(self, data: Any, weights: Any | None = None) -> dict[str, FloatArray]:
        """Mean and, about it, second moments: all that leaves a worker before the first round."""
        mean, scatter = moments(data, weights, full=self.told_products)
        return {"mean": mean, "scatter": scatter}

    def combine(self, summaries: Summaries, shares: FloatArray) -> dict[str, FloatArray]:
        """Mean and second moments about it, of all parts together."""
        return combine_moments(summaries, shares)

    def bind(self, summaries: Summaries, counts: IntArray, weights: FloatArray) -> Self:
        """Common origin and scale, the constants of T, and what they rule out."""
        samples = check_rows_suffice(self.n_components, counts)
        whole = self.combine(summaries, weights)
        origin, d = whole["mean"], len(whole["mean"])
        products = len(whole["scatter"]) != d or self.products
        products = products and len(whole["scatter"]) == d * (d + 1) // 2
        moment = unpack(whole["scatter"], d) if products else whole["scatter"]
        spread = np.diagonal(moment) if products else moment
        frame = common_frame(origin, spread, self.kind, floored=self.covariance_floor > 0)
        moment = moment / (np.outer(frame.scale, frame.scale) if products else frame.scale**2)
        if self.n_components > 1:
            moment = self.kept_of(moment)
        return dataclasses.replace(self, bound=BoundGaussian(frame, samples, moment))

    # The E-step.

    @property
    def feature_count(self) -> int:
        """d, plus the length of the second moments of one row where they travel."""
        second = self.second_shape(self.n_features)
        return self.n_features + (0 if second is None else int(np.prod(second)))

    def features(self, xp: Any, rows: Any) -> Any:
        """Rows in the frame, then the squares or products that the covariance type needs."""
        frame = self.constants.frame
        origin = xp.asarray(frame.origin[:, None], device=device(rows))
        inverse = xp.asarray(1 / frame.scale[:, None], device=device(rows))
        if rows.dtype != xp.float64:
            rows = xp.astype(rows, xp.float64)
        return self.expand(xp, (xp.matrix_transpose(rows) - origin) * inverse)

    @abstractmethod
    def expand(self, xp: Any, z: Any) -> Any:
        """f(z), ``(d, m) -> (feature_count, m)``: rows in the frame, then their second moments."""

    @abstractmethod
    def slopes(self, params: GaussianParameters, precisions: FloatArray) -> FloatArray:
        """B of the model: coefficients of the features, ``(..., K, feature_count)``."""

    @abstractmethod
    def squared_means(self, params: GaussianParameters, precisions: FloatArray) -> FloatArray:
        """mu^T Sigma^-1 mu, ``(..., K)``."""

    @property
    @abstractmethod
    def shared_covariance(self) -> bool:
        """Whether one covariance serves all components: its log det is then in the carrier."""

    def natural(self, params: GaussianParameters) -> tuple[FloatArray, FloatArray]:
        """phi(theta): for shared covariances without what is common to all components."""
        precisions, log_det = self.precisions(params)
        c = np.log(params.weights) - 0.5 * self.squared_means(params, precisions)
        if not self.shared_covariance:
            c = c - 0.5 * log_det
        return c, self.slopes(params, precisions)

    def carrier(self, params: GaussianParameters) -> Callable[[Any, Any], Any]:
        """The constants of the density in user units and, where shared, the quadratic form."""
        constant = self._constant
        if not self.shared_covariance:
            return lambda xp, features: constant
        factor = np.linalg.inv(np.linalg.cholesky(params.covariances))
        log_det = -2 * np.log(np.diagonal(factor, axis1=-2, axis2=-1)).sum(axis=-1)[..., None]

        def quadratic(xp: Any, features: Any) -> Any:
            white = xp.asarray(factor, device=device(features)) @ features
            half = xp.asarray(0.5 * log_det, device=device(features))
            return constant - half - 0.5 * xp.sum(white * white, axis=-2)

        return quadratic

    def assemble(self, mass: FloatArray, moments: FloatArray, extra: Any = None) -> FloatArray:
        """The statistics vector: mass, first moments, second moments."""
        d = self.n_features
        parts = {"mass": mass, "first": moments[..., :d]}
        if moments.shape[-1] > d:
            shape = self.layout.fields[2][1]
            lead = moments.shape[:-2]
            parts["second"] = moments[..., d:].reshape(*lead, *shape)
        return self.layout.join(parts)

    # Rows on a GPU.

    @property
    def pass_features(self) -> Second:
        """The second moments that a kernel's pass needs; see `Features`."""
        return "none" if self.shared_covariance else "products" if self.products else "squares"

    @property
    def sweeps(self) -> bool:
        """Every covariance type does, with up to so many components."""
        return self.n_components <= MOST_COMPONENTS

    def as_pass(self, params: GaussianParameters, whole: bool = False) -> Pass | None:
        """Features in the frame, with intercepts and slopes of `natural`."""
        frame = self.constants.frame
        c, slopes = self.natural(params)
        if not (whole and self.shared_covariance):
            features = Features(frame.origin, frame.scale, self.pass_features)
            return Pass(features, c, slopes)
        precision, log_det = self.precisions(params)
        features = Features(frame.origin, frame.scale, "products")
        _, _, diagonal = triangle(self.n_features)
        quadratic = (pack(precision) * np.where(diagonal, -0.5, -1.0))[..., None, :]
        quadratic = np.broadcast_to(quadratic, (*slopes.shape[:-1], quadratic.shape[-1]))
        whole_slopes = np.concatenate([slopes, quadratic], axis=-1)
        return Pass(features, c - 0.5 * np.asarray(log_det)[..., None], whole_slopes)

    @property
    def _constant(self) -> float:
        """What log densities in the user's units have beside the frame's."""
        d = self.n_features
        return float(-0.5 * d * np.log(2 * np.pi) - np.log(self.constants.frame.scale).sum())

    def carried(self, params: GaussianParameters, rows: Ragged) -> FloatArray:
        """Constants and, where covariances are shared, the quadratic form of each worker's rows."""
        if not self.shared_covariance:
            return self._constant * np.asarray(rows.totals)
        precision, log_det = self.precisions(params)
        quadratic = (precision * self._second_moments(rows)).sum(axis=(-1, -2))
        return (self._constant - 0.5 * log_det) * rows.totals - 0.5 * quadratic

    def carried_whole(self, params: GaussianParameters, rows: Ragged) -> float:
        return self._constant

    def _second_moments(self, rows: Ragged) -> FloatArray:
        """Sums of z z^T over each worker's rows; they do not change, so one pass finds them."""
        frame, d = self.constants.frame, self.n_features
        key = ("second moments", frame.origin.tobytes(), frame.scale.tobytes())
        if key not in rows.memo:
            features = Features(frame.origin, frame.scale, "products")
            nothing = Pass(features, np.zeros(1), np.zeros((1, len(features.left))))
            exact = dataclasses.replace(rows, precision="double")
            rows.memo[key] = unpack(sweep(exact, nothing).moments[:, 0, d:], d)
        return np.asarray(rows.memo[key])

    # The M-step.

    @property
    def _pseudo_mass(self) -> float:
        """(concentration - 1) / N, what the Dirichlet prior adds to each component's mass."""
        return (self.weight_concentration - 1) / self.constants.samples

    def _raw(self, statistics: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        parts = self.layout.split(statistics)
        mass = parts["mass"]
        means = parts["first"] / mass[..., None]
        second = parts.get("second", parts.get("total"))
        return mass, means, self.covariances_from(mass, means, second)

    def maximize(self, statistics: FloatArray) -> GaussianParameters:
        """T(s), Appendix F.1, "The M step: the map T"; weights are normalised, means are ratios."""
        mass, means, covariances = self._raw(np.asarray(statistics, dtype=np.float64))
        weights = mass + self._pseudo_mass
        weights = weights / weights.sum(axis=-1, keepdims=True)
        return GaussianParameters(weights, means, self.lift(covariances))

    def inside(self, statistics: FloatArray) -> bool:
        """Every mass is positive and no eigenvalue lies below minus the floor."""
        if not np.all(np.isfinite(statistics)):
            return False
        if np.any(statistics[..., : self.n_components] < SMALLEST_MASS):
            return False
        _, _, covariances = self._raw(statistics)
        # Without a floor, an eigenvalue that doubles cannot tell from zero is none.
        slack = self.covariance_floor or -1e-14
        return bool(np.all(np.isfinite(covariances))) and self.all_positive(covariances, slack)

    def protect(self, before: FloatArray, after: FloatArray) -> FloatArray:
        """Components that explain less than one sample do not hold up the others."""
        return keep_dying(self.layout, before, after, self.constants.samples, common=("total",))

    def split(self, statistics: FloatArray, empty: BoolArray, attempt: int) -> FloatArray:
        """Two halves of a component along an axis, with its mean and covariance.

        Components take turns, the widest first, along their longest axes; then along the next.
        """
        params = self.maximize(statistics)
        k, d = params.means.shape
        weights, means = params.weights.copy(), params.means.copy()
        tied = params.covariances.ndim == 2 and self.shared_covariance
        shapes = np.stack([params.covariances] * k) if tied else params.covariances.copy()
        spread = shapes if shapes.ndim < 3 else np.trace(shapes, axis1=-2, axis2=-1)
        size = weights * (spread if spread.ndim == 1 else spread.sum(axis=-1))
        axis = attempt // int((~empty).sum()) % d
        for new, old in zip(*halved(size, empty, attempt), strict=True):
            if shapes.ndim == 3:
                values, vectors = axes(shapes[old])
                step = APART * np.sqrt(values[-1 - axis]) * vectors[:, -1 - axis]
                shapes[old] -= np.outer(step, step)
            else:
                own = np.broadcast_to(shapes[old], d)
                narrow = self.column_moments  # all columns share one spread: take the widest
                column = int(
                    np.argsort(-own * narrow if len(narrow) else -own, kind="stable")[axis]
                )
                step = APART * np.sqrt(own[column]) * np.eye(d)[column]
                shapes[old] -= step**2 if shapes.ndim == 2 else (step**2).mean()
            weights[[old, new]] = weights[old] / 2
            means[new], means[old] = means[old] + step, means[old] - step
            shapes[new] = shapes[old]
        within = params.covariances if tied else shapes
        return self.statistics_of(GaussianParameters(weights, means, within))

    def surrogate(self, statistics: FloatArray, params: GaussianParameters) -> FloatArray:
        """psi(theta) + R(theta) - <s, phi(theta)> in the frame's units, up to a constant."""
        parts = self.layout.split(np.asarray(statistics, dtype=np.float64))
        c, slopes = self.natural(params)
        d = self.n_features
        value = -(parts["mass"] * c).sum(axis=-1)
        value = value - (parts["first"] * slopes[..., :d]).sum(axis=(-1, -2))
        if "second" in parts:
            second = parts["second"].reshape(*parts["mass"].shape, -1)
            value = value - (second * slopes[..., d:]).sum(axis=(-1, -2))
        if self.shared_covariance:
            precision, log_det = self.precisions(params)
            value = value + 0.5 * log_det
            if (whole := self.moment_in(parts)) is not None:
                value = value + 0.5 * (precision * whole).sum(axis=(-1, -2))
        return value + self.penalty(params)

    def penalty(self, params: GaussianParameters) -> float:
        """R(theta): the negative log priors divided by the number of samples."""
        value = self.prior_terms(params) if self.covariance_prior is not None else 0.0
        if self._pseudo_mass:
            value -= self._pseudo_mass * float(np.log(params.weights).sum())
        return value

    def closed_form(self) -> FloatArray | None:
        """One Gaussian is the mean and the second moment of all rows."""
        moment, d = self.constants.second_moment, self.n_features
        if self.n_components > 1 or (self.products and moment.ndim < 2):
            return None
        shape = self.of_moment(moment)
        shape = shape if self.shared_covariance else shape[None]
        return self.statistics_of(GaussianParameters(np.ones(1), np.zeros((1, d)), shape))

    # Starts, metric, units.

    def start(self, seed: int) -> GaussianParameters:
        """Means drawn around the common mean with the spread of all data; equal weights."""
        k, d = self.n_components, self.n_features
        draws = normal_row(seed, 0, Purpose.START, k * d)
        return GaussianParameters(np.full(k, 1 / k), *self.start_from(draws.reshape(k, d)))

    def clusters(self, count: int) -> Clusters:
        """k-means in the model's own frame."""
        known, columns = self.constants, self.column_moments
        spreads = columns if len(columns) else None
        return Clusters.within(known.frame, count, known.samples, spreads)

    def start_at(
        self, mass: FloatArray, centres: FloatArray, spread: FloatArray
    ) -> GaussianParameters:
        """Clusters of one shape, with the variances within them."""
        if self.shared_covariance:
            mass, centres = self.feasible_clusters(mass, centres)
            shapes = self.lift(self.covariances_from(mass, centres, None))
        else:
            shapes = np.stack([self.of_moment(spread)] * len(mass))
        return GaussianParameters(mass, centres, shapes)

    def rows_at(self, points: FloatArray) -> FloatArray:
        return self.clusters(1).rows_at(points)

    @property
    def moment_of_rows(self) -> FloatArray | None:
        moment = self.constants.second_moment
        if moment.ndim == 2:
            return moment
        return self.column_moments if len(self.column_moments) else None

    def feasible_clusters(
        self, mass: FloatArray, centres: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        """Clusters that rows with the known second moment can have; here all can."""
        return mass, centres

    def metric(self, params: GaussianParameters) -> GaussianMetric:
        """The Fisher metric of the complete-data model at these parameters."""
        known = self.constants
        columns = self.column_moments
        return GaussianMetric.at(params, self.kind, self.layout, known.samples, columns)

    def statistics_of(self, params: GaussianParameters) -> FloatArray:
        """mass = pi, first = pi mu, second = pi (Sigma + mu mu^T)."""
        parts = {"mass": params.weights, "first": params.weights[..., None] * params.means}
        second = self.second_of(params)
        if second is not None:
            extra = (None,) * (second.ndim - params.weights.ndim)
            parts["second"] = params.weights[(..., *extra)] * second
        return self.layout.join(parts)

    @abstractmethod
    def second_of(self, params: GaussianParameters) -> FloatArray | None:
        """E[second moments of y | component], ``(..., K, *second)``."""

    def to_user(self, params: GaussianParameters) -> GaussianParameters:
        return self.constants.frame.leave(params, self.kind)

    def from_user(self, params: GaussianParameters) -> GaussianParameters:
        """Check parameters given in the user's units and bring them into the frame."""
        check_start(params, self.n_components, self.n_features, self.kind)
        inner = self.constants.frame.enter(params, self.kind)
        own = self.by_component(inner)
        symmetric = own.ndim == 2 or np.allclose(own, np.swapaxes(own, -1, -2))
        if not symmetric or not self.all_positive(inner.covariances):
            raise SettingsError("start covariances must be symmetric and positive definite.")
        return self.with_known(inner)

    @abstractmethod
    def with_known(self, params: GaussianParameters) -> GaussianParameters:
        """Starting parameters, with what the model knows in place of theirs."""

    def held_up(self, params: GaussianParameters) -> tuple[HeldUp, ...]:
        """Components whose covariance is at the floor, by column or combination of columns."""
        low = NEAR_FLOOR * self.covariance_floor
        if low == 0 or self.all_positive(params.covariances, -low):
            return ()
        return self.at_floor(params, low)

    def portrait(self, params: GaussianParameters, names: Sequence[str]) -> Portrait:
        return normal_portrait(params.weights, params.means, self.by_component(params), names)

    def words(self) -> ModelWords:
        if self.n_components == 1:
            return ModelWords("Gaussian distribution")
        return ModelWords(f"Gaussian mixture with {plural(self.n_components, 'component')}")

    def describe(self) -> dict[str, Any]:
        """The settings; constants of the data are not among them."""
        prior = self.covariance_prior
        return {
            "model": "gaussian-mixture",
            "covariance_type": self.kind,
            "n_components": self.n_components,
            "covariance_floor": self.covariance_floor,
            "weight_concentration": self.weight_concentration,
            "covariance_prior": prior and prior.describe(),
        }

    def free_parameters(self) -> int:
        k, d = self.n_components, self.n_features
        return k - 1 + k * d + covariance_parameters(self.kind, k, d)

    def sample(self, params: Any, count: int, seed: int) -> tuple[FloatArray, IntArray]:
        """A component for each row, then the row."""
        return sample_gaussian(self.to_user(params), self.kind, count, seed)

    def prior_scale(self) -> FloatArray:
        """The inverse-Wishart scale matrix in the frame's units, divided by N."""
        assert self.covariance_prior is not None
        scale = np.asarray(self.covariance_prior.scale, dtype=np.float64)
        frame = self.constants.frame
        if scale.ndim == 0:
            matrix = float(scale) * np.eye(self.n_features)
        elif scale.shape == (self.n_features,) * 2:
            matrix = scale / np.outer(frame.scale, frame.scale)
        else:
            raise SettingsError(
                f"InverseWishart scale must be a number or a {self.n_features} x "
                f"{self.n_features} matrix; got shape {scale.shape}."
            )
        return matrix / self.constants.samples

    def prior_weight(self, dimension: int) -> float:
        """(dof + dimension + 1) / N, what the prior adds to the count of a covariance."""
        assert self.covariance_prior is not None
        return (self.covariance_prior.dof + dimension + 1) / self.constants.samples

    @staticmethod
    def scatter(second: FloatArray, mass: FloatArray, means: FloatArray) -> FloatArray:
        """sum of responsibility (y - mu)(y - mu)^T from raw second moments, as matrices."""
        d = means.shape[-1]
        return unpack(second, d) - mass[..., None, None] * outer(means, means)
