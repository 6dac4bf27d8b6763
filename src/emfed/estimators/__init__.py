"""scikit-learn's face: estimators for rows that stay where they are."""

from emfed.estimators.base import NotConverged
from emfed.estimators.factors import FederatedFactorAnalysis
from emfed.estimators.gaussian import FederatedGaussianMixture
from emfed.estimators.imputer import FederatedImputer
from emfed.estimators.kmeans import FederatedKMeans
from emfed.estimators.mixed import FederatedMixture

__all__ = [
    "FederatedFactorAnalysis",
    "FederatedGaussianMixture",
    "FederatedImputer",
    "FederatedKMeans",
    "FederatedMixture",
    "NotConverged",
]
