"""Ridge regressions of many rows at once, alone or tied to their neighbours.

Each row solves a small regression on the rows of the other side of a table; with penalties on
differences between rows they are one banded system. Memory is one number per cell and rank^2 per
row: the normal equations are added up pair by pair, never as outer products of cells.

Penalties along time pull towards "nothing changes". So that they do not shrink a growth that all
sites share, effects are penalised about a straight line whose slope is free: the penalty b' P b
becomes its minimum over d of (b - d x)' P (b - d x), with x the standardised time. That is P less a
matrix of rank one, which `Side` works with as it is.

Rows may also be tied along the edges of a graph, as sites are to their neighbours on a map. Such a
system has no narrow band, so it is solved by conjugate gradients, whose memory is one number per
unknown and edge.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, final

import numpy as np

from emfed.core.errors import NumericalError
from emfed.core.protocols import FloatArray, IntArray

Strength = float | FloatArray
SEASON = 12
"""The lag of the seasonal penalty: months of a year."""
FREE = 1e-3
"""The precision of a slope that is all but free: that of coefficients of covariates."""
_MOST_STEPS, _SMALL = 5000, 1e-20
"""Steps of conjugate gradients at most, and the squared error, relative, that ends them."""


def add_up(index: IntArray, values: FloatArray, size: int) -> FloatArray:
    """Values added by index: out[index[i]] += values[i]."""
    return np.asarray(np.bincount(index, values, minlength=size), dtype=np.float64)


@lru_cache(maxsize=16)
def line(count: int) -> FloatArray:
    """Standardised time: a straight line with mean 0 and variance 1 over its ``count`` places."""
    x = np.arange(count) - (count - 1) / 2
    out = np.asarray(x / np.sqrt(np.mean(x * x)))
    out.flags.writeable = False  # all callers share it
    return out


def drift_of(effects: bool, count: int) -> float:
    """The precision of the slope of effects along ``count`` times: 0 where there is no line."""
    return FREE if effects and count > 2 else 0.0


def lags_of(smoothing: float, seasonality: float, count: int) -> tuple[tuple[int, float], ...]:
    """The penalised differences between ``count`` time stamps."""
    lags = ((1, smoothing), (SEASON, seasonality))
    return tuple((lag, strength) for lag, strength in lags if strength > 0 and lag < count)


@final
@dataclass(frozen=True, eq=False)
class Graph:
    """Which rows are neighbours, with the weight of each pair."""

    count: int
    first: IntArray
    second: IntArray
    weights: FloatArray

    @cached_property
    def incidence(self) -> Any:
        """Rows x pairs: the root of a pair's weight at its first row, less that at its second."""
        from scipy.sparse import csr_array

        root, pair = np.sqrt(self.weights), np.arange(len(self.first))
        ends = (np.concatenate([self.first, self.second]), np.concatenate([pair, pair]))
        shape = (self.count, len(pair))
        return csr_array((np.concatenate([root, -root]), ends), shape=shape)

    @cached_property
    def laplacian(self) -> Any:
        """L with x' L x the weighted sum of squared differences of neighbours."""
        return (self.incidence @ self.incidence.T).tocsr()


