"""One worker: SPIDER-EM against EM, online EM, FIEM and sEM-vr."""

from __future__ import annotations

from dataclasses import replace

from emfed.artifacts import Figure, Panel, band
from emfed.core.protocols import FloatArray
from paper.findings import Findings
from paper.traces import Traces, each, ratio

TARGET = 1e-8
"""The |h|^2 to reach."""


def analyse(traces: Traces) -> Findings:
    """Epochs to reach the target, and in units of those that EM needs."""
    runs = list(dict.fromkeys(t.job.run for t in traces.all))
    epochs = {r: each(traces.of(r), lambda t: t.last_above(TARGET, "epochs")) for r in runs}
    measures: dict[str, FloatArray] = {}
    for run in runs:
        measures[f"{run}: epochs to |h|² = {TARGET:g}"] = epochs[run]
        measures[f"{run}: final |h|²"] = each(traces.of(run), lambda t: t.final_h)
        measures[f"EM's epochs over those of {run}"] = ratio(epochs["EM"], epochs[run])
    lines = [band(r, [(t["epochs"], t["squared_h"]) for t in traces.of(r)]) for r in runs]
    panel = Panel(
        [replace(line, points=True) for line in lines],
        "conditional expectations computed, in epochs",
        "$|h|^2$",
        lowest=1e-16,
    )
    caption = "|h|² against the conditional expectations computed, for one worker."
    return Findings(measures, {"siblings": Figure(caption, [panel])})
