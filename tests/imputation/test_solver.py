"""T(S): the low-rank fit of cell sums, against what it must be."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy.sparse import csr_array

import emfed
from emfed.imputation import FAMILIES, Structure
from emfed.imputation.sweeps import Solver, leading
from emfed.models.sides import FREE, line
from tests.imputation.tables import small_table

STRUCTURES = [
    Structure(0, 1.0, 0.5, 0.5),
    Structure(2, 1.0, 0.5, 0.5),
    Structure(2, 1.0, 0.5, 0.5, smoothing=3.0, seasonality=2.0),
    Structure(2, 1.5, effects=False),
]


@pytest.mark.parametrize("family", ["gaussian", "poisson", "bernoulli"])
@pytest.mark.parametrize("structure", STRUCTURES, ids=str)
def test_a_fit_is_a_stationary_point(family: str, structure: Structure) -> None:
    cells = small_table(family).pooled
    solver = Solver(FAMILIES[family], structure, sweeps=600, tolerance=1e-12)
    params = solver.fit(cells)
    value = solver.objective(cells, params)
    rng = np.random.default_rng(1)
    for _ in range(5):  # no direction goes down
        moved = [
            replace(
                params,
                offset=params.offset + step * a,
                sites=params.sites + step * b,
                times=params.times + step * c,
            )
            for a, b, c in [
                (
                    rng.normal(),
                    rng.normal(size=params.sites.shape),
                    rng.normal(size=params.times.shape),
                )
            ]
            for step in (1e-4, -1e-4)
        ]
        slope = (solver.objective(cells, moved[0]) - solver.objective(cells, moved[1])) / 2e-4
        assert abs(slope) < 2e-3 * (1 + abs(value))


@pytest.mark.parametrize("family", ["gaussian", "poisson", "bernoulli"])
def test_a_sweep_never_raises_the_objective(family: str) -> None:
    cells = small_table(family, seed=3).pooled
    structure = Structure(3, 0.3, 0.1, 0.1, smoothing=1.0)
    solver = Solver(FAMILIES[family], structure)
    params = solver.start(cells)
    values = [solver.objective(cells, params)]
    for _ in range(20):
        params = solver.sweep(cells, params, structure)
        values.append(solver.objective(cells, params))
    assert np.all(np.diff(values) <= 1e-9 * np.abs(values[0]))


def test_rank_zero_is_the_ridge_regression_on_sites_times_and_a_line() -> None:
    table = small_table()
    cells, (rows, columns) = table.pooled, table.shape
    structure = Structure(0, 1.0, 0.7, 0.2)
    params = Solver(table.family, structure, sweeps=5000, tolerance=1e-15).fit(cells)
    design = np.zeros((cells.size, 2 + rows + columns))
    design[:, 0] = 1
    design[:, -1] = line(columns)[cells.times]  # a slope of all times, all but free
    design[np.arange(cells.size), 1 + cells.sites] = 1
    design[np.arange(cells.size), 1 + rows + cells.times] = 1
    ridge = np.diag([0.0] + [0.7] * rows + [0.2] * columns + [FREE])
    normal = design.T @ (cells.weights[:, None] * design) + ridge
    exact = design @ np.linalg.solve(normal, design.T @ cells.sums)
    assert np.allclose(params.theta(cells.sites, cells.times), exact, atol=1e-6)


def test_smoothing_draws_neighbouring_times_together() -> None:
    table = small_table(months=40)
    rough, smooth = (
        Solver(table.family, Structure(0, smoothing=s), sweeps=200).fit(table.pooled)
        for s in (0.0, 100.0)
    )
    assert (
        np.abs(np.diff(smooth.times[:, 0])).sum() < 0.2 * np.abs(np.diff(rough.times[:, 0])).sum()
    )


def test_the_leading_factors_are_those_of_the_dense_matrix() -> None:
    rng = np.random.default_rng(0)
    dense = rng.normal(size=(30, 20)) * (rng.random((30, 20)) < 0.3)
    left, values, right = leading(csr_array(dense), 4, seed=0)
    u, s, v = np.linalg.svd(dense)
    assert np.allclose(values, s[:4])
    assert np.allclose((left * values) @ right.T, (u[:, :4] * s[:4]) @ v[:4])
    again = leading(csr_array(dense), 4, seed=0)
    assert np.array_equal(left, again[0])
    tall, sizes, _ = leading(csr_array(dense[:, :2]), 4, seed=0)  # more factors than columns
    assert tall.shape == (30, 4)
    assert np.all(sizes[2:] == 0)


def test_covariates_find_a_slope_that_effects_would_have_to_learn_site_by_site() -> None:
    rng = np.random.default_rng(2)
    table = small_table(sites=80, records=160, seed=5)
    altitude = rng.normal(size=80)
    lifted = replace(table, values=table.values + table.weights * 2.0 * altitude[table.site])
    covariates = lifted.grid.covariates(altitude, None)
    params = Solver(
        table.family, Structure(0, 1, 5.0, 5.0), covariates, sweeps=300, tolerance=1e-10
    ).fit(lifted.pooled)
    assert params.coefficients[0] / altitude.std() == pytest.approx(2.0, abs=0.25)
    with pytest.raises(emfed.DataError, match="expected 80 rows, one per site"):
        table.grid.covariates(np.ones(7), None)


def test_one_cell_and_one_row_and_all_zeros_can_be_fitted() -> None:
    for options in ({"records": 1}, {"sites": 1}, {"months": 1, "sites": 3}):
        table = small_table("poisson", **options)
        params = Solver(table.family, Structure(3, 1.0)).fit(table.pooled)
        assert np.isfinite(params.dense(np.arange(len(table.sites)))).all()
    table = small_table("poisson")
    zero = replace(table.pooled, sums=np.zeros(table.pooled.size))
    params = Solver(table.family, Structure(2, 1.0)).fit(zero)
    assert np.all(np.exp(params.dense(np.arange(12))) < 1e-3)


@pytest.mark.parametrize("mode", ["observed", "paper"])
def test_a_table_of_one_value_leaves_nothing_to_factor(mode: str) -> None:
    table = small_table()
    flat = replace(table, values=2.0 * table.weights)
    structure = Structure(2, 1.0, effects=mode == "observed")
    few = {"rounds": 3, "compressor": emfed.Identity()} if mode == "paper" else {}
    result = emfed.impute(flat, mode=mode, structure=structure, **few)
    assert np.isfinite(result.trend()["estimate"]).all()
    if mode != "paper":
        assert np.allclose(result.predict([0, 5], [0, 7]), 2.0)
    for part in leading(csr_array((5, 4)), 2, seed=0):
        assert not part.any()
