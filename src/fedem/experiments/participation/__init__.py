"""Partial participation, against the noise floor."""

from __future__ import annotations

import numpy as np

from fedem.experiments.findings import Findings
from fedem.experiments.traces import Traces, each, slope
from fedem.reporting import Figure, Panel, Series, band, spread


def analyse(traces: Traces) -> Findings:
    """The floor of FedEM as a power of p, and where VR-FedEM ends."""
    ps = traces.values("participation")
    floors = [each(traces.where(algorithm="fedem", participation=p), lambda t: t.floor) for p in ps]
    ends = [
        each(traces.where(algorithm="vr-fedem", participation=p), lambda t: t.final_h) for p in ps
    ]
    middle = float(np.median(floors[-1]))
    law = Series("1/p", np.array(ps), middle / np.array(ps), reference=True)
    by_p = Panel(
        [
            spread("FedEM, mean of the last half", ps, floors),
            spread("VR-FedEM, end", ps, ends),
            law,
        ],
        "probability p that a worker takes part",
        "$|h|^2$ after all rounds",
        log="xy",
        ticks=ps,
    )
    by_round = Panel(
        [
            band(
                f"FedEM, p = {p:g}",
                [
                    (t["round"], t["squared_h"])
                    for t in traces.where(algorithm="fedem", participation=p)
                ],
                80,
            )
            for p in (ps[0], ps[-1])
        ]
        + [
            band(
                f"VR-FedEM, p = {p:g}",
                [
                    (t["round"], t["squared_h"])
                    for t in traces.where(algorithm="vr-fedem", participation=p)
                ],
                80,
            )
            for p in (ps[0], ps[-1])
        ],
        "rounds",
        "$|h|^2$",
    )
    return Findings(
        {
            "FedEM: exponent of the floor in p": slope(ps, floors),
            "FedEM: floor with the fewest over that with all": floors[0] / floors[-1],
            "VR-FedEM: largest final |h|² over p": np.max(ends, axis=0),
            "VR-FedEM: largest final |h|² over FedEM's floor": np.max(
                np.array(ends) / np.array(floors), axis=0
            ),
        },
        {"floor": Figure("The noise floor against participation.", [by_p, by_round])},
    )
