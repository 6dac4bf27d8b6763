"""Figure 3 of the paper: weights and |H|^2 on MNIST, for the paper's step and a larger one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from emfed.artifacts import Figure, Panel, one_by_one, trajectory_panel
from emfed.core.protocols import FloatArray
from paper.findings import Findings, over_seeds
from paper.traces import Trace, Traces, each, tracking

NAMES = {"FedEM": "FedEM", "VR-FedEM": "VR-FedEM"}


def analyse(traces: Traces) -> Findings:
    """Where each is after 100 epochs, how fast it still falls, and what the server sees of it."""
    measures: dict[str, FloatArray] = {}
    figures: dict[str, Figure] = {}
    for step in traces.values("step_size"):
        fields, weights = [], []
        for algorithm, name in NAMES.items():
            group = traces.where(algorithm=algorithm, step_size=step)
            which = f"{name}, step {step:g}"
            measures[f"{which}: final |h|²"] = each(group, lambda t: t.final_h)
            measures[f"{which}: mean |h|² of the last half"] = each(group, lambda t: t.floor)
            measures[f"{which}: median of |H|²/|h|²"] = each(group, tracking)
            measures[f"{which}: mean |h|² of the last quarter over the one before"] = each(
                group, lambda t: t.flatness
            )
            measures[f"{which}: final |h|² over that at three quarters"] = each(group, progress)
            curves = [(t["epochs"], t["squared_H"], t["squared_h"]) for t in group]
            fields.append(trajectory_panel(which, curves))
            weights.append(weights_panel(which, group))
        measures[f"FedEM's |h|² over VR-FedEM's final one, step {step:g}"] = (
            measures[f"FedEM, step {step:g}: mean |h|² of the last half"]
            / measures[f"VR-FedEM, step {step:g}: final |h|²"]
        )
        figures[f"fields-step-{step:g}"] = Figure(
            f"|H|² (what the server sees) and |h|² (the truth) on MNIST with step {step:g}, "
            f"in the frame of standardised components; {over_seeds(len(group))}.",
            fields,
            share_y=True,
        )
        figures[f"weights-step-{step:g}"] = Figure(
            f"The ten weights of the mixture with step {step:g}, all seeds, from 1/10 at epoch 0; "
            "S_0 and the first memories take a pass each.",
            weights,
            share_y=True,
        )
    return Findings(measures, figures)


def progress(trace: Trace) -> float:
    """How much |h|^2 changes in the last quarter: below 1, it is still falling."""
    values = trace.at_h("squared_h")
    late = values[-max(1, len(values) // 20) :].mean()
    return float(late / values[int(0.75 * len(values))])


def weights_panel(title: str, group: Sequence[Trace]) -> Panel:
    """Each weight against epochs, from the start's on, a line for every seed."""
    columns = sorted((n for n in group[0].columns if n.startswith("weight_")), key=_number)
    series = []
    for name in columns:
        curves = []
        for trace in group:
            there = np.isfinite(trace[name])
            # The start has equal weights; the first record is T(S_0), after the opening's passes.
            x = np.append(0.0, trace["epochs"][there])
            curves.append((x, np.append(1 / len(columns), trace[name][there])))
        lines = one_by_one(f"component {_number(name) + 1}", curves)
        series.append(replace(lines, points=True))  # ten dashes in grey are not enough
    return Panel(series, "epochs (passes over all data)", "weight", title, log="")


def _number(column: str) -> int:
    return int(column.removeprefix("weight_"))
