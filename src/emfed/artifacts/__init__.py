"""Records and plain tables to figures and pages."""

from emfed.artifacts.figures import (
    Figure,
    Panel,
    Series,
    band,
    draw,
    one_by_one,
    render,
    spread,
    trajectories,
    trajectory_panel,
)
from emfed.artifacts.fits import fit_page
from emfed.artifacts.page import Explorer, Page, Section, Table, render_page

__all__ = [
    "Explorer",
    "Figure",
    "Page",
    "Panel",
    "Section",
    "Series",
    "Table",
    "band",
    "draw",
    "fit_page",
    "one_by_one",
    "render",
    "render_page",
    "spread",
    "trajectories",
    "trajectory_panel",
]
