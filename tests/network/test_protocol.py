"""The rules of docs/protocol.md, one by one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import emfed
from emfed.core.registry import plain
from emfed.core.wire import (
    Header,
    Kind,
    Reason,
    decode_bundle,
    decode_join,
    decode_refusal,
    decode_text,
    deflate,
    encode_bundle,
    encode_constants,
    encode_count,
    encode_floats,
    encode_join,
    encode_question,
    encode_refusal,
    encode_reply,
    encode_text,
    inflate,
    is_short,
    kind_of,
    open_answer,
    open_refusal,
    payload_size,
    peek,
    read_short,
    seal,
    seal_answer,
    seal_refusal,
    shorten,
)
from emfed.network import LocalTransport, RemoteFederation, Site, Transport
from emfed.network.rules import Refusal
from emfed.network.site import mark
from emfed.network.store import SiteStore
from tests.helpers import OPEN, make_data, make_model

TABLES = make_data(6, sizes=(24, 18, 30, 22), spread=8.0)
KEYS = [f"site {i}" for i in range(len(TABLES))]
ALGORITHM = emfed.FedEM(emfed.Dithering(3, block="row"), step_size=0.5, in_metric=True)
Post = tuple[str, bytes]


def make_sites(where: Path, tables: Any = None) -> dict[str, Site]:
    tables = dict(zip(KEYS, TABLES, strict=True)) if tables is None else tables
    return {key: Site(table, where / key, rules=OPEN) for key, table in tables.items()}


class Tampered(Transport):
    """Hands every request and reply to functions that may change, drop or add to it.

    Replies come to them in the long form, which tells all by itself.
    """

    def __init__(
        self,
        sites: Mapping[str, Site],
        down: Callable[[str, bytes], bytes | None] = lambda key, message: message,
        up: Callable[[str, bytes], list[Post]] = lambda key, message: [(key, message)],
    ) -> None:
        self.sites, self.down, self.up = dict(sites), down, up

    def workers(self) -> list[str]:
        return list(self.sites)

    def deliver(self, messages: Mapping[str, bytes], deadline: float) -> Iterator[Post]:
        for key, message in messages.items():
            request = self.down(key, message)
            if request is None or key not in self.sites:
                continue
            try:
                asked = self.sites[key].read(request)
            except Refusal:  # it knows nothing of this
                yield key, self.sites[key].step(request)
                continue
            answer = self.sites[key].step(request)
            for name, post in self.up(key, seal(*open_answer(answer, asked))):
                yield name, on_the_wire(message, post)


def on_the_wire(request: bytes, post: bytes) -> bytes:
    """An answer as it travels; what is no message as it is."""
    try:
        header, body = peek(post)
    except emfed.EmfedError:
        return post
    if header.kind is Kind.REFUSAL:
        return seal_refusal(request, body)
    return seal_answer(header, body)


def fit(federation: RemoteFederation, **options: Any) -> emfed.Result:
    chosen = {"rounds": 10, "seed": 4, "start": "moments", "tol": 0} | options
    return emfed.fit(make_model("diag", k=2), None, ALGORITHM, federation=federation, **chosen)


def undisturbed(tables: Any = TABLES, **options: Any) -> emfed.Result:
    chosen = {"rounds": 10, "seed": 4, "start": "moments", "tol": 0} | options
    chosen = {"federation": "loop"} | chosen
    return emfed.fit(make_model("diag", k=2), tables, ALGORITHM, **chosen)


def asked_kind(message: bytes) -> Kind:
    """Of a message, or of the last in a bundle."""
    if kind_of(message) is not Kind.BUNDLE:
        return kind_of(message)
    body = read_short(message).body if is_short(message) else peek(message)[1]
    return decode_bundle(body)[-1][0]


def refused(answer: bytes) -> tuple[Reason, str]:
    assert kind_of(answer) is Kind.REFUSAL
    return decode_refusal(open_refusal(answer)[1])[:2]


def requests_of(where: Path, rounds: int = 4) -> list[bytes]:
    """What one worker is sent in a run of two."""
    seen: list[bytes] = []

    def note(key: str, message: bytes) -> bytes:
        if key == KEYS[0]:
            seen.append(message)
        return message

    two = dict(zip(KEYS[:2], TABLES[:2], strict=True))
    fit(RemoteFederation(Tampered(make_sites(where, two), note)), rounds=rounds)
    return seen


def files(where: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in sorted(where.rglob("*")) if p.is_file()}


# Lost, late and repeated messages.


def test_the_envelope_of_a_round_is_a_few_bytes(tmp_path: Path) -> None:
    """Besides its payload a request takes at most 12 bytes and a reply at most 8."""
    requests = requests_of(tmp_path, rounds=6)
    site = Site(TABLES[0], tmp_path / KEYS[0], rules=OPEN)
    for request in requests[-4:]:
        asked = site.read(request)
        assert len(request) - payload_size(asked[0].kind, asked[1]) <= 12
    answer = site.step(requests[-1])
    header, body = open_answer(answer, asked)
    assert header.kind is Kind.REPLY
    assert len(answer) - payload_size(Kind.REPLY, body) <= 8


def test_a_repeated_request_gets_the_same_bytes_and_changes_nothing(tmp_path: Path) -> None:
    last = requests_of(tmp_path)[-1]
    site = Site(TABLES[0], tmp_path / KEYS[0], rules=OPEN)
    before = files(tmp_path)
    first = site.step(last)
    assert kind_of(first) is Kind.REPLY
    assert is_short(last)
    assert site.step(last) == first
    assert site.step(seal(*site.read(last))) == first  # the long form says the same
    assert files(tmp_path) == before


def test_an_old_request_is_told_so_and_changes_nothing(tmp_path: Path) -> None:
    *_, old, _ = requests_of(tmp_path)
    before = files(tmp_path)
    answer = Site(TABLES[0], tmp_path / KEYS[0], rules=OPEN).step(old)
    assert refused(answer)[0] is Reason.OLD
    assert files(tmp_path) == before


def test_a_stragglers_reply_to_an_old_round_is_not_taken(tmp_path: Path) -> None:
    """One worker's replies come a round late, in the place of the right ones, then go missing."""
    held: list[bytes] = []

    def late(key: str, message: bytes) -> list[Post]:
        if key != KEYS[1] or peek(message)[0].kind is not Kind.REPLY:
            return [(key, message)]
        held.append(message)
        return [(key, held[-2])] if len(held) > 1 else []

    federation = RemoteFederation(Tampered(make_sites(tmp_path), up=late), attempts=1, pause=0)
    result = fit(federation, patience=None)
    assert [r.answered for r in result.records[1:]] == [3] * 10
    assert result.ledger.counts[2, 0, 0].tolist() == [10, 9, 10, 10]  # late ones are charged too
    silent = fit(
        RemoteFederation(
            Tampered(
                make_sites(tmp_path / "2"),
                up=lambda k, m: [] if k == KEYS[1] and peek(m)[0].kind is Kind.REPLY else [(k, m)],
            ),
            attempts=1,
        ),
        patience=None,
    )
    np.testing.assert_array_equal(result.statistics, silent.statistics)


