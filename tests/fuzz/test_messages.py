"""What a hostile server may send to a site, in valid envelopes, is answered or refused in words.

Messages of real runs are kept, each with the site's folder as it was when the message came. Then
something in one of them is changed: a setting, a description, a view, constants, statistics. A site
answers or refuses by a rule that it knows; that it "could not be worked out" is what it says of
its own mistakes, and its log then has a traceback.
"""

from __future__ import annotations

import json
import shutil
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import count
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import polars as pl
import pytest

import emfed
from emfed.core.wire import (
    Header,
    Kind,
    decode_bundle,
    decode_count,
    decode_end,
    decode_floats,
    decode_question,
    decode_text,
    deflate,
    encode_bundle,
    encode_count,
    encode_floats,
    is_grid,
    seal,
)
from emfed.deployment.approval import check_approved
from emfed.network import RemoteFederation, Site, SiteRules, Transport
from emfed.network.masking import SiteIdentity
from tests.network.losses import heard

MOST_SECONDS, MOST_BYTES = 1.0, 100_000_000
"""Computing and memory that one message may cost a site."""
KEPT_OF_A_KIND = 2
RNG = np.random.default_rng(7)
TABLES = {
    name: pl.DataFrame(RNG.normal(RNG.choice([-3.0, 3.0], (40, 1)), 1.0, (40, 2)), ["x", "y"])
    for name in ("a", "b", "c")
}
KNOWN = SiteIdentity.everybody(TABLES)
RULES = SiteRules(unmasked=True, smallest_rows=1, mini_batches=True)
DEEP: Any = []
for _ in range(900):
    DEEP = [DEEP]
HOSTILE: tuple[Any, ...] = (
    *(None, True, False, "", "x" * 3000, "\x1b[2J", [], {}, [[]], {"model": {}}, DEEP),
    *(-1, 0, 1, 2, 7, 1000, 2**16, 2**31, 2**53, 2**63, 2**64, -(2**63), 10**30, 10**400),
    *(0.5, -0.0, 1e-320, 1e17, 1e300, -1e300, float("nan"), float("inf"), float("-inf")),
    *([0] * 5000, [1e300] * 3, [2**40] * 3, ["a"] * 300, {str(n): 2**63 for n in range(40)}),
)
"""What stands for anything in a text."""
ODD_NUMBERS = (0.0, -1.0, 1e-320, 1e17, 1e155, 1e300, -1e300, 2.0**1023, np.pi)


@dataclass(frozen=True)
class Heard:
    """A message, and the site's folder just before it came."""

    folder: Path
    header: Header
    parts: tuple[tuple[Kind, bytes], ...]


class Keeping(Transport):
    """Sites in memory, one of whose messages are kept."""

    def __init__(self, where: Path, kept: list[Heard]) -> None:
        self._sites = {name: site(name, where / name) for name in TABLES}
        self._where, self._kept, self._numbers = where, kept, count()
        self._seen: dict[str, int] = {}

    def workers(self) -> list[str]:
        return list(self._sites)

    def deliver(
        self, messages: Mapping[str, bytes], deadline: float
    ) -> Iterator[tuple[str, bytes]]:
        for name, message in messages.items():
            if name == "a":
                self._keep(*self._sites[name].read(message))
            yield name, self._sites[name].step(message)

    def _keep(self, header: Header, body: bytes) -> None:
        parts = decode_bundle(body) if header.kind is Kind.BUNDLE else [(header.kind, body)]
        names = [kind.name for kind, _ in parts]
        if parts[-1][0] is Kind.QUESTION:
            names.append(decode_question(parts[-1][1])[0])
        subject = " ".join(names)
        self._seen[subject] = self._seen.get(subject, 0) + 1
        if self._seen[subject] <= KEPT_OF_A_KIND:
            folder = self._where / "kept" / str(next(self._numbers))
            folder.mkdir(parents=True)  # the site has none before its first message
            if (self._where / "a").exists():
                shutil.copytree(self._where / "a", folder, dirs_exist_ok=True)
            self._kept.append(Heard(folder, header, tuple(parts)))


def site(name: str, folder: Path) -> Site:
    return Site(TABLES[name], folder, rules=RULES, identity=KNOWN[name], columns=["x", "y"])


