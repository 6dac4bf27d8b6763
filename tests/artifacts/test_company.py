"""Whose model it is: who took part to the end, of those who began."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import emfed
from emfed.artifacts.company import Company
from emfed.artifacts.fits import fit_page
from tests.helpers import make_data, make_model

GONE = {"oslo": "did not answer any more"}


def left(**more: Any) -> Company:
    return Company(("bergen", "oslo", "tromso"), ("bergen", "tromso"), 440, 569, GONE, **more)


def test_all_who_stay_leave_no_doubt() -> None:
    whole = Company(("bergen", "oslo"), ("bergen", "oslo"), 529, 529)
    assert whole.share == 1.0
    assert whole.doubt == ""
    assert whole.words == "all 2 sites that began took part to the end, with 529 rows."


def test_what_left_is_counted_in_rows_and_named_with_its_reason() -> None:
    whose = left()
    assert whose.share == pytest.approx(440 / 569)
    assert whose.doubt == (
        "2 of the 3 sites that began took part to the end, with 440 of 569 rows (77%). oslo did "
        "not answer any more."
    )
    assert left(least_share=0.7).doubt == ""


def test_sites_count_where_rows_are_not_known_or_others_came() -> None:
    assert replace(left(), rows_began=None).share == pytest.approx(2 / 3)
    came = replace(left(), here=("bergen", "tromso", "alta"), rows=600)
    assert came.share == pytest.approx(2 / 3)
    assert "alta came later" in came.words


def test_model_file_card_and_report_carry_the_doubt(tmp_path: Path) -> None:
    found = emfed.fit(make_model("full"), make_data(0), masks=True, moves=0)
    assert found.facts is not None
    assert found.company is None
    result = replace(found, facts=replace(found.facts, company=left()))
    assert result.doubts == [left().doubt]
    result.save(tmp_path / "model.emfed")
    again = emfed.load(tmp_path / "model.emfed")
    assert again.company == left()
    assert again.card["doubts"] == [left().doubt]
    page = fit_page(again)
    assert page.warnings[0] == left().doubt
    box = next(box for box in page.highlights if box.name == "sites")
    assert box.note == "2 of 3 that began"
    assert box.good is False
    result.save(tmp_path / "model.emfed", names=False)
    unnamed = emfed.load(tmp_path / "model.emfed").company
    assert unnamed is not None
    assert "oslo" not in unnamed.words
    assert unnamed.share == left().share
