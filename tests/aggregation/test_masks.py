"""Masked sums from end to end: the sum and nothing else comes out, and lies are noticed."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from emfed.aggregation.integers import pack
from emfed.aggregation.keys import (
    GroupSecrets,
    Member,
    MemberKeys,
    RunKey,
    seal,
    unseal,
)
from emfed.aggregation.lattice import Lattice, Shape
from emfed.aggregation.masks import MODULUS, Part, PartsDiffer, add_parts
from emfed.core.errors import NumericalError, SettingsError, WireError
from tests.aggregation.sets import Sites, context, integers_of, precision

EVERYONE = Sites.of(50)
FIVE = Sites.of(5)


# The sum.


@pytest.mark.parametrize(("n", "q"), [(3, 1), (3, 2000), (4, 33), (17, 500), (50, 200)])
def test_the_sum_comes_out_with_the_noise_of_so_many_roundings(n: int, q: int) -> None:
    sites = Sites.of(n)
    rng = np.random.default_rng(n * q)
    values = rng.normal(size=(n, q)) * 2.0**18  # far beyond the bits of the sum
    lattice = Lattice.of(precision(q, 0.25, 8 * n, values.sum(axis=0) + rng.normal(size=q)), q)
    found = sites.sum(values, lattice)
    error = (found - values.sum(axis=0)) / 0.25
    assert lattice.bits.max() <= 14
    assert (found == np.rint(found * 4) / 4).all()
    assert np.abs(error).max() <= n / 2 + 1
    if q >= 200:
        assert stats.kstest(error / np.sqrt(n / 12), "norm").pvalue > 1e-4 or n < 10
        assert error.var() == pytest.approx(n / 12, rel=0.35)
        assert abs(error.mean()) < 5 * np.sqrt(n / 12 / q)


def test_numbers_of_different_bits_go_together() -> None:
    step = np.array([1.0, 2.0**-23, 2.0**-80, 8.0])
    reach = np.array([3.0, 2.0**12, 2.0**40, 100.0])
    values = np.random.default_rng(2).normal(size=(5, 4)) * [1, 100, 1e9, 10]
    centre = np.rint(values.sum(axis=0))
    lattice = Lattice.of(replace(precision(4), step=step, reach=reach, centre=centre), 4)
    assert lattice.bits.tolist() == [3, 37, 121, 5]
    found = FIVE.sum(values, lattice)
    room = 3 * np.sqrt(5 / 12) * step + 1e-15 * np.abs(values).sum(axis=0)
    assert (np.abs(found - values.sum(axis=0)) <= room).all()


def test_what_a_fit_does_not_foresee_comes_out_as_exactly_as_doubles_are() -> None:
    values = np.array([[1e9, 1e-9, 0.1, -0.0, 3.0], [2e9, 1e-12, 0.2, 0.0, 5e-324]])
    values = np.concatenate([values, -values[:1], values[:1], values[1:]])
    wanted = [float(sum(Fraction(x) for x in column)) for column in values.T]
    found = FIVE.sum(values, Lattice.of(None, 5))
    np.testing.assert_allclose(found, wanted, rtol=4e-16, atol=2.0**-72)


def test_counts_and_zeros_are_exact_where_a_fit_foresees_nothing() -> None:
    values = np.zeros((50, 4))
    values[:, 1], values[:25, 2], values[25:, 2], values[0, 3] = 3.0, 7.25, -7.25, 2.0**42
    found = EVERYONE.sum(values, Lattice.of(None, 4))
    np.testing.assert_array_equal(found, [0.0, 150.0, 0.0, 2.0**42])
    values[0, 3] = 2.0**43 + 1
    assert EVERYONE.sum(values, Lattice.of(None, 4)) is None
    found = EVERYONE.sum(values, Lattice.of(None, 4, attempt=1))
    np.testing.assert_array_equal(found, [0.0, 150.0, 0.0, 2.0**43 + 1])


def test_the_analyst_reads_what_sites_read_and_cannot_check() -> None:
    lattice = Lattice.of(precision(3), 3)
    total = add_parts(FIVE.parts(np.ones((5, 3)), lattice))
    opener = FIVE.analyst.opener(FIVE.context, lattice)
    np.testing.assert_array_equal(opener.open(total), FIVE.opened(total, lattice))
    assert opener.tag is None
    assert opener.open(replace(total, tag=(total.tag + 1) % MODULUS)) is not None
    with pytest.raises(WireError, match="no keys"):
        FIVE.analyst.masking(FIVE.context, lattice)


def test_two_sites_add_without_masks_and_without_a_pad() -> None:
    two = Sites.of(2)
    lattice = Lattice.of(precision(4), 4)
    values = np.array([[1.4, -2.6, 30.0, 0.0], [2.0, 1.0, 5.4, -0.0]])
    with pytest.raises(SettingsError, match="at least 3 sites; got 2"):
        two.keys["s00"].masking(two.context, lattice)
    parts = {
        name: keys.plain(two.context, lattice).part(row)
        for (name, keys), row in zip(two.keys.items(), values, strict=True)
    }
    found = two.keys["s01"].opener(two.context, lattice, masked=False).open(add_parts(parts))
    np.testing.assert_array_equal(found, [3.0, -2.0, 35.0, 0.0])
    again = two.keys["s00"].plain(two.context, lattice).part(values[0])
    assert again.numbers == parts["s00"].numbers
    # The same tag key checks; masks and plain sums have different ones.
    assert two.keys["s01"].opener(two.context, lattice).open(add_parts(parts)) is None


# What is not there fails.


def flipped(total: Part, bit: int) -> Part:
    data = bytearray(total.numbers)
    data[bit // 8] ^= 1 << bit % 8
    return replace(total, numbers=bytes(data))


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_sums_that_are_changed_anywhere_fail(data: st.DataObject) -> None:
    q = data.draw(st.integers(1, 6))
    lattice = Lattice.of(precision(q), q)
    total = add_parts(FIVE.parts(np.full((5, q), 3.25), lattice))
    assert FIVE.opened(total, lattice) is not None
    bit = data.draw(st.integers(0, int(lattice.bits.sum()) - 1))
    assert FIVE.opened(flipped(total, bit), lattice) is None
    tag = data.draw(st.integers(0, MODULUS - 1).filter(lambda tag: tag != total.tag))
    assert FIVE.opened(replace(total, tag=tag), lattice) is None
    cut = total.encode()[: data.draw(st.integers(0, len(total.encode()) - 1))]
    with pytest.raises(WireError):
        Part.decode(cut)


CHANGES: dict[str, dict[str, Any]] = {
    "settings": {"settings": b"other"},
    "release": {"release": "0.3"},
    "a process": {"members": (Member("s00", b"restarted", b"rows of s00"),)},
    "rows": {"members": (Member("s00", b"s00" * 4, b"other rows"),)},
    "exchange": {"exchange": 4},
    "attempt": {"attempt": 1},
    "chain": {"head": b"other"},
}


@pytest.mark.parametrize("what", CHANGES)
def test_sums_and_parts_of_another_context_fail(what: str) -> None:
    change = dict(CHANGES[what])
    if "members" in change:
        change["members"] += FIVE.context.members[1:]
    other = replace(FIVE.context, **change)
    lattice = Lattice.of(precision(2), 2)
    values = np.arange(10.0).reshape(5, 2)
    here, there = FIVE.parts(values, lattice), FIVE.parts(values, lattice, other)
    assert other.digest() != FIVE.context.digest()
    assert FIVE.opened(add_parts(there), lattice, other) is not None
    assert FIVE.opened(add_parts(there), lattice) is None
    mixed = {**here, "s02": replace(there["s02"], state=here["s02"].state)}
    assert FIVE.opened(add_parts(mixed), lattice) is None
    for one, two in zip(here.values(), there.values(), strict=True):
        assert one.numbers != two.numbers or len(one.numbers) < 3
        assert one.tag != two.tag


def test_another_step_or_number_of_bits_is_another_context() -> None:
    same_bits = Lattice.of(precision(1), 1), Lattice.of(precision(1, 2.0, 200.0), 1)
    assert same_bits[0].shape == same_bits[1].shape
    total = add_parts(FIVE.parts(np.ones((5, 1)), same_bits[0]))
    assert FIVE.opened(total, same_bits[1]) is None
    assert FIVE.opened(total, Lattice.of(precision(1), 1, attempt=1)) is None


def test_a_part_left_out_or_counted_twice_fails() -> None:
    lattice = Lattice.of(precision(3), 3)
    parts = FIVE.parts(np.ones((5, 3)), lattice)
    four = {name: parts[name] for name in FIVE.names[:4]}
    assert FIVE.opened(add_parts(four), lattice) is None
    assert FIVE.opened(add_parts({**parts, "again": parts["s01"]}), lattice) is None


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 4), st.integers(1, 30), st.sampled_from([-1, 1]))
def test_a_sum_without_room_fails_and_more_bits_let_it_pass(
    site: int, turns: int, sign: int
) -> None:
    lattice = Lattice.of(precision(2, reach=20), 2)
    values = np.ones((5, 2))
    values[site, 1] += sign * turns * 2.0 ** int(lattice.bits[1])
    assert FIVE.sum(values, lattice) is None
    found = FIVE.sum(values, Lattice.of(precision(2, reach=20), 2, attempt=1))
    np.testing.assert_allclose(found, values.sum(axis=0), atol=3)


@pytest.mark.parametrize("turns", [1, 2**10, 2.0**63, 2.0**500])
def test_large_numbers_that_are_0_modulo_the_lattice_do_not_vanish(turns: float) -> None:
    """The attack: on a fine lattice all other sites' numbers are whole turns, and one is read."""
    lattice = Lattice.of(precision(1, 2.0**-20, 1.0), 1)
    others = np.ldexp(turns, int(lattice.bits[0]) - 20)
    values = np.array([[others], [2 * others], [0.125], [others], [others]])
    assert FIVE.sum(values, lattice) is None


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e308, -1.7e308])
@pytest.mark.parametrize("words", [1, 3])
def test_what_is_not_finite_fails_whatever_its_bits(bad: float, words: int) -> None:
    lattice = Lattice.of(precision(3) if words == 1 else None, 3)
    assert lattice.words == words
    values = np.ones((5, 3))
    values[2, 1] = bad
    assert FIVE.sum(values, lattice) is None