@final
@dataclass(frozen=True, eq=False)
class Side:
    """One side of the table during half a sweep: whose rows move, and what they are tied to."""

    index: IntArray
    """The row of each cell."""
    other: IntArray
    """The fixed row of each cell."""
    design: FloatArray
    """The fixed side's rows."""
    effects: bool
    ridge: FloatArray
    lags: tuple[tuple[int, Strength], ...] = ()
    """Penalised differences between rows: (lag, penalty), one penalty or one for each column."""
    drift: float = 0.0
    """The precision of the slope of a line that the last unknown follows for nothing; 0: none."""
    graph: Graph | None = None
    """Neighbours whose differences are penalised; not together with lags or a line."""
    tie: Strength = 0.0
    """The penalty of those differences, one or one for each column."""
    _lines: dict[int, tuple[FloatArray, float]] = field(
        default_factory=dict, init=False, repr=False
    )

    @classmethod
    def penalty(
        cls,
        ridge: FloatArray,
        lags: tuple[tuple[int, Strength], ...] = (),
        drift: float = 0.0,
        graph: Graph | None = None,
        tie: Strength = 0.0,
    ) -> Side:
        """What rows are tied to, without cells: for normal equations that come from elsewhere."""
        none: IntArray = np.empty(0, dtype=np.int64)
        design = np.zeros((1, len(ridge)))
        return cls(none, none, design, True, ridge, lags, drift, graph, tie)

    @property
    def tied(self) -> bool:
        """Whether rows depend on each other."""
        return bool(self.lags) or self.drift > 0 or self.graph is not None

    def noises(self, count: int) -> int:
        """Normals that a draw of ``count`` rows takes."""
        pairs = 0 if self.graph is None else len(self.graph.first)
        return (count + pairs) * len(self.ridge) + 1

    def column(self, k: int) -> FloatArray | float:
        """The k-th regressor of each cell; an effect's is 1."""
        if self.effects and k == self.design.shape[1] - 1:
            return 1.0
        return self.design[self.other, k]

    def contribution(self, rows: FloatArray) -> FloatArray:
        """What the moving rows add to theta at each cell."""
        out = np.zeros(len(self.index))
        for k in range(rows.shape[1]):
            out += rows[self.index, k] * self.column(k)
        return out

    def gradient(self, score: FloatArray, rows: FloatArray) -> FloatArray:
        """The gradient of the penalised log-likelihood, by row."""
        out = np.empty_like(rows)
        for k in range(rows.shape[1]):
            out[:, k] = add_up(self.index, score * self.column(k), len(rows))
        return out - self.pull(rows)

    def information(self, weight: FloatArray, count: int) -> FloatArray:
        """Sum of weight times outer products of regressors, by row: ``(count, k, k)``."""
        width = self.design.shape[1]
        out = np.empty((count, width, width))
        for i in range(width):
            left = weight * self.column(i)
            for j in range(i, width):
                out[:, i, j] = add_up(self.index, left * self.column(j), count)
                out[:, j, i] = out[:, i, j]
        return out

    def pull(self, rows: FloatArray) -> FloatArray:
        """The gradient of the penalty."""
        out = self._plain_pull(rows)
        if self.drift:
            lifted, size = self._lifted(len(rows))
            out[:, -1] -= lifted * float(lifted @ rows[:, -1]) / size
        return out

    def _plain_pull(self, rows: FloatArray) -> FloatArray:
        """The same without a free line."""
        out = rows * self.ridge
        if self.graph is not None:
            out += self.tie * (self.graph.laplacian @ rows)
        for lag, strength in self.lags:
            difference = strength * (rows[lag:] - rows[:-lag])
            out[lag:] += difference
            out[:-lag] -= difference
        return out

    def _lifted(self, count: int) -> tuple[FloatArray, float]:
        """v = P x of the line x, and x' P x plus the precision of its slope; worked out once."""
        if count not in self._lines:
            x = np.zeros((count, len(self.ridge)))
            x[:, -1] = line(count)
            lifted = self._plain_pull(x)[:, -1]
            self._lines[count] = lifted, float(lifted @ x[:, -1]) + self.drift
        return self._lines[count]

    def price(self, rows: FloatArray) -> FloatArray:
        """The penalty of each row; a difference counts at its later row, the line at the last."""
        out = np.asarray(0.5 * (rows * rows) @ self.ridge)
        if self.graph is not None:  # each row has half of what its pairs cost
            out += 0.5 * (self.tie * rows * (self.graph.laplacian @ rows)).sum(axis=1)
        for lag, strength in self.lags:
            out[lag:] += 0.5 * (strength * (rows[lag:] - rows[:-lag]) ** 2).sum(axis=1)
        if self.drift:
            lifted, size = self._lifted(len(rows))
            out[-1] -= 0.5 * float(lifted @ rows[:, -1]) ** 2 / size
        return out

    def solve(
        self, information: FloatArray, right: FloatArray, noise: FloatArray | None = None
    ) -> FloatArray:
        """(information + penalty)^-1 right; with standard normal ``noise``, a draw about it.

        ``noise`` has a number for each unknown and, last, one for the slope of a free line; where
        rows are neighbours, `noises` says how many.
        """
        step, jump = self.solve_and_draw(information, right, noise)
        return step if noise is None else step + jump

    def solve_and_draw(
        self, information: FloatArray, right: FloatArray, noise: FloatArray | None
    ) -> tuple[FloatArray, FloatArray]:
        """The solution, and a draw about zero by the same factor of the system: 0 without noise."""
        if self.graph is not None:
            step, zero = self._solve_graph(self.graph, information, right, None), 0.0 * right
            if noise is None:
                return step, zero
            return step, self._solve_graph(self.graph, information, zero, noise)
        if not self.drift:
            both, jump = self._solve(information, right[..., None], noise)
            return both[..., 0], jump
        lifted, size = self._lifted(len(right))
        column = np.zeros_like(right)
        column[:, -1] = lifted
        both, jump = self._solve(information, np.stack([right, column], axis=-1), noise)
        # Sherman and Morrison: (M - v v' / c)^-1 = M^-1 + w w' / (c - v' w), w = M^-1 v.
        along = both[..., 1]
        gap = size - float(lifted @ along[:, -1])
        step = both[..., 0] + float((along * right).sum()) / gap * along
        if noise is not None:
            jump = jump + float(noise[-1]) / gap**0.5 * along
        return np.asarray(step), jump

    def _solve_graph(
        self, graph: Graph, information: FloatArray, right: FloatArray, noise: FloatArray | None
    ) -> FloatArray:
        """Conjugate gradients, preconditioned by each row's own block.

        A draw solves for a right side with noise of the system's covariance: a root of each row's
        block times normals, and a root of each pair's penalty times normals at both of its ends.
        """
        width = len(self.ridge)
        own = information + np.diag(self.ridge + 1e-12)
        if noise is not None:
            split = right.size
            along = noise[split:-1].reshape(-1, width) * np.sqrt(self.tie)
            root = np.linalg.cholesky(own)
            right = right + (root @ noise[:split].reshape(*right.shape, 1))[..., 0]
            right = right + graph.incidence @ along
        degree = graph.laplacian.diagonal()[:, None] * np.broadcast_to(self.tie, width)
        inverse = np.linalg.inv(own + degree[..., None] * np.eye(width))
        out, left = np.zeros_like(right), right.copy()
        ahead = step = (inverse @ left[..., None])[..., 0]
        size = first = float((left * ahead).sum())
        for _ in range(_MOST_STEPS):
            if size <= _SMALL * first:
                return out
            moved = (own @ step[..., None])[..., 0] + self.tie * (graph.laplacian @ step)
            length = size / float((step * moved).sum())
            out, left = out + length * step, left - length * moved
            ahead = (inverse @ left[..., None])[..., 0]
            before, size = size, float((left * ahead).sum())
            step = ahead + (size / before) * step
        raise NumericalError(
            "the ties between neighbouring sites are too strong to be solved for: lower spatial, "
            "or raise penalty."
        )

    def _solve(
        self, information: FloatArray, rights: FloatArray, noise: FloatArray | None
    ) -> tuple[FloatArray, FloatArray]:
        """Without a line, for several right sides, and the draw."""
        if noise is not None:
            noise = noise[: rights[..., 0].size].reshape(rights.shape[:-1])
        if self.lags:
            return _solve_banded(information, rights, self.ridge, self.lags, noise)
        system = information + np.diag(self.ridge)
        # Relative to each unknown's own size: one that is held by a large penalty (the effects of
        # sites in mode site-owner, 1e9) must not shrink the others.
        size = np.einsum("...ii->...i", system)[..., None]
        system = system + (1e-12 + 1e-10 * size) * np.eye(rights.shape[-2])
        out = np.asarray(np.linalg.solve(system, rights))
        if noise is None:
            return out, np.zeros(rights.shape[:-1])
        factor = np.linalg.cholesky(system)
        jump = np.linalg.solve(factor.transpose(0, 2, 1), noise[..., None])[..., 0]
        return out, np.asarray(jump, dtype=np.float64)


