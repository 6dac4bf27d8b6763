"""Every registered operator keeps the contract of `Compressor`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from emfed.compressors import COMPRESSORS, Dithering, Identity, block_quantization
from emfed.core.errors import SettingsError
from emfed.core.protocols import Compressed, Compressor, FloatArray, Layout
from emfed.core.wire import decode_payload, encode_payload, payload_sizes
from tests.helpers import bias_in_sigmas, quantise_many

EXAMPLES = [example for cls in COMPRESSORS.values() for example in cls.examples()]
each = pytest.mark.parametrize("operator", EXAMPLES, ids=repr)
vectors = hnp.arrays(
    np.float64,
    st.integers(1, 12),
    elements=st.floats(-100, 100).filter(lambda v: v == 0 or abs(v) > 1e-6),
)
REPEATS = 4000


@each
@settings(max_examples=15)
@given(x=vectors, seed=st.integers(0, 2**32))
def test_unbiased_and_within_omega(operator: Compressor, x: FloatArray, seed: int) -> None:
    q = len(x)
    assert bias_in_sigmas(operator, x, REPEATS, seed) < 6
    sample = quantise_many(operator, x, REPEATS, np.random.default_rng(seed + 1))
    errors = ((sample - x) ** 2).sum(axis=1)
    margin = 6 * errors.std() / np.sqrt(REPEATS) + 20 * (1 + operator.omega(q)) * (x @ x) / REPEATS
    assert errors.mean() <= operator.omega(q) * (x @ x) + margin
    exact = operator.variance(x)
    if exact is not None:
        assert abs(errors.mean() - float(exact)) <= margin
        assert float(exact) <= operator.omega(q) * (x @ x) * (1 + 1e-9) + 1e-12


@dataclass(frozen=True)
class _RoundsDown:
    """A wrong operator: it rounds down by a twentieth more often than it should."""

    inner: Dithering

    def draws(self, q: int) -> int:
        return q

    def compress(self, x: FloatArray, u: FloatArray) -> Compressed:
        return self.inner.compress(x, u * 0.95)

    def decompress(self, message: Compressed, u: FloatArray, q: int) -> FloatArray:
        return self.inner.decompress(message, u, q)


def test_the_check_of_unbiasedness_can_fail() -> None:
    x = np.linspace(-1, 2, 12)
    assert bias_in_sigmas(_RoundsDown(Dithering()), x, 20 * REPEATS, 0) > 6


@pytest.mark.parametrize("p", [1, 2, 3, np.inf])
@given(x=vectors, sizes=st.lists(st.integers(1, 6), min_size=1, max_size=5))
def test_block_p_variance_is_the_lemma(p: float, x: FloatArray, sizes: list[int]) -> None:
    x = np.resize(x, sum(sizes))
    parts = np.split(x, np.cumsum(sizes)[:-1])
    # The lemma on block-p-quantization: sum over blocks of |x|_1 |x|_p - |x|_2^2.
    lemma = sum(np.abs(b).sum() * np.linalg.norm(b, p) - b @ b for b in parts)
    got = float(block_quantization(tuple(sizes), p, "float64").variance(x))
    assert got == pytest.approx(lemma, rel=1e-9, abs=1e-9 * (1 + x @ x))


@pytest.mark.parametrize("size", [1, 4, 9, 100])
def test_block_2_omega_is_the_papers(size: int) -> None:
    omega = np.sqrt(size) - 1
    assert block_quantization(size, scales="float64").omega(10 * size) == pytest.approx(omega)
    assert block_quantization(size).omega(10 * size) == pytest.approx(omega, abs=1e-5)


@settings(max_examples=200)
@given(
    x=vectors,
    levels=st.integers(1, 6),
    norm=st.sampled_from([1, 1.3, 2, 2.7, 5, np.inf]),
    scales=st.sampled_from(["float64", "float32", "bfloat16"]),
)
def test_dithering_omega_bounds_every_vector(
    x: FloatArray, levels: int, norm: float, scales: Any
) -> None:
    operator = Dithering(levels, norm, scales=scales)
    bound = operator.omega(len(x)) * (x @ x)
    assert float(operator.variance(x)) <= bound * (1 + 1e-9) + 1e-12


@pytest.mark.parametrize(
    ("d", "levels", "norm", "worst"),
    [
        (9, 1, 2.0, np.ones(9)),
        (16, 2, 2.0, np.ones(16)),
        (10, 1, 1.0, np.ones(10)),
        (9, 1, np.inf, np.r_[1.0, np.full(8, 1 / 4)]),
        (9, 3, np.inf, np.r_[1.0, np.full(8, 1 / (3 + np.sqrt(17)))]),
    ],
)
def test_dithering_omega_is_attained(d: int, levels: int, norm: float, worst: FloatArray) -> None:
    operator = Dithering(levels, norm, scales="float64")
    ratio = float(operator.variance(worst)) / (worst @ worst)
    assert ratio == pytest.approx(operator.omega(d), rel=1e-9)


@pytest.mark.parametrize("norm", [2.2, 3.5, 8.0, 50.0])
@pytest.mark.parametrize("levels", [1, 4])
@pytest.mark.parametrize("d", [20, 1000])
def test_dithering_omega_between_norms_2_and_infinity_is_not_far_from_the_worst(
    d: int, levels: int, norm: float
) -> None:
    """It was that of norm 2, up to twice what is ever reached."""
    operator = Dithering(levels, norm, scales="float64")
    many = np.arange(1, 7)[:, None, None]  # so many large numbers beside equal small ones
    small = np.geomspace(1e-4, 1, 400)[None, :, None]
    vectors = np.where(np.arange(d) < many, 1.0, small).reshape(-1, d)
    ratios = operator.variance(vectors) / (vectors**2).sum(axis=-1)
    assert ratios.max() <= operator.omega(d) <= 1.6 * ratios.max()
    assert operator.omega(d) <= Dithering(levels, 2.0, scales="float64").omega(d)


@each
@given(scale=st.sampled_from([0.0, 5e-324, 1e-310, 1e-200, 1e-30, 1e30, 1e200, 1e300]))
def test_extreme_vectors_stay_finite(operator: Compressor, scale: float) -> None:
    x = scale * np.array([[1.0, -0.25, 0.0, 0.5, 1.0, -1.0, 0.125]])
    u = np.random.default_rng(0).random((1, operator.draws(7)))
    with np.errstate(over="ignore", under="ignore", invalid="raise", divide="raise"):
        message = operator.compress(x, u)
        back = operator.decompress(message, u, 7)
    assert np.isfinite(message.reals).all()
    assert np.isfinite(back).all() or scale >= 1e300
    if scale == 0:
        assert not back.any()


@each
def test_leading_axes_change_nothing(operator: Compressor) -> None:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(3, 4, 11))
    u = rng.random((3, 4, operator.draws(11)))
    whole = operator.decompress(operator.compress(x, u), u, 11)
    for i in range(3):
        for j in range(4):
            alone = operator.decompress(operator.compress(x[i, j], u[i, j]), u[i, j], 11)
            np.testing.assert_array_equal(whole[i, j], alone)


@each
def test_wire_round_trip_is_exact_and_sizes_are_true(operator: Compressor) -> None:
    rng = np.random.default_rng(2)
    x = rng.normal(size=(20, 13)) * np.exp(3 * rng.normal(size=(20, 1)))
    x[0] = 0
    u = rng.random((20, operator.draws(13)))
    message = operator.compress(x, u)
    form, dither = operator.form(13), operator.dither(u, 13)
    sizes = payload_sizes(message, form, dither)
    for i in range(20):
        mine = None if dither is None else dither[i]
        data = encode_payload(message.take(i), form, mine)
        assert len(data) == sizes[i]
        back = decode_payload(data, form, mine)
        np.testing.assert_array_equal(back.reals, message.reals[i])
        np.testing.assert_array_equal(back.symbols, message.symbols[i])
        np.testing.assert_array_equal(
            operator.decompress(back, u[i], 13), operator.decompress(message, u, 13)[i]
        )


@each
def test_description_is_plain_json(operator: Compressor) -> None:
    assert json.loads(json.dumps(operator.describe()))["compressor"] in COMPRESSORS


def test_blocks_come_from_the_layout() -> None:
    layout = Layout((("mass", (3,)), ("first", (3, 2))))
    assert Dithering(block="field").resolve(layout).block == (3, 6)
    assert Dithering(block="row").resolve(layout).block == (3, 2, 2, 2)
    assert Identity().resolve(layout) == Identity()


@pytest.mark.parametrize(
    "make",
    [
        lambda: Dithering(levels=0),
        lambda: Dithering(levels=1.5),
        lambda: Dithering(norm=0.5),
        lambda: Dithering(norm=float("nan")),
        lambda: Dithering(block=0),
        lambda: Dithering(block="rows"),
        lambda: Dithering(block=(3, 4)).resolve(Layout((("a", (8,)),))),
        lambda: COMPRESSORS["random-sparsification"](0),
        lambda: COMPRESSORS["random-sparsification"](1.5),
        lambda: COMPRESSORS["random-sparsification"](9).omega(8),
        lambda: COMPRESSORS["subtractive-dithering"](0.0),
    ],
)
def test_bad_settings_are_refused(make: object) -> None:
    with pytest.raises(SettingsError, match="got|but"):
        make()
