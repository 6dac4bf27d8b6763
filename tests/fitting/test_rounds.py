"""The loop: limits, callbacks, records, weights and diagnostics."""

from __future__ import annotations

import csv
import logging
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

import emfed
from tests.helpers import fit, make_data, make_model, memory_gap, plain_fit

TABLES = make_data(1)
ALGORITHM = emfed.FedEM(emfed.Dithering(2), step_size=0.3, batch_size=5)


@pytest.mark.parametrize(
    ("limit", "reason"),
    [
        ({"rounds": 7}, "rounds"),
        ({"epochs": 2.5}, "epochs"),
        ({"max_bytes": 20_000}, "bytes"),
        ({"seconds": 0.05}, "seconds"),
        ({"rounds": 10_000, "field_tol": 5e-2}, "tolerance"),
        ({"rounds": 50, "callbacks": [lambda record: record.round == 4]}, "callback"),
    ],
)
def test_limits(limit: dict[str, Any], reason: str) -> None:
    result = fit(make_model("tied"), TABLES, ALGORITHM, **limit)
    last, previous = result.records[-1], result.records[-2]
    assert result.stopped == reason
    if reason == "rounds":
        assert last.round == 7
    if reason == "epochs":
        assert previous.epochs < 2.5 <= last.epochs
    if reason == "bytes":
        total = result.bytes_up + result.bytes_down
        assert total >= 20_000 > total - last.bytes_up - last.bytes_down
    if reason == "tolerance":
        tail = result.records.column("squared_H")[-4:]
        assert (tail[1:] <= 5e-2).all()
        assert tail[0] > 5e-2 or np.isnan(tail[0]) or result.records[-4].guard_hits
    if reason == "callback":
        assert last.round == 4


def test_default_is_a_hundred_rounds_of_em() -> None:
    result = plain_fit(make_model("diag"), TABLES)
    assert result.records[-1].round == 100
    objective = plain_fit(make_model("diag"), TABLES, monitor=emfed.fitting.Monitor()).records
    values = objective.column("objective")[1:]
    assert np.all(np.diff(values) <= 1e-9)


def test_the_default_step_suits_the_compression() -> None:
    """Left alone, a coarse quantiser gets a small step, and ends near the optimum it starts at."""
    tables = make_data(3, sizes=(60, 60, 60), spread=6.0)
    rows = np.concatenate(tables)
    start = fit(make_model("diag"), tables, rounds=200).params
    best = fit(make_model("diag"), tables, rounds=1, start=start).log_likelihood(rows)
    for operator in (emfed.Dithering(), emfed.RandomSparsification(0.25)):
        result = fit(make_model("diag"), tables, emfed.FedEM(operator), start=start, rounds=500)
        assert 0 < result.card["settings"]["algorithm"]["step_size"] < 0.5
        assert result.log_likelihood(rows) > best - 0.02
    plain = fit(make_model("diag"), tables, emfed.FedEM(), rounds=1)
    assert plain.card["settings"]["algorithm"]["step_size"] == 1.0


def test_a_tolerance_alone_is_a_limit() -> None:
    reached = fit(make_model("diag"), TABLES, field_tol=1e-12)
    assert reached.stopped == "tolerance"
    with pytest.warns(emfed.EmfedWarning, match="did not fall to 1e-12"):
        missed = fit(make_model("diag"), TABLES, rounds=3, field_tol=1e-12)
    assert missed.stopped == "rounds"


def test_results_are_told_in_a_line() -> None:
    result = fit(make_model("diag"), TABLES, ALGORITHM, rounds=9, threads=1)
    assert repr(result).startswith(
        "<Result: not converged (it met its limit on rounds) in 9 rounds, "
    )
    rows = np.concatenate(TABLES)
    assert result.score_samples(rows).mean() == pytest.approx(result.log_likelihood(rows))


def test_no_rounds_gives_the_start() -> None:
    result = fit(make_model("diag"), TABLES, rounds=0)
    assert [r.round for r in result.records] == [0]


def test_records_count_what_happened() -> None:
    result = fit(
        make_model("diag"), TABLES, ALGORITHM, rounds=9, participation=emfed.algorithms.FixedSize(3)
    )
    records = result.records
    assert [r.round for r in records] == list(range(10))
    assert all(r.asked == r.answered == 3 for r in records[1:])
    assert sum(r.bytes_up for r in records) == result.bytes_up
    assert sum(r.bytes_down for r in records) == result.bytes_down
    evaluations = np.cumsum(records.column("evaluations"))
    np.testing.assert_allclose(records.column("epochs"), evaluations / 142)
    assert all(r.evaluations == 15 for r in records[1:])


def test_evaluations_of_variance_reduction() -> None:
    algorithm = emfed.VRFedEM(step_size=0.2, batch_size=4, inner_rounds=5)
    records = fit(make_model("diag"), TABLES, algorithm, rounds=11).records
    # A full pass of everyone, then two mini-batches of 4 for each of 4 workers (K_CE).
    want = [142, 32, 32, 32, 32] * 2 + [142]
    assert records.column("evaluations")[1:].tolist() == want


