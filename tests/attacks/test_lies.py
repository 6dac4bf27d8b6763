"""A server that tells sites different things, plays messages again, or has helpers among them."""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars
import pytest

import emfed
from emfed.algorithms.steps import from_lattice, wrap_check
from emfed.core.messages import Lattice
from emfed.core.protocols import WHOLE, Phase, Request, View
from emfed.core.registry import plain
from emfed.core.storage import ScratchDisk
from emfed.core.streams import Purpose, uniforms
from emfed.core.wire import NEWS, Kind, decode_refusal, encode_question
from emfed.fitting.session import Session
from emfed.models.side_by_side import SideBySideParameters
from emfed.network import LocalTransport, RemoteFederation, Site, SiteRules
from emfed.network.keys import sign
from emfed.network.masking import SiteIdentity, _fixed, encode_members, encode_roster
from emfed.network.store import Links
from emfed.network.sums import add_up, answer_shape, upload_shape
from tests.network.masked import masked_sites

RNG = np.random.default_rng(2)
TABLES = {name: RNG.normal(size=(40, 2)) + i for i, name in enumerate("abcd")}
FINE = Lattice.fine(1.0)


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
        asked = {keys[n]: m for n, m in messages.items()}
        federation._last_set = {}  # it names sets of its own; who is asked twice says its number
        for _ in range(2):
            federation._take_ready("round", asked, fresh, set())
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


LIES = ["round", "generation", "step", "rate", "statistics", "last digits", "kind"]


@pytest.mark.parametrize("lie", LIES)
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
        "last digits": {"statistics": liar.statistics * (1 + 1e-9)},
        "kind": {"kind": "local"},
    }[lie]
    requests = {n: liar.request(**(other if n == 0 else {})) for n in range(4)}
    fresh, messages = liar.ready(requests)
    told, shape = liar.told(fresh, messages, list(fresh)), upload_shape(FINE, len(liar.statistics))
    assert len(told) == 4
    for size in (1, 2, 3, 4):
        for some in itertools.combinations(range(4), size):
            assert add_up([told[n] for n in some], shape) is None


def total(liar: Liar, requests: dict[int, Request]) -> Any:
    """What the server adds up of one round, None if masks do not cancel."""
    fresh, messages = liar.ready(requests)
    told = liar.told(fresh, messages, list(fresh))
    found = add_up([told[n] for n in range(4)], upload_shape(FINE, len(liar.statistics)))
    if found is None:
        return None
    return from_lattice(liar.model, 0, requests[0], np.arange(4), found[0])


def same(request: Request) -> dict[int, Request]:
    return dict.fromkeys(range(4), request)


