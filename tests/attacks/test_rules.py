"""What a server gets from a site that answers everything, and from one without a rules file."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

import emfed
from emfed.core.wire import decode_refusal, open_refusal
from emfed.deployment.site import read_rules
from emfed.models.clusters import Centres, Clusters
from emfed.models.site_owner import SiteOwner
from emfed.network import LocalTransport, RemoteFederation, Site, SiteRules
from tests.attacks.malicious import Server
from tests.helpers import BARE, OPEN

RNG = np.random.default_rng(7)
ROWS = RNG.normal(size=(60, 2)) * [3.0, 0.2] + [50.0, 7.0]


def by_batches_of_one(site: Site) -> int:
    """Rows that the server reads off mini-batches of one row, whichever they are."""
    server = Server({"a": site}, emfed.gaussian_mixture(1, "diag"))
    server.begin(emfed.FedEM(step_size=0.5, memory_rate=0.0, batch_size=1))
    here, frame = server.model.statistics_of(server.model.start(0)), server.model.constants.frame
    seen = []
    for _ in range(200):
        told = server.ask(here).get("a")
        if told is not None:
            seen.append(server.model.layout.split(told + here)["first"][0])
    found = np.array(seen).reshape(-1, 2) * frame.scale + frame.origin
    return sum(bool((np.abs(found - row).max(axis=1) < 1e-9).any()) for row in ROWS if len(found))


def test_mini_batches_of_one_row_are_the_rows(tmp_path: Path) -> None:
    assert by_batches_of_one(Site(ROWS, tmp_path / "a", rules=SiteRules.loosest())) > 50
    assert by_batches_of_one(Site(ROWS, tmp_path / "b", rules=BARE)) == 0


def listened(site: Site, k: int) -> bool:
    """Whether a server that only listens has as many equations as the site has unknowns."""
    try:
        server = Server({"a": site}, emfed.gaussian_mixture(k, "full"))
    except emfed.ParticipationError:
        return False
    return bool(server.model.layout.size >= int(server.session.counts[0]) * 2)


@pytest.mark.parametrize("rows", [3, 5, 8])
def test_sites_with_hardly_any_rows_are_equations(rows: int, tmp_path: Path) -> None:
    """Two columns: a full covariance for each of three components is 18 numbers a round."""
    assert listened(Site(ROWS[:rows], tmp_path / "a", rules=SiteRules.loosest()), 3)
    assert not listened(Site(ROWS[:rows], tmp_path / "b", rules=BARE), 3)


def test_fewer_rows_than_statistics_are_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(emfed.ParticipationError, match="18 statistics of so few rows"):
        Server(
            {"a": Site(ROWS[:18], tmp_path / "a", rules=BARE)}, emfed.gaussian_mixture(3, "full")
        )
    Server({"a": Site(ROWS[:19], tmp_path / "b", rules=BARE)}, emfed.gaussian_mixture(3, "full"))


def test_a_model_that_a_sites_rows_cannot_have_is_judged_all_the_same(tmp_path: Path) -> None:
    """More components than rows: bound to the rows of all sites it would tell those of each."""
    tables = {"a": ROWS[:12], "b": np.tile(ROWS, (20, 1))}
    sites = {name: Site(t, tmp_path / name, rules=BARE) for name, t in tables.items()}
    server = Server(sites, emfed.gaussian_mixture(13, "diag"))
    server.begin(emfed.EM())
    assert "a" not in server.ask(server.model.statistics_of(server.model.start(0)))
    assert "statistics of so few rows" in server.federation.refusals["a"]


def test_each_step_of_a_sequence_counts_as_a_row(tmp_path: Path) -> None:
    chain, rules = emfed.hidden_markov(2, "gaussian"), dataclasses.replace(BARE, smallest_rows=2)
    two = np.random.default_rng(3).normal(size=(2, 30, 1))
    Server({"a": Site(two, tmp_path / "a", rules=rules)}, chain)
    with pytest.raises(emfed.ParticipationError, match="statistics of so few rows"):
        Server({"a": Site(two[:, :4], tmp_path / "b", rules=rules)}, chain)


def joined(rules: SiteRules | None, where: Path, columns: list[str]) -> bool:
    """Whether the server gets moments of one column for each value of another, by a join."""
    patients = pl.DataFrame(
        {
            "ward": np.arange(60.0) % 3,
            "age": 30.0 + np.arange(60),
            "weight": np.ones(60),
            "pressure": RNG.normal(120, 10, 60),
        }
    )
    model = SiteOwner(times=90, rank=1)
    try:
        server = Server({"a": Site(patients, where, rules=rules)}, model, columns=columns)
    except emfed.ParticipationError:
        return False
    return server.federation.size == 1


def test_a_join_over_columns_of_the_servers_choice_is_the_owners_to_allow(tmp_path: Path) -> None:
    """`site-owner` sums one column by values of another: single values where these are unique."""
    picked = ["ward", "age", "weight", "pressure"]
    assert joined(SiteRules.loosest(), tmp_path / "a", picked)
    assert not joined(BARE, tmp_path / "b", picked)
    assert not joined(
        SiteRules(unmasked=True, models=["site-owner"]), tmp_path / "c", picked[:3][::-1]
    )


def test_a_column_that_the_owner_did_not_list_is_not_told_of(tmp_path: Path) -> None:
    table = pl.DataFrame({"x": ROWS[:, 0], "y": ROWS[:, 1], "secret": RNG.normal(size=60)})
    model = emfed.gaussian_mixture(1, "full")
    with pytest.raises(emfed.ParticipationError, match="--columns"):
        Server({"a": Site(table, tmp_path / "a", rules=BARE)}, model, columns=["x", "secret"])
    listed = Site(table, tmp_path / "b", columns=["x", "y"], rules=BARE)
    assert Server({"a": listed}, model, columns=["y"]).federation.size == 1
    with pytest.raises(emfed.ParticipationError):
        Server({"a": listed}, model, columns=["x", "secret"])


def test_models_that_count_no_rows_are_the_owners_to_allow(tmp_path: Path) -> None:
    model = emfed.models.LinearGaussian()
    with pytest.raises(emfed.ParticipationError, match="names it in `models`"):
        Server({"a": Site(ROWS, tmp_path / "a", rules=BARE)}, model)
    rules = SiteRules(unmasked=True, models=["linear-gaussian"])
    assert Server({"a": Site(ROWS, tmp_path / "b", rules=rules)}, model).federation.size == 1


def by_slices(site: Site, cuts: int, phases: bool = True) -> int:
    """Rows whose first column the server isolates: clusters cut the data ever more finely.

    Two centres far away from all rows but in the first column put the cut between them anywhere.
    """
    server = Server({"a": site}, Clusters(2))
    frame, found, before = server.model._frame, [], None
    places = np.sort(ROWS[:, 0])
    for cut in (places[1:] + places[:-1])[:cuts] / 2:
        here = (cut - frame.origin[0]) / frame.scale[0]
        if phases or not server.round:
            server.begin(emfed.FedEM(step_size=1.0, memory_rate=0.0))
        centres = np.array([[here - 1, 0.0], [here + 1, 0.0]])
        statistics = server.model.statistics_of(Centres(centres))
        told = server.ask(statistics).get("a")
        if told is None:
            break
        parts = server.model.layout.split(told + statistics)
        now = np.concatenate([parts["mass"][:1], parts["first"][0]]) * len(ROWS)
        if before is not None and abs(now[0] - before[0] - 1) < 1e-6:
            found.append((now - before)[1] * frame.scale[0] + frame.origin[0])
        before = now
    return sum(bool((np.abs(np.array(found) - row) < 1e-6).any()) for row in places if found)


def test_slices_and_differences_end_with_the_owners_allowance(tmp_path: Path) -> None:
    """Without secure sums the number of free choices is what bounds this attack, and no more."""
    assert by_slices(Site(ROWS, tmp_path / "a", rules=SiteRules.loosest()), 59) >= 55
    rules = SiteRules(unmasked=True, largest_choices=10)
    assert by_slices(Site(ROWS, tmp_path / "b", rules=rules), 59) <= 8


def test_rounds_of_one_phase_cut_rows_as_well_as_free_choices_do(tmp_path: Path) -> None:
    """Each cut is a short step from the one before. The rule on all answers is what bounds it."""
    rules = SiteRules(unmasked=True, largest_choices=10)
    assert by_slices(Site(ROWS, tmp_path / "a", rules=rules), 59, phases=False) >= 55
    rules = SiteRules(unmasked=True, largest_rounds=12)
    assert by_slices(Site(ROWS, tmp_path / "b", rules=rules), 59, phases=False) <= 10


def test_steps_that_no_round_makes_are_refused(tmp_path: Path) -> None:
    server = Server(
        {"a": Site(ROWS, tmp_path / "a", rules=BARE)}, emfed.gaussian_mixture(2, "diag")
    )
    server.begin(emfed.EM())
    here = server.model.statistics_of(server.model.start(0))
    assert "a" in server.ask(here)
    far = here.copy()
    far[server.model.layout.slices["second"]] *= 100.0
    assert "a" not in server.ask(far)
    assert "path" in server.federation.refusals["a"]


def test_a_backup_of_a_site_that_is_put_back_does_not_give_its_answers_back(tmp_path: Path) -> None:
    rules = SiteRules(unmasked=True, largest_rounds=5, second_ledger=str(tmp_path / "elsewhere"))
    for attempt in range(5):
        Server({"a": Site(ROWS, tmp_path / "a", rules=rules)}, emfed.gaussian_mixture(1, "diag"))
        if attempt % 2:
            shutil.rmtree(tmp_path / "a")  # the oldest backup that there can be
    site = Site(ROWS, tmp_path / "a", rules=rules)
    with pytest.raises(emfed.ParticipationError, match="5 messages about the rows"):
        Server({"a": site}, emfed.gaussian_mixture(1, "diag"))


def test_refusals_and_joins_count(tmp_path: Path) -> None:
    site = Site(ROWS, tmp_path / "a", rules=SiteRules(unmasked=True, largest_rounds=5))
    for _ in range(5):  # runs that ask for nothing but the join, over and over
        Server({"a": site}, emfed.gaussian_mixture(1, "diag"))
    with pytest.raises(emfed.ParticipationError, match="5 messages about the rows"):
        Server({"a": site}, emfed.gaussian_mixture(1, "diag"))
    odd = Site(ROWS, tmp_path / "b", rules=SiteRules(unmasked=True, largest_rounds=5))
    for _ in range(6):
        with pytest.raises(emfed.ParticipationError):
            Server({"a": odd}, emfed.models.LinearGaussian())
    with pytest.raises(emfed.ParticipationError, match="5 messages"):
        Server({"a": odd}, emfed.gaussian_mixture(1, "diag"))


def test_what_goes_wrong_inside_is_told_in_the_same_words_whatever_it_was(tmp_path: Path) -> None:
    site = Site(ROWS, tmp_path / "a", rules=BARE)
    server = Server({"a": site}, emfed.gaussian_mixture(1, "diag"))
    params, refusals, answer = server.model.start(0), [], site.step

    def step(message: bytes) -> bytes:
        refusals.append(answer(message))
        return refusals[-1]

    setattr(site, "step", step)  # noqa: B010
    for broken in (None, 3, "rows"):
        site._data = broken  # an error of another type each time
        with pytest.raises(emfed.ParticipationError):
            server.question("values", params)
    assert len({decode_refusal(open_refusal(r)[1]) for r in refusals}) == 1


def test_ordinary_runs_work_under_the_default_rules(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = {k: rng.normal(rng.choice([-3, 3], (200, 1)), 1, (200, 2)) for k in "abc"}
    sites = {k: Site(t, tmp_path / k, rules=BARE) for k, t in rows.items()}
    federation = emfed.network.RemoteFederation(emfed.network.LocalTransport(sites), attempts=1)
    found = emfed.FederatedGaussianMixture("1:4", random_state=1).fit(federation)
    assert found.n_components_ == 2
    assert not federation.refusals
    again = emfed.fit(emfed.gaussian_mixture(2), federation, "em", n_init=3, scores=True, rounds=9)
    assert np.isfinite(again.statistics).all()
    assert not federation.refusals


def test_looser_rules_say_what_they_give_away(tmp_path: Path) -> None:
    [lying] = SiteRules().gives_away()
    assert "can read whole rows of a site that it names" in lying
    [private] = SiteRules(largest_epsilon=2).gives_away()
    assert "epsilon 2 allows over all runs" in private
    assert SiteRules.loosest().gives_away()[0] == lying
    assert len(SiteRules.loosest(smallest_group=5).gives_away()) == 13
    assert "Leave this rule out" in SiteRules(smallest_group=5).gives_away()[-1]
    path = tmp_path / "rules.toml"
    path.write_text("largest_rounds = false\nmini_batches = true\nspare_rows = 40\n")
    rules = read_rules(path)
    assert rules.largest_rounds is None
    assert rules.mini_batches
    assert rules.spare_rows == 40
    assert len(rules.gives_away()) == 3
    assert json.dumps(rules.gives_away())


def test_refusals_of_models_tell_the_largest_code_of_a_site(tmp_path: Path) -> None:
    """What remains: whether rows suit a model at all is told, and costs one answer each time."""
    codes = np.column_stack([RNG.normal(size=40), np.arange(40) % 6])
    rules = SiteRules(unmasked=True, largest_rounds=9)
    site, fits = Site(codes, tmp_path, rules=rules), []
    for count in range(2, 9):
        model = emfed.mixed_mixture(1, ["gaussian", emfed.models.Categorical(count)])
        try:
            fits.append(Server({"a": site}, model).federation.size == 1)
        except emfed.ParticipationError:
            fits.append(False)
    assert fits == [count >= 6 for count in range(2, 9)]
    assert site._tally.read()["answered"] >= 7


@pytest.mark.parametrize(("rules", "least"), [(OPEN, 2), (SiteRules(unmasked=True), 5)])
def test_a_start_tells_of_no_cluster_of_a_few_rows(
    rules: SiteRules, least: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without masks the k-means of a start is sums over a site's rows near each centre."""
    told: list[float] = []
    exact = Clusters.expected_statistics

    def spy(self: Clusters, data: Any, params: Any, weights: Any = None) -> Any:
        found = exact(self, data, params, weights)
        told.extend((self.layout.split(found)["mass"] * data.shape[-2]).ravel().tolist())
        return found

    monkeypatch.setattr(Clusters, "expected_statistics", spy)
    tables = [RNG.standard_t(2, size=(90, 2)) for _ in range(3)]
    sites = {f"{i}": Site(rows, tmp_path / f"{i}", rules=rules) for i, rows in enumerate(tables)}
    federation = RemoteFederation(LocalTransport(sites), masks=False)
    emfed.fit(emfed.gaussian_mixture(3), federation, rounds=1, start="k-means")
    assert not federation.refusals
    rows = np.array(told)
    assert min(rows[rows > 0]) == pytest.approx(least)
