"""What no rows can say, refused and named; and what is odd, told to whoever runs the server.

A worker speaks for its own rows, and nobody can check them. Some numbers no rows can give: shares
below zero, masses that do not sum to one, a negative variance, numbers so large that their squares
are infinite. Those are proofs, and the worker is out. What is merely odd (rows far from those of
all others, one worker with nearly all of the rows) is a warning in the log.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from emfed.core.protocols import FloatArray, IntArray, Model, Summaries
from emfed.models.clusters import Clusters
from emfed.models.side_by_side import SideBySide

MOST_ROWS = 1 << 40
"""No worker has as many: of one number each they would be 8 terabytes. Sums of them are exact."""
LARGEST_NUMBER = 1e150
"""The square of a larger number is not finite, and models are made of squares."""
LARGEST_UPLOAD = 1e15
"""Times (1 + |S|) over a worker's share of the rows. In a frame statistics are about 1, and of a
worker with a share w at most 1/w; models without a frame have those of the data."""
ROUNDING = 1e-6
"""What rounding may add to a share."""
DOMINANT, FAR = 1000.0, 100.0
"""Rows of one worker over those of all others together; distance of its mean from those of the
others, in standard deviations: odd, if larger."""


def impossible_summary(count: int, summary: Summaries, total: float | None) -> str:
    """What no rows can say of themselves in a join, in words; empty if rows could."""
    if not 0 < count < MOST_ROWS:
        return f"it says that it has {count} rows, which no worker has."
    if total is not None and not 0 < total < LARGEST_NUMBER:
        return f"it says that its rows weigh {total:g} together; weights are positive."
    for name, values in summary.items():
        if np.abs(values).max(initial=0.0) > LARGEST_NUMBER:
            return (
                f"its summary ({name}) holds a number above {LARGEST_NUMBER:g}: its columns need "
                "other units."
            )
    shares = summary.get("observed", np.ones(1))
    if shares.min() < -ROUNDING or shares.max() > 1 + ROUNDING:
        return "its shares of values seen do not lie between 0 and 1."
    if _variances(summary).min(initial=0.0) < 0:
        return "its summary (scatter) has a negative variance."
    return ""


def _variances(summary: Summaries) -> FloatArray:
    """The variances of the columns, ``(..., columns)``, where a summary tells them; else none."""
    if not {"mean", "scatter"} <= {*summary}:
        return np.empty(0)
    d, scatter = summary["mean"].shape[-1], summary["scatter"]
    if scatter.shape[-1] == d:
        return scatter
    rows = np.arange(d)  # the upper triangle, row by row
    return scatter[..., rows * d - rows * (rows - 1) // 2]


def impossible_statistics(model: Model, statistics: FloatArray) -> str:
    """What no rows can say in exact statistics, in words; empty if rows could."""
    if np.abs(statistics).max(initial=0.0) > LARGEST_NUMBER:
        return f"its statistics hold a number above {LARGEST_NUMBER:g}."
    shares = model.group_shares(statistics)
    if shares.min(initial=0.0) < -ROUNDING:
        return "its statistics hold a negative share of rows."
    parts: list[tuple[Any, FloatArray]] = [(model, statistics)]
    if isinstance(model, SideBySide):
        parts = [(m, statistics[cut]) for m, cut in zip(model.models, model.cuts, strict=True)]
    for part, own in parts:
        told = part.layout.split(own)
        mass = told.get("initial", told.get("mass"))  # a chain's mass is in steps
        whole = 1.0 if mass is None else float(mass.sum())
        if abs(whole - 1) <= ROUNDING or isinstance(part, Clusters):  # it leaves small ones out
            continue
        expected = part.layout.split(part.statistics_of(part.start(0)))
        if abs(float(expected["initial" if "initial" in told else "mass"].sum()) - 1) < ROUNDING:
            return f"its masses sum to {whole:.6g}, and not to one."
    return ""


def impossible_answer(kind: str, model: Model, told: FloatArray) -> str:
    """What no rows can say to a question of a kind, in words; empty if rows could."""
    if kind == "statistics":
        return impossible_statistics(model, told)
    largest = np.abs(told).max(initial=0.0)
    return (
        f"its answer holds {largest:.2g}, which no rows give." if largest > LARGEST_NUMBER else ""
    )


def impossible_upload(values: Any, statistics: FloatArray, share: float) -> str:
    """What no rows can say in an upload, whatever its compression and the memory behind it."""
    largest = float(abs(values).max()) if values.size else 0.0
    limit = LARGEST_UPLOAD * (1 + float(np.abs(statistics).max(initial=0.0))) / share
    return f"its upload holds {largest:.2g}, which no rows give." if largest > limit else ""


def oddities(keys: Sequence[str], counts: IntArray, summaries: Summaries) -> dict[str, str]:
    """Workers that stand out from all others, and by what."""
    found: dict[str, str] = {}
    if len(keys) < 2:
        return found
    squares = _variances(summaries)
    for j, key in enumerate(keys):
        others = np.arange(len(keys)) != j
        if counts[j] > DOMINANT * counts[others].sum():
            found[key] = (
                f"it says that it has {counts[j] / counts[others].sum():.0f} times as many rows as "
                "all others together: the model will be its own."
            )
        if not squares.size or others.sum() < 2:
            continue
        means = summaries["mean"]
        middle = np.median(means[others], axis=0)
        within = np.median(squares[others], axis=0)
        between = np.median((means[others] - middle) ** 2, axis=0)
        far = np.abs(means[j] - middle) > FAR * np.sqrt(within + between)
        if far.any():
            where = ", ".join(str(column) for column in np.flatnonzero(far)[:5])
            found[key] = f"its means are far from all others' (columns {where}, from 0)."
    return found
