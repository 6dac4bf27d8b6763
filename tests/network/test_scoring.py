"""Scores over a network: those of one process, also of chosen candidates and of models without."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import emfed
from tests.helpers import BARE


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
def test_scores_are_those_of_one_process(model: Any, numbers: Any, told: int) -> None:
    data = {"a": rows(0), "b": rows(1)}
    settings: dict[str, Any] = {"n_components": numbers, "rounds": 200, "tol": 1e-4, "scores": True}
    here = emfed.fit(model, data, masks=False, **settings)
    with emfed.network.LocalSites(data, rules=BARE) as sites:
        there = emfed.fit(model, sites, **settings)
    shares = len(there.params.weights) if told == 4 else 0  # of components, beside the four
    assert np.isfinite(there.facts.by_worker.scores).sum() == (told + shares) * 2
    np.testing.assert_allclose(there.facts.by_worker.scores, here.facts.by_worker.scores, rtol=1e-9)
    for way in ("up", "down"):
        assert there.ledger.total(way) == here.ledger.total(way)


def test_masked_sites_say_how_well_all_of_them_are_served() -> None:
    data = {name: rows(seed) for seed, name in enumerate("abc")}
    model, settings = emfed.gaussian_mixture(2, "diag"), {"scores": True, "tol": 1e-4}
    with emfed.network.LocalSites(data) as sites:
        there = emfed.fit(model, sites, **settings)
    here = emfed.fit(model, [np.concatenate([*data.values()])], **settings)
    assert there.facts.by_worker is None
    for told in (slice(4), slice(4, None)):  # which component comes first is chance
        found = (np.sort(one.facts.scores[told]) for one in (there, here))
        np.testing.assert_allclose(*found, atol=1e-2)
