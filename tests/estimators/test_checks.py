"""All of scikit-learn's own checks, on every estimator; none is expected to fail."""

from __future__ import annotations

from typing import Any

from sklearn.utils.estimator_checks import parametrize_with_checks

import fedem

ESTIMATORS = [
    fedem.FederatedGaussianMixture(),
    fedem.FederatedGaussianMixture(2, covariance_type="tied"),
    fedem.FederatedGaussianMixture("1:2", covariance_type="diag", missing=True),
    fedem.FederatedMixture(),
    fedem.FederatedMixture(2, n_init=2),
    fedem.FederatedFactorAnalysis(),
    fedem.FederatedImputer(),
    fedem.FederatedImputer(2, covariance_type="diag"),
    fedem.FederatedImputer(rank=2),
    fedem.FederatedKMeans(),
]


@parametrize_with_checks(ESTIMATORS)
def test_scikit_learn_check(estimator: Any, check: Any) -> None:
    check(estimator)
