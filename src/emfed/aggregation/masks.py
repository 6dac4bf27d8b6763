"""Masked sums: mask first, then round (docs/decisions/003).

Each site turns its part into integers, adds a mask and rounds the result to the few bits that the
sum needs. Masks of all sites add up to 0, and roundings add up to what brings the sum back to the
lattice. A tag, linear in what the site's rounded part stands for, shows to sites whether the sum
is the sum of these parts. The first site adds a pad, so that the relay, which adds, learns no sum.

    Z = rint(x 2^F / step)                 an integer of any size
    V = (Z + M + 2^(F-1)) mod 2^W          W is 64 bits or more, F = W - b, the M add up to 0
    part = floor(V / 2^F)                  b bits; the first site adds the pad modulo 2^b
    T = Z - ((V mod 2^F) - 2^(F-1))        the T add up to 2^F times the sum of parts, exactly
    tag = <k, T> + r modulo 2^127 - 1      the r add up to R
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import numpy as np

from emfed.aggregation.integers import (
    WORD,
    Integers,
    add,
    extended,
    fixed_point,
    high_bits,
    inner,
    limbs,
    negative,
    pack,
    to_floats,
    unpack,
)
from emfed.aggregation.lattice import DIGEST_BYTES, TAG_BYTES, Lattice, Shape
from emfed.core.errors import WireError
from emfed.core.sums import FloatArray

MODULUS = 2**127 - 1
"""Tags are numbers modulo this prime."""


@final
@dataclass(frozen=True, eq=False)
class Part:
    """What one site sends for a sum, and what the relay sends of the sum.

    Parameters
    ----------
    shape : Shape
        The bits of each number.
    numbers : bytes
        The numbers, one after the other.
    tag : int
        The tag.
    state : bytes
        A keyed digest of the state that the part is about: parts with different ones do not add.
    """

    shape: Shape
    numbers: bytes
    tag: int
    state: bytes

    def encode(self) -> bytes:
        """The bytes on the wire."""
        tag = self.tag.to_bytes(TAG_BYTES, "little")
        return self.shape.encode() + tag + self.state + self.numbers

    @classmethod
    def decode(cls, data: bytes) -> Part:
        """The inverse of `encode`; raises `WireError` for anything else."""
        shape, rest = Shape.decode(data)
        front = TAG_BYTES + DIGEST_BYTES
        if len(rest) != front + shape.numbers_bytes:
            raise WireError(f"a part of {shape.part_bytes} bytes came with {len(data)}.")
        tag = int.from_bytes(rest[:TAG_BYTES], "little")
        if tag >= MODULUS:
            raise WireError("a tag that is out of range.")
        return cls(shape, rest[front:], tag, rest[TAG_BYTES:front])

    def words(self, words: int) -> Integers:
        """The numbers, in the highest bits of so many words."""
        return unpack(self.numbers, self.shape.bits, words)


class PartsDiffer(WireError):
    """Raised by `add_parts` where sites are not at one state; ``groups`` names who agree."""

    def __init__(self, groups: list[list[str]]) -> None:
        super().__init__("sites disagree: " + "; ".join(", ".join(names) for names in groups))
        self.groups = groups


def add_parts(parts: Mapping[str, Part]) -> Part:
    """Add the parts of all sites of a set: all that a relay does, without any key.

    Raises `PartsDiffer` where their states or the bits of their numbers differ.
    """
    groups: dict[tuple[bytes, Shape], list[str]] = {}
    for name, part in parts.items():
        groups.setdefault((part.state, part.shape), []).append(name)
    if len(groups) > 1:
        raise PartsDiffer(sorted(groups.values(), key=len, reverse=True))
    ((state, shape),) = groups
    bits = shape.bits
    words = -(-int(bits.max()) // WORD)
    total = np.zeros((len(bits), words), dtype=np.uint64)
    for part in parts.values():
        total = add(total, part.words(words))
    tag = sum(part.tag for part in parts.values()) % MODULUS
    return Part(shape, pack(total, bits), tag, state)


@final
@dataclass(frozen=True, eq=False)
class TagKey:
    """What sites know of the tag of one sum, and neither relay nor analysts do.

    Parameters
    ----------
    factors : array of shape (size, 2)
        A factor k of 127 bits for each number.
    pad : int
        R, what the tag of the sum is hidden with.
    """

    factors: Integers
    pad: int

    def of(self, integers: Integers) -> int:
        """<k, T>, for integers of any size."""
        return inner(limbs(self.factors), limbs(integers)) % MODULUS


@final
@dataclass(frozen=True, eq=False)
class Opener:
    """Takes the pad off a sum, lifts it around the expected value, and checks its tag.

    Parameters
    ----------
    lattice : Lattice
        The lattice of the sum.
    pad : array of shape (size, words)
        What the first site added, in the highest bits.
    tag : TagKey, optional
        None: of an analyst, who cannot check.
    """

    lattice: Lattice
    pad: Integers
    tag: TagKey | None

    def open(self, total: Part) -> FloatArray | None:
        """The sum, or None if it has no room or is not the sum of these parts.

        An analyst is given what came: it is to be confirmed by the sites.
        """
        lattice = self.lattice
        if total.shape != lattice.shape:
            return None
        middle = lattice.middle
        # In the units of Z, modulo 2^W: the bits below the step are 0 in all of these.
        pad = add(self.pad, middle[:, : lattice.words])
        away = add(total.words(lattice.words), negative(pad))
        words = max(lattice.words, middle.shape[1]) + 1
        lifted = add(extended(middle, words), extended(away, words))
        if self.tag is not None and (self.tag.of(lifted) + self.tag.pad) % MODULUS != total.tag:
            return None
        # To the nearest multiple of the guard, by rounding up from its half.
        place = lattice.fraction + lattice.guard
        half = fixed_point(np.ones(lattice.size), place - 1, words)[:, :words]
        kept = high_bits(words, WORD * words - place)
        return to_floats(add(lifted, half) & kept, lattice.exponents - lattice.fraction)


@final
@dataclass(frozen=True, eq=False)
class Masking:
    """All that one site uses once, for its part of one sum in one context.

    Parameters
    ----------
    opener : Opener
        What the sum is opened with.
    masks : array of shape (size, words)
        M: those of all sites of the set add up to 0 modulo 2^W.
    blind : int
        r: those of all sites add up to R.
    pads : bool
        Whether this site is the one that adds the pad.
    state : bytes
        The keyed digest of the state.
    """

    opener: Opener
    masks: Integers
    blind: int
    pads: bool
    state: bytes

    def part(self, values: FloatArray) -> Part:
        """The part that leaves the site."""
        lattice, tag_key = self.opener.lattice, self.opener.tag
        assert tag_key is not None, "an analyst has no part"
        finite = np.isfinite(values)
        integers = lattice.integers(np.where(finite, values, 0.0))
        words = lattice.words
        half = fixed_point(np.ones(lattice.size), lattice.fraction - 1, words)[:, :words]
        hidden = add(integers[:, :words], add(self.masks, half))
        tag = tag_key.of(integers) + self.blind
        if not finite.all():
            # A random integer modulo 2^W (2^127 - 1), whatever the number was: the tag fails.
            drawn = np.frombuffer(os.urandom(8 * words * int((~finite).sum())), dtype=np.uint64)
            hidden[~finite] = drawn.reshape(-1, words)
            tag += int.from_bytes(os.urandom(TAG_BYTES), "little")
        high = high_bits(words, lattice.bits)
        rounded = add(hidden & ~high, negative(half))
        tag = (tag - tag_key.of(rounded)) % MODULUS
        if self.pads:
            hidden = add(hidden & high, self.opener.pad)
        return Part(lattice.shape, pack(hidden, lattice.bits), tag, self.state)
