"""Federated Expectation-Maximization.

Fit latent-variable models on data that may not be pooled: workers send compressed statistics of
their rows. Between three sites or more these are masked, so that nobody learns those of one site:
docs/what-the-server-learns.md says what keeps rows secret and what does not. Start with `fit`, or
with an estimator such as `FederatedGaussianMixture`.

What most fits need is here. The rest is in `emfed.models`, `emfed.compressors`, `emfed.algorithms`
(participation, step sizes), `emfed.data` (files, streams), `emfed.network` (federations, sites,
rules), `emfed.fitting` (settings, runs by hand, `serve`), `emfed.imputation`, `emfed.theory` and
`emfed.testing`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from emfed.core.version import __version__

if TYPE_CHECKING:
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
    from emfed.fitting import fit, select_components
    from emfed.fitting.estimators import (
        FederatedFactorAnalysis,
        FederatedGaussianMixture,
        FederatedImputer,
        FederatedKMeans,
        FederatedMixture,
    )
    from emfed.imputation import impute
    from emfed.models import (
        factor_analysis,
        gaussian_mixture,
        hidden_markov,
        k_means,
        mixed_mixture,
        ppca,
        regression_mixture,
    )

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


_HOMES = (
    "core.errors",
    "compressors",
    "algorithms",
    "models",
    "artifacts.result",
    "fitting",
    "fitting.estimators",
    "imputation",
)
"""Where the public names are looked for, in this order: what is quick to import comes first."""


def __getattr__(name: str) -> Any:
    """Import a public name or subpackage when it is first asked for, so that `import emfed` is
    quick, and `emfed --help` with it.
    """
    if name in _ROOMS:
        return import_module(f"emfed.{name}")
    for home in _HOMES if name in __all__ else ():
        found = getattr(import_module(f"emfed.{home}"), name, None)
        if found is not None:
            globals()[name] = found
            return found
    raise AttributeError(f"module 'emfed' has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names, and nothing else."""
    return sorted({*__all__, *_ROOMS})
