"""Methods side by side: how far each is from the pooled optimum, and at what cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from emfed.artifacts import Explorer, Figure, Panel, Series, Table, band
from emfed.artifacts.figures import FEW
from emfed.core.protocols import FloatArray
from paper.comparison import MethodSettings
from paper.findings import Findings, in_words
from paper.traces import Trace, Traces

METHODS = (
    *("AutoEM", "FedEM", "VR-FedEM", "private AutoEM", "EM with 32-bit floats"),
    *("FedEM without memories", "FedAvg", "SCAFFOLD", "averaged local fits", "one-shot merge"),
)
"""As in the figures; their looks follow this order."""
TARGET = 1e-2
"""Nats a row to which bytes, rounds and passes are counted."""
CLOSE = 1e-4
"""Nats a row below which steps count as equally good, and the faster one is taken."""
FLOOR = 1e-6
"""Where figures end below: pooled EM was stopped about there."""
AXES = {
    "bytes up": ("bytes_up", "bytes up per worker"),
    "bytes down": ("bytes_down", "bytes down per worker"),
    "rounds": ("round", "rounds"),
    "passes over the rows": ("epochs", "passes over all rows"),
}
DISTANCE = "nats a row from the pooled optimum"


def analyse(traces: Traces) -> Findings:
    """For each set the best step of every method; figures, the table, and measures."""
    measures: dict[str, FloatArray] = {}
    panels: dict[str, dict[str, Panel]] = {}
    rows = []
    for data in traces.values("data"):
        optimum = {t.job.seed: t["log_likelihood"].max() for t in traces.of("pooled EM", data=data)}
        settings = _settings(traces.where(data=data)[0])
        title = settings.title
        curves, counts = {}, {}
        for method in METHODS:
            group = _best(traces, method, data, optimum)
            curves[method] = [_curve(trace, optimum) for trace in group]
            counts[method] = {
                axis: np.array([_reached(c, axis) for c in curves[method]]) for axis in AXES
            }
            final = np.array([c["distance"][-1] for c in curves[method]])
            measures[f"{settings.name}, {method}: final distance"] = final
            for axis, values in counts[method].items():
                measures[f"{settings.name}, {method}: {axis} to {TARGET:g}"] = values
            rows.append([title, method, _step(group[0]), *_cells(final, counts[method])])
        told = _ratios(curves, counts)
        measures |= {f"{settings.name}: {name}": values for name, values in told.items()}
        panels[title] = {
            axis: Panel(
                [_series(method, curves[method], axis) for method in METHODS],
                label,
                DISTANCE,
                title,
                log="xy",
            )
            for axis, (_, label) in AXES.items()
        }
    figures = {
        axis.replace(" ", "-"): Figure(
            _caption(axis, label), [p[axis] for p in panels.values()], share_y=True
        )
        for axis, (_, label) in AXES.items()
    }
    table = Table(
        "Distance at the end (median and range over seeds; below zero, in a better optimum than "
        "pooled EM's from the same start), and medians of bytes per worker, rounds and passes to "
        f"{TARGET:g} nats (–: most seeds never get there).",
        ("data", "method", "step", "distance", "lowest", "highest", *AXES),
        rows,
    )
    explorer = Explorer("Choose the data and the axis, and hide methods.", ("data", "axis"), panels)
    return Findings(measures, figures, (table,), (explorer,))


def _settings(trace: Trace) -> MethodSettings:
    assert isinstance(trace.job.settings, MethodSettings)
    return trace.job.settings


def _curve(trace: Trace, optimum: dict[int, float]) -> dict[str, FloatArray]:
    """The distance, and what it is drawn against."""
    distance = optimum[trace.job.seed] - trace["log_likelihood"]
    return {"distance": distance, **{column: trace[column] for column, _ in AXES.values()}}


def _best(traces: Traces, method: str, data: str, optimum: dict[int, float]) -> list[Trace]:
    """The traces at the steps that end nearest; of those that end close, at the fastest."""

    def worth(group: list[Trace]) -> tuple[float, float]:
        curves = [_curve(trace, optimum) for trace in group]
        final = float(np.median([abs(c["distance"][-1]) for c in curves]))
        return max(final, CLOSE), float(np.median([_reached(c, "rounds") for c in curves]))

    tried: dict[str, list[Trace]] = {}
    for trace in traces.of(method, data=data):
        tried.setdefault(_step(trace), []).append(trace)
    return min(tried.values(), key=worth)


def _reached(curve: dict[str, FloatArray], axis: str) -> float:
    """Where the target, or better, is first reached; infinite if never."""
    there = np.flatnonzero(curve["distance"] <= TARGET)
    return float(curve[AXES[axis][0]][there[0]]) if len(there) else np.inf


def _ratios(
    curves: dict[str, list[dict[str, FloatArray]]], counts: dict[str, dict[str, FloatArray]]
) -> dict[str, FloatArray]:
    """What claims are about: medians over seeds of one method over those of another.

    Seeds by themselves say less. Noise and long steps lead some of them to another optimum than
    pooled EM's from the same start, a better or a worse one.
    """
    final = {
        method: max(float(np.median([abs(c["distance"][-1]) for c in group])), FLOOR)
        for method, group in curves.items()
    }
    count = {m: {axis: float(np.median(v)) for axis, v in c.items()} for m, c in counts.items()}
    plain, none, once = "EM with 32-bit floats", "FedEM without memories", "averaged local fits"
    pairs = list(zip(curves["AutoEM"], curves[once], strict=True))
    bytes_, rounds = (
        np.median([_at(ours, axis, theirs[AXES[axis][0]][-1]) for ours, theirs in pairs])
        for axis in ("bytes up", "rounds")
    )
    merged, passes = final["one-shot merge"], "passes over the rows"
    ratios = {
        "bytes of 32-bit EM over those of AutoEM": (
            count[plain]["bytes up"] / count["AutoEM"]["bytes up"]
        ),
        "rounds of AutoEM over those of 32-bit EM": (
            count["AutoEM"]["rounds"] / count[plain]["rounds"]
        ),
        "passes of VR-FedEM over those of FedEM": count["VR-FedEM"][passes]
        / count["FedEM"][passes],
        "distance of FedEM without memories over FedEM's": final[none] / final["FedEM"],
        "distance of FedAvg over SCAFFOLD's": final["FedAvg"] / final["SCAFFOLD"],
        "distance of private AutoEM over that of merging": final["private AutoEM"] / merged,
        "distance of averaged local fits over that of merging": final[once] / merged,
        "distance of averaged local fits over AutoEM's for as many bytes": (
            final[once] / max(float(bytes_), FLOOR)
        ),
        "distance of averaged local fits over AutoEM's after as many rounds": (
            final[once] / max(float(rounds), FLOOR)
        ),
    }
    return {name: np.array([value]) for name, value in ratios.items()}


def _at(curve: dict[str, FloatArray], axis: str, value: float) -> float:
    """The distance where an axis was last at most so far along."""
    last = np.flatnonzero(curve[AXES[axis][0]] <= value)
    return float(abs(curve["distance"][last[-1]])) if len(last) else np.inf


def _series(method: str, curves: Sequence[dict[str, FloatArray]], axis: str) -> Series:
    """Quantiles over seeds, on logarithmic axes; of one-shot methods a point."""
    column, logs = AXES[axis][0], []
    for curve in curves:
        known = np.isfinite(curve["distance"])
        y = np.maximum(np.abs(curve["distance"][known]), FLOOR)
        end = int(np.argmax(y == FLOOR)) + 1 if y.min() == FLOOR else len(y)
        logs.append((np.log(curve[column][known][:end]), np.log(y[:end])))
    once = method in ("averaged local fits", "one-shot merge")
    if once:
        x, y = np.transpose([(xs[-1], ys[-1]) for xs, ys in logs])
        return Series(method, np.exp(x), np.exp(y), points=True, line=False)
    if len(logs) >= FEW:  # quantiles are over all seeds: who is there stays there
        last = max(float(x[-1]) for x, _ in logs)
        logs = [(np.append(x, last), np.append(y, y[-1])) for x, y in logs]
    found = band(method, logs, points=60)
    low, high = (None if end is None else np.exp(end) for end in (found.low, found.high))
    return replace(found, x=np.exp(found.x), y=np.exp(found.y), low=low, high=high, points=True)


def _step(trace: Trace) -> str:
    """The step, and how many of them a worker makes between two rounds if it makes several."""
    used = _settings(trace).used
    size = f"{used['step_size']:g}" if "step_size" in used else ""
    return f"{used['local_steps']} × {size}" if "local_steps" in used else size


def _cells(final: FloatArray, reached: dict[str, FloatArray]) -> list[str]:
    cells = [_nats(value) for value in (np.median(final), final.min(), final.max())]
    for values in reached.values():
        many = float(np.median(values))
        cells.append(f"{many:,.0f}" if np.isfinite(many) else "–")
    return cells


def _nats(distance: float) -> str:
    """Two digits; what pooled EM was not run for counts as nothing."""
    sign = "−" if distance < 0 else ""
    return "0" if abs(distance) < FLOOR else f"{sign}{abs(distance):.2g}"


def _caption(axis: str, against: str) -> str:
    what = "whole messages count, and so do the opening and the start"
    if "bytes" not in axis:
        what = "the opening and the start count"
    return (
        "How many nats a row each method is from the pooled optimum, above or below, against "
        f"{against}; {what}. What is nearer than {in_words(FLOOR)} nats is drawn there. Steps of "
        "FedEM and VR-FedEM are the best of three, those of FedAvg and SCAFFOLD, with their "
        "number, of six; AutoEM has none to choose."
    )
