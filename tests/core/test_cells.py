"""What workers tell of the cells that they observed: exact, short, and as long as the price."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import gammaln

from emfed.core.errors import WireError
from emfed.core.protocols import WorkerCells
from emfed.core.wire import cells_size, decode_cells, encode_cells
from tests.core.test_wire import CELLS

VALUES = {
    "counts": lambda rng, n: rng.poisson(3.0, n).astype(float),
    "flocks": lambda rng, n: np.floor(np.exp(4 * rng.normal(size=n))),
    "logarithms": lambda rng, n: np.log1p(rng.poisson(3.0, n)),
    "reals": lambda rng, n: rng.normal(size=n),
    "single": lambda rng, n: rng.normal(size=n).astype(np.float32).astype(float),
    "large": lambda rng, n: np.ldexp(rng.normal(size=n), rng.integers(-900, 900, n)),
    "one value": lambda rng, n: np.full(n, -0.1),
    "negative": lambda rng, n: -rng.poisson(400.0, n).astype(float),
}


def told(size: int, share: float, values: str, unit: float, seed: int) -> WorkerCells:
    rng = np.random.default_rng(seed)
    keys = np.flatnonzero(rng.random(size) < share)
    keys = keys if len(keys) else np.array([size - 1])
    weights = unit * (1.0 + rng.poisson(0.3, len(keys)))
    return WorkerCells(keys, weights, VALUES[values](rng, len(keys)))


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 3000),
    st.floats(0, 1),
    st.sampled_from(list(VALUES)),
    st.sampled_from([1.0, 0.37]),
    st.integers(0, 2**32),
)
def test_cells_travel_exactly_at_the_price_told(
    size: int, share: float, values: str, unit: float, seed: int
) -> None:
    cells = told(size, share, values, unit, seed)
    data = encode_cells(cells, size)
    assert len(data) == cells_size(cells)
    read = decode_cells(data, size)
    for name in ("keys", "weights", "sums"):
        np.testing.assert_array_equal(getattr(read, name), getattr(cells, name), err_msg=name)


@pytest.mark.parametrize("values", VALUES)
def test_no_prefix_of_cells_is_read_as_something_that_no_worker_has(values: str) -> None:
    data = encode_cells(told(500, 0.1, values, 1.0, 0), 500)
    for cut in range(len(data)):
        with contextlib.suppress(WireError):
            read = decode_cells(data[:cut], 500)
            assert np.all(np.diff(read.keys) > 0)
            assert read.keys[-1] < 500
            assert np.isfinite(read.sums).all()
            assert read.weights.min() > 0


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60), st.integers(0, 200))
def test_hostile_cells_are_refused_or_valid(data: bytes, size: int) -> None:
    with contextlib.suppress(WireError):
        read = decode_cells(data, size)
        assert np.all(np.diff(read.keys) > 0)
        assert 0 <= read.keys[0] <= read.keys[-1] < size
        assert len(read.keys) == len(read.weights) == len(read.sums)
        assert read.weights.min() > 0


def test_positions_take_about_their_entropy_and_runs_hardly_anything() -> None:
    rng, size = np.random.default_rng(0), 5_000_000
    for count in (10, 300, 5000):
        keys = np.sort(rng.choice(size, count, replace=False))
        one = np.ones(count)
        least = gammaln(size + 1) - gammaln(count + 1) - gammaln(size - count + 1)
        assert cells_size(WorkerCells(keys, one, one)) <= 1.05 * least / np.log(2) / 8 + 40
    months = (40 * np.arange(100)[:, None] + np.arange(24)).ravel()  # 24 of 40 at every site
    assert cells_size(WorkerCells(months, np.ones(2400), np.ones(2400))) < 150


def test_bad_cells_are_refused() -> None:
    one = np.ones(2)
    for keys in ([3, 2], [1, 1], [0, 9]):
        with pytest.raises(WireError, match="increasing positions below 9"):
            encode_cells(WorkerCells(np.array(keys), one, one), 9)
    good, keys, weights, sums = encode_cells(CELLS, 100), CELLS.keys, CELLS.weights, CELLS.sums
    unseen, endless = (
        WorkerCells(keys, 0 * weights, sums),
        WorkerCells(keys, weights, sums * np.inf),
    )
    for data, size, words in (
        (b"ab", 100, "at least 4 bytes"),
        (good, 4, "cannot have observed 5 of 4"),
        (good, 99, "not below 99"),
        (good + b"x", 100, "bytes follow"),
        (good[:-3], 100, "end inside"),
        (encode_cells(unseen, 100), 100, "more than nothing"),
        (encode_cells(endless, 100), 100, "not finite"),
    ):
        with pytest.raises(WireError, match=words):
            decode_cells(data, size)


def test_few_bytes_do_not_become_many_numbers() -> None:
    """A column that says it has a number for each of 10^8 cells must hold them."""
    size = 100_000_000
    data = size.to_bytes(4, "little") + b"\x03\x02ab" * 3
    with pytest.raises(WireError):
        decode_cells(data, size)


def test_the_corpus_of_the_fuzzer_has_cells() -> None:
    path = Path(__file__).parents[1] / "fuzz" / "corpus" / "cells"
    read = decode_cells(path.read_bytes()[4:], 1000)
    np.testing.assert_array_equal(read.sums, CELLS.sums)
