"""``python -m paper ebird``: trends with LOESS, errors, and the printed algorithm beside them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import polars as pl
import pytest

import emfed
from paper import load_experiment, reproduce
from paper.ebird import smooth, whole_years
from paper.smoothing import loess
from paper.tables import TableSettings, load, run_table
from tests.imputation.test_ebird import line, write

SMALL = """
title = "Small"
about = "A small table."
shows = "Its trend."
seeds = 2

[settings]
records = 1500
observers = 60
sites = 60
months = 48

[runs."Mallard, simulated"]

[runs."Common Buzzard, simulated, as printed"]
mode = "paper"
rounds = 5
"""


def test_a_small_reproduction_leaves_trends_figures_and_a_report(tmp_path: Path) -> None:
    config = tmp_path / "small.toml"
    config.write_text(SMALL)
    result = reproduce(["ebird"], tmp_path / "out", config=config)
    out = tmp_path / "out"
    names = {path.name for path in out.iterdir()}
    assert {
        "ebird.csv",
        "ebird.parquet",
        "ebird-trends.csv",
        "ebird-mallard-simulated.png",
        "ebird-mallard-simulated.svg",
        "report.html",
        "summary.json",
    } <= names
    trends = pl.read_csv(out / "ebird-trends.csv")
    assert trends.height == 2 * 2 * 48  # two runs, two seeds
    columns = ["run", "seed", "time", "estimate", "missing", "lower", "upper", "truth", "empty"]
    assert trends.columns == columns
    mallard = trends.filter(pl.col("run") == "Mallard, simulated")
    assert (mallard["lower"] < mallard["upper"]).all()
    assert (mallard["truth"] > 0).all()
    measures = json.loads((out / "summary.json").read_text())["experiments"]["ebird"]["measures"]
    left = measures["Common Buzzard, simulated, as printed: error left of the start's"]
    assert all(0.99 < value <= 1.0001 for value in left)
    assert len(measures["Mallard, simulated: percent better than additive"]) == 2
    # Claims about runs that are not there are not judged.
    assert 0 < len(result.verdicts) < 11
    again = reproduce(["ebird"], out, config=config)  # from the files that are there
    assert [v.values for v in again.verdicts] == [v.values for v in result.verdicts]


def test_a_download_of_one_s_own(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = [
        line(
            f"S{k}",
            str(rng.poisson(4)),
            site=f"L{k % 7}",
            date=f"20{10 + k % 5}-{1 + k % 12:02d}-11",
            observer=f"obsr{k % 20}",
        )
        for k in range(300)
    ]
    file = write(tmp_path / "ebd.txt", rows)
    config = tmp_path / "mine.toml"
    config.write_text(
        'title = "Mine"\nabout = "My download."\nshows = "Its trend."\n'
        f'[runs."Mallard"]\ndata = "ebird"\nobservations = "{file}"\nspecies = "Mallard"\n'
        "groups = 4\n"
    )
    result = reproduce(["ebird"], tmp_path / "out", config=config)
    assert result.holds
    assert (tmp_path / "out" / "ebird-mallard.png").exists()


def test_runs_whose_data_are_not_here_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EMFED_DATA", str(tmp_path))
    assert not any("thrush" in run for run in load_experiment("ebird").runs)
    (tmp_path / "bbs_wood_thrush.csv.gz").touch()
    assert any("thrush" in run for run in load_experiment("ebird").runs)


def test_loess_keeps_a_parabola_and_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.linspace(1990, 2020, 200)
    y = (x - 2004) ** 2
    assert np.allclose(loess(x, y), y, atol=1e-2 * y.max())
    noisy = y + 20 * np.random.default_rng(0).normal(size=200)
    assert np.abs(loess(x, noisy) - y).mean() < 0.5 * np.abs(noisy - y).mean()
    monkeypatch.setitem(sys.modules, "skmisc.loess", None)
    with pytest.raises(emfed.DataError, match="pip install scikit-misc"):
        loess(x, y)


def test_years_are_marked_whole() -> None:
    assert whole_years(np.array([1995.0, 2014.9])) == [1995, 2000, 2005, 2010]
    assert whole_years(np.array([2010.0, 2014.9])) == [2010, 2011, 2012, 2013, 2014]


def test_unbiased_batches_move_the_fit_and_quick_species_are_two_tables() -> None:
    table = emfed.imputation.simulate_table(
        600, observers=30, sites=20, months=24, groups=3, family="gaussian", seed=0
    )
    options = {"mode": "paper", "rounds": 60, "batch_size": 20, "step_size": 0.05}
    start = float(np.sqrt((table.pooled.sums**2 / table.pooled.weights).sum() / 600))
    errors = {
        batch: emfed.impute(table, batch=batch, **options).score(table.pooled)
        for batch in ("observations", "rescaled")
    }
    assert errors["rescaled"] < 0.9 * errors["observations"]
    assert errors["observations"] <= 1.001 * start
    runs = load_experiment("ebird", quick=True).runs
    for kind in ("", ", counts as printed", ", counts, unbiased batches"):
        species = [runs[f"{name}, simulated{kind}"] for name in ("Common Buzzard", "Mallard")]
        first, second = (load(settings, 0).pooled for settings in species)
        assert not np.array_equal(first.keys, second.keys)


def test_gaussian_runs_are_of_counts_as_the_paper_has_them() -> None:
    size = {"records": 600, "observers": 30, "sites": 20, "months": 24}
    plain, counts = (
        load(TableSettings(**size, family=family), 0) for family in ("gaussian", "poisson")
    )
    assert plain.family.name == "gaussian"
    assert np.array_equal(plain.pooled.sums, counts.pooled.sums)
    assert counts.pooled.sums.min() >= 0


def test_all_records_may_be_fitted_in_a_period_by_a_family(tmp_path: Path) -> None:
    settings = TableSettings(
        records=600, observers=30, sites=20, months=24, family="poisson", holdout=0
    )
    columns, trend = run_table(settings, 0, lambda share: None)
    assert np.isnan(columns["rmse"]).all()
    assert (trend["lower"] < trend["upper"]).all()
    days = ("2010-01-11", "2010-06-11", "2011-03-11", "2012-09-11")
    rows = [
        line(f"S{day}{k}", "3", site=f"L{k}", date=day, observer=f"obsr{k}")
        for day in days
        for k in range(4)
    ]
    settings = TableSettings(
        data="ebird",
        observations=str(write(tmp_path / "ebd.txt", rows)),
        since="2010-06-01",
        until="2011-12-31",
        family="gaussian",
        groups=2,
    )
    table = load(settings, 0)
    assert (table.family.name, table.records, table.bins.labels()[0]) == ("gaussian", 8, "2010-06")


def test_one_far_estimate_is_drawn_and_smoothed_as_logarithms() -> None:
    years, values = np.arange(60.0), np.full(60, 100.0)
    assert np.allclose(smooth(years, values, True), 100)
    values[30] = 1e6
    assert smooth(years, values, True).min() > 50
    assert smooth(years, values, True).max() < 1000 < smooth(years, values, False).max()
