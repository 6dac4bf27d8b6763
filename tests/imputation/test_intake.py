"""Long tables in: what is read, what is refused, and in which words."""

from __future__ import annotations

import gzip
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pytest

import emfed
from emfed.imputation import ColumnNames, FieldTable, read_records


def rows(**changes: Any) -> dict[str, list[Any]]:
    table: dict[str, list[Any]] = {
        "observer": ["ann", "bob", "ann", "cid", "bob"],
        "site": ["pond", "pond", "wood", "wood", "hill"],
        "date": ["2004-05-01", "2004-05-20", "2004-06-02", "2004-07-07", "2005-01-31"],
        "count": [3, 5, 0, 2, 7],
    }
    return table | changes


def frame(**changes: Any) -> pl.DataFrame:
    return pl.DataFrame(rows(**changes), strict=False)


def same(a: FieldTable, b: FieldTable) -> bool:
    return (
        list(a.sites) == list(b.sites)
        and list(a.workers) == list(b.workers)
        and a.bins == b.bins
        and np.array_equal(a.keys, b.keys)
        and np.allclose(a.values, b.values)
        and np.array_equal(a.weights, b.weights)
    )


def test_the_same_table_from_every_source(tmp_path: Path) -> None:
    data = frame()
    data.write_csv(tmp_path / "t.csv")
    data.write_csv(tmp_path / "t.tsv", separator="\t")
    data.write_parquet(tmp_path / "t.parquet")
    with gzip.open(tmp_path / "z.csv.gz", "wb") as file:
        file.write(data.write_csv().encode())
    first = read_records(data)
    assert first.shape == (3, 9)
    assert list(first.sites) == ["hill", "pond", "wood"]
    assert first.bins.labels()[0] == "2004-05"
    sources = [data.lazy(), pd.DataFrame(rows())]
    sources += [tmp_path / n for n in ("t.csv", "t.tsv", "t.parquet", "z.csv.gz")]
    for source in sources:
        assert same(first, read_records(source)), source


def test_cells_hold_counts_and_sums_in_the_family_s_scale() -> None:
    for family, scale in (("log1p", np.log1p), ("poisson", float), ("bernoulli", np.sign)):
        table = read_records(frame(), family=family)
        cells = table.pooled
        assert cells.size == 4  # two observers saw the pond in May
        may = (cells.sites == 1) & (cells.times == 0)
        assert cells.weights[may] == 2
        assert cells.sums[may] == pytest.approx(scale(3) + scale(5))


def test_weeks_years_and_bounds() -> None:
    years = read_records(frame(), bins="year")
    assert years.bins.labels() == ["2004", "2005"]
    weeks = read_records(frame(), bins="week")
    assert weeks.bins.labels()[0] == "2004-04-26"  # the Monday before
    assert weeks.bins.count == 41
    some = read_records(frame(), since="2004-06-01", until="2004-12-31")
    assert some.bins.labels() == ["2004-06", "2004-07"]
    assert some.intake.rows == 2
    named = read_records(
        frame(date=[2004, 2004, 2004, 2004, 2005]).with_columns(month=pl.Series([5, 5, 6, 7, 1])),
        ColumnNames(date=("date", "month")),
        duplicates="keep",
    )
    assert named.bins == read_records(frame()).bins


def test_exposure_is_the_weight_of_poisson_counts() -> None:
    data = frame().with_columns(hours=pl.Series([1.0, 0.5, 2.0, 1.5, 1.0]))
    table = read_records(data, ColumnNames(exposure="hours"), family="poisson")
    assert table.pooled.weights.sum() == pytest.approx(6.0)
    with pytest.raises(emfed.SettingsError, match="exposure goes with families of counts"):
        read_records(data, ColumnNames(exposure="hours"), family="log1p")
    bad = data.with_columns(hours=pl.Series([1.0, 0.0, 2.0, 1.5, 1.0]))
    with pytest.raises(emfed.DataError, match="row 1, column 'hours': '0.0' is no number > 0"):
        read_records(bad, ColumnNames(exposure="hours"), family="poisson")


def test_missing_values_are_counted() -> None:
    table = read_records(frame(count=["3", "NA", "", None, "7"]))
    assert (table.intake.rows, table.intake.used, table.intake.missing) == (5, 2, 3)
    assert len(table.sites) == 3  # the wood was visited; it is asked about like the others
    with pytest.warns(emfed.EmfedWarning, match="1 of 3 sites have no record, the first 'wood'"):
        table.warn()


