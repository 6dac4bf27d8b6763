"""Workers' own clusters, which a start merges (`emfed.fitting.starts.merging`)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import emfed
from emfed.core.errors import ParticipationError, WireError
from emfed.models.clusters import Buckets
from emfed.network.own_clusters import (
    QUANTISER,
    _own,
    clusters_width,
    decode_clusters,
    encoded_clusters,
)
from tests.helpers import BARE, bind, make_data

TABLES = make_data(6, sizes=(90, 40, 60), spread=8.0)
MODEL = emfed.gaussian_mixture(2, "diag")


def buckets(tables: Any, most: int) -> Buckets:
    return Buckets(bind(MODEL, tables).clusters(most), 3, 10)


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
    model, weights = buckets(TABLES, 8), np.ones(len(TABLES[0]))
    errors, lengths = [], []
    for number in range(200):
        told = _own(model, TABLES[0], weights, number, 5)
        sent = encoded_clusters(model, TABLES[0], weights, number, 5)
        errors.append(((decode_clusters(sent, model, number) - told) ** 2).sum())
        lengths.append((told**2).sum())
    assert np.mean(errors) == pytest.approx(QUANTISER.noise * np.mean(lengths), rel=0.1)


def test_bytes_that_tell_no_clusters_are_refused_in_words() -> None:
    model, rng = buckets(TABLES, 4), np.random.default_rng(0)
    with pytest.raises(WireError):
        decode_clusters(b"", model, 0)
    for size in (1, 3, 20, 400):
        try:
            found = decode_clusters(rng.bytes(size), model, 0)
        except WireError:
            continue
        assert found.shape == (clusters_width(model),)
        assert np.isfinite(found).all()


def test_an_owner_may_tell_none() -> None:
    rules = {"a": emfed.network.SiteRules(unmasked=True, own_clusters=False), "b": BARE}
    tables = dict(zip("ab", TABLES, strict=False))
    with (
        emfed.network.LocalSites(tables, rules=rules) as sites,
        pytest.raises(ParticipationError, match="a: .*tells no clusters of its own rows"),
    ):
        emfed.fit(MODEL, sites, start="merge")


def test_a_thousand_clusters_are_drawn_by_their_share() -> None:
    rng = np.random.default_rng(2)
    centres = np.array([[-4.0, 0.0], [4.0, 0.0]])
    tables = [
        rng.normal(size=(50, 2)) * 0.3 + centres[(rng.random(50) < 0.4).astype(int)]
        for _ in range(300)
    ]
    result = emfed.fit(MODEL, tables, rounds=10, start="merge", seed=4, tol=0)
    order = np.argsort(result.params.means[:, 0])
    assert result.params.means[order] == pytest.approx(centres, abs=0.5)
    assert result.params.weights[order] == pytest.approx([0.6, 0.4], abs=0.05)
