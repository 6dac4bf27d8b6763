"""The codec: exact round trips, sizes known in advance, and a clear error for anything else."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from emfed.compressors.precision import ULP, round_randomly, round_up
from emfed.core.errors import WireError
from emfed.core.protocols import Compressed, Form, View, WorkerCells
from emfed.core.wire import (
    ANSWER_ENVELOPE,
    ENVELOPE,
    REPLY_ENVELOPE,
    REQUEST_ENVELOPE,
    Header,
    Join,
    Kind,
    Reason,
    RequestBody,
    checksum,
    count_sizes,
    decode_bundle,
    decode_constants,
    decode_floats,
    decode_join,
    decode_payload,
    decode_question,
    decode_refusal,
    decode_reply,
    decode_request,
    decode_text,
    deflate,
    encode_bundle,
    encode_cells,
    encode_constants,
    encode_floats,
    encode_join,
    encode_numbers,
    encode_payload,
    encode_question,
    encode_refusal,
    encode_reply,
    encode_request,
    encode_text,
    envelopes,
    fingerprint,
    floats_size,
    kind_of,
    numbers_size,
    open_answer,
    payload_size,
    payload_sizes,
    peek,
    read_short,
    reply_envelopes,
    request_fronts,
    seal,
    seal_answer,
    seal_refusal,
    shorten,
    steps_size,
)
from emfed.core.wire.control import _framed
from emfed.core.wire.entropy import CHUNK, PARAMETERS, prior
from emfed.core.wire.counts import decode_count, encode_count

GOLDEN = Path(__file__).parent / "golden"
bounds = st.sampled_from([1, 2, 4, 16, 100, 1000, 2**20, 2**30 - 1])


@st.composite
def payloads(draw: Any) -> tuple[Compressed, Form, Any]:
    """Messages of every shape: few and many levels, sparse and dense, with and without dither."""
    bound = draw(bounds)
    n = draw(st.integers(0, 60))
    spread = draw(st.sampled_from([0, 1, bound // 3 + 1, bound]))
    symbols = draw(hnp.arrays(np.int32, n, elements=st.integers(-spread, spread)))
    reals = draw(
        hnp.arrays(
            np.float64, st.integers(0, 5), elements=st.floats(allow_nan=False, allow_infinity=False)
        )
    )
    if draw(st.booleans()):
        with np.errstate(over="ignore"):
            reals = reals.astype(np.float32).astype(np.float64)
        reals[~np.isfinite(reals)] = 0
    dither = None
    if draw(st.booleans()):
        dither = draw(hnp.arrays(np.float64, n, elements=st.floats(-0.5, 0.4999)))
    return Compressed(reals, symbols), Form(len(reals), n, bound), dither


@settings(max_examples=300)
@given(payloads())
def test_round_trip_is_exact_and_sizes_are_true(case: tuple[Compressed, Form, Any]) -> None:
    message, form, dither = case
    with np.errstate(over="ignore"):
        data = encode_payload(message, form, dither)
        stack = Compressed(message.reals[None], message.symbols[None])
        sizes = payload_sizes(stack, form, None if dither is None else dither[None])
    assert len(data) == sizes[0]
    back = decode_payload(data, form, dither)
    assert back.reals.tobytes() == message.reals.tobytes() or (back.reals == message.reals).all()
    np.testing.assert_array_equal(back.symbols, message.symbols)


@pytest.mark.parametrize("n", [1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 3])
@pytest.mark.parametrize("with_dither", [False, True])
def test_long_messages_are_chunked(n: int, with_dither: bool) -> None:
    rng = np.random.default_rng(n)
    symbols = rng.geometric(0.6, size=(1, n)).astype(np.int32) - 1
    symbols *= rng.choice([-1, 1], size=(1, n)).astype(np.int32)
    dither = rng.random((1, n)) - 0.5 if with_dither else None
    message, form = Compressed(np.ones((1, 2)), symbols), Form(2, n, 50)
    mine = None if dither is None else dither[0]
    data = encode_payload(message.take(0), form, mine)
    assert len(data) == payload_sizes(message, form, dither)[0]
    np.testing.assert_array_equal(decode_payload(data, form, mine).symbols, symbols[0])


@pytest.mark.parametrize("spread", [0.01, 0.1, 0.5, 2.0, 5.0])
def test_codes_are_near_the_entropy(spread: float) -> None:
    """At most 5% above the message's own order-0 entropy, plus 4 bytes, scale included."""
    rng = np.random.default_rng(0)
    symbols = np.round(rng.laplace(scale=spread, size=(400, 210))).astype(np.int32)
    form = Form(1, 210, int(np.abs(symbols).max()))
    sizes = payload_sizes(Compressed(np.full((400, 1), 0.1, np.float32) + 0.0, symbols), form)
    entropy = []
    for row in symbols:
        _, counts = np.unique(row, return_counts=True)
        entropy.append(-(counts * np.log2(counts / 210)).sum() / 8)
    assert sizes.mean() <= 1.05 * (np.mean(entropy) + 4) + 4


