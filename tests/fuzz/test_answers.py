"""What a hostile site may answer, in valid envelopes, ends no run and spoils no model unnoticed.

One of four sites changes some of its answers: a text, a number of rows, moments, statistics, an
upload, a part of a masked sum, a refusal, or the kind of the answer. The run goes on with it or
without it, or ends in words that people can act on; what comes out is finite, at a bounded cost.
"""

from __future__ import annotations

import contextlib
import time
import tracemalloc
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import emfed
from emfed.core.errors import WireError
from emfed.core.wire import (
    Join,
    Kind,
    Message,
    Reason,
    decode_join,
    decode_reply,
    encode_count,
    encode_join,
    encode_refusal,
    open_answer,
    seal_answer,
    seal_refusal,
)
from emfed.network import RemoteFederation, Site, SiteRules, Transport
from emfed.network.masking import SiteIdentity
from emfed.network.sums import EXACT_STEP, Opened
from tests.fuzz.test_messages import changed, changed_bytes, changed_numbers, framed

MOST_SECONDS, MOST_BYTES = 30.0, 150_000_000
"""Computing and memory that a run of 12 rounds with a hostile site may take."""
RNG = np.random.default_rng(7)
TABLES = {name: RNG.normal(RNG.choice([-3.0, 3.0], (40, 1)), 1.0, (40, 2)) for name in "abcd"}
KNOWN = SiteIdentity.everybody(TABLES)
COUNTS = (0, 1, 2, 39, 41, 2**31, 2**50, 2**63 - 1)
ANSWERS = (Kind.JOIN, Kind.ANSWER, Kind.REPLY, Kind.LOST_MEMORY, Kind.READY, Kind.MASKED)
FEDEM = emfed.FedEM(emfed.Dithering(4), step_size=0.5)
RUNS: dict[str, tuple[Any, dict[str, Any]]] = {
    "masked": ("auto", {"masks": True, "scores": True}),
    "plain": ("auto", {"masks": False, "scores": True, "errors": True}),
    "FedEM": (FEDEM, {"masks": False, "start": "merge", "validate": True}),
    "EM": (emfed.EM(), {"masks": False, "start": "k-means"}),
    "candidates": ("auto", {"masks": False, "n_components": "1:3", "n_init": 2}),
    "private": (None, {"epsilon": 60.0}),
}


class Hostile(Transport):
    """Sites in memory, one of which changes answers."""

    def __init__(self, where: Path, rng: np.random.Generator, often: float) -> None:
        # Lies that rows might tell move the model as such rows would, by long steps, too.
        rules = SiteRules(unmasked=True, smallest_rows=1, mini_batches=True, largest_step=None)
        self._sites = {
            name: Site(table, where / name, rules=rules, identity=KNOWN[name])
            for name, table in TABLES.items()
        }
        self._rng, self._often = rng, often

    def workers(self) -> list[str]:
        return list(self._sites)

    def deliver(
        self, messages: Mapping[str, bytes], deadline: float
    ) -> Iterator[tuple[str, bytes]]:
        for name, message in messages.items():
            site = self._sites[name]
            asked = site.read(message) if name == "b" else None
            answer = site.step(message)
            if asked is not None and self._rng.random() < self._often:
                answer = self._changed(message, asked, answer)
            yield name, answer

    def _changed(self, message: bytes, asked: Message, answer: bytes) -> bytes:
        rng = self._rng
        if rng.random() < 0.1:
            words = "\x1b[2J=1+1" + "x" * int(rng.choice([0, 10, 5000]))
            reason = Reason(int(rng.choice(list(Reason))))
            return seal_refusal(message, encode_refusal(reason, words, int(rng.choice(COUNTS))))
        try:
            header, body = open_answer(answer, asked)
        except WireError:  # it refused
            return answer
        kind = header.kind
        if kind is Kind.REFUSAL:
            return seal_refusal(message, changed_bytes(body, rng))
        body = changed_body(kind, body, rng)
        if rng.random() < 0.1:
            kind = Kind(int(rng.choice(ANSWERS)))
        return seal_answer(replace(header, kind=kind), body)


