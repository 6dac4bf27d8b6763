"""Attacks on the noise of members that follow a private fit: whatever is repeated, put back, copied
or forked, an answer has the noise that it had, or is another one and is charged.

The relay lies where it likes, and the analyst helps it: it reads every sum.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from emfed.aggregation.privacy import SiteNoise, WithoutNoise
from emfed.core.errors import FederationError, SettingsError
from emfed.core.noise import NoiseKey
from emfed.core.privacy import DEVIATION
from emfed.core.sums import FloatArray
from emfed.data import as_workers
from emfed.data.summing import HeldRows
from emfed.fitting.private import PrivateAsk
from emfed.models.bounded import Asked
from emfed.network.exchange.followed import PassPlace
from emfed.network.exchange.records import MemoryRecords
from emfed.network.exchange.virtual import RELAY
from emfed.network.owner_rules import SiteRules
from emfed.network.spending import Allowance, noise_key
from tests.network.attacker import Attacker, last_sum, until_sums
from tests.network.exchanges import NAMES, READER
from tests.network.owners import Owners, document

SITES = NAMES[:3]
RNG = np.random.default_rng(3)
TABLES = {name: RNG.normal(size=(1500, 2)) + np.array([0.0, 100.0]) for name in SITES}
ONE = {"kind": "gaussian-mixture", "n_components": 1}
PRIVATE = document(ONE, epsilon=6.0, rounds=2)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """What members make of sums tells nothing more, so it may be quick."""
    monkeypatch.setattr("emfed.fitting.private.SKETCH_ROWS", 300)
    monkeypatch.setattr("emfed.fitting.private.START_ROUNDS", 2)


def begun(where: Path, **options: Any) -> Owners:
    return Owners(where, TABLES, PRIVATE, **options)


def answers(owners: Owners) -> dict[str, tuple[float, tuple[str, ...]]]:
    """What each ledger says was told: mu squared, and the names of the answers."""
    found = {}
    for name in SITES:
        total, runs = Allowance(owners.folder(name)).read()
        (own,) = runs.values()
        assert own.used <= own.budget * (1 + 1e-9)
        assert total == own.budget
        found[name] = (own.used, own.answers)
    return found


def check_answers(owners: Owners) -> None:
    """A site's parts for one exchange are one part, and each is in its ledger."""
    for name, (_, names) in answers(owners).items():
        parts = set(owners.federation.made[name])
        assert len({exchange for exchange, _ in parts}) == len(parts)
        assert len(parts) <= len(names)


def final(owners: Owners) -> bytes:
    assert set(owners.told().values()) == {""}
    return bytes(owners.result().statistics.tobytes())


def until_given(owners: Owners, count: int, name: str = "bert") -> None:
    """Run until a site has made so many parts."""
    made = owners.federation.made[name]
    owners.federation.run(200, lambda: len(made) >= count)
    assert len(made) == count


# What is done again.


@pytest.mark.parametrize("seed", range(8))
def test_kills_and_lost_disks_give_no_second_noise(seed: int, tmp_path: Path) -> None:
    """The same model comes out to the last bit, and nothing is charged twice."""
    quiet = begun(tmp_path / "quiet")
    quiet.federation.run(600)
    shutil.copytree(tmp_path / "quiet", tmp_path / "noisy")
    for name in SITES:
        shutil.rmtree(tmp_path / "noisy" / name)
    noisy, rng = begun(tmp_path / "noisy"), random.Random(seed)
    network = noisy.federation.network

    def strike(who: str) -> None:
        network.kill(who)
        disk = rng.choice([None, None, MemoryRecords()])
        network.at(network.now + rng.choice([0.05, 1.0, 30.0]), partial(network.start, who, disk))

    for _ in range(4):
        network.at(rng.random() * 0.8, partial(strike, rng.choice([*SITES, READER])))
    noisy.federation.run(600)
    assert final(noisy) == final(quiet)
    assert answers(noisy) == answers(quiet)
    check_answers(noisy)


def test_a_run_of_which_all_lists_are_lost_has_its_noise_again(tmp_path: Path) -> None:
    """Relay and members forget everything but keys and ledgers, half way and at the end."""
    owners = begun(tmp_path)
    until_given(owners, 4)
    for _ in range(2):
        again = begun(tmp_path)
        again.federation.run(600)
        ended = final(again)
        told = answers(again)
    third = begun(tmp_path)
    third.federation.run(600)
    assert final(third) == ended
    assert answers(third) == told
    for name in SITES:
        assert set(owners.federation.made[name]) <= set(third.federation.made[name])


