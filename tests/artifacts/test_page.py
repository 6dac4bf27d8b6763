"""Reports: one file, every text escaped, nothing from outside; and looked at in a real browser."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from emfed.artifacts import Explorer, Figure, Page, Panel, Section, Series, Table, render_page
from tests.artifacts.browser import Browser

X = np.linspace(1, 5, 9)
FIGURES = [
    Figure(f"Figure with {n} panels.", [Panel([Series("a", X, X**2)], "x", "y", f"t{n}")] * n)
    for n in (1, 2, 3)
]
WIDE = Table("A wide table", [f"column {k}" for k in range(14)], [["value"] * 14] * 3)
PAGE = Page(
    "A <report> & more",
    ["Some text. " * 30, "averyveryverylongword" * 12],
    {"seeds": "0, 1", "libraries": "numpy 1, scipy 2, polars 3, matplotlib 4"},
    [Table("Verdicts", ("claim", "verdict"), [("one", "holds"), ("<b>two</b>", "fails")])],
    [Section("One", ["Text."], FIGURES, [WIDE], [WIDE]), Section("Two")],
)


def test_text_is_escaped_and_nothing_comes_from_outside() -> None:
    html = render_page(PAGE)
    assert "A &lt;report&gt; &amp; more" in html
    assert "<b>two</b>" not in html
    assert not re.search(r"(?:src|href)=[\"'](?!data:|#)", html)
    assert "<script" not in html
    assert not re.search(r"https?://", re.sub(r"base64,[A-Za-z0-9+/=]+", "", html))
    assert html.count("data:image/svg+xml") == 6  # for wide pages and for narrow ones
    assert 'class="holds"' in html
    assert 'class="fails"' in html


AWAY = [Series("<b>a</b>", X, 10.0**-X, 9.0**-X, 11.0**-X), Series("dots", X, X, line=False)]
EXPLORED = Page(
    "Explored",
    sections=[
        Section(
            "One",
            figures=FIGURES[:1],
            explorers=[
                Explorer(
                    "Choose.",
                    ("data", "axis"),
                    {
                        data: {axis: Panel(AWAY, axis, "</script>") for axis in ("bytes", "rounds")}
                        for data in ("near", "far")
                    },
                )
            ],
        )
    ],
)
CHOOSE = """(() => {
    const [data, axis] = document.querySelectorAll(".explorer select");
    const paths = () => document.querySelectorAll(".explorer svg[role] path").length;
    if (paths() !== 2) return false;
    axis.value = "rounds";
    axis.dispatchEvent(new Event("change"));
    const ticks = document.querySelectorAll(".explorer input");
    ticks[0].click();
    const label = document.querySelector(".explorer svg[role]").getAttribute("aria-label");
    return paths() === 0 && label === "</script> against rounds, near" && ticks.length === 2;
})()"""


@pytest.mark.parametrize("width", [1280, 390])
def test_a_reader_chooses_and_hides(browser: Browser, tmp_path: Path, width: int) -> None:
    path = tmp_path / "report.html"
    html = render_page(EXPLORED)
    assert html.count("<script") == 2  # the numbers, and the one script whose digest is named
    assert "script-src 'sha256-" in html
    assert not re.search(r"https?://", re.sub(r"base64,[A-Za-z0-9+/=]+", "", html))
    path.write_text(html, encoding="utf-8")
    seen = browser.look(path, width, until=CHOOSE)
    assert seen["page"] <= width
    assert seen["console"] == []
    assert "<b>a</b>" in seen["text"]
    if width == 390:
        path.write_text(html.replace("script-src", "img-src"), encoding="utf-8")
        assert "Choose." not in browser.look(path, width)["text"]  # no script, no empty frame


@pytest.mark.parametrize("width", [1280, 375])
def test_in_a_browser(browser: Browser, tmp_path: Path, width: int) -> None:
    path = tmp_path / "report.html"
    path.write_text(render_page(PAGE), encoding="utf-8")
    seen = browser.look(path, width)
    assert seen["images"] == 3
    if width == 375:  # panels stand one above the other, as in a paper's column of 3.25 inches
        assert seen["widths"] == [312] * 3
    else:
        assert min(seen["widths"]) > 500
    assert seen["page"] <= width
    assert seen["font"] >= 14
    assert seen["console"] == []


def test_the_check_can_fail(browser: Browser, tmp_path: Path) -> None:
    """A broken image, a wide element and an error on the console are all seen."""
    path = tmp_path / "bad.html"
    path.write_text(
        "<!doctype html><img src='data:image/svg+xml;base64,AAAA'>"
        "<div style='width: 900px'>wide</div><script>console.error('oh'); nothing()</script>"
    )
    seen = browser.look(path, 375)
    assert seen["widths"] == [0]
    assert seen["page"] > 375
    assert len(seen["console"]) >= 2


def test_columns_of_numbers_stand_to_the_right_whether_or_not_all_are_known() -> None:
    rows = [("a", "1,200", "–", ""), ("b", "–", "–", "−0.5"), ("3", "", "–", "x")]
    assert Table("", ("name", "bytes", "none", "mixed"), rows).numeric == [
        False,
        True,
        False,
        False,
    ]
