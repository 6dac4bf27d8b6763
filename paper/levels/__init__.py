"""The number of quantisation levels, against rounds and against bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from emfed.artifacts import Figure, Panel, Table, band
from emfed.artifacts.figures import FEW
from emfed.core.protocols import FloatArray
from paper.findings import Findings, in_words
from paper.traces import Trace, Traces, each, ratio

TARGET = 1e-5
"""The |h|^2 to reach; some splits lead past a saddle, where it rises again for a while."""
EXACT = "32-bit floats"


def analyse(traces: Traces) -> Findings:
    """Rounds and bytes to reach the target, in units of those that floats need."""
    runs = list(dict.fromkeys(t.job.run for t in traces.all))
    rounds = {r: each(traces.of(r), lambda t: t.first_below(TARGET, "round")) for r in runs}
    size = {
        r: each(traces.of(r), lambda t: t.first_below(TARGET, "bytes_up_sum") / t.settings.workers)
        for r in runs
    }
    measures: dict[str, FloatArray] = {}
    for run in runs:
        measures[f"{run}: rounds to |h|² = {TARGET:g}"] = rounds[run]
        measures[f"{run}: bytes up per worker to |h|² = {TARGET:g}"] = size[run]
        measures[f"{run}: rounds over those of floats"] = ratio(rounds[run], rounds[EXACT])
        measures[f"{run}: bytes over those of floats"] = ratio(size[run], size[EXACT])
    measures["64 levels: bytes over those of 4 levels"] = ratio(size["64 levels"], size["4 levels"])
    against: dict[str, Callable[[Trace], FloatArray]] = {
        "rounds": lambda t: t["round"],
        "bytes uploaded per worker": lambda t: t["bytes_up_sum"] / t.settings.workers,
    }
    panels = []
    for name, x in against.items():
        lines = [band(r, [(x(t), t["squared_h"]) for t in traces.of(r)]) for r in runs]
        if name == "rounds":  # six bands, one over the other, would hide the lines
            ends = (runs[0], EXACT)
            lines = [s if s.label in ends else replace(s, low=None, high=None) for s in lines]
        lines = [replace(s, points=True) for s in lines]
        panels.append(Panel(lines, name, "$|h|^2$", log="xy" if "bytes" in name else "y"))
    table = Table(
        f"To |h|² = {in_words(TARGET)}, medians over seeds",
        ("quantisation", "rounds", "bytes up per worker"),
        [
            (
                r,
                f"{np.median(rounds[r]):.0f}",
                f"{np.median(size[r]):,.0f}",
            )
            for r in runs
        ],
    )
    caption = (
        "|h|² against rounds and against bytes, for several numbers of quantisation levels, in the "
        "frame of standardised components"
    )
    many = len(traces.of(EXACT)) >= FEW
    caption += ". Against rounds, only the first and the last have bands." if many else "."
    return Findings(measures, {"levels": Figure(caption, panels, share_y=True)}, (table,))
