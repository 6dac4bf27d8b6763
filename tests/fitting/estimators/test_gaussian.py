"""The Gaussian mixture beside scikit-learn's, alone and in a federation."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pandas as pd
import pytest
import sklearn
from sklearn import datasets
from sklearn.base import clone
from sklearn.mixture import GaussianMixture
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import StandardScaler

import emfed
from emfed.fitting.convergence import PLAIN
from emfed.fitting.estimators import NotConverged
from tests.helpers import make_data

KINDS = ("full", "tied", "diag", "spherical")
each_kind = pytest.mark.parametrize("kind", KINDS)
ROWS = np.concatenate(make_data(2, sizes=(150, 150), k=3, d=3, spread=1.5))


def from_sklearn(kind: str, k: int = 3) -> tuple[emfed.models.GaussianParameters, Any]:
    """A start, and where scikit-learn ends from it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first = GaussianMixture(k, covariance_type=kind, max_iter=1, random_state=0).fit(ROWS)
        peer = GaussianMixture(
            k,
            covariance_type=kind,
            weights_init=first.weights_,
            means_init=first.means_,
            precisions_init=first.precisions_,
            reg_covar=1e-12,
            tol=1e-10,
            max_iter=5000,
        ).fit(ROWS)
    return emfed.models.GaussianParameters(first.weights_, first.means_, first.covariances_), peer


@each_kind
@pytest.mark.parametrize("groups", [None, np.arange(len(ROWS)) % 4], ids=["alone", "four"])
def test_ends_where_scikit_learn_ends(kind: str, groups: Any) -> None:
    start, peer = from_sklearn(kind)
    ours = emfed.FederatedGaussianMixture(
        3, covariance_type=kind, start=start, tol=1e-9, algorithm="em"
    )
    ours.fit(ROWS, groups=groups)
    assert ours.converged_
    assert ours.n_iter_ - PLAIN - 2 < peer.n_iter_  # long steps, and a bold one that is judged
    assert abs(ours.score(ROWS) - peer.score(ROWS)) < 1e-7
    np.testing.assert_allclose(ours.means_, peer.means_, atol=1e-3)
    assert ours.lower_bound_ == pytest.approx(ours.score(ROWS), abs=1e-7)


@each_kind
def test_to_sklearn_answers_alike(kind: str) -> None:
    ours = emfed.FederatedGaussianMixture(3, covariance_type=kind).fit(ROWS)
    theirs = ours.to_sklearn()
    np.testing.assert_array_equal(ours.predict(ROWS), theirs.predict(ROWS))
    np.testing.assert_allclose(ours.predict_proba(ROWS), theirs.predict_proba(ROWS), atol=1e-10)
    np.testing.assert_allclose(ours.score_samples(ROWS), theirs.score_samples(ROWS), atol=1e-10)
    assert ours.bic(ROWS) == pytest.approx(theirs.bic(ROWS), rel=1e-12)
    assert ours.aic(ROWS) == pytest.approx(theirs.aic(ROWS), rel=1e-12)
    assert ours.result_.free_parameters == theirs._n_parameters()
    assert clone(theirs).fit(ROWS).score(ROWS) > ours.score(ROWS) - 1e-3


def test_samples_look_like_the_rows() -> None:
    fitted = emfed.FederatedGaussianMixture(3, random_state=3).fit(ROWS)
    drawn, labels = fitted.sample(40_000)
    np.testing.assert_allclose(drawn.mean(axis=0), ROWS.mean(axis=0), atol=0.1)
    np.testing.assert_allclose(np.cov(drawn.T), np.cov(ROWS.T), atol=0.25)
    np.testing.assert_allclose(np.bincount(labels) / len(labels), fitted.weights_, atol=0.01)
    np.testing.assert_array_equal(drawn[:10], fitted.sample(10)[0])  # the first are the same


