"""docs/what-the-server-learns.md names a test for what it claims, and no page claims more."""

from __future__ import annotations

import re
from pathlib import Path

import emfed
from emfed.cli.main import app
from emfed.network.owner_rules import rules_table

ROOT = Path(__file__).parents[2]


def test_every_test_that_a_page_names_exists() -> None:
    pages = [p.read_text(encoding="utf-8") for p in (ROOT / "docs").rglob("*.md")]
    named = {name for page in pages for name in re.findall(r"`(test_\w+)`", page)}
    there = "".join(p.read_text(encoding="utf-8") for p in (ROOT / "tests").rglob("test_*.py"))
    assert len(named) > 20
    assert {name for name in named if f"def {name}(" not in there} == set()


def test_the_page_has_every_rule_of_an_owner() -> None:
    """`python -c "from emfed.network.owner_rules import *; print(rules_table())"` makes it anew."""
    page = (ROOT / "docs" / "what-the-server-learns.md").read_text(encoding="utf-8")
    assert rules_table() in page


def test_no_page_says_never_rows_without_its_condition() -> None:
    pages = [p.read_text(encoding="utf-8") for p in (ROOT / "docs").glob("*.md")]
    for text in (*pages, str(emfed.__doc__), str(app.info.help)):
        for promise in ("never rows", "rows never leave", "Raw points never"):
            assert promise not in " ".join(text.split())
