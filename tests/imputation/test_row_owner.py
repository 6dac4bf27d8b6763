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
from emfed.models import build_model
from emfed.models.owners import SHRINK
from emfed.models.parameters import Frame
from emfed.models.row_owner import RowOwner
from emfed.models.site_owner import SiteOwner
from emfed.network import LocalTransport, RemoteFederation, Site
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


def test_owners_elsewhere_come_to_the_same_fit(tmp_path: Path) -> None:
    """The description of the model travels, and the opening binds it, to the last bit alike."""
    names = [f"c{j}" for j in range(TABLES[0].shape[1])]
    frames = {f"w{i}": pl.DataFrame(t, schema=names) for i, t in enumerate(TABLES)}
    options: dict[str, Any] = {"rounds": 15, "seed": 4}
    here = emfed.fit(RowOwner(2), frames, "auto", **options)
    sites = {key: Site(frame, tmp_path / key, rules=OPEN) for key, frame in frames.items()}
    federation = RemoteFederation(LocalTransport(sites))
    there = emfed.fit(RowOwner(2), None, "auto", federation=federation, **options)
    rows = np.concatenate(TABLES)
    np.testing.assert_allclose(here.impute(rows), there.impute(rows), rtol=1e-9)
    assert here.ledger.summary()["round"] == there.ledger.summary()["round"]
    assert build_model(here.model.describe()).describe() == here.model.describe()


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
