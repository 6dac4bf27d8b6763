"""Errors that one could make in the algorithms, each a small change of the real code.

Every mutant names a verdict that must fail under it. Each is a way to get the paper wrong that the
trajectories or, where they would hide it, a verdict on the part itself must show.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from emfed.algorithms import paper, steps
from emfed.algorithms.base import CompressedEM
from emfed.algorithms.participation import Bernoulli
from emfed.compressors import Dithering
from paper import comparison

Patch = pytest.MonkeyPatch
NEVER = 10**9
"""Rounds of an outer loop that does not end."""


@dataclass(frozen=True)
class Mutant:
    """An error, and the verdict of a quick experiment that it fails."""

    name: str
    plant: Callable[[Patch], None]
    experiment: str
    verdict: str


def around(patch: Patch, owner: Any, name: str, change: Callable[..., Any]) -> None:
    """Replace a function by ``change(function, arguments...)``."""
    real = getattr(owner, name)
    patch.setattr(owner, name, lambda *a, **k: change(real, *a, **k))


def no_division_by_p(patch: Patch) -> None:
    """H = V + sum w_i Q_i."""
    patch.setattr(Bernoulli, "probabilities", lambda self, workers, n: np.ones(len(workers)))


def never_refreshed(patch: Patch) -> None:
    """The first outer loop of VR-FedEM has no end."""

    def endless(real: Any, self: Any, settings: Any, *a: Any) -> Any:
        return real(self, replace(settings, inner_rounds=NEVER), *a)

    around(patch, paper.Innovations, "_spider", endless)


def memories_forgotten(patch: Patch) -> None:
    """V_i and V are zero again at the beginning of every outer loop, which have 20 rounds."""

    def forget(real: Any, ask: Any, replies: Any, memory: Any) -> Any:
        step, kept = real(ask, replies, memory)
        if ask.server.round % 20 or not ask.server.round:
            return step, kept
        # A new generation of memories is how the real code starts them anew.
        return replace(step, anew=True), np.zeros_like(kept)

    around(patch, paper, "step_of", forget)


def server_forgets(patch: Patch) -> None:
    """The server's V stays what it was at the start."""

    def keep(real: Any, ask: Any, replies: Any, memory: Any) -> Any:
        step, kept = real(ask, replies, memory)
        return step, memory if ask.server.round else kept

    around(patch, paper, "step_of", keep)


def no_memories(patch: Patch) -> None:
    """alpha = 0, from memories at zero."""

    def change(real: Any, self: Any, *a: Any) -> Any:
        return replace(real(self, *a), memory_rate=0.0)

    around(patch, CompressedEM, "resolve", change)


def biased_operator(patch: Patch) -> None:
    """Dithering comes out 1% too long."""
    around(patch, Dithering, "decompress", lambda real, *a: 1.01 * real(*a))


def committed_on_send(patch: Patch) -> None:
    """A worker adds its upload to V_i when it sends it, and not again when it is counted."""

    def commit(real: Any, self: Any, rows: Any, workers: Any, states: Any) -> Any:
        passes = real(self, rows, workers, states)
        states["memory"] = states["memory"] + states["pending"]
        states["pending"] = np.zeros_like(states["pending"])
        return passes

    around(patch, paper.Innovations, "_sent", commit)


def without_replacement(patch: Patch) -> None:
    """Batches of distinct rows where distinct draws are meant."""
    for module in (steps, paper):
        around(patch, module, "batch_indices", lambda real, *a: real(*a[:-1], False))


def wrong_sign(patch: Patch) -> None:
    """Delta_i = S_i - S + V_i."""

    def flip(real: Any, self: Any, rows: Any, workers: Any, states: Any) -> Any:
        estimates, passes = real(self, rows, workers, states)
        return estimates + 2 * states["memory"], passes

    around(patch, paper.Innovations, "_estimates", flip)


def no_controls(patch: Patch) -> None:
    """SCAFFOLD's local steps are FedAvg's."""
    around(patch, comparison, "averaging", lambda real, *a: real(*a[:-1], False))


TRACKS = "VR-FedEM's |H|² tracks |h|²"
NO_FLOOR = "VR-FedEM has no floor: the last quarter is far below the one before"
BELOW = "VR-FedEM ends at least 30 times below the floor of FedEM"
MUTANTS = [
    Mutant(
        "no 1/p in H",
        no_division_by_p,
        "parts",
        "H is the mean field on average, whoever takes part",
    ),
    Mutant("outer loops are never refreshed", never_refreshed, "synthetic", TRACKS),
    Mutant("V and V_i begin every outer loop at zero", memories_forgotten, "synthetic", NO_FLOOR),
    Mutant("the server's V does not move", server_forgets, "synthetic", NO_FLOOR),
    Mutant("alpha = 0", no_memories, "synthetic", BELOW),
    Mutant("dithering is biased by 1%", biased_operator, "parts", "Every operator is unbiased"),
    Mutant(
        "memories are committed on send",
        committed_on_send,
        "parts",
        "Memories are exact when uploads are lost",
    ),
    Mutant(
        "batches without replacement",
        without_replacement,
        "parts",
        "The variance of a batch is that of draws with replacement",
    ),
    Mutant("wrong sign of V in Delta", wrong_sign, "synthetic", NO_FLOOR),
    Mutant(
        "alpha = 0 in the comparison",
        no_memories,
        "methods",
        "simulated: without memories FedEM stays far from the optimum",
    ),
    Mutant(
        "SCAFFOLD without its controls",
        no_controls,
        "methods",
        "simulated: FedAvg drifts, which SCAFFOLD corrects",
    ),
]
