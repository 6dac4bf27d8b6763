"""Federated Expectation-Maximization.

Fit latent-variable models on data that may not be pooled: workers send compressed statistics,
never rows. Start with `fit`.
"""

from typing import TYPE_CHECKING, Any

from emfed.algorithms import (
    EM,
    AutoEM,
    Bernoulli,
    Decreasing,
    Everyone,
    FedEM,
    FixedSize,
    Schedule,
    VRFedEM,
)
from emfed.artifacts.result import Result, load
from emfed.compressors import (
    ChosenDithering,
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
from emfed.core.records import Records, RoundRecord
from emfed.core.version import __version__
from emfed.data import (
    ParquetRows,
    Stream,
    WorkerData,
    WorkerTables,
    as_workers,
    pad_sequences,
    synthetic_federation,
)
from emfed.fitting.driver import fit, open_run, select_components
from emfed.fitting.rounds import Run
from emfed.fitting.selection import Selection
from emfed.fitting.serving import Served, rehearse, serve
from emfed.fitting.settings import FitSettings
from emfed.fitting.stopping import Monitor, Stop
from emfed.models import (
    Categorical,
    Centres,
    FactorParameters,
    GaussianParameters,
    InverseWishart,
    LinearGaussian,
    MarkovParameters,
    MixedParameters,
    Poisson,
    RegressionParameters,
    factor_analysis,
    gaussian_mixture,
    hidden_markov,
    k_means,
    mixed_mixture,
    ppca,
    register_model,
    regression_mixture,
)
from emfed.network import (
    FaultPlan,
    FaultyFederation,
    LocalTransport,
    LoopFederation,
    RayFederation,
    RemoteFederation,
    Site,
    SiteRules,
    StackedFederation,
    Transport,
)

if TYPE_CHECKING:
    from emfed.fitting.estimators import (
        FederatedFactorAnalysis,
        FederatedGaussianMixture,
        FederatedImputer,
        FederatedKMeans,
        FederatedMixture,
    )
    from emfed.imputation import (
        Columns,
        FieldTable,
        Imputation,
        Structure,
        impute,
        read_ebird,
        read_records,
        simulate_table,
    )

__all__ = [
    "AutoEM",
    "ChosenDithering",
    "MarkovParameters",
    "hidden_markov",
    "pad_sequences",
    "RegressionParameters",
    "regression_mixture",
    "EM",
    "Bernoulli",
    "Categorical",
    "Centres",
    "CheckpointError",
    "Columns",
    "ContractError",
    "DataError",
    "Decreasing",
    "Dithering",
    "Everyone",
    "FactorParameters",
    "FaultPlan",
    "FaultyFederation",
    "FedEM",
    "FederatedFactorAnalysis",
    "FederatedGaussianMixture",
    "FederatedImputer",
    "FederatedKMeans",
    "FederatedMixture",
    "EmfedError",
    "EmfedWarning",
    "FederationError",
    "FieldTable",
    "FitSettings",
    "FixedSize",
    "GaussianParameters",
    "Identity",
    "Imputation",
    "InverseWishart",
    "LinearGaussian",
    "LocalTransport",
    "LoopFederation",
    "MixedParameters",
    "ModelFileError",
    "Monitor",
    "NumericalError",
    "ParquetRows",
    "ParticipationError",
    "Poisson",
    "RandomSparsification",
    "RayFederation",
    "Records",
    "RemoteFederation",
    "Result",
    "RoundRecord",
    "Run",
    "Schedule",
    "Selection",
    "Served",
    "SettingsError",
    "Site",
    "SiteRules",
    "StackedFederation",
    "Stop",
    "Stream",
    "Structure",
    "SubtractiveDithering",
    "Transport",
    "VRFedEM",
    "WireError",
    "WorkerData",
    "WorkerTables",
    "__version__",
    "as_workers",
    "block_quantization",
    "factor_analysis",
    "fit",
    "gaussian_mixture",
    "impute",
    "k_means",
    "load",
    "mixed_mixture",
    "open_run",
    "ppca",
    "read_ebird",
    "read_records",
    "register_model",
    "rehearse",
    "select_components",
    "serve",
    "simulate_table",
    "synthetic_federation",
]

_ESTIMATORS = (
    "FederatedFactorAnalysis",
    "FederatedGaussianMixture",
    "FederatedImputer",
    "FederatedKMeans",
    "FederatedMixture",
)
_IMPUTATION = (
    "Columns",
    "FieldTable",
    "FitSettings",
    "Imputation",
    "Structure",
    "impute",
    "read_ebird",
    "read_records",
    "simulate_table",
)


def __getattr__(name: str) -> Any:
    """Names that need more than numpy, imported when they are first asked for."""
    if name in _ESTIMATORS:
        from emfed.fitting import estimators

        return getattr(estimators, name)
    if name in _IMPUTATION:
        from emfed import imputation

        return getattr(imputation, name)
    raise AttributeError(f"module 'emfed' has no attribute {name!r}")