def test_one_worker_cannot_speak_for_another(tmp_path: Path) -> None:
    """A reply under another key is not taken: its number and instance are not that worker's."""

    def steal(key: str, message: bytes) -> list[Post]:
        reply = peek(message)[0].kind is Kind.REPLY
        return (
            [(KEYS[0], message), (key, message)] if reply and key == KEYS[1] else [(key, message)]
        )

    result = fit(RemoteFederation(Tampered(make_sites(tmp_path), up=steal)))
    np.testing.assert_allclose(result.statistics, undisturbed().statistics, atol=1e-9)


# Hostile and truncated bytes.


def test_hostile_bytes_get_a_reason_and_change_nothing(tmp_path: Path) -> None:
    messages = requests_of(tmp_path)
    site = Site(TABLES[0], tmp_path / KEYS[0], rules=OPEN)
    before = files(tmp_path)
    header, request = site.read(messages[-1])
    other = Header(Kind.REQUEST, 5, 3, 0, 1)
    deep = deflate("[" * 100_000)
    hostile = [
        b"",
        b"EMFD",
        bytes(44),
        messages[-1][:-1],
        messages[-1] + b"\0",
        *(seal(replace(header, kind=kind), b"") for kind in Kind),
        *(seal(replace(header, kind=kind), b"\xff" * 50) for kind in Kind),
        *(shorten(replace(header, kind=kind), b"\xff" * 50) for kind in Kind),
        seal(replace(header, kind=Kind.HELLO), deep),
        seal(replace(header, kind=Kind.HELLO), deflate('{"model": ' + "[" * 100_000)),
        seal(
            replace(header, kind=Kind.HELLO),
            encode_text({"model": {"model": "gaussian-mixture"}}),
        ),
        seal(replace(header, kind=Kind.BUNDLE), b"\x03\x00" * 4),
        seal(replace(header, kind=Kind.BUNDLE), b"x" * 50),
        seal(replace(header, worker=7), request),
        seal(replace(header, round=2**32 - 1), request[:-3]),
        seal(replace(header, fingerprint=1), request),
        seal(replace(header, run=5), request),
        *(shorten(h, request) for h in (other, replace(header, worker=7))),
        shorten(replace(header, fingerprint=1), request),
        b"\x87" + bytes(3),
        b"\xc7" + b"\xff" * 30,
    ]
    for message in hostile:
        answer = site.step(message)
        assert kind_of(answer) is Kind.REFUSAL, message[:60]
    assert files(tmp_path) == before


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[bytes]]:
    where = tmp_path_factory.mktemp("recorded")
    return where, requests_of(where)


