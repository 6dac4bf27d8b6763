"""A growth that all sites share: no penalty shrinks it, and no season is taken for it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from emfed.imputation import FAMILIES, Cells, Structure, impute
from emfed.imputation.bins import Bins, Unit
from emfed.imputation.index import slope_of
from emfed.imputation.sweeps import Solver
from emfed.imputation.table import Grid, IntakeReport, build_table
from emfed.models import SiteOwner
from emfed.models.owners import Loadings
from emfed.models.sides import Side, line

GROWTH = 0.02
PENALTIES = (
    {"time_penalty": 100.0},
    {"smoothing": 1000.0},
    {"smoothing": 100.0, "seasonality": 1000.0, "time_penalty": 5.0},
)


@pytest.mark.parametrize("family", ["gaussian", "poisson", "bernoulli", "negative-binomial"])
@pytest.mark.parametrize("rank", [0, 1])
def test_no_penalty_along_time_shrinks_a_growth_that_all_sites_share(
    family: str, rank: int
) -> None:
    rng, shape = np.random.default_rng(0), (12, 36)
    theta = 0.5 + 0.5 * rng.normal(size=12)[:, None] + GROWTH * np.arange(36)
    sites, times = np.nonzero(rng.random(shape) < 0.4)
    weights = np.full(len(sites), 3.0)
    sums = weights * FAMILIES[family].mean(theta[sites, times])
    cells = Cells(sites, times, weights, sums, shape)
    for penalties in PENALTIES:
        structure = Structure(rank, 30.0, site_penalty=1e-3, **penalties)
        params = Solver(FAMILIES[family], structure, sweeps=300, tolerance=1e-10).fit(cells)
        slope = np.polyfit(np.arange(36), params.dense(np.arange(12)).mean(axis=0), 1)[0]
        assert slope == pytest.approx(GROWTH, rel=0.03)


def test_the_maximum_of_site_owner_keeps_a_line_of_means() -> None:
    model = SiteOwner(24, 1, smoothing=1e4, seasonality=1e4)
    model = replace(model, samples=200, mass=np.full(24, 1 / 24))
    means = 0.3 + GROWTH * np.arange(24)
    truth = Loadings(np.stack([np.full(24, 0.5), means], axis=1), np.array([0.1]))
    found = model.maximize(model.statistics_of(truth)).loadings[:, 1]
    assert np.polyfit(np.arange(24), found, 1)[0] == pytest.approx(GROWTH, rel=0.01)


@pytest.mark.parametrize("lags", [(), ((1, 2.0), (3, np.array([0.5, 4.0])))])
def test_a_free_line_is_what_the_least_penalty_over_its_slope_is(lags: tuple) -> None:
    """Price, gradient, solution and draws against the dense matrices."""
    count, rng = 7, np.random.default_rng(1)
    tied = Side.penalty(np.array([0.7, 0.3]), lags, drift=1e-3)
    plain = replace(tied, drift=0.0)
    rows, x = rng.normal(size=(count, 2)), np.zeros((count, 2))
    x[:, 1] = line(count)
    slopes = np.linspace(-2, 2, 8001)
    least = min(plain.price(rows - d * x).sum() + 0.5e-3 * d * d for d in slopes)
    assert tied.price(rows).sum() == pytest.approx(least, abs=1e-5)
    units = np.eye(2 * count).reshape(-1, count, 2)
    penalty = np.stack([tied.pull(unit).ravel() for unit in units])
    assert 0.5 * rows.ravel() @ penalty @ rows.ravel() == pytest.approx(tied.price(rows).sum())
    information = rng.normal(size=(count, 2, 2))
    information = information @ information.transpose(0, 2, 1)
    dense = penalty.copy()
    for row in range(count):
        dense[2 * row : 2 * row + 2, 2 * row : 2 * row + 2] += information[row]
    solved = tied.solve(information, rows)
    assert np.allclose(dense @ solved.ravel(), rows.ravel(), atol=1e-6)
    draws = [tied.solve(information, 0 * rows, unit).ravel() for unit in np.eye(2 * count + 1)]
    assert np.allclose(
        dense @ np.stack(draws, axis=1) @ np.stack(draws), np.eye(2 * count), atol=1e-6
    )


@pytest.mark.parametrize(("unit", "per_year"), [("month", 12), ("week", 365.25 / 7)])
@pytest.mark.parametrize("years", [1.6, 2.5, 3.0, 4.3])
def test_a_season_is_not_taken_for_a_slope(unit: Unit, per_year: float, years: float) -> None:
    for first in (24_000, 24_005, 24_011):
        bins = Bins(unit, first, round(years * per_year))
        season = np.random.default_rng(first).normal(size=53)[bins.seasons()]
        totals = np.tile(season + np.log(1.1) * np.arange(bins.count) / per_year, (3, 1))
        used = np.arange(bins.count) % 7 != 3
        assert slope_of(bins, totals[0], totals, used)["slope"] == pytest.approx(1.1, rel=1e-9)
    short = Bins(unit, 24_000, 10)
    assert np.isnan(
        slope_of(short, np.zeros(10), np.zeros((3, 10)), np.ones(10, dtype=bool))["slope"]
    )


def test_three_years_of_months_with_a_season_show_a_growth_of_ten_percent() -> None:
    """30 sites x 36 months with 30% seen came out with 1 to 2% a year."""
    rng, shape, first = np.random.default_rng(2), (30, 36), 24_000
    months = np.arange(36)
    theta = 1.5 + 0.7 * rng.normal(size=30)[:, None] + np.log(1.1) * months / 12
    counts = rng.poisson(np.exp(theta + 0.8 * np.cos(2 * np.pi * months / 12))).astype(float)
    site, time = np.nonzero(rng.random(shape) < 0.3)
    grid = Grid([f"s{j}" for j in range(30)], Bins("month", first, 36), FAMILIES["poisson"])
    ones, told = np.ones(len(site)), IntakeReport(len(site), len(site))
    table = build_table(grid, ["a", "b"], site % 2, site, time, ones, counts[site, time], told)
    tied = Structure(0, 1.0, 2.0, 0.1, smoothing=10.0, seasonality=30.0)
    fitted = impute(table, structure=tied, draws=60)
    slope = fitted.index().slopes[0]
    assert abs(slope["slope"] - 1.1) < 0.04
    assert slope["class"].endswith("increase")
