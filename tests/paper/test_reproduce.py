"""The small version of every experiment: its claims hold, and it leaves what it says."""

from __future__ import annotations

import io
import json
import subprocess
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path

import markupsafe
import numpy as np
import polars as pl
import pytest

from emfed.core.errors import DataError, SettingsError
from emfed.core.storage.disk import Disk
from paper import NAMES, load_experiment, reproduce
from paper.__main__ import main
from tests.artifacts.browser import Browser
from tests.helpers import first

FIRST = ["synthetic", "parts", "mnist", "memories"]


@pytest.mark.parametrize("name", first(FIRST + [n for n in NAMES if n not in FIRST], len(FIRST)))
def test_quick_version_holds(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    experiment = load_experiment(name, quick=True)
    if experiment.needs_mnist:
        monkeypatch.setenv("EMFED_DATA", str(request.getfixturevalue("data_dir")))
    result = reproduce([name], tmp_path, quick=True)
    failed = [v for v in result.verdicts if not v.holds]
    assert not failed
    assert len(result.verdicts) >= 1
    records = pl.read_parquet(tmp_path / f"{name}.parquet")
    assert set(records["run"]) == set(experiment.runs)
    assert len(pl.read_csv(tmp_path / f"{name}.csv", infer_schema_length=None)) == len(records)
    pictures = list(tmp_path.glob(f"{name}-*.png"))
    assert pictures
    assert all(path.with_suffix(s).exists() for path in pictures for s in (".svg", ".pdf"))
    if experiment.needs_mnist:  # what is not in the paper's units says so
        (outcome,) = result.outcomes
        about_h = [f.caption for f in outcome.findings.figures.values() if "|h|²" in f.caption]
        assert all("in the frame of" in caption for caption in about_h)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert {"name", "value", "expected", "holds"} <= set(summary["verdicts"][0])
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert markupsafe.escape(experiment.title) in page
    guesses = "What the paper prints, and what we run" in page
    assert guesses != ("The paper has no such run: all settings are ours." in page)
    assert page.count('<img src="data:image/svg+xml;base64,') == len(pictures)


CONFIG = """
title = "T"
about = "A"
shows = "S"
[settings]
workers = 5
rows = 40
epochs = 8
step_size = 0.1
batch_size = 5
[runs.FedEM]
[runs.VR-FedEM]
algorithm = "VR-FedEM"
"""


def command(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """``python -m paper`` in this process."""
    out, err = io.StringIO(), io.StringIO()
    printing = (redirect_stdout(out), redirect_stderr(err))
    with printing[0], printing[1], chdir(cwd or "."), pytest.raises(SystemExit) as end:
        main(list(arguments))
    assert isinstance(end.value.code, int)
    return subprocess.CompletedProcess(arguments, end.value.code, out.getvalue(), err.getvalue())


def test_a_claim_that_fails_shows_in_the_exit_code(tmp_path: Path) -> None:
    config = tmp_path / "own.toml"
    config.write_text(CONFIG)
    arguments = ("synthetic", "--config", str(config), "--jobs", "1")
    arguments = (*arguments, "--out", str(tmp_path / "out"))
    done = command(*arguments)
    assert done.returncode == 1
    assert "fails" in done.stdout
    assert "holds" in done.stdout
    assert "Traceback" not in done.stderr
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    by_name = {v["name"]: v for v in summary["verdicts"]}
    assert by_name["FedEM's |H|² stays far above |h|²"]["holds"] is False
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert page.rindex('class="fails"') < page.index('class="holds"'), "what fails comes first"
    again = command(*arguments, "--json")
    assert again.returncode == 1
    printed = json.loads(again.stdout)
    assert printed["verdicts"] == summary["verdicts"]


@pytest.mark.parametrize("width", [1280, 375])
def test_the_report_in_a_browser(browser: Browser, tmp_path: Path, width: int) -> None:
    config = tmp_path / "own.toml"
    config.write_text(CONFIG)
    reproduce(["synthetic"], tmp_path, config=config)
    seen = browser.look(tmp_path / "report.html", width)
    assert seen["images"] == 1
    assert seen["widths"][0] == 312 if width < 600 else seen["widths"][0] > 500
    assert seen["page"] <= width
    assert seen["console"] == []


def test_the_command_lists_and_refuses(tmp_path: Path) -> None:
    listed = command("--list")
    assert listed.returncode == 0
    assert all(name in listed.stdout for name in NAMES)
    for arguments, message in (
        ([], "name an experiment: all, synthetic"),
        (["minst"], "no experiment 'minst'"),
        (["synthetic", "--jobs", "0"], "jobs"),
        (["synthetic", "--config", "nowhere.toml"], "nowhere.toml"),
    ):
        done = command(*arguments, cwd=tmp_path)
        assert done.returncode == 2, done.stderr
        assert message in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.long
def test_seeds_count_from_the_one_given_and_seconds_are_kept(tmp_path: Path) -> None:
    config = tmp_path / "own.toml"
    config.write_text("seeds = 2\n" + CONFIG)
    result = reproduce(["synthetic"], tmp_path / "out", seed=40, config=config)
    assert result.summary["experiments"]["synthetic"]["seeds"] == [40, 41]
    assert result.summary["facts"]["seeds"] == "40, 41"
    assert set(pl.read_parquet(tmp_path / "out" / "synthetic.parquet")["seed"]) == {40, 41}
    (first,) = result.outcomes
    assert first.processor_seconds > 0
    assert first.not_judged == []
    assert result.missing == []
    blind = replace(result, outcomes=[replace(first, verdicts=[], not_judged=["of storms"])])
    assert not blind.holds, "no claim failed, since none could be judged"
    assert blind.missing == [
        "Not judged: 1 claims of synthetic, since EMFED_DATA names no folder with their data."
    ]
    assert replace(blind, summary={"quick": True}).holds
    (again,) = reproduce(["synthetic"], tmp_path / "out", seed=40, config=config).outcomes
    assert again.processor_seconds == first.processor_seconds, "a resumed call adds nothing"


@pytest.mark.long
def test_without_data_others_still_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMFED_DATA", str(tmp_path))
    with pytest.raises(DataError, match="has no mnist.npz"):
        reproduce(["mnist"], tmp_path / "alone", quick=True)
    result = reproduce(["mnist", "one_worker"], tmp_path / "both", quick=True)
    assert list(result.skipped) == ["mnist"]
    assert not result.holds
    assert [o.experiment.name for o in result.outcomes] == ["one_worker"]
    page = (tmp_path / "both" / "report.html").read_text()
    assert "Not run: mnist" in page


def test_measures_follow_from_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the report says is what the records hold: recomputed here by hand."""
    config = tmp_path / "own.toml"
    config.write_text(CONFIG)
    made = {config}
    real = Disk.create
    monkeypatch.setattr(Disk, "create", lambda s, path, data: made.add(path) or real(s, path, data))
    result = reproduce(["synthetic"], tmp_path, config=config)
    # A full disk then leaves no torn file, and the message names the one that had no room.
    assert {path for path in tmp_path.rglob("*") if path.is_file()} == made
    records = pl.read_parquet(tmp_path / "synthetic.parquet")
    for run in ("FedEM", "VR-FedEM"):
        part = records.filter((pl.col("run") == run) & pl.col("squared_h").is_not_null())
        measured = result.outcomes[0].findings.measures[f"{run}: median of |H|²/|h|²"]
        expected = np.median(part["squared_H"].to_numpy() / part["squared_h"].to_numpy())
        assert measured[0] == pytest.approx(expected)
    final = result.outcomes[0].findings.measures["VR-FedEM: final |h|²"][0]
    assert final == part["squared_h"][-1]


def test_runs_of_ones_own_are_kept_and_missing_ones_are_named_at_once(tmp_path: Path) -> None:
    config = tmp_path / "own.toml"
    config.write_text(CONFIG.replace("[runs.VR-FedEM]", "[runs.Mine]"))
    with pytest.raises(SettingsError, match="also needs the runs VR-FedEM"):
        reproduce(["synthetic"], tmp_path / "none", config=config)
    assert not (tmp_path / "none").exists()
    config.write_text(CONFIG + "[runs.Mine]\nstep_size = 0.05\n")
    reproduce(["synthetic"], tmp_path / "out", config=config)
    assert "Mine" in set(pl.read_parquet(tmp_path / "out" / "synthetic.parquet")["run"])
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "In the records, but in no figure: Mine." in page
    assert str(config) in page
    config.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SettingsError, match="not a text file"):
        reproduce(["synthetic"], tmp_path / "none", config=config)


def test_a_damaged_job_is_named(tmp_path: Path) -> None:
    config = tmp_path / "own.toml"
    config.write_text(CONFIG)
    reproduce(["synthetic"], tmp_path / "out", config=config)
    job = next((tmp_path / "out" / "jobs").glob("synthetic-*.parquet"))
    job.write_bytes(b"nothing of the kind")
    with pytest.raises(DataError, match="is damaged: delete it"):
        reproduce(["synthetic"], tmp_path / "out", config=config)
