"""Configurations are checked to the last key, and jobs are told apart by all they depend on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from emfed.core.errors import SettingsError
from paper import NAMES, Job, load_experiment
from paper.config import packaged, read_config
from paper.settings import ExperimentSettings, as_plain

GOOD = """
title = "T"
about = "A"
shows = "S"
seeds = 2
[settings]
step_size = 0.5
rounds = 10
[runs.one]
[runs.two]
step_size = 1
[vary]
levels = [1, 4]
[quick]
seeds = 1
rounds = 5
vary.levels = [4]
"""


def test_levels_override_each_other() -> None:
    full = read_config(GOOD, "x", "here")
    assert list(full.runs) == ["one, levels 1", "one, levels 4", "two, levels 1", "two, levels 4"]
    assert full.runs["one, levels 4"].step_size == 0.5
    assert full.runs["two, levels 4"].step_size == 1.0
    assert full.runs["two, levels 4"].levels == 4
    assert [job.seed for job in full.jobs(7)] == [7] * 4 + [8] * 4
    own = GOOD.replace("step_size = 1", "vary.step_size = [1.0]\nvary.levels = [2]")
    assert list(read_config(own, "x", "here").runs)[2:] == ["two, levels 2, step_size 1.0"]
    quick = read_config(GOOD, "x", "here", quick=True)
    assert list(quick.runs) == ["one, levels 4", "two, levels 4"]
    assert quick.seeds == 1
    assert all(settings.rounds == 5 for settings in quick.runs.values())


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("step_size = 0.5", "stepsize = 0.5", "unknown key 'stepsize'; did you mean 'step_size'"),
        ("[runs.one]", "[runs.one]\nbatchsize = 3", "did you mean 'batch_size'"),
        ("[settings]", "[setings]", "did you mean 'settings'"),
        ("rounds = 5", "epoch = 5", "did you mean 'epochs'"),
        ("levels = [1, 4]", "level = [1, 4]", "did you mean 'levels'"),
        ("[settings]", "[settings]\nqqqq = 1", "choose among data, split"),
        ("step_size = 0.5", "step_size = 'big'", "step_size must be of type float; got 'big'"),
        ("step_size = 0.5", "step_size = 5", "step_size must lie in (0, 2)"),
        ("rounds = 10", "rounds = 1.5", "rounds must be of type int; got 1.5"),
        ("rounds = 10", "rounds = true", "rounds must be of type int; got True"),
        ("rounds = 10", "", "at least one of rounds"),
        ("rounds = 10", "rounds = 10\nworkers = 0", "workers must be a whole number >= 1"),
        (
            "rounds = 10",
            "rounds = 10\ndata = 'minst'",
            "data cannot be 'minst'; did you mean 'mnist'",
        ),
        ("rounds = 10", "rounds = 10\nsplit = 'writer'", "needs sizes = 'writers'"),
        ("rounds = 10", "rounds = 10\nsizes = 'writers'", "needs data = 'mnist'"),
        ("rounds = 10", "rounds = 10\nalgorithm = 'fiem'", "needs workers = 1 and a batch_size"),
        ("rounds = 10", "rounds = 10\nparticipation = 2.0", "must lie in"),
        ("rounds = 10", "rounds = 10\nmonitor = 0", "every must be a whole number"),
        ("levels = [1, 4]", "levels = 4", "vary.levels must be a list"),
        ("seeds = 2", "seeds = 0", "seeds must be a whole number >= 1"),
        ("seeds = 2", "seeds = = 2", "is not TOML"),
        ('title = "T"', "title = 3", "title must be a text"),
        ("[runs.one]\n[runs.two]\nstep_size = 1\n", "", "there are no runs"),
        ("[runs.one]", "[runs]\none = 3", "runs.one must be a table"),
        ("[vary]\nlevels = [1, 4]", "", None),
    ],
)
def test_bad_configurations_are_refused_in_words(
    before: str, after: str, message: str | None
) -> None:
    assert before in GOOD
    text = GOOD.replace(before, after, 1)
    if message is None:
        read_config(text, "x", "here.toml")
        return
    quick = before == "rounds = 5"
    with pytest.raises(SettingsError) as caught:
        read_config(text, "x", "here.toml", quick=quick)
    assert message in str(caught.value)
    assert "here.toml" in str(caught.value)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("quick", [False, True])
def test_packaged_configurations_are_valid(name: str, quick: bool) -> None:
    experiment = load_experiment(name, quick)
    assert experiment.runs
    assert all(settings.cost > 0 for settings in experiment.runs.values())
    assert len(packaged(name, "README.md").splitlines()) > 3


def test_an_unknown_experiment_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="no experiment 'synthetics'; choose among synthetic"):
        load_experiment("synthetics")
    own = tmp_path / "own.toml"
    own.write_text(
        GOOD.replace("[runs.one]", "[runs.FedEM]").replace("[runs.two]", "[runs.VR-FedEM]")
    )
    mine = load_experiment("synthetic", config=own)
    assert (mine.title, mine.source, mine.extra) == ("T", str(own), ())


def test_the_file_of_a_job_depends_on_everything() -> None:
    job = Job("e", "Run, p 0.1", ExperimentSettings(rounds=3), 0)
    assert Job.from_json(job.to_json()) == job
    others = [
        replace(job, seed=1),
        replace(job, run="Run, p 0.2"),
        replace(job, experiment="f"),
        replace(job, settings=ExperimentSettings(rounds=4)),
    ]
    assert len({other.file for other in (job, *others)}) == 5
    assert job.file.startswith("e-run-p-0.1-0-")
    assert as_plain(job.settings)["rounds"] == 3


def test_a_settings_table_has_what_the_run_used_and_nothing_else() -> None:
    runs = load_experiment("one_worker").runs
    plain = {"data", "workers", "rows", "algorithm", "epochs", "monitor"}
    assert set(runs["EM"].used) == plain
    assert set(runs["FIEM"].used) == plain | {"step_size", "batch_size"}
    assert set(runs["sEM-vr"].used) == plain | {"step_size", "batch_size", "inner_rounds"}
    assert {"compressor", "memory_rate", "replacement"} <= set(runs["SPIDER-EM"].used)
    claims = load_experiment("claims").runs
    assert not {"memory_rate", "batch_size"} & set(claims["sum (V_i + Q) / np"].used)
    assert claims["half take part, with memories"].used["memory_rate"] == "1 / (1 + omega)"
    assert claims["half take part, with memories"].used["batch_size"] == "all rows"
    methods = load_experiment("methods").runs
    assert "rounds" in methods["AutoEM, data storms"].used
    for run in ("private AutoEM", "one-shot merge", "averaged local fits"):
        assert "rounds" not in methods[f"{run}, data storms"].used
