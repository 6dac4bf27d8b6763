"""Free parameters, samples, and one pass for statistics, likelihood and entropy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import emfed
from emfed.models.sampling import entropy
from tests.helpers import bind, make_data, make_model, plain_fit
from tests.registry import REGISTRY

K, D = 3, 4
MIXED = ["gaussian", "poisson", "bernoulli", emfed.models.Categorical(4)]
BY_HAND: list[tuple[Any, int]] = [
    (emfed.gaussian_mixture(K, "full"), 2 + 3 * 4 + 3 * 10),
    (emfed.gaussian_mixture(K, "tied"), 2 + 3 * 4 + 10),
    (emfed.gaussian_mixture(K, "diag"), 2 + 3 * 4 + 3 * 4),
    (emfed.gaussian_mixture(K, "spherical"), 2 + 3 * 4 + 3),
    (emfed.gaussian_mixture(K, "known", known_covariance=np.eye(D)), 2 + 3 * 4),
    (emfed.gaussian_mixture(K, "full", missing=True), 2 + 3 * 4 + 3 * 10),
    (emfed.factor_analysis(2), 4 + (8 - 1) + 4),
    (emfed.ppca(2), 4 + (8 - 1) + 1),
    (emfed.factor_analysis(1, K), 2 + 3 * (4 + 4 + 4)),
    (emfed.mixed_mixture(K, "gaussian"), 2 + 3 * 8),
    (emfed.mixed_mixture(K, "gamma"), 2 + 3 * 8),
    (emfed.mixed_mixture(K, "exponential"), 2 + 3 * 4),
    (emfed.mixed_mixture(K, MIXED), 2 + 3 * (2 + 1 + 1 + 3)),
    (emfed.regression_mixture(K), 2 + 3 * (3 + 1 + 1)),
    (emfed.models.LinearGaussian(), 4),
]


@pytest.mark.parametrize(("model", "count"), BY_HAND, ids=lambda v: str(getattr(v, "kind", "")))
def test_free_parameters_are_those_counted_by_hand(model: Any, count: int) -> None:
    rng = np.random.default_rng(0)
    rows = np.column_stack(
        [rng.gamma(2, size=60), rng.poisson(3, 60) + 1, rng.integers(2, size=60) + 1.0]
    )
    rows = np.column_stack([rows, rng.integers(4, size=60) + 1.0])
    if isinstance(model.describe().get("families"), list):  # zeros are for counts and categories
        rows = rows - [0, 1, 1, 1]
    result = plain_fit(model, [rows], rounds=1)
    assert result.free_parameters == count


@pytest.mark.parametrize("name", REGISTRY)
def test_one_pass_gives_what_three_give(name: str) -> None:
    entry = REGISTRY[name]
    model = bind(entry.make(), entry.tables)
    params = model.maximize(model.expected_statistics(np.concatenate(entry.tables), model.start(1)))
    rows = entry.tables[0]
    weights = np.random.default_rng(0).uniform(0.1, 2, size=len(rows))
    for w in (None, weights):
        statistics, likelihood, spread = model.evaluate(rows, params, w)
        np.testing.assert_allclose(
            statistics, model.expected_statistics(rows, params, w), atol=1e-12
        )
        assert likelihood == pytest.approx(float(model.log_likelihood(rows, params, w)), abs=1e-10)
        if "chain" not in name:
            shares = model.responsibilities(rows, params)
            assert spread == pytest.approx(float(entropy(shares, w)), abs=1e-10)


@pytest.mark.parametrize("kind", ["full", "tied", "diag", "spherical", "known"])
def test_samples_have_the_moments_of_the_model(kind: str) -> None:
    result = plain_fit(make_model(kind), make_data(3), rounds=10)
    rows, labels = result.sample(60_000, seed=5)
    params = result.params
    for j in range(3):
        mine = rows[labels == j]
        covariance = params.covariances
        if kind in ("full", "diag", "spherical"):
            covariance = covariance[j]
        if kind in ("diag", "spherical"):
            covariance = covariance * np.eye(2)
        np.testing.assert_allclose(mine.mean(axis=0), params.means[j], atol=0.1)
        np.testing.assert_allclose(np.cov(mine.T), covariance, atol=0.15)
    again, _ = result.sample(60_000, seed=5)
    np.testing.assert_array_equal(rows, again)
    assert not np.array_equal(rows[:5], result.sample(5, seed=6)[0])


def test_models_without_an_answer_say_so() -> None:
    rng = np.random.default_rng(0)
    result = plain_fit(emfed.regression_mixture(2), [rng.normal(size=(50, 3))], rounds=2)
    with pytest.raises(emfed.SettingsError, match="cannot draw rows; fit"):
        result.sample(3)
    for bad in (0, -1, 1.5):
        with pytest.raises(emfed.SettingsError, match="count"):
            result.sample(bad)
