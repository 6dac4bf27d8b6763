"""FedEM, Algorithm 1 of the paper, with partial participation."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar, final

from emfed.algorithms import memory, steps
from emfed.algorithms.base import CompressedEM
from emfed.core.errors import SettingsError, check_count
from emfed.core.protocols import (
    FloatArray,
    IntArray,
    Latent,
    Model,
    Request,
    SimulatesLatents,
    StateField,
    Task,
    WorkerStates,
)
from emfed.core.streams import latent_uniforms


@final
@dataclass(frozen=True)
class FedEM(CompressedEM):
    """FedEM, Algorithm 1 of the paper: compressed statistics, and memories that undo heterogeneity.

    Where the paper has 1/n, ours has the weight of each worker.

    Parameters
    ----------
    compressor : Compressor
        The operator that compresses uploads.
    step_size : float, callable or None
        The step gamma, a number or a function of the round, which counts from 1. None chooses one
        from the compression, the participation and the number of workers: a rule of thumb that is
        far above the limits of Theorems 1 and 4.
    memory_rate : float or None
        The rate alpha of the memories V_i. None stands for 1 / (1 + omega); 0 switches memories
        off, which is the naive method that the paper warns of.
    memory_start : {"zero", "mean-field"}
        Where memories start: at zero, or at V_i = h_i(S_0) at the cost of one exact upload.
    batch_size : int or None
        The number of rows of a mini-batch; None stands for the full local pass.
    replacement : bool
        Whether a mini-batch is drawn with replacement.
    in_metric : bool
        Whether to compress in the metric that the model supplies, not in the Euclidean one.
    broadcast : Compressor or None
        The operator that compresses the server's steps too. Workers that were there in the last
        rounds are sent quantised steps, others the statistics in full.
    simulations : int or None
        How many draws of a row's latent variable replace the expectation over it: a Monte Carlo
        E-step, which A7 allows. None takes the expectation.

    Examples
    --------
    >>> import emfed
    >>> data = emfed.data.synthetic_federation(workers=4, rows_per_worker=50)
    >>> model = emfed.gaussian_mixture(2, "tied")
    >>> algorithm = emfed.FedEM(emfed.Dithering(levels=4), step_size=0.5)
    >>> emfed.fit(model, data, algorithm, rounds=20).rounds
    20
    """

    simulations: int | None = None

    name: ClassVar[str] = "FedEM"

    def check_settings(self) -> None:
        """The number of draws."""
        if self.simulations is not None:
            check_count("simulations", self.simulations)

    def state_fields(self, q: int) -> dict[str, StateField]:
        return memory.state_fields(q)

    def estimate(self, task: Task, fresh: IntArray) -> tuple[WorkerStates, FloatArray, IntArray]:
        """An unbiased estimate of s-bar_i(T(S)): the full pass, or the mean over a mini-batch."""
        model, request, oracle = task.model, task.request, task.oracle
        own = task.seed if oracle.own_seed is None else oracle.own_seed
        latent = self._latent(model, own, request)
        if self.batch_size is None or request.kind == "start":
            return task.states, oracle.full(request.params, fresh, latent), oracle.counts[fresh]
        batch = steps.draw_batch(task, fresh, self.batch_size, self.replacement)
        if latent is None:
            estimates = model.expected_statistics(batch.data, request.params, batch.weights)
        else:
            assert isinstance(model, SimulatesLatents)  # or there would be no uniforms
            u = latent(request.workers[fresh], 0, batch.data.shape[1])
            estimates = model.simulated_statistics(batch.data, request.params, u, batch.weights)
        return task.states, estimates, batch.evaluations

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
