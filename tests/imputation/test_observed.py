"""Mode ``observed``: sums of cells are sent once, and the fit is that of all records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import emfed
from emfed.aggregation.coded import encode_weight
from emfed.core.protocols import WorkerCells
from emfed.core.wire import encode_cells, encode_count
from emfed.data import WorkerData, as_workers
from emfed.imputation import ColumnNames, FieldTable, Structure, impute, read_records
from emfed.imputation.cells import check_cells
from emfed.imputation.sweeps import Solver
from emfed.models.site_owner import COLUMNS
from emfed.network import LoopFederation, StackedFederation
from tests.imputation.tables import paper_size, pooled_error, small_table

STRUCTURE = Structure(2, 0.9, 0.5, 0.5, smoothing=10.0, seasonality=30.0)


def pooled_fit(table: FieldTable, structure: Structure, seed: int = 0) -> Any:
    """T of the sums of all records in one place."""
    solver = Solver(table.family, structure, sweeps=500, tolerance=1e-7, seed=seed)
    return solver.fit(table.pooled)


@pytest.mark.parametrize("family", ["gaussian", "poisson", "log1p"])
@pytest.mark.parametrize("kind", [LoopFederation, StackedFederation])
def test_the_fit_is_that_of_all_records_in_one_place_exactly(family: str, kind: type) -> None:
    table = small_table(family, workers=7, records=600)
    data = WorkerData(table.rows, table.offsets, list(table.workers), COLUMNS)
    structure = Structure(1, 3.0)
    wanted = pooled_fit(table, structure)
    for found in (
        impute(table, structure=structure),
        impute(kind(data), grid=table.grid, structure=structure),
        impute(table.regroup(2), structure=structure),
    ):
        np.testing.assert_allclose(found.params.sites, wanted.sites, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(found.params.times, wanted.times, rtol=1e-9, atol=1e-12)
    there = impute(kind(data), grid=table.grid, structure=structure)
    for name in ("keys", "weights", "sums"):
        assert np.array_equal(getattr(there.cells, name), getattr(table.pooled, name))
    assert np.array_equal(there.params.sites, wanted.sites)
    assert np.array_equal(there.table.values, table.values)  # what each worker told
    assert list(there.table.workers) == list(table.workers)


def test_one_exchange_is_all_there_is() -> None:
    """Its bytes are those of the codec, whatever is fitted to the sums."""
    table = small_table(workers=2, records=150)
    result = impute(table, structure=Structure(1))
    assert (result.rounds, result.stopped, len(result.records)) == (1, "fitted", 1)
    told = result.ledger.summary()
    assert {kind for kind, ways in told.items() if ways["up"]["messages"]} == {"opening"}
    for worker, own in enumerate(np.split(table.rows, table.offsets[1:-1])):
        keys = (own[:, 0] * table.shape[1] + own[:, 1]).astype(int)
        cells = WorkerCells(keys, own[:, 2], own[:, 3])
        told_cells = encode_cells(cells, table.shape[0] * table.shape[1])
        weighed = len(encode_weight(len(own))) + len(encode_count(len(own)))
        assert result.ledger.counts[0, 0, 1, worker] == weighed + len(told_cells)
    record = result.records[0]
    assert (record.bytes_up, record.bytes_down) == (result.bytes_up, result.bytes_down)
    assert record.objective == result.solver.objective(table.pooled, result.params)
    assert impute(table, rank=0, penalty=1.0).bytes_up == result.bytes_up


def test_the_same_seed_gives_the_same_fit() -> None:
    table = small_table()
    first, second = (impute(table, rank=1, seed=4) for _ in range(2))
    assert np.array_equal(first.params.sites, second.params.sites)
    assert first.ledger.summary() == second.ledger.summary()


def test_cells_must_come_sorted_and_each_once() -> None:
    rows = np.array([[0.0, 1.0, 1.0, 2.0], [0.0, 1.0, 1.0, 3.0]])
    for wrong in (rows, rows[::-1] * [1, 2, 1, 1]):
        with pytest.raises(emfed.DataError, match="sorted by site and time, each once"):
            check_cells((2, 3), as_workers([wrong]))
    for wrong, words in (
        (rows * [1, 3, 1, 1], "times below 3"),
        (rows * [1, 1, 0, 1], "weights above 0"),
        (np.where(rows == 2, np.inf, rows), "finite columns"),
        (rows[:, :3], "finite columns"),
    ):
        with pytest.raises(emfed.DataError, match=words):
            check_cells((2, 3), as_workers([wrong]))


@pytest.mark.parametrize(
    ("family", "limit"),
    [("log1p", 3700), *(pytest.param(f, 3100, marks=pytest.mark.long) for f in ("poisson",))],
)
def test_few_kilobytes_a_worker_at_the_paper_s_size(family: str, limit: int) -> None:
    """Support, counts and every envelope included, for the busiest of ten workers."""
    table = emfed.imputation.simulate_table(12_185, seed=0, family=family)
    result = impute(table, structure=STRUCTURE)
    assert result.ledger.counts[:, 0, 1:].sum(axis=(0, 1)).max() <= limit
    assert result.bytes_down / 10 < 100


def test_held_out_cells_at_the_paper_s_size_are_as_in_one_place() -> None:
    table, held = paper_size(12_185, 0)
    result = impute(table, structure=STRUCTURE)
    assert result.score(held) / pooled_error(table, STRUCTURE, held) - 1 < 1e-4


def test_oystercatchers_come_to_the_pooled_error(data_dir: Path) -> None:
    whole = read_records(
        data_dir / "oystercatcher_monthly.csv.gz",
        ColumnNames(date=("year", "month"), observer=None),
        family="log1p",
    )
    structure = Structure(6, 5.5, 0.1, 0.1, smoothing=10.0, seasonality=30.0)
    table, held = whole.regroup(10, 0).split(0.1, 0)
    result = impute(table, structure=structure)
    assert result.score(held) / pooled_error(table, structure, held) - 1 < 1e-4
    additive = pooled_error(table, Structure(0, 1.0, 0.5, 0.5), held)
    assert result.score(held) < 0.92 * additive


def test_callbacks_and_settings(tmp_path: Path) -> None:
    table = small_table()
    seen: list[int] = []
    impute(table, rank=0, callbacks=[lambda record: seen.append(record.round)])
    assert seen == [1]
    once = "takes no {}: its workers send their sums once"
    for options, text in (
        ({"mode": "all"}, "mode must be one of"),
        ({"batch_size": 3}, "mode 'observed' takes no batch_size"),
        ({"structure": Structure(1), "rank": 1}, "not both"),
        ({"compressor": emfed.Identity()}, once.format("compressor")),
        ({"participation": 0.5}, once.format("participation")),
        ({"rounds": 3}, once.format("rounds")),
        ({"patience": 5}, once.format("patience")),
        ({"checkpoint": tmp_path / "c"}, "sends cells once and leaves no checkpoint"),
        ({"structure": 2}, "structure must be something like"),
        ({"rank": -1}, "rank must be a whole number"),
    ):
        with pytest.raises(emfed.SettingsError, match=text):
            impute(table, **options)


def test_ctrl_c_while_a_structure_is_chosen_keeps_the_best_so_far() -> None:
    tried: list[float] = []

    def stop(what: str, share: float) -> None:
        tried.append(share)
        if len(tried) == 3:
            raise KeyboardInterrupt

    result = impute(small_table(records=400), progress=stop)
    assert result.stopped == "interrupted"
    assert result.plain
    assert result.choice is not None
    assert len(result.choice.tried) <= 3
    assert np.isfinite(result.trend()["estimate"]).all()
