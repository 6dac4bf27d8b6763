"""Files as people have them: quotes, marks, commas, holes, and errors that say where."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

import emfed
from emfed.cli.help import Options
from emfed.cli.intake import read_workers
from emfed.cli.tables import listed
from emfed.data import Schema, read
from emfed.data.files import open_cells, open_file
from tests.cli.shell import Shell


def test_quotes_marks_and_other_alphabets(tmp_path: Path) -> None:
    text = '\ufeff"Größe, cm",名前,"say ""hi"""\r\n"1.5",1e3, 2 \r\n-2,NA,\r\n'
    path = tmp_path / "odd.csv"
    path.write_bytes(text.encode())
    frame = open_file(path).frame
    assert frame.columns == ["Größe, cm", "名前", 'say "hi"']
    rows = read(path).rows
    np.testing.assert_array_equal(rows, [[1.5, 1000, 2], [-2, np.nan, np.nan]])
    assert listed('"Größe, cm", 名前') == ["Größe, cm", "名前"]
    (tmp_path / "odd.csv.gz").write_bytes(gzip.compress(text.encode()))
    assert open_file(tmp_path / "odd.csv.gz").frame.equals(frame)
    (tmp_path / "odd.tsv").write_text("a\tb\n1\t2\n")
    assert open_file(tmp_path / "odd.tsv").columns == ["a", "b"]


def test_numbers_are_not_guessed_from_the_first_rows(tmp_path: Path) -> None:
    path = tmp_path / "late.csv"
    path.write_text("a,b\n" + "1,2\n" * 5000 + "1.25,3\n")
    rows = read(path, Schema(["a"])).rows
    assert rows[-1, 0] == 1.25


