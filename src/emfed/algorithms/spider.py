"""The SPIDER estimate of s-bar_i: a full pass now and then, differences on mini-batches between.

A worker keeps the pair (S_i, theta_ref), where theta_ref are the parameters at which S_i was last
evaluated. Its next difference runs from theta_ref to the current parameters. The pair changes once
per round it answers, together with the pending upload, and stands even if that upload is lost; at
its first active round of an outer loop the worker makes a full pass instead.

theta_ref is kept as the statistics it is T of.

Algorithm 2 has no workers that are away. It makes the full pass at the end of an outer loop (line
20), and in the next round adds a difference that is zero, because both of its terms are at the same
parameters (line 8 with S_{t,0} = S_{t,-1}, line 17). Ours makes the pass in that round and leaves
out the difference: the estimates are the same.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from emfed.algorithms import memory, steps
from emfed.core.protocols import (
    FloatArray,
    IntArray,
    Model,
    StateField,
    Task,
    WorkerStates,
)


def state_fields(q: int) -> dict[str, StateField]:
    """The pair (S_i, theta_ref) with the outer loop it belongs to."""
    return {
        "estimate": StateField((q,), np.float64),
        "reference": StateField((q,), np.float64),
        "reference_round": StateField((), np.int64, -1),
        "outer": StateField((), np.int64, -1),
    }


class Loops(NamedTuple):
    """How many rows a mini-batch has, whether they repeat, and rounds between full passes, k_in."""

    batch_size: int
    replacement: bool
    inner_rounds: int


def estimate(
    task: Task, fresh: IntArray, loops: Loops
) -> tuple[WorkerStates, FloatArray, IntArray]:
    """S_i of Algorithm 2, line 8, or a full pass where the outer loop is new."""
    model, states, request, oracle = task.model, task.states, task.request, task.oracle
    outer = (request.round - 1) // loops.inner_rounds
    # Where nothing was accepted yet, an answer must follow from the request alone: a worker
    # that lost its disk and is asked again could not know that it had a pair before.
    new = (states["outer"][fresh] != outer) | (request.accepted[fresh] < 0)
    estimates = np.empty((len(fresh), len(request.statistics)))
    cost = np.empty(len(fresh), dtype=np.int64)
    if new.any():
        estimates[new] = oracle.full(request.params, fresh[new])
        cost[new] = oracle.counts[fresh[new]]
    if not new.all():
        old = fresh[~new]
        batch = steps.draw_batch(task, old, *loops[:2])
        now = model.expected_statistics(batch.data, request.params, batch.weights)
        reference = _references(model, states, old)
        then = model.expected_statistics(batch.data, reference, batch.weights)
        estimates[~new] = states["estimate"][old] + (now - then)
        cost[~new] = 2 * batch.evaluations
    pair = {
        "estimate": estimates,
        "reference": np.broadcast_to(request.statistics, estimates.shape),
        "reference_round": np.full(len(fresh), request.round),
        "outer": np.full(len(fresh), outer),
    }
    return memory.update(states, fresh, pair), estimates, cost


def _references(model: Model, states: WorkerStates, positions: IntArray) -> Any:
    """theta_ref of each worker; computed once per distinct round, and shared if there is one."""
    rounds = states["reference_round"][positions]
    _, first, which = np.unique(rounds, return_index=True, return_inverse=True)
    references = states["reference"][positions[first]]
    if len(first) == 1:
        return model.maximize(references[0])
    return model.maximize(references).take(which)
