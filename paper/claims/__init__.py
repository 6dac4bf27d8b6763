"""Sentences of the paper, each with a figure and a verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from emfed.artifacts import Figure, Panel, Series, band, spread
from emfed.core.protocols import FloatArray
from emfed.theory import FedEMBounds, VRBounds
from paper.findings import Findings, in_words
from paper.steps import constants
from paper.traces import Trace, Traces, each, ratio, slope

TARGET = 1e-7
"""The |h|^2 to which rounds and conditional expectations are counted."""
SIZES = (100, 400, 1600)
CROWDS = (10, 40, 160)
"""Rows of a worker, and numbers of workers, that are compared."""
EPSILONS = (0.05, 0.025, 0.0125)
"""The runs stop at the last. Above the first, the larger steps are below their floor at once."""
ALPHAS = ("0", "0.1", "1")
ClaimPart = tuple[dict[str, FloatArray], str, Figure]
"""Measures, and a figure with its name."""


def analyse(traces: Traces) -> Findings:
    """All of them."""
    parts = [part(traces) for part in (_bounds, _size, _epsilon, _crowd, _memories, _silence)]
    parts += [part(traces) for part in (_naive_sum, _no_role)]
    measures = {name: values for found, _, _ in parts for name, values in found.items()}
    return Findings(measures, {name: figure for _, name, figure in parts})


def _bounds(traces: Traces) -> ClaimPart:
    """The mean of |h|^2 over rounds, beside what Theorems 3 and 4 say of it."""
    reduced, partial = traces.of("Theorem 3"), traces.of("Theorem 4")
    panels, measures = [], {}
    for group, bound in ((reduced, _theorem_3), (partial, _theorem_4)):
        name = group[0].job.run
        means = [_running_mean(t) for t in group]
        known = [bound(t) for t in group]
        last = np.array([m[-1] for m in means])
        measures[f"{name}: mean |h|² over its bound"] = last / np.array([b[-1] for b in known])
        rounds = [t.at_h("round") for t in group]
        panels.append(
            Panel(
                [
                    band("mean of |h|² so far", list(zip(rounds, means, strict=True))),
                    band("its bound", list(zip(rounds, known, strict=True))),
                ],
                "rounds",
                "$|h|^2$",
                name,
                log="xy",
            )
        )
    caption = (
        "The mean of |h|² over rounds, and the bounds of Theorem 3 (VR-FedEM) and of Theorem 4 "
        '(FedEM when half of the workers take part), with constants measured on the data. "The '
        'quantity of interest E[|h|²] is controlled by E[|H|²]" (below Theorem 3). "Partial '
        'participation impacts both the limiting variance ... and the maximal learning rate" '
        "(below Theorem 4)."
    )
    return measures, "bounds", Figure(caption, panels, share_y=True)


def _running_mean(trace: Trace) -> FloatArray:
    values = trace.at_h("squared_h")
    return np.asarray(np.cumsum(values) / np.arange(1, len(values) + 1))


def _theorem_3(trace: Trace) -> FloatArray:
    """The bound after each round; not a number where the step is beyond the theorem's."""
    settings, (problem, omega) = trace.settings, constants(trace.settings, trace.job.seed)
    inner, batch = settings.inner_rounds, settings.batch_size
    assert batch is not None
    rounds = np.arange(1, len(trace.at_h("round")) + 1)
    bounds = VRBounds(problem, omega, inner, batch)
    if settings.step_size > bounds.step * (1 + 1e-12):
        return np.full(len(rounds), np.nan)
    _, once = bounds.means(settings.step_size, 1)
    return np.asarray(once * inner / rounds)


def _theorem_4(trace: Trace) -> FloatArray:
    """The bound after each round; not a number where the step is beyond the theorem's."""
    settings, (problem, omega) = trace.settings, constants(trace.settings, trace.job.seed)
    step, bounds = settings.step_size, FedEMBounds(problem, omega, settings.participation)
    rounds = np.arange(1, len(trace.at_h("round")) + 1)
    if step > bounds.step_limit.largest:
        return np.full(len(rounds), np.nan)
    return np.array([bounds.bound(step, int(k)) for k in rounds])


