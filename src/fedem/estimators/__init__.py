"""scikit-learn's face: estimators for rows that stay where they are."""

from fedem.estimators.base import NotConverged
from fedem.estimators.factors import FederatedFactorAnalysis
from fedem.estimators.gaussian import FederatedGaussianMixture
from fedem.estimators.imputer import FederatedImputer
from fedem.estimators.kmeans import FederatedKMeans
from fedem.estimators.mixed import FederatedMixture

__all__ = [
    "FederatedFactorAnalysis",
    "FederatedGaussianMixture",
    "FederatedImputer",
    "FederatedKMeans",
    "FederatedMixture",
    "NotConverged",
]
