"""Sites that are heard one by one: fits over a network in memory beside the same in one process."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import polars as pl
import pytest

import emfed
from emfed.aggregation.coded import DIGEST_BYTES, News
from emfed.aggregation.unmasked import Present
from emfed.algorithms.memories import settle
from emfed.core.ledger import DIRECTIONS
from emfed.core.sums import Heard, LastSum, drive
from emfed.data import as_workers
from emfed.data.held import HeldWorkers
from emfed.fitting import ascent
from emfed.fitting.in_process import begin, fit
from emfed.fitting.program import FitProgram
from emfed.fitting.settings import FitSettings
from emfed.network.exchange.heard import RECORD, HeardSums, _Record
from emfed.network.exchange.records import MemoryRecords
from emfed.network.exchange.statements import Entry, SignedSum, StatementKind
from emfed.network.exchange.virtual import RELAY
from tests.network.exchanges import NAMES, READER, Federation, Plan, Trial, Tried

SUMS = {
    "a mixture": {},
    "plain EM": {"algorithm": "em", "rounds": 12},
    "a range": {"n_components": "1:3", "moves": 0},
    "own clusters": {"start": "merge"},
    "FedEM": {"algorithm": "FedEM", "rounds": 15},
    "VR-FedEM": {"algorithm": emfed.VRFedEM(batch_size=7, inner_rounds=4), "rounds": 15},
    "some of them": {"algorithm": "FedEM", "participation": 0.6, "rounds": 15},
    "some in turns": {"participation": 0.6, "rounds": 15},
    "scores": {"algorithm": "em", "rounds": 6, "scores": True},
    "validation": {"algorithm": "em", "rounds": 6, "validate": True},
    "a broadcast": {
        "algorithm": emfed.FedEM(
            emfed.SubtractiveDithering(0.1), broadcast=emfed.SubtractiveDithering(0.05)
        ),
        "rounds": 15,
    },
}
"""Settings of fits that sites follow without masks."""


def tables(sites: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    found = {}
    for j, name in enumerate(NAMES[:sites]):
        shares = [(40 + 5 * j, (0, 0)), (30, (4, 1)), (20 + 3 * j, (0, 5))]
        found[name] = np.concatenate([rng.normal(size=(n, 2)) + at for n, at in shares])
    return found


def settings_of(about: dict[str, Any]) -> FitSettings:
    model = emfed.gaussian_mixture if "n_components" in about else emfed.gaussian_mixture(3)
    common = {"masks": False, "columns": ("0", "1"), "seed": 5, "moves": 0}
    return FitSettings(model, **(common | about))


def federation(about: dict[str, Any], sites: int = 3, **options: Any) -> Federation:
    """A federation whose analyst adds."""
    settings = settings_of(about)
    found = Federation(
        sites=sites,
        masked=False,
        tables=tables(sites),
        **{"options": {"coded": True}} | options,
    )
    found.accept = lambda _: FitProgram(settings)
    return found


def workers_of(sites: int) -> HeldWorkers:
    named = {name: pl.DataFrame(rows, ["0", "1"]) for name, rows in tables(sites).items()}
    return HeldWorkers(as_workers(named))


def alone(about: dict[str, Any], sites: int = 3) -> emfed.Result:
    return fit(settings_of(about), workers_of(sites)).result


def reached(found: Federation, name: str = "anna") -> emfed.Result:
    assert {n: e.words for n, e in found.ends.items() if not e.final} == {}
    result: emfed.Result = found.ends[name].result.fitted().result
    return result


@pytest.mark.parametrize("kind", SUMS)
@pytest.mark.parametrize("sites", [2, 4])
def test_a_fit_is_that_of_one_process_and_so_is_its_ledger(kind: str, sites: int) -> None:
    about = SUMS[kind]
    found = federation(about, sites)
    assert found.run() < 600
    want = alone(about, sites)
    for name in (*NAMES[:sites], READER):
        got = reached(found, name)
        np.testing.assert_allclose(got.statistics, want.statistics, rtol=0, atol=1e-12)
        assert (got.rounds, got.stopped) == (want.rounds, want.stopped)
        for way in DIRECTIONS:
            assert got.ledger.total(way) == want.ledger.total(way)
            for kind_, told in got.ledger.summary().items():
                spent = want.ledger.summary()[kind_][way]
                both = sum(told[way][part] for part in ("payload", "envelope"))
                assert both == spent["payload"] + spent["envelope"]
        for mine, theirs in zip(got.records, want.records, strict=True):
            assert (mine.answered, mine.asked) == (theirs.answered, theirs.asked)
            assert mine.squared_H == pytest.approx(theirs.squared_H, abs=1e-12)
    assert found.plain == set()


def kinds(found: Federation) -> list[StatementKind]:
    machine = found.network.processes[RELAY].machine
    return [StatementKind(Entry.decode(data).kind) for data in machine.transcript.entries]


def test_every_sum_is_told_and_none_is_added_by_the_relay() -> None:
    found = federation({})
    found.run()
    reached(found)
    assert StatementKind.SUM not in kinds(found)
    assert StatementKind.SECRETS not in kinds(found)
    assert kinds(found).count(StatementKind.TOLD) > 5


# Absences.


def told(found: Federation) -> list[News]:
    """What the adder said of each exchange of the last epoch, as the analyst follows it."""
    transcript = found.network.processes[RELAY].machine.transcript
    place, members = transcript.epochs[-1]
    news, rows, everyone = list[News](), 0.0, np.arange(len(members))
    for data in transcript.entries[place:]:
        entry = Entry.decode(data)
        if entry.kind == StatementKind.TOLD:
            body = SignedSum.decode(entry.statements[0].body)
            news.append(News.decode(body.told[DIGEST_BYTES:], everyone, rows)[0])
            rows = news[-1].rows
    return news


def away(found: Federation, name: str, first: float, last: float | None) -> None:
    """Let a site go away at a time, and come back."""
    network = found.network
    network.computing = 0.5
    network.at(first, lambda: network.kill(name))
    if last is not None:
        network.at(last, lambda: network.start(name))


WAIT = {"options": {"coded": True, "wait": 20.0}}


def test_who_is_away_stands_for_itself_and_comes_back_with_exact_memories() -> None:
    about = {"patience": None, "algorithm": "em", "rounds": 40, "tol": 0}
    found = federation(about, 4, **WAIT)
    away(found, "dora", 8.3, 36.0)
    assert found.run() < 200
    news = told(found)
    missing = [3 not in one.arrived for one in news]
    assert 1 < sum(missing) < len(news) - 10
    assert not missing[-1]
    assert {one.rows for one in news} == {news[0].rows}
    assert not any(one.anew for one in news)
    assert StatementKind.CHANGE not in kinds(found)
    everyone = alone({**about, "masks": None}, 4)
    got = reached(found)
    np.testing.assert_allclose(got.statistics, everyone.statistics, atol=2e-3)
    answered = [record.answered for record in got.records]
    assert min(answered) == 3 < max(answered) == 4


@pytest.mark.parametrize("about", [{}, SUMS["some of them"]], ids=["sums", "answers"])
def test_absences_cost_and_do_what_they_do_in_a_simulation(
    about: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    about, arrived, real = {"patience": 3, **about}, list[Any](), HeardSums._take

    def take(self: HeardSums, data: bytes) -> None:
        if self._adds and self._coded is not None:
            arrived.append(self._coded.told(data[DIGEST_BYTES:])[1].arrived)
        real(self, data)

    monkeypatch.setattr(HeardSums, "_take", take)
    found = federation(about, 4, **WAIT)
    away(found, "dora", 6.3, 40.0)
    assert found.run() < 300
    transcript = found.network.processes[RELAY].machine.transcript
    assert len(transcript.epochs) == 1
    assert any(3 not in one for one in arrived)
    arrivals = iter(arrived)

    def present(ask: Any, exchange: int) -> Present:
        here = next(arrivals)
        return Present(here, here)

    begun = begin(settings_of(about), workers_of(4))
    begun.course.unmasked.present = present
    outcome = drive(begun.program, begun.course.answer, begun.course.refuses)
    begun.course.complete(LastSum(0, outcome.final.estimate.left))
    want, got = begun.fitted(outcome).result, reached(found)
    np.testing.assert_allclose(got.statistics, want.statistics, rtol=0, atol=1e-12)
    for way in DIRECTIONS:
        assert got.ledger.total(way) == want.ledger.total(way)
    assert [r.answered for r in got.records] == [r.answered for r in want.records]


def test_sums_go_on_without_the_rows_of_who_is_gone_for_good() -> None:
    about = {"patience": 3, "algorithm": "em", "rounds": 60, "tol": 0}
    found = federation(about, 4, **WAIT)
    away(found, "dora", 8.3, None)
    found.late = ("dora",)
    network = found.network
    network.at(0.0, lambda: network.start("dora"))
    assert found.run() < 300
    news = told(found)
    assert sum(one.anew for one in news) == 1
    assert news[-1].rows == news[0].rows - len(tables(4)["dora"])
    got, rest = reached(found), {n: rows for n, rows in tables(4).items() if n != "dora"}
    model, params = got.model, got.model.maximize(got.statistics)
    rows = np.concatenate([*rest.values()])
    again = model.expected_statistics(rows[None], params)[0]
    white = model.metric(params).whiten(again - got.statistics)
    assert white @ white < 2e-3


def test_who_leaves_is_left_out_at_once() -> None:
    found = federation({"rounds": 30, "algorithm": "em", "tol": 0}, 4, **WAIT)
    network = found.network
    network.computing = 0.5
    network.at(8.3, lambda: network.follower("dora").order("leave"))
    assert found.run() < 60
    assert "left" in found.ends.pop("dora").words
    news = told(found)
    assert sum(one.anew for one in news) == 1
    assert news[-1].rows == news[0].rows - len(tables(4)["dora"])
    reached(found)


def test_a_newcomer_begins_a_new_epoch_where_the_others_are() -> None:
    about = {"rounds": 25, "algorithm": "em", "tol": 0}
    found = federation(about, 4, late=("dora",), **WAIT)
    network = found.network
    network.computing = 0.5
    network.at(1.0, lambda: network.follower(READER).order("begin"))
    network.at(19.0, lambda: network.start("dora"))
    network.at(0.0, lambda: setattr(found, "late", ()))
    assert found.run() < 120
    assert kinds(found).count(StatementKind.CHANGE) == 1
    transcript = network.processes[RELAY].machine.transcript
    assert [members for _, members in transcript.epochs] == [NAMES[:3], NAMES[:4]]
    assert len({reached(found, name).statistics.tobytes() for name in NAMES[:4]}) == 1
    assert told(found)[-1].rows == sum(map(len, tables(4).values()))


def test_an_analyst_that_lost_its_disk_makes_all_begin_anew() -> None:
    found = federation({"rounds": 20, "algorithm": "em", "tol": 0})
    network = found.network
    network.computing = 0.5
    network.at(8.3, lambda: network.start(READER, MemoryRecords()))
    assert found.run() < 60
    orders = [k for k in kinds(found) if k is StatementKind.ORDER]
    assert len(orders) == 1
    want = alone({"rounds": 20, "algorithm": "em", "tol": 0})
    np.testing.assert_allclose(reached(found).statistics, want.statistics, atol=5e-3)


def test_masks_and_coded_sums_exclude_each_other() -> None:
    found = federation({})
    found.settings = replace(found.settings, masked=True)
    found.run(30)
    assert found.network.processes[RELAY].machine.transcript.entries == []


# Faults.

LONG = (0.05, 1.0, 8.0, 60.0, 400.0)
"""Seconds that a killed process stays away: at times more than others wait."""
KINDS = (
    {"rounds": 9},
    {"algorithm": "FedEM", "rounds": 9, "start": "moments"},
    {"algorithm": emfed.VRFedEM(batch_size=7, inner_rounds=4), "rounds": 9, "start": "moments"},
    {"algorithm": "FedEM", "participation": 0.6, "rounds": 9, "start": "moments"},
)


class Strikes(Trial):
    """A plan of faults for a fit whose analyst adds; memories are checked whenever it tells."""

    down = LONG

    def made(self, plan: Plan) -> Federation:
        self.about = KINDS[plan.seed % len(KINDS)]
        self.checks, self.gap_of_memories, self.anew = 0, 0.0, 0
        found = federation(self.about, max(plan.sites, 3), fate=plan.fate())
        found.network.computing = 0.3  # kills strike while there is something to kill
        return found

    def check(self, adder: HeardSums) -> None:
        """V is the sum of what sites keep on their disks, unless one has lost it."""
        record, coded = adder._mine, adder._coded
        assert record is not None
        assert coded is not None
        found, news = coded.told(record.message[DIGEST_BYTES:])
        self.anew += news.anew
        if isinstance(found, Heard) and hasattr(found.told, "generation"):
            self.anew = max(self.anew, found.told.generation)
        books = adder._books.copy()
        books.close(coded.asked, news)
        kept = {n: c["memory"] for n, c in record.after.items() if n != "adder"}
        kept = {name: total for name, total in kept.items() if total.size}
        for name, total in kept.items():
            states = [self.disk(adder, member) for member in adder._members]
            if name in books.counted:
                at, generation = books.counted[name].at, books.counted[name].generation
                weights = np.ones(len(states))
            elif isinstance(found, Heard) and hasattr(found.told, "counted"):
                at, generation = found.told.counted, found.told.generation
                totals = record.after["adder"]["totals"]
                weights = totals / coded.ask.method.rows
            else:
                continue
            want, heard = np.zeros_like(total), np.flatnonzero(at >= 0)
            own = [copy.deepcopy(states[j].get(name)) for j in heard.tolist()]
            if any(one is None for one in own):
                continue
            if any(
                len(settle(one, at[[j]], generation)) for one, j in zip(own, heard, strict=True)
            ):
                continue
            for one, j in zip(own, heard, strict=True):
                want = want + weights[j] * one["memory"][0]
            scale = np.abs(total).max() + 1
            self.checks += 1
            self.gap_of_memories = max(self.gap_of_memories, np.abs(total - want).max() / scale)

    def disk(self, adder: HeardSums, member: str) -> Any:
        """What a site keeps, as its disk has it."""
        data = self.network.processes[member].disk.states().get(RECORD)
        record = None if data is None else _Record.decode(data)
        return {} if record is None or record.place != adder._place else record.after

    def wrong(self) -> tuple[list[str], float]:
        members, ends = (*self.federation.names, READER), self.federation.ends
        wrong = [f"{name}: {end.words}" for name, end in ends.items() if not end.final]
        wrong += [f"{name} never ended" for name in members if name not in ends]
        models = {
            end.result.conclusion.final.estimate.point.statistics.tobytes()
            for end in ends.values()
            if end.final and end.result is not None
        }
        wrong += ["two models are final"] if len(models) > 1 else []
        if self.gap_of_memories > 1e-12:
            wrong.append(f"V is {self.gap_of_memories} off")
        return wrong, self.gap_of_memories


def strike(seed: int, patch: pytest.MonkeyPatch) -> tuple[Tried, Strikes]:
    """Run a plan of faults."""
    trial = Strikes(seed)
    real = HeardSums._keep

    def keep(self: HeardSums, record: Any) -> None:
        real(self, record)
        if self._adds:
            trial.check(self)

    patch.setattr(HeardSums, "_keep", keep)
    patch.setattr(ascent, "FEWEST_OF_MANY", 3)
    return trial.run(7200.0), trial


@pytest.mark.parametrize("block", range(4))
def test_memories_are_exact_under_random_faults(
    block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried, checks, kills = [], 0, 0
    for seed in range(8 * block, 8 * block + 8):
        with monkeypatch.context() as patch:
            found, trial = strike(seed, patch)
        tried.append(found)
        checks += trial.checks
        kills += found.kills
    assert [one for one in tried if one.wrong] == []
    assert checks > 40
    assert kills > 8