def _size(traces: Traces) -> ClaimPart:
    """Rounds and conditional expectations to the target, beside those of full passes."""
    rounds, work = {}, {}
    for run in ("VR-FedEM", "full passes"):
        groups = [traces.of(f"{run}, m = {m}") for m in SIZES]
        rounds[run] = [each(g, lambda t: t.first_below(TARGET, "round")) for g in groups]
        work[run] = [each(g, expectations) for g in groups]
    # The data differ with m, and how fast EM is on them: full passes on the same data know.
    slower, less = (
        [ratio(a, b) for a, b in zip(what["VR-FedEM"], what["full passes"], strict=True)]
        for what in (rounds, work)
    )
    caption = (
        "Rounds, and conditional expectations that a worker computes, to |h|² = "
        f"{in_words(TARGET)} after "
        'the opening, with one step for all m. "In the Stochastic Approximation steps of VR-FedEM, '
        'the step sizes are independent of m" (section 1). "The complexity increases as √m" '
        "(Appendix E.2); with full passes it increases as m."
    )
    places = np.array(SIZES, dtype=np.float64)
    laws = [
        Series(
            name, places, float(np.median(first)) * (places / places[0]) ** power, reference=True
        )
        for name, first, power in (
            ("√m", work["VR-FedEM"][0], 0.5),
            ("m", work["full passes"][0], 1.0),
        )
    ]
    panels = [
        Panel(
            [*(spread(run, SIZES, values) for run, values in what.items()), *lines],
            "rows m of a worker",
            name,
            log="xy",
            ticks=list(SIZES),
            lowest=lowest,
        )
        # Rounds are to be the same: on an axis of a few rounds their chance would look like more.
        for name, what, lines, lowest in (
            ("rounds", rounds, [], 10.0),
            ("conditional expectations", work, laws, None),
        )
    ]
    return (
        {
            "VR-FedEM's rounds over those of full passes, most rows over fewest": slower[-1]
            / slower[0],
            "exponent in m of VR-FedEM's conditional expectations over those of full passes": slope(
                SIZES, less
            ),
            "exponent in m of the conditional expectations of full passes": slope(
                SIZES, work["full passes"]
            ),
        },
        "rows",
        Figure(caption, panels),
    )


def expectations(trace: Trace) -> float:
    """Conditional expectations of a worker until the target is reached, the opening left out."""
    return (trace.first_below(TARGET, "epochs") - trace["epochs"][0]) * trace.settings.rows


def _epsilon(traces: Traces) -> ClaimPart:
    """Rounds at the best step until the mean of |h|^2 over rounds is epsilon."""
    noisy = [t for t in traces.all if t.job.run.startswith("FedEM, step ")]
    steps = list(dict.fromkeys(t.job.run for t in noisy))
    best = [np.min([_reached(traces.of(s), e) for s in steps], axis=0) for e in EPSILONS]
    reduced = [_reached(traces.of("VR-FedEM, linear"), e) for e in EPSILONS]
    places = np.array(EPSILONS)
    laws = [
        Series(
            name, places, float(np.median(last)) * (places / places[-1]) ** power, reference=True
        )
        for name, last, power in (("ε⁻²", best[-1], -2), ("ε⁻¹", reduced[-1], -1))
    ]
    caption = (
        'Rounds until the mean of |h|² is ε. "The complexity K_opt(ε) is decomposed into two '
        'terms scaling respectively as σ²ε⁻² and γ_max⁻¹ε⁻¹" (below Theorem 1): single rows and '
        'the best of four steps. "K_opt(ε) = O(1/(γε))" (below Theorem 3): one step.'
    )
    series = [
        spread("FedEM, batches of one row, best step", EPSILONS, best),
        spread("VR-FedEM, batches of one row", EPSILONS, reduced),
        *laws,
    ]
    panel = Panel(series, "ε", "rounds", log="xy", ticks=list(EPSILONS))
    return (
        {
            "FedEM: exponent of the rounds in epsilon": slope(EPSILONS, best),
            "VR-FedEM: exponent of the rounds in epsilon": slope(EPSILONS, reduced),
        },
        "epsilon",
        Figure(caption, [panel]),
    )


def _reached(group: Sequence[Trace], epsilon: float) -> FloatArray:
    """The first rounds at which the mean of |h|^2 so far is at most epsilon."""
    below = [np.flatnonzero(_running_mean(trace) <= epsilon) for trace in group]
    return np.array([float(there[0] + 1) if len(there) else np.inf for there in below])


def _crowd(traces: Traces) -> ClaimPart:
    """FedEM's floor, as a power of n."""
    floors = [each(traces.of(f"n = {n}"), lambda t: t.floor) for n in CROWDS]
    law = float(np.median(floors[0])) * CROWDS[0] / np.array(CROWDS)
    caption = (
        "FedEM's floor against the number of workers: the term γ L (1 + 5ω) σ² / n of Theorem 1. "
        '"K_opt(ε) = O((1 + ω) σ² / (n ε²)) ∨ O(1/(γ_max ε))" (below Corollary 2).'
    )
    panel = Panel(
        [
            spread("FedEM, mean of the last half", CROWDS, floors),
            Series("1/n", np.array(CROWDS, dtype=np.float64), law, reference=True),
        ],
        "workers n",
        "noise floor of $|h|^2$",
        log="xy",
        ticks=list(CROWDS),
    )
    return (
        {"exponent of the floor in n": slope(CROWDS, floors)},
        "workers",
        Figure(caption, [panel]),
    )


