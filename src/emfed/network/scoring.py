"""How well a model fits each worker's rows, beside what the model itself would lead one to expect.

Log-likelihoods of two workers cannot be compared: rows of a rare or wide component have a lower one
however well they fit. So a worker's mean stands beside that of rows which the model draws, with as
many of each component as the worker has.

Decision: docs/decisions/027-judging-a-fit.md
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np
from array_api_compat import array_namespace

from emfed.core.protocols import (
    AssignsRows,
    BoolArray,
    DrawsRows,
    FloatArray,
    IntArray,
    Model,
    ScoresRows,
)
from emfed.core.sums import (
    Answers,
    Ask,
    Gather,
    Precision,
    Rows,
    RowsOfWorkers,
    Stated,
    States,
    Sum,
)
from emfed.core.wire import floats_size
from emfed.data.tables import Piece
from emfed.models.mixture import to_numpy

DRAWS = 4000
"""Rows that the model draws to say what it expects."""
SCORES = 4
"""Numbers that a worker tells, and its share of each component where there are any."""
FEWEST = 500
"""How many of them are masked like the rows of a worker with missing values, at least."""


@dataclass(frozen=True, eq=False)
class Expectation:
    """Rows that the model drew, and what became of whole ones, ``(K, 2)``."""

    rows: FloatArray
    moments: FloatArray


def expectation(model: Model, params: Any) -> Expectation | None:
    """None for models that draw no samples, or cannot tell components apart."""
    if not (isinstance(model, DrawsRows) and _tells_apart(model)):
        return None
    rows, _ = model.sample(params, DRAWS, 0)
    return Expectation(rows, _by_component(model, params, rows))


def scores_width(model: Model) -> int:
    """How many of the numbers a model can tell: an answer holds these alone."""
    if isinstance(model, DrawsRows) and _tells_apart(model):
        return SCORES + int(model.describe().get("n_components", 1))
    return 2 if isinstance(model, ScoresRows) else 1


def _tells_apart(model: Any) -> bool:
    return isinstance(model, ScoresRows) and isinstance(model, AssignsRows)


def _by_component(model: Any, params: Any, rows: FloatArray) -> FloatArray:
    """Mean of the log-likelihood and of its square in each component, ``(K, 2)``."""
    scores, shares = model.score_samples(rows, params), model.responsibilities(rows, params)
    powers = np.stack([scores, scores**2], axis=1)
    return np.asarray((shares.T @ powers) / np.maximum(shares.sum(axis=0), 1e-12)[:, None])


def score(model: Model, params: Any, piece: Piece, drawn: Expectation | None) -> FloatArray:
    """Mean of the log-likelihood, of its square, both as expected, and shares of components."""
    if not isinstance(model, ScoresRows):  # a model of the user's that only has the mean
        mean = np.asarray(model.log_likelihood(piece.rows, params, piece.padding))
        return np.stack([mean, *np.full((3, len(mean)), np.nan)], axis=1)
    values = np.asarray(model.score_samples(piece.rows, params))
    inside = np.ones(values.shape) if piece.padding is None else to_numpy(piece.padding)
    inside = inside / inside.sum(axis=-1, keepdims=True)
    powers = np.stack([values, values**2], axis=-1)
    found = (inside[..., None] * powers).sum(axis=-2)
    if drawn is None or not isinstance(model, AssignsRows):
        return np.concatenate([found, np.full_like(found, np.nan)], axis=-1)
    shares = (inside[..., None] * model.responsibilities(piece.rows, params)).sum(axis=-2)
    expected = shares @ drawn.moments
    if model.allows_missing:
        for position, holes in _torn(piece, inside > 0):
            expected[position] = shares[position] @ _masked(model, params, drawn, holes)
    return np.concatenate([found, expected, shares], axis=-1)


def _torn(piece: Piece, inside: BoolArray) -> Iterator[tuple[int, BoolArray]]:
    """Workers with missing values, by their place in the piece, and where values are missing."""
    holes = to_numpy(array_namespace(piece.rows).isnan(piece.rows)) > 0
    for position in np.flatnonzero((holes & inside[..., None]).any(axis=(1, 2))).tolist():
        yield position, holes[position][inside[position]]


def _masked(model: Any, params: Any, drawn: Expectation, holes: BoolArray) -> FloatArray:
    """What to expect of rows that lack what the rows of a worker lack, one after the other."""
    count = min(DRAWS, max(FEWEST, 4 * len(holes)))
    masks = holes[np.arange(count) % len(holes)]
    return _by_component(model, params, np.where(masks, np.nan, drawn.rows[:count]))


def scores_of(model: Any, params: Any, pieces: Iterable[Piece], workers: int) -> FloatArray:
    """Mean and spread of the log-likelihood of each worker's rows, found and expected; shares."""
    width = max(SCORES, scores_width(model))
    expected, total = expectation(model, params), np.zeros((workers, width))
    for piece in pieces:
        total[piece.positions] += piece.share * score(model, params, piece, expected)
    return means_and_spreads(total)


