"""Rows that are held out: each worker knows by itself which, and everybody means the same part.

Decision: docs/decisions/027-judging-a-fit.md
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np

from emfed.core.protocols import BoolArray, FloatArray, IntArray, Model, ScoresRows
from emfed.core.sums import (
    Answers,
    Ask,
    Gather,
    Precision,
    Rows,
    RowsOfWorkers,
    Stated,
    States,
    picked,
)
from emfed.models.adapting import climb
from emfed.models.mixture import to_numpy
from emfed.network.scoring import own_numbers

PARTS = 5
"""Parts of the rows that are held out, one after the other."""
WORTH = 50.0
"""Rows that the common model counts for where a worker adapts it: the default of `adapt`."""
MOST_ROWS = 20_000
"""Rows of a worker that its own models are fitted to, evenly spread: ten small fits are made."""
GAINS = 5
"""What a worker tells of itself: the mean log-likelihood of its rows under the common model, the
adapted one and its own, each fitted without the row; standard errors of what the last two gain."""


@final
@dataclass(frozen=True)
class HeldPart:
    """Rows of one part, or all but these, by their numbers at the worker.

    Parameters
    ----------
    part : int
        Which part.
    seed : int
        What tells one way of parting rows from another.
    inside : bool
        Whether the rows of the part are meant, or the others.

    Examples
    --------
    >>> import numpy as np
    >>> parts = np.stack([HeldPart(part, 0)(1000) for part in range(PARTS)])
    >>> bool((parts.sum(axis=0) == 1).all()), bool((parts.sum(axis=1) > 150).all())
    (True, True)
    """

    part: int
    seed: int
    inside: bool = True

    def __call__(self, count: int) -> BoolArray:
        """Which of so many rows."""
        return np.asarray((part_of(np.arange(count), self.seed) == self.part) == self.inside)


def part_of(numbers: IntArray, seed: int) -> IntArray:
    """The part that rows with these numbers belong to (splitmix64)."""
    first = np.uint64((1 + seed) * 0x9E3779B97F4A7C15 % 2**64)
    with np.errstate(over="ignore"):
        mixed = numbers.astype(np.uint64) + first
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
    return np.asarray(mixed % np.uint64(PARTS)).astype(np.int64)


@final
@dataclass(frozen=True, eq=False)
class Kept(Ask):
    """An ask about the rows that one part leaves."""

    inner: Ask
    pick: HeldPart
    purpose: str = "closing"

    @property
    def precision(self) -> Precision | None:  # type: ignore[override]
        """That of the ask."""
        return self.inner.precision

    @property
    def size(self) -> int:
        """The numbers of the ask."""
        return self.inner.size

    def part(self, rows: Rows) -> FloatArray:
        """The sum over these rows."""
        kept = picked(rows, self.pick)
        return self.inner.part(kept) if kept.total > 0 else np.zeros(self.size)

    def words(self) -> str:
        """What is asked, for the owner's journal."""
        return f"{self.inner.words()}, without rows that are held out"

    def about(self) -> tuple[Stated, ...]:
        """The part and the ask."""
        return f"{self.pick.part} {self.pick.seed}".encode(), *self.inner.about()


@final
@dataclass(frozen=True, eq=False)
class KeptTotals(Ask):
    """The weight of the rows that each part leaves."""

    seed: int
    purpose: str = "closing"
    precision: Precision | None = None

    @property
    def size(self) -> int:
        """One number a part."""
        return PARTS

    def part(self, rows: Rows) -> FloatArray:
        """The weights of these rows."""
        picks = (HeldPart(part, self.seed, inside=False) for part in range(PARTS))
        return np.array([picked(rows, pick).total for pick in picks])

    def words(self) -> str:
        """What is asked, for the owner's journal."""
        return "how many rows are left where a fifth is held out"

    def about(self) -> tuple[Stated, ...]:
        """The way of parting."""
        return (str(self.seed).encode(),)


