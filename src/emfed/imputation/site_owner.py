"""Mode ``site-owner``: a field table as rows of `emfed.models.site_owner`, and back."""

from __future__ import annotations

import numpy as np

from emfed.core.errors import DataError
from emfed.core.protocols import FloatArray
from emfed.imputation.lowrank import TableParameters
from emfed.imputation.table import FieldTable
from emfed.models.owners import Loadings
from emfed.models.site_owner import SiteOwner


def worker_rows(table: FieldTable) -> FloatArray:
    """The rows of all workers, in the order of `emfed.models.site_owner.COLUMNS`."""
    return np.stack([table.site, table.time, table.weights, table.values], axis=1).astype(
        np.float64
    )


def table_parameters(model: SiteOwner, table: FieldTable, params: Loadings) -> TableParameters:
    """theta of the whole table: each owner works out its own sites' factors."""
    rows = worker_rows(table)
    site = rows[:, 0].astype(np.int64)
    value = (rows[:, 3] - rows[:, 2] * model.centre) / model.spread
    mean, _ = model.posterior(
        np.append(site, len(table.sites) - 1),  # sites without a record keep the prior mean
        np.append(rows[:, 1].astype(np.int64), 0),
        np.append(rows[:, 2], 0.0),
        np.append(value, 0.0),
        params,
    )
    k = model.rank
    return TableParameters(
        model.centre,
        np.concatenate([model.spread * mean, np.zeros((len(mean), 1))], axis=1),
        np.concatenate([params.loadings[:, :k], model.spread * params.loadings[:, k:]], axis=1),
        effects=True,
    )


def check_owners(table: FieldTable) -> None:
    """Refuse a site that two workers have records of."""
    owner = np.repeat(np.arange(len(table.workers)), np.diff(table.offsets))
    pairs = np.unique(np.stack([table.site, owner], axis=1), axis=0)
    twice = np.flatnonzero(np.diff(pairs[:, 0]) == 0)
    if len(twice):
        site, first = pairs[twice[0]]
        second = pairs[twice[0] + 1, 1]
        raise DataError(
            f"mode 'site-owner' needs each site in one worker; {table.sites[site]!r} is in "
            f"{table.workers[first]!r} and {table.workers[second]!r} (of {len(twice)} like it). "
            "Let the workers be those who own sites, or use mode 'observed'."
        )