def test_knowing_the_dither_saves_bytes() -> None:
    rng = np.random.default_rng(1)
    x, u = rng.laplace(scale=0.3, size=(200, 210)), rng.random((200, 210)) - 0.5
    symbols = np.floor(x + u + 0.5).astype(np.int32)
    message, form = Compressed(np.ones((200, 1)), symbols), Form(1, 210, 12)
    blind, sighted = payload_sizes(message, form).mean(), payload_sizes(message, form, u).mean()
    assert sighted < 0.9 * blind


def test_the_prior_is_what_the_specification_says() -> None:
    """Golden integers: another implementation must have the same tables."""
    plain = prior(24, 3, 1)  # mean size 1: ratio floor(2**24 (sqrt(2) - 1)) = 6949350
    assert plain.weights.tolist() == [[74519, 179907, 434334, 1048576, 434334, 179907, 74519]]
    assert plain.total == [2426096]
    assert plain.step == [2426096 // 64]
    assert prior(20, 2, 8).weights.shape == (8, 5)
    assert int(prior(20, 2, 8).weights.sum()) == SIGHTED_SUM
    assert [len(prior(p, 1, 1).total) for p in range(PARAMETERS)] == [1] * PARAMETERS


SIGHTED_SUM = 221025687


@given(payloads(), st.data())
def test_cut_payloads_are_refused_or_shorter_messages(
    case: tuple[Compressed, Form, Any], data: Any
) -> None:
    message, form, dither = case
    with np.errstate(over="ignore"):
        whole = encode_payload(message, form, dither)
    cut = data.draw(st.integers(0, len(whole) - 1))
    try:
        back = decode_payload(whole[:cut], form, dither)
    except WireError:
        return
    assert back.symbols.shape == (form.symbols,)


@settings(max_examples=300)
@given(st.binary(max_size=80), st.integers(0, 3), st.integers(0, 30), bounds, st.booleans())
def test_hostile_payloads_give_the_documented_error_or_a_message(
    data: bytes, reals: int, n: int, bound: int, dithered: bool
) -> None:
    dither = np.linspace(-0.5, 0.49, n) if dithered else None
    try:
        message = decode_payload(data, Form(reals, n, bound), dither)
    except WireError:
        return
    assert message.symbols.shape == (n,)
    assert np.abs(message.symbols.astype(np.int64)).max(initial=0) <= bound
    assert np.isfinite(message.reals).all()


HEADER = Header(Kind.REQUEST, 2**63 + 5, 17, 3, 12345678901234567890, 2, 7)
OTHERS: list[dict[str, int]] = [
    {"run": 2**63 + 4},
    {"run": 5},
    {"round": 18},
    {"worker": 4},
    {"phase": 1},
    {"fingerprint": 1},
    {"generation": 0},
]
headers = st.builds(
    Header,
    st.sampled_from(Kind),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**64 - 1),
    st.one_of(st.just(0), st.integers(0, 2**32 - 1)),
    st.integers(0, 2**16 - 1),
)


