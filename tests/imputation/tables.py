"""Small tables that several tests share."""

from __future__ import annotations

from typing import Any

import numpy as np

from emfed.algorithms import Everyone
from emfed.algorithms.cells import default_step
from emfed.core.protocols import WHOLE, Crowd, Federation, Participation
from emfed.data import WorkerData
from emfed.fitting.rounds import Run
from emfed.fitting.session import Session
from emfed.imputation import Cells, FieldTable, Structure, simulate_table
from emfed.imputation.bins import Bins
from emfed.imputation.cells import Observed
from emfed.imputation.families import CellFamily, as_family
from emfed.imputation.fit import QUANTISER_OF_CELLS
from emfed.imputation.sweeps import Solver
from emfed.imputation.table import Grid, IntakeReport, build_table
from emfed.models import CellSums
from emfed.models.site_owner import COLUMNS
from emfed.network.inprocess import StackedFederation


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


def opened(
    table: FieldTable, seed: int = 0, federation: Federation | None = None
) -> tuple[Session, Cells]:
    """The opening of a fit over cells, in this process if nothing else is said."""
    data = WorkerData(table.rows, table.offsets, list(table.workers), COLUMNS)
    there = StackedFederation(data) if federation is None else federation
    session = Session(CellSums(*table.shape), there, columns=COLUMNS, seed=seed)
    return session, table.pooled.with_sums(np.zeros(table.pooled.size))


def observed_run(
    table: FieldTable,
    solver: Solver | None = None,
    participation: Participation | None = None,
    *,
    seed: int = 0,
    federation: Federation | None = None,
    **options: Any,
) -> Run:
    """Rounds of mode ``observed``."""
    session, cells = opened(table, seed, federation)
    who = participation or Everyone()
    n = len(table.workers)
    crowd = Crowd(float(n), float(who.probabilities(np.arange(n), n).min()))
    settings: dict[str, Any] = {"compressor": QUANTISER_OF_CELLS, **options}
    step = default_step(settings["compressor"], np.diff(table.offsets), crowd)
    solver = solver or Solver(table.family, Structure(1))
    algorithm = Observed(**{"step_size": step, **settings}, solver=solver, cells=cells)
    return Run(session, WHOLE, algorithm, np.zeros(cells.size), participation=who)


def sums_of(run: Run) -> Any:
    """The cell sums as the server of `observed_run` knows them."""
    assert isinstance(run.algorithm, Observed)
    return run.algorithm.seen(run.state).sums
