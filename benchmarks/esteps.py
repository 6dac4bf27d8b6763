"""One full pass with statistics and M-step over 70,000 x 20 points, K=10, beside its peers."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from sklearn.mixture import GaussianMixture

import emfed
from benchmarks.pfl_peer import pfl_pass
from benchmarks.rounds import K, data
from benchmarks.timing import best_times


def sklearn_pass(judge: Any, rows: np.ndarray) -> Callable[[], object]:
    def run() -> object:
        _, log_responsibilities = judge._e_step(rows)
        judge._m_step(rows, log_responsibilities)
        return judge.means_

    return run


def wide_rows() -> np.ndarray:
    rng = np.random.default_rng(2)
    return (
        rng.normal(size=(10_000, 100)) + 2 * rng.normal(size=(3, 100))[rng.integers(3, size=10_000)]
    )


def bench_esteps() -> dict[str, dict[str, float]]:
    rows = data()
    cases = {kind: (kind, K, rows) for kind in ("tied", "diag", "spherical", "full")}
    cases["full, 10,000 x 100, K=3"] = ("full", 3, wide_rows())
    return {name: _case(*case) for name, case in cases.items()}


def _case(kind: str, k: int, rows: np.ndarray) -> dict[str, float]:
    run = emfed.fitting.open_run(emfed.gaussian_mixture(k, kind), [rows])
    model, params = run.model, run.params
    judge = GaussianMixture(
        k, covariance_type=kind, max_iter=1, init_params="random", random_state=0
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        judge.fit(rows)

    def ours() -> Any:
        return model.maximize(model.expected_statistics(rows, params))

    out = best_times({"emfed": ours, "scikit-learn": sklearn_pass(judge, rows)})
    peer = pfl_pass(rows, model.to_user(params)) if kind == "diag" else None
    if peer is not None:
        seconds, means = peer
        np.testing.assert_allclose(means, model.to_user(ours()).means, atol=1e-8)  # the same work
        out["pfl"] = seconds
    return out
