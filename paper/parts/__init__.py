"""Operators, batches, participation and memories, each by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from emfed.artifacts import Figure, Panel, Series, Table, band
from emfed.compressors import COMPRESSORS
from emfed.core.protocols import Compressor, FloatArray
from emfed.core.streams import Purpose, normals, uniforms
from paper.findings import Findings
from paper.traces import Trace, Traces, each

DRAWS, CHUNK, DIMENSION = 2**19, 2**16, 4
"""The standard error of a bias is sqrt(omega / DRAWS) at most: 0.24% for the coarsest example (one
coordinate of four, omega = 3), below 0.15% for all others; the verdict asks for 0.75%."""
LOSSY = ("no losses", "a tenth of the uploads lost")


def analyse(traces: Traces) -> Findings:
    """Each part's measure beside what it must be."""
    seeds = list(dict.fromkeys(trace.job.seed for trace in traces.all))
    one, many = (traces.of(f"batches of {b}") for b in ("1", "all rows"))
    rows = many[0].settings.batch_size
    assert rows is not None
    kinds = [k for k in COMPRESSORS.values() if isinstance(k, type) and issubclass(k, Compressor)]
    operators = [operator for kind in kinds for operator in kind.examples()]
    biases = np.array([[bias(operator, seed) for operator in operators] for seed in seeds])
    ends = {run: each(traces.of(run), lambda t: t.final_h) for run in LOSSY}
    names = _names(operators)
    largest = biases.max(axis=0)
    places = np.arange(len(operators), dtype=np.float64)
    wrong = Series(
        "what 1% too long would be",
        np.full(2, 1.0),
        np.array([-0.5, len(operators) - 0.5]),
        reference=True,
    )
    panel = Panel(
        [Series("largest over seeds", 100 * largest, places, points=True, line=False), wrong],
        "bias, in % of |x|",
        "",
        log="",
        ticks=(0, 0.25, 0.5, 0.75, 1),
        names=names,
    )
    table = Table(
        "The operators, and the largest bias over seeds",
        ("operator", "settings", "bias"),
        [
            (name, _settings(operator), f"{value:.2g}")
            for name, operator, value in zip(names, operators, largest, strict=True)
        ],
    )
    losses = [band(run, [(t["round"], t["squared_h"]) for t in traces.of(run)]) for run in LOSSY]
    losses[1] = replace(losses[1], points=True)  # the lines lie one upon the other
    return Findings(
        {
            "largest bias of an operator": biases.max(axis=1),
            "rows of a batch times its variance, over that of one row": rows
            * each(many, oracle_variance)
            / each(one, oracle_variance),
            "half of the workers: mean |H|² over |h|²": each(
                traces.of("half of the workers"),
                lambda t: float((t.at_h("squared_H") / t.at_h("squared_h")).mean()),
            ),
            "final |h|² with losses": ends[LOSSY[1]],
            "final |h|² without losses": ends[LOSSY[0]],
        },
        {
            "operators": Figure(
                "The bias of every operator, from half a million draws. The table says what the "
                "numbers stand for.",
                [panel],
            ),
            "losses": Figure(
                "|h|² against rounds, without losses and with a tenth of the uploads lost.",
                [Panel(losses, "rounds", "$|h|^2$")],
            ),
        },
        (table,),
    )


def bias(operator: Compressor, seed: int) -> float:
    """|E Q(x) - x| / |x| along x or along an axis, the larger; x is one for all draws."""
    x = normals(seed, 0, Purpose.DATA, np.zeros(1, np.int64), DIMENSION)
    total = np.zeros(DIMENSION)
    for start in range(0, DRAWS, CHUNK):
        draws = np.arange(start, start + CHUNK, dtype=np.int64)
        u = uniforms(seed, 1, Purpose.COMPRESSION, draws, operator.draws(DIMENSION))
        vectors = np.broadcast_to(x, (CHUNK, DIMENSION))
        message = operator.compress(np.ascontiguousarray(vectors), u)
        total += operator.decompress(message, u, DIMENSION).sum(axis=0)
    error: FloatArray = total / DRAWS - x[0]
    length = float(np.linalg.norm(x))
    return max(abs(float(error @ x[0])) / length**2, float(np.abs(error).max()) / length)


def oracle_variance(trace: Trace) -> float:
    """The variance of H: what |H|^2 has above |h|^2, on average."""
    return float((trace.at_h("squared_H") - trace.at_h("squared_h")).mean())


def _names(operators: Sequence[Compressor]) -> list[str]:
    """The kind of each, with a number."""
    kinds = [str(o.describe()["compressor"]).removeprefix("random-") for o in operators]
    return [f"{kind} {kinds[: k + 1].count(kind)}" for k, kind in enumerate(kinds)]


def _settings(operator: Compressor) -> str:
    told = {k: v for k, v in operator.describe().items() if k != "compressor" and v is not None}
    return ", ".join(f"{name} {value}" for name, value in told.items())
