"""What relay, analysts and any coalition of sites see depends on the other sites' rows through the
integer sum of their numbers alone. By enumeration, and by a bijection of masks at full size.

Masks that are multiples of 2^60 are a group of 16 elements in which everything works as it does
among 64-bit words: so all masks are enumerated in the code that runs between machines.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emfed.aggregation.lattice import Lattice
from emfed.aggregation.masks import MODULUS
from tests.aggregation.sets import masking, precision

UNIT = 2**60
"""What masks and numbers are multiples of in an enumeration: 16 of them are a whole turn."""
TURN = 16
FACTOR = 0x1234567_89ABCDEF_0FEDCBA9_87654321
"""k of the one number."""
ONE_NUMBER = Lattice(np.array([2]), np.array([0]), np.zeros(1))
"""One number of two bits: in units of 2^60 a step is 4."""
FINER = Lattice(np.array([3]), np.array([0]), np.zeros(1))
"""A further attempt with another split of the word: a step is 2."""

Split = Callable[[Lattice, int, int], tuple[bytes, int]]


def sent(lattice: Lattice, units: int, mask: int) -> tuple[bytes, int]:
    """A site's numbers and tag, without pad and pair pads, of a number in units of 2^60."""
    value = np.array([units * UNIT / 2.0 ** float(lattice.fraction[0])])
    part = masking(lattice, [mask % TURN * UNIT], [FACTOR]).part(value)
    return part.numbers, part.tag


def attempts(numbers: tuple[int, int, int], lattice: Lattice, split: Split) -> Counter[Any]:
    """The law of parts and of the tags' sum, over all masks of three sites.

    Pair pads make single tags uniform given their sum (`test_tags_tell_their_sum_alone`).
    """
    law: Counter[Any] = Counter()
    table = {
        (i, m): split(lattice, units, m) for i, units in enumerate(numbers) for m in range(TURN)
    }
    for m, n in product(range(TURN), repeat=2):
        seen = [table[0, m], table[1, n], table[2, (-m - n) % TURN]]
        law[(*(part for part, _ in seen), sum(tag for _, tag in seen) % MODULUS)] += 1
    return law


def of_two(numbers: tuple[int, int], known: int, lattice: Lattice, split: Split) -> Counter[Any]:
    """What a relay sees with the third site, which knows its masks: they add up to ``known``."""
    law: Counter[Any] = Counter()
    for m in range(TURN):
        (one, a), (two, b) = (
            split(lattice, numbers[0], m),
            split(lattice, numbers[1], (known - m) % TURN),
        )
        law[one, two, (a + b) % MODULUS] += 1
    return law


def equal_sums() -> Iterator[tuple[tuple[int, int, int], tuple[int, int, int]]]:
    first = (5, 1, 0)
    for a, b in ((0, 0), (-3, 18), (40, -7), (-16, 3), (6, 0)):
        yield first, (a, b, sum(first) - a - b)


def depends_on_more_than_the_sum(split: Split, lattice: Lattice = ONE_NUMBER) -> bool:
    relay = any(
        attempts(one, lattice, split) != attempts(two, lattice, split) for one, two in equal_sums()
    )
    coalition = any(
        of_two((z, 7 - z), known, lattice, split) != of_two((7, 0), known, lattice, split)
        for z in range(-20, 21)
        for known in (0, 5)
    )
    return relay or coalition


@pytest.mark.parametrize("lattice", [ONE_NUMBER, FINER])
def test_parts_and_tags_depend_on_the_integer_sum_alone(lattice: Lattice) -> None:
    assert not depends_on_more_than_the_sum(sent, lattice)


def test_so_do_two_attempts_together() -> None:
    """Masks of two attempts are independent: given the numbers, so are the two parts of the law.
    What is left is that the numbers of both have equal sums whenever those of one do."""
    for one, two in equal_sums():
        both = [
            (attempts(numbers, ONE_NUMBER, sent), attempts(numbers, FINER, sent))
            for numbers in (one, two)
        ]
        assert both[0] == both[1]


def test_another_sum_is_another_law() -> None:
    assert attempts((5, 1, 0), ONE_NUMBER, sent) != attempts((5, 1, 1), ONE_NUMBER, sent)
    assert of_two((3, 4), 0, ONE_NUMBER, sent) != of_two((3, 5), 0, ONE_NUMBER, sent)


# Mutants: what other designs would tell.


