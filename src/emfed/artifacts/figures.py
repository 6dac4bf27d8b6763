"""Figures in one style: colour-blind safe, readable in grey; PNG, SVG and PDF.

A figure is plain data (`Figure`, `Panel`, `Series`); `draw` alone knows matplotlib. Colour, dash
and marker go together and follow the label, so that a label looks the same in every panel.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from emfed.core.protocols import FloatArray
from emfed.core.records import Records
from emfed.core.storage import write_atomic

PALETTE = (
    *("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9"),
    *("#882255", "#7F7F7F", "#8C8C00"),
)
"""Okabe and Ito's, in an order in which neighbours also differ in grey, and three more."""
DASHES: tuple[Any, ...] = (
    "-",
    (0, (6, 2)),
    (0, (1, 1.2)),
    (0, (6, 2, 1, 2)),
    (0, (3, 1.5)),
    (0, (6, 1.5, 1, 1.5, 1, 1.5)),
    (0, (10, 2)),
    (0, (4, 1, 1, 1)),
    (0, (2, 2)),
    (0, (8, 1.5, 1, 1.5)),
)
"""Dashes of the series of a figure, so that they differ without colour."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", "h")
MARKS = 8
"""Points of a long line that are marked."""
CLOUD = 40
"""Points beyond which they are drawn small and faint, so that a line through them shows."""
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
    bars: bool = False
    """Horizontal bars at ``y``, from ``low`` to ``x``."""


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
    names: Sequence[str] = ()
    """What stands at y = 0, 1, ..., from above: the panel grows with them."""
    image: FloatArray | None = None
    """A heat map in place of series, its first row above; NaN stays grey."""
    extent: tuple[float, float, float, float] | None = None
    """The edges of the image: left, right, bottom, top."""
    colours: tuple[float, float] | None = None
    """What the first and the last colour of the image stand for, if not its own range."""


@dataclass(frozen=True, eq=False)
class Figure:
    """Panels side by side, with a caption for reports."""

    caption: str
    panels: Sequence[Panel]
    share_y: bool = False
    apart: bool = False
    """Panels may stand below each other where a page is narrow: each has a picture of its own."""

    @property
    def across(self) -> int:
        """Panels in a row; more than three stand in two rows."""
        count = len(self.panels)
        return count if count <= 3 else -(-count // 2)


FEW = 5
"""Seeds below which a band would say more than they can: each seed is drawn by itself."""


def band(label: str, curves: Sequence[tuple[FloatArray, FloatArray]], points: int = 150) -> Series:
    """One curve a seed, as one series: the median over seeds and the 5 to 95% range, at each x.

    Every curve is interpolated on one grid, over the x that all of them reach; so quantiles are
    over seeds and never over time. Fewer than five seeds are drawn one by one.
    """
    known = [(x[k], y[k]) for x, y in curves if (k := np.isfinite(x) & np.isfinite(y)).any()]
    if not known:
        return Series(label, np.empty(0), np.empty(0))
    if len(known) < FEW:
        return one_by_one(label, known, 4 * points)
    first, last = max(x[0] for x, _ in known), min(x[-1] for x, _ in known)
    grid = np.linspace(first, last, min(points, max(len(x) for x, _ in known)))
    median, low, high = np.quantile([np.interp(grid, x, y) for x, y in known], (0.5, 0.05, 0.95), 0)
    return Series(label, grid, median, low, high)


def one_by_one(
    label: str, curves: Sequence[tuple[FloatArray, FloatArray]], points: int = 150
) -> Series:
    """Every curve as a line of its own, all with one label; each of so many points at most."""
    parts = []
    for x, y in curves:
        thin = np.unique(np.linspace(0, len(x) - 1, points).astype(int))
        parts += [np.full((2, 1), np.nan), np.stack([x[thin], y[thin]])]  # a gap, a line
    x, y = np.hstack(parts[1:])
    return Series(label, x, y)


def spread(label: str, x: Sequence[float], samples: Sequence[FloatArray]) -> Series:
    """A measure of several runs at each x: the median and the whole range."""
    keep = [k for k, s in enumerate(samples) if np.isfinite(s).all() and len(s)]
    place = np.array([x[k] for k in keep], dtype=np.float64)
    rows = [(np.median(samples[k]), samples[k].min(), samples[k].max()) for k in keep]
    median, low, high = np.transpose(rows) if rows else np.empty((3, 0))
    return Series(label, place, median, low, high, points=True)


def draw(figure: Figure, path: Path) -> None:
    """Write the figure beside ``path``: .png for screens, .svg and .pdf for a paper's column."""
    for suffix in (".png", ".svg", ".pdf"):
        content = render(figure, suffix[1:], column=suffix != ".png")
        write_atomic(path.with_name(path.name + suffix), content)