@given(headers, st.binary(max_size=40))
def test_both_forms_of_a_message_say_the_same(header: Header, body: bytes) -> None:
    assert peek(seal(header, body)) == (header, body)
    short = read_short(shorten(header, body))
    known = (header.run, header.worker, header.fingerprint)
    assert short.told_to([(1, 2, 3), known]) == header
    assert short.body == body
    assert short.run == header.run % 256
    assert kind_of(seal(header, body)) is kind_of(shorten(header, body)) is header.kind
    for form, known_here in ((seal, False), (shorten, True)):
        size = envelopes(header.round, header.phase, header.generation, np.array([known_here]))
        assert len(form(header, body)) - len(body) == size[0]


@pytest.mark.parametrize("change", OTHERS, ids=str)
def test_a_short_message_or_an_answer_is_not_taken_for_that_of_another(
    change: dict[str, int],
) -> None:
    """Whatever differs in the header, the checksum tells, though the header does not travel."""
    other = dataclasses.replace(HEADER, **change)
    mine = (HEADER.run, HEADER.worker, HEADER.fingerprint)
    assert read_short(shorten(other, b"body")).told_to([mine]) != HEADER
    answer = seal_answer(dataclasses.replace(other, kind=Kind.REPLY), b"upload")
    with pytest.raises(WireError, match="another message"):
        open_answer(answer, (HEADER, b"body"))
    refusal = seal_refusal(shorten(other, b"body"), b"no")
    with pytest.raises(WireError, match="a refusal of another message"):
        open_answer(refusal, (HEADER, b"body"))


def test_an_answer_is_opened_by_who_asked() -> None:
    asked = HEADER, b"body"
    for form in (seal, shorten):
        header, body = open_answer(seal_refusal(form(*asked), b"no"), asked)
        assert (header.kind, body) == (Kind.REFUSAL, b"no")
    mine = dataclasses.replace(HEADER, kind=Kind.REPLY)
    answer = seal_answer(mine, b"upload")
    assert len(answer) == ANSWER_ENVELOPE + 6
    assert open_answer(answer, asked) == (mine, b"upload")
    bundle = dataclasses.replace(HEADER, kind=Kind.BUNDLE), b"other body"
    assert open_answer(answer, bundle) == (mine, b"upload")  # asked again, without the news


def test_bodies_of_rounds_round_trip() -> None:
    data = encode_reply(700, 700, b"payload")
    assert decode_reply(data, 700) == (700, b"payload")
    assert len(data) + ANSWER_ENVELOPE == REPLY_ENVELOPE + 7
    assert decode_reply(encode_reply(20, 700, b""), 700) == (20, b"")
    sizes = reply_envelopes(np.array([700, 20, 0]), np.array([700, 700, 700]))
    assert sizes.tolist() == [REPLY_ENVELOPE] * 3
    full = RequestBody(16, "round", np.array([1.0, -0.0, 5e-324, 1e300]))
    body = encode_request(17, full)
    back = decode_request(body, 17, 4)
    assert back.statistics is not None
    assert full.statistics is not None
    assert back.statistics.tobytes() == full.statistics.tobytes()
    assert (back.accepted, back.kind) == (16, "round")
    assert len(body) == 1 + floats_size(4)
    first = RequestBody(-1, "start", np.zeros(4))
    assert decode_request(encode_request(17, first), 17, 4).accepted == -1
    steps = RequestBody(14, "round", None, (b"abc", b"", b"x" * 200))
    body = encode_request(17, steps)
    assert decode_request(body, 17, 4) == steps
    assert len(body) == 1 + steps_size([3, 0, 200]) == 1 + 1 + 3 + 1 + 200
    assert request_fronts(17, np.array([14, -1, 16])).tolist() == [1, 1, 1]
    for told, kind in itertools.product((full, steps), ("start", "round", "local", "fine")):
        again = encode_request(17, dataclasses.replace(told, kind=kind))
        assert decode_request(again, 17, 4).kind == kind
        assert len(again) == len(encode_request(17, told))
    values = np.array([1.5, 2.5, -3.5])
    assert decode_floats(encode_floats(values), 3).tolist() == values.tolist()
    assert decode_floats(encode_floats(values)).tolist() == values.tolist()