@given(data=st.data())
def test_no_bytes_make_a_site_raise(recorded: tuple[Path, list[bytes]], data: Any) -> None:
    """Valid messages with bodies changed and sealed anew, so that the checksum does not help."""
    where, messages = recorded
    site = Site(TABLES[0], where / KEYS[0], rules=OPEN)
    header, body = site.read(data.draw(st.sampled_from(messages)))
    changed = bytearray(body)
    for _ in range(data.draw(st.integers(1, 4))):
        if changed:
            at = data.draw(st.integers(0, len(changed) - 1))
            changed[at] = data.draw(st.integers(0, 255))
    cut = bytes(changed)[: data.draw(st.integers(0, len(changed)))]
    kind = data.draw(st.sampled_from([header.kind, *Kind]))
    # Rounds of long ago: an answer to a changed request must not become the worker's state.
    form = data.draw(st.sampled_from([seal, shorten]))
    assert is_short(site.step(form(replace(header, kind=kind, round=0), cut)))


@settings(max_examples=20)
@given(data=st.data())
def test_no_reply_makes_the_server_raise(data: Any, tmp_path_factory: Any) -> None:
    """A worker that answers nonsense is as good as silent; the others go on."""

    def spoil(key: str, message: bytes) -> list[Post]:
        header, body = peek(message)
        if key != KEYS[0] or header.kind is Kind.JOIN:
            return [(key, message)]
        nonsense = data.draw(st.binary(max_size=40))
        return [
            (key, nonsense),
            (key, seal(header, nonsense)),
            (key, seal(header, body[:3] + nonsense)),
            (key, seal(replace(header, kind=Kind.REFUSAL), b"\x05" + bytes(8) + nonsense)),
            ("a key nobody has", message),
        ]

    where = tmp_path_factory.mktemp("spoiled")
    federation = RemoteFederation(Tampered(make_sites(where), up=spoil), attempts=1, pause=0)
    result = fit(federation, rounds=2)
    assert result.records[-1].answered >= 3


def test_a_join_that_lies_about_its_shapes_is_left_out(tmp_path: Path) -> None:
    def spoil(key: str, message: bytes) -> list[Post]:
        header, body = peek(message)
        if key != KEYS[2] or header.kind is not Kind.JOIN:
            return [(key, message)]
        lie = replace(decode_join(body), about={"shapes": {"mean": [10**9]}})
        return [(key, seal(header, encode_join(lie)))]

    federation = RemoteFederation(Tampered(make_sites(tmp_path), up=spoil))
    fit(federation, rounds=2)
    assert list(federation.refusals) == [KEYS[2]]


# A lost disk, an old backup, two with one key.


def wipe_after(sites: dict[str, Site], key: str, rounds: int, where: Path) -> Tampered:
    """A transport that deletes a worker's files after so many of its replies."""
    left = [rounds]

    def up(name: str, message: bytes) -> list[Post]:
        if name == key and peek(message)[0].kind is Kind.REPLY:
            left[0] -= 1
            if left[0] == 0:
                shutil.rmtree(where / key)  # under a site that lives on
        return [(name, message)]

    return Tampered(sites, up=up)


