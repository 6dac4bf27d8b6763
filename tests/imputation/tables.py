"""Small tables that several tests share."""

from __future__ import annotations

from typing import Any

import numpy as np

from emfed.imputation import Cells, FieldTable, Structure, simulate_table
from emfed.imputation.bins import Bins
from emfed.imputation.families import CellFamily, as_family
from emfed.imputation.sweeps import Solver
from emfed.imputation.table import Grid, IntakeReport, build_table


def small_table(
    family: str = "gaussian",
    *,
    sites: int = 12,
    months: int = 30,
    workers: int = 3,
    records: int = 200,
    seed: int = 0,
) -> FieldTable:
    """Random cells of a rank-1 table with effects, several observers in some of them."""
    rng = np.random.default_rng(seed)
    kind = as_family(family)
    row, column = rng.integers(0, sites, records), rng.integers(0, months, records)
    theta = (
        0.4
        + 0.5 * rng.normal(size=sites)[row]
        + 0.3 * np.sin(column)
        + rng.normal(size=sites)[row] * 0.6 * rng.normal(size=months)[column]
    )
    if family == "gaussian":
        values = theta + 0.3 * rng.normal(size=records)
    else:
        values = kind.forward(rng.poisson(np.exp(theta)).astype(float))
    return build_table(
        Grid([f"s{j}" for j in range(sites)], Bins("month", 2000 * 12, months), kind),
        [f"w{c}" for c in range(workers)],
        rng.integers(0, workers, records),
        row,
        column,
        np.ones(records),
        values,
        IntakeReport(records, records),
    )


def paper_size(records: int, seed: int, family: str = "log1p") -> tuple[FieldTable, Cells]:
    """A simulated table of the paper's size, and 10% of its cells held out."""
    return simulate_table(records, family=family, seed=seed).split(0.1, seed)


def error(params: Any, family: CellFamily, held: Cells) -> float:
    """Root mean deviance of held-out cells: for the Gaussian, their RMSE."""
    theta = params.theta(held.sites, held.times)
    total = family.deviance(theta, held.sums, held.weights).sum()
    return float(np.sqrt(2 * total / held.weights.sum()))


def pooled_error(table: FieldTable, structure: Structure, held: Cells) -> float:
    """The converged fit of everything in one place."""
    solver = Solver(table.family, structure, sweeps=500, tolerance=1e-9)
    return error(solver.fit(table.pooled), table.family, held)