def test_a_malformed_date_on_line_10001_is_named(tmp_path: Path) -> None:
    dates = [f"2004-{1 + k % 12:02d}-{1 + k % 28:02d}" for k in range(12_000)]
    dates[9_999] = "2004-13-01"
    data = pl.DataFrame(
        {
            "observer": [f"o{k}" for k in range(12_000)],
            "site": [f"s{k % 50}" for k in range(12_000)],
            "date": dates,
            "count": [1] * 12_000,
        }
    )
    data.write_csv(tmp_path / "t.csv")
    with pytest.raises(emfed.DataError, match="line 10001, column 'date': '2004-13-01' is no date"):
        read_records(tmp_path / "t.csv")
    with pytest.warns(emfed.EmfedWarning, match="line 10001"):
        table = read_records(tmp_path / "t.csv", bad_rows="skip")
    assert table.intake.bad == {"date": 1}
    assert "'2004-13-01'" in table.intake.examples[0]
    assert table.intake.used == 11_999


@pytest.mark.parametrize(
    ("changes", "family", "message"),
    [
        (
            {"count": [3, -5, 0, 2, 7]},
            "poisson",
            "row 1, column 'count': '-5' is no whole number >= 0",
        ),
        (
            {"count": [3, 5.5, 0, 2, 7]},
            "poisson",
            "row 1, column 'count': '5.5' is no whole number >= 0",
        ),
        (
            {"count": [3, -5, 0, 2, 7]},
            "log1p",
            "row 1, column 'count': '-5' is no number >= 0, for log",
        ),
        ({"count": ["3", "many", "0", "2", "7"]}, "gaussian", "'many' is no number"),
        (
            {"site": ["pond", None, "a", "b", "c"]},
            "log1p",
            "row 1, column 'site': the site is missing",
        ),
        (
            {"observer": ["", "b", "a", "b", "c"]},
            "log1p",
            "row 0, column 'observer': the observer is missing",
        ),
        (
            {"date": ["yesterday"] * 5},
            "log1p",
            r"row 0, column 'date': 'yesterday' is no date \(5 cells\)",
        ),
    ],
)
def test_bad_rows_are_named(changes: dict[str, Any], family: str, message: str) -> None:
    with pytest.raises(emfed.DataError, match=message):
        read_records(frame(**changes), family=family)


def test_duplicated_keys_are_refused_or_kept() -> None:
    twice = frame(
        observer=["ann"] * 5, site=["pond"] * 5, date=["2004-05-01"] * 2 + ["2004-05-02"] * 3
    )
    with pytest.raises(
        emfed.DataError, match="observer 'ann' at site 'pond' on 2004-05-01 has 2 records"
    ):
        read_records(twice)
    assert read_records(twice, duplicates="keep").pooled.weights.tolist() == [5]


def test_an_observer_in_two_workers_is_refused() -> None:
    data = frame().with_columns(club=pl.Series(["x", "x", "y", "y", "x"]))
    with pytest.raises(emfed.DataError, match="observer 'ann' is in 2 workers \\('x', 'y'\\)"):
        read_records(data, ColumnNames(worker="club"))
    fine = read_records(data, ColumnNames(worker="club", observer=None))
    assert list(fine.workers) == ["x", "y"]


def test_one_worker_with_everything_and_empty_months_are_told() -> None:
    table = read_records(frame(observer=["ann"] * 5))
    with pytest.warns(emfed.EmfedWarning) as seen:
        table.warn()
    texts = [str(w.message) for w in seen]
    assert any("one worker, 'ann', holds every record" in text for text in texts)
    assert any("5 of 9 months have no record, the first '2004-08'" in text for text in texts)


def test_what_cannot_be_a_table(tmp_path: Path) -> None:
    with pytest.raises(emfed.DataError, match="no column 'date'; there are 'observer', 'site'"):
        read_records(frame().drop("date"))
    with pytest.raises(emfed.DataError, match="there is no such file"):
        read_records(tmp_path / "none.csv")
    with pytest.raises(emfed.DataError, match="expected a .csv, .tsv, .txt or .parquet"):
        read_records(tmp_path / "t.xlsx")
    with pytest.raises(emfed.DataError, match="expected a file, a polars or a pandas frame"):
        read_records([1, 2, 3])
    with pytest.raises(emfed.DataError, match="no record with a value"):
        read_records(frame(count=[None] * 5))
    for option, value in (("bins", "day"), ("bad_rows", "drop"), ("since", "May")):
        with pytest.raises(emfed.SettingsError, match=option):
            read_records(frame(), **{option: value})
    with pytest.raises(emfed.SettingsError, match="family must be one of"):
        read_records(frame(), family="normal")
    (tmp_path / "b.parquet").write_bytes(b"not parquet at all")
    with pytest.raises(emfed.DataError, match="cannot be read"):
        read_records(tmp_path / "b.parquet")


