"""Fitted models in a reader's terms: moments of each component, and its parameters by column.

Everything here follows from parameters alone; no row is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from emfed.core.protocols import FloatArray, IntArray
from emfed.models.clusters import Clusters
from emfed.models.columns import Columns
from emfed.models.emissions import by_column
from emfed.models.gaussian import GaussianMixture
from emfed.models.linear import LinearGaussian
from emfed.models.loadings import FactorParameters
from emfed.models.markov import HiddenMarkov
from emfed.models.missing import MissingGaussianMixture
from emfed.models.mixed import MixedMixture
from emfed.models.regression import RegressionMixture

VARIANCES: dict[str, Callable[[FloatArray], FloatArray]] = {
    "gaussian": lambda t: t[..., 1],
    "poisson": lambda t: t[..., 0],
    "bernoulli": lambda t: t[..., 0] * (1 - t[..., 0]),
    "exponential": lambda t: t[..., 0] ** 2,
    "gamma": lambda t: t[..., 1] ** 2 / t[..., 0],
}
"""Of one value, per unit of exposure; categories have none."""


@dataclass(frozen=True, eq=False)
class Portrait:
    """Components of a fitted model, in the user's units."""

    noun: str
    """What the parts are called: component or state."""
    weights: FloatArray
    """The share of each, ``(K,)``."""
    features: Sequence[str]
    cells: Sequence[Sequence[str]]
    """For each feature, a short text for each component."""
    columns: IntArray
    """Columns with moments."""
    means: FloatArray | None = None
    covariances: FloatArray | None = None
    """``(K, c)`` and ``(K, c, c)``, or variances ``(K, c)``; None where rows have none."""


def width_of(model: Any) -> int | None:
    """The number of columns of the data that a bound model was fitted on."""
    if isinstance(model, MissingGaussianMixture):
        return model.inner.n_features
    if isinstance(model, RegressionMixture):
        return model.n_inputs + 1
    if isinstance(model, (MixedMixture, HiddenMarkov)):
        return model.columns.count
    return getattr(model, "n_features", None)


def portray(model: Any, params: Any, names: Sequence[str] | None = None) -> Portrait | None:
    """The portrait of a fitted model; None for a model that this module does not know."""
    if names is None:
        names = [f"column {j}" for j in range(width_of(model) or 0)]
    if isinstance(model, MissingGaussianMixture):
        return portray(model.inner, params, names)
    if isinstance(model, GaussianMixture):
        return _normal(params.weights, params.means, _spread(model.kind, params), names)
    if isinstance(params, FactorParameters):  # of whichever model is one or several of them
        return _normal(params.weights, params.means, params.covariances(), names)
    if isinstance(model, Clusters):
        return _centres(params.centres, names)
    if isinstance(model, LinearGaussian):
        return _normal(np.ones(1), params.mean[None], np.ones((1, len(params.mean))), names)
    if isinstance(model, MixedMixture):
        return _columns("component", params.weights, model.columns, params, names)
    if isinstance(model, HiddenMarkov):
        weights = _stationary(params.transitions)
        return _columns("state", weights, model.columns, params, names)
    if isinstance(model, RegressionMixture):
        return _regressions(model, params, names)
    return None


def _spread(kind: str, params: Any) -> FloatArray:
    """Covariances ``(K, d, d)``, or variances ``(K, d)``."""
    k, d = params.means.shape
    if kind in ("full", "diag"):
        return np.asarray(params.covariances)
    if kind == "spherical":
        return np.broadcast_to(params.covariances[:, None], (k, d))
    return np.broadcast_to(params.covariances, (k, d, d))


def _normal(
    weights: FloatArray, means: FloatArray, spread: FloatArray, names: Sequence[str]
) -> Portrait:
    variances = np.diagonal(spread, axis1=-2, axis2=-1) if spread.ndim == 3 else spread
    sd = np.sqrt(variances)
    cells = [
        [f"{m:.4g} ± {s:.3g}" for m, s in zip(means[:, j], sd[:, j], strict=True)]
        for j in range(means.shape[1])
    ]
    every = np.arange(means.shape[1], dtype=np.int64)
    return Portrait("component", weights, names, cells, every, means, spread)


