"""EM on sums: its path, its momentum and what it does when exchanges are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emfed.aggregation.simulated import SimulatedSums
from emfed.core.sums import Ask, Finish, Fit, drive
from emfed.data import as_workers
from emfed.data.held import HeldWorkers
from emfed.fitting.ascent import Cohort, Objective, ascend, look
from emfed.fitting.asks import LIKELIHOOD_STEP
from emfed.fitting.convergence import Convergence, Tolerance, remaining
from emfed.fitting.escape import escape
from emfed.fitting.parallel import together
from emfed.fitting.proposals import merged_and_split
from tests.helpers import bind, make_data, make_model

TABLES = make_data(3, k=3, d=2, sizes=(40, 60, 25))


def problem(kind: str = "full", tables: Any = TABLES, k: int = 3, **options: Any) -> Objective:
    model = bind(make_model(kind, k), tables)
    cohort = Cohort(len(tables), float(sum(map(len, tables))))
    return Objective(model, cohort, **({"tolerance": Tolerance(1e-8)} | options))


def answers(tables: Any = TABLES, workers: int | None = None) -> SimulatedSums:
    return SimulatedSums(HeldWorkers(as_workers(tables)), workers or len(tables), 1)


def start_of(one: Objective, seed: int) -> Any:
    return one.model.statistics_of(one.model.start(seed))


@pytest.mark.parametrize("kind", ["full", "diag", "tied", "spherical"])
@pytest.mark.parametrize("accelerate", [True, False])
def test_it_ends_at_a_fixed_point_of_em(kind: str, accelerate: bool) -> None:
    one = problem(kind, tolerance=Tolerance(1e-9), accelerate=accelerate)
    found = drive(ascend(one, start_of(one, 0)), answers(workers=1))
    assert found.converged
    params = one.model.maximize(found.point.statistics)
    again = one.model.expected_statistics(np.concatenate(TABLES), params)
    white = one.model.metric(params).whiten(again - found.point.statistics)
    assert white @ white < 1e-7


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(["full", "diag", "spherical"]), st.integers(1, 3))
def test_no_step_that_stays_lowers_the_objective(seed: int, kind: str, workers: int) -> None:
    """By more than rounding: the unit of the log-likelihood, once for each worker."""
    one, sums, path = problem(kind), answers(workers=workers), list[float]()

    def gives_up(point: Any, left: float) -> bool:
        path.append(point.objective)
        return False

    found = drive(ascend(one, start_of(one, seed), gives_up), sums)
    path.append(found.point.objective)
    noise = 4 * LIKELIHOOD_STEP * workers + 2e-5 * (workers > 1)
    assert min(np.diff(path), default=0.0) >= -noise


def test_without_momentum_the_path_is_that_of_em() -> None:
    one = problem(accelerate=False, tolerance=Tolerance(0.0))
    rows, here = np.concatenate(TABLES), start_of(one, 2)
    seen: list[Any] = []

    def answer(ask: Any) -> Any:
        seen.append(ask.statistics)
        return sums(ask)

    def enough(ask: Ask) -> str | None:
        return "enough" if len(seen) == 8 else None

    sums = answers(workers=1)
    drive(ascend(one, here), answer, enough)
    for asked in seen:
        assert np.allclose(asked, here, atol=1e-9)
        here = one.model.expected_statistics(rows, one.model.maximize(here))


def test_refused_at_once_it_returns_its_start() -> None:
    one = problem()
    start = start_of(one, 0)
    found = drive(ascend(one, start), answers(), lambda ask: "no")
    assert not found.converged
    assert np.array_equal(found.point.statistics, start)


@pytest.mark.parametrize("exchanges", [1, 2, 5, 9])
def test_refused_later_it_returns_the_best_place_it_has_seen(exchanges: int) -> None:
    one, sums = problem(), answers()
    found = drive(
        ascend(one, start_of(one, 0)), sums, lambda a: "no" if sums.exchanges >= exchanges else None
    )
    assert sums.exchanges == exchanges
    assert np.isfinite(found.point.objective)


def waits(count: int, one: Objective) -> Fit[int]:
    """Looks so many times at one place."""
    done = 0
    try:
        for _ in range(count):
            yield from look(one, start_of(one, 0), 1.0)
            done += 1
    except Finish:
        return -done
    return done


@given(st.lists(st.integers(0, 6), min_size=1, max_size=5), st.integers(0, 8))
@settings(max_examples=20, deadline=None)
def test_fits_side_by_side_take_as_many_exchanges_as_the_longest(
    counts: list[int], most: int
) -> None:
    one, sums = problem(), answers()
    found = drive(
        together([waits(count, one) for count in counts]),
        sums,
        lambda ask: "no" if sums.exchanges == most else None,
    )
    assert sums.exchanges == min(max(counts), most)
    assert found == [count if count <= most else -most for count in counts]


def test_gains_that_halve_leave_as_much_as_the_last() -> None:
    before = np.array([1.0, 0.0])
    assert np.isclose(remaining(0.1, before, before * np.sqrt(0.5)), 0.5)
    assert remaining(0.1, before, np.zeros(2)) == 0


def test_a_bold_step_is_due_once_little_is_left_and_steps_go_straight() -> None:
    state = Convergence(Tolerance(1e-6))
    step = np.array([1e-5, 0.0])
    for made in range(1, 4):
        state.note(0.0, step, 0.5 * step, 1.0)
        assert state.due == (made == 3)
    state.disturb()
    assert not state.due


def test_a_sum_without_room_is_made_again_and_no_other() -> None:
    one = problem()
    sums = answers()
    sums.exchanges = 1  # the first sum of a fit is exact
    found = drive(look(one, start_of(one, 0), 1e-6), sums)
    assert sums.attempts >= 1
    exact = drive(look(one, start_of(one, 0), 1.0), answers(workers=1))
    assert np.allclose(found.field, exact.field, atol=1e-3)


def test_two_components_that_lie_along_the_wrong_axis_are_turned() -> None:
    """Merged, two components leave no other one to split: the axes of the merged one have turns."""
    rng = np.random.default_rng(3)
    groups = np.repeat([-2.0, 2.0], 300)
    rows = np.stack([rng.uniform(-10, 10, 600), groups + 0.3 * rng.normal(size=600)], axis=1)
    tables = [rows[::2], rows[1::2]]
    one = problem("diag", tables, k=2)
    whole = one.model.statistics_of(one.model.start(0))
    stuck = drive(ascend(one, next(merged_and_split(one.model, whole))), answers(tables))
    freed = drive(escape(one, stuck, 3), answers(tables))
    assert freed.point.objective > stuck.point.objective + 0.1
