"""The reader: one report of all faults, whatever the source, and lines as an editor counts them."""

from __future__ import annotations

import gzip
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emfed.core.errors import SettingsError
from emfed.data import Column, DataTable, FaultReport, FaultyTable, Schema, TextForm, read

FAULTY = 'a,b,ward,a\n1,2,icu,4\n3,four,er,4\n4,"1,5",er,4\n5,6\n7,8,home,9\n2,3,er,2\n1,9,er,2\n'
WANTED = Schema(["a", "b", Column("ward", "category", ("icu", "er"))])
"""A table with five faults: two columns of one name, a word, a comma, a short row, a category."""


def faults_of(source: Any, schema: Schema | None = None) -> FaultReport:
    with pytest.raises(FaultyTable) as caught:
        read(source, schema)
    return caught.value.report


def test_all_faults_of_a_file_are_in_one_report() -> None:
    report = faults_of(FAULTY.encode(), WANTED)
    told = [(f.line, f.column, f.value) for f in report.faults]
    assert told == [
        (1, "a", None),
        (3, "b", "four"),
        (4, "b", "1,5"),
        (5, None, None),
        (6, "ward", "home"),
    ]
    assert report.total == 5
    assert all(fault.hint for fault in report.faults)
    assert len(str(report).splitlines()) == 7  # a line each, the total, the heads of columns
    assert json.loads(json.dumps(report.as_json()))["faults"][1]["value"] == "four"


@pytest.mark.parametrize(
    "written",
    [
        FAULTY.encode("utf-8-sig"),
        FAULTY.replace("\n", "\r\n").encode(),
        FAULTY.replace("\n", "\r").encode(),
        gzip.compress(FAULTY.encode()),
    ],
    ids=["mark", "Windows", "old Mac", "gz"],
)
def test_faults_have_the_same_lines_however_a_file_is_written(written: bytes) -> None:
    assert faults_of(written, WANTED) == faults_of(FAULTY.encode(), WANTED)


def test_faults_of_several_files_are_told_together(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x\n1\ntwo\n3\n4\n")
    (tmp_path / "b.csv").write_text("")
    (tmp_path / "c.csv").write_text("x\n1\n2\n3,4\n")
    report = faults_of([tmp_path / "a.csv", tmp_path / "c.csv"])
    assert [(Path(f.file).name, f.line) for f in report.faults] == [("a.csv", 3), ("c.csv", 4)]
    assert "2 tables: 2 faults" in str(report)
    assert faults_of([tmp_path / "a.csv", tmp_path / "b.csv"]).total == 1  # nothing to compare


def test_lines_are_those_of_an_editor_where_cells_have_several() -> None:
    text = 'a,note\n1,"two\nlines"\n2,x\nthree,y\n4,z\n5,z\n'
    assert [f.line for f in faults_of(text.encode(), Schema(["a"])).faults] == [5]


def test_a_column_of_words_is_one_fault_and_a_repeated_slip_another() -> None:
    rows = [f"w{k},{'<1' if k % 3 == 0 else k}" for k in range(30)]
    report = faults_of(("name,x\n" + "\n".join(rows)).encode())
    assert [(f.column, f.value, f.times) for f in report.faults] == [
        ("name", "w0", 30),
        ("x", "<1", 10),
    ]


def test_a_message_shows_ten_faults_and_the_number_of_all() -> None:
    report = faults_of(("x\n" + "1\n" * 50 + "".join(f"w{k}\n" for k in range(30))).encode())
    lines = str(report).splitlines()
    assert (report.total, len(report.faults)) == (30, 30)
    assert lines[0] == "the input: 30 faults"
    assert lines[-1].strip() == "and 20 faults more"
    assert len(lines) == 13


def test_a_report_survives_processes() -> None:
    report = faults_of(FAULTY.encode(), WANTED)
    again = pickle.loads(pickle.dumps(FaultyTable(report)))
    assert (again.report, str(again)) == (report, str(report))


@given(
    cells=st.lists(
        st.sampled_from(["1", "-2.5", "1e3", "NA", "", "x", "1,5", "2020-01-01", "inf", " 7 "]),
        min_size=1,
        max_size=30,
    )
)
def test_what_is_read_is_whole_or_every_bad_cell_is_named(cells: list[str]) -> None:
    text = "k;x\n" + "".join(f"{row};{cell}\n" for row, cell in enumerate(cells))
    schema = Schema(form=TextForm(";"))
    bad = [line for line, cell in enumerate(cells, 2) if cell in ("x", "1,5", "2020-01-01")]
    if bad:
        report = faults_of(text.encode(), schema)
        assert {f.column for f in report.faults} == {"x"}
        assert sum(f.times for f in report.faults) == len(bad)
        assert report.faults[0].line == bad[0]
        return
    expected = [np.nan if cell in ("NA", "") else float(cell) for cell in cells]
    np.testing.assert_array_equal(read(text.encode(), schema).rows[:, 1], expected)


@pytest.mark.parametrize(
    ("kind", "bad"),
    [("count", ["1.5", "-1", "inf", "x"]), ("amount", ["-1", "x"]), ("weight", ["0", "-1"])],
)
def test_kinds_of_numbers_have_limits(kind: Any, bad: list[str]) -> None:
    text = "n\n" + "3\n" * 9 + "".join(f"{cell}\n" for cell in bad)
    report = faults_of(text.encode(), Schema([Column("n", kind)]))
    assert [f.value for f in report.faults] == bad
    assert read(b"n\n3\nNA\n", Schema([Column("n", kind)])).rows[0, 0] == 3


def test_a_kind_that_is_none_is_refused() -> None:
    with pytest.raises(SettingsError, match="a column's kind must be one of number, count"):
        Column("n", "integer")  # type: ignore[arg-type]


def test_files_and_frames_and_arrays_become_the_same_workers(tmp_path: Path) -> None:
    frame = pl.DataFrame({"site": ["s", "n", "s"], "a": [1.0, 2.0, 3.0], "b": [4.0, 5.0, 6.0]})
    frame.write_csv(tmp_path / "t.csv")
    frame.write_csv(tmp_path / "t.tsv", separator="\t")
    frame.write_parquet(tmp_path / "t.parquet")
    by_site = Schema(groups="site")
    sources: list[Any] = [tmp_path / f"t.{kind}" for kind in ("csv", "tsv", "parquet")]
    sources += [
        frame,
        pd.DataFrame(frame.to_dict(as_series=False)),
        (tmp_path / "t.csv").read_bytes(),
    ]
    for source in sources:
        workers = read(source, by_site).workers
        assert list(workers.names or ()) == ["n", "s"]
        assert workers.columns == ("a", "b")
        np.testing.assert_array_equal(workers.worker(1), [[1, 4], [3, 6]])
    tables = {"n": frame.select("a", "b")[1:2], "s": frame.select("a", "b")[::2]}
    assert read(tables).workers.counts.tolist() == [1, 2]
    assert read(np.zeros((3, 2))).workers.counts.tolist() == [3]


def test_what_is_missing_can_be_said() -> None:
    found: DataTable = read(b"a\n1\n-99\n", Schema(missing=("-99",)))
    np.testing.assert_array_equal(found.rows, [[1], [np.nan]])


def test_names_of_columns_command_no_terminal() -> None:
    words = str(faults_of(b"\x1b[31mred,b\n1,2\nx,3\n4,5\n6,y\n7,8\n"))
    assert "?[31mred" in words
    assert "\x1b" not in words
