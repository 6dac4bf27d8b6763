"""Masked sums over sites: the run of a simulation on the same lattice, told as sums alone."""

from __future__ import annotations

import gc
import logging
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import emfed
from emfed.artifacts.disclosure import least_rows, protections
from emfed.core.storage import ScratchDisk
from emfed.core.wire import Kind, kind_of
from emfed.data.tables import WorkerTables
from emfed.models.row_owner import RowOwner
from emfed.models.site_owner import SiteOwner
from emfed.network import LocalTransport, RemoteFederation, Site, SiteRules
from emfed.network.keys import make_site_key
from emfed.network.roster import pin_keys, roster_digest
from tests.helpers import OPEN, first
from tests.network.masked import masked_sites
from tests.network.networks import try_plan
from tests.network.processes import real_sites

RNG = np.random.default_rng(0)
TABLES = {
    f"site {i}": RNG.normal(RNG.choice([-3, 0, 3], (60 + 20 * i, 1)), 1, (60 + 20 * i, 2))
    for i in range(4)
}
MIXTURE = emfed.gaussian_mixture(2, "full")
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


OUTLIERS = {
    name: np.vstack([table, [[30.0 + 9 * i, -40.0]]]) if i < 2 else table
    for i, (name, table) in enumerate(TABLES.items())
}


@pytest.mark.filterwarnings("ignore::emfed.EmfedWarning")
@pytest.mark.parametrize(
    ("model", "numbers"),
    [
        (emfed.gaussian_mixture(4, "tied"), None),
        (emfed.gaussian_mixture(1, "tied"), "2:4"),
        (emfed.k_means(4), None),
    ],
)
def test_what_has_few_rows_of_all_sites_is_left_out_alike(
    model: Any, numbers: str | None, tmp_path: Path
) -> None:
    """The default floor on components: two outliers take components that no site would go on from.

    The run of a simulation is that of a network under the default rules, and no site refuses.
    """
    settings = SETTINGS | {"rounds": 15, "n_components": numbers, "likelihood": True}
    here = emfed.fit(model, OUTLIERS, "auto", **settings)
    sites = masked_sites(OUTLIERS, tmp_path, rules=SiteRules(), disk=ScratchDisk())
    network = RemoteFederation(LocalTransport(sites), attempts=1)
    there = emfed.fit(model, network, "auto", **settings)
    assert not network.refusals
    np.testing.assert_allclose(there.statistics, here.statistics, rtol=0, atol=1e-7)
    np.testing.assert_array_equal(there.ledger.counts, here.ledger.counts)
    rows = here.model.component_shares(here.statistics) * here.samples
    assert ((rows >= 3) | (rows < 1e-6)).all()
    bare = emfed.fit(model, OUTLIERS, "auto", **settings | {"masks": False})
    rows = bare.model.component_shares(bare.statistics) * bare.samples
    assert rows.min() < 3  # or there would be nothing to leave out
    assert any("fewer than 3 rows" in remark for remark in here.facts.settings["remarks"])


class Noting(LocalTransport):
    """Keeps the kind and the size of every message; ``restarts`` ends processes before a SET."""

    def __init__(self, sites: Any, restarts: int = 0, again: Any = None) -> None:
        super().__init__(sites)
        self.sizes: dict[Kind, list[int]] = {}
        self.restarts, self.sets, self.again = restarts, 0, again

    def deliver(self, messages: Any, deadline: float) -> Any:
        named = any(kind_of(message) is Kind.SET for message in messages.values())
        self.sets += named
        if named and self.sets == self.restarts:
            self.sites = {**self.sites, "site 1": self.again()}
        for message in messages.values():
            self.sizes.setdefault(kind_of(message), []).append(len(message))
        for key, answer in super().deliver(messages, deadline):
            self.sizes.setdefault(kind_of(answer), []).append(len(answer))
            yield key, answer


