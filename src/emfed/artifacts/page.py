"""Self-contained HTML pages: text, figures and tables in one file that needs no network."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources

from emfed.artifacts.figures import Figure, render

NUMBER = re.compile(r"[-+−]?[\d,.]+(e[+-]?\d+)?%?( ± [\d,.]+)?$")
"""What a cell of numbers looks like."""
WORDY = 48
"""Characters beyond which a cell is a sentence."""


@dataclass(frozen=True)
class Table:
    """Rows of text under a heading each; a cell that says yes or no may be coloured by it."""

    heading: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    @property
    def numeric(self) -> list[bool]:
        """Which columns hold numbers alone: they stand to the right."""
        cells = list(zip(*self.rows, strict=True)) or [()] * len(self.columns)
        return [
            any(column) and all(not c or NUMBER.match(c) is not None for c in column)
            for column in cells
        ]

    @property
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


@dataclass(frozen=True)
class Section:
    """A heading and what stands under it, in this order: text, figures, tables, folded tables."""

    heading: str
    text: Sequence[str] = ()
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()
    details: Sequence[Table] = ()
    """Tables that the reader opens."""
    terms: Mapping[str, str] = field(default_factory=dict)
    """Words and what they mean."""


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

    source = resources.files("emfed.artifacts").joinpath("page.html").read_text(encoding="utf-8")
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["svgs"] = _svgs
    html = environment.from_string(source).render(page=page)
    return html.replace("|²", "|\u2060²")  # a square does not leave its norm at the end of a line


def _svgs(figure: Figure) -> list[str]:
    """A figure as addresses of images that hold it: one, or one for each panel."""
    parts = [replace(figure, panels=[panel]) for panel in figure.panels]
    drawn = [render(part, "svg") for part in (parts if figure.apart else [figure])]
    return ["data:image/svg+xml;base64," + base64.b64encode(svg).decode() for svg in drawn]
