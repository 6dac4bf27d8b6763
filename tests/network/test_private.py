"""Private runs over sites: what they tell, what they refuse, and what they write down first."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import emfed
from emfed.artifacts.disclosure import protections
from emfed.core.errors import ParticipationError, SettingsError
from emfed.core.privacy import Privacy, mu_squared_of, step_for
from emfed.data.workers import as_workers
from emfed.deployment.approval import answer_fit, check_approved, pending_fits
from emfed.deployment.config import read_config
from emfed.deployment.site import MEMORY
from emfed.deployment.views import SiteView
from emfed.fitting.driver import run_fit
from emfed.fitting.settings import FitSettings
from emfed.models.bounded import Asked
from emfed.network import LocalTransport, RemoteFederation, Site, SiteRules, StackedFederation
from emfed.network.masking import SiteIdentity
from emfed.network.spending import Allowance
from emfed.network.sums import SiteSums
from tests.helpers import OPEN
from tests.network.masked import masked_sites
from tests.network.processes import real_sites


def tables(rows: int = 30_000, sites: int = 3) -> dict[str, np.ndarray]:
    rng = np.random.Generator(np.random.Philox(1))
    parts = [rng.normal(size=(rows // 2, 2)) + centre for centre in ([0.0, 100.0], [8.0, 104.0])]
    mixed = rng.permutation(np.concatenate(parts))
    return dict(zip("abcde", np.array_split(mixed, sites), strict=False))


MODEL = emfed.gaussian_mixture(2, "full")


def run(sites: dict[str, Any], epsilon: float = 1.0, **options: Any) -> emfed.Result:
    federation = RemoteFederation(LocalTransport(sites), pause=0.0, attempts=2)
    return emfed.fit(MODEL, federation, epsilon=epsilon, **options)


def spent(where: Path, name: str = "a") -> float:
    return Allowance(where / name).read()[0]


def test_a_private_run_ends_near_the_pooled_fit_and_charges_its_budget_once(tmp_path: Path) -> None:
    data = tables()
    sites = masked_sites(data, tmp_path, rules=SiteRules(largest_epsilon=1.2))
    result = run(sites)
    rows = np.concatenate(list(data.values()))
    pooled = emfed.fit(MODEL, rows).log_likelihood(rows)
    assert result.log_likelihood(rows) > pooled - 0.05
    assert result.privacy is not None
    assert result.privacy["epsilon"] == pytest.approx(1.0)
    assert result.privacy["private"] is True
    assert result.privacy["noise"] == "each site's secret"
    assert "epsilon 1" in result.outcome
    for name in data:
        total, used = Allowance(tmp_path / name).read()
        assert total == pytest.approx(mu_squared_of(1.0, 1e-6))
        assert next(iter(used.values())).used <= total * (1 + 1e-6)
    # The budget is over: a second run is refused, also by a site that was started anew.
    again = masked_sites(data, tmp_path, rules=SiteRules(largest_epsilon=1.2))
    with pytest.raises(ParticipationError, match="gives away epsilon 1.2 over all runs"):
        run(again)
    assert spent(tmp_path) == pytest.approx(mu_squared_of(1.0, 1e-6))


def test_a_site_with_a_largest_epsilon_answers_private_runs_alone(tmp_path: Path) -> None:
    sites = masked_sites(tables(), tmp_path, rules=SiteRules(largest_epsilon=1.0))
    federation = RemoteFederation(LocalTransport(sites), pause=0.0, attempts=2)
    with pytest.raises(ParticipationError, match="private runs alone"):
        emfed.fit(MODEL, federation, masks=True)
    assert spent(tmp_path) == 0.0


def test_without_a_largest_epsilon_a_site_answers_a_run_without_noise_too(tmp_path: Path) -> None:
    """So the epsilon of a run protects from no server that lies; the pages say it."""
    sites = masked_sites(tables(), tmp_path, rules=SiteRules())
    assert run(sites).privacy is not None
    federation = RemoteFederation(LocalTransport(sites), pause=0.0, attempts=2)
    assert emfed.fit(MODEL, federation, masks=True, rounds=2, tol=0).privacy is None


def test_a_server_that_asks_for_more_than_the_run_declared_gets_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Less noise than it promised, or more questions: the site adds up by itself."""
    monkeypatch.setattr("emfed.fitting.private.START_ROUNDS", 1)
    monkeypatch.setitem(emfed.fitting.private.SHARES, "moments", 4.0)
    sites = masked_sites(tables(), tmp_path)
    with pytest.raises(ParticipationError):
        run(sites)
    total, used = Allowance(tmp_path / "a").read()
    assert max(own.used for own in used.values()) <= total


