"""Mixtures of regressions: statsmodels and scipy are the judges."""

from __future__ import annotations

import warnings
from typing import Any

import array_api_strict
import numpy as np
import polars as pl
import pytest
import statsmodels.api as sm
from scipy import optimize
from scipy.special import logsumexp
from scipy.stats import norm

import emfed
from tests.helpers import bind, plain_fit
from tests.registry import REGISTRY


def columns(rows: Any) -> tuple[Any, Any]:
    return np.delete(rows, 1, axis=1), rows[:, 1]


def log_density(user: Any, rows: Any) -> Any:
    """log p(y | x) row by row, from the user's parameters."""
    x, y = columns(rows)
    means = user.intercepts + x @ user.coefficients.T
    joint = norm(means, np.sqrt(user.noise)).logpdf(y[:, None]) + np.log(user.weights)
    return logsumexp(joint, axis=1)


@pytest.mark.parametrize("k", [1, 2])
def test_likelihood_is_the_density_of_scipy(k: int) -> None:
    tables = REGISTRY[f"regressions {k}"].tables
    rows = np.concatenate(tables)
    model = bind(emfed.regression_mixture(k, target=1), tables)
    params = model.maximize(model.expected_statistics(rows, model.start(0)))
    want = log_density(model.to_user(params), rows)
    np.testing.assert_allclose(model.score_samples(rows, params), want, rtol=1e-9)
    strict = array_api_strict.asarray(rows)
    np.testing.assert_allclose(
        model.expected_statistics(strict, params), model.expected_statistics(rows, params)
    )


def test_one_federated_regression_is_that_of_statsmodels() -> None:
    tables = REGISTRY["regressions 1"].tables
    x, y = columns(np.concatenate(tables))
    judge = sm.OLS(y, sm.add_constant(x)).fit()
    got = plain_fit(emfed.regression_mixture(1, target=1), tables, emfed.FedEM(), rounds=3)
    np.testing.assert_allclose(
        np.append(got.params.intercepts, got.params.coefficients), judge.params, rtol=1e-9
    )
    value = got.log_likelihood(np.concatenate(tables))
    assert value == pytest.approx(judge.llf / len(y), abs=1e-9)


def test_ridge_is_that_of_sklearn() -> None:
    from sklearn.linear_model import Ridge

    tables = REGISTRY["regressions 1"].tables
    x, y = columns(np.concatenate(tables))
    got = plain_fit(emfed.regression_mixture(1, target=1, ridge=7.0), tables, rounds=3)
    judge = Ridge(alpha=7.0).fit((x - x.mean(axis=0)) / x.std(axis=0), y)
    np.testing.assert_allclose(got.params.coefficients[0] * x.std(axis=0), judge.coef_, rtol=1e-9)


def test_an_optimiser_of_the_likelihood_ends_where_federated_em_ends() -> None:
    tables = REGISTRY["regressions 2"].tables
    rows = np.concatenate(tables)
    model = emfed.regression_mixture(2, target=1)
    start = plain_fit(model, [rows], rounds=5, seed=1).params
    got = plain_fit(model, tables, emfed.FedEM(), start=start, rounds=2000, field_tol=1e-22)

    def split(z: Any) -> emfed.models.RegressionParameters:
        weights = np.exp(z[:2]) / np.exp(z[:2]).sum()
        return emfed.models.RegressionParameters(
            weights, z[2:4], z[4:8].reshape(2, 2), np.exp(z[8:])
        )

    begin = np.concatenate(
        [
            np.log(start.weights),
            start.intercepts,
            start.coefficients.ravel(),
            np.log(start.noise),
        ]
    )
    best = optimize.minimize(
        lambda z: -float(log_density(split(z), rows).mean()), begin, options={"gtol": 1e-8}
    )
    assert got.log_likelihood(rows) == pytest.approx(-best.fun, abs=1e-6)
    agree = got.predict(rows) == got.predict_proba(rows).argmax(axis=1)
    assert agree.all()


def test_bad_settings_and_rows_are_told() -> None:
    rows = np.random.default_rng(0).normal(size=(20, 3))
    with pytest.raises(emfed.DataError, match="a target at position 5"):
        plain_fit(emfed.regression_mixture(2, target=5), rows)
    with pytest.raises(emfed.DataError, match="columns of x"):
        plain_fit(emfed.regression_mixture(2), rows[:, :1])
    with pytest.raises(emfed.SettingsError, match="ridge"):
        emfed.regression_mixture(2, ridge=-1)
    twice = np.column_stack([rows[:, 0], rows[:, 0], rows[:, 1]])
    with pytest.raises(emfed.SettingsError, match="combinations of others"):
        plain_fit(emfed.regression_mixture(1), twice)
    assert np.isfinite(plain_fit(emfed.regression_mixture(1, ridge=1.0), twice).statistics).all()


@pytest.mark.parametrize("column", ["zeros", "sentinel"])
def test_noise_that_falls_to_the_floor_is_no_end_by_itself(column: str) -> None:
    """Where a component's rows come to lie on a line, "converged" still means what it says."""
    rng = np.random.default_rng(7)
    rows = rng.normal(size=(300, 2))
    rare = rng.random(300) < 0.2
    rows[:, 0] = np.where(rare, rng.poisson(2, 300), 0) if column == "zeros" else rows[:, 0]
    rows[rare, 0] = -9999.0 if column == "sentinel" else rows[rare, 0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", emfed.EmfedWarning)
        ours = emfed.fit(emfed.regression_mixture(3, 0), rows, groups=np.arange(300) % 4)
    assert ours.converged
    model, here = ours.model, ours.statistics
    for _ in range(100):
        here = model.protect(here, model.expected_statistics(rows, model.maximize(here)))
    more = model.log_likelihood(rows, model.maximize(here)) - ours.log_likelihood(rows)
    assert more < 1e-3


def test_a_column_of_x_with_one_value_is_named() -> None:
    rng = np.random.default_rng(0)
    frame = pl.DataFrame(
        {"y": rng.normal(size=60), "a": rng.normal(size=60), "b": np.full(60, 3.0)}
    )
    model, groups = emfed.regression_mixture(2, target="y"), np.arange(60) % 3
    with pytest.raises(emfed.DataError, match="column 'b' holds one single value, as the intercep"):
        emfed.fit(model, frame, groups=groups)
    ridged = emfed.regression_mixture(2, target="y", ridge=1.0)
    with pytest.warns(emfed.EmfedWarning, match="column 'b' holds one single value and says"):
        emfed.fit(ridged, frame, groups=groups)
