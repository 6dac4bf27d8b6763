"""A common model fitted to one worker's rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import emfed
from tests.helpers import first, plain_fit
from tests.registry import REGISTRY


def _fitted(name: str, priors: bool = False) -> tuple[Any, Any]:
    entry = REGISTRY[name]
    model = entry.make(**(entry.priors if priors else {}))
    return plain_fit(model, entry.tables, rounds=60), entry.tables[2]


@pytest.mark.parametrize("name", first(REGISTRY, 12))
def test_from_the_common_model_to_the_workers_own(name: str) -> None:
    result, rows = _fitted(name)
    fits = [r.log_likelihood(rows) for r in (result, *(result.adapt(rows, w) for w in (200, 20)))]
    assert np.all(np.diff(fits) > 1e-4), fits


# With a prior, T takes the tied covariance from the rows' second moments and not from theta.
PRIORS = [(n, True) for n in REGISTRY if n != "tied"]


@pytest.mark.parametrize(("name", "priors"), first([*((n, False) for n in REGISTRY), *PRIORS], 12))
def test_a_common_model_worth_very_many_rows_stays(name: str, priors: bool) -> None:
    result, rows = _fitted(name, priors)
    pairs = zip(
        result.adapt(rows, 1e12).params.arrays().values(),
        result.params.arrays().values(),
        strict=True,
    )
    for ours, theirs in pairs:
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("priors", [False, True])
@pytest.mark.parametrize("name", ["full", "diag", "full 2, NaN", "mixed mixture, NaN"])
def test_it_ends_at_the_optimum_of_own_rows_and_prior(name: str, priors: bool) -> None:
    result, rows = _fitted(name, priors)
    found = result.adapt(rows, 30)
    model = found.model
    common = model.statistics_of(model.from_user(result.params))
    share = 30 / (len(rows) + 30)

    def loss(s: Any) -> float:
        theta = model.maximize(s)
        penalty = model.penalty(theta)
        prior = float(model.surrogate(common, theta)) - penalty
        own = float(model.log_likelihood(rows, theta))
        return -(1 - share) * own + share * prior + penalty

    s = found.statistics
    for _ in range(500):
        s = (1 - share) * model.expected_statistics(rows, model.maximize(s)) + share * common
    assert loss(found.statistics) - loss(s) < 2e-6
    rng = np.random.default_rng(0)
    for _ in range(20):  # it is flat there to first order
        step = 1e-5 * np.abs(s) * rng.normal(size=s.shape)
        up, down, here = loss(s + step), loss(s - step), loss(s)
        assert abs(up - down) < 0.05 * (up + down - 2 * here)


@pytest.mark.parametrize("kind", ["full", "tied"])
def test_one_gaussian_is_the_conjugate_answer(kind: Any) -> None:
    rng = np.random.default_rng(3)
    tables = [rng.normal(size=(200, 3)) * [1, 2, 3] + h for h in range(4)]
    result = plain_fit(emfed.gaussian_mixture(1, kind, covariance_floor=0), tables, rounds=3)
    rows, worth = rng.normal(size=(30, 3)) + 5, 70.0
    adapted = result.adapt(rows, worth).params
    mean = result.params.means[0]
    cov = result.params.covariances.reshape(3, 3)
    share = worth / (30 + worth)
    centre = (1 - share) * rows.mean(axis=0) + share * mean
    second = (1 - share) * rows.T @ rows / 30 + share * (cov + np.outer(mean, mean))
    np.testing.assert_allclose(adapted.means[0], centre, rtol=1e-9)
    np.testing.assert_allclose(
        adapted.covariances.reshape(3, 3), second - np.outer(centre, centre), rtol=1e-7, atol=1e-7
    )


def test_small_workers_that_differ_are_served_best_by_it() -> None:
    """Twelve workers, each with its own shift: new rows are likelier than under either model."""
    rng = np.random.default_rng(5)
    centres = 4 * rng.normal(size=(3, 4))
    shifts = 0.6 * rng.normal(size=(12, 4))

    def draw(worker: int, count: int) -> Any:
        labels = rng.integers(3, size=count)
        return centres[labels] + shifts[worker] + rng.normal(size=(count, 4))

    tables = [draw(w, 40) for w in range(12)]
    model = emfed.gaussian_mixture(3, "full", covariance_floor=1e-2)
    result = emfed.fit(model, tables, "auto", start="k-means")
    found = []
    for w, rows in enumerate(tables):
        new = draw(w, 2000)
        alone = plain_fit(model, [rows], start=result.params, rounds=200, tol=1e-6)
        mine = result.adapt(rows, 40)
        found.append([r.log_likelihood(new) for r in (mine, result, alone)])
    mine_, common, alone_ = np.array(found).T
    assert np.all(mine_ > common)
    assert np.all(mine_ > alone_)


def test_it_can_be_saved_and_says_what_it_is(tmp_path: Path) -> None:
    result, rows = _fitted("mixed mixture, NaN")
    adapted = result.adapt(rows, 25)
    adapted.save(tmp_path / "mine.emfed")
    loaded = emfed.load(tmp_path / "mine.emfed")
    np.testing.assert_array_equal(loaded.impute(rows), adapted.impute(rows))
    assert loaded.card["settings"]["adapted"] == {"rows": len(rows), "worth": 25}
    again = result.adapt(rows, 25)
    np.testing.assert_array_equal(again.statistics, adapted.statistics)


def test_one_row_is_enough_and_what_is_wrong_is_said() -> None:
    result, rows = _fitted("full")
    moved = result.adapt(rows[:1], 50)
    assert np.isfinite(moved.log_likelihood(rows))
    altered = replace(result, pooled_summary={"mean": np.zeros(7)})
    with pytest.raises(emfed.DataError, match="altered"):
        altered.adapt(rows)
    for worth in (0, -1, np.inf, np.nan):
        with pytest.raises(emfed.SettingsError, match="worth"):
            result.adapt(rows, worth)
    with pytest.raises(emfed.DataError, match="columns"):
        result.adapt(rows[:, :2])
    with pytest.raises(emfed.DataError, match="rows"):
        result.adapt(rows[:0])
    torn = rows.copy()
    torn[3, 1] = np.nan
    with pytest.raises(emfed.DataError, match="nan"):
        result.adapt(torn)
