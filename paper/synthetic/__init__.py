"""Figure 1 of the paper: |H|^2 and |h|^2 on the synthetic mixture."""

from __future__ import annotations

from emfed.artifacts import Figure, trajectory_panel
from paper.findings import Findings, over_seeds
from paper.traces import Traces, each, tracking


def analyse(traces: Traces) -> Findings:
    """Where both end, and how well |H|^2 tracks |h|^2 in the second half."""
    emfed, reduced = traces.of("FedEM"), traces.of("VR-FedEM")
    floor = each(emfed, lambda t: t.floor)
    final = each(reduced, lambda t: t.final_h)
    panels = [
        trajectory_panel(run, [(t["epochs"], t["squared_H"], t["squared_h"]) for t in group])
        for run, group in (("FedEM", emfed), ("VR-FedEM", reduced))
    ]
    return Findings(
        measures={
            "FedEM: mean |h|² of the last half": floor,
            "FedEM: mean |h|² of the last quarter over the one before": each(
                emfed, lambda t: t.flatness
            ),
            "VR-FedEM: mean |h|² of the last quarter over the one before": each(
                reduced, lambda t: t.flatness
            ),
            "VR-FedEM: final |h|²": final,
            "FedEM's |h|² over VR-FedEM's final one": floor / final,
            "FedEM: median of |H|²/|h|²": each(emfed, tracking),
            "VR-FedEM: median of |H|²/|h|²": each(reduced, tracking),
        },
        figures={
            "trajectories": Figure(
                "|H|² (what the server sees) and |h|² (the truth) against epochs, on the synthetic "
                f"mixture; {over_seeds(len(reduced))}.",
                panels,
                share_y=True,
            )
        },
    )
