"""The batch size, against the noise floor."""

from __future__ import annotations

import numpy as np

from emfed.artifacts import Figure, Panel, Series, band, spread
from paper.findings import Findings
from paper.traces import Traces, each, slope


def analyse(traces: Traces) -> Findings:
    """The floor as a power of the batch size."""
    sizes = traces.values("batch_size")
    floors = [each(traces.where(batch_size=b), lambda t: t.floor) for b in sizes]
    law = Series(
        "1/b",
        np.array(sizes, dtype=np.float64),
        np.median(floors[0]) * sizes[0] / np.array(sizes),
        reference=True,
    )
    by_size = Panel(
        [spread("FedEM, mean of the last half", sizes, floors), law],
        "batch size b (rows)",
        "noise floor of $|h|^2$",
        log="xy",
        ticks=sizes,
    )
    by_round = Panel(
        [
            band(f"b = {b}", [(t["round"], t["squared_h"]) for t in traces.where(batch_size=b)], 80)
            for b in sizes
        ],
        "rounds",
        "$|h|^2$",
    )
    return Findings(
        {
            "exponent of the floor in b": slope(sizes, floors),
            "floor of the smallest batch over that of the largest": floors[0] / floors[-1],
        },
        {"floor": Figure("The noise floor against the batch size.", [by_size, by_round])},
    )
