"""Figures in one style: colour-blind safe, readable in grey, PNG and SVG.

A figure is plain data (`Figure`, `Panel`, `Series`); `draw` alone knows matplotlib. Colour, dash
and marker go together and follow the label, so that a label looks the same in every panel.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from emfed.core.protocols import FloatArray
from emfed.core.records import Records

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9")
"""Okabe and Ito's, in an order in which neighbours also differ in grey."""
DASHES: tuple[Any, ...] = (
    "-",
    (0, (6, 2)),
    (0, (1, 1.2)),
    (0, (6, 2, 1, 2)),
    (0, (3, 1.5)),
    (0, (6, 1.5, 1, 1.5, 1, 1.5)),
    (0, (10, 2)),
)
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
STYLE: Any = {
    "figure.dpi": 150,
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "axes.formatter.useoffset": False,
    "legend.frameon": False,
    "legend.handlelength": 3.2,
    "svg.hashsalt": "emfed",
}


@dataclass(frozen=True, eq=False)
class Series:
    """A line, with a band where several runs are summed up."""

    label: str
    x: FloatArray
    y: FloatArray
    low: FloatArray | None = None
    high: FloatArray | None = None
    points: bool = False
    """Mark the points; without a line where ``line`` is False."""
    line: bool = True
    reference: bool = False
    """Not measured: thin and grey."""


@dataclass(frozen=True, eq=False)
class Panel:
    """One set of axes."""

    series: Sequence[Series]
    x: str
    y: str
    title: str = ""
    log: Literal["", "x", "y", "xy"] = "y"
    ticks: Sequence[float] = ()
    """Where to mark x, if not where matplotlib would."""
    lowest: float | None = None
    """Where y ends below, if not at the data."""
    whole: Literal["", "x", "y", "xy"] = ""
    """Axes that count: marked at whole numbers."""


@dataclass(frozen=True, eq=False)
class Figure:
    """Panels side by side, with a caption for reports."""

    caption: str
    panels: Sequence[Panel]
    share_y: bool = False


