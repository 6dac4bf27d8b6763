"""Masked sums over sites: the run of a simulation on the same lattice, told as sums alone."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import emfed
from emfed.network import LocalTransport, RemoteFederation
from tests.network.masked import identities, masked_sites
from tests.network.networks import (
    Case,
    Dice,
    FaultyTransport,
    NetworkPlan,
    Trial,
    undisturbed,
)
from tests.network.processes import real_sites

RNG = np.random.default_rng(0)
TABLES = {
    f"site {i}": RNG.normal(RNG.choice([-3, 0, 3], (60 + 20 * i, 1)), 1, (60 + 20 * i, 2))
    for i in range(4)
}
SETTINGS: dict[str, Any] = {"seed": 3, "rounds": 12, "tol": 0, "masks": True}


def both(where: Path, model: Any, algorithm: Any, **more: Any) -> tuple[Any, Any]:
    settings = SETTINGS | more
    here = emfed.fit(model, TABLES, algorithm, **settings)
    network = RemoteFederation(LocalTransport(masked_sites(TABLES, where)), attempts=1)
    return here, emfed.fit(model, network, algorithm, **settings)


@pytest.mark.filterwarnings("ignore::emfed.EmfedWarning")
@pytest.mark.parametrize("start", ["moments", "k-means"])
@pytest.mark.parametrize(
    "algorithm",
    [
        "auto",
        "em",
        emfed.FedEM(emfed.SubtractiveDithering(0.2), step_size=0.5, memory_start="mean-field"),
    ],
)
def test_a_masked_run_is_the_simulation_on_the_same_lattice(
    algorithm: Any, start: str, tmp_path: Path
) -> None:
    here, there = both(tmp_path, emfed.gaussian_mixture(3, "full"), algorithm, start=start)
    np.testing.assert_allclose(there.statistics, here.statistics, rtol=0, atol=1e-9)
    np.testing.assert_array_equal(there.ledger.counts, here.ledger.counts)


@pytest.mark.filterwarnings("ignore::emfed.EmfedWarning")
def test_ranges_competing_starts_and_likelihoods_are_sums_too(tmp_path: Path) -> None:
    model = emfed.gaussian_mixture(1)
    more: dict[str, Any] = {"n_components": "1:3", "n_init": 2, "likelihood": True, "scores": True}
    here, there = both(tmp_path, model, "auto", **more)
    np.testing.assert_allclose(there.statistics, here.statistics, rtol=0, atol=1e-7)
    np.testing.assert_array_equal(there.ledger.counts, here.ledger.counts)


@pytest.mark.filterwarnings("ignore::emfed.EmfedWarning")
@pytest.mark.parametrize("kind", ["tied", "missing", "mixed", "factors", "regression", "markov"])
def test_openings_of_all_models_that_are_made_of_moments(kind: str, tmp_path: Path) -> None:
    model: Any = {
        "tied": emfed.gaussian_mixture(2, "tied"),
        "missing": emfed.gaussian_mixture(2, "full", missing=True),
        "mixed": emfed.mixed_mixture(2, ["gaussian", "gaussian"]),
        "factors": emfed.factor_analysis(1),
        "regression": emfed.regression_mixture(2),
        "markov": emfed.hidden_markov(2, "gaussian"),
    }[kind]
    tables = TABLES
    if kind == "markov":
        tables = {name: np.stack([t, t + 0.5], axis=1) for name, t in TABLES.items()}
    settings = SETTINGS | {"rounds": 3, "start": "moments"}
    here = emfed.fit(model, tables, "em", **settings)
    network = RemoteFederation(LocalTransport(masked_sites(tables, tmp_path)), attempts=1)
    there = emfed.fit(model, network, "em", **settings)
    np.testing.assert_allclose(there.statistics, here.statistics, rtol=0, atol=1e-8)


MASKED = {f"w{i}": RNG.normal(size=(5 + i, 2)) + i for i in range(5)}
KNOWN = identities(MASKED)


def faulty(seed: int, algorithm: Any, everyone: bool) -> Trial:
    """A masked run through all faults: messages and processes, between the phases too."""
    dice = Dice(seed)
    case = Case(
        emfed.models.LinearGaussian(0.8),
        MASKED,
        algorithm,
        emfed.algorithms.Everyone(),
        5,
        everyone,
        masks=True,
    )
    plan = NetworkPlan.draw(dice, disks=not everyone)
    return Trial(seed, case, FaultyTransport(MASKED, plan, dice, KNOWN))


@pytest.mark.filterwarnings("ignore::emfed.EmfedWarning")
@pytest.mark.parametrize("seed", range(12))
def test_memories_are_exact_under_faults_of_a_masked_run(seed: int) -> None:
    """Where every round waits for all, the answer is the undisturbed one, whatever happened."""
    logging.disable(logging.CRITICAL)
    algorithm = (emfed.AutoEM(), emfed.FedEM(emfed.SubtractiveDithering(0.3)), emfed.EM())[seed % 3]
    disturbed = faulty(seed, algorithm, seed % 2 == 0)
    try:
        disturbed.go()
    finally:
        logging.disable(logging.NOTSET)
    assert disturbed.gap < 1e-9
    assert disturbed.bytes_agree
    if seed % 2 == 0:
        right = undisturbed(disturbed.case, seed)
        np.testing.assert_allclose(disturbed.statistics, right, rtol=0, atol=1e-8)


@pytest.mark.filterwarnings("ignore::emfed.EmfedWarning")
def test_real_processes_mask_and_come_to_the_fit_of_a_simulation(tmp_path: Path) -> None:
    """Under the default rules, with a range of components, k-means starts and likelihoods."""
    tables = {f"s{i}": np.concatenate([t, t + 0.3]) for i, t in enumerate(TABLES.values())}
    model, more = emfed.gaussian_mixture(1), {"n_components": "1:3", "likelihood": True}
    settings = SETTINGS | more | {"rounds": 8}
    here = emfed.fit(model, tables, **settings)
    with real_sites(tables, tmp_path, masked=True) as transport:
        there = emfed.fit(model, RemoteFederation(transport), **settings)
        np.testing.assert_allclose(there.statistics, here.statistics, rtol=0, atol=1e-7)
        np.testing.assert_array_equal(there.ledger.counts, here.ledger.counts)
        with pytest.raises(emfed.ParticipationError, match="masked sums alone"):
            emfed.fit(model, RemoteFederation(transport, attempts=1), rounds=1, masks=False)
