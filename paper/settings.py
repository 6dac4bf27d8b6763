"""One run of an experiment as plain data, and the objects it stands for."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, final

from emfed.algorithms import Bernoulli, Decreasing, Everyone, FedEM, VRFedEM
from emfed.compressors import Dithering, Identity, RandomSparsification
from emfed.core.errors import SettingsError, check_count, check_range
from emfed.core.protocols import Algorithm, Compressor, Participation
from emfed.fitting.stopping import Monitor, Stop


@final
@dataclass(frozen=True, kw_only=True)
class ExperimentSettings:
    """Everything that decides a run but the seed; the names are the keys of ``config.toml``."""

    data: Literal["synthetic", "mnist", "linear"] = "synthetic"
    """The paper's two, or the linear model whose constants are all known."""
    split: Literal["random", "sorted", "writer"] = "random"
    """How rows are dealt: at random, sorted by component or label, or by writer (MNIST)."""
    sizes: Literal["equal", "writers"] = "equal"
    """``writers``: each worker has as many rows as one writer of MNIST wrote, in any split."""
    workers: int = 100
    rows: int = 100
    """Rows of each worker, where sizes are equal."""
    dimension: int = 64
    """Columns of the linear model."""
    weights: Literal["uniform", "samples"] = "uniform"
    algorithm: Literal["em", "FedEM", "VR-FedEM", "fiem", "sem-vr", "naive-sum"] = "FedEM"
    compressor: Literal["identity", "float32", "dithering", "sparsification"] = "identity"
    levels: int = 1
    block: int | None = None
    """Coordinates that share a scale; the whole vector if left out."""
    keep: int = 1
    """How many coordinates sparsification sends."""
    step_size: float = 1.0
    step_power: float = 0.0
    """Steps fall like round**-power, as online EM needs; 0 keeps them constant."""
    memory_rate: float | None = None
    """alpha; 1 / (1 + omega) if left out, 0 for no memories."""
    memory_start: Literal["zero", "mean-field"] = "mean-field"
    batch_size: int | None = None
    """The full local pass if left out."""
    replacement: bool = True
    inner_rounds: int = 20
    participation: float = 1.0
    lose_uploads: float = 0.0
    """The share of uploads that the network loses."""
    epochs: float | None = None
    rounds: int | None = None
    target: float | None = None
    """Stop as soon as the mean of |h|^2 over rounds, which the theorems bound, is this low."""
    monitor: int = 10
    """Rounds between two computations of |h|^2, which are not counted as work."""
    watch_memories: bool = False
    """Record how far memories are from what they are to hold, where |h|^2 is computed."""

    def __post_init__(self) -> None:
        """Build what the settings stand for once, so that a bad one is refused at once."""
        for name in ("workers", "rows", "dimension"):
            check_count(name, getattr(self, name))
        if self.split == "writer" and self.sizes != "writers":
            raise SettingsError("split = 'writer' needs sizes = 'writers'.")
        if self.sizes == "writers" and self.data != "mnist":
            raise SettingsError("sizes = 'writers' needs data = 'mnist'.")
        one = self.algorithm in ("fiem", "sem-vr")
        if one and (self.workers != 1 or self.batch_size is None):
            raise SettingsError(f"{self.algorithm} needs workers = 1 and a batch_size.")
        if self.algorithm == "naive-sum" and (self.batch_size or self.sizes != "equal"):
            raise SettingsError("naive-sum makes full passes over workers of equal sizes.")
        self.make_algorithm()
        check_range("lose_uploads", self.lose_uploads, 0, 1, open_high=True)
        self.make_participation()
        self.make_monitor()
        Stop(rounds=self.rounds, epochs=self.epochs)

    @property
    def available(self) -> bool:
        """Whether its data are here: all of them can be made or fetched."""
        return True

    @property
    def cost(self) -> float:
        """Very roughly, the milliseconds it takes: good for telling the time left."""
        samples = self.workers * self.rows
        batch = self.rows if self.batch_size is None else self.batch_size
        a_round = self.workers * self.participation * batch
        if self.algorithm in ("VR-FedEM", "sem-vr"):
            a_round = 2 * a_round + samples / self.inner_rounds
        rounds = self.rounds or (self.epochs or 0) * samples / a_round
        return rounds * (1 + 1.8e-4 * (a_round + samples / self.monitor))

    @property
    def used(self) -> dict[str, Any]:
        """The settings that play a role in this run."""
        mnist, reduced = self.data == "mnist", self.algorithm in ("VR-FedEM", "sem-vr")
        idle = {
            "dimension": self.data != "linear",
            "split": self.data == "linear" or self.workers == 1,
            "sizes": not mnist,
            "rows": mnist and self.sizes == "writers",
            "weights": self.workers == 1,
            "levels": self.compressor != "dithering",
            "block": self.compressor != "dithering",
            "keep": self.compressor != "sparsification",
            "step_power": not self.step_power,
            "inner_rounds": not reduced,
            "replacement": self.batch_size is None,
            "lose_uploads": not self.lose_uploads,
            "watch_memories": not self.watch_memories,
        }
        idle |= dict.fromkeys(_NO_USE.get(self.algorithm, ()), True)
        limits = ("epochs", "rounds", "target")
        return {
            name: _LEFT_OUT.get(name, value) if value is None else value
            for name, value in as_plain(self).items()
            if not idle.get(name) and not (name in limits and value is None)
        }

    def make_compressor(self) -> Compressor:
        """Q."""
        if self.compressor == "identity":
            return Identity()
        if self.compressor == "float32":
            return Identity("float32")
        if self.compressor == "sparsification":
            return RandomSparsification(self.keep)
        return Dithering(self.levels, block=self.block or "all")

    def make_algorithm(self) -> Algorithm:
        """EM, FedEM or VR-FedEM; online EM is FedEM with one worker and falling steps."""
        if self.algorithm in ("em", "fiem", "sem-vr", "naive-sum"):
            return FedEM(step_size=1.0, memory_rate=0.0)  # of the others it is the opening
        check_range("step_power", self.step_power, 0, 1)
        step: Any = self.step_size
        if self.step_power:
            step = Decreasing(self.step_size, self.step_power)
        common: dict[str, Any] = {
            "compressor": self.make_compressor(),
            "step_size": step,
            "memory_rate": self.memory_rate,
            "memory_start": self.memory_start,
            "batch_size": self.batch_size,
            "replacement": self.replacement,
        }
        if self.algorithm == "VR-FedEM":
            return VRFedEM(inner_rounds=self.inner_rounds, **common)
        return FedEM(**common)

    def make_participation(self) -> Participation:
        """Everyone, or independent draws."""
        return Everyone() if self.participation == 1 else Bernoulli(self.participation)

    def make_monitor(self) -> Monitor:
        """How often |h|^2 is computed."""
        return Monitor(every=self.monitor, objective=False)


_CHANNEL = ("compressor", "levels", "block", "keep", "memory_rate", "memory_start", "participation")
_NO_USE: Mapping[str, tuple[str, ...]] = {
    "em": (*_CHANNEL, "step_size", "step_power", "batch_size", "replacement", "inner_rounds"),
    "fiem": (*_CHANNEL, "step_power", "replacement"),
    "sem-vr": (*_CHANNEL, "step_power", "replacement"),
    "naive-sum": ("memory_rate", "memory_start", "step_power", "batch_size", "replacement"),
}
"""What an algorithm has no use for. FIEM and sEM-vr always draw distinct rows."""
_LEFT_OUT = {
    "block": "the whole vector",
    "memory_rate": "1 / (1 + omega)",
    "batch_size": "all rows",
}
"""What a setting that is left out stands for."""


def as_plain(settings: Any) -> dict[str, Any]:
    """The settings as JSON types."""
    return dataclasses.asdict(settings)