def test_records_to_csv_and_parquet(tmp_path: Path) -> None:
    records = fit(
        make_model("diag"), TABLES, ALGORITHM, rounds=6, monitor=emfed.fitting.Monitor(2)
    ).records
    records.to_csv(tmp_path / "r.csv")
    records.to_parquet(tmp_path / "r.parquet")
    frame = pl.read_parquet(tmp_path / "r.parquet")
    assert frame.schema["round"] == pl.Int64
    assert frame.schema["squared_h"] == pl.Float64
    assert frame["squared_h"].null_count() == 4  # the opening, and every second round
    with (tmp_path / "r.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(r["round"]) for r in rows] == frame["round"].to_list()
    assert [float(r["squared_H"]) for r in rows[1:]] == frame["squared_H"].to_list()[1:]
    assert rows[2]["objective"] == ""
    again = emfed.fitting.Records.from_columns(frame.to_dict(as_series=False))
    assert again == records
    assert again[1:] == records[1:]
    assert "7 rounds" in repr(again)


def test_diagnostics_are_the_definitions() -> None:
    run = emfed.fitting.open_run(
        make_model("diag"),
        TABLES,
        emfed.FedEM(step_size=1.0),
        monitor=emfed.fitting.Monitor(),
        weights="uniform",
    )
    for _ in range(4):
        statistics, params = run.statistics, run.params
        record = run.step()
        h = np.mean([run.model.expected_statistics(t, params) for t in TABLES], axis=0) - statistics
        assert record.squared_h == pytest.approx(float(h @ h))
        assert record.squared_H == pytest.approx(float(h @ h))  # EM's H is h
        likelihood = np.mean([run.model.log_likelihood(t, params) for t in TABLES])
        assert record.objective == pytest.approx(-float(likelihood))


def test_weights_by_samples_give_the_pooled_fit_and_uniform_ones_do_not() -> None:
    pooled = fit(make_model("full"), [np.concatenate(TABLES)], rounds=30)
    samples = fit(make_model("full"), TABLES, rounds=30, weights="samples")
    uniform = fit(make_model("full"), TABLES, rounds=30, weights="uniform")
    given = fit(make_model("full"), TABLES, rounds=30, weights=[len(t) for t in TABLES])
    np.testing.assert_allclose(samples.statistics, pooled.statistics, atol=1e-9)
    np.testing.assert_allclose(given.statistics, samples.statistics, atol=1e-12)
    assert np.abs(uniform.params.means - samples.params.means).max() > 1e-3


def test_guard_hits_are_counted_and_survived() -> None:
    """A brutal quantiser with full steps: no NaN, no error, and the report says so."""
    with pytest.warns(emfed.EmfedWarning, match="rounds the step was shortened"):
        result = fit(
            make_model("full"),
            TABLES,
            emfed.FedEM(emfed.RandomSparsification(1), step_size=1.0, memory_rate=0.0),
            rounds=50,
        )
    assert result.guard_hits > 0
    assert result.guard_hits == sum(r.guard_hits for r in result.records)
    assert np.isfinite(result.statistics).all()
    short = [r.step_size for r in result.records[1:] if r.guard_hits]
    assert all(s < 1.0 for s in short)


def test_the_library_prints_nothing(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        fit(make_model("diag"), TABLES, ALGORITHM, rounds=3)
    assert capsys.readouterr() == ("", "")
    assert not caplog.records


def test_a_few_are_active_of_many_registered() -> None:
    rows = np.random.default_rng(0).normal(size=(9_000, 2))
    data = emfed.data.WorkerData(rows, np.arange(0, 9_001, 3))
    run = emfed.fitting.open_run(
        emfed.gaussian_mixture(2, "tied"),
        data,
        emfed.FedEM(emfed.Dithering(), step_size=0.2),
        participation=emfed.algorithms.FixedSize(50),
    )
    for _ in range(10):
        run.step()
    assert 50 < np.count_nonzero(run.memories.any(axis=1)) <= 500
    assert memory_gap(run) < 1e-12


def test_bytes_are_counted_from_the_opening_on() -> None:
    with pytest.warns(emfed.EmfedWarning, match="the opening and the start took") as caught:
        result = emfed.fit(make_model("tied"), TABLES, "auto", start="k-means", max_bytes=1)
    spent = result.bytes_up + result.bytes_down
    assert (result.stopped, result.rounds) == ("bytes", 0)
    assert f"took {spent} bytes" in str(caught[0].message)
    books = result.ledger.summary()
    assert books["start"]["up"]["payload"] > 0
    assert books["opening"]["down"]["payload"] > 0
    more = emfed.fit(make_model("tied"), TABLES, "auto", start="k-means", max_bytes=spent + 1)
    assert more.rounds == 1
