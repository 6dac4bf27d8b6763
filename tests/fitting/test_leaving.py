"""Workers that leave and come back: the answer is that of the rows of those who are here.

Sites that do so are in tests/network/test_heard.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import emfed
from emfed.core.protocols import FloatArray
from tests.helpers import first

RNG = np.random.default_rng(5)
TABLES = {
    name: RNG.normal(RNG.choice([-4.0, 4.0], (size, 1)) + shift, 1, (size, 2))
    for name, size, shift in (("a", 150, 0.0), ("b", 100, 1.0), ("c", 200, -1.0))
}
ALGORITHMS = ("auto", "em", "FedEM")
Away = Mapping[int, tuple[int, int | None]]


def told(params: Any) -> FloatArray:
    """Weights and means, components in order, and all that is told of spreads."""
    order = np.argsort(params.means[:, 0])
    parts = (params.weights[order], params.means[order], np.sort(params.covariances, axis=None))
    return np.concatenate([np.ravel(part) for part in parts])


def pooled(kind: str, names: str) -> FloatArray:
    """EM on the rows of these alone."""
    rows = {name: TABLES[name] for name in names}
    return told(emfed.fit(emfed.gaussian_mixture(2, kind), rows, "em", tol=1e-12).params)


def left(away: Away, algorithm: str = "auto", kind: str = "full", **options: Any) -> emfed.Result:
    """A fit whose workers are away from one exchange until another."""
    inner = emfed.network.StackedFederation(emfed.data.as_workers(TABLES))
    network = emfed.network.FaultyFederation(inner, emfed.network.FaultPlan(away=away))
    return emfed.fit(emfed.gaussian_mixture(2, kind), network, algorithm, seed=3, **options)


@pytest.mark.parametrize("kind", ["full", "diag"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_who_leaves_at_any_time_leaves_nothing_behind(algorithm: str, kind: str) -> None:
    """In the search for a start, in the rounds, and before the last questions."""
    right = pooled(kind, "ac")
    for time in (2, 9, 17):
        result = left({1: (time, None)}, algorithm, kind, rounds=300)
        assert result.converged
        assert result.records[-1].answered == 2
        np.testing.assert_allclose(told(result.params), right, atol=2e-4)


@pytest.mark.parametrize("options", first([{"n_init": 3}, {"n_components": (1, 2, 3)}]))
def test_starts_and_candidates_compete_without_who_has_left(options: dict[str, Any]) -> None:
    for time in (3, 12):
        result = left({2: (time, None)}, rounds=300, **options)
        np.testing.assert_allclose(told(result.params), pooled("full", "ab"), atol=2e-3)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_who_comes_back_counts_again(algorithm: str) -> None:
    result = left({1: (9, 30)}, algorithm, tol=0, rounds=100)
    answered = [record.answered for record in result.records[1:]]
    assert {*answered} == {2, 3}
    assert {*answered[-30:]} == {3}
    np.testing.assert_allclose(told(result.params), pooled("full", "abc"), atol=1e-5)


@pytest.mark.parametrize("kind", ["full", "tied"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_where_nobody_answers_nothing_moves_and_nobody_has_left(algorithm: str, kind: str) -> None:
    result = left(dict.fromkeys(range(3), (12, 32)), algorithm, kind, tol=0, rounds=60)
    assert {record.answered for record in result.records[1:]} == {0, 3}
    atol = 3e-3 if kind == "tied" else 1e-5  # the spread of all rows is rounded
    np.testing.assert_allclose(told(result.params), pooled(kind, "abc"), atol=atol)


def test_a_start_given_by_parameters_needs_only_those_who_are_here() -> None:
    start = emfed.fit(emfed.gaussian_mixture(2), TABLES, "em", rounds=2).params
    result = left({1: (1, None)}, start=start)
    np.testing.assert_allclose(told(result.params), pooled("full", "ac"), atol=2e-4)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_checkpoint_remembers_who_is_away(algorithm: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"tol": 0, "start": "moments"}
    whole = left({1: (6, None)}, algorithm, rounds=40, **options)
    for rounds in (12, 40):
        resumed = left(
            {1: (6, None)},
            algorithm,
            rounds=rounds,
            checkpoint=tmp_path / "run",
            resume=True,
            **options,
        )
    np.testing.assert_array_equal(resumed.statistics, whole.statistics)


@pytest.mark.parametrize("algorithm", ["auto", "FedEM"])
def test_of_many_workers_who_misses_some_rounds_by_chance_is_hardly_ever_left_out(
    algorithm: str,
) -> None:
    """Memories that began again for each of them made 300 rounds of 64, and 117 of 40."""
    data = emfed.data.synthetic_federation(workers=100, rows_per_worker=50, seed=1)
    plan = emfed.network.FaultPlan(seed=1, lose_reply=0.1)
    network = emfed.network.FaultyFederation(emfed.network.StackedFederation(data), plan)
    model = emfed.gaussian_mixture(2, "tied")
    waits, leaves = (
        emfed.fit(model, network, algorithm, patience=patience, rounds=150)
        for patience in (None, 3)
    )
    assert waits.converged
    assert leaves.converged
    assert leaves.rounds < 1.5 * waits.rounds
