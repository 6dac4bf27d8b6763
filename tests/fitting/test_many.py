"""Many workers: where local steps and quiet sums lead, and what they cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from benchmarks.ablation import ALL, bench_ablation

import emfed
from emfed.aggregation.unmasked import Present, UnmaskedWorkers
from emfed.core.sums import Finish, drive
from emfed.data import as_workers
from emfed.data.held import HeldWorkers
from emfed.fitting import FitSettings, in_process, many
from emfed.fitting.ascent import Cohort, Objective, are_many
from emfed.fitting.convergence import Tolerance
from emfed.fitting.fitted import Watch
from emfed.fitting.opening import pool
from emfed.fitting.parallel import together

N, ROWS = 60, 40
RNG = np.random.default_rng(1)
CENTRES = np.array([[-3.0, 0, 1], [3, 0, -1], [0, 3, 0]])
DATA = as_workers(
    [CENTRES[RNG.integers(3, size=ROWS)] + RNG.normal(size=(ROWS, 3)) for _ in range(N)]
)
MODEL = emfed.gaussian_mixture(3, "full")


SHAPES = {name: v.shape[1:] for name, v in MODEL.summary(DATA.worker(0)[None]).items()}


def begun() -> tuple[Any, Any]:
    told = drive(pool(MODEL, SHAPES), UnmaskedWorkers(HeldWorkers(DATA)))
    model = told.bind(MODEL)
    start = emfed.fit(MODEL, DATA, rounds=0, seed=1).params
    problem = Objective(model, Cohort(N, told.rows, masked=False), Tolerance(1e-7))
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
    found = drive(many.ascend_with_many(PROBLEM, START), UnmaskedWorkers(HeldWorkers(DATA)))
    assert found.converged
    assert pooled(found.point.statistics) < 1e-5


def test_local_steps_are_made_by_workers_that_are_alike() -> None:
    steps = []
    sums = UnmaskedWorkers(HeldWorkers(DATA), 1)

    def answer(ask: Any) -> Any:
        steps.append(getattr(ask, "steps", 1))
        return sums(ask)

    drive(many.ascend_with_many(PROBLEM, START), answer)
    assert steps[0] == 1 < max(steps) <= 1 + many.MOST_STEPS
    assert steps[-1] == 1


def test_workers_that_are_away_do_not_keep_it_from_ending() -> None:
    rng = np.random.default_rng(4)

    def present(ask: Any, exchange: int) -> Present:
        there = np.flatnonzero(rng.random(N) < 0.9) if exchange > 3 else np.arange(N)
        return Present(there, there)

    sums = UnmaskedWorkers(HeldWorkers(DATA), 2, present)
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
    assert are_many(100, masked=False)
    assert not are_many(100, masked=True)
    assert not are_many(4, masked=False)


def test_what_the_ablation_says_pays_does() -> None:
    """Its quick version: sums that are not rounded take more bytes down."""
    rows = {(row["table"], row["without"]): row for row in bench_ablation(quick=True, seeds=1)}
    titles = {title for title, _ in rows}
    assert len(titles) == 2
    for title in titles:
        own = rows[title, ALL]
        assert rows[title, "rounded sums down"]["all down"] > own["all down"]
        assert rows[title, "FedEM"]["up"] > 0


def test_momentum_helps_workers_that_differ() -> None:
    """Each worker sees two of four clusters: nobody goes on alone, and it ends where EM does."""
    rng = np.random.default_rng(8)
    own = [
        CENTRES[[j % 3, (j + 1) % 3]][rng.integers(2, size=ROWS)] + rng.normal(size=(ROWS, 3))
        for j in range(N)
    ]
    data, rounds = as_workers(own), list[int]()
    told = drive(pool(MODEL, SHAPES), UnmaskedWorkers(HeldWorkers(data)))
    model = told.bind(MODEL)
    problem = Objective(model, Cohort(N, told.rows, masked=False), Tolerance(1e-7))
    start = model.statistics_of(model.from_user(emfed.fit(MODEL, data, rounds=0, seed=1).params))
    for momentum in (many.with_momentum, lambda model, walk, ask, led: (0, led)):
        with patch.object(many, "with_momentum", momentum):
            walk = drive(
                many.walked(model, problem.cohort, start), UnmaskedWorkers(HeldWorkers(data))
            )
        rounds.append(walk.rounds)
        assert walk.apart > many.LARGEST_DRIFT
    assert rounds[0] <= rounds[1]
    found = drive(many.climb(problem, start), UnmaskedWorkers(HeldWorkers(data)))
    step = (
        model.expected_statistics(data.rows[None], model.maximize(found.point.statistics))[0]
        - found.point.statistics
    )
    assert np.abs(step).max() < 1e-3


def test_ascents_that_share_exchanges_have_a_memory_each() -> None:
    """Each is told apart; what has ended is forgotten."""
    sums, kept = UnmaskedWorkers(HeldWorkers(DATA), 3), list[int]()

    def answer(ask: Any) -> Any:
        found = sums(ask)
        kept.append(len(sums.states))
        return found

    away = PROBLEM.model.statistics_of(PROBLEM.model.start(5))
    both = [many.climb(PROBLEM, START), many.climb(PROBLEM, away)]
    found = drive(together(both), answer)
    assert set(kept) == {1, 2}
    assert kept == sorted(kept, reverse=True)
    for one in found:
        assert one.converged
        assert pooled(one.point.statistics) < 1e-5


def fitted(watch: Watch | None = None, **settings: Any) -> Any:
    model = settings.pop("model", MODEL)
    return in_process.fit(
        FitSettings(model, **settings), HeldWorkers(DATA), watch or Watch()
    ).result


def test_a_fit_of_many_starts_from_workers_own_clusters() -> None:
    result, other = fitted(), fitted(start="k-means")
    assert result.converged
    assert other.converged
    start, by_sums = (one.ledger.summary()["start"] for one in (result, other))
    assert start["up"]["messages"] == N < by_sums["up"]["messages"]
    assert start["down"]["messages"] == N  # where the fit begins
    assert start["up"]["payload"] + start["down"]["payload"] < by_sums["up"]["payload"]
    rows = DATA.rows
    assert abs(result.log_likelihood(rows) - other.log_likelihood(rows)) < 1e-3


def test_masked_workers_are_not_asked_one_by_one() -> None:
    result = fitted(masks=True, rounds=3)
    assert result.ledger.summary()["start"]["up"]["messages"] > N
    with pytest.raises(emfed.SettingsError, match="masks forbid"):
        fitted(masks=True, start="merge")


def test_a_range_of_many_chooses_as_pooled_rows_do() -> None:
    fit = in_process.fit(
        FitSettings(lambda k: emfed.gaussian_mixture(k, "full"), n_components="2:4"),
        HeldWorkers(DATA),
    )
    assert fit.selection is not None
    assert fit.selection.n_components == 3


def test_a_checkpoint_of_many_leads_to_the_same_end(tmp_path: Path) -> None:
    path = tmp_path / "fit.emfed"
    whole, cut = fitted(), fitted(Watch(checkpoint=path), rounds=6)
    assert cut.rounds == 6
    again = fitted(Watch(checkpoint=path, resume=True))
    np.testing.assert_array_equal(again.statistics, whole.statistics)
    assert again.ledger.total("up") == whole.ledger.total("up")
    assert again.ledger.total("down") == whole.ledger.total("down")


def test_a_fit_that_is_cut_goes_where_its_last_sum_leads() -> None:
    ends = [
        emfed.fit(MODEL, DATA, rounds=rounds, seed=1, tol=0).log_likelihood(DATA.rows)
        for rounds in (0, 1, 2, 4)
    ]
    assert ends == sorted(set(ends))
