"""docs/what-the-server-learns.md names a test for what it claims, and no page claims more."""

from __future__ import annotations

import re
from pathlib import Path

import emfed
from emfed.cli.main import app

ROOT = Path(__file__).parents[2]


def test_every_test_that_the_page_names_exists() -> None:
    page = (ROOT / "docs" / "what-the-server-learns.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(test_\w+)`", page))
    there = "".join(p.read_text(encoding="utf-8") for p in (ROOT / "tests").rglob("test_*.py"))
    assert len(named) > 20
    assert {name for name in named if f"def {name}(" not in there} == set()


def test_no_page_says_never_rows_without_its_condition() -> None:
    pages = [p.read_text(encoding="utf-8") for p in (ROOT / "docs").glob("*.md")]
    for text in (*pages, str(emfed.__doc__), str(app.info.help)):
        for promise in ("never rows", "rows never leave", "Raw points never"):
            assert promise not in " ".join(text.split())
