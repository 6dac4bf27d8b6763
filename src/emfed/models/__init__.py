"""Latent-variable models: statistics in, parameters out."""

from emfed.models.categories import Categorical
from emfed.models.clusters import Centres, Clusters, k_means
from emfed.models.factors import FactorMixture, factor_analysis, ppca
from emfed.models.factory import COVARIANCES, gaussian_mixture
from emfed.models.families import Poisson
from emfed.models.gaussian import GaussianMixture
from emfed.models.linear import LinearGaussian, Location
from emfed.models.loadings import FactorParameters
from emfed.models.markov import HiddenMarkov, MarkovParameters, hidden_markov
from emfed.models.mixed import MixedMixture, MixedParameters, mixed_mixture
from emfed.models.parameters import GaussianParameters, InverseWishart
from emfed.models.registry import CLASSES, savable
from emfed.models.regression import RegressionMixture, RegressionParameters, regression_mixture

__all__ = [
    "CLASSES",
    "savable",
    "MarkovParameters",
    "hidden_markov",
    "HiddenMarkov",
    "RegressionParameters",
    "regression_mixture",
    "RegressionMixture",
    "COVARIANCES",
    "Categorical",
    "Centres",
    "Clusters",
    "FactorMixture",
    "FactorParameters",
    "GaussianMixture",
    "GaussianParameters",
    "InverseWishart",
    "LinearGaussian",
    "Location",
    "MixedMixture",
    "MixedParameters",
    "Poisson",
    "factor_analysis",
    "gaussian_mixture",
    "k_means",
    "mixed_mixture",
    "ppca",
]
