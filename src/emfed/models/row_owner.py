"""``site-owner`` for a plain table with holes: its rows are the sites, its columns the times.

Each row belongs to one worker and keeps its factors there; what rows share is the loadings of the
columns (see `emfed.models.owners`). Three things differ from `SiteOwner`:

* columns have units, so they are standardised by the means and variances of what all workers saw,
  which are known from the opening exchange;
* a sample is a row, so a weight is how often a row counts;
* the posterior covariance of a row's factors depends on its pattern of missingness alone, so the
  E-step runs pattern by pattern (`emfed.models.patterns`).

Given the loadings, a row's factors are a ridge regression with penalty sigma^2, for rows of the fit
and for new ones alike.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple, Self, final

import numpy as np

from emfed.core.errors import DataError, SettingsError, check_count, check_range, check_type, known
from emfed.core.protocols import FloatArray, IntArray, ModelWords, Names, Summaries
from emfed.core.registry import register_model
from emfed.core.streams import Purpose, normal_row
from emfed.models.component_summaries import Portrait, factor_portrait
from emfed.models.imputing import latent_numbers
from emfed.models.loadings import FactorParameters, rotate
from emfed.models.mixture import to_numpy
from emfed.models.naming import column_name
from emfed.models.owners import FactorOwner, Loadings
from emfed.models.parameters import (
    Frame,
    GaussianParameters,
    check_shapes,
    common_frame,
    is_constant,
)
from emfed.models.patterns import Stack, add_by_owner, row_stacks, sizes
from emfed.models.rows import check_seen, combine_seen, mean_over_rows, seen_moments, total_weight
from emfed.models.sampling import sample_gaussian
from emfed.models.sides import Side


class RowPosterior(NamedTuple):
    """Factors of the rows of some patterns, and what they follow from; all in the frame."""

    stack: Stack
    values: FloatArray
    """0 where nothing was seen, ``(u, m, d)``."""
    residuals: FloatArray
    """About the columns' means."""
    score: FloatArray
    mean: FloatArray
    """``(u, m, k)``."""
    covariance: FloatArray
    """``(u, k, k)``."""
    loadings: FloatArray
    """Loadings of each pattern's worker, or of all: ``(u or 1, d, k + 1)``."""
    noise: FloatArray
    """``(u or 1, 1, 1)``."""

    def estimates(self) -> FloatArray:
        """E[y | what was seen], ``(u, m, d)``."""
        k = self.mean.shape[-1]
        common = self.loadings[:, None, :, k]
        return self.mean @ np.swapaxes(self.loadings[..., :k], -1, -2) + common

    def variances(self) -> FloatArray:
        """Variances of values that were not seen, ``(u, d)``."""
        factors = self.loadings[..., : self.mean.shape[-1]]
        return ((factors @ self.covariance) * factors).sum(axis=-1) + self.noise[..., 0]


