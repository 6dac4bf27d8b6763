"""README's figure: all bytes of a worker until the pooled answer, from knowing nothing.

Air quality at twelve stations of Beijing (ten columns, complete rows), a mixture of five Gaussians
with full covariances. Every run finds its own start; opening, start, rounds and envelopes count,
up and down. The target is where pooled EM ends from the run's own start. Shown is the median run of
five seeds.

Runs with masks and without find starts of their own. What masks cost in rounds shows where both
begin at the same place: `bench_pairs`, on every twentieth row.
"""

from __future__ import annotations

import itertools
import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np

import emfed
from benchmarks.answer import NATS as MARKS
from benchmarks.answer import Runs, curve_of, reached, sets
from benchmarks.answer_network import WAYS, followed

SET = "Beijing full"
NATS, ROUNDS = 1e-3, 150
EVERY, SEEDS = 20, 5
FIGURE = Path(__file__).parent.parent / "docs" / "bytes-to-the-answer.png"


def bench_figure(keep: Path | None = None, minutes: float = np.inf) -> list[dict[str, Any]]:
    """Bytes a worker until within 1e-3 nats a row of pooled EM, medians of seeds; draws the figure.

    What is in the file ``keep`` is not run again, and nothing begins after so many minutes.
    """
    if not os.environ.get("EMFED_DATA"):
        return []
    warnings.simplefilter("ignore", emfed.EmfedWarning)
    exact, runs = emfed.Identity("float32"), Runs(keep, minutes)
    plain = emfed.FedEM(exact, step_size=1.0, broadcast=exact)
    model, workers, algorithm = next((m, w, a) for _, m, w, a, _ in sets((SET,)))
    ways = {
        "32-bit floats": (plain, False),
        "emfed, masked sums": (algorithm, True),
        "emfed": (algorithm, False),
    }
    for seed, (name, (chosen, masks)) in itertools.product(range(SEEDS), ways.items()):
        if runs.lacks(f"{name}/{seed}"):
            curve = followed(model, workers, chosen, ROUNDS, seed, masks)
            runs.keep(f"{name}/{seed}", _spent(curve, reached(curve, NATS)["rounds"]))
    raw = workers.rows.nbytes / workers.size
    rows = [{"run": "the rows themselves", "rounds": None, "up": raw, "down": 0.0}]
    for name in ways:
        own = [runs.found[key] for s in range(SEEDS) if (key := f"{name}/{s}") in runs.found]
        rows.append({"run": name, **_middle(own), "each": [run["rounds"] for run in own]})
    draw(rows, FIGURE)
    return rows


def _spent(curve: dict[str, Any], rounds: int | None) -> dict[str, Any]:
    """All bytes of a worker until so many rounds are made."""
    if rounds is None:
        return {"rounds": None, "up": None, "down": None}
    spent = {w: curve[f"opening_{w}"] + curve[f"start_{w}"] + curve[f"all_{w}"] for w in WAYS}
    return {"rounds": rounds, **{way: float(spent[way][rounds - 1]) for way in WAYS}}


def _middle(own: list[dict[str, Any]]) -> dict[str, Any]:
    """The median run, those that did not arrive last."""
    if not own:
        return {"rounds": None, "up": None, "down": None}
    return sorted(own, key=lambda run: run["rounds"] or np.inf)[(len(own) - 1) // 2]


def bench_pairs(keep: Path | None = None, minutes: float = np.inf) -> list[dict[str, Any]]:
    """Rounds to the pooled answer from one start, with masks and without; of two starts a seed."""
    if not os.environ.get("EMFED_DATA"):
        return []
    warnings.simplefilter("ignore", emfed.EmfedWarning)
    model, whole, algorithm = next((m, w, a) for _, m, w, a, _ in sets((SET,)))
    ends = [-(-end // EVERY) for end in whole.offsets.tolist()]
    workers, runs = emfed.data.WorkerData(whole.rows[::EVERY], np.array(ends)), Runs(keep, minutes)
    found = []
    for seed, own in itertools.product(range(SEEDS), (False, True)):
        if runs.lacks(key := f"pairs/{seed}/{own}"):
            runs.keep(key, _pair(model, workers, algorithm, seed, own))
        found += [runs.found[key]] if key in runs.found else []
    return found


def _pair(model: Any, workers: Any, algorithm: Any, seed: int, own: bool) -> dict[str, Any]:
    """Both ways from the start that one of them finds."""
    first = emfed.fit(model, workers, algorithm, rounds=0, tol=0, seed=seed, masks=own)
    pooled = emfed.fit(model, workers, emfed.EM(), start=first.params, tol=1e-9, rounds=1500)
    target = -pooled.log_likelihood(workers.rows)
    row: dict[str, Any] = {"seed": seed, "start": "masked" if own else "plain"}
    row |= {"pooled": -target, "pooled rounds": pooled.rounds}
    for name, masks in (("plain", False), ("masked", True)):
        curve = curve_of(model, workers, algorithm, first.params, target, ROUNDS, seed, masks=masks)
        row[name] = [reached(curve, nats)["rounds"] for nats in MARKS]
        row[f"{name} ends"] = float(curve["end"])
    return row


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """A bar for each run that arrived, with its bytes."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from emfed.artifacts.figures import STYLE

    known = [row for row in rows if row["up"] is not None][::-1]
    names = [row["run"] for row in known]
    totals = [row["up"] + row["down"] for row in known]
    colours = ["#0072B2" if name.startswith("emfed") else "#999999" for name in names]
    with plt.rc_context(STYLE):
        figure, panel = plt.subplots(figsize=(7.2, 0.8 + 0.5 * len(known)), layout="constrained")
        bars = panel.barh(names, totals, color=colours, height=0.6)
        panel.bar_label(bars, [f"{total / 1000:,.1f} kB" for total in totals], padding=4)
        panel.set(xscale="log", xlim=(1e3, 6 * max(totals)))
        panel.grid(axis="y", visible=False)
        panel.set_xlabel("bytes of a station, up and down, until the model of all rows is found")
        figure.savefig(path)
        plt.close(figure)
