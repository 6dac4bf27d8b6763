"""Components that are moved after a run has converged: what gains is kept, and nothing is lost."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn import datasets

import emfed
from emfed.core.protocols import FloatArray
from emfed.core.records import RoundRecord
from emfed.fitting.proposals import _pairs, merged_and_split, with_one_less, with_one_more
from emfed.models.components import thin
from tests.helpers import first

Tables = dict[str, FloatArray]


def tails() -> Tables:
    """Three workers, and a start of k-means that misses rows far out."""
    rows = np.random.default_rng(3).lognormal(0, 1.3, (240, 2))
    far = np.repeat([[60.0, 3.0], [90.0, 3.0], [140.0, 3.0]], 6, axis=0)
    rows = np.concatenate([rows, far + np.random.default_rng(4).normal(size=far.shape)])
    return {name: rows[j::3] for j, name in enumerate("abc")}


@pytest.mark.parametrize("algorithm", first(["em", "auto"]))
def test_moves_of_clusters_gain_and_a_resumed_fit_makes_the_same(
    algorithm: str, tmp_path: Path
) -> None:
    data = tails()
    common: dict[str, Any] = {"seed": 1, "algorithm": algorithm}
    whole = emfed.fit(emfed.k_means(4), data, **common)
    rows = np.concatenate(list(data.values()))
    inertia = -whole.log_likelihood(rows)
    stops = range(whole.rounds // 4, whole.rounds, max(1, whole.rounds // 4))
    for stop in stops:
        path = tmp_path / f"{stop}.ckpt"
        halt = {"callbacks": [lambda record, last=stop: record.round >= last]}
        emfed.fit(emfed.k_means(4), data, checkpoint=path, **common, **halt)
        resumed = emfed.fit(emfed.k_means(4), data, checkpoint=path, resume=True, **common)
        np.testing.assert_array_equal(resumed.statistics, whole.statistics)
        assert (resumed.rounds, resumed.bytes_up) == (whole.rounds, whole.bytes_up)
    before = emfed.fit(emfed.k_means(4), data, moves=0, **common)
    assert inertia < 0.9 * -before.log_likelihood(rows)
    assert before.converged
    assert whole.converged
    assert before.rounds < whole.rounds


def test_a_given_start_of_k_means_is_meant() -> None:
    data = tails()
    centres = np.array([[0.0, 0.0], [1.0, 1.0], [2.0, 5.0], [30.0, 3.0]])
    ours = emfed.fit(emfed.k_means(4), data, "em", start=emfed.models.Centres(centres), seed=1)
    pooled = emfed.fit(
        emfed.k_means(4),
        [np.concatenate(list(data.values()))],
        "em",
        start=emfed.models.Centres(centres),
    )
    np.testing.assert_allclose(ours.params.centres, pooled.params.centres, rtol=1e-8)


def sorted_workers(rows: FloatArray, count: int) -> Tables:
    """Workers as unlike each other as can be, by the first column."""
    place = np.argsort(np.argsort(rows[:, 0], kind="stable"))
    return {str(j): rows[place * count // len(rows) == j] for j in range(count)}


def standardised(rows: FloatArray) -> FloatArray:
    return np.asarray(rows / rows.std(axis=0))


WINE = sorted_workers(standardised(datasets.load_wine().data), 4)
IRIS = sorted_workers(datasets.load_iris().data, 4)
RATES = np.random.default_rng(1).choice([1, 4, 9, 20, 35, 60], (300, 2))
COUNTS = sorted_workers(np.random.default_rng(0).poisson(RATES).astype(float), 4)
HOLES = {
    name: np.where(np.random.default_rng(len(rows)).random(rows.shape) < 0.1, np.nan, rows)
    for name, rows in WINE.items()
}
CASES: dict[str, tuple[Any, Tables, int]] = {
    "full": (emfed.gaussian_mixture(5, "full"), IRIS, 0),
    "diag": (emfed.gaussian_mixture(6, "diag"), WINE, 1),
    "tied": (emfed.gaussian_mixture(4, "tied"), WINE, 1),
    "poisson": (emfed.mixed_mixture(5, "poisson", missing=False), COUNTS, 1),
    "missing": (emfed.gaussian_mixture(4, "diag", missing=True), HOLES, 0),
}
GAINING = ("full", "diag", "poisson")


def pooled(data: Tables) -> FloatArray:
    return np.concatenate(list(data.values()))


@pytest.mark.parametrize("case", list(CASES))
def test_moves_never_cost_and_often_gain(case: str) -> None:
    model, data, seed = CASES[case]
    rows = pooled(data)
    before, after = (emfed.fit(model, data, seed=seed, moves=moves) for moves in (0, 3))
    gain = after.log_likelihood(rows) - before.log_likelihood(rows)
    assert gain > -1e-5
    assert gain > 0.04 or case not in GAINING
    assert before.converged
    assert after.converged
    assert after.rounds > before.rounds


def test_a_moved_fit_ends_at_an_optimum_of_em() -> None:
    model, data, seed = CASES["diag"]
    result = emfed.fit(model, data, seed=seed)
    more = emfed.fit(model, [pooled(data)], "em", start=result.params, tol=0, rounds=100)
    assert more.log_likelihood(pooled(data)) - result.log_likelihood(pooled(data)) < 1e-3


def test_moved_statistics_are_inside_and_hold_the_same_rows() -> None:
    """Merging and splitting change no sum over all components, and nothing else is moved."""
    for case, (model, data, seed) in CASES.items():
        result = emfed.fit(model, data, seed=seed, moves=0)
        bound, here = result.model, result.statistics
        mass = bound.layout.slices["mass"]
        found = [there for _, there in zip(range(4), merged_and_split(bound, here), strict=False)]
        assert len(found) == 4, case
        for there in found:
            assert bound.inside(there), case
            assert there[mass].sum() == pytest.approx(here[mass].sum(), rel=1e-3), case
            kept = np.isclose(there[mass], here[mass], rtol=1e-3).sum()
            assert kept == model.n_components - 3, case  # one took another's rows, one is halved


def test_neighbours_begin_where_each_other_ended() -> None:
    found = emfed.select_components(emfed.gaussian_mixture(1, "full"), IRIS, [2, 3], moves=0)
    two, three = (found.results[k] for k in (2, 3))
    rows = pooled(IRIS)

    def worth(model: Any, statistics: FloatArray) -> float:
        return float(model.log_likelihood(rows, model.maximize(statistics)))

    more, *others = with_one_more(three.model, two.model, two.statistics)
    less, *_ = with_one_less(two.model, three.model, three.statistics)
    assert len(others) == 1  # of two, either is split
    # Halves of a Gaussian lose next to nothing, and two that are one lose what they differed by.
    assert worth(three.model, more) > two.log_likelihood(rows) - 0.05
    assert worth(two.model, less) < three.log_likelihood(rows)
    assert worth(two.model, less) > two.log_likelihood(rows) - 0.5


def test_no_move_leaves_a_component_with_one_or_two_rows() -> None:
    """With a common covariance two rows far out would be worth a component: nobody looks there."""
    rng = np.random.default_rng(0)
    rows = rng.normal(rng.choice([-2.0, 2.0], (200, 1)), 1, (200, 2))
    rows[:2] = 40 + rng.normal(size=(2, 2))
    data = {str(j): rows[j::4] for j in range(4)}
    for seed in range(3):
        before, after = (
            emfed.fit(emfed.gaussian_mixture(3, "tied"), data, seed=seed, moves=moves)
            for moves in (0, 3)
        )
        few = [thin(r.model.component_shares(r.statistics), 200).sum() for r in (before, after)]
        assert few[1] <= few[0]


def test_a_given_start_and_follow_em_and_many_workers_are_not_led_on() -> None:
    model, data, seed = CASES["diag"]
    start = emfed.fit(model, data, seed=seed, rounds=3, moves=0).params
    rows = np.random.default_rng(0).normal(np.arange(4).repeat(150)[:, None] % 3, 1, (600, 2))
    many = {str(j): rows[j::60] for j in range(60)}
    for table, options in (
        (data, {"start": start}),
        (data, {"follow_em": True}),
        (data, {"algorithm": "em"}),
        (many, {}),
    ):
        ended = [emfed.fit(model, table, seed=seed, moves=moves, **options) for moves in (0, 3)]
        np.testing.assert_array_equal(ended[0].statistics, ended[1].statistics)
        assert ended[0].rounds == ended[1].rounds


def test_a_fit_that_is_resumed_makes_the_same_moves(tmp_path: Path) -> None:
    model, data, seed = CASES["diag"]
    common: dict[str, Any] = {"seed": seed}
    whole = emfed.fit(model, data, **common)
    for stop in range(whole.rounds // 4, whole.rounds, max(1, whole.rounds // 4)):
        path = tmp_path / f"{stop}.ckpt"
        halt = {"callbacks": [lambda record, last=stop: record.round >= last]}
        emfed.fit(model, data, checkpoint=path, **common, **halt)
        resumed = emfed.fit(model, data, checkpoint=path, resume=True, **common)
        np.testing.assert_array_equal(resumed.statistics, whole.statistics)
        assert (resumed.rounds, resumed.converged) == (whole.rounds, whole.converged)


def test_a_limit_that_is_met_while_moves_are_tried_loses_nothing() -> None:
    model, data, seed = CASES["diag"]
    first_end = emfed.fit(model, data, seed=seed, moves=0)
    whole = emfed.fit(model, data, seed=seed)
    rows = pooled(data)
    for rounds in range(first_end.rounds + 2, whole.rounds, 29):
        result = emfed.fit(model, data, seed=seed, rounds=rounds)
        assert result.converged
        assert result.log_likelihood(rows) > first_end.log_likelihood(rows) - 1e-5


def test_a_range_is_led_on_from_its_best() -> None:
    """BIC of the number that is chosen only falls, by workers and alone."""
    rows = pooled(WINE)
    for data in (WINE, [rows]):
        chosen = [
            emfed.select_components(emfed.gaussian_mixture(1, "full"), data, "1:4", moves=moves)
            for moves in (0, 3)
        ]
        bics = [found.best.bic(rows) for found in chosen]
        assert bics[1] <= bics[0] + 1e-3
        told = {row["n_components"]: row["bic"] for row in chosen[1].table}
        assert told[chosen[1].n_components] == min(told.values())
        assert told[chosen[1].n_components] == pytest.approx(bics[1], abs=1e-2)
        assert chosen[1].best.converged


def test_an_error_while_components_are_moved_carries_the_best() -> None:
    model, data, seed = CASES["diag"]
    ended = emfed.fit(model, data, seed=seed, moves=0)
    last = emfed.fit(model, data, seed=seed).rounds
    rows = pooled(data)

    def fail(record: RoundRecord, stop: int) -> None:
        if record.round >= stop:
            raise OSError("no more")

    for stop in range(ended.rounds + 1, last, 29):
        with pytest.raises(OSError, match="no more") as caught:
            emfed.fit(model, data, seed=seed, callbacks=[partial(fail, stop=stop)])
        reached = vars(caught.value)["result"]
        assert reached.log_likelihood(rows) > ended.log_likelihood(rows) - 1e-5
        assert not reached.converged


def test_of_many_components_the_nearest_pairs_are_tried() -> None:
    """Forty Gaussians in pairs that touch: some of them are merged, and not all 780 are tried."""
    rng = np.random.default_rng(0)
    centres = np.repeat(np.arange(20.0) * 50, 2) + np.tile([0.0, 2.0], 20)
    rows = rng.normal(np.repeat(centres, 20)[:, None], 1, (800, 2))
    data = {str(j): rows[j::4] for j in range(4)}
    params = emfed.models.GaussianParameters(
        np.full(40, 1 / 40), np.repeat(centres[:, None], 2, axis=1), np.ones((40, 2))
    )
    run = emfed.fitting.open_run(emfed.gaussian_mixture(40, "diag"), data, start=params)
    pairs = _pairs(run.model, run.statistics)
    assert len(pairs) == 100
    assert all(one % 2 == 0 and free == one + 1 for one, free in pairs[:20])
