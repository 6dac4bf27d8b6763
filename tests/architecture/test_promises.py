"""Pages, help and templates promise what is true of the protocol, and point to its one page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from emfed.cli.federate import join, serve
from emfed.network.owner_rules import GONE, SiteRules

ROOT = Path(__file__).parents[2]
HOW = "what-the-server-learns.md"
POINT = [
    *("README.md", "SECURITY.md"),
    *(f"docs/{name}.md" for name in ("index", "privacy", "private-runs", "deployment", "protocol")),
    *(f"docs/{name}.md" for name in ("read-a-report", "between-machines", "platforms")),
    "docs/data-protection.md",
]
"""Pages that speak of masks between machines."""
TEXTS = [
    *ROOT.glob("*.md"),
    *(path for end in ("md", "svg") for path in (ROOT / "docs").rglob(f"*.{end}")),
    *(path for end in ("py", "toml", "service") for path in (ROOT / "examples").rglob(f"*.{end}")),
    *(path for end in ("py", "html", "toml") for path in (ROOT / "src").rglob(f"*.{end}")),
]
TOLD = ("CHANGELOG.md", HOW, "protocol.md", "rules.py")
"""Files that speak of release 0.1."""
OF_0_1 = re.compile(r"server that lie[sd]\b.{0,40}reads?\b|lying\*{0,2} server .{0,40}\breads?\b")
"""What a server of release 0.1 could do: now said of that release alone."""


def text_of(path: Path) -> str:
    return " ".join(path.read_text(encoding="utf-8").split())


@pytest.mark.parametrize("page", POINT)
def test_pages_on_masks_point_to_who_learns_what(page: str) -> None:
    assert HOW in text_of(ROOT / page)


def test_no_page_says_of_today_what_was_true_of_release_0_1() -> None:
    found = []
    for path in TEXTS:
        if (
            path.name in ("CHANGELOG.md", HOW, "protocol.md", "rules.py")
            or "decisions" in path.parts
        ):
            continue
        paragraphs = re.split(r"\n\s*\n", path.read_text(encoding="utf-8"))
        for paragraph in (" ".join(paragraph.split()) for paragraph in paragraphs):
            if OF_0_1.search(paragraph) and "0.1" not in paragraph:
                found.append(f"{path.relative_to(ROOT)}: {paragraph[:120]}")
    assert found == []


def test_the_first_screen_says_who_learns_what() -> None:
    screen = (ROOT / "docs" / HOW).read_text(encoding="utf-8")[:3000]
    for who in ("A relay", "curious or lying", "An analyst", "Another site", "A site that lies"):
        assert who in screen
    for who in ("eavesdropper", "model file", "The theorem"):
        assert who in screen


def test_help_of_server_and_site_points_to_it() -> None:
    for command in (join, serve):
        assert HOW in " ".join((command.__doc__ or "").split())


def test_what_rules_give_away_begins_with_what_is_left_under_all_of_them() -> None:
    for rules in (SiteRules(), SiteRules.trusting()):
        first = " ".join(rules.gives_away()[:3])
        assert "learns no number of a single site, whatever it does" in first
        assert "read single rows" in first
    assert "than epsilon 1 allows" in SiteRules(largest_epsilon=1.0).gives_away()[0]


def test_no_page_or_template_recommends_a_rule_that_is_gone() -> None:
    told = {"CHANGELOG.md", f"docs/{HOW}", "docs/protocol.md"}
    for path in TEXTS:
        name = str(path.relative_to(ROOT))
        if name not in told and not name.startswith(("src/", "docs/decisions/")):
            assert not [rule for rule in GONE if rule in text_of(path)], name
