"""The codec: exact round trips, sizes known in advance, and a clear error for anything else."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy.special import gammaln

from emfed.compressors.precision import ULP, round_randomly, round_up
from emfed.core.errors import WireError
from emfed.core.protocols import Compressed, Form, View
from emfed.core.wire import (
    ENVELOPE,
    REPLY_ENVELOPE,
    REQUEST_ENVELOPE,
    Header,
    Join,
    Kind,
    Reason,
    RequestBody,
    decode_bundle,
    decode_floats,
    decode_join,
    decode_payload,
    decode_question,
    decode_refusal,
    decode_reply,
    decode_request,
    decode_support,
    decode_table,
    decode_text,
    encode_bundle,
    encode_floats,
    encode_join,
    encode_payload,
    encode_question,
    encode_refusal,
    encode_reply,
    encode_request,
    encode_support,
    encode_table,
    encode_text,
    fingerprint,
    floats_size,
    join_envelope,
    payload_sizes,
    peek,
    question_envelope,
    seal,
    support_size,
    unseal,
)
from emfed.core.wire.entropy import CHUNK, PARAMETERS, prior

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


HEADER = Header(Kind.REPLY, 2**63 + 5, 17, 3, 12345678901234567890, 210)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"run": 1}, "another run"),
        ({"round": 18}, "another round: expected 18, got 17"),
        ({"worker": 4}, "another worker"),
        ({"phase": 1}, "another phase"),
        ({"fingerprint": 1}, "another model or layout"),
        ({"dimension": 211}, "another dimension"),
        ({"kind": Kind.REQUEST}, "another kind"),
    ],
)
def test_a_message_of_another_kind_is_refused_with_the_reason(
    change: dict[str, Any], message: str
) -> None:
    data = encode_reply(HEADER, 0, 700, b"body")
    with pytest.raises(WireError, match=message):
        decode_reply(data, dataclasses.replace(HEADER, **change))


def test_replies_requests_and_tables_round_trip() -> None:
    data = encode_reply(HEADER, 2, 700, b"payload")
    assert decode_reply(data, HEADER) == (2, 700, b"payload")
    assert len(data) == REPLY_ENVELOPE + 7
    header = dataclasses.replace(HEADER, kind=Kind.REQUEST, dimension=4)
    full = RequestBody(1, 16, False, np.array([1.0, -0.0, 5e-324, 1e300]))
    back = decode_request(encode_request(header, full), header)
    assert back.statistics is not None
    assert full.statistics is not None
    assert back.statistics.tobytes() == full.statistics.tobytes()
    assert (back.generation, back.accepted, back.start) == (1, 16, False)
    assert len(encode_request(header, full)) == REQUEST_ENVELOPE + floats_size(4)
    steps = RequestBody(0, 15, False, None, (b"abc", b""), 15)
    assert decode_request(encode_request(header, steps), header) == steps
    table = dataclasses.replace(HEADER, kind=Kind.ANSWER, dimension=3)
    values = np.array([1.5, 2.5, -3.5])
    np.testing.assert_array_equal(decode_table(encode_table(table, values), table), values)
    assert decode_floats(encode_floats(values), 3).tolist() == values.tolist()


@settings(max_examples=150)
@given(st.integers(1, 5000), st.floats(0, 1), st.integers(0, 2**32))
def test_supports_round_trip_near_their_entropy(size: int, share: float, seed: int) -> None:
    indices = np.flatnonzero(np.random.default_rng(seed).random(size) < share)
    data = encode_support(indices, size)
    assert len(data) == support_size(indices, size)
    np.testing.assert_array_equal(decode_support(data, size), indices)
    k = len(indices)
    least = (gammaln(size + 1) - gammaln(k + 1) - gammaln(size - k + 1)) / np.log(2) / 8
    assert len(data) <= 1.2 * least + 12  # log2 of the number of such supports


def test_a_large_sparse_support() -> None:
    indices = np.sort(np.random.default_rng(0).choice(5_000_000, 5_000, replace=False))
    data = encode_support(indices, 5_000_000)
    np.testing.assert_array_equal(decode_support(data, 5_000_000), indices)
    assert len(data) < 1.5 * 5_000  # 11.4 bits an index is the entropy, 12 allowed


@given(st.binary(max_size=60), st.integers(0, 200))
def test_hostile_supports_are_refused_or_valid(data: bytes, size: int) -> None:
    try:
        indices = decode_support(data, size)
    except WireError:
        return
    assert np.all(np.diff(indices) > 0)
    assert len(indices) == 0 or (indices[0] >= 0 and indices[-1] < size)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_reals_must_be_finite(value: float) -> None:
    message = Compressed(np.array([value]), np.empty(0, np.int32))
    with pytest.raises(WireError, match="not finite"), np.errstate(invalid="ignore"):
        encode_payload(message, Form(1, 0))
    with pytest.raises(WireError, match="not finite"):
        decode_floats(encode_floats(np.array([value])), 1)


def test_bad_supports_are_refused() -> None:
    for indices in ([3, 2], [1, 1], [0, 9]):
        with pytest.raises(WireError, match="increasing indices below 9"):
            encode_support(np.array(indices), 9)


def test_floats_in_fewer_bytes_must_be_exact() -> None:
    values = np.array([0.5, -3.0, 1024.0])
    for precision, size in (("bfloat16", 7), ("float32", 13), ("float64", 25)):
        data = encode_floats(values, precision)
        assert len(data) == size == floats_size(3, precision)
        np.testing.assert_array_equal(decode_floats(data, 3), values)
    with pytest.raises(WireError, match="not exact in float32"):
        encode_floats(np.array([0.1]), "float32")


def test_requests_that_do_not_add_up_are_refused() -> None:
    header = dataclasses.replace(HEADER, kind=Kind.REQUEST, dimension=4)
    for body, message in (
        (b"short", "at least"),
        (bytes(12) + b"\x02\x00" + bytes(4), "unknown flags"),
        (bytes(12) + b"\x00\x01" + bytes(4) + b"\x05", "ends inside a step"),
        (bytes(12) + b"\x00\x01" + bytes(4) + b"\x05\0\0\0ab", "ends inside a step"),
        (bytes(12) + b"\x00\x01" + bytes(4), "0 steps cannot lead from round 0 to 17"),
        (bytes(12) + b"\x00\x00" + bytes(4) + b"\x80", "expected 4 reals"),
    ):
        with pytest.raises(WireError, match=message):
            decode_request(seal(header, body), header)


@settings(max_examples=300)
@given(st.binary(max_size=120), st.integers(0, 60), st.integers(0, 255))
def test_hostile_messages_are_refused(data: bytes, position: int, value: int) -> None:
    with pytest.raises(WireError):
        unseal(data, HEADER)
    good = bytearray(encode_reply(HEADER, 0, 7, data))
    position %= len(good)
    if good[position] != value:  # one byte changed anywhere
        good[position] = value
        with pytest.raises(WireError):
            unseal(bytes(good), HEADER)
    with pytest.raises(WireError):
        unseal(bytes(good) + b"x", HEADER)
    with pytest.raises(WireError):
        unseal(bytes(good[:-1]), HEADER)


def golden_messages() -> dict[str, bytes]:
    """One message of every kind, from fixed inputs."""
    rng = np.random.default_rng(2021)
    symbols = np.array([0, 1, 0, 0, -1, 2, 0, 0, 0, -3, 0, 1], dtype=np.int32)
    dither = rng.random(12) - 0.5
    ternary = Compressed(np.array([0.5, 0.75]), np.clip(symbols, -1, 1).astype(np.int32))
    levels = Compressed(np.array([np.float64(np.float32(0.1))]), symbols)
    precise = Compressed(np.array([0.1]), symbols)
    wide = Compressed(np.array([1.0]), (symbols * 1000 + 7).astype(np.int32))

    def reply(message: Compressed, bound: int, u: Any = None) -> bytes:
        form = Form(len(message.reals), 12, bound)
        header = dataclasses.replace(HEADER, dimension=12)
        return encode_reply(header, 0, 20, encode_payload(message, form, u))

    header = dataclasses.replace(HEADER, kind=Kind.REQUEST, dimension=3)
    numbers = np.array([1.0, 1 / 3, -2e-308])
    return {
        "reply-ternary": reply(ternary, 1),
        "reply-levels": reply(levels, 4),
        "reply-dither": reply(precise, 6, dither),
        "reply-wide": reply(wide, 5000),
        "request-full": encode_request(header, RequestBody(0, 16, False, numbers)),
        "request-steps": encode_request(
            header, RequestBody(0, 15, False, None, (b"\0a", b"\1b"), 15)
        ),
        "answer": encode_table(
            dataclasses.replace(header, kind=Kind.ANSWER, phase=0xA5C3), numbers
        ),
        "constants": encode_table(dataclasses.replace(header, kind=Kind.CONSTANTS), numbers),
        "support": seal(
            dataclasses.replace(header, kind=Kind.SUPPORT, dimension=100),
            encode_support(np.array([0, 3, 4, 50, 99]), 100),
        ),
        "lost-memory": seal(dataclasses.replace(header, kind=Kind.LOST_MEMORY), b""),
        **control_messages(header, numbers),
    }


def control_messages(header: Header, numbers: Any) -> dict[str, bytes]:
    """Those that open a run and keep it in order."""
    hello = encode_text(
        dataclasses.replace(header, kind=Kind.HELLO, dimension=0),
        {"model": {"model": "linear-gaussian", "kappa": 0.5}, "columns": ["x", "\u00e9"]},
    )
    about = {"columns": ["x", "y"], "shapes": {"mean": [3]}, "software": "emfed 0"}
    join = Join(2**63 + 5, about, 700, numbers)
    question = dataclasses.replace(header, kind=Kind.QUESTION, phase=2)
    view = {"parts": [0, 2, 2], "watched": True}
    return {
        "hello": hello,
        "settings": encode_text(
            dataclasses.replace(header, kind=Kind.SETTINGS, dimension=0, phase=2),
            {"view": view, "seed": 3},
        ),
        "question": encode_question(question, "values", view, numbers),
        "join": encode_join(dataclasses.replace(header, kind=Kind.JOIN), join),
        "refusal": encode_refusal(
            dataclasses.replace(header, kind=Kind.REFUSAL, dimension=0),
            Reason.OTHER_INSTANCE,
            "not me",
            2**64 - 1,
        ),
        "bundle": encode_bundle(
            dataclasses.replace(header, kind=Kind.BUNDLE, dimension=0), [hello, hello[:3]]
        ),
    }


def test_control_messages_come_back() -> None:
    numbers = np.array([1.0, 1 / 3, -2e-308])
    made = control_messages(dataclasses.replace(HEADER, dimension=3), numbers)
    bodies = {name: peek(message)[1] for name, message in made.items()}
    assert decode_text(bodies["hello"])["columns"] == ["x", "é"]
    join = decode_join(bodies["join"], 3)
    assert (join.instance, join.count, join.about["shapes"]) == (2**63 + 5, 700, {"mean": [3]})
    np.testing.assert_array_equal(join.values, numbers)
    assert decode_refusal(bodies["refusal"]) == (Reason.OTHER_INSTANCE, "not me", 2**64 - 1)
    assert decode_bundle(bodies["bundle"]) == [made["hello"], made["hello"][:3]]
    rows = 8
    assert len(made["join"]) - join_envelope(bodies["join"]) == rows + floats_size(3)
    kind, view, values = decode_question(bodies["question"], 3)
    assert (kind, View.read(view)) == ("values", View((0, 2, 2), watched=True))
    np.testing.assert_array_equal(values, numbers)
    assert len(made["question"]) - question_envelope(bodies["question"]) == floats_size(3)
    assert decode_text(bodies["settings"]) == {"view": view, "seed": 3}
    assert peek(made["settings"])[0].phase == 2


@pytest.mark.parametrize(
    ("decode", "body"),
    [
        (decode_text, b"[1]"),
        (decode_text, b"\xff"),
        (decode_text, b"[" * 10**5),
        (lambda body: decode_join(body, 3), bytes(19)),
        (lambda body: decode_join(body, 3), bytes(8) + b"\xff" * 12),
        (lambda body: decode_question(body, 3), b""),
        (lambda body: decode_question(body, 3), bytes(3)),
        (lambda body: decode_question(body, 3), b"\xff" * 12),
        (lambda body: decode_question(body, 3), b"\x02\0\0\0{}"),
        (lambda body: decode_question(body, 3), b'\x0d\0\0\0{"kind":"all"}'),
        (lambda body: decode_question(body, 3), b'\x11\0\0\0{"kind":["scores"]}'),
        (decode_refusal, bytes(9)),
        (decode_refusal, b"\1" + bytes(600)),
        (decode_bundle, b""),
        (decode_bundle, b"\1\0"),
        (decode_bundle, b"\xff" * 4),
        (decode_bundle, bytes(4 * 5)),
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
    assert (ENVELOPE, REQUEST_ENVELOPE, REPLY_ENVELOPE) == (44, 62, 56)
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
