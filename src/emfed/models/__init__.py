"""Latent-variable models: statistics in, parameters out."""

from typing import Any

import emfed.models.positive_families  # noqa: F401 (registers its families)
from emfed.core.protocols import Model
from emfed.core.registry import MODELS, register_model
from emfed.models.categories import Categorical
from emfed.models.clusters import Centres, Clusters, k_means
from emfed.models.factors import FactorMixture, factor_analysis, ppca
from emfed.models.factory import COVARIANCES, gaussian_mixture
from emfed.models.families import FAMILIES, Family, Poisson, register_family
from emfed.models.gaussian import GaussianMixture
from emfed.models.linear import LinearGaussian, Location
from emfed.models.loadings import FactorParameters
from emfed.models.markov import HiddenMarkov, MarkovParameters, hidden_markov
from emfed.models.mixed import MixedMixture, MixedParameters, mixed_mixture
from emfed.models.observers import ObserverEffects, ObserverParameters
from emfed.models.occupancy import Occupancy, OccupancyParameters
from emfed.models.parameters import GaussianParameters, InverseWishart
from emfed.models.regression import RegressionMixture, RegressionParameters, regression_mixture
from emfed.models.row_owner import RowOwner
from emfed.models.site_owner import SiteOwner

__all__ = [
    "MODELS",
    "MarkovParameters",
    "hidden_markov",
    "HiddenMarkov",
    "RegressionParameters",
    "regression_mixture",
    "RegressionMixture",
    "COVARIANCES",
    "FAMILIES",
    "Family",
    "Categorical",
    "Centres",
    "Clusters",
    "FactorMixture",
    "FactorParameters",
    "GaussianMixture",
    "GaussianParameters",
    "InverseWishart",
    "LinearGaussian",
    "ObserverEffects",
    "ObserverParameters",
    "Occupancy",
    "OccupancyParameters",
    "Location",
    "MixedMixture",
    "MixedParameters",
    "Poisson",
    "RowOwner",
    "SiteOwner",
    "build_model",
    "factor_analysis",
    "gaussian_mixture",
    "k_means",
    "make_model",
    "mixed_mixture",
    "ppca",
    "register_family",
    "register_model",
]

build_model = MODELS.build
"""The model, not bound to data, that describes itself as a description says."""


def make_model(kind: str, n_components: int | None = None, **options: Any) -> Model:
    """Make the model of this kind: the one way from words to a model.

    The command line, ``run.toml`` and estimators all come through here.

    Parameters
    ----------
    kind : str
        A name that models describe themselves with, one of `MODELS`.
    n_components : int or None
        The number of components, for kinds that have them.
    **options : object
        Arguments of the function of that name; what is left out has the default there.

    Returns
    -------
    Model
        The model, not bound to data.

    Raises
    ------
    SettingsError
        If the kind or an option is unknown, or the options cannot go together.

    Examples
    --------
    >>> from emfed.models import make_model
    >>> make_model("gaussian-mixture", 3, covariance_type="diag").describe()["n_components"]
    3
    """
    if n_components is not None:
        options["n_components"] = n_components
    return MODELS.make(kind, options)
