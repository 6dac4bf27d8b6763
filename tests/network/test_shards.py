"""Workers in shards answer as workers in one process do, whatever a fit asks of them."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import polars as pl
import pytest

import emfed
from emfed.aggregation.unmasked import Present, UnmaskedWorkers
from emfed.algorithms import Bernoulli, paper
from emfed.core.sums import AskedWorkers, drive
from emfed.data import as_workers
from emfed.data.held import HeldWorkers
from emfed.fitting import in_process
from emfed.fitting.ascent import Cohort, Objective
from emfed.fitting.convergence import Tolerance
from emfed.fitting.fitted import Fitted
from emfed.fitting.many import ascend_with_many
from emfed.fitting.settings import FitSettings
from emfed.network.shards import Shard, ShardedWorkers, divide, told_by
from tests.helpers import make_data, make_model

SIZES = (20, 9, 14, 30, 41, 9, 12)
TABLES = dict(zip("abcdefg", make_data(2, sizes=SIZES), strict=True))
EDGES = 3
QUANTISER = emfed.Dithering(2, block=4)


def sharded(data: Any, **more: Any) -> ShardedWorkers:
    """Shards to which every message is pickled, so that nothing is shared."""
    portions = divide(data, None, EDGES, **more)
    shards = [Shard(part.first, part.data) for part in portions.parts]
    words = [shard.ready() for shard in shards]

    def call(method: str, calls: Any) -> list[Any]:
        there = [(shard, pickle.loads(pickle.dumps(given))) for shard, given in calls]
        return [getattr(shards[shard], method)(*given) for shard, given in there]

    return ShardedWorkers(told_by(words, portions.edges, portions.names), call)


def fitted(workers: AskedWorkers, model: Any, **settings: Any) -> Fitted:
    return in_process.fit(
        FitSettings.read(model, None, **{"seed": 3, "scores": True, **settings}), workers
    )


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"n_components": "1:3"},
        {"weights": "uniform"},
        {"n_init": 3, "masks": True},
    ],
    ids=["a fit", "a range", "weights", "masked starts"],
)
def test_a_fit_is_that_of_one_process(settings: dict[str, Any]) -> None:
    model = emfed.gaussian_mixture if "n_components" in settings else make_model("full")
    here = fitted(HeldWorkers(as_workers(TABLES)), model, **settings).result
    there = fitted(sharded(TABLES), model, **settings).result
    np.testing.assert_allclose(there.statistics, here.statistics, rtol=0, atol=1e-12)
    assert (there.rounds, there.stopped) == (here.rounds, here.stopped)
    np.testing.assert_array_equal(there.ledger.counts, here.ledger.counts)
    assert there.ledger.names == here.ledger.names == list("abcdefg")
    assert there.facts is not None
    assert here.facts is not None
    np.testing.assert_allclose(there.facts.scores, here.facts.scores, rtol=0, atol=1e-12)
    own = [one.facts.by_worker and one.facts.by_worker.scores for one in (there, here)]
    assert (own[0] is None) == (own[1] is None) == bool(settings.get("masks"))
    if own[0] is not None:
        np.testing.assert_allclose(*own, rtol=0, atol=1e-12)


def test_row_weights_stay_with_their_rows() -> None:
    rng = np.random.default_rng(1)
    weights = {name: rng.uniform(0.5, 2, len(table)) for name, table in TABLES.items()}
    data = as_workers(TABLES, sample_weight=weights)
    here = fitted(HeldWorkers(data), make_model("diag")).result
    there = fitted(sharded(TABLES, sample_weight=weights), make_model("diag")).result
    np.testing.assert_allclose(there.statistics, here.statistics, rtol=0, atol=1e-12)
    np.testing.assert_allclose(there.worker_weights, here.worker_weights)


def present(ask: Any, exchange: int) -> Present:
    """Somebody is away now and then, and two workers lose what they kept."""
    n, none = len(SIZES), np.arange(0)
    there = np.flatnonzero((np.arange(n) + exchange) % 5 > 0) if exchange > 3 else np.arange(n)
    return Present(there, there, wiped=np.array([1, 6]) if exchange == 6 else none)


def begun() -> tuple[Any, Any]:
    """A model that knows its frame, and statistics on the way."""
    found = fitted(HeldWorkers(as_workers(TABLES)), make_model("diag"), rounds=2).result
    return found.model, found.statistics


def test_memories_and_local_steps_are_those_of_one_process() -> None:
    model, start = begun()
    problem = Objective(model, Cohort(len(SIZES), float(sum(SIZES)), masked=False), Tolerance(1e-7))
    ends = []
    for workers in (HeldWorkers(as_workers(TABLES)), sharded(TABLES)):
        left, sums = iter(range(12)), UnmaskedWorkers(workers, 5, present)
        found = drive(
            ascend_with_many(problem, start),
            sums,
            lambda ask, left=left: None if next(left) < 11 else "enough",
        )
        ends.append((found.point.statistics, sums))
    (here, sums), (there, others) = ends
    np.testing.assert_allclose(there, here, rtol=0, atol=1e-12)
    np.testing.assert_array_equal(others.counted.counts, sums.counted.counts)
    assert sums.states.keys() == others.states.keys()
    for memory, states in sums.states.items():
        for name, column in states.items():
            other = others.states[memory][name]
            np.testing.assert_allclose(other, column, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "algorithm",
    [
        emfed.FedEM(QUANTISER, step_size=0.3, memory_rate=0.4, batch_size=7),
        emfed.VRFedEM(QUANTISER, step_size=0.3, memory_rate=0.4, batch_size=5, inner_rounds=4),
    ],
    ids=["FedEM", "VR-FedEM"],
)
def test_gathers_are_those_of_one_process(algorithm: Any) -> None:
    """Whoever is drawn: one worker of one shard, or of none."""
    model, start = begun()
    method = paper.Method(model, algorithm, Bernoulli(0.3), len(SIZES), float(sum(SIZES)), 4)
    ends = []
    for workers in (HeldWorkers(as_workers(TABLES)), sharded(TABLES)):
        answers = UnmaskedWorkers(workers, present=present)
        server = drive(
            paper.rounds(method, paper.Server.begun(method, start)),
            answers,
            lambda ask: "rounds" if ask.server.round > 25 else None,
        )
        ends.append((server, answers))
    (here, answers), (there, others) = ends
    np.testing.assert_allclose(there.statistics, here.statistics, rtol=0, atol=1e-12)
    memory, other = (one.adder.memories["0"] for one in (answers, others))
    np.testing.assert_allclose(other, memory, rtol=0, atol=1e-12)
    np.testing.assert_array_equal(others.counted.counts, answers.counted.counts)


def test_columns_are_picked_where_the_rows_are() -> None:
    workers = sharded(
        {name: pl.DataFrame(table, schema=["a", "b"]) for name, table in TABLES.items()}
    ).view(("b",))
    assert workers.columns == ("b",)
    assert [rows.shape[1] for rows in workers.everywhere(_rows)] == [1] * EDGES
    with pytest.raises(emfed.DataError, match="missing 'c'|missing ..c"):
        workers.view(("c",)).everywhere(_rows)


def _rows(data: Any) -> Any:
    return data.worker(0)
