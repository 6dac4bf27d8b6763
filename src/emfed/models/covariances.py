"""The five covariance types of a Gaussian mixture, one final class each."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, ClassVar, final

import numpy as np
from array_api_compat import device, is_numpy_array

from emfed.core.errors import SettingsError
from emfed.core.protocols import FloatArray, HeldUp, Layout
from emfed.core.registry import stored
from emfed.models.components import flattest, held_at, held_in
from emfed.models.devices import Features, Pass, Sums
from emfed.models.gaussian import GaussianMixture
from emfed.models.matrices import (
    is_positive_definite,
    outer,
    pack,
    raise_eigenvalues,
    triangle,
    unpack,
)
from emfed.models.metric import narrow_columns
from emfed.models.parameters import GaussianParameters


def _invert(matrices: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Inverses and log determinants of positive definite matrices, by Cholesky."""
    root = np.linalg.cholesky(matrices)
    inverse_root = np.linalg.inv(root)
    log_det = 2 * np.log(np.diagonal(root, axis1=-2, axis2=-1)).sum(axis=-1)
    return np.swapaxes(inverse_root, -1, -2) @ inverse_root, log_det


def _diagonal(moment: FloatArray) -> FloatArray:
    return np.diagonal(moment) if moment.ndim == 2 else moment


class _Matrices(GaussianMixture):
    def lift(self, covariances: FloatArray) -> FloatArray:
        """Eigenvalues below the floor raised to it; the paper has no floor."""
        return raise_eigenvalues(covariances, self.covariance_floor)

    def all_positive(self, covariances: FloatArray, slack: float = 0.0) -> bool:
        return is_positive_definite(covariances + slack * np.eye(self.n_features))

    def precisions(self, params: GaussianParameters) -> tuple[FloatArray, FloatArray]:
        return _invert(params.covariances)

    def prior_terms(self, params: GaussianParameters) -> float:
        """The inverse-Wishart log density, summed over the covariances, over N."""
        precisions, log_det = self.precisions(params)
        inner = (precisions * self.prior_scale()).sum(axis=(-1, -2))
        return float(0.5 * np.sum(self.prior_weight(self.n_features) * log_det + inner))

    def by_component(self, params: GaussianParameters) -> FloatArray:
        """The matrices; a shared one is repeated."""
        k, d = params.means.shape
        return np.broadcast_to(params.covariances, (k, d, d))


class _Shared(_Matrices):
    """One matrix for all components: second moments of single rows do not travel."""

    @property
    def shared_covariance(self) -> bool:
        return True

    def of_moment(self, moment: FloatArray) -> FloatArray:
        return moment

    def second_shape(self, d: int) -> None:
        return None

    def second_of(self, params: GaussianParameters) -> None:
        return None

    def expand(self, xp: Any, z: Any) -> Any:
        """The rows alone: the quadratic form is common to all components and cancels."""
        return z

    def slopes(self, params: GaussianParameters, precisions: FloatArray) -> FloatArray:
        return params.means @ precisions

    def squared_means(self, params: GaussianParameters, precisions: FloatArray) -> FloatArray:
        return ((params.means @ precisions) * params.means).sum(axis=-1)


@stored("gaussian-mixture/known")
@dataclass(frozen=True, eq=False)
class Known(_Shared):
    """A covariance given by the user: only weights and means are fitted."""

    matrix: FloatArray = field(default_factory=lambda: np.empty((0, 0)))
    kind: ClassVar[str] = "known"

    def __post_init__(self) -> None:
        super().__post_init__()
        m = self.matrix
        if m.ndim != 2 or m.shape[0] != m.shape[1] or not np.all(np.isfinite(m)):
            raise SettingsError(
                f"known_covariance must be a square matrix of finite numbers; got shape {m.shape}."
            )
        if not np.allclose(m, m.T) or not is_positive_definite(m):
            raise SettingsError("known_covariance must be symmetric and positive definite.")
        if self.covariance_prior is not None:
            raise SettingsError("covariance='known' has no covariance to put a prior on.")

    def covariances_from(self, mass: FloatArray, means: FloatArray, second: Any) -> FloatArray:
        return np.broadcast_to(self._inner(), (*mass.shape[:-1], *self.matrix.shape))

    def lift(self, covariances: FloatArray) -> FloatArray:
        return covariances

    def at_floor(self, params: GaussianParameters, low: float) -> tuple[HeldUp, ...]:
        return ()

    def with_known(self, params: GaussianParameters) -> GaussianParameters:
        return GaussianParameters(params.weights, params.means, self._inner())

    def start_from(self, draws: FloatArray) -> tuple[FloatArray, FloatArray]:
        return draws, self._inner()

    def _inner(self) -> FloatArray:
        scale = self.constants.frame.scale
        if self.matrix.shape != (len(scale), len(scale)):
            raise SettingsError(
                f"known_covariance is {self.matrix.shape[0]} x {self.matrix.shape[0]}, but the "
                f"data have {len(scale)} columns."
            )
        return self.matrix / np.outer(scale, scale)

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "known_covariance": self.matrix.tolist()}


