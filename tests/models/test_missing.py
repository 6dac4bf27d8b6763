"""Gaussian mixtures with missing values: a row loop and scipy's optimiser are the judges."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy import optimize
from scipy.stats import multivariate_normal, norm

import emfed
from tests.helpers import bind, make_data, plain_fit

both = pytest.mark.parametrize("kind", ["full", "diag"])


def torn(seed: int = 0, share: float = 0.25, d: int = 3, k: int = 2) -> list[Any]:
    """Rows with holes; one row of which nothing was seen, and one column a worker never saw."""
    rng = np.random.default_rng(seed)
    tables = [np.where(rng.random(t.shape) < share, np.nan, t) for t in make_data(seed, k=k, d=d)]
    tables[0][0] = np.nan
    tables[2][:, 1] = np.nan
    return tables


def matrices(covariances: Any) -> Any:
    return covariances if covariances.ndim == 3 else covariances[..., None] * np.eye(3)


def row_by_row(rows: Any, user: Any) -> tuple[Any, Any, Any]:
    """Log densities, and means and scatter of the completed rows by component: the textbook."""
    k, d = user.means.shape
    covariances = matrices(user.covariances)
    densities, mass = np.zeros(len(rows)), np.zeros(k)
    first, second = np.zeros((k, d)), np.zeros((k, d, d))
    for i, y in enumerate(rows):
        o, m = np.flatnonzero(~np.isnan(y)), np.flatnonzero(np.isnan(y))
        joint = np.log(user.weights)
        full, extra = np.zeros((k, d)), np.zeros((k, d, d))
        for j in range(k):
            s, mu = covariances[j], user.means[j]
            full[j, o] = y[o]
            if len(o):
                joint[j] += multivariate_normal(mu[o], s[np.ix_(o, o)]).logpdf(y[o])
                gain = s[np.ix_(m, o)] @ np.linalg.inv(s[np.ix_(o, o)])
                full[j, m] = mu[m] + gain @ (y[o] - mu[o])
                extra[j][np.ix_(m, m)] = s[np.ix_(m, m)] - gain @ s[np.ix_(o, m)]
            else:
                full[j], extra[j] = mu, s
        densities[i] = np.logaddexp.reduce(joint)
        shares = np.exp(joint - densities[i])
        mass += shares
        first += shares[:, None] * full
        second += shares[:, None, None] * (full[:, :, None] * full[:, None, :] + extra)
    return densities, first / mass[:, None], second / mass[:, None, None]


@both
def test_patterns_give_what_a_row_loop_gives(kind: str) -> None:
    tables = torn()
    rows = np.concatenate(tables)
    model = bind(emfed.gaussian_mixture(2, kind, missing=True, covariance_floor=0.0), tables)
    params = model.maximize(model.expected_statistics(rows, model.start(0)))
    densities, means, second = row_by_row(rows, model.to_user(params))
    np.testing.assert_allclose(model.score_samples(rows, params), densities, atol=1e-9)
    after = model.to_user(model.maximize(model.expected_statistics(rows, params)))
    np.testing.assert_allclose(after.means, means, rtol=1e-8, atol=1e-8)
    want = second - means[:, :, None] * means[:, None, :]
    if kind == "diag":
        want = np.diagonal(want, axis1=1, axis2=2)
    np.testing.assert_allclose(after.covariances, want, rtol=1e-7, atol=1e-8)


@both
def test_complete_rows_are_the_plain_mixture(kind: str) -> None:
    tables = make_data(3)
    plain = plain_fit(emfed.gaussian_mixture(3, kind), tables, rounds=30)
    got = plain_fit(emfed.gaussian_mixture(3, kind, missing=True), tables, rounds=30)
    np.testing.assert_allclose(got.statistics, plain.statistics, atol=1e-10)
    rows = np.concatenate(tables)
    np.testing.assert_allclose(got.predict_proba(rows), plain.predict_proba(rows), atol=1e-9)
    np.testing.assert_array_equal(got.impute(rows), rows)


@both
def test_blocks_and_stacks_do_not_show(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = torn(1)
    rows = np.concatenate(tables)
    model = bind(emfed.gaussian_mixture(2, kind, missing=True), tables)
    params = model.start(0)
    whole = model.expected_statistics(rows, params), model.score_samples(rows, params)
    monkeypatch.setattr("emfed.models.patterns.BLOCK_ELEMENTS", 50)
    monkeypatch.setattr("emfed.models.patterns.STACK_ELEMENTS", 20)
    np.testing.assert_allclose(model.expected_statistics(rows, params), whole[0], atol=1e-12)
    np.testing.assert_allclose(model.score_samples(rows, params), whole[1], atol=1e-12)


@pytest.mark.parametrize("k", [1, 2])
def test_an_optimiser_of_the_likelihood_ends_where_federated_em_ends(k: int) -> None:
    tables = torn(4, share=0.15, k=k)
    rows, d = np.concatenate(tables), 3
    model = emfed.gaussian_mixture(k, "full", missing=True, covariance_floor=0.0)
    start = plain_fit(model, tables, rounds=10, seed=2).params  # in the basin of one optimum
    got = plain_fit(model, tables, emfed.FedEM(), start=start, rounds=3000, field_tol=1e-22)
    lower = np.tril_indices(d)

    def split(x: Any) -> emfed.models.GaussianParameters:
        root = np.zeros((k, d, d))
        root[:, lower[0], lower[1]] = x[k + k * d :].reshape(k, -1)
        logits = x[:k] - x[:k].max()
        weights = np.exp(logits) / np.exp(logits).sum()
        means = x[k : k + k * d].reshape(k, d)
        return emfed.models.GaussianParameters(weights, means, root @ np.swapaxes(root, 1, 2))

    root = np.linalg.cholesky(start.covariances)[:, lower[0], lower[1]]
    begin = np.concatenate([np.log(start.weights), start.means.ravel(), root.ravel()])

    def objective(x: Any) -> float:
        densities, *_ = row_by_row(rows, split(x))
        return -float(densities.mean())

    def fast(x: Any) -> float:
        return -float(got.model.log_likelihood(rows, got.model.from_user(split(x))))

    assert fast(begin) == pytest.approx(objective(begin), abs=1e-9)
    best = optimize.minimize(fast, begin, method="BFGS", options={"gtol": 1e-7})
    assert got.log_likelihood(rows) == pytest.approx(-objective(best.x), abs=1e-6)


@both
def test_imputations_are_means_and_draws_and_intervals_of_the_posterior(kind: str) -> None:
    tables = torn(5)
    rows = np.concatenate(tables)
    result = plain_fit(emfed.gaussian_mixture(2, kind, missing=True), tables, rounds=60)
    holes = np.isnan(rows)
    filled = result.impute(rows)
    assert np.isfinite(filled).all()
    np.testing.assert_array_equal(filled[~holes], rows[~holes])
    draws = result.impute_draws(rows, draws=1500, seed=3)
    np.testing.assert_array_equal(draws[:, ~holes][0], rows[~holes])
    mine = draws[:, holes]
    error = np.abs(mine.mean(axis=0) - filled[holes])
    assert np.all(error < 6 * mine.std(axis=0) / np.sqrt(1500))
    for level in (0.5, 0.9):
        low, high = result.impute_intervals(rows, level=level)
        np.testing.assert_array_equal(low[~holes], rows[~holes])
        covered = (mine >= low[holes]) & (mine <= high[holes])
        assert np.abs(covered.mean(axis=0) - level).max() < 0.08
        assert covered.mean() == pytest.approx(level, abs=0.005)


def test_one_gaussian_imputes_by_regression() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=4000)
    rows = np.column_stack([x, 2 * x + 0.5 * rng.normal(size=4000)])
    rows[::3, 1] = np.nan
    result = plain_fit(emfed.gaussian_mixture(1, missing=True), [rows], rounds=50)
    mu, sigma = result.params.means[0], result.params.covariances[0]
    want = mu[1] + sigma[0, 1] / sigma[0, 0] * (rows[::3, 0] - mu[0])
    np.testing.assert_allclose(result.impute(rows)[::3, 1], want, atol=1e-9)
    low, high = result.impute_intervals(rows, level=0.9)
    half = norm.ppf(0.95) * np.sqrt(sigma[1, 1] - sigma[0, 1] ** 2 / sigma[0, 0])
    np.testing.assert_allclose(high[::3, 1] - want, half, atol=1e-9)
    np.testing.assert_allclose(want - low[::3, 1], half, atol=1e-9)


def test_settings_and_rows_that_cannot_be() -> None:
    with pytest.raises(emfed.SettingsError, match="goes with covariance_type 'full' or 'diag'"):
        emfed.gaussian_mixture(2, "tied", missing=True)
    model = emfed.gaussian_mixture(1, missing=True)
    with pytest.raises(emfed.DataError, match="row 1, column 0 is inf"):
        plain_fit(model, [[1.0, 2.0], [np.inf, 1.0]])
    with pytest.raises(emfed.DataError, match="nobody has a single value in column 1"):
        plain_fit(model, np.column_stack([np.arange(9.0), np.full(9, np.nan)]))