def test_a_relay_that_loses_a_sum_gets_the_same_one(tmp_path: Path) -> None:
    """Whole sums are exact under masks: what is asked next is the same, too, and costs nothing."""
    owners = begun(tmp_path, options={"wait": 10.0})
    machine = Attacker()
    machine.start(owners.federation)
    until_sums(machine, 3)
    machine.fork(0, len(machine.branches[0].transcript) - last_sum(machine.branches[0]))
    machine.disks[READER] = MemoryRecords()
    machine.crash(READER)
    for _ in range(60):
        machine.run_all(1, 100)
    members = [own[0] for own in machine.members.values()]
    assert [one._dropped for one in members] == [1, 1, 1, 0]
    assert all(one.ended is not None and one.ended.final for one in members)
    assert len({one.result.digest for one in members}) == 1
    check_answers(owners)


def replayed(seed: int) -> Callable[[str, str, bytes], list[tuple[float, bytes]]]:
    """Messages come late, twice, out of order, and old ones again."""
    rng, known = random.Random(seed), dict[str, list[bytes]]()

    def fate(sender: str, receiver: str, data: bytes) -> list[tuple[float, bytes]]:
        before = known.setdefault(f"{sender}>{receiver}", [])
        old = [rng.choice(before[-8:]) for _ in range(rng.randrange(3)) if before]
        before.append(data)
        found = [data, *old] * rng.choice([1, 1, 2])
        return [(0.01 + rng.random() * rng.choice([0.0, 3.0]), one) for one in found]

    return fate


@pytest.mark.parametrize("seed", range(4))
def test_a_relay_that_replays_and_reorders_gets_nothing_more(seed: int, tmp_path: Path) -> None:
    quiet = begun(tmp_path)
    quiet.federation.run(600)
    before = answers(quiet)
    noisy = begun(tmp_path)
    noisy.federation.network.fate = replayed(seed)
    noisy.federation.run(3000)
    assert final(noisy) == final(quiet)
    assert answers(noisy) == before
    check_answers(noisy)


def test_a_second_process_with_the_same_key_adds_the_same_noise(tmp_path: Path) -> None:
    owners = begun(tmp_path)
    network = owners.federation.network

    def copy() -> None:
        network.copy("bert")

    for when in (0.15, 0.3, 0.45):
        network.at(when, copy)
    owners.federation.run(60)
    check_answers(owners)
    assert len(owners.federation.made["bert"]) > 3


# What is put back.


def restarted(owners: Owners, change: Callable[[], Any]) -> str:
    """Kill a site, change what it has, start it; why it ends, or no words if it goes on."""
    network, federation = owners.federation.network, owners.federation
    network.kill("bert")
    change()

    def reached() -> int:
        return max(exchange for made in federation.made.values() for exchange, _ in made)

    before = reached()
    network.start("bert")
    network.run(network.now + 300, lambda: "bert" in owners.told() or federation.over())
    federation.over()
    words = owners.told().get("bert", "")
    if words:  # nobody goes on without it
        assert reached() <= before + 1
        assert not any(end.final for end in federation.ends.values())
    return words


def test_an_older_ledger_is_refused_by_name_and_nobody_goes_on(tmp_path: Path) -> None:
    """What its last process said is older than that of the one before."""
    assert "bert has another key of noise, or another or an older ledger" in put_back(
        tmp_path, started=True
    )


def test_a_ledger_that_is_older_than_the_fit_is_refused_at_its_own_site(tmp_path: Path) -> None:
    """Others were told of an even older one; the list says how often this site has answered."""
    assert "the ledger of what this site's rows have told is older" in put_back(
        tmp_path, started=False
    )


def put_back(where: Path, started: bool) -> str:
    """Why a site ends that is given a backup of its folder in mid-fit."""
    owners, backup = begun(where), where / "backup"
    until_given(owners, 3)
    shutil.copytree(owners.folder("bert"), backup)
    network, given = owners.federation.network, owners.federation.made["bert"]
    network.run(100, lambda: len(given) >= 5)
    if started:
        network.kill("bert")
        network.start("bert")
        network.run(100, lambda: len(given) >= 6)

    def replace_folder() -> None:
        shutil.rmtree(owners.folder("bert"))
        shutil.copytree(backup, owners.folder("bert"))

    return restarted(owners, replace_folder)


