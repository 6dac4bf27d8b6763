"""Jobs: whole or absent, never twice, the same in one process or two, after a kill or Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import polars as pl
import pytest
from polars.testing import assert_frame_equal

from emfed.core.errors import EmfedError, SettingsError
from paper import Job, reproduce, runner
from paper.jobs import run_job
from paper.settings import ExperimentSettings
from tests.helpers import first

JOBS = [
    Job(
        "e",
        name,
        ExperimentSettings(workers=5, rows=20, rounds=30, step_size=step, monitor=5),
        seed,
    )
    for seed in (0, 1)
    for name, step in (("half", 0.5), ("full", 1.0))
]
CONFIG = """
title = "T"
about = "A"
shows = "S"
[settings]
workers = 20
rows = 50
rounds = 500
step_size = 0.01
batch_size = 5
[runs.FedEM]
[runs.VR-FedEM]
algorithm = "VR-FedEM"
"""


def tables(folder: Path) -> dict[str, pl.DataFrame]:
    return {
        p.name: pl.read_parquet(p).drop("seconds", "processor_seconds")
        for p in sorted(folder.glob("*.parquet"))
    }


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    runner.run_jobs(JOBS, folder, 1, lambda job, share: None)
    return folder


def test_processes_give_what_one_gives(alone: Path, tmp_path: Path) -> None:
    told: dict[str, list[float]] = {job.file: [] for job in JOBS}
    runner.run_jobs(JOBS, tmp_path, 2, lambda job, share: told[job.file].append(share))
    assert all(shares[-1] == 1 for shares in told.values())
    ours, theirs = tables(tmp_path), tables(alone)
    assert list(ours) == list(theirs) == sorted(job.file for job in JOBS)
    for name, table in ours.items():
        assert_frame_equal(table, theirs[name], rel_tol=1e-12)
        assert len(table) == 31


def test_what_is_there_is_not_run_again(alone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "run_job", None)
    seen = []
    runner.run_jobs(JOBS, alone, 1, lambda job, share: seen.append((job, share)))
    assert seen == [(job, 1.0) for job in JOBS]


@pytest.mark.parametrize("processes", [1, 2])
def test_a_job_that_fails_is_named(tmp_path: Path, processes: int) -> None:
    bad = ExperimentSettings(workers=1, rows=1, rounds=2)  # two components, one row
    jobs = [Job("e", f"bad {k}", bad, k) for k in range(2)]
    with pytest.raises(EmfedError, match="use fewer components") as caught:
        runner.run_jobs(jobs, tmp_path, processes, lambda job, share: None)
    if processes == 2:
        assert "e, bad" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_dies_is_named(tmp_path: Path) -> None:
    slow = [
        Job("e", f"r{k}", ExperimentSettings(rounds=10**6, step_size=0.01), k) for k in range(2)
    ]

    def kill_once(job: Job, share: float) -> None:
        import multiprocessing

        for child in multiprocessing.active_children():
            assert child.pid is not None
            os.kill(child.pid, signal.SIGKILL)

    with pytest.raises(EmfedError, match="the process of e, r., seed . died"):
        runner.run_jobs(slow, tmp_path, 2, kill_once)


def test_a_run_that_diverges_ends(tmp_path: Path) -> None:
    wild = ExperimentSettings(
        data="linear", workers=1, rows=5, compressor="sparsification", step_size=1.0, rounds=5000,
        monitor=1,
    )  # fmt: skip
    columns = run_job(Job("e", "r", wild, 0), tmp_path, lambda share: None)
    assert 1e12 < columns["squared_h"][-1] < 1e30
    assert len(columns["round"]) < 5001


def test_a_run_stops_at_its_target(tmp_path: Path) -> None:
    aim = ExperimentSettings(
        data="linear", workers=4, rows=5, step_size=1.0, rounds=500, monitor=1, target=1
    )
    h = run_job(Job("e", "r", aim, 0), tmp_path, lambda share: None)["squared_h"][1:]
    assert h.mean() <= 1 < h[:-1].mean()


def start(out: Path, config: Path, *more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            sys.executable,
            *("-m", "paper", "synthetic", "--config", str(config), "--out", str(out), *more),
        ],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Tests may have been started in the background, where Ctrl-C is ignored by inheritance.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def wait_for(out: Path, count: int) -> list[Path]:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        done = sorted((out / "jobs").glob("*.parquet")) if (out / "jobs").is_dir() else []
        if len(done) >= count:
            return done
        time.sleep(0.02)
    raise AssertionError(f"{count} jobs were not done in time")


@pytest.mark.parametrize("processes", first(["2", "1"]))
def test_a_killed_run_continues_where_it_was(tmp_path: Path, processes: str) -> None:
    config, out = tmp_path / "config.toml", tmp_path / "out"
    config.write_text(CONFIG.replace("500", "80") + "[vary]\nparticipation = [1.0, 0.5]\n")
    process = start(out, config, "--jobs", processes)
    done = wait_for(out, 1)
    process.kill()
    process.communicate(timeout=30)
    assert process.returncode == -signal.SIGKILL
    assert len(done) < 4
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in done}
    again = start(out, config, "--jobs", processes)
    _, errors = again.communicate(timeout=120)
    assert "Traceback" not in errors
    assert len(list((out / "jobs").glob("*.parquet"))) == 4
    for path, (when, content) in before.items():
        assert path.stat().st_mtime_ns == when
        assert path.read_bytes() == content
    whole = tmp_path / "whole"
    start(whole, config, "--jobs", "2").communicate(timeout=120)
    assert_frame_equal(
        pl.read_parquet(out / "synthetic.parquet").drop("seconds", "processor_seconds"),
        pl.read_parquet(whole / "synthetic.parquet").drop("seconds", "processor_seconds"),
    )


@pytest.mark.parametrize("processes", first(["2", "1"]))
def test_ctrl_c_is_clean(tmp_path: Path, processes: str) -> None:
    config, out = tmp_path / "config.toml", tmp_path / "out"
    config.write_text(CONFIG.replace("500", "10000000") + "[vary]\nlevels = [1, 2]\n")
    process = start(out, config, "--jobs", processes)
    deadline = time.monotonic() + 60
    while not (out / "jobs").is_dir() and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(2.5)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted" in errors
    assert "Traceback" not in errors
    assert list((out / "jobs").iterdir()) == []


def test_settings_of_a_call_are_checked(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="processes"):
        reproduce(["synthetic"], tmp_path, processes=0)
    with pytest.raises(SettingsError, match="seed"):
        reproduce(["synthetic"], tmp_path, seed=-1)
    with pytest.raises(SettingsError, match="goes with one experiment"):
        reproduce(["synthetic", "steps"], tmp_path, config=tmp_path / "x.toml")
