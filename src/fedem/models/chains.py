"""Forward and backward through Markov chains, all sequences at once, scaled step by step.

The passes loop over time and are vectorised over sequences. A few long sequences would leave
nothing to vectorise: they are cut into pieces, the product of the K x K steps of every piece is
formed for all pieces together, those products give the state at every cut, and the pieces then run
side by side as if they were sequences.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import numpy as np

from fedem.protocols import BoolArray, FloatArray

TINY = 1e-300
SHORTEST_PIECE = 32
SIDE_BY_SIDE = 512
"""So many sequences or pieces hide the cost of a loop over time."""


class Smoothed(NamedTuple):
    """What a pass over ``(..., n, t, K)`` emissions says of the states.

    ``states`` are p(state at each step | sequence), ``pairs`` the sums over steps and (weighted)
    sequences of p(state, next state), ``log_densities`` the log-likelihood of each sequence.
    """

    states: FloatArray
    pairs: FloatArray
    log_densities: FloatArray


class Cuts(NamedTuple):
    """What is known at the ends of the pieces, ``(..., n * pieces, K)`` each."""

    starts: FloatArray
    """p(first state of the piece | all before)."""
    before: FloatArray
    """p(last state before the piece | all up to there); 0 for the first piece."""
    betas: FloatArray
    """How likely what follows the piece is, given its last state; scaled."""


def lengths(seen: BoolArray) -> FloatArray:
    """Steps up to the last one at which anything was seen, of ``(..., t, columns)``."""
    there = seen.any(axis=-1)
    steps = np.arange(1, there.shape[-1] + 1)
    return np.asarray((there * steps).max(axis=-1), dtype=np.float64)


def _pieces(steps: int, chains: int) -> int:
    """Into how many pieces to cut each of so many sequences."""
    pieces = min(steps // SHORTEST_PIECE, SIDE_BY_SIDE // max(1, chains))
    return pieces if pieces >= 4 else 1


def _cut(values: FloatArray, axis: int, pieces: int) -> FloatArray:
    """Time from ``axis`` to the front, ``(t / pieces, ..., n * pieces, ...)``; filled with 0.

    The axis before ``axis`` counts the sequences.
    """
    axis %= values.ndim
    steps = values.shape[axis]
    size = -(-steps // pieces)
    if size * pieces != steps:
        widths = [(0, size * pieces - steps if a == axis else 0) for a in range(values.ndim)]
        values = np.pad(values, widths)
    n = values.shape[axis - 1]
    shape = (*values.shape[: axis - 1], n * pieces, size, *values.shape[axis + 1 :])
    return np.array(np.moveaxis(values.reshape(shape), axis, 0), order="C")


def _forward(
    emissions: FloatArray, starts: FloatArray, transitions: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """p(state | steps so far) and p(step | steps before), time first: ``(t, ..., n, K)``."""
    alpha = np.empty_like(emissions)
    scales = np.empty(emissions.shape[:-1])
    ones = np.ones(emissions.shape[-1])  # a product with ones sums a short axis fast
    np.multiply(starts, emissions[0], out=alpha[0])
    for t in range(len(emissions)):
        here = alpha[t]
        if t:
            np.matmul(alpha[t - 1], transitions, out=here)
            here *= emissions[t]
        np.maximum(here @ ones, TINY, out=scales[t])
        here /= scales[t][..., None]
    return alpha, scales


def _boundaries(
    emissions: FloatArray, initial: FloatArray, transitions: FloatArray, pieces: int
) -> Cuts:
    """The state at every cut, from the product of the steps of each piece."""
    _, *lead, chains, k = emissions.shape
    begin = np.broadcast_to(initial[..., None, :], (*lead, chains // pieces, k))
    if pieces == 1:
        return Cuts(begin, np.zeros((*lead, chains, k)), np.ones((*lead, chains, k)))
    product, spare = np.zeros((2, *lead, chains, k, k))
    product[...] = np.eye(k)
    rows = (*lead, chains * k, k)  # one matrix product for all pieces
    for t in range(len(emissions)):
        if t:  # into the first step of a piece leads `starts`, which has its transition
            np.matmul(product.reshape(rows), transitions, out=spare.reshape(rows))
            product, spare = spare, product
        product *= emissions[t][..., None, :]
        if t % 8 == 7:
            product /= np.maximum(product.max(axis=(-1, -2), keepdims=True), TINY)
    through = product.reshape(*lead, chains // pieces, pieces, k, k)
    starts, before = np.empty(through.shape[:-1]), np.zeros(through.shape[:-1])
    ends = np.empty(through.shape[:-1])
    now = begin
    for piece in range(pieces):
        starts[..., piece, :] = now
        end = (now[..., None, :] @ through[..., piece, :, :])[..., 0, :]
        ends[..., piece, :] = end / np.maximum(end.sum(axis=-1, keepdims=True), TINY)
        now = ends[..., piece, :] @ transitions
        if piece + 1 < pieces:
            before[..., piece + 1, :] = ends[..., piece, :]
    betas = np.ones(through.shape[:-1])
    for piece in range(pieces - 1, 0, -1):
        later = (through[..., piece, :, :] @ betas[..., piece, :, None])[..., 0]
        beta = later @ np.swapaxes(transitions, -1, -2)
        total = (ends[..., piece - 1, :] * beta).sum(axis=-1, keepdims=True)
        betas[..., piece - 1, :] = beta / np.maximum(total, TINY)
    shape = (*lead, chains, k)
    return Cuts(starts.reshape(shape), before.reshape(shape), betas.reshape(shape))


def _scaled(log_emissions: FloatArray, pieces: int) -> tuple[FloatArray, FloatArray]:
    """Densities of each step over their largest, time first, and the log of that."""
    logs = _cut(log_emissions, -2, pieces)
    top = logs[..., 0].copy()
    for state in range(1, logs.shape[-1]):  # faster than a reduction over a short axis
        np.maximum(top, logs[..., state], out=top)
    logs -= top[..., None]
    return np.exp(logs, out=logs), top


def smooth(
    log_emissions: FloatArray,
    initial: FloatArray,
    transitions: FloatArray,
    length: FloatArray,
    weights: FloatArray | None = None,
) -> Smoothed:
    """The E-step of hidden Markov chains: ``(..., n, t, K)`` log densities of each step.

    Steps after a sequence's ``length`` ``(..., n)`` must have log density 0; they do not count.
    """
    *lead, n, steps, k = log_emissions.shape
    pieces = _pieces(steps, prod(lead) * n)
    emissions, top = _scaled(log_emissions, pieces)
    cuts = _boundaries(emissions, initial, transitions, pieces)
    alpha, scales = _forward(emissions, cuts.starts, transitions)
    alive = (np.arange(steps) < length[..., None]).astype(np.float64)
    paired = alive * (np.arange(steps) > 0)
    paired = _cut(paired if weights is None else paired * weights[..., None], -1, pieces)
    pairs = np.zeros((*lead, k, k))
    beta, back = cuts.betas.copy(), np.swapaxes(transitions, -1, -2)
    ahead, counted = np.empty_like(beta), np.empty_like(beta)
    everyone = (paired == 1).all(axis=tuple(range(1, paired.ndim)))
    for t in range(len(emissions) - 1, -1, -1):
        np.multiply(emissions[t], beta, out=ahead)
        ahead /= scales[t][..., None]
        alpha[t] *= beta
        before = alpha[t - 1] if t else cuts.before
        chosen = ahead if everyone[t] else np.multiply(ahead, paired[t][..., None], out=counted)
        pairs += np.swapaxes(before, -1, -2) @ chosen
        np.matmul(ahead, back, out=beta)
    states = np.moveaxis(alpha, 0, -2).reshape(*lead, n, -1, k)[..., :steps, :]
    if not alive.all():
        states = states * alive[..., None]
    log_densities = (np.log(scales) + top).sum(axis=0).reshape(*lead, n, pieces).sum(axis=-1)
    return Smoothed(states, pairs * transitions, log_densities)


def filtered_log_densities(
    log_emissions: FloatArray, initial: FloatArray, transitions: FloatArray
) -> FloatArray:
    """The log-likelihood of each sequence, by the forward pass alone."""
    *lead, n, steps, _ = log_emissions.shape
    pieces = _pieces(steps, prod(lead) * n)
    emissions, top = _scaled(log_emissions, pieces)
    cuts = _boundaries(emissions, initial, transitions, pieces)
    _, scales = _forward(emissions, cuts.starts, transitions)
    whole = (np.log(scales) + top).sum(axis=0)
    return np.asarray(whole.reshape(*lead, n, pieces).sum(axis=-1))