def test_groups_are_random_even_and_seeded() -> None:
    table = emfed.imputation.simulate_table(
        2000, observers=100, sites=50, months=24, groups=7, seed=1
    )
    assert len(table.workers) == 7
    again = emfed.imputation.simulate_table(
        2000, observers=100, sites=50, months=24, groups=7, seed=1
    )
    assert same(table, again)
    assert table.pooled.weights.sum() == 2000
    with pytest.raises(emfed.SettingsError, match="7 workers cannot make 8 groups"):
        table.regroup(8)


def test_a_split_shares_no_cell() -> None:
    table = emfed.imputation.simulate_table(2000, observers=100, sites=50, months=24, seed=1)
    rest, held = table.split(0.1, seed=3)
    assert held.size == round(0.1 * table.pooled.size)
    assert not np.isin(rest.keys, held.keys).any()
    assert rest.pooled.weights.sum() + held.weights.sum() == 2000
    with pytest.raises(emfed.SettingsError, match="share"):
        table.split(1.5)


def test_real_tables(data_dir: Path) -> None:
    birds = read_records(data_dir / "bbs_wood_thrush.csv.gz", ColumnNames(date="year"), bins="year")
    assert birds.shape == (3140, 52)
    assert len(birds.workers) == 6129
    assert birds.records == 75_949
    waders = read_records(
        data_dir / "oystercatcher_monthly.csv.gz",
        ColumnNames(date=("year", "month"), observer=None),
    )
    assert waders.shape == (138, 240)
    assert waders.intake.missing == 33_120 - 13_240
    with pytest.raises(emfed.DataError, match="line 48, column 'site_1deg': the site is missing"):
        read_records(data_dir / "nz_seabirds_at_sea.csv.gz", ColumnNames(site="site_1deg"))


def test_commas_of_semicolon_files_are_decimal_points(tmp_path: Path) -> None:
    rows = ["ann;pond, west;2004-05-01;3,0", "bob;pond, west;2004-06-01;2,50"]
    (tmp_path / "t.csv").write_text("\n".join(["observer;site;date;count", *rows]) + "\n")
    table = read_records(tmp_path / "t.csv", family="gaussian")
    assert table.values.tolist() == [3.0, 2.5]
    assert list(table.sites) == ["pond, west"]
    with pytest.raises(emfed.DataError, match="line 3, column 'count': '2.50' is no whole number"):
        read_records(tmp_path / "t.csv")


def test_a_reason_is_told_once_and_other_encodings_are_told_what_to_become(tmp_path: Path) -> None:
    with pytest.raises(
        emfed.DataError, match=r"'May' is no date \(5 cells\): write the year first"
    ):
        read_records(frame(date=["May"] * 5))
    text = "observer,site,date,count\nann,Zürich,2004-05-01,3\n"
    (tmp_path / "t.csv").write_bytes(text.encode("latin-1"))
    with pytest.raises(emfed.DataError, match="save it as UTF-8"):
        read_records(tmp_path / "t.csv")