@given(st.integers(0, 2**63 - 1))
def test_counts_round_trip(number: int) -> None:
    data = encode_count(number)
    assert decode_count(b"x" + data + b"rest", 1) == (number, 1 + len(data))
    assert len(data) == count_sizes(np.array(number))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_reals_must_be_finite(value: float) -> None:
    message = Compressed(np.array([value]), np.empty(0, np.int32))
    with pytest.raises(WireError, match="not finite"), np.errstate(invalid="ignore"):
        encode_payload(message, Form(1, 0))
    with pytest.raises(WireError, match="not finite"):
        decode_floats(encode_floats(np.array([value])), 1)


def test_floats_in_fewer_bytes_must_be_exact() -> None:
    values = np.array([0.5, -3.0, 1024.0])
    for precision, size in (("bfloat16", 7), ("float32", 13), ("float64", 25)):
        data = encode_floats(values, precision)
        assert len(data) == size == floats_size(3, precision)
        np.testing.assert_array_equal(decode_floats(data, 3), values)
    with pytest.raises(WireError, match="not exact in float32"):
        encode_floats(np.array([0.1]), "float32")


@given(
    hnp.arrays(np.int64, st.integers(0, 40), elements=st.integers(-(2**19), 2**19)),
    st.integers(0, 40),
)
def test_multiples_of_a_power_of_two_take_few_bytes(multiples: Any, exponent: int) -> None:
    values = multiples * 0.5**exponent
    data = encode_numbers(values)
    assert len(data) == numbers_size(values) <= floats_size(len(values))
    assert decode_floats(data, len(values)).tolist() == values.tolist()
    if len(values) > 3:
        small = np.abs(multiples).max().item().bit_length()
        assert len(data) <= 3 + 1 + len(values) * (small + 2) / 8 + 8
    other = np.append(values, np.pi)
    assert encode_numbers(other) == encode_floats(other)
    assert numbers_size(other) == floats_size(len(other))


def test_requests_that_do_not_add_up_are_refused() -> None:
    for body, message in (
        (b"", "inside a count"),
        (b"\xff" * 12, "more than nine bytes"),
        (encode_count(8 * 18), "18 rounds after another"),
        (encode_count(8 * 2 + 2) + b"\x05ab", "ends inside a step"),
        (encode_count(8 * 9 + 2), "9 steps cannot be"),
        (encode_count(2), "0 steps cannot be"),
        (b"\x00\x80", "expected 4 reals"),
    ):
        with pytest.raises(WireError, match=message):
            decode_request(body, 17, 4)


@settings(max_examples=300)
@given(st.binary(max_size=120), st.integers(0, 60), st.integers(0, 255))
def test_hostile_messages_are_refused(data: bytes, position: int, value: int) -> None:
    """One byte changed, added or left out: no reader takes it for the message it was."""
    asked, mine = (HEADER, data), (HEADER.run, HEADER.worker, HEADER.fingerprint)
    answer = dataclasses.replace(HEADER, kind=Kind.REPLY)
    readers = [
        (seal(HEADER, data), peek),
        (shorten(HEADER, data), lambda m: read_short(m).told_to([mine])),
        (seal_answer(answer, data), lambda m: open_answer(m, asked)[0].kind is Kind.REPLY),
        (seal_refusal(seal(*asked), data), lambda m: open_answer(m, asked)),
    ]
    for whole, read in readers:
        assert read(whole)
        good = bytearray(whole)
        good[position % len(good)] ^= value or 1
        for bad in (bytes(good), whole + b"x", whole[:-1], data):
            try:
                assert not read(bad)
            except WireError:
                continue


