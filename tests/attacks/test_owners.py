"""What an analyst, with the relay on its side, gets of a site through what the owner accepts.

The analyst begins as many fits as it likes, of any settings; a site's only answers are to refuse,
or to follow. Sums themselves are in `tests/attacks/test_lying_relay.py`.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import polars as pl
import pytest

from emfed.core.errors import EmfedError
from emfed.data import WorkerData, as_workers
from emfed.data.tables import Workers
from emfed.deployment.consent import DOCUMENT, OfferedRows, OwnerTerms
from emfed.network.exchange.statements import Agreement, Entry, SignedOrder, StatementKind
from emfed.network.exchange.virtual import RELAY
from emfed.network.owner_rules import SiteRules
from emfed.network.spending import SiteMemory
from tests.network.exchanges import NAMES, READER, Federation

RNG = np.random.default_rng(11)
COLUMNS = ["age", "height"]
ROWS = RNG.normal(size=(60, 2))
BARE = SiteRules(unmasked=True)
FIT = {"rounds": 6, "moves": 0}
LINEAR = {"kind": "linear-gaussian"}


def asked(masked: bool = False, sites: Any = NAMES[:3], **program: Any) -> Agreement:
    given: dict[str, Any] = {"algorithm": {}, "fit": FIT, "columns": COLUMNS}
    given["model"] = {"kind": "gaussian-mixture", "n_components": 2}
    return Agreement(tuple(sites), (READER,), masked, program={**given, **program})


def mixture(k: int, covariance: str = "full") -> dict[str, Any]:
    return {"kind": "gaussian-mixture", "n_components": k, "covariance_type": covariance}


def table(rows: Any, columns: Any = COLUMNS, **more: Any) -> Workers:
    return as_workers([pl.DataFrame(rows, list(columns))], **more)


def terms(
    rows: Any, rules: SiteRules = BARE, folder: Path | None = None, **more: Any
) -> OwnerTerms:
    """A process of the site `anna`."""
    data = rows if isinstance(rows, Workers) else table(rows)
    memory = None if folder is None else SiteMemory(folder)
    return OwnerTerms("anna", rules, set(NAMES), OfferedRows(data), memory)


def refused(own: OwnerTerms, agreement: Agreement) -> str:
    """Why a site does not follow; empty if it does."""
    try:
        assert own.accept(agreement) is not None
    except EmfedError as error:
        return str(error) or "no words"
    return ""


def passes(own: OwnerTerms, agreement: Agreement, rows: float = 0.0) -> str:
    """Why a site does not make its first pass, once it has accepted; empty if it does."""
    try:
        program = own.accept(agreement)
    except EmfedError as error:
        return str(error)
    assert program is not None
    ask = next(program.begin(agreement.sites, b"", bytes(32)))
    about: Any = SimpleNamespace(members=agreement.sites, agreement=agreement)
    try:
        own.before_pass(ask, rows, about)
    except EmfedError as error:
        return str(error)
    return ""


# Rows.


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_no_value_of_any_row_is_in_a_refusal(bad: float) -> None:
    """What is wrong with rows is for their owner; others hear that something is."""
    rows = ROWS.copy()
    rows[17, 1] = bad
    rules = SiteRules(smallest_rows=1)
    federation = Federation(masked=True)
    owns = {n: OwnerTerms(n, rules, set(NAMES), OfferedRows(table(ROWS))) for n in NAMES[:3]}
    owns["bert"] = OwnerTerms("bert", rules, set(NAMES), OfferedRows(table(rows)))
    federation.settings = asked(masked=True)
    for name, process in federation.network.processes.items():
        if name in owns:
            federation.consents = {}
            make = process.make

            def consenting(disk: Any, make: Any = make, own: OwnerTerms = owns[name]) -> Any:
                found = make(disk)
                found._me.consent, found._me.rows = own.consent(), own.rows
                return found

            process.make = consenting
    federation.run(30)
    told = federation.ends["bert"].words
    assert "row 17" in told
    entries = map(Entry.decode, federation.network.processes[RELAY].machine.transcript.entries)
    (said,) = [
        SignedOrder.decode(entry.statements[0].body).argument
        for entry in entries
        if entry.kind == StatementKind.ORDER
    ]
    assert "do not suit" in said
    sent = b"".join(data for _, data in federation.network.sent)
    assert b"row 17" not in sent
    assert str(bad).encode() not in sent


def test_whether_rows_suit_a_model_is_told_and_costs_an_answer_each_time(tmp_path: Path) -> None:
    """What remains: it tells the largest code of a site; a new run begins no new count."""
    codes = np.column_stack([RNG.normal(size=40), np.arange(40) % 6])
    found = []
    for count in range(2, 12):
        families = {"age": "gaussian", "height": {"family": "categorical", "categories": count}}
        model = {"kind": "mixed-mixture", "n_components": 1, "families": families}
        own = terms(codes, SiteRules(unmasked=True, largest_rounds=7), tmp_path)
        found.append(refused(own, asked(model=model)))
    assert all("height" in words for words in found[:4])
    assert found[4:7] == [""] * 3
    assert all("largest_rounds" in words for words in found[7:])


def test_passes_and_refusals_end_with_the_owners_allowance(tmp_path: Path) -> None:
    rules = SiteRules(unmasked=True, largest_rounds=6)  # a process takes 1, then 2 at once
    found = [passes(terms(ROWS, rules, tmp_path), asked()) for _ in range(2)]
    assert found == ["", ""]
    assert "largest_rounds" in refused(terms(ROWS, rules, tmp_path), asked())


def test_a_backup_that_is_put_back_does_not_give_answers_back(tmp_path: Path) -> None:
    """The largest count that some copy has is what was spent."""
    rules, copy = SiteRules(unmasked=True, largest_rounds=2), tmp_path / "copy"
    for folder in ("first", "put back"):
        own = terms(ROWS, rules)
        memory = SiteMemory(tmp_path / folder, copies=[copy])
        own = OwnerTerms("anna", rules, set(NAMES), own.rows, memory)
        if folder == "first":
            assert passes(own, asked()) == ""
    assert "largest_rounds" in refused(own, asked())


@pytest.mark.parametrize("rows", [3, 5, 8, 12, 18])
def test_sites_with_hardly_any_rows_are_equations(rows: int) -> None:
    """Two columns: a full covariance for each of three components is 18 numbers a round."""
    few = SiteRules(unmasked=True, smallest_rows=1)
    assert "statistics of so few rows" in refused(terms(ROWS[:rows], few), asked(model=mixture(3)))
    assert not refused(terms(ROWS[:19], few), asked(model=mixture(3)))
    loose = SiteRules.trusting()
    assert not refused(terms(ROWS[:rows], loose), asked(model=mixture(min(3, rows))))


def test_a_model_that_a_sites_rows_cannot_have_is_judged_all_the_same() -> None:
    """More components than rows: bound to the rows of all sites it would tell those of each."""
    own = terms(ROWS[:12])
    assert "statistics of so few rows" in refused(own, asked(model=mixture(13, "diag")))


def test_under_masks_the_rows_of_all_sites_count() -> None:
    """So a refusal tells of their sum, which all members know."""
    own, agreement = terms(ROWS[:12], SiteRules()), asked(masked=True, model=mixture(3))
    assert "statistics of so few rows" in passes(own, agreement, rows=18.0)
    assert not passes(own, agreement, rows=19.0)


def test_each_step_of_a_sequence_counts_as_a_row() -> None:
    few = SiteRules(unmasked=True, smallest_rows=2)
    chain = {"kind": "hidden-markov", "n_components": 2, "families": "gaussian"}
    two = np.random.default_rng(3).normal(size=(2, 30, 1))
    for steps, words in ((30, ""), (4, "statistics of so few rows")):
        data = WorkerData(two[:, :steps], np.array([0, 2]), ["anna"], ("x",))
        own = OwnerTerms("anna", few, set(NAMES), OfferedRows(data))
        assert words in refused(own, asked(model=chain, columns=["x"]))


@pytest.mark.parametrize("limit", [1, 2, None])
def test_fits_are_counted_where_they_come_to_the_rows(limit: int | None, tmp_path: Path) -> None:
    """Restarts of one, and those that are only proposed, count once or not at all."""
    rules, found = SiteRules(unmasked=True, largest_fits=limit), []
    for run in ("first", "first", "second", "third", "first"):
        about = replace(asked(), run=run)
        for _ in range(3):
            refused(terms(ROWS, rules, tmp_path), replace(asked(), run=f"{run} proposed"))
        found.append("largest_fits" in passes(terms(ROWS, rules, tmp_path), about))
    allowed = [True, True, limit != 1, limit is None, True]
    assert found == [not one for one in allowed]


# Settings.


@pytest.mark.parametrize(
    ("program", "rules", "words"),
    [
        ({"model": {"kind": "linear-gaussian"}}, BARE, "names it in `models`"),
        (
            {"model": {"kind": "linear-gaussian"}},
            SiteRules(unmasked=True, models=["linear-gaussian"]),
            "",
        ),
        ({"algorithm": {"kind": "fedem", "batch_size": 1}}, BARE, "mini_batches"),
        ({"columns": ["age"]}, BARE, "--columns"),
    ],
)
def test_what_an_analyst_may_ask_is_the_owners_to_allow(
    program: Any, rules: SiteRules, words: str
) -> None:
    found = refused(terms(ROWS, rules), asked(**program))
    assert words in found
    assert bool(words) == bool(found)


def test_how_large_a_model_may_be_tells_no_number_of_rows() -> None:
    """Under masks; without, its number of rows is told anyway."""
    sizes = [20, 2_000, 200_000]
    for k in (10, 10_000, 1_000_000, 10_000_000):
        agreement = asked(masked=True, model=mixture(k, "diag"))
        owns = (terms(np.zeros((n, 2)), SiteRules()) for n in sizes)
        found = {"largest_model" in refused_for_room(own, agreement) for own in owns}
        assert len(found) == 1


def refused_for_room(own: OwnerTerms, agreement: Agreement) -> str:
    return "".join(check(own, agreement) for check in DOCUMENT)


# Differences.


def company(own: OwnerTerms, sites: str) -> str:
    return passes(own, asked(masked=True, sites=tuple(sites)))


def member(name: str, rules: SiteRules, folder: Path) -> OwnerTerms:
    memory = SiteMemory(folder / name)
    return OwnerTerms(name, rules, set("abcde"), OfferedRows(table(ROWS)), memory)


@pytest.mark.parametrize(("most", "told"), [(None, 2), (1, 1), (0, 0)])
def test_runs_with_and_without_a_site_are_counted_by_its_companions(
    most: int | None, told: int, tmp_path: Path
) -> None:
    """Two sums that differ by one site tell of it: every change of company counts, in any run."""
    rules, found = SiteRules(largest_changes=most), 0
    for sites in ("abcd", "abc", "abce"):
        words = [company(member(n, rules, tmp_path), sites) for n in "abc"]
        assert len({bool(one) for one in words}) == 1
        found += not words[0]
    assert found - 1 == told


def test_with_seven_sites_one_change_each_tells_of_two(tmp_path: Path) -> None:
    """Each site has a first company and another: {abc} and {abcd}, {def} and {efg} are enough."""
    found = {}
    for sites in ("abc", "def", "abcd", "efg", "abce"):
        words = []
        for name in sites:
            memory = SiteMemory(tmp_path / name)
            rows = OfferedRows(table(ROWS))
            own = OwnerTerms(name, SiteRules(), set("abcdefg"), rows, memory)
            words.append(company(own, sites))
        found[sites] = any(words)
    assert found == {"abc": False, "def": False, "abcd": False, "efg": False, "abce": True}


def test_a_row_whose_weight_changes_is_another_row(tmp_path: Path) -> None:
    """Or one that its owner leaves out by a weight of zero would be told by two runs."""
    weights, found = np.ones(60), []
    for weight in (1.0, 0.0):
        weights[7] = weight
        data = table(ROWS, sample_weight=weights)
        found.append("a few of its rows" in refused(terms(data, BARE, tmp_path), asked()))
    assert found == [False, True]


@pytest.mark.parametrize("masked", [False, True])
def test_one_patient_more_is_told_by_no_second_run(masked: bool, tmp_path: Path) -> None:
    more = np.concatenate([ROWS, [[1.5, -0.9]]])
    assert not refused(terms(ROWS, BARE, tmp_path), asked(masked))
    assert "a few of its rows" in refused(terms(more, BARE, tmp_path), asked(masked))
    # Nor by two tables in turn.
    other = RNG.normal(size=(60, 2))
    assert not refused(terms(other, BARE, tmp_path), asked(masked))
    assert "a few of its rows" in refused(terms(more, BARE, tmp_path), asked(masked))


def test_rows_may_change_by_many_and_a_site_may_join_again(tmp_path: Path) -> None:
    def joins(rows: Any) -> bool:
        return "a few of its rows" not in refused(terms(rows, BARE, tmp_path), asked())

    assert joins(ROWS)
    assert joins(ROWS[::-1])  # the same rows in another order
    assert not joins(ROWS[:-9])
    assert not joins(np.concatenate([ROWS[:-4], ROWS[-4:] + 1]))  # four went, four came
    assert joins(ROWS[:-10])


# Owners.


def test_ordinary_runs_work_under_the_default_rules(tmp_path: Path) -> None:
    own = terms(ROWS, SiteRules(), tmp_path)
    assert not passes(own, asked(masked=True), rows=180.0)


def test_looser_rules_say_what_they_give_away() -> None:
    careful = SiteRules().gives_away()
    for looser in ({"unmasked": True}, {"spare_rows": None}, {"largest_rounds": None}):
        assert len(SiteRules(**looser).gives_away()) == len(careful) + 1
    loose = SiteRules.read({"preset": "trusting", "spare_rows": 40})
    assert loose.spare_rows == 40
    assert loose.largest_rounds is None
    assert loose.mini_batches
    assert len(loose.gives_away()) > len(careful) + 5
    assert json.dumps(loose.gives_away())


def test_a_run_that_began_under_looser_rules_is_not_followed_under_stricter_ones() -> None:
    """Each process asks the rules anew, also in mid fit."""
    federation = Federation()
    rules = [SiteRules(unmasked=True), SiteRules()]
    own = {"anna": rules[0]}

    def accept(agreement: Agreement) -> Any:
        if own["anna"].unmasked or agreement.masked:
            return federation.program
        raise EmfedError("masked sums alone")

    federation = Federation(masked=False, accept=accept)
    federation.run(0.3, lambda: False)
    given = len(federation.made["anna"])
    assert given
    own["anna"] = rules[1]
    federation.network.kill("anna")
    federation.network.start("anna")
    federation.network.run(60.0, lambda: False)
    assert len(federation.made["anna"]) == given
    words = federation.network.follower("anna").ended
    assert words is not None
    assert "masked sums alone" in words.words