def band(label: str, curves: Sequence[tuple[FloatArray, FloatArray]], points: int = 150) -> Series:
    """Many curves as one: in each of so many slices of x, the median and the 5 to 95% range."""
    x = np.concatenate([c[0] for c in curves])
    y = np.concatenate([c[1] for c in curves])
    known = np.isfinite(x) & np.isfinite(y)
    x, y = x[known], y[known]
    if not len(x):
        empty = np.empty(0)
        return Series(label, empty, empty)
    width = max(1, len(x) // (points * max(1, len(curves))))
    points = min(points, len(x) // max(1, width * len(curves)) + 1)
    edges = np.linspace(x.min(), x.max(), points + 1)
    slot = np.minimum(np.searchsorted(edges, x, side="right") - 1, points - 1)
    rows = [
        (x[slot == k].mean(), *np.quantile(y[slot == k], (0.5, 0.05, 0.95)))
        for k in np.unique(slot)
    ]
    middle, median, low, high = np.transpose(rows)
    return Series(label, middle, median, low, high)


def aligned(label: str, curves: Sequence[tuple[FloatArray, FloatArray]]) -> Series:
    """Curves with as many points each as one: point by point, the median and the whole range."""
    x, y = (np.stack([curve[k] for curve in curves]) for k in (0, 1))
    known = np.isfinite(y).all(axis=0)
    x, y = x[:, known], y[:, known]
    return Series(label, np.median(x, axis=0), np.median(y, axis=0), y.min(axis=0), y.max(axis=0))


def spread(label: str, x: Sequence[float], samples: Sequence[FloatArray]) -> Series:
    """A measure of several runs at each x: the median and the whole range."""
    keep = [k for k, s in enumerate(samples) if np.isfinite(s).all() and len(s)]
    place = np.array([x[k] for k in keep], dtype=np.float64)
    rows = [(np.median(samples[k]), samples[k].min(), samples[k].max()) for k in keep]
    median, low, high = np.transpose(rows) if rows else np.empty((3, 0))
    return Series(label, place, median, low, high, points=True)


def draw(figure: Figure, path: Path) -> None:
    """Write the figure beside ``path`` with the endings .png and .svg."""
    for suffix in (".png", ".svg"):
        path.with_name(path.name + suffix).write_bytes(render(figure, suffix[1:]))


def render(figure: Figure, kind: str) -> bytes:
    """The figure as PNG or SVG; the same figure gives the same bytes."""
    import matplotlib
    from matplotlib.figure import Figure as Drawing

    labels = list(dict.fromkeys(s.label for p in figure.panels for s in p.series))
    count = len(figure.panels)
    width = 4.6 * count if count > 1 else 5.6
    longest = max(len(label) for label in labels)
    columns = max(1, min(4, int(width / (0.085 * longest + 0.75))))
    height = 3.4 + 0.22 * -(-len(labels) // columns)
    handles: dict[str, Any] = {}
    buffer = io.BytesIO()
    with matplotlib.rc_context(STYLE):  # not pyplot, which would touch the user's windows
        drawing = Drawing(figsize=(width, height), layout="constrained")
        axes = drawing.subplots(1, count, sharey=figure.share_y, squeeze=False)[0]
        for axis, panel in zip(axes, figure.panels, strict=True):
            _draw_panel(axis, panel, labels, handles, figure.share_y and axis is not axes[0])
        drawing.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=columns)
        drawing.savefig(buffer, format=kind, metadata={"Date": None} if kind == "svg" else {})
    return buffer.getvalue()


def _draw_panel(
    axis: Any, panel: Panel, labels: list[str], handles: dict[str, Any], bare: bool
) -> None:
    """One panel; fills in the handles of the common legend."""
    from matplotlib.ticker import MaxNLocator

    for series in panel.series:
        cycle, look = divmod(labels.index(series.label), len(PALETTE))
        colour = "0.45" if series.reference else PALETTE[look]
        dash = DASHES[(look + cycle) % len(DASHES)]
        (line,) = axis.plot(
            series.x,
            series.y,
            color=colour,
            ls=dash if series.line else "none",
            lw=1.0 if series.reference else 1.5,
            marker=MARKERS[look] if series.points else None,
            ms=4.5,
            label=series.label,
        )
        if series.low is not None and series.high is not None:
            axis.fill_between(series.x, series.low, series.high, color=colour, alpha=0.18, lw=0)
        handles.setdefault(series.label, line)
    if "x" in panel.log:
        axis.set_xscale("log")
    if "y" in panel.log:
        axis.set_yscale("log")
    if panel.ticks:
        axis.set_xticks(panel.ticks, [f"{tick:g}" for tick in panel.ticks])
        axis.set_xticks([], minor=True)
    for name in panel.whole:
        getattr(axis, f"{name}axis").set_major_locator(MaxNLocator("auto", integer=True))
    if panel.lowest is not None:
        axis.set_ylim(bottom=panel.lowest)
    axis.set_xlabel(panel.x)
    if not bare:
        axis.set_ylabel(panel.y)
    axis.set_title(panel.title)


EPOCHS = "epochs (passes over all data)"
SQUARED_FIELD = "squared norm of the mean field"


def trajectory_panel(
    title: str, curves: Sequence[tuple[FloatArray, FloatArray, FloatArray]]
) -> Panel:
    """|H|^2 and |h|^2 against epochs, over one or more runs, as in the paper's figure 1."""
    return Panel(
        [
            band("estimate at the server, $|H|^2$", [(e, big) for e, big, _ in curves]),
            band("true, $|h|^2$", [(e, small) for e, _, small in curves]),
        ],
        EPOCHS,
        SQUARED_FIELD,
        title,
    )


def trajectories(runs: Mapping[str, Records]) -> Figure:
    """One panel per run: |H|^2 and |h|^2 against epochs."""
    names = ("epochs", "squared_H", "squared_h")
    panels = []
    for title, records in runs.items():
        epochs, estimate, truth = (records.column(name) for name in names)
        panels.append(trajectory_panel(title, [(epochs, estimate, truth)]))
    return Figure("The mean field and its estimate, against epochs.", panels, share_y=True)
