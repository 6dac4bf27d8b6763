"""Neighbouring sites tied: exact systems, a gain where a map is smooth, no loss elsewhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
import pytest

import emfed
from emfed.data import WorkerData
from emfed.imputation import FAMILIES, FieldTable, Search, Structure, impute
from emfed.imputation.bins import Bins
from emfed.imputation.families import as_family
from emfed.imputation.lowrank import Covariates
from emfed.imputation.space import neighbours, places_of
from emfed.imputation.sweeps import Solver
from emfed.imputation.table import Grid, IntakeReport, build_table
from emfed.models.sides import Side
from emfed.models.site_owner import COLUMNS
from emfed.network import StackedFederation
from tests.imputation.tables import small_table

FIXED: dict[str, Any] = {"rank": 0, "smoothing": 0.0, "seasonality": 0.0}


def sparse_table(smooth: bool, seed: int) -> tuple[FieldTable, Any, Any]:
    """Some four counts a site; on a smooth map, or with sites that know nothing of each other."""
    rng, sites, times, records = np.random.default_rng(seed), 60, 10, 240
    places = rng.random((sites, 2))
    far = np.linalg.norm(places[:, None] - places[None], axis=2)
    root = np.linalg.cholesky(np.exp(-((far / 0.25) ** 2) / 2) + 1e-6 * np.eye(sites))
    effect = 0.9 * (root if smooth else np.eye(sites)) @ rng.normal(size=sites)
    theta = 1.0 + effect[:, None] + 0.3 * np.sin(np.arange(times) / 2)
    row, column = rng.integers(0, sites, records), rng.integers(0, times, records)
    counts = rng.poisson(np.exp(theta[row, column])).astype(float)
    grid = Grid([f"s{j}" for j in range(sites)], Bins("year", 2000, times), as_family("poisson"))
    report, ones = IntakeReport(records, records), np.ones(records)
    worker = rng.integers(0, 3, records)
    table = build_table(grid, ["a", "b", "c"], worker, row, column, ones, counts, report)
    return table, places, np.exp(theta)


def fitted(table: FieldTable, graph: Any) -> tuple[Any, Structure]:
    known = Covariates(graph=graph)
    structure = Search(table.pooled, table.family, known).choose(**FIXED).structure
    params = Solver(table.family, structure, known, sweeps=60).fit(table.pooled)
    return np.exp(params.dense(np.arange(len(table.sites)))), structure


def deviance(truth: Any, mean: Any) -> float:
    return float(2 * np.mean(truth * np.log(truth / mean) - truth + mean))


@pytest.mark.parametrize("smooth", [True, False])
def test_ties_help_where_a_map_is_smooth_and_do_no_harm_elsewhere(smooth: bool) -> None:
    gains = []
    for seed in range(3):
        table, places, truth = sparse_table(smooth, seed)
        graph = neighbours(places)
        plain, without = fitted(table, None)
        tied, structure = fitted(table, graph)
        assert without.spatial == 0
        assert (structure.spatial > 0) == smooth
        gains.append(deviance(truth, tied) / deviance(truth, plain))
    assert np.mean(gains) < 0.75 if smooth else gains == [1, 1, 1]


def test_a_tied_system_is_solved_and_drawn_from_exactly() -> None:
    rng = np.random.default_rng(0)
    graph, width = neighbours(rng.random((25, 2))), 2
    tie, ridge = np.array([3.0, 0.5]), np.array([0.4, 1.0])
    side = Side.penalty(ridge, graph=graph, tie=tie)
    root = rng.normal(size=(25, width, width))
    information = root @ root.transpose(0, 2, 1)
    dense = np.kron(graph.laplacian.toarray(), np.diag(tie)) + np.kron(np.eye(25), np.diag(ridge))
    for j in range(25):
        dense[2 * j : 2 * j + 2, 2 * j : 2 * j + 2] += information[j]
    right = rng.normal(size=(25, width))
    found = side.solve(information, right)
    assert np.allclose(found.ravel(), np.linalg.solve(dense, right.ravel()), atol=1e-8)
    rows = rng.normal(size=(25, width))
    assert side.price(rows).sum() == pytest.approx(0.5 * float((rows * side.pull(rows)).sum()))
    size, zero = side.noises(25), np.zeros((25, width))
    draws = np.array([side.solve(information, zero, rng.normal(size=size)).ravel()
                      for _ in range(3000)])  # fmt: skip
    wanted = np.linalg.inv(dense)
    assert np.allclose(draws.T @ draws / 3000, wanted, atol=6 * wanted.max() / np.sqrt(3000))


@pytest.mark.parametrize("family", ["gaussian", "poisson"])
def test_a_sweep_of_tied_sites_never_raises_the_objective(family: str) -> None:
    cells = small_table(family, seed=3).pooled
    structure = Structure(2, 0.5, 0.1, 0.1, smoothing=1.0, spatial=4.0)
    known = Covariates(graph=neighbours(np.random.default_rng(0).random((12, 2))))
    solver = Solver(FAMILIES[family], structure, known)
    params = solver.start(cells)
    values = [solver.objective(cells, params)]
    for _ in range(15):
        params = solver.sweep(cells, params, structure)
        values.append(solver.objective(cells, params))
    assert np.all(np.diff(values) <= 1e-8 * np.abs(values[0]))


def test_workers_elsewhere_know_no_map_and_bounds_hold_the_truth() -> None:
    table, places, truth = sparse_table(True, 4)
    options: dict[str, Any] = {
        "structure": Structure(0, 1.0, 0.1, 0.5, spatial=3.0),
        "coordinates": places,
        "draws": 60,
    }
    here = impute(table, **options)
    workers = WorkerData(table.rows, table.offsets, list(table.workers), COLUMNS)
    there = impute(StackedFederation(workers), grid=table.grid, **options)
    assert there.ledger.summary() == here.ledger.summary()
    assert np.allclose(there.params.sites, here.params.sites, atol=1e-7)
    plain = impute(table, **{**options, "coordinates": None, "structure": Structure(0)})
    assert plain.ledger.summary() == here.ledger.summary()  # the server alone knows the map
    cells = np.indices(table.shape).reshape(2, -1)
    low, high = here.intervals(*cells, level=0.9, of="mean")
    inside = (low <= truth.ravel()) & (truth.ravel() <= high)
    assert 0.8 < inside.mean() < 0.99


def test_neighbours_are_the_nearest_on_a_map_and_on_the_globe() -> None:
    line = neighbours(np.column_stack([np.arange(12.0), np.zeros(12)]))
    assert {(0, 1), (5, 6), (10, 11)} <= set(zip(line.first, line.second, strict=True))
    across = neighbours(np.array([[179.9, 10.0], [-179.9, 10.0], [0.0, 10.0], [1.0, 10.0]]), True)
    weights = dict(zip(zip(across.first, across.second, strict=True), across.weights, strict=True))
    assert weights[0, 1] == 1  # neighbours across the date line
    coast = np.random.default_rng(0).random((30, 2))
    island = neighbours(np.vstack([coast, [20.0, 20.0]]))
    assert island.weights[island.second == 30].max() < 0.01
    assert len(neighbours(np.zeros((1, 2))).first) == 0


def test_what_coordinates_refuse() -> None:
    table = small_table(sites=3)
    frame = pl.DataFrame({"site": ["s2", "s0", "s1"], "lat": [50, 40, 41], "lon": [1, 2, 3]})
    places, degrees = places_of(frame, table.sites)
    assert degrees
    assert places.tolist() == [[2, 40], [3, 41], [1, 50]]
    for bad, text in (
        (frame.with_columns(lat=pl.lit(95.0)), "coordinates of site 's0' are no degrees"),
        (frame.with_columns(height=pl.lit(1)).drop("lat"), None),
        (frame.with_columns(height=pl.lit(1), x=pl.lit(2)).drop("lat"), "two columns of places"),
        (frame.head(2), "coordinates of sites: 1 are absent, first 's1'"),
    ):
        if text is None:
            assert not places_of(bad, table.sites)[1]
            continue
        with pytest.raises(emfed.DataError, match=text):
            places_of(bad, table.sites)
    with pytest.raises(emfed.SettingsError, match="give their coordinates"):
        impute(table, spatial=2.0)
    with pytest.raises(emfed.SettingsError, match="'paper' takes no coordinates"):
        impute(table, "paper", coordinates=frame)
    fit = impute(table, coordinates=frame, structure=Structure(0, spatial=1.0))
    with pytest.raises(emfed.SettingsError, match="covariates or coordinates cannot be carried"):
        fit.transform(table)


def test_the_penalty_of_coefficients_is_chosen_by_held_out_error() -> None:
    """Many covariates that say nothing are held down, one that says much is not."""
    rng = np.random.default_rng(0)
    table, _, truth = sparse_table(False, 1)
    effect = np.log(truth).mean(axis=1)
    chosen = {}
    for name, values in (("noise", rng.normal(size=(60, 25))), ("told", effect)):
        known = table.grid.covariates(values, None)
        search = Search(table.pooled, table.family, known)
        structure = search.choose(**FIXED).structure
        chosen[name] = structure.covariate_penalty
        free = next(s for k, s in search.tried.items() if k.covariate_penalty < 0.01)
        assert search.score(structure) <= free
    assert chosen["noise"] >= 10
    assert chosen["told"] <= 1.5
    given = Search(table.pooled, table.family, table.grid.covariates(effect, None))
    assert given.choose(covariate_penalty=7.0, **FIXED).structure.covariate_penalty == 7.0
