"""One full pass (E-step and M-step) of each model beside its counterpart, one thread."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from hmmlearn import hmm
from sklearn.decomposition import FactorAnalysis
from sklearn.mixture import GaussianMixture

import emfed
from benchmarks.esteps import sklearn_pass
from benchmarks.timing import best_times


def opened(model: Any, rows: Any) -> tuple[Any, Any]:
    """The bound model, and parameters after one step."""
    run = emfed.fitting.open_run(model, [rows], start_statistics="expected")
    return run.model, run.params


def our_pass(model: Any, params: Any, rows: Any) -> Callable[[], object]:
    return lambda: model.maximize(model.expected_statistics(rows, params))


def clusters(n: int, d: int, k: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return 3 * rng.normal(size=(k, d))[rng.integers(k, size=n)] + rng.normal(size=(n, d))


def judge_mixture(kind: str, k: int, rows: np.ndarray) -> Any:
    judge = GaussianMixture(k, covariance_type=kind, max_iter=1, init_params="random")
    judge.set_params(random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return judge.fit(rows)


def row_loop(rows: np.ndarray, user: Any) -> Callable[[], object]:
    """The textbook E-step of a Gaussian mixture with missing values, row after row."""
    k, d = user.means.shape

    def run() -> object:
        mass, first, second = np.zeros(k), np.zeros((k, d)), np.zeros((k, d, d))
        for y in rows:
            seen = ~np.isnan(y)
            o, m = np.flatnonzero(seen), np.flatnonzero(~seen)
            joint, full = np.log(user.weights), np.tile(y, (k, 1))
            extra = np.zeros((k, d, d))
            for j in range(k):
                s, mu = user.covariances[j], user.means[j]
                root = np.linalg.cholesky(s[np.ix_(o, o)])
                white = np.linalg.solve(root, np.column_stack([y[o] - mu[o], s[np.ix_(o, m)]]))
                joint[j] -= 0.5 * white[:, 0] @ white[:, 0] + np.log(np.diagonal(root)).sum()
                joint[j] -= 0.5 * len(o) * np.log(2 * np.pi)
                full[j, m] = mu[m] + white[:, 1:].T @ white[:, 0]
                extra[j][np.ix_(m, m)] = s[np.ix_(m, m)] - white[:, 1:].T @ white[:, 1:]
            shares = np.exp(joint - joint.max())
            shares /= shares.sum()
            mass += shares
            first += shares[:, None] * full
            second += shares[:, None, None] * (full[:, :, None] * full[:, None, :] + extra)
        return mass, first, second

    return run


def bench_missing() -> dict[str, float]:
    """20,000 rows of 8 columns, one value in ten missing, full covariances."""
    rows = clusters(20_000, 8, 3)
    rows[np.random.default_rng(1).random(rows.shape) < 0.1] = np.nan
    model, params = opened(emfed.gaussian_mixture(3, "full", missing=True), rows)
    few = rows[:500]
    loop = best_times({"row loop": row_loop(few, model.to_user(params))}, seconds=2)
    ours = best_times({"emfed": our_pass(model, params, rows)}, seconds=2)
    return {"emfed": ours["emfed"], "row loop": loop["row loop"] * len(rows) / len(few)}


def bench_air() -> dict[str, float]:
    """All hours of twelve Beijing stations with their gaps, beside the same rows filled up."""
    path = Path(os.environ.get("EMFED_DATA", "")) / "beijing_air_quality.parquet"
    if not path.is_file():
        return {}
    names = ["PM2.5", "PM10", "SO2", "NO2", "CO", "O3", "TEMP", "PRES", "DEWP", "RAIN", "WSPM"]
    torn = np.ascontiguousarray(emfed.data.ParquetRows(path, names).read(0, 420_768))
    whole = np.where(np.isnan(torn), np.nanmean(torn, axis=0), torn)
    model, params = opened(emfed.gaussian_mixture(5, "full", missing=True), torn)
    plain, start = opened(emfed.gaussian_mixture(5, "full"), whole)
    return best_times(
        {"emfed": our_pass(model, params, torn), "without gaps": our_pass(plain, start, whole)}
    )


def bench_diagonal() -> dict[str, float]:
    """Gaussian columns of a mixed mixture, beside scikit-learn's diagonal mixture."""
    rows = clusters(70_000, 20, 10)
    model, params = opened(emfed.mixed_mixture(10, "gaussian", missing=False), rows)
    judge = judge_mixture("diag", 10, rows)
    return best_times(
        {"emfed": our_pass(model, params, rows), "scikit-learn": sklearn_pass(judge, rows)}
    )


def bench_diagonal_missing() -> dict[str, float]:
    """The same with one value in ten missing, beside scikit-learn on complete rows."""
    rows = clusters(70_000, 20, 10)
    judge = judge_mixture("diag", 10, rows)
    torn = np.where(np.random.default_rng(1).random(rows.shape) < 0.1, np.nan, rows)
    model, params = opened(emfed.mixed_mixture(10, "gaussian"), torn)
    return best_times(
        {"emfed": our_pass(model, params, torn), "scikit-learn": sklearn_pass(judge, rows)}
    )


