"""What a site's owner sees and controls."""

from __future__ import annotations

import contextlib
import json
import tracemalloc
from contextlib import nullcontext
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import emfed
from emfed.core.protocols import WHOLE
from emfed.core.storage import load_checkpoint
from emfed.core.wire import Header, Kind, Reason, decode_refusal, encode_text, open_refusal, seal
from emfed.fitting.driver import Watch, run_fit
from emfed.fitting.session import Session
from emfed.fitting.settings import FitSettings
from emfed.models.side_by_side import SideBySide
from emfed.network import LocalTransport, RemoteFederation, Site, SiteRules
from emfed.network.rules import GuardedRows, Refusal
from emfed.network.spending import BLOCK
from tests.helpers import OPEN, make_data, make_model
from tests.network.test_trajectories import Scales

TABLES = make_data(6, sizes=(24, 18, 30, 22), spread=8.0)
KEYS = list("abcd")


def run(where: Path, rules: SiteRules, model: Any = None, **options: Any) -> RemoteFederation:
    """A run in which the first site has these rules."""
    sites = {
        key: Site(table, where / key, rules=rules if key == "a" else OPEN)
        for key, table in zip(KEYS, TABLES, strict=True)
    }
    federation = RemoteFederation(LocalTransport(sites), attempts=1)
    chosen = {"rounds": 6, "seed": 4, "start": "moments", "tol": 0} | options
    algorithm = chosen.pop("algorithm", emfed.EM())
    result = emfed.fit(
        make_model("diag") if model is None else model,
        None,
        algorithm,
        federation=federation,
        **chosen,
    )
    federation.answers = [r.answered for r in result.records[1:]]
    return federation


def test_too_few_rows(tmp_path: Path) -> None:
    federation = run(tmp_path, SiteRules.loosest(smallest_rows=25))
    assert "more rows than there are" in federation.refusals["a"]
    assert "24" not in federation.refusals["a"]
    assert not run(tmp_path / "2", SiteRules.loosest(smallest_rows=24)).refusals


def test_allowed_models(tmp_path: Path) -> None:
    federation = run(tmp_path, SiteRules.loosest(models=("factor-analysis", "ppca")))
    assert "allows the models factor-analysis, ppca" in federation.refusals["a"]
    assert not run(tmp_path / "2", SiteRules.loosest(models=["gaussian-mixture"])).refusals


def test_no_more_rounds_than_allowed_but_repeats(tmp_path: Path) -> None:
    federation = run(tmp_path, SiteRules.loosest(largest_rounds=5))  # and the join
    assert federation.answers == [4, 4, 4, 4, 3, 3]
    assert "5 messages" in federation.refusals["a"]


def ask(site: Site, model: Any, questions: int) -> tuple[int, int]:
    """How many likelihoods and how many statistics a server gets that asks for nothing else."""
    counts = []
    for kind in ("values", "statistics"):
        counts.append(0)
        try:
            session = Session(model, RemoteFederation(LocalTransport({"a": site}), attempts=1))
        except emfed.ParticipationError:  # joins count, too
            continue
        params = session.view(WHOLE).start(0)
        for _ in range(questions):
            with contextlib.suppress(emfed.ParticipationError):
                assert np.isfinite(session.ask(kind, WHOLE, params)).all()
                counts[-1] += 1
    return counts[0], counts[1]


def test_questions_count_and_a_new_run_is_no_new_allowance(tmp_path: Path) -> None:
    model = make_model("diag", k=1)
    assert ask(Site(TABLES[0], tmp_path / "free", rules=OPEN), model, 5) == (5, 5)
    rules = SiteRules.loosest(largest_rounds=9)  # two of them joins
    assert ask(Site(TABLES[0], tmp_path / "7", rules=rules), model, 5) == (5, 2)
    again = Site(TABLES[0], tmp_path / "7", rules=rules)  # another process
    assert ask(again, model, 5) == (0, 0)
    (tmp_path / "7" / "answered").write_bytes(b"damaged")
    assert ask(again, model, 5) == (0, 0)
    (tmp_path / "7" / "answered").unlink()  # the owner's affair
    assert ask(again, model, 5) == (5, 2)


