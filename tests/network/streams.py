"""Masks under which sums between machines are rounded as those of a simulation are."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import numpy as np

from emfed.aggregation.integers import Integers, add, fixed_point, negative
from emfed.aggregation.keys import MemberKeys
from emfed.aggregation.masks import Part
from emfed.core.streams import Purpose, uniforms
from emfed.core.sums import FloatArray, Rows
from emfed.network.exchange.adding import EpochKeys, PlacedAsk
from emfed.network.exchange.transcript import Transcript


def drawn_seed(about: Transcript, seed: int) -> int:
    """The seed that sites draw together, as `FitProgram` has it."""
    place = about.heads[about.began]
    word = hashlib.sha256(b"emfed seed\0" + place + str(seed).encode())
    return int.from_bytes(word.digest()[:4], "little")


@contextmanager
def rounded_as_simulated(tables: Mapping[str, Rows], seed: int) -> Iterator[None]:
    """Sites of this process take masks that follow from the simulation's draws and all parts.

    Between machines nobody knows all parts, and pair masks are as good: what the roundings add is
    of the same law (tests/aggregation/test_law.py).
    """

    def values(question: PlacedAsk, rows: Rows) -> FloatArray:
        found = question.ask.part(rows)
        first = question.exchange == 0 and question.ask.counted
        return np.append(found, rows.total) if first else found

    def masks(about: Transcript, question: PlacedAsk, name: str) -> Integers:
        lattice, sites = question.lattice, about.members
        free = np.arange(len(sites) - 1, dtype=np.int64) + question.attempt * len(sites)
        drawn = uniforms(
            drawn_seed(about, seed), question.exchange + 1, Purpose.COMPRESSION, free, lattice.size
        )
        words = lattice.words
        half = fixed_point(np.ones(lattice.size), lattice.fraction - 1, words)[:, :words]
        last = np.zeros_like(half)
        own = last
        for one, site in zip(drawn, sites, strict=False):
            low = fixed_point(1 - one, lattice.fraction, words)[:, :words]
            part = lattice.integers(values(question, tables[site]))[:, :words]
            mask = add(low, negative(add(part, half)))
            last = add(last, negative(mask))
            own = mask if site == name else own
        return last if name == sites[-1] else own

    def part(keys: EpochKeys, about: Transcript, question: PlacedAsk, own: FloatArray) -> Part:
        hellos = about.hellos_at(len(about))
        pairs = {n: keys.run.pair(hellos[n].key) for n in keys.members if n != keys.name}
        context = keys._context(about, question, len(about))
        made = MemberKeys(keys.name, keys.group, pairs).masking(context, question.lattice)
        return replace(made, masks=masks(about, question, keys.name)).part(own)

    with patch.object(EpochKeys, "part", part):
        yield
