"""Factors of owned rows as latent variables: what is the same however a worker's rows are laid out.

A row's factors z_j ~ N(0, I) belong to the worker that has the row:

    y_jl = w_l . (z_j, 1) + noise,    noise ~ N(0, sigma^2 / weight of the cell).

The statistics are means of the posterior moments of (z, 1) by column l, over what was seen there;
T is a small ridge regression per column and the residual variance. `site_owner.SiteOwner` reads
cells of a sites x times table, `row_owner.RowOwner` a plain table with holes.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from emfed.core.protocols import FloatArray, Layout, Metric, Model, Parameters
from emfed.models.sides import Side

SHRINK = 0.25
"""A column's moments shrink to no less than this in one round, in any direction."""

LEAST_SHARE = 0.02
"""The least share of the average: a column that hardly anyone saw does not dominate."""


@final
@dataclass(frozen=True)
class Loadings(Parameters):
    """theta: a row of loadings and a mean per column, and the noise variance."""

    loadings: FloatArray
    variance: FloatArray


@final
@dataclass(frozen=True, eq=False)
class OwnerMetric(Metric):
    """The metric in which statistics are compressed, at one set of parameters (no leading axes).

    With w_l the loadings of column l, m_l the share seen of it, sigma^2 the noise and N the cells
    of a sample, the coordinates of statistics (G, p, s) are

        cross'  = (p_l - G_l w_l) / (sigma sqrt(m_l))
        square' = (s - sum_l (2 w_l . p_l - w_l G_l w_l + sigma^2 m'_l)) / (sigma^2 sqrt(2 N))
        latent' = G_l / sqrt(m_l), its diagonal also / sqrt(2),

    m'_l the moment of the constant in G_l. To first order a move by (G, p, s) moves w_l by
    G_l^-1 (p_l - G_l w_l) and sigma^2 by what square' says, so half their squares are the nats per
    sample that it is worth; G itself moves nothing, and is measured by its own spread.
    """

    layout: Layout
    loadings: FloatArray
    noise: float
    mass: FloatArray
    cells: float

    def _scales(self) -> tuple[FloatArray, FloatArray, float]:
        """The sizes of cross, latent and square."""
        root = np.sqrt(np.maximum(self.mass, LEAST_SHARE * self.mass.mean()))[:, None]
        i, j = np.triu_indices(self.loadings.shape[1])
        pairs = np.where((i == j) & (i < self.loadings.shape[1] - 1), np.sqrt(2.0), 1.0)
        square = self.noise * float(np.sqrt(2 * self.cells))
        return root * np.sqrt(self.noise), root * pairs, square

    def _turned(self, latent: FloatArray) -> FloatArray:
        """G_l w_l."""
        width = self.loadings.shape[1]
        full = np.zeros((*latent.shape[:-1], width, width))
        i, j = np.triu_indices(width)
        full[..., i, j] = full[..., j, i] = latent
        return (full @ self.loadings[..., None])[..., 0]

    def _explained(self, latent: FloatArray, cross: FloatArray, turned: FloatArray) -> Any:
        """What s has without a change of sigma^2, ``(..., 1)``."""
        fitted = ((2 * cross - turned) * self.loadings).sum(axis=(-1, -2))
        return (fitted + self.noise * latent[..., -1].sum(axis=-1))[..., None]

    def whiten(self, vectors: FloatArray) -> FloatArray:
        parts, (a, b, c) = self.layout.split(vectors), self._scales()
        latent, cross = parts["latent"], parts["cross"]
        turned = self._turned(latent)
        square = parts["square"] - self._explained(latent, cross, turned)
        return self.layout.join(
            {"latent": latent / b, "cross": (cross - turned) / a, "square": square / c}
        )

    def unwhiten(self, vectors: FloatArray) -> FloatArray:
        parts, (a, b, c) = self.layout.split(vectors), self._scales()
        latent = parts["latent"] * b
        turned = self._turned(latent)
        cross = parts["cross"] * a + turned
        square = parts["square"] * c + self._explained(latent, cross, turned)
        return self.layout.join({"latent": latent, "cross": cross, "square": square})


