"""One full pass with statistics and M-step over 70,000 x 20 points, K=10, beside its peers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from sklearn.mixture import GaussianMixture

import fedem
from benchmarks.pfl_peer import pfl_pass
from benchmarks.rounds import K, data
from benchmarks.timing import best_times


def sklearn_pass(judge: Any, rows: np.ndarray) -> Callable[[], object]:
    def run() -> object:
        _, log_responsibilities = judge._e_step(rows)
        judge._m_step(rows, log_responsibilities)
        return judge.means_

    return run


def bench_esteps() -> dict[str, dict[str, float]]:
    rows = data()
    out = {}
    for kind in ("tied", "diag", "spherical", "full"):
        run = fedem.open_run(fedem.gaussian_mixture(K, kind), [rows])
        model, params = run.model, run.params
        judge = GaussianMixture(K, covariance_type=kind, max_iter=1, init_params="random")
        judge.set_params(random_state=0)
        import warnings

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            judge.fit(rows)

        def ours(model: Any = model, params: Any = params) -> object:
            return model.maximize(model.expected_statistics(rows, params))

        out[kind] = best_times({"fedem": ours, "scikit-learn": sklearn_pass(judge, rows)})
        peer = pfl_pass(rows, model.to_user(params)) if kind == "diag" else None
        if peer is not None:
            seconds, means = peer
            expected = model.to_user(model.maximize(model.expected_statistics(rows, params)))
            np.testing.assert_allclose(means, expected.means, atol=1e-8)  # the same work
            out[kind]["pfl"] = seconds
    return out