MOST_BETWEEN = 0.99
"""The share of the variance, in any direction, that may lie between the clusters of a start."""


class _Tied(_Shared):
    """One covariance for all components."""

    kind: ClassVar[str] = "tied"
    products: ClassVar[bool] = True

    @property
    def told_products(self) -> bool:
        return True

    def kept_of(self, moment: FloatArray) -> FloatArray:
        """All of it: the covariance is what the means leave of it."""
        return moment

    def moment_in(self, parts: dict[str, FloatArray]) -> FloatArray | None:
        """A constant, or a statistic where rows stream."""
        total = parts.get("total")
        return self.constants.second_moment if total is None else unpack(total, self.n_features)

    def at_floor(self, params: GaussianParameters, low: float) -> tuple[HeldUp, ...]:
        """One covariance: all rows lie on the few values of a column."""
        alone = np.flatnonzero(np.diagonal(params.covariances) <= low).tolist()
        own = [(j,) for j in alone] if alone else [flattest(params.covariances)]
        return tuple(HeldUp(tuple(range(len(params.weights))), 1.0, columns) for columns in own)

    def feasible_clusters(
        self, mass: FloatArray, centres: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        """Light enough, then near enough, that the scatter of the centres leaves some within.

        Masses of clusters are rounded up and centres come quantised: a few outliers given a tenth
        of the rows would have more than the second moment of all rows. The mass of a cluster with
        m c^T W^-1 c > 1 is what no rows can have, so that goes down first; only then do all
        centres move in, in the directions (of the metric W) where there is still too much.
        """
        whole = raise_eigenvalues(self.constants.second_moment, max(self.covariance_floor, 1e-12))
        inverse = np.linalg.inv(np.linalg.cholesky(whole))
        white = centres @ inverse.T
        most = MOST_BETWEEN / np.maximum((white**2).sum(axis=-1), 1e-12)
        light = np.minimum(mass, most)
        mass = light / light.sum() if np.any(light < mass) else mass
        values, vectors = np.linalg.eigh((white * mass[:, None]).T @ white)
        shrink = np.sqrt(MOST_BETWEEN / np.maximum(values, MOST_BETWEEN))
        if np.all(shrink == 1):
            return mass, centres
        moved = (white @ vectors * shrink) @ vectors.T
        return mass, moved @ np.linalg.inv(inverse).T

    def covariances_from(self, mass: FloatArray, means: FloatArray, second: Any) -> FloatArray:
        """The second moment of all data less that of the means (Appendix F.1)."""
        whole = self.constants.second_moment if second is None else unpack(second, means.shape[-1])
        inner = whole - np.swapaxes(means * mass[..., None], -1, -2) @ means
        if self.covariance_prior is None:
            return inner
        return (inner + self.prior_scale()) / (1 + self.prior_weight(self.n_features))

    def start_from(self, draws: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Means with at most half the spread of all data in any direction; the rest is within."""
        whole = self.constants.second_moment
        values, vectors = np.linalg.eigh(whole)
        root = (vectors * np.sqrt(np.maximum(values, 0))) @ vectors.T
        shrink = np.sqrt(0.5 / np.linalg.eigvalsh(draws.T @ draws / len(draws)).max())
        means = min(1.0, float(shrink)) * draws @ root
        within = whole - means.T @ means / len(means)
        return means, raise_eigenvalues(within, max(self.covariance_floor, 1e-12))

    def with_known(self, params: GaussianParameters) -> GaussianParameters:
        return params


@stored("gaussian-mixture/tied")
@final
@dataclass(frozen=True, eq=False)
class Tied(_Tied):
    """The data's second moment is a constant, which travels once."""

    @property
    def fixed_data(self) -> bool:
        return True

    def streamed(self, statistics: FloatArray) -> tuple[StreamedTied, FloatArray]:
        model = StreamedTied(**{f.name: getattr(self, f.name) for f in fields(self)})
        return model, np.concatenate([statistics, pack(self.constants.second_moment)])


@stored("gaussian-mixture/tied-streamed")
@final
@dataclass(frozen=True, eq=False)
class StreamedTied(_Tied):
    """The second moment is one more statistic: for streams, which have no constant one."""

    @cached_property
    def layout(self) -> Layout:
        """``mass``, ``first``, and ``total``, the upper triangle of the mean of y y^T."""
        k, d = self.n_components, self.n_features
        return Layout((("mass", (k,)), ("first", (k, d)), ("total", (d * (d + 1) // 2,))))

    @property
    def sweeps(self) -> bool:
        """The second moment travels too, so it is not constant."""
        return False

    def as_pass(self, params: GaussianParameters, whole: bool = False) -> Pass | None:
        """What `sweeps` needs; single rows can still be answered for."""
        return super().as_pass(params, whole) if whole else None

    def common(self, xp: Any, features: Any, weights: Any) -> Any:
        """Sums of y y^T, flat."""
        weighted = features if weights is None else features * weights[..., None, :]
        products = weighted @ xp.matrix_transpose(features)
        return xp.reshape(products, (*products.shape[:-2], products.shape[-1] ** 2))

    def assemble(self, mass: FloatArray, moments: FloatArray, extra: Any = None) -> FloatArray:
        """Mass, first moments, and the triangle of the sums above."""
        square = (*extra.shape[:-1], self.n_features, self.n_features)
        total = pack(extra.reshape(square))
        return self.layout.join({"mass": mass, "first": moments, "total": total})

    def statistics_of(self, params: GaussianParameters) -> FloatArray:
        """mass = pi, first = pi mu, total = Sigma + sum of pi mu mu^T."""
        first = params.weights[..., None] * params.means
        total = params.covariances + np.swapaxes(first, -1, -2) @ params.means
        parts = {"mass": params.weights, "first": first, "total": pack(total)}
        return self.layout.join(parts)

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "second_moment": "statistic"}


@stored("gaussian-mixture/full")
@dataclass(frozen=True, eq=False)
class Full(_Matrices):
    """A covariance matrix per component."""

    kind: ClassVar[str] = "full"
    products: ClassVar[bool] = True

    @property
    def told_products(self) -> bool:
        """One Gaussian is its moments; but others, bound with it, may ask for squares alone."""
        alone = self.n_components == 1
        return alone and (self.bound is None or self.bound.second_moment.ndim == 2)

    def of_moment(self, moment: FloatArray) -> FloatArray:
        return np.diag(moment) if moment.ndim == 1 else moment

    def at_floor(self, params: GaussianParameters, low: float) -> tuple[HeldUp, ...]:
        """By column, or by a combination of columns."""
        means, scale = self.to_user(params).means, self.constants.frame.scale
        return held_in(params.weights, means, scale, params.covariances, low)

    def with_known(self, params: GaussianParameters) -> GaussianParameters:
        return params

    @property
    def shared_covariance(self) -> bool:
        return False

    @property
    def wide(self) -> bool:
        """Whether rows are whitened for each component instead of multiplied out.

        With many columns and few components, a product of d x d matrices for each component costs
        less than making d^2 / 2 features of each row (measured: from about five columns for each).
        """
        return self.n_features >= max(20, 5 * self.n_components)

    @property
    def row_width(self) -> int:
        """The columns alone where there are many."""
        return self.n_features if self.wide else self.feature_count

    def beyond(self, xp: Any, params: GaussianParameters, where: Any) -> Any:
        """-1/2 z^T Sigma^-1 z, by a whitening for each component."""
        if not self.wide:
            return None
        roots = xp.asarray(np.linalg.inv(np.linalg.cholesky(params.covariances)), device=where)

        def quadratic(z: Any) -> Any:
            parts = []
            for k in range(self.n_components):
                white = roots[..., k, :, :] @ z
                parts.append(xp.sum(white * white, axis=-2))
            return -0.5 * xp.stack(parts, axis=-2)

        return quadratic

    def moments(self, xp: Any, shares: Any, features: Any) -> Any:
        """Sums of z and of the upper triangle of z z^T, a product for each component."""
        if not self.wide:
            return super().moments(xp, shares, features)
        rows, columns, _ = triangle(self.n_features)
        across = xp.matrix_transpose(features)
        first = shares @ across
        cells = xp.asarray(rows * self.n_features + columns, device=device(features))
        second = []
        for k in range(self.n_components):
            products = (features * shares[..., k : k + 1, :]) @ across
            flat = xp.reshape(products, (*products.shape[:-2], self.n_features**2))
            second.append(xp.take(flat, cells, axis=-1))
        return xp.concat([first, xp.stack(second, axis=-2)], axis=-1)

    def second_shape(self, d: int) -> tuple[int, ...]:
        return (d * (d + 1) // 2,)

    def second_of(self, params: GaussianParameters) -> FloatArray:
        return pack(params.covariances + outer(params.means, params.means))

    def expand(self, xp: Any, z: Any) -> Any:
        """The rows, then the upper triangle of their outer product."""
        d, m = z.shape
        if self.wide:
            return z
        if not is_numpy_array(z):
            return xp.concat([z, *(z[j : j + 1, :] * z[j:, :] for j in range(d))], axis=0)
        out = np.empty((d + d * (d + 1) // 2, m))  # the same without a second copy
        out[:d] = z
        stop = d
        for j in range(d):
            start, stop = stop, stop + d - j
            np.multiply(out[j], out[j:d], out=out[start:stop])
        return out

    def slopes(self, params: GaussianParameters, precisions: FloatArray) -> FloatArray:
        """Sigma^-1 mu, then -1/2 of the precision (off the diagonal twice that)."""
        linear = (precisions @ params.means[..., None])[..., 0]
        _, _, diagonal = triangle(self.n_features)
        quadratic = pack(precisions) * np.where(diagonal, -0.5, -1.0)
        return np.concatenate([linear, quadratic], axis=-1)

    def squared_means(self, params: GaussianParameters, precisions: FloatArray) -> FloatArray:
        return np.einsum("...i,...ij,...j->...", params.means, precisions, params.means)

    def covariances_from(self, mass: FloatArray, means: FloatArray, second: Any) -> FloatArray:
        """Scatter about the mean, over the mass."""
        scatter = self.scatter(second, mass, means)
        if self.covariance_prior is None:
            return scatter / mass[..., None, None]
        count = mass + self.prior_weight(self.n_features)
        return (scatter + self.prior_scale()) / count[..., None, None]

    def start_from(self, draws: FloatArray) -> tuple[FloatArray, FloatArray]:
        return draws, np.tile(np.eye(self.n_features), (self.n_components, 1, 1))


class _Variances(GaussianMixture):
    """Covariances that are variances, one per component and column or one per component."""

    def with_known(self, params: GaussianParameters) -> GaussianParameters:
        return params

    @property
    def shared_covariance(self) -> bool:
        return False

    def lift(self, covariances: FloatArray) -> FloatArray:
        floor = self.covariance_floor
        return np.maximum(covariances, floor) if floor > 0 else covariances

    def all_positive(self, covariances: FloatArray, slack: float = 0.0) -> bool:
        return bool(np.all(covariances > -slack))

    def prior_scales(self) -> FloatArray:
        return np.diagonal(self.prior_scale())

    def at_floor(self, params: GaussianParameters, low: float) -> tuple[HeldUp, ...]:
        means, scale = self.to_user(params).means, self.constants.frame.scale
        return held_at(params.weights, means, scale, self.by_component(params) <= low)


@stored("gaussian-mixture/diag")
@dataclass(frozen=True, eq=False)
class Diagonal(_Variances):
    """A variance per component and column."""

    kind: ClassVar[str] = "diag"

    def of_moment(self, moment: FloatArray) -> FloatArray:
        return _diagonal(moment)

    def by_component(self, params: GaussianParameters) -> FloatArray:
        return params.covariances

    def second_shape(self, d: int) -> tuple[int, ...]:
        return (d,)

    def second_of(self, params: GaussianParameters) -> FloatArray:
        return params.covariances + params.means**2

    def expand(self, xp: Any, z: Any) -> Any:
        if not is_numpy_array(z):
            return xp.concat([z, z * z], axis=0)
        out = np.empty((2 * z.shape[0], z.shape[1]))
        out[: len(z)] = z
        np.multiply(out[: len(z)], out[: len(z)], out=out[len(z) :])
        return out

    def precisions(self, params: GaussianParameters) -> tuple[FloatArray, FloatArray]:
        return 1 / params.covariances, np.log(params.covariances).sum(axis=-1)

    def slopes(self, params: GaussianParameters, precisions: FloatArray) -> FloatArray:
        return np.concatenate([params.means * precisions, -0.5 * precisions], axis=-1)

    def squared_means(self, params: GaussianParameters, precisions: FloatArray) -> FloatArray:
        return (params.means**2 * precisions).sum(axis=-1)

    def covariances_from(self, mass: FloatArray, means: FloatArray, second: Any) -> FloatArray:
        """Mean square less squared mean."""
        if self.covariance_prior is None:
            return second / mass[..., None] - means**2
        scatter = second - mass[..., None] * means**2
        return (scatter + self.prior_scales()) / (mass + self.prior_weight(1))[..., None]

    def prior_terms(self, params: GaussianParameters) -> float:
        v = params.covariances
        return float(0.5 * np.sum(self.prior_weight(1) * np.log(v) + self.prior_scales() / v))

    def start_from(self, draws: FloatArray) -> tuple[FloatArray, FloatArray]:
        return draws, np.ones((self.n_components, self.n_features))


@stored("gaussian-mixture/spherical")
@final
@dataclass(frozen=True, eq=False)
class Spherical(_Variances):
    """One variance per component."""

    kind: ClassVar[str] = "spherical"

    def of_moment(self, moment: FloatArray) -> FloatArray:
        return np.asarray(_diagonal(moment).mean())

    def by_component(self, params: GaussianParameters) -> FloatArray:
        return np.broadcast_to(params.covariances[:, None], params.means.shape)

    def kept_of(self, moment: FloatArray) -> FloatArray:
        """The spread of each column, of which the covariance is the mean."""
        return _diagonal(moment)

    @property
    def column_moments(self) -> FloatArray:
        return _diagonal(self.constants.second_moment)

    def second_shape(self, d: int) -> tuple[int, ...]:
        """One number: the squared length."""
        return ()

    def second_of(self, params: GaussianParameters) -> FloatArray:
        return self.n_features * params.covariances + (params.means**2).sum(axis=-1)

    def expand(self, xp: Any, z: Any) -> Any:
        return xp.concat([z, xp.sum(z * z, axis=0, keepdims=True)], axis=0)

    def as_pass(self, params: GaussianParameters, whole: bool = False) -> Pass | None:
        """As for diagonal covariances, with one slope for all squares."""
        frame, d = self.constants.frame, self.n_features
        c, slopes = self.natural(params)
        squares = np.repeat(slopes[..., d:], d, axis=-1)
        features = Features(frame.origin, frame.scale, "squares")
        return Pass(features, c, np.concatenate([slopes[..., :d], squares], axis=-1))

    def folded(self, sums: Sums, params: GaussianParameters) -> FloatArray:
        """Squared lengths from squares."""
        d, moments = self.n_features, sums.moments
        lengths = moments[..., d:].sum(axis=-1, keepdims=True)
        return np.concatenate([moments[..., :d], lengths], axis=-1)

    def precisions(self, params: GaussianParameters) -> tuple[FloatArray, FloatArray]:
        return 1 / params.covariances, self.n_features * np.log(params.covariances)

    def slopes(self, params: GaussianParameters, precisions: FloatArray) -> FloatArray:
        p = precisions[..., None]
        return np.concatenate([params.means * p, -0.5 * p], axis=-1)

    def squared_means(self, params: GaussianParameters, precisions: FloatArray) -> FloatArray:
        return (params.means**2).sum(axis=-1) * precisions

    def covariances_from(self, mass: FloatArray, means: FloatArray, second: Any) -> FloatArray:
        """Mean squared distance to the mean, per column."""
        scatter = second - mass * (means**2).sum(axis=-1)
        if self.covariance_prior is None:
            return scatter / (mass * self.n_features)
        count = mass * self.n_features + self.prior_weight(1)
        return (scatter + self.prior_scales().mean()) / count

    def prior_terms(self, params: GaussianParameters) -> float:
        """One-dimensional inverse-Wishart densities, summed."""
        v = params.covariances
        scale = self.prior_scales().mean()
        return float(0.5 * np.sum(self.prior_weight(1) * np.log(v) + scale / v))

    def start_from(self, draws: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Unit variances in the frame; means within what narrow columns hold."""
        return draws * narrow_columns(self.column_moments), np.ones(self.n_components)
