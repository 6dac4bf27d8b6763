"""Gaussian mixtures, full and diagonal, of rows with missing values (NaN, missing at random).

Given a component, what is missing in a row is Gaussian around an affine function of what was seen:

    E[y | y_o] = A y_o + b,   cov = C,   with A = S_.o S_oo^-1 and C = S - A S_o.

A, b and C depend on the pattern of missingness alone. So the E-step of each pattern is that of the
plain mixture on rows with zeros for what is missing, under a covariance in which those columns are
independent and standard normal (their density is a constant); the mean statistics of the completed
rows then follow from those of the seen ones by A, b and C, once per pattern and not per row.
Patterns of similar size run together, as workers with parameters of their own.

T, domain, metric and units are those of the plain mixture.

Decision: docs/decisions/012-missing-values-by-pattern.md
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Self, final

import numpy as np

from emfed.core.errors import DataError
from emfed.core.protocols import (
    BoolArray,
    FloatArray,
    IntArray,
    Names,
    Summaries,
)
from emfed.core.registry import stored
from emfed.models.clusters import Clusters
from emfed.models.covariances import Diagonal, Full
from emfed.models.devices import Pass
from emfed.models.gaussian import GaussianMixture
from emfed.models.imputing import latent_numbers, mixture_quantile, pick
from emfed.models.matrices import outer, pack, unpack
from emfed.models.mixture import to_numpy
from emfed.models.naming import column_name
from emfed.models.parameters import GaussianParameters
from emfed.models.patterns import Stack, row_stacks, sizes
from emfed.models.rows import check_seen, combine_seen, mean_over_rows, seen_moments, total_weight
from emfed.models.sampling import entropy


@dataclass(frozen=True)
class Completion:
    """A, b and C of patterns and components: ``(u, K, d, d)``, ``(u, K, d)``, ``(u, K, d, d)``.

    For diagonal covariances A is the pattern itself and C its complement's variances.
    """

    gain: FloatArray
    shift: FloatArray
    spread: FloatArray


class _Missing(GaussianMixture):
    """What mixtures with missing values do otherwise than plain ones, which come next."""

    @property
    def allows_missing(self) -> bool:
        return True

    # The opening exchange.

    def check(self, data: Any, where: str, columns: Names = None, first: int = 0) -> None:
        """Numbers of at most 1e140 in size, or NaN."""
        expected = None if self.bound is None else self.n_features
        check_seen(data, where, columns, expected, first)

    def summary(self, data: Any, weights: Any | None = None) -> dict[str, FloatArray]:
        """The share of values seen in each column, their mean and variance."""
        observed, mean, scatter = seen_moments(data, weights)
        return {"observed": observed, "mean": mean, "scatter": scatter}

    def combine(self, summaries: Summaries, shares: FloatArray) -> dict[str, FloatArray]:
        return combine_seen(summaries, shares)

    def bind(self, summaries: Summaries, counts: IntArray, weights: FloatArray) -> Self:
        """The frame is that of what was seen."""
        seen = weights @ summaries["observed"]
        if np.any(seen <= 0):
            name = column_name(int(np.flatnonzero(seen <= 0)[0]))
            raise DataError(f"nobody has a single value in column {name}: leave it out.")
        return super().bind(summaries, counts, weights)

    def closed_form(self) -> FloatArray | None:
        """What was seen of each column does not say what one Gaussian is."""
        return None

    # Patterns.

    def _stacks(self, data: Any, weights: Any | None) -> Iterator[Stack]:
        """Blocks of rows of all workers, by pattern."""
        d = self.n_features
        cost = self.n_components * d * (1 if self.kind == "diag" else d)
        return row_stacks(data, weights, self.constants.frame.origin, cost)

    def _own(self, params: GaussianParameters, owners: IntArray) -> GaussianParameters:
        """Parameters of each pattern: the worker's own, where workers have their own."""
        if params.weights.ndim == 1:
            return params
        flat = {
            name: value.reshape(-1, *value.shape[params.weights.ndim - 1 :])
            for name, value in params.arrays().items()
        }
        return GaussianParameters(**flat).take(owners)

    def _marginal(self, params: GaussianParameters, seen: BoolArray) -> GaussianParameters:
        """Parameters under which what is missing is independent and standard normal."""
        mask = seen[:, None, :]
        means = np.where(mask, params.means, 0.0)
        if self.kind == "diag":
            covariances = np.where(mask, params.covariances, 1.0)
        else:
            both = mask[..., :, None] & mask[..., None, :]
            covariances = np.where(both, params.covariances, np.eye(seen.shape[1]))
        weights = np.broadcast_to(params.weights, means.shape[:-1])
        return GaussianParameters(weights, means, covariances)

    def _completion(self, params: GaussianParameters, seen: BoolArray) -> Completion:
        """A, b and C of each pattern."""
        mask = seen[:, None, :].astype(np.float64)
        means, covariances = params.means, params.covariances
        if self.kind == "diag":
            gain = np.broadcast_to(mask, (len(seen), *means.shape[-2:]))
            return Completion(gain, (1 - mask) * means, (1 - mask) * covariances)
        inverse = np.linalg.inv(self._marginal(params, seen).covariances)
        inverse = inverse * mask[..., :, None] * mask[..., None, :]
        gain = covariances @ inverse
        gain = np.where(seen[:, None, :, None], np.eye(seen.shape[1]), gain)  # exactly
        shift = means - (gain @ np.broadcast_to(means, gain.shape[:-1])[..., None])[..., 0]
        rest = 1 - mask
        spread = covariances - gain @ covariances
        return Completion(gain, shift * rest, spread * rest[..., :, None] * rest[..., None, :])

    def _complete(
        self, statistics: FloatArray, params: GaussianParameters, seen: BoolArray
    ) -> FloatArray:
        """Statistics of rows with zeros for what is missing to those of completed rows."""
        if seen.all():
            return statistics
        parts, c = self.layout.split(statistics), self._completion(params, seen)
        mass, first = parts["mass"], parts["first"]
        if self.kind == "diag":
            second = c.gain * parts["second"] + mass[..., None] * (c.shift**2 + c.spread)
            parts["first"] = c.gain * first + mass[..., None] * c.shift
            return self.layout.join({**parts, "second": second})
        moved = (c.gain @ first[..., None])[..., 0]
        products = c.gain @ unpack(parts["second"], seen.shape[1]) @ np.swapaxes(c.gain, -1, -2)
        crossed = outer(moved, c.shift)
        products = products + crossed + np.swapaxes(crossed, -1, -2)
        products = products + mass[..., None, None] * (outer(c.shift, c.shift) + c.spread)
        parts["first"] = moved + mass[..., None] * c.shift
        return self.layout.join({**parts, "second": pack(products)})

    # The E-step.

    @property
    def sweeps(self) -> bool:
        """Patterns are found on the host."""
        return False

    def as_pass(self, params: GaussianParameters, whole: bool = False) -> Pass | None:
        return None

    def _statistics(
        self,
        data: Any,
        params: GaussianParameters,
        weights: Any | None,
        uniforms: FloatArray | None,
        tally: Any = None,
    ) -> FloatArray:
        """Per pattern, the plain mixture's, completed."""
        lead = data.shape[:-2]
        total = np.zeros((int(np.prod(lead)), self.layout.size))
        draws = None if uniforms is None else uniforms.reshape(-1, uniforms.shape[-1])
        for stack in self._stacks(data, weights):
            own = self._own(params, stack.owners)
            marginal = own if stack.seen.all() else self._marginal(own, stack.seen)
            size, u = sizes(stack), None if draws is None else draws[stack.positions]
            with np.errstate(invalid="ignore"):
                values = super()._statistics(stack.rows, marginal, stack.weights, u)
            values = self._complete(np.where(size[:, None] > 0, values, 0.0), own, stack.seen)
            np.add.at(total, stack.owners, size[:, None] * values)
        count = total_weight(data, weights).reshape(-1, 1)
        return (total / count).reshape(*lead, self.layout.size)

    def evaluate(
        self, data: Any, params: GaussianParameters, weights: Any | None = None
    ) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Three passes."""
        statistics = self.expected_statistics(data, params, weights)
        likelihood = self.log_likelihood(data, params, weights)
        return statistics, likelihood, entropy(self.responsibilities(data, params), weights)

    def log_likelihood(
        self, data: Any, params: GaussianParameters, weights: Any | None = None
    ) -> FloatArray:
        return mean_over_rows(self.score_samples(data, params), weights)

    def score_samples(self, data: Any, params: GaussianParameters) -> FloatArray:
        """log p of what was seen in each row, in the user's units."""
        scale = np.log(self.constants.frame.scale) + 0.5 * np.log(2 * np.pi)
        out = np.empty(int(np.prod(data.shape[:-1])))
        for stack in self._stacks(data, None):
            own = self._own(params, stack.owners)
            marginal = own if stack.seen.all() else self._marginal(own, stack.seen)
            values = super().score_samples(stack.rows, marginal)
            out[stack.positions] = values + ((~stack.seen) @ scale)[:, None]
        return out.reshape(data.shape[:-1])

    def responsibilities(self, data: Any, params: GaussianParameters) -> FloatArray:
        """p(component | what was seen), ``(..., rows, K)``."""
        out = np.empty((int(np.prod(data.shape[:-1])), self.n_components))
        for stack in self._stacks(data, None):
            own = self._own(params, stack.owners)
            marginal = self._marginal(own, stack.seen)
            out[stack.positions] = super().responsibilities(stack.rows, marginal)
        return out.reshape(*data.shape[:-1], self.n_components)

    # Starts and units.

    def clusters(self, count: int) -> Clusters:
        """The clusters of the plain mixture, with NaN for the common mean."""
        return dataclasses.replace(super().clusters(count), fill=True)

    @property
    def moment_of_rows(self) -> FloatArray | None:
        return None

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "missing": True}

    # Missing values.

    def _conditionals(
        self, data: Any, params: GaussianParameters
    ) -> Iterator[tuple[Stack, FloatArray, FloatArray, FloatArray]]:
        """Stacks with shares ``(u, m, K)``, completed rows ``(u, m, K, d)`` and C, all in frame."""
        frame = self.constants.frame
        for stack in self._stacks(data, None):
            if stack.seen.all():
                continue
            own = self._own(params, stack.owners)
            shares = super().responsibilities(stack.rows, self._marginal(own, stack.seen))
            c = self._completion(own, stack.seen)
            z = ((stack.rows - frame.origin) / frame.scale)[:, None]  # (u, 1, m, d)
            if self.kind == "diag":
                full = z * c.gain[:, :, None, :] + c.shift[:, :, None, :]
            else:
                full = z @ np.swapaxes(c.gain, -1, -2) + c.shift[:, :, None, :]
            yield stack, shares, np.swapaxes(full, 1, 2), c.spread

    def impute(self, data: Any, params: GaussianParameters) -> FloatArray:
        out, frame = to_numpy(data).copy(), self.constants.frame
        for stack, shares, full, _ in self._conditionals(data, params):
            mean = (shares[..., None] * full).sum(axis=-2) * frame.scale + frame.origin
            out[stack.positions] = np.where(stack.seen[:, None], out[stack.positions], mean)
        return out

    def draw(self, data: Any, params: GaussianParameters, draws: int, seed: int) -> FloatArray:
        """Completions: a component for each row, then what is missing given what was seen."""
        from scipy.special import ndtri

        base, frame = to_numpy(data).copy(), self.constants.frame
        n, d = base.shape
        out = np.repeat(base[None], draws, axis=0)
        u = np.stack([latent_numbers(seed, draw, n, 1 + d) for draw in range(draws)])
        for stack, shares, full, spread in self._conditionals(data, params):
            mine = u[:, stack.positions]  # (draws, u, m, 1 + d)
            labels = pick(shares, mine[..., 0])
            noise = ndtri(mine[..., 1:])
            units, m = np.arange(len(labels[0]))[:, None], np.arange(full.shape[1])
            centre = full[units, m, labels]
            if self.kind == "diag":
                moved = noise * np.sqrt(spread)[units, labels]
            else:
                root = _root(spread)[units, labels]
                moved = (root @ noise[..., None])[..., 0]
            values = (centre + moved) * frame.scale + frame.origin
            seen = stack.seen[:, None]
            out[:, stack.positions] = np.where(seen, out[:, stack.positions], values)
        return out

    def intervals(
        self, data: Any, params: GaussianParameters, level: float
    ) -> tuple[FloatArray, FloatArray]:
        """Ends of the central interval of each missing value's posterior, a normal mixture."""
        from scipy.special import ndtri

        frame, given = self.constants.frame, to_numpy(data).copy()
        ends = (given.copy(), given.copy())
        for stack, shares, full, spread in self._conditionals(data, params):
            diagonal = self.kind == "diag"
            variances = spread if diagonal else np.diagonal(spread, axis1=-2, axis2=-1)
            holes = np.broadcast_to(~stack.seen[:, None], full[:, :, 0].shape)
            unit, row, column = np.nonzero(holes)
            centre, share = full[unit, row, :, column], shares[unit, row]
            sd = np.sqrt(variances[unit, :, column])
            for q, out in zip((0.5 - level / 2, 0.5 + level / 2), ends, strict=True):
                own = centre + sd * ndtri(q)
                value = mixture_quantile(_normal(centre, sd), share, own, q)
                where = stack.positions[unit, row]
                out[where, column] = value * frame.scale[column] + frame.origin[column]
        return ends


def _normal(centre: FloatArray, sd: FloatArray) -> Callable[[FloatArray], FloatArray]:
    """Distribution functions of normal numbers, ``(n,) -> (n, K)``."""
    from scipy.special import ndtr

    return lambda y: np.asarray(ndtr((y[:, None] - centre) / sd))


def _root(spread: FloatArray) -> FloatArray:
    values, vectors = np.linalg.eigh(spread)
    return vectors * np.sqrt(np.maximum(values, 0))[..., None, :]


@stored("gaussian-mixture/full/missing")
@final
@dataclass(frozen=True, eq=False)
class MissingFull(_Missing, Full):
    """A covariance matrix per component, and missing values."""


@stored("gaussian-mixture/diag/missing")
@final
@dataclass(frozen=True, eq=False)
class MissingDiagonal(_Missing, Diagonal):
    """A variance per component and column, and missing values."""
