"""Modes ``observed`` and ``cell``: what a server of cells does with a round's uploads.

``observed``: FedEM on the smaller augmentation, statistics on observed cells alone.

The paper's latent variables are all unobserved cells of all workers. They carry no information:
integrating them out leaves, for each worker, the weight and the sum of its observed cells, and no
latent variable at all. What is left of Algorithm 1 is its memories and its compression: the worker
uploads Q(y_c - D_c), the server moves S by gamma (sum D_c + sum Q / p_c - S), and T(S) is a
penalised low-rank fit of cell sums. Requests carry nothing: no worker needs the parameters.

``cell``: the paper's statistic with a step that converges, for the Gaussian family.

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

from dataclasses import dataclass, replace
from math import sqrt
from typing import Self, final

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.linalg import LinearOperator

from emfed.algorithms import CellEM
from emfed.core.errors import SettingsError
from emfed.core.protocols import (
    FloatArray,
    Heard,
    IntArray,
    Model,
    ServerState,
    StepInfo,
    Summaries,
)
from emfed.imputation.lowrank import Cells, TableParameters
from emfed.imputation.sweeps import Solver, leading

WARM_SWEEPS = 3
"""Sweeps in a round; T is finished, and restarted once, at the end."""
Pair = tuple[FloatArray, FloatArray]
"""Factors (u, v) of u v^T."""


@final
@dataclass(frozen=True, kw_only=True)
class Observed(CellEM):
    """Cell sums by compressed innovations, and a few sweeps of T(S) every round."""

    solver: Solver
    cells: Cells
    """The cells that somebody observed, with their weights."""

    def server_step(
        self, model: Model, seed: int, state: ServerState, heard: Heard
    ) -> tuple[ServerState, StepInfo]:
        """S += gamma H, and sweeps on from the parameters of the round before."""
        state, info = super().server_step(model, seed, state, heard)
        cells, warm = self.seen(state), self.params(state)
        guarded = int(np.count_nonzero(cells.sums != state.statistics[self.cells.weights > 0]))
        params = self.solver.start(cells) if warm is None else warm
        for _ in range(WARM_SWEEPS):
            params = self.solver.sweep(cells, params, self.solver.structure)
        extras = {
            "offset": np.array(params.offset),
            "sites": params.sites,
            "times": params.times,
            "coefficients": params.coefficients,
        }
        value = self.solver.objective(cells, params)
        return replace(state, extras=extras), replace(info, guard_hits=guarded, objective=value)

    def params(self, state: ServerState) -> TableParameters | None:
        """The parameters that the sweeps have come to, None before the first round."""
        if not state.extras:
            return None
        told, solver = state.extras, self.solver
        return TableParameters(
            float(told["offset"]),
            told["sites"],
            told["times"],
            solver.structure.effects,
            told["coefficients"],
            solver.covariates,
        )

    def seen(self, state: ServerState) -> Cells:
        """The sums as the server knows them, moved to where data could be."""
        cells = _here(self.cells, state.statistics)
        return cells.with_sums(self.solver.family.project(cells.sums, cells.weights))

    def attended(
        self, weights: FloatArray, counts: IntArray, summaries: Summaries, state: ServerState
    ) -> tuple[Self, ServerState]:
        """Keep the part of each cell's sum that those who are here count for."""
        before = self.cells.weights
        share = np.divide(weights, before, out=np.zeros_like(weights), where=before > 0)
        now = replace(self, cells=replace(self.cells, weights=weights))
        return now, replace(state, statistics=state.statistics * share)

    def finish(self, state: ServerState, final: Solver) -> TableParameters:
        """T(S), swept until it stands still; one restart guards against a poor early basin."""
        cells, warm = self.seen(state), self.params(state)
        rough = Solver(final.family, final.structure, final.covariates, seed=final.seed)
        start = rough.fit(cells)
        if warm is not None and warm.rank == start.rank:
            settled = [start, rough.settle(cells, warm)]
            start = min(settled, key=lambda params: final.objective(cells, params))
        return final.settle(cells, start)