@pytest.mark.filterwarnings("ignore::emfed.EmfedWarning")
def test_the_envelopes_of_masked_rounds_are_a_few_bytes(tmp_path: Path) -> None:
    """A request takes at most 12 bytes and a reply 8, however many sites there are."""
    transport = Noting(masked_sites(TABLES, tmp_path))
    network = RemoteFederation(transport, attempts=1)
    fitted = emfed.fit(MIXTURE, network, "auto", **SETTINGS)
    for kind, most in {Kind.SET: 12, Kind.READY: 8}.items():
        first, later = transport.sizes[kind][:4], transport.sizes[kind][4:]
        assert min(first) > most  # of the opening: numbers of everybody
        assert max(later) <= most
    for way, most in {"up": 2 * 8, "down": 2 * 12}.items():
        rounds = fitted.records[2:]
        around = rounds.column(f"bytes_{way}") - rounds.column(f"payload_{way}")
        assert (around <= most * len(TABLES)).all()


@pytest.mark.filterwarnings("ignore::emfed.EmfedWarning")
@pytest.mark.parametrize("restarts", first([9, 2, 15]))
def test_a_site_that_starts_again_draws_its_number_anew(restarts: int, tmp_path: Path) -> None:
    here = emfed.fit(MIXTURE, TABLES, "auto", **SETTINGS)
    sites, name = masked_sites(TABLES, tmp_path), "site 1"
    sums = sites[name]._sums
    assert sums is not None
    again = partial(Site, TABLES[name], tmp_path / name, identity=sums.identity, rules=OPEN)
    transport = Noting(sites, restarts, again)
    there = emfed.fit(MIXTURE, RemoteFederation(transport, attempts=1), "auto", **SETTINGS)
    np.testing.assert_allclose(there.statistics, here.statistics, rtol=0, atol=1e-9)
    assert sum(size > 8 for size in transport.sizes[Kind.READY]) == len(TABLES) + 1
    more = {size for size in transport.sizes[Kind.SET][len(TABLES) :] if size > 12}
    assert len(more) == 2  # all of it to that site, what is new to the others


OPENINGS = [
    *"tied missing mixed categories factors regression markov site-owner rows".split(),
    *("occupancy", "observers"),
]


@pytest.mark.filterwarnings("ignore::emfed.EmfedWarning")
@pytest.mark.parametrize("kind", OPENINGS)
def test_openings_of_all_models(kind: str, tmp_path: Path) -> None:
    model: Any = {
        "tied": emfed.gaussian_mixture(2, "tied"),
        "missing": emfed.gaussian_mixture(2, "full", missing=True),
        "mixed": emfed.mixed_mixture(2, ["gaussian", "gaussian"]),
        "factors": emfed.factor_analysis(1),
        "regression": emfed.regression_mixture(2),
        "markov": emfed.hidden_markov(2, "gaussian"),
        "categories": emfed.mixed_mixture(2, ["gamma", emfed.models.Categorical(3)]),
        "site-owner": SiteOwner(times=4, rank=1),
        "rows": RowOwner(rank=1),
        "occupancy": emfed.models.Occupancy(2),
        "observers": emfed.models.ObserverEffects(9, 4),
    }[kind]
    tables = TABLES
    if kind == "markov":
        tables = {name: np.stack([t, t + 0.5], axis=1) for name, t in TABLES.items()}
    if kind == "categories":
        codes = {name: np.clip(np.round(np.abs(t[:, 1])), 0, 2) for name, t in TABLES.items()}
        tables = {n: np.column_stack([np.exp(t[:, 0]), codes[n]]) for n, t in TABLES.items()}
    if kind == "site-owner":
        cells = {name: np.indices((9, 4)).reshape(2, -1).T for name in TABLES}
        tables = {
            name: np.column_stack([cells[name] + [9 * i, 0], np.ones(36), t[:36, 0]])
            for i, (name, t) in enumerate(TABLES.items())
        }
    if kind == "occupancy":
        tables = {name: (t > 0).astype(float) for name, t in TABLES.items()}
    if kind == "observers":
        place, counts = np.indices((9, 4)).reshape(2, -1), np.arange(36) % 7
        row = np.column_stack([*place, np.arange(36) % 3, np.ones(36), counts])
        tables = {name: row + np.eye(5)[4] * k for k, name in enumerate(TABLES)}
    settings = SETTINGS | {"rounds": 3, "start": "moments"}
    here = emfed.fit(model, tables, "em", **settings)
    network = RemoteFederation(LocalTransport(masked_sites(tables, tmp_path)), attempts=1)
    there = emfed.fit(model, network, "em", **settings)
    np.testing.assert_allclose(there.statistics, here.statistics, rtol=0, atol=1e-8)


