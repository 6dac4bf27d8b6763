"""Peers are what they are called: gradients are gradients, and averaging is fair to them."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import emfed
from emfed.core.wire import floats_size
from emfed.data.workers import WorkerData
from paper import Job, load_experiment
from paper.comparison import ComparedData, MethodSettings, run_method, stand_in
from paper.peers import FreeChart, Tables, averaged_fits, averaging, matched

KINDS = ("tied", "full")


def opened(kind: str, equal: bool = False) -> tuple[Any, WorkerData, Any]:
    """A bound model, rows of six workers, and parameters to begin at."""
    data = stand_in(ComparedData("", "", 3, "full", 2, 6), 0, 40)
    if equal:
        data = WorkerData(np.tile(data.rows[::6], (6, 1)), data.offsets)
    model = emfed.gaussian_mixture(3, kind)
    run = emfed.fitting.open_run(model, data, emfed.AutoEM(), start="moments", seed=1)
    return run.model, data, run.params


@pytest.mark.parametrize("kind", KINDS)
def test_the_direction_is_the_gradient_over_the_weights_of_the_start(kind: str) -> None:
    model, data, start = opened(kind)
    tables, chart = Tables.of(model, data), FreeChart(start)
    x = 0.1 * np.cos(np.arange(chart.size))
    own = np.tile(x, (data.size, 1))
    found = tables.shares @ chart.direction(own, tables.moments(chart.parameters(own)))
    step, slopes = 1e-5, []
    for e in np.eye(chart.size) * step:
        ends = [model.log_likelihood(data.rows, chart.parameters(x + s * e)) for s in (1, -1)]
        slopes.append((ends[0] - ends[1]) / (2 * step))
    d = start.means.shape[1]
    each = np.repeat(start.weights, d * (d + 1) // 2) if kind == "full" else np.ones(3)
    scale = np.concatenate([start.weights, np.repeat(start.weights, d), each])
    np.testing.assert_allclose(found * scale, slopes, atol=2e-8)
    at_zero = chart.parameters(np.zeros(chart.size))
    for name, value in start.arrays().items():
        np.testing.assert_allclose(getattr(at_zero, name), value, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_where_workers_are_alike_corrections_change_nothing(kind: str) -> None:
    model, data, start = opened(kind, equal=True)
    tables = Tables.of(model, data)
    runs = [averaging(tables, start, 0.1, 3, corrected) for corrected in (False, True)]
    worth = [float(model.log_likelihood(data.rows, start))]
    for plain, corrected in itertools.islice(zip(*runs, strict=True), 5):
        np.testing.assert_allclose(plain.params.means, corrected.params.means, atol=1e-6)
        worth.append(float(model.log_likelihood(data.rows, plain.params)))
        assert plain.vector_bytes == floats_size(FreeChart(start).size, "float32")
    assert np.all(np.diff(worth) > 0)


@pytest.mark.parametrize("kind", KINDS)
def test_fits_of_workers_that_are_alike_average_to_their_own(kind: str) -> None:
    model, data, start = opened(kind, equal=True)
    alone = WorkerData(data.rows[:40], np.array([0, 40]))
    all_, one = (averaged_fits(Tables.of(model, d), start, 20).params for d in (data, alone))
    for name, value in one.arrays().items():
        np.testing.assert_allclose(getattr(all_, name), value, atol=1e-12)
    assert model.log_likelihood(data.rows, one) > model.log_likelihood(data.rows, start) + 0.05


def test_components_are_matched_whatever_their_order() -> None:
    _, _, start = opened("full")
    for order in itertools.permutations(range(3)):
        found = matched(start.means[list(order)] + 0.01, start)
        np.testing.assert_array_equal(np.array(order)[found], np.arange(3))


def test_a_step_that_is_too_long_ends_without_a_likelihood() -> None:
    settings = MethodSettings(method="FedAvg", step_size=50.0, rounds=30, rows=60)
    found = run_method(settings, 0, lambda: None, lambda share: None)
    assert found["log_likelihood"][-1] == -np.inf
    assert np.isfinite(found["log_likelihood"][0])


def test_data_that_are_not_here_are_stood_in_for_and_said_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EMFED_DATA", str(tmp_path))
    away = MethodSettings(data="storms")
    assert away.title == "simulated, for Atlantic storms by year"
    rows = ["year,lat,long,wind,pressure"]
    rows += [f"{1990 + k % 3},{k},{k % 7},{k % 5},{k % 11}" for k in range(60)]
    (tmp_path / "storms.csv.gz").write_text("\n".join(rows))
    here = MethodSettings(data="storms")
    assert here.title == "Atlantic storms by year"
    files = {Job("methods", "AutoEM", settings, 0).file for settings in (away, here)}
    assert len(files) == 2


@pytest.mark.parametrize("run", load_experiment("methods", quick=True).runs)
def test_every_method_runs_and_tells_its_cost(run: str) -> None:
    """The whole experiment is a long test: two rounds show that each method still has a way in."""
    settings = load_experiment("methods", quick=True).runs[run]
    assert isinstance(settings, MethodSettings)
    told = run_method(replace(settings, rounds=2), 0, lambda: None, lambda share: None)
    assert np.isfinite(told["log_likelihood"]).all()
    assert (np.diff(told["round"]) > 0).all()
    for direction in ("bytes_up", "bytes_down"):
        assert told[direction][0] > 0
        assert (np.diff(told[direction]) > 0).all()
