"""A server that lies about sets, keys, requests and rounds, to sites that mask what they tell."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import given
from hypothesis import strategies as st

import emfed
from emfed.core.errors import SettingsError, WireError
from emfed.core.protocols import WHOLE
from emfed.core.storage import ScratchDisk
from emfed.core.wire import Kind, decode_refusal
from emfed.fitting.rounds import Run
from emfed.fitting.session import Session
from emfed.network import LocalTransport, RemoteFederation, Site, SiteRules
from emfed.network.masking import (
    RunKeys,
    SiteIdentity,
    check_set,
    context_of,
    decode_members,
    decode_roster,
    decode_set,
    encode_members,
    encode_roster,
    encode_set,
    next_numbers,
    pack_words,
    packed_size,
    sum_words,
    to_words,
    unpack_words,
)
from emfed.network.spending import Secret
from emfed.network.store import SiteStore
from emfed.network.sums import FIXED_STEP, SiteSums, add_up, answer_shape, from_fixed, to_fixed
from tests.helpers import OPEN
from tests.network.masked import masked_sites

RNG = np.random.default_rng(5)
TABLES = {name: RNG.normal(size=(40, 2)) + i for i, name in enumerate("abcdefg")}
NAMES = list(TABLES)


# The masks themselves.


def run_keys(names: str, run: int = 7) -> dict[int, RunKeys]:
    """Keys of a run that all members know."""
    made = {
        number: RunKeys(own, bytes([number]) * 32, run, 100 + number)
        for number, own in enumerate(SiteIdentity.everybody(names).values())
    }
    roster = encode_roster({number: keys.announcement for number, keys in made.items()})
    for keys in made.values():
        keys.learn(roster)
    return made


@pytest.mark.parametrize("bits", [2, 10, 11, 33, 64, 256])
def test_masks_cancel_in_the_sum_of_a_set_and_in_no_smaller_one(bits: int) -> None:
    keys, members = run_keys("abcd"), {0: 5, 1: 6, 2: 7, 3: 8}
    kind: Any = object if bits > 64 else np.int64
    own = {n: np.array([n % 2, -(n % 2), 0, (n + 1) % 2] * 5, dtype=kind) for n in members}
    told = {
        n: keys[n].masked(to_words(own[n], bits), bits, n, members, context_of(b"x", members))
        for n in members
    }
    for words in told.values():
        assert list(unpack_words(pack_words(words, bits), 20, bits)) == list(words)
        assert len(pack_words(words, bits)) == packed_size(20, bits)

    def modular(numbers: Any) -> list[int]:
        return [int(number) % 2**bits for number in numbers]

    total = sum(own.values())
    assert modular(sum_words(list(told.values()), bits)) == modular(total)
    for some in itertools.chain(*(itertools.combinations(members, k) for k in (1, 2, 3))):
        if bits > 8:
            part = sum_words([told[n] for n in some], bits)
            assert modular(part) != modular(sum(own[n] for n in some))


def test_a_masked_vector_looks_uniform() -> None:
    keys, members = run_keys("abc"), {0: 1, 1: 2, 2: 3}
    words = keys[0].masked(np.zeros(40_000, dtype=np.uint64), 4, 0, members, b"context")
    counts = np.bincount(words.astype(np.int64), minlength=16)
    assert ((counts - 2500) ** 2 / 2500).sum() < 40  # chi-squared of 15 degrees: 1e-3 beyond 38


@pytest.mark.parametrize("change", ["set", "fresh", "request", "run"])
def test_masks_of_another_set_request_or_run_do_not_cancel(change: str) -> None:
    keys, members = run_keys("abcd"), {0: 1, 1: 2, 2: 3}
    others = {"set": {0: 1, 1: 2, 2: 3, 3: 4}, "fresh": {0: 1, 1: 2, 2: 9}}.get(change, members)
    about = b"other" if change == "request" else b"asked"
    odd = run_keys("abcd", run=8)[2] if change == "run" else keys[2]
    zero = np.zeros(4, dtype=np.uint64)
    told = [keys[n].masked(zero, 64, n, members, context_of(b"asked", members)) for n in (0, 1)]
    told.append(odd.masked(zero, 64, 2, others, context_of(about, others)))
    assert sum_words(told, 64).any()


def test_a_key_that_no_pinned_identity_signed_is_no_peer() -> None:
    """The server substitutes its own key, replays one of another run, or brings its own site."""
    made = run_keys("abc")
    strange = SiteIdentity("b", ec.generate_private_key(ec.SECP384R1()), {})
    own = RunKeys(strange, bytes(32), 7, 101).announcement
    replayed = replace(run_keys("abc", run=8)[1].announcement, instance=101)
    for lie in (own, replayed, replace(own, name="unheard of")):
        entries = {n: keys.announcement for n, keys in made.items()} | {1: lie}
        made[0].learn(encode_roster(entries))
        assert made[0].strangers({0: 1, 1: 2, 2: 3}, 0) == [1]


def test_sets_that_a_site_refuses() -> None:
    mine: dict[int, int] = {0: 10, 1: 11, 2: 12, 3: 13, 4: 14, 5: 15, 6: 16}

    def without(*gone: int) -> dict[int, int]:
        return {n: f for n, f in mine.items() if n not in gone}

    assert check_set(mine, 3, []) == ""
    assert "at least 3" in check_set({0: 10, 1: 11}, 3, [])
    assert "at least 8" in check_set(mine, 8, [])
    assert check_set(mine, 3, [mine]) == ""  # the same again is the same answer
    for gone in ((1,), (1, 2)):
        assert "hardly differs" in check_set(without(*gone), 3, [mine])
    assert "hardly differs" in check_set(mine | {3: 99}, 3, [mine])  # another plaintext
    assert check_set(without(1, 2, 3), 3, [mine]) == ""
    assert "two sets" in check_set(without(4, 5, 6), 3, [mine, without(1, 2, 3)])


MEMBERS = st.dictionaries(st.integers(0, 20), st.integers(0, 2**64 - 1), min_size=3, max_size=9)


@given(MEMBERS, st.data())
def test_a_set_is_named_in_short_to_who_knows_the_last(last: dict[int, int], data: Any) -> None:
    changed = data.draw(st.sets(st.sampled_from(sorted(last))))
    now = next_numbers(last) | dict.fromkeys(changed, 7)
    body = encode_set(now, last)
    assert len(body) == 4 + 12 * len(changed)
    assert decode_set(body, [], last) == now
    assert decode_set(body, [now], {}) == now  # the same set again, after the last one moved on
    other = {n: f ^ 1 for n, f in last.items()}
    assert decode_set(body, [], other) is None or len(changed) == len(last)
    fewer = dict(list(now.items())[1:])
    assert decode_set(encode_set(fewer, last), [], {}) == fewer


def test_a_number_follows_from_a_set_once_and_in_one_process(tmp_path: Path) -> None:
    identity = SiteIdentity.everybody("abc")["a"]
    store, secret = SiteStore(tmp_path / "run"), Secret(tmp_path)
    store.directory.mkdir()
    blocks = [(np.arange(3), 20)]

    def ready(sums: SiteSums, number: int) -> bytes:
        return sums.ready(store, number, b"%d" % number, b"", blocks, me=0)

    sums = SiteSums(identity, secret, SiteRules())
    assert len(ready(sums, 1)) == 8  # nothing was told yet
    sums._made[store.directory] = 9, {0: 1, 1: 2, 2: 3}
    assert ready(sums, 2) == b""
    waiting = sums.waiting(store, 2)
    assert waiting is not None
    assert waiting.fresh == next_numbers({0: 1, 1: 2, 2: 3})[0]
    assert len(ready(sums, 3)) == 8  # another answer, and no set since
    sums._made[store.directory] = 9, {0: 1, 1: 2, 2: 3}
    assert len(ready(SiteSums(identity, secret, SiteRules()), 4)) == 8  # perhaps an old disk
    sums.forget_last(store)
    assert len(ready(sums, 5)) == 8


@pytest.mark.parametrize("cut", [1, 20, 140])
def test_damaged_rosters_and_sets_are_refused(cut: int) -> None:
    roster = encode_roster({n: k.announcement for n, k in run_keys("abc").items()})
    with pytest.raises(WireError):
        decode_roster(roster[:-cut])
    with pytest.raises(WireError):
        decode_members(encode_members({1: 2, 3: 4})[: -(cut % 12 or 1)])
    with pytest.raises(WireError):
        decode_members(encode_members({1: 2}) * 2)


def test_an_identity_wants_three_keys_and_its_own_among_them(tmp_path: Path) -> None:
    from emfed.network.keys import make_site_key

    for name in "abc":
        make_site_key(tmp_path, name)
    assert SiteIdentity.read(tmp_path / "a.key", tmp_path).name == "a"
    (tmp_path / "c.pub").unlink()
    with pytest.raises(SettingsError, match="at least 3"):
        SiteIdentity.read(tmp_path / "a.key", tmp_path)
    with pytest.raises(SettingsError):
        SiteRules(smallest_set=2)


# Whole runs.


class Tampered(LocalTransport):
    """Hands every answer to a function that may keep it to itself."""

    def __init__(self, sites: Mapping[str, Site], up: Callable[[str, bytes], bool]) -> None:
        super().__init__(dict(sites))
        self.up, self.seen = up, list[tuple[str, bytes]]()

    def deliver(self, messages: Mapping[str, bytes], deadline: float) -> Iterator[Any]:
        for key, answer in super().deliver(messages, deadline):
            self.seen.append((key, answer))
            if self.up(key, answer):
                yield key, answer


def session_of(transport: LocalTransport, **options: Any) -> Session:
    federation = RemoteFederation(transport, attempts=1, pause=0.0, **options)
    return Session(emfed.gaussian_mixture(2, "diag"), federation, masks=True)


def ask(session: Session) -> Any:
    params = session.view(WHOLE).start(0)
    return session.ask("values", WHOLE, params)


def exact(names: list[str], session: Session) -> Any:
    rows = np.concatenate([TABLES[name] for name in names])
    model = session.view(WHOLE)
    return float(model.log_likelihood(rows, model.start(0)))


def test_the_server_sees_the_sum_and_no_message_tells_of_one_site(tmp_path: Path) -> None:
    transport = Tampered(masked_sites(TABLES, tmp_path), lambda key, answer: True)
    session = session_of(transport)
    assert ask(session)[0, 0] == pytest.approx(exact(NAMES, session), abs=1e-8)
    # Whatever a site sent, its own mean appears in no message of it, in no form that was summed.
    for key, answer in transport.seen:
        own = TABLES[key].mean(axis=0)
        assert all(value.tobytes() not in answer for value in own)
        assert len(TABLES[key]).to_bytes(8, "little") not in answer
    assert len(set(session.counts.tolist())) == 1  # counts are everybody's, shared out


def test_a_member_that_vanishes_between_the_phases_is_waited_for(tmp_path: Path) -> None:
    """A sum without it, beside the sums before, would tell of it."""
    away: set[str] = set()
    sites = masked_sites(TABLES, tmp_path)

    def up(key: str, answer: bytes) -> bool:
        return not (key in away and answer[0] & 0x3F == Kind.MASKED)

    session = session_of(Tampered(sites, up))
    away.add("c")
    with pytest.raises(emfed.ParticipationError, match="6 of 7 sites are there"):
        ask(session)
    away.clear()
    assert ask(session)[0, 0] == pytest.approx(exact(NAMES, session), abs=1e-8)


def test_three_sites_that_lose_one_have_no_sum(tmp_path: Path) -> None:
    few = {name: TABLES[name] for name in "abc"}
    away: set[str] = set()
    transport = Tampered(masked_sites(few, tmp_path), lambda key, answer: key not in away)
    session = session_of(transport)
    away.add("b")
    with pytest.raises(
        emfed.ParticipationError, match="2 of 3 sites are there, and a masked sum needs 3"
    ):
        ask(session)


def name_set(session: Session, members: Mapping[int, int], to: list[int], question: int) -> Any:
    """What sites answer to a set that a server names as it likes."""
    federation = session.federation
    body, keys = encode_members(members), federation.members.keys
    messages = {keys[n]: (federation._header(Kind.SET, n, question), body) for n in to}
    return {
        key: decode_refusal(told)[1] if kind is Kind.REFUSAL else told
        for key, kind, told in federation._line.deliver("question", messages)
    }


def ready(session: Session) -> tuple[dict[int, int], int]:
    """Everyone is ready with an answer; no set was named yet."""
    federation = session.federation
    fresh: dict[int, int] = {}
    from emfed.core.wire import encode_floats, encode_question
    from emfed.models.binding import flatten_params

    params = flatten_params(session.view(WHOLE).start(0))
    federation._next_question()
    asked = federation._everyone(
        encode_question("values", {}, encode_floats(params)), (Kind.CONSTANTS,)
    )
    federation._last_set = {}  # it names sets of its own: whoever is asked twice says its number
    for _ in range(2):
        federation._take_ready("question", asked.messages(asked.numbers), fresh, set())
    return fresh, federation._question


def test_split_views_give_nothing_away(tmp_path: Path) -> None:
    """The server tells v the set {v, w1, w2} and the others {w1, w2, w3}."""
    session = session_of(LocalTransport(masked_sites(TABLES, tmp_path)))
    fresh, question = ready(session)
    first = {n: fresh[n] for n in (0, 1, 2)}
    second = {n: fresh[n] for n in (1, 2, 3)}
    told = name_set(session, first, [0], question) | name_set(session, second, [1, 2, 3], question)
    answers = [value for value in told.values() if isinstance(value, bytes)]
    assert len(answers) == 4
    sums = add_up([told[n] for n in "bcd"], answer_shape(2))
    assert sums is not None  # the sum of the three that agree is theirs to give
    for some in itertools.combinations("abcd", 3):
        if "a" in some:
            assert add_up([told[n] for n in some], answer_shape(2)) is None
    assert add_up(answers, answer_shape(2)) is None


def test_nearly_the_same_set_is_not_answered_again(tmp_path: Path) -> None:
    """A sum over all and one over all but w differ by w: in one question, and in a repeated one."""
    session = session_of(LocalTransport(masked_sites(TABLES, tmp_path)))
    fresh, question = ready(session)
    assert all(
        isinstance(v, bytes) for v in name_set(session, fresh, list(fresh), question).values()
    )
    fewer = {n: f for n, f in fresh.items() if n != 3}
    told = name_set(session, fewer, list(fewer), question)
    assert all("hardly differs" in str(v) for v in told.values())
    fresh, question = ready(session)  # the same question, asked anew
    fewer = {n: f for n, f in fresh.items() if n != 3}
    told = name_set(session, fewer, list(fewer), question)
    assert all("hardly differs" in str(v) for v in told.values())


def test_a_set_that_is_too_small_for_one_owner_is_refused_by_it(tmp_path: Path) -> None:
    sites = masked_sites(TABLES, tmp_path)
    sites["a"] = Site(
        TABLES["a"],
        tmp_path / "a",
        identity=sites["a"]._sums.identity,
        rules=SiteRules(smallest_set=5),
    )
    session = session_of(LocalTransport(sites))
    fresh, question = ready(session)
    few = {n: fresh[n] for n in (0, 1, 2)}
    told = name_set(session, few, [0, 1, 2], question)
    assert "at least 5 sites" in str(told["a"])
    assert isinstance(told["b"], bytes)


def test_a_colluding_site_takes_its_own_part_off_and_has_a_sum_of_the_others(
    tmp_path: Path,
) -> None:
    """What remains: n - 1 colluding sites know the last one's part; docs say so."""
    few = {name: TABLES[name] for name in "abc"}
    session = session_of(LocalTransport(masked_sites(few, tmp_path)))
    model = session.view(WHOLE)
    total = float(ask(session)[0, 0]) * 120
    mine = sum(float(model.log_likelihood(TABLES[n], model.start(0))) * 40 for n in "ab")
    own = float(model.log_likelihood(TABLES["c"], model.start(0)))
    assert (total - mine) / 40 == pytest.approx(own, abs=1e-6)