@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e-300, -123456.789, 2**53 + 1, 5e-324])
def test_numbers_are_read_to_the_last_bit(value: float, tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text(f"a\n{value!r}\n")
    assert read(path).rows[0, 0] == float(value)


BAD: dict[str, tuple[str | bytes, str]] = {
    "empty": ("", "bad.csv: the file is empty: expected a header"),
    "header only": ("a,b\n", "no rows"),
    "semicolons": ("a;b\n1,5;2,5\n3,5;4,5\n", "parted by ';': say --separator ';' (and --decimal"),
    "bars": ("a|b\n1|2\n3|4\n", "parted by '|': say --separator '|'."),
    "tabs in a csv": ("a\tb\n1\t2\n3\t4\n", "parted by tab: say --separator tab."),
    "spaces": ("a b\n1 2\n3 4\n", "parted by space: say --separator space."),
    "decimal commas": (
        'a,b\n"1,5",2\n"-2,5",3\n',
        "has a decimal comma (2 cells): say --decimal , (or",
    ),
    "two of one name": ("a,b,a\n1,2,3\n4,5,6\n", "two columns called 'a'"),
    "two without a name": ("a,,\n1,2,3\n", "two columns without a name"),
    "words": ("a,b\n1,2\n3,four\n", "line 3, column 'b': 'four' is no number: write it as one"),
    "a long row": ("a,b\n1,2\n3,4,5\n6,7\n", "line 3: 3 cells, where the header has 2: quote"),
    "cut short": ("a,b,c\n1,2,3\n4,5", "line 3: 2 cells, where the header has 3: the file may be"),
    "a blank line between": ("a,b\n1,2\n\n3,4\n", "line 3: no cell"),
    "marks of two kinds": (
        'a,b\n"1,001.5",2\n',
        "'1,001.5' has marks between thousands: write 1001.5",
    ),
    "a space in a number": ("a,b\n1 001,2\n", "'1 001' has marks between thousands: write 1001"),
    "thousand and one": (
        'a,b\n"1,001",2\n',
        "'1,001' may be the number 1001 or 1.001: write 1001 if",
    ),
    "thousands": ('a,b\n"1,234,567",2\n', "write 1234567"),
    "dates": ("a,b\n2020-01-01,2\n", "such as days since a date"),
    "no header": ("1.5,2\n3,4\n5,6\n", "the first line holds numbers (1.5 ...)"),
    "no header, counts": ("3,0,12\n1,2,3\n", "put a line of names above the rows"),
    "a return within a line": ("a,b\rc,d\n1,2,3\n", "line 1: no readable row"),
    "a name without end": ("a," + "b" * 200_000 + "\n1,2\n", "line 1: no readable row"),
    "half a gzip": (gzip.compress(b"a,b\n1,2\n")[:12], "not a whole .gz file"),
    "latin-1": (
        "gr\xf6\xdfe,b\n1,2\n3,4\n".encode("latin-1"),
        "line 1: not UTF-8: save it as UTF-8",
    ),
    "utf-16": ("a,b\n1,2\n".encode("utf-16"), "is UTF-16: save it as UTF-8"),
    "binary": (bytes(range(256)) * 4, ""),
    "infinite": ("a,b\n1,2\ninf,3\n2,2\n", "inf"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_refused_in_one_line(name: str, emfed_shell: Shell) -> None:
    text, message = BAD[name]
    emfed_shell.write("bad.csv", text)
    code, out, err = emfed_shell("fit", "bad.csv", "-k", 1)
    assert code == 1, err
    assert message in err
    assert out == ""
    assert not (emfed_shell.folder / "model.emfed").exists()


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, unique=True))
def test_a_row_of_numbers_is_never_taken_for_names(row: list[float]) -> None:
    text = (",".join(map(repr, row)) + "\n") * 3
    with pytest.raises(emfed.DataError, match="line of names"):
        open_cells(text.encode(), "csv", "x.csv")


@pytest.mark.parametrize("names", ["0,1,2", "1990,1991,1995", "a,1.5,2", "5", "x"])
def test_years_and_places_may_be_names(names: str) -> None:
    row = ",".join("1" for _ in names.split(","))
    assert open_cells(f"{names}\n{row}\n".encode(), "csv", "x.csv").columns == names.split(",")


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_one_row_and_one_column(kind: str, emfed_shell: Shell) -> None:
    frame = pl.DataFrame({"a": [1.0], "b": [2.0]})
    if kind == "csv":
        frame.write_csv(emfed_shell.folder / "one.csv")
    else:
        frame.write_parquet(emfed_shell.folder / "one.parquet")
    code, _, err = emfed_shell("fit", f"one.{kind}", "-k", 2)
    assert code == 1
    assert "1 rows" in err
    assert emfed_shell("fit", f"one.{kind}", "-k", 1, "-q", "--report", "r.html")[0] in (0, 1, 3)


def test_a_table_without_rows_is_named(emfed_shell: Shell) -> None:
    nothing = pl.DataFrame({"site": [], "a": []}, schema={"site": pl.String, "a": pl.Float64})
    nothing.write_parquet(emfed_shell.folder / "none.parquet")
    code, _, err = emfed_shell("fit", "none.parquet", "-g", "site")
    assert code == 1
    assert "none.parquet has a header but no rows" in err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["fit", "nowhere.csv"], 1, "nowhere.csv: there is no such file"),
        (["fit", "nowhere.parquet"], 1, "nowhere.parquet"),
        (["fit", "wards.ods"], 1, "expected a .csv, .tsv, .xlsx or .parquet"),
        (["fit", "wards.csv"], 1, "line 2  hospital  'north' is no number (105 cells): choose"),
        (["fit", "wards.csv", "-g", "clinic"], 2, "no column 'clinic'"),
        (["fit", "wards.csv", "--columns", "age,weight"], 2, "no column 'weight'"),
        (["fit", "wards.csv", "--columns", "age,hospital", "-g", "hospital"], 2, "workers"),
        (["fit", "wards.csv", "-k", "0"], 2, "2:8"),
        (["fit", "wards.csv", "-k", "5:2"], 2, "2:8"),
        (["fit", "wards.csv", "-k", "many"], 2, "2:8"),
        (["fit", "wards.csv", "--model", "hmm"], 2, "--model: unknown 'hmm'"),
        (["fit", "wards.csv", "--algorithm", "sgd"], 2, "--algorithm must be one of"),
        (["fit", "wards.csv", "--compressor", "zip", "--algorithm", "FedEM"], 2, "zip"),
        (["fit", "wards.csv", "--compressor", "none", "--algorithm", "em"], 2, "goes with"),
        (["fit", "wards.csv", "--compressor", "none"], 2, "goes with --algorithm FedEM"),
        (
            ["fit", "wards.csv", "--batch-size", "9", "--algorithm", "em"],
            2,
            "--batch-size goes with",
        ),
        (["fit", "wards.csv", "--follow-em", "--algorithm", "FedEM"], 2, "--algorithm auto, not"),
        (
            ["fit", "wards.csv", "--target", "age"],
            2,
            "--target goes with --model regression-mixture",
        ),
        (
            ["fit", "wards.csv", "--factors", "2"],
            2,
            "--factors goes with --model factor-analysis or ppca",
        ),
        (["fit", "wards.csv", "--model", "ppca", "--covariance-type", "full"], 2, "not with ppca"),
        (["fit", "wards.csv", "--model", "factor-analysis", "--missing"], 2, "--missing goes with"),
        (
            ["fit", "wards.csv", "--types", "ward=categorical", "--covariance-type", "full"],
            2,
            "--types",
        ),
        (["fit", "wards.csv", "--types", "ward"], 2, "--types must be like"),
        (["fit", "wards.csv", "--types", "ward=word"], 2, "--types must be like"),
        (["fit", "wards.csv", "--types", "floor=poisson"], 2, "no column 'floor'"),
        (["fit", "wards.csv", "--model", "regression-mixture"], 2, "--target"),
        (["fit", "wards.csv", "-o", "-"], 2, "path of a file"),
        (["fit", "wards.csv", "-o", "no/where/m.emfed"], 2, "there is no folder"),
        (["fit", "wards.csv", "--report", "report.pdf"], 2, ".html"),
        (["fit", "wards.csv", "-p", "1.5"], 2, "participation"),
        (["fit"], 2, "DATA"),
        (["predict", "wards.csv", "wards.csv"], 1, "model file"),
        (["predict", "nowhere.emfed", "wards.csv"], 1, "there is no model file"),
        (["predict", "nowhere.emfed", "wards.csv", "--json"], 2, "--json takes stdout"),
        (["report", "nowhere.emfed", "-o", "r.txt"], 2, ".html"),
    ],
)
def test_wrong_usage_is_one_line(
    arguments: list[str], code: int, message: str, emfed_shell: Shell
) -> None:
    got, out, err = emfed_shell(*arguments)
    assert got == code, err
    assert message in err
    assert out == ""