def test_large_numbers_that_cancel_are_no_trouble() -> None:
    values = np.array([[1e308], [-1e308], [2.0], [5e-324], [-0.0]])
    found = FIVE.sum(values, Lattice.of(precision(1, 2.0**-30, 10.0), 1))
    assert found[0] == pytest.approx(2.0, abs=1e-8)


# What others see is noise.


def test_parts_and_sums_are_uniform_whatever_the_rows() -> None:
    """The relay's bytes, tags too: no test tells them from random ones, for any of the values."""
    lattice = Lattice.of(precision(4000, reach=120), 4000)
    for value in (0.0, 1.0, 0.5, -(2.0**30), 1e300):
        parts = FIVE.parts(np.full((5, 4000), value), lattice)
        for part in [*parts.values(), add_parts(parts)]:
            counts = np.bincount(np.frombuffer(part.numbers, np.uint8), minlength=256)
            assert stats.chisquare(counts).pvalue > 1e-6
    tags = []
    for attempt in range(300):
        about = replace(FIVE.context, exchange=attempt)
        small = Lattice.of(precision(1), 1)
        tags += [part.tag for part in FIVE.parts(np.ones((5, 1)), small, about).values()]
    assert stats.kstest(np.array(tags, np.float64) / MODULUS, "uniform").pvalue > 1e-6


