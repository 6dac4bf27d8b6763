"""Whatever members sign and relays hand out: a clear error, nothing changed, in bounded memory.

Bytes that mean nothing are tried in `tests.fuzz.decoders`. Here they are well formed, and signed
where the attacker has a key: a site, an analyst, or somebody whom the settings do not name.
"""

from __future__ import annotations

import contextlib
import copy
import json
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import lru_cache, partial
from typing import Any, get_type_hints

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emfed.core.errors import EmfedError, WireError
from emfed.data import as_workers
from emfed.deployment.consent import OfferedRows, OwnerTerms
from emfed.network.exchange import statements
from emfed.network.exchange.member import Follower
from emfed.network.exchange.member_runs import MemberRuns
from emfed.network.exchange.records import MemoryRecords
from emfed.network.exchange.relay import Relay
from emfed.network.exchange.relay_runs import RelayRuns
from emfed.network.exchange.statements import (
    BODIES,
    LONGEST_TEXT,
    Added,
    Agreement,
    Document,
    Entry,
    HandOut,
    Post,
    SetChange,
    SignedOrder,
    Statement,
    StatementKind,
    Turn,
)
from emfed.network.exchange.transcript import ORDERS, Stage, Transcript
from emfed.network.exchange.virtual import RELAY
from emfed.network.owner_rules import SiteRules
from tests.network.exchanges import NAMES, READER, Federation

MOST_SECONDS, MOST_BYTES = 1.0, 100_000_000
"""Computing and memory that one message may cost."""
OUTSIDER = "mallory"
"""Somebody with a key, whom the settings of this run do not name."""
HOSTILE_TEXTS = ("", "²", "٣", "9" * 20, "-1", "\x1b[2J", "../x", "x" * 60_000, *NAMES, *ORDERS)
COUNTS = (0, 1, 2, 3, 7, 255, 2**16, 2**31, 2**32 - 1)


@lru_cache
def snapshots() -> list[tuple[Federation, Any]]:
    """A relay of four sites at several moments: before it began, in mid fit, and at the end."""
    found = []
    for seconds in (0.0, 0.05, 0.15, 0.3, 60.0):
        federation = Federation(sites=4)
        federation.roster[OUTSIDER] = federation.keys["anna"].public
        federation.start()
        federation.network.run(seconds, federation.over)
        found.append((federation, federation.network.processes[RELAY].machine))
    return found


def relay_of(federation: Federation, honest: Relay) -> Relay:
    """Another relay with the same entries."""
    records = MemoryRecords()
    records.write(0, honest.transcript.entries)
    found = Relay(federation.roster, records, 0.0)
    found.tick(1e6)  # it has waited
    return found


class Outsider:
    """Signs with a key that the relay knows, in a name of its own."""

    def __init__(self, key: Any) -> None:
        self._key, self.name = key, OUTSIDER
        self.sign, self.secret = key.sign, key.secret


