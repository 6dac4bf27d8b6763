"""What sites in memory, and sites that join from Python, may be given as rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest

import emfed
from emfed.network import LocalSites, join
from tests.helpers import make_data, make_model

COLUMNS = ["x", "y"]
TABLES = {
    name: pl.DataFrame(table, schema=COLUMNS)
    for name, table in zip("abc", make_data(6, sizes=(24, 18, 30), spread=8.0), strict=True)
}


def test_files_and_columns_in_any_order_give_what_arrays_give(tmp_path: Path) -> None:
    more = TABLES["a"].with_columns(name=0.5).select("name", "y", "x")
    more.write_parquet(tmp_path / "rows.parquet")
    rows = {**TABLES, "a": tmp_path / "rows.parquet", "b": TABLES["b"].select("y", "x")}
    with LocalSites(rows, columns=COLUMNS) as sites:
        there = emfed.fit(make_model("diag", k=2), sites)
    here = emfed.fit(make_model("diag", k=2), TABLES, seed=there.seed)
    np.testing.assert_allclose(there.params.means, here.params.means, atol=0.01)


def test_a_site_without_a_column_that_is_asked_for_hears_so_alone() -> None:
    rows = {**TABLES, "d": TABLES["a"].select("x")}
    with LocalSites(rows, columns=COLUMNS) as sites:
        with pytest.warns(match="d takes no part"):
            result = emfed.fit(make_model("diag", k=2), sites, rounds=3, tol=0)
        assert "'y'" in sites.ends["d"].words
    assert result.company is not None
    assert result.company.here == ("a", "b", "c")


def test_rows_that_change_cannot_be_committed_to(tmp_path: Path) -> None:
    stream = emfed.data.Stream(lambda round_: TABLES["b"])
    with pytest.raises(emfed.DataError, match="those of a stream are others each time"):
        LocalSites({**TABLES, "b": stream}, columns=COLUMNS)
    with pytest.raises(emfed.DataError, match="those of a stream are others each time"):
        join("127.0.0.1:1", stream, tmp_path / "b")
