"""Pages, help and templates promise what is true: masks do not stop a server that lies."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from emfed.cli.federate import join, serve
from emfed.network import SiteRules

ROOT = Path(__file__).parents[2]
HOW = "what-the-server-learns.md"
WARN = [
    *("README.md", "SECURITY.md"),
    *(f"docs/{name}.md" for name in ("index", "privacy", "private-runs", "deployment", "protocol")),
    *(f"docs/{name}.md" for name in ("read-a-report", "between-machines", "platforms")),
]
"""Pages that speak of masks between machines: each warns and points to the attacks."""
TEXTS = [
    *ROOT.glob("*.md"),
    *(path for end in ("md", "svg") for path in (ROOT / "docs").rglob(f"*.{end}")),
    *(path for end in ("py", "toml", "service") for path in (ROOT / "examples").rglob(f"*.{end}")),
    *(path for end in ("py", "html", "toml") for path in (ROOT / "src").rglob(f"*.{end}")),
]
PROMISE = re.compile(
    r"(server|it) (then )?(learns?|learned|sees?|saw|reads?|knows)( only)? (the )?(sums?|totals?)\b"
    r"|nothing (of|about) (any )?(one|a single)\b( site| of them|\.)"
)
"""Sentences that used to promise too much. They hold of a server that follows the protocol."""
MEANT = re.compile("follows the protocol|curious|a server that lies")
GROUP_RULE = ["docs/protocol.md", "docs/data-protection.md", f"docs/{HOW}"]
"""Pages that may name `smallest_group`: they say to leave it out."""


def text_of(path: Path) -> str:
    return " ".join(path.read_text(encoding="utf-8").split())


@pytest.mark.parametrize("page", [*WARN, "docs/data-protection.md", f"docs/{HOW}"])
def test_pages_on_masks_say_what_a_server_that_lies_can_do(page: str) -> None:
    text = text_of(ROOT / page)
    assert re.search(r"server that \**lies|lying\** server", text)
    assert re.search(r"reads? (whole )?rows|\*\*rows of a site", text)
    assert HOW in text or page.endswith(HOW)


def test_every_promise_of_masks_is_of_a_server_that_follows_the_protocol() -> None:
    found = []
    for path in TEXTS:
        paragraphs = re.split(r"\n\s*\n|\n\| ", path.read_text(encoding="utf-8"))
        for paragraph in (" ".join(paragraph.split()) for paragraph in paragraphs):
            if PROMISE.search(paragraph) and not MEANT.search(paragraph):
                found.append(f"{path.relative_to(ROOT)}: {paragraph[:120]}")
    assert found == []


def test_the_first_screen_says_who_learns_what() -> None:
    screen = (ROOT / "docs" / HOW).read_text(encoding="utf-8")[:3000]
    for who in ("curious server", "lying server", "Another site", "eavesdropper", "model file"):
        assert who in screen


def test_help_of_server_and_site_says_whom_to_trust() -> None:
    for command in (join, serve):
        words = " ".join((command.__doc__ or "").split())
        assert "follows the protocol" in words
        assert "trust" in words
        assert HOW in words


def test_what_rules_give_away_begins_with_a_server_that_lies() -> None:
    for rules in (SiteRules(), SiteRules.loosest()):
        assert "can read whole rows of a site that it names" in rules.gives_away()[0]
    assert "learns of each row what epsilon 1" in SiteRules(largest_epsilon=1.0).gives_away()[0]


def test_no_page_or_template_recommends_a_rule_whose_refusals_depend_on_rows() -> None:
    said = {str(path.relative_to(ROOT)) for path in TEXTS if "smallest_group" in text_of(path)}
    assert {name for name in said if not name.startswith("src/")} <= {"CHANGELOG.md", *GROUP_RULE}
    for page in GROUP_RULE:
        assert re.search("leave it out|no rules file has", text_of(ROOT / page), re.IGNORECASE)