def rounds_first(lattice: Lattice, units: int, mask: int) -> tuple[bytes, int]:
    """Round to the step, and mask whole steps: the sum of roundings tells of single sites."""
    step = 2 ** int(lattice.fraction[0]) // UNIT
    return sent(lattice, round(units / step) * step, mask // step * step)


def tags_of_reduced_numbers(lattice: Lattice, units: int, mask: int) -> tuple[bytes, int]:
    """Reduce Z modulo the word before the tag: which site went round the turn shows."""
    part, tag = sent(lattice, units, mask)
    return part, (tag - FACTOR * UNIT * (units - units % TURN)) % MODULUS


def tags_of_centred_numbers(lattice: Lattice, units: int, mask: int) -> tuple[bytes, int]:
    """The same around 0, as signed machine words would be."""
    part, tag = sent(lattice, units, mask)
    centred = (units + TURN // 2) % TURN - TURN // 2
    return part, (tag - FACTOR * UNIT * (units - centred)) % MODULUS


@pytest.mark.parametrize("mutant", [rounds_first, tags_of_reduced_numbers, tags_of_centred_numbers])
def test_mutants_tell_more(mutant: Split) -> None:
    assert depends_on_more_than_the_sum(mutant)


# Full size: for rows with the same sum there are masks, as likely, under which all is the same.


def seen_of(values: Any, lattice: Lattice, masks: Any, blinds: Any, factors: Any) -> list[bytes]:
    pad = [3 % 2 ** int(b) for b in lattice.bits]
    return [
        masking(lattice, m, factors, r, at == 0, pad).part(row).encode()
        for at, (row, m, r) in enumerate(zip(values, masks, blinds, strict=True))
    ]


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_rows_that_change_sites_change_nothing_that_is_seen(data: st.DataObject) -> None:
    """Sites i and j swap what they like as long as the sum of their integers stays. There is one
    mask of the pair, and one pair pad, under which relay and all other sites see the same bytes:
    the law is the same, whatever they do and however often they ask."""
    n, q = data.draw(st.integers(2, 6)), data.draw(st.integers(1, 12))
    seed = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    reach = 2.0 ** seed.integers(0, 60, q)
    lattice = Lattice.of(precision(q, reach=reach), q, data.draw(st.integers(0, 2)))
    turn = 2 ** (64 * lattice.words)
    whole = [int.from_bytes(seed.bytes(16), "little") for _ in range(q)]
    factors = [x >> 1 for x in whole]
    masks = [[int.from_bytes(seed.bytes(40), "little") % turn for _ in range(q)] for _ in range(n)]
    blinds = [int.from_bytes(seed.bytes(15), "little") for _ in range(n)]
    # Numbers on a grid that doubles hold exactly, so that their integers add up exactly.
    grid = 2.0 ** seed.integers(-4, 40, q)
    values = seed.integers(-(2**20), 2**20, (n, q)) * grid
    moved = seed.integers(-(2**20), 2**20, q) * grid
    i, j = seed.permutation(n)[:2]
    other = values.copy()
    other[i] += moved
    other[j] -= moved
    before = seen_of(values, lattice, masks, blinds, factors)
    shift = [
        int(x) * 2 ** int(f)  # the numbers are whole sixteenths
        for x, f in zip(np.rint(moved * 16), lattice.fraction - 4, strict=True)
    ]
    turned = [list(row) for row in masks]
    turned[i] = [(m - s) % turn for m, s in zip(masks[i], shift, strict=True)]
    turned[j] = [(m + s) % turn for m, s in zip(masks[j], shift, strict=True)]
    told = sum(k * s for k, s in zip(factors, shift, strict=True))
    blinded = list(blinds)
    blinded[i] -= told
    blinded[j] += told
    assert seen_of(other, lattice, turned, blinded, factors) == before
    assert not moved.any() or seen_of(other, lattice, masks, blinds, factors) != before


@given(st.integers(0, MODULUS - 1), st.integers(0, MODULUS - 1))
def test_tags_tell_their_sum_alone(blind: int, more: int) -> None:
    """A pair pad moves a tag by itself: uniform pads that cancel leave nothing but the sum."""
    one, two = (
        masking(ONE_NUMBER, [7], [FACTOR], pad).part(np.array([1.25])).tag
        for pad in (blind, blind + more)
    )
    assert (two - one) % MODULUS == more


def test_an_analyst_sees_the_same_when_sites_swap() -> None:
    """The pad hides the sum from the relay; whoever knows it sees the sum, and nothing else."""
    for pad in range(4):
        laws = []
        for numbers in ((5, 1, 0), (-3, 18, -9)):
            law: Counter[Any] = Counter()
            for m, n in product(range(TURN), repeat=2):
                turn = [m, n, (-m - n) % TURN]
                law[
                    tuple(
                        masking(ONE_NUMBER, [u * UNIT], [FACTOR], 0, at == 0, [pad])
                        .part(np.array([z * UNIT / 2.0**62]))
                        .numbers
                        for at, (z, u) in enumerate(zip(numbers, turn, strict=True))
                    )
                ] += 1
            laws.append(law)
        assert laws[0] == laws[1]
