"""The course of a fit, looked at afterwards: a federation that remembers some of what it sent.

A monitor would compute the log-likelihood in every round, and of candidates that run side by side
only all together. The statistics of a few dozen rounds are enough for a curve of the one that won.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, final

import numpy as np

from emfed.artifacts.result import Result
from emfed.core.protocols import (
    Algorithm,
    Federation,
    FloatArray,
    IntArray,
    Model,
    Opening,
    Replies,
    Request,
    Rows,
)
from emfed.core.records import Records
from emfed.network.inprocess import InProcessFederation

MOST = 64
"""Rounds that are remembered: memory does not grow with the length of the fit."""


@final
class Tape(Federation):
    """Another federation, and the statistics at the beginning of evenly spread rounds."""

    def __init__(self, inner: InProcessFederation) -> None:
        self.inner, self.kept, self._every = inner, dict[int, FloatArray](), 1
        self._whole: FloatArray | None = None
        self._places: Any = slice(None)

    def exchange(self, request: Request) -> Replies:
        """As within, after a note of the statistics; those that were dropped stay as they were."""
        if self._whole is None:
            self._whole = request.statistics
        if request.round > 0 and (request.round - 1) % self._every == 0:
            self._whole = self._whole.copy()
            self._whole[self._places] = request.statistics
            self.kept[request.round] = self._whole
            if len(self.kept) > MOST:
                self._every *= 2
                self.kept = {r: s for r, s in self.kept.items() if (r - 1) % self._every == 0}
        return self.inner.exchange(request)

    def curve(self, result: Result, place: slice) -> Result:
        """The result with the objective in the records of the rounds that were remembered.

        ``place`` is where the result's statistics lie in those that were sent.
        """
        assert result.worker_weights is not None
        found: dict[int, float] = {}
        for round_, statistics in self.kept.items():
            params = result.model.maximize(statistics[place])
            likelihood = self.inner.mean_log_likelihood(result.model, params, result.worker_weights)
            found[round_] = result.model.penalty(params) - likelihood
        records = [replace(r, objective=found.get(r.round, r.objective)) for r in result.records]
        return replace(result, records=Records(records))

    @property
    def size(self) -> int:
        """As within."""
        return self.inner.size

    def open(self, model: Model) -> Opening:
        """As within."""
        return self.inner.open(model)

    def begin(self, model: Model, algorithm: Algorithm, seed: int) -> None:
        """As within, on a new tape."""
        self.kept, self._every = {}, 1
        self._whole, self._places = None, slice(None)
        self.inner.begin(model, algorithm, seed)

    def narrow(self, model: Model, places: IntArray) -> None:
        """As within, on the same tape."""
        assert self._whole is not None
        self._places = np.arange(len(self._whole))[self._places][places]
        self.inner.narrow(model, places)

    def mean_statistics(self, model: Model, params: Any, weights: FloatArray) -> FloatArray:
        """As within."""
        return self.inner.mean_statistics(model, params, weights)

    def mean_log_likelihood(self, model: Model, params: Any, weights: FloatArray) -> float:
        """As within."""
        return self.inner.mean_log_likelihood(model, params, weights)

    def scores(self, model: Model, params: Any) -> FloatArray:
        """As within."""
        return self.inner.scores(model, params)

    def worker_rows(self) -> tuple[IntArray, Rows]:
        """As within."""
        return self.inner.worker_rows()

    def restore_rows(self, workers: IntArray, rows: Rows) -> None:
        """As within."""
        self.inner.restore_rows(workers, rows)
