"""Forward and backward through Markov chains, all sequences at once, scaled step by step."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fedem.protocols import BoolArray, FloatArray

TINY = 1e-300


class Smoothed(NamedTuple):
    """What a pass over ``(..., n, t, K)`` emissions says of the states.

    ``states`` are p(state at each step | sequence), ``pairs`` the sums over steps and (weighted)
    sequences of p(state, next state), ``log_densities`` the log-likelihood of each sequence.
    """

    states: FloatArray
    pairs: FloatArray
    log_densities: FloatArray


def lengths(seen: BoolArray) -> FloatArray:
    """Steps up to the last one at which anything was seen, of ``(..., t, columns)``."""
    there = seen.any(axis=-1)
    steps = np.arange(1, there.shape[-1] + 1)
    return np.asarray((there * steps).max(axis=-1), dtype=np.float64)


def _forward(
    emissions: FloatArray, initial: FloatArray, transitions: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """p(state | steps so far) and p(step | steps before), time first: ``(t, ..., n, K)``."""
    alpha = np.empty_like(emissions)
    scales = np.empty(emissions.shape[:-1])
    np.multiply(initial[..., None, :], emissions[0], out=alpha[0])
    for t in range(len(emissions)):
        here = alpha[t]
        if t:
            np.matmul(alpha[t - 1], transitions, out=here)
            here *= emissions[t]
        total = here.sum(axis=-1)
        np.maximum(total, TINY, out=scales[t])
        here /= scales[t][..., None]
    return alpha, scales


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
    steps = log_emissions.shape[-2]
    first = np.moveaxis(log_emissions, -2, 0)
    top = first.max(axis=-1)
    emissions = np.exp(first - top[..., None])
    alpha, scales = _forward(emissions, initial, transitions)
    log_densities = (np.log(scales) + top).sum(axis=0)
    beta = np.ones(alpha.shape[1:])
    back = np.swapaxes(transitions, -1, -2)
    pairs = np.zeros((*alpha.shape[1:-2], *transitions.shape[-2:]))
    ahead = np.empty_like(beta)
    for t in range(steps - 1, 0, -1):
        np.multiply(emissions[t], beta, out=ahead)
        ahead /= scales[t][..., None]
        alpha[t] *= beta
        counted = ahead * _counts(length, t, weights)[..., None]
        pairs += np.swapaxes(alpha[t - 1], -1, -2) @ counted
        np.matmul(ahead, back, out=beta)
    alpha[0] *= beta
    alive = np.arange(steps).reshape(-1, *(1,) * length.ndim) < length
    states = np.moveaxis(alpha * alive[..., None], 0, -2)
    return Smoothed(states, pairs * transitions, log_densities)


def _counts(length: FloatArray, step: int, weights: FloatArray | None) -> FloatArray:
    """The weight of each sequence that has a step of this number, 0 for others."""
    alive = (length > step).astype(np.float64)
    return alive if weights is None else alive * weights


def filtered_log_densities(
    log_emissions: FloatArray, initial: FloatArray, transitions: FloatArray
) -> FloatArray:
    """The log-likelihood of each sequence, by the forward pass alone."""
    first = np.moveaxis(log_emissions, -2, 0)
    top = first.max(axis=-1)
    _, scales = _forward(np.exp(first - top[..., None]), initial, transitions)
    return np.asarray((np.log(scales) + top).sum(axis=0))
