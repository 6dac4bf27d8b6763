"""One round of loop and stacked, beside the floor: the same work in bare numpy.

Shapes: n=100 workers, m=700 rows, d=20 columns, K=10 components, mini-batches of b=20,
q = K + K d = 210 statistics, blocks of 4.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

import emfed
from benchmarks.timing import best_times

N, M, D, K, B = 100, 700, 20, 10, 20
Q = K + K * D


def data() -> np.ndarray:
    rng = np.random.default_rng(0)
    return rng.normal(size=(N * M, D)) + 2 * rng.normal(size=(K, D))[rng.integers(K, size=N * M)]


def floor(rows: np.ndarray) -> Callable[[], object]:
    """Gather, two products, exponentials, random numbers and rounding of one round; no emfed."""
    rng = np.random.default_rng(1)
    slopes, intercepts = rng.normal(size=(K, D)), rng.normal(size=(K, 1))
    memories = rng.normal(size=(N, Q))
    starts = np.arange(0, N * M, M)[:, None]

    def run() -> object:
        index = starts + rng.integers(M, size=(N, B))  # (100, 20)
        batch = rows[index.ravel()]  # (2000, 20)
        logits = slopes @ batch.T + intercepts  # (10, 20) @ (20, 2000)
        shares = np.exp(logits - logits.max(axis=0))
        shares /= shares.sum(axis=0)
        moments = shares.reshape(K, N, B).transpose(1, 0, 2) @ batch.reshape(N, B, D)
        values = moments.reshape(N, K * D)
        estimate = np.concatenate([shares.reshape(K, N, B).sum(axis=2).T, values], axis=1)
        x = estimate - memories  # (100, 210)
        norms = np.sqrt(np.add.reduceat(x * x, np.arange(0, Q, 4), axis=1))
        spread = np.repeat(norms, 4, axis=1)[:, :Q]
        levels = np.floor(np.abs(x) / spread + rng.random((N, Q)))
        return np.ones(N) @ (np.copysign(levels, x) * spread)

    return run


def bench_rounds() -> dict[str, float]:
    rows = data()
    workers = emfed.data.WorkerData(rows, np.arange(0, N * M + 1, M))
    algorithm = emfed.FedEM(
        emfed.block_quantization(4), step_size=0.01, batch_size=B, replacement=True
    )
    tasks: dict[str, Callable[[], object]] = {"floor (numpy)": floor(rows)}
    for name, made in emfed.network.FEDERATIONS.items():
        model = emfed.gaussian_mixture(K, "tied")
        forever = {"weights": "uniform", "tol": 0, "rounds": 10**9}
        tasks[name] = emfed.fitting.open_run(model, made(workers), algorithm, **forever).step
    return best_times(tasks)
