"""Memories that stay exact under faults.

A worker keeps its last upload pending and adds it to V_i only when a later request says that the
server accepted that very round; otherwise it drops it. The server, which moved V by the same
upload, persists before it says so. Hence, at every moment and under any loss, repetition, delay
or crash,

    V = sum_i w_i (V_i + rate_i pending_i [the server accepted round_i]).

This is not as printed: Algorithm 1 adds Q(Delta_i) to V_i when it is sent (line 8), which is the
same where no message is ever lost.

Every transition of that state is in this file. The fields of a worker's state:

``memory``           V_i
``pending``          the decoded upload Q(Delta_i) of round ``pending_round``
``pending_rate``     the memory rate alpha that goes with it
``pending_round``    the last round answered, -1 before the first
``committed_round``  the last round known to be accepted, -1 if none
``generation``       which generation of memories this is
``evaluations``, ``pending_bytes``   what the pending upload cost, to tell it again
``pending_energy``   where only sums are told: how long the innovation was

A request of generation g > ``generation`` starts all memories anew at zero: the server's answer
to a worker that lost its disk (it does not keep a replica of each V_i; the choice costs a few
rounds of convergence in a rare event instead of n q numbers at the server always).

Decision: docs/decisions/014-memories-under-faults.md
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from emfed.core.protocols import (
    BoolArray,
    FloatArray,
    IntArray,
    Replies,
    Request,
    StateField,
    WorkerStates,
)


def state_fields(q: int) -> dict[str, StateField]:
    """The columns above."""
    return {
        "memory": StateField((q,), np.float64),
        "pending": StateField((q,), np.float64),
        "pending_rate": StateField((), np.float64),
        "pending_round": StateField((), np.int64, -1),
        "committed_round": StateField((), np.int64, -1),
        "generation": StateField((), np.int64),
        "evaluations": StateField((), np.int64),
        "pending_bytes": StateField((), np.int64),
        "pending_energy": StateField((), np.float64),
    }


@dataclass(frozen=True)
class Received:
    """How a batch of workers takes a request: positions by what they must do."""

    states: WorkerStates
    """The workers' state with pending uploads committed or dropped, for those in ``fresh``."""
    fresh: IntArray
    """These compute a new upload."""
    again: IntArray
    """These have answered this round before and repeat themselves."""
    lost: IntArray
    """These cannot match what the server accepted: their memory is gone or old."""


def receive(states: WorkerStates, request: Request) -> Received:
    """Take a request: settle the pending upload, or repeat it, or ignore an old request."""
    behind = states["generation"] < request.generation
    if behind.any():
        states = _restart(states, behind, request.generation)
    seen = states["pending_round"]
    # A new generation forgets what was accepted, not which requests are old.
    new = (request.round > seen) & (states["generation"] == request.generation)
    accepted = new & (request.accepted == seen) & (seen >= 0)
    dropped = new & ~accepted & (request.accepted == states["committed_round"])
    lost = new & ~accepted & ~dropped
    return Received(
        _settle(states, accepted),
        fresh=np.flatnonzero(accepted | dropped),
        again=np.flatnonzero((request.round == seen) & ~behind),
        lost=np.flatnonzero(lost),
    )


def _restart(states: WorkerStates, behind: BoolArray, generation: int) -> WorkerStates:
    """Memories at zero; the pending upload counts for nothing any more."""
    keep = ~behind
    return states | {
        "memory": states["memory"] * keep[:, None],
        "pending": states["pending"] * keep[:, None],
        "committed_round": np.where(behind, -1, states["committed_round"]),
        "generation": np.where(behind, generation, states["generation"]),
    }


def _settle(states: WorkerStates, accepted: BoolArray) -> WorkerStates:
    """V_i += rate * pending where the server accepted it (Algorithm 1, line 8)."""
    gain = np.where(accepted, states["pending_rate"], 0.0)[:, None]
    return states | {
        "memory": states["memory"] + gain * states["pending"] if gain.any() else states["memory"],
        "committed_round": np.where(accepted, states["pending_round"], states["committed_round"]),
    }


def hold(
    states: WorkerStates,
    fresh: IntArray,
    round_: int,
    values: FloatArray,
    rate: float | FloatArray,
    evaluations: IntArray,
    sizes: IntArray,
    energies: FloatArray | None = None,
) -> WorkerStates:
    """Keep new uploads as pending, all at once: what is persisted before a reply leaves."""
    new = {
        "pending": values,
        "pending_rate": np.full(len(fresh), rate),
        "pending_round": np.full(len(fresh), round_),
        "evaluations": evaluations,
        "pending_bytes": sizes,
        "pending_energy": np.zeros(len(fresh)) if energies is None else energies,
    }
    return update(states, fresh, new)


def update(states: WorkerStates, positions: IntArray, new: WorkerStates) -> WorkerStates:
    """Rows with some positions of some columns replaced; the old ones are untouched."""
    if len(positions) == len(states["generation"]):
        return states | new
    out = dict(states)
    for name, value in new.items():
        out[name] = states[name].copy()
        out[name][positions] = value
    return out


def replies(states: WorkerStates, request: Request, received: Received) -> Replies:
    """What the workers send: the pending uploads of this round, new or repeated."""
    again = len(received.again) > 0
    send = np.union1d(received.fresh, received.again) if again else received.fresh
    # New uploads of all need no copy; anything else may share memory with the store.
    pick = slice(None) if len(received.fresh) == len(request.workers) else send
    return Replies(
        workers=request.workers[pick],
        rounds=np.full(len(send), request.round),
        values=states["pending"][pick],
        rates=states["pending_rate"][pick],
        evaluations=states["evaluations"][pick],
        bytes_up=states["pending_bytes"][pick],
        lost_memory=request.workers[received.lost],
        energies=None if request.lattice is None else states["pending_energy"][pick],
    )


def gap(
    common: FloatArray,
    generation: int,
    accepted: IntArray,
    weights: FloatArray,
    workers: IntArray,
    states: WorkerStates,
) -> float:
    """The relative violation of the invariant at the top of this file; zero up to rounding.

    ``workers`` and ``states`` are those of `Federation.worker_states`.
    """
    current = states["generation"] == generation
    taken = (
        current & (accepted[workers] == states["pending_round"]) & (states["pending_round"] >= 0)
    )
    waiting = taken & (states["committed_round"] != states["pending_round"])
    memories = states["memory"] * current[:, None]
    memories = (
        memories + np.where(waiting, states["pending_rate"], 0.0)[:, None] * states["pending"]
    )
    total = weights[workers] @ memories
    lengths = np.sqrt((memories * memories).sum(axis=1))
    size = np.linalg.norm(common) + weights[workers] @ lengths
    return float(np.linalg.norm(common - total) / size) if size > 0 else 0.0