def test_a_server_that_accepts_one_sites_answer_and_no_others_learns_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The site would take its last answer off the next, and two sums differ by just that."""
    one = np.array([1, -1, -1, -1])
    liar = Liar(tmp_path / "masks that depend on it")
    assert total(liar, same(liar.request())) is not None
    assert total(liar, same(liar.request(round=2, accepted=one))) is None

    def forgets(self: Links, committed: Any, request: bytes) -> Links:
        return Links(about=hashlib.sha256(request).hexdigest())

    monkeypatch.setattr(Links, "after", forgets)
    liar = Liar(tmp_path / "masks that do not")
    first = total(liar, same(liar.request()))
    apart = first - total(liar, same(liar.request(round=2, accepted=one)))
    own = liar.model.expected_statistics(TABLES["a"][None], liar.request().params)[0]
    np.testing.assert_allclose(apart, liar.session.weights[0] * (own - liar.statistics), atol=1e-5)


def test_a_narrow_lattice_leaves_no_site_alone_in_the_sum(tmp_path: Path) -> None:
    """Were numbers clipped at a bound of the server's, those of all sites but one would be known.

    S lies so near to one site's own statistics that all others are far outside of a narrow window;
    on few bits they wrap around instead, and the sum tells what any sum modulo 2^bits tells.
    """
    liar = Liar(tmp_path)
    params = liar.model.maximize(liar.statistics)
    own = {n: liar.model.expected_statistics(t[None], params)[0] for n, t in TABLES.items()}
    weights, q = liar.session.weights, len(liar.statistics)
    narrow = Lattice(2.0**-20, 8, 1.0)
    requests = same(liar.request(lattice=narrow))
    fresh, messages = liar.ready(requests)
    told = liar.told(fresh, messages, list(fresh))
    symbols, _, check = add_up([told[n] for n in range(4)], upload_shape(narrow, q)) or ()
    # The server knows that there was no room.
    assert wrap_check(symbols.tolist(), narrow) != int(check[0]) % 2**64
    u = uniforms(0, 1, Purpose.COMPRESSION, np.arange(4), q)
    metric = liar.model.metric(params)
    exact = sum(
        np.floor(metric.whiten(own[name] - liar.statistics) * (weights[n] / narrow.step) + u[n])
        for n, name in enumerate(TABLES)
    )
    # Within a unit: the site works at S to 34 digits.
    apart = (symbols - exact + 128) % 256 - 128
    assert np.abs(apart).max() <= 4


def test_what_one_site_was_told_in_an_earlier_round_is_not_forgotten(tmp_path: Path) -> None:
    """Its memory follows from it: a sum that cancels would tell the difference."""
    liar = Liar(tmp_path)
    other = liar.model.statistics_of(liar.model.start(1))
    lied = liar.request(statistics=other)
    assert total(liar, {**same(liar.request()), 0: lied}) is None
    everyone = np.ones(4, dtype=np.int64)
    for number in (2, 3):
        told = liar.request(round=number, accepted=everyone * (number - 1))
        assert total(liar, same(told)) is None
    assert total(liar, same(liar.request(round=4, generation=1))) is not None  # at zero for all


def test_rounds_that_follow_each_other_have_their_sums(tmp_path: Path) -> None:
    liar, everyone = Liar(tmp_path), np.ones(4, dtype=np.int64)
    for number in (1, 2, 3):
        accepted = everyone * (number - 1 or -1)
        assert total(liar, same(liar.request(round=number, accepted=accepted))) is not None


def test_an_answer_on_another_lattice_is_not_told_on_this_one(tmp_path: Path) -> None:
    """A site that was asked for the round before answers as it did then, and its masks say so."""
    liar = Liar(tmp_path)
    liar.ready({0: liar.request(lattice=replace(FINE, step=FINE.step / 2))})
    assert total(liar, same(liar.request())) is None


def test_a_question_of_a_masked_run_brings_its_parameters(tmp_path: Path) -> None:
    """Those of the last round may be others at one site."""
    liar = Liar(tmp_path)
    total(liar, same(liar.request()))
    body = encode_question("values", WHOLE.describe(), b"")
    with pytest.raises(emfed.ParticipationError):
        liar.federation._ask_all("question", body, (Kind.CONSTANTS,), answer_shape(2))


def test_models_that_leave_single_sites_out_are_not_fitted_to_masked_sums(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sum over all less that over all others is a site's own."""
    view = View((0,) * 4, folds=True)
    for allowed in (False, True):
        if allowed:
            monkeypatch.setattr(Site, "_check_folds", lambda self: None)
        liar = Liar(tmp_path / str(allowed))
        alike, whole = liar.statistics, total(liar, same(liar.request()))
        liar.model = liar.session.view(view)
        liar.session.begin(Phase(view, emfed.EM().resolve(liar.model.layout), 0, 2))
        liar.statistics = np.tile(alike, 4)
        if not allowed:
            assert liar.ready(same(liar.request()))[0] == {}
            assert "leave nobody out" in liar.federation.refusals["a"]
            continue
        without = total(liar, same(liar.request()))[: len(alike)]
        one = liar.session.view(WHOLE)
        own = one.expected_statistics(TABLES["a"][None], one.maximize(alike))[0]
        np.testing.assert_allclose(
            whole - without, liar.session.weights[0] * (own - alike), atol=1e-5
        )


NAMED = {name: polars.DataFrame(table, schema=["x", "y"]) for name, table in TABLES.items()}
JOINS: dict[str, Any] = {
    "nothing": {},
    "columns": {"columns": ["y", "x"]},
    "model": {"model": plain(emfed.gaussian_mixture(2, "diag", covariance_floor=0.5).describe())},
    "weights": {"weights": "uniform"},
}