def test_rounds_of_all_runs_count_together(tmp_path: Path) -> None:
    rules = SiteRules.loosest(largest_rounds=10)  # two of them joins
    first = run(tmp_path, rules)
    second = run(tmp_path, rules)
    assert first.answers == [4] * 6
    assert second.answers == [4, 4, 3, 3, 3, 3]


def test_no_likelihood_of_a_small_group(tmp_path: Path) -> None:
    rows = np.concatenate([np.zeros((20, 2)), np.full((2, 2), 30.0)])
    rows += np.random.default_rng(0).normal(size=rows.shape)
    for smallest, heard in ((3, 0), (2, 2)):
        rules = SiteRules.loosest(smallest_group=smallest)
        site = Site(rows, tmp_path / str(smallest), rules=rules)
        federation = RemoteFederation(LocalTransport({"a": site}), attempts=1)
        start = emfed.models.GaussianParameters([0.5, 0.5], [[0, 0], [30, 30]], np.ones((2, 2)))
        session = Session(make_model("diag", k=2), federation)
        params, told = session.view(WHOLE).from_user(start), 0
        for _ in range(2):
            with contextlib.suppress(emfed.ParticipationError):
                told += bool(np.isfinite(session.ask("values", WHOLE, params)).all())
        assert told == heard
        assert not federation.refusals  # for now, not for good


def test_small_groups_are_not_told_of(tmp_path: Path) -> None:
    """A component that holds less than k of the rows keeps the site silent in that round."""
    rng = np.random.default_rng(0)
    near, far = rng.normal(size=(40, 2)), rng.normal(size=(2, 2)) + 30
    rows = {"a": np.concatenate([near[:20], far]), "b": near[20:], "c": far + 1}
    start = emfed.models.GaussianParameters([0.5, 0.5], [[0, 0], [30, 30]], np.ones((2, 2)))
    for smallest, heard in ((3, [2, 2, 2]), (2, [3, 3, 3])):
        folder = tmp_path / str(smallest)
        rules = SiteRules.loosest(smallest_group=smallest)
        sites = {k: Site(t, folder / k, rules=rules if k == "a" else OPEN) for k, t in rows.items()}
        federation = RemoteFederation(LocalTransport(sites), attempts=1)
        result = emfed.fit(
            make_model("diag", k=2),
            None,
            emfed.EM(),
            federation=federation,
            start=start,
            start_statistics="parameters",
            rounds=3,
        )
        assert [r.answered for r in result.records[1:]] == heard
        assert not federation.refusals  # for now, not for good


def test_small_groups_of_a_batch_and_of_the_start(tmp_path: Path) -> None:
    rules = SiteRules.loosest(smallest_group=6)
    algorithm = emfed.FedEM(batch_size=5, step_size=0.1)
    federation = run(tmp_path, rules, algorithm=algorithm, model=make_model("diag", k=1))
    assert federation.answers == [3] * 6
    start = emfed.fit(make_model("diag"), TABLES, rounds=5, seed=4).params
    with pytest.raises(emfed.ParticipationError, match="answered by 3 of 4 workers"):
        run(tmp_path / "2", SiteRules.loosest(smallest_group=20), start=start, patience=None)


def test_columns_hardly_seen_are_not_described(tmp_path: Path) -> None:
    rows = TABLES[0].copy()
    rows[4:, 1] = np.nan
    site = Site(rows, tmp_path / "a", rules=SiteRules.loosest(smallest_group=5))
    sites = {"a": site, "b": Site(TABLES[1], tmp_path / "b", rules=OPEN)}
    federation = RemoteFederation(LocalTransport(sites))
    emfed.fit(make_model("diag", missing=True), None, federation=federation, rounds=1)
    assert "no group as small" in federation.refusals["a"]


