"""Latent-variable models: statistics in, parameters out."""

from fedem.models.factory import COVARIANCES, gaussian_mixture
from fedem.models.gaussian import GaussianMixture
from fedem.models.linear import LinearGaussian, Location
from fedem.models.parameters import GaussianParameters, InverseWishart

__all__ = [
    "COVARIANCES",
    "GaussianMixture",
    "GaussianParameters",
    "InverseWishart",
    "LinearGaussian",
    "Location",
    "gaussian_mixture",
]
