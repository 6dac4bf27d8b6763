"""``site-owner``: each site belongs to one worker, and its factor never leaves it.

Probabilistic PCA with missing values. A site's factors z_j ~ N(0, I) are the latent variable:

    y_jl = w_l . (z_j, 1) + noise,    noise ~ N(0, sigma^2 / weight of the cell).

The statistics are sums per time stamp of the posterior moments of (z, 1), weighted by the cells
seen then; the M-step is a small regression per time stamp. No support is sent and no site is
named: the server learns, per worker and time stamp, how much was seen and its moments with the
factors. It is an ordinary `emfed.core.protocols.Model`, so `emfed.fit` runs it with any algorithm.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Self, final

import numpy as np

from emfed.core.errors import DataError, check_count, known
from emfed.core.protocols import FloatArray, IntArray, ModelWords, Names, Summaries
from emfed.core.registry import register_model
from emfed.core.streams import Purpose, normal_row
from emfed.models.owners import FactorOwner, Loadings
from emfed.models.sides import Side, add_up, drift_of, lags_of

_FLOOR = 1e-9
"""The least variance of all values: of a constant table there would be none."""
COLUMNS = ("site", "time", "weight", "total")
"""A worker's rows: a cell's site and time as indices, its weight and its sum."""


@register_model("site-owner")
@final
@dataclass(frozen=True)
class SiteOwner(FactorOwner):
    """Low rank of a sites x times table, with factors of sites which stay with their owner.

    `emfed.impute` fits it in the mode "site-owner". The rows of a worker have the columns
    `emfed.models.site_owner.COLUMNS`.

    Parameters
    ----------
    times : int
        The number of time stamps.
    rank : int
        The number of factors of a site.
    ridge : float
        How much loadings are shrunk, in units of the weight of one observation.
    smoothing : float
        How strongly neighbouring time stamps are tied together, in the same units.
    seasonality : float
        How strongly time stamps 12 apart are tied together, in the same units.
    samples : int or None
        The number of rows of all workers, which binding fills in.
    mass : array or None
        The share of each time stamp, which binding fills in.
    centre : float
        The mean of all values, which binding fills in.
    spread : float
        The standard deviation of all values, which binding fills in.

    Examples
    --------
    >>> from emfed.models import SiteOwner
    >>> SiteOwner(times=12, rank=2).rank
    2
    """

    times: int
    rank: int = 3
    ridge: float = 1.0
    smoothing: float = 0.0
    seasonality: float = 0.0
    samples: int | None = None
    mass: FloatArray | None = None
    centre: float = 0.0
    spread: float = 1.0

    def __post_init__(self) -> None:
        check_count("rank", self.rank)
        check_count("times", self.times)

    def check(self, data: Any, where: str, columns: Names = None, first: int = 0) -> None:
        """Four columns of finite numbers, times inside the table, positive weights."""
        rows = np.asarray(data)
        if rows.shape[0] == 0:
            raise DataError(f"{where} has no rows; leave it out.")
        if rows.ndim != 2 or rows.shape[1] != len(COLUMNS) or not np.isfinite(rows).all():
            raise DataError(f"{where}: expected finite columns {COLUMNS}; got {rows.shape}.")
        if rows[:, 1].min() < 0 or rows[:, 1].max() >= self.times or rows[:, 2].min() <= 0:
            raise DataError(f"{where}: times must lie below {self.times}, weights above 0.")

    def summary(self, data: Any, weights: Any | None = None) -> dict[str, FloatArray]:
        """Weight seen per time stamp, and the first two moments of values; means over cells."""
        return _each(data, weights, self._summary)

    def _summary(self, rows: FloatArray) -> dict[str, FloatArray]:
        time, weight, total = rows[:, 1].astype(np.int64), rows[:, 2], rows[:, 3]
        count = max(1, int(np.count_nonzero(weight)))
        safe = np.where(weight > 0, weight, 1.0)
        return {
            "mass": add_up(time, weight, self.times) / count,
            "total": np.array([total.sum() / count]),
            "square": np.array([(total**2 / safe).sum() / count]),
        }

    def combine(self, summaries: Summaries, shares: FloatArray) -> dict[str, FloatArray]:
        return {name: shares @ values for name, values in summaries.items()}

    def bind(self, summaries: Summaries, counts: IntArray, weights: FloatArray) -> Self:
        """Centre, spread and the share of each time stamp."""
        mass = weights @ summaries["mass"]
        centre = float(weights @ summaries["total"][:, 0]) / float(mass.sum())
        spread = float(weights @ summaries["square"][:, 0]) - centre**2 * float(mass.sum())
        return dataclasses.replace(
            self,
            samples=int(counts.sum()),
            mass=mass,
            centre=centre,
            spread=max(spread, _FLOOR) ** 0.5,
        )

    def expected_statistics(
        self, data: Any, params: Loadings, weights: Any | None = None
    ) -> FloatArray:
        """Posterior moments of the sites' factors, by time stamp; means over cells."""
        return _each(data, weights, lambda rows: {"s": self._expected(rows, params)})["s"]

    def _expected(self, rows: FloatArray, params: Loadings) -> FloatArray:
        site, time, weight, value = self._read(rows)
        mean, spread = self.posterior(site, time, weight, value, params)
        k, count = self.rank, max(1, int(np.count_nonzero(weight)))
        full = np.zeros((len(mean), self.width, self.width))
        full[:, :k, :k] = spread + mean[:, :, None] * mean[:, None, :]
        full[:, :k, k] = full[:, k, :k] = mean
        full[:, k, k] = 1.0
        one = np.concatenate([mean, np.ones((len(mean), 1))], axis=1)
        upper = np.triu_indices(self.width)
        moments = [
            add_up(time, weight * full[site, i, j], self.times) for i, j in zip(*upper, strict=True)
        ]
        products = [add_up(time, value * one[site, i], self.times) for i in range(self.width)]
        safe = np.where(weight > 0, weight, 1.0)
        parts = {
            "latent": np.stack(moments, axis=1) / count,
            "cross": np.stack(products, axis=1) / count,
            "square": np.array([(value**2 / safe).sum() / count]),
        }
        return self.layout.join(parts)

    def _read(self, rows: FloatArray) -> tuple[IntArray, IntArray, FloatArray, FloatArray]:
        """Local site numbers, times, weights, and sums in the common frame."""
        site = np.unique(rows[:, 0], return_inverse=True)[1]
        weight = rows[:, 2]
        return (
            site,
            rows[:, 1].astype(np.int64),
            weight,
            (rows[:, 3] - weight * self.centre) / self.spread,
        )

    def posterior(
        self, site: IntArray, time: IntArray, weight: FloatArray, value: FloatArray, params: Any
    ) -> tuple[FloatArray, FloatArray]:
        """Mean and covariance of each site's factors given its cells."""
        k, count = self.rank, int(site.max()) + 1
        noise = float(params.variance[0])
        side = Side(site, time, params.loadings[:, :k], False, np.ones(k))
        precision = np.eye(k) + side.information(weight / noise, count)
        residual = (value - weight * params.loadings[time, k]) / noise
        score = side.gradient(residual, np.zeros((count, k)))
        covariance = np.asarray(np.linalg.inv(precision), dtype=np.float64)
        return np.einsum("jik,jk->ji", covariance, score), covariance

    @property
    def n_columns(self) -> int:
        return self.times

    @property
    def noise_bounds(self) -> tuple[float, float]:
        """No floor: T is defined where something is left unexplained."""
        return 0.0, _FLOOR

    def cells(self, moments: FloatArray) -> FloatArray:
        return np.ones(moments.shape[:-3])

    def side(self) -> Side:
        """The penalty on loadings, per cell."""
        n, mean = known(self.samples), max(1e-6, 1e-3 * self.ridge)  # means are hardly shrunk
        lags = lags_of(self.smoothing / n, self.seasonality / n, self.times)
        # Without ties each time stamp has its mean for itself, and no line is needed.
        drift = drift_of(bool(lags), self.times) / n
        return Side.penalty(np.array([*[self.ridge] * self.rank, mean]) / n, lags, drift)

    def log_likelihood(self, data: Any, params: Loadings, weights: Any | None = None) -> FloatArray:
        return _each(data, weights, lambda rows: {"v": self._likelihood(rows, params)})["v"]

    def _likelihood(self, rows: FloatArray, params: Loadings) -> FloatArray:
        site, time, weight, value = self._read(rows)
        k, noise, real = self.rank, float(params.variance[0]), weight > 0
        safe = np.where(real, weight, 1.0)
        mean, covariance = self.posterior(site, time, weight, value, params)
        residual = value - weight * params.loadings[time, k]
        side = Side(site, time, params.loadings[:, :k], False, np.ones(k))
        score = side.gradient(residual / noise, np.zeros_like(mean))
        square = (residual**2 / safe).sum() / noise - (score * mean).sum()
        volume = np.log(2 * np.pi * noise * self.spread**2 / safe)[real].sum()
        shrink = np.linalg.slogdet(covariance)[1].sum()
        return np.asarray(-0.5 * (square + volume - shrink) / max(1, int(np.count_nonzero(real))))

    def start(self, seed: int) -> Loadings:
        """Small random loadings about the mean."""
        draw = normal_row(seed, 0, Purpose.START, self.times * self.rank).reshape(
            self.times, self.rank
        )
        # One common factor to begin with: most of what sites differ in is how much they hold.
        draw = 0.1 * draw
        draw[:, 0] += 0.5
        return Loadings(np.pad(draw, ((0, 0), (0, 1))), np.array([0.5]))

    def words(self) -> ModelWords:
        return ModelWords(f"low-rank model of sites and times, of rank {self.rank}")

    def describe(self) -> dict[str, Any]:
        names = ("times", "rank", "ridge", "smoothing", "seasonality")
        return {"model": "site-owner", **{name: getattr(self, name) for name in names}}


def _each(data: Any, weights: Any | None, function: Any) -> dict[str, FloatArray]:
    """A function of one worker's rows, over leading axes; padding has weight 0 and says nothing."""
    rows = np.asarray(data, dtype=np.float64)
    if weights is not None:
        scale = np.asarray(weights, dtype=np.float64)[..., None]
        rows = np.concatenate([rows[..., :2], rows[..., 2:] * scale], axis=-1)
    if rows.ndim == 2:
        return dict(function(rows))
    parts = [_each(part, None, function) for part in rows]
    return {name: np.stack([part[name] for part in parts]) for name in parts[0]}
