"""The streams are Philox4x64-10 at documented places, whatever the order or batching."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emfed.core.errors import SettingsError
from emfed.core.streams import (
    Purpose,
    check_seed,
    choose,
    choose_distinct,
    normals,
    to_uniforms,
    uniforms,
    words,
)

MASK = (1 << 64) - 1


def philox(key: tuple[int, int], counter: int) -> list[int]:
    """One block of Philox4x64-10, in Python integers, after Salmon et al. (SC'11)."""
    c = [(counter >> (64 * j)) & MASK for j in range(4)]
    k0, k1 = key
    for _ in range(10):
        p0, p1 = 0xD2E7470EE14C6C93 * c[0], 0xCA5A826395121157 * c[2]
        c = [(p1 >> 64) ^ c[1] ^ k0, p1 & MASK, (p0 >> 64) ^ c[3] ^ k1, p0 & MASK]
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & MASK, (k1 + 0xBB67AE8584CAA73B) & MASK
    return c


def test_reference_block_is_the_published_one() -> None:
    # Known-answer vector of the Random123 distribution, philox4x64-10, all zeros.
    assert philox((0, 0), 0) == [
        0x16554D9ECA36314C,
        0xDB20FE9D672D0FDC,
        0xD7E772CEE186176B,
        0x7E68B68AEC7BA23B,
    ]


@given(
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**40),
    st.sampled_from(list(Purpose)),
    st.lists(st.integers(0, 5000), min_size=1, max_size=12),
    st.integers(1, 11),
)
def test_words_stand_where_the_address_says(
    seed: int, round_: int, purpose: Purpose, workers: list[int], count: int
) -> None:
    got = words(seed, round_, purpose, np.array(workers), count)
    blocks = -(-count // 4)
    key = (seed, (purpose << 48) + round_)
    for row, worker in zip(got, workers, strict=True):
        want = [w for j in range(blocks) for w in philox(key, worker * blocks + j + 1)]
        assert row.tolist() == want[:count]


def test_golden_values() -> None:
    got = words(2021, 7, Purpose.COMPRESSION, np.array([0, 1, 99]), 2)
    assert got.tolist() == GOLDEN
    assert to_uniforms(got)[0, 0] == (GOLDEN[0][0] >> 11) * 2.0**-53


GOLDEN = [
    [14849235088289689515, 13918498783656050654],
    [5947708701436568264, 9449240887432872393],
    [9818219330159755334, 2355917183855150406],
]


def test_uniforms_and_normals_have_their_moments() -> None:
    u = uniforms(1, 1, Purpose.BATCH, np.arange(200), 500)
    assert u.min() >= 0
    assert u.max() < 1
    assert abs(u.mean() - 0.5) < 5 / np.sqrt(12 * u.size)
    z = normals(1, 1, Purpose.START, np.arange(200), 500)
    assert np.isfinite(z).all()
    assert abs(z.mean()) < 5 / np.sqrt(z.size)
    assert abs(z.var() - 1) < 5 * np.sqrt(2 / z.size)


def test_choose_covers_its_range_evenly() -> None:
    u = uniforms(5, 1, Purpose.BATCH, np.arange(1000), 60)
    picks = choose(u, np.full(1000, 7))
    counts = np.bincount(picks.ravel(), minlength=7)
    expected = picks.size / 7
    assert (((counts - expected) ** 2) / expected).sum() < 22.5  # chi2(6), p = 0.001


@given(st.integers(0, 10**6), st.lists(st.integers(1, 40), min_size=1, max_size=8))
def test_distinct_choices_are_distinct_and_in_range(seed: int, bounds: list[int]) -> None:
    k = min(bounds)
    u = uniforms(seed, 1, Purpose.BATCH, np.arange(len(bounds)), k)
    picks = choose_distinct(u, np.array(bounds))
    for row, bound in zip(picks, bounds, strict=True):
        assert len(set(row.tolist())) == k
        assert row.min() >= 0
        assert row.max() < bound


def test_every_subset_is_equally_likely() -> None:
    u = uniforms(9, 1, Purpose.BATCH, np.arange(30000), 2)
    picks = np.sort(choose_distinct(u, np.full(30000, 5)), axis=1)
    _, counts = np.unique(picks[:, 0] * 5 + picks[:, 1], return_counts=True)
    assert len(counts) == 10
    assert (((counts - 3000) ** 2) / 3000).sum() < 27.9  # chi2(9), p = 0.001


@pytest.mark.parametrize("seed", [-1, 2**64, 1.5, "0", None, True])
def test_bad_seeds_are_refused(seed: object) -> None:
    with pytest.raises(SettingsError, match="seed"):
        check_seed(seed)
