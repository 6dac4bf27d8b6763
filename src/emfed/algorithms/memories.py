"""Memories that stay exact under faults: what the adder believes of a worker is what it sent.

A worker that sends an innovation keeps it as *pending*. It adds it to its memory only when a later
message says that the adder counted that very exchange; otherwise it drops it. The adder, which
moved its total by the same innovation, says so in the next message. Hence, at every moment and
under any loss, repetition, delay or restart,

    total = sum over workers of (memory_i + pending_i [the adder counted it]).

Transitions of a worker, all in `settle`:

====================================  ================================
what the message says it counted      the worker
====================================  ================================
the exchange of the pending one       adds it to the memory
the last one that was added before    drops it
another generation than the worker's  begins again at zero
anything else                         cannot go on: it asks to begin anew
====================================  ================================
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

import numpy as np

from emfed.core.sums import FloatArray, IntArray, States

NOT_COUNTED = -1
"""The exchange of a worker that was never counted."""


def columns(size: int) -> States:
    """The memory of one worker."""
    return {
        "memory": np.zeros(size),
        "pending": np.zeros(size),
        "pending_at": np.array(NOT_COUNTED),
        "counted_at": np.array(NOT_COUNTED),
        "generation": np.array(0),
    }


def settle(states: States, counted: IntArray, generation: int) -> IntArray:
    """Take what the adder says it counted; return the rows of those that cannot go on."""
    behind = states["generation"] != generation
    states["memory"][behind] = states["pending"][behind] = 0.0
    states["pending_at"][behind] = states["counted_at"][behind] = NOT_COUNTED
    states["generation"][behind] = generation
    added = (counted == states["pending_at"]) & (counted != NOT_COUNTED)
    states["memory"][added] += states["pending"][added]
    states["counted_at"][added] = counted[added]
    states["pending"][added] = 0.0
    return np.flatnonzero(counted != states["counted_at"])


def believed(states: States, counted: IntArray, generation: int) -> FloatArray:
    """The memories of all workers as the adder believes them, which counted them when."""
    waiting = (states["pending_at"] == counted) & (counted != NOT_COUNTED)
    waiting &= states["generation"] == generation
    known = (states["generation"] == generation)[:, None]
    return np.where(known, states["memory"], 0.0) + waiting[:, None] * states["pending"]


@final
@dataclass
class Counted:
    """What all members know of the memories of one ascent: whom the adder counted when.

    Parameters
    ----------
    workers : int
        How many there are.
    """

    workers: int
    generation: int = 0
    at: IntArray = field(init=False)
    """The last exchange in which each was counted."""

    def __post_init__(self) -> None:
        self.at = np.full(self.workers, NOT_COUNTED, dtype=np.int64)

    def begin_anew(self) -> None:
        """Some memory is lost: all begin at zero."""
        self.at[:] = NOT_COUNTED
        self.generation += 1

    @property
    def heard(self) -> IntArray:
        """Workers whose memories are part of the total."""
        return np.flatnonzero(self.at != NOT_COUNTED)
