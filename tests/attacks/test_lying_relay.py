"""What read rows of release 0.1 through its masks, tried on members that follow the fit.

The relay lies and the analyst helps it, as `emfed serve` may. Each attack has a test here; the
class is excluded by `tests/aggregation/test_law.py` (what anybody sees depends on the sum alone),
`tests/network/test_lies.py` and `tests/network/test_attacks.py` (members ask for their own fit or
for nothing, whatever a relay does).
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

import emfed
from emfed.aggregation import keys
from emfed.aggregation.masks import Part
from emfed.core.errors import SettingsError
from emfed.data import as_workers
from emfed.data.summing import HeldRows
from emfed.deployment.consent import choices_in
from emfed.fitting import FitSettings
from emfed.fitting.in_process import of_named_columns
from emfed.fitting.program import FitProgram
from emfed.network.exchange.statements import (
    Added,
    Entry,
    HandOut,
    Post,
    StatementKind,
    Turn,
)
from emfed.network.exchange.virtual import RELAY
from emfed.network.owner_rules import SiteRules
from tests.network.exchanges import NAMES, READER, Federation, Toy
from tests.network.test_lies import forged, lied_to, with_sums

FloatArray = NDArray[np.float64]
COLUMNS = ("size", "dents")
FIT = {"rounds": 12, "moves": 0, "masks": True}


def program(**settings: Any) -> FitProgram:
    given: dict[str, Any] = {"columns": list(COLUMNS), **FIT, **settings}
    return FitProgram(of_named_columns(FitSettings(emfed.gaussian_mixture(2), **given), COLUMNS))


def tables(seed: int, sites: int = 3, rows: int = 40) -> dict[str, FloatArray]:
    rng = np.random.default_rng(seed)
    return {
        name: rng.normal(size=(rows, 2)) + 4 * rng.integers(2, size=(rows, 1))
        for name in NAMES[:sites]
    }


def fitted(data: dict[str, FloatArray], **options: Any) -> Federation:
    federation = Federation(len(data), accept=lambda _: program(), **options)
    federation.rows = {name: HeldRows(as_workers([rows])) for name, rows in data.items()}
    federation.run(600)
    return federation


def sent(federation: Federation) -> dict[tuple[int, int], dict[str, bytes]]:
    """The parts that the relay saw, by exchange and attempt."""
    found: dict[tuple[int, int], dict[str, bytes]] = defaultdict(dict)
    for name, data in federation.network.sent:
        post = Post.decode(data)
        if post.kind == StatementKind.PART:
            turn = Turn.decode(post.body)
            found[turn.exchange, turn.attempt][name] = post.payload
    return found


def final(federation: Federation) -> bool:
    return all(end.final for end in federation.ends.values())


# One attack after the other.


def test_a_narrow_component_cannot_be_named() -> None:
    """Statistics are not sent: an analyst could name them in settings, and owners count that."""
    means, variances = [[0.0, 0.0], [1.0, 1.0]], [[[1e-9, 0.0], [0.0, 1e-9]]] * 2
    start = {"weights": [0.5, 0.5], "means": means, "covariances": variances}
    narrow = {"model": {"kind": "gaussian-mixture", "n_components": 2}, "fit": {"start": start}}
    assert choices_in(narrow) == 14
    known = {"model": {"kind": "gaussian-mixture", "known_covariance": variances[0]}, "fit": {}}
    assert choices_in(known) == 4
    assert SiteRules().largest_choices == 0


def test_a_false_number_of_rows_ends_the_fit() -> None:
    """The number of all rows is the last number of the first sum, under its tag as all are."""

    def lie(name: str, out: Any) -> Any:
        return [with_sums(out, lambda added: forged(added) if added.exchange == 0 else added)]

    federation = lied_to(lie)
    federation.run(600)
    assert not any(end.final for end in federation.ends.values())
    for made in federation.made.values():
        assert {exchange for exchange, _ in made} == {0}


def test_steps_and_rounds_are_nobodys_choice() -> None:
    """Bits and steps follow from the fit, and its exchanges are counted by the members.

    A relay that adds parts under another number, or says that another sum is due, gets none.
    """

    def other_number(name: str, out: Any) -> Any:
        return [with_sums(out, lambda added: replace(added, exchange=added.exchange + 1))]

    federation = lied_to(other_number)
    federation.run(120)
    assert federation.ends == {} or not final(federation)
    assert {exchange for made in federation.made.values() for exchange, _ in made} == {0}


def test_lengths_follow_from_the_sums_alone() -> None:
    """Release 0.1 told each site's distance to S by the length of its message."""
    data = tables(1)
    data["bert"] = 50 + 30 * data["bert"]  # far away from the others
    for parts in sent(fitted(data)).values():
        assert len({len(part) for part in parts.values()}) == 1


