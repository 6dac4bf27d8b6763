"""All of scikit-learn's own checks, on every estimator; none is expected to fail."""

from __future__ import annotations

from typing import Any

from sklearn.utils.estimator_checks import parametrize_with_checks

import emfed

ESTIMATORS = [
    emfed.FederatedGaussianMixture(),
    emfed.FederatedGaussianMixture(2, covariance_type="tied"),
    emfed.FederatedGaussianMixture("1:2", covariance_type="diag", missing=True),
    emfed.FederatedMixture(),
    emfed.FederatedMixture(2, n_init=2),
    emfed.FederatedFactorAnalysis(),
    emfed.FederatedImputer(),
    emfed.FederatedImputer(2, covariance_type="diag"),
    emfed.FederatedImputer(rank=2),
    emfed.FederatedKMeans(),
]


@parametrize_with_checks(ESTIMATORS)
def test_scikit_learn_check(estimator: Any, check: Any) -> None:
    check(estimator)