@register_model("row-owner")
@final
@dataclass(frozen=True, eq=False)
class RowOwner(FactorOwner):
    """Low rank plus noise, with factors for each row which stay with its worker.

    Parameters
    ----------
    rank : int
        The number of factors of a row.
    ridge : float
        How much the loadings of columns are shrunk, in units of a row of weight one.
    noise_floor : float
        The least noise, in variances of the columns.
    hidden : float
        The share of values that the fit does not see, so that it can be judged by them; which ones
        is a function of a row's values and the column, and so the same in every federation.
    frame : Frame or None
        The common origin and scale, which binding fills in.
    mass : array or None
        The share of values seen in each column, which binding fills in.
    varies : array or None
        1, but 0 for columns of one single value: they say nothing, and noise must not fill them.
        Binding fills it in.
    rows : float
        The total weight of all rows, which binding fills in.

    Examples
    --------
    >>> import numpy as np
    >>> import emfed
    >>> table = np.outer(np.arange(1.0, 9), [1.0, 2.0, 3.0])
    >>> table[2, 1] = np.nan
    >>> model = emfed.models.RowOwner(1, ridge=0.01)
    >>> result = emfed.fit(model, [table[:4], table[4:]], "em", rounds=50)
    >>> float(result.impute(table[:4])[2, 1].round())
    6.0
    """

    rank: int
    ridge: float = 1.0
    noise_floor: float = 1e-6
    hidden: float = 0.0
    frame: Frame | None = None
    mass: FloatArray | None = None
    varies: FloatArray | None = None
    rows: float = 0.0

    def __post_init__(self) -> None:
        check_count("rank", self.rank)
        check_range("ridge", self.ridge, 0, np.inf, open_high=True)
        check_range("noise_floor", self.noise_floor, 0, 1, open_high=True)
        check_range("hidden", self.hidden, 0, 1, open_high=True)

    @property
    def _frame(self) -> Frame:
        return known(self.frame)

    @property
    def n_features(self) -> int:
        return len(self._frame.origin)

    @property
    def n_columns(self) -> int:
        return self.n_features

    @property
    def allows_missing(self) -> bool:
        return True

    @property
    def noise_bounds(self) -> tuple[float, float]:
        """T raises the noise to the floor; residuals below minus the floor are none of data."""
        return self.noise_floor, -self.noise_floor or 1e-14

    def cells(self, moments: FloatArray) -> FloatArray:
        return np.asarray(moments[..., -1, -1].sum(axis=-1))

    def side(self) -> Side:
        """The penalty on loadings, per row; the mean of a column is hardly shrunk."""
        mean = max(1e-6, 1e-3 * self.ridge)
        return Side.penalty(np.array([*[self.ridge] * self.rank, mean]) / self.rows)

    # The opening exchange.

    def check(self, data: Any, where: str, columns: Names = None, first: int = 0) -> None:
        expected = None if self.frame is None else self.n_features
        check_seen(data, where, columns, expected, first)

    def summary(self, data: Any, weights: Any | None = None) -> dict[str, FloatArray]:
        """The share of values seen in each column, their mean and variance; rows by weight."""
        observed, mean, scatter = seen_moments(data, weights)
        total = total_weight(data, weights)
        count = total if weights is None else np.count_nonzero(to_numpy(weights), axis=-1)
        each = np.asarray(count / total)[..., None]
        return {"observed": observed, "mean": mean, "scatter": scatter, "rows": each}

    def combine(self, summaries: Summaries, shares: FloatArray) -> dict[str, FloatArray]:
        return {**combine_seen(summaries, shares), "rows": shares @ summaries["rows"]}

    def bind(self, summaries: Summaries, counts: IntArray, weights: FloatArray) -> Self:
        """Origin and scale of the columns, how much of each was seen, and the total weight."""
        whole, n = self.combine(summaries, weights), int(counts.sum())
        empty, d = np.flatnonzero(whole["observed"] <= 0), len(whole["observed"])
        if len(empty):
            name = column_name(int(empty[0]))
            raise DataError(f"nobody has a single value in column {name}: leave it out.")
        if self.rank > min(n, d):
            raise DataError(
                f"rank={self.rank} is more than a table of n_samples={n} rows and n_features={d} "
                f"columns can have: expected at most {min(n, d)}."
            )
        floored = self.noise_floor > 0
        return dataclasses.replace(
            self,
            frame=common_frame(whole["mean"], whole["scatter"], "diag", floored=floored),
            mass=whole["observed"],
            varies=np.where(is_constant(whole["mean"], whole["scatter"]), 0.0, 1.0),
            rows=n / float(whole["rows"][0]),
        )

    def group_shares(self, statistics: FloatArray) -> FloatArray:
        return self.layout.split(statistics)["latent"][..., -1]

    # The E-step.

    def _posteriors(
        self, data: Any, params: Loadings, weights: Any | None = None
    ) -> Iterator[RowPosterior]:
        frame, k = self._frame, self.rank
        data = self._shown(data)
        for stack in row_stacks(data, weights, frame.origin, self.layout.size):
            loadings, noise = self._own(params, stack.owners)
            seen = stack.seen.astype(np.float64)
            values = (stack.rows - frame.origin) / frame.scale
            factors = loadings[..., :k] * seen[..., None]
            precision = np.swapaxes(factors, -1, -2) @ factors / noise + np.eye(k)
            residuals = values - (loadings[..., k] * seen)[:, None, :]
            score = residuals @ factors / noise
            covariance = np.asarray(np.linalg.inv(precision), dtype=np.float64)
            yield RowPosterior(
                stack, values, residuals, score, score @ covariance, covariance, loadings, noise
            )

    def hiding(self, share: float) -> RowOwner:
        """The same model, from whose fit a share of the values is hidden."""
        return dataclasses.replace(self, hidden=share)

    def _shown(self, data: Any) -> Any:
        """The rows, with holes where values are hidden."""
        if not self.hidden:
            return data
        rows = np.asarray(to_numpy(data), dtype=np.float64)
        return np.where(chances(rows) < self.hidden, np.nan, rows)

    def _hidden_errors(self, data: Any, params: Loadings, weights: Any | None) -> FloatArray:
        """Squared errors of hidden values in units of the columns' scales; means over rows."""
        rows = np.asarray(to_numpy(data), dtype=np.float64)
        flat = rows.reshape(-1, rows.shape[-1])
        away = np.zeros(len(flat))
        for at in self._posteriors(data, params):
            where = at.stack.positions
            values = (flat[where] - self._frame.origin) / self._frame.scale
            errors = np.where(at.stack.seen[:, None], 0.0, values - at.estimates())
            away[where] = np.nansum(errors**2, axis=-1)  # values that are missing have no error
        return mean_over_rows(away.reshape(rows.shape[:-1]), weights)

    def _own(self, params: Loadings, owners: IntArray) -> tuple[FloatArray, FloatArray]:
        """Loadings and noise of each pattern's worker, or of all where they are common."""
        assert self.varies is not None
        loadings, noise = params.loadings * self.varies[:, None], params.variance[..., None]
        if loadings.ndim == 2:
            return loadings[None], noise[None]
        return (
            loadings.reshape(-1, *loadings.shape[-2:])[owners],
            noise.reshape(-1, 1, 1)[owners],
        )

    def _moments(self, at: RowPosterior) -> FloatArray:
        """Sums over the rows of each pattern, ``(u, q)``."""
        w = np.ones(at.mean.shape[:2]) if at.stack.weights is None else at.stack.weights
        k = self.rank
        one = np.concatenate([at.mean, np.ones((*at.mean.shape[:2], 1))], axis=-1)
        weighted = one * w[..., None]
        products = np.swapaxes(weighted, -1, -2) @ one
        products[:, :k, :k] += sizes(at.stack)[:, None, None] * at.covariance
        packed = products[:, *np.triu_indices(self.width)]
        return self.layout.join(
            {
                "latent": at.stack.seen[:, :, None] * packed[:, None, :],
                "cross": np.swapaxes(at.values, -1, -2) @ weighted,
                "square": ((at.values**2).sum(axis=-1) * w).sum(axis=-1, keepdims=True),
            }
        )

    def _densities(self, at: RowPosterior) -> FloatArray:
        """log p of what was seen in each row, in the user's units, ``(u, m)``."""
        noise = at.noise[..., 0]
        seen = at.stack.seen
        volume = seen.sum(axis=-1, keepdims=True) * np.log(2 * np.pi * noise)
        volume = volume + 2 * (seen @ np.log(self._frame.scale))[:, None]
        shrink = np.linalg.slogdet(at.covariance)[1][:, None]
        square = (at.residuals**2).sum(axis=-1) / noise - (at.score * at.mean).sum(axis=-1)
        return np.asarray(-0.5 * (square + volume - shrink))

    def expected_statistics(
        self, data: Any, params: Loadings, weights: Any | None = None
    ) -> FloatArray:
        """Posterior moments of the rows' factors, by column; means over rows."""
        return self.evaluate(data, params, weights)[0]

    def evaluate(
        self, data: Any, params: Loadings, weights: Any | None = None
    ) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Statistics and log-likelihood in one pass, and the error of what is hidden.

        There are no components, and so no entropy whose place it would take.
        """
        lead, q = data.shape[:-2], self.layout.size
        total, values = np.zeros((prod(lead), q)), np.zeros(prod(lead))
        for at in self._posteriors(data, params, weights):
            owners, w = at.stack.owners, at.stack.weights
            densities = self._densities(at)
            densities = densities if w is None else densities * w
            add_by_owner(total, owners, self._moments(at))
            add_by_owner(values, owners, densities.sum(axis=-1))
        count = total_weight(data, weights)
        likelihood = values.reshape(lead) / count
        error = self._hidden_errors(data, params, weights) if self.hidden else np.zeros(lead)
        return total.reshape(*lead, q) / count[..., None], likelihood, error

    def responsibilities(self, data: Any, params: Loadings) -> FloatArray:
        """All rows are of one component, ``(..., rows, 1)``."""
        return np.ones((*data.shape[:-1], 1))

    def score_samples(self, data: Any, params: Loadings) -> FloatArray:
        """log p of what was seen in each row."""
        out = np.empty(prod(data.shape[:-1]))
        for at in self._posteriors(data, params):
            out[at.stack.positions] = self._densities(at)
        return out.reshape(data.shape[:-1])

    def log_likelihood(self, data: Any, params: Loadings, weights: Any | None = None) -> FloatArray:
        """The (weighted) mean over rows of log p of what was seen."""
        return mean_over_rows(self.score_samples(data, params), weights)

    # Missing values.

    def _missing(self, data: FloatArray, params: Loadings) -> Iterator[RowPosterior]:
        whole = self.hiding(0.0)
        return (at for at in whole._posteriors(data, params) if not at.stack.seen.all())

    def impute(self, data: Any, params: Loadings) -> FloatArray:
        out, frame = to_numpy(data).copy(), self._frame
        for at in self._missing(out, params):
            where = at.stack.positions
            values = at.estimates() * frame.scale + frame.origin
            out[where] = np.where(at.stack.seen[:, None], out[where], values)
        return out

    def draw(self, data: Any, params: Loadings, draws: int, seed: int) -> FloatArray:
        """Completions: factors given what was seen, then values given the factors."""
        from scipy.special import ndtri

        base, frame, k = to_numpy(data).copy(), self._frame, self.rank
        out = np.repeat(base[None], draws, axis=0)
        for at in self._missing(base, params):
            where, seen = at.stack.positions, at.stack.seen[:, None]
            root = np.swapaxes(np.linalg.cholesky(at.covariance), -1, -2)
            for index in range(draws):
                numbers = latent_numbers(seed, index, len(base), k + self.n_features)[where]
                noise = np.asarray(ndtri(numbers))
                drawn = at._replace(mean=at.mean + noise[..., :k] @ root)
                values = drawn.estimates() + noise[..., k:] * np.sqrt(at.noise)
                values = values * frame.scale + frame.origin
                out[index, where] = np.where(seen, base[where], values)
        return out

    def intervals(self, data: Any, params: Loadings, level: float) -> tuple[FloatArray, FloatArray]:
        """Ends of the central interval of each missing value, which is normal."""
        from scipy.special import ndtri

        given, frame = to_numpy(data).copy(), self._frame
        low, high = given.copy(), given.copy()
        reach = float(ndtri(0.5 + level / 2))
        for at in self._missing(given, params):
            where, seen = at.stack.positions, at.stack.seen[:, None]
            centre, half = at.estimates(), reach * np.sqrt(at.variances())[:, None]
            for out, end in ((low, centre - half), (high, centre + half)):
                values = end * frame.scale + frame.origin
                out[where] = np.where(seen, given[where], values)
        return low, high

    # Starts and units.

    def start(self, seed: int) -> Loadings:
        """Random loadings that explain half of the variances."""
        d, k = self.n_features, self.rank
        draw = normal_row(seed, 0, Purpose.START, d * k)
        loadings = draw.reshape(d, k) * np.sqrt(0.5 / k)
        return Loadings(np.pad(loadings, ((0, 0), (0, 1))), np.array([0.5]))

    def to_user(self, params: Loadings) -> FactorParameters:
        """One factor analyser in the user's units, rotated as `emfed.ppca` says."""
        origin, scale, k = self._frame.origin, self._frame.scale, self.rank
        assert self.varies is not None
        noise, factors = params.variance * scale**2, params.loadings * self.varies[:, None]
        loadings = rotate(factors[:, :k] * scale[:, None], noise)
        means = factors[:, k] * scale + origin
        return FactorParameters(np.ones(1), means[None], loadings[None], noise[None])

    def from_user(self, params: FactorParameters) -> Loadings:
        """Check parameters given in the user's units and bring them into the frame."""
        check_type("start", params, FactorParameters, "FactorParameters(weights, means, ...)")
        d, k = self.n_features, self.rank
        shapes = {"weights": (1,), "means": (1, d), "loadings": (1, d, k), "noise": (1, d)}
        check_shapes(params, shapes)
        if np.any(params.noise <= 0):
            raise SettingsError("start noise: expected positive numbers.")
        origin, scale = self._frame.origin, self._frame.scale
        means = (params.means[0] - origin) / scale
        loadings = np.column_stack([params.loadings[0] / scale[:, None], means])
        noise = max(float((params.noise[0] / scale**2).mean()), self.noise_floor)
        return Loadings(loadings, np.array([noise]))

    def free_parameters(self) -> int:
        """Loadings up to their rotation, means, and the noise."""
        d, k = self.n_features, self.rank
        return d * (k + 1) + 1 - k * (k - 1) // 2

    def sample(self, params: Loadings, count: int, seed: int) -> tuple[FloatArray, IntArray]:
        """Complete rows; all are of the one component."""
        user = self.to_user(params)
        gaussian = GaussianParameters(user.weights, user.means, user.covariances())
        return sample_gaussian(gaussian, "full", count, seed)

    def portrait(self, params: FactorParameters, names: Sequence[str]) -> Portrait:
        return factor_portrait(params, names)

    def words(self) -> ModelWords:
        return ModelWords(f"low-rank model of rank {self.rank}")

    def describe(self) -> dict[str, Any]:
        names = ("rank", "ridge", "noise_floor", *(["hidden"] if self.hidden else []))
        return {"model": "row-owner", **{name: getattr(self, name) for name in names}}


def chances(rows: FloatArray) -> FloatArray:
    """A number in [0, 1) for each value, from the bits of its row and its column.

    It is the finaliser of splitmix64 over the row's values one after the other, then over that and
    the column; holes count as one value, whatever their bits.
    """
    # 0.0 and -0.0 are one value.
    bits = np.where(np.isnan(rows), 1e300, rows + 0.0).view(np.uint64)
    state = np.zeros(rows.shape[:-1], dtype=np.uint64)
    for column in range(rows.shape[-1]):
        state = _mixed(state + bits[..., column])
    columns = np.arange(1, rows.shape[-1] + 1, dtype=np.uint64)
    return np.asarray((_mixed(state[..., None] ^ _mixed(columns)) >> np.uint64(11)) * 2.0**-53)


def _mixed(numbers: Any) -> Any:
    """The next number of splitmix64, modulo 2^64."""
    z = numbers + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
