"""AutoEM: the pooled answer for few bytes, whoever is away, and a word when it was not reached."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import emfed
from emfed.core.errors import EmfedWarning
from emfed.network import FEDERATIONS
from tests.helpers import first, make_data, make_model, plain_fit

CENTRES = np.array([[-4.0, 0.0], [4.0, 0.0], [0.0, 6.0]])


def unlike(seed: int = 4, workers: int = 20, rows: int = 60) -> list[Any]:
    """Workers that hold one cluster each: nothing could be more different."""
    rng = np.random.default_rng(seed)
    return [CENTRES[i % 3] + rng.normal(size=(rows, 2)) for i in range(workers)]


def pooled(model: Any, tables: list[Any]) -> tuple[Any, float]:
    """A start that is off, and the log-likelihood where EM ends from it."""
    shape = {"tied": 4 * np.eye(2), "diag": np.full((3, 2), 4.0)}
    covariances = shape.get(model.describe()["covariance_type"], np.tile(4 * np.eye(2), (3, 1, 1)))
    start = emfed.models.GaussianParameters(np.full(3, 1 / 3), 0.6 * CENTRES + 1, covariances)
    rows = np.concatenate(tables)
    return start, plain_fit(model, tables, rounds=500, tol=1e-10, start=start).log_likelihood(rows)


@pytest.mark.parametrize(
    ("kind", "p"),
    first([("tied", 0.5), ("diag", 0.1), ("full", 0.5), ("tied", 0.1), ("full", 0.1)], 2),
)
def test_absent_workers_cost_time_and_nothing_else(kind: str, p: float) -> None:
    tables = unlike()
    model = make_model(kind)
    start, best = pooled(model, tables)
    got = emfed.fit(
        model,
        tables,
        "auto",
        start=start,
        participation=emfed.algorithms.Bernoulli(p),
        rounds=int(60 / p),
        seed=3,
    )
    assert got.log_likelihood(np.concatenate(tables)) == pytest.approx(best, abs=1e-6)


def test_stops_by_itself_near_the_pooled_answer_for_a_quarter_of_the_bytes() -> None:
    tables = unlike(workers=60, rows=60)
    model = make_model("full")
    start, best = pooled(model, tables)
    exact = emfed.Identity("float32")
    whole = plain_fit(
        model,
        tables,
        emfed.FedEM(exact, step_size=1.0, in_metric=True, broadcast=exact),
        start=start,
        tol=1e-4,
        rounds=500,
    )
    got = emfed.fit(model, tables, start=start, seed=2)
    assert got.converged
    assert got.stopped == "nats"
    assert got.log_likelihood(np.concatenate(tables)) == pytest.approx(best, abs=1e-3)
    up = [result.ledger.summary()["round"]["up"]["payload"] for result in (got, whole)]
    assert up[0] / got.rounds < 0.25 * up[1] / whole.rounds


def test_a_run_cut_short_says_what_may_be_left() -> None:
    with pytest.warns(EmfedWarning, match="before it converged to 1e-09 nats a row"):
        result = emfed.fit(make_model("diag"), make_data(3), "auto", tol=1e-9, rounds=8)
    assert not result.converged


@pytest.mark.parametrize("algorithm", [emfed.FedEM(), emfed.VRFedEM()])
def test_statistics_stay_where_they_are_while_nobody_answers(algorithm: Any) -> None:
    inner = FEDERATIONS["stacked"](emfed.data.as_workers(make_data(3)))
    silent = emfed.network.FaultyFederation(inner, emfed.network.FaultPlan(lose_reply=1.0))
    run = emfed.fitting.open_run(make_model("diag"), silent, algorithm, start="moments")
    before = run.statistics
    for _ in range(5):
        run.step()
    np.testing.assert_array_equal(run.statistics, before)


def test_lost_disks_and_lost_messages_leave_the_answer() -> None:
    tables = unlike(workers=8)
    model = make_model("diag")
    start, best = pooled(model, tables)
    plan = emfed.network.FaultPlan(seed=5, lose_request=0.1, lose_reply=0.1, lose_disk=0.002)
    faulty = emfed.network.FaultyFederation(
        FEDERATIONS["stacked"](emfed.data.as_workers(tables)), plan
    )
    algorithm = emfed.FedEM(emfed.SubtractiveDithering(0.25), in_metric=True)
    run = emfed.fitting.open_run(model, faulty, algorithm, start=start, seed=1, tol=0)
    for _ in range(400):
        run.step()
    assert run.server.generation > 0
    got = run.model.log_likelihood(np.concatenate(tables), run.params)
    assert float(got) == pytest.approx(best, abs=1e-6)


def test_gains_are_what_em_steps_are_worth() -> None:
    """Near the optimum the log-likelihood grows by between gain and twice gain."""
    tables = make_data(3, sizes=(200, 150), spread=2.0)
    model = make_model("full")
    result = plain_fit(model, tables, rounds=400, monitor=emfed.fitting.Monitor(mean_field=False))
    records = [r for r in result.records if r.round > 0]
    checked = 0
    for a, b in pairwise(records):
        assert a.objective is not None
        assert b.objective is not None
        assert a.gain is not None
        if 1e-9 < a.gain < 1e-5:
            assert 0.9 * a.gain <= a.objective - b.objective <= 2.1 * a.gain
            checked += 1
    assert checked > 5


def test_settings_are_checked() -> None:
    with pytest.raises(emfed.SettingsError, match="batch_size"):
        emfed.AutoEM(batch_size=0)
    with pytest.raises(emfed.SettingsError, match="'auto'"):
        emfed.fit(make_model("diag"), make_data(3), "automatic")


@pytest.mark.parametrize("p", [0.3, 0.1])
def test_convergence_is_true_of_partial_participation(p: float) -> None:
    """What a round tells is of those who answered; little of that is not little of all."""
    rng = np.random.default_rng(2)
    centres = np.array([[-2.0, 0.0], [2.0, 0.0], [0.0, 3.0]])
    tables = [centres[rng.integers(3, size=80)] + rng.normal(size=(80, 2)) for _ in range(20)]
    model = make_model("diag")
    start, _ = pooled(model, tables)
    part = emfed.algorithms.Bernoulli(p)
    got = emfed.fit(model, tables, "auto", start=start, participation=part, seed=1, tol=1e-4)
    assert got.converged
    rows = np.concatenate(tables)
    better = plain_fit(model, [rows], start=got.params, tol=1e-9, rounds=5000)
    assert better.log_likelihood(rows) - got.log_likelihood(rows) < 1e-3
