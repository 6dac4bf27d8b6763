"""The other algorithms for one worker: EM with full batches, EM's fixed points, their cost."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import emfed
from emfed.core.streams import Purpose, choose, uniforms
from emfed.data.synthetic import START, TRUTH
from paper import Job
from paper.jobs import run_job, synthetic_mixture
from paper.settings import ExperimentSettings
from paper.single_worker import SIBLINGS

ROWS = 300


@pytest.fixture(scope="module")
def opened() -> Any:
    """A bound model, its rows, and where EM starts."""
    model = emfed.gaussian_mixture(2, "known", known_covariance=TRUTH.covariances)
    data = emfed.data.synthetic_federation(1, workers=1, rows_per_worker=ROWS)
    run = emfed.fitting.open_run(model, data, start=START)
    return run.model, data.rows, run.statistics


def em_step(model: Any, rows: Any, statistics: Any) -> Any:
    return model.expected_statistics(rows, model.maximize(statistics))


@pytest.mark.parametrize("name", SIBLINGS)
def test_with_full_batches_it_is_em(opened: Any, name: str) -> None:
    model, rows, statistics = opened
    moves = SIBLINGS[name](model, rows, statistics, 1.0, ROWS, 5, 0)
    for move in itertools.islice(moves, 12):
        statistics = em_step(model, rows, statistics)
        np.testing.assert_allclose(move.statistics, statistics, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", SIBLINGS)
def test_it_ends_at_a_fixed_point_of_em(opened: Any, name: str) -> None:
    model, rows, statistics = opened
    moves = SIBLINGS[name](model, rows, statistics, 0.2, 10, 20, 3)
    for move in itertools.islice(moves, 2000):
        statistics = move.statistics
    field = em_step(model, rows, statistics) - statistics
    assert field @ field < 1e-20
    assert move.mean_field @ move.mean_field < 1e-20


@pytest.mark.parametrize("name", SIBLINGS)
def test_the_estimate_of_the_field_is_unbiased(opened: Any, name: str) -> None:
    """Some rounds on, the mean of H over many next batches is h, within its standard error."""
    model, rows, start = opened
    fields, truth = [], None
    for seed in range(300):
        moves = SIBLINGS[name](model, rows, start, 1e-9, 10, 100, seed)
        first = next(moves)  # a step so small that S stays where it was
        fields.append(next(moves).mean_field)
        truth = em_step(model, rows, first.statistics) - first.statistics
    assert truth is not None
    error = np.abs(np.mean(fields, axis=0) - truth)
    assert np.all(error < 5 * np.std(fields, axis=0) / np.sqrt(300) + 1e-7)


def test_they_cost_what_the_papers_say(opened: Any) -> None:
    model, rows, statistics = opened
    costs = {
        name: [
            m.evaluations for m in itertools.islice(make(model, rows, statistics, 0.1, 7, 3, 0), 7)
        ]
        for name, make in SIBLINGS.items()
    }
    assert costs["sem-vr"] == [ROWS + 14, 14, 14, ROWS + 14, 14, 14, ROWS + 14]
    assert costs["fiem"] == [ROWS + 14] + [14] * 6


def test_a_job_counts_the_start_and_all_rounds(tmp_path: Path) -> None:
    settings = ExperimentSettings(
        workers=1,
        rows=ROWS,
        algorithm="sem-vr",
        batch_size=10,
        inner_rounds=5,
        step_size=0.5,
        epochs=6,
    )
    columns = run_job(Job("e", "r", settings, 0), tmp_path, lambda share: None)
    assert columns["epochs"][0] == 1  # S_0 is a full pass
    assert columns["epochs"][-1] == pytest.approx(columns["evaluations"].sum() / ROWS)
    assert 6 <= columns["epochs"][-1] < 7.1
    assert np.isfinite(columns["squared_h"]).sum() == -(-(len(columns["round"]) - 1) // 10)


def test_online_em_is_fedem_with_one_worker(tmp_path: Path) -> None:
    """Cappé and Moulines: S += gamma_k (s-bar of a fresh batch - S), written out."""
    settings = ExperimentSettings(
        workers=1,
        rows=ROWS,
        batch_size=20,
        step_power=0.6,
        rounds=15,
        memory_start="zero",
        monitor=1,
    )
    columns = run_job(Job("e", "r", settings, 4), tmp_path, lambda share: None)
    data = emfed.data.synthetic_federation(4, workers=1, rows_per_worker=ROWS)
    run = emfed.fitting.open_run(synthetic_mixture(), data, start=START)
    statistics, step = run.statistics, emfed.algorithms.Decreasing(1.0, 0.6)
    for k in range(1, 16):
        field = em_step(run.model, data.rows, statistics) - statistics
        assert columns["squared_h"][k] == pytest.approx(field @ field, rel=1e-9)
        u = uniforms(4, k, Purpose.BATCH, np.zeros(1, np.int64), 20)
        batch = data.rows[choose(u, np.array([ROWS]))[0]]
        here = run.model.expected_statistics(batch, run.model.maximize(statistics))
        statistics = statistics + step(k) * (here - statistics)


def test_the_naive_sum_is_fedem_where_everyone_takes_part(tmp_path: Path) -> None:
    """(np)^-1 sum (V_i + Q) and V + (np)^-1 sum Q differ in who is silent, and in nothing else."""

    def path(algorithm: Any, p: float) -> Any:
        settings = ExperimentSettings(
            algorithm=algorithm, split="sorted", workers=6, rows=20, compressor="dithering",
            step_size=0.2, rounds=40, monitor=1, participation=p,
        )  # fmt: skip
        return run_job(Job("e", "r", settings, 3), tmp_path, lambda share: None)["squared_h"][2:]

    np.testing.assert_allclose(path("naive-sum", 1.0), path("FedEM", 1.0), rtol=1e-9)
    assert path("naive-sum", 0.5)[-1] > 100 * path("FedEM", 0.5)[-1]


def test_the_distance_of_memories_is_what_they_lack(tmp_path: Path) -> None:
    """Memories at zero lack h_i itself; those started at the mean field lack nothing."""

    def first(**more: Any) -> float:
        settings = ExperimentSettings(
            split="sorted", workers=4, rows=25, step_size=1e-9, rounds=2, monitor=1,
            watch_memories=True, **more,
        )  # fmt: skip
        columns = run_job(Job("e", "r", settings, 0), tmp_path, lambda share: None)
        return float(columns["memory_error"][-1])

    data = emfed.data.synthetic_federation(0, workers=4, rows_per_worker=25, split="sorted")
    run = emfed.fitting.open_run(synthetic_mixture(), data, start=START)
    tables = data.rows.reshape(4, 25, 2)
    fields = run.model.expected_statistics(tables, run.params) - run.statistics
    lacking = (fields**2).sum(axis=1).mean()
    assert first(memory_rate=0.0) == pytest.approx(lacking, rel=1e-6)
    assert first(memory_rate=0.5) < 1e-12 * lacking
    assert first(memory_rate=0.5, memory_start="zero") == pytest.approx(lacking / 16, rel=1e-5)