def test_a_private_run_refuses_every_answer_without_noise(tmp_path: Path) -> None:
    sites = masked_sites(tables(), tmp_path)
    federation = RemoteFederation(LocalTransport(sites), pause=0.0, attempts=2)
    privacy = emfed.core.privacy.Privacy(1.0)
    federation.open_private(MODEL, None, privacy)
    with pytest.raises(ParticipationError):
        federation._add_up_opening(federation.members)
    assert all("has noise" in words for words in federation.refusals.values())


def test_a_backup_that_is_put_back_does_not_give_the_budget_back(tmp_path: Path) -> None:
    folders = tmp_path / "site", tmp_path / "other disk"
    assert Allowance(folders[0], copies=folders[1:]).charge("run", 0.05, 0.06)
    shutil.rmtree(folders[0])
    again = Allowance(folders[0], copies=folders[1:])
    assert not again.charge("another", 0.05, 0.06)
    assert again.charge("run", 0.05, 0.06)  # the same run is charged once
    assert again.read()[0] == 0.05


def test_a_run_that_goes_on_from_its_answers_asks_none_of_them_again(tmp_path: Path) -> None:
    sites = masked_sites(tables(), tmp_path)
    kept, seen = tmp_path / "answers", []

    def stop(record: Any) -> bool:
        seen.append(record.round)
        return len(seen) == 3

    federation = RemoteFederation(LocalTransport(sites), tmp_path / "server", pause=0.0)
    emfed.fit(MODEL, federation, epsilon=1.0, callbacks=[stop], checkpoint=kept)
    federation = RemoteFederation(LocalTransport(sites), tmp_path / "server", pause=0.0)
    result = emfed.fit(MODEL, federation, epsilon=1.0, checkpoint=kept, resume=True)
    assert result.rounds == 8
    runs = Allowance(tmp_path / "a").read()[1]
    used = sum(own.used for own in runs.values())
    assert used == pytest.approx(mu_squared_of(1.0, 1e-6), rel=1e-6)


