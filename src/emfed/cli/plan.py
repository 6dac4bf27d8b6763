"""``emfed plan``: what the theory says of a run, before it is made."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console
from rich.table import Table
from threadpoolctl import threadpool_limits

from emfed.cli.help import Options
from emfed.cli.intake import read_workers
from emfed.compressors.words import parse_compressor
from emfed.core.streams import check_seed
from emfed.data.synthetic import START, TRUTH, synthetic_federation
from emfed.models import gaussian_mixture
from emfed.theory import Estimate, Plan, estimate_problem, plan
from emfed.theory.planning import Advice, check_goal


def run_plan(options: Options) -> None:
    """Measure the constants, plan, print."""
    operator, share = parse_compressor(options.compressor), options.participation
    check_goal(share, options.accuracy)
    check_seed(options.seed)
    console = Console(quiet=options.json_output)
    with threadpool_limits(options.threads), console.status("measuring the constants on the data"):
        found = _measure(options)
        goal = {"batch_size": options.batch_size, "epsilon": options.accuracy}
        advice = plan(found, operator, participation=share, **goal)
    if options.json_output:
        out = {"seed": options.seed, "constants": _constants(found), "plan": advice.describe()}
        print(json.dumps(out))  # noqa: T201
    else:
        _print(console, found, advice, options.seed)


def _measure(options: Options) -> Estimate:
    common: dict[str, Any] = {"in_metric": options.metric, "seed": options.seed}
    if options.data is not None:
        model = gaussian_mixture(options.n_components or 2, options.covariance_type or "full")
        workers = read_workers(options, [str(options.data)]).workers
        return estimate_problem(model, workers, **common)
    known = gaussian_mixture(2, "known", known_covariance=TRUTH.covariances)
    data = synthetic_federation(options.seed)
    return estimate_problem(known, data, start=START, weights="uniform", **common)


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
    first, second = _promises(advice.fed_em), _promises(advice.vr_fed_em)
    for name, words in first.items():
        table.add_row(name, words, second[name])
    console.print(table)
    for note in advice.notes:
        console.print(f"- {note}")


def _promises(a: Advice) -> dict[str, str]:
    return {
        "step size": f"{a.step_size:.3g}",
        "memory rate": f"{a.memory_rate:.3g}",
        "batch size": "all rows" if a.batch_size is None else str(a.batch_size),
        "inner rounds": "-" if a.inner_rounds is None else str(a.inner_rounds),
        "rounds": f"{a.rounds:.3g}" if a.rounds > 1e6 else f"{a.rounds:,}",
        "conditional expectations": f"{a.evaluations:.2g}",
        "MB up, per worker": f"{a.bytes_up / 1e6:.3g}",
        "MB down, per worker": f"{a.bytes_down / 1e6:.3g}",
        "step limited by": a.step_regime,
        "noise": a.noise_regime,
        "rounds, against no compression": f"x {a.slowdown:.2f}",
    }