def _solve_banded(
    information: FloatArray,
    rights: FloatArray,
    ridge: FloatArray,
    lags: tuple[tuple[int, Strength], ...],
    noise: FloatArray | None,
) -> tuple[FloatArray, FloatArray]:
    """The rows as one system: blocks on the diagonal, the penalties of differences beside it."""
    # Their faces in scipy.linalg take five times as long as they do for some hundred unknowns.
    from scipy.linalg.lapack import dpbtrf, dpbtrs, dtbtrs

    count, width, many = rights.shape
    upper = max([width - 1, *(lag * width for lag, _ in lags)])
    band = np.zeros((upper + 1, count * width))
    for i in range(width):
        for j in range(i, width):
            band[upper + i - j, j::width] += information[:, i, j]
    band[upper].reshape(count, width)[:] += ridge + 1e-12 + 1e-10 * band[upper].max()
    for lag, strength in lags:
        diagonal = band[upper].reshape(count, width)
        diagonal[lag:] += strength
        diagonal[:-lag] += strength
        band[upper - lag * width].reshape(count, width)[lag:] -= strength
    factor, failed = dpbtrf(band)
    if failed:
        raise NumericalError("the system of tied rows is not positive definite: raise penalties.")
    out = dpbtrs(factor, rights.reshape(count * width, many))[0].reshape(rights.shape)
    if noise is None:
        return out, np.zeros((count, width))
    return out, dtbtrs(factor, noise.reshape(-1, 1))[0].reshape(count, width)
