"""Processor time of masks and tags, a site and a round."""

from __future__ import annotations

import os
import statistics
import time
from typing import Any

import numpy as np

from emfed.aggregation.keys import Context, GroupSecrets, Member, MemberKeys, RunKey
from emfed.aggregation.lattice import Lattice
from emfed.aggregation.masks import add_parts
from emfed.core.sums import Precision

TURNS = 20
"""Rounds that are timed; the median is shown."""
SIZES = ((3, 100), (10, 330), (30, 1000), (50, 2000))
"""Sites, and numbers of a sum."""


def set_of(sites: int) -> tuple[list[MemberKeys], Context]:
    """Keys of so many sites, and a context."""
    run = {f"s{number:03d}": RunKey() for number in range(sites)}
    group = GroupSecrets.draw()
    keys = [
        MemberKeys(name, group, {o: key.pair(run[o].public) for o in run if o != name})
        for name, key in run.items()
    ]
    members = tuple(Member(name, os.urandom(16), os.urandom(32)) for name in run)
    return keys, Context(bytes(32), "0.2", members, 0, 0, bytes(32), bytes(16))


def rounds_of(sites: int, numbers: int) -> dict[str, Any]:
    """Milliseconds of one site's processor, of the relay's, and bytes of a part."""
    keys, context = set_of(sites)
    rng = np.random.default_rng(0)
    step, reach = np.full(numbers, 1.0), np.full(numbers, 200.0)
    step[-2:], reach[-2:] = 2.0**-23, 2.0**12  # the log-likelihood and the entropy
    lattice = Lattice.of(Precision(step, np.zeros(numbers), reach), numbers)
    values = rng.normal(size=(sites, numbers))
    parts = {k.name: k.masking(context, lattice).part(v) for k, v in zip(keys, values, strict=True)}
    spent: dict[str, list[float]] = {"mask and tag": [], "open and check": [], "relay adds": []}

    def timed(what: str, began: float) -> float:
        spent[what].append(1e3 * (time.process_time() - began))
        return time.process_time()

    for _ in range(TURNS):
        now = time.process_time()
        keys[1].masking(context, lattice).part(values[1])
        now = timed("mask and tag", now)
        total = add_parts(parts)
        now = timed("relay adds", now)
        assert keys[1].opener(context, lattice).open(total) is not None
        timed("open and check", now)
    found = {what: statistics.median(each) for what, each in spent.items()}
    return {
        "sites": sites,
        "numbers": numbers,
        **found,
        "a site": found["mask and tag"] + found["open and check"],
        "bytes": lattice.part_bytes,
    }