def test_no_refusal_depends_on_rows() -> None:
    with pytest.raises(SettingsError, match="smallest_component, which all sites judge alike"):
        SiteRules.read({"smallest_group": 5})


def test_an_analyst_and_a_relay_together_make_no_sum() -> None:
    """The analyst's keys open sums and check none: what it makes fails at the sites."""
    federation = Federation(program=Toy(exchanges=4))

    def lie(added: Added) -> Added:
        own = federation.network.follower(READER).fit.keys  # type: ignore[attr-defined]
        if own is None or added.exchange < 2:
            return added
        assert own.group.tag == b""
        chosen = hashlib.sha256(own.group.pad).digest()  # whatever follows from what it has
        return replace(added, part=added.part[:-8] + chosen[:8])

    def fate(sender: str, receiver: str, data: bytes) -> list[tuple[float, bytes]]:
        if sender or receiver == READER:
            return [(0.01, data)]
        return [(0.01, with_sums(HandOut.decode(data), lie).encode())]

    federation.network.fate = fate
    federation.run(300)
    assert not any(end.final for end in federation.ends.values())
    assert {exchange for exchange, _ in federation.made["anna"]} == {0, 1, 2}


# The class.


@pytest.mark.parametrize("kept", [False, True])
def test_rows_that_change_sites_change_nothing_but_who_has_them(kept: bool) -> None:
    """Metamorphic: the same table parted otherwise is the same fit, exchange for exchange.

    What is asked, how long each message is, when it is sent and what comes out are the same;
    ``kept`` has sites of equal size, else one site has nearly all rows.
    """
    data = tables(2, rows=30)
    rows = np.concatenate(list(data.values()))
    order = np.random.default_rng(3).permutation(len(rows))
    cuts = [30, 60] if kept else [3, 6]
    parted = dict(zip(NAMES, np.split(rows[order], cuts), strict=False))
    one, other = fitted(data), fitted(parted)
    seen, again = sent(one), sent(other)
    assert final(one)
    assert final(other)
    for key in sorted(set(seen) & set(again))[:6]:  # roundings then part the ways of two fits
        assert {len(p) for p in seen[key].values()} == {len(p) for p in again[key].values()}
    ends = [f.ends["anna"].result.conclusion.final.estimate.point.objective for f in (one, other)]
    assert ends[0] == pytest.approx(ends[1], abs=1e-3)


def uniform(federation: Federation) -> float:
    """The p-value of all bytes of numbers that the relay saw, if they are uniform."""
    payloads = [part for parts in sent(federation).values() for part in parts.values()]
    transcript = federation.network.processes[RELAY].machine.transcript
    entries = [Entry.decode(entry) for entry in transcript.entries]
    payloads += [Added.decode(entry.added).part for entry in entries if entry.added]
    parts = [Part.decode(payload) for payload in payloads]
    numbers = b"".join(part.numbers[:-1] for part in parts)  # the last byte may be filled up
    counts = np.bincount(np.frombuffer(numbers, np.uint8), minlength=256)
    assert counts.sum() > 1000
    return float(stats.chisquare(counts).pvalue)


def test_what_a_relay_sees_is_noise_whatever_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blind: parts and sums of nearly constant rows, and of rows far apart, are uniform bytes."""
    given = tables(4)
    flat = {name: j + 1e-3 * rows for j, (name, rows) in enumerate(given.items())}
    wide = {name: 1e6 * rows for name, rows in given.items()}
    for data in (flat, wide):
        assert uniform(fitted(data)) > 1e-4
    monkeypatch.setattr(keys, "_chacha", lambda key, size: bytes(size))  # masks of zeros
    assert uniform(fitted(flat)) < 1e-9
