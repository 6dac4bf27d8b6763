"""A site that lies, alone or with the relay: what it reaches, and what it does not.

Sites trust each other for the truth of sums (docs/decisions/003): the last tests hold what is left,
and what owners are told of it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from emfed.aggregation.integers import add, high_bits, pack
from emfed.aggregation.keys import MemberKeys
from emfed.aggregation.masks import MODULUS, Part
from emfed.core.sums import Ask, Precision, Rows
from emfed.data import as_workers
from emfed.data.summing import HeldRows
from emfed.deployment.consent import OfferedRows, OwnerTerms
from emfed.fitting.asks import Statistics
from emfed.models.components import thin
from emfed.network.exchange.adding import EpochKeys, PlacedAsk
from emfed.network.exchange.relay import Relay
from emfed.network.exchange.statements import Added, Entry
from emfed.network.exchange.virtual import RELAY
from emfed.network.owner_rules import SiteRules
from tests.attacks.test_lying_relay import program
from tests.network.exchanges import NAMES, READER, Federation

FloatArray = NDArray[np.float64]
HONEST = ("anna", "bert")


class Crooked:
    """Rows that add to each sum what a liar likes."""

    def __init__(self, rows: Any, lie: Any) -> None:
        self.rows, self.lie = rows, lie
        self.total, self.count, self.squares = rows.total, rows.count, rows.squares

    def sum(self, mean: Any, ragged: bool = False) -> FloatArray:
        return np.asarray(self.rows.sum(mean, ragged) + self.lie)


def lying(lie: Any, exchange: int = 2, **options: Any) -> Federation:
    """Cleo adds something to its part of a sum."""

    def look(rows: Rows, ask: Ask, place: Any) -> Rows:
        return Crooked(rows, lie(ask)) if place.exchange == exchange else rows

    return Federation(consents={"cleo": {"look": look}}, **options)


def check_masks(federation: Federation) -> None:
    """No mask covers two messages, and nothing leaves without one."""
    assert all(len(plain) == 1 for plain in federation.parts.values())
    assert federation.plain == set()


def attempts(federation: Federation) -> list[tuple[int, int]]:
    transcript = federation.network.processes[RELAY].machine.transcript
    entries = [Entry.decode(data) for data in transcript.entries]
    added = [Added.decode(entry.added) for entry in entries if entry.added]
    return [(one.exchange, one.attempt) for one in added]


@pytest.mark.parametrize("lie", [np.nan, np.inf, 1e300, -1e300])
def test_garbage_ends_the_fit_and_nothing_else(lie: float) -> None:
    """Twice the bits, and twice again; then it is over, and nobody is named."""
    federation = lying(lambda ask: lie)
    federation.run(300)
    assert not any(end.final for end in federation.ends.values())
    assert attempts(federation)[-3:] == [(2, 0), (2, 1), (2, 2)]
    check_masks(federation)
    for name in NAMES[:3]:
        assert "forged" in federation.ends[name].words
        assert "cleo" not in federation.ends[name].words


def test_a_number_that_is_0_modulo_the_bits_leaves_nobody_alone_in_the_sum() -> None:
    """Release 0.1 lost all parts but one so: here tags are of the integers themselves."""

    def around(ask: Ask) -> FloatArray:
        assert isinstance(ask.precision, Precision)
        bits = np.broadcast_to(ask.precision.bits, ask.size)
        return np.ldexp(np.broadcast_to(ask.precision.step, ask.size), bits)

    federation = lying(around)
    federation.run(300)
    # With room for it the sum is that of all, the liar's number among them.
    assert (2, 1) in attempts(federation)
    for name in HONEST:
        assert federation.ends[name].words == ""
    check_masks(federation)


@pytest.mark.parametrize("lie", [0.3, 7.0])
def test_a_site_may_say_any_number_and_is_one_of_many(lie: float) -> None:
    """What is left: it steers what others compute, without knowing their sum before it speaks."""
    honest, other = Federation(), lying(lambda ask: lie)
    honest.run()
    other.run()
    assert {end.final for end in other.ends.values()} == {True}
    assert honest.ends["anna"].state != other.ends["anna"].state


# With the relay.


class Forging(Relay):
    """Adds to a sum what one site's keys let it add, tag and all."""

    federation: Federation
    steps: FloatArray
    exchange = 2
    reader = "cleo"

    def _added(self) -> Entry:
        entry = super()._added()
        added = Added.decode(entry.added)
        if added.exchange != self.exchange:
            return entry
        follower = self.federation.network.follower(self.reader)
        keys: EpochKeys = follower.fit.keys  # type: ignore[attr-defined]
        question = PlacedAsk(follower.following, added.exchange, added.attempt)  # type: ignore[arg-type]
        context = keys._context(self.transcript, question, len(self.transcript))
        opener = MemberKeys(keys.name, keys.group).opener(context, question.lattice)
        lattice, part = question.lattice, Part.decode(added.part)
        change = lattice.integers(self.steps * np.ldexp(1.0, lattice.exponents))
        numbers = add(part.words(lattice.words), change[:, : lattice.words])
        numbers &= high_bits(lattice.words, lattice.bits)
        tag = part.tag
        if opener.tag is not None:
            tag = (tag + opener.tag.of(change)) % MODULUS
        forged = replace(part, numbers=pack(numbers, lattice.bits), tag=tag)
        return Entry.sum(replace(added, part=forged.encode()))