@pytest.mark.filterwarnings("ignore::emfed.EmfedWarning")
# 53: a disk is lost in the opening; 5645: a sum of 62 bits has no room.
@pytest.mark.parametrize("seed", [*range(10), 53, 64, 5645])
def test_memories_are_exact_under_faults_of_a_masked_run(seed: int) -> None:
    """Where every round waits for all, the answer is the undisturbed one, whatever happened."""
    logging.disable(logging.CRITICAL)
    try:
        assert try_plan(seed, masks=True).good
    finally:
        logging.disable(logging.NOTSET)


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


@pytest.mark.filterwarnings("ignore::emfed.EmfedWarning")
def test_row_weights_scores_and_validation_are_sums_too(tmp_path: Path) -> None:
    """What is one site's own comes as the mean over all."""
    rng = np.random.default_rng(4)
    weights = [rng.random(len(table)) + 0.1 for table in TABLES.values()]
    tables = {
        name: WorkerTables([table], row_weights=[own])
        for (name, table), own in zip(TABLES.items(), weights, strict=True)
    }
    together = WorkerTables(list(TABLES.values()), list(TABLES), row_weights=weights)
    model = emfed.gaussian_mixture(2, "tied")
    settings = SETTINGS | {"scores": True, "validate": True, "rounds": 6}
    here = emfed.fit(model, together, "auto", **settings)
    network = RemoteFederation(LocalTransport(masked_sites(tables, tmp_path)), attempts=1)
    there = emfed.fit(model, network, "auto", **settings)
    np.testing.assert_allclose(there.statistics, here.statistics, rtol=0, atol=1e-8)
    np.testing.assert_array_equal(there.ledger.counts, here.ledger.counts)
    for name in ("scores", "held_out"):
        told, want = getattr(there.facts, name), getattr(here.facts, name)
        np.testing.assert_allclose(told, want, rtol=0, atol=1e-5)
    assert there.facts.by_worker is None
    alone = emfed.fit(model, together, "auto", **settings | {"masks": False})
    assert there.facts.log_likelihood == pytest.approx(alone.facts.log_likelihood, abs=1e-3)


@pytest.mark.filterwarnings("ignore::emfed.EmfedWarning")
@pytest.mark.parametrize("weighted", [False, True])
def test_sites_that_count_alike_are_sums_too(weighted: bool, tmp_path: Path) -> None:
    """Each scales what it tells before it is masked, so sums are on one lattice."""
    rng = np.random.default_rng(4)
    own = [rng.random(len(table)) + 0.1 if weighted else None for table in TABLES.values()]
    tables = {
        name: table if mine is None else WorkerTables([table], row_weights=[mine])
        for (name, table), mine in zip(TABLES.items(), own, strict=True)
    }
    together: Any = TABLES
    if weighted:
        together = WorkerTables(list(TABLES.values()), list(TABLES), row_weights=own)
    settings = SETTINGS | {"weights": "uniform", "likelihood": True, "start": "moments"}
    for model, algorithm in ((emfed.gaussian_mixture(2, "tied"), "auto"), (MIXTURE, "em")):
        here = emfed.fit(model, together, algorithm, **settings)
        sites = masked_sites(tables, tmp_path / str(algorithm))
        network = RemoteFederation(LocalTransport(sites), attempts=1)
        there = emfed.fit(model, network, algorithm, **settings)
        np.testing.assert_allclose(there.statistics, here.statistics, rtol=0, atol=1e-8)
        np.testing.assert_array_equal(there.ledger.counts, here.ledger.counts)
        np.testing.assert_array_equal(there.worker_weights, np.full(4, 1 / 4))
        assert there.samples == pytest.approx(here.samples)
    bare = emfed.fit(MIXTURE, together, "em", **settings | {"masks": False})
    np.testing.assert_allclose(there.params.means, bare.params.means, atol=1e-5)
    by_rows = emfed.fit(MIXTURE, together, "em", **settings | {"weights": "samples"})
    assert np.abs(there.params.means - by_rows.params.means).max() > 1e-3