def test_a_site_with_a_roster_refuses_a_run_without_masks_unless_its_owner_said_so(
    tmp_path: Path,
) -> None:
    tables = {name: TABLES[name] for name in "abc"}
    sites = masked_sites(tables, tmp_path, rules=SiteRules())
    federation = RemoteFederation(LocalTransport(sites), attempts=1)
    with pytest.raises(emfed.ParticipationError, match="masked sums alone"):
        emfed.fit(emfed.gaussian_mixture(1), federation, rounds=1)
    rules = SiteRules(unmasked=True)
    federation = RemoteFederation(LocalTransport(masked_sites(tables, tmp_path / "2", rules=rules)))
    emfed.fit(emfed.gaussian_mixture(1), federation, rounds=1)


def test_a_site_without_a_roster_refuses_a_masked_run(tmp_path: Path) -> None:
    sites = {name: Site(TABLES[name], tmp_path / name) for name in "abc"}
    federation = RemoteFederation(LocalTransport(sites), attempts=1)
    with pytest.raises(emfed.ParticipationError, match="no roster"):
        emfed.fit(emfed.gaussian_mixture(1), federation, rounds=1, masks=True)


def test_a_server_that_lies_about_sizes_cannot_cut_all_sites_but_one() -> None:
    """Were numbers without room cut, the sum less what was cut would be the smallest site's."""
    own = [np.array([0.7, -0.4]), np.array([0.6, -0.5]), np.array([0.9, -0.8])]
    rows = np.array([5000, 4000, 30])
    for claimed in (9030, 1e-3, 40):  # of all rows: the truth, and lies
        told = [to_fixed(v, n / claimed, 3)[0] for v, n in zip(own, rows, strict=True)]
        left = sum(told).astype(float) * FIXED_STEP
        if claimed == 9030:
            np.testing.assert_allclose(left[-1], 1.0, atol=1e-8)
            continue
        assert left[0] > 2.0**20 * 2  # as large as it should be
        assert left[1] < -(2.0**20) * 2
        cut = left - 2 * np.sign(left) * 2.0**20
        assert np.abs(cut[:2] - own[2] * 30 / claimed).min() > 2.0**20


