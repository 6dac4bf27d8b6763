"""Modes ``cell`` and ``site-owner``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import emfed
from emfed.imputation import ColumnNames, FieldTable, Structure, impute, read_records
from emfed.models.site_owner import COLUMNS, SiteOwner
from tests.helpers import plain_fit
from tests.imputation.tables import pooled_error, small_table


def owned(table: FieldTable) -> FieldTable:
    """The same records, each site in one worker."""
    from emfed.imputation.table import build_table

    return build_table(
        table.grid,
        table.workers,
        table.site % len(table.workers),
        table.site,
        table.time,
        table.weights,
        table.values,
        table.intake,
    )


def test_a_fit_of_factors_alone_ends_where_one_more_step_changes_nothing() -> None:
    """theta = T(theta + residuals / w), worked out with dense tables."""
    table = small_table(records=300)
    structure = Structure(2, 2.0, effects=False)
    done = impute(table, structure=structure)
    cells, params = table.pooled, done.params
    theta = params.dense(np.arange(len(table.sites)))
    inner = theta - params.offset
    weight, sums = np.zeros(table.shape), np.zeros(table.shape)
    weight[cells.sites, cells.times], sums[cells.sites, cells.times] = cells.weights, cells.sums
    moved = inner + (sums - weight * theta) / weight.max()
    left, values, right = np.linalg.svd(moved, full_matrices=False)
    shrunk = np.maximum(values[:2] - 2.0 / weight.max(), 0)
    assert np.abs(inner).max() > 0.3
    assert np.allclose((left[:, :2] * shrunk) @ right[:2], inner, atol=1e-5)


def test_site_owner_s_statistics_are_the_posterior_moments() -> None:
    """Against sums over cells and sites, with the factors' posterior by the book."""
    table = owned(small_table(sites=6, months=8, records=30))
    rows = table.rows
    model = SiteOwner(8, rank=2).bind(
        {k: v[None] for k, v in SiteOwner(8, rank=2).summary(rows).items()},
        np.array([len(rows)]),
        np.ones(1),
    )
    params = model.start(3)
    got = model.layout.split(model.expected_statistics(rows, params))
    w, noise = params.loadings, params.variance[0]
    moments, products = np.zeros((8, 3, 3)), np.zeros((8, 3))
    for site in range(6):
        own = rows[rows[:, 0] == site]
        time, weight = own[:, 1].astype(int), own[:, 2]
        value = (own[:, 3] / weight - model.centre) / model.spread
        # The joint law of z and the cell means.
        cross = w[time, :2]
        cov = cross @ cross.T + np.diag(noise / weight)
        gain = cross.T @ np.linalg.inv(cov)
        mean = gain @ (value - w[time, 2])
        spread = np.eye(2) - gain @ cross
        one = np.append(mean, 1.0)
        full = np.outer(one, one)
        full[:2, :2] += spread
        for t, n, y in zip(time, weight, value, strict=True):
            moments[t] += n * full
            products[t] += n * y * one
    i, j = np.triu_indices(3)
    assert np.allclose(got["latent"], moments[:, i, j] / len(rows))
    assert np.allclose(got["cross"], products / len(rows))


def test_em_with_site_owners_never_lowers_the_likelihood() -> None:
    table = owned(small_table(records=250))
    data = emfed.data.WorkerData(table.rows, table.offsets, list(table.workers), COLUMNS)
    for options in ({}, {"smoothing": 2.0, "seasonality": 1.0}):
        model = SiteOwner(table.bins.count, rank=2, ridge=0.5, **options)
        monitor = emfed.fitting.Monitor(mean_field=False)
        result = plain_fit(model, data, rounds=60, federation="loop", monitor=monitor)
        values = result.records.column("objective")[1:]
        assert np.all(np.diff(values) < 1e-10)
        assert values[-1] < values[0] - 0.1


def test_site_owner_in_loop_and_stacked_is_the_same_run() -> None:
    table = owned(small_table(records=250))
    data = emfed.data.WorkerData(table.rows, table.offsets, list(table.workers), COLUMNS)
    loop, stacked = (
        plain_fit(SiteOwner(table.bins.count, 2), data, emfed.EM(), rounds=5, federation=name)
        for name in ("loop", "stacked")
    )
    assert np.allclose(loop.statistics, stacked.statistics, rtol=1e-9)


def test_site_owner_names_a_site_with_two_owners() -> None:
    with pytest.raises(emfed.DataError, match="needs each site in one worker; 's0' is in 'w0'"):
        impute(small_table(), mode="site-owner", rounds=1)
    with pytest.raises(emfed.SettingsError, match="Gaussian"):
        impute(owned(small_table("poisson")), mode="site-owner", rounds=1)


def test_oystercatchers_by_site_owners(data_dir: Path) -> None:
    whole = read_records(
        data_dir / "oystercatcher_monthly.csv.gz",
        ColumnNames(date=("year", "month"), observer=None),
        family="log1p",
    )
    table, held = whole.regroup(10, 0).split(0.1, 0)
    result = impute(table, mode="site-owner", rounds=60)
    additive = pooled_error(table, Structure(0, 1.0, 0.5, 0.5), held)
    assert result.score(held) < 0.92 * additive
    low, high = result.intervals(held.sites, held.times, 0.9)
    value = table.family.backward(held.sums / held.weights)
    assert 0.8 < np.mean((low <= value) & (value <= high)) < 0.97
    # Nothing that grows with the number of cells leaves a worker: L x 20 numbers, not 138 x 240.
    up = result.ledger.counts[2, 0, 1].mean() / result.rounds
    assert up < 240 * 20


def test_settings_of_modes_are_taken_as_given() -> None:
    table = small_table()
    assert impute(table, rank=1, penalty=0.0).solver.structure.penalty == 0
    with pytest.raises(emfed.SettingsError, match="takes no site_covariates"):
        impute(table, mode="paper", site_covariates=np.ones((3, 2)))


def test_a_table_shows_its_rounds_and_takes_the_words_of_a_fit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """``verbose`` draws the bar of `fit`, and a number is the probability of a worker."""
    table = owned(small_table(workers=4, records=120))
    options: dict[str, Any] = {"mode": "site-owner", "rank": 1, "penalty": 3.0, "rounds": 3}
    by_number = impute(table, participation=0.5, verbose=True, **options)
    told = capsys.readouterr().err
    assert told.startswith("impute: opening")
    assert "round 1" in told
    by_name = impute(table, participation=emfed.algorithms.Bernoulli(0.5), **options)
    assert by_number.ledger.summary() == by_name.ledger.summary()
    impute(table, rank=1, verbose=True)
    assert "choosing rank and penalties" in capsys.readouterr().err
