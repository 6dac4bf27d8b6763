"""Forward and backward through Markov chains, all sequences at once, scaled step by step.

The passes loop over time and are vectorised over sequences, which stand last, so that every
operation runs along contiguous memory. A few long sequences would leave nothing to vectorise: they
are cut into pieces, the product of the K x K steps of every piece is formed for all pieces
together, those products give the state at every cut, and the pieces then run side by side as if
they were sequences.
"""

from __future__ import annotations

from math import isqrt, prod
from typing import NamedTuple

import numpy as np

from emfed.core.protocols import BoolArray, FloatArray

TINY = 1e-300
"""The least sum that numbers are divided by."""
SMALL = 1e-100
"""Where a few steps together have shrunk numbers to this, each step is scaled."""
SHORTEST_PIECE = 32
"""Steps of a piece, at least: shorter ones spend their time at their ends."""
SIDE_BY_SIDE = 1024
"""So many sequences or pieces hide the cost of a loop over time."""
LONGEST_WALK = 32
"""More cuts than these are themselves passed in groups."""


class Smoothed(NamedTuple):
    """What a pass over ``(..., K, n, t)`` emissions says of the states.

    ``states`` ``(..., K, n, t)`` are p(state at each step | sequence), ``pairs`` the sums over
    steps and (weighted) sequences of p(state, next state), ``log_densities`` the log-likelihood of
    each sequence.
    """

    states: FloatArray
    pairs: FloatArray
    log_densities: FloatArray


class Cuts(NamedTuple):
    """What is known at the ends of the pieces, ``(..., K, n * pieces)`` each."""

    starts: FloatArray
    """p(first state of the piece | all before)."""
    before: FloatArray
    """p(last state before the piece | all up to there); 0 for the first piece."""
    betas: FloatArray
    """How likely what follows the piece is, given its last state; scaled."""


def lengths(seen: BoolArray) -> FloatArray:
    """Steps up to the last one at which anything was seen, of ``(..., t, columns)``."""
    there = np.asarray(seen.any(axis=-1))
    last = there.shape[-1] - there[..., ::-1].argmax(axis=-1)
    return np.asarray(np.where(there.any(axis=-1), last, 0), dtype=np.float64)


