"""What users import is there, documented, and told apart from what they should not."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import emfed
from emfed.core import errors


def test_exported_names() -> None:
    assert sorted(emfed.__all__) == sorted(
        "AutoEM Bernoulli Categorical Centres FederatedFactorAnalysis FederatedGaussianMixture "
        "FederatedImputer FederatedKMeans FederatedMixture Selection k_means select_components "
        "CheckpointError ChosenDithering Columns ContractError DataError Decreasing "
        "Dithering EM Everyone FactorParameters FaultPlan FaultyFederation FedEM EmfedError "
        "EmfedWarning FederationError FieldTable FitSettings FixedSize GaussianParameters "
        "Identity Imputation "
        "InverseWishart LinearGaussian LocalTransport LoopFederation MarkovParameters "
        "MixedParameters ModelFileError Monitor NumericalError ParquetRows ParticipationError "
        "Poisson RandomSparsification RayFederation Records RegressionParameters RemoteFederation "
        "Result RoundRecord Run Schedule Served SettingsError Site SiteRules StackedFederation "
        "Stop Stream Structure SubtractiveDithering Transport VRFedEM WireError "
        "WorkerData WorkerTables __version__ as_workers block_quantization factor_analysis "
        "fit gaussian_mixture hidden_markov impute load mixed_mixture open_run pad_sequences "
        "ppca read_ebird read_records register_model regression_mixture rehearse serve "
        "simulate_table "
        "synthetic_federation".split()
    )
    for name in emfed.__all__:
        assert hasattr(emfed, name)


@pytest.mark.parametrize("name", [n for n in emfed.__all__ if n != "__version__"])
def test_exported_names_are_documented(name: str) -> None:
    assert inspect.getdoc(getattr(emfed, name))


def test_the_exception_tree_is_the_one_drawn() -> None:
    assert errors.__doc__ is not None
    for name, value in vars(errors).items():
        if inspect.isclass(value) and issubclass(value, (Exception, Warning)):
            assert name in errors.__doc__
            if value is not emfed.EmfedError and not issubclass(value, Warning):
                assert issubclass(value, emfed.EmfedError)
    assert issubclass(emfed.DataError, ValueError)
    assert issubclass(emfed.SettingsError, ValueError)


def test_heavy_imports_are_lazy() -> None:
    script = (
        "import sys, emfed, emfed.cli.main; "
        "print([m for m in ('scipy.stats', 'sklearn', 'polars', 'pandas', 'matplotlib', 'rich') "
        "if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
