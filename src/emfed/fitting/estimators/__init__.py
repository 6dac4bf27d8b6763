"""scikit-learn's face: estimators for rows that stay where they are."""

from emfed.fitting.estimators.base import NotConverged
from emfed.fitting.estimators.factors import FederatedFactorAnalysis
from emfed.fitting.estimators.gaussian import FederatedGaussianMixture
from emfed.fitting.estimators.imputer import FederatedImputer
from emfed.fitting.estimators.kmeans import FederatedKMeans
from emfed.fitting.estimators.mixed import FederatedMixture

__all__ = [
    "FederatedFactorAnalysis",
    "FederatedGaussianMixture",
    "FederatedImputer",
    "FederatedKMeans",
    "FederatedMixture",
    "NotConverged",
]
