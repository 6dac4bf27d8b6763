"""VR-FedEM, Algorithm 2 of the paper: SPIDER variance reduction, with partial participation.

The paper writes it for full participation and uses it with p = 0.75; `emfed.algorithms.spider` says
what a worker keeps while it is away.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from emfed.algorithms import memory, spider
from emfed.algorithms.base import CompressedEM
from emfed.core.errors import SettingsError, check_count
from emfed.core.protocols import Column, FloatArray, IntArray, Model, Oracle, Request, Rows


@final
@dataclass(frozen=True)
class VRFedEM(CompressedEM):
    """FedEM with variance-reduced local estimates; ``inner_rounds`` is k_in; see `CompressedEM`."""

    batch_size: int | None = 1
    inner_rounds: int = 10

    name: ClassVar[str] = "VR-FedEM"

    def check_settings(self) -> None:
        """Mini-batches are the point."""
        check_count("inner_rounds", self.inner_rounds)
        if self.batch_size is None:
            raise SettingsError("VRFedEM needs a batch_size; with full local passes use FedEM.")

    @property
    def revisits_rows(self) -> bool:
        """For full passes and for differences on one batch."""
        return True

    def columns(self, q: int) -> dict[str, Column]:
        """The memory's, and the pair (S_i, theta_ref) with the outer loop it belongs to."""
        return memory.columns(q) | spider.columns(q)

    def estimate(
        self, model: Model, seed: int, rows: Rows, request: Request, oracle: Oracle, fresh: IntArray
    ) -> tuple[Rows, FloatArray, IntArray]:
        """S_i of Algorithm 2, line DS:localS, or a full pass where the outer loop is new."""
        if request.kind == "start":
            return rows, oracle.full(request.params, fresh), oracle.counts[fresh]
        assert self.batch_size is not None
        return spider.estimate(
            model,
            seed,
            rows,
            request,
            oracle,
            fresh,
            self.batch_size,
            self.replacement,
            self.inner_rounds,
        )
