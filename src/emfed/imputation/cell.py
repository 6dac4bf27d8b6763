"""``cell``: the paper's statistic with a step that converges, for the Gaussian family.

A worker's statistic is theta plus its residual on the cells it observed; the server knows theta, so
only the residual travels. With n workers Algorithm 1 moves theta by 1/n of the summed residuals,
though no cell need be seen by all of them: the objective's curvature is the largest total weight of
a cell, w, and a step of 1/w is safe (majorisation). Then S = theta + residuals / w is low rank plus
sparse, T(S) shrinks its leading singular values by penalty / w, and momentum with restart
(Nesterov; O'Donoghue and Candes 2015) makes up for the size of the augmentation.

theta = offset + u_j . v_l, without effects, as in the paper; the offset is the mean, told in the
opening.
"""

from __future__ import annotations

from dataclasses import replace
from math import sqrt
from typing import final

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.linalg import LinearOperator

from emfed.core.errors import SettingsError
from emfed.core.ledger import Ledger
from emfed.core.protocols import FloatArray, IntArray
from emfed.core.wire import ENVELOPE, floats_size
from emfed.imputation.lowrank import Cells, TableParameters
from emfed.imputation.runs import Step, TableRun
from emfed.imputation.supports import Exchange, Settings, Supports
from emfed.imputation.sweeps import Solver, leading
from emfed.imputation.table import FieldTable

Pair = tuple[FloatArray, FloatArray]
"""Factors (u, v) of u v^T."""


@final
class CellRun(TableRun):
    """Accelerated proximal steps on theta, by compressed residuals."""

    def __init__(self, table: FieldTable, solver: Solver, settings: Settings, seed: int) -> None:
        if not solver.family.quadratic:
            raise SettingsError(
                "mode 'cell' is for the Gaussian family (or log1p): for others the filled-in cells "
                "are not low rank plus sparse. Use mode 'observed'."
            )
        if solver.structure.effects or solver.structure.smooth or solver.covariates.count:
            raise SettingsError(
                "mode 'cell' has factors and an offset alone: no effects, covariates or smoothing."
            )
        ledger = Ledger(len(table.workers), table.workers)
        supports = Supports(table)
        super().__init__(ledger, len(table.site), np.zeros(supports.cells.size))
        self.table, self.solver, self.supports, self.seed = table, solver, supports, seed
        self.exchange = Exchange(supports, settings, seed, ledger)
        everyone = np.arange(supports.workers)
        ledger.add("opening", "up", everyone, floats_size(1), ENVELOPE)  # its total
        ledger.add("opening", "down", everyone, floats_size(1), ENVELOPE)  # the offset
        self.offset = float(table.values.sum() / table.weights.sum())
        self.weight = float(supports.cells.weights.max())
        rank, (rows, columns) = solver.structure.rank, table.shape
        self._now: Pair = (np.zeros((rows, rank)), np.zeros((columns, rank)))
        self._ahead: Pair = self._now
        self._momentum = 1.0
        self._counts = np.diff(table.offsets)
        self.opened(supports.workers)

    def advance(self, round_: int) -> Step:
        """Residuals at the extrapolated theta, a step of 1 / w, the leading factors, momentum."""
        table, cells = self.table, self.supports.cells
        here = self.offset + _product(self._ahead, table.site, table.time)
        residuals = table.values - table.weights * here
        down = np.array([floats_size(int(q)) for q in self._counts])  # theta on its own cells
        estimate, asked = self.exchange.gather(round_, residuals, down)
        move = csr_array((estimate / self.weight, (cells.sites, cells.times)), shape=cells.shape)
        new = self._shrink(move)
        theta = self.offset + _product(self._ahead, cells.sites, cells.times)
        self.state = replace(
            self.state,
            round=round_ + 1,
            statistics=estimate + cells.weights * theta,
            control=self.exchange.control,
        )
        self._accelerate(new)
        value = self.solver.objective(self.seen(), self.finish())
        return Step(asked, estimate, 1 / self.weight, len(table.site), value)

    def adopt(self, solver: Solver) -> None:
        """Go on with another rank or penalty, from zero: memories and what they hold stay."""
        self.solver = solver
        rows, columns = self.table.shape
        rank = solver.structure.rank
        self._now = (np.zeros((rows, rank)), np.zeros((columns, rank)))
        self._ahead, self._momentum = self._now, 1.0

    def _shrink(self, move: csr_array) -> Pair:
        """T(S) of S = the extrapolated theta plus a sparse move: thresholded SVD."""
        left, right = self._ahead
        rank, threshold = self.solver.structure.rank, self.solver.structure.penalty / self.weight
        if rank == 0:
            return self._now
        transposed = move.T.tocsr()
        operator = LinearOperator(
            move.shape,
            matvec=lambda x: left @ (right.T @ x) + move @ x,
            rmatvec=lambda x: right @ (left.T @ x) + transposed @ x,
            matmat=lambda x: left @ (right.T @ x) + move @ x,
            dtype=np.float64,
        )
        u, values, v = leading(operator, rank, self.seed)
        root = np.sqrt(np.maximum(values - threshold, 0.0))
        return u * root, v * root

    def _accelerate(self, new: Pair) -> None:
        """Extrapolate, or forget the momentum where it points uphill."""
        step = _inner(self._ahead, new) - _inner(self._ahead, self._now)
        step -= _inner(new, new) - _inner(new, self._now)
        if step > 0:  # <ahead - new, new - now>
            self._momentum = 1.0
        following = (1 + sqrt(1 + 4 * self._momentum**2)) / 2
        beta = (self._momentum - 1) / following
        now, self._now, self._momentum = self._now, new, following
        self._ahead = (
            np.concatenate([(1 + beta) * new[0], -beta * now[0]], axis=1),
            np.concatenate([new[1], now[1]], axis=1),
        )

    def seen(self) -> Cells:
        """Sums as the server can work them out from residuals and theta."""
        return self.supports.cells.with_sums(self.state.statistics)

    def finish(self) -> TableParameters:
        """The last theta, without extrapolation."""
        return TableParameters(self.offset, self._now[0], self._now[1], effects=False)


def _product(pair: Pair, sites: IntArray, times: IntArray) -> FloatArray:
    """u v^T at the cells named."""
    left, right = pair
    out = np.zeros(len(sites))
    for k in range(left.shape[1]):
        out += left[sites, k] * right[times, k]
    return out


def _inner(first: Pair, second: Pair) -> float:
    """<u v^T, x y^T> = tr (u^T x)(y^T v), never forming either."""
    return float(np.sum((first[0].T @ second[0]) * (first[1].T @ second[1])))
