"""Federated Expectation-Maximization.

Fit latent-variable models on data that may not be pooled: workers send compressed statistics of
their rows. Between three sites or more these are masked, so that the server learns sums alone;
docs/what-the-server-learns.md says what keeps rows secret and what does not. Start with `fit`, or
with an estimator such as `FederatedGaussianMixture`.

What most fits need is here. The rest is in `emfed.models`, `emfed.compressors`, `emfed.algorithms`
(participation, step sizes), `emfed.data` (files, streams), `emfed.network` (federations, sites,
rules), `emfed.fitting` (settings, runs by hand, `serve`), `emfed.imputation`, `emfed.theory` and
`emfed.testing`.
"""

from typing import TYPE_CHECKING, Any

from emfed.algorithms import EM, AutoEM, FedEM, VRFedEM
from emfed.artifacts.result import Result, load
from emfed.compressors import (
    Dithering,
    Identity,
    RandomSparsification,
    SubtractiveDithering,
    block_quantization,
)
from emfed.core.errors import (
    CheckpointError,
    ContractError,
    DataError,
    EmfedError,
    EmfedWarning,
    FederationError,
    ModelFileError,
    NumericalError,
    ParticipationError,
    SettingsError,
    WireError,
)
from emfed.core.version import __version__
from emfed.fitting import fit, select_components
from emfed.models import (
    factor_analysis,
    gaussian_mixture,
    hidden_markov,
    k_means,
    mixed_mixture,
    ppca,
    regression_mixture,
)

if TYPE_CHECKING:
    from emfed.fitting.estimators import (
        FederatedFactorAnalysis,
        FederatedGaussianMixture,
        FederatedImputer,
        FederatedKMeans,
        FederatedMixture,
    )
    from emfed.imputation import impute

__all__ = [
    "AutoEM",
    "CheckpointError",
    "ContractError",
    "DataError",
    "Dithering",
    "EM",
    "EmfedError",
    "EmfedWarning",
    "FedEM",
    "FederatedFactorAnalysis",
    "FederatedGaussianMixture",
    "FederatedImputer",
    "FederatedKMeans",
    "FederatedMixture",
    "FederationError",
    "Identity",
    "ModelFileError",
    "NumericalError",
    "ParticipationError",
    "RandomSparsification",
    "Result",
    "SettingsError",
    "SubtractiveDithering",
    "VRFedEM",
    "WireError",
    "__version__",
    "block_quantization",
    "factor_analysis",
    "fit",
    "gaussian_mixture",
    "hidden_markov",
    "impute",
    "k_means",
    "load",
    "mixed_mixture",
    "ppca",
    "regression_mixture",
    "select_components",
]
_ROOMS = (
    "algorithms",
    "compressors",
    "data",
    "fitting",
    "imputation",
    "models",
    "network",
    "testing",
    "theory",
)
"""Subpackages that users import from."""


def __getattr__(name: str) -> Any:
    """Names that need more than numpy, imported when they are first asked for."""
    if name.startswith("Federated"):
        from emfed.fitting import estimators

        if name in estimators.__all__:
            return getattr(estimators, name)
    if name == "impute":
        from emfed.imputation import impute

        return impute
    if name in _ROOMS:
        return __import__(f"emfed.{name}", fromlist=["__all__"])
    raise AttributeError(f"module 'emfed' has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names, and nothing else."""
    return sorted({*__all__, *_ROOMS})