def hello(rows: Any, model: Any, smallest: int, where: Path) -> dict[str, str]:
    """The refusals of an opening with one careful site and one that is not."""
    careful = Site(rows, where / "a", rules=SiteRules.loosest(smallest_group=smallest))
    transport = LocalTransport({"a": careful, "b": Site(rows, where / "b", rules=OPEN)})
    federation = RemoteFederation(transport, attempts=1)
    federation.open(model)
    return federation.refusals


@pytest.mark.parametrize("rare", ["category", "one", "zero"])
def test_rare_codes_are_not_described(rare: str, tmp_path: Path) -> None:
    """Three rows hold them: a rule of three lets them pass, one of four does not."""
    rng = np.random.default_rng(0)
    few = np.arange(60) < 3
    codes = np.where(few, 2, np.arange(60) % 2) if rare == "category" else np.arange(60) % 3
    ones = np.arange(60) % 2 if rare == "category" else few if rare == "one" else ~few
    wait = rng.gamma(2.0, size=60)  # its summary lies beside that of the codes
    rows = np.column_stack([wait, rng.normal(size=60), codes, ones]).astype(float)
    families = ["gamma", "gaussian", emfed.models.Categorical(3), "bernoulli"]
    model = emfed.mixed_mixture(1, families)
    assert not hello(rows, model, 3, tmp_path / "3")
    assert "no group as small" in hello(rows, model, 4, tmp_path / "4")["a"]


def group_sizes(model: Any, rows: Any, seed: int) -> tuple[Any, Any]:
    """The bound model's statistics where EM ends, and the sizes of the groups they tell of."""
    summary = {name: values[None] for name, values in model.summary(rows).items()}
    bound = model.bind(summary, np.array([len(rows)]), np.ones(1))
    params = emfed.fit(model, [rows], emfed.EM(), rounds=30, seed=seed).params
    statistics = bound.expected_statistics(rows, bound.from_user(params))
    sizes = np.sort(bound.group_shares(statistics)) * len(rows)
    for smallest in range(1, 8):
        small = bool(np.any((sizes > 1e-9) & (sizes < smallest - 1e-6)))
        with pytest.raises(Refusal, match="small") if small else nullcontext():
            GuardedRows.check(bound, statistics[None], np.array([len(rows)]), smallest)
    return bound, sizes


@pytest.mark.parametrize("family", ["bernoulli", emfed.models.Categorical(2)])
def test_rare_codes_of_a_component_are_not_told_of(family: Any) -> None:
    """Two components far apart: a code that is common in all, and rare in one of them."""
    near = np.arange(80) < 40
    place = np.where(near, 0.0, 1000.0) + np.random.default_rng(0).normal(size=80)
    codes = np.where(near, np.arange(80) < 5, np.arange(80) < 60).astype(float)
    rows = np.column_stack([place, codes])
    bound, sizes = group_sizes(emfed.mixed_mixture(2, ["gaussian", family], missing=False), rows, 1)
    np.testing.assert_allclose(sizes, [5, 20, 20, 35, 40, 40], atol=1e-6)
    twice = SideBySide((bound, bound))
    statistics = bound.expected_statistics(rows, bound.start(0))
    one = bound.group_shares(statistics)
    both = twice.group_shares(twice.join([statistics, statistics]))
    np.testing.assert_array_equal(both, np.concatenate([one, one]))


def test_states_and_transitions_are_counted() -> None:
    states = np.zeros((12, 10))
    states[:4] = 1  # four sequences begin in the other state
    states[:3, 5:] = 0  # of which three leave it
    rows = (states * 1000 + np.random.default_rng(0).normal(size=states.shape))[..., None]
    _, sizes = group_sizes(emfed.hidden_markov(2, "gaussian"), rows, 1)
    steps = [2.5, 9.5]  # of ten each; as often as states and as values seen
    changes = [0, 3, 12 + 9, 72 + 12]
    np.testing.assert_allclose(sizes, np.sort([*steps, *steps, 4, 8, *changes]), atol=1e-6)


@pytest.mark.parametrize(
    "bad",
    [
        {"smallest_rows": 0},
        {"largest_rounds": 0},
        {"smallest_group": 1.5},
        {"models": "gaussian-mixture"},
    ],
)
def test_bad_rules(bad: dict[str, Any]) -> None:
    with pytest.raises(emfed.SettingsError):
        SiteRules(**bad)


