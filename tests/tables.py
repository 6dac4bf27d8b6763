"""Small tables of mixed types, with and without missing values, that several tests share."""

from __future__ import annotations

from typing import Any

import numpy as np

import emfed
import tests.models.negative_binomial  # noqa: F401 (registers a family of its own)
from emfed.core.protocols import FloatArray

FAMILIES: dict[str, Any] = {
    "gaussian": ["gaussian", "gaussian"],
    "poisson": ["poisson", "poisson"],
    "exposed": [emfed.models.Poisson(exposure=2), emfed.models.Poisson(exposure=2), "exposure"],
    "bernoulli": ["bernoulli"] * 7,
    "categorical": [emfed.models.Categorical(n) for n in (3, 2, 4, 3, 3)],
    "exponential": ["exponential"] * 3,
    "gamma": ["gamma", "gamma"],
    "mixed": [
        "gaussian",
        emfed.models.Poisson(exposure=5),
        "bernoulli",
        emfed.models.Categorical(3),
        "gamma",
        "exposure",
        "poisson",
        "gaussian",
        "exponential",
    ],
}
"""A list of families per kind of table; every registered family has one."""
FAMILIES |= {name: [name] * 2 for name in emfed.models.FAMILIES if name not in FAMILIES}


def column(family: Any, k: int, labels: Any, exposure: FloatArray, rng: Any) -> FloatArray:
    """One column drawn from k components of a family."""
    n = len(labels)
    if family == "gaussian":
        return (3 * rng.normal(size=k))[labels] + rng.normal(size=n) * rng.uniform(0.5, 1)
    if family == "poisson":
        return rng.poisson(rng.uniform(1, 12, size=k)[labels]).astype(float)
    if isinstance(family, emfed.models.Poisson):
        return rng.poisson(rng.uniform(0.5, 6, size=k)[labels] * exposure).astype(float)
    if family == "bernoulli":
        return (rng.random(n) < rng.permutation(np.linspace(0.1, 0.9, k))[labels]).astype(float)
    if family == "exponential":
        return rng.exponential(rng.permutation(np.geomspace(0.5, 12, k))[labels])
    if family == "gamma":
        shape, mean = rng.uniform(1, 6, size=k), rng.uniform(1, 10, size=k)
        return rng.gamma(shape[labels], mean[labels] / shape[labels])
    if family == "exposure":
        return exposure
    if isinstance(family, str):
        made = emfed.models.FAMILIES[family]
        return made().draw(np.array(made.examples)[labels], np.ones(n), rng.random(n))
    p = rng.dirichlet(np.full(family.categories, 0.4), size=k)
    return np.array([rng.choice(family.categories, p=p[j]) for j in labels], dtype=float)


def mixed_tables(
    kind: str,
    seed: int = 0,
    sizes: tuple[int, ...] = (40, 55, 21, 64),
    k: int = 2,
    missing: float = 0.0,
) -> list[FloatArray]:
    """Workers of unequal size; entries are missing completely at random."""
    rng = np.random.default_rng(seed)
    n = sum(sizes)
    labels = rng.integers(k, size=n)
    exposure = rng.uniform(0.5, 3, size=n)
    rows = np.stack([column(f, k, labels, exposure, rng) for f in FAMILIES[kind]], axis=1)
    holes = rng.random(rows.shape) < missing
    holes[:, [f == "exposure" for f in FAMILIES[kind]]] = False
    rows[holes] = np.nan
    return np.split(rows, np.cumsum(sizes)[:-1])
