"""The fit on sums, from settings and rows to a result (`emfed.fitting.in_process`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import emfed
from emfed.data import as_workers
from emfed.data.held import HeldWorkers
from emfed.data.summing import summary_shapes
from emfed.fitting import FitSettings, in_process
from emfed.fitting.fitted import Fitted, Watch
from tests.helpers import make_data, make_model
from tests.registry import REGISTRY

TABLES = make_data(5, k=3, d=2, sizes=(60, 45, 30, 80))


def fitted(model: Any, tables: Any, watch: Watch | None = None, **settings: Any) -> Fitted:
    workers = tables if isinstance(tables, emfed.data.Workers) else as_workers(tables)
    return in_process.fit(FitSettings(model, **settings), HeldWorkers(workers), watch or Watch())


def objective(result: emfed.Result, tables: Any) -> float:
    rows = np.concatenate(tables)
    params = result.model.maximize(result.statistics)
    return float(result.model.log_likelihood(rows, params)) - result.model.penalty(params)


@pytest.mark.parametrize("name", REGISTRY)
def test_every_model_ends_where_em_gains_nothing(name: str) -> None:
    entry = REGISTRY[name]
    result = fitted(entry.make(), entry.tables, moves=0).result
    assert result.converged
    rows = np.concatenate(entry.tables)
    model, here = result.model, result.statistics
    before = objective(result, entry.tables)
    for _ in range(20):
        here = model.protect(here, model.expected_statistics(rows, model.maximize(here)))
    params = model.maximize(here)
    after = float(model.log_likelihood(rows, params)) - model.penalty(params)
    assert -1e-6 < after - before < 1e-4


@pytest.mark.parametrize("name", [*list(REGISTRY)[::5], "full", "gaussian chain"])
def test_priors_are_part_of_what_is_maximised(name: str) -> None:
    entry = REGISTRY[name]
    result = fitted(entry.make(**entry.priors), entry.tables, moves=0).result
    run = emfed.fitting.open_run(
        entry.make(**entry.priors), entry.tables, "em", start=result.params, tol=0, rounds=99
    )
    began = objective(result, entry.tables)
    for _ in range(10):
        run.step()
    params = run.params
    rows = np.concatenate(entry.tables)
    ended = float(run.model.log_likelihood(rows, params)) - run.model.penalty(params)
    assert abs(ended - began) < 1e-4


@pytest.mark.parametrize("kind", ["full", "tied", "diag"])
def test_one_worker_and_many_go_the_same_way(kind: str) -> None:
    """Sums are exact for one worker and rounded for four: the path differs by the noise alone."""
    start = fitted(make_model(kind), TABLES, rounds=1, moves=0).result.params
    options: dict[str, Any] = {"start": start, "rounds": 6, "tol": 0.0, "accelerate": False}
    alone = fitted(make_model(kind), np.concatenate(TABLES), **options).result
    many = fitted(make_model(kind), TABLES, **options).result
    assert alone.rounds == many.rounds == 6
    a, b = (r.records.column("objective")[1:] for r in (alone, many))
    assert 0 < np.abs(a - b).max() < 1e-3


def test_rows_may_lie_with_any_worker() -> None:
    """Where sums are exact nothing but the order of addition can differ."""
    from emfed.core.sums import drive
    from emfed.fitting.following import follow

    rows = np.random.default_rng(0).permutation(np.concatenate(TABLES))
    found = []
    for tables in (TABLES, np.array_split(rows, 4)):
        held = HeldWorkers(as_workers(tables))
        program = follow(
            FitSettings(make_model("full")), 4, summary_shapes(make_model("full"), held.data)
        )
        sums = in_process.SimulatedSums(held, 1)
        found.append(drive(program, sums).final.estimate.point.objective)
    assert abs(found[0] - found[1]) < 1e-6


def test_a_given_start_is_where_the_fit_begins() -> None:
    start = fitted(make_model("full"), TABLES).result.params
    again = fitted(make_model("full"), TABLES, start=start)
    assert again.result.rounds <= 10
    untouched = fitted(make_model("full"), TABLES, start=start, rounds=0)
    assert untouched.result.rounds == 0
    assert np.allclose(untouched.result.params.means, start.means, atol=1e-3)


def test_a_limit_on_rounds_holds_and_is_named() -> None:
    fit = fitted(make_model("full"), TABLES, rounds=3)
    assert fit.result.rounds == 3
    assert fit.result.stopped == "rounds"
    assert not fit.result.converged
    assert "limit on rounds" in fit.shortfall


@pytest.mark.parametrize(
    ("limit", "name"), [({"epochs": 10.0}, "epochs"), ({"max_bytes": 9000}, "bytes")]
)
def test_other_limits_end_a_fit(limit: dict[str, Any], name: str) -> None:
    result = fitted(make_model("full"), TABLES, tol=0.0, **limit).result
    assert result.stopped == name


def test_the_mean_field_may_end_a_fit() -> None:
    result = fitted(make_model("full"), TABLES, field_tol=1e-4).result
    assert result.stopped == "tolerance"
    assert (result.records.column("squared_H")[-3:] <= 1e-4).sum() >= 2


def test_callbacks_see_every_round_and_end_the_fit() -> None:
    seen: list[int] = []

    def look(record: emfed.fitting.RoundRecord) -> bool:
        seen.append(record.round)
        return record.round == 4

    result = fitted(make_model("full"), TABLES, Watch((look,))).result
    assert seen == [1, 2, 3, 4]
    assert result.stopped == "callback"


def test_ctrl_c_keeps_what_was_reached() -> None:
    import signal

    def press(record: emfed.fitting.RoundRecord) -> None:
        if record.round == 3:
            signal.raise_signal(signal.SIGINT)

    result = fitted(make_model("full"), TABLES, Watch((press,))).result
    assert result.stopped == "interrupted"
    assert result.rounds == 3
    assert np.isfinite(objective(result, TABLES))


def test_records_tell_what_was_gained_and_what_is_left() -> None:
    result = fitted(make_model("full"), TABLES, moves=0).result
    records = result.records
    assert records[0].round == 0
    assert records[0].bytes_up > 0
    assert records.column("round").tolist() == list(range(len(records)))
    assert np.nanmin(records.column("left")[-4:]) < 1e-6
    ledger = result.ledger.summary()
    up = ledger["round"]["up"]["payload"] + ledger["round"]["up"]["envelope"]
    assert up == sum(record.bytes_up for record in records if record.round)
    start = sum(
        ledger[kind]["up"][part]
        for kind in ("opening", "start")
        for part in ("payload", "envelope")
    )
    assert start == records[0].bytes_up


def test_a_monitor_tells_the_true_mean_field() -> None:
    monitor = emfed.fitting.Monitor(every=2)
    result = fitted(make_model("full"), TABLES, Watch(monitor=monitor), rounds=6).result
    exact = result.records.column("squared_h")
    assert np.isfinite(exact[2::2]).all()
    assert np.isnan(exact[1::2]).all()
    noisy = result.records.column("squared_H")[2::2]
    assert np.allclose(np.sqrt(exact[2::2]), np.sqrt(noisy), rtol=0.5)


def test_a_checkpoint_leads_to_the_same_end(tmp_path: Path) -> None:
    whole = fitted(make_model("full"), TABLES, n_components="2:4").result
    path = tmp_path / "fit.emfed"
    cut = fitted(make_model("full"), TABLES, Watch(checkpoint=path), n_components="2:4", rounds=7)
    assert cut.result.rounds == 7
    watch = Watch(checkpoint=path, resume=True)
    again = fitted(make_model("full"), TABLES, watch, n_components="2:4").result
    assert np.array_equal(again.statistics, whole.statistics)
    assert again.rounds == whole.rounds
    assert again.ledger.total("up") == whole.ledger.total("up")


def test_a_checkpoint_of_another_fit_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "fit.emfed"
    fitted(make_model("full"), TABLES, Watch(checkpoint=path), rounds=4)
    with pytest.raises(emfed.CheckpointError, match="seed"):
        fitted(make_model("full"), TABLES, Watch(checkpoint=path, resume=True), seed=1)
    moved = [TABLES[0] + 1e-3, *TABLES[1:]]
    with pytest.raises(emfed.CheckpointError, match="other data"):
        fitted(make_model("full"), moved, Watch(checkpoint=path, resume=True))


@pytest.mark.parametrize("criterion", ["bic", "aic", "icl"])
def test_a_range_is_as_good_as_its_numbers_alone(criterion: str) -> None:
    fit = fitted(make_model("full"), TABLES, n_components="1:5", criterion=criterion)
    assert fit.selection is not None
    best = {row["n_components"]: row[criterion] for row in fit.selection.table}
    for k in (2, 3):
        alone = fitted(make_model("full", k=k), TABLES)
        rows = sum(map(len, TABLES))
        gap = best[k] + 2 * rows * (alone.log_likelihood or 0.0)
        free = emfed.core.protocols.free_parameters(alone.result.model)
        if criterion != "icl":
            assert gap <= free * (2 if criterion == "aic" else np.log(rows)) + 2 * rows * 1e-2
    assert fit.selection.n_components == min(best, key=lambda k: best[k])


def test_held_out_values_choose_a_rank_which_then_sees_all() -> None:
    entry = REGISTRY["low rank, NaN"]
    fit = fitted(entry.make(), entry.tables, n_components=None)
    assert fit.result.converged
    chosen = fitted(
        lambda k: emfed.models.RowOwner(k, ridge=1.0),
        entry.tables,
        n_components="1:3",
        criterion="held-out",
    )
    assert chosen.selection is not None
    assert {row["n_components"] for row in chosen.selection.table} == {1, 2, 3}
    assert chosen.result.model.hidden == 0


def test_several_starts_are_no_worse_than_the_first() -> None:
    one = fitted(make_model("full", k=4), TABLES, moves=0)
    five = fitted(make_model("full", k=4), TABLES, moves=0, n_init=5)
    assert (five.log_likelihood or 0) >= (one.log_likelihood or 0) - 1e-3


def test_weights_of_rows_are_repetitions() -> None:
    times = [np.random.default_rng(j).integers(1, 4, len(t)) for j, t in enumerate(TABLES)]
    start = fitted(make_model("full"), TABLES).result.params
    weighted = fitted(make_model("full"), as_workers(TABLES, sample_weight=times), start=start)
    repeated = [np.repeat(t, n, axis=0) for t, n in zip(TABLES, times, strict=True)]
    plain = fitted(make_model("full"), repeated, start=start)
    assert abs((weighted.log_likelihood or 0) - (plain.log_likelihood or 0)) < 1e-5
    assert np.allclose(weighted.result.params.means, plain.result.params.means, atol=1e-2)


def test_workers_may_count_alike() -> None:
    start = fitted(make_model("full"), TABLES).result.params
    alike = fitted(make_model("full"), TABLES, weights="uniform", start=start).result
    old = emfed.fit(make_model("full"), TABLES, "em", weights="uniform", start=start, tol=1e-9)
    assert np.allclose(alike.params.means, old.params.means, atol=2e-2)
    assert np.allclose(alike.worker_weights, 0.25)


def test_rows_without_weight_do_not_count() -> None:
    weights = [np.ones(len(t)) for t in TABLES]
    odd = [np.vstack([t, [[50.0, 50.0]]]) for t in TABLES]
    heavy = [np.append(w, 0.0) for w in weights]
    start = fitted(make_model("full"), TABLES).result.params
    with_odd = fitted(make_model("full"), as_workers(odd, sample_weight=heavy), start=start)
    without = fitted(make_model("full"), TABLES, start=start)
    assert abs((with_odd.log_likelihood or 0) - (without.log_likelihood or 0)) < 1e-5


def test_standard_errors_are_those_of_all_rows_together() -> None:
    start = fitted(make_model("full"), TABLES, tol=1e-9).result.params
    options: dict[str, Any] = {"start": start, "errors": True, "tol": 1e-9}
    ours = fitted(make_model("full"), TABLES, **options).result
    old = emfed.fit(make_model("full"), np.concatenate(TABLES), **options)
    mine, theirs = (np.array(r.summary().table["std_err"], dtype=float) for r in (ours, old))
    assert np.allclose(mine, theirs, rtol=0.02, equal_nan=True)


def test_scores_are_those_of_each_worker() -> None:
    fit = fitted(make_model("full"), TABLES, scores=True)
    scores = fit.result.facts.by_worker.scores
    for j, rows in enumerate(TABLES):
        assert np.isclose(scores[j, 0], fit.result.log_likelihood(rows))
    total = fit.result.facts.log_likelihood
    assert abs(total - (fit.log_likelihood or 0)) < 1e-6


@pytest.mark.parametrize(
    ("tables", "match"),
    [
        ([np.zeros((0, 2)), np.ones((3, 2))], "no rows"),
        ([np.array([[1.0, np.nan], [2.0, 3.0]])], "NaN|missing"),
        ([np.array([[1.0, 2.0]])], "rows"),
    ],
)
def test_rows_that_cannot_be_used_are_refused_in_words(tables: Any, match: str) -> None:
    with pytest.raises(emfed.EmfedError, match=match):
        fitted(emfed.gaussian_mixture(2), tables)


def test_one_row_is_enough_for_one_component() -> None:
    result = fitted(emfed.gaussian_mixture(1, "diag"), [np.array([[1.0, 2.0]])]).result
    assert np.allclose(result.params.means, [[1.0, 2.0]])


def test_columns_of_one_value_and_with_holes_are_fitted() -> None:
    rng = np.random.default_rng(0)
    tables = [np.column_stack([t, np.full(len(t), 7.0)]) for t in TABLES]
    result = fitted(emfed.gaussian_mixture(3, "diag"), tables).result
    assert np.allclose(result.params.means[:, 2], 7.0)
    torn = [np.where(rng.random(t.shape) < 0.2, np.nan, t) for t in TABLES]
    assert fitted(emfed.gaussian_mixture(3, "full", missing=True), torn).result.converged


def test_masks_forbid_that_workers_are_heard_one_by_one() -> None:
    for option in ({"algorithm": "FedEM"}, {"algorithm": "em", "participation": 0.5}):
        with pytest.raises(emfed.SettingsError, match="one by one, which masks forbid"):
            fitted(make_model("full"), TABLES, masks=True, **option)
