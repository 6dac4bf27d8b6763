"""Estimates, choices, intervals, draws, trends, files, other sites and dates."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest

import emfed
from emfed.imputation import FAMILIES, Search, Structure, impute, read_records
from tests.imputation.tables import paper_size, pooled_error, small_table

SMOOTH = Structure(2, 0.9, 0.5, 0.5, smoothing=10.0, seasonality=30.0)


@pytest.fixture(scope="module")
def fitted() -> emfed.imputation.Imputation:
    table = emfed.imputation.simulate_table(4000, observers=200, sites=150, months=60, seed=2)
    return impute(table, structure=SMOOTH, draws=60)


def test_the_choice_finds_rank_where_there_is_some_and_none_where_there_is_none() -> None:
    rich = emfed.imputation.simulate_table(4000, observers=200, sites=150, months=60, seed=2).pooled
    choice = Search(rich, FAMILIES["gaussian"]).choose()
    assert choice.structure.rank >= 1
    rng = np.random.default_rng(0)
    means = rng.normal(size=150)[rich.sites] + 0.1 * rng.normal(size=60)[rich.times]
    noise = rng.normal(size=rich.size)
    plain = replace(rich, sums=rich.weights * means + np.sqrt(rich.weights) * noise)
    assert Search(plain, FAMILIES["gaussian"]).choose().structure.rank == 0
    assert {"rank", "penalty", "deviance"} <= set(choice.describe()[0])
    given = Search(rich, FAMILIES["gaussian"]).choose(rank=1, penalty=3.0).structure
    assert (given.rank, given.penalty) == (1, 3.0)


@pytest.mark.long
def test_the_chosen_structure_beats_the_additive_fit_at_the_paper_s_size() -> None:
    table, held = paper_size(12_185, 0)
    result = impute(table)
    additive = min(pooled_error(table, Structure(0, 1.0, e, e), held) for e in (0.1, 0.5, 2.0))
    assert result.score(held) < 0.95 * additive
    sent = impute(table, structure=Structure(0)).bytes_up
    assert result.bytes_up == sent  # cross-validation costs no bytes


def test_estimates_by_name_and_by_index(fitted: emfed.imputation.Imputation) -> None:
    names = fitted.predict(["site003", "site010"], ["1977-02", "1980-12"])
    assert np.array_equal(names, fitted.predict([3, 10], [1, 47]))
    assert np.all(names >= 0)
    with pytest.raises(emfed.DataError, match="no site 'pond'; the first is 'site000'"):
        fitted.predict(["pond"], [0])
    with pytest.raises(emfed.DataError, match=r"time indices must lie in 0..59"):
        fitted.predict([0], [60])


def test_the_trend_is_the_sum_of_the_dense_table(fitted: emfed.imputation.Imputation) -> None:
    trend = fitted.trend()
    rows, columns = np.indices((150, 60)).reshape(2, -1)
    dense = fitted.predict(rows, columns).reshape(150, 60)
    assert np.allclose(trend["estimate"], dense.sum(axis=0))
    seen = np.zeros((150, 60), dtype=bool)
    seen[fitted.cells.sites, fitted.cells.times] = True
    assert np.array_equal(trend["missing"], (~seen).sum(axis=0))
    inside = (trend["lower"] < trend["estimate"]) & (trend["estimate"] < trend["upper"])
    assert inside.all()
    medians = fitted.predict(rows, columns, "median").reshape(150, 60)
    assert medians.sum() < 0.95 * dense.sum()  # half of the records lie below, the mean does not


@pytest.mark.parametrize("family", ["log1p", "poisson", "bernoulli"])
def test_intervals_cover_and_draws_agree_with_them(family: str) -> None:
    table, held = emfed.imputation.simulate_table(
        6000, observers=300, sites=100, months=60, family=family, seed=4
    ).split(0.1, 4)
    scale = {"log1p": 1.0, "poisson": 8.0, "bernoulli": 0.3}[family]
    structure = Structure(2, 1.5 * scale, 0.5, 0.5, 5.0, 10.0)
    result = impute(table, structure=structure, draws=60)
    once = held.take(np.flatnonzero(held.weights == 1))
    value = once.sums if family != "log1p" else np.expm1(once.sums)
    low, high = result.intervals(once.sites, once.times, 0.9, of="record")
    covered = np.mean((low <= value + 1e-9) & (value <= high + 1e-9))
    assert covered > 0.85
    if family == "bernoulli":  # a record is 0 or 1: what has an interval is the rate
        low, high = result.intervals(once.sites, once.times, 0.9)
        assert 0 < np.median(high - low) < 0.9
    else:
        assert covered < 0.98  # bounds of counts are whole numbers
        drawn = result.draws(once.sites, once.times, count=60)
        bounds = np.quantile(drawn, [0.05, 0.95], axis=0)
        by_draws = np.mean((bounds[0] <= value) & (value <= bounds[1]))
        assert abs(by_draws - covered) < 0.07
    wide = result.intervals(once.sites, once.times, 0.99, of="record")
    assert np.mean(wide[1] - wide[0]) >= np.mean(high - low)


def test_draws_differ_and_are_seeded(fitted: emfed.imputation.Imputation) -> None:
    a = fitted.draws([0, 1, 2], [3, 4, 5], count=4)
    assert np.array_equal(a, fitted.draws([0, 1, 2], [3, 4, 5], count=4))
    assert a.std(axis=0).min() >= 0
    assert len(np.unique(a)) > 3
    assert np.array_equal(a, np.rint(a))  # counts


def test_the_filled_table_as_csv_and_parquet(
    fitted: emfed.imputation.Imputation, tmp_path: Path
) -> None:
    fitted.write(tmp_path / "t.csv", level=0.8)
    fitted.write(tmp_path / "t.parquet")
    csv, parquet = pl.read_csv(tmp_path / "t.csv"), pl.read_parquet(tmp_path / "t.parquet")
    assert csv.height == parquet.height == 150 * 60
    bounds = ["lower", "upper", "mean_lower", "mean_upper"]
    assert csv.columns == ["site", "time", "records", "observed", "estimate", *bounds]
    inside = csv.select((pl.col("mean_lower") < pl.col("estimate")).mean()).item()
    assert inside > 0.99
    assert np.allclose(csv["estimate"], parquet["estimate"])
    assert csv["observed"].null_count() == 150 * 60 - fitted.cells.size
    assert np.all(csv["lower"].to_numpy() <= csv["upper"].to_numpy())
    with pytest.raises(emfed.SettingsError, match="ends in .csv or .parquet"):
        fitted.write(tmp_path / "t.txt")


def test_new_sites_get_rows_from_their_own_records() -> None:
    whole = emfed.imputation.simulate_table(8000, observers=200, sites=120, months=60, seed=3)
    names = np.array(whole.sites)
    known = np.isin(whole.site, np.arange(40, 120))
    base = replace(whole.keep(known), sites=names[40:].tolist(), site=whole.keep(known).site - 40)
    result = impute(base, structure=SMOOTH)
    others = whole.keep(~known)  # the busiest sites, unknown to the fit
    kept, held = others.split(0.2, 1)
    carried = result.transform(kept)
    assert len(carried.table.sites) == 120
    place = {name: i for i, name in enumerate(carried.table.sites)}
    rows = np.array([place[names[j]] for j in held.sites])
    guess = carried.params.theta(rows, held.times)
    mean = held.sums / held.weights
    plain = np.sqrt(np.mean((mean - mean.mean()) ** 2))
    assert np.sqrt(np.mean((mean - guess) ** 2)) < 0.75 * plain
    before = result.params.theta(np.arange(80), np.zeros(80, dtype=np.int64))
    assert np.allclose(carried.params.theta(np.arange(80), np.zeros(80, dtype=np.int64)), before)


def test_new_dates_follow_the_season_or_are_refused() -> None:
    table = emfed.imputation.simulate_table(8000, observers=200, sites=60, months=72, seed=3)
    early = table.keep(table.time < 60)
    early = replace(early, bins=replace(table.bins, count=60))
    result = impute(early, structure=SMOOTH)
    later = result.transform(table)
    assert later.table.bins.count == 72
    new = table.keep(table.time >= 60).pooled
    guess = later.params.theta(new.sites, new.times)
    mean = new.sums / new.weights
    level = np.sqrt(np.mean((mean - mean.mean()) ** 2))
    assert np.sqrt(np.mean((mean - guess) ** 2)) < 0.85 * level
    stiff = impute(early, structure=Structure(1))
    with pytest.raises(emfed.SettingsError, match="need a fit with smoothing or seasonality"):
        stiff.transform(table)
    yearly = read_records(
        pl.DataFrame({"observer": ["a"], "site": ["b"], "date": ["2000"], "count": [1]}),
        bins="year",
        family="log1p",
    )
    with pytest.raises(emfed.DataError, match="one column a month, these records one a year"):
        result.transform(yearly)


def test_covariates_in_a_fit() -> None:
    table = small_table(sites=20, records=300)
    climate = pl.DataFrame({"site": [f"s{j}" for j in range(20)][::-1], "height": range(20)})
    month = np.cos(np.arange(30))
    result = impute(table, structure=Structure(1), site_covariates=climate, time_covariates=month)
    assert result.params.coefficients.shape == (2,)
    assert np.allclose(
        result.params.dense(np.arange(20))[3, 4], result.params.theta(np.array([3]), np.array([4]))
    )
    with pytest.raises(emfed.SettingsError, match="cannot be carried"):
        result.transform(table)
    for bad, text in (
        (climate.head(5), "15 are absent, first 's0'"),
        (climate.rename({"site": "place"}), "need a column 'site'"),
        (climate.with_columns(height=pl.lit("tall")), "must be numbers"),
        (np.full(20, np.nan), "covariates of site 's0' are not all finite"),
    ):
        with pytest.raises(emfed.DataError, match=text):
            impute(table, structure=Structure(1), site_covariates=bad)


def test_wood_thrush_is_ten_percent_better_than_additive(data_dir: Path) -> None:
    birds = read_records(
        data_dir / "bbs_wood_thrush.csv.gz",
        emfed.imputation.ColumnNames(date="year"),
        bins="year",
        groups=40,
        family="log1p",
    )
    table, held = birds.split(0.1, 0)
    result = impute(table, structure=Structure(6, 6.0, 0.1, 0.1, smoothing=30.0))
    additive = pooled_error(table, Structure(0, 1.0, 0.1, 0.1), held)
    assert result.score(held) < 0.9 * additive
    assert result.score(held) < 0.44


def test_transform_minds_the_family_and_says_what_it_leaves_out() -> None:
    table = small_table()
    result = impute(table, rank=1)
    with pytest.raises(emfed.DataError, match="with the family of the fit"):
        result.transform(small_table("poisson"))
    with pytest.warns(emfed.EmfedWarning, match="sites that the fit has records of were left out"):
        result.transform(table)


@pytest.mark.parametrize("family", ["poisson", "bernoulli"])
def test_draws_of_counts_stay_about_the_estimate(family: str) -> None:
    """Draws are made about a damped mode: trends lie within their bands."""
    table = small_table(family, workers=3, records=400)
    result = impute(table, structure=Structure(2, 1.0, 0.5, 0.5), draws=40)
    trend = result.trend()
    estimate, low, high = (np.asarray(trend[k]) for k in ("estimate", "lower", "upper"))
    assert np.mean((estimate < low) | (estimate > high)) < 0.2
    assert np.all(high < 100 * (1 + estimate))


def test_an_index_bears_times_at_which_nothing_was_counted() -> None:
    """It is 0 there, without doubt, where every site was seen; the base is a time with birds."""
    counts = np.array([[0, 4, 0, 5, 6], [0, 3, 0, 2, 7]])
    site, time = np.indices(counts.shape).reshape(2, -1)
    rows = {
        "observer": [f"o{k}" for k in site],
        "site": [f"s{k}" for k in site],
        "date": [str(2000 + k) for k in time],
        "count": counts.ravel(),
    }
    table = emfed.imputation.read_records(pl.DataFrame(rows), bins="year")
    result = emfed.impute(table, structure=Structure(0), draws=10)
    index = result.index()
    assert index.base == "2001"
    assert index["index"][[0, 2]].tolist() == index["upper"][[0, 2]].tolist() == [0.0, 0.0]
    assert index["index"][1] == pytest.approx(100)
    assert np.isfinite(index.slopes[0]["slope"])
    assert index.slopes[0]["error"] > 0.02  # records vary, though every site was seen
    with pytest.raises(emfed.DataError, match="total of 0 at 2000"):
        result.index(base="2000")


def test_one_site_has_no_factors() -> None:
    site, time = np.zeros(24, dtype=np.int64), np.arange(24)
    counts = np.random.default_rng(0).poisson(4.0, 24) * 1.0
    cells = emfed.imputation.Cells(site, time, np.ones(24), counts, (1, 24))
    assert Search(cells, FAMILIES["poisson"]).choose(seasons=False).structure.rank == 0