def test_a_lost_disk_opens_a_new_generation_and_the_answer_is_the_same(tmp_path: Path) -> None:
    transport = wipe_after(make_sites(tmp_path), KEYS[1], 5, tmp_path)
    federation = RemoteFederation(transport)
    start = undisturbed(rounds=30).params
    result = fit(federation, rounds=90, start=start)
    assert result.records[-1].generation == 1
    assert [r.generation for r in result.records].index(1) == 7  # found out in round 6
    clean = undisturbed(rounds=90, start=start)
    np.testing.assert_allclose(result.statistics, clean.statistics, atol=1e-8)
    assert not federation.refusals


def test_an_old_backup_is_a_lost_memory(tmp_path: Path) -> None:
    sites = make_sites(tmp_path)
    copies: dict[int, Path] = {}

    def up(key: str, message: bytes) -> list[Post]:
        header, _ = peek(message)
        if key == KEYS[0] and header.kind is Kind.REPLY:
            folder = tmp_path / key / f"{header.run:016x}"
            copies[header.round] = tmp_path / f"backup {header.round}"
            shutil.copytree(folder, copies[header.round])
            if header.round == 6:
                shutil.rmtree(folder)
                shutil.copytree(copies[3], folder)
        return [(key, message)]

    result = fit(RemoteFederation(Tampered(sites, up=up)))
    assert result.records[-1].generation == 1


def test_a_damaged_state_is_a_lost_memory(tmp_path: Path) -> None:
    def up(key: str, message: bytes) -> list[Post]:
        header, _ = peek(message)
        if key == KEYS[0] and header.kind is Kind.REPLY and header.round == 4:
            state = tmp_path / key / f"{header.run:016x}" / "state"
            state.write_bytes(state.read_bytes()[:-7] + b"garbage")
        return [(key, message)]

    result = fit(RemoteFederation(Tampered(make_sites(tmp_path), up=up)))
    assert result.records[-1].generation == 1
    assert result.records[-1].answered == 4


