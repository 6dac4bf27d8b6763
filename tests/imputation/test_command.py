"""``emfed impute``, as a shell sees it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import polars as pl
import pytest

import emfed
from tests.cli.test_main import emfed_command


@pytest.fixture
def counts(tmp_path: Path) -> Path:
    table = emfed.imputation.simulate_table(
        600, observers=30, sites=12, months=24, family="gaussian", seed=1
    )
    cells = table.pooled
    frame = pl.DataFrame(
        {
            "who": [f"o{k % 5}" for k in range(cells.size)],
            "site": [table.sites[j] for j in cells.sites],
            "date": [f"{table.bins.label(t)}-0{1 + k % 9}" for k, t in enumerate(cells.times)],
            "count": [max(0, round(s)) for s in cells.sums],
        }
    )
    path = tmp_path / "counts.csv"
    frame.write_csv(path)
    return path


def test_it_writes_a_trend_records_a_summary_and_the_filled_table(counts: Path) -> None:
    out, filled = counts.parent / "out", counts.parent / "filled.parquet"
    arguments = ["impute", str(counts), "--observer", "who", "--out", str(out)]
    done = emfed_command(
        *arguments, "--filled", str(filled), "--rank", "1", "--penalty", "2", "--draws", "20"
    )
    assert done.returncode == 0, done.stderr
    assert "kB up per worker" in done.stdout
    names = {p.name for p in out.iterdir()}
    assert names == {
        "trend.csv",
        "trend.parquet",
        "index.csv",
        "index.parquet",
        "index.png",
        "report.html",
        "records.csv",
        "records.parquet",
        "summary.json",
    }
    summary = json.loads((out / "summary.json").read_text())
    assert summary["rank"] == 1
    assert summary["workers"] == 5
    assert pl.read_parquet(filled).height == summary["sites"] * summary["times"]
    trend = pl.read_csv(out / "trend.csv")
    assert trend.columns == ["time", "estimate", "missing", "empty", "lower", "upper"]
    assert summary["slopes"][0]["stratum"] == "all"
    assert (out / "report.html").read_text().count("image/svg") >= 7
    assert trend.height == summary["times"]


def test_json_is_all_there_is_on_stdout_and_seeds_repeat(counts: Path) -> None:
    arguments = ["impute", str(counts), "--observer", "who", "--out", str(counts.parent / "o")]
    arguments += [
        "--rank",
        "0",
        "--draws",
        "20",
        "--json",
        "--seed",
        "3",
        "--groups",
        "3",
    ]
    first, second = (emfed_command(*arguments) for _ in range(2))
    assert json.loads(first.stdout) == json.loads(second.stdout)
    assert json.loads(first.stdout)["workers"] == 3


def test_errors_are_one_line_with_an_exit_code(counts: Path) -> None:
    lines = counts.read_text().splitlines()
    lines[4] = lines[4].rsplit(",", 1)[0] + ",-3"
    counts.write_text("\n".join(lines) + "\n")
    out = ["--out", str(counts.parent / "o"), "--observer", "who"]
    done = emfed_command("impute", str(counts), "--family", "poisson", *out)
    assert done.returncode == 1
    assert (
        "line 5, column 'count': '-3' is no whole number >= 0: mend it; --skip-bad leaves"
        in done.stderr
    )
    fine = emfed_command(
        "impute", str(counts), "--skip-bad", "--rank", "0", "--draws", "20", "--json", *out
    )
    assert json.loads(fine.stdout)["intake"]["bad"] == {"value": 1}
    for arguments, code, text in (
        ([str(counts), "--mode", "best", "--skip-bad"], 2, "mode must be one of"),
        ([str(counts), "--species", "Mallard"], 2, "--species goes with --ebird"),
        ([str(counts), "--skip-bad", "-p", "0.6"], 2, "its workers send their sums once"),
        ([str(counts), "--filled", "t.xls"], 2, "--filled must end in .csv or .parquet"),
        ([str(counts.parent / "no.csv")], 1, "there is no such file"),
    ):
        done = emfed_command("impute", *arguments, *out)
        assert done.returncode == code, done.stderr
        assert text in done.stderr


def test_errors_speak_of_options(counts: Path) -> None:
    for arguments, words in (
        (["--value", "birds"], "no column 'birds' of counts.*--value"),
        (["--bins", "decade"], "--bins must be one of"),
    ):
        done = emfed_command("impute", str(counts), "--observer", "who", *arguments)
        assert done.returncode != 0
        assert re.search(words, done.stderr), done.stderr
        assert "Columns(" not in done.stderr
    twice = counts.parent / "twice.csv"
    twice.write_text("observer;site;date;count\na;b;2001;3\na;b;2002;4\na;c;2002;4\n")
    done = emfed_command("impute", str(twice), "--out", str(counts.parent / "years"))
    assert "years alone" in done.stderr
    assert "--bins year" in done.stderr


def test_times_may_be_numbers_and_semicolons_part_columns(tmp_path: Path) -> None:
    rows = [f"s{k % 6};{1 + k % 8};{k % 5};{k % 3}" for k in range(60)]
    path = tmp_path / "index.csv"
    path.write_text("\n".join(["site;visit;count;who", *rows]) + "\n")
    columns = emfed.imputation.ColumnNames(date="visit", observer="who")
    table = emfed.imputation.read_records(
        path, columns, bins="index", family="poisson", duplicates="keep"
    )
    assert table.bins.labels() == [str(k) for k in range(1, 9)]
    assert table.shape == (6, 8)
    with pytest.raises(emfed.DataError, match="a whole number goes with bins='index'"):
        emfed.imputation.read_records(path, columns, family="poisson", duplicates="keep")


def test_coordinates_observer_effects_and_penalties_are_options(counts: Path) -> None:
    folder = counts.parent
    sites = pl.read_csv(counts)["site"].unique().sort()
    places = {"site": sites, "longitude": [k % 4 for k in range(12)], "latitude": range(12)}
    pl.DataFrame(places).write_csv(folder / "places.csv")
    pl.DataFrame({"site": sites, "height": range(12)}).write_csv(folder / "heights.csv")
    arguments = ["impute", str(counts), "--observer", "who", "--out", str(folder / "out")]
    arguments += ["--rank", "0", "--smoothing", "1", "--seasonality", "0", "--draws", "20"]
    arguments += ["--coordinates", str(folder / "places.csv"), "--spatial", "2"]
    arguments += ["--site-covariates", str(folder / "heights.csv"), "--covariate-penalty", "3"]
    done = emfed_command(*arguments, "--observer-effects", "--keep-duplicates")
    assert done.returncode == 0, done.stderr
    summary = json.loads((folder / "out/summary.json").read_text())
    assert summary["structure"]["spatial"] == 2
    assert summary["structure"]["covariate_penalty"] == 3
    assert summary["observers"]["spread"] >= 0
    assert "skill of observers" in done.stdout
    assert "Sites by their total" in (folder / "out/report.html").read_text()
    done = emfed_command("impute", str(counts), "--observer", "", "--observer-effects")
    assert done.returncode == 2
    assert "--observer-effects needs a column of observers" in done.stderr
