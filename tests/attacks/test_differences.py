"""Two sums that differ by one site or one row tell of it: joins, runs, sets that change."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import emfed
from emfed.core.protocols import WHOLE
from emfed.data.workers import as_workers
from emfed.fitting.session import Session
from emfed.network import LocalTransport, RemoteFederation, Site, SiteRules
from emfed.network.masking import SiteIdentity
from tests.attacks.malicious import Server
from tests.helpers import BARE, OPEN

RNG = np.random.default_rng(11)
TABLES = {name: RNG.normal(size=(40, 2)) * [3.0, 0.2] + RNG.normal(size=2) for name in "abcde"}
MODEL = emfed.gaussian_mixture(1, "full")
KNOWN = SiteIdentity.everybody(TABLES)


def masked(where: Path, tables: Mapping[str, Any], rules: SiteRules) -> dict[str, Site]:
    """Sites whose folders, and what they remember, last over runs."""
    return {
        name: Site(table, where / name, identity=KNOWN[name], rules=rules)
        for name, table in tables.items()
    }


def opened(sites: Mapping[str, Site], masks: bool = True) -> Session:
    federation = RemoteFederation(LocalTransport(dict(sites)), attempts=1, pause=0.0)
    return Session(MODEL, federation, masks=masks)


def total(session: Session) -> tuple[int, Any]:
    """Rows and their sum, as an opening tells them."""
    return session.samples, session.samples * np.asarray(session.summary["mean"])


def isolated(where: Path, rules: SiteRules) -> list[str]:
    """Sites whose mean a server works out that holds one run with all, and one without each."""
    sites = masked(where, TABLES, rules)
    rows, sums = total(opened(sites))
    found = []
    for name in TABLES:
        try:
            fewer = total(opened({k: site for k, site in sites.items() if k != name}))
        except emfed.ParticipationError:
            continue
        mean = (sums - fewer[1]) / (rows - fewer[0])
        if np.allclose(mean, TABLES[name].mean(axis=0), atol=1e-9):
            found.append(name)
    return found


def test_runs_with_and_without_a_site_tell_of_it_as_often_as_its_companions_allow(
    tmp_path: Path,
) -> None:
    """Masks alone do not help; the rule on changes bounds it, and none at all prevents it."""
    assert isolated(tmp_path / "open", OPEN) == list(TABLES)
    assert len(isolated(tmp_path / "default", SiteRules())) == 1
    assert isolated(tmp_path / "none", SiteRules(largest_changes=0)) == []


def test_with_seven_sites_one_change_each_tells_of_two(tmp_path: Path) -> None:
    """Each site has a first company and another: {abc} and {abcd}, {def} and {efg} are enough."""
    tables = {name: RNG.normal(size=(40, 2)) for name in "abcdefg"}
    known, sums = SiteIdentity.everybody(tables), {}
    sites = {n: Site(t, tmp_path / n, identity=known[n]) for n, t in tables.items()}
    for some in ("abc", "def", "abcd", "efg"):
        sums[some] = total(opened({name: sites[name] for name in some}))[1]
    d = sums["abcd"] - sums["abc"]
    g = sums["efg"] - (sums["def"] - d)
    for name, found in (("d", d), ("g", g)):
        np.testing.assert_allclose(found, tables[name].sum(axis=0), atol=1e-6)
    with pytest.raises(emfed.ParticipationError):
        opened({name: sites[name] for name in "abce"})


def test_a_row_whose_weight_changes_is_another_row(tmp_path: Path) -> None:
    """Or one that its owner leaves out by a weight of zero would be told by two joins."""
    weights, found = np.ones(40), []
    for weight in (1.0, 0.0):
        weights[7] = weight
        data = as_workers({"a": TABLES["a"]}, sample_weight={"a": weights})
        federation = RemoteFederation(LocalTransport({"a": Site(data, tmp_path, rules=BARE)}))
        with contextlib.suppress(emfed.ParticipationError):
            federation.open(MODEL)
        found.append("a few of its rows" in federation.refusals.get("a", ""))
    assert found == [False, True]


def patient(where: Path, rules: SiteRules, masks: bool) -> bool:
    """Whether the joins of two runs, between which one patient came, tell that patient's row."""
    known = {name: TABLES[name] for name in "abc"}
    rows, sums = total(opened(masked(where, known, rules), masks))
    row = np.array([[1.5, -0.9]])
    known["a"] = np.concatenate([known["a"], row])
    try:
        after = total(opened(masked(where, known, rules), masks))
    except emfed.ParticipationError:
        return False
    return bool(after[0] - rows == 1 and np.allclose(after[1] - sums, row, atol=1e-6))