def _pieces(steps: int, chains: int) -> int:
    """Into how many pieces to cut each of so many sequences."""
    pieces = min(steps // SHORTEST_PIECE, SIDE_BY_SIDE // max(1, chains))
    return pieces if pieces >= 4 else 1


def _cut(values: FloatArray, pieces: int) -> FloatArray:
    """``(..., n, t)`` with time first, ``(t / pieces, ..., n * pieces)``; filled up with 0."""
    *lead, n, steps = values.shape
    size = -(-steps // pieces)
    if size * pieces != steps:
        values = np.pad(values, [(0, 0)] * (len(lead) + 1) + [(0, size * pieces - steps)])
    return np.array(np.moveaxis(values.reshape(*lead, n * pieces, size), -1, 0), order="C")


def _joined(values: FloatArray, n: int, steps: int) -> FloatArray:
    """The inverse of `_cut`."""
    size, *lead, chains = values.shape
    whole = np.moveaxis(values, 0, -1).reshape(*lead, n, chains // n * size)
    return whole[..., :steps]


def _forward(
    emissions: FloatArray, starts: FloatArray, transitions: FloatArray, every: int = 4
) -> tuple[FloatArray, FloatArray]:
    """p(state | steps so far) and p(step | steps before), time first: ``(t, ..., K, chains)``.

    Both up to factors of each chain that cancel: numbers are scaled ``every`` so many steps, at
    each one where they would get small, and always at the last.
    """
    steps = len(emissions)
    alpha = np.empty_like(emissions)
    scales = np.ones((steps, *starts.shape[:-2], 1, starts.shape[-1]))
    into = np.ascontiguousarray(np.swapaxes(transitions, -1, -2))
    np.multiply(starts, emissions[0], out=alpha[0])
    for t in range(steps):
        here = alpha[t]
        if t:
            np.matmul(into, alpha[t - 1], out=here)
            here *= emissions[t]
        if t % every == every - 1 or t == steps - 1:
            scale = scales[t]
            np.add.reduce(here, axis=-2, keepdims=True, out=scale)
            np.maximum(scale, TINY, out=scale)
            here /= scale
    if every > 1 and scales.min() < SMALL:
        return _forward(emissions, starts, transitions, 1)
    return alpha, scales


def _products(emissions: FloatArray, transitions: FloatArray) -> FloatArray:
    """The product of the steps of each piece, ``(..., K to, K from, chains)``, scaled.

    Into the first step of a piece leads what comes before, which has its transition.
    """
    _, *lead, k, chains = emissions.shape
    into = np.ascontiguousarray(np.swapaxes(transitions, -1, -2))
    product, spare = np.zeros((2, *lead, k, k, chains))
    product[...] = np.eye(k)[..., None]
    flat, other = (x.reshape(*lead, k, k * chains) for x in (product, spare))
    for t in range(len(emissions)):
        if t:  # one matrix product for all pieces
            np.matmul(into, flat, out=other)
            product, spare, flat, other = spare, product, other, flat
        product *= emissions[t][..., None, :]
        if t % 8 == 7:
            product /= np.maximum(product.max(axis=(-3, -2), keepdims=True), TINY)
    return product


def _carried(first: FloatArray, matrices: FloatArray) -> FloatArray:
    """v, v M_1, v M_1 M_2, ...: rows ``(1 + matrices, ..., 1, K)``, scaled.

    Many matrices are cut like the sequences that they come from: groups side by side, from what
    their products carry to the first of each.
    """
    count, *lead, _, k = matrices.shape
    groups = isqrt(count) if count > LONGEST_WALK else 1
    size = -(-count // groups)
    ends = np.broadcast_to(np.eye(k), (groups * size - count, *lead, k, k))
    parts = np.concatenate([matrices, ends]).reshape(groups, size, *lead, k, k)
    heads = first[None]
    if groups > 1:
        product = parts[:-1, 0]
        for step in range(1, size):
            product = product @ parts[:-1, step]
            product /= np.maximum(product.max(axis=(-1, -2), keepdims=True), TINY)
        heads = _carried(first, product)
    out = np.empty((groups, size, *first.shape))
    for step in range(size):
        heads = heads @ parts[:, step]
        heads /= np.maximum(heads.sum(axis=-1, keepdims=True), TINY)
        out[:, step] = heads
    return np.concatenate([first[None], out.reshape(groups * size, *first.shape)[:count]])


def _boundaries(
    emissions: FloatArray, initial: FloatArray, transitions: FloatArray, pieces: int
) -> Cuts:
    """The state at every cut, from the product of the steps of each piece."""
    _, *lead, k, chains = emissions.shape
    n = chains // pieces
    begin = np.broadcast_to(initial[..., None, :], (*lead, n, k))
    shape = (*lead, k, chains)
    if pieces == 1:
        return Cuts(np.swapaxes(begin, -1, -2), np.zeros(shape), np.ones(shape))
    product = _products(emissions, transitions).reshape(*lead, k, k, n, pieces)
    # From the end of a piece to that of the next: pieces first, (..., n, K from, K to).
    through = np.array(np.moveaxis(product, (-1, -3, -4), (0, -2, -1)), order="C")
    onward = transitions[..., None, :, :] @ through[1:]
    end = begin[..., None, :] @ through[0]
    ends = _carried(end / np.maximum(end.sum(axis=-1, keepdims=True), TINY), onward)
    last = np.full((*lead, n, 1, k), 1.0)
    betas = _carried(last, np.swapaxes(onward, -1, -2)[::-1])[::-1]
    betas = betas / np.maximum((ends * betas).sum(axis=-1, keepdims=True), TINY)
    before = np.concatenate([np.zeros((1, *lead, n, k)), ends[:-1, ..., 0, :]])
    starts = before @ transitions
    starts[0] = begin
    found = (starts, before, betas[..., 0, :])
    return Cuts(*(np.moveaxis(x, (0, -1), (-1, -3)).reshape(shape) for x in found))


def _scaled(log_emissions: FloatArray, pieces: int) -> tuple[FloatArray, FloatArray]:
    """Densities of each step over their largest, time first, and the log of that."""
    logs = _cut(log_emissions, pieces)
    top = logs.max(axis=-2, keepdims=True)
    logs -= top
    return np.exp(logs, out=logs), top


def _log_densities(scales: FloatArray, top: FloatArray, n: int) -> FloatArray:
    """Log-densities of sequences, from those of their pieces."""
    pieces = (np.log(scales) + top).sum(axis=0)[..., 0, :]
    return np.asarray(pieces.reshape(*pieces.shape[:-1], n, -1).sum(axis=-1))


def smooth(
    log_emissions: FloatArray,
    initial: FloatArray,
    transitions: FloatArray,
    length: FloatArray,
    weights: FloatArray | None = None,
) -> Smoothed:
    """The E-step of hidden Markov chains: ``(..., K, n, t)`` log densities of each step.

    Steps after a sequence's ``length`` ``(..., n)`` must have log density 0; they do not count.
    """
    *lead, _, n, steps = log_emissions.shape
    pieces = _pieces(steps, prod(lead) * n)
    emissions, top = _scaled(log_emissions, pieces)
    cuts = _boundaries(emissions, initial, transitions, pieces)
    alpha, scales = _forward(emissions, cuts.starts, transitions)
    betas = np.empty_like(emissions)
    betas[-1] = cuts.betas
    emissions /= scales
    for t in range(len(emissions) - 1, -1, -1):
        emissions[t] *= betas[t]
        if t:
            np.matmul(transitions, emissions[t], out=betas[t - 1])
    whole = weights is None and bool((length == steps).all()) and len(alpha) * pieces == steps
    alive = None if whole else np.arange(steps) < length[..., None]
    if alive is not None:
        counted = alive if weights is None else alive * weights[..., None]
        emissions *= _cut(counted.astype(np.float64), pieces)[..., None, :]
    ahead = np.swapaxes(emissions, -1, -2)
    pairs = cuts.before @ ahead[0] + (alpha[:-1] @ ahead[1:]).sum(axis=0)
    alpha *= betas
    states = _joined(alpha, n, steps)
    if alive is not None and not alive.all():
        states = states * alive[..., None, :, :]
    return Smoothed(states, pairs * transitions, _log_densities(scales, top, n))


def filtered_log_densities(
    log_emissions: FloatArray, initial: FloatArray, transitions: FloatArray
) -> FloatArray:
    """The log-likelihood of each sequence, by the forward pass alone."""
    *lead, _, n, steps = log_emissions.shape
    pieces = _pieces(steps, prod(lead) * n)
    emissions, top = _scaled(log_emissions, pieces)
    cuts = _boundaries(emissions, initial, transitions, pieces)
    _, scales = _forward(emissions, cuts.starts, transitions)
    return _log_densities(scales, top, n)
