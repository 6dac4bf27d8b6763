"""Validation across sites: models that leave some workers out, and rows that a worker holds out.

**Leaving out.** A view with ``folds`` names one model several times. Part f is fitted without the
workers whose number is f modulo the number of parts: where such a worker is asked for its mean
statistics, it answers, for that part, with the statistics that it was sent. So it asks for no
change, H of the part is that of the others alone, and the fixed point is their optimum, exactly.
All parts share rounds and messages; the server's update stays a sum, and nobody learns who is left
out where.

**Holding out.** A worker is then sent these models and, last, the common one. It tells how well
the model that never saw its rows fits them; and, holding out a fifth of them at a time, what the
common model, adapted and on its own, would say of the fifth. Without the fifth the common model is
EM on the worker's other rows together with what the others' rows told, which is the rest of the
common statistics: exact where nothing is held out, and so to first order in what is. Adapted to the
rows, it counts as 50 of them (`emfed.models.adapting`), on its own as one. Means over its rows are
all that a worker tells.
"""

from __future__ import annotations

from typing import Any, final

import numpy as np

from emfed.core.protocols import FloatArray, IntArray, Latent, Model, Oracle, Request, ScoresRows
from emfed.data.tables import Workers, gather
from emfed.models.adapting import climb
from emfed.models.mixture import to_numpy
from emfed.models.side_by_side import SideBySide

PARTS = 5
"""Parts of a worker's rows that are held out one after the other."""
WORTH = 50.0
"""Rows that the common model counts for where a worker adapts it: the default of `adapt`."""
MOST_ROWS = 20_000
"""Rows of a worker that take part, evenly spread: fifteen small fits are made on them."""
VALIDATION = 6
"""Numbers that a worker tells: the mean log-likelihood of its rows under the model without it, the
common one, the adapted one and its own; and standard errors of what the last two gain."""


@final
class LeftOut(Oracle):
    """Workers' data, where each is left out of one part of the model."""

    def __init__(self, inner: Oracle, model: Model, request: Request) -> None:
        assert isinstance(model, SideBySide)
        self._inner, self._model, self._request = inner, model, request
        self.counts, self.own_seed = inner.counts, inner.own_seed
        self.lasting = False  # S is the mean of some workers alone: nobody goes on from it

    def full(
        self, params: Any, subset: IntArray, latent: Latent | None = None, each: bool = False
    ) -> FloatArray:
        """The full pass; a worker has nothing to say of its own part."""
        out = self._inner.full(params, subset, latent, each)
        cuts = self._model.cuts
        for place, number in enumerate(self._request.workers[subset].tolist()):
            own = cuts[number % len(cuts)]
            out[place, own] = self._request.statistics[own]
        return out

    def take(self, indices: IntArray, subset: IntArray) -> Any:
        """Picked rows know no parts: folds are fitted with full passes."""
        return self._inner.take(indices, subset)


def validation_of(
    model: Any, params: Any, data: Workers, numbers: IntArray, total: float
) -> FloatArray:
    """What each of some workers with these numbers tells, ``(workers, 6)``; ``total``: all rows."""
    found = []
    for place, number in enumerate(numbers.tolist()):
        part = number % (len(model.models) - 1)  # the last is the common one
        count = int(data.counts_of(np.array([place]))[0])
        picked = np.arange(0, count, -(-count // MOST_ROWS), dtype=np.int64)
        rows = to_numpy(gather(data.worker(place), picked))
        weights = np.ones(len(rows))
        if data.row_weights is not None:
            weights = data.row_weights[place][picked]
        others = max(1.0, (total - count) * len(picked) / count)
        strange = _scores(model.models[part], rows, params.parts[part], weights)
        held = _held_out(model.models[-1], params.parts[-1], rows, weights, others)
        found.append(_told(np.concatenate([strange[None], held]), weights))
    return np.array(found)


def _held_out(
    model: Any, params: Any, rows: FloatArray, weights: FloatArray, others: float
) -> FloatArray:
    """Scores of rows by fits to the other ones: common, adapted, and on its own, ``(3, rows)``."""
    scores = np.stack([_scores(model, rows, params, weights)] * 3)
    own = float(weights.sum())
    here = model.expected_statistics(rows, params, weights)
    rest = (model.statistics_of(params) * (own + others) - own * here) / others
    if not model.inside(rest):  # some component has hardly any rows elsewhere
        rest = model.statistics_of(params)
    parts = min(PARTS, len(rows))
    for part in range(parts if parts > 1 else 0):
        held = np.arange(len(rows)) % parts == part
        known, count = rows[~held], weights[~held]
        if not count.any():
            continue
        fitted = _fitted(model, rest, params, known, count, others)
        scores[0, held] = _scores(model, rows[held], fitted, weights[held])
        prior = model.statistics_of(fitted)
        for j, worth in ((1, WORTH), (2, 1.0)):
            better = _fitted(model, prior, fitted, known, count, worth)
            scores[j, held] = _scores(model, rows[held], better, weights[held])
    return scores


def _told(scores: FloatArray, weights: FloatArray) -> FloatArray:
    """Means over rows, and standard errors of what adapting and a model of its own gain."""
    total = float(weights.sum())
    means, gains = scores @ weights / total, scores[2:] - scores[1]
    away = (gains - (gains @ weights / total)[:, None]) ** 2
    return np.concatenate([means, np.sqrt(away @ weights / total / max(1.0, total))])


def _fitted(
    model: Any,
    prior: FloatArray,
    params: Any,
    rows: FloatArray,
    weights: FloatArray,
    worth: float,
) -> Any:
    """The model fitted to rows, beside which statistics count as much as ``worth`` of them."""
    share = worth / (float(weights.sum()) + worth)
    with np.errstate(all="ignore"):
        found = climb(model, prior, rows, share, weights, params)
    return model.maximize(found) if model.inside(found) else params


def _scores(model: Any, rows: FloatArray, params: Any, weights: FloatArray) -> FloatArray:
    """The log-likelihood of each row, or their mean in its place."""
    if isinstance(model, ScoresRows):
        return np.asarray(model.score_samples(rows, params))
    mean = 0.0 if not weights.any() else float(model.log_likelihood(rows, params, weights))
    return np.full(len(rows), mean)