def _memories(traces: Traces) -> ClaimPart:
    """G, and its mean over rounds."""
    group = traces.of("memories of VR-FedEM")
    errors = [t.at_h("memory_error") for t in group]
    means = [np.cumsum(e) / np.arange(1, len(e) + 1) for e in errors]
    rounds = [t.at_h("round") for t in group]
    caption = (
        '"The average squared distance between V_i and h_i(S) (i.e., G), converges to 0 in the '
        'sense of Cesaro" (below Proposition 26). Memories start at zero.'
    )
    panel = Panel(
        [
            band("G", list(zip(rounds, errors, strict=True))),
            band("mean of G so far", list(zip(rounds, means, strict=True))),
        ],
        "rounds",
        "$G$",
    )
    return (
        {
            "mean of G over all rounds over that of the first half": np.array(
                [m[-1] / m[len(m) // 2 - 1] for m in means]
            ),
            "final G over the first": np.array([e[-1] / e[0] for e in errors]),
        },
        "memories",
        Figure(caption, [panel]),
    )


def _silence(traces: Traces) -> ClaimPart:
    """Half of the workers, nothing compressed, with memories and without."""
    runs = [f"half take part, {word} memories" for word in ("with", "without")]
    caption = (
        '"Such an update H^dEM is expected not to be robust to data heterogeneity" '
        "(Appendix A): half of the workers take part, nothing is compressed, and workers "
        "hold one component each."
    )
    labels = ["with memories", "without memories"]
    name = "without memories over with, half take part"
    return _stalls(traces, dict(zip(runs, labels, strict=True)), name, "silence", caption)


def _naive_sum(traces: Traces) -> ClaimPart:
    """The two ways to put H together."""
    labels = {
        "V + sum Q / np": "H = V + Σ Q(Δ_i) / (np), the paper's",
        "sum (V_i + Q) / np": "H = Σ (V_i + Q(Δ_i)) / (np)",
    }
    caption = (
        '"Though the later solution may appear more natural, it would actually not only require to '
        "store all values V_{k,i} ... on the central server, but also impair convergence in the "
        'heterogeneous setting" (Appendix A): half of the workers take part, ω = 1, and workers '
        "hold one component each."
    )
    return _stalls(traces, labels, "the naive sum over the paper's", "naive-sum", caption)


def _stalls(
    traces: Traces, labels: Mapping[str, str], name: str, file: str, caption: str
) -> ClaimPart:
    """Two runs, each with its label, of which the second is to end far above the first."""
    runs = list(labels)
    good, bad = (each(traces.of(run), lambda t: t.final_h) for run in runs)
    curves = [band(labels[r], [(t["round"], t["squared_h"]) for t in traces.of(r)]) for r in runs]
    panel = Panel(curves, "rounds", "$|h|^2$")
    floor = each(traces.of(runs[1]), lambda t: t.flatness)
    return (
        {f"|h|²: {name}": bad / good, f"flatness of {runs[1]}": floor},
        file,
        Figure(caption, [panel]),
    )


def _no_role(traces: Traces) -> ClaimPart:
    """Without compression, |h|^2 does not depend on alpha."""
    groups = [traces.of(f"no compression, alpha = {a}") for a in ALPHAS]
    paths = np.array([[t.at_h("squared_h") for t in g] for g in groups])
    apart = np.abs(paths / paths[0] - 1).max(axis=(0, 2))
    caption = (
        '"When there is no compression ..., we prove that the introduction of the random variables '
        "V_{k,i}'s play no role whatever α > 0 and the choice of the V_{0,i}'s\" (below Theorem 1)."
        " FedEM on batches of 5 rows; the three lines lie one upon the other."
    )
    lines = [
        band(f"α = {a}", [(t["round"], t["squared_h"]) for t in g])
        for a, g in zip(ALPHAS, groups, strict=True)
    ]
    curves = [replace(line, points=True) for line in lines]  # they lie one upon the other
    figure = Figure(caption, [Panel(curves, "rounds", "$|h|^2$")])
    return {"no compression: largest relative difference of |h|²": apart}, "no-role", figure
