"""Unmasked sums: what the federation believes of a worker is what it sent, to the last bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import emfed
from emfed.aggregation import codes
from emfed.aggregation.coded import CodedSums, Present
from emfed.core.errors import WireError
from emfed.core.sums import Precision, drive
from emfed.data import as_workers
from emfed.data.each import EachRows
from emfed.data.held import HeldWorkers
from emfed.data.summing import HeldRows
from emfed.fitting.asks import Statistics
from emfed.fitting.many import Tracked
from emfed.fitting.opening import Pooled, pool

N, D, K = 12, 3, 2
RNG = np.random.default_rng(3)
DATA = as_workers([RNG.normal(3 * (j % 2), 1, size=(20 + j, D)) for j in range(N)])
ROWS, EACH = HeldWorkers(DATA), EachRows(DATA)
SHAPES = {"mean": (D,), "scatter": (D * (D + 1) // 2,)}


def bound() -> Any:
    model = emfed.gaussian_mixture(K, "tied")
    shapes = {name: value.shape[1:] for name, value in model.summary(DATA.worker(0)[None]).items()}
    told: Pooled = drive(pool(model, shapes), CodedSums(ROWS))
    return told.bind(model)


MODEL = bound()


def ask_at(statistics: Any, step: float = 0.5, down: float = 0.0, walks: bool = False) -> Tracked:
    q = len(statistics)
    steps = np.concatenate([np.full(q, step), np.full(2, step / 2)])
    precision = Precision(steps, np.zeros(q + 2), np.full(q + 2, np.inf), down)
    return Tracked(Statistics(MODEL, statistics, precision), 1, walks)


def start(seed: int = 0) -> Any:
    return MODEL.statistics_of(MODEL.start(seed))


symbols = st.lists(st.integers(-(2**33), 2**33), min_size=1, max_size=40) | st.lists(
    st.integers(-3, 3), min_size=1, max_size=200
)


@given(values=symbols, seed=st.integers(0, 99))
def test_a_code_has_the_length_that_is_counted_and_is_read_back(values: Any, seed: int) -> None:
    told = np.array(values, dtype=np.float64)
    dither = np.random.default_rng(seed).random(len(told)) - 0.5
    data = codes.encode(told, dither)
    assert len(data) == codes.symbol_sizes(told[None], dither[None])[0]
    np.testing.assert_array_equal(codes.decode(data, len(told), dither), told)


@given(
    values=st.lists(st.floats(-1e12, 1e12, allow_subnormal=False), min_size=1, max_size=40),
    bits=st.integers(3, 28),
)
def test_short_floats_are_read_back(values: Any, bits: int) -> None:
    short = codes.short_floats(np.array(values), bits)
    data = codes.encode_floats(short, bits)
    assert len(data) == codes.floats_size(short, bits)
    np.testing.assert_array_equal(codes.decode_floats(data, len(short)), short)


def test_garbage_is_refused() -> None:
    dither = np.zeros(4)
    for data in (b"", b"\xff1234", bytes([codes.RAW]) + b"123"):
        with pytest.raises(WireError):
            codes.decode(data, 4, dither)
    with pytest.raises(WireError):
        codes.decode_floats(b"12", 4)


def test_an_opening_is_right_and_short() -> None:
    told = drive(pool(emfed.gaussian_mixture(K, "tied"), _shapes()), sums := CodedSums(ROWS))
    pooled = DATA.rows - DATA.rows.mean(axis=0)
    np.testing.assert_allclose(np.ravel(told.summary["mean"]), DATA.rows.mean(axis=0), atol=1e-7)
    packed = (pooled.T @ pooled / len(pooled))[np.triu_indices(D)]
    np.testing.assert_allclose(np.ravel(told.summary["scatter"]), packed, rtol=5e-3, atol=5e-3)
    assert told.rows == len(DATA.rows)
    assert sums.counted.total("up") / N < 60 < 8 * (2 + 2 * D + 6)


def _shapes() -> Any:
    model = emfed.gaussian_mixture(K, "tied")
    return {name: value.shape[1:] for name, value in model.summary(DATA.worker(0)[None]).items()}


def test_sums_are_unbiased_and_as_noisy_as_they_say() -> None:
    ask = ask_at(start(), step=2.0)
    want = ask.part(HeldRows(DATA))
    assert ask.precision is not None
    told = np.array([CodedSums(ROWS, seed)(ask).value for seed in range(400)])
    off = (told - want) / ask.precision.step
    variance = (N + 1) / 12  # of every worker, and of the sum on its way down
    assert np.abs(off.mean(axis=0)).max() < 4 * np.sqrt(variance / 400)
    np.testing.assert_allclose(off.var(axis=0).mean(), variance, rtol=0.08)


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10**6), walks=st.booleans())
def test_memories_stay_exact(seed: int, walks: bool) -> None:
    """Absences, lost parts, and a worker that comes back from an old backup."""
    rng = np.random.default_rng(seed)

    def present(ask: Any, exchange: int) -> Present:
        asked = np.flatnonzero(rng.random(N) < 0.8)
        return Present(asked, asked[rng.random(len(asked)) < 0.7])

    sums, backup = CodedSums(ROWS, seed, present), dict[str, Any]()
    for exchange in range(30):
        if exchange == 8:
            backup = {name: column[4].copy() for name, column in sums.kept[None].states.items()}
        if exchange == 20:
            for name, column in sums.kept[None].states.items():
                column[4] = backup[name]
        sums(ask_at(start(exchange % 3), step=0.3 + rng.random(), down=0.05, walks=walks))
        total, states = sums.kept[None].total, sums.kept[None].states
        mine = states["generation"] == total.generation
        waiting = (states["pending_at"] == total.counted) & (total.counted >= 0)
        believed = states["memory"] + waiting[:, None] * states["pending"]
        if exchange < 20 or total.generation:
            known = (mine & (total.counted >= 0))[:, None]
            want = (known * believed).sum(axis=0)
            scale = np.abs(want).max() + 1
            np.testing.assert_allclose(total.value / scale, want / scale, rtol=0, atol=1e-12)


def test_who_is_away_stands_for_itself() -> None:
    """The sum is over all that were ever heard; what they sent last counts."""
    there = np.arange(N)

    def present(ask: Any, exchange: int) -> Present:
        who = there if exchange == 1 else there[:5]
        return Present(who, who)

    sums, first, second = CodedSums(ROWS, 1, present), start(0), start(1)
    sums(ask_at(first, step=1e-6))
    told = sums(ask_at(second, step=1e-6))
    assert (told.missing, told.rows) == (N - 5, len(DATA.rows))
    here = [ask_at(second).part(EACH.one(j)) for j in range(5)]
    away = []
    for j in range(5, N):
        one = EACH.one(j)
        held = Statistics(MODEL, first, ask_at(first).precision)
        seen = held.metric.unwhiten(held.part(one)[:-2]) + one.total * first
        white = ask_at(second).inner.metric.whiten(seen - one.total * second)
        away.append(np.concatenate([white, held.part(one)[-2:]]))
    np.testing.assert_allclose(told.value, np.sum(here + away, axis=0), atol=1e-3)


def test_what_rounding_leaves_out_is_in_the_next_sum() -> None:
    """Sums are rounded down much, memories are not: at one place sums average to what is there."""
    sums, ask = CodedSums(ROWS, 2), ask_at(start(), step=1e-4, down=0.1)
    want = ask.part(HeldRows(DATA))
    told = np.array([sums(ask).value for _ in range(200)])
    scale = np.sqrt(np.mean(want[:-2] ** 2))
    assert np.abs(told[0] - want)[:-2].max() > 0.1 * scale
    assert np.abs(told.mean(axis=0) - want)[:-2].max() < 0.12 * scale


def test_few_bytes_where_nothing_changes() -> None:
    sums, ask = CodedSums(ROWS, 2), ask_at(start(), step=0.5)
    sums(ask)
    before = sums.counted.total("up")
    sums(ask)
    assert sums.counted.total("up") - before < 0.8 * before
