"""Self-contained HTML pages: text, figures and tables in one file that needs no network."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources

from emfed.artifacts.figures import Figure, render


@dataclass(frozen=True)
class Table:
    """Rows of text under a heading each; a cell that says yes or no may be coloured by it."""

    heading: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Section:
    """A heading and what stands under it, in this order: text, figures, tables, folded tables."""

    heading: str
    text: Sequence[str] = ()
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()
    details: Sequence[Table] = ()
    """Tables that the reader opens."""


@dataclass(frozen=True)
class Page:
    """A whole report."""

    title: str
    text: Sequence[str] = ()
    facts: Mapping[str, str] = field(default_factory=dict)
    """Short facts, told by name: versions, seeds, times."""
    tables: Sequence[Table] = ()
    sections: Sequence[Section] = ()


def render_page(page: Page) -> str:
    """The page as HTML; every text is escaped, every figure is inside."""
    import jinja2

    source = resources.files("emfed.artifacts").joinpath("page.html").read_text(encoding="utf-8")
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["svg"] = _svg
    html = environment.from_string(source).render(page=page)
    return html.replace("|²", "|\u2060²")  # a square does not leave its norm at the end of a line


def _svg(figure: Figure) -> str:
    """A figure as the address of an image that holds it."""
    return "data:image/svg+xml;base64," + base64.b64encode(render(figure, "svg")).decode()