def test_the_newest_ledger_counts_where_one_folder_is_put_back(tmp_path: Path) -> None:
    rules = dict.fromkeys(SITES, SiteRules())
    rules["bert"] = SiteRules(second_ledger=str(tmp_path / "another disk"))
    owners = begun(tmp_path / "sites", rules=rules)
    until_given(owners, 5)
    assert restarted(owners, lambda: shutil.rmtree(owners.folder("bert"))) == ""
    owners.federation.network.run(600, owners.federation.over)
    final(owners)
    check_answers(owners)


@pytest.mark.parametrize("lost", ["key", "ledger"])
def test_a_site_without_its_key_or_ledger_is_a_new_site(lost: str, tmp_path: Path) -> None:
    owners = begun(tmp_path)
    until_given(owners, 4)

    def lose() -> None:
        if lost == "key":
            (tmp_path / "bert.noise").unlink()
        else:
            shutil.rmtree(owners.folder("bert"))

    assert "another key of noise" in restarted(owners, lose)
    check = set(owners.federation.made["bert"])
    assert len({exchange for exchange, _ in check}) == len(check)


def test_other_rows_get_no_answer_in_a_fit_that_began_without_them(tmp_path: Path) -> None:
    """Two answers with the same noise would differ by what changed; even from an empty list."""
    tables = {name: rows.copy() for name, rows in TABLES.items()}
    owners = Owners(tmp_path, tables, PRIVATE)
    until_given(owners, 4)
    told = answers(owners)
    tables["bert"][7] += 1.0
    assert "other rows" in restarted(owners, lambda: None)
    assert answers(owners)["bert"] == told["bert"]
    # All lists are lost: the same run begins anew, with other noise, within the same budget.
    again = Owners(tmp_path, tables, PRIVATE)
    again.federation.run(100)
    used, names = answers(again)["bert"]
    assert set(names) > set(told["bert"][1])
    assert any("budget" in words for words in again.told().values())
    assert used <= Allowance(again.folder("bert")).read()[0] * (1 + 1e-9)
    for (_, one), (_, other) in zip(
        sorted(owners.federation.made["bert"]),
        sorted(again.federation.made["bert"]),
        strict=False,
    ):
        mine, theirs = (np.frombuffer(part[:-16]) for part in (one, other))
        if len(mine) == len(theirs):
            assert (mine != theirs).mean() > 0.99


def test_another_run_of_the_same_settings_has_other_noise_and_is_charged(tmp_path: Path) -> None:
    one, two = (begun(tmp_path, run=run) for run in ("first", "second"))
    one.federation.run(600)
    two.federation.run(600)
    assert final(one) != final(two)
    total, runs = Allowance(two.folder("anna")).read()
    assert total == pytest.approx(sum(own.budget for own in runs.values()))
    assert len(runs) == 2
    first, second = (
        np.frombuffer(dict(owners.federation.made["anna"])[0][:-16]) for owners in (one, two)
    )
    assert (first != second).mean() > 0.99


# The key.


def test_the_key_is_its_owners_alone_and_in_no_folder_of_runs(tmp_path: Path) -> None:
    owners = begun(tmp_path)
    owners.federation.run(600)
    path = tmp_path / "anna.noise"
    assert path.stat().st_mode & 0o077 == 0
    key = bytes.fromhex(path.read_text())
    seen = b"".join(data for _, data in owners.federation.network.sent)
    entries = owners.federation.network.processes[RELAY].machine.transcript.entries
    kept = [file.read_bytes() for file in owners.folder("anna").rglob("*") if file.is_file()]
    assert kept
    for found in (seen, b"".join(entries), *kept):
        assert key not in found
        assert key.hex().encode() not in found


def test_a_damaged_key_is_an_error_and_no_new_key(tmp_path: Path) -> None:
    path = tmp_path / "anna.noise"
    noise_key(path)
    for damaged in ("", "zz" * 32, "00" * 31):
        path.write_text(damaged)
        with pytest.raises(SettingsError, match="damaged"):
            noise_key(path)


# The noise.


PLACE = PassPlace(b"s" * 32, b"r" * 32, SITES, 3, True)


