"""What a warning advises can be done on the face that shows it, in the words that stand there."""

from __future__ import annotations

import ast
import re
import shlex
import tomllib
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import pytest

import emfed
from emfed.cli.help import CommandFace
from emfed.core.configuration import TOML
from emfed.core.errors import DataError
from emfed.fitting.estimators import NotConverged
from emfed.fitting.words import read_words
from tests.cli.shell import Shell


def zeros(seed: int = 0, whole: bool = True) -> pd.DataFrame:
    """A column of which 83% are 0, the others counts or amounts."""
    rng = np.random.default_rng(seed)
    some = 1.0 + rng.poisson(6, 400) if whole else rng.gamma(2, 3, 400)
    table = {"visits": np.where(rng.random(400) < 0.83, 0.0, some), "age": rng.normal(50, 9, 400)}
    return pd.DataFrame(table)


def words(warning: warnings.WarningMessage) -> str:
    """What was said, with the settings that it mentions."""
    assert isinstance(warning.message, Warning)
    said: str = warning.message.args[0]
    return said


def warned(estimator: Any, table: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        estimator.fit(table, groups=np.arange(len(table)) % 3)
    return [words(w) for w in found]


def remark(told: list[str]) -> str:
    (found,) = [line for line in told if "many rows have one value" in line]
    assert "column 'visits' at 0" in found
    return found


@pytest.mark.parametrize(
    "estimator",
    [
        emfed.FederatedGaussianMixture(2, covariance_type="diag"),
        emfed.FederatedMixture(2),
        emfed.FederatedImputer(2, covariance_type="diag"),
        emfed.FederatedImputer(2, families="gaussian"),
    ],
    ids=repr,
)
def test_an_estimator_takes_what_its_warning_advises(estimator: Any) -> None:
    told = remark(warned(estimator, zeros()))
    (floor,) = re.findall(r"say (\w*floor)=([\d.e-]+)\)", told)
    known = estimator.get_params()
    assert float(floor[1]) > known[floor[0]]
    higher = estimator.set_params(**{floor[0]: float(floor[1])})
    warned(higher, zeros())
    settings = higher.result_.model.describe()
    assert float(floor[1]) in settings.values()  # it reaches the model
    (family,) = re.findall(r"(\w*)\(?families=(\{.*?\})", told)
    other = getattr(emfed, family[0])(2) if family[0] else estimator
    assert ("families" in known) == (not family[0])
    again = warned(other.set_params(families=ast.literal_eval(family[1])), zeros())
    assert not any("many rows have one value" in line for line in again)


def test_the_command_line_takes_what_its_warning_advises(emfed_shell: Shell) -> None:
    table = zeros().assign(site=np.arange(400) % 3)
    table.to_csv(emfed_shell.folder / "rows.csv", index=False)
    fit = ("fit", "rows.csv", "-g", "site", "-k", 2)
    for more in ((), ("--model", "mixed-mixture")):
        code, out, err = emfed_shell(*fit, *more)
        assert code == 0, err
        told = remark([" ".join(out.split())])
        (types,) = re.findall(r"(--types \S+?),? ", told)
        (floor,) = re.findall(r"\(say (--[^)]*)\)", told)
        assert emfed_shell(*fit, *more, *shlex.split(floor))[0] == 0
        code, out, err = emfed_shell(*fit, *more, *shlex.split(types))
        assert code == 0, err
        assert "many rows have one value" not in " ".join(out.split())


def test_a_run_file_takes_what_its_warning_advises() -> None:
    for model in (emfed.gaussian_mixture(2), emfed.mixed_mixture(2, "gaussian", missing=False)):
        with pytest.warns(emfed.EmfedWarning) as found:
            emfed.fit(model, zeros())
        told = TOML(remark([words(w) for w in found]))
        (floor,) = re.findall(r"\(say (.*?)\)", told)
        (kind, families) = re.findall(r'(kind = ".*?") and (families = \{.*?\})', told)[0]
        name = tomllib.loads(f'kind = "{model.describe()["model"]}"\nn_components = 2\n{floor}')
        if "families" in model.describe():
            name["families"] = "gaussian"
        assert read_words(name).candidates()[0].describe().items() >= tomllib.loads(floor).items()
        other = read_words(tomllib.loads(f"{kind}\nn_components = 2\n{families}"))
        assert "poisson" in str(other.candidates()[0].describe())


@pytest.mark.parametrize("value", [-9.0, 0.5])
def test_counts_are_advised_where_the_value_can_be_one(value: float) -> None:
    table = zeros().assign(visits=lambda t: t["visits"].where(t["visits"] > 0, value))
    with pytest.warns(emfed.EmfedWarning, match="for codes mixed_mixture") as found:
        emfed.fit(emfed.gaussian_mixture(2), table)
    assert "poisson" not in " ".join(str(w.message) for w in found)
    assert "--types visits=categorical" in CommandFace([])(words(found[0]))


def test_families_of_counts_and_amounts_bear_zeros() -> None:
    counts = emfed.FederatedMixture("1:3", families={"visits": "poisson"}, random_state=0)
    assert not warned(counts, zeros())
    assert counts.n_components_ == 2
    assert min(counts.parameters_["visits"]["rate"]) < 0.01
    amounts: Mapping[str, str] = {"visits": "exponential"}
    some = emfed.FederatedMixture("1:3", families=amounts, random_state=0)
    assert "column 'visits' at 0" in remark(warned(some, zeros(whole=False)))
    assert some.n_components_ == 2
    with pytest.raises(DataError, match="column 'visits' is 0.0; expected a finite number > 0"):
        emfed.FederatedMixture(2, families={"visits": "gamma"}).fit(zeros(whole=False))


@pytest.mark.parametrize("model", ["gaussian-mixture", "factor-analysis", "k-means"])
def test_missing_is_advised_where_the_model_takes_it(model: str, emfed_shell: Shell) -> None:
    table = zeros().assign(site=np.arange(400) % 3)
    table.loc[7, "age"] = np.nan
    table.to_csv(emfed_shell.folder / "rows.csv", index=False)
    fit = ("fit", "rows.csv", "-g", "site", "--model", model, "-q")
    code, _, err = emfed_shell(*fit)
    assert code == 2
    assert "line 9, column 'age'" in err
    takes = "say --missing" in err
    assert takes == (model == "gaussian-mixture")
    assert emfed_shell(*fit, "--missing")[0] == (0 if takes else 2)
    if takes:
        code, _, err = emfed_shell(*fit, "--covariance-type", "tied")
        assert "say --missing, with --covariance-type full or diag, if" in " ".join(err.split())


def test_what_a_model_needs_is_asked_for_in_the_words_of_the_command_line(
    emfed_shell: Shell,
) -> None:
    fit = ("fit", "wards.csv", "-g", "hospital", "--columns", "age,pressure", "-q")
    code, _, err = emfed_shell(*fit, "--model", "row-owner")
    assert code == 2
    assert "--model row-owner needs --set rank=..." in err
    assert emfed_shell(*fit, "--model", "row-owner", "--set", "rank=1")[0] == 0
    assert emfed_shell(*fit, "--model", "factor-analysis", "--factors", 1)[0] == 0
    assert emfed.load(emfed_shell.folder / "model.emfed").model.n_components == 1


def test_what_may_help_is_told_in_the_words_of_the_estimator() -> None:
    rows = np.random.default_rng(0).normal(size=(90, 3))
    for estimator, words in (
        (emfed.FederatedKMeans(3, max_iter=1), "in 1 round: .* fewer clusters"),
        (emfed.FederatedImputer(rank=1, max_iter=1), "or a lower rank"),
    ):
        with pytest.warns(NotConverged, match=words):
            estimator.fit(rows, groups=np.arange(90) % 3)