def test_masks_go_with_no_weights_of_the_servers_choice(tmp_path: Path) -> None:
    sites = masked_sites(TABLES, tmp_path, rules=SiteRules(smallest_component=5))
    network = RemoteFederation(LocalTransport(sites), attempts=1, pause=0)
    with pytest.raises(emfed.SettingsError, match="leave little of a sum but one site's part"):
        emfed.fit(MIXTURE, network, masks=True, weights=[1.0, 1e-9, 1e-9, 1e-9])
    with pytest.raises(emfed.ParticipationError, match="does not tell how many rows"):
        emfed.fit(MIXTURE, network, masks=True, weights="uniform")


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
@pytest.mark.parametrize("since", first([17, 5, 30]))
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


class Expelling(LocalTransport):
    """The operator expels a site that has just said that it is ready, in the fifth exchange."""

    sets = 0

    def deliver(self, messages: Any, deadline: float) -> Any:
        self.sets += any(kind_of(message) is Kind.SET for message in messages.values())
        out = self.shut_out()
        return super().deliver({k: m for k, m in messages.items() if k not in out}, deadline)

    def shut_out(self) -> dict[str, str]:
        return {"site 1": "expelled by the operator"} if self.sets > 4 else {}


@pytest.mark.filterwarnings("ignore::emfed.EmfedWarning")
def test_a_masked_run_does_not_wait_for_a_site_that_was_expelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr("emfed.network.connection.time.sleep", pauses.append)
    network = RemoteFederation(
        Expelling(masked_sites(TABLES, tmp_path, rules=SiteRules())), attempts=5, pause=1.0
    )
    model = emfed.gaussian_mixture(1, "diag")
    result = emfed.fit(model, network, "em", masks=True, seed=3, tol=0, rounds=9)
    np.testing.assert_array_equal(result.worker_weights > 0, [True, False, True, True])
    assert not pauses


@pytest.mark.filterwarnings("ignore::emfed.EmfedWarning")
def test_a_masked_run_that_a_site_left_goes_on_after_its_server_was_killed(tmp_path: Path) -> None:
    """The sum of the opening is asked for anew: the checkpoint knows the run by the first one."""
    transport = Expelling(masked_sites(TABLES, tmp_path, rules=SiteRules()))
    model = emfed.gaussian_mixture(1, "diag")

    def serve(rounds: int) -> Any:
        options: dict[str, Any] = {"tol": 0, "seed": 3, "attempts": 2, "pause": 0, "masks": True}
        return emfed.fitting.serve(model, "em", transport, tmp_path / "s", rounds=rounds, **options)

    serve(8)
    served = serve(12)
    assert served.rounds == 12
    others = {name: table for name, table in TABLES.items() if name != "site 1"}
    right = emfed.fit(model, others, "em", tol=1e-12)
    np.testing.assert_allclose(told(served.result), told(right), atol=1e-3)


