"""EM itself, distributed without compression: the reference for everything else."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self, final

from emfed.algorithms import memory, steps
from emfed.compressors import Identity
from emfed.core.protocols import (
    ALONE,
    Algorithm,
    Crowd,
    Heard,
    Layout,
    Model,
    Replies,
    Request,
    ServerState,
    StateField,
    StepInfo,
    Task,
    WorkerStates,
)

_EXACT = steps.Channel(Identity(), memory_rate=0.0, in_metric=False)


@final
@dataclass(frozen=True)
class EM(Algorithm):
    """EM itself, distributed without compression: S <- sum_i w_i s-bar_i(T(S)).

    A worker that does not answer leaves its share of S as it is.

    Examples
    --------
    >>> import emfed
    >>> data = emfed.data.synthetic_federation(workers=4, rows_per_worker=50)
    >>> model = emfed.gaussian_mixture(2, "tied")
    >>> emfed.fit(model, data, emfed.EM()).converged
    True
    """

    name: ClassVar[str] = "em"

    @property
    def broadcasts_steps(self) -> bool:
        """Workers get the statistics in full."""
        return False

    @property
    def tells_gains(self) -> bool:
        """H is exact."""
        return True

    @property
    def needs_start_round(self) -> bool:
        """There are no memories."""
        return False

    def resolve(self, layout: Layout, crowd: Crowd = ALONE) -> Self:
        """Nothing depends on the layout."""
        return self

    def state_fields(self, q: int) -> dict[str, StateField]:
        """FedEM's; the memories stay at zero."""
        return memory.state_fields(q)

    def worker_step(self, task: Task) -> tuple[WorkerStates, Replies]:
        """Upload s-bar_i(T(S)) - S, exactly."""
        request, oracle = task.request, task.oracle
        received = memory.receive(task.states, request)
        fresh, states = received.fresh, received.states
        if len(fresh):
            fields, cost = oracle.full(request.params, fresh), oracle.counts[fresh]
            task = replace(task, states=states)
            states = steps.hold_upload(task, _EXACT, fresh, fields - request.statistics, cost)
        return states, memory.replies(states, request, received)

    def read_upload(
        self, model: Model, seed: int, request: Request, evaluations: int, payload: bytes
    ) -> Replies:
        return steps.read_upload(model, _EXACT, seed, request, evaluations, payload)

    def server_step(
        self, model: Model, seed: int, state: ServerState, heard: Heard
    ) -> tuple[ServerState, StepInfo]:
        """A full step."""
        return steps.advance(model, seed, state, heard, 1.0, gauge=True)

    def describe(self) -> dict[str, Any]:
        return {"algorithm": self.name}