def test_an_answer_that_is_given_again_bit_for_bit_is_charged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A site is killed between its ledger and its answer; then the server loses all answers."""
    monkeypatch.setattr("emfed.fitting.private.SKETCH_ROWS", 300)
    data, kill, before = tables(6000), [4, 9, 13], SiteSums.ready

    def ready(self: SiteSums, *given: Any) -> int:
        kill[:] = [left - 1 for left in kill]
        if 0 in kill:
            raise OSError("killed")
        return before(self, *given)

    def once() -> emfed.Result:
        rules = SiteRules(largest_epsilon=3.0)
        sites = {n: Site(t, tmp_path / n, identity=known[n], rules=rules) for n, t in data.items()}
        federation = RemoteFederation(LocalTransport(sites), tmp_path / "server", pause=0.0)
        return emfed.fit(MODEL, federation, epsilon=3.0, rounds=2)

    known = SiteIdentity.everybody(data)
    monkeypatch.setattr(SiteSums, "ready", ready)
    first = once()
    assert max(kill) <= 0
    spent = [Allowance(tmp_path / name).read() for name in data]
    again = once()
    assert [Allowance(tmp_path / name).read() for name in data] == spent
    for name, array in first.params.arrays().items():
        np.testing.assert_array_equal(again.params.arrays()[name], array)
    for total, runs in spent:
        ((budget, used, answers),) = runs.values()
        assert total == budget
        assert len(answers) == 14  # 2 of columns, moments, 8 of the start, comparison, 2 rounds
        assert used <= budget


def test_other_rows_have_no_answer_in_a_run_that_began_without_them(tmp_path: Path) -> None:
    """The difference of two answers with the same noise would tell the rows that changed."""
    data, known = tables(300), SiteIdentity.everybody("abc")

    def opened() -> RemoteFederation:
        sites = {n: Site(t, tmp_path / n, identity=known[n], rules=OPEN) for n, t in data.items()}
        made = RemoteFederation(LocalTransport(sites), tmp_path / "server", pause=0.0, attempts=2)
        made.open_private(MODEL, None, Privacy(3.0))
        return made

    def answers() -> int:
        (run,) = Allowance(tmp_path / "a").read()[1].values()
        return len(run.answers)

    def asked(edge: float) -> Asked:
        return Asked(step_for(4, 0.01, 2), 2, np.array([[0.0, edge, 9.0]] * 2))

    federation = opened()
    told = [federation.release(asked(edge), "round", 0) for edge in (1.0, 2.0, 1.0)]
    assert answers() == 2
    np.testing.assert_array_equal(told[0], told[2])
    data["a"] = data["a"] + 1.0
    with pytest.raises(ParticipationError, match="data changed since the run began"):
        opened().release(asked(2.0), "round", 0)
    assert answers() == 2


def test_a_site_that_forgot_a_run_answers_it_with_other_noise_and_charges_it(
    tmp_path: Path,
) -> None:
    """It forgot for which sets it answered, too: the same noise in two sums would be taken off."""
    data, known = tables(300), SiteIdentity.everybody("abc")
    asked = Asked(step_for(4, 0.01, 2), 2, np.array([[0.0, 1.0, 9.0]] * 2))
    told, used = [], []
    for _ in range(2):
        sites = {n: Site(t, tmp_path / n, identity=known[n], rules=OPEN) for n, t in data.items()}
        made = RemoteFederation(LocalTransport(sites), tmp_path / "server", pause=0.0, attempts=2)
        made.open_private(MODEL, None, Privacy(3.0))
        told.append(made.release(asked, "round", 0))
        (run,) = Allowance(tmp_path / "a").read()[1].values()
        used.append(run.used)
        for name in data:  # as after eight other runs
            for folder in (tmp_path / name).glob("[0-9a-f]" * 16):
                shutil.rmtree(folder)
    assert (told[0] != told[1]).any()
    assert used[1] == pytest.approx(2 * used[0])


def test_a_private_run_does_not_say_that_a_few_rows_are_new(tmp_path: Path) -> None:
    """Noise covers them; a refusal would tell for certain that somebody came or went."""
    data, known = tables(300), SiteIdentity.everybody("abc")
    for _ in range(2):
        sites = {n: Site(t, tmp_path / n, identity=known[n]) for n, t in data.items()}
        made = RemoteFederation(LocalTransport(sites), pause=0.0, attempts=2)
        made.open_private(MODEL, None, Privacy(3.0))
        data["a"] = data["a"][1:]


ALONE = SiteRules(unmasked=True, largest_epsilon=1.2)


def test_two_sites_that_cannot_mask_add_all_of_the_noise_themselves(tmp_path: Path) -> None:
    """Each answer is private by itself: the server may look at single ones as long as it likes."""
    data = tables(sites=2)
    sites = {name: Site(table, tmp_path / name, rules=ALONE) for name, table in data.items()}
    result = run(sites)
    rows = np.concatenate(list(data.values()))
    assert result.log_likelihood(rows) > emfed.fit(MODEL, rows).log_likelihood(rows) - 0.05
    assert result.privacy is not None
    assert result.privacy["shares"] == 1
    assert "each site added all of the noise by itself" in result.outcome
    assert "Secure sums were off" in protections(result)
    for name in data:
        total, used = Allowance(tmp_path / name).read()
        assert total == pytest.approx(mu_squared_of(1.0, 1e-6))
        assert next(iter(used.values())).used == pytest.approx(total, rel=1e-6)
    again = {name: Site(table, tmp_path / name, rules=ALONE) for name, table in data.items()}
    with pytest.raises(ParticipationError, match="gives away epsilon 1.2 over all runs"):
        run(again)


def test_a_private_run_without_masks_is_for_every_owner_to_allow(tmp_path: Path) -> None:
    sites = masked_sites(tables(3000), tmp_path, rules=SiteRules())
    with pytest.raises(ParticipationError, match="own statistics, with noise"):
        run(sites, masks=False)
    assert spent(tmp_path) == 0.0


@pytest.mark.parametrize("lie", ["shares", "count"])
def test_without_masks_a_site_counts_on_no_noise_but_its_own(lie: str, tmp_path: Path) -> None:
    """An answer that claims others' noise would cost less than it tells; and no row is counted."""
    data, seen = tables(300, sites=2), list[bytes]()
    sites = {name: Site(t, tmp_path / name, rules=ALONE) for name, t in data.items()}

    class Listening(LocalTransport):
        def deliver(self, messages: Any, deadline: float) -> Any:
            for key, answer in super().deliver(messages, deadline):
                seen.append(answer)
                yield key, answer

    federation = RemoteFederation(Listening(sites), pause=0.0, attempts=1)
    federation.open_private(MODEL, None, Privacy(1.0))
    if lie == "count":
        assert (federation.members.counts == 1).all()
        assert federation.members.values.size == 0
        return
    asked = Asked(step_for(4, 0.01, 2), 2, np.array([[0.0, 1.0, 9.0]] * 2))
    with pytest.raises(ParticipationError, match="0 of 2 sites answered"):
        federation.release(asked, "round", 0)
    (own,) = Allowance(tmp_path / "a").read()[1].values()
    assert own.used == 0.0


