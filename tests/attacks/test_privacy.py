"""An empirical audit: what an attacker who knows all rows but one finds out about that one."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from scipy.stats import beta

from emfed.aggregation.privacy import NoisyWorkers, SiteNoise, WithoutNoise
from emfed.core.noise import NoiseKey
from emfed.core.privacy import epsilon_of, price_on, step_for
from emfed.data.held import HeldWorkers
from emfed.data.summing import HeldRows
from emfed.data.workers import as_workers
from emfed.fitting.private import PrivateAsk
from emfed.models import GaussianParameters
from emfed.models.bounded import Asked
from emfed.network.exchange.followed import PassPlace

DELTA = 1e-5


def proven(hits: int, alarms: int, n: int, delta: float) -> float:
    """Epsilon that a test proves which is right ``hits`` and wrong ``alarms`` times of n.

    With 95% confidence (Clopper and Pearson, 1934).
    """
    right = float(beta.ppf(0.025, hits, n - hits + 1)) if hits else 0.0
    wrong = float(beta.ppf(0.975, alarms + 1, n - alarms)) if alarms < n else 1.0
    return float(np.log(max(right - delta, 1e-12) / wrong))


def lower_bound(with_row: np.ndarray, without: np.ndarray, delta: float) -> float:
    """Half of the runs choose a threshold, the other half judge it."""
    half = len(with_row) // 2

    def worth(cut: float, part: slice) -> float:
        hits, alarms = ((scores[part] > cut).sum() for scores in (with_row, without))
        return proven(int(hits), int(alarms), len(with_row[part]), delta)

    cuts = np.quantile(np.concatenate([with_row[:half], without[:half]]), np.linspace(0, 1, 41))
    best = max(cuts.tolist(), key=lambda cut: worth(cut, slice(0, half)))
    return max(0.0, worth(best, slice(half, None)))


def audited(step: float, trials: int) -> float:
    """The canary is as far out as a row can be; the attacker looks along its own vector."""
    rng = np.random.Generator(np.random.Philox(3))
    rows, canary = rng.normal(size=(60, 3)), np.array([[50.0, -50.0, 50.0]])
    params = GaussianParameters(np.ones(1), np.zeros((1, 3)), np.eye(3)[None])
    asked = Asked(step, 1, None, "full", params, np.zeros(3), np.eye(3), 4.0)
    fine = Asked(1e-9, 1, None, "full", params, np.zeros(3), np.eye(3), 4.0)

    def told(rows: np.ndarray, about: Asked, number: int) -> np.ndarray:
        # Where rows differ, so does seeded noise.
        layer = NoisyWorkers(HeldWorkers(as_workers([rows])), NoiseKey(0))
        return layer.sum(PrivateAsk(about, "round", number))

    along = told(canary, fine, 0)
    scores = [
        np.array([float(told(some, asked, number) @ along) for number in range(trials)])
        for some in (np.concatenate([rows, canary]), rows)
    ]
    return lower_bound(*scores, DELTA)


def audited_member(step: float, trials: int, colluders: int) -> float:
    """The same of a masked sum of three sites, some of whom tell the attacker their noise."""
    rng = np.random.Generator(np.random.Philox(3))
    rows, canary = rng.normal(size=(60, 3)), np.array([[50.0, -50.0, 50.0]])
    params = GaussianParameters(np.ones(1), np.zeros((1, 3)), np.eye(3)[None])
    asked = Asked(step, 2, None, "full", params, np.zeros(3), np.eye(3), 4.0)
    keys = [NoiseKey.of(bytes([site]) * 32) for site in range(3)]

    def told(own: np.ndarray, number: int) -> np.ndarray:
        held = [HeldRows(as_workers([table])) for table in (own, rows, rows)]
        ask, total = PrivateAsk(asked, "round", number), np.zeros(10)
        for site in range(3 - colluders):
            commitment = hashlib.sha256(own.tobytes()).digest()
            place = PassPlace(b"run", commitment, ("anna", "bert", "cleo"), number, True)
            layer = SiteNoise(held[site], keys[site], place.digest(), lambda cost, name: True)
            total += layer.noisy(ask)
        return total

    fine = Asked(1e-9, 1, None, "full", params, np.zeros(3), np.eye(3), 4.0)
    along = WithoutNoise(PrivateAsk(fine, "round", 0)).part(HeldRows(as_workers([canary])))
    scores = [
        np.array([float(told(some, number) @ along) for number in range(trials)])
        for some in (np.concatenate([rows, canary]), rows)
    ]
    return lower_bound(*scores, DELTA)


@pytest.mark.parametrize("colluders", [1, 2])
def test_an_audit_of_a_masked_sum_counts_on_the_noise_of_two_sites(colluders: int) -> None:
    """One colluder is what a run counts on; with two the row is half as private."""
    step = step_for(10, 4.0, 2)
    allowed = epsilon_of(price_on(step, 10, 3 - colluders), DELTA)
    found = audited_member(step, 200, colluders)
    assert 0.5 < found <= allowed


@pytest.mark.parametrize("cost", [0.25, 4.0])
def test_an_audit_with_canaries_never_finds_more_than_the_accountant_allows(cost: float) -> None:
    step = step_for(10, cost, 1)
    allowed = epsilon_of(price_on(step, 10, 1), DELTA)
    found = audited(step, 300)
    assert found <= allowed
    if cost > 1:
        assert found > 0.5  # the attack does work: it sees a good part of what it may


def test_without_noise_worth_the_name_the_canary_is_seen_in_every_run() -> None:
    assert audited(step_for(10, 1e4, 1), 100) > 2.0