def test_random_state_means_for_samples_what_it_means_in_scikit_learn() -> None:
    factors = emfed.FederatedFactorAnalysis(1).fit(ROWS)
    for fitted in (emfed.FederatedGaussianMixture(3).fit(ROWS), factors):
        first, second = (np.asarray(fitted.sample(5)[0]) for _ in range(2))
        assert not np.array_equal(first, second)
        np.random.seed(3)
        first = np.asarray(fitted.sample(5)[0])
        np.random.seed(3)
        np.testing.assert_array_equal(first, fitted.sample(5)[0])
        fitted.set_params(random_state=np.random.RandomState(0))
        assert not np.array_equal(fitted.sample(5)[0], fitted.sample(5)[0])


def test_the_number_of_components_is_found_in_one_run() -> None:
    rows, _ = datasets.make_blobs(900, 3, centers=4, random_state=2)
    for given, criterion in (("2:6", "bic"), (range(2, 7), "icl")):
        fitted = emfed.FederatedGaussianMixture(given, criterion=criterion)
        fitted.fit(rows, groups=np.arange(900) % 3)
        assert fitted.n_components_ == len(fitted.weights_) == 4
        assert [row["n_components"] for row in fitted.selection_.table] == [2, 3, 4, 5, 6]
        best = fitted.selection_.table[2]
        assert best["bic"] == pytest.approx(fitted.bic(rows), rel=2e-8)  # asked on a grid
        assert best["icl"] == pytest.approx(fitted.icl(rows), rel=2e-8)


def test_warm_start_goes_on() -> None:
    once = emfed.FederatedGaussianMixture(3, tol=1e-8).fit(ROWS)
    again = emfed.FederatedGaussianMixture(3, tol=1e-8, max_iter=4, warm_start=True)
    scores = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(30):
            scores.append(again.fit(ROWS).score(ROWS))
    assert np.all(np.diff(scores) > -1e-9)
    assert again.converged_
    assert scores[-1] == pytest.approx(once.score(ROWS), abs=1e-6)


def test_changed_settings_are_no_ground_to_go_on_from() -> None:
    warm = emfed.FederatedGaussianMixture(3, warm_start=True).fit(ROWS)
    warm.set_params(n_components=2)
    with pytest.raises(emfed.SettingsError, match="n_components from 3 to 2: put that back"):
        warm.fit(ROWS)
    warm.set_params(n_components=3, covariance_type="diag")
    with pytest.raises(emfed.SettingsError, match="covariance_type from 'full' to 'diag'"):
        warm.fit(ROWS)
    warm.set_params(covariance_type="full", covariance_floor=1e-5).fit(ROWS)  # that may change
    with pytest.raises(emfed.SettingsError, match="columns from 3 to 1"):
        warm.fit(ROWS[:, :1])
    warm.set_params(n_components="2:3")
    with pytest.warns(emfed.EmfedWarning, match="starts anew"):
        warm.fit(ROWS)
    online = emfed.FederatedGaussianMixture(3).partial_fit(ROWS)
    online.set_params(n_components=2)
    with pytest.raises(emfed.SettingsError, match="partial_fit.*n_components from 3 to 2"):
        online.partial_fit(ROWS)
    assert online.set_params(n_components=3).partial_fit(ROWS).n_batches_ == 2
    analysis = emfed.FederatedFactorAnalysis(1, warm_start=True).fit(ROWS)
    assert analysis.fit(ROWS).converged_


def test_batches_keep_the_column_of_workers() -> None:
    table = pd.DataFrame(ROWS, columns=["x", "y", "z"]).assign(site=np.arange(len(ROWS)) % 3)
    online = emfed.FederatedGaussianMixture(2).partial_fit(table, groups="site")
    online.partial_fit(table.drop(columns="site"))
    assert online.groups_column_ == "site"
    assert len(online.predict(table)) == len(table)
    online.fit([ROWS, ROWS])
    assert online.groups_column_ is None


def test_it_says_when_it_has_not_converged() -> None:
    with pytest.warns(NotConverged, match="max_iter") as caught:
        fitted = emfed.FederatedGaussianMixture(3, max_iter=2, start="moments").fit(ROWS)
    assert issubclass(caught[0].category, sklearn.exceptions.ConvergenceWarning)
    assert not fitted.converged_
    assert fitted.n_iter_ == fitted.n_rounds_ == 2


