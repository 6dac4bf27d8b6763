"""Cells of workers whose rows are in this process or in a cluster, each sent once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, final

import numpy as np

from emfed.aggregation.simulated import SimulatedSums
from emfed.aggregation.unmasked import UnmaskedWorkers
from emfed.core.ledger import Ledger
from emfed.core.protocols import WorkerCells
from emfed.core.sums import AskedWorkers, drive
from emfed.data.tables import Workers
from emfed.imputation.cells import OwnCells, check_cells, pooled_cells
from emfed.imputation.lowrank import Cells
from emfed.imputation.table import FieldTable, Grid, known_table
from emfed.models.site_owner import COLUMNS

TOGETHER = "all"
"""What those are called whose cells are known as a sum alone."""


@final
@dataclass(frozen=True, eq=False)
class Gathered:
    """What workers sent."""

    table: FieldTable
    """The cells of each worker; with masks those of all together, under one name."""
    ledger: Ledger


def gathered(workers: AskedWorkers, grid: Grid, masks: bool, seed: int, observers: int) -> Gathered:
    """The cells of every worker; with masks sums of those that enough of them have seen."""
    workers = workers.view(COLUMNS)
    workers.everywhere(partial(_checked, grid.shape))
    n = len(workers.totals)
    ledger = Ledger(n, workers.names)
    if masks:
        sums = SimulatedSums(workers, n, seed, ledger)
        cells = drive(pooled_cells(grid.shape, n, observers), sums)
        return Gathered(table_of_sums(grid, cells), ledger)
    cells = UnmaskedWorkers(workers, ledger=ledger)(OwnCells(grid.shape, np.arange(n)))
    names = list(workers.names or map(str, range(n)))
    return Gathered(known_table(grid, names, cells), ledger)


def _checked(shape: Any, data: Workers) -> None:
    check_cells(shape, data)


def table_of_sums(grid: Grid, cells: Cells) -> FieldTable:
    """The table of cells that are known as sums over all workers."""
    return known_table(grid, [TOGETHER], [WorkerCells(cells.keys, cells.weights, cells.sums)])
