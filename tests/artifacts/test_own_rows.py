"""The report of one site's rows: what masks hide from others is known there, and right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

import emfed
from emfed.artifacts.own_rows import _page
from emfed.artifacts.page import render_page
from tests.artifacts.test_model_files import REGISTRY
from tests.artifacts.test_provenance import COLUMNS, ROWS, in_one_process, masked, tables


@pytest.mark.parametrize("name", ROWS)
def test_a_site_knows_of_itself_what_masks_hide(name: str) -> None:
    """It is what the site would have told without masks."""
    hidden, plain = masked("one process"), in_one_process(masks=False)
    own = hidden.own_rows(tables()[name])
    assert plain.facts is not None
    known = plain.facts.by_worker
    assert known is not None
    assert known.scores is not None
    place = list(ROWS).index(name)
    assert own.rows == known.rows[place]
    np.testing.assert_allclose(own.scores, known.scores[place], atol=2e-3)
    told, found = plain.validation, own.gains
    assert told is not None
    assert told.by_worker is not None
    assert found is not None
    gains = told.by_worker.gains[place]
    np.testing.assert_allclose(found.gains[0], gains, atol=0.1 + 0.3 * np.abs(gains).max())
    assert found.verdicts[0].split()[0] == told.by_worker.verdicts[place].split()[0]


def test_columns_are_beside_what_the_model_expects_of_these_shares() -> None:
    own = masked("one process").own_rows(tables()["anna"])
    assert [one.name for one in own.columns] == list(COLUMNS)
    for one, mean in zip(own.columns, tables()["anna"].mean(axis=0), strict=True):
        assert one.mean == pytest.approx(mean)
        assert abs(one.away) < 5 * one.error < 0.2
        assert one.spread == pytest.approx(1.0, abs=0.1)  # it has one of the components alone


def test_a_column_in_another_unit_is_far_from_what_is_expected() -> None:
    rng = np.random.default_rng(0)
    height, weight = rng.normal(170, 8, 900), rng.normal(75, 10, 900)
    rows = np.stack([height, weight], axis=1)
    result = emfed.fit(emfed.gaussian_mixture(1), [rows[:300], rows[300:600]], masks=True)
    right, wrong = result.own_rows(rows[600:]), result.own_rows(rows[600:] * [1.0, 1000.0])
    assert right.well_served
    assert not wrong.well_served
    away = [abs(one.away) / one.spread for one in wrong.columns]
    assert away[0] < 0.5 < 1000 < away[1]


@pytest.mark.parametrize("name", [*list(REGISTRY)[::4], "gaussian chain"])
def test_every_model_has_a_page_of_own_rows(name: str) -> None:
    entry = REGISTRY[name]
    result = emfed.fit(entry.make(), entry.tables, rounds=4)
    own = result.own_rows(entry.tables[0])
    assert "nan" not in str(own)
    assert str(own.rows) in render_page(_page(own, None))


def test_the_command_writes_a_page_and_says_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from emfed.cli.main import main

    masked("one process").save(tmp_path / "model.emfed")
    pl.DataFrame(tables()["cleo"], schema=COLUMNS).write_csv(tmp_path / "cleo.csv")
    command = ["report", str(tmp_path / "model.emfed"), str(tmp_path / "cleo.csv")]
    out = ["-o", str(tmp_path / "cleo.html")]
    said: list[Any] = []
    for more in ([], ["--json"]):
        with pytest.raises(SystemExit) as end:
            main([*command, *out, *more])
        assert end.value.code == 0
        said.append(capsys.readouterr().out)
    told = json.loads(said[1])
    assert told["rows"] == ROWS["cleo"]
    assert f"{told['log-likelihood_per_row']:.4f}" in said[0]
    assert "The rows" not in said[0]
    page = (tmp_path / "cleo.html").read_text()
    assert "in standard errors" in page
    assert f"{told['log-likelihood_per_row']:.4f}" in page
