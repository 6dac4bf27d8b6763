"""What FedEM and VR-FedEM have in common: all but the local estimate S_i."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field, replace
from math import sqrt
from typing import Any, ClassVar, Literal, Self, final

from emfed.algorithms import memory, steps
from emfed.compressors import Identity
from emfed.core.errors import SettingsError, check_count, check_range, check_type
from emfed.core.protocols import (
    ALONE,
    Algorithm,
    Compressor,
    Crowd,
    FloatArray,
    Heard,
    IntArray,
    Lattice,
    Layout,
    Model,
    Replies,
    Request,
    ServerState,
    StepInfo,
    Task,
    WorkerStates,
)

MOST_SHARE = 0.25
"""Noise as a share of the last innovations on a common lattice: those of the next round are
shorter, and their share is larger than this."""
LARGEST_NOISE = 0.01
"""Nats per sample, about, that the noise of a common lattice may cost a step: AutoEM's budget."""


@dataclass(frozen=True)
class CompressedEM(Algorithm):
    """EM in expectation space with compressed uploads and memories; `FedEM` explains the fields."""

    compressor: Compressor = field(default_factory=Identity)
    step_size: steps.StepSize | None = None
    memory_rate: float | None = None
    memory_start: Literal["zero", "mean-field"] = "zero"
    batch_size: int | None = None
    replacement: bool = False
    in_metric: bool = False
    broadcast: Compressor | None = None

    name: ClassVar[str]

    def __post_init__(self) -> None:
        check_type("compressor", self.compressor, Compressor, "Dithering(levels=4)")
        if self.broadcast is not None:
            check_type("broadcast", self.broadcast, Compressor, "SubtractiveDithering(0.05)")
        if self.step_size is not None:
            steps.check_step_size(self.step_size)
        if self.memory_rate is not None:
            hint = "0 switches memories off; None means 1 / (1 + omega)."
            check_range("memory_rate", self.memory_rate, 0, 1, hint=hint)
        if self.memory_start not in ("zero", "mean-field"):
            raise SettingsError(
                f"memory_start must be 'zero' or 'mean-field'; got {self.memory_start!r}."
            )
        if self.batch_size is not None:
            check_count("batch_size", self.batch_size)
        self.check_settings()

    @abstractmethod
    def check_settings(self) -> None:
        """Check what the algorithm adds."""

    @abstractmethod
    def estimate(self, task: Task, fresh: IntArray) -> tuple[WorkerStates, FloatArray, IntArray]:
        """S_i at the positions ``fresh``: the rows it changes, the estimates, their cost."""

    @property
    @final
    def broadcasts_steps(self) -> bool:
        """A broadcast compressor makes steps small."""
        return self.broadcast is not None

    @property
    @final
    def rows_at_once(self) -> int:
        return self.batch_size or 0

    @property
    @final
    def needs_start_round(self) -> bool:
        """Memories that start at the mean field need it."""
        return self.memory_start == "mean-field" and self.memory_rate != 0

    @final
    def resolve(self, layout: Layout, crowd: Crowd = ALONE) -> Self:
        """Blocks of the layout, and what was left open.

        alpha = 1 / (1 + omega), as in the theorems. gamma = min(1, sqrt(n / (2 w (1 + w)))) with
        w = (1 + omega) / p - 1 and n the effective number of workers. This is a rule of thumb: it
        falls like 1 / w, where the second limit of Theorems 1 and 4, sqrt(n) / ((1 + w) sqrt(w))
        up to constants, falls like w^(-3/2) and is sqrt((1 + w) / 2) times smaller. The
        "Remark on the maximal learning rate" (Appendix C.4) needs 1 / w for the bound on h, and
        asks for w^(-3/2) to bound the memories. `paper/regimes` measures slowdowns
        like w.
        """
        compressor = self.compressor.resolve(layout)
        omega = compressor.omega(layout.size)
        rate = 1 / (1 + omega) if self.memory_rate is None else self.memory_rate
        step = self.step_size
        if step is None:
            noise = (1 + omega) / crowd.probability - 1
            step = min(1.0, sqrt(crowd.effective / max(2 * noise * (1 + noise), 1e-12)))
        down = None if self.broadcast is None else self.broadcast.resolve(layout)
        return replace(
            self, compressor=compressor, memory_rate=rate, step_size=step, broadcast=down
        )

    @final
    def lattice(self, state: ServerState, workers: int) -> Lattice:
        """The operator's noise, as a share of what all workers sent last."""
        if self.needs_start_round and state.round == 0:
            return Lattice.fine(1.0)
        omega = min(self.compressor.omega(len(state.statistics)), MOST_SHARE)
        return steps.next_lattice(state, workers, omega, LARGEST_NOISE, self.memory_rate)

    @final
    def worker_step(self, task: Task) -> tuple[WorkerStates, Replies]:
        """Estimate, subtract S and V_i, compress, keep pending, send."""
        request = task.request
        received = memory.receive(task.states, request)
        fresh, states = received.fresh, received.states
        if len(fresh):
            states, estimates, cost = self.estimate(replace(task, states=states), fresh)
            task, targets = replace(task, states=states), estimates - request.statistics
            states = steps.hold_upload(task, self._up(), fresh, targets, cost)
        return states, memory.replies(states, request, received)

    def _up(self) -> steps.Channel:
        if self.memory_rate is None:  # as a server may leave it, and not only a caller
            raise SettingsError(f"{type(self).__name__} is not resolved: it has no memory_rate.")
        return steps.Channel(self.compressor, self.memory_rate, self.in_metric)

    def _down(self) -> steps.Channel | None:
        if self.broadcast is None:
            return None
        return steps.Channel(self.broadcast, 0.0, self.in_metric)

    @final
    def read_upload(
        self, model: Model, seed: int, request: Request, evaluations: int, payload: bytes
    ) -> Replies:
        """Decode, with the operator and the uniforms that the worker used."""
        return steps.read_upload(model, self._up(), seed, request, evaluations, payload)

    @final
    def follow(
        self, model: Model, seed: int, round_: int, statistics: FloatArray, step: bytes
    ) -> FloatArray:
        """The quantised step, as the server made it."""
        down = self._down()
        if down is None:
            return super().follow(model, seed, round_, statistics, step)
        return steps.follow(model, down, seed, round_, statistics, step)

    @final
    def server_step(
        self, model: Model, seed: int, state: ServerState, heard: Heard
    ) -> tuple[ServerState, StepInfo]:
        """H, S and V of Algorithm 1, lines 14 to 16."""
        assert self.step_size is not None
        step = steps.step_at(self.step_size, max(1, state.round))
        return steps.advance(model, seed, state, heard, step, self._down(), gauge=self.in_metric)

    @final
    def describe(self) -> dict[str, Any]:
        settings = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return settings | {
            "algorithm": self.name,
            "compressor": self.compressor.describe(),
            "broadcast": None if self.broadcast is None else self.broadcast.describe(),
            "step_size": None if self.step_size is None else steps.describe_step(self.step_size),
        }
