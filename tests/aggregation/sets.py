"""Sets of sites in one process, and masks that a test chooses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from emfed.aggregation.integers import WORD
from emfed.aggregation.keys import Context, GroupSecrets, Member, MemberKeys, RunKey
from emfed.aggregation.lattice import Lattice
from emfed.aggregation.masks import Masking, Opener, Part, TagKey, add_parts
from emfed.core.sums import Precision


def precision(size: int, step: float = 1.0, reach: float = 100.0, centre: Any = 0.0) -> Precision:
    return Precision(
        *(np.broadcast_to(np.asarray(x, float), (size,)) for x in (step, centre, reach))
    )


def context(names: Sequence[str], **changes: Any) -> Context:
    members = tuple(Member(name, name.encode() * 4, b"rows of " + name.encode()) for name in names)
    about = {
        "settings": b"settings",
        "release": "0.2",
        "members": members,
        "exchange": 3,
        "attempt": 0,
        "head": b"head",
        "state": b"state",
    }
    return Context(**{**about, **changes})


@dataclass
class Sites:
    """Sites with keys of their own, and one context."""

    keys: dict[str, MemberKeys]
    analyst: MemberKeys
    context: Context

    @classmethod
    def of(cls, count: int) -> Sites:
        names = [f"s{number:02d}" for number in range(count)]
        run = {name: RunKey() for name in names}
        group = GroupSecrets.draw()
        keys = {
            one: MemberKeys(
                one, group, {o: run[one].pair(run[o].public) for o in names if o != one}
            )
            for one in names
        }
        return cls(keys, MemberKeys("analyst", group.for_analyst()), context(names))

    @property
    def names(self) -> list[str]:
        return list(self.keys)

    def parts(self, values: Any, lattice: Lattice, about: Context | None = None) -> dict[str, Part]:
        about = about or self.context
        return {
            name: keys.masking(about, lattice).part(row)
            for (name, keys), row in zip(self.keys.items(), values, strict=True)
        }

    def opened(self, total: Part, lattice: Lattice, about: Context | None = None) -> Any:
        """What every site makes of it: all the same."""
        found = [k.opener(about or self.context, lattice).open(total) for k in self.keys.values()]
        for one in found[1:]:
            np.testing.assert_array_equal(one, found[0])
        return found[0]

    def sum(self, values: Any, lattice: Lattice) -> Any:
        return self.opened(add_parts(self.parts(values, lattice)), lattice)


def words_of(integers: Sequence[int], words: int = 1) -> np.ndarray:
    """Python's integers in two's complement."""
    mask = 2**WORD - 1
    return np.array(
        [[(value >> (WORD * at)) & mask for at in range(words)] for value in integers], np.uint64
    ).reshape(len(integers), words)


def integers_of(array: np.ndarray) -> list[int]:
    """The inverse of `words_of`."""
    return [
        int.from_bytes(row.astype("<u8").tobytes(), "little", signed=True)
        for row in np.ascontiguousarray(array)
    ]


def masking(
    lattice: Lattice,
    masks: Sequence[int],
    factors: Sequence[int],
    blind: int = 0,
    pads: bool = False,
    pad: Sequence[int] | None = None,
) -> Masking:
    """A site's masking with masks, factors and pads that a test chooses."""
    high = np.zeros((lattice.size, lattice.words), np.uint64)
    if pad is not None:
        shifted = [p << int(f) for p, f in zip(pad, lattice.fraction, strict=True)]
        high = words_of(shifted, lattice.words)
    opener = Opener(lattice, high, TagKey(words_of(factors, 2), 0))
    return Masking(opener, words_of(masks, lattice.words), blind, pads, bytes(8))
