"""The regimes table: by which factor compression multiplies the rounds."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from emfed.artifacts import Figure, Panel, Series, Table, spread
from emfed.core.protocols import FloatArray
from emfed.theory import FedEMBounds, Problem, VRBounds
from paper.findings import Findings
from paper.jobs import KAPPA
from paper.settings import ExperimentSettings
from paper.steps import constants
from paper.traces import Trace, Traces, each, ratio

CASES = ("low noise, n = 100", "low noise, n = 10", "high noise, n = 100", "high noise, n = 10")
"""The four cells of the paper's table on FedEM: the noise by the ratio n / omega^3."""
REDUCED = ("VR-FedEM, n = 100", "VR-FedEM, n = 10")
"""The two cells of the one on VR-FedEM."""
STATISTICS = 6
"""Coordinates of the synthetic mixture's statistics: two weights, two means in the plane."""


def analyse(traces: Traces) -> Findings:
    """Measured slowdowns beside the theory's."""
    measures: dict[str, FloatArray] = {}
    found = [_regimes(traces, cases, measures) for cases in (CASES, REDUCED)]
    (fed, fed_rows), (reduced, reduced_rows) = found
    for name, cases in (("", CASES), ("VR-FedEM: ", REDUCED)):
        over = [
            values
            for measure, values in measures.items()
            if measure.startswith(cases) and measure.endswith("over the theory's")
        ]
        measures[f"{name}largest slowdown over the theory's"] = np.max(over, axis=0)
    few, many = (_strongest(measures, f"low noise, n = {n}") for n in (10, 100))
    measures["low noise, n = 10 over n = 100, largest omega"] = ratio(few, many)
    columns = ("case", "omega", "the table says", "theory, constants kept", "measured")
    tables = (
        Table(
            "The table of FedEM's regimes (section 2), with measured slowdowns", columns, fed_rows
        ),
        Table("That of VR-FedEM's (section 3)", columns, reduced_rows),
    )
    caption = (
        "By which factor compression multiplies the rounds: measured, and the theory's bound. "
        '"Depending on the situation, the complexity can be multiplied by a factor ranging from 1 '
        'to ω ∨ (ω^1.5/√n)" (section 2). With much noise and many workers one ω was run: more '
        "would be the low ratio of n to ω³ again."
    )
    reduced_caption = (
        "By which factor compression multiplies the rounds of VR-FedEM with batches of 5 rows: "
        "measured, and the theory's bound with constants measured on the data. \"The optimization "
        "complexity is then higher to the one of SPIDER-EM (by a factor proportional to "
        'ω^1.5/√n)" where ω³ ≫ n; where ω³ ≪ n, "the gain from compression is maximal" (section 3).'
    )
    figures = {
        "slowdowns": Figure(caption, fed, share_y=True),
        "reduced-slowdowns": Figure(reduced_caption, reduced, share_y=True),
    }
    return Findings(measures, figures, tables)


def _regimes(
    traces: Traces, cases: Sequence[str], measures: dict[str, FloatArray]
) -> tuple[list[Panel], list[list[str]]]:
    """A panel and rows of the table for each case; fills in the measures."""
    panels, rows = [], []
    tried = {case: list(dict.fromkeys(t.settings.keep for t in traces.of(case))) for case in cases}
    places = sorted({_omega(traces.of(c)[0].settings, k) for c in cases for k in tried[c]} - {0.0})
    for case in cases:
        seeds = [trace.job.seed for trace in traces.of(case, keep=tried[case][0])]
        settings = traces.of(case)[0].settings
        free = rounds_needed(traces, case, tried[case][0])
        omegas = [_omega(settings, keep) for keep in tried[case][1:]]
        slow = [ratio(rounds_needed(traces, case, keep), free) for keep in tried[case][1:]]
        # At every omega, so that all panels have one scale.
        promised = {w: promise(settings, w, list(dict.fromkeys(seeds))) for w in places}
        for omega, measured in zip(omegas, slow, strict=True):
            measures[f"{case}, omega {omega:g}: slowdown"] = measured
            measures[f"{case}, omega {omega:g}: slowdown over the theory's"] = (
                measured / promised[omega]
            )
            bound = float(np.median(promised[omega]))
            rows.append(_row(case, settings, omega, float(np.median(measured)), bound))
        series = [
            spread("measured", omegas, slow),
            Series(
                "theory, constants kept",
                np.array(places),
                np.array([np.median(promised[w]) for w in places]),
                points=True,
            ),
        ]
        panels.append(Panel(series, "ω", "slowdown", case, log="xy", ticks=places))
    return panels, rows


def _omega(settings: ExperimentSettings, keep: int) -> float:
    """The omega of sending so many coordinates."""
    return (settings.dimension if settings.data == "linear" else STATISTICS) / keep - 1


def _strongest(measures: dict[str, FloatArray], case: str) -> FloatArray:
    """The slowdown of a case at the largest omega, which comes last."""
    return [
        v for name, v in measures.items() if name.startswith(f"{case},") and name.endswith("down")
    ][-1]


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


@lru_cache
def measured_problem(settings: ExperimentSettings, seed: int) -> Problem:
    """The mixture's constants on this seed's data."""
    return constants(settings, seed)[0]


def promise(settings: ExperimentSettings, omega: float, seeds: Sequence[int]) -> FloatArray:
    """The theory's slowdown for each seed; on the mixture its constants are measured."""
    assert settings.target is not None
    if settings.data == "linear":
        return np.full(
            len(seeds), FedEMBounds(exact_problem(settings), omega).slowdown(settings.target)
        )
    inner, batch = settings.inner_rounds, settings.batch_size
    assert batch is not None
    found = []
    for seed in seeds:
        problem = measured_problem(settings, seed)
        bounds = [VRBounds(problem, w, inner, batch) for w in (omega, 0.0)]
        needed = [each.rounds(settings.target) for each in bounds]
        found.append(needed[0] / needed[1])
    return np.array(found)


def _row(
    case: str, settings: ExperimentSettings, omega: float, measured: float, bound: float
) -> list[str]:
    worst = f"× omega^1.5 / sqrt(n) = {omega**1.5 / np.sqrt(settings.workers):.2g}"
    if settings.data == "linear":
        assert settings.target is not None
        bounds = FedEMBounds(exact_problem(settings), omega)
        noisy = bounds.rounds(settings.target).regime == "high noise"
        limited = bounds.step_limit.regime == "compression"
        says = f"× omega = {omega:g}" if noisy else worst if limited else "× 1"
    else:
        says = worst if omega**3 > settings.workers else "× 1"
    return [case, f"{omega:g}", says, f"{bound:.3g}", f"{measured:.3g}"]
