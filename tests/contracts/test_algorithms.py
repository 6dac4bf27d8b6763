"""Every registered algorithm keeps its promises, in every federation."""

from __future__ import annotations

import json
from typing import Any

import array_api_strict
import numpy as np
import pytest

import emfed
from emfed.algorithms import ALGORITHMS
from emfed.network import FEDERATIONS
from tests.helpers import KINDS, first, fit, make_data, make_model, memory_gap

OPERATORS: dict[str, Any] = {
    "identity": emfed.Identity(),
    "dithering": emfed.Dithering(levels=2, block="row"),
    "rand-k": emfed.RandomSparsification(0.5, emfed.Dithering(4)),
    "subtractive": emfed.SubtractiveDithering(0.3),
}


def variants(name: str) -> list[Any]:
    """The ways an algorithm can be set up that the tests go through."""
    if name == "em":
        return [emfed.EM()]
    if name == "auto":
        return [emfed.AutoEM(), emfed.AutoEM(follow_em=True), emfed.AutoEM(batch_size=10)]
    size = {"batch_size": 10}
    cls = ALGORITHMS[name]
    out = [
        cls(operator, step_size=0.2, in_metric=operator_name == "subtractive", **size)
        for operator_name, operator in OPERATORS.items()
    ]
    out.append(cls(emfed.Dithering(4), step_size=0.3, memory_start="mean-field", **size))
    out.append(cls(emfed.Dithering(4), step_size=0.3, replacement=True, **size))
    out.append(
        cls(emfed.Dithering(4), step_size=emfed.algorithms.Decreasing(0.8), memory_rate=0.0, **size)
    )
    return out


ALL = [variant for name in ALGORITHMS for variant in variants(name)]
HEARD = [one for one in ALL if isinstance(one, emfed.FedEM | emfed.VRFedEM)]
"""Those whose workers are heard one by one, and keep memories."""
each = pytest.mark.parametrize("algorithm", ALL, ids=lambda a: repr(a)[:90])
each_kind = pytest.mark.parametrize("kind", KINDS)


@each
@each_kind
def test_loop_and_stacked_give_the_same_trajectory(algorithm: Any, kind: str) -> None:
    tables = make_data(2, sizes=(30, 18, 13, 30, 21, 30))
    participation = emfed.algorithms.Bernoulli([0.9, 0.5, 1.0, 0.6, 0.7, 0.8])
    runs = [
        fit(
            make_model(kind),
            tables,
            algorithm,
            rounds=15,
            federation=name,
            participation=participation,
        )
        for name in FEDERATIONS
    ]
    np.testing.assert_allclose(runs[0].statistics, runs[1].statistics, rtol=1e-9, atol=1e-9)
    for name in ("squared_H", "evaluations", "answered"):
        a, b = (run.records.column(name) for run in runs)
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-12)
    # Where the innovation is nothing but rounding (the first round after V_i = h_i), symbols and
    # so bytes may differ.
    a, b = (run.records.column("bytes_up")[2:] for run in runs)
    np.testing.assert_array_equal(a, b)


@each
def test_rows_may_live_on_another_array_namespace(algorithm: Any) -> None:
    tables = make_data(2, sizes=(9, 8, 8))
    strict = [array_api_strict.asarray(t) for t in tables]
    for name in FEDERATIONS:
        here = fit(make_model("tied"), tables, algorithm, rounds=6, federation=name)
        there = fit(make_model("tied"), strict, algorithm, rounds=6, federation=name)
        np.testing.assert_allclose(here.statistics, there.statistics, atol=1e-10)


@pytest.mark.parametrize("algorithm", HEARD, ids=lambda a: repr(a)[:90])
def test_memories_add_up_after_every_round(algorithm: Any) -> None:
    run = emfed.fitting.open_run(
        make_model("diag"),
        make_data(3),
        algorithm,
        participation=emfed.algorithms.Bernoulli(0.6),
        weights="uniform",
        seed=5,
        tol=0,
    )
    largest = 0.0
    for _ in range(40):
        run.step()
        assert memory_gap(run) < 1e-12
        largest = max(largest, float(np.abs(run.memory).max()))
    assert (largest > 1e-2) == (algorithm.memory_rate != 0)


@pytest.mark.parametrize("algorithm", HEARD, ids=lambda a: repr(a)[:90])
def test_steps_do_not_change_their_input(algorithm: Any) -> None:
    run = emfed.fitting.open_run(make_model("full"), make_data(3), algorithm, seed=5, tol=0)
    run.step()
    statistics, memory = run.statistics, run.memory
    copies = statistics.copy(), memory.copy()
    run.step()
    np.testing.assert_array_equal(statistics, copies[0])
    np.testing.assert_array_equal(memory, copies[1])


@each
def test_description_is_plain_json(algorithm: Any) -> None:
    assert json.loads(json.dumps(algorithm.describe()))["algorithm"] in ALGORITHMS


@pytest.mark.parametrize("kind", first(sorted(KINDS, key=("full", "tied").__contains__)[::-1], 2))
@pytest.mark.parametrize("name", ["FedEM", "VR-FedEM", "auto"])
def test_compressed_runs_reach_the_pooled_optimum(kind: str, name: str) -> None:
    """With full local information and memories, compression noise dies out."""
    tables = make_data(3, sizes=(40, 25, 60, 33), spread=6.0)
    start = fit(make_model(kind), tables, rounds=20, seed=1).params  # in one basin
    pooled = fit(make_model(kind), tables, rounds=400, start=start)
    size = {"batch_size": 1000, "inner_rounds": 5} if name == "VR-FedEM" else {}
    settings: dict[str, Any] = {
        "compressor": emfed.SubtractiveDithering(0.2),
        "step_size": 0.5,
        "in_metric": True,
    }
    algorithm = ALGORITHMS[name](**({} if name == "auto" else settings | size))
    got = fit(make_model(kind), tables, algorithm, rounds=350, start=start)
    rows = np.concatenate(tables)
    assert got.log_likelihood(rows) == pytest.approx(pooled.log_likelihood(rows), abs=1e-6)
