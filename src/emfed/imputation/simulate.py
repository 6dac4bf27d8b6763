"""A table of the paper's size, drawn: birds of one species in a country, by site and month.

Visits are as uneven as real ones: few sites and observers make most records, and recent months
have more than early ones. Log-abundance is a site effect, a season, a trend, and site-specific
amplitudes of both: rank 2 beyond the additive part.
"""

from __future__ import annotations

import numpy as np

from emfed.core.errors import check_count
from emfed.core.protocols import FloatArray, IntArray
from emfed.core.streams import Purpose, check_seed, normal_row, normals, uniforms
from emfed.imputation.bins import Bins
from emfed.imputation.families import CellFamily, as_family
from emfed.imputation.lowrank import TableParameters, in_parts
from emfed.imputation.table import FieldTable, Grid, IntakeReport, build_table

PAPER = {"observers": 2465, "sites": 9721, "months": 525}
"""The table of the paper (section 4); 525 months is a size, not a period."""
BUZZARD, MALLARD = 5980, 12185
"""Records of its two species."""
_FIRST = 1977 * 12
"""The first month, as a number of months."""
_NOISE = 0.5
"""The standard deviation of a record about the log-abundance of its cell."""


def simulated_truth(sites: int, months: int, seed: int) -> TableParameters:
    """The log-abundance that the records are drawn from."""
    z = normal_row(seed, 0, Purpose.SIMULATION, 3 * sites)
    site, season, trend = z.reshape(3, sites)
    month = np.arange(months)
    year = month / max(1, months - 1) - 0.5
    cycle = np.cos(2 * np.pi * (month % 12 - 1) / 12)
    rows = np.stack([0.9 * season, 1.3 * trend, 0.9 * site], axis=1)
    columns = np.stack([cycle, year, 0.4 * cycle + 0.8 * year], axis=1)
    return TableParameters(1.6, rows, columns, effects=True)


def simulated_totals(shape: tuple[int, int], seed: int) -> FloatArray:
    """The expected counts of `simulate_table` added over sites, by month."""
    truth, total = simulated_truth(*shape, seed), np.zeros(shape[1])
    for some in in_parts(np.arange(shape[0]), shape[1]):
        total += np.exp(truth.dense(some) + _NOISE**2 / 2).sum(axis=0)
    return total


def simulate_table(
    records: int = MALLARD,
    *,
    observers: int = PAPER["observers"],
    sites: int = PAPER["sites"],
    months: int = PAPER["months"],
    groups: int = 10,
    family: str | CellFamily = "log1p",
    seed: int = 0,
) -> FieldTable:
    """Simulate records of observers in random groups, which are the workers.

    Parameters
    ----------
    records : int
        The number of records.
    observers : int
        The number of observers.
    sites : int
        The number of sites.
    months : int
        The number of months.
    groups : int
        The number of groups of observers.
    family : str or CellFamily
        The family of a record.
    seed : int
        The seed.

    Returns
    -------
    FieldTable
        The cells of each group.

    Examples
    --------
    >>> from emfed.imputation import simulate_table
    >>> simulate_table(600, observers=40, sites=12, months=24, groups=4)
    <FieldTable of 12 sites x 24 months, 4 workers, 389 cells, 600 records>
    """
    family = as_family(family)
    for name, number in (
        ("records", records),
        ("observers", observers),
        ("sites", sites),
        ("months", months),
    ):
        check_count(name, number)
    check_seed(seed)
    truth = simulated_truth(sites, months, seed)
    u = uniforms(seed, 0, Purpose.SIMULATION, np.arange(1, 5), records)
    observer = _pick(_zipf(observers, 0.5), u[0])
    site = _pick(_zipf(sites, 1.0), u[1])
    month = _pick(0.3 + np.linspace(0, 1, months), u[2])
    noise = normals(seed, 0, Purpose.SIMULATION, np.arange(10, 11), records)[0]
    theta = truth.theta(site, month) + _NOISE * noise
    if family.name == "gaussian" and family.forward(np.ones(1))[0] == 1:
        values = theta
    else:
        values = family.forward(as_family("poisson").draw(theta, 0.0, u[3]))
    names = [f"site{index:0{len(str(sites))}d}" for index in range(sites)]
    people = [f"observer{index:0{len(str(observers))}d}" for index in range(observers)]
    table = build_table(
        Grid(names, Bins("month", _FIRST, months), family),
        people,
        observer,
        site,
        month,
        np.ones(records),
        values,
        IntakeReport(records, records),
    )
    return table.regroup(groups, seed)


def _zipf(count: int, power: float) -> FloatArray:
    return np.asarray((1.0 + np.arange(count)) ** -power)


def _pick(weights: FloatArray, uniform: FloatArray) -> IntArray:
    """Indices with probabilities in proportion to the weights."""
    running = np.cumsum(weights)
    index = np.searchsorted(running, uniform * running[-1], side="right")
    return np.minimum(index, len(weights) - 1).astype(np.int64)