def asking(number: int = 0, **more: Any) -> PrivateAsk:
    asked = Asked(0.5**30, 2, np.array([[-1.0, 0.0, 1.0]] * 2))
    return PrivateAsk(replace(asked, **more), "round", number)


def noise(key: NoiseKey, place: PassPlace = PLACE, ask: PrivateAsk | None = None) -> FloatArray:
    ask = asking() if ask is None else ask
    rows = HeldRows(as_workers([TABLES["anna"]]))
    told = SiteNoise(rows, key, place.digest(), lambda cost, name: True).noisy(ask)
    return np.asarray(told - WithoutNoise(ask).part(rows))


def test_noise_is_a_function_of_all_that_an_answer_depends_on_and_of_nothing_else() -> None:
    key = NoiseKey.of(bytes(32))
    first = noise(key)
    same = [replace(PLACE, masked=False), replace(PLACE, weight=7.0), replace(PLACE)]
    for place in same:
        assert (noise(key, place) == first).all()
    others = {
        "key": noise(NoiseKey.of(b"1" * 32)),
        "settings": noise(key, replace(PLACE, settings=b"t" * 32)),
        "rows": noise(key, replace(PLACE, rows=b"q" * 32)),
        "set": noise(key, replace(PLACE, members=NAMES[:4])),
        "exchange": noise(key, replace(PLACE, exchange=4)),
        "scale": noise(key, ask=asking(step=0.5**31)),
        "shares": noise(key, ask=asking(shares=1)),
        "place": noise(key, ask=asking(edges=np.array([[-1.0, 0.5, 1.0]] * 2))),
    }
    for name, other in others.items():
        assert not (other == first).any(), name


def test_names_of_sites_and_digests_do_not_run_into_each_other() -> None:
    places = [
        PLACE,
        replace(PLACE, members=("annabert", "cleo")),
        replace(PLACE, members=("anna", "bertcleo")),
        replace(PLACE, settings=b"s" * 31, rows=b"s" + b"r" * 32),
    ]
    assert len({place.digest() for place in places}) == 4


def test_an_answer_is_charged_before_it_is_worked_out() -> None:
    done: list[str] = []

    class Rows:
        total, count, squares = 0.0, 0, 0.0

        def sum(self, mean: Any, ragged: bool = False) -> FloatArray:
            raise AssertionError

        def blocks(self) -> Iterator[Iterator[FloatArray]]:
            done.append("rows")
            yield iter([TABLES["anna"]])

    def charge(cost: float, name: str) -> bool:
        done.append("charge")
        return len(done) < 3

    layer = SiteNoise(Rows(), NoiseKey(), PLACE.digest(), charge)
    layer.noisy(asking())
    with pytest.raises(FederationError, match="used up"):
        layer.noisy(asking(1))
    assert done == ["charge", "rows", "charge"]
    with pytest.raises(FederationError, match="every answer in it has noise"):
        layer.sum(lambda block, weights: block)


@pytest.mark.parametrize("masked", [True, False])
def test_the_noise_in_a_sum_is_that_of_all_sites(masked: bool, tmp_path: Path) -> None:
    """Independent, normal, of three times the variance of one draw; to the last unit whole."""
    for number, name in enumerate(SITES):  # other keys than the system's: it is the same each time
        (tmp_path / f"{name}.noise").write_text((bytes([number]) * 32).hex())
    rules = dict.fromkeys(SITES, SiteRules(unmasked=True))
    owners = begun(tmp_path, masked=masked, rules=rules)
    owners.federation.run(600)
    final(owners)
    rows = [HeldRows(as_workers([table])) for table in TABLES.values()]
    noises = []
    for ask, told in owners.sums:
        assert isinstance(ask, PrivateAsk)
        exact = np.sum([WithoutNoise(ask).part(own) for own in rows], axis=0)
        noises.append(told.value - exact)
    found = np.concatenate(noises)
    assert len(found) > 400
    assert np.abs(found - np.rint(found)).max() < 0.01
    scaled = found / (DEVIATION * np.sqrt(3))
    low, high = stats.chi2.ppf([1e-3, 1 - 1e-3], len(scaled)) / len(scaled)
    assert low < (scaled**2).mean() < high
    assert stats.kstest(scaled, "norm").pvalue > 1e-3
    of_two = found / (DEVIATION * np.sqrt(2))  # were the share of one site missing, it would show
    assert (of_two**2).mean() > high
