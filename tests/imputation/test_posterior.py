"""Bounds that hold what they promise, forecasts that widen, times that nobody saw."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from benchmarks.field_bounds import covered, simulate
from scipy.stats import gamma

import emfed
from emfed.imputation import FAMILIES, Cells, Structure, impute
from emfed.imputation.families import CellMoments, NegativeBinomialCells, ZeroInflatedCells
from emfed.imputation.fit import fitted_spread
from emfed.imputation.lowrank import Covariates
from emfed.imputation.posterior import (
    Posterior,
    _log_determinant,
    _log_determinants,
)
from emfed.imputation.sweeps import Solver


@pytest.mark.parametrize("kind", ["gaussian", "overdispersed, fitted as poisson", "bernoulli"])
def test_bounds_hold_the_truth_as_often_as_they_say(kind: str) -> None:
    """Four tables; `python -m benchmarks field-bounds` has 500 of each family."""
    structure = Structure(1, 3.0, 0.5, 0.5, smoothing=5.0)
    options = {"structure": structure, "draws": 60, "shape": (24, 16)}
    runs = [covered(kind, seed, **options) for seed in range(4)]
    for name, slack in (("cells", 0.1), ("sites", 0.15), ("trend", 0.25)):
        half, _, most, _ = np.mean([run[name] for run in runs], axis=0)
        assert 0.5 - slack < half < 0.6 + slack  # rates of few records are wider than they need
        assert 0.9 - slack < most


def test_a_factor_that_records_cannot_show_is_not_taken_for_none() -> None:
    """Cells of no weight tell nothing: its size is then as unsure as the prior says.

    Where noise hid a factor, draws took it for none and bounds of cells were too narrow.
    """
    site, time = np.indices((8, 8)).reshape(2, -1)
    cells = Cells(site, time, np.full(64, 1e-6), np.zeros(64), (8, 8))
    fit, sizes = Solver(FAMILIES["poisson"], Structure(0, 1.0, 0.5, 0.5)), []
    for seed in range(3):
        drawn = Posterior(fit, cells, fit.fit(cells), seed, 80)
        sizes.append(np.sqrt((drawn.sites[:, :, 0] ** 2).mean(axis=1)))
    quartiles = np.quantile(sizes, (0.25, 0.5, 0.75))
    assert quartiles == pytest.approx(gamma.ppf((0.25, 0.5, 0.75), 2.0, scale=1 / 4), rel=0.3)


def test_bounds_of_counts_are_as_wide_whatever_their_size() -> None:
    """Millions of midges vary as tens of them do; bounds of the trend were a third as wide."""
    rng = np.random.default_rng(0)
    site, time = np.indices((12, 40)).reshape(2, -1)
    mean = 30 * np.exp(0.5 * rng.normal(size=12)[site] + 0.3 * np.sin(time / 3))
    varied, widths = mean * rng.gamma(3.0, 1 / 3, len(site)), []
    for times in (1, 10_000):
        cells = Cells(site, time, np.ones(480), np.rint(times * varied), (12, 40))
        unit = times * 10.0
        fit = Solver(FAMILIES["poisson"], Structure(0, unit, unit, unit, smoothing=20 * unit))
        drawn = Posterior(fit, cells, fit.fit(cells), 0, 60)
        low, high = drawn.bounds(drawn.totals(np.arange(12)), 0.9)
        widths.append(float(np.mean(np.log(high / low))))
    assert widths[1] == pytest.approx(widths[0], rel=0.25)


def test_determinants_of_priors_along_time_are_those_of_their_factors() -> None:
    strengths = np.exp(np.random.default_rng(1).normal(size=(5, 2)))
    here = _log_determinants(9, strengths, [1])
    assert here == pytest.approx([_log_determinant(9, each, [1]) for each in strengths])
    assert _log_determinants(9, strengths[:, :1], []) == pytest.approx(9 * np.log(strengths[:, 0]))


@pytest.mark.parametrize("family", ["log1p", "poisson"])
def test_no_cell_is_expected_to_hold_more_than_was_ever_counted(family: str) -> None:
    """A draw that runs away where nobody looked made millions of birds of log1p."""
    site, time = np.indices((40, 50)).reshape(2, -1)
    counts = 1.0 + (site * time) % 30
    sums = FAMILIES[family].forward(counts)
    cells = Cells(site, time, np.ones(2000), sums, (40, 50))
    fit = Solver(FAMILIES[family], Structure(0))
    drawn = Posterior(fit, cells, fit.fit(cells), 0, 4)
    drawn.times[:, 7] += 25.0
    assert drawn.largest == pytest.approx(30)
    assert drawn.dense_moments(np.arange(40)).value.max() <= drawn.largest
    totals = drawn.totals(np.arange(40))
    assert np.allclose(totals[:, 7], 40 * drawn.largest)
    assert totals[:, 8].max() < 40 * drawn.largest
    direct = FAMILIES[family].value(drawn.params(0).dense(np.arange(2)), float(drawn.spreads[0]))
    assert np.allclose(
        drawn.value(drawn.params(0).dense(np.arange(40)), 0)[:2],
        np.minimum(direct, 30),
        rtol=3e-4,
        atol=1e-3,
    )


@pytest.mark.parametrize("freedom", [7, 1000])
def test_bounds_of_cells_know_how_long_the_tails_of_draws_are(freedom: int) -> None:
    site, time = np.indices((6, 40)).reshape(2, -1)
    cells = Cells(site, time, np.ones(240), np.ones(240), (6, 40))
    fit, rng = Solver(FAMILIES["gaussian"], Structure(0)), np.random.default_rng(0)
    drawn = Posterior(fit, cells, fit.fit(cells), 0, 2)
    drawn.offsets, drawn.coefficients = np.zeros(3000), np.empty((3000, 0))
    drawn.sites = np.zeros((3000, 6, 1), dtype=np.float32)
    drawn.times = rng.standard_t(freedom, (3000, 40, 1)).astype(np.float32)
    for level in (0.5, 0.9, 0.99):
        within = np.abs(drawn.times / drawn.times.std(axis=0)) < drawn.reach(level)
        assert within.mean() == pytest.approx(level, abs=0.012)


@pytest.mark.parametrize("unit", [1e-3, 1e3])
def test_bounds_in_other_units_are_the_same_bounds(unit: float) -> None:
    site, time = np.indices((12, 10)).reshape(2, -1)
    values = np.random.default_rng(0).normal(size=120)
    fit = Solver(FAMILIES["gaussian"], Structure(0, 1.0, 0.5, 0.5))

    def errors(unit: float) -> Any:
        cells = Cells(site, time, np.ones(120), unit * values, (12, 10))
        drawn = Posterior(fit, cells, fit.fit(cells), 0, 20)
        return np.sqrt(drawn.moments(site, time).variance) / unit

    assert np.allclose(errors(unit), errors(1.0), rtol=1e-2)


def test_a_spread_of_counts_is_found_and_poisson_counts_have_none() -> None:
    rng = np.random.default_rng(0)
    site, time = np.indices((30, 20)).reshape(2, -1)
    mean = np.exp(1.5 + 0.5 * rng.normal(size=30))[site]
    fit = Solver(FAMILIES["poisson"], Structure(0))
    for extra, low, high in ((1.0, 0.0, 0.08), (rng.gamma(2.0, 0.5, len(mean)), 0.3, 0.7)):
        cells = Cells(site, time, np.ones(len(site)), rng.poisson(mean * extra) * 1.0, (30, 20))
        assert low <= Posterior(fit, cells, fit.fit(cells), 0, 40).spread <= high


def test_sure_zeros_are_found_and_do_not_lower_the_mean_of_the_others() -> None:
    rng = np.random.default_rng(3)
    site, time = np.indices((30, 30)).reshape(2, -1)
    counts = rng.poisson(4.0, 900) * (rng.random(900) > 0.3) * 1.0
    cells = Cells(site, time, np.ones(900), counts, (30, 30))
    start = Solver(ZeroInflatedCells(), Structure(0, 1.0, 5.0, 5.0))
    family = fitted_spread(start, cells)
    assert isinstance(family, ZeroInflatedCells)
    assert abs(family.share - 0.3) < 0.06
    assert family.base.spread < 0.1
    fit = Solver(family, start.structure)
    drawn = Posterior(fit, cells, fit.fit(cells), 0, 20).moments(site, time)
    assert abs(np.exp(drawn.theta).mean() - 4) < 0.3
    assert abs(drawn.value.mean() / counts.mean() - 1) < 0.06
    low, high = family.quantiles(drawn, family.base.spread, (0.05, 0.95))
    assert low.max() == 0
    assert 6 <= np.median(high) <= 9


@pytest.mark.parametrize("power", [0.0, 0.6, 1.0])
def test_the_negative_binomial_has_the_derivatives_of_its_loss(power: float) -> None:
    rng = np.random.default_rng(1)
    family, theta = NegativeBinomialCells(0.7, power), rng.normal(size=50)
    sums, weights = rng.integers(0, 9, 50).astype(float), rng.uniform(0.5, 3, 50)
    step = 1e-5
    up, here, down = (family.loss(theta + d, sums, weights) for d in (step, 0.0, -step))
    assert np.allclose(family.score(theta, sums, weights), (down - up) / (2 * step), atol=1e-6)
    curve = (up - 2 * here + down) / step**2
    assert np.allclose(family.gain(theta, sums, weights), curve, atol=1e-3)
    assert np.all(family.deviance(theta, sums, weights) >= 0)
    at = np.log(np.maximum(sums, 1e-9) / weights)
    assert np.allclose(family.deviance(at, sums, weights), 0, atol=1e-6)


@pytest.mark.parametrize("fall", [0.3, 1.0])
def test_the_score_of_counts_whose_spread_falls_is_the_derivative_of_their_loss(
    fall: float,
) -> None:
    rng = np.random.default_rng(1)
    family, theta = NegativeBinomialCells(0.7, 0.5, fall, 1.0), rng.normal(size=50)
    sums, weights = rng.integers(0, 9, 50).astype(float), rng.uniform(0.5, 3, 50)
    step = 1e-5
    up, down = (family.loss(theta + d, sums, weights) for d in (step, -step))
    assert np.allclose(family.score(theta, sums, weights), (down - up) / (2 * step), atol=1e-6)
    assert np.all(family.gain(theta, sums, weights) > 0)


def test_count_intervals_are_those_of_the_negative_binomial() -> None:
    from scipy.stats import nbinom

    rng = np.random.default_rng(2)
    mean, variance = np.exp(rng.normal(1, 1.5, 3000)), rng.uniform(0, 2, 3000)
    at = CellMoments(np.log(mean), variance, mean, variance * mean**2)
    low, high = FAMILIES["poisson"].quantiles(at, 0.5, (0.05, 0.95))
    size = 1 / (0.5 + 1.5 * variance)
    for found, tail in ((low, 0.05), (high, 0.95)):
        exact = nbinom.ppf(tail, size, size / (size + mean))
        assert np.all(np.abs(found - exact) <= 1 + 0.03 * exact)


def test_forecasts_widen_with_their_lead() -> None:
    table, _ = simulate("overdispersed", 1, (30, 24))
    early = table.keep(table.time < 16)
    early = replace(early, bins=replace(table.bins, count=16))
    options = {"structure": Structure(1, 3.0, 0.5, 0.5, smoothing=10.0), "draws": 80}
    later = impute(early, **options).transform(replace(table, bins=replace(table.bins, count=24)))
    trend = later.trend()
    width = np.log(trend["upper"] / trend["lower"])
    inside, near, far = (float(width[k : k + 3].mean()) for k in (9, 16, 21))
    assert far > 1.1 * near > 1.3 * inside


def test_times_without_a_record_are_marked_and_no_part_of_the_slope() -> None:
    table, _ = simulate("overdispersed", 2, (24, 20))
    gap = table.keep((table.time < 8) | (table.time > 11))
    fitted = impute(gap, structure=Structure(0, 1.0, 0.5, 0.5), draws=60)
    trend = fitted.trend()
    assert np.array_equal(np.flatnonzero(trend["empty"]), [8, 9, 10, 11])
    assert np.all(trend["upper"] < 30 * trend["estimate"].max())
    index = fitted.index()
    assert np.array_equal(np.flatnonzero(index["empty"]), [8, 9, 10, 11])
    assert {"slope", "error", "class"} <= set(index.slopes[0])


def test_ctrl_c_in_the_search_or_the_draws_keeps_what_is_there() -> None:
    table, _ = simulate("poisson", 3, (16, 12))
    seen = []

    def stop(stage: str, share: float) -> None:
        seen.append(stage)
        if len(seen) == 3:
            raise KeyboardInterrupt

    result = impute(table, progress=stop)
    assert result.stopped == "interrupted"
    assert set(seen) == {"choosing rank and penalties"}
    assert np.isfinite(result.trend()["estimate"]).all()
    whole = impute(table, structure=Structure(0), draws=40)
    seen.clear()
    cut = whole.sampled(stop)
    assert set(seen) == {"drawing for the bounds"}
    assert cut.stopped == "interrupted"
    assert "lower" not in cut.trend()


def test_totals_are_those_observed() -> None:
    """Sums of medians lay 6 to 50% below."""
    for kind in ("log1p", "overdispersed"):
        table, mean = simulate(kind, 5, (24, 16))
        result = impute(table, structure=Structure(1, 3.0, 0.5, 0.5), draws=60)
        total = result.trend()["estimate"].sum()
        assert abs(total / mean.sum() - 1) < 0.12


def test_the_index_is_100_at_its_base_and_has_words_for_its_slope() -> None:
    table, _ = simulate("overdispersed", 4, (24, 16))
    result = impute(table, structure=Structure(0, 1.0, 0.5, 0.5), draws=60)
    strata = {name: "north" if int(name[1:]) % 2 else "south" for name in table.sites}
    index = result.index("1995", strata=strata, least=2)
    frame = index.frame()
    assert set(frame["stratum"]) == {"all", "north", "south"}
    assert np.allclose(frame.filter(frame["time"] == "1995")["index"], 100)
    assert (frame["lower"] <= frame["upper"]).all()
    inner = frame.filter((frame["time"] == "2000") & (frame["stratum"] != "all"))["total"].sum()
    whole = frame.filter((frame["time"] == "2000") & (frame["stratum"] == "all"))["total"].item()
    assert inner == pytest.approx(whole)
    with pytest.raises(emfed.DataError, match="no time '1890'"):
        result.index("1890")


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [
        (1.06, 1.2, "strong increase"),
        (1.01, 1.2, "moderate increase"),
        (0.96, 1.04, "stable"),
        (0.9, 1.04, "uncertain"),
        (0.9, 0.99, "moderate decline"),
        (0.8, 0.94, "steep decline"),
    ],
)
def test_the_words_of_rtrim(low: float, high: float, words: str) -> None:
    from emfed.imputation.index import trend_class

    assert trend_class(low, high) == words


def test_coefficients_of_covariates_have_errors_that_fit_the_number_of_sites() -> None:
    rng = np.random.default_rng(6)
    height, sites, times = rng.normal(size=40), 40, 12
    height = (height - height.mean()) / height.std()
    theta = 1.0 + 0.6 * height + 0.5 * rng.normal(size=sites)
    site, time = np.indices((sites, times)).reshape(2, -1)
    counts = rng.poisson(np.exp(theta[site])) * 1.0
    cells = Cells(site, time, np.ones(len(site)), counts, (sites, times))
    known = Covariates(height[:, None], np.empty((times, 0)), ("site: height",))
    solver = Solver(FAMILIES["poisson"], Structure(0), known)
    drawn = Posterior(solver, cells, solver.fit(cells), 0, 120).coefficients[:, 0]
    # 40 sites that differ by 0.5 tell a slope to 0.5 / sqrt(40) = 0.08.
    assert 0.05 < drawn.std() < 0.14
    assert abs(drawn.mean() - 0.6) < 3 * drawn.std()


@pytest.mark.parametrize(("fall", "low", "high"), [(1.0, 0.75, 1.0), (0.0, 0.0, 0.2)])
def test_how_the_spread_of_counts_falls_is_found_and_totals_are_those_observed(
    fall: float, low: float, high: float
) -> None:
    """2 to 7,000 birds; with one spread for all, large flocks weigh as little as others."""
    rng = np.random.default_rng(1)
    site, time = np.indices((40, 20)).reshape(2, -1)
    mean = np.exp(np.linspace(0.7, 8.8, 40)[site] + 0.3 * rng.normal(size=20)[time])
    size = 0.7 * (mean / 100) ** fall
    counts = rng.poisson(mean * rng.gamma(size, 1 / size)) * 1.0
    cells = Cells(site, time, np.ones(len(site)), counts, (40, 20))
    fit = Solver(FAMILIES["poisson"], Structure(0, 1.0, 0.5, 0.5))
    drawn = Posterior(fit, cells, fit.fit(cells), 0, 40)
    assert low <= np.median(drawn.falls) <= high
    if fall:
        assert abs(drawn.moments(site, time).value.sum() / counts.sum() - 1) < 0.03
