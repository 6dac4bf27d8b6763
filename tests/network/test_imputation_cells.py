"""Cells of a table whose records stay at sites: loop, stacked and network come to the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

import emfed
from emfed import LocalTransport, RemoteFederation, Site
from emfed.core.protocols import Federation
from emfed.data import WorkerData
from emfed.imputation import FieldTable, Structure, impute
from emfed.imputation.site_owner import worker_rows
from emfed.models.site_owner import COLUMNS
from emfed.network.loop import LoopFederation
from emfed.network.stacked import StackedFederation
from tests.imputation.tables import small_table

FACTORS = Structure(rank=2, penalty=3.0, effects=False)
MODES: dict[str, dict[str, Any]] = {
    "observed": {"mode": "observed", "structure": Structure(rank=2, penalty=3.0), "rounds": 6},
    "half": {
        "mode": "observed",
        "structure": Structure(rank=1, penalty=3.0),
        "rounds": 6,
        "participation": emfed.Bernoulli(0.5),
    },
    "cell": {"mode": "cell", "structure": FACTORS, "rounds": 12},
    "chosen": {"mode": "cell", "rank": 2, "rounds": 8},
}


def frames(table: FieldTable) -> dict[str, pl.DataFrame]:
    """Each worker's own rows."""
    cells = worker_rows(table)
    parts = zip(table.workers, table.offsets[:-1], table.offsets[1:], strict=True)
    return {key: pl.DataFrame(cells[a:b], schema=list(COLUMNS)) for key, a, b in parts}


def sites_of(table: FieldTable, folder: Path, **rules: Any) -> dict[str, Site]:
    return {key: Site(rows, folder / key, **rules) for key, rows in frames(table).items()}


def federations(table: FieldTable, folder: Path) -> dict[str, Federation]:
    data = WorkerData(worker_rows(table), table.offsets, list(table.workers), COLUMNS)
    return {
        "loop": LoopFederation(data),
        "stacked": StackedFederation(data),
        "network": RemoteFederation(LocalTransport(sites_of(table, folder)), columns=COLUMNS),
    }


@pytest.mark.parametrize("mode", MODES)
def test_cells_elsewhere_are_fitted_as_here_byte_for_byte(mode: str, tmp_path: Path) -> None:
    """Sites with their own records, a loop and a stack: same parameters, rounds and ledger."""
    table = small_table(workers=7, records=260)
    here = impute(table, seed=3, **MODES[mode])
    everywhere = np.indices(table.shape).reshape(2, -1)
    for name, federation in federations(table, tmp_path).items():
        there = impute(federation, grid=table.grid, seed=3, **MODES[mode])
        found, wanted = there.params.theta(*everywhere), here.params.theta(*everywhere)
        np.testing.assert_allclose(found, wanted, rtol=1e-8, atol=1e-8, err_msg=name)
        assert there.ledger.summary() == here.ledger.summary(), name
        assert there.records.column("bytes_up").tolist() == here.records.column("bytes_up").tolist()
        assert list(there.table.workers) == list(table.workers)
        assert np.array_equal(there.cells.keys, here.cells.keys)