def golden_messages() -> dict[str, bytes]:
    """One message of every kind, from fixed inputs."""
    rng = np.random.default_rng(2021)
    symbols = np.array([0, 1, 0, 0, -1, 2, 0, 0, 0, -3, 0, 1], dtype=np.int32)
    dither = rng.random(12) - 0.5
    ternary = Compressed(np.array([0.5, 0.75]), np.clip(symbols, -1, 1).astype(np.int32))
    levels = Compressed(np.array([np.float64(np.float32(0.1))]), symbols)
    precise = Compressed(np.array([0.1]), symbols)
    wide = Compressed(np.array([1.0]), (symbols * 1000 + 7).astype(np.int32))

    answer = dataclasses.replace(HEADER, kind=Kind.REPLY)

    def reply(message: Compressed, bound: int, u: Any = None) -> bytes:
        form = Form(len(message.reals), 12, bound)
        return seal_answer(answer, encode_reply(20, 20, encode_payload(message, form, u)))

    numbers = np.array([1.0, 1 / 3, -2e-308])
    steps = encode_request(17, RequestBody(15, "round", None, (b"\0a", b"\1b")))
    return {
        "reply-ternary": reply(ternary, 1),
        "reply-levels": reply(levels, 4),
        "reply-dither": reply(precise, 6, dither),
        "reply-wide": reply(wide, 5000),
        "request-full": shorten(HEADER, encode_request(17, RequestBody(16, "round", numbers))),
        "request-steps": shorten(HEADER, steps),
        "request-long": seal(HEADER, steps),
        "answer": seal_answer(_kind(Kind.ANSWER), encode_floats(numbers)),
        "cells": encode_cells(CELLS, 100),
        "lost-memory": seal_answer(_kind(Kind.LOST_MEMORY), b""),
        **control_messages(numbers),
    }


def _kind(kind: Kind, **changes: Any) -> Header:
    return dataclasses.replace(HEADER, kind=kind, **changes)


CELLS = WorkerCells(
    np.array([0, 3, 4, 50, 99]), np.array([1.0, 2, 1, 1, 1]), np.array([0.5, 7, 0.5, -2, 7])
)
VIEW = {"parts": [0, 2, 2], "watched": True}


def control_messages(numbers: Any) -> dict[str, bytes]:
    """Those that open a run and keep it in order."""
    hello = {"model": {"model": "linear-gaussian", "kappa": 0.5}, "columns": ["x", "\u00e9"]}
    about = {"columns": ["x", "y"], "shapes": {"mean": [3]}, "software": "emfed 0"}
    constants = encode_constants(700, encode_floats(numbers))
    question = encode_question("values", VIEW, encode_floats(numbers))
    news = [
        (Kind.CONSTANTS, constants),
        (Kind.SETTINGS, encode_text({"view": VIEW, "seed": 3})),
        (Kind.QUESTION, question),
    ]
    return {
        "hello": seal(_kind(Kind.HELLO, fingerprint=0, worker=0), encode_text(hello)),
        "question": shorten(_kind(Kind.QUESTION, phase=0, round=1 << 27), question),
        "join": seal_answer(
            _kind(Kind.JOIN),
            encode_join(Join(2**63 + 5, about, 700, encode_floats(numbers), None, b"cells")),
        ),
        "refusal": seal_refusal(
            b"some message", encode_refusal(Reason.OTHER_INSTANCE, "not me", 2**64 - 1)
        ),
        "bundle": seal(_kind(Kind.BUNDLE), encode_bundle(news)),
    }


def test_control_messages_come_back() -> None:
    numbers = np.array([1.0, 1 / 3, -2e-308])
    made = control_messages(numbers)
    assert decode_text(peek(made["hello"])[1])["columns"] == ["x", "é"]
    body = made["join"][1:-4]
    join = decode_join(body)
    assert (join.instance, join.count, join.about["shapes"]) == (2**63 + 5, 700, {"mean": [3]})
    assert join.cells == b"cells"
    np.testing.assert_array_equal(decode_floats(join.numbers), numbers)
    weighed = dataclasses.replace(join, about=join.about | {"weighted": True}, total=2.5)
    assert decode_join(encode_join(weighed)) == weighed
    rows, frame = 2, 1
    assert payload_size(Kind.JOIN, body) == rows + frame + floats_size(3) + 5
    refusal = encode_refusal(Reason.OTHER_INSTANCE, "not me", 2**64 - 1)
    assert decode_refusal(refusal) == (Reason.OTHER_INSTANCE, "not me", 2**64 - 1)
    question = read_short(made["question"]).body
    kind, view, values = decode_question(question)
    assert (kind, View.read(view)) == ("values", View((0, 2, 2), watched=True))
    np.testing.assert_array_equal(decode_floats(values), numbers)
    assert payload_size(Kind.QUESTION, question) == floats_size(3)
    (_, constants), (_, settings), last = decode_bundle(peek(made["bundle"])[1])
    np.testing.assert_array_equal(decode_constants(constants, 3), [700, *numbers])
    assert decode_text(settings) == {"view": VIEW, "seed": 3}
    assert last == (Kind.QUESTION, question)