def numpy_classes(rows: np.ndarray, weights: np.ndarray, p: np.ndarray) -> Callable[[], object]:
    """Latent class analysis of 0/1 columns, as one would write it in numpy."""

    def run() -> object:
        logits = rows @ np.log(p).T + (1 - rows) @ np.log1p(-p).T + np.log(weights)
        shares = np.exp(logits - logits.max(axis=1, keepdims=True))
        shares /= shares.sum(axis=1, keepdims=True)
        mass = shares.sum(axis=0)
        return mass, shares.T @ rows / mass[:, None]

    return run


def bench_bernoulli() -> dict[str, float]:
    """70,000 rows of 40 columns of 0 and 1, five classes."""
    rng = np.random.default_rng(0)
    p = rng.uniform(0.1, 0.9, size=(5, 40))
    rows = (rng.random((70_000, 40)) < p[rng.integers(5, size=70_000)]).astype(float)
    model, params = opened(emfed.mixed_mixture(5, "bernoulli", missing=False), rows)
    theirs = numpy_classes(rows, np.full(5, 0.2), p)
    return best_times({"emfed": our_pass(model, params, rows), "numpy": theirs})


def bench_factors() -> dict[str, float]:
    """20,000 rows of 50 columns and 5 factors; scikit-learn's pass is one SVD."""
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(20_000, 5)) @ rng.normal(size=(5, 50)) + rng.normal(size=(20_000, 50))
    model, params = opened(emfed.factor_analysis(5), rows)

    def judge(steps: int) -> Callable[[], object]:
        def run() -> object:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return FactorAnalysis(5, tol=0, max_iter=steps, svd_method="lapack").fit(rows)

        return run

    times = best_times(
        {"emfed": our_pass(model, params, rows), "one": judge(1), "three": judge(3)}, seconds=1.5
    )
    return {"emfed": times["emfed"], "scikit-learn": (times["three"] - times["one"]) / 2}


def bench_regressions() -> dict[str, float]:
    """100,000 rows, 6 inputs, 3 lines; beside least squares with weights, one line at a time."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(100_000, 6))
    lines = 3 * rng.normal(size=(3, 7))
    mine = lines[rng.integers(3, size=len(x))]
    y = mine[:, 0] + (mine[:, 1:] * x).sum(axis=1) + rng.normal(size=len(x))
    rows = np.column_stack([x, y])
    model, params = opened(emfed.regression_mixture(3), rows)
    user = model.to_user(params)
    design = np.column_stack([np.ones(len(x)), x])

    def theirs() -> object:
        residuals = y[:, None] - design @ user.lines().T
        logits = np.log(user.weights) - 0.5 * (residuals**2 / user.noise + np.log(user.noise))
        shares = np.exp(logits - logits.max(axis=1, keepdims=True))
        shares /= shares.sum(axis=1, keepdims=True)
        out = []
        for j in range(3):
            weighted = design * shares[:, j : j + 1]
            line = np.linalg.solve(weighted.T @ design, weighted.T @ y)
            out.append((line, shares[:, j] @ (y - design @ line) ** 2 / shares[:, j].sum()))
        return out

    return best_times({"emfed": our_pass(model, params, rows), "numpy": theirs})


def bench_markov(kind: str, count: int = 1000, steps: int = 100) -> dict[str, float]:
    """100,000 steps of 3 columns in 4 states, beside hmmlearn (scaled)."""
    rng = np.random.default_rng(0)
    labels = np.cumsum(rng.random((count, steps)) < 0.1, axis=1) % 4
    if kind == "gaussian":
        rows = 3 * rng.normal(size=(4, 3))[labels] + rng.normal(size=(count, steps, 3))
    else:
        rows = rng.poisson(rng.uniform(1, 20, size=(4, 3))[labels]).astype(float)
    model, params = opened(emfed.hidden_markov(4, kind), rows)
    user = model.to_user(params)
    options: dict[str, Any] = {"n_components": 4, "n_iter": 1, "init_params": "", "tol": 0}
    flat, sizes = rows.reshape(-1, 3), [steps] * count

    def theirs() -> object:
        if kind == "gaussian":
            judge = hmm.GaussianHMM(covariance_type="diag", implementation="scaling", **options)
            judge.means_, judge.covars_ = user.gaussian[..., 0], user.gaussian[..., 1]
            return _fitted(judge, user, flat, sizes)
        judge = hmm.PoissonHMM(implementation="scaling", **options)
        judge.lambdas_ = user.poisson
        return _fitted(judge, user, flat.astype(int), sizes)

    return best_times({"emfed": our_pass(model, params, rows), "hmmlearn": theirs})


def _fitted(judge: Any, user: Any, flat: np.ndarray, sizes: list[int]) -> object:
    judge.startprob_, judge.transmat_ = user.initial, user.transitions
    return judge.fit(flat, sizes)


def bench_models() -> dict[str, dict[str, float]]:
    found = {
        "Gaussian mixture with NaN, full": bench_missing(),
        "Beijing air, 420,768 rows with NaN, full": bench_air(),
        "Gaussian columns": bench_diagonal(),
        "Gaussian columns with NaN": bench_diagonal_missing(),
        "Bernoulli columns": bench_bernoulli(),
        "factor analysis": bench_factors(),
        "mixture of regressions": bench_regressions(),
        "Markov chain, Gaussian, 1,000 sequences": bench_markov("gaussian"),
        "Markov chain, Gaussian, one sequence": bench_markov("gaussian", 1, 100_000),
        "Markov chain, Poisson, 1,000 sequences": bench_markov("poisson"),
    }
    return {name: times for name, times in found.items() if times}