@pytest.mark.parametrize("case", ["three sites", "an owner's rule"])
def test_a_masked_run_that_cannot_go_on_without_who_left_says_so(case: str, tmp_path: Path) -> None:
    tables = {name: TABLES[name] for name in list(TABLES)[: 3 if case == "three sites" else 4]}
    rules = SiteRules(largest_changes=0) if case == "an owner's rule" else SiteRules()
    sites = masked_sites(tables, tmp_path, rules=rules)
    network = RemoteFederation(Leaving(sites, "site 1", 12), attempts=2, pause=0)
    words = {
        "three sites": "without masks, which every site",
        "an owner's rule": "owner allows that 0 times",
    }[case]
    with pytest.raises(emfed.ParticipationError, match=words):
        emfed.fit(emfed.gaussian_mixture(2), network, "em", masks=True, rounds=30, tol=0)


@pytest.mark.filterwarnings("ignore::emfed.EmfedWarning")
def test_an_old_backup_of_the_server_of_a_masked_run_goes_on(tmp_path: Path) -> None:
    """All sites say that they are ahead, so that there is no sum of the round that is asked for."""
    transport = LocalTransport(masked_sites(TABLES, tmp_path, rules=SiteRules()))
    model, place, backup = emfed.gaussian_mixture(1, "diag"), tmp_path / "s", tmp_path / "backup"

    def serve(rounds: int) -> Any:
        options: dict[str, Any] = {"tol": 0, "seed": 3, "attempts": 2, "pause": 0, "masks": True}
        return emfed.fitting.serve(model, "em", transport, place, rounds=rounds, **options)

    serve(3)
    shutil.copytree(place, backup)
    serve(7)
    shutil.rmtree(place)
    backup.rename(place)
    served = serve(12)
    assert served.rounds == 12
    right = emfed.fit(model, TABLES, "em", start=served.result.params, tol=1e-12)
    np.testing.assert_allclose(told(served.result), told(right), atol=1e-3)


class Elsewhere(LocalTransport):
    """Sites that show keys."""

    between_machines = True


@pytest.mark.filterwarnings("ignore::emfed.EmfedWarning")
def test_between_machines_three_sites_are_masked_unless_all_agree_otherwise(tmp_path: Path) -> None:
    """Nobody says anything of masks here, and the report says that they were on."""
    model, quick = emfed.gaussian_mixture(2), {"rounds": 2, "tol": 0}
    sites = masked_sites(TABLES, tmp_path, rules=SiteRules())
    result = emfed.fit(model, RemoteFederation(Elsewhere(sites), attempts=1), **quick)
    assert "Secure sums were on" in protections(result)
    assert "how many each has was not told" in least_rows(result)
    bare = RemoteFederation(Elsewhere(sites), attempts=1, masks=False)
    with pytest.raises(emfed.ParticipationError, match="masked sums alone"):
        emfed.fit(model, bare, **quick)
    willing = masked_sites(TABLES, tmp_path / "willing", rules=SiteRules(unmasked=True))
    bare = RemoteFederation(Elsewhere(willing), attempts=1, masks=False)
    assert "Secure sums were off" in protections(emfed.fit(model, bare, **quick))
    two = {name: willing[name] for name in list(willing)[:2]}
    alone = RemoteFederation(Elsewhere(two), attempts=1)
    assert "Secure sums were off" in protections(emfed.fit(model, alone, **quick))


@pytest.mark.filterwarnings("ignore::emfed.EmfedWarning")
def test_tables_in_one_process_are_tried_out_as_between_machines(tmp_path: Path) -> None:
    """With keys, masks and the owners' rules; what sites write goes away unless it has a folder."""
    tables = {name.replace(" ", "-"): table for name, table in TABLES.items()}
    transport = LocalTransport.of(tables)
    wrote = transport.sites["site-0"].directory.parent
    result = emfed.fit(emfed.gaussian_mixture(2), RemoteFederation(transport), rounds=2, tol=0)
    assert "Secure sums were on" in protections(result)
    assert wrote.is_dir()
    del transport, result
    gc.collect()
    assert not wrote.exists()
    kept = LocalTransport.of(tables, tmp_path, rules=SiteRules(smallest_rows=10_000))
    with pytest.raises(emfed.ParticipationError, match="more rows than there are"):
        emfed.fit(emfed.gaussian_mixture(2), RemoteFederation(kept, attempts=1), rounds=2)
    assert {path.name for path in tmp_path.iterdir()} == set(tables)
    with pytest.raises(emfed.SettingsError, match="a site's name"):
        LocalTransport.of({"../up": TABLES["site 0"]}, tmp_path)


