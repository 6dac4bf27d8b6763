"""Fits on live sites from Python: one face for sites in memory and sites that call."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import emfed
from emfed.algorithms import FixedSize
from emfed.core.registry import plain
from emfed.fitting import live
from emfed.fitting.settings import FitSettings
from emfed.fitting.words import read_words, say
from emfed.imputation import simulate_table
from emfed.models.site_owner import COLUMNS as CELL_COLUMNS
from emfed.network.owner_rules import SiteRules
from tests.network.processes import make_keys

RNG = np.random.default_rng(0)
ROWS = {
    name: RNG.normal(RNG.choice([-3, 3], (60, 1)), 1, (60, 2))
    for name in ("bergen", "oslo", "rana")
}
COLUMNS = ["x1", "x2"]
MODEL = emfed.gaussian_mixture(2)


@contextmanager
def joined(
    port: int, folder: Path, data: Any = ROWS, keys: bool = False, rules: Any = None
) -> Iterator[list[str]]:
    """Sites that follow in threads of this process; gives what they report."""
    stop, told = threading.Event(), list[str]()
    threads = []
    for name, table in data.items():
        options: dict[str, Any] = {"name": name, "stop": stop, "rules": rules}
        if keys:
            options |= {"key": folder / f"{name}.key", "ca": folder / "keys" / "ca.pem"}
            options |= {"roster": folder / "keys" / "sites"}
        options["report"] = lambda kind, words: told.append(f"{kind}: {words}")
        place = (f"127.0.0.1:{port}", table, folder / f"site-{name}")
        threads.append(threading.Thread(target=emfed.network.join, args=place, kwargs=options))
        threads[-1].start()
    try:
        yield told
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_every_face_takes_sites_in_memory() -> None:
    with emfed.network.LocalSites(ROWS) as sites:
        result = emfed.fit(MODEL, sites)
        selection = emfed.select_components(MODEL, sites, "1:2")
        mixture = emfed.FederatedGaussianMixture(2).fit(sites)
        clusters = emfed.FederatedKMeans(2).fit(sites)
    assert result.converged
    assert result.records[-1].answered == 3
    assert result.columns == ("x1", "x2")
    assert selection.n_components == 2
    assert set(selection.results) >= {1, 2}
    assert not hasattr(mixture, "feature_names_in_")  # nobody named the columns
    found = np.sort(mixture.means_[:, 0]), np.sort(clusters.cluster_centers_[:, 0])
    assert np.allclose(found, [[-3, 3], [-3, 3]], atol=0.5)
    pooled = np.concatenate([*ROWS.values()])
    assert result.log_likelihood(pooled) == pytest.approx(mixture.score(pooled), abs=1e-5)


def test_masks_are_on_with_three_sites_and_a_simulation_takes_the_seed() -> None:
    with emfed.network.LocalSites(ROWS) as sites:
        masked, other = emfed.fit(MODEL, sites, seed=5), emfed.fit(MODEL, sites, seed=5)
    assert masked.facts is not None
    assert masked.facts.settings["masks"] is True
    assert masked.seed != other.seed  # nobody chooses it alone
    two = {name: ROWS[name] for name in ("bergen", "oslo")}
    with emfed.network.LocalSites(two, rules=SiteRules(unmasked=True)) as sites:
        bare = emfed.fit(MODEL, sites, seed=5)
        with pytest.raises(emfed.SettingsError, match="three|3 sites"):
            emfed.fit(MODEL, sites, masks=True)
    assert bare.seed == 5


def test_owners_that_refuse_are_named() -> None:
    two = {name: ROWS[name] for name in ("bergen", "oslo")}
    with (
        emfed.network.LocalSites(two) as sites,
        pytest.raises(emfed.ParticipationError, match="bergen: .*masked sums alone") as caught,
    ):
        emfed.fit(MODEL, sites)
    assert set(caught.value.refused) == set(two)
    four = ROWS | {"voss": ROWS["oslo"] + 0.1}
    rules = {"voss": SiteRules(models=("ppca",))}
    with (
        emfed.network.LocalSites(four, rules=rules) as sites,
        pytest.warns(emfed.EmfedWarning, match="voss takes no part: .*models ppca"),
    ):
        result = emfed.fit(MODEL, sites)
    assert result.records[-1].answered == 3


def test_a_callback_and_a_clock_end_a_fit_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(live, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    def tick(record: Any) -> None:
        clock[0] = record.round

    with emfed.network.LocalSites(ROWS) as sites:
        short = emfed.fit(MODEL, sites, tol=0, callbacks=lambda record: record.round >= 2)
        ends = [end.result.conclusion.final.estimate.point for end in sites.ends.values()]
        late = emfed.fit(MODEL, sites, tol=0, seconds=3, callbacks=tick)
        with pytest.raises(emfed.FederationError, match="before it had reached anything"):
            emfed.fit(MODEL, sites, seconds=0)
    assert short.stopped == "callback"
    assert 2 <= short.rounds < 8
    assert len({point.statistics.tobytes() for point in ends}) == 1
    assert late.stopped == "seconds"
    assert 3 <= late.rounds < 9


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"weights": "uniform"}, "count alike"),
        ({"participation": FixedSize(2)}, "travels as one probability"),
        ({"monitor": emfed.fitting.Monitor()}, "elsewhere"),
        ({"checkpoint": "run.checkpoint"}, "in memory"),
        ({"columns": ["age"]}, "has not listed the columns"),
    ],
)
def test_what_cannot_be_is_refused_in_words(settings: Any, words: str) -> None:
    with (
        emfed.network.LocalSites(ROWS) as sites,
        pytest.raises(emfed.EmfedError, match=words),
    ):
        emfed.fit(MODEL, sites, **settings)


@pytest.mark.parametrize(
    "settings",
    [
        FitSettings(emfed.gaussian_mixture(1, "tied"), n_components="1:3", seed=2),
        FitSettings(emfed.mixed_mixture(2, ["gaussian", emfed.models.Categorical(3)])),
        FitSettings(emfed.k_means(3), rounds=7),
        FitSettings(emfed.ppca(2), algorithm=emfed.EM(), participation=0.5),
        FitSettings(emfed.hidden_markov(2), algorithm="em", tol=1e-4),
        FitSettings(MODEL, algorithm=emfed.FedEM(emfed.Dithering(4), step_size=0.1)),
        FitSettings(MODEL, algorithm=emfed.AutoEM(follow_em=True)),
        FitSettings(
            lambda k: emfed.gaussian_mixture(
                k, "diag", covariance_prior=emfed.models.InverseWishart(5.0, 1.0)
            ),
            n_components=[2, 4],
        ),
    ],
)
def test_settings_come_back_from_their_words(settings: FitSettings) -> None:
    said = say(settings)
    again = read_words(said["model"], said["algorithm"], said["fit"])
    assert plain(said) == said
    for name in ("seed", "rounds", "tol", "participation"):
        assert getattr(again, name) == getattr(settings, name)
    assert [one.describe() for one in again.candidates()] == [
        one.describe() for one in settings.candidates()
    ]
    assert plain(again.method(3).describe()) == plain(settings.method(3).describe())


def test_sites_that_call_follow_one_fit_after_the_other(tmp_path: Path) -> None:
    make_keys([*ROWS], tmp_path)
    keys = tmp_path / "keys"
    with (
        emfed.network.listen("127.0.0.1:0", keys=keys, columns=COLUMNS) as sites,
        joined(sites.port, tmp_path, keys=True) as told,
    ):
        sites.wait_for(3, 30)
        first = emfed.fit(MODEL, sites)
        second = emfed.FederatedGaussianMixture("1:2").fit(sites)
        with pytest.raises(emfed.ParticipationError, match="has not listed the columns"):
            emfed.fit(MODEL, sites, columns=["age"])
    assert first.converged
    assert second.n_components_ == 2
    assert sum("all sites have signed" in words for words in told) == 6
    saved = [emfed.load(tmp_path / f"site-{name}" / "model.emfed") for name in ROWS]
    assert all(np.array_equal(one.params.means, second.means_) for one in saved)


def test_a_fit_goes_on_from_its_file(tmp_path: Path) -> None:
    """The analyst's process, and the relay in it, end in mid-run: the sites stay."""
    path = tmp_path / "run.checkpoint"
    options: dict[str, Any] = {"tol": 0, "rounds": 30}

    def stumble(record: Any) -> None:
        if record.round == 5:
            raise ZeroDivisionError

    with emfed.network.listen("127.0.0.1:0", insecure=True, columns=2) as sites:
        port = sites.port
        with joined(port, tmp_path):
            sites.wait_for(3, 30)
            with pytest.raises(ZeroDivisionError):
                emfed.fit(MODEL, sites, checkpoint=path, callbacks=stumble, **options)
            sites.close()
            with emfed.network.listen(f"127.0.0.1:{port}", insecure=True) as again:
                again.columns = tuple(COLUMNS)
                again.wait_for(3, 60)
                with pytest.raises(emfed.CheckpointError, match="other settings"):
                    emfed.fit(MODEL, again, checkpoint=path, resume=True, tol=0, rounds=31)
                found = emfed.fit(MODEL, again, checkpoint=path, resume=True, **options)
    assert found.rounds == 30
    assert found.stopped == "rounds"


