"""``observed``: FedEM on the smaller augmentation, statistics on observed cells alone.

The paper's latent variables are all unobserved cells of all workers. They carry no information:
integrating them out leaves, for each worker, the weight and the sum of its observed cells, and no
latent variable at all. What is left of Algorithm 1 is its memories and its compression: the worker
uploads Q(y_c - D_c), the server moves S by gamma (sum D_c + sum Q / p_c - S), and T(S) is a
penalised low-rank fit of cell sums. Requests carry nothing: no worker needs the parameters.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np

from emfed.algorithms import CellEM
from emfed.core.protocols import Model, ServerState, StepInfo
from emfed.imputation.lowrank import Cells, TableParameters
from emfed.imputation.sweeps import Solver

WARM_SWEEPS = 3
"""Sweeps in a round; T is finished, and restarted once, at the end."""


@final
@dataclass(frozen=True, kw_only=True)
class Observed(CellEM):
    """Cell sums by compressed innovations, and a few sweeps of T(S) every round."""

    solver: Solver
    cells: Cells
    """Those that somebody observed, with their weights."""

    def server_step(
        self, model: Model, seed: int, state: ServerState, *told: Any
    ) -> tuple[ServerState, StepInfo]:
        """S += gamma H, and sweeps on from the parameters of the round before."""
        state, info = super().server_step(model, seed, state, *told)
        cells, warm = self.seen(state), self.params(state)
        guarded = int(np.count_nonzero(cells.sums != state.statistics))
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
        family, cells = self.solver.family, self.cells
        return cells.with_sums(family.project(state.statistics, cells.weights))

    def finish(self, state: ServerState, final: Solver) -> TableParameters:
        """T(S), swept until it stands still; one restart guards against a poor early basin."""
        cells, warm = self.seen(state), self.params(state)
        rough = Solver(final.family, final.structure, final.covariates, seed=final.seed)
        start = rough.fit(cells)
        if warm is not None and warm.rank == start.rank:
            settled = [start, rough.settle(cells, warm)]
            start = min(settled, key=lambda params: final.objective(cells, params))
        return final.settle(cells, start)
