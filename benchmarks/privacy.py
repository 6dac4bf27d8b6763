"""Held-out nats against epsilon: private fits, pooled DP-EM as published, and none."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import emfed
from benchmarks.answer import AIR, _digits, _table
from emfed.core.privacy import mu_squared_of

EPSILONS = (0.3, 1.0, 3.0, 10.0)
SITES = 10


def sets() -> Iterator[tuple[str, np.ndarray, int, str, float]]:
    """Name, rows, components, covariances and delta."""
    folder = Path(os.environ.get("EMFED_DATA", ""))
    if (folder / "lifesci.csv.gz").is_file():
        rows = np.loadtxt(folder / "lifesci.csv.gz", delimiter=",")
        # The units of Park et al.: no row is longer than one. Nats depend on them.
        yield "Life Science", rows / np.linalg.norm(rows, axis=1).max(), 3, "full", 1e-4
    if (folder / "mnist.npz").is_file():
        digits = _digits()[0]
        yield "MNIST tied", digits / digits.std(axis=0), 10, "tied", 1e-6
    if (folder / "beijing_air_quality.parquet").is_file():
        yield (
            "Beijing full",
            _table("beijing_air_quality.parquet", AIR, "station")[0],
            5,
            "full",
            1e-6,
        )


def published(
    rows: np.ndarray, k: int, epsilon: float, delta: float, seed: int, rounds: int = 10
) -> Any:
    """DP-EM (Park, Foulds, Chaudhuri and Welling, 2017), pooled, with full covariances.

    Rows are scaled into the unit ball by the length of the longest, which is taken as public. Each
    round perturbs the weights, every mean and every covariance by a Gaussian mechanism of its own;
    all compose exactly here, which is kinder to it than the paper's accountant. Neighbours have one
    row more or less. The start is drawn from a Gaussian, as theirs.
    """
    rng = np.random.default_rng(seed)
    size = float(np.linalg.norm(rows, axis=1).max())
    y, (n, d) = rows / size, rows.shape
    multiplier = np.sqrt(rounds * (2 * k + 1) / mu_squared_of(epsilon, delta))
    weights, means = np.full(k, 1 / k), rng.normal(size=(k, d)) * 0.1
    covariances = np.tile(np.eye(d) * float((y**2).mean()), (k, 1, 1))
    model = emfed.gaussian_mixture(k, "full")
    unit = {"mean": np.zeros((1, d)), "scatter": np.ones((1, d))}
    bound = model.bind(unit, np.array([n]), np.ones(1))
    for _ in range(rounds):
        params = emfed.models.GaussianParameters(weights, means, covariances)
        r = bound.responsibilities(y[None], params)[0]
        mass = np.maximum(r.sum(axis=0) + multiplier * rng.normal(size=k), 10.0)
        weights = mass / mass.sum()
        means = (r.T @ y + multiplier * rng.normal(size=(k, d))) / mass[:, None]
        for j in range(k):
            noise = np.triu(multiplier * rng.normal(size=(d, d)))
            second = (r[:, j, None] * y).T @ y + noise + np.triu(noise, 1).T
            raw = second / mass[j] - np.outer(means[j], means[j])
            values, vectors = np.linalg.eigh(raw)
            covariances[j] = (vectors * np.maximum(values, 1e-3 / d)) @ vectors.T
    return emfed.models.GaussianParameters(weights, means * size, covariances * size**2)


def held_out(model: Any, params: Any, rows: np.ndarray) -> float:
    """Nats a row of parameters in the user's units."""
    d = rows.shape[1]
    products = model.kind == "tied"
    scatter = np.eye(d)[np.triu_indices(d)] if products else np.ones(d)
    unit = {"mean": np.zeros((1, d)), "scatter": scatter[None]}
    bound = model.bind(unit, np.array([len(rows)]), np.ones(1))
    return float(np.mean(bound.log_likelihood(rows[None], bound.from_user(params))))


def bench_privacy(seeds: int = 10) -> list[dict[str, Any]]:
    """Medians over seeds; a tenth of the rows is held out, another one for each seed."""
    found = []
    for name, rows, k, kind, delta in sets():
        model = emfed.gaussian_mixture(k, kind)
        values: dict[str, list[float]] = {}
        for seed in range(seeds):
            order = np.random.default_rng(seed).permutation(len(rows))
            test, train = rows[order[: len(rows) // 10]], rows[order[len(rows) // 10 :]]
            exact = emfed.fit(model, train, seed=seed)
            values.setdefault("none", []).append(held_out(model, exact.params, test))
            for epsilon in EPSILONS:
                parts = np.array_split(train, SITES)
                ours = emfed.fit(model, parts, epsilon=epsilon, delta=delta, seed=seed)
                values.setdefault(f"{epsilon:g}", []).append(held_out(model, ours.params, test))
                full = emfed.gaussian_mixture(k, "full")
                theirs = published(train, k, epsilon, delta, seed)
                values.setdefault(f"DP-EM {epsilon:g}", []).append(held_out(full, theirs, test))
        medians = {key: float(np.median(told)) for key, told in values.items()}
        found.append({"data": name, "delta": delta, "seeds": seeds, **medians})
    return found
