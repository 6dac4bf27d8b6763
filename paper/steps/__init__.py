"""The step size, against gamma_max and the bound of Theorem 1."""

from __future__ import annotations

import numpy as np

from emfed.artifacts import Figure, Panel, Series, spread
from emfed.core.protocols import FloatArray
from emfed.data.synthetic import START, synthetic_federation
from emfed.theory import FedEMBounds, Problem, estimate_problem, omega_of
from paper.findings import Findings
from paper.jobs import synthetic_mixture
from paper.settings import ExperimentSettings
from paper.traces import Traces, each, slope

CURVE = 40
"""Points of the curve of the bound."""


def analyse(traces: Traces) -> Findings:
    """The mean of |h|^2 over rounds beside its bound, and the floor as a power of the step."""
    steps: list[float] = traces.values("step_size")
    settings = traces.all[0].settings
    seeds = sorted({trace.job.seed for trace in traces.all})
    problems = [constants(settings, seed) for seed in seeds]
    limits = np.array([FedEMBounds(p, omega).step_limit.largest for p, omega in problems])
    means = [
        each(traces.where(step_size=s), lambda t: float(t.at_h("squared_h").mean())) for s in steps
    ]
    floors = [each(traces.where(step_size=s), lambda t: t.floor) for s in steps]
    small = [k for k, s in enumerate(steps) if s <= limits.min()]
    return Findings(
        {
            "gamma_max": limits,
            "largest mean |h|² over its bound, up to gamma_max": np.max(
                [means[k] / bounds(problems, steps[k], settings) for k in small], axis=0
            ),
            "best step over gamma_max": np.array(steps)[np.argmin(means, axis=0)] / limits,
            "exponent of the floor in the step, from gamma_max to 1": slope(
                *zip(
                    *[(s, f) for s, f in zip(steps, floors, strict=True) if limits.min() <= s <= 1],
                    strict=True,
                )
            ),
        },
        {"steps": _figure(steps, means, floors, problems, limits, settings)},
    )


def constants(settings: ExperimentSettings, seed: int) -> tuple[Problem, float]:
    """What the theorem needs to know, measured on this seed's data, and omega."""
    data = synthetic_federation(seed, workers=settings.workers, rows_per_worker=settings.rows)
    found = estimate_problem(synthetic_mixture(), data, weights="uniform", start=START, seed=seed)
    omega = omega_of(settings.make_compressor(), found.layout).value
    return found.with_batch(settings.batch_size), omega


def bounds(
    problems: list[tuple[Problem, float]], step: float, settings: ExperimentSettings
) -> FloatArray:
    """The theorem's bound for each seed."""
    assert settings.rounds is not None
    return np.array([FedEMBounds(p, w).bound(step, settings.rounds) for p, w in problems])


def _figure(
    steps: list[float],
    means: list[FloatArray],
    floors: list[FloatArray],
    problems: list[tuple[Problem, float]],
    limits: FloatArray,
    settings: ExperimentSettings,
) -> Figure:
    limit = float(limits.min())
    allowed = np.geomspace(steps[0], limit, CURVE)
    bound = np.array([np.median(bounds(problems, float(s), settings)) for s in allowed])
    lowest = min(float(f.min()) for f in floors)
    panel = Panel(
        [
            spread("mean over all rounds", steps, means),
            spread("mean over the last half (floor)", steps, floors),
            Series("Theorem 1's bound on the mean", allowed, bound),
            Series("gamma_max", np.full(2, limit), np.array([lowest, bound.max()]), reference=True),
        ],
        "step size",
        "$|h|^2$",
        log="xy",
        ticks=steps,
    )
    return Figure("|h|² against the step size, with Theorem 1's limit and bound.", [panel])