def test_two_workers_with_one_key_are_both_out_and_the_run_goes_on(tmp_path: Path) -> None:
    """Requests to the key go to one or the other, in turn."""
    sites = make_sites(tmp_path)
    twins = [sites[KEYS[0]], Site(TABLES[0], tmp_path / "twin", rules=OPEN)]
    turn = [0]

    class Twins(Transport):
        def workers(self) -> list[str]:
            return KEYS

        def deliver(self, messages: Mapping[str, bytes], deadline: float) -> Iterator[Post]:
            for key, message in messages.items():
                if key != KEYS[0]:
                    yield key, sites[key].step(message)
                else:
                    turn[0] += asked_kind(message) is Kind.REQUEST
                    yield key, twins[turn[0] // 3 % 2].step(message)

    federation = RemoteFederation(Twins())
    result = fit(federation, rounds=20)
    assert "two workers use this key" in federation.refusals[KEYS[0]]
    assert result.rounds == 20
    assert result.records[-1].answered == 3


def test_a_worker_that_comes_back_with_other_data_is_out(tmp_path: Path) -> None:
    sites = make_sites(tmp_path)

    def up(key: str, message: bytes) -> list[Post]:
        header, _ = peek(message)
        if key == KEYS[0] and header.kind is Kind.REPLY and header.round == 4:
            shutil.rmtree(tmp_path / key)
            transport.sites[key] = Site(TABLES[0] + 1.0, tmp_path / key, rules=OPEN)
        return [(key, message)]

    transport = Tampered(sites, up=up)
    federation = RemoteFederation(transport)
    fit(federation)
    assert "other data" in federation.refusals[KEYS[0]]


def test_data_that_change_in_mid_run_are_refused(tmp_path: Path) -> None:
    def up(key: str, message: bytes) -> list[Post]:
        if key == KEYS[0] and peek(message)[0].round == 4:
            transport.sites[key] = Site(TABLES[0][:-1], tmp_path / key, rules=OPEN)
        return [(key, message)]

    transport = Tampered(make_sites(tmp_path), up=up)
    federation = RemoteFederation(transport)
    assert fit(federation).records[-1].answered == 3
    assert "changed since the run began" in federation.refusals[KEYS[0]]


# Other models, releases and schemas.


def test_another_release_is_refused_with_a_reason_and_the_run_goes_on(tmp_path: Path) -> None:
    def newer(key: str, message: bytes) -> bytes:
        """What a server of a release with one more setting would say."""
        if key != KEYS[3] or kind_of(message) is not Kind.HELLO:
            return message
        header, body = peek(message)
        content = decode_text(body)
        content["model"]["novelty"] = 1
        return seal(header, encode_text(content))

    federation = RemoteFederation(Tampered(make_sites(tmp_path), newer))
    result = fit(federation)
    assert "another release of emfed" in federation.refusals[KEYS[3]]
    np.testing.assert_allclose(result.statistics, undisturbed(TABLES[:3]).statistics, atol=1e-9)


def test_another_wire_format_is_refused_with_a_reason(tmp_path: Path) -> None:
    messages = requests_of(tmp_path)
    site = Site(TABLES[0], tmp_path / KEYS[0], rules=OPEN)
    other = bytearray(messages[0])
    other[4] = 99
    assert "format 99" in refused(site.step(bytes(other)))[1]


def frames(**changes: Any) -> dict[str, Any]:
    import polars as pl

    tables = {k: pl.DataFrame(t, schema=["x", "y"]) for k, t in zip(KEYS, TABLES, strict=True)}
    return tables | {KEYS[int(name[1:])]: change(tables) for name, change in changes.items()}


def test_columns_are_matched_by_name_and_others_left_out(tmp_path: Path) -> None:
    """Another order, and a column that the run does not ask for."""
    tables = frames(
        t2=lambda t: t[KEYS[2]].select("y", "x"),
        t3=lambda t: t[KEYS[3]].with_columns(id=1.0),
    )
    federation = RemoteFederation(LocalTransport(make_sites(tmp_path, tables)))
    result = fit(federation)
    assert not federation.refusals
    assert result.columns == ("x", "y")
    np.testing.assert_allclose(result.statistics, undisturbed().statistics, atol=1e-9)


def test_another_schema_is_refused_with_a_reason_and_the_run_goes_on(tmp_path: Path) -> None:
    tables = frames(
        t1=lambda t: t[KEYS[1]].rename({"y": "z"}),
        t3=lambda t: TABLES[3],
    )
    federation = RemoteFederation(LocalTransport(make_sites(tmp_path, tables)))
    result = fit(federation)
    assert "missing ['y']" in federation.refusals[KEYS[1]]
    assert "name none" in federation.refusals[KEYS[3]]
    pair = [TABLES[0], TABLES[2]]
    np.testing.assert_allclose(result.statistics, undisturbed(pair).statistics, atol=1e-9)


def test_other_widths_and_bad_rows_are_refused_without_telling_a_value(tmp_path: Path) -> None:
    bad = TABLES[1].copy()
    bad[3, 1] = np.inf
    bad[4, 0] = 123456.789
    tables = dict(zip(KEYS, [TABLES[0], bad, np.ones((9, 5)), TABLES[3]], strict=True))
    federation = RemoteFederation(LocalTransport(make_sites(tmp_path, tables)))
    fit(federation)
    assert set(federation.refusals) == {KEYS[1], KEYS[2]}
    assert "inf" not in federation.refusals[KEYS[1]]
    assert "row" not in federation.refusals[KEYS[1]]


def test_a_model_nobody_could_build_is_refused_before_anything_is_sent(tmp_path: Path) -> None:
    model = make_model("diag")

    class Odd(type(model)):
        def describe(self) -> dict[str, Any]:
            return {"model": "of my own"}

    with pytest.raises(emfed.SettingsError, match="unknown model"):
        RemoteFederation(LocalTransport(make_sites(tmp_path))).open(Odd(2))


# Deadlines and minimum participation.


def silence(*keys: str) -> Callable[[str, bytes], bytes | None]:
    """Requests to these workers are lost."""
    return lambda key, message: (
        None if key in keys and asked_kind(message) is Kind.REQUEST else message
    )


def test_a_round_with_too_few_answers_is_asked_again_then_given_up(tmp_path: Path) -> None:
    asked: list[str] = []

    def down(key: str, message: bytes) -> bytes | None:
        if asked_kind(message) is Kind.REQUEST:
            asked.append(key)
        return silence(*KEYS[:2])(key, message)

    transport = Tampered(make_sites(tmp_path), down)
    federation = RemoteFederation(transport, tmp_path / "server", minimum=3, attempts=4, pause=0)
    checkpoint = tmp_path / "server" / "run.checkpoint"
    with pytest.raises(emfed.ParticipationError, match="2 workers answered, 3 are needed"):
        fit(federation, checkpoint=checkpoint)
    assert [asked.count(key) for key in KEYS] == [4, 4, 1, 1]
    transport.down = lambda key, message: message
    again = RemoteFederation(transport, tmp_path / "server", minimum=3)
    result = fit(again, checkpoint=checkpoint, resume=True)
    np.testing.assert_allclose(result.statistics, undisturbed().statistics, atol=1e-9)


def test_enough_answers_close_a_round(tmp_path: Path) -> None:
    transport = Tampered(make_sites(tmp_path), silence(KEYS[2]))
    result = fit(RemoteFederation(transport, minimum=3))
    assert [r.answered for r in result.records[1:]] == [3] * 10


def test_fewer_may_be_asked_than_needed(tmp_path: Path) -> None:
    federation = RemoteFederation(LocalTransport(make_sites(tmp_path)), minimum=4)
    result = fit(federation, participation=emfed.algorithms.FixedSize(2))
    assert {r.answered for r in result.records[1:]} == {2}


def test_retries_ask_the_silent_again(tmp_path: Path) -> None:
    """`fit`'s own retries work over a network: the third request gets through."""
    count = [0]

    def down(key: str, message: bytes) -> bytes | None:
        if key != KEYS[0] or asked_kind(message) is not Kind.REQUEST:
            return message
        count[0] += 1
        return message if count[0] % 3 == 0 else None

    result = fit(RemoteFederation(Tampered(make_sites(tmp_path), down)), retries=2)
    np.testing.assert_allclose(result.statistics, undisturbed().statistics, atol=1e-9)


def test_too_few_members_are_told_why(tmp_path: Path) -> None:
    tables = dict(zip(KEYS, [np.full((3, 2), np.nan)] * 4, strict=True))
    federation = RemoteFederation(LocalTransport(make_sites(tmp_path, tables)), minimum=2)
    with pytest.raises(emfed.ParticipationError, match="(?s)0 workers joined.*its log says why"):
        fit(federation)


def test_what_is_wrong_with_its_rows_is_told_to_the_owner_once_and_to_nobody_else(
    tmp_path: Path,
) -> None:
    rows = np.ones((9, 2))
    rows[4, 1] = np.nan
    site = Site(rows, tmp_path / "site", rules=OPEN, journal=tmp_path / "messages.jsonl")
    for _ in range(2):
        with pytest.raises(emfed.ParticipationError) as told:
            fit(RemoteFederation(LocalTransport({"s0": site}), minimum=1, attempts=1))
        assert "row 4" not in str(told.value)
    entries = map(json.loads, (tmp_path / "messages.jsonl").read_text().splitlines())
    (words,) = [entry["content"] for entry in entries if entry["kind"] == "warning"]
    assert words.startswith("row 4, column 1 is nan")
    assert "`missing = true` in the server's [model]" in words


@pytest.mark.parametrize(
    "bad", [{"deadline": 0}, {"minimum": 0}, {"attempts": 0}, {"deadline": float("nan")}]
)
def test_bad_settings(bad: dict[str, Any]) -> None:
    with pytest.raises(emfed.SettingsError):
        RemoteFederation(LocalTransport({}), **bad)


def test_bad_company() -> None:
    with pytest.raises(emfed.SettingsError, match="transport"):
        RemoteFederation({})
    remote = RemoteFederation(LocalTransport({}))
    with pytest.raises(emfed.SettingsError, match="Transport"):
        emfed.network.FaultyFederation(remote, emfed.network.FaultPlan())
    with pytest.raises(emfed.SettingsError, match="opening_precision"):
        fit(remote, opening_precision="float32")
    with pytest.raises(emfed.ParticipationError, match="0 workers joined"):
        fit(remote)


# The server comes back.


def test_a_server_that_comes_back_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """In a folder on a real disk; the opening and the start are not asked for again."""
    kinds: list[Kind] = []

    def down(key: str, message: bytes) -> bytes:
        kinds.append(asked_kind(message))
        return message

    start = undisturbed(rounds=2).params
    sites = make_sites(tmp_path)
    server, options = tmp_path / "server", {"start": start, "resume": True}
    checkpoint = server / "run.checkpoint"
    for rounds in (3, 4, 10):
        kinds.clear()
        federation = RemoteFederation(Tampered(sites, down), server)
        result = fit(federation, rounds=rounds, checkpoint=checkpoint, **options)
        if rounds > 3:
            assert set(kinds) == {Kind.REQUEST}
    whole = fit(
        RemoteFederation(LocalTransport(make_sites(tmp_path / "whole"))), rounds=10, start=start
    )
    np.testing.assert_array_equal(result.statistics, whole.statistics)


def test_a_folder_of_another_model_is_not_continued(tmp_path: Path) -> None:
    transport = LocalTransport(make_sites(tmp_path))
    fit(RemoteFederation(transport, tmp_path / "server"), rounds=1)
    with pytest.raises(emfed.CheckpointError, match="another model"):
        emfed.fit(
            make_model("full"),
            None,
            federation=RemoteFederation(transport, tmp_path / "server"),
            rounds=1,
        )


def test_a_refusal_is_cut_and_made_printable() -> None:
    message = encode_refusal(Reason.FAILED, "bad\x1b[31m\n" + "é" * 900)
    _, text, _ = decode_refusal(message)
    assert "\x1b" not in text
    assert len(text.encode()) <= 500


def test_a_forged_reply_does_not_move_the_server(tmp_path: Path) -> None:
    """Numbers that no worker should send: not finite, or of another generation."""

    def forge(key: str, message: bytes) -> list[Post]:
        header, _ = peek(message)
        if key != KEYS[0] or header.kind is not Kind.REPLY:
            return [(key, message)]
        nan = encode_reply(5, 5, b"\x80" + np.full(10, np.nan).tobytes())
        forged = encode_reply(6, 5, b"\0" * 40)
        return [
            (key, seal(header, nan)),
            (key, seal(replace(header, generation=7), forged)),
            (key, message),
        ]

    result = fit(RemoteFederation(Tampered(make_sites(tmp_path), up=forge)))
    np.testing.assert_allclose(result.statistics, undisturbed().statistics, atol=1e-9)


def test_what_a_site_keeps(tmp_path: Path) -> None:
    requests_of(tmp_path)
    folder = next(p for p in (tmp_path / KEYS[0]).iterdir() if p.is_dir())
    assert sorted(p.name for p in folder.iterdir()) == ["joined", "state"]
    joined, state = SiteStore(folder).joined(), SiteStore(folder).state()
    assert joined is not None
    assert state is not None
    assert (joined.number, joined.count) == (0, len(TABLES[0]))
    assert json.loads(joined.phase)["algorithm"]["algorithm"] == "FedEM"
    assert state.round == 4
    assert int(state.rows["committed_round"][0]) == 3


def test_a_run_does_not_change_its_settings(tmp_path: Path) -> None:
    """A server that asks for another model under the number of a run gets nothing."""
    hello = requests_of(tmp_path)[0]
    header, body = peek(hello)
    site = Site(TABLES[0], tmp_path / KEYS[0], rules=OPEN)
    before = files(tmp_path)
    content = decode_text(body)
    content["model"]["n_components"] = 3
    answer = site.step(seal(header, encode_text(content)))
    assert refused(answer) == (Reason.REFUSED, "this run began with other settings.")
    assert kind_of(site.step(hello)) is Kind.JOIN
    assert files(tmp_path) == before


def test_a_model_of_any_size_can_be_named_and_is_refused(tmp_path: Path) -> None:
    """Names cost nothing; memory would. (An owner who sets no limit is as safe.)"""
    site = Site(
        TABLES[0], tmp_path / "a", rules=emfed.network.SiteRules.loosest(largest_model=1 << 60)
    )
    model = plain(make_model("full").describe()) | {"n_components": 10**9}
    hello = Header(Kind.HELLO, 7, 1, 0, 0), encode_text({"model": model, "columns": None})
    join = decode_join(open_answer(site.step(seal(*hello)), hello)[1])
    mine = replace(hello[0], fingerprint=mark(inflate(hello[1]), join.instance))
    constants = encode_count(0) + encode_constants(2 * 10**9, join.numbers)
    ask = encode_question("statistics", {}, encode_floats(np.ones(1)))
    bundle = encode_bundle([(Kind.CONSTANTS, constants), (Kind.QUESTION, ask)])
    answer = site.step(seal(replace(mine, kind=Kind.BUNDLE), bundle))
    assert "more than a message can hold" in refused(answer)[1]
