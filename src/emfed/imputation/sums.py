"""Sums of cells, sent once: all that the fit of a table needs of its workers.

The paper's latent variables are all cells that a worker has not observed. They carry no
information: integrating them out leaves, for each worker, the weight and the sum of each cell that
it observed, and no latent variable. These numbers depend on no parameters, so every worker sends
them once, and what is left of FedMissEM is T(S), a penalised low-rank fit of the pooled sums
(`emfed.imputation.sweeps`), which needs no further exchange.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np

from emfed.core.errors import DataError, SettingsError
from emfed.core.ledger import Ledger
from emfed.core.protocols import Federation, WorkerCells
from emfed.core.wire import LARGEST_PAYLOAD
from emfed.core.wording import Setting, Wording
from emfed.fitting.session import Session
from emfed.imputation.table import FieldTable, Grid, known_table
from emfed.models.cells import CellSums, PaddedCells, listed_cells
from emfed.models.site_owner import COLUMNS

MOST_MASKED_CELLS = LARGEST_PAYLOAD // 32 - 1000
"""Numbers of 32 bytes that a message has room for."""


@final
@dataclass(frozen=True, eq=False)
class Gathered:
    """What workers sent."""

    table: FieldTable
    """The cells of each worker; with masks those of all together, under one name."""
    ledger: Ledger


def gathered(network: Federation, grid: Grid, seed: int) -> Gathered:
    """The cells of every worker that takes part, as it observed them."""
    model = CellSums(*grid.shape)
    session = Session(model, network, columns=COLUMNS, seed=seed, masks=False)
    opening = session.opening
    assert opening.cells is not None
    names = list(opening.names or map(str, range(len(opening.cells))))
    return Gathered(known_table(grid, names, opening.cells), session.ledger)


def gathered_masked(network: Federation, grid: Grid, seed: int, observers: int) -> Gathered:
    """Masked sums over all workers of the cells that at least so many of them observed.

    Two sums: how many workers observed each cell of the table, then weights and sums of the cells
    that enough observed. Every worker sends numbers of all cells, zeros where it has no record.
    """
    shape = grid.shape
    if (cells := shape[0] * shape[1]) > MOST_MASKED_CELLS:
        raise SettingsError(
            Wording(
                "masked sums need a number of every cell from every site, and this table has {:,} "
                "cells; at most {:,} have room in a message. Choose coarser bins or fewer places, "
                "or fit with {}, which every site must allow.",
                *(cells, MOST_MASKED_CELLS, Setting("masks", False)),
            )
        )
    first = Session(PaddedCells(*shape), network, columns=COLUMNS, seed=seed, masks=True)
    seen = np.rint(first.summary["cell_observers"] * first.samples)
    chosen = seen >= observers
    if not chosen.any():
        most = int(seen.max())
        raise DataError(f"no cell was seen by {observers} workers; by {most} at most.")
    model = PaddedCells(*shape, observers, listed_cells(chosen))
    session = Session(model, network, columns=COLUMNS, seed=seed, masks=True)
    weights, sums = (
        session.summary[name] * session.samples for name in ("cell_weights", "cell_sums")
    )
    # Weights are counts of records; sums are those of floats, which 2^-96 leaves as they are.
    pooled = WorkerCells(np.flatnonzero(chosen), np.round(weights, 9), sums)
    session.ledger.restore(session.ledger.counts + first.ledger.counts)
    return Gathered(known_table(grid, ["all"], [pooled]), session.ledger)
