"""Masked sums over sites: the run of a simulation on the same lattice, told as sums alone."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import emfed
from emfed.network import LocalTransport, RemoteFederation, SiteRules
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


class Leaving(LocalTransport):
    """One site is gone for good from some delivery on."""

    def __init__(self, sites: Any, who: str, since: int) -> None:
        super().__init__(sites)
        self.who, self.since, self.deliveries = who, since, 0

    def deliver(self, messages: Any, deadline: float) -> Any:
        self.deliveries += 1
        gone = {self.who} if self.deliveries > self.since else set()
        left = {key: message for key, message in messages.items() if key not in gone}
        return super().deliver(left, deadline)


def told(result: Any) -> Any:
    order = np.argsort(result.params.means[:, 0])
    return np.concatenate([result.params.weights[order], result.params.means[order].ravel()])


@pytest.mark.filterwarnings("ignore::emfed.EmfedWarning")
@pytest.mark.parametrize("kind", ["full", "tied"])
@pytest.mark.parametrize("since", [5, 17, 30])
def test_who_leaves_a_masked_run_leaves_nothing_behind(
    kind: str, since: int, tmp_path: Path
) -> None:
    """Under the default rules: in the search for a start, and in the rounds."""
    sites = masked_sites(TABLES, tmp_path, rules=SiteRules())
    network = RemoteFederation(Leaving(sites, "site 1", since), attempts=2, pause=0)
    model = emfed.gaussian_mixture(3, kind)
    result = emfed.fit(model, network, "em", masks=True, seed=3, tol=1e-9, rounds=400)
    np.testing.assert_array_equal(result.worker_weights > 0, [True, False, True, True])
    others = {name: table for name, table in TABLES.items() if name != "site 1"}
    right = emfed.fit(model, others, "em", start=result.params, tol=1e-12)
    np.testing.assert_allclose(told(result), told(right), atol=1e-3)


@pytest.mark.parametrize("case", ["three sites", "an owner's rule"])
def test_a_masked_run_that_cannot_go_on_without_who_left_says_so(case: str, tmp_path: Path) -> None:
    tables = {name: TABLES[name] for name in list(TABLES)[: 3 if case == "three sites" else 4]}
    rules = SiteRules(largest_changes=0) if case == "an owner's rule" else SiteRules()
    sites = masked_sites(tables, tmp_path, rules=rules)
    network = RemoteFederation(Leaving(sites, "site 1", 12), attempts=2, pause=0)
    words = {
        "three sites": "without masks, which every site",
        "an owner's rule": "may change 0 times",
    }[case]
    with pytest.raises(emfed.ParticipationError, match=words):
        emfed.fit(emfed.gaussian_mixture(2), network, "em", masks=True, rounds=30, tol=0)
