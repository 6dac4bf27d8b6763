"""Records and plain tables to figures and pages."""

from emfed.artifacts.figures import (
    Figure,
    Panel,
    Series,
    aligned,
    band,
    draw,
    render,
    spread,
    trajectories,
    trajectory_panel,
)
from emfed.artifacts.fits import fit_page
from emfed.artifacts.page import Page, Section, Table, render_page

__all__ = [
    "Figure",
    "Page",
    "Panel",
    "Section",
    "Series",
    "Table",
    "aligned",
    "band",
    "draw",
    "fit_page",
    "render",
    "render_page",
    "spread",
    "trajectories",
    "trajectory_panel",
]
