"""Memories on and off, against heterogeneity."""

from __future__ import annotations

from emfed.artifacts import Figure, Panel, band
from emfed.core.protocols import FloatArray
from paper.findings import Findings
from paper.traces import Traces, each

SPLITS = {"random": "at random", "writer": "by writer", "sorted": "by label"}


def analyse(traces: Traces) -> Findings:
    """|h|^2 with and without memories, in each split."""
    measures: dict[str, FloatArray] = {}
    panels = []
    for split, name in SPLITS.items():
        series, floors = [], {}
        for run in ("with memories", "without memories"):
            group = traces.of(run, split=split)
            floors[run] = each(group, lambda t: t.floor)
            measures[f"{name}, {run}: mean |h|² of the last half"] = floors[run]
            series.append(band(run, [(t["round"], t["squared_h"]) for t in group]))
        measures[f"{name}: |h|² without memories over that with them"] = (
            floors["without memories"] / floors["with memories"]
        )
        panels.append(Panel(series, "rounds", "$|h|^2$", f"rows dealt {name}"))
    without = [
        measures[f"{name}, without memories: mean |h|² of the last half"]
        for name in SPLITS.values()
    ]
    measures["by writer over at random, without memories"] = without[1] / without[0]
    measures["by label over by writer, without memories"] = without[2] / without[1]
    workers = traces.all[0].settings.workers
    caption = (
        f"|h|² with and without memories, for three ways to deal the rows to {workers} workers, in "
        'the frame of standardised components. "Without assumptions on the heterogeneity of '
        "workers, ... a “naive” implementation of compressed distributed EM (i.e. an "
        "implementation without the variables V_{k,i}'s) would not converge\" (below Corollary 2)."
    )
    return Findings(measures, {"splits": Figure(caption, panels, share_y=True)})