class Draws:
    """Fields of statements: of this run, of another place of it, and of no run at all."""

    def __init__(self, about: Transcript, rng: np.random.Generator) -> None:
        self.about, self.rng = about, rng
        hints: dict[Any, int] = {statements.Hash: 32, statements.HashStart: 8}
        hints |= {statements.Nonce: 16, statements.Blob: 40}
        counts = (*COUNTS, *about.due, about.epoch % 2**32, len(about))
        self._ways: dict[Any, Callable[[], Any]] = {
            **{hint: partial(self.start, size) for hint, size in hints.items()},
            statements.Text: lambda: self.pick(HOSTILE_TEXTS),
            statements.Small: lambda: self.pick((0, 1, 2, 3, 255)),
            statements.Count: lambda: self.pick(counts),
            statements.NameList: self.names,
            statements.SealedTo: lambda: tuple((name, self.hash()) for name in self.names()),
            statements.Blobs: lambda: (self.hash(),),
        }

    def pick(self, values: Any) -> Any:
        return values[int(self.rng.integers(len(values)))]

    def start(self, size: int) -> bytes:
        return (self.hash() + bytes(8))[:size]

    def hash(self) -> bytes:
        about = self.about
        others = (self.pick(about.heads), about.settings, bytes(32), self.rng.bytes(32))
        return about.head if self.rng.random() < 0.6 else self.pick(others)

    def names(self) -> tuple[str, ...]:
        known = (*NAMES[:4], *NAMES[:4], READER, OUTSIDER, "", "nobody")
        return tuple(self.pick(known) for _ in range(self.rng.integers(4)))

    def body(self, kind: StatementKind) -> Any:
        """Some body of a kind; of a part or hello that is nearly right as often as not."""
        made = BODIES[kind]
        hints = get_type_hints(made, include_extras=True)
        given = {one.name: self._ways[hints[one.name]]() for one in fields(made)}
        if "settings" in given and self.rng.random() < 0.8:
            given["settings"] = self.about.settings
        if kind is StatementKind.ORDER:
            given["word"] = self.pick((*ORDERS, "", "x" * 300))
        return made(**given)

    def post(self, signer: Any) -> tuple[Post, Statement]:
        """Something that somebody signs."""
        kind = self.pick([*BODIES])
        signed = Statement.by(signer, self.body(kind))
        about = self.about
        length, head = len(about), about.head[:8]
        if self.rng.random() < 0.1:
            length, head = self.pick(COUNTS), self.rng.bytes(8)
        body, payload = signed.body, b""
        if kind is StatementKind.PART:
            body, payload = Turn(*about.due).encode(), self.rng.bytes(40)
        return Post(signer.name, length, head, kind, body, signed.signature, payload), signed


def signers(federation: Federation) -> list[Any]:
    keys = federation.keys
    return [keys["anna"], keys["dora"], keys[READER], Outsider(keys["anna"])]


def state_of(about: Transcript) -> dict[str, Any]:
    return copy.deepcopy({k: v for k, v in vars(about).items() if k != "_roster"})