def test_a_private_run_over_real_processes(tmp_path: Path) -> None:
    data = tables()
    with real_sites(data, tmp_path, masked=True) as transport:
        federation = RemoteFederation(transport, deadline=60.0)
        result = emfed.fit(MODEL, federation, epsilon=1.0)
    rows = np.concatenate(list(data.values()))
    assert result.log_likelihood(rows) > emfed.fit(MODEL, rows).log_likelihood(rows) - 0.05


def test_a_yes_to_a_private_fit_is_no_yes_to_the_same_fit_without_noise(tmp_path: Path) -> None:
    sites = masked_sites(tables(3000), tmp_path / "memory")
    sites["a"].approve = partial(check_approved, tmp_path)
    impatient = RemoteFederation(LocalTransport(sites), pause=0.0, attempts=2)
    with pytest.raises(ParticipationError, match="2 workers joined"):
        emfed.fit(MODEL, impatient, epsilon=1.0)
    (asked,) = pending_fits(tmp_path)
    assert "private: epsilon 1, delta 1e-06" in asked["words"]
    answer_fit(tmp_path, asked["fit"], True)
    plain = RemoteFederation(LocalTransport(sites), pause=0.0, attempts=2, minimum=3)
    with pytest.raises(ParticipationError, match="2 workers joined"):
        emfed.fit(MODEL, plain)
    (other,) = pending_fits(tmp_path)
    assert "without noise, not private" in other["words"]


def test_between_machines_a_seed_of_noise_is_refused(tmp_path: Path) -> None:
    sites = masked_sites(tables(300), tmp_path)
    with pytest.raises(SettingsError, match="every site draws its noise from a secret of its own"):
        run(sites, noise_seed=1)
    assert spent(tmp_path) == 0.0
    said = '[model]\nkind = "gaussian-mixture"\nn_components = 2\n'
    for table in ("privacy", "fit"):
        (tmp_path / "run.toml").write_text(f"{said}[{table}]\nnoise_seed = 1\n")
        with pytest.raises(SettingsError, match=rf"\[{table}\]: noise_seed is for fits in one"):
            read_config(tmp_path / "run.toml")


def test_the_owners_page_tells_the_epsilon_that_was_given_away(tmp_path: Path) -> None:
    assert SiteView(tmp_path)()["epsilon"] is None
    Allowance(tmp_path / MEMORY).charge("run", mu_squared_of(0.5, SiteRules.delta), None)
    shown = SiteView(tmp_path)()
    assert shown["epsilon"] == pytest.approx(0.5)
    assert "epsilon 0.5 given away over all runs" in shown["line"]


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (MODEL, {}),
        (MODEL, {"masks": False}),
        (emfed.gaussian_mixture(2, "tied"), {"n_components": "1:2"}),
        (emfed.gaussian_mixture(2, "diag"), {}),
        (emfed.ppca(1), {}),
    ],
)
def test_a_simulation_prices_a_private_run_as_the_network_does(
    model: Any, words: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("emfed.fitting.private.SKETCH_ROWS", 1000)
    monkeypatch.setattr("emfed.fitting.private.START_ROUNDS", 4)
    data, settings = tables(6000), FitSettings(model, epsilon=10.0, rounds=2, **words)
    sites = masked_sites(data, tmp_path, rules=OPEN)
    federation = RemoteFederation(LocalTransport(sites), pause=0.0)
    simulated = StackedFederation(as_workers(data))
    over, alone = (run_fit(settings, where).result for where in (federation, simulated))
    np.testing.assert_array_equal(over.ledger.counts, alone.ledger.counts)
