"""Partial participation, against the noise floor."""

from __future__ import annotations

import numpy as np

from emfed.artifacts import Figure, Panel, Series, band, spread
from emfed.core.protocols import FloatArray
from paper.findings import Findings
from paper.traces import Traces, each, slope

RUNS = ("FedEM", "VR-FedEM")


def analyse(traces: Traces) -> Findings:
    """The floor of FedEM as a power of p, and where VR-FedEM ends."""
    ps: list[float] = traces.values("participation")
    floors = [each(traces.of("FedEM", participation=p), lambda t: t.floor) for p in ps]
    ends = [each(traces.of("VR-FedEM", participation=p), lambda t: t.final_h) for p in ps]
    return Findings(
        {
            "FedEM: exponent of the floor in p": slope(ps, floors),
            "FedEM: floor with the fewest over that with all": floors[0] / floors[-1],
            "VR-FedEM: largest final |h|² over p": np.max(ends, axis=0),
            "VR-FedEM: largest final |h|² over FedEM's floor": np.max(
                np.array(ends) / np.array(floors), axis=0
            ),
        },
        {"floor": _figure(traces, ps, floors, ends)},
    )


def _figure(
    traces: Traces, ps: list[float], floors: list[FloatArray], ends: list[FloatArray]
) -> Figure:
    law = np.median(floors[-1]) / np.array(ps)
    by_p = [
        spread("FedEM, mean of the last half", ps, floors),
        spread("VR-FedEM, end", ps, ends),
        Series("1/p", np.array(ps), law, reference=True),
    ]
    by_round = [
        band(
            f"{run}, p = {p:g}",
            [(t["round"], t["squared_h"]) for t in traces.of(run, participation=p)],
            80,
        )
        for run in RUNS
        for p in (ps[0], ps[-1])
    ]
    return Figure(
        'The noise floor against participation. "Partial participation impacts both the limiting '
        'variance (which increases by a factor proportional to 1/p) and the maximal learning rate" '
        "(below Theorem 4).",
        [
            Panel(by_p, "probability p that a worker takes part", "$|h|^2$", log="xy", ticks=ps),
            Panel(by_round, "rounds", "$|h|^2$"),
        ],
    )