def test_a_table_is_filled_by_sites_and_fitted_here() -> None:
    table = simulate_table(900, observers=30, sites=20, months=24, groups=3, seed=0)
    own = np.split(table.rows, table.offsets[1:-1])
    cells = dict(zip(("bergen", "oslo", "rana"), own, strict=True))
    here = emfed.impute(table, rank=1, penalty=3.0)
    rules = SiteRules(smallest_observers=1)
    with emfed.network.LocalSites(cells, rules=rules, columns=CELL_COLUMNS) as sites:
        there = emfed.impute(sites, grid=table.grid, rank=1, penalty=3.0)
        with pytest.raises(emfed.EmfedError, match="by 4 workers"):
            emfed.impute(sites, grid=table.grid, rank=1, penalty=3.0, observers=4)
    assert np.allclose(here.trend()["estimate"], there.trend()["estimate"], rtol=1e-6)
    assert there.ledger.total("up") > 0


def test_a_private_fit_runs_on_sites() -> None:
    rows = {name: np.tile(table, (40, 1)) for name, table in ROWS.items()}
    with emfed.network.LocalSites(rows) as sites:
        result = emfed.fit(MODEL, sites, epsilon=5.0, delta=1e-6, rounds=4)
    assert result.privacy is not None
    assert result.privacy["private"]
    assert result.privacy["epsilon"] <= 5.0
