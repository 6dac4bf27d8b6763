"""Rows that change sites while their sum stays the same: nobody else sees a difference.

Masks are random, so those of one division of the rows stand for others of another one: with M
shifted by the difference of the parts, which adds up to 0, each site sends what it sent before.
Here a second run follows its own rows in all that it does, and in place of its shifted masks takes
the numbers of the first division. So any byte, length, time, refusal or end that follows from the
rows of one site shows, whatever the relay does meanwhile.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from numpy.typing import NDArray

from emfed.aggregation.keys import RunKey
from emfed.aggregation.privacy import WithoutNoise
from emfed.core.noise import NoisyAsk
from emfed.data import as_workers
from emfed.data.summing import HeldRows
from emfed.deployment.consent import OfferedRows
from emfed.network.exchange.adding import EpochKeys
from emfed.network.exchange.member import Follower
from emfed.network.exchange.records import MemoryRecords
from emfed.network.exchange.statements import HandOut
from emfed.network.exchange.virtual import RELAY
from emfed.network.owner_rules import SiteRules
from tests.network.exchanges import NAMES, READER
from tests.network.owners import MIXTURE, Owners, document
from tests.network.test_lies import forged, with_sums

FloatArray = NDArray[np.float64]
Tables = dict[str, FloatArray]
SITES = NAMES[:4]


def parted(order: str) -> Tables:
    """The same rows, divided otherwise."""
    rng = np.random.default_rng(7)
    rows = np.concatenate([rng.normal(size=(70, 2)), rng.normal([6.0, 2.0], size=(50, 2))])
    cuts = [30, 60, 90]
    if order == "sorted":  # sites have one cluster each, and one of them nearly all rows
        rows, cuts = rows[np.argsort(rows[:, 0])], [12, 24, 36]
    elif order == "shuffled":
        rows = rng.permutation(rows)
    return dict(zip(SITES, np.split(rows, cuts), strict=True))


class Relays:
    """What a relay does to messages and members; it follows from a seed."""

    def __init__(self, seed: int, owners: Owners) -> None:
        self.rng, self.network = random.Random(seed), owners.federation.network
        self.network.fate = self.fate
        self.loss, self.late = self.rng.choice([0.0, 0.1]), self.rng.choice([0.0, 0.5])
        self.lies = self.rng.choice([0.0, 0.02, 0.3])
        self.old: list[tuple[str, bytes]] = []
        for _ in range(self.rng.choice([0, 2, 4])):
            who = self.rng.choice([*SITES, READER, RELAY])
            self.network.at(self.rng.random() * 2, partial(self.strike, who))

    def strike(self, who: str) -> None:
        """A process is killed; its disk may be lost."""
        self.network.kill(who)
        disk = MemoryRecords() if self.rng.random() < 0.2 else None
        self.network.at(
            self.network.now + self.rng.choice([0.05, 3.0]), partial(self.network.start, who, disk)
        )

    def fate(self, sender: str, receiver: str, data: bytes) -> list[tuple[float, bytes]]:
        """Lost, late, again, forged, or shown to somebody else."""
        if self.rng.random() < self.loss:
            return []
        if sender == RELAY:
            self.old.append((receiver, data))
            if self.rng.random() < self.lies:
                data = with_sums(HandOut.decode(data), forged).encode()
            elif self.rng.random() < self.lies:
                data = self.rng.choice(self.old)[1]
        copies = self.rng.choice([1, 1, 1, 2])
        return [(0.01 + self.late * self.rng.random(), data) for _ in range(copies)]


def seen(
    where: Path,
    tables: Tables,
    numbers: Tables,
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
    **fit: Any,
) -> tuple[list[tuple[str, bytes]], dict[str, str]]:
    """All that members send, and how they end; masks are shifted to those of other tables."""
    drawn = random.Random(seed)

    def bits(count: int) -> bytes:
        return drawn.randbytes(count)

    def part(keys: EpochKeys, about: Any, question: Any, values: FloatArray) -> Any:
        held = HeldRows(as_workers([numbers[keys.name]]))
        if isinstance(question.ask, NoisyAsk):
            exact = WithoutNoise(question.ask).part(own[keys.name])
            shifted = values - exact + WithoutNoise(question.ask).part(held)
        else:
            shifted = question.ask.part(held)
        if question.exchange == 0 and question.ask.counted:
            shifted = np.append(shifted, held.total)
        sums.setdefault(question.ask.digest(), {})[keys.name] = values - shifted
        return inner(keys, about, question, shifted)

    inner: Callable[..., Any] = EpochKeys.part
    sums: dict[bytes, dict[str, FloatArray]] = {}
    with monkeypatch.context() as patch:
        patch.setattr("os.urandom", bits)
        patch.setitem(Follower.__init__.__kwdefaults__ or {}, "random", bits)
        key = lambda: RunKey(X25519PrivateKey.from_private_bytes(bits(32)))  # noqa: E731
        patch.setattr("emfed.network.exchange.member.RunKey", key)
        salted = lambda self, salt: hashlib.sha256(salt).digest()  # noqa: E731
        patch.setattr(OfferedRows, "commitment", salted)
        patch.setattr(EpochKeys, "part", part)
        rules = dict.fromkeys(SITES, SiteRules(largest_changes=3))
        owners = Owners(where, tables, document(MIXTURE, **fit), rules)
        own = owners.federation.rows
        Relays(seed, owners)
        owners.federation.run(400)
    for added in sums.values():  # the shifts of masks add up to 0, to the roundings of each site
        if len(added) == len(SITES):
            largest = max(float(np.abs(one).max()) for one in added.values())
            most = len(SITES) if "epsilon" in fit else 1e-7 * max(1.0, largest)
            assert np.abs(sum(added.values())).max() <= most
    return owners.federation.network.sent, owners.told()


@pytest.mark.parametrize("order", ["sorted", "shuffled"])
def test_whatever_a_relay_does_members_send_the_same(
    order: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other, final = parted("as they are"), parted(order), 0
    fit = {"rounds": 6, "moves": 0}
    for seed in range(6):
        first, ends = seen(tmp_path / f"{seed} one", one, one, seed, monkeypatch, **fit)
        second, again = seen(tmp_path / f"{seed} two", other, one, seed, monkeypatch, **fit)
        assert len(first) > 40
        assert first == second
        assert ends == again
        final += set(ends.values()) == {""}
    assert 2 <= final < 6  # some relays lie so much that the fit ends


@pytest.mark.parametrize("order", ["sorted", "shuffled"])
def test_nor_do_they_in_a_private_fit(
    order: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With equal keys of noise; which part has whose noise is under the masks, too."""
    monkeypatch.setattr("emfed.fitting.private.SKETCH_ROWS", 300)
    monkeypatch.setattr("emfed.fitting.private.START_ROUNDS", 2)
    one, other = parted("as they are"), parted(order)
    for seed in range(2):
        first, ends = seen(tmp_path / f"{seed} one", one, one, seed, monkeypatch, epsilon=90.0)
        second, again = seen(tmp_path / f"{seed} two", other, one, seed, monkeypatch, epsilon=90.0)
        assert first == second
        assert ends == again


def test_lengths_that_follow_from_one_sites_rows_would_show(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As release 0.1 told each site's distance: here by a refusal."""
    one, other = parted("as they are"), parted("sorted")
    monkeypatch.setattr(
        "emfed.deployment.consent._has_rows",
        lambda terms: "" if terms.rows.count >= 20 else "few rows",
    )
    first, _ = seen(tmp_path / "one", one, one, 0, monkeypatch, rounds=6, moves=0)
    second, _ = seen(tmp_path / "two", other, one, 0, monkeypatch, rounds=6, moves=0)
    assert first != second
