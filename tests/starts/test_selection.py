"""Numbers of components are compared in one run, by criteria that pooled rows would give."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sklearn import datasets

import fedem
from fedem.selection import read_range
from tests.helpers import make_data
from tests.registry import REGISTRY

ROWS, _ = datasets.make_blobs(700, 3, centers=4, random_state=2)
SITES = {"a": ROWS[:100], "b": ROWS[100:350], "c": ROWS[350:]}


@pytest.mark.parametrize(
    "algorithm",
    [None, fedem.FedEM(fedem.SubtractiveDithering(0.05), in_metric=True)],
    ids=["em", "fedem"],
)
def test_the_table_is_that_of_pooled_rows(algorithm: Any) -> None:
    model = fedem.gaussian_mixture(1, "diag")
    found = fedem.select_components(model, SITES, "2:6", algorithm=algorithm, rounds=40)
    assert found.n_components == 4
    assert list(found.results) == [2, 3, 4, 5, 6]
    for row, (k, result) in zip(found.table, found.results.items(), strict=True):
        assert row["n_components"] == k == len(result.params.weights)
        assert row["log_likelihood"] == pytest.approx(result.log_likelihood(ROWS), abs=1e-9)
        for name in ("aic", "bic", "icl"):
            assert row[name] == pytest.approx(getattr(result, name)(ROWS), rel=1e-9)
    assert found.best is found.results[4]
    assert found.to_frame().shape == (5, 7)
    assert "4 components by bic" in repr(found)


def test_candidates_share_rounds_and_messages() -> None:
    model = fedem.gaussian_mixture(1, "diag")
    found = fedem.select_components(model, SITES, "2:6", rounds=20)
    alone = fedem.fit(fedem.gaussian_mixture(6, "diag"), SITES, rounds=20, start="auto")
    books, one = found.best.ledger.summary(), alone.ledger.summary()
    # 20 rounds for all, and one exchange at the end about their likelihoods
    assert books["round"]["up"]["messages"] == one["round"]["up"]["messages"] + 3
    assert books["opening"] == one["opening"]
    assert books["start"]["up"]["messages"] == one["start"]["up"]["messages"]


def test_a_function_makes_the_models_too_and_icl_wants_distinct_ones() -> None:
    rng = np.random.default_rng(0)
    skew = np.concatenate([rng.gamma(2, size=(500, 1)), 14 + rng.gamma(2, size=(500, 1))])
    tables = np.array_split(rng.permutation(skew), 4)
    found = {
        name: fedem.select_components(
            lambda k: fedem.mixed_mixture(k, "gaussian", missing=False),
            tables,
            [1, 2, 3, 4],
            criterion=name,
            n_init=3,
            rounds=60,
        ).n_components
        for name in ("bic", "icl")
    }
    assert found["icl"] == 2 < found["bic"]  # two skewed clusters, several Gaussians


def test_hidden_markov_models_and_missing_values_can_be_selected() -> None:
    holes = [
        np.where(np.random.default_rng(j).random(t.shape) < 0.1, np.nan, t)
        for j, t in enumerate(SITES.values())
    ]
    missing = fedem.gaussian_mixture(1, "full", missing=True)
    assert fedem.select_components(missing, holes, "3:5", rounds=30).n_components == 4
    entry = REGISTRY["gaussian chain"]
    found = fedem.select_components(
        fedem.hidden_markov(1, "gaussian"), entry.tables, [1, 2], rounds=20
    )
    assert [row["free_parameters"] for row in found.table] == [4, 11]


def test_ranges_are_read_and_nonsense_refused() -> None:
    assert read_range("2:4") == [2, 3, 4]
    assert read_range(range(3, 5)) == [3, 4]
    assert read_range(7) == [7]
    assert read_range(np.array([5, 2, 5])) == [2, 5]
    for bad in ("4:2", "a:b", "3", [], 0, [1.5], "1:2:3"):
        with pytest.raises(fedem.SettingsError, match="components"):
            read_range(bad)
    with pytest.raises(fedem.SettingsError, match="criterion"):
        fedem.select_components(fedem.gaussian_mixture(1), SITES, criterion="r2")
    with pytest.raises(fedem.SettingsError, match="no number of components"):
        fedem.select_components(fedem.LinearGaussian(), make_data(0))
