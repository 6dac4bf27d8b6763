"""A server that tells sites different things, plays messages again, or has helpers among them."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import emfed
from emfed.core.messages import Lattice
from emfed.core.protocols import WHOLE, Phase, Request
from emfed.core.wire import NEWS, Kind, decode_refusal
from emfed.fitting.session import Session
from emfed.network import LocalTransport, RemoteFederation, SiteRules
from emfed.network.masking import SiteIdentity, encode_members, encode_roster
from emfed.network.sums import add_up, upload_shape
from tests.network.masked import masked_sites

RNG = np.random.default_rng(2)
TABLES = {name: RNG.normal(size=(40, 2)) + i for i, name in enumerate("abcd")}
FINE = Lattice.fine(len(TABLES), 1.0)


class Liar:
    """A masked run in which the server sends every site what it likes."""

    def __init__(self, where: Path) -> None:
        sites = masked_sites(TABLES, where, rules=SiteRules())
        self.federation = RemoteFederation(LocalTransport(sites), attempts=1, pause=0.0)
        self.session = Session(emfed.gaussian_mixture(2, "diag"), self.federation, masks=True)
        self.model = self.session.view(WHOLE)
        self.session.begin(Phase(WHOLE, emfed.EM().resolve(self.model.layout), 0))
        self.statistics = self.model.statistics_of(self.model.start(0))

    def request(self, **lies: Any) -> Request:
        everyone = np.arange(len(TABLES))
        told = replace(
            Request(
                1,
                0,
                "round",
                self.statistics,
                self.model.maximize(self.statistics),
                everyone,
                np.full(len(TABLES), -1),
                lattice=FINE,
                weights=self.session.weights,
                encode=True,
            ),
            **lies,
        )
        return told

    def ready(self, requests: dict[int, Request]) -> tuple[dict[int, int], dict[int, Any]]:
        """Fresh numbers, and the messages that sites are ready with."""
        federation, fresh = self.federation, dict[int, int]()
        messages = {
            n: federation._with_news(federation._request(r, n), NEWS) for n, r in requests.items()
        }
        keys = federation.members.keys
        federation._take_ready("round", {keys[n]: m for n, m in messages.items()}, fresh, set())
        return fresh, messages

    def told(
        self, fresh: dict[int, int], messages: dict[int, Any], to: list[int]
    ) -> dict[int, Any]:
        """What sites answer to a set."""
        federation, keys = self.federation, self.federation.members.keys
        body = encode_members(fresh)
        sets = {keys[n]: (replace(messages[n][0], kind=Kind.SET), body) for n in to}
        return {
            federation._numbers[key]: decode_refusal(answer)[1] if kind is Kind.REFUSAL else answer
            for key, kind, answer in federation._line.deliver("round", sets)
        }


def test_sites_that_are_told_the_same_tell_their_sum(tmp_path: Path) -> None:
    liar = Liar(tmp_path)
    fresh, messages = liar.ready({n: liar.request() for n in range(4)})
    told = liar.told(fresh, messages, list(fresh))
    assert add_up([told[n] for n in range(4)], upload_shape(FINE, len(liar.statistics))) is not None


@pytest.mark.parametrize("lie", ["round", "generation", "step", "rate", "statistics"])
def test_one_site_that_is_told_otherwise_has_masks_that_do_not_cancel(
    lie: str, tmp_path: Path
) -> None:
    """So neither its part nor that of the others is left when the rest is taken off."""
    liar = Liar(tmp_path)
    other: dict[str, Any] = {
        "round": {"round": 2},
        "generation": {"generation": 1},
        "step": {"lattice": replace(FINE, step=FINE.step / 2)},
        "rate": {"lattice": replace(FINE, rate=0.5)},
        "statistics": {"statistics": liar.model.statistics_of(liar.model.start(1))},
    }[lie]
    requests = {n: liar.request(**(other if n == 0 else {})) for n in range(4)}
    fresh, messages = liar.ready(requests)
    told, shape = liar.told(fresh, messages, list(fresh)), upload_shape(FINE, len(liar.statistics))
    assert len(told) == 4
    for size in (1, 2, 3, 4):
        for some in itertools.combinations(range(4), size):
            assert add_up([told[n] for n in some], shape) is None


def test_old_sets_and_answers_are_not_told_again(tmp_path: Path) -> None:
    """A set that was named for another answer, and answers that the server kept from before."""
    liar, q = Liar(tmp_path), 0
    fresh, messages = liar.ready({n: liar.request() for n in range(4)})
    first = liar.told(fresh, messages, list(fresh))
    later, again = liar.ready({n: liar.request(round=2) for n in range(4)})
    stale = liar.told(fresh, again, list(fresh))
    assert all("another answer" in str(words) for words in stale.values())
    second = liar.told(later, again, list(later))
    q = len(liar.statistics)
    for n in range(4):  # an old answer in the place of a new one
        mixed = [first[m] if m == n else second[m] for m in range(4)]
        assert add_up(mixed, upload_shape(FINE, q)) is None


def test_keys_that_the_server_puts_in_the_place_of_a_sites_are_noticed(tmp_path: Path) -> None:
    liar = Liar(tmp_path)
    roster, strange = liar.federation.members.roster, SiteIdentity.everybody(["b", "x"])
    from emfed.network.masking import RunKeys

    run = liar.federation.members.run
    own = RunKeys(strange["b"], bytes(32), run, roster[1].instance).announcement
    liar.federation.members.roster = {**roster, 1: own}
    assert encode_roster(liar.federation.members.roster) != encode_roster(roster)
    for known in liar.federation._knows.values():
        known.discard(Kind.ROSTER)
    fresh, messages = liar.ready({n: liar.request() for n in range(4)})
    told = liar.told(fresh, messages, [0, 2, 3])
    assert all("no identity in this site's roster has signed: b" in str(w) for w in told.values())


def test_two_sites_that_collude_are_left_with_the_sum_of_the_others(tmp_path: Path) -> None:
    """They know their own parts; of the other two they learn the sum and neither part."""
    sites = masked_sites(TABLES, tmp_path, rules=SiteRules())
    federation = RemoteFederation(LocalTransport(sites), attempts=1, pause=0.0)
    session = Session(emfed.gaussian_mixture(1, "full"), federation, masks=True)
    sums = session.samples * session.summary["mean"]
    left = sums - sum(TABLES[name].sum(axis=0) for name in "ab")
    np.testing.assert_allclose(left, TABLES["c"].sum(axis=0) + TABLES["d"].sum(axis=0), atol=1e-9)
    for name in "cd":
        assert np.abs(left - TABLES[name].sum(axis=0)).max() > 1