def _centres(centres: FloatArray, names: Sequence[str]) -> Portrait:
    """k-means has centres and nothing else: shares are in the statistics."""
    cells = [[f"{v:.4g}" for v in column] for column in centres.T]
    shares = np.full(len(centres), np.nan)
    return Portrait("cluster", shares, names, cells, np.empty(0, dtype=np.int64))


def _columns(
    noun: str, weights: FloatArray, columns: Columns, params: Any, names: Sequence[str]
) -> Portrait:
    found = by_column(columns, params)
    keys = list(found)
    cells = [[_words(found[key], k) for k in range(len(weights))] for key in keys]
    order = [int(c) for group in columns.groups for c in group.columns]
    labels = [names[c] for c in sorted(order)]
    which, means, variances = [], [], []
    for group in columns.groups:
        if group.array in VARIANCES:
            theta = group.read(params)
            which += group.columns.tolist()
            means.append(group.family.mean(theta, np.ones(1)))
            variances.append(VARIANCES[group.array](theta))
    if not which:
        return Portrait(noun, weights, labels, cells, np.empty(0, dtype=np.int64))
    picked = np.argsort(which)
    return Portrait(
        noun,
        weights,
        labels,
        cells,
        np.array(which, dtype=np.int64)[picked],
        np.concatenate(means, axis=-1)[:, picked],
        np.concatenate(variances, axis=-1)[:, picked],
    )


def _words(arrays: Any, k: int) -> str:
    """One column's parameters in one component, few words."""
    parts = []
    for name, value in arrays.items():
        numbers = np.atleast_1d(np.asarray(value)[k])
        text = " ".join(f"{v:.3g}" for v in numbers[:12]) + (" …" if len(numbers) > 12 else "")
        parts.append(f"{name} {text}")
    return ", ".join(parts)


def _regressions(model: RegressionMixture, params: Any, names: Sequence[str]) -> Portrait:
    target = model.target % len(names)
    inputs = [name for j, name in enumerate(names) if j != target]
    rows = [params.intercepts, *params.coefficients.T, np.sqrt(params.noise)]
    labels = [f"{names[target]}: intercept", *(f"per unit of {n}" for n in inputs), "noise (sd)"]
    cells = [[f"{v:.4g}" for v in np.ravel(row)] for row in rows]
    return Portrait("component", params.weights, labels, cells, np.empty(0, dtype=np.int64))


def _stationary(transitions: FloatArray) -> FloatArray:
    """The long-run share of each state."""
    k = len(transitions)
    system = np.vstack([transitions.T - np.eye(k), np.ones(k)])
    shares = np.linalg.lstsq(system, np.append(np.zeros(k), 1.0), rcond=None)[0]
    return np.clip(shares, 0.0, 1.0)


def principal_plane(portrait: Portrait) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
    """The mixture's first two principal axes, from its own moments.

    Columns are standardised by the mixture's own spread. Returns the axes ``(2, c)``, the share of
    variance along each ``(2,)``, the components' means ``(K, 2)`` and covariances ``(K, 2, 2)``.
    """
    assert portrait.means is not None
    assert portrait.covariances is not None
    w, means, spread = portrait.weights, portrait.means, portrait.covariances
    centre = w @ means
    away = means - centre
    matrices = spread.ndim == 3
    inner = np.tensordot(w, spread, axes=1)
    total = (inner if matrices else np.diag(inner)) + (away.T * w) @ away
    sd = np.sqrt(np.maximum(np.diagonal(total), 1e-300))
    values, vectors = np.linalg.eigh(total / np.outer(sd, sd))
    axes = vectors[:, : -3 if len(values) > 2 else None : -1].T
    axes = (
        axes * np.where(axes[np.arange(len(axes)), np.abs(axes).argmax(axis=1)] < 0, -1, 1)[:, None]
    )
    scaled = axes / sd
    if matrices:
        flat = scaled @ spread @ scaled.T
    else:
        flat = np.einsum("ac,kc,bc->kab", scaled, spread, scaled)
    return axes, values[::-1][: len(axes)] / values.sum(), away @ scaled.T, flat