@lru_cache
def messages() -> list[Heard]:
    """Messages of a masked run, one without masks, one of candidates, and a private one."""
    kept: list[Heard] = []
    model, where = emfed.gaussian_mixture(2, "diag"), Path(mkdtemp(prefix="emfed-fuzz-"))
    compressed = emfed.FedEM(emfed.Dithering(4), step_size=0.5)
    runs: tuple[tuple[Any, dict[str, Any]], ...] = (
        ("auto", {"masks": True, "scores": True}),
        (compressed, {"masks": False, "start": "merge", "validate": True}),
        ("auto", {"masks": False, "n_components": "1:3", "n_init": 2, "rounds": 20}),
        (None, {"epsilon": 60.0}),
    )
    for number, (algorithm, settings) in enumerate(runs):
        transport = Keeping(where / str(number), kept)
        federation = RemoteFederation(transport, attempts=1, pause=0.0, columns=["x", "y"])
        emfed.fit(model, federation, algorithm, **{"rounds": 12, "seed": 3, **settings})
    return kept


# What is changed.


def changed(content: Any, rng: np.random.Generator) -> Any:
    """Some content of a text with something else in one place, or with one place more or less."""
    if isinstance(content, dict) and content and rng.random() < 0.8:
        name = str(rng.choice(sorted(content)))
        if (kind := rng.random()) < 0.1:
            return {key: value for key, value in content.items() if key != name}
        if kind < 0.2:
            return {**content, "unheard of": picked(rng)}
        return {**content, name: changed(content[name], rng)}
    if isinstance(content, list) and content and rng.random() < 0.6:
        place = int(rng.integers(len(content)))
        return [*content[:place], changed(content[place], rng), *content[place + 1 :]]
    return picked(rng)


def picked(rng: np.random.Generator) -> Any:
    return HOSTILE[int(rng.integers(len(HOSTILE)))]


def changed_text(body: bytes, rng: np.random.Generator) -> bytes:
    return deflate(json.dumps(changed(decode_text(body), rng)))


def changed_bytes(body: bytes, rng: np.random.Generator) -> bytes:
    """Bytes with some others in them, too few or too many."""
    out, how = bytearray(body), rng.random()
    if how < 0.2:
        return bytes(out[: int(rng.integers(len(out) + 1))])
    if how < 0.4:
        return bytes(out) + rng.bytes(int(rng.integers(1, 40)))
    for _ in range(int(rng.integers(1, 4))):
        if out:
            out[int(rng.integers(len(out)))] = int(rng.choice([0, 1, 127, 128, 255, 64]))
    return bytes(out)


def changed_numbers(body: bytes, rng: np.random.Generator) -> bytes:
    """Numbers of a question, with some that no rows have, or of another number of them."""
    if not body or is_grid(body):
        return changed_bytes(body, rng)
    values = decode_floats(body).copy()
    if rng.random() < 0.2:
        values = np.resize(values, int(rng.choice([0, 1, len(values) + 1, 4096])))
    for _ in range(int(rng.integers(1, 4)) if len(values) else 0):
        values[int(rng.integers(len(values)))] = rng.choice(ODD_NUMBERS)
    return encode_floats(values)


def changed_question(body: bytes, rng: np.random.Generator) -> bytes:
    kind, view, numbers = decode_question(body)
    if rng.random() < 0.5:
        return framed(changed({"kind": kind, **view}, rng)) + numbers
    return framed({"kind": kind, **view}) + changed_numbers(numbers, rng)


def framed(content: Any) -> bytes:
    text = deflate(json.dumps(content))
    return encode_count(len(text)) + text


def changed_constants(body: bytes, rng: np.random.Generator) -> bytes:
    """Another number of rows, or other moments, under the number of before."""
    number, start = decode_count(body)
    rows, rest = decode_count(body, start)
    if rng.random() < 0.4:
        rows = int(rng.choice([0, 1, 2**31, 2**62]))
        return encode_count(number) + encode_count(rows) + body[rest:]
    return body[:rest] + changed_bytes(body[rest:], rng)


def changed_end(body: bytes, rng: np.random.Generator) -> bytes:
    about, model = decode_end(body)
    return framed(changed(about, rng)) + model


CHANGES: dict[Kind, Callable[[bytes, np.random.Generator], bytes]] = {
    Kind.HELLO: changed_text,
    Kind.SETTINGS: changed_text,
    Kind.QUESTION: changed_question,
    Kind.CONSTANTS: changed_constants,
    Kind.END: changed_end,
}


