"""The command line speaks of options, never of Python; run.toml of keys; a summary tells all."""

from __future__ import annotations

import copy
import json
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

import emfed
from emfed.cli.help import CommandFace
from emfed.cli.main import app
from emfed.core.configuration import TOML
from emfed.core.errors import SettingsError
from emfed.core.wording import Setting, Wording
from emfed.deployment.config import read_config
from emfed.fitting.estimators.base import EstimatorFace
from tests.cli.shell import Shell

PYTHON = re.compile(r"(?<![\w/.'-])[a-z]+_[a-z]+|=True|=False|=None|\bmax_iter\b")
NUMBERS = ("--columns", "age,pressure", "-g", "hospital")


@pytest.mark.parametrize(
    "arguments",
    [
        ["-k", "500"],
        ["-k", "2", "--n-init", "0"],
        ["-k", "2", "--covariance-floor", "0.5", "--covariance-type", "tied", "--missing"],
        ["-k", "2", "--algorithm", "em", "--participation", "0.5", "--batch-size", "3"],
        ["--follow-em", "--algorithm", "em"],
        ["--rounds", "-1"],
        ["--resume"],
        ["--max-bytes", "10"],
        ["--covariance-floor", "1e-15"],
        ["--start", "nowhere"],
        ["--weights", "heavy"],
        ["--model", "factor-analysis", "--factors", "9"],
        ["--checkpoint", "."],
    ],
)
def test_errors_and_notes_name_options(arguments: list[str], emfed_shell: Shell) -> None:
    code, out, err = emfed_shell("fit", "wards.csv", *NUMBERS, *arguments)
    assert code != 0 or "note:" in out, out
    assert not PYTHON.search(out + err), out + err


def face_of(command: str) -> CommandFace:
    return CommandFace(typer.main.get_command(app).commands[command].params)  # type: ignore[attr-defined]


def test_each_face_prints_settings_by_its_own_names() -> None:
    start, missing = Setting("start", "k-means"), Setting("missing", True)
    said = Wording(
        "{} > 1 needs {}, a larger {}, {} or {}; in 3 rounds the start was lost.",
        *(Setting("n_init"), start, Setting("tol"), Setting("max_bytes", 30), missing),
    )
    lost = "in 3 rounds the start was lost."
    smaller = "a larger tol"
    assert said == (
        f"n_init > 1 needs start='k-means', a larger tol, max_bytes=30 or missing=True; {lost}"
    )
    assert face_of("fit")(said) == (
        f"--n-init > 1 needs --start k-means, a larger --tol, --max-bytes 30 or --missing; {lost}"
    )
    assert TOML(said) == (
        f'n_init > 1 needs start = "k-means", {smaller}, max_bytes = 30 or missing = true; {lost}'
    )
    rounds = SettingsError(setting="rounds", must="be a whole number", got=1.5)
    assert str(rounds) == "rounds must be a whole number; got 1.5."
    assert face_of("fit")(rounds.message) == "--rounds must be a whole number; got 1.5."
    rounds = rounds.on(EstimatorFace({"rounds": "max_iter"}, families=False))
    assert str(rounds) == "max_iter must be a whole number; got 1.5."


@pytest.mark.parametrize(
    ("setting", "typed"),
    [
        (Setting("floor", 0.01), "--set floor=0.01"),
        (Setting("drop", False), "--set drop=false"),
        (Setting("n_factors", 2), "--factors 2"),
        (
            Setting("families", {"ward": "categorical"}, of="mixed_mixture"),
            "--types ward=categorical",
        ),
        (Setting("unheard_of"), "unheard_of"),
    ],
)
def test_what_has_no_option_of_its_own_is_set(setting: Setting, typed: str) -> None:
    assert face_of("fit")(Wording("{}", setting)) == typed


@given(st.text(), st.one_of(st.none(), st.booleans(), st.integers(), st.text()))
def test_a_message_holds_what_users_wrote_as_it_is_and_can_be_copied(text: str, got: Any) -> None:
    error = SettingsError(setting="start", must="be parameters", got=text, instead=text)
    assert text in str(error)
    said = Wording("{}: {}, {}", text, error.message, Setting("start", got))
    again = pickle.loads(pickle.dumps(said))
    assert (again, TOML(again)) == (said, TOML(said))
    assert copy.deepcopy(said).parts == said.parts


