"""Private fits that members follow: what they tell, what they refuse, what is charged when."""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

import emfed
from emfed.artifacts.disclosure import protections
from emfed.core.errors import EmfedError, SettingsError
from emfed.core.privacy import mu_squared_of
from emfed.data import as_workers
from emfed.data.held import HeldWorkers
from emfed.deployment.approval import answer_fit, owners_word, pending_fits
from emfed.deployment.config import read_config
from emfed.deployment.site import MEMORY
from emfed.deployment.views import SiteView
from emfed.fitting.private_in_process import private_fit
from emfed.fitting.settings import FitSettings
from emfed.network.exchange.statements import Entry, Post, StatementKind
from emfed.network.exchange.virtual import RELAY
from emfed.network.owner_rules import SiteRules
from emfed.network.spending import Allowance
from tests.network.exchanges import NAMES, READER
from tests.network.owners import COLUMNS, Owners, document

MODEL = emfed.gaussian_mixture(2, "full")


def tables(rows: int = 30_000, sites: int = 3) -> dict[str, np.ndarray]:
    rng = np.random.Generator(np.random.Philox(1))
    parts = [rng.normal(size=(rows // 2, 2)) + centre for centre in ([0.0, 100.0], [8.0, 104.0])]
    mixed = rng.permutation(np.concatenate(parts))
    return dict(zip(NAMES, np.array_split(mixed, sites), strict=False))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """What members make of sums tells nothing more, so it may be quick."""
    monkeypatch.setattr("emfed.fitting.private.SKETCH_ROWS", 300)


def everybody(rules: SiteRules, sites: int = 3) -> dict[str, SiteRules]:
    return dict.fromkeys(NAMES[:sites], rules)


def ran(owners: Owners, until: float = 600.0) -> Owners:
    owners.federation.run(until)
    return owners


def refusal(owners: Owners, name: str = "anna") -> str:
    """Why a site's owner does not take part; empty if it does."""
    about = replace(owners.federation.settings, program=owners.program)
    try:
        owners.terms(name).accept(about)
    except EmfedError as error:
        return str(error)
    return ""


def near(result: Any, data: dict[str, np.ndarray]) -> None:
    rows = np.concatenate(list(data.values()))
    pooled = emfed.fit(MODEL, rows).log_likelihood(rows)
    assert result.log_likelihood(rows) > pooled - 0.05


def test_a_private_fit_ends_near_the_pooled_fit_and_charges_its_budget_once(
    tmp_path: Path,
) -> None:
    data, rules = tables(), everybody(SiteRules(largest_epsilon=1.2))
    owners = ran(Owners(tmp_path, data, document(epsilon=1.0), rules))
    assert set(owners.told().values()) == {""}
    result = owners.result()
    near(result, data)
    assert result.privacy["epsilon"] == pytest.approx(1.0)
    assert result.privacy["private"] is True
    assert result.privacy["noise"] == "each site's secret"
    assert "epsilon 1" in result.outcome
    assert result.company is not None
    assert result.company.here == NAMES[:3]
    assert "server that lies" not in protections(result)
    for name in data:
        total, used = Allowance(owners.folder(name)).read()
        assert total == pytest.approx(mu_squared_of(1.0, 1e-6))
        assert next(iter(used.values())).used == pytest.approx(total)
    # The budget is over: another run is refused, also by a site that was started anew.
    again = Owners(tmp_path, data, document(epsilon=1.0), rules, run="another")
    assert "gives away epsilon 1.2 over all runs" in refusal(again)
    assert Allowance(again.folder("anna")).read()[0] == pytest.approx(mu_squared_of(1.0, 1e-6))


def test_a_run_that_is_only_proposed_costs_nothing(tmp_path: Path) -> None:
    owners = Owners(tmp_path, tables(300), document(epsilon=1.0))
    assert refusal(owners) == ""
    assert Allowance(owners.folder("anna")).read() == (0.0, {})


def test_without_a_largest_epsilon_an_owner_takes_part_without_noise_too(tmp_path: Path) -> None:
    """So the epsilon of one run bounds what that run tells, and nothing else; the pages say it."""
    data = tables(300)
    assert refusal(Owners(tmp_path, data, document(epsilon=1.0))) == ""
    assert refusal(Owners(tmp_path, data, document())) == ""
    rules = everybody(SiteRules(largest_epsilon=1.0))
    assert "private runs alone" in refusal(Owners(tmp_path, data, document(), rules))


def test_a_backup_that_is_put_back_does_not_give_the_budget_back(tmp_path: Path) -> None:
    folders = tmp_path / "site", tmp_path / "other disk"
    assert Allowance(folders[0], copies=folders[1:]).charge("run", 0.05, 0.06)
    shutil.rmtree(folders[0])
    again = Allowance(folders[0], copies=folders[1:])
    assert not again.charge("another", 0.05, 0.06)
    assert again.charge("run", 0.05, 0.06)  # the same run is charged once
    assert again.read()[0] == 0.05
    assert Allowance(folders[0]).read()[0] == 0.05  # what was put back has what the other has


@pytest.mark.parametrize("colluders", [0, 1, 2])
def test_an_owner_who_counts_on_fewer_others_is_charged_more(
    colluders: int, tmp_path: Path, quick: None
) -> None:
    """A run counts on the noise of all sites but one; each owner on that of all but these."""
    rules = everybody(SiteRules(colluders=colluders), 4)
    owners = ran(Owners(tmp_path, tables(6000, 4), document(epsilon=3.0), rules))
    assert set(owners.told().values()) == {""}
    total, used = Allowance(owners.folder("anna")).read()
    assert total == pytest.approx(mu_squared_of(3.0, 1e-6) * 3 / (4 - colluders))
    assert next(iter(used.values())).used == pytest.approx(total)


@pytest.mark.parametrize("said", [1e-6, 1e-4])
def test_two_sites_that_cannot_mask_add_all_of_the_noise_themselves(
    said: float, tmp_path: Path
) -> None:
    """Each part is private by itself: whoever likes may look at single ones."""
    data = tables(sites=2)
    rules = everybody(SiteRules(unmasked=True, largest_epsilon=1.2, delta=1e-5), 2)
    program = document(epsilon=1.0, delta=said)
    owners = ran(Owners(tmp_path, data, program, rules, masked=False), 60)
    if said > 1e-5:
        assert "a delta of 1e-05" in refusal(owners)
        return
    assert set(owners.told().values()) == {""}
    result = owners.result()
    near(result, data)
    assert result.privacy["shares"] == 1
    assert "each site added all of the noise by itself" in result.outcome
    assert "Secure sums were off" in protections(result)
    for name in data:
        total, used = Allowance(owners.folder(name)).read()
        assert total == pytest.approx(mu_squared_of(1.0, 1e-6))
        assert next(iter(used.values())).used == pytest.approx(total, rel=1e-6)


def test_a_private_fit_without_masks_is_for_every_owner_to_allow(tmp_path: Path) -> None:
    owners = Owners(tmp_path, tables(300), document(epsilon=1.0), masked=False)
    assert "masked sums alone" in refusal(owners)


def test_a_yes_to_a_private_fit_is_no_yes_to_the_same_fit_without_noise(tmp_path: Path) -> None:
    data = tables(300)
    private = Owners(tmp_path / "m", data, document(epsilon=1))
    plain = Owners(tmp_path / "m", data, document())

    def asked(owners: Owners) -> Any:
        terms = replace(owners.terms("anna"), approve=partial(owners_word, tmp_path))
        return terms.accept(replace(owners.federation.settings, program=owners.program))

    assert asked(private) is None
    (question,) = pending_fits(tmp_path)
    assert "private: epsilon 1, delta 1e-06" in question["words"]
    answer_fit(tmp_path, question["fit"], True)
    assert asked(private) is not None
    assert asked(plain) is None
    (other,) = pending_fits(tmp_path)
    assert "without noise, not private" in other["words"]


def test_between_machines_a_seed_of_noise_is_refused(tmp_path: Path) -> None:
    seeded = Owners(tmp_path, tables(300), document(epsilon=1.0, noise_seed=1))
    assert "every site draws its noise from a secret of its own" in refusal(seeded)
    said = '[model]\nkind = "gaussian-mixture"\nn_components = 2\n'
    for table in ("privacy", "fit"):
        (tmp_path / "run.toml").write_text(f"{said}[{table}]\nnoise_seed = 1\n")
        with pytest.raises(SettingsError, match=rf"\[{table}\]: noise_seed is for fits in one"):
            read_config(tmp_path / "run.toml")


def test_the_owners_page_tells_the_epsilon_that_was_given_away(tmp_path: Path) -> None:
    assert SiteView(tmp_path)()["epsilon"] is None
    Allowance(tmp_path / MEMORY).charge("run", mu_squared_of(0.5, SiteRules().delta), None)
    shown = SiteView(tmp_path)()
    assert shown["epsilon"] == pytest.approx(0.5)
    assert "epsilon 0.5 given away over all runs" in shown["line"]


def mixture(covariance: str, k: Any = 2) -> dict[str, Any]:
    return {"kind": "gaussian-mixture", "n_components": k, "covariance_type": covariance}


@pytest.mark.parametrize(
    ("about", "model", "numbers"),
    [
        (mixture("full"), MODEL, None),
        (mixture("tied", "1:2"), emfed.gaussian_mixture(2, "tied"), "1:2"),
        (mixture("diag"), emfed.gaussian_mixture(2, "diag"), None),
        ({"kind": "ppca", "n_factors": 1}, emfed.ppca(1), None),
    ],
)
def test_members_tell_as_many_bytes_as_a_simulation_counts(
    about: dict[str, Any], model: Any, numbers: Any, tmp_path: Path, quick: None
) -> None:
    data = tables(6000)
    owners = ran(Owners(tmp_path, data, document(about, epsilon=10.0, rounds=2)))
    assert set(owners.told().values()) == {""}
    settings = FitSettings(model, epsilon=10.0, rounds=2, n_components=numbers)
    frames = [pl.DataFrame(rows, schema=list(COLUMNS)) for rows in data.values()]
    alone = private_fit(settings, HeldWorkers(as_workers(frames))).result
    over = owners.result()
    assert over.samples == pytest.approx(alone.samples, abs=60)
    for direction in ("up", "down"):
        assert over.ledger.total(direction) == alone.ledger.total(direction)


# Who leaves.


def entries(owners: Owners) -> list[StatementKind]:
    transcript = owners.federation.network.processes[RELAY].machine.transcript
    return [StatementKind(Entry.decode(data).kind) for data in transcript.entries]


def until_parts(owners: Owners, count: int) -> None:
    """Run until a site has sent so many parts."""
    sent = owners.federation.network.sent

    def enough() -> bool:
        mine = (Post.decode(data).kind for name, data in sent if name == "anna")
        return sum(kind == StatementKind.PART for kind in mine) >= count

    owners.federation.run(100, enough)


def test_nobody_goes_on_without_a_site_whose_noise_counts(tmp_path: Path, quick: None) -> None:
    """Not when it is silent for longer than others wait; when it is back all goes on."""
    owners = Owners(tmp_path, tables(6000, 4), document(epsilon=3.0))
    until_parts(owners, 5)
    network = owners.federation.network
    network.kill("dora")
    network.run(network.now + 1000, owners.federation.over)
    assert StatementKind.CHANGE not in entries(owners)
    assert owners.told() == {}
    network.start("dora")
    network.run(network.now + 100, owners.federation.over)
    assert set(owners.told().values()) == {""}


@pytest.mark.parametrize(("parts", "told"), [(5, "has left a private fit"), (14, "")])
def test_where_a_site_leaves_the_others_keep_what_was_reached(
    parts: int, told: str, tmp_path: Path, quick: None
) -> None:
    """They ask for nothing more: their noise was sized for those who began."""
    owners = Owners(tmp_path, tables(6000, 4), document(epsilon=3.0))
    until_parts(owners, parts)
    before = {n: Allowance(owners.folder(n)).read()[1] for n in NAMES[:4]}
    network = owners.federation.network
    network.follower("dora").order("leave")
    network.run(network.now + 300, lambda: len(owners.told()) == 5 or owners.federation.over())
    owners.federation.over()
    ends = owners.federation.ends
    stayed = (*NAMES[:3], READER)
    if told:
        assert told in ends["anna"].words
        assert not any(end.final for end in ends.values())
    else:
        assert all(ends[name].final for name in stayed)
        assert 0 < ends[READER].result.fitted().result.rounds < 8
    for name in NAMES[:3]:  # an answer that was under way at most
        (now,), (then,) = (
            b.values() for b in (Allowance(owners.folder(name)).read()[1], before[name])
        )
        assert len(now.answers) <= len(then.answers) + 1