def test_several_starts_find_what_one_misses() -> None:
    rows, _ = datasets.make_blobs(1200, 2, centers=12, cluster_std=0.5, random_state=3)
    options: dict[str, Any] = {"start": "moments", "covariance_type": "spherical"}
    one = [
        emfed.FederatedGaussianMixture(12, random_state=s, **options).fit(rows).score(rows)
        for s in range(4)
    ]
    many = [
        emfed.FederatedGaussianMixture(12, n_init=8, random_state=s, **options).fit(rows)
        for s in range(4)
    ]
    assert np.mean([m.score(rows) for m in many]) > np.mean(one) + 0.03


@pytest.mark.parametrize("kind", ["full", "tied"])
def test_online_em_learns_from_batches(kind: str) -> None:
    rng = np.random.default_rng(0)
    centres = np.array([[-4.0, 0], [4, 0], [0, 6]])

    def batch(count: int) -> Any:
        return centres[rng.integers(3, size=count)] + rng.normal(size=(count, 2))

    fitted = emfed.FederatedGaussianMixture(3, covariance_type=kind)
    for _ in range(40):
        fitted.partial_fit(batch(200), groups=rng.integers(4, size=200))
    assert fitted.n_batches_ == 40
    found = fitted.means_[np.argsort(fitted.means_[:, 0])]
    np.testing.assert_allclose(found, centres[[0, 2, 1]], atol=0.15)
    rows = batch(5000)
    pooled = GaussianMixture(3, covariance_type=kind, random_state=0).fit(rows)
    assert fitted.score(rows) > pooled.score(rows) - 0.01


def test_a_fit_goes_on_in_batches() -> None:
    for kind in KINDS:
        fitted = emfed.FederatedGaussianMixture(2, covariance_type=kind, tol=1e-9).fit(ROWS)
        before = fitted.score(ROWS)
        for _ in range(3):
            fitted.partial_fit(ROWS)  # the same rows: it stays where it is
        assert fitted.score(ROWS) == pytest.approx(before, abs=1e-6)
    assert not hasattr(emfed.FederatedGaussianMixture("1:3"), "partial_fit")


def test_pipelines_grids_and_routed_groups() -> None:
    groups = np.arange(len(ROWS)) % 3
    with sklearn.config_context(enable_metadata_routing=True):
        mixture = emfed.FederatedGaussianMixture(2).set_fit_request(groups=True)
        pipeline = Pipeline([("scale", StandardScaler()), ("mixture", mixture)])
        pipeline.fit(ROWS, groups=groups)
        assert pipeline["mixture"].result_.ledger.counts.shape[-1] == 3
        assert pipeline.predict(ROWS).shape == (len(ROWS),)
    plain = make_pipeline(StandardScaler(), emfed.FederatedGaussianMixture(2)).fit(ROWS)
    assert plain[-1].result_.ledger.counts.shape[-1] == 1
    grid = GridSearchCV(emfed.FederatedGaussianMixture(), {"n_components": [1, 3]}, cv=2)
    assert grid.fit(ROWS).best_params_ == {"n_components": 3}


def test_missing_values_are_integrated_out() -> None:
    holes = np.where(np.random.default_rng(1).random(ROWS.shape) < 0.1, np.nan, ROWS)
    fitted = emfed.FederatedGaussianMixture(3, missing=True).fit(holes, groups=np.arange(300) % 2)
    whole = emfed.FederatedGaussianMixture(3).fit(ROWS)
    assert fitted.score(ROWS) > whole.score(ROWS) - 0.1
    with pytest.raises(ValueError, match="NaN"):
        whole.predict(holes)


def test_repr_and_params_are_scikit_learns() -> None:
    fitted = emfed.FederatedGaussianMixture("2:8", covariance_type="diag")
    assert repr(fitted) == "FederatedGaussianMixture(covariance_type='diag', n_components='2:8')"
    assert clone(fitted).get_params() == fitted.get_params()