def test_sites_that_were_sent_different_statistics_have_masks_that_do_not_cancel() -> None:
    from emfed.network.sums import round_subject

    here = np.array([0.5, 0.25, 1e-3])
    assert round_subject(WHOLE, here) == round_subject(WHOLE, here * (1 + 1e-15))
    assert round_subject(WHOLE, here) != round_subject(WHOLE, here + np.array([0, 1e-4, 0]))
    assert from_fixed(np.array([2**33, 2**32]))[0] == pytest.approx([2.0])


# A component of the sum with few rows.

PATIENT = np.array([9.0, 12.0])
WITH_PATIENT = {name: TABLES[name] for name in "abc"}
WITH_PATIENT["c"] = np.vstack([TABLES["c"], PATIENT])


def sums_of_a_shrinking_component(
    where: Path, least: int | None, honest: bool = False
) -> tuple[list[Any], str]:
    """Rows and mean of a component that would end with one row, in every S of a run.

    It begins around the patient, and so wide that it has some of the other rows. A server that is
    not honest goes on with whatever comes.
    """
    rules = replace(OPEN, smallest_component=least)
    sites = masked_sites(WITH_PATIENT, where, rules=rules, disk=ScratchDisk())
    session = session_of(LocalTransport(sites))
    model, why = session.view(WHOLE), ""
    frame = model.constants.frame
    centre = (PATIENT - frame.origin) / frame.scale
    narrow = model.start(0)
    begin = replace(
        narrow,
        means=np.stack([np.zeros(2), centre]),
        covariances=np.stack([np.ones(2), np.full(2, 16.0)]),
        weights=np.array([0.5, 0.5]),
    )
    run = Run(session, WHOLE, emfed.EM(), model.statistics_of(begin))
    seen = []
    for _ in range(30):
        try:
            run.step() if honest else run._round()
        except emfed.ParticipationError as error:
            why = str(error)
            break
        shares, params = model.group_shares(run.state.statistics), run.params
        mean = params.means[1] * frame.scale + frame.origin
        seen.append((shares.ravel()[1] * 121, mean))
    return seen, why