def test_masks_of_all_sites_add_up_to_nothing() -> None:
    for size in (precision(7), precision(7, 2.0**-60)):
        lattice = Lattice.of(size, 7)
        made = [keys.masking(EVERYONE.context, lattice) for keys in EVERYONE.keys.values()]
        turn = 2 ** (64 * lattice.words)
        columns = zip(*(integers_of(each.masks) for each in made), strict=True)
        assert {sum(column) % turn for column in columns} == {0}
        tag = made[0].opener.tag
        assert tag is not None
        assert (sum(each.blind for each in made) - tag.pad) % MODULUS == 0
        assert [each.pads for each in made] == [True] + 49 * [False]
        # Sites know k, so it is the pair pads that hide a site's tag from all others.
        blinds = np.array([each.blind for each in made], np.float64)
        assert stats.kstest(blinds / MODULUS, "uniform").pvalue > 1e-6


# Keys.


def test_an_analyst_with_the_relay_cannot_forge() -> None:
    """k and R follow from the tag secret. A mutant takes them from the pad's: then whoever reads
    sums makes any sum with a good tag."""
    lattice = Lattice.of(precision(2), 2)
    total = add_parts(FIVE.parts(np.ones((5, 2)), lattice))

    def forged(group: GroupSecrets, mine: GroupSecrets) -> Any:
        """Add 1 to the first number, and to the tag what a key that one has says of it."""
        tag = MemberKeys("x", mine).opener(FIVE.context, lattice).tag
        assert tag is not None
        numbers = total.words(1)
        numbers[:1, 0] += np.uint64(1) << np.uint64(lattice.fraction[0])  # modulo 2^64
        more = tag.of(np.array([[1 << int(lattice.fraction[0])], [0]], np.uint64))
        lie = replace(total, numbers=pack(numbers, lattice.bits), tag=(total.tag + more) % MODULUS)
        return MemberKeys("s", group).opener(FIVE.context, lattice).open(lie)

    secret = FIVE.keys["s00"].group
    analyst = GroupSecrets(secret.pad, secret.pad)  # all that an analyst may derive from
    assert forged(secret, analyst) is None
    assert forged(secret, secret) is not None  # the forgery itself works, with the right key


