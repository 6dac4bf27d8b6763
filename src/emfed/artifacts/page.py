"""Self-contained HTML pages: text, figures and tables in one file that needs no network."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import resources
from typing import Any

from emfed.artifacts.figures import DASHES, PALETTE, Figure, Panel, Series, render

NUMBER = re.compile(r"[-+−]?[\d,.]+(e[+-]?\d+)?%?( ± [\d,.]+)?$")
"""What a cell of numbers looks like."""
EMPTY = ("", "–")
"""Cells that stand for no number."""
DASH_ARRAYS = ["" if dash == "-" else " ".join(f"{2 * n:g}" for n in dash[1]) for dash in DASHES]
"""The dashes of figures, as SVG has them: in pixels, for lines that are two wide."""
WORDY = 48
"""Characters beyond which a cell is a sentence."""


@dataclass(frozen=True)
class Table:
    """Rows of text under a heading each; a cell that says yes or no may be coloured by it."""

    heading: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    @cached_property
    def numeric(self) -> list[bool]:
        """Which columns hold numbers alone, or none: they stand to the right."""
        cells = list(zip(*self.rows, strict=True)) or [()] * len(self.columns)
        return [
            any(map(NUMBER.match, column)) and all(c in EMPTY or NUMBER.match(c) for c in column)
            for column in cells
        ]

    @cached_property
    def wordy(self) -> bool:
        """Whether cells hold sentences: on a narrow page each row is then a paragraph."""
        return any(len(cell) > WORDY for row in self.rows for cell in row)


@dataclass(frozen=True)
class Highlight:
    """A figure that everybody looks for first: its name, its value, and a word beside."""

    name: str
    value: str
    note: str = ""
    good: bool | None = None
    """Whether it is good or bad news; None: neither."""


@dataclass(frozen=True, eq=False)
class Explorer:
    """Panels among which the reader chooses, and whose series can be hidden.

    Without scripts nothing of it shows: the figures of the section must tell the same.
    """

    caption: str
    names: tuple[str, str]
    """What the reader chooses first, and then."""
    panels: Mapping[str, Mapping[str, Panel]]


@dataclass(frozen=True)
class Section:
    """A heading and what stands under it: text, explorers, figures, tables, folded tables."""

    heading: str
    text: Sequence[str] = ()
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()
    details: Sequence[Table] = ()
    """Tables that the reader opens."""
    terms: Mapping[str, str] = field(default_factory=dict)
    """Words and what they mean."""
    explorers: Sequence[Explorer] = ()


@dataclass(frozen=True)
class Page:
    """A whole report."""

    title: str
    text: Sequence[str] = ()
    facts: Mapping[str, str] = field(default_factory=dict)
    """Short facts, told by name: versions, seeds, times."""
    tables: Sequence[Table] = ()
    sections: Sequence[Section] = ()
    source: str = ""
    """What it tells of, and when and by what it was made, in a line."""
    highlights: Sequence[Highlight] = ()
    """What a reader must know first."""
    warnings: Sequence[str] = ()


def render_page(page: Page) -> str:
    """The page as HTML; every text is escaped, every figure is inside."""
    import jinja2

    folder = resources.files("emfed.artifacts")
    source, script = (
        folder.joinpath(name).read_text(encoding="utf-8") for name in ("page.html", "explorer.js")
    )
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["pictures"] = _pictures
    environment.filters["numbers"] = _numbers
    # No script runs but this one, whose digest the page names.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    explored = any(section.explorers for section in page.sections)
    told = {"script": script, "digest": digest} if explored else {}
    html = environment.from_string(source).render(page=page, **{"script": "", "digest": ""} | told)
    return html.replace("|²", "|\u2060²")  # a square does not leave its norm at the end of a line


@dataclass(frozen=True)
class Picture:
    """Addresses that hold an image: for wide pages and, if it is another, for narrow ones."""

    wide: str
    narrow: str = ""


def _pictures(figure: Figure) -> list[Picture]:
    """A figure as one picture, or one for each panel; narrow pages get that of a column."""
    if figure.apart:
        parts = [replace(figure, panels=[panel]) for panel in figure.panels]
        return [Picture(_address(part)) for part in parts]
    return [Picture(_address(figure), _address(figure, column=True))]


def _address(figure: Figure, column: bool = False) -> str:
    # Hundredths of a point are finer than any screen, and half the size of what matplotlib writes.
    svg = re.sub(
        rb' d="[^"]*"',
        lambda path: re.sub(rb"(\.\d\d)\d+", rb"\1", path[0]),
        render(figure, "svg", column),
    )
    return "data:image/svg+xml;base64," + base64.b64encode(svg).decode()


def _numbers(explorer: Explorer) -> str:
    """The panels as JSON that can stand in a page; colours and marks are those of the figures."""
    flat = [panel for panels in explorer.panels.values() for panel in panels.values()]
    labels = list(dict.fromkeys(s.label for panel in flat for s in panel.series))
    dots = {s.label for panel in flat for s in panel.series if not s.line}
    looks = {
        label: {
            "colour": PALETTE[place % len(PALETTE)],
            "dash": DASH_ARRAYS[place % len(PALETTE)],
            "dot": label in dots,
        }
        for place, label in enumerate(labels)
    }
    panels = {
        first: {
            second: {"x": panel.x, "y": panel.y, "series": [_curve(s) for s in panel.series]}
            for second, panel in choices.items()
        }
        for first, choices in explorer.panels.items()
    }
    text = json.dumps({"names": explorer.names, "looks": looks, "panels": panels})
    return text.replace("<", "\\u003c")


def _curve(series: Series) -> dict[str, Any]:
    """A series in four digits; None where a line has a gap."""
    parts = {"x": series.x, "y": series.y, "low": series.low, "high": series.high}
    numbers = {
        name: [float(f"{v:.4g}") if math.isfinite(v) else None for v in values.tolist()]
        for name, values in parts.items()
        if values is not None
    }
    return {"label": series.label, "line": series.line, **numbers}
