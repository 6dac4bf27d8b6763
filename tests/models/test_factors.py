"""Factor analysis and probabilistic PCA: scikit-learn and scipy are the judges."""

from __future__ import annotations

from typing import Any

import array_api_strict
import numpy as np
import pytest
from scipy import optimize
from scipy.stats import multivariate_normal
from sklearn.decomposition import PCA, FactorAnalysis

import emfed
from tests.helpers import bind, plain_fit
from tests.registry import REGISTRY

NAMES = ("factors 1", "factors 2", "ppca 1", "ppca 2")
each = pytest.mark.parametrize("name", NAMES)


def setup(name: str) -> tuple[Any, Any, Any, Any]:
    entry = REGISTRY[name]
    model = bind(entry.make(), entry.tables)
    rows = np.concatenate(entry.tables)
    return entry, model, rows, model.maximize(model.expected_statistics(rows, model.start(0)))


@each
def test_likelihood_is_the_density_of_scipy(name: str) -> None:
    _, model, rows, params = setup(name)
    user = model.to_user(params)
    density = sum(
        user.weights[j] * multivariate_normal(user.means[j], user.covariances()[j]).pdf(rows)
        for j in range(len(user.weights))
    )
    np.testing.assert_allclose(model.score_samples(rows, params), np.log(density), rtol=1e-9)
    np.testing.assert_allclose(model.responsibilities(rows, params).sum(axis=-1), 1)


@each
def test_e_step_uses_the_array_api_alone(name: str) -> None:
    _, model, rows, params = setup(name)
    strict = array_api_strict.asarray(rows)
    np.testing.assert_allclose(
        model.expected_statistics(strict, params), model.expected_statistics(rows, params)
    )


@each
def test_statistics_are_moments_of_the_latent_factors(name: str) -> None:
    """Drawn (y, z) average to `statistics_of`, and z given y to the E-step: both by simulation."""
    _, model, _, params = setup(name)
    rng = np.random.default_rng(0)
    k, d, r = params.loadings.shape
    labels = rng.choice(k, size=200_000, p=params.weights)
    z = rng.normal(size=(200_000, r))
    noise = rng.normal(size=(200_000, d)) * np.sqrt(params.noise[labels])
    y = params.means[labels] + np.einsum("nij,nj->ni", params.loadings[labels], z) + noise
    frame = model.frame
    got = model.layout.split(model.expected_statistics(y * frame.scale + frame.origin, params))
    want = model.layout.split(model.statistics_of(params))
    for part in want:
        np.testing.assert_allclose(got[part], want[part], rtol=0.05, atol=0.05)


def test_federated_factor_analysis_ends_where_sklearn_ends() -> None:
    entry, _, rows, _ = setup("factors 1")
    judge = FactorAnalysis(2, tol=1e-14, max_iter=20_000, svd_method="lapack").fit(rows)
    got = plain_fit(entry.make(), entry.tables, emfed.FedEM(), rounds=4000, field_tol=1e-20)
    assert got.log_likelihood(rows) == pytest.approx(judge.score(rows), abs=1e-6)
    np.testing.assert_allclose(got.params.noise[0], judge.noise_variance_, rtol=1e-3)
    np.testing.assert_allclose(got.params.covariances()[0], judge.get_covariance(), atol=1e-3)
    z = got.model.factors(rows, got.model.maximize(got.statistics))[:, 0]
    theirs = judge.transform(rows)
    turn, *_ = np.linalg.lstsq(theirs, z, rcond=None)
    np.testing.assert_allclose(theirs @ turn, z, atol=1e-3)


def test_federated_ppca_ends_where_sklearn_ends() -> None:
    entry, _, rows, _ = setup("ppca 1")
    judge = PCA(2, svd_solver="full").fit(rows)
    got = plain_fit(entry.make(), entry.tables, emfed.FedEM(), rounds=4000, field_tol=1e-20)
    # scikit-learn's noise divides by n - 1 where the maximum of the likelihood divides by n.
    values, vectors = np.linalg.eigh(np.cov(rows.T, bias=True))
    noise = values[:-2].mean()
    root = vectors[:, -2:] * np.sqrt(values[-2:] - noise)
    best = multivariate_normal(rows.mean(axis=0), root @ root.T + noise * np.eye(9))
    assert got.log_likelihood(rows) == pytest.approx(best.logpdf(rows).mean(), abs=1e-6)
    assert got.params.noise[0] == pytest.approx(noise, rel=1e-6)
    directions = got.params.loadings[0] / np.linalg.norm(got.params.loadings[0], axis=0)
    same = np.abs((directions * judge.components_.T).sum(axis=0))
    np.testing.assert_allclose(same, 1, atol=1e-6)