def test_one_patient_more_in_a_second_run_is_told_by_neither_join(tmp_path: Path) -> None:
    for masks in (False, True):
        assert patient(tmp_path / f"open {masks}", OPEN, masks)
        assert not patient(tmp_path / f"rules {masks}", BARE, masks)


def test_rows_may_change_by_many_and_a_site_may_join_again(tmp_path: Path) -> None:
    def joins(rows: Any) -> bool:
        federation = RemoteFederation(LocalTransport({"a": Site(rows, tmp_path, rules=BARE)}))
        with contextlib.suppress(emfed.ParticipationError):
            federation.open(MODEL)
        return "a few of its rows" not in federation.refusals.get("a", "")

    rows = TABLES["a"]
    assert joins(rows)
    assert joins(rows[::-1])  # the same rows in another order
    assert not joins(rows[:-9])
    assert not joins(np.concatenate([rows[:-4], rows[-4:] + 1]))  # four went, four came
    assert joins(rows[:-10])


def followed(where: Path, rules: SiteRules) -> list[str]:
    """Sites whose statistics a server reads off a run whose set it changes from round to round.

    It asks at parameters that hardly differ, with everybody and then without one: what was asked
    is never the same twice, so that no rule on repeated questions is met.
    """
    session = opened(masked(where, TABLES, rules))
    model, federation = session.view(WHOLE), session.federation
    params = model.start(0)
    found: list[str] = []

    def asked(shift: float) -> Any:
        moved = params.with_arrays({**params.arrays(), "means": params.means + shift})
        told = session.ask("statistics", WHOLE, moved)
        return model.layout.split(told)["first"]

    everyone = asked(0.0)
    for number, name in enumerate(TABLES):
        federation.leave_out(np.array([number]))
        try:
            others = asked(1e-7 * (number + 1))
        except emfed.ParticipationError:
            continue
        mean = (200 * everyone - 160 * others) / 40 * model.constants.frame.scale
        if np.allclose(mean + model.constants.frame.origin, TABLES[name].mean(axis=0), atol=1e-4):
            found.append(name)
    return found


def test_a_server_that_leaves_out_one_site_after_the_other_meets_the_rule_on_changes(
    tmp_path: Path,
) -> None:
    assert followed(tmp_path / "open", OPEN) == list(TABLES)
    assert len(followed(tmp_path / "default", SiteRules())) <= 1


def test_a_row_that_is_corrected_in_mid_run_ends_the_run_at_that_site(tmp_path: Path) -> None:
    """Two answers at the same parameters, before and after, would differ by that row alone."""
    rows = RNG.normal(size=(40, 2))
    server = Server({"a": Site(rows, tmp_path, rules=BARE)}, emfed.gaussian_mixture(1, "diag"))
    server.question("statistics", server.model.start(0))
    corrected = rows.copy()
    corrected[7] += 1.0
    transport: Any = server.federation._line.transport
    transport.sites["a"] = Site(corrected, tmp_path, rules=BARE)
    with pytest.raises(emfed.ParticipationError, match="data changed since the run began"):
        server.question("statistics", server.model.start(0))