def test_keys_are_pinned_with_the_digest_that_was_read_out_and_not_exchanged(
    tmp_path: Path,
) -> None:
    public = [make_site_key(tmp_path, name)[1] for name in "abc"]
    digest = roster_digest(pin_keys(public, tmp_path / "first"))
    spoken = digest.upper().replace("-", " ")
    assert roster_digest(pin_keys(public, tmp_path / "roster", spoken)) == digest
    _, other = make_site_key(tmp_path / "elsewhere", "b")
    with pytest.raises(emfed.SettingsError, match="--replace"):
        pin_keys([other], tmp_path / "roster")
    with pytest.raises(emfed.SettingsError, match="some site's key is another here, or missing"):
        pin_keys([other], tmp_path / "roster", digest, replace=True)
    assert roster_digest(pin_keys([], tmp_path / "roster")) == digest  # nothing was written
    assert roster_digest(pin_keys([other], tmp_path / "roster", replace=True)) != digest


@pytest.mark.filterwarnings("ignore::emfed.EmfedWarning")
def test_a_process_that_is_killed_leaves_a_masked_run_to_the_others(tmp_path: Path) -> None:
    """Real processes over TLS and the default rules: four sites, one gone after round 3."""
    tables, children = {f"s{i}": t for i, t in enumerate(TABLES.values())}, dict[str, Any]()
    with real_sites(tables, tmp_path, children, masked=True) as transport:
        transport._absent = 0.2  # seconds that a question waits for a site that went away

        def leave(record: emfed.fitting.RoundRecord) -> None:
            if record.round == 3:
                children["s1"].kill()
                children["s1"].wait()

        served = emfed.fitting.serve(
            emfed.gaussian_mixture(2, "tied"),
            "em",
            transport,
            tmp_path / "server",
            attempts=2,
            pause=0.01,
            callbacks=[leave],
            tol=1e-9,
            rounds=300,
        )
    result = served.result
    np.testing.assert_array_equal(result.worker_weights > 0, [True, False, True, True])
    others = [table for name, table in tables.items() if name != "s1"]
    right = emfed.fit(emfed.gaussian_mixture(2, "tied"), others, "em", start=result.params)
    np.testing.assert_allclose(told(result), told(right), atol=1e-3)


@pytest.mark.parametrize("names", ["abd", "abcd"])
def test_a_masked_answer_of_another_release_names_the_site_and_says_what_to_do(
    names: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Three of four sites go on without it; two have no masked sum."""
    rows = np.random.default_rng(0).normal(size=(len(names), 40, 2))
    transport = LocalTransport.of(dict(zip(names, rows, strict=True)))
    older = transport.sites["d"]._sums
    assert older is not None
    whole = older.masked

    def shorter(*given: Any) -> tuple[bytes, int]:
        words, size = whole(*given)
        return words[:-8], size

    setattr(older, "masked", shorter)  # noqa: B010 (a method is no variable)
    federation = RemoteFederation(transport, pause=0.0)
    model = emfed.gaussian_mixture(1, "diag")
    if len(names) == 3:
        with pytest.raises(emfed.ParticipationError, match="d: its masked answer.*another release"):
            emfed.fit(model, None, "em", federation=federation, rounds=2)
        return
    emfed.fit(model, None, "em", federation=federation, rounds=2)
    assert federation.members.keys == ["a", "b", "c"]
    assert "d is out of the run: its masked answer" in caplog.text
    assert "another release" in federation.refusals["d"]