def test_counts_without_zeros_and_one_above_all_others_are_told() -> None:
    many = {
        "observer": ["ann", "bob"] * 15,
        "site": [f"s{k % 6}" for k in range(30)],
        "date": [str(2000 + k // 6) for k in range(30)],
    }
    for counts, words in (
        ([1 + k % 2 for k in range(30)], "15 cells hold a count of 1 and none a 0"),
        ([0, 10**6, *[3] * 28], "one cell, 's1' in 2000, holds 100% of all that was counted"),
    ):
        table = read_records(pl.DataFrame({**many, "count": counts}), bins="year")
        with pytest.warns(emfed.EmfedWarning, match=words):
            table.warn()


@pytest.mark.parametrize(
    ("counts", "family", "words"),
    [([0] * 5, "poisson", "every record is 0"), ([1] * 5, "bernoulli", "every record reports")],
)
def test_records_that_are_all_alike_are_refused(counts: list[int], family: str, words: str) -> None:
    table = read_records(frame(count=counts), family=family)
    with pytest.warns(emfed.EmfedWarning), pytest.raises(emfed.DataError, match=words):
        emfed.impute(table)


def test_records_of_any_effort_have_the_odds_of_central_effort() -> None:
    """Of one place and time, the odds of what records are worth are those at central effort."""
    effort = emfed.imputation.Effort(("minutes",), (0.7,), (0.1,), (1.0,))
    theta, reports = -0.8, np.array([1.0, 0.0])
    for minutes in (-2.0, 1.0, 4.0):
        odds = np.exp(theta + 0.7 * (minutes - 1.0))
        nowhere = np.zeros(2, dtype=np.int64)
        worth = effort.worth(np.full((2, 1), minutes), reports, nowhere, nowhere)
        assert np.isclose(odds * worth[0] / worth[1], np.exp(theta))
        if minutes == 1.0:
            assert np.allclose(worth, 1.0)


def longer_visits(seed: int = 0, records: int = 1500) -> pl.DataFrame:
    """Visits that grow from 20 to 60 minutes where the rate of a visit of given length is one."""
    rng = np.random.default_rng(seed)
    site, year = rng.integers(0, 20, records), rng.integers(0, 8, records)
    minutes = 20 * 3 ** (year / 7) * np.exp(0.5 * rng.normal(size=records))
    odds = np.exp(-1.0 + 0.6 * rng.normal(size=20))[site] * minutes / 35
    return pl.DataFrame(
        {
            "observer": [f"o{number % 12}" for number in range(records)],
            "site": [f"s{place}" for place in site],
            "date": [str(2000 + number) for number in year],
            "count": (rng.random(records) < odds / (1 + odds)).astype(int),
            "minutes": minutes,
        }
    )


def test_longer_visits_do_not_make_a_trend_of_reporting_rates() -> None:
    told: dict[str, Any] = {"family": "bernoulli", "bins": "year", "duplicates": "keep"}
    table = read_records(longer_visits(), ColumnNames(effort=("log(minutes)",)), **told)
    assert table.effort is not None
    minutes = table.effort.describe()[0]
    assert abs(minutes["coefficient"] - 1) < 3 * minutes["error"] < 0.5
    options: dict[str, Any] = {"structure": emfed.imputation.Structure(0), "draws": 20}
    flat, grown = (
        emfed.impute(one, **options).trend()
        for one in (table, read_records(longer_visits(), **told))
    )
    assert 0.75 < flat["estimate"][-1] / flat["estimate"][0] < 1.33
    assert grown["estimate"][-1] / grown["estimate"][0] > 1.4


def test_bounds_hold_the_doubt_of_effort() -> None:
    told: dict[str, Any] = {"family": "bernoulli", "bins": "year", "duplicates": "keep"}
    table = read_records(longer_visits(), ColumnNames(effort=("log(minutes)",)), **told)
    assert table.effort is not None
    sure = replace(table, effort=replace(table.effort, errors=(0.0,)))
    options: dict[str, Any] = {"structure": emfed.imputation.Structure(0), "draws": 200}
    errors = [
        np.log(trend["upper"] / trend["lower"])[[0, -1]]
        for trend in (emfed.impute(one, **options).trend() for one in (table, sure))
    ]
    assert (errors[0] > errors[1]).all()


def test_effort_needs_visits_with_and_without_the_species() -> None:
    some = longer_visits().with_columns(count=pl.lit(1))
    columns = ColumnNames(effort=("log(minutes)",))
    told: dict[str, Any] = {"bins": "year", "duplicates": "keep"}
    with pytest.raises(emfed.DataError, match="every record reports the species"):
        read_records(some, columns, family="bernoulli", **told)
    with pytest.raises(emfed.SettingsError, match="not with log1p"):
        read_records(some, columns, family="log1p", **told)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["Count", "site", "date", "observer"], "'Count' is there"),
        (["site", "date", "count"], r"use ColumnNames\(observer=None\)"),
        (["site", "2001", "2002"], "make it long first"),
        (["site", "date", "observer"], "presence only"),
    ],
)
def test_a_column_that_is_not_there_is_told_with_what_to_do(names: list[str], words: str) -> None:
    with pytest.raises(emfed.DataError, match=words):
        read_records(pl.DataFrame({name: ["1"] for name in names}))


def test_presences_alone_are_refused_before_a_round_whatever_messages_leave_of_them() -> None:
    told: dict[str, Any] = {"family": "bernoulli", "bins": "year", "duplicates": "keep"}
    table = read_records(longer_visits().filter(pl.col("count") > 0), **told)
    with pytest.raises(emfed.DataError, match="every record reports the species"):
        emfed.impute(table)


def test_a_day_before_its_month_is_no_date_and_an_effort_of_nothing_has_no_logarithm() -> None:
    frame = pl.DataFrame(
        {
            "observer": ["ann", "bob", "cid", "dan"],
            "site": ["pond", "pond", "wood", "wood"],
            "date": ["2024-05-01", "2024-06-20", "2024-05-02", "2024-06-07"],
            "count": [3, 5, 1, 2],
            "minutes": [30, 0, 60, None],
        }
    )
    table = read_records(frame, ColumnNames(effort=("log(minutes)",)))
    assert table.intake.used == 2
    assert table.intake.filtered == {"effort is missing, or 0 where its logarithm counts": 2}
    with pytest.raises(emfed.DataError, match="year first: 2004-07-31"):
        read_records(frame.with_columns(date=pl.lit("20.06.2024")))