@pytest.mark.parametrize(
    ("decode", "body"),
    [
        (decode_text, deflate("[1]")),
        (decode_text, b"\xff"),
        (decode_text, b""),
        (decode_text, deflate('{"a":1}')[:-1]),
        (decode_text, deflate('{"a":1}') + b"x"),
        (decode_text, deflate("[" * 10**5)),
        (decode_text, deflate('{"a":"' + "a" * (1 << 24) + '"}')),
        (decode_floats, b"\xc1\x05\x05\x00"),
        (lambda body: decode_floats(body, 3), b"\xc1\x29\x05\x00"),
        (lambda body: decode_floats(body, 3), b"\xc1\x05"),
        (lambda body: decode_constants(body, 3), b""),
        (lambda body: decode_constants(body, 3), b"\x05\x80" + bytes(16)),
        (decode_join, bytes(7)),
        (decode_join, bytes(8) + b"\xff" * 12),
        (decode_join, bytes(8) + b"\x04" + deflate("{}") + b"\x05\x09\x80"),
        (decode_join, bytes(8) + _framed(deflate('{"weighted":true}')) + b"\x05\x01\x80"),
        (decode_question, b""),
        (decode_question, b"\xff" * 12),
        (decode_question, _framed(deflate("{}"))),
        (decode_question, _framed(deflate('{"kind":"all"}'))),
        (decode_question, _framed(deflate('{"kind":["scores"]}'))),
        (decode_refusal, bytes(9)),
        (decode_refusal, b"\1" + bytes(600)),
        (decode_bundle, b""),
        (decode_bundle, b"\x03\0"),
        (decode_bundle, b"\x03\x05ab"),
        (decode_bundle, b"\xff" * 4),
        (decode_bundle, b"\x03\0" * 5 + b"\x07"),
    ],
)
def test_control_messages_that_are_none(decode: Any, body: bytes) -> None:
    with pytest.raises(WireError):
        decode(body)


@pytest.mark.parametrize("name", list(golden_messages()))
def test_golden_files(name: str) -> None:
    """A change of the format is noticed here: it needs a new version number."""
    assert golden_messages()[name] == (GOLDEN / f"{name}.bin").read_bytes()


def test_envelope_sizes_are_documented() -> None:
    assert (ENVELOPE, ANSWER_ENVELOPE, REQUEST_ENVELOPE, REPLY_ENVELOPE) == (40, 5, 9, 6)
    header = dataclasses.replace(HEADER, generation=0)
    request = shorten(header, encode_request(17, RequestBody(16, "round", None, (b"step",))))
    assert len(request) == REQUEST_ENVELOPE + 4
    assert checksum(header, b"") != checksum(HEADER, b"")
    assert fingerprint(b"model") != fingerprint(b"other")


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_scales_round_up_and_numbers_round_without_bias(precision: Any) -> None:
    rng = np.random.default_rng(0)
    x = np.exp(rng.normal(size=2000) * 10)
    up = round_up(x, precision)
    assert (up >= x).all()
    assert (up <= x * (1 + ULP[precision])).all()
    np.testing.assert_array_equal(round_up(up, precision), up)
    for value in (0.0, 5e-324, 1e-300, 1e300):
        assert round_up(np.array([value]), precision)[0] == value
    signed = np.r_[x[:50], -x[:50]]
    draws = np.stack([round_randomly(signed, precision, rng.random(100)) for _ in range(4000)])
    gap = np.abs(signed) * ULP[precision]
    assert (np.abs(draws - signed) <= gap).all()
    assert (np.abs(draws.mean(axis=0) - signed) <= 5 * gap / np.sqrt(4000)).all()
