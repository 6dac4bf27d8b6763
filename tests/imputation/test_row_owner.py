"""Rows of a plain table as sites: the same model as ``site-owner``, and what noise does to it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

import emfed
from emfed.fitting.program import _going_on
from emfed.fitting.words import read_words
from emfed.models import build_model
from emfed.models.owners import SHRINK
from emfed.models.parameters import Frame
from emfed.models.row_owner import RowOwner, chances
from emfed.models.site_owner import SiteOwner
from tests.helpers import OPEN, plain_fit
from tests.registry import REGISTRY

TABLES = REGISTRY["low rank, NaN"].tables


def bound(model: RowOwner, rows: Any) -> RowOwner:
    summary = {name: value[None] for name, value in model.summary(rows).items()}
    return model.bind(summary, np.array([len(rows)]), np.ones(1))


def test_rows_are_sites_and_columns_are_times() -> None:
    """On cells of standardised rows `SiteOwner` has the same statistics, T and likelihood."""
    rows = np.concatenate(TABLES)
    model = bound(RowOwner(2, 1.5), rows)
    assert model.frame is not None
    site, time = np.nonzero(~np.isnan(rows))
    values = ((rows - model.frame.origin) / model.frame.scale)[site, time]
    cells = np.stack([site, time, np.ones(len(site)), values], axis=1)
    other = SiteOwner(rows.shape[1], 2, 1.5)
    summary = {name: value[None] for name, value in other.summary(cells).items()}
    other = replace(other.bind(summary, np.array([len(cells)]), np.ones(1)), centre=0.0, spread=1.0)
    params, each = model.start(3), len(cells) / len(rows)
    mine = model.expected_statistics(rows, params)
    theirs = other.expected_statistics(cells, params)
    np.testing.assert_allclose(mine, each * theirs, atol=1e-12)
    for name, value in model.maximize(mine).arrays().items():
        np.testing.assert_allclose(value, other.maximize(theirs).arrays()[name], rtol=1e-8)
    frame = replace(model, frame=Frame(model.frame.origin * 0, model.frame.scale * 0 + 1))
    standard = (rows - model.frame.origin) / model.frame.scale
    assert frame.log_likelihood(standard, params) == pytest.approx(
        each * float(other.log_likelihood(cells, params)), rel=1e-12
    )


def test_the_likelihood_is_that_of_the_gaussian_it_implies() -> None:
    rows = TABLES[0]
    model = bound(RowOwner(2), rows)
    params = model.start(1)
    user = model.to_user(params)
    gaussian = emfed.models.GaussianParameters(user.weights, user.means, user.covariances())
    full = plain_fit(
        emfed.gaussian_mixture(1, missing=True),
        [rows],
        rounds=0,
        start=gaussian,
        start_statistics="parameters",
    )
    np.testing.assert_allclose(
        model.score_samples(rows, params), full.score_samples(rows), atol=1e-8
    )
    np.testing.assert_allclose(model.impute(rows, params), full.impute(rows), rtol=1e-8)
    for mine, theirs in zip(
        model.intervals(rows, params, 0.8), full.impute_intervals(rows, 0.8), strict=True
    ):
        np.testing.assert_allclose(mine, theirs, rtol=1e-6)


def test_the_metric_measures_nats() -> None:
    """Half the squared length of a small move is what it costs, where moments are typical."""
    model = bound(RowOwner(2, ridge=0.0, noise_floor=0.0), np.concatenate(TABLES))
    params = model.start(2)
    here = model.statistics_of(params)
    metric = model.metric(params)
    rng = np.random.default_rng(0)
    for _ in range(5):
        white = rng.normal(size=model.layout.size)
        white[model.layout.slices["latent"]] *= 0  # which alone moves nothing
        move = metric.unwhiten(1e-4 * white)
        np.testing.assert_allclose(metric.whiten(move), 1e-4 * white, atol=1e-12)
        lost = model.surrogate(here, model.maximize(here + move)) - model.surrogate(here, params)
        assert lost == pytest.approx(0.5e-8 * float(white @ white), rel=1e-2)
    latent = np.zeros(model.layout.size)
    latent[model.layout.slices["latent"]] = rng.normal(
        size=latent[model.layout.slices["latent"]].size
    )
    moved = model.maximize(here + metric.unwhiten(1e-4 * latent))
    np.testing.assert_allclose(moved.loadings, params.loadings, atol=1e-9)


def test_noise_cannot_wipe_out_the_moments_of_a_column() -> None:
    """A column whose moments would all but vanish goes part of the way; the others go all of it."""
    model = bound(RowOwner(2, ridge=0.0), np.concatenate(TABLES))
    before = model.statistics_of(model.start(0))
    parts = model.layout.split(before.copy())
    parts["latent"][1, 0] *= -3.0
    parts["latent"][4, 0] *= 0.5
    parts["cross"][:] += 0.1
    after = model.layout.join(parts)
    got = model.layout.split(model.protect(before, after))
    old = model.layout.split(before)["latent"]
    assert got["latent"][1, 0] == pytest.approx(SHRINK * old[1, 0], rel=1e-6)
    for name in ("latent", "cross"):
        np.testing.assert_allclose(
            np.delete(got[name], 1, 0), np.delete(parts[name], 1, 0), atol=1e-15
        )
    assert model.inside(model.layout.join(got))
    np.testing.assert_array_equal(model.protect(before, before), before)


def test_owners_elsewhere_come_to_the_same_fit() -> None:
    """The description of the model travels, and the opening binds it, to the last bit alike."""
    names = [f"c{j}" for j in range(TABLES[0].shape[1])]
    frames = {f"w{i}": pl.DataFrame(t, schema=names) for i, t in enumerate(TABLES)}
    options: dict[str, Any] = {"rounds": 15, "seed": 4, "masks": False}
    here = emfed.fit(RowOwner(2), frames, **options)
    with emfed.network.LocalSites(frames, rules=OPEN) as sites:
        there = emfed.fit(RowOwner(2), sites, **options)
    rows = np.concatenate(TABLES)
    np.testing.assert_allclose(here.impute(rows), there.impute(rows), rtol=1e-9)
    assert build_model(here.model.describe()).describe() == here.model.describe()


def test_which_values_are_hidden_follows_from_the_row_and_the_column() -> None:
    rows = np.concatenate(TABLES)
    order = np.random.default_rng(0).permutation(len(rows))
    whole = chances(rows)
    np.testing.assert_array_equal(chances(rows[order]), whole[order])
    np.testing.assert_array_equal(chances(rows[:8].reshape(2, 4, -1)).reshape(8, -1), whole[:8])
    other = np.where(np.isnan(rows), -np.nan, rows)
    np.testing.assert_array_equal(chances(np.where(other == 0, -0.0, other)), whole)
    some = chances(np.random.default_rng(1).normal(size=(500, 20)))
    assert abs(np.mean(some < 0.1) - 0.1) < 0.01
    assert np.abs(np.corrcoef(some.T) - np.eye(20)).max() < 0.2


def holes_in_rank_three() -> np.ndarray:
    """60 rows of rank 3 plus noise with half of the values missing: BIC is too careful."""
    rng = np.random.default_rng(5)
    rows = rng.normal(size=(60, 3)) @ rng.normal(size=(3, 24)) + 0.4 * rng.normal(size=(60, 24))
    return np.where(rng.random(rows.shape) < 0.5, np.nan, rows)


def test_ranks_are_chosen_by_held_out_error_and_alike_over_a_network() -> None:
    rows = holes_in_rank_three()
    names = [f"c{j}" for j in range(24)]
    frames = {f"w{i}": pl.DataFrame(rows[i::3], schema=names) for i in range(3)}
    options: dict[str, Any] = {"n_components": [1, 3], "seed": 1, "masks": False}
    by = {"criterion": "held-out", "tol": 1e-4}
    here = emfed.select_components(RowOwner, frames, **by, **options)
    assert here.n_components == 3
    shown, scale = np.where(chances(rows) < 0.1, np.nan, rows), here.best.model.frame.scale
    away = (here.results[1].impute(shown) - rows) / scale
    error = np.nansum(away[np.isnan(shown)] ** 2) / len(rows)
    assert here.table[0]["held-out"] == pytest.approx(error, rel=1e-6)
    assert here.best.model.hidden == 0
    alone = emfed.fit(RowOwner(3), frames, "auto", seed=1, tol=1e-4)
    scores = [fitted.score_samples(rows).mean() for fitted in (here.best, alone)]
    assert scores[0] == pytest.approx(scores[1], abs=0.02)
    with emfed.network.LocalSites(frames, rules=OPEN) as sites:
        there = emfed.select_components(RowOwner, sites, **by, **options)
    np.testing.assert_allclose(there.best.impute(rows), here.best.impute(rows), rtol=1e-9)
    assert [row["held-out"] for row in there.table] == pytest.approx(
        [row["held-out"] for row in here.table]
    )


def test_an_epoch_goes_on_with_the_rank_that_was_chosen() -> None:
    settings = read_words({"kind": "row-owner", "rank": "1:3"}, fit={"criterion": "held-out"})
    before = plain_fit(RowOwner(2), TABLES, rounds=2)
    assert _going_on(settings, before).numbers == (2,)


def test_an_imputer_chooses_its_rank_by_held_out_error_and_a_mixture_cannot() -> None:
    rows = holes_in_rank_three()
    imputer = emfed.FederatedImputer(rank=[1, 3], random_state=0, tol=1e-3).fit(rows)
    assert imputer.rank_ == 3
    assert imputer.selection_.criterion == "held-out"
    with pytest.raises(emfed.SettingsError, match="'held-out' is for ranks"):
        emfed.FederatedImputer("1:2", criterion="held-out").fit(rows)


def test_bad_settings_and_starts() -> None:
    with pytest.raises(emfed.SettingsError, match="rank"):
        RowOwner(0)
    with pytest.raises(emfed.EmfedError, match="does not know its data yet"):
        RowOwner(2).start(0)
    model = bound(RowOwner(2), np.concatenate(TABLES))
    good = model.to_user(model.start(0))
    with pytest.raises(emfed.SettingsError, match=r"start loadings: .* \(1, 6, 2\)"):
        model.from_user(replace(good, loadings=good.loadings[..., :1]))
    with pytest.raises(emfed.SettingsError, match="start noise"):
        model.from_user(replace(good, noise=-good.noise))


@pytest.mark.parametrize("model", [SiteOwner(5, 2), RowOwner(2)], ids=["cells", "rows"])
def test_a_model_file_brings_back_owners_without_their_module(model: Any, tmp_path: Path) -> None:
    """`emfed serve` leaves one of every model it can fit."""
    rng = np.random.default_rng(4)
    table = rng.normal(size=(30, 2)) @ rng.normal(size=(2, 5)) + 0.1 * rng.normal(size=(30, 5))
    cells = np.argwhere(rng.random(table.shape) < 0.7)
    long = np.column_stack([cells, np.ones(len(cells)), table[tuple(cells.T)]])
    tables = [long[:60], long[60:]] if isinstance(model, SiteOwner) else [table[:9], table[9:]]
    result = plain_fit(model, tables, rounds=5)
    result.save(tmp_path / "owners.emfed")
    script = "import emfed, sys; print(repr(emfed.load(sys.argv[1]).statistics.tolist()))"
    command = [sys.executable, "-c", script, str(tmp_path / "owners.emfed")]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert told.strip() == repr(result.statistics.tolist())
