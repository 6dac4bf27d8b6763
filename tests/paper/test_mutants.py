"""Verdicts can fail: every mutant fails one of the quick versions, by name."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from emfed.core.errors import EmfedError
from paper import load_experiment
from paper.runner import run_jobs
from paper.traces import Traces, read_trace
from paper.verdicts import judge
from tests.paper.mutants import MUTANTS, Mutant

SHORT = [m for m in MUTANTS if m.experiment == "synthetic"]
SHORT += [m for m in MUTANTS if m.experiment == "parts"][:1]


def failed(experiment: str, folder: Path) -> set[str]:
    """Claims of the quick version that fail with the first seed, in this process."""
    jobs = [job for job in load_experiment(experiment, quick=True).jobs(0) if job.seed == 0]
    run_jobs(jobs, folder, 1, lambda job, share: None)
    traces = Traces([read_trace(job, folder) for job in jobs])
    analysis = importlib.import_module(f"paper.{experiment}")
    verdicts = judge(experiment, analysis.analyse(traces).measures, quick=True)
    return {verdict.name for verdict in verdicts if not verdict.holds}


@pytest.mark.parametrize(
    "mutant",
    [pytest.param(m, marks=[pytest.mark.long] * (m not in SHORT), id=m.name) for m in MUTANTS],
)
def test_a_mutant_fails_a_verdict_by_name(
    mutant: Mutant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant.plant(monkeypatch)
    try:
        assert mutant.verdict in failed(mutant.experiment, tmp_path)
    except EmfedError as error:  # it went so wrong that the run could not go on
        pytest.fail(f"{mutant.name} stops the run before any verdict: {error}")
