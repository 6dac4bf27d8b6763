"""Presence and detection apart: known parameters come back, sites at a distance agree."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy.optimize import minimize

import emfed
from emfed.models import Occupancy
from emfed.network.owner_rules import SiteRules
from emfed.testing import check_model
from tests.network.processes import real_sites

PRESENCE, DETECTION = np.array([0.3, 0.9]), np.array([-0.2, -0.7])


def places(count: int, seed: int, visits: int = 4) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x, w = rng.normal(size=(count, 1)), rng.normal(size=(count, visits))
    there = rng.random(count) < 1 / (1 + np.exp(-(PRESENCE[0] + PRESENCE[1] * x[:, 0])))
    seen = rng.random((count, visits)) < 1 / (1 + np.exp(-(DETECTION[0] + DETECTION[1] * w)))
    y = (seen & there[:, None]).astype(float)
    y[rng.random((count, visits)) < 0.2] = np.nan
    return np.column_stack([y, x, w])


MODEL = Occupancy(4, 1, 1, ridge=1e-6)


def test_it_keeps_the_contract_of_a_model() -> None:
    check_model(MODEL, [places(60, seed) for seed in range(3)])


def test_known_parameters_come_back_and_are_those_of_the_likelihood() -> None:
    tables = [places(400, seed) for seed in range(5)]
    result = emfed.fit(MODEL, tables, emfed.EM(), start="moments", rounds=400, tol=1e-10)
    assert np.allclose(result.params.presence, PRESENCE, atol=0.25)
    assert np.allclose(result.params.detection, DETECTION, atol=0.12)
    rows = np.concatenate(tables)

    def loss(beta: np.ndarray) -> float:
        x, w, y = rows[:, 4], rows[:, 5:], rows[:, :4]
        there = 1 / (1 + np.exp(-(beta[0] + beta[1] * x)))
        p = 1 / (1 + np.exp(-(beta[2] + beta[3] * w)))
        each = np.where(np.isnan(y), 1.0, np.where(y == 1, p, 1 - p)).prod(axis=1)
        none = ~(np.nan_to_num(y) > 0).any(axis=1)
        return -float(np.log(there * each + (1 - there) * none).mean())

    best = minimize(loss, np.zeros(4), method="BFGS").x
    found = np.concatenate([result.params.presence, result.params.detection])
    assert np.allclose(found, best, atol=2e-2)


def test_detection_is_not_presence() -> None:
    rows = places(800, 9)
    naive = (np.nan_to_num(rows[:, :4]) > 0).any(axis=1).mean()
    result = emfed.fit(MODEL, [rows[::2], rows[1::2]], emfed.EM(), start="moments", rounds=200)
    model = result.model
    there = model.presence(rows, result.params)
    assert there.mean() > naive + 0.03
    assert np.all(there[(np.nan_to_num(rows[:, :4]) > 0).any(axis=1)] == pytest.approx(1))


def test_sites_with_masks_give_what_one_process_gives(tmp_path: Path) -> None:
    tables = {name: places(80, seed) for seed, name in enumerate(("north", "south", "west"))}
    options = {"start": "moments", "rounds": 15, "tol": 0}
    rules = SiteRules(models=["occupancy"])
    with emfed.network.LocalSites(tables, rules=rules) as sites:
        there = emfed.fit(MODEL, sites, "em", **options)
    here = emfed.fit(MODEL, tables, "em", **options)
    assert there.rounds == here.rounds
    # Rounding follows from the sites' nonces: 0.2 to 1.3e-4 in eight fits.
    assert np.allclose(there.statistics, here.statistics, atol=1e-3)
    path = tmp_path / "occupancy.emfed"
    there.save(path)
    again = emfed.load(path)
    assert np.array_equal(again.params.presence, there.params.presence)


def test_sites_in_processes_of_their_own_give_what_one_process_gives(tmp_path: Path) -> None:
    """Over TLS on the loopback address; missing visits included."""
    tables = {f"s{seed}": places(80, seed) for seed in range(3)}
    options = {"start": "moments", "rounds": 6, "tol": 0, "errors": True, "masks": False}
    here = emfed.fit(MODEL, tables, emfed.EM(), **options)
    with real_sites(tables, tmp_path) as sites:
        there = emfed.fit(MODEL, sites, emfed.EM(), **options)
    assert np.allclose(there.statistics, here.statistics, atol=1e-9)
    for name in ("presence", "detection"):
        found, wanted = (r.errors_of(lambda p, n=name: getattr(p, n)) for r in (there, here))
        assert np.allclose(found, wanted, rtol=1e-4)


def test_errors_cover_the_truth() -> None:
    """`python -m benchmarks occupancy` has 200 tables, and unmarked's estimates beside ours."""
    truth = np.concatenate([PRESENCE, DETECTION])
    inside = []
    for seed in range(40):
        rows = places(300, 100 + seed)
        tables = [rows[k::3] for k in range(3)]
        options = {"start": "moments", "rounds": 300, "tol": 1e-9, "errors": True}
        result = emfed.fit(MODEL, tables, emfed.EM(), **options)
        values, errors = result.errors_of(lambda p: np.concatenate([p.presence, p.detection]))
        inside.append(np.abs(values - truth) < 1.96 * errors)
    assert 0.88 < np.mean(inside) <= 1


def test_what_it_refuses() -> None:
    rows = places(20, 0)
    rows[3, 1] = 2
    with pytest.raises(emfed.DataError, match="row 3, visit 1: expected 0, 1 or missing"):
        emfed.fit(MODEL, [rows], emfed.EM(), rounds=1)
    with pytest.raises(emfed.DataError, match="expected 9 columns"):
        emfed.fit(MODEL, [rows[:, :5]], emfed.EM(), rounds=1)