def test_the_journal_has_every_message(tmp_path: Path) -> None:
    journal = tmp_path / "sent.jsonl"
    sites = {
        key: Site(table, tmp_path / key, journal=journal if key == "a" else None, rules=OPEN)
        for key, table in zip(KEYS, TABLES, strict=True)
    }
    scales = Scales(LocalTransport({"a": sites["a"]}))
    emfed.fit(
        make_model("diag"),
        None,
        emfed.FedEM(emfed.Dithering(3)),
        federation=RemoteFederation(scales),
        rounds=4,
        tol=0,
        start="moments",
        monitor=emfed.fitting.Monitor(every=2),
        scores=True,
    )
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    kinds = [line["kind"] for line in lines]
    assert kinds[0] == "join"
    assert kinds.count("reply") == 4
    assert kinds.count("answer") == 2 * 2 + 1
    told = " ".join(line["content"] for line in lines if line["kind"] == "answer")
    assert all(word in told for word in ("exact expected", "entropy", "spread"))
    assert sum(line["bytes"] for line in lines) == scales.up
    assert [line["round"] for line in lines if line["kind"] == "reply"] == [1, 2, 3, 4]
    assert len({line["run"] for line in lines}) == 1
    for line in lines:
        assert datetime.fromisoformat(line["time"]).utcoffset() == timedelta(0)
        assert line["content"]
    sites["a"].step(b"nonsense")
    last = json.loads(journal.read_text().splitlines()[-1])
    assert (last["kind"], last["content"][:7]) == ("refusal", "damaged")


def test_every_question_of_a_fit_is_in_ledger_and_journal_and_under_the_rules(
    tmp_path: Path,
) -> None:
    """k-means, starts that compete, a range of components, a curve's questions, scores."""
    sites = {}
    for key, table in zip(KEYS, TABLES, strict=True):
        journal = tmp_path / f"{key}.jsonl"
        rules = SiteRules.loosest(largest_rounds=10_000)
        sites[key] = Site(table, tmp_path / key, journal=journal, rules=rules)
    federation = RemoteFederation(LocalTransport(sites))
    settings = FitSettings(
        make_model("diag"), n_components="1:3", n_init=2, scores=True, likelihood=True, seed=2
    )
    result = run_fit(settings, federation, Watch(curve=True)).result
    assert {"opening", "start", "round", "question", "closing"} <= set(result.ledger.summary())
    assert result.facts is not None
    assert result.facts.scores is not None
    assert np.isfinite(result.facts.scores).all()
    frame = result.ledger.to_frame()
    for key in KEYS:
        lines = list(map(json.loads, (tmp_path / f"{key}.jsonl").read_text().splitlines()))
        own = frame.filter((frame["worker"] == key) & (frame["direction"] == "up"))
        sent = own["payload"].sum() + own["envelope"].sum()
        assert sum(line["bytes"] for line in lines) == sent
        told = [line["kind"] for line in lines]
        assert set(told) == {"join", "reply", "answer"}
        # All of it counts against what the owner allows, taken in blocks.
        counted = load_checkpoint(tmp_path / key / "answered")[1]["answered"]
        assert len(told) <= counted < len(told) + BLOCK


def test_a_site_that_leaves_or_joins_between_two_fits_is_noticed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sites = {key: Site(t, tmp_path / key, rules=OPEN) for key, t in zip(KEYS, TABLES, strict=True)}
    late = sites.pop("d")
    transport = LocalTransport(sites)
    federation = RemoteFederation(transport)
    options: dict[str, Any] = {"rounds": 3, "tol": 0, "seed": 1}
    first = emfed.fit(make_model("diag"), federation, **options)
    again = emfed.fit(make_model("diag"), federation, **options)
    assert "since the last fit" not in caplog.text
    del transport.sites["a"]
    transport.sites["d"] = late
    other = emfed.fit(make_model("diag"), federation, **options)
    assert "since the last fit left: ['a']; came: ['d']" in caplog.text
    assert [list(r.ledger.names) for r in (first, again, other)] == [["a", "b", "c"]] * 2 + [
        ["b", "c", "d"]
    ]
    here = emfed.fit(make_model("diag"), dict(zip("bcd", TABLES[1:], strict=True)), **options)
    np.testing.assert_allclose(other.statistics, here.statistics, rtol=1e-9)


