"""What a site's owner allows, and the record of what left the site."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, final

import numpy as np

from emfed.core.errors import SettingsError, check_count
from emfed.core.protocols import FloatArray, IntArray, Latent, Model, Oracle
from emfed.core.wire import Reason


class Refusal(Exception):
    """A worker says no: a reason for the server's program, and words that reveal no record."""

    def __init__(self, reason: Reason, text: str, instance: int = 0) -> None:
        super().__init__(text)
        self.reason, self.text, self.instance = reason, text, instance


@final
@dataclass(frozen=True)
class SiteRules:
    """What the owner of the data insists on; the server cannot change it, and is told no more than
    which rule it met.

    ``smallest_rows``: no answer at all from fewer rows. ``models``: names of the models that may be
    fitted (None: all). ``largest_rounds``: how many rounds, starts and questions of a
    monitor are answered in all, over all runs in one folder. ``smallest_group``: see `GuardedRows`.
    """

    smallest_rows: int = 1
    models: Sequence[str] | None = None
    largest_rounds: int | None = None
    smallest_group: int | None = None

    def __post_init__(self) -> None:
        check_count("smallest_rows", self.smallest_rows)
        for name in ("largest_rounds", "smallest_group"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name))
        if self.models is not None:
            if isinstance(self.models, str):
                raise SettingsError(f"models must be a list of names; got {self.models!r}.")
            object.__setattr__(self, "models", tuple(str(name) for name in self.models))

    def check_model(self, name: str) -> None:
        """Refuse a model that is not allowed."""
        if self.models is not None and name not in self.models:
            allowed = ", ".join(self.models) or "none"
            raise Refusal(Reason.REFUSED, f"the owner allows the models {allowed}; not {name!r}.")

    def check_opening(self, rows: int, shares: FloatArray) -> None:
        """Refuse to describe too few rows, or groups of these shares if one is too small."""
        if rows < self.smallest_rows:
            raise Refusal(Reason.REFUSED, "the owner answers for more rows than there are here.")
        if self.smallest_group is None:
            return
        if rows < self.smallest_group or _small(rows * shares, self.smallest_group):
            raise Refusal(Reason.REFUSED, "the owner describes no group as small as one here.")

    def check_cells(self, weights: FloatArray) -> None:
        """Refuse to tell sums of cells with few records."""
        if self.smallest_group is not None and weights.min() < self.smallest_group:
            raise Refusal(
                Reason.REFUSED, "the owner tells no cell with as few records as one here."
            )

    def check_answers(self, answered: int) -> None:
        """Refuse an answer more than allowed."""
        if self.largest_rounds is not None and answered >= self.largest_rounds:
            raise Refusal(
                Reason.REFUSED,
                f"the owner answers {self.largest_rounds} rounds and questions, no more.",
            )


@final
class GuardedRows(Oracle):
    """A worker's data with the rule on small groups.

    The statistics of a mixture are sums over the rows of each component. A component that holds
    more than nothing but less than ``smallest`` rows of what a message is computed from (all local
    rows, or the mini-batch) would be a statement about a few records, so the worker does not answer
    that round. It may answer another: components move. The same holds for all that a model counts
    (`Model.group_shares`): rows of a component with a code or in which a column was seen, first
    states and transitions of a chain. Statistics that count nothing are not about groups.
    """

    def __init__(self, inner: Oracle, model: Model, params: Any, smallest: int) -> None:
        self._inner, self._model, self._params, self._smallest = inner, model, params, smallest
        self.counts, self.own_seed = inner.counts, inner.own_seed

    def full(self, params: Any, subset: IntArray, latent: Latent | None = None) -> FloatArray:
        """The full pass, if no group is too small."""
        statistics = self._inner.full(params, subset, latent)
        self.check(self._model, statistics, self.counts[subset], self._smallest)
        return statistics

    def take(self, indices: IntArray, subset: IntArray) -> Any:
        """Picked rows, if no group among them is too small."""
        rows = self._inner.take(indices, subset)
        counts = np.minimum(self.counts[subset], indices.shape[1])
        real = (np.arange(indices.shape[1]) < counts[:, None]).astype(np.float64)
        statistics = self._model.expected_statistics(rows, self._params, real)
        self.check(self._model, statistics, counts, self._smallest)
        return rows

    @staticmethod
    def check(model: Model, statistics: FloatArray, counts: IntArray, smallest: int) -> None:
        """Refuse for now if the statistics, of so many rows each, tell of a small group."""
        if _small(model.group_shares(statistics) * counts[:, None], smallest):
            raise Refusal(
                Reason.NOT_NOW, "the owner tells nothing of a group as small as one here now."
            )


def _small(rows: FloatArray, smallest: int) -> bool:
    """Whether some group is there and too small; sums of shares are exact to rounding only."""
    return bool(np.any((rows > 0) & (rows < smallest - 1e-9)))


@final
class Journal:
    """Every message that left, one JSON object a line: when, what, how large, and its content."""

    def __init__(self, path: Path | None) -> None:
        self._path, self._lock = path, threading.Lock()

    def write(self, **entry: Any) -> None:
        """Add a line; it is there before the message leaves."""
        if self._path is None:
            return
        stamp = datetime.now(UTC).isoformat(timespec="milliseconds")
        line = json.dumps({"time": stamp, **entry}, allow_nan=False)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._lock, self._path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