def test_a_site_does_not_go_on_where_a_component_of_the_sum_has_few_rows(tmp_path: Path) -> None:
    seen, why = sums_of_a_shrinking_component(tmp_path / "none", None)
    assert seen[-1][0] == pytest.approx(1, abs=0.1)
    np.testing.assert_allclose(seen[-1][1], PATIENT, atol=0.05)  # the patient, to the server
    assert not why
    for least in (10, SiteRules().smallest_component):
        seen, why = sums_of_a_shrinking_component(tmp_path / str(least), least)
        assert f"fewer than {least} rows" in why
        assert all(rows >= least for rows, _ in seen[:-1])
        assert seen[-1][0] > 1.5
        assert np.abs(seen[-1][1] - PATIENT).max() > 0.2


def test_a_run_goes_on_without_a_component_that_has_few_rows(tmp_path: Path) -> None:
    """The default rule ends no honest run: what shrinks is a copy of another from then on."""
    least = SiteRules().smallest_component
    assert least is not None
    seen, why = sums_of_a_shrinking_component(tmp_path, least, honest=True)
    assert not why
    rows = np.array([rows for rows, _ in seen])
    assert rows[0] > least
    assert ((rows >= least) | (rows < 1e-6)).all()
    assert rows[-1] < 1e-6
    assert np.abs(seen[-1][1] - PATIENT).max() > 5  # where the others are


def test_a_lying_server_gets_past_the_floor_on_components(tmp_path: Path) -> None:
    """What remains: sites have only the server's word for S. The page says so."""
    rules = replace(OPEN, smallest_component=10)
    sites = masked_sites(WITH_PATIENT, tmp_path, rules=rules, disk=ScratchDisk())
    session = session_of(LocalTransport(sites))
    model = session.view(WHOLE)
    frame = model.constants.frame
    centre = (PATIENT - frame.origin) / frame.scale
    lie = replace(
        model.start(0),
        means=np.stack([np.zeros(2), centre]),
        covariances=np.stack([np.ones(2), np.full(2, 0.05)]),
        weights=np.array([0.5, 0.5]),
    )
    told = model.layout.split(session.ask("statistics", WHOLE, lie))
    rows = told["mass"][1] * 121
    assert rows == pytest.approx(1, abs=0.1)
    found = told["first"][1] / told["mass"][1] * frame.scale + frame.origin
    np.testing.assert_allclose(found, PATIENT, atol=0.05)
