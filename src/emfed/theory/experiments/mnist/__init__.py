"""Figure 3 of the paper: weights and |H|^2 on MNIST, for the paper's step and a larger one."""

from __future__ import annotations

import numpy as np

from emfed.artifacts import Figure, Panel, Series, trajectory_panel
from emfed.core.protocols import FloatArray
from emfed.theory.experiments.findings import Findings
from emfed.theory.experiments.traces import Trace, Traces, each, tracking

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
            measures[f"{which}: final |h|² over that at three quarters"] = each(group, progress)
            curves = [(t["epochs"], t["squared_H"], t["squared_h"]) for t in group]
            fields.append(trajectory_panel(which, curves))
            weights.append(weights_panel(which, group[0]))
        figures[f"fields-step-{step:g}"] = Figure(
            f"|H|² (what the server sees) and |h|² (the truth) on MNIST with step {step:g}; "
            "medians and 90% bands over seeds.",
            fields,
            share_y=True,
        )
        figures[f"weights-step-{step:g}"] = Figure(
            f"The ten weights of the mixture with step {step:g}, first seed.", weights, share_y=True
        )
    return Findings(measures, figures)


def progress(trace: Trace) -> float:
    """How much |h|^2 changes in the last quarter: below 1, it is still falling."""
    values = trace.at_h("squared_h")
    late = values[-max(1, len(values) // 20) :].mean()
    return float(late / values[int(0.75 * len(values))])


def weights_panel(title: str, trace: Trace) -> Panel:
    """Each weight against epochs."""
    names = sorted((n for n in trace.columns if n.startswith("weight_")), key=lambda n: int(n[7:]))
    epochs = trace.at_h("epochs")
    thin = np.unique(np.linspace(0, len(epochs) - 1, 150).astype(int))
    series = [
        Series(f"component {k + 1}", epochs[thin], trace.at_h(name)[thin])
        for k, name in enumerate(names)
    ]
    return Panel(series, "epochs (passes over all data)", "weight", title, log="")