class FactorOwner(Model):
    """T, its domain and its statistics; the E-step is the subclass's. ``(..., q)`` but with lags.

    A subclass has a ``rank`` and, once bound, the ``mass`` seen per column and sample.
    """

    rank: int
    mass: FloatArray | None

    @property
    @abstractmethod
    def n_columns(self) -> int:
        """The number of columns."""

    @abstractmethod
    def side(self) -> Side:
        """The penalty on loadings, per sample: statistics are means over all samples."""

    @abstractmethod
    def cells(self, moments: FloatArray) -> FloatArray:
        """Cells per sample, given the moments of (z, 1): what residuals are divided by."""

    @property
    @abstractmethod
    def noise_bounds(self) -> tuple[float, float]:
        """The least variance that T gives, and the least residual at which it is defined."""

    @property
    def width(self) -> int:
        """Factors and the constant."""
        return self.rank + 1

    @property
    def layout(self) -> Layout:
        """Moments of (z, 1), their products with values, and the mean square; by column."""
        pairs = self.width * (self.width + 1) // 2
        return Layout(
            (
                ("latent", (self.n_columns, pairs)),
                ("cross", (self.n_columns, self.width)),
                ("square", (1,)),
            )
        )

    @final
    def maximize(self, statistics: FloatArray) -> Loadings:
        """A ridge regression per column, and the residual variance."""
        moments, products, square = self._unpack(statistics)
        side = self.side()
        loadings = side.solve(moments, products)
        variance = self._residual(side, moments, products, square, loadings) / self.cells(moments)
        return Loadings(loadings, np.maximum(variance, self.noise_bounds[0])[..., None])

    def _unpack(self, statistics: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        parts = self.layout.split(np.asarray(statistics, dtype=np.float64))
        packed = parts["latent"]
        full = np.zeros((*packed.shape[:-1], self.width, self.width))
        i, j = np.triu_indices(self.width)
        full[..., i, j] = full[..., j, i] = packed
        return full, parts["cross"], parts["square"][..., 0]

    def _residual(
        self,
        side: Side,
        moments: FloatArray,
        products: FloatArray,
        square: FloatArray,
        loadings: FloatArray,
    ) -> FloatArray:
        """The squared residuals of a sample, the penalty included: both are in units of sigma^2."""
        fitted = np.einsum("...li,...lij,...lj->...", loadings, moments, loadings)
        residual = square - 2 * (loadings * products).sum(axis=(-1, -2)) + fitted
        return np.asarray(residual + 2 * side.price(loadings).sum(axis=-1))

    @final
    def surrogate(self, statistics: FloatArray, params: Loadings) -> FloatArray:
        """cells log(sigma^2) / 2 + (residual + penalty) / (2 sigma^2)."""
        moments, products, square = self._unpack(statistics)
        noise = params.variance[..., 0]
        total = self._residual(self.side(), moments, products, square, params.loadings)
        return np.asarray(0.5 * self.cells(moments) * np.log(noise) + 0.5 * total / noise)

    @final
    def penalty(self, params: Loadings) -> float:
        return float(self.side().price(params.loadings).sum()) / float(params.variance[0])

    @final
    def inside(self, statistics: FloatArray) -> bool:
        """Every column's moments are positive definite, and something is left unexplained."""
        if not np.isfinite(statistics).all():
            return False
        moments, products, square = self._unpack(statistics)
        side = self.side()
        if not _positive(moments, side.ridge).all():
            return False
        loadings = side.solve(moments, products)
        cells = self.cells(moments)
        left = self._residual(side, moments, products, square, loadings)
        return bool(np.all(cells > 0) and np.all(left > self.noise_bounds[1] * cells))

    @final
    def protect(self, before: FloatArray, after: FloatArray) -> FloatArray:
        """A column whose moments noise would all but wipe out in some direction goes less far.

        T divides by them, so without this the loadings of one column could throw off the fit.
        """
        if not np.isfinite(after).all():
            return after
        ridge = np.diag(self.side().ridge)
        old, new = (self._unpack(statistics)[0] + ridge for statistics in (before, after))
        least = _relative(old, new)
        if not np.any(least < SHRINK):
            return after
        share = ((1 - SHRINK) / (1 - np.minimum(least, SHRINK)))[:, None]
        there, here = self.layout.split(after), self.layout.split(before)
        mixed = {n: here[n] + share * (there[n] - here[n]) for n in ("latent", "cross")}
        return self.layout.join({**there, **mixed})

    @final
    def statistics_of(self, params: Loadings) -> FloatArray:
        """What the model would send of its own draws, seen as often as the data."""
        assert self.mass is not None
        moments = self.mass[:, None, None] * np.eye(self.width)
        square = self.mass @ (params.loadings**2).sum(axis=1)
        square = square + self.cells(moments) * params.variance[0]
        return self.layout.join(
            {
                "latent": moments[:, *np.triu_indices(self.width)],
                "cross": self.mass[:, None] * params.loadings,
                "square": np.array([square]),
            }
        )

    @final
    def metric(self, params: Loadings) -> OwnerMetric:
        """The metric of the regressions at these parameters."""
        assert self.mass is not None
        cells = float(self.cells(self.mass[:, None, None] * np.eye(self.width)))
        noise = float(params.variance[0])
        return OwnerMetric(self.layout, params.loadings, noise, self.mass, cells)


def _relative(old: FloatArray, new: FloatArray) -> FloatArray:
    """The least ratio of ``new`` to ``old``, positive definite matrices, over all directions."""
    inverse = np.linalg.inv(np.linalg.cholesky(old))
    return np.asarray(np.linalg.eigvalsh(inverse @ new @ np.swapaxes(inverse, -1, -2))[..., 0])


def _positive(moments: FloatArray, ridge: FloatArray) -> Any:
    """Which columns' moments are positive definite, with their ridge."""
    smallest = np.linalg.eigvalsh(moments + np.diag(ridge))[..., 0]
    return smallest > 0
