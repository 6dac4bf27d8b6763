"""``emfed plan``: what the theory says of a run, before it is made."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console
from rich.table import Table
from threadpoolctl import threadpool_limits

from emfed.cli.intake import read_workers
from emfed.compressors.words import parse_compressor
from emfed.core.streams import check_seed
from emfed.data.synthetic import START, TRUTH, synthetic_federation
from emfed.models import gaussian_mixture
from emfed.theory import Estimate, Plan, estimate_problem, plan
from emfed.theory.planning import check_goal


def run_plan(
    rows: tuple[Any, ...] | None,
    n_components: int | None,
    covariance_type: str | None,
    compressor: str,
    participation: float,
    batch_size: int | None,
    epsilon: float,
    in_metric: bool,
    seed: int,
    threads: int,
    json_output: bool,
) -> None:
    """Measure the constants, plan, print."""
    operator = parse_compressor(compressor)
    check_goal(participation, epsilon)
    check_seed(seed)
    console = Console(quiet=json_output)
    with threadpool_limits(threads), console.status("measuring the constants on the data"):
        found = _measure(rows, n_components, covariance_type, in_metric, seed)
        advice = plan(
            found, operator, participation=participation, batch_size=batch_size, epsilon=epsilon
        )
    if json_output:
        out = {"seed": seed, "constants": _constants(found), "plan": advice.describe()}
        print(json.dumps(out))  # noqa: T201
    else:
        _print(console, found, advice, seed)


def _measure(
    rows: tuple[Any, ...] | None,
    n_components: int | None,
    covariance_type: str | None,
    in_metric: bool,
    seed: int,
) -> Estimate:
    if rows is not None:
        model = gaussian_mixture(n_components or 2, covariance_type or "full")
        workers = read_workers(*rows).workers
        return estimate_problem(model, workers, in_metric=in_metric, seed=seed)
    known = gaussian_mixture(2, "known", known_covariance=TRUTH.covariances)
    return estimate_problem(
        known,
        synthetic_federation(seed),
        start=START,
        weights="uniform",
        in_metric=in_metric,
        seed=seed,
    )


def _constants(found: Estimate) -> dict[str, Any]:
    problem = found.problem
    return {
        "L/sqrt(n)": problem.spread_lipschitz,
        "sample L/sqrt(n)": problem.spread_sample_lipschitz,
        "L_W": problem.smoothness,
        "v_min": problem.v_min,
        "v_max": problem.largest_eigenvalue,
        "W(S_0) - min W": problem.gap,
        "sigma^2 of one row": float(found.sample_variance.mean()),
        "norm": problem.norm,
    }


def _verdict(advice: Plan) -> str:
    """The plan in two sentences."""
    costs = {
        name: "is free" if a.slowdown < 1.05 else f"costs {a.slowdown:.2g} times the rounds"
        for name, a in (("FedEM", advice.fed_em), ("VR-FedEM", advice.vr_fed_em))
    }
    words = ", ".join(f"compression {cost} for {name}" for name, cost in costs.items())
    return (
        f"By the theory, {words}. Start with FedEM's default step, {advice.default_step:.3g} here, "
        "a rule of thumb; the theorems' steps are for the worst case."
    )


def _print(console: Console, found: Estimate, advice: Plan, seed: int) -> None:
    exact = "exactly" if advice.omega_exact else "at most"
    console.print(
        f"{advice.workers} workers, q = {advice.dimension}, omega = {advice.omega:.3g} ({exact}, "
        f"{advice.norm} norm), {advice.message_bytes:.0f} bytes a message, p = "
        f"{advice.participation:g}, seed {seed}"
    )
    console.print(_verdict(advice))
    constants = Table(title="Constants measured on the data")
    for heading in ("", "value"):
        constants.add_column(heading, justify="right" if heading else "left")
    for name, value in _constants(found).items():
        constants.add_row(name, f"{value:.3g}" if isinstance(value, float) else str(value))
    console.print(constants)
    table = Table(title=f"What the theorems promise: mean |h|² at most {advice.epsilon:g}")
    table.add_column("")
    for title in ("FedEM", "VR-FedEM"):
        table.add_column(title, justify="right")
    both = (advice.fed_em, advice.vr_fed_em)
    rows: dict[str, list[str]] = {
        "step size": [f"{a.step_size:.3g}" for a in both],
        "memory rate": [f"{a.memory_rate:.3g}" for a in both],
        "batch size": ["all rows" if a.batch_size is None else str(a.batch_size) for a in both],
        "inner rounds": ["-" if a.inner_rounds is None else str(a.inner_rounds) for a in both],
        "rounds": [f"{a.rounds:.3g}" if a.rounds > 1e6 else f"{a.rounds:,}" for a in both],
        "conditional expectations": [f"{a.evaluations:.2g}" for a in both],
        "MB up, per worker": [f"{a.bytes_up / 1e6:.3g}" for a in both],
        "MB down, per worker": [f"{a.bytes_down / 1e6:.3g}" for a in both],
        "step limited by": [a.step_regime for a in both],
        "noise": [a.noise_regime for a in both],
        "rounds, against no compression": [f"x {a.slowdown:.2f}" for a in both],
    }
    for name, cells in rows.items():
        table.add_row(name, *cells)
    console.print(table)
    for note in advice.notes:
        console.print(f"- {note}")