def test_secrets_have_one_purpose_each() -> None:
    """Another pad secret changes pads alone, another tag secret tags, factors and digests alone."""
    lattice = Lattice.of(precision(9), 9)
    old = FIVE.keys["s01"]
    group = old.group
    for new in (replace(group, pad=b"x" * 32), replace(group, tag=b"x" * 32)):
        one, two = (
            replace(old, group=each).masking(FIVE.context, lattice) for each in (group, new)
        )
        tags = [each.opener.tag for each in (one, two)]
        assert tags[0] is not None
        assert tags[1] is not None
        np.testing.assert_array_equal(one.masks, two.masks)
        pad_is_new, tag_is_new = new.pad != group.pad, new.tag != group.tag
        assert (one.opener.pad != two.opener.pad).any() == pad_is_new
        assert (tags[0].factors != tags[1].factors).any() == tag_is_new
        assert (tags[0].pad != tags[1].pad) == tag_is_new
        assert (one.state != two.state) == tag_is_new


def test_no_key_depends_on_what_a_processor_made_of_the_state() -> None:
    lattice, other = Lattice.of(precision(2), 2), replace(FIVE.context, state=b"other")
    values = np.arange(10.0).reshape(5, 2)
    here, there = FIVE.parts(values, lattice), FIVE.parts(values, lattice, other)
    assert all(here[name].numbers == there[name].numbers for name in FIVE.names)
    assert all(here[name].state != there[name].state for name in FIVE.names)


def test_states_are_compared_without_being_shown() -> None:
    lattice = Lattice.of(precision(1), 1)
    states = {
        (state, exchange): FIVE.keys[name]
        .masking(replace(FIVE.context, state=state, exchange=exchange), lattice)
        .state
        for name in FIVE.names[:2]
        for state in (b"one", b"two")
        for exchange in (1, 2)
    }
    assert len(set(states.values())) == 4
    assert {len(digest) for digest in states.values()} == {8}
    parts = FIVE.parts(np.ones((5, 1)), lattice)
    away = FIVE.parts(np.ones((5, 1)), lattice, replace(FIVE.context, state=b"elsewhere"))
    with pytest.raises(PartsDiffer, match="s00, s01, s02, s03; s04") as refused:
        add_parts({**parts, "s04": away["s04"]})
    assert refused.value.groups == [FIVE.names[:4], ["s04"]]