COLUMN = 3.25
"""Inches: the width of one column of most two-column journals and proceedings."""
LETTERS = 26
"""Letters of a label that fit beside a panel of a column, 1.6 inches high."""
_SMALL = {"font.size": 8, "axes.titlesize": 8, "legend.fontsize": 7, "lines.linewidth": 1.2}


def render(figure: Figure, kind: str, column: bool = False) -> bytes:
    """The figure as PNG, SVG or PDF; the same figure gives the same bytes.

    Panels stand side by side. In a ``column`` of a paper, 3.25 inches wide, they stand one above
    the other, so that text keeps its size.
    """
    import matplotlib

    buffer = io.BytesIO()
    with matplotlib.rc_context(STYLE | (_SMALL if column else {})):
        dateless: Any = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind, {})
        drawn(figure, column).savefig(buffer, format=kind, metadata=dateless)
    return buffer.getvalue()


def drawn(figure: Figure, column: bool = False) -> Any:
    """The figure as one of matplotlib's."""
    import matplotlib
    from matplotlib.figure import Figure as Drawing

    labels = list(dict.fromkeys(s.label for p in figure.panels for s in p.series))
    across = 1 if column else figure.across
    width = COLUMN if column else 4.6 * across if across > 1 else 5.6
    letter = 0.063 if column else 0.085
    longest = max((len(label) for label in labels), default=1)
    columns = max(1, min(4, int(width / (letter * longest + 0.75 * letter / 0.085))))
    rows = -(-len(figure.panels) // across)
    named = max(len(panel.names) for panel in figure.panels)
    each = 2.3 if column else 3.4
    if named:
        each = 0.9 + 0.26 * named if named > 9 else 1.2 + 0.3 * named
    height = each * rows + 2.6 * letter * -(-len(labels) // columns)
    handles: dict[str, Any] = {}
    with matplotlib.rc_context(STYLE | (_SMALL if column else {})):  # not pyplot: no windows
        drawing = Drawing(figsize=(width, height), layout="constrained")
        share: Any = "all" if figure.share_y else "none"
        axes = drawing.subplots(rows, across, sharey=share, squeeze=False).ravel()
        for place, (axis, panel) in enumerate(zip(axes, figure.panels, strict=False)):
            bare = figure.share_y and place % across > 0
            _draw_panel(axis, panel, labels, handles)
            if not bare:  # a label longer than its axis takes two lines
                axis.set_ylabel("\n".join(textwrap.wrap(panel.y, LETTERS if column else 40)))
        for axis in axes[len(figure.panels) :]:
            axis.remove()
        if handles:
            drawing.legend(
                handles.values(), handles.keys(), loc="outside lower center", ncols=columns
            )
    return drawing


def _draw_panel(axis: Any, panel: Panel, labels: list[str], handles: dict[str, Any]) -> None:
    """One panel; fills in the handles of the common legend."""
    from matplotlib.ticker import MaxNLocator

    if panel.image is not None:
        axis.set_facecolor("0.85")
        low, high = panel.colours or (None, None)
        look = {"aspect": "auto", "cmap": "viridis", "vmin": low, "vmax": high}
        shown = axis.imshow(panel.image, extent=panel.extent, **look)
        axis.figure.colorbar(shown, ax=axis)
        axis.grid(visible=False)
    for series in panel.series:
        handles.setdefault(series.label, _draw_series(axis, series, labels.index(series.label)))
    if "x" in panel.log:
        axis.set_xscale("log")
        _mark_short_decades(axis.xaxis, axis.get_xlim())
    if "y" in panel.log:
        axis.set_yscale("log")
    if panel.lowest is not None and not panel.names:
        axis.set_ylim(bottom=panel.lowest)
    if "y" in panel.log:  # once it is known where the axis ends
        _mark_short_decades(axis.yaxis, axis.get_ylim())
    if panel.ticks:
        axis.set_xticks(panel.ticks, [f"{tick:g}" for tick in panel.ticks])
        axis.set_xticks([], minor=True)
    for name in panel.whole:
        getattr(axis, f"{name}axis").set_major_locator(MaxNLocator("auto", integer=True))
    if panel.names:
        axis.set_yticks(range(len(panel.names)), [_short(name) for name in panel.names])
        axis.set_ylim(len(panel.names) - 0.5, -0.5)
        axis.grid(visible=False, axis="y")
        if panel.lowest is not None:
            axis.set_xlim(left=panel.lowest)
    axis.set_xlabel(panel.x)
    axis.set_title(panel.title)


def _draw_series(axis: Any, series: Series, number: int) -> Any:
    """Draw bars, or a line with its band, and return what stands in the legend."""
    cycle, look = divmod(number, len(PALETTE))
    colour = "0.45" if series.reference else PALETTE[look]
    if series.bars:
        left = series.low if series.low is not None else np.zeros_like(series.x)
        hatch = ("", "///", "...", "xxx", "---")[cycle % 5]
        return axis.barh(
            series.y, series.x - left, 0.72, left, color=colour, hatch=hatch, label=series.label
        )
    apart = max(1, len(series.x) // MARKS)  # marks of neighbours do not fall together
    few = series.line or len(series.x) <= CLOUD
    (line,) = axis.plot(
        series.x,
        series.y,
        color=colour,
        ls=DASHES[(look + cycle) % len(DASHES)] if series.line else "none",
        lw=1.0 if series.reference else 1.5,
        marker=MARKERS[look] if series.points else None,
        ms=4.5 if few else 2.2,
        mew=1.0 if few else 0.0,
        alpha=1.0 if few else 0.5,
        zorder=2 if few else 1.5,
        markevery=(look * apart // len(PALETTE), apart) if series.line else None,  # dots are data
        label=series.label,
    )
    if series.low is not None and series.high is not None:
        axis.fill_between(series.x, series.low, series.high, color=colour, alpha=0.18, lw=0)
    return line


def _mark_short_decades(axis: Any, limits: tuple[float, float]) -> None:
    """Numbers and grid between powers of ten, where an axis spans hardly more than one decade."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator

    low, high = limits
    if high / low < 30:
        short = high / low < 4
        axis.set_major_locator(MaxNLocator(5) if short else LogLocator(subs=(1, 2, 3, 5)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(FuncFormatter(lambda value, _: ""))


def _short(name: str) -> str:
    """A name that leaves room for the plot; dollars are no formula."""
    cut = name if len(name) <= 24 else name[:23] + "…"
    return cut.replace("$", r"\$")


EPOCHS = "epochs (passes over all data)"
SQUARED_FIELD = "$|H|^2$ and $|h|^2$"


def trajectory_panel(
    title: str, curves: Sequence[tuple[FloatArray, FloatArray, FloatArray]]
) -> Panel:
    """|H|^2 and |h|^2 against epochs, over one or more runs, as in the paper's figure 1."""
    truth = band("true, $|h|^2$", [(e, small) for e, _, small in curves])
    return Panel(
        [
            band("estimate at the server, $|H|^2$", [(e, big) for e, big, _ in curves]),
            replace(truth, points=True),  # in grey, too, it shows that both lines are there
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
