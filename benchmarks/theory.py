"""Where |h|^2 settles beside the theory, on a model whose mean field is affine.

`LinearGaussian` with slope -1/2 in 10 dimensions, heterogeneous workers of 40 rows, mini-batches of
one row, subtractive dither (its omega is exact), alpha = 1 / (1 + omega); means over 8,000 rounds
after 2,000.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np

import emfed
from emfed import theory

D, M, KAPPA, ROUNDS = 10, 40, 0.5, 10_000


def settled(step: float, omega: float, n: int, p: float) -> dict[str, Any]:
    rng = np.random.default_rng(n)
    rows = rng.normal(size=(n, M, D))
    rows = (rows - rows.mean(axis=1, keepdims=True)) / rows.std(axis=1, keepdims=True)
    rows += 3 * rng.normal(size=(n, 1, D))
    data = emfed.data.WorkerData(rows.reshape(n * M, D), np.arange(0, n * M + 1, M))
    records = emfed.fit(
        emfed.models.LinearGaussian(KAPPA),
        data,
        emfed.FedEM(
            emfed.SubtractiveDithering(omega), step_size=step, batch_size=1, replacement=True
        ),
        participation=emfed.algorithms.Bernoulli(p),
        rounds=ROUNDS,
        monitor=emfed.fitting.Monitor(objective=False),
    ).records
    setting = (step, KAPPA, KAPPA**2 * D, n, omega, p)
    measured = records[2000:].average("squared_h")
    return {
        "step": step,
        "omega": omega,
        "n": n,
        "p": p,
        "measured": measured,
        "to_formula": measured / theory.noise_floor(*setting),
        "to_exact": measured / theory.settled_mean_field(*setting),
    }


def bench_theory() -> list[dict[str, Any]]:
    """Every setting of a small grid."""
    grid = product((0.05, 0.2), (0.25, 1.0, 3.0), (10, 100), (1.0, 0.5))
    return [settled(*setting) for setting in grid]
