"""The opening of a fit: two sums that bind the model to all rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from emfed.core.errors import DataError
from emfed.core.protocols import Model
from emfed.core.sums import Fit, FloatArray
from emfed.fitting.asks import COUNTS, SummaryAsk
from emfed.models.binding import extra_owners
from emfed.models.rows import without_rounding


@final
@dataclass(frozen=True, eq=False)
class Pooled:
    """What the opening says of all rows together."""

    summary: dict[str, FloatArray]
    rows: float
    """The sum of the rows' weights, which is their number where they have none."""
    count: int
    """How many rows have a weight."""
    effective: float
    """How many rows of equal weight they are worth."""

    def bind(self, model: Model) -> Any:
        """The model that knows all rows."""
        whole = {name: values[None] for name, values in self.summary.items()}
        return model.bind(whole, np.array([self.count]), np.ones(1))


def pool(model: Model, shapes: Mapping[str, tuple[int, ...]]) -> Fit[Pooled]:
    """Ask for what binds a model; ``shapes`` are those of `Model.summary` of one worker."""
    d = int(np.prod(shapes.get("mean", (0,))))
    owners = extra_owners(model, d).tolist()
    first = yield SummaryAsk(model, shapes, owners)
    if not first.rows > 0:
        raise DataError("no worker has a row with a weight: nothing can be fitted.")
    count, squares = first.value[:COUNTS].tolist()
    summary = _first_moments(first.value[COUNTS:] / first.rows, shapes, owners)
    if "scatter" in shapes:
        mean = np.ravel(summary["mean"])
        moments = (yield SummaryAsk(model, shapes, owners, mean)).value
        seen = _seen(summary, d) * first.rows
        about = seen
        if len(moments) != d:
            rows, _ = np.triu_indices(d)
            about = seen[rows]
        scatter = without_rounding(mean, moments / np.where(about > 0, about, 1.0))
        summary["scatter"] = scatter.reshape(shapes["scatter"])
    return Pooled(summary, first.rows, round(count), first.rows**2 / squares)


def _seen(summary: Mapping[str, FloatArray], d: int) -> FloatArray:
    """Values seen of each column, as a share of the rows' weight."""
    steps = float(np.ravel(summary.get("length", np.ones(1)))[0])
    return steps * np.ravel(summary.get("observed", np.ones(d)))


def _first_moments(
    left: FloatArray, shapes: Mapping[str, tuple[int, ...]], owners: Sequence[int]
) -> dict[str, FloatArray]:
    """Shares and means from the first sum of an opening, divided by the rows."""

    def take(count: int) -> FloatArray:
        nonlocal left
        taken, left = left[:count], left[count:]
        return taken

    d = int(np.prod(shapes.get("mean", (0,))))
    length, seen = take(1), take(d)
    some = np.where(seen > 0, seen, 1.0)
    found: dict[str, FloatArray] = {"length": length, "observed": seen / length}
    found["mean"] = take(d) / some
    found["extra"] = take(len(owners)) / some[list(owners)]
    for name in sorted(set(shapes) - {*found, "scatter"}):
        found[name] = take(int(np.prod(shapes[name])))
    return {name: found[name].reshape(shapes[name]) for name in shapes if name in found}