@pytest.mark.parametrize("seed", range(4))
def test_a_relay_bears_whatever_its_members_sign(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for federation, honest in snapshots():
        for signer in signers(federation):
            relay = relay_of(federation, honest)
            for _ in range(60):
                post, _ = Draws(relay.transcript, rng).post(signer)
                relay.receive(post.encode(), 1e6)
                relay.tick(1e6)
            again = Transcript(federation.roster)
            for data in relay.transcript.entries:
                again.append(data)


@pytest.mark.parametrize("seed", range(4))
def test_an_entry_that_is_refused_leaves_the_transcript_as_it_was(seed: int) -> None:
    rng = np.random.default_rng(100 + seed)
    for federation, honest in snapshots():
        about = relay_of(federation, honest).transcript
        for _ in range(100):
            draws = Draws(about, rng)
            signed = [draws.post(signer)[1] for signer in signers(federation)]
            several = signed[: int(rng.integers(1, 4))]
            added = Added(*about.due, rng.bytes(30)).encode()
            entry = draws.pick(
                (
                    Entry.of(signed[0]),
                    Entry.of(signed[2]),
                    Entry(signed[0].kind, tuple(several), b""),
                    Entry(int(rng.integers(256)), tuple(several), added),
                    Entry(StatementKind.SUM, (), rng.bytes(8)),
                )
            )
            before = state_of(about)
            try:
                about.append(entry.encode())
            except WireError:
                assert state_of(about) == before
            if about.stage in (Stage.ENDED, Stage.FINAL):
                about = relay_of(federation, honest).transcript


@pytest.mark.parametrize("seed", range(4))
def test_a_member_bears_whatever_a_relay_hands_out(seed: int) -> None:
    """The relay has an analyst's key and one site's, and adds what it likes."""
    rng = np.random.default_rng(200 + seed)
    for federation, honest in snapshots():
        entries = honest.transcript.entries
        for name in ("bert", READER):
            make = federation.network.processes[name].make
            member: Follower = make(MemoryRecords())
            for number in range(40):
                draws = Draws(member.transcript, rng)
                first = int(draws.pick((len(member.transcript), 0, 2**32 - 1)))
                more = list(entries[first : first + int(rng.integers(4))])
                if rng.random() < 0.6:
                    signed = [draws.post(signer)[1] for signer in signers(federation)]
                    more.append(Entry.of(signed[int(rng.integers(4))]).encode())
                if more and rng.random() < 0.3:
                    more[-1] = _cut(more[-1], rng)
                place = min(first, len(member.transcript))
                head = member.transcript.heads[place][:8]
                out = HandOut(first, head, draws.pick(COUNTS), draws.names(), 1, tuple(more))
                member.receive(out.encode(), float(number))
                job = member.job()
                if job is not None:
                    member.done(job, job(), float(number))
                member.tick(float(number))
            if member.ended is not None and not member.ended.final:
                assert member.ended.words


def _cut(data: bytes, rng: np.random.Generator) -> bytes:
    at = int(rng.integers(len(data)))
    changed = bytes([data[at] ^ int(rng.integers(1, 256))])
    return data[:at] + (changed + data[at + 1 :] if rng.random() < 0.7 else b"")


# What an analyst's document may say.
DEEP: Any = []
for _ in range(900):
    DEEP = [DEEP]
HOSTILE: tuple[Any, ...] = (
    *(None, True, False, "", "x" * 3000, "\x1b[2J", "\ud800", [], {}, [[]], {"model": {}}, DEEP),
    *(-1, 0, 1, 2, 7, 1000, 2**16, 2**31, 2**53, 2**63, 2**64, -(2**63), 10**30, 10**400),
    *(0.5, -0.0, 1e-320, 1e17, 1e300, -1e300),
    *([0] * 5000, [1e300] * 3, [2**40] * 3, ["a"] * 300, {str(n): 2**63 for n in range(40)}),
)
"""What stands for anything in a document."""
PROGRAMS: tuple[dict[str, Any], ...] = (
    {
        "model": {"kind": "gaussian-mixture", "n_components": [2, 3], "covariance_type": "full"},
        "algorithm": {"kind": "auto"},
        "fit": {"rounds": 20, "seed": 3, "n_init": 2, "moves": 1},
        "columns": ["age", "height"],
    },
    {
        "model": {
            "kind": "mixed-mixture",
            "n_components": 2,
            "families": {"age": "poisson", "height": "gaussian"},
        },
        "algorithm": {},
        "fit": {},
        "columns": ["age", "height"],
    },
)
TABLE = pl.DataFrame(np.random.default_rng(7).poisson(3.0, size=(40, 2)), ["age", "height"])
ODD_NAMES = ("start", "covariance_prior", "target", "weights", "batch_size", "epsilon", "n_init")


def owner(rules: SiteRules) -> OwnerTerms:
    data = as_workers([TABLE])
    return OwnerTerms("bert", rules, set(NAMES), OfferedRows(data))


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """All places of a document, the whole among them."""
    yield path
    inner = dict(enumerate(value)) if isinstance(value, list) else value
    for name, one in inner.items() if isinstance(inner, dict) else ():
        yield from places(one, (*path, name))


def with_value(document: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    changed = copy.deepcopy(document)
    inner = changed
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    return changed


@contextmanager
def bounded() -> Iterator[None]:
    tracemalloc.start()
    began = time.process_time()
    try:
        yield
    finally:
        seconds, (_, peak) = time.process_time() - began, tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert seconds < MOST_SECONDS
    assert peak < MOST_BYTES


def tried(text: bytes, rules: SiteRules) -> str:
    """What a site makes of a document, up to its first pass: words where it refuses."""
    try:
        agreement = Agreement.read(Document(text))
        program = owner(rules).accept(agreement)
        assert program is not None
        next(program.begin(agreement.sites, b"", bytes(32)))
    except EmfedError as error:
        return str(error) or "no words"
    return ""


def document(program: Any) -> dict[str, Any]:
    text = Agreement(NAMES[:3], (READER,), program=program).document().text
    found: dict[str, Any] = json.loads(text)
    return found


def written(about: Any) -> bytes:
    return json.dumps(about, sort_keys=True, separators=(",", ":")).encode()


@pytest.mark.parametrize("program", range(len(PROGRAMS)))
def test_a_document_is_accepted_or_refused_in_words(program: int) -> None:
    """Every place of it in turn holds what no honest analyst writes."""
    rng = np.random.default_rng(program)
    whole = document(PROGRAMS[program])
    rules = SiteRules(unmasked=True, smallest_rows=1, largest_choices=None, mini_batches=True)
    assert tried(written(whole), rules) == ""
    where = list(places(whole))
    for _ in range(150):
        path = where[int(rng.integers(len(where)))]
        value = HOSTILE[int(rng.integers(len(HOSTILE)))]
        if path and rng.random() < 0.3:
            path = (*path[:-1], str(rng.choice(ODD_NAMES)))
        try:
            changed = written(with_value(whole, path, value))
        except TypeError:
            continue
        with bounded(), np.errstate(all="ignore"):
            assert tried(changed, rules) != "no words"


@pytest.mark.parametrize("text", [b'{"a":[' + b"[]," * 5_000_000 + b"0]}", b"[" * 60_000_000])
def test_a_document_that_unpacks_to_millions_of_values_is_not_read(text: bytes) -> None:
    with bounded(), pytest.raises(WireError, match="values"):
        Agreement.read(Document(text))


def test_half_a_character_is_refused() -> None:
    """It cannot be written: a site that names it in a refusal ended with a traceback."""
    text = written(document(PROGRAMS[0])).replace(b'"age"', b'"\\ud800"')
    with pytest.raises(WireError, match="UnicodeEncodeError"):
        Agreement.read(Document(text))


# What people read of others.


@pytest.mark.parametrize("words", ["bad\x1b[31m\nwords", "\ud800", "é" * 9000, "\u202e"])
def test_words_of_others_are_cut_and_made_printable(words: str) -> None:
    sent = SignedOrder(bytes(32), 0, "refuse", words).encode()
    told = SignedOrder.decode(sent).argument
    assert told.isprintable()
    assert len(told.encode()) <= LONGEST_TEXT


@pytest.mark.parametrize("words", [b"bad\x1b[31m", b"\xff", b"x" * (LONGEST_TEXT + 1)])
def test_other_words_are_refused(words: bytes) -> None:
    sent = SignedOrder(bytes(32), 0, "refuse", "").encode()[:-2]
    with pytest.raises(WireError, match="a text"):
        SignedOrder.decode(sent + len(words).to_bytes(2, "little") + words)


# Two that once ended a relay, for all of its runs.


def test_a_change_that_nobody_in_the_set_signed_is_refused() -> None:
    federation, honest = snapshots()[3]
    relay = relay_of(federation, honest)
    about = relay.transcript
    body = SetChange(about.head, 0, (), ("dora",))
    signed = Statement.by(federation.keys[READER], body)
    post = Post(READER, len(about), about.head[:8], body.KIND, signed.body, signed.signature)
    relay.receive(post.encode(), 1e6)
    relay.tick(1e6)
    assert len(about) == len(honest.transcript)


@pytest.mark.parametrize("rounds", ["²", "-1", "1e3", "9" * 10, ""])
def test_an_extension_that_is_no_number_is_refused(rounds: str) -> None:
    federation, honest = snapshots()[3]
    about = relay_of(federation, honest).transcript
    order = SignedOrder(about.settings, 0, "extend", rounds)
    with pytest.raises(WireError, match="no number"):
        about.append(Entry.of(Statement.by(federation.keys[READER], order)).encode())


# Bytes around them.


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60), st.sampled_from(["anna", READER]), st.booleans())
def test_bytes_of_a_connection_are_read_or_refused(data: bytes, name: str, own: bool) -> None:
    """What a relay gets of a member, and a member of a relay, for whatever run."""
    federation, _ = snapshots()[0]
    kept = MemoryRecords()
    runs = RelayRuns(federation.roster, [READER], lambda run: kept, (), lambda run: None, 0.0)
    front = Post(name, 0, bytes(8), 0, b"", b"").encode()[: 2 + len(name)] if own else b""
    with contextlib.suppress(WireError):
        runs.receive(name, bytes(7) + b"\1" + front + data, 0.0)
    MemberRuns(lambda message: None).received(data)
    MemberRuns(lambda message: None).received(bytes(8) + data)
