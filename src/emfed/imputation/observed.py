"""``observed``: FedEM on the smaller augmentation, statistics on observed cells alone.

The paper's latent variables are all unobserved cells of all workers. They carry no information:
integrating them out leaves, for each worker, the weight and the sum of its observed cells, and no
latent variable at all. What is left of Algorithm 1 is its memories and its compression: the worker
uploads Q(y_c - D_c), the server moves S by gamma (sum D_c + sum Q / p_c - S), and T(S) is a
penalised low-rank fit of cell sums. Requests carry nothing: no worker needs the parameters.
"""

from __future__ import annotations

from dataclasses import replace
from typing import final

import numpy as np

from emfed.core.ledger import Ledger
from emfed.imputation.lowrank import Cells, TableParameters
from emfed.imputation.runs import Step, TableRun, best_of
from emfed.imputation.supports import Exchange, Settings, Supports
from emfed.imputation.sweeps import Solver
from emfed.imputation.table import FieldTable

WARM_SWEEPS = 3
"""Sweeps in a round; T is finished, and restarted once, at the end."""


@final
class ObservedRun(TableRun):
    """Cell sums by compressed innovations."""

    def __init__(self, table: FieldTable, solver: Solver, settings: Settings, seed: int) -> None:
        ledger = Ledger(len(table.workers), table.workers)
        supports = Supports(table)
        super().__init__(ledger, len(table.site), np.zeros(supports.cells.size))
        self.table, self.solver, self.supports = table, solver, supports
        self.exchange = Exchange(supports, settings, seed, ledger)
        self.params: TableParameters | None = None
        self.opened(supports.workers)

    def advance(self, round_: int) -> Step:
        """H = sum D_c + sum Q(y_c - D_c) / p_c - S, S += gamma H, then a few sweeps of T(S)."""
        estimate, asked = self.exchange.gather(round_, self.table.values)
        state, gamma = self.state, self.exchange.step_size
        field = estimate - state.statistics
        self.state = replace(
            state,
            round=round_ + 1,
            statistics=state.statistics + gamma * field,
            control=self.exchange.control,
        )
        cells = self.seen()
        guarded = int(np.count_nonzero(cells.sums != self.state.statistics))
        warm = self.solver.start(cells) if self.params is None else self.params
        for _ in range(WARM_SWEEPS):
            warm = self.solver.sweep(cells, warm, self.solver.structure)
        self.params = warm
        return Step(
            asked,
            field,
            gamma,
            len(self.table.site),
            self.solver.objective(cells, warm),
            guarded,
        )

    def seen(self) -> Cells:
        """The sums as the server knows them, moved to where data could be."""
        cells = self.supports.cells
        family = self.solver.family
        return cells.with_sums(family.project(self.state.statistics, cells.weights))

    def finish(self) -> TableParameters:
        """T(S), swept until it stands still; one restart guards against a poor early basin."""
        cells, final = self.seen(), self.solver
        rough = Solver(final.family, final.structure, final.covariates, seed=final.seed)
        start = rough.fit(cells)
        if self.params is not None and self.params.rank == start.rank:
            start = best_of(final, cells, [start, rough.settle(cells, self.params)])
        return final.settle(cells, start)
