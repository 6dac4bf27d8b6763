"""What follows from sums alone for whoever reads them: members, and rows that explain them.

Under masks these are sums over all sites, so a site with few rows is hidden among the others' rows;
without masks they are each site's own.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

import emfed

FloatArray = NDArray[np.float64]

# Membership by likelihood ratio. The analyst knows how people are distributed and asks of each of
# some people whether they are among the rows of one site (Homer et al. 2008). What moments tell of
# one row grows with the number of columns and falls with that of rows.

COLUMNS, ROWS, SITES = 40, 20, 10
RNG = np.random.default_rng(5)
PEOPLE = RNG.normal(size=(SITES * ROWS, COLUMNS))
STRANGERS = RNG.normal(size=(200, COLUMNS))


def advantage(table: FloatArray) -> float:
    """How often a member of the first site scores above a stranger: one half is a guess.

    The score is the log-likelihood ratio of the moments, with the person among the rows and with a
    stranger in its place; means and variances of n rows are about normal.
    """
    rows, mean, second = len(table), table.mean(axis=0), (table**2).mean(axis=0)

    def score(people: FloatArray) -> FloatArray:
        squares = people**2 - 1
        found = rows * (mean * people + (second - 1) * squares / 2).sum(axis=1)
        return np.asarray(found - (people**2 + squares**2 / 2).sum(axis=1) / 2)

    inside, outside = score(PEOPLE[:ROWS]), score(STRANGERS)
    return float((inside[:, None] > outside).mean())


def test_membership_is_told_by_a_sites_moments_and_hardly_by_those_of_all() -> None:
    alone, among_all = advantage(PEOPLE[:ROWS]), advantage(PEOPLE)
    assert alone > 0.9
    assert 0.5 < among_all < alone - 0.15  # a member of some site, and of a crowd: not nothing


# Reconstruction by optimisation: rows that have the statistics of each round.

PAIRS = np.random.default_rng(9).normal(size=(3, 12, 2)) * [2.0, 1.0] + [
    [[0, 0]],
    [[3, 1]],
    [[-2, 4]],
]


def rows_that_explain(table: FloatArray, starts: int) -> FloatArray:
    """The rows that ten sums over them lead to, in the units of the data."""
    model, count = _bound(table), len(table)
    asked = [model.start(seed) for seed in range(10)]
    answers = [model.expected_statistics(table[None], params)[0] for params in asked]
    rng, centre, scale = np.random.default_rng(1), table.mean(axis=0), table.std(axis=0)

    def each(flat: Any) -> Any:
        """What every row would say alone, sum by sum: ``(rows, all sums)``."""
        rows = flat.reshape(-1, 1, 2) * scale + centre
        return np.concatenate([model.expected_statistics(rows, p) for p in asked], axis=1)

    def wrong(flat: Any) -> Any:
        return each(flat).mean(axis=0) - np.concatenate(answers)

    def slope(flat: Any) -> Any:
        here, by = each(flat), []
        for step in ([1e-7, 0.0], [0.0, 1e-7]):
            by.append((each((flat.reshape(-1, 2) + step).ravel()) - here) / (1e-7 * count))
        return np.stack(by, axis=1).reshape(2 * count, -1).T

    best = min(
        (
            least_squares(wrong, rng.normal(size=2 * count), slope, max_nfev=80)
            for _ in range(starts)
        ),
        key=lambda found: float(found.cost),
    )
    return np.asarray(best.x.reshape(-1, 2) * scale + centre)


def _bound(table: FloatArray) -> Any:
    model: Any = emfed.gaussian_mixture(3, "diag")
    summary = {name: values[:1] for name, values in model.summary(table[None]).items()}
    return model.bind(summary, np.array([len(table)]), np.ones(1))


def recovered(found: FloatArray) -> int:
    """Rows of the first site that are among those that were found."""
    apart = np.abs(found[:, None] - PAIRS[0]).max(axis=-1)
    return int((apart.min(axis=0) < 1e-3).sum())


def test_rows_that_explain_a_sites_sums_are_its_rows_and_those_of_all_are_not() -> None:
    """`spare_rows` refuses the first: 15 statistics of 12 rows."""
    assert recovered(rows_that_explain(PAIRS[0], 4)) >= 10
    assert recovered(rows_that_explain(PAIRS.reshape(-1, 2), 1)) <= 2