def changed_header(header: Header, rng: np.random.Generator) -> Header:
    name, most = [("round", 2**32), ("phase", 2**16), ("generation", 2**32), ("worker", 2**32)][
        int(rng.integers(4))
    ]
    value = int(rng.choice([0, 1, 2, 1000, most // 2, most - 1]))
    return replace(header, **{name: value})


def mutant(told: Heard, rng: np.random.Generator) -> bytes:
    """A kept message with one change, in an envelope that fits it."""
    if rng.random() < 0.1:
        return seal(changed_header(told.header, rng), body_of(told.parts))
    place = int(rng.integers(len(told.parts)))
    kind, body = told.parts[place]
    make = CHANGES.get(kind, changed_bytes) if rng.random() < 0.85 else changed_bytes
    parts = [*told.parts[:place], (kind, make(body, rng)), *told.parts[place + 1 :]]
    return seal(told.header, body_of(parts))


def body_of(parts: Any) -> bytes:
    return encode_bundle(parts) if len(parts) > 1 else parts[0][1]


def repr_of(value: Any) -> str:
    """A short name of a test's argument."""
    return str(value)[:20]


# What a site makes of it.


def answered(told: Heard, message: bytes, folder: Path, approves: bool = False) -> None:
    """A site takes the message: it answers, or refuses by a rule, at a bounded cost."""
    shutil.copytree(told.folder, folder)
    asked = site("a", folder)
    if approves:
        asked.approve = lambda content: check_approved(folder, content)
    with heard() as lines, np.errstate(all="ignore"):
        tracemalloc.start()
        began = time.process_time()
        asked.step(message)
        seconds, (_, peak) = time.process_time() - began, tracemalloc.get_traced_memory()
        tracemalloc.stop()
    shutil.rmtree(folder)
    assert not [line for line in lines if "could not be answered" in line], lines
    assert seconds < MOST_SECONDS
    assert peak < MOST_BYTES


@pytest.mark.parametrize("seed", range(4))
def test_a_site_answers_or_refuses_whatever_a_hostile_server_says(
    seed: int, tmp_path: Path
) -> None:
    rng, kept = np.random.default_rng(seed), messages()
    for number in range(60):
        told = kept[int(rng.integers(len(kept)))]
        answered(told, mutant(told, rng), tmp_path / str(number))


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        (Kind.SETTINGS, ("unheard of",), float("nan")),
        (Kind.HELLO, ("columns",), 5),
        (Kind.HELLO, ("model", "n_components"), 10**400),
        (Kind.HELLO, ("model",), {str(n): 2**63 for n in range(9000)}),
        (Kind.HELLO, ("model", "n_components"), DEEP),
        (Kind.SETTINGS, ("algorithm", "share"), "0.1"),
        (Kind.SETTINGS, ("algorithm", "share"), None),
        (Kind.SETTINGS, ("algorithm", "share"), 0.0),
        (Kind.SETTINGS, ("algorithm", "memory_rate"), None),
        (Kind.SETTINGS, ("seed",), 2**64),
    ],
    ids=repr_of,
)
def test_settings_that_were_a_sites_own_mistake_are_refused(
    kind: Kind, path: tuple[str, ...], value: Any, tmp_path: Path
) -> None:
    """Each was a traceback in the site's log, and the server heard that it could not be worked
    out."""
    tried = 0
    for told in messages():
        bodies = dict(told.parts)
        content = decode_text(bodies[kind]) if kind in bodies else {}
        inner = content.get(path[0], {}) if len(path) == 2 else content
        if kind not in bodies or (len(path) == 2 and path[1] not in inner):
            continue
        inner[path[-1]] = value
        text = deflate(json.dumps(content))
        parts = [(each, text if each is kind else body) for each, body in told.parts]
        answered(told, seal(told.header, body_of(parts)), tmp_path / str(tried))
        tried += 1
    assert tried


def test_a_text_that_unpacks_to_millions_of_values_is_not_read() -> None:
    """A hello of 16 kB took a third of a gigabyte."""
    bomb = deflate('{"a":[' + "[]," * 5_000_000 + "0]}")
    assert len(bomb) < 20_000
    tracemalloc.start()
    with pytest.raises(emfed.WireError, match="values"):
        decode_text(bomb)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < MOST_BYTES


def test_a_site_whose_owner_is_asked_answers_or_refuses_any_hello(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    hellos = [told for told in messages() if told.header.kind is Kind.HELLO]
    for number in range(100):
        told = hellos[number % len(hellos)]
        answered(told, mutant(told, rng), tmp_path / str(number), approves=True)
