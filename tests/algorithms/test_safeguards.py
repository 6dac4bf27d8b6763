"""What AutoEM does against its own noise: it waits, it goes back, and it looks before it stops."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import emfed
from emfed.algorithms import auto, safeguards
from emfed.fitting.verifying import verify
from emfed.network import LocalTransport, RemoteFederation, Site
from tests.helpers import OPEN, make_data, make_model

TABLES = make_data(2, sizes=(60, 80, 50, 70))


def opened(kind: str = "full", seed: int = 0, **options: Any) -> Any:
    return emfed.fitting.open_run(
        make_model(kind), TABLES, "auto", start="k-means", seed=seed, **options
    )


def objective(run: Any) -> float:
    likelihood = float(run.ask("values")[0, 0])
    return float(run.model.penalty(run.params) - likelihood)


def pushed(run: Any) -> np.ndarray:
    """S with the means of two components moved by two spreads, as if noise had done it."""
    theta = run.params
    means = theta.means + np.array([[2.0], [-2.0], [0.0]])
    return np.asarray(run.model.statistics_of(replace(theta, means=means)))


def harmed(kind: str, federation: Any) -> tuple[Any, np.ndarray, float]:
    """A run after a step that did harm, where it was before, and the objective there."""
    plain = emfed.AutoEM(local_steps=1)
    model = make_model(kind)
    run = emfed.fitting.open_run(model, TABLES, plain, start="k-means", federation=federation)
    for _ in range(12):
        run.step()
    good, before = run.state.statistics, objective(run)
    extras = dict(run.state.extras) | {"good": good}
    run.state = replace(run.state, statistics=pushed(run), extras=extras)
    run._params = None
    assert objective(run) > before + 1
    return run, good, before


@pytest.mark.parametrize("federation", ["stacked", "loop"])
def test_a_step_that_did_harm_is_undone_within_two_rounds(federation: str) -> None:
    run, good, before = harmed("spherical", federation)
    run.step()
    run.step()
    np.testing.assert_allclose(run.state.statistics, good, atol=1e-5)  # told in full, on a grid
    assert run.state.extras["caution"] == 1
    assert run.memory_gap < 1e-12
    for _ in range(6):
        run.step()
    assert objective(run) <= before + 1e-4


@pytest.mark.parametrize("kind", ["full", "diag", "spherical"])
def test_harm_does_not_last(kind: str) -> None:
    run, _, before = harmed(kind, "stacked")
    for _ in range(8):
        run.step()
    assert objective(run) <= before + 1e-4


def test_exact_steps_are_never_taken_for_harm() -> None:
    """The bound holds for EM, from anywhere."""
    for kind in ("full", "tied", "diag"):
        model = opened(kind).model
        rows = np.concatenate(TABLES)
        for seed in range(5):
            theta = model.start(seed)
            for _ in range(10):
                here = model.expected_statistics(rows, theta)
                after = model.maximize(here)
                there = model.expected_statistics(rows, after)
                rise = model.surrogate(there, theta) - model.surrogate(there, after)
                gain = model.log_likelihood(rows, after) - model.log_likelihood(rows, theta)
                assert rise >= gain - 1e-10 >= -2e-10
                theta = after


def test_s_waits_while_its_noise_is_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safeguards, "STAND", 1e-12)
    run = opened()
    first = run.state.statistics
    for _ in range(safeguards.MOST_WAITS):
        run.step()
        np.testing.assert_array_equal(run.state.statistics, first)
    sizes = run.records.column("squared_H")[1:]
    exact = run.ask("statistics") - first
    assert abs(np.sqrt(sizes[-1]) - np.linalg.norm(exact)) < 1e-3 * np.linalg.norm(exact)
    run.step()  # it does not wait for ever
    assert not np.array_equal(run.state.statistics, first)


def test_a_curvature_without_bounds_is_no_error() -> None:
    """A worker that measured an infinite L^2 takes the least noise there is."""
    run = opened()
    run.step()
    workers, rows = run.federation.worker_states()
    rows["curvature"][:] = np.inf
    run.federation.restore_states(workers, rows)
    run.step()
    _, rows = run.federation.worker_states()
    assert np.isfinite(rows["curvature"]).all()


def saddle() -> list[np.ndarray]:
    """Two clusters, and a start half-way between them, where EM hardly moves."""
    rng = np.random.default_rng(0)
    rows = np.concatenate([rng.normal(-2, 1, (400, 2)), rng.normal(2, 1, (400, 2))])
    return np.array_split(rows[rng.permutation(800)], 4)


@pytest.mark.parametrize("algorithm", ["auto", "em"])
def test_a_saddle_is_no_end(algorithm: str) -> None:
    tables = saddle()
    rows = np.concatenate(tables)
    shift = 0.1 * np.array([[1.0, 1.0], [-1.0, -1.0]])
    start = emfed.models.GaussianParameters(
        np.full(2, 0.5), rows.mean(axis=0) + shift, np.cov(rows.T, bias=True)
    )
    model = emfed.gaussian_mixture(2, "tied")
    result = emfed.fit(model, tables, algorithm, start=start, tol=1e-6, rounds=500)
    assert result.converged
    assert np.abs(result.params.means).min() > 1.5


def test_verify_tells_what_em_would_gain() -> None:
    run = emfed.fitting.open_run(make_model("full"), TABLES, "em", start="k-means")
    for _ in range(3):
        run.step()
    before = objective(run)
    told = verify(run, 1e-6).left
    for _ in range(300):
        run.step()
    assert told == pytest.approx(before - objective(run), rel=1.0)
    assert verify(run, 1e-6).left <= 1e-6


def test_a_small_field_by_chance_is_not_convergence() -> None:
    """A tolerance so coarse that any field meets it ends the run, but nobody says converged."""
    vague = emfed.VRFedEM(emfed.SubtractiveDithering(0.25), in_metric=True, batch_size=8)
    result = emfed.fit(make_model("full"), TABLES, vague, start="moments", field_tol=1e3, rounds=50)
    assert result.stopped == "tolerance"
    assert not result.converged


@pytest.mark.parametrize("shift", [0.05, 0.01, 0.003])
def test_alone_a_saddle_is_no_end_either(shift: float) -> None:
    rows = np.concatenate(saddle())
    means = rows.mean(axis=0) + shift * np.array([[1.0, 1.0], [-1.0, -1.0]])
    start = emfed.models.GaussianParameters(np.full(2, 0.5), means, np.cov(rows.T, bias=True))
    result = emfed.fit(emfed.gaussian_mixture(2, "tied"), [rows], start=start, tol=1e-6, rounds=99)
    assert result.converged
    assert np.abs(result.params.means).min() > 1.5


@pytest.mark.parametrize("kind", ["full", "tied", "diag", "spherical"])
def test_looking_before_the_end_hardly_waits(kind: str) -> None:
    """Workers are asked for fine answers, so S need not wait for what rough ones leave out."""
    run = opened(kind)
    stop, asked, waits, fine = emfed.fitting.Stop(rounds=500, nats=1e-6), 0, 0, 0
    while run.reason(stop) is None:
        extras = dict(run.state.extras)
        probing = safeguards.number(extras, "probe") > 0
        fine += run.plan().kind == "fine"
        run.step()
        asked += probing
        waits += probing and safeguards.number(dict(run.state.extras), "waits") > 0
    assert run.confirmed
    assert run.memory_gap < 1e-12
    assert 0 < fine < asked
    assert asked <= safeguards.JUDGE + safeguards.MOST_PLAIN + waits
    assert waits <= 3


def test_where_em_crawls_answers_are_fine_here_and_at_sites_elsewhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Early, so that the test is short: requests say it, so both ends decode alike."""
    data = {name: TABLES[j] for j, name in enumerate("abcd")}
    options: Any = {"start": "k-means", "seed": 0}
    coarse = emfed.fit(make_model("diag"), data, **options)
    monkeypatch.setattr(auto, "CRAWLS_AFTER", 3)
    fine = emfed.fit(make_model("diag"), data, **options)
    assert fine.bytes_up / fine.rounds > coarse.bytes_up / coarse.rounds
    sites = {name: Site(table, tmp_path / name, rules=OPEN) for name, table in data.items()}
    there = emfed.fit(make_model("diag"), RemoteFederation(LocalTransport(sites)), **options)
    np.testing.assert_allclose(there.statistics, fine.statistics, atol=1e-9)
    assert (there.rounds, there.bytes_up) == (fine.rounds, fine.bytes_up)


def test_a_masked_round_that_tells_no_length_of_innovations_is_a_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So it is where one site lies, or where nothing is new to anyone."""
    run = opened("diag", masks=True)
    exchange = run.federation.exchange
    monkeypatch.setattr(
        run.federation, "exchange", lambda asked: replace(exchange(asked), energies=np.zeros(1))
    )
    for _ in range(3):
        run.step()
    assert np.isfinite(run.state.statistics).all()
