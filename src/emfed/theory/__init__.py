"""The paper's theory as numbers: omega, step-size limits, bounds, regimes, planning a run.

Every formula cites the theorem, assumption (A1 to A9) or section of the paper.
"""

from emfed.theory.bounds import (
    FedEMBounds,
    RoundsNeeded,
    StepLimit,
    VRBounds,
    memory_rate,
    noise_floor,
    settled_mean_field,
    vr_inner_rounds,
)
from emfed.theory.estimates import Estimate, estimate_problem
from emfed.theory.planning import Advice, Plan, plan
from emfed.theory.problem import Omega, Problem, memory_error, omega_of, participating

__all__ = [
    "Advice",
    "Estimate",
    "FedEMBounds",
    "Omega",
    "Plan",
    "Problem",
    "RoundsNeeded",
    "StepLimit",
    "VRBounds",
    "estimate_problem",
    "memory_error",
    "memory_rate",
    "noise_floor",
    "omega_of",
    "participating",
    "plan",
    "settled_mean_field",
    "vr_inner_rounds",
]