def test_data_of_several_workers_are_no_sites(tmp_path: Path) -> None:
    with pytest.raises(emfed.DataError, match="one worker"):
        Site(emfed.data.as_workers(TABLES), tmp_path)


def test_files_and_frames(tmp_path: Path) -> None:
    """A Parquet file, picked columns, and a stream give what arrays give."""
    import polars as pl

    tables: dict[str, Any] = dict(zip(KEYS, TABLES, strict=True))
    frame = (
        pl.DataFrame(TABLES[0], schema=["x", "y"]).with_columns(name=0.5).select("name", "y", "x")
    )
    frame.write_parquet(tmp_path / "rows.parquet")
    named = {k: pl.DataFrame(t, schema=["x", "y"]) for k, t in tables.items()}
    sites = {k: Site(t, tmp_path / k, rules=OPEN) for k, t in named.items()}
    sites["a"] = Site(tmp_path / "rows.parquet", tmp_path / "a", rules=OPEN)
    sites["b"] = Site(
        emfed.data.Stream(lambda round_: named["b"]), tmp_path / "b", columns=["x", "y"], rules=OPEN
    )
    options: dict[str, Any] = {"rounds": 5, "seed": 1}
    here = emfed.fit(make_model("diag"), named, **options)
    federation = RemoteFederation(LocalTransport(sites), columns=["x", "y"])
    there = emfed.fit(make_model("diag"), None, federation=federation, **options)
    np.testing.assert_allclose(there.statistics, here.statistics, atol=1e-9)
    with pytest.raises(emfed.DataError, match="missing"):
        Site(named["a"], tmp_path / "z", columns=["x", "w"])


ASKS: dict[str, dict[str, Any]] = {
    "times": {"model": "site-owner", "times": 400_000_000, "rank": 2},
    "components": {"model": "gaussian-mixture", "n_components": 10_000_000},
    "categories": {
        "model": "mixed-mixture",
        "n_components": 2,
        "families": ["categorical:400000000"],
    },
    "clusters": {"model": "k-means", "n_components": 1 << 40},
    "states": dict(emfed.hidden_markov(2).describe()) | {"n_components": 20_000},
    "many": {"model": "side-by-side", "models": [{"model": "x", "n_components": 9_000_000}] * 50},
}


@pytest.mark.parametrize("ask", list(ASKS))
def test_a_large_ask_is_refused_before_any_memory_is_taken(ask: str, tmp_path: Path) -> None:
    """A hello of 214 bytes made a site allocate 6.2 GB."""
    rows = np.zeros((50, 2)) + np.arange(50)[:, None]
    site = Site(rows[None] if ask == "states" else rows, tmp_path / "site", rules=OPEN)
    hello = encode_text({"model": ASKS[ask], "columns": None})
    message = seal(Header(Kind.HELLO, 1, 1, 0, 0), hello)
    tracemalloc.start()
    answer = site.step(message)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    reason, words, _ = decode_refusal(open_refusal(answer)[1])
    assert reason is Reason.REFUSED
    assert "numbers here, and the owner allows 4.2e+06" in words
    assert peak < 3_000_000


def test_what_the_data_can_support_is_not_too_large(tmp_path: Path) -> None:
    for rows, allowed in ((100, False), (300_000, True)):
        rules = SiteRules()
        needed = 10_000_000
        if allowed:
            rules.check_size(needed, 4 * rows)
        else:
            with pytest.raises(Refusal, match="smaller model"):
                rules.check_size(needed, 4 * rows)
    with pytest.raises(Refusal, match="allows 1e"):
        SiteRules(largest_model=100).check_size(101, 10**9)
