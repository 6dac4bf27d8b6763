"""The settings that FedEM and VR-FedEM have in common."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field, replace
from math import sqrt
from typing import Any, ClassVar, Literal, Self, final

from emfed.algorithms import steps
from emfed.compressors import Identity
from emfed.core.errors import SettingsError, check_count, check_range, check_type
from emfed.core.protocols import ALONE, Algorithm, Compressor, Crowd, Layout


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
    def describe(self) -> dict[str, Any]:
        settings = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return settings | {
            "algorithm": self.name,
            "compressor": self.compressor.describe(),
            "broadcast": None if self.broadcast is None else self.broadcast.describe(),
            "step_size": None if self.step_size is None else steps.describe_step(self.step_size),
        }
