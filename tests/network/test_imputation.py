"""Imputation by site owners, each elsewhere."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import emfed
from emfed import LocalTransport, RemoteFederation, Site
from emfed.imputation import Structure, impute
from emfed.imputation.fit import QUANTISER_OF_TIMES
from emfed.imputation.site_owner import table_parameters, worker_rows
from emfed.models.site_owner import COLUMNS, SiteOwner
from tests.imputation.tables import small_table
from tests.imputation.test_modes import owned


def test_site_owners_elsewhere_come_to_the_same_table(tmp_path: Path) -> None:
    """Over 25 rounds, as in one process; each owner works out its own sites' factors."""
    import polars as pl

    table = owned(small_table())
    structure = Structure(rank=2, penalty=3.0, smoothing=10.0)
    here = impute(table, mode="site-owner", structure=structure, rounds=25, seed=3)
    cells = worker_rows(table)
    sites = {}
    for i, key in enumerate(table.workers):
        mine = cells[table.offsets[i] : table.offsets[i + 1]]
        sites[key] = Site(pl.DataFrame(mine, schema=list(COLUMNS)), tmp_path / key)
    model = SiteOwner(table.bins.count, structure.rank, structure.penalty, structure.smoothing)
    there = emfed.fit(
        model,
        None,
        emfed.FedEM(QUANTISER_OF_TIMES),
        federation=RemoteFederation(LocalTransport(sites)),
        rounds=25,
        seed=3,
    )
    loadings = there.model.maximize(there.statistics)
    found = table_parameters(there.model, table, loadings)
    everywhere = np.indices(table.shape).reshape(2, -1)
    np.testing.assert_allclose(
        found.theta(*everywhere), here.params.theta(*everywhere), rtol=1e-9, atol=1e-9
    )
    assert here.ledger.summary()["round"] == there.ledger.summary()["round"]
