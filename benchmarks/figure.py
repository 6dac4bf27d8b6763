"""README's figure: all bytes of a worker until the pooled answer, from knowing nothing.

Air quality at twelve stations of Beijing (ten columns, complete rows), a mixture of five Gaussians
with full covariances. Every run finds its own start; opening, start, rounds and envelopes count,
up and down. The target is where pooled EM ends from the run's own start.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np

import emfed
from benchmarks.answer import reached, sets
from benchmarks.answer_network import WAYS, followed

SET = "Beijing full"
NATS, ROUNDS = 1e-3, 90
FIGURE = Path(__file__).parent.parent / "docs" / "bytes-to-the-answer.png"


def bench_figure() -> list[dict[str, Any]]:
    """Bytes a worker until within 1e-3 nats a row of pooled EM; draws the figure."""
    if not os.environ.get("EMFED_DATA"):
        return []
    warnings.simplefilter("ignore", emfed.EmfedWarning)
    exact = emfed.Identity("float32")
    plain = emfed.FedEM(exact, step_size=1.0, broadcast=exact)
    model, workers, algorithm = next((m, w, a) for name, m, w, a, _ in sets() if name == SET)
    curves, rows = {}, []
    for name, chosen, masks in (
        ("32-bit floats", plain, False),
        ("emfed, masked sums", algorithm, True),
        ("emfed", algorithm, False),
    ):
        curve = followed(model, workers, chosen, ROUNDS, 0, masks)
        spent = {
            way: curve[f"opening_{way}"] + curve[f"start_{way}"] + curve[f"all_{way}"]
            for way in WAYS
        }
        curves[name] = (spent["up"] + spent["down"], curve["gap"])
        rounds = reached(curve, NATS)["rounds"]
        bytes_ = {way: rounds and float(spent[way][rounds - 1]) for way in WAYS}
        rows.append({"run": name, "rounds": rounds, **bytes_})
    raw = workers.rows.nbytes / workers.size
    rows.append({"run": "the rows themselves", "rounds": None, "up": raw, "down": 0.0})
    draw(curves, raw, FIGURE)
    return rows


def draw(curves: dict[str, tuple[Any, Any]], raw: float, path: Path) -> None:
    """One panel, whose curves bear their names."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from emfed.artifacts.figures import STYLE

    colours = {"32-bit floats": "#000000", "emfed, masked sums": "#56B4E9", "emfed": "#0072B2"}
    with plt.rc_context(STYLE):
        figure, panel = plt.subplots(figsize=(7.2, 3.2), layout="constrained")
        for name, (spent, gap) in curves.items():
            shown = gap > 1e-5
            panel.plot(spent[shown], gap[shown], color=colours[name], lw=2)
            crossed = int(np.flatnonzero(gap > NATS)[-1])
            panel.annotate(
                f"{name}\n{spent[min(crossed + 1, len(spent) - 1)] / 1000:.0f} kB",
                (spent[crossed], NATS),
                (6, 4),
                textcoords="offset points",
                color=colours[name],
            )
        panel.axvline(raw, color="#D55E00", lw=1.5, ls="--")
        panel.annotate(
            f"the rows themselves\n{raw / 1000:,.0f} kB",
            (raw, NATS),
            (-6, 4),
            textcoords="offset points",
            ha="right",
            color="#D55E00",
        )
        panel.axhline(NATS, color="grey", lw=0.8)
        panel.set(xscale="log", yscale="log", ylim=(1e-5, 3))
        panel.set_xlabel("bytes of a site, up and down, from the first message on")
        panel.set_ylabel("nats a row short of\nthe pooled answer")
        panel.set_title(
            "Air quality at twelve stations: five Gaussians with full covariances", fontsize=10
        )
        figure.savefig(path)
        plt.close(figure)
