"""FedEM, Algorithm 1 of the paper, with partial participation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from fedem.algorithms import memory, steps
from fedem.algorithms.base import CompressedEM
from fedem.protocols import Column, FloatArray, IntArray, Model, Oracle, Request, Rows


@final
@dataclass(frozen=True)
class FedEM(CompressedEM):
    """Compressed statistics with memories that undo heterogeneity; see `CompressedEM`."""

    name: ClassVar[str] = "fedem"

    def check_settings(self) -> None:
        """Nothing to add."""

    def columns(self, q: int) -> dict[str, Column]:
        """The memory's."""
        return memory.columns(q)

    def estimate(
        self, model: Model, seed: int, rows: Rows, request: Request, oracle: Oracle, fresh: IntArray
    ) -> tuple[Rows, FloatArray, IntArray]:
        """An unbiased estimate of s-bar_i(T(S)): the full pass, or the mean over a mini-batch."""
        if self.batch_size is None or request.kind == "start":
            return rows, oracle.full(request.params, fresh), oracle.counts[fresh]
        batch = steps.draw_batch(seed, request, oracle, fresh, self.batch_size, self.replacement)
        estimates = model.expected_statistics(batch.data, request.params, batch.weights)
        return rows, estimates, batch.evaluations