def test_run_toml_is_spoken_of_in_its_own_words(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        '[model]\nkind = "gaussian-mixture"\nn_components = 2\n[fit]\nn_init = 3\nstart = 4\n'
        "[sites]\nexpected = 3\n"
    )
    with pytest.raises(SettingsError, match='run.toml: n_init > 1 .* start = "k-means"'):
        read_config(path)


def test_the_summary_tells_bytes_beside_the_rows_and_a_report_has_a_title(
    emfed_shell: Shell,
) -> None:
    fit = ("fit", "wards.csv", *NUMBERS, "-k", 2)
    code, out, _ = emfed_shell(*fit, "--report", "r.html", "--title", "Wards & beds")
    assert code == 0
    assert "the rows themselves: 3.0 kB" in re.sub(r"\s+", " ", out)  # 185 rows of two doubles
    page = (emfed_shell.folder / "r.html").read_text(encoding="utf-8")
    assert "<h1>Wards &amp; beds</h1>" in page
    assert "Rows of wards.csv, simulated in one process" in page
    told = json.loads(emfed_shell(*fit, "--json")[1])
    assert told["raw_bytes"] == 185 * 2 * 8
    assert emfed_shell("report", "model.emfed", "-o", "again.html", "--title", "Again")[0] == 0
    assert "<h1>Again</h1>" in (emfed_shell.folder / "again.html").read_text(encoding="utf-8")


def test_what_the_terminal_warned_of_is_in_the_report(emfed_shell: Shell) -> None:
    _, out, _ = emfed_shell("fit", "wards.csv", *NUMBERS, "--rounds", 2, "--report", "r.html")
    note = re.sub(r"\s+", " ", out.split("note: ")[1].split("note:")[0].split("The model")[0])
    page = re.sub(r"\s+", " ", (emfed_shell.folder / "r.html").read_text(encoding="utf-8"))
    assert "--tol" in note
    assert note.strip()[1:] in page


def test_a_family_that_fits_nobody_is_called_wrong(emfed_shell: Shell) -> None:
    rng = np.random.default_rng(0)
    lines = [f"{'abc'[i % 3]},{v}" for i, v in enumerate(rng.negative_binomial(1, 0.05, 600))]
    emfed_shell.write("visits.csv", "\n".join(["site,visits", *lines]) + "\n")
    fit = ("fit", "visits.csv", "-g", "site", "-k", 1, "--types", "visits=poisson")
    _, out, _ = emfed_shell(*fit)
    assert "its family is wrong" in re.sub(r"\s+", " ", out)
    assert "emfed adapt" not in out


def test_parameters_are_printed(emfed_shell: Shell) -> None:
    assert emfed_shell("fit", "wards.csv", *NUMBERS, "-k", 2, "-q")[0] == 0
    code, out, _ = emfed_shell("inspect", "model.emfed", "--params")
    assert code == 0
    rows = {line.split("|")[1].strip(): line for line in out.splitlines()}
    assert set(rows) == {"mean ± standard deviation", "---", "share", "age", "pressure"} - {
        "---"
    } | {next(name for name in rows if name.startswith("---"))}
    params = emfed.load(emfed_shell.folder / "model.emfed").params
    first = float(re.findall(r"[\d.]+", rows["age"])[0])
    assert first == pytest.approx(params.means[0, 0], abs=0.06)
    told = json.loads(emfed_shell("inspect", "model.emfed", "--params", "--json")[1])
    np.testing.assert_allclose(told["params"]["means"], params.means)


def test_a_plan_takes_the_short_option_of_groups(emfed_shell: Shell) -> None:
    plan = ("plan", "wards.csv", "-g", "hospital", "--columns", "age,pressure", "--json")
    code, out, err = emfed_shell(*plan)
    assert code == 0, err
    assert json.loads(out)["plan"]["workers"] == 3