def test_a_range_is_cut_to_what_the_rows_can_have(emfed_shell: Shell) -> None:
    emfed_shell.write("five.csv", "a\n1\n2\n4\n8\n9\n")
    code, out, err = emfed_shell("fit", "five.csv", "-k", "1:8", "--json")
    assert code == 0, err
    told = json.loads(out)
    assert [row["n_components"] for row in told["tried"]] == [1, 2, 3, 4, 5]
    assert told["remarks"][0].startswith("5 rows cannot have 6, 7, 8 components")


def options(groups: str | None = None) -> Options:
    return Options(groups=groups, columns=None, separator=None, decimal=".", encoding="utf-8")


def test_workers_keep_their_names_and_rows_without_one_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("site,a\n007,1\n7,2\nNA,3\n")
    intake = read_workers(options(groups="site"), [str(path)])
    assert sorted(intake.workers.names) == ["007", "7", "NA"]
    path.write_text("site,a\n007,1\n,2\n")
    with pytest.raises(emfed.DataError, match="line 3, column 'site': the row has no worker"):
        read_workers(options(groups="site"), [str(path)])


def test_families_of_columns(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("a,stays,days,w\n1,2,3,10\n2,1,2,9\n0,0,1,NA\n")
    intake = read_workers(options(), [str(path)], "stays=poisson:days,w=categorical")
    kinds: Any = intake.families
    assert list(kinds) == ["stays", "days", "w"]  # the others are Gaussian
    assert kinds["stays"] == emfed.models.Poisson(exposure="days")
    assert kinds["days"] == "exposure"
    assert kinds["w"] == emfed.models.Categorical(2)
    assert intake.categories == {"w": ["9", "10"]}  # numbers in their order


FORMS: dict[str, tuple[bytes, list[str]]] = {
    "blank lines at the end": (b"a,b\n1.5,2\n3,4\n\n\r\n\n", []),
    "lines of spaces at the end": (b"a,b\r\n1.5,2\r\n3,4 \r\n\r\n  \r\n ", []),
    "lines that end as on old Macs": (b"a,b\r1.5,2\r3,4\r", []),
    "semicolons and decimal commas": (
        b"a;b\n1,5;2\n3;4\n",
        ["--separator", ";", "--decimal", ","],
    ),
    "tabs": (b"a\tb\n1.5\t2\n3\t4\n", ["--separator", "tab"]),
    "latin-1": ("a,größe\n1.5,2\n3,4\n".encode("latin-1"), ["--encoding", "latin-1"]),
    "utf-16": ("a,b\n1.5,2\n3,4\n".encode("utf-16"), ["--encoding", "utf-16"]),
    "truth": (b"a,b\n1.5,2\n3,4\n", []),
}
ONE_COLUMN = ("mean height", "P(x|y)")
"""Names that hold what parts columns elsewhere."""


@pytest.mark.parametrize("name", ONE_COLUMN)
def test_one_column_may_have_any_name(name: str, emfed_shell: Shell) -> None:
    emfed_shell.write("one.csv", f"{name}\n1.5\n3\n4\n".encode())
    code, out, err = emfed_shell("fit", "one.csv", "-k", 1, "--json")
    assert code in (0, 3), err
    assert json.loads(out)["rows"] == 3


@pytest.mark.parametrize("name", FORMS)
def test_files_are_read_as_they_are_written(name: str, emfed_shell: Shell) -> None:
    content, options = FORMS[name]
    emfed_shell.write("odd.csv", content)
    code, out, err = emfed_shell("fit", "odd.csv", "-k", 1, "--json", *options)
    assert code in (0, 3), err
    means = emfed.load(emfed_shell.folder / "model.emfed").params.means
    np.testing.assert_allclose(means, [[2.25, 3.0]])
    assert json.loads(out)["rows"] == 2
    code, out, err = emfed_shell("predict", "model.emfed", "odd.csv", *options)
    assert (code, out.count("\n")) == (0, 3), err


def test_truth_in_words_is_a_number(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("a\nTRUE\nfalse\nNA\n")
    np.testing.assert_array_equal(read(path).rows[:, 0], [1, 0, np.nan])


def test_sheets_are_read_where_an_engine_is_installed(emfed_shell: Shell) -> None:
    pytest.importorskip("fastexcel")
    pytest.importorskip("xlsxwriter")
    frame = pl.DataFrame({"a": [1.5, 3.0], "b": [1 / 3, 4.0], "ward": ["icu", "er"]})
    frame.write_excel(emfed_shell.folder / "wards.xlsx")
    code, _, err = emfed_shell("fit", "wards.xlsx", "--columns", "a,b", "-k", 1, "-q")
    assert code in (0, 3), err
    means = emfed.load(emfed_shell.folder / "model.emfed").params.means
    np.testing.assert_allclose(means, [[2.25, (1 / 3 + 4) / 2]], rtol=1e-14)
    emfed_shell.write("none.xlsx", "a,b\n1,2\n")
    code, _, err = emfed_shell("fit", "none.xlsx")
    assert code == 1
    assert "not a readable Excel file" in err


def test_a_second_sheet_of_the_same_columns_is_not_passed_over(tmp_path: Path) -> None:
    pytest.importorskip("fastexcel")
    xlsxwriter = pytest.importorskip("xlsxwriter")
    with xlsxwriter.Workbook(tmp_path / "wards.xlsx") as book:
        for title, header in (("May", "a"), ("June", "a"), ("Notes", "what")):
            book.add_worksheet(title).write_column(0, 0, [header, 1])
    with pytest.raises(emfed.DataError, match="the sheets 'May', 'June' have the same columns"):
        read(tmp_path / "wards.xlsx")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--separator", "::"], "--separator must be one character"),
        (["--decimal", "x"], "--decimal must be . or ,"),
        (["--decimal", ",", "--separator", ","], "needs another --separator"),
        (["--encoding", "klingon"], "--encoding: 'klingon' is not known"),
    ],
)
def test_wrong_forms_are_refused(options: list[str], message: str, emfed_shell: Shell) -> None:
    code, _, err = emfed_shell("fit", "wards.csv", "-g", "hospital", *options)
    assert code == 2
    assert message in err


