"""The packing refuses what it did not make."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedem.errors import WireError
from fedem.protocols import Compressed
from fedem.wire import (
    decode_compressed,
    decode_floats,
    encode_compressed,
    encode_floats,
    encode_reply,
    encode_request,
    encoded_sizes,
    reply_sizes,
    request_size,
)

messages = st.builds(
    Compressed,
    hnp.arrays(np.float64, st.integers(0, 6)),
    st.integers(0, 31).flatmap(
        lambda bits: hnp.arrays(
            np.int32, st.integers(0, 40), elements=st.integers(-(2**bits), 2**bits - 1)
        )
    ),
)


@given(messages)
def test_round_trip_is_exact(message: Compressed) -> None:
    data = encode_compressed(message)
    assert len(data) == int(encoded_sizes(message))
    back = decode_compressed(data)
    assert back.reals.tobytes() == message.reals.tobytes()
    np.testing.assert_array_equal(back.symbols, message.symbols)
    assert len(encode_reply(1, 2, 3, message)) == int(reply_sizes(message))


@given(hnp.arrays(np.float64, st.integers(0, 9)))
def test_floats_round_trip(values: np.ndarray) -> None:
    assert decode_floats(encode_floats(values)).tobytes() == values.tobytes()
    assert len(encode_request(1, 0, -1, values)) == request_size(len(values))


@given(messages, st.data())
def test_cut_or_longer_messages_are_refused(message: Compressed, data: st.DataObject) -> None:
    whole = encode_compressed(message)
    cut = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(WireError):
        decode_compressed(whole[:cut])
    with pytest.raises(WireError):
        decode_compressed(whole + b"\0")


@given(st.binary(max_size=64))
def test_hostile_bytes_give_the_documented_error_or_a_message(data: bytes) -> None:
    for candidate in (data, b"FE\x01" + data):
        try:
            message = decode_compressed(candidate)
        except WireError:
            continue
        assert len(encode_compressed(message)) <= len(candidate) + 1


def test_other_kinds_are_named() -> None:
    with pytest.raises(WireError, match="expected floats alone"):
        decode_floats(encode_compressed(Compressed(np.ones(1), np.ones(3, dtype=np.int32))))
    with pytest.raises(WireError, match="not a fedem message"):
        decode_compressed(b"PNG" + bytes(20))


def test_golden_message() -> None:
    message = Compressed(np.array([0.5]), np.array([1, -1, 0, 2], dtype=np.int32))
    # FE, version 1, 3 bits; 1 real, 4 symbols; 0.5; 101 011 100 110 + padding
    golden = "464501030100000004000000000000000000e03fae60"
    assert encode_compressed(message).hex() == golden
