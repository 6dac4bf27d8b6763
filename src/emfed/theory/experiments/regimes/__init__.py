"""The regimes table: by which factor compression multiplies the rounds."""

from __future__ import annotations

import numpy as np

from emfed.artifacts import Figure, Panel, Series, Table, spread
from emfed.core.protocols import FloatArray
from emfed.theory import Problem, fedem_rounds, fedem_step_limit, slowdown
from emfed.theory.experiments.findings import Findings
from emfed.theory.experiments.jobs import KAPPA
from emfed.theory.experiments.settings import ExperimentSettings
from emfed.theory.experiments.traces import Trace, Traces, each, ratio

CASES = ("low noise, n = 100", "low noise, n = 10", "high noise, n = 100", "high noise, n = 10")
"""The four cells of the paper's table: the noise by the ratio n / omega^3."""


def analyse(traces: Traces) -> Findings:
    """Measured slowdowns beside the theory's."""
    measures: dict[str, FloatArray] = {}
    rows, panels = [], []
    dimension = traces.all[0].settings.dimension
    places = [dimension / keep - 1 for keep in traces.values("keep") if keep < dimension]
    for case in CASES:
        tried = dict.fromkeys(trace.settings.keep for trace in traces.of(case))
        kept = [keep for keep in tried if keep < dimension]
        omegas = [dimension / keep - 1 for keep in kept]
        free = rounds_needed(traces, case, dimension)
        slow = [ratio(rounds_needed(traces, case, keep), free) for keep in kept]
        settings = traces.of(case)[0].settings
        promised = [promise(settings, omega) for omega in omegas]
        for omega, measured, bound in zip(omegas, slow, promised, strict=True):
            measures[f"{case}, omega {omega:g}: slowdown"] = measured
            measures[f"{case}, omega {omega:g}: slowdown over the theory's"] = measured / bound
            rows.append(_row(case, settings, omega, float(np.median(measured)), bound))
        series = [
            spread("measured", omegas, slow),
            # At every omega, so that all panels have one scale.
            Series(
                "theory, constants kept",
                np.array(places),
                np.array([promise(settings, omega) for omega in places]),
                points=True,
            ),
        ]
        panels.append(Panel(series, "ω", "slowdown", case, log="xy", ticks=places))
    measures["largest slowdown over the theory's"] = np.max(
        [values for name, values in measures.items() if name.endswith("over the theory's")], axis=0
    )
    few, many = (measures[f"low noise, n = {n}, omega {omegas[-1]:g}: slowdown"] for n in (10, 100))
    measures["low noise, n = 10 over n = 100, largest omega"] = ratio(few, many)
    table = Table(
        "The regimes table (section 2), with measured slowdowns",
        ("case", "omega", "the table says", "theory, constants kept", "measured"),
        rows,
    )
    caption = (
        "By which factor compression multiplies the rounds: measured, and the theory's bound. "
        '"Depending on the situation, the complexity can be multiplied by a factor ranging from 1 '
        'to ω ∨ (ω^1.5/√n)" (section 2). With much noise and many workers one ω was run: more '
        "would be the low ratio of n to ω³ again."
    )
    return Findings(measures, {"slowdowns": Figure(caption, panels, share_y=True)}, (table,))


def rounds_needed(traces: Traces, case: str, keep: int) -> FloatArray:
    """K at the best step, for each seed; infinite if no step gets there."""
    steps = dict.fromkeys(trace.settings.step_size for trace in traces.of(case))
    needed = [each(traces.of(case, keep=keep, step_size=s), first_round) for s in steps]
    return np.asarray(np.min(needed, axis=0))


def first_round(trace: Trace) -> float:
    """The first round at which the mean of |h|^2 so far is at the target."""
    values = trace.at_h("squared_h")
    mean = np.cumsum(values) / np.arange(1, len(values) + 1)
    assert trace.settings.target is not None
    reached = np.flatnonzero(mean <= trace.settings.target)
    return float(reached[0] + 1) if len(reached) else np.inf


def exact_problem(settings: ExperimentSettings) -> Problem:
    """The linear model's constants: L = L_W = kappa, B = I, |S_0 - S_star|^2 = dimension."""
    gap = 0.5 * KAPPA * settings.dimension
    variance = 0.0
    if settings.batch_size is not None:
        variance = KAPPA**2 * settings.dimension / settings.batch_size
    return Problem(settings.workers, KAPPA, KAPPA, gap, variance=variance)


def promise(settings: ExperimentSettings, omega: float) -> float:
    """The theory's slowdown."""
    assert settings.target is not None
    return slowdown(exact_problem(settings), settings.target, omega)


def _row(
    case: str, settings: ExperimentSettings, omega: float, measured: float, bound: float
) -> list[str]:
    assert settings.target is not None
    problem = exact_problem(settings)
    noisy = fedem_rounds(problem, settings.target, omega).regime == "high noise"
    limited = fedem_step_limit(problem, omega).regime == "compression"
    if noisy:
        says = f"× omega = {omega:g}"
    elif limited:
        says = f"× omega^1.5 / sqrt(n) = {omega**1.5 / np.sqrt(settings.workers):.2g}"
    else:
        says = "× 1"
    return [case, f"{omega:g}", says, f"{bound:.3g}", f"{measured:.3g}"]
