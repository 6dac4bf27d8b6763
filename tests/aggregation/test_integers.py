"""Integers of any size for every finite double, against Python's own."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emfed.aggregation.integers import (
    add,
    extended,
    fixed_point,
    inner,
    limbs,
    negative,
    pack,
    to_floats,
    unpack,
)
from emfed.core.errors import WireError
from tests.aggregation.sets import integers_of, words_of

EXTREME = [0.0, -0.0, 5e-324, -5e-324, 2.2e-308, 1e308, -1.7976931348623157e308, 0.5, 1.5, 2.5]
doubles = st.floats(allow_nan=False, allow_infinity=False)
sizes = st.integers(-(2**191), 2**191 - 1)


@given(st.lists(doubles, min_size=1, max_size=4), st.integers(-1100, 1200))
def test_fixed_point_rounds_exactly(values: list[float], exponent: int) -> None:
    values = [*values, *EXTREME]
    wanted = [round(Fraction(x) * Fraction(2) ** exponent) for x in values]
    assert integers_of(fixed_point(values, np.full(len(values), exponent))) == wanted


@given(st.lists(st.tuples(sizes, sizes), min_size=1, max_size=5))
def test_sums_and_negatives_wrap_as_they_should(pairs: list[tuple[int, int]]) -> None:
    one, other = (words_of(side, 3) for side in zip(*pairs, strict=True))
    wrap = lambda x: (x + 2**191) % 2**192 - 2**191  # noqa: E731
    assert integers_of(add(one, other)) == [wrap(a + b) for a, b in pairs]
    assert integers_of(negative(one)) == [wrap(-a) for a, _ in pairs]
    assert integers_of(extended(one, 5)) == [a for a, _ in pairs]


@given(st.lists(st.tuples(st.integers(0, 2**127 - 1), sizes), min_size=1, max_size=20))
def test_inner_products_are_exact(pairs: list[tuple[int, int]]) -> None:
    factors, integers = zip(*pairs, strict=True)
    found = inner(limbs(words_of(factors, 2)), limbs(words_of(integers, 3)))
    assert found == sum(a * b for a, b in pairs)


@pytest.mark.parametrize("count", [1 << 20, (1 << 20) + 3])
def test_inner_products_of_many_large_numbers_are_exact(count: int) -> None:
    ones = np.full((count, 1), 2.0**16 - 1)
    assert inner(ones, ones) == count * (2**16 - 1) ** 2


@given(st.lists(sizes, min_size=1, max_size=5), st.integers(-80, 10))
def test_floats_are_as_near_as_doubles_are(integers: list[int], exponent: int) -> None:
    found = to_floats(words_of(integers, 3), np.full(len(integers), exponent))
    for value, integer in zip(found, integers, strict=True):
        wanted = Fraction(integer) * Fraction(2) ** exponent
        assert abs(Fraction(float(value)) - wanted) <= abs(wanted) * Fraction(2) ** -52


@given(st.data())
def test_bits_survive_packing(data: st.DataObject) -> None:
    bits = np.array(data.draw(st.lists(st.integers(1, 128), min_size=1, max_size=9)), np.int64)
    numbers = [data.draw(st.integers(0, 2 ** int(b) - 1)) for b in bits]
    words = words_of([x << int(128 - b) for x, b in zip(numbers, bits, strict=True)], 2)
    packed = pack(words, bits)
    assert len(packed) == -(-int(bits.sum()) // 8)
    np.testing.assert_array_equal(unpack(packed, bits, 2), words)


def test_a_wrong_number_of_bytes_is_refused() -> None:
    bits = np.array([3, 3])
    with pytest.raises(WireError, match="take 1 bytes; got 2"):
        unpack(b"\0\0", bits, 1)
    with pytest.raises(WireError, match="are not 0"):
        unpack(b"\xff", bits, 1)
