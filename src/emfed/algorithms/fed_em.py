"""FedEM, Algorithm 1 of the paper, with partial participation."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar, final

from emfed.algorithms import memory, steps
from emfed.algorithms.base import CompressedEM
from emfed.core.errors import SettingsError, check_count
from emfed.core.protocols import (
    Column,
    FloatArray,
    IntArray,
    Latent,
    Model,
    Oracle,
    Request,
    Rows,
    SimulatesLatents,
)
from emfed.core.streams import latent_uniforms


@final
@dataclass(frozen=True)
class FedEM(CompressedEM):
    """Compressed statistics with memories that undo heterogeneity; see `CompressedEM`.

    ``simulations`` replaces the expectation over a row's latent variable by a mean over that many
    draws of it: a Monte Carlo E-step, one of the oracles that the paper's assumption on them
    allows (A7).
    """

    simulations: int | None = None

    name: ClassVar[str] = "FedEM"

    def check_settings(self) -> None:
        """The number of draws."""
        if self.simulations is not None:
            check_count("simulations", self.simulations)

    def columns(self, q: int) -> dict[str, Column]:
        return memory.columns(q)

    def estimate(
        self, model: Model, seed: int, rows: Rows, request: Request, oracle: Oracle, fresh: IntArray
    ) -> tuple[Rows, FloatArray, IntArray]:
        """An unbiased estimate of s-bar_i(T(S)): the full pass, or the mean over a mini-batch."""
        own = seed if oracle.own_seed is None else oracle.own_seed
        latent = self._latent(model, own, request)
        if self.batch_size is None or request.kind == "start":
            return rows, oracle.full(request.params, fresh, latent), oracle.counts[fresh]
        batch = steps.draw_batch(seed, request, oracle, fresh, self.batch_size, self.replacement)
        if latent is None:
            estimates = model.expected_statistics(batch.data, request.params, batch.weights)
        else:
            assert isinstance(model, SimulatesLatents)  # or there would be no uniforms
            u = latent(request.workers[fresh], 0, batch.data.shape[1])
            estimates = model.simulated_statistics(batch.data, request.params, u, batch.weights)
        return rows, estimates, batch.evaluations

    def _latent(self, model: Model, seed: int, request: Request) -> Latent | None:
        """The uniforms of a simulated E-step, by worker and row."""
        if self.simulations is None:
            return None
        if not isinstance(model, SimulatesLatents):
            raise SettingsError(
                f"{type(model).__name__} has no E-step by simulation: leave simulations out."
            )
        draws = self.simulations * model.latent_size
        return partial(latent_uniforms, seed, request.round, draws)