@final
@dataclass(frozen=True, eq=False)
class HeldOutScores(Ask):
    """The log-likelihood of all rows, each under the fit that has not seen it; and under the one
    that has.
    """

    model: Model
    without: Sequence[Any]
    """Parameters of the fits that have not seen a part, part by part."""
    final_model: Model
    final: Any
    seed: int
    purpose: str = "closing"
    precision: Precision | None = None

    @property
    def size(self) -> int:
        """Two."""
        return 2

    def part(self, rows: Rows) -> FloatArray:
        """The sums over these rows."""
        held = 0.0
        for part, params in enumerate(self.without):
            some = picked(rows, HeldPart(part, self.seed))
            held += _likelihood(self.model, params, some) if some.total > 0 else 0.0
        return np.array([held, _likelihood(self.final_model, self.final, rows)])

    def words(self) -> str:
        """What is asked, for the owner's journal."""
        return "the log-likelihood of rows that were held out"

    def about(self) -> tuple[Stated, ...]:
        """All parameters."""
        places = (*self.without, self.final)
        return tuple(array for one in places for array in one.arrays().values())


def _likelihood(model: Any, params: Any, rows: Rows) -> float:
    def mean(block: Any, weights: Any) -> FloatArray:
        return np.reshape(model.log_likelihood(block, params, weights), (-1, 1))

    return float(rows.sum(mean)[0])


@final
@dataclass(frozen=True, eq=False)
class OwnGains(Gather):
    """What each worker would gain from a model of its own, on rows that it has held out.

    The fit is sent a row for each worker: the weight of its rows, their number, and `GAINS`
    numbers; NaN where it did not reply.
    """

    model: Any
    without: Sequence[Any]
    seed: int
    workers: IntArray
    purpose: str = field(default="closing")

    def fields(self) -> dict[str, Any]:
        """Workers keep nothing."""
        return {}

    def answer(self, rows: RowsOfWorkers, workers: IntArray, states: States) -> Answers:
        """What these workers tell."""
        found = []
        for worker in workers.tolist():
            own, weights = rows.some(worker, MOST_ROWS)
            parts = part_of(rows.which(worker, MOST_ROWS), self.seed)
            found.append(own_gains(self.model, self.without, to_numpy(own), weights, parts))
        return own_numbers(rows, workers, np.reshape(found, (len(workers), GAINS)))

    def concluded(
        self, answers: Answers, memory: FloatArray | None
    ) -> tuple[FloatArray, bytes, FloatArray]:
        """The numbers of all workers, what tells them, and nothing that is kept."""
        _, data, none = super().concluded(answers, memory)
        return self.told(data, answers.workers), data, none

    def told(self, data: bytes, workers: IntArray) -> FloatArray:
        """The numbers of all workers."""
        out = np.full((len(self.workers), 2 + GAINS), np.nan)
        if len(workers):
            out[np.searchsorted(self.workers, workers)] = super().told(data, workers)
        return out


def own_gains(
    model: Any,
    without: Sequence[Any],
    rows: FloatArray,
    weights: FloatArray,
    parts: IntArray,
) -> FloatArray:
    """`GAINS` numbers of one worker's rows, of which each belongs to one of the parts.

    ``without`` are the parameters of common models that have not seen a part. Adapted to the
    worker's other rows such a model counts as 50 of them (`emfed.models.adapting`), on its own as
    one.
    """
    scores = np.empty((3, len(rows)))
    for part, params in enumerate(without):
        held = parts == part
        if not held.any():
            continue
        known, count = rows[~held], weights[~held]
        scores[:, held] = _scores(model, rows[held], params, weights[held])
        if not count.any():
            continue
        prior = model.statistics_of(params)
        for j, worth in ((1, WORTH), (2, 1.0)):
            share = worth / (float(count.sum()) + worth)
            with np.errstate(all="ignore"):
                found = climb(model, prior, known, share, count, params)
            if model.inside(found):
                better = model.maximize(found)
                scores[j, held] = _scores(model, rows[held], better, weights[held])
    total = float(weights.sum())
    means, gains = scores @ weights / total, scores[1:] - scores[0]
    away = (gains - (gains @ weights / total)[:, None]) ** 2
    return np.concatenate([means, np.sqrt(away @ weights / total / max(1.0, total))])


def _scores(model: Any, rows: FloatArray, params: Any, weights: FloatArray) -> FloatArray:
    """The log-likelihood of each row, or their mean in its place."""
    if isinstance(model, ScoresRows):
        return np.asarray(model.score_samples(rows, params))
    mean = 0.0 if not weights.any() else float(model.log_likelihood(rows, params, weights))
    return np.full(len(rows), mean)
