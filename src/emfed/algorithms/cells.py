"""Rounds over statistics that live on each worker's own cells.

Worker c tracks a vector t_c on its support (the cells it observed): its sums, or its weighted
residuals at parameters that it is told. It uploads Q(t_c - D_c), both sides move the memory D_c by
alpha times that, and the server's estimate of sum_c t_c is

    sum_c D_c + sum over active c of Q(t_c - D_c) / p_c.

This is Algorithm 1 with V_c = D_c minus what the server knows anyway. Weights are 1, not 1/n: cell
sums add up.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import sqrt
from typing import Any, ClassVar, Self

import numpy as np

from emfed.algorithms import memory, steps
from emfed.compressors import Identity
from emfed.core.errors import check_range, check_type
from emfed.core.protocols import (
    ALONE,
    Algorithm,
    Compressor,
    Crowd,
    FloatArray,
    Heard,
    IntArray,
    Layout,
    Model,
    Replies,
    Request,
    ServerState,
    StateField,
    StepInfo,
    Summaries,
    Task,
    WorkerStates,
)


def cells_layout(size: int) -> Layout:
    """The statistics of one worker."""
    return Layout((("cells", (size,)),))


@dataclass(frozen=True)
class CellEM(Algorithm):
    """Memories and compression of Algorithm 1 for statistics on each worker's own cells.

    `emfed.impute` runs on it in the modes "observed" and "cell".

    Parameters
    ----------
    compressor : Compressor
        The operator that compresses uploads.
    step_size : float or None
        The step; None stands for 1.
    memory_rate : float or None
        The rate of the memories. None takes that of each innovation, see
        `emfed.algorithms.steps.own_rates`.
    residuals : bool
        Whether workers send what is left of their cells at the parameters that they are told, in
        place of sums of cells.

    Examples
    --------
    >>> import emfed
    >>> emfed.algorithms.CellEM(emfed.Dithering(levels=3)).describe()["algorithm"]
    'CellEM'
    """

    compressor: Compressor = field(default_factory=Identity)
    step_size: float | None = None
    memory_rate: float | None = None
    residuals: bool = False

    name: ClassVar[str] = "CellEM"

    def __post_init__(self) -> None:
        check_type("compressor", self.compressor, Compressor, "Dithering(levels=3)")
        if self.step_size is not None:
            steps.check_step_size(self.step_size)
        if self.memory_rate is not None:
            check_range("memory_rate", self.memory_rate, 0, 1)

    @property
    def broadcasts_steps(self) -> bool:
        """Workers get parameters, or nothing."""
        return False

    @property
    def needs_start_round(self) -> bool:
        """Memories start at zero."""
        return False

    @property
    def tells_statistics(self) -> bool:
        """Sums need no parameters."""
        return self.residuals

    def told(self, state: ServerState) -> FloatArray:
        """Nothing, or the parameters of the cells."""
        return state.extras["theta"] if self.residuals else np.empty(0)

    def sure(self, state: ServerState) -> bool | None:
        """A small |H| is enough: S has nowhere else to go."""
        return True

    def resolve(self, layout: Layout, crowd: Crowd = ALONE) -> Self:
        """Operators follow from each worker's own size."""
        return self

    def state_fields(self, q: int) -> dict[str, StateField]:
        return memory.state_fields(q)

    def _up(self, size: int) -> steps.Channel:
        operator = self.compressor.resolve(cells_layout(size))
        return steps.Channel(operator, self.memory_rate, in_metric=False, own=True)

    def worker_step(self, task: Task) -> tuple[WorkerStates, Replies]:
        """Subtract the memory from all cells, compress, keep pending, send."""
        received, theta = memory.receive(task.states, task.request), task.request.statistics
        states, fresh = received.states, received.fresh
        if len(fresh):
            size = states["memory"].shape[1]
            data = task.oracle.take(np.tile(np.arange(size), (len(fresh), 1)), fresh)
            params = (theta[fresh] if theta.ndim == 2 else theta) if self.residuals else None
            targets = task.model.expected_statistics(data, params)
            task, cost = replace(task, states=states), np.full(len(fresh), size)
            states = steps.hold_upload(task, self._up(size), fresh, targets, cost)
        return states, memory.replies(states, task.request, received)

    def read_upload(
        self, model: Model, seed: int, request: Request, evaluations: int, payload: bytes
    ) -> Replies:
        """Every worker evaluates each of its cells once, so that is how many it has."""
        channel = self._up(evaluations)
        return steps.read_upload(model, channel, seed, request, evaluations, payload, evaluations)

    def gathered(self, state: ServerState, heard: Heard) -> tuple[FloatArray, ServerState]:
        """The estimate of the sum of all targets, and the state with the memories moved."""
        replies = heard.replies
        estimate = state.memory + (1 / heard.probabilities) @ replies.values
        moved = state.memory + replies.rates @ replies.values
        return estimate, replace(state, round=state.round + 1, memory=moved)

    def server_step(
        self, model: Model, seed: int, state: ServerState, heard: Heard
    ) -> tuple[ServerState, StepInfo]:
        """H = sum D_c + sum Q(y_c - D_c) / p_c - S, S += gamma H."""
        estimate, state = self.gathered(state, heard)
        step, mean_field = self.step_size or 1.0, estimate - state.statistics
        state = replace(state, statistics=state.statistics + step * mean_field)
        return state, StepInfo(float(mean_field @ mean_field), step, 0)

    def attended(
        self, weights: FloatArray, counts: IntArray, summaries: Summaries, state: ServerState
    ) -> tuple[Self, ServerState]:
        """Go on with who is here: what their cells count for, their rows and what they told.

        S is on its way to the sum of their cells whatever it is; memories start at zero.
        """
        return self, state

    def describe(self) -> dict[str, Any]:
        return {
            "algorithm": self.name,
            "compressor": self.compressor.describe(),
            "step_size": self.step_size,
            "memory_rate": self.memory_rate,
            "residuals": self.residuals,
        }


def default_step(compressor: Compressor, sizes: Any, crowd: Crowd) -> float:
    """The shortest step that the rule of `CompressedEM.resolve` takes for any worker's size."""
    out = 1.0
    for size in np.unique(sizes).tolist():
        omega = compressor.resolve(cells_layout(size)).omega(size)
        noise = (1 + omega) / crowd.probability - 1
        out = min(out, sqrt(crowd.effective / max(2 * noise * (1 + noise), 1e-12)))
    return out
