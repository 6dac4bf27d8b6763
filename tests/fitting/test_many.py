"""Many workers: where local steps and quiet sums lead, and what they cost."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from benchmarks.ablation import ALL, bench_ablation

import emfed
from emfed.aggregation.coded import CodedSums, Present
from emfed.core.sums import Finish, drive
from emfed.data import as_workers
from emfed.data.each import EachRows
from emfed.fitting import many
from emfed.fitting.ascent import Cohort, Objective
from emfed.fitting.convergence import Tolerance
from emfed.fitting.opening import pool

N, ROWS = 60, 40
RNG = np.random.default_rng(1)
CENTRES = np.array([[-3.0, 0, 1], [3, 0, -1], [0, 3, 0]])
DATA = as_workers(
    [CENTRES[RNG.integers(3, size=ROWS)] + RNG.normal(size=(ROWS, 3)) for _ in range(N)]
)
MODEL = emfed.gaussian_mixture(3, "full")


def begun() -> tuple[Any, Any]:
    shapes = {name: v.shape[1:] for name, v in MODEL.summary(DATA.worker(0)[None]).items()}
    told = drive(pool(MODEL, shapes), CodedSums(EachRows(DATA)))
    model = told.bind(MODEL)
    start = emfed.fit(MODEL, DATA, rounds=0, seed=1).params
    problem = Objective(model, Cohort(N, told.rows), Tolerance(1e-7))
    return problem, model.statistics_of(model.from_user(start))


PROBLEM, START = begun()


def pooled(statistics: Any) -> float:
    """How far EM on all rows still moves these statistics, in the metric."""
    params = PROBLEM.model.maximize(statistics)
    rows = DATA.rows[None]
    step = PROBLEM.model.expected_statistics(rows, params)[0] - statistics
    white = PROBLEM.model.metric(params).whiten(step)
    return float(white @ white)


def test_it_ends_at_a_fixed_point_of_em() -> None:
    found = drive(many.ascend_with_many(PROBLEM, START), CodedSums(EachRows(DATA)))
    assert found.converged
    assert pooled(found.point.statistics) < 1e-5


def test_local_steps_are_made_by_workers_that_are_alike() -> None:
    steps = []
    sums = CodedSums(EachRows(DATA), 1)

    def answer(ask: Any) -> Any:
        steps.append(getattr(ask, "steps", 1))
        return sums(ask)

    drive(many.ascend_with_many(PROBLEM, START), answer)
    assert steps[0] == 1 < max(steps) <= 1 + many.MOST_STEPS
    assert steps[-1] == 1


def test_workers_that_are_away_do_not_keep_it_from_ending() -> None:
    rng = np.random.default_rng(4)

    def present(exchange: int) -> Present:
        there = np.flatnonzero(rng.random(N) < 0.9) if exchange > 3 else np.arange(N)
        return Present(there, there)

    sums = CodedSums(EachRows(DATA), 2, present)
    left = iter(range(60))
    found = drive(
        many.ascend_with_many(PROBLEM, START),
        sums,
        lambda ask: None if next(left) < 50 else "enough",
    )
    assert pooled(found.point.statistics) < 1e-3


def test_a_fit_that_is_stopped_has_what_it_reached() -> None:
    fit = many.ascend_with_many(PROBLEM, START)
    next(fit)
    with pytest.raises(StopIteration) as ended:
        fit.throw(Finish("stopped"))
    np.testing.assert_array_equal(ended.value.value.point.statistics, START)


def test_one_rule_says_which_case_a_fit_is() -> None:
    assert many.are_many(100, masked=False)
    assert not many.are_many(100, masked=True)
    assert not many.are_many(4, masked=False)


def test_what_the_ablation_says_pays_does() -> None:
    """Its quick version: sums that are not rounded take more bytes down."""
    rows = {(row["table"], row["without"]): row for row in bench_ablation(quick=True, seeds=1)}
    titles = {title for title, _ in rows}
    assert len(titles) == 2
    for title in titles:
        own = rows[title, ALL]
        assert rows[title, "rounded sums down"]["all down"] > own["all down"]
        assert rows[title, "FedEM"]["up"] > 0
