"""Rounded means and second moments: as few bits as the answer allows, the same wherever made."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emfed.core.errors import WireError
from emfed.core.wire import (
    decode_moments,
    encode_moments,
    floats_size,
    rounded_moments,
)
from emfed.core.wire.moments import LOSS, worker_loss
from emfed.models.matrices import pack, unpack


def moments_of(rows: Any, products: bool = True) -> Any:
    mean, covariance = rows.mean(axis=0), np.cov(rows.T, bias=True)
    return np.concatenate([mean, pack(covariance) if products else np.diagonal(covariance)])


def summaries(seed: int, workers: int, d: int, rows: int = 60) -> Any:
    rng = np.random.default_rng(seed)
    scale = np.exp(rng.normal(size=d) * 3)
    mix = (np.eye(d) + 0.2 * rng.normal(size=(d, d))) * scale
    shift = rng.normal(size=d) * 20 * scale
    tables = [rng.normal(size=(rows, d)) @ mix + shift for _ in range(workers)]
    return np.stack([moments_of(table) for table in tables])


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 12), st.integers(7, 12), st.booleans())
def test_bytes_say_what_a_simulation_rounds_to(seed: int, n: int, d: int, at_random: bool) -> None:
    values = summaries(seed, n, d)
    rounded, sizes = rounded_moments(values, d, worker_loss(n), at_random)
    for own, expected, size in zip(values, rounded, sizes, strict=True):
        data = encode_moments(own, d, worker_loss(n), at_random)
        assert len(data) == size
        np.testing.assert_array_equal(decode_moments(data, len(own)), expected)
        assert size < 0.5 * floats_size(len(own))


@pytest.mark.parametrize("workers", [1, 3, 100])
def test_the_combined_moments_cost_a_millionth_of_a_nat(workers: int) -> None:
    d, errors = 9, []
    for seed in range(5):
        values = summaries(seed, workers, d, rows=400)
        rounded, _ = rounded_moments(values, d, worker_loss(workers))
        whole, found = (unpack(v[:, d:].mean(axis=0), d) for v in (values, rounded))
        off = np.linalg.solve(whole, found) - np.eye(d)
        errors.append(float(np.sum(off * off.T)))
        assert np.all(np.linalg.eigvalsh(found) > 0)
    assert np.mean(errors) / 4 < LOSS


def test_errors_of_alike_workers_average_out() -> None:
    """Rounding to the nearest would leave the same error in all."""
    d, n = 8, 400
    one = summaries(3, 1, d)[0]
    values = one * (1 + 1e-6 * np.random.default_rng(0).normal(size=(n, len(one))))
    loss = worker_loss(n)
    single = np.abs(rounded_moments(values, d, loss)[0][0] - one)
    together = np.abs(rounded_moments(values, d, loss)[0].mean(axis=0) - one)
    assert together.sum() < 0.2 * single.sum()


def test_what_cannot_be_rounded_goes_as_it_is() -> None:
    d = 8
    constant = summaries(0, 1, d)[0].copy()
    constant[d] = 0.0  # a column without variance
    collinear = moments_of(np.random.default_rng(0).normal(size=(40, 1)) * np.ones(d))
    few = np.arange(1.0, 15.0)
    for values, width, loss in (
        (constant, d, LOSS),
        (collinear, d, LOSS),
        (few, 4, LOSS),
        (summaries(0, 1, d)[0], d, 0.0),
        (np.arange(1.0, 60.0), 0, LOSS),
    ):
        data = encode_moments(values, width, loss)
        assert len(data) == floats_size(len(values))
        np.testing.assert_array_equal(decode_moments(data, len(values)), values)


def test_a_frame_alone_takes_little() -> None:
    rows = np.random.default_rng(2).normal(size=(50, 40)) * 7 + 300
    values = moments_of(rows, products=False)
    data = encode_moments(values, 40, LOSS)
    assert len(data) < 2.2 * len(values)
    np.testing.assert_allclose(decode_moments(data, 80)[40:], values[40:], rtol=0.012)


@settings(max_examples=200)
@given(st.binary(max_size=60), st.sampled_from([0, 44, 80, 230, 1 << 30]))
def test_hostile_moments_are_refused_or_finite(data: bytes, count: int) -> None:
    for whole in (data, b"\xc0" + data, b"\xc0\x0c\x08" + data):
        try:
            values = decode_moments(whole, count)
        except WireError:
            continue
        assert values.shape == (count,)
        assert np.isfinite(values).all()
