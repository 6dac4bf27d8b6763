"""Scores over a network: those of one process, also of chosen candidates and of models without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import emfed
from tests.helpers import OPEN


def rows(seed: int) -> Any:
    rng = np.random.default_rng(seed)
    x = rng.normal(rng.choice([-4, 4], (60, 1)), 1, (60, 3))
    x[:, 2] = x[:, 0] + 0.1 * rng.normal(size=60)
    return x


@pytest.mark.parametrize(
    ("model", "numbers", "told"),
    [
        (emfed.gaussian_mixture(2, "diag"), None, 4),
        (emfed.gaussian_mixture(1, "diag"), "1:3", 4),
        (emfed.regression_mixture(1, 2), None, 2),
    ],
)
def test_scores_are_those_of_one_process(
    model: Any, numbers: Any, told: int, tmp_path: Path
) -> None:
    data = {"a": rows(0), "b": rows(1)}
    sites = {
        name: emfed.network.Site(table, tmp_path / name, rules=OPEN) for name, table in data.items()
    }
    federation = emfed.network.RemoteFederation(emfed.network.LocalTransport(sites), pause=0.0)
    settings: dict[str, Any] = {"n_components": numbers, "rounds": 200, "tol": 1e-4, "scores": True}
    here, there = (emfed.fit(model, given, **settings) for given in (data, federation))
    assert here.facts is not None
    assert there.facts is not None
    shares = len(there.params.weights) if told == 4 else 0  # of components, beside the four
    assert np.isfinite(there.facts.by_worker.scores).sum() == (told + shares) * 2
    np.testing.assert_allclose(there.facts.by_worker.scores, here.facts.by_worker.scores, rtol=1e-9)
    assert np.array_equal(there.ledger.counts, here.ledger.counts)


def test_who_did_not_score_is_named() -> None:
    """One that has gone so late that it still counts."""
    workers = emfed.data.as_workers({"a": rows(0), "b": rows(1), "c": rows(2)})
    plan = emfed.network.FaultPlan(away={1: (4, None)})
    federation = emfed.network.FaultyFederation(emfed.network.LoopFederation(workers), plan)
    model, settings = emfed.gaussian_mixture(2, "diag"), {"algorithm": "em", "start": "moments"}
    with pytest.warns(UserWarning, match="b did not say how well the model fits its rows"):
        result = emfed.fit(model, federation, scores=True, rounds=5, tol=None, **settings)
    assert result.facts is not None
    assert np.isnan(result.facts.by_worker.scores[:, 0]).tolist() == [False, True, False]