@pytest.mark.parametrize("larger", [1e2, 1e4])
def test_ppca_of_columns_in_unlike_units_is_that_of_sklearn(larger: float) -> None:
    """A record number or a salary beside ages: one column has nearly all of the variance."""
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(300, 5)) @ rng.normal(size=(5, 5))
    rows = np.column_stack([rows, np.full(300, 7.0), larger * rng.normal(1, 3, size=300)])
    for factors in (1, 3):
        judge = PCA(factors).fit(rows)
        with pytest.warns(emfed.EmfedWarning, match="one single value"):
            result = emfed.fit(emfed.ppca(factors), np.split(rows, 3))
        noise = judge.noise_variance_ * 299 / 300  # scikit-learn divides by one row less
        np.testing.assert_allclose(result.params.noise, noise, rtol=1e-5)
        assert abs(result.log_likelihood(rows) - judge.score(rows)) < 1e-4


@pytest.mark.long
def test_an_optimiser_of_the_mixture_ends_where_federated_em_ends() -> None:
    tables = [table[:, :4] for table in REGISTRY["factors 2"].tables]
    rows = np.concatenate(tables)
    start = plain_fit(emfed.factor_analysis(1, 2), [rows], rounds=100).params
    options = {"rounds": 4000, "field_tol": 1e-19, "start": start}
    got = plain_fit(emfed.factor_analysis(1, 2), tables, emfed.FedEM(), **options)
    model = got.model
    shapes = {name: value.shape for name, value in start.arrays().items()}

    def split(x: Any) -> Any:
        arrays, at = {}, 0
        for name, shape in shapes.items():
            size = int(np.prod(shape))
            arrays[name] = x[at : at + size].reshape(shape)
            at += size
        weights = np.exp(arrays["weights"])
        arrays["weights"] = weights / weights.sum()
        return model.from_user(type(start)(**{**arrays, "noise": np.exp(arrays["noise"])}))

    parts = start.arrays()
    begin = [np.log(parts["weights"]), parts["means"], parts["loadings"], np.log(parts["noise"])]
    best = optimize.minimize(
        lambda x: -float(model.log_likelihood(rows, split(x))),
        np.concatenate([part.ravel() for part in begin]),
        method="L-BFGS-B",
        options={"maxiter": 600, "maxfun": 10**6, "ftol": 1e-15, "gtol": 1e-8},
    )
    assert got.log_likelihood(rows) == pytest.approx(-best.fun, abs=1e-6)


@each
def test_the_rotation_is_the_documented_one(name: str) -> None:
    _, model, rows, params = setup(name)
    user = model.to_user(params)
    scaled = np.swapaxes(user.loadings, -1, -2) / user.noise[:, None, :]
    inner = scaled @ user.loadings
    for matrix, loadings in zip(inner, user.loadings, strict=True):
        np.testing.assert_allclose(matrix, np.diag(np.diagonal(matrix)), atol=1e-8)
        assert np.all(np.diff(np.diagonal(matrix)) < 0)
        assert np.all(loadings[np.abs(loadings).argmax(axis=0), range(2)] > 0)
    turn = np.linalg.qr(np.random.default_rng(0).normal(size=(2, 2)))[0]
    turned = emfed.models.FactorParameters(
        params.weights, params.means, params.loadings @ turn, params.noise
    )
    np.testing.assert_allclose(model.to_user(turned).loadings, user.loadings, atol=1e-8)
    value = model.log_likelihood(rows, turned)
    assert float(value) == pytest.approx(float(model.log_likelihood(rows, params)), abs=1e-10)


def test_bad_settings_and_rows_are_told() -> None:
    rows = np.random.default_rng(0).normal(size=(20, 3))
    with pytest.raises(emfed.DataError, match="needs more columns"):
        plain_fit(emfed.factor_analysis(3), rows)
    with pytest.raises(emfed.SettingsError, match="n_factors"):
        emfed.factor_analysis(0)
    with pytest.raises(emfed.SettingsError, match="the scale must be a number"):
        emfed.ppca(1, noise_prior=emfed.models.InverseWishart(3.0, np.eye(3)))
    wrong = emfed.models.FactorParameters(
        np.ones(1), np.zeros((1, 3)), np.zeros((1, 3, 2)), np.ones(3)
    )
    with pytest.raises(emfed.SettingsError, match=r"start noise: expected .* \(1, 3\)"):
        plain_fit(emfed.factor_analysis(2), rows, start=wrong)
