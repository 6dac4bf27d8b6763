"""A setting is declared once, and every face follows: options, run.toml, docstrings, checks."""

from __future__ import annotations

import inspect
import subprocess
import sys
from dataclasses import MISSING, dataclass, fields, replace
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

import emfed
from emfed.cli.help import Command, option, with_settings
from emfed.core.errors import SettingsError
from emfed.core.settings.declaring import check_declared, declared, documented, setting
from emfed.core.settings.fit import ALGORITHM, FitFields
from emfed.core.settings.impute import ImputeFields
from emfed.fitting import FitSettings
from emfed.fitting.estimators.parameters import PARAMETERS
from emfed.fitting.words import WORDS
from emfed.imputation import ImputeSettings

ESTIMATORS = [getattr(emfed, name) for name in emfed.__all__ if name.startswith("Federated")]
ESTIMATORS = [made for made in ESTIMATORS if inspect.isclass(made)]
OTHERWISE = {
    "FederatedKMeans": {"tol": 1e-6, "algorithm": "em"},
    "FederatedImputer": {"criterion": None},
}
"""Defaults of an estimator that are not those of a fit."""


@documented
@dataclass(frozen=True, eq=False)
class More(FitFields):
    """A fit with a setting more.

    Parameters
    ----------
    {settings}
    """

    patience_of_saints: int = setting(
        7, "How many sins are forgiven.", takes="int", low=1, panel=ALGORITHM, metavar="SINS"
    )

    def __post_init__(self) -> None:
        check_declared(self)


def run(*arguments: str) -> Any:
    app, found = typer.Typer(rich_markup_mode=None), {}

    @with_settings(More, before="data")
    def sinner(data: Annotated[str, option("Rows.")] = "none", **settings: Any) -> None:
        found.update(settings, data=data)

    app.command(cls=Command)(sinner)
    result = CliRunner().invoke(app, arguments)
    return result, found


def test_a_field_is_an_option_with_its_help_default_and_least_value() -> None:
    shown = run("--help")[0].output
    assert "--patience-of-saints SINS" in shown
    assert "How many sins are forgiven. [default: 7; x>=1]" in " ".join(shown.split())
    assert run("--patience-of-saints", "9")[1]["patience_of_saints"] == 9
    assert run()[1]["patience_of_saints"] == 7
    result, _ = run("--patience-of-saints", "0")
    assert result.exit_code == 2


def test_a_field_is_a_key_with_a_check_and_an_entry_in_the_docstring() -> None:
    known = declared(More)
    assert known["patience_of_saints"].toml
    assert "patience_of_saints : int\n    How many sins are forgiven." in str(More.__doc__)
    with pytest.raises(SettingsError, match="patience_of_saints must be a whole number >= 1"):
        More(emfed.gaussian_mixture(2), patience_of_saints=0)


@pytest.mark.parametrize("kind", [FitSettings, ImputeSettings])
def test_every_field_is_declared_and_described(kind: Any) -> None:
    known = declared(kind)
    assert set(known) == {f.name for f in fields(kind) if f.init}
    for name, entry in known.items():
        assert entry.help[-1] in ".?", name
        assert f"{name} : {entry.takes}\n" in str(kind.__doc__)
    assert set(WORDS) == {name for name, entry in declared(FitSettings).items() if entry.toml}


@pytest.mark.parametrize(("kind", "command"), [(FitFields, "fit"), (ImputeFields, "impute")])
def test_a_command_has_the_declared_options_with_the_declared_defaults(
    kind: Any, command: str
) -> None:
    from emfed.cli.main import app

    group: Any = typer.main.get_command(app)
    params = {param.name: param for param in group.commands[command].params}
    for name, entry in declared(kind).items():
        if entry.panel:
            assert params[name].default == getattr(kind, name), name
            assert entry.help in params[name].help, name


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_an_estimator_has_the_declared_names_and_defaults(estimator: Any) -> None:
    own = OTHERWISE.get(estimator.__name__, {})
    names = {"max_iter": "rounds", "random_state": "seed"}
    defaults = {f.name: f.default for f in fields(FitSettings)}
    parameters = inspect.signature(estimator).parameters
    for name, parameter in parameters.items():
        assert f"\n{name} : " in estimator.__doc__, name
        known = defaults.get(names.get(name, name), MISSING)
        if name not in ("n_components", "max_iter", "random_state") and known is not MISSING:
            assert parameter.default == own.get(name, known), name
    assert "{" not in estimator.__doc__.split("Attributes")[1].split("Examples")[0]
    stored = estimator()
    assert all(getattr(stored, name) is p.default for name, p in parameters.items())


def test_entries_of_estimators_are_those_of_the_fit() -> None:
    shared = ("tol", "n_init", "moves", "start", "algorithm", "follow_em", "participation")
    for name in shared:
        assert PARAMETERS[name] is declared(FitFields)[name]


def test_declarations_need_nothing_that_takes_time() -> None:
    script = (
        "import sys; import emfed.core.settings.fit, emfed.core.settings.impute\n"
        "print([name for name in ('numpy', 'scipy', 'polars', 'rich') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_settings_may_be_changed_one_by_one() -> None:
    settings = FitSettings(emfed.gaussian_mixture(2))
    assert replace(settings, n_init=3).n_init == 3
