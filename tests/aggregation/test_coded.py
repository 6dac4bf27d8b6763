"""Unmasked sums: what the federation believes of a worker is what it sent, to the last bit."""

from __future__ import annotations

import copy
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import emfed
from emfed.aggregation import codes
from emfed.aggregation.coded import DIGEST_BYTES, CodedSum, encode_weight
from emfed.aggregation.gathered import CodedGather
from emfed.aggregation.unmasked import Present, UnmaskedWorkers
from emfed.algorithms.memories import Counted
from emfed.core.errors import WireError
from emfed.core.sums import Gather, Precision, drive
from emfed.data import as_workers
from emfed.data.each import EachRows
from emfed.data.held import HeldWorkers
from emfed.data.summing import HeldRows
from emfed.fitting import ascent
from emfed.fitting.asks import Statistics
from emfed.fitting.following import follow
from emfed.fitting.many import Tracked
from emfed.fitting.opening import Pooled, pool
from emfed.fitting.settings import FitSettings

N, D, K = 12, 3, 2
RNG = np.random.default_rng(3)
DATA = as_workers([RNG.normal(3 * (j % 2), 1, size=(20 + j, D)) for j in range(N)])
ROWS, EACH = HeldWorkers(DATA), EachRows(DATA)
SHAPES = {"mean": (D,), "scatter": (D * (D + 1) // 2,)}


def bound() -> Any:
    model = emfed.gaussian_mixture(K, "tied")
    shapes = {name: value.shape[1:] for name, value in model.summary(DATA.worker(0)[None]).items()}
    told: Pooled = drive(pool(model, shapes), UnmaskedWorkers(ROWS))
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
    told = drive(pool(emfed.gaussian_mixture(K, "tied"), _shapes()), sums := UnmaskedWorkers(ROWS))
    pooled = DATA.rows - DATA.rows.mean(axis=0)
    np.testing.assert_allclose(np.ravel(told.summary["mean"]), DATA.rows.mean(axis=0), atol=1e-7)
    packed = (pooled.T @ pooled / len(pooled))[np.triu_indices(D)]
    np.testing.assert_allclose(np.ravel(told.summary["scatter"]), packed, rtol=5e-3, atol=5e-3)
    assert told.rows == len(DATA.rows)
    assert sums.counted.total("up") / N < 66 < 8 * (2 + 2 * D + 6)


def _shapes() -> Any:
    model = emfed.gaussian_mixture(K, "tied")
    return {name: value.shape[1:] for name, value in model.summary(DATA.worker(0)[None]).items()}


def test_sums_are_unbiased_and_as_noisy_as_they_say() -> None:
    ask = ask_at(start(), step=2.0)
    want = ask.part(HeldRows(DATA))
    assert ask.precision is not None
    told = np.array([UnmaskedWorkers(ROWS, seed)(ask).value for seed in range(400)])
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

    sums, backup = UnmaskedWorkers(ROWS, seed, present), dict[str, Any]()
    for exchange in range(30):
        if exchange == 8:
            backup = {name: column[4].copy() for name, column in sums.states["sum0"].items()}
        if exchange == 20:
            for name, column in sums.states["sum0"].items():
                column[4] = backup[name]
        sums(ask_at(start(exchange % 3), step=0.3 + rng.random(), down=0.05, walks=walks))
        counted, states = sums.books.counted["sum0"], sums.states["sum0"]
        total = sums.adder.memories.get("sum0", 0.0)
        if exchange < 20 or counted.generation:
            want = believed(counted, states)
            scale = np.abs(want).max() + 1
            np.testing.assert_allclose(total / scale, want / scale, rtol=0, atol=1e-12)


def believed(counted: Counted, states: Any) -> Any:
    """The sum of all memories, with what is pending and counted."""
    mine = states["generation"] == counted.generation
    waiting = (states["pending_at"] == counted.at) & (counted.at >= 0)
    kept = states["memory"] + waiting[:, None] * states["pending"]
    return ((mine & (counted.at >= 0))[:, None] * kept).sum(axis=0)


def test_who_is_away_stands_for_itself() -> None:
    """The sum is over all that were ever heard; what they sent last counts."""
    there = np.arange(N)

    def present(ask: Any, exchange: int) -> Present:
        who = there if exchange == 1 else there[:5]
        return Present(who, who)

    sums, first, second = UnmaskedWorkers(ROWS, 1, present), start(0), start(1)
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
    sums, ask = UnmaskedWorkers(ROWS, 2), ask_at(start(), step=1e-4, down=0.1)
    want = ask.part(HeldRows(DATA))
    told = np.array([sums(ask).value for _ in range(200)])
    scale = np.sqrt(np.mean(want[:-2] ** 2))
    assert np.abs(told[0] - want)[:-2].max() > 0.1 * scale
    assert np.abs(told.mean(axis=0) - want)[:-2].max() < 0.12 * scale


def test_few_bytes_where_nothing_changes() -> None:
    sums, ask = UnmaskedWorkers(ROWS, 2), ask_at(start(), step=0.5)
    sums(ask)
    before = sums.counted.total("up")
    sums(ask)
    assert sums.counted.total("up") - before < 0.8 * before


def over_the_wire(sums: UnmaskedWorkers, ask: Any) -> tuple[bytes, int]:
    """One exchange as members make it, one worker after the other: the message down, bytes up."""
    books, n = sums.books, sums.books.workers
    coded = CodedGather(ask, books) if isinstance(ask, Gather) else CodedSum(ask, books, sums.seed)
    states = copy.deepcopy(coded.fresh(sums.states, n))
    sent = {}
    for worker in coded.asked.tolist():
        own = {m: {c: v[[worker]] for c, v in kept.items()} for m, kept in states.items()}
        one, who = HeldWorkers(DATA), np.array([worker])
        if isinstance(coded, CodedGather):
            sent[worker] = coded.message(one, worker, own)
        else:
            assert not coded.settle(who, own).any()
            sent[worker] = coded.parts(one, who, one.totals[who], own).encode(0)
    weights = sum(len(encode_weight(sums.rows.totals[w])) for w in sent if not books.weighed[w])
    up = sum(map(len, sent.values())) + weights + DIGEST_BYTES * len(sent)
    adder = copy.deepcopy(sums.adder)
    if isinstance(coded, CodedGather):
        return coded.add(adder, coded.asked, coded.read(sent, adder.totals), up)[0], up
    values = np.array([coded.read(data, worker) for worker, data in sent.items()])
    return coded.add(adder, coded.asked, values, up, False), up


@pytest.mark.parametrize("kind", ["opening", "memories", "local", "FedEM", "VR-FedEM", "clusters"])
def test_what_is_priced_is_what_travels(kind: str) -> None:
    """Every message of a fit, made by each worker alone and read by the adder from its bytes."""
    sums, purposes = UnmaskedWorkers(ROWS, 3), set[str]()

    def answer(ask: Any) -> Any:
        purposes.add(ask.purpose)
        down, up = over_the_wire(sums, ask)
        before = {way: sums.counted.total(way) for way in ("up", "down")}
        told = sums(ask)
        spent = {way: sums.counted.total(way) - before[way] for way in before}
        assert spent == {"up": up, "down": N * (len(down) + DIGEST_BYTES)}
        return told

    settings = {
        "opening": {"rounds": 0, "start": "moments"},
        "memories": {"algorithm": "em"},
        "local": {},
        "FedEM": {"algorithm": "FedEM", "participation": 0.6},
        "VR-FedEM": {"algorithm": emfed.VRFedEM(batch_size=5, inner_rounds=3)},
        "clusters": {"start": "merge"},
    }[kind]
    model = emfed.gaussian_mixture(K, "tied")
    given = FitSettings(model, **{"rounds": 9, "masks": False, **settings})
    left = iter(range(25))
    with patch.object(ascent, "FEWEST_OF_MANY", 10 if kind == "local" else 50):
        fit = follow(given, N, _shapes(), masked=False)
        drive(fit, answer, lambda ask: None if next(left) < 20 else "enough")
    assert purposes >= ({"opening"} if kind == "opening" else {"opening", "round"})
