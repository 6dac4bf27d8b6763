"""The fit on sums beside the best of several starts of scikit-learn, on tables nobody tuned on."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
from sklearn.mixture import GaussianMixture

import emfed
from benchmarks.right import models, tables
from emfed.data.held import HeldWorkers
from emfed.fitting import FitSettings
from emfed.fitting.in_process import fit

STARTS = 5
"""Starts of scikit-learn, of which the best counts."""


def bench_on_sums(k: int = 4, seeds: int = 2) -> Iterator[dict[str, Any]]:
    """One row a table and Gaussian mixture: medians over seeds, with moves and without."""
    for name, rows, groups in tables():
        workers = emfed.data.as_workers(rows, groups)
        for kind, model in models(name, k):
            if kind == "poisson":
                continue
            peer = _peer(rows, kind, k)
            for moves in (0, 3):
                found = [_ours(model, workers, rows, seed, moves) for seed in range(seeds)]
                medians = {
                    what: float(np.median([one[what] for one in found])) for what in found[0]
                }
                yield {"table": name, "model": kind, "moves": moves, "sklearn": peer, **medians}


def _ours(model: Any, workers: Any, rows: np.ndarray, seed: int, moves: int) -> dict[str, float]:
    began = time.perf_counter()
    result = fit(FitSettings(model, seed=seed, moves=moves), HeldWorkers(workers)).result
    return {
        "log_likelihood": result.log_likelihood(rows),
        "rounds": result.rounds,
        "kilobytes": (result.bytes_up + result.bytes_down) / 1000,
        "seconds": time.perf_counter() - began,
    }


def _peer(rows: np.ndarray, kind: str, k: int) -> float:
    """Log-likelihood a row of scikit-learn on standardised columns, in the units of the rows."""
    unit = rows.std(axis=0) if kind != "spherical" else np.full(rows.shape[1], rows.std())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peer = GaussianMixture(
            k, covariance_type=kind, n_init=STARTS, tol=1e-6, max_iter=2000, random_state=0
        )
        return float(peer.fit(rows / unit).score(rows / unit) - np.log(unit).sum())
