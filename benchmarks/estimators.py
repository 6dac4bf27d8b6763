"""The estimators beside scikit-learn: speed from one start, and where default starts lead."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
from sklearn import datasets
from sklearn.decomposition import PCA
from sklearn.mixture import GaussianMixture

import fedem

KINDS = ("full", "tied", "diag", "spherical")
ROWS, COLUMNS, COMPONENTS = 70_000, 20, 10


def rows_of(spread: float) -> np.ndarray:
    """Components whose centres lie so many standard deviations from the origin in each column."""
    rng = np.random.default_rng(0)
    centres = spread * rng.normal(size=(COMPONENTS, COLUMNS))
    shapes = np.eye(COLUMNS) + 0.3 * rng.normal(size=(COMPONENTS, COLUMNS, COLUMNS))
    labels = rng.integers(COMPONENTS, size=ROWS)
    noise = rng.normal(size=(ROWS, COLUMNS))
    return centres[labels] + np.einsum("nij,nj->ni", shapes[labels], noise)


def bench_speed() -> list[dict[str, Any]]:
    """Whole fits from the start of scikit-learn's k-means, both with their defaults."""
    out = []
    for spread in (2.0, 0.7):
        rows = rows_of(spread)
        for kind in KINDS:
            out.append({"spread": spread, "covariance": kind, **_speed(rows, kind)})
    return out


def _speed(rows: np.ndarray, kind: str) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first = GaussianMixture(COMPONENTS, covariance_type=kind, max_iter=1, random_state=0)
        first.fit(rows)
        start = fedem.GaussianParameters(first.weights_, first.means_, first.covariances_)
        given = {
            "weights_init": first.weights_,
            "means_init": first.means_,
            "precisions_init": first.precisions_,
            "init_params": "random_from_data",  # not used, and free
        }
        peer = GaussianMixture(COMPONENTS, covariance_type=kind, random_state=0, **given)
        ours = fedem.FederatedGaussianMixture(COMPONENTS, covariance_type=kind, start=start)
        seconds = {}
        for name, estimator in (("fedem", ours), ("sklearn", peer)):
            best = np.inf
            for _ in range(3):
                began = time.perf_counter()
                estimator.fit(rows)
                best = min(best, time.perf_counter() - began)
            seconds[name] = best
    return {
        "seconds": seconds["fedem"],
        "sklearn_seconds": seconds["sklearn"],
        "rounds": ours.n_iter_,
        "sklearn_rounds": peer.n_iter_,
        "log_likelihood": ours.score(rows),
        "sklearn_log_likelihood": peer.score(rows),
    }


def tables() -> Iterator[tuple[str, np.ndarray, int]]:
    """Data sets that no setting was tuned on, with a number of components each."""
    yield "iris", datasets.load_iris().data, 3
    yield "wine", datasets.load_wine().data, 3
    cancer = datasets.load_breast_cancer().data
    yield "cancer, 8 PCs", PCA(8, random_state=0).fit_transform(cancer / cancer.std(axis=0)), 4
    yield "digits, 10 PCs", PCA(10, random_state=0).fit_transform(datasets.load_digits().data), 10
    blobs, _ = datasets.make_blobs(3000, 5, centers=8, random_state=1)
    yield "stretched blobs", blobs @ np.random.default_rng(0).normal(size=(5, 5)), 8
    moons, _ = datasets.make_moons(1500, noise=0.08, random_state=0)
    yield "moons", moons, 6


def _pooled(kind: str, k: int, rows: np.ndarray, seed: int, n_init: int, split: int) -> float:
    """Where pooled EM ends from the default start, found by so many workers."""
    parts = np.array_split(rows[np.argsort(rows[:, 0], kind="stable")], split)
    model = fedem.gaussian_mixture(k, kind)
    run = fedem.open_run(model, parts, start="k-means", n_init=n_init, seed=seed)
    start = run.model.to_user(run.params)
    judge = fedem.FederatedGaussianMixture(k, covariance_type=kind, start=start, tol=1e-7)
    return judge.fit(rows).score(rows)


def bench_starts(runs: int = 10) -> list[dict[str, Any]]:
    """Median log-likelihood that EM reaches from our start and from scikit-learn's k-means."""
    out = []
    for name, rows, k in tables():
        for kind in ("full", "diag"):
            for n_init in (1, 5):
                row: dict[str, Any] = {"data": name, "covariance": kind, "n_init": n_init}
                unit = rows.std(axis=0)
                found: dict[str, list[float]] = {"alone": [], "8 workers": [], "sklearn": []}
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    for seed in range(runs):
                        found["alone"].append(_pooled(kind, k, rows, seed, n_init, 1))
                        found["8 workers"].append(_pooled(kind, k, rows, seed, n_init, 8))
                        peer = GaussianMixture(
                            k,
                            covariance_type=kind,
                            n_init=n_init,
                            tol=1e-6,
                            max_iter=2000,
                            random_state=seed,
                        )
                        score = peer.fit(rows / unit).score(rows / unit)
                        found["sklearn"].append(float(score - np.log(unit).sum()))
                out.append(row | {n: float(np.median(v)) for n, v in found.items()})
    return out