@pytest.mark.parametrize("lie", JOINS)
def test_a_site_that_joined_something_else_has_masks_that_do_not_cancel(
    lie: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its columns in another order, sums of two runs would differ by its own means."""
    sites = masked_sites(NAMED, tmp_path, rules=SiteRules())
    federation = RemoteFederation(LocalTransport(sites), attempts=1, pause=0.0)
    hello, asked = federation._roll.hello, {"columns": ["x", "y"]}

    def lies(run: int, keys: Any, content: Any, once: bool = False) -> Any:
        joins, told = hello(run, [key for key in keys if key != "a"], content | asked, once)
        own, said = hello(run, ["a"], content | asked | JOINS[lie], once)
        about = joins["b"].about  # whatever it said of itself
        return joins | {"a": replace(own["a"], about=about)}, told | said

    monkeypatch.setattr(federation._roll, "hello", lies)
    if lie == "nothing":
        Session(emfed.gaussian_mixture(2, "diag"), federation, masks=True)
        return
    with pytest.raises(emfed.ParticipationError, match="did not cancel|masked answer has"):
        Session(emfed.gaussian_mixture(2, "diag"), federation, masks=True)


def test_old_sets_and_answers_are_not_told_again(tmp_path: Path) -> None:
    """A set that was named for another answer, and answers that the server kept from before."""
    liar, q = Liar(tmp_path), 0
    fresh, messages = liar.ready({n: liar.request() for n in range(4)})
    first = liar.told(fresh, messages, list(fresh))
    later, again = liar.ready({n: liar.request(round=2) for n in range(4)})
    stale = liar.told(fresh, again, list(fresh))
    assert not any(stale.values())  # that answer is gone: nothing is told
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
    assert all("no identity in this site's roster has signed" in str(w) for w in told.values())


@pytest.mark.parametrize("helped", [False, True])
def test_one_site_under_two_numbers_is_no_set_of_three(helped: bool, tmp_path: Path) -> None:
    """The masks of b with a, once taken off and once added, would leave b's part bare.

    Without help the server gives a's own announcement two numbers. With the help of c it gives a's
    key a second name: c signs it as if it were its own.
    """
    liar = Liar(tmp_path)
    roster, run = liar.federation.members.roster, liar.federation.members.run
    twice = roster[0]
    if helped:
        transport: Any = liar.federation._line.transport
        helper = transport.sites["c"]._sums.identity
        lent = replace(roster[2], public=roster[0].public, signature=b"")
        twice = replace(lent, signature=_fixed(sign(helper.key, lent.statement(run))))
    liar.federation.members.roster = {**roster, 2: twice}
    for known in liar.federation._knows.values():
        known.discard(Kind.ROSTER)
    fresh, messages = liar.ready({n: liar.request() for n in range(4)})
    bare = liar.told({n: fresh[n] for n in (0, 1, 2)}, messages, [1])[1]
    assert "twice: " in bare


def test_which_held_out_model_a_site_looks_at_is_not_the_servers_to_choose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With as many models as sites, each has its own: one may tell, and the others say nothing.

    Rows have hardly any say under a component that is wide enough, so that the sum is one site's.
    """
    for allowed in (False, True):
        if allowed:
            monkeypatch.setattr(Site, "_check_folds", lambda self: None)
        liar = Liar(tmp_path / str(allowed))
        model = liar.model
        params, wide = model.start(0), 1e18
        silent = replace(params, means=0 * params.means, covariances=params.covariances * wide)
        parts = (params, silent, silent, silent, params)
        asked = SideBySideParameters(parts)
        if not allowed:
            with pytest.raises(emfed.ParticipationError, match="leave nobody out"):
                liar.session.scores(View((0,) * 5), asked, "validation")
            continue
        told = float(liar.session.scores(View((0,) * 5), asked, "validation")[0, 0])
        mute = float(model.log_likelihood(TABLES["b"], silent))
        own = float(model.log_likelihood(TABLES["a"], params))
        assert 4 * told - 3 * mute == pytest.approx(own, abs=1e-4)


def test_how_large_a_model_may_be_tells_no_number_of_rows(tmp_path: Path) -> None:
    """A limit that follows from the rows is found by asking for ever larger models."""
    refused = set()
    for rows in (200_000, 400_000):
        table = {n: np.zeros((rows if n == "a" else 40, 2)) for n in "abc"}
        sites = masked_sites(table, tmp_path / str(rows), rules=SiteRules())
        federation = RemoteFederation(LocalTransport({"a": sites["a"]}), attempts=1, pause=0.0)
        with pytest.raises(emfed.ParticipationError):
            Session(emfed.gaussian_mixture(1 << 24, "diag"), federation, masks=True)
        refused.add(federation.refusals["a"])
    assert len(refused) == 1


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


def test_no_row_makes_a_masked_site_refuse(tmp_path: Path) -> None:
    """At a slope of 1e151 squares are infinite for rows beyond some value, and nothing is told.

    A site that refused there told the server on which side of any bound its largest value is.
    """
    rng = np.random.default_rng(0)
    tables = {name: np.clip(rng.normal(size=(40, 2)), -0.5, 0.5) for name in "abc"}
    tables["c"][0, 0] = 3.0
    sites = masked_sites(tables, tmp_path, rules=SiteRules(), disk=ScratchDisk())
    federation = RemoteFederation(LocalTransport(sites), attempts=1, pause=0.0)
    session = Session(emfed.regression_mixture(2), federation, masks=True)
    model = session.view(WHOLE)
    session.begin(Phase(WHOLE, emfed.EM().resolve(model.layout), 0))

    def finite(name: str, params: Any) -> bool:
        return bool(np.isfinite(model.expected_statistics(tables[name], params)).all())

    with np.errstate(all="ignore"):
        for power in np.arange(148, 154, 0.1):
            slopes = np.full_like(model.start(0).coefficients, 10.0**power)
            here = model.statistics_of(replace(model.start(0), coefficients=slopes))
            params = model.maximize(here)
            if model.inside(here) and finite("a", params) and not finite("c", params):
                break
        else:
            raise AssertionError("the attack needs such statistics.")
        asked = (1, 0, "round", here, params, np.arange(3), np.full(3, -1))
        request = Request(*asked, lattice=FINE, weights=session.weights, encode=True)
        heard = federation.exchange(request)
    assert not len(federation.missed)
    assert not federation.refusals
    assert heard.overflow  # the sum is lost, whoever's numbers were not finite
