"""Workers' own clusters, and the start that merges them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import emfed
from emfed.core.errors import ParticipationError, SettingsError, WireError
from emfed.core.protocols import View
from emfed.data import as_workers
from emfed.fitting.session import Session
from emfed.models.clusters import Buckets
from emfed.network import LocalTransport, RemoteFederation, Site, SiteRules
from emfed.network.own_clusters import (
    QUANTISER,
    _own,
    clusters_width,
    decode_clusters,
    encode_clusters,
)
from tests.helpers import OPEN, make_data

TABLES = make_data(6, sizes=(90, 40, 60), spread=8.0)
MODEL = emfed.gaussian_mixture(2, "diag")
KEYS = list("abc")


def buckets(tables: Any, most: int) -> Buckets:
    session = Session(MODEL, emfed.network.StackedFederation(as_workers(tables)))
    found = session.view(View((0,), clusters=most, seed=3))
    assert isinstance(found, Buckets)
    return found


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 99), st.integers(1, 12), st.integers(1, 30), st.integers(3, 80))
def test_no_cluster_is_told_that_is_smaller_than_the_smallest_group(
    seed: int, most: int, smallest: int, rows: int
) -> None:
    rng = np.random.default_rng(seed)
    own = rng.standard_t(2, size=(rows, 2))
    model = buckets([own, rng.normal(size=(5, 2))], most)
    vector = _own(model, own, np.ones(rows), 7, smallest)
    shares, means = vector[:most] / most, vector[most:].reshape(most, 2)
    different, where = np.unique(means, axis=0, return_inverse=True)
    each = np.bincount(where.ravel(), shares) * rows
    assert len(different) == 1 or each.min() >= smallest - 1e-9
    assert shares.sum() == pytest.approx(1)
    assert model.inner.frame is not None
    points = (own - model.inner.frame.origin) / model.inner.frame.scale
    assert np.allclose(shares @ means, points.mean(axis=0))


def test_what_is_read_differs_from_what_was_told_by_the_chosen_noise() -> None:
    data, model = as_workers(TABLES), buckets(TABLES, 8)
    errors, lengths = [], []
    for number in range(200):
        told = _own(model, TABLES[0], np.ones(len(TABLES[0])), number, 5)
        read = decode_clusters(encode_clusters(model, data, 0, number, 5), model, number)
        errors.append(((read - told) ** 2).sum())
        lengths.append((told**2).sum())
    assert np.mean(errors) == pytest.approx(QUANTISER.noise * np.mean(lengths), rel=0.1)


def test_bytes_that_tell_no_clusters_are_refused_in_words() -> None:
    model = buckets(TABLES, 4)
    assert np.isnan(decode_clusters(b"", model, 0)).all()
    rng = np.random.default_rng(0)
    for size in (1, 3, 20, 400):
        try:
            found = decode_clusters(rng.bytes(size), model, 0)
        except WireError:
            continue
        assert found.shape == (clusters_width(model),)
        assert np.isfinite(found).all()


def network(where: Path, rules: SiteRules) -> RemoteFederation:
    """Three sites, the first of which has these rules."""
    sites = {
        key: Site(
            table, where / key, rules=rules if key == "a" else OPEN, journal=where / f"{key}.log"
        )
        for key, table in zip(KEYS, TABLES, strict=True)
    }
    return RemoteFederation(LocalTransport(sites), attempts=1)


def test_too_many_clusters_are_refused_before_any_work(tmp_path: Path) -> None:
    """A server that named 20,000 of them took a site minutes."""
    session, view = Session(MODEL, network(tmp_path, OPEN)), View((0,), clusters=20_000)
    with pytest.raises(SettingsError, match=r"20000 clusters for a start; a start asks for 32"):
        session.view(view)
    honest = session.bound.view(View((0,), clusters=2))
    session.bound._views[view] = honest  # a server that has no scruples
    with pytest.raises(ParticipationError, match="a start asks for 32"):
        session.own_clusters(view)
    last = json.loads((tmp_path / "a.log").read_text().splitlines()[-1])
    assert last["kind"] == "refusal"


def fit(federation: Any, data: Any = None, **options: Any) -> emfed.Result:
    chosen = {"rounds": 3, "seed": 4, "tol": 0} | options
    return emfed.fit(MODEL, data, federation=federation, **chosen)


@pytest.mark.parametrize("n_init", [1, 2])
def test_sites_and_simulations_merge_alike(tmp_path: Path, n_init: int) -> None:
    start = "merge" if n_init == 1 else "auto"
    there = fit(network(tmp_path, OPEN), n_init=n_init, start=start)
    data = dict(zip(KEYS, TABLES, strict=True))
    for federation in ("loop", "stacked"):
        here = fit(federation, data, n_init=n_init, start=start)
        assert np.allclose(here.statistics, there.statistics, rtol=1e-9)
        assert here.ledger.summary() == there.ledger.summary()
    journal = [json.loads(line) for line in (tmp_path / "a.log").read_text().splitlines()]
    told = [line for line in journal if "none with fewer than 10" in line["content"]]
    assert len(told) == 1


def test_where_an_owner_tells_none_the_start_is_by_sums_alone(tmp_path: Path) -> None:
    rules = SiteRules.loosest(own_clusters=False)
    silent = fit(network(tmp_path, rules), n_init=2)
    plain = fit("stacked", dict(zip(KEYS, TABLES, strict=True)), start="k-means", n_init=2)
    assert np.allclose(silent.statistics, plain.statistics, rtol=1e-9)
    assert "no clusters of its own" in (tmp_path / "a.log").read_text()
    with pytest.raises(SettingsError, match="use start='k-means'"):
        fit(network(tmp_path / "2", rules), start="merge")


def test_masked_runs_tell_no_clusters() -> None:
    data = dict(zip(KEYS, TABLES, strict=True))
    alike = [
        fit("stacked", data, masks=True, start=start, n_init=2) for start in ("auto", "k-means")
    ]
    assert np.array_equal(alike[0].statistics, alike[1].statistics)
    with pytest.raises(SettingsError, match="without masks"):
        fit("stacked", data, masks=True, start="merge")


def test_a_thousand_clusters_are_drawn_by_their_share() -> None:
    rng = np.random.default_rng(2)
    centres = np.array([[-4.0, 0.0], [4.0, 0.0]])
    tables = [
        rng.normal(size=(50, 2)) * 0.3 + centres[(rng.random(50) < 0.4).astype(int)]
        for _ in range(600)
    ]
    result = fit("stacked", tables, rounds=10, start="merge")
    order = np.argsort(result.params.means[:, 0])
    assert result.params.means[order] == pytest.approx(centres, abs=0.5)
    assert result.params.weights[order] == pytest.approx([0.6, 0.4], abs=0.05)


def test_many_workers_merge_by_default_and_few_do_not() -> None:
    rng = np.random.default_rng(3)
    tables = [rng.normal(size=(20, 2)) + 6 * (np.arange(20) % 2)[:, None] for _ in range(60)]
    for some, same, masks in ((60, "merge", False), (60, "k-means", True), (40, "k-means", False)):
        begun = [
            fit("stacked", tables[:some], rounds=0, start=start, masks=masks)
            for start in ("auto", same)
        ]
        assert np.array_equal(begun[0].statistics, begun[1].statistics)
        assert begun[0].ledger.summary() == begun[1].ledger.summary()
