"""The codec: exact round trips, sizes known in advance, and a clear error for anything else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from emfed.compressors.precision import ULP, round_randomly, round_up
from emfed.core.errors import WireError
from emfed.core.protocols import Compressed, Form, WorkerCells
from emfed.core.wire import (
    count_sizes,
    decode_count,
    decode_floats,
    decode_payload,
    encode_cells,
    encode_count,
    encode_floats,
    encode_numbers,
    encode_payload,
    floats_size,
    payload_sizes,
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
    assert len(data) <= floats_size(len(values))
    assert decode_floats(data, len(values)).tolist() == values.tolist()
    if len(values) > 3:
        small = np.abs(multiples).max().item().bit_length()
        assert len(data) <= 3 + 1 + len(values) * (small + 2) / 8 + 8
    other = np.append(values, np.pi)
    assert encode_numbers(other) == encode_floats(other)


CELLS = WorkerCells(
    np.array([0, 3, 4, 50, 99]), np.array([1.0, 2, 1, 1, 1]), np.array([0.5, 7, 0.5, -2, 7])
)


def golden_payloads() -> dict[str, bytes]:
    """One payload of every kind, from fixed inputs."""
    rng = np.random.default_rng(2021)
    symbols = np.array([0, 1, 0, 0, -1, 2, 0, 0, 0, -3, 0, 1], dtype=np.int32)
    dither = rng.random(12) - 0.5

    def payload(reals: list[float], symbols: Any, bound: int, u: Any = None) -> bytes:
        message = Compressed(np.array(reals), np.asarray(symbols, np.int32))
        return encode_payload(message, Form(len(reals), 12, bound), u)

    return {
        "ternary": payload([0.5, 0.75], np.clip(symbols, -1, 1), 1),
        "levels": payload([float(np.float32(0.1))], symbols, 4),
        "dither": payload([0.1], symbols, 6, dither),
        "wide": payload([1.0], symbols * 1000 + 7, 5000),
        "floats": encode_floats(np.array([1.0, 1 / 3, -2e-308])),
        "cells": encode_cells(CELLS, 100),
    }


@pytest.mark.parametrize(
    ("count", "body"),
    [
        (None, b"\xc1\x05\x05\x00"),
        (3, b"\xc1\x29\x05\x00"),
        (3, b"\xc1\x05"),
        (4, b"\x80"),
        (3, b""),
    ],
)
def test_numbers_that_are_none(count: int | None, body: bytes) -> None:
    with pytest.raises(WireError):
        decode_floats(body, count)


@pytest.mark.parametrize("name", list(golden_payloads()))
def test_golden_files(name: str) -> None:
    """A change of the format is noticed here: it needs a new version."""
    assert golden_payloads()[name] == (GOLDEN / f"{name}.bin").read_bytes()


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