@final
@dataclass(frozen=True, kw_only=True)
class Proximal(CellEM):
    """Accelerated proximal steps on theta, by compressed residuals."""

    residuals: bool = True
    solver: Solver
    cells: Cells
    """The cells that somebody observed, with their weights."""
    offset: float

    def __post_init__(self) -> None:
        super().__post_init__()
        solver = self.solver
        if not solver.family.quadratic:
            raise SettingsError(
                "mode 'cell' is for the Gaussian family (or log1p, family='log1p'): for others the "
                "filled-in cells are not low rank plus sparse. Use mode 'observed'."
            )
        if solver.structure.effects or solver.structure.smooth or solver.covariates.count:
            raise SettingsError(
                "mode 'cell' has factors and an offset alone: no effects, covariates or smoothing."
            )

    @property
    def weight(self) -> float:
        """The largest of a cell: a step of 1 / w is safe."""
        return float(self.cells.weights.max())

    def start(self) -> dict[str, FloatArray]:
        """Factors at zero, and no momentum: what the server keeps beside S and V."""
        (rows, columns), rank = self.cells.shape, self.solver.structure.rank
        zero = np.zeros((rows, rank)), np.zeros((columns, rank))
        return self._extras(zero, zero, 1.0)

    def _extras(self, now: Pair, ahead: Pair, momentum: float) -> dict[str, FloatArray]:
        theta = self.offset + _product(ahead, self.cells.sites, self.cells.times)
        names = ("sites", "times", "ahead_sites", "ahead_times")
        pairs = dict(zip(names, (*now, *ahead), strict=True))
        return {**pairs, "momentum": np.array(momentum), "theta": theta}

    def server_step(
        self, model: Model, seed: int, state: ServerState, heard: Heard
    ) -> tuple[ServerState, StepInfo]:
        """Residuals at the extrapolated theta, a step of 1 / w, the leading factors, momentum."""
        estimate, state = self.gathered(state, heard)
        cells, told = self.cells, state.extras
        move = csr_array((estimate / self.weight, (cells.sites, cells.times)), shape=cells.shape)
        now: Pair = (told["sites"], told["times"])
        ahead: Pair = (told["ahead_sites"], told["ahead_times"])
        new = self._shrink(now, ahead, move, seed)
        state = replace(
            state,
            statistics=estimate + cells.weights * told["theta"],
            extras=self._accelerate(now, ahead, new, float(told["momentum"])),
        )
        value = self.solver.objective(self.seen(state), self.params(state))
        field = float(estimate @ estimate)
        return state, StepInfo(field, 1 / self.weight, 0, objective=value)

    def _shrink(self, now: Pair, ahead: Pair, move: csr_array, seed: int) -> Pair:
        """T(S) of S = the extrapolated theta plus a sparse move: thresholded SVD."""
        left, right = ahead
        rank, threshold = self.solver.structure.rank, self.solver.structure.penalty / self.weight
        if rank == 0:
            return now
        transposed = move.T.tocsr()
        operator = LinearOperator(
            move.shape,
            matvec=lambda x: left @ (right.T @ x) + move @ x,
            rmatvec=lambda x: right @ (left.T @ x) + transposed @ x,
            matmat=lambda x: left @ (right.T @ x) + move @ x,
            dtype=np.float64,
        )
        u, values, v = leading(operator, rank, seed)
        root = np.sqrt(np.maximum(values - threshold, 0.0))
        return u * root, v * root

    def _accelerate(
        self, now: Pair, ahead: Pair, new: Pair, momentum: float
    ) -> dict[str, FloatArray]:
        """Extrapolate, or forget the momentum where it points uphill."""
        step = _inner(ahead, new) - _inner(ahead, now)
        step -= _inner(new, new) - _inner(new, now)
        if step > 0:  # <ahead - new, new - now>
            momentum = 1.0
        following = (1 + sqrt(1 + 4 * momentum**2)) / 2
        beta = (momentum - 1) / following
        further = (
            np.concatenate([(1 + beta) * new[0], -beta * now[0]], axis=1),
            np.concatenate([new[1], now[1]], axis=1),
        )
        return self._extras(new, further, following)

    def seen(self, state: ServerState) -> Cells:
        """Sums as the server can work them out from residuals and theta."""
        return _here(self.cells, state.statistics)

    def attended(
        self, weights: FloatArray, counts: IntArray, summaries: Summaries, state: ServerState
    ) -> tuple[Self, ServerState]:
        """The offset is the mean of those who are here; factors stay, momentum does not."""
        offset = mean_of(weights, counts, summaries)
        now = replace(self, cells=replace(self.cells, weights=weights), offset=offset)
        factors: Pair = (state.extras["sites"], state.extras["times"])
        return now, replace(state, extras=now._extras(factors, factors, 1.0))

    def params(self, state: ServerState) -> TableParameters:
        """The last theta, without extrapolation."""
        sites, times = state.extras["sites"], state.extras["times"]
        return TableParameters(self.offset, sites, times, effects=False)


def mean_of(weights: FloatArray, counts: IntArray, summaries: Summaries) -> float:
    """The mean of all values, from the mean that each worker told of its cells' sums."""
    return float(counts @ summaries["mean"][:, 0]) / float(weights.sum())


def _here(cells: Cells, sums: FloatArray) -> Cells:
    """Cells with these sums, without those that nobody who is here has seen."""
    return cells.with_sums(sums).take(np.flatnonzero(cells.weights > 0))


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
