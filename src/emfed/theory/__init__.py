"""The paper's theory as numbers: omega, step-size limits, bounds, regimes, planning a run.

Every formula cites the lines of the paper's source it stands at. See `bounds` for the symbols.
"""

from emfed.theory.bounds import (
    Rounds,
    StepLimit,
    fedem_bound,
    fedem_corollary,
    fedem_evaluations,
    fedem_rounds,
    fedem_step,
    fedem_step_limit,
    lambda_star,
    memory_rate,
    noise_floor,
    settled_mean_field,
    slowdown,
    vr_batch,
    vr_bounds,
    vr_evaluations,
    vr_inner_rounds,
    vr_regime,
    vr_rounds,
    vr_step,
)
from emfed.theory.estimates import Estimate, estimate_problem
from emfed.theory.planning import Advice, Plan, plan
from emfed.theory.problem import Omega, Problem, memory_error, omega_of, participating

__all__ = [
    "Advice",
    "Estimate",
    "Omega",
    "Plan",
    "Problem",
    "Rounds",
    "StepLimit",
    "estimate_problem",
    "fedem_bound",
    "fedem_corollary",
    "fedem_evaluations",
    "fedem_rounds",
    "fedem_step",
    "fedem_step_limit",
    "lambda_star",
    "memory_error",
    "memory_rate",
    "noise_floor",
    "omega_of",
    "participating",
    "plan",
    "settled_mean_field",
    "slowdown",
    "vr_batch",
    "vr_bounds",
    "vr_evaluations",
    "vr_inner_rounds",
    "vr_regime",
    "vr_rounds",
    "vr_step",
]
