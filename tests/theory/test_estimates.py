"""Constants measured on data: exact where they are known, and true to their meaning elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

import emfed
from emfed import theory
from emfed.data.files import parquet_labels, parquet_workers
from emfed.data.synthetic import START, TRUTH
from emfed.data.tables import WorkerTables
from emfed.models import LinearGaussian, Location


def test_known_constants_are_found() -> None:
    rng = np.random.default_rng(0)
    data = [rng.normal(size=(50 + 10 * i, 4)) + i for i in range(6)]
    start = Location(np.full(4, 2.0))
    found = theory.estimate_problem(LinearGaussian(0.3), data, start=start)
    problem = found.problem
    assert problem.lipschitz == pytest.approx([0.3] * 6, rel=1e-6)
    assert problem.sample_lipschitz == pytest.approx(0.3, rel=1e-6)
    assert problem.smoothness == pytest.approx(0.3, rel=1e-3)
    assert (problem.v_min, problem.v_max) == pytest.approx((1.0, 1.0), rel=1e-6)
    everything = np.concatenate(data)
    first = 0.7 * start.mean + 0.3 * everything.mean(axis=0)  # S_0 is s-bar at the start
    gap = 0.15 * ((everything.mean(axis=0) - first) ** 2).sum()
    assert problem.gap == pytest.approx(gap, rel=1e-6)
    variances = [0.09 * rows.var(axis=0).sum() for rows in data]
    assert found.sample_variance == pytest.approx(variances)
    assert found.with_batch(5).variance == pytest.approx(np.array(variances) / 5)
    fields = np.stack([0.3 * (rows.mean(axis=0) - first) for rows in data])
    assert found.memory_error == pytest.approx(theory.memory_error(problem.weights, fields))
    assert (found.layout.size, found.samples, found.directions) == (4, 75, 4)


@pytest.mark.parametrize("kind", ["known", "tied", "full", "diag", "spherical"])
@pytest.mark.parametrize("in_metric", [False, True])
def test_the_descent_inequality_holds_where_it_was_measured(kind: str, in_metric: bool) -> None:
    """W(s + g h) <= W(s) - g v_min |h|^2 + g^2 L_W |h|^2 / 2, and W falls no faster than v_max."""
    known = {"known_covariance": TRUTH.covariances} if kind == "known" else {}
    model = emfed.gaussian_mixture(2, kind, **known)
    data = emfed.data.synthetic_federation(0)
    found = theory.estimate_problem(model, data, in_metric=in_metric, points=4)
    problem = found.problem
    assert problem.v_min > 0
    assert found.directions == found.layout.size - 1  # masses sum to one
    run = emfed.fitting.open_run(
        model, data, emfed.FedEM(step_size=1.0), start="moments", tol=0, rounds=5
    )
    bound, rows = run.model, np.asarray(data.rows)
    for _ in range(4):
        point = run.statistics
        field = bound.expected_statistics(rows, bound.maximize(point)) - point
        end = bound.maximize(point)
        metric = bound.metric(end) if in_metric else emfed.core.protocols.IdentityMetric()
        size = float((metric.whiten(field) ** 2).sum())

        def objective(s: np.ndarray, bound: Any = bound) -> float:
            return -float(bound.log_likelihood(rows, bound.maximize(s)))

        step = 1e-3
        fall = objective(point) - objective(point + step * field)
        slack = step**2 * problem.smoothness * size / 2
        if not in_metric:  # the metric here is that of the point, there that of the path's end
            assert step * problem.v_min * size - slack <= fall * 1.01 + 1e-9
            assert fall <= step * problem.v_max * size * 1.01 + slack + 1e-9
        run.step()


def test_the_metric_is_b_at_the_end_of_the_path() -> None:
    """Whitened by the complete-data Fisher information, B is about the identity."""
    model = emfed.gaussian_mixture(2, "known", known_covariance=TRUTH.covariances)
    data = emfed.data.synthetic_federation(0)
    plain, white = (
        theory.estimate_problem(
            model, data, start=START, weights="uniform", points=2, in_metric=metric
        ).problem
        for metric in (False, True)
    )
    assert white.v_max / white.v_min < plain.v_max / plain.v_min / 3
    assert white.norm == "metric"


def test_sharp_and_light_components_are_measured_or_named() -> None:
    """Five components on two clusters: some are sharp, some light, some fall onto the floor."""
    for seed in range(3):
        rng = np.random.default_rng(seed)
        rows = rng.normal(size=(500, 2)) + 4 * rng.integers(2, size=(500, 1))
        complaint = ""
        try:
            found = theory.estimate_problem(
                emfed.gaussian_mixture(5, "full"), rows, points=2, seed=seed
            )
            assert 0 < found.problem.v_min < found.problem.v_max
        except emfed.DataError as error:
            complaint = str(error)
        assert not complaint or "collapsed" in complaint


def test_unequal_workers_keep_their_weights_in_the_sample() -> None:
    rng = np.random.default_rng(0)
    data = [rng.normal(size=(10_000, 2)), rng.normal(size=(100, 2)) + 5]
    start = Location(np.full(2, 3.0))
    whole = theory.estimate_problem(LinearGaussian(), data, start=start, points=1, rows=10**6)
    part = theory.estimate_problem(LinearGaussian(), data, start=start, points=1, rows=2000)
    assert part.problem.gap == pytest.approx(whole.problem.gap, rel=0.05)


def test_files_are_sampled_too(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).normal(size=(300, 2))
    sites = np.repeat(["a", "b", "c"], 100)
    path = tmp_path / "s.parquet"
    pl.DataFrame({"x": rows[:, 0], "y": rows[:, 1], "site": sites}).write_parquet(path)
    whole = emfed.data.ParquetRows(path, ["x", "y"])
    tables = WorkerTables(*parquet_workers(whole, "site", parquet_labels(path, "site")))
    for data in (tables, path):
        groups = "site" if data is path else None
        found = theory.estimate_problem(LinearGaussian(), data, groups=groups, points=1)
        assert found.rows == 300


def test_many_workers_and_rows_are_sampled() -> None:
    rng = np.random.default_rng(1)
    data = emfed.data.WorkerData(rng.normal(size=(3000, 2)), np.arange(0, 3001, 10))
    found = theory.estimate_problem(LinearGaussian(0.5), data, rows=200, points=1)
    assert found.rows == 200
    assert len(found.problem.weights) == 300
    assert found.problem.spread_lipschitz == pytest.approx(0.5 / np.sqrt(300), rel=1e-6)
    few = theory.estimate_problem(
        emfed.gaussian_mixture(3, "full"), rng.normal(size=(500, 3)), directions=5, points=1
    )
    assert few.directions == 5