def _told(model: Model, summed: bool) -> IntArray:
    """Which of the numbers of `score` a model can tell; finite ones alone.

    What to expect of rows with missing values depends on all rows of the worker, so it is no sum.
    """
    width = scores_width(model)
    known = np.arange(width)
    gaps = summed and bool(model.allows_missing)
    return known[(known < 2) | (known >= SCORES)] if gaps else known


def _spread_out(model: Model, told: FloatArray, summed: bool) -> FloatArray:
    """Means and spreads of each row of numbers that were told, and NaN for what was not."""
    out = np.full((len(told), max(SCORES, scores_width(model))), np.nan)
    out[:, _told(model, summed)] = told
    return means_and_spreads(out)


@final
@dataclass(frozen=True, eq=False)
class ScoreSums(Ask):
    """The scores of all rows together, as sums over rows."""

    model: Any
    params: Any
    purpose: str = "closing"
    precision: Precision | None = None

    @property
    def size(self) -> int:
        """The numbers that the model can tell."""
        return len(_told(self.model, summed=True))

    def part(self, rows: Rows) -> FloatArray:
        """The sums over these rows."""
        model, params, known = self.model, self.params, _told(self.model, summed=True)
        drawn = None if model.allows_missing else expectation(model, params)

        def mean(block: Any, weights: Any) -> FloatArray:
            piece = Piece(np.arange(len(block)), block, weights, 1.0, 0)
            return score(model, params, piece, drawn)[:, known]

        return rows.sum(mean)

    def scores(self, answer: Sum) -> FloatArray:
        """The scores that a sum says."""
        return _spread_out(self.model, answer.value[None] / answer.rows, summed=True)[0]

    def words(self) -> str:
        """What is asked, for the owner's journal."""
        return "how well the model fits the rows"

    def about(self) -> tuple[Stated, ...]:
        """The parameters."""
        return tuple(self.params.arrays().values())


@final
@dataclass(frozen=True, eq=False)
class Scores(Gather):
    """Rows, and mean and spread of their log-likelihood, found and expected, with shares.

    Of workers that are not masked. The fit is sent a row for each worker: the weight of its rows,
    their number, and its scores; NaN where it did not reply.
    """

    model: Any
    params: Any
    workers: IntArray
    purpose: str = field(default="closing")

    def fields(self) -> dict[str, Any]:
        """Workers keep nothing."""
        return {}

    def answer(self, rows: RowsOfWorkers, workers: IntArray, states: States) -> Answers:
        """The scores of these workers."""
        model, params = self.model, self.params
        drawn, known = expectation(model, params), _told(model, summed=False)

        def mean(block: Any, weights: Any, which: IntArray, first: int) -> FloatArray:
            return score(model, params, Piece(which, block, weights, 1.0, 0), drawn)[:, known]

        return own_numbers(rows, workers, rows.means(mean, workers))

    def concluded(
        self, answers: Answers, memory: FloatArray | None
    ) -> tuple[FloatArray, bytes, FloatArray]:
        """The scores of all workers, what tells them, and nothing that is kept."""
        _, data, none = super().concluded(answers, memory)
        return self.told(data, answers.workers), data, none

    def told(self, data: bytes, workers: IntArray) -> FloatArray:
        """The scores of all workers."""
        found = super().told(data, workers)
        out = np.full((len(self.workers), 2 + max(SCORES, scores_width(self.model))), np.nan)
        if len(workers):
            place = np.searchsorted(self.workers, workers)
            out[place, :2] = found[:, :2]
            out[place, 2:] = _spread_out(self.model, found[:, 2:], summed=False)
        return out


def own_numbers(rows: RowsOfWorkers, workers: IntArray, found: FloatArray) -> Answers:
    """Answers of exact numbers of each worker, after the weight and the number of its rows."""
    totals, counts = rows.totals[workers], rows.counts[workers]
    values = np.column_stack([totals, counts, found])
    sizes, none = np.full(len(workers), floats_size(values.shape[1])), np.zeros(0, np.int64)
    return Answers(workers, values, np.zeros(len(workers)), sizes, none, totals, counts)


def falls_short(scores: FloatArray, rows: IntArray) -> BoolArray:
    """Which workers' rows the model explains clearly worse than it claims to.

    Clearly: by more than half the spread of single rows, and by more than three times what chance
    gives for so many rows. Not where the model claims nothing.
    """
    found, _, mean, spread = scores[:, :4].T
    short = mean - found
    with np.errstate(invalid="ignore"):
        return np.asarray((short > 0.5 * spread) & (short > 3 * spread / np.sqrt(rows)))


def over_all(scores: FloatArray, rows: Any) -> FloatArray:
    """The scores of all rows together, from those of workers with so many rows; NaN: not known."""
    moments = scores.copy()
    for j in (1, 3):
        moments[:, j] = scores[:, j] ** 2 + scores[:, j - 1] ** 2
    held = np.asarray(rows) > 0
    shares = np.asarray(rows)[held] / np.sum(rows)
    return np.asarray(means_and_spreads((shares @ moments[held])[None])[0])


def means_and_spreads(moments: FloatArray) -> FloatArray:
    """First and second moments, in pairs, as means and standard deviations."""
    out = moments.copy()
    for j in (1, 3):
        out[:, j] = np.sqrt(np.maximum(moments[:, j] - moments[:, j - 1] ** 2, 0.0))
    return out
