"""Figures in one style: colour-blind safe, readable in grey, PNG and SVG."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedem.records import Records

BLUE, ORANGE = "#0072B2", "#D55E00"  # Okabe and Ito's palette
STYLE: Any = {
    "figure.dpi": 150,
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "svg.hashsalt": "fedem",
}


def draw_trajectories(runs: Mapping[str, Records], path: Path) -> None:
    """|H|^2 and |h|^2 against epochs, one panel per run, as in the paper's figure 1."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with plt.rc_context(STYLE):
        figure, panels = plt.subplots(
            1, len(runs), figsize=(4.6 * len(runs), 3.6), sharey=True, squeeze=False
        )
        for panel, (name, records) in zip(panels[0], runs.items(), strict=True):
            _trajectory(panel, records)
            panel.set_title(name)
            panel.set_xlabel("epochs (passes over all data, opening included)")
            panel.legend(frameon=False)
        panels[0, 0].set_ylabel("squared norm of the mean field")
        figure.tight_layout()
        for suffix in (".png", ".svg"):
            figure.savefig(path.with_suffix(suffix))
        plt.close(figure)


def _trajectory(panel: Any, records: Records) -> None:
    epochs = records.column("epochs")
    estimate, truth = records.column("squared_H"), records.column("squared_h")
    known = np.isfinite(truth)
    shown = np.isfinite(estimate)
    panel.plot(epochs[shown], estimate[shown], color=ORANGE, lw=0.6, alpha=0.7, label="$|H|^2$")
    panel.plot(epochs[known], truth[known], color=BLUE, lw=1.4, ls="--", label="$|h|^2$")
    panel.set_yscale("log")
