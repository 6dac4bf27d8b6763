"""Workers that are alike go on by themselves before they answer; others, and late, they do not."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import emfed
from emfed.algorithms import auto
from emfed.network import LocalTransport, RemoteFederation, Site
from tests.helpers import BARE

MODEL = emfed.gaussian_mixture(3, "full")


def tables(alike: bool, workers: int = 6, rows: int = 300) -> list[np.ndarray]:
    """Three clusters that overlap; in every worker, or sorted."""
    rng = np.random.default_rng(4)
    labels = rng.integers(3, size=workers * rows)
    centres = np.array([[-1.5, 0.0], [1.5, 0.0], [0.0, 2.0]])
    points = centres[labels] + rng.normal(size=(workers * rows, 2))
    return np.array_split(points if alike else points[np.argsort(labels)], workers)


def fitted(data: Any, local_steps: int = 8, **settings: Any) -> emfed.Result:
    algorithm = emfed.AutoEM(local_steps=local_steps)
    return emfed.fit(MODEL, data, algorithm, start="k-means", seed=1, moves=0, **settings)


def passes(result: emfed.Result) -> np.ndarray:
    """Passes over all rows in each round."""
    rounds = [record for record in result.records if record.round > 0]
    return np.array([record.evaluations for record in rounds]) / result.samples


def test_alike_workers_need_far_fewer_rounds_and_bytes() -> None:
    data = tables(alike=True)
    best = emfed.fit(MODEL, [np.concatenate(data)], start=fitted(data).params, tol=1e-9)
    target = 5e-4 - best.log_likelihood(np.concatenate(data))
    reached = []
    for steps in (8, 1):
        result = fitted(
            data, steps, tol=0, rounds=40, monitor=emfed.fitting.Monitor(mean_field=False)
        )
        records = result.records[1:]
        last = int(np.flatnonzero(records.column("objective") > target)[-1])
        sent = records.column("payload_up") + records.column("payload_down")
        reached.append((last, sent[:last].sum()))
        assert (passes(result).max() > 2) == (steps > 1)
    assert reached[0][0] < 0.6 * reached[1][0]
    assert reached[0][1] < 0.8 * reached[1][1]


def test_alike_workers_end_where_em_ends_and_look_at_plain_steps_before_they_say_so() -> None:
    data = tables(alike=True)
    result, rows = fitted(data), np.concatenate(data)
    assert result.converged
    best = emfed.fit(MODEL, [rows], start=result.params, tol=1e-9).log_likelihood(rows)
    assert result.log_likelihood(rows) == pytest.approx(best, abs=1e-5)
    np.testing.assert_array_equal(passes(result)[-6:], 1)


def test_workers_that_differ_make_the_very_rounds_they_made_before() -> None:
    data = tables(alike=False)
    walking, plain = fitted(data), fitted(data, local_steps=1)
    np.testing.assert_array_equal(passes(walking), 1)
    np.testing.assert_array_equal(walking.statistics, plain.statistics)


def test_who_is_unlike_the_others_takes_fewer_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "LARGEST_DRIFT", 10.0)
    odd = tables(alike=True, workers=12)
    odd[0] = odd[0][odd[0][:, 1] > 1.5]
    run = emfed.fitting.open_run(MODEL, odd, "auto", start="k-means", seed=1)
    for _ in range(2):
        run.step()
    _, rows = run.federation.worker_states()
    assert rows["walked"][0] < rows["walked"][1:].min()


@pytest.mark.parametrize(("workers", "more"), [(90, True), (3, False)])
def test_many_workers_take_more_steps_while_s_moves_far(
    workers: int, more: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    walked = []
    for far in (0.0, np.inf):
        monkeypatch.setattr(auto, "FAR_MOVE", far)
        data = tables(alike=True, workers=workers)
        run = emfed.fitting.open_run(MODEL, data, "auto", start="k-means", seed=1)
        for _ in range(2):
            run.step()
        walked.append(run.federation.worker_states()[1]["walked"])
    assert (walked[0] > walked[1]).mean() > 0.9 if more else (walked[0] <= walked[1] + 1).all()


def test_local_rounds_have_less_noise_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = []
    for noise, step in ((1e-3, 0.02), (1.0, auto.COARSEST_STEP)):
        monkeypatch.setattr(auto, "LOCAL_NOISE_NATS", noise)
        monkeypatch.setattr(auto, "COARSEST_LOCAL_STEP", step)
        data = tables(alike=True, workers=90)
        records = emfed.fit(MODEL, data, start="moments", seed=1, tol=0, rounds=3).records
        sent.append([records.column(f"payload_{way}")[1:] for way in ("up", "down")])
    (up, down), (coarse_up, coarse_down) = sent
    assert up[0] == coarse_up[0], "the first round is a plain one"
    assert up[1] > coarse_up[1]
    assert down[2] > coarse_down[2]


@pytest.mark.parametrize("local", ["loop", "stacked"])
def test_a_network_of_sites_takes_the_same_local_steps(tmp_path: Path, local: Any) -> None:
    data = {f"site {i}": t for i, t in enumerate(tables(alike=True, workers=3))}
    here = fitted(data, federation=local, tol=0, rounds=12)
    rules = dataclasses.replace(BARE, smallest_cluster=2)  # as in a simulation, which has no owners
    sites = {name: Site(t, tmp_path / name, rules=rules) for name, t in data.items()}
    there = fitted(None, federation=RemoteFederation(LocalTransport(sites)), tol=0, rounds=12)
    np.testing.assert_allclose(there.statistics, here.statistics, rtol=0, atol=1e-9)
    np.testing.assert_array_equal(there.ledger.counts, here.ledger.counts)
    np.testing.assert_array_equal(passes(there), passes(here))
    assert passes(here).max() > 2


def test_local_steps_end_where_em_ends_whatever_is_lost() -> None:
    data = tables(alike=True)
    rows = np.concatenate(data)
    best = emfed.fit(MODEL, [rows], start=fitted(data).params, tol=1e-9).log_likelihood(rows)
    for seed in range(3):
        inner = emfed.network.FEDERATIONS["stacked"](emfed.data.as_workers(data))
        plan = emfed.network.FaultPlan(
            seed=seed, lose_request=0.02, lose_reply=0.05, delay_reply=0.02
        )
        network = emfed.network.FaultyFederation(inner, plan)
        run = emfed.fitting.open_run(
            MODEL, None, "auto", federation=network, start="k-means", seed=1
        )
        for _ in range(60):
            run.step()
            assert run.memory_gap < 1e-12
        assert run.records.column("evaluations")[1:].max() > run.samples
        params = run.model.to_user(run.params)
        found = emfed.fit(MODEL, [rows], start=params, rounds=0, tol=0).log_likelihood(rows)
        assert found == pytest.approx(best, abs=1e-4)


def test_sums_alone_tell_whether_workers_are_alike() -> None:
    for alike in (True, False):
        result = fitted(tables(alike), masks=True, rounds=8, tol=0)
        assert (passes(result).max() > 2) == alike


def test_those_who_follow_em_or_see_other_rows_each_round_take_none() -> None:
    data = tables(alike=True)
    follows = emfed.fit(MODEL, data, emfed.AutoEM(follow_em=True), rounds=5, tol=0)
    np.testing.assert_array_equal(passes(follows), 1)
    draw = np.random.default_rng(0)
    streams = [emfed.data.Stream(lambda k: draw.permutation(data[0])[:200]) for _ in range(3)]
    run = emfed.fitting.open_run(MODEL, streams, "auto", start="moments")
    for _ in range(4):
        run.step()
    _, rows = run.federation.worker_states()
    np.testing.assert_array_equal(rows["walked"], 1)


def test_local_steps_cannot_leave_the_domain(monkeypatch: pytest.MonkeyPatch) -> None:
    """With any number of steps, even where workers differ, the run ends no worse than it began."""
    monkeypatch.setattr(auto, "LARGEST_DRIFT", np.inf)
    monkeypatch.setattr(auto, "DRIFT_TIMES_STEPS", np.inf)
    data = tables(alike=False)
    rows = np.concatenate(data)
    result, start = fitted(data), fitted(data, rounds=0)
    assert result.log_likelihood(rows) >= start.log_likelihood(rows)


def test_harm_of_local_steps_is_undone_at_once() -> None:
    run = emfed.fitting.open_run(MODEL, tables(alike=True), "auto", start="k-means", seed=1)
    for _ in range(4):
        run.step()
    assert run.algorithm.asks(run.state) == "local"
    theta, good = run.params, run.state.extras["good"]
    moved = theta.means + np.array([[4.0], [-4.0], [0.0]])
    run.move(run.model.statistics_of(dataclasses.replace(theta, means=moved)))
    run.step()
    np.testing.assert_array_equal(run.state.statistics, good)
    assert run.memory_gap < 1e-12


def test_a_server_names_no_million_of_steps() -> None:
    """A site would take them, one pass over its rows each, before it answers one message."""
    with pytest.raises(emfed.SettingsError, match=r"local_steps must lie in \[1, 100\]"):
        emfed.AutoEM(local_steps=1_000_000)
