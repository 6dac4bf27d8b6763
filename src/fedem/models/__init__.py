"""Latent-variable models: statistics in, parameters out."""

from fedem.models.categories import Categorical
from fedem.models.clusters import Centres, Clusters, k_means
from fedem.models.factors import FactorMixture, factor_analysis, ppca
from fedem.models.factory import COVARIANCES, gaussian_mixture
from fedem.models.families import Poisson
from fedem.models.gaussian import GaussianMixture
from fedem.models.linear import LinearGaussian, Location
from fedem.models.loadings import FactorParameters
from fedem.models.markov import HiddenMarkov, MarkovParameters, hidden_markov
from fedem.models.mixed import MixedMixture, MixedParameters, mixed_mixture
from fedem.models.parameters import GaussianParameters, InverseWishart
from fedem.models.registry import CLASSES, savable
from fedem.models.regression import RegressionMixture, RegressionParameters, regression_mixture

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
