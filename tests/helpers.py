"""Small federations and the checks that several tests share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

import emfed
from emfed.core.protocols import Compressor, FloatArray
from emfed.models import COVARIANCES

OPEN = emfed.network.SiteRules.trusting()
BARE = emfed.network.SiteRules(unmasked=True)
"""The default rules of an owner who allows runs without masks."""
"""Rules of a site that answers everything: most tests have few rows, and some odd models."""
KINDS = (*COVARIANCES, "streamed")
"""Every covariance type, and tied with y y^T among the statistics."""


def first(values: Iterable[Any], count: int = 1) -> list[Any]:
    """Parameters of a test of which only so many run by default; `make long` runs the others."""
    given = list(values)
    late = [value if isinstance(value, tuple) else (value,) for value in given[count:]]
    return given[:count] + [pytest.param(*values, marks=pytest.mark.long) for values in late]


def make_model(kind: str, k: int = 3, d: int = 2, **options: Any) -> Any:
    if kind == "known":
        options["known_covariance"] = 0.5 * np.eye(d) + 0.1
    if kind == "streamed":
        kind, options = "tied", options | {"second_moment": "statistic"}
    return emfed.gaussian_mixture(k, kind, **options)


def make_data(
    seed: int = 0,
    sizes: tuple[int, ...] = (30, 45, 7, 60),
    k: int = 3,
    d: int = 2,
    spread: float = 3.0,
) -> list[FloatArray]:
    """Workers of unequal size, each with its own mix of k clusters."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(k, d)) * spread
    out = []
    for m in sizes:
        labels = rng.choice(k, size=m, p=rng.dirichlet(np.ones(k)))
        out.append(centres[labels] + rng.normal(size=(m, d)) * rng.uniform(0.5, 1.0, size=d))
    return out


def memory_gap(run: emfed.fitting.Run) -> float:
    """The relative violation of V = sum w_i V_i: zero up to rounding."""
    gap = run.memory - run.weights @ run.memories
    return float(np.linalg.norm(gap) / (np.linalg.norm(run.memory) or 1.0))


def bind(model: Any, tables: list[FloatArray], weights: FloatArray | None = None) -> Any:
    """The opening exchange, by hand."""
    counts = np.array([len(t) for t in tables])
    w = counts / counts.sum() if weights is None else weights
    parts = [model.summary(t) for t in tables]
    return model.bind({n: np.stack([p[n] for p in parts]) for n in parts[0]}, counts, w)


def quantise_many(
    operator: Compressor, x: FloatArray, repeats: int, rng: np.random.Generator
) -> FloatArray:
    u = rng.random((repeats, operator.draws(x.shape[-1])))
    stack = np.broadcast_to(x, (repeats, len(x)))
    return operator.decompress(operator.compress(stack, u), u, len(x))


def bias_in_sigmas(operator: Compressor, x: FloatArray, repeats: int, seed: int) -> float:
    """|mean Q(x) - x| in standard errors of that mean, with an allowance for rare levels."""
    sample = quantise_many(operator, x, repeats, np.random.default_rng(seed))
    error = np.linalg.norm(sample.mean(axis=0) - x)
    spread = np.sqrt(((sample - x) ** 2).sum(axis=1).mean() / repeats)
    return float(error / (spread + rare(x, repeats)))


def rare(x: FloatArray, repeats: int) -> float:
    """What levels of probability about 1 / repeats, perhaps never seen, may contribute."""
    return 2 * float(np.linalg.norm(x)) / repeats + 1e-300


PLAIN: dict[str, Any] = {"start": "moments", "tol": 0}
"""A cheap start, and as many rounds as are asked for."""


def plain_fit(model: Any, data: Any, algorithm: Any = None, **options: Any) -> emfed.Result:
    """EM unless told otherwise, from moments: what a test needs that compares trajectories."""
    limits = {"rounds", "epochs", "max_bytes", "seconds", "tol", "field_tol"}
    rounds = {} if limits & {*options} else {"rounds": 100}
    return emfed.fit(model, data, algorithm or emfed.EM(), **{**PLAIN, **rounds, **options})


def fit(model: Any, tables: Any, algorithm: Any = None, **options: Any) -> emfed.Result:
    """The same, with a seed of its own."""
    return plain_fit(model, tables, algorithm, **{"seed": 3, **options})