def changed_body(kind: Kind, body: bytes, rng: np.random.Generator) -> bytes:
    """The body of an answer with one change."""
    if rng.random() < 0.25:
        return changed_bytes(body, rng)
    if kind is Kind.JOIN:
        join = changed_join(decode_join(body), rng)
        bare = encode_join(replace(join, about={}))
        return bare.replace(framed({}), framed(join.about), 1)  # not a number is no JSON of ours
    if kind is Kind.REPLY:
        evaluations, payload = decode_reply(body, len(TABLES["b"]))
        if rng.random() < 0.3:
            return encode_count(int(rng.choice(COUNTS))) + payload
        return encode_count(evaluations + 1) + numbers(payload, rng)
    return numbers(body, rng)


def numbers(body: bytes, rng: np.random.Generator) -> bytes:
    """Floats with others among them, where they are floats; else bytes."""
    try:
        return changed_numbers(body, rng)
    except WireError:
        return changed_bytes(body, rng)


def changed_join(join: Join, rng: np.random.Generator) -> Join:
    part = int(rng.integers(5))
    if part == 0:
        return replace(join, count=int(rng.choice(COUNTS)))
    if part == 1:
        return replace(join, instance=int(rng.integers(1 << 62)))
    if part == 2:
        about = changed(join.about, rng)
        return replace(join, about=about if isinstance(about, dict) else {"shapes": about})
    if part == 3:
        about, total = join.about | {"weighted": True}, float(rng.choice([1e-300, 40.0, 1e300]))
        return replace(join, about=about, total=total)
    return replace(join, numbers=numbers(join.numbers, rng), cells=rng.bytes(int(rng.integers(9))))


def harmed(run: str, seed: int, where: Path) -> None:
    """One run with a hostile site: it ends well, or in words."""
    rng = np.random.default_rng(seed)
    transport = Hostile(where, rng, float(rng.choice([0.05, 0.3, 1.0])))
    federation = RemoteFederation(transport, attempts=2, pause=0.0)
    algorithm, settings = RUNS[run]
    model = emfed.gaussian_mixture(2, "diag")
    options: dict[str, Any] = {"rounds": 12, "seed": 3, **settings}
    began, result = time.process_time(), None
    with contextlib.suppress(emfed.EmfedError):  # too few are left, or masks do not cancel
        result = emfed.fit(model, federation, algorithm, **options)
    assert time.process_time() - began < MOST_SECONDS
    assert not {"a", "c", "d"} & {*federation.refusals}, federation.refusals
    if result is not None:
        assert all(np.isfinite(values).all() for values in result.params.arrays().values())


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.filterwarnings("ignore::emfed.EmfedWarning")
def test_a_hostile_site_ends_no_run_without_words(run: str, tmp_path: Path) -> None:
    harmed(run, 0, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.filterwarnings("ignore::emfed.EmfedWarning")
def test_a_hostile_site_ends_no_run_without_words_whatever_it_says(
    run: str, tmp_path: Path
) -> None:
    for seed in range(1, 13):
        tracemalloc.start()
        harmed(run, seed, tmp_path / str(seed))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < MOST_BYTES


@pytest.mark.parametrize("rows", [-(1 << 70), 0, 1 << 41, 1 << 70])
def test_a_masked_opening_of_no_possible_number_of_rows_is_told_in_words(
    rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2^64 rows ended the server with a traceback, none ended the run for good."""

    def lie(sums: Any, *rest: Any) -> Opened:
        lied = sums.astype(object)
        lied[0] = int(rows / EXACT_STEP)
        return honest(lied, *rest)

    honest = Opened.of
    monkeypatch.setattr(Opened, "of", lie)
    federation = RemoteFederation(Hostile(tmp_path, RNG, 0.0), attempts=2, pause=0.0)
    with pytest.raises(emfed.ParticipationError, match="a sum does not tell which"):
        emfed.fit(emfed.gaussian_mixture(2, "diag"), federation, "auto", masks=True, rounds=3)