def test_a_value_that_a_family_cannot_give_is_named_by_its_line(emfed_shell: Shell) -> None:
    """Workers' rows lie in another order than the file's; messages speak of the file."""
    emfed_shell.write("x.csv", "site,n\nb,1\na,2\nb,3\na,-4\nb,5\n")
    code, _, err = emfed_shell("fit", "x.csv", "-g", "site", "--types", "n=poisson", "-k", 1)
    assert code == 1
    assert "worker 'a': line 5, column 'n' is -4.0" in err


FAULTY = 'a,b,ward,a\n1,2,icu,4\n3,four,er,4\n4,"1,5",er,4\n5,6\n7,8,home,9\n2,3,er,2\n'


def test_the_command_line_prints_the_report_and_gives_it_to_machines(emfed_shell: Shell) -> None:
    emfed_shell.write("bad.csv", FAULTY)
    code, out, err = emfed_shell("fit", "bad.csv", "--columns", "a,b", "-k", 1)
    assert (code, out) == (1, "")
    assert err.splitlines()[0] == "emfed: bad.csv: 4 faults"
    code, out, err = emfed_shell("fit", "bad.csv", "--columns", "a,b", "-k", 1, "--json")
    assert code == 1
    assert [fault["line"] for fault in json.loads(out)["faults"]] == [1, 3, 4, 5]