def test_a_set_names_each_site_once_and_in_order() -> None:
    with pytest.raises(WireError, match="once, in order"):
        context(["b", "a", "c"])
    with pytest.raises(WireError, match="once, in order"):
        context(["a", "a", "b"])
    stranger = context([*FIVE.names, "stranger"])
    with pytest.raises(WireError, match="no keys"):
        FIVE.keys["s00"].masking(stranger, Lattice.of(None, 1))


def test_group_secrets_are_sealed_to_one_process() -> None:
    one, two, other = RunKey(), RunKey(), RunKey()
    group = GroupSecrets.draw()
    sealed = seal(one.pair(two.public), group.encode(), b"epoch 1")
    assert group.pad not in sealed
    opened = unseal(two.pair(one.public), sealed, b"epoch 1")
    assert GroupSecrets.decode(opened) == group
    for pair, about in ((two.pair(one.public), b"epoch 2"), (other.pair(one.public), b"epoch 1")):
        with pytest.raises(WireError, match="was not made by this member"):
            unseal(pair, sealed, about)
    with pytest.raises(WireError, match="was not made by this member"):
        unseal(two.pair(one.public), sealed[:9], b"epoch 1")
    assert "pad" not in repr(group)


@pytest.mark.parametrize("public", [bytes(32), b"\1" + bytes(31), b"short"])
def test_run_keys_that_give_no_secret_are_refused(public: bytes) -> None:
    with pytest.raises(WireError, match="no point of X25519"):
        RunKey().pair(public)


def test_a_process_is_not_its_own_peer() -> None:
    key = RunKey()
    with pytest.raises(WireError, match="own run key"):
        key.pair(key.public)


# Bytes and lattices.


@given(st.lists(st.tuples(st.integers(1, 400), st.integers(1, 300)), min_size=1, max_size=5))
def test_shapes_survive_the_wire(runs: list[tuple[int, int]]) -> None:
    bits = np.repeat([b for _, b in runs], [c for c, _ in runs])
    shape = Shape.of(bits)
    found, rest = Shape.decode(shape.encode() + b"more")
    assert (found, rest) == (shape, b"more")
    np.testing.assert_array_equal(found.bits, bits)


@given(st.binary(max_size=60))
def test_hostile_bytes_are_refused_in_words(data: bytes) -> None:
    try:
        part = Part.decode(data)
    except WireError:
        return
    assert part.shape.part_bytes <= len(data)


def test_a_part_that_claims_a_billion_numbers_takes_no_memory() -> None:
    for runs in (((1 << 40, 1),), ((1 << 24, 1), (1, 4096)), ((1, 5000),), ((0, 5),)):
        with pytest.raises(WireError):
            Shape.decode(Shape(runs).encode())


def test_bytes_are_foretold() -> None:
    for about, size in ((None, 4), (precision(33), 33), (precision(5, 2.0**-50), 5)):
        lattice = Lattice.of(about, size)
        parts = FIVE.parts(np.ones((5, size)), lattice)
        for part in [*parts.values(), add_parts(parts)]:
            assert len(part.encode()) == lattice.part_bytes


@pytest.mark.parametrize("change", [{"step": 0.3}, {"centre": np.nan}, {"reach": np.inf}])
def test_lattices_that_cannot_be_are_refused(change: dict[str, float]) -> None:
    with pytest.raises(NumericalError):
        Lattice.of(precision(2, **change), 2)


IMPORTS = """
import sys
import emfed.aggregation.simulated
assert "cryptography" not in sys.modules
"""


def test_sums_in_one_process_need_no_cryptography() -> None:
    subprocess.run([sys.executable, "-c", IMPORTS], check=True, timeout=60)
