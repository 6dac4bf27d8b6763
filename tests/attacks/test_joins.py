"""What joins tell, of rows that come and go, under rules that change, and of runs that call
themselves private."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import emfed
from emfed.core.privacy import Privacy, step_for
from emfed.core.protocols import FloatArray
from emfed.models import Categorical, GaussianParameters
from emfed.models.bounded import Asked, from_integers
from emfed.network import LocalTransport, RemoteFederation, Site, SiteRules
from emfed.network.masking import Announcement, RunKeys, SiteIdentity, encode_roster
from emfed.network.sums import FIXED_STEP, to_fixed
from tests.attacks.malicious import Server
from tests.network.masked import masked_sites

RNG = np.random.default_rng(5)
TABLES = {name: RNG.normal(size=(60, 2)) for name in "abc"}
MIXTURE = emfed.gaussian_mixture(2, "diag")
RULES = SiteRules(unmasked=True)


def refused(sites: dict[str, Site], model: Any, private: bool) -> bool:
    """Whether site a does not join a run."""
    federation = RemoteFederation(LocalTransport(sites), attempts=1, pause=0.0, minimum=len(sites))
    try:
        if private:
            federation.open_private(model, None, Privacy(0.01))
        else:
            federation.open(model)
    except emfed.ParticipationError:
        return True
    return False


def test_a_private_join_is_not_refused_for_what_any_row_is(tmp_path: Path) -> None:
    """Without noise a join tells whether one value is missing, or too large to be squared."""
    for number, odd in enumerate((0.0, np.nan, 1e160, -1e300)):
        own = {name: table.copy() for name, table in TABLES.items()}
        own["a"][7, 1] = odd
        told = []
        for private in (False, True):
            where = tmp_path / f"{number} {private}"
            with np.errstate(over="ignore"):
                told.append(refused(masked_sites(own, where, rules=RULES), MIXTURE, private))
        assert told == [odd != 0.0, False]


def test_a_private_join_tells_no_largest_code(tmp_path: Path) -> None:
    """A model of which a join could tell whether rows suit it is refused, whatever the rows are."""
    own = {n: np.column_stack([t[:, 0], np.arange(60) % 6]) for n, t in TABLES.items()}
    sites = masked_sites(own, tmp_path, rules=RULES)
    models = [emfed.mixed_mixture(1, ["gaussian", Categorical(n)]) for n in range(4, 9)]
    assert [refused(sites, model, False) for model in models] == [True, True, False, False, False]
    assert all(refused(sites, model, True) for model in models)


def test_rows_with_a_missing_value_are_left_out_of_private_sums_one_by_one(tmp_path: Path) -> None:
    gaps = {name: np.vstack([t, [np.nan, 1.0]]) for name, t in TABLES.items()}
    sums = [moments(masked_sites(t, tmp_path / str(i)), 1e6) for i, t in enumerate((TABLES, gaps))]
    np.testing.assert_allclose(sums[0], sums[1], atol=0.5)


# Noise by name alone.


def moments(sites: dict[str, Site], epsilon: float) -> FloatArray:
    """Rows and the sum of each column, by the one question of a run that calls itself private."""
    federation = RemoteFederation(LocalTransport(sites), attempts=1, pause=0.0)
    federation.open_private(MIXTURE, None, Privacy(epsilon))
    one = GaussianParameters(np.ones(1), np.zeros((1, 2)), np.eye(2)[None])
    asked = Asked(1.0, 2, None, "full", one, np.zeros(2), np.eye(2), 16.0)
    step = step_for(asked.size, 0.9 * Privacy(epsilon).mu_squared, 2)
    asked = Asked(step, 2, None, "full", one, np.zeros(2), np.eye(2), 16.0)
    found = from_integers(asked, federation.release(asked, "opening", 0))
    told: FloatArray = np.concatenate([np.ravel(v) for v in asked.split(found).values()])[:3]
    return told


@pytest.mark.parametrize("protected", [False, True])
def test_noise_by_name_alone_does_not_hide_a_patient_who_came(
    protected: bool, tmp_path: Path
) -> None:
    """An epsilon of a million is no noise, and such a run is held to the rule on few new rows."""
    patient = np.array([3.0, -2.0])
    rules = SiteRules() if protected else SiteRules(smallest_rows=1)
    later = {**TABLES, "a": np.vstack([TABLES["a"], patient])}
    known = SiteIdentity.everybody(TABLES)

    def at(tables: dict[str, Any]) -> dict[str, Site]:
        return {
            name: Site(table, tmp_path / name, rules=rules, identity=known[name])
            for name, table in tables.items()
        }

    before = moments(at(TABLES), 1e6)
    if protected:
        with pytest.raises(emfed.ParticipationError, match="a few of its rows are others"):
            moments(at(later), 1e6)
        return
    count, *row = moments(at(later), 1e6) - before
    assert count == pytest.approx(1.0, abs=0.1)
    assert row == pytest.approx(patient, abs=0.5)


def test_an_owner_who_said_how_much_epsilon_is_asked_nothing_more(tmp_path: Path) -> None:
    """There the ledger is the bound, and a refusal would tell that a row is new."""
    rules = SiteRules(largest_epsilon=40.0)
    known = SiteIdentity.everybody(TABLES)
    for more in (0, 1):
        later = {**TABLES, "a": np.vstack([TABLES["a"], np.ones((more, 2))])}
        sites = {n: Site(t, tmp_path / n, rules=rules, identity=known[n]) for n, t in later.items()}
        assert moments(sites, 12.0).shape == (3,)


# Tables in turn, and rules that change.


def test_a_row_that_is_new_in_one_of_two_tables_in_turn_is_told_by_no_join(tmp_path: Path) -> None:
    """All tables that were described count: against the last alone, 61 rows would seem new."""
    first, other = TABLES["a"], TABLES["b"]
    longer = np.vstack([first, [[9.0, 9.0]]])
    for rules, last in ((SiteRules(unmasked=True), False), (SiteRules.loosest(), True)):
        where, joined = tmp_path / str(last), []
        for rows in (first, other, longer, first):
            site = Site(rows, where, rules=rules)
            joined.append(not refused({"a": site}, MIXTURE, False))
        assert joined == [True, True, last, True]


def test_runs_that_began_under_looser_rules_are_not_answered_under_stricter_ones(
    tmp_path: Path,
) -> None:
    """Else a server keeps a run open, and what the owner writes later is of no use."""
    rules = [
        SiteRules(largest_epsilon=1.0, unmasked=True),
        SiteRules(),
        SiteRules(unmasked=True, models=["ppca"]),
        SiteRules(unmasked=True, smallest_rows=61),
    ]
    for number, stricter in enumerate(rules):
        where = tmp_path / str(number)
        loose = {n: Site(t, where / n, rules=SiteRules(unmasked=True)) for n, t in TABLES.items()}
        server = Server(loose, MIXTURE)
        server.begin(emfed.EM())
        statistics = server.model.statistics_of(server.model.start(0))
        assert set(server.ask(statistics)) == set(TABLES)
        transport: Any = server.federation._line.transport
        transport.sites = {n: Site(t, where / n, rules=stricter) for n, t in TABLES.items()}
        assert server.ask(statistics) == {}


# Sites that are not there.


def test_sites_that_are_not_there_make_no_hidden_number_smaller() -> None:
    """What has no room in a sum is hidden by a random number that leaves room for all sites: with
    enough names in the roster it would be small, and the sum would be the last site's."""
    known = SiteIdentity.everybody("abc")
    entries = {
        n: RunKeys(known[name], bytes(32), 7, n).announcement for n, name in enumerate("abc")
    }
    crowd = {n: Announcement(f"x{n}", n, bytes(32), bytes(96)) for n in range(3, 20_000)}
    keys = RunKeys(known["a"], bytes(32), 7, 0)
    keys.learn(encode_roster({**entries, **crowd}))
    value, away = -9e5, {}
    for sites in (len(keys.names), keys.sites):
        # A server that claims 40 rows in all has no room for sites of 5,000 and of 4,000.
        told = [to_fixed(np.array([value]), n / 40, sites)[0] for n in (5000, 4000, 30)]
        found = float(sum(told)[0]) * FIXED_STEP
        middle = 2 * -0.75 * 2.0**62 * FIXED_STEP / sites  # what two hidden numbers come to, about
        away[sites] = abs((found - middle) / 0.75 - value)
    assert away[len(keys.names)] < 0.05 * abs(value)
    assert keys.sites == 3
    assert away[3] > 0.05 * abs(value)