def forging(steps: FloatArray, reader: str = "cleo") -> Federation:
    kind = type("Forging", (Forging,), {"steps": steps, "reader": reader})
    federation = Federation(relay=kind)
    kind.federation = federation  # type: ignore[attr-defined]
    return federation


def test_a_relay_with_one_site_makes_any_sum_and_owners_are_told_so() -> None:
    """The keys of tags are those of all sites; a site adds and checks, and so it can forge."""
    honest, federation = Federation(), forging(np.array([5.0, 0.0, 0.0, -3.0]))
    honest.run()
    federation.run(300)
    assert {end.final for end in federation.ends.values()} == {True}
    assert federation.ends["anna"].state != honest.ends["anna"].state
    check_masks(federation)
    told = "A site that lies together with the server can steer the sums and so read single rows"
    assert told in " ".join(SiteRules().gives_away())


def test_a_relay_with_an_analyst_does_not() -> None:
    """It has the pad and no key of tags: `emfed serve` is both."""
    federation = forging(np.array([5.0, 0.0, 0.0, -3.0]), READER)
    federation.run(300)
    assert not any(end.final for end in federation.ends.values())
    for name in NAMES[:3]:
        assert "forged" in federation.ends[name].words
    assert {exchange for made in federation.made.values() for exchange, _ in made} == {0, 1, 2}


def narrowed(ask: Ask) -> FloatArray:
    """What leaves the first component nearly no mass in the sum over 120 rows."""
    assert isinstance(ask, Statistics)
    here, k = ask.statistics, 2
    there = here.copy()
    for place in ask.model.layout.slices.values():
        own = there[place].reshape(k, -1)
        moved = 0.99 * own[0]
        own[0] -= moved
        own[1] += moved
    lie = 120 * (there - here)
    return np.append(lie, np.zeros(2 * ask.values))


@pytest.mark.parametrize("left_out", [True, False])
@pytest.mark.parametrize("floor", [None, 3])
def test_a_floor_on_components_holds_against_sums_that_are_steered(
    floor: int | None, left_out: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A narrow component is the way from steered sums to a row: honest sites do not look there.

    The fit leaves such components out. A mutant that does not shows the rule of owners.
    """
    if not left_out:
        monkeypatch.setattr(
            "emfed.fitting.ascent._supported", lambda problem, statistics: statistics
        )
    rng = np.random.default_rng(3)
    tables = {
        name: np.concatenate([rng.normal(size=(20, 2)), rng.normal(6.0, size=(20, 2))])
        for name in NAMES[:3]
    }
    steered: list[int] = []

    def look(rows: Rows, ask: Ask, place: Any) -> Rows:
        if not isinstance(ask, Statistics) or place.exchange < 12 or steered:
            return rows
        steered.append(place.exchange)
        return Crooked(rows, narrowed(ask))

    seen: list[Ask] = []

    def watch(rows: Rows, ask: Ask, place: Any) -> Rows:
        seen.append(ask)
        return rows

    def terms(name: str) -> OwnerTerms:
        rules = SiteRules(smallest_component=floor, spare_rows=None)
        return OwnerTerms(name, rules, None, OfferedRows(as_workers([tables[name]])))

    consents: dict[str, Any] = {
        name: {"before_pass": terms(name).before_pass, "look": watch} for name in HONEST
    }
    federation = Federation(
        accept=lambda about: program(tol=0.0, n_init=1, rounds=30),
        consents={**consents, "cleo": {"look": look}},
    )
    federation.rows = {name: HeldRows(as_workers([rows])) for name, rows in tables.items()}
    federation.run(600)
    (begun,) = steered
    looked = max(exchange for exchange, _ in federation.made["anna"])
    words = " ".join(end.words for name, end in federation.ends.items() if name in HONEST)
    refused = floor is not None and not left_out
    assert ("smallest_component" in words) == refused
    assert (looked == begun) == refused
    narrow = [
        thin(ask.model.component_shares(ask.statistics), 120).any()
        for ask in seen
        if isinstance(ask, Statistics)
    ]
    assert any(narrow) == (floor is None and not left_out)
