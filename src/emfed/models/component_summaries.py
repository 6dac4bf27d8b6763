"""Fitted models in a reader's terms: moments of each component, and its parameters by column.

Everything here follows from parameters alone; no row is needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np

from emfed.core.protocols import FloatArray, HasColumns, IntArray, Parameters
from emfed.models.columns import Columns
from emfed.models.emissions import by_column
from emfed.models.loadings import FactorParameters

MOST_NUMBERS = 12
"""Numbers of a column's parameters that a cell of a table holds."""
NEGLIGIBLE = 0.01
"""A spread below this share of the largest one does not set the decimals of a feature."""
_NO_COLUMNS: IntArray = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, eq=False)
class Portrait:
    """Components of a fitted model, in the user's units."""

    weights: FloatArray
    """The share of each, ``(K,)``; NaN where parameters do not tell it."""
    features: Sequence[str]
    cells: Sequence[Sequence[str]]
    """For each feature, a short text for each component."""
    columns: IntArray
    """Columns with moments."""
    means: FloatArray | None = None
    covariances: FloatArray | None = None
    """``(K, c)`` and ``(K, c, c)``, or variances ``(K, c)``; None where rows have none."""
    levels: Mapping[str, FloatArray] = field(default_factory=dict)
    """The probability of each category of features that are categories, ``(K, categories)``."""
    legend: str = ""
    """What the numbers of a cell are, where the cell does not say it."""


@runtime_checkable
class HasPortrait(Protocol):
    """A model that says what a report shows of its components."""

    def portrait(self, params: Any, names: Sequence[str]) -> Portrait:
        """The components at parameters in the user's units; ``names`` are those of columns."""


def width_of(model: Any) -> int | None:
    """The number of columns of the data that a bound model was fitted on, if they are fixed."""
    return model.n_features if isinstance(model, HasColumns) else None


def portray(model: Any, params: Any, names: Sequence[str] | None = None) -> Portrait:
    """The portrait of a fitted model: its own, or every array of its parameters."""
    if isinstance(model, HasPortrait):
        return model.portrait(params, names or [f"column {j}" for j in range(width_of(model) or 0)])
    arrays = params.arrays() if isinstance(params, Parameters) else {}
    cells = [_numbers(np.reshape(value, (1, -1))) for value in arrays.values()]
    return Portrait(np.full(1, np.nan), list(arrays), cells, _NO_COLUMNS)


def normal_portrait(
    weights: FloatArray, means: FloatArray, spread: FloatArray, names: Sequence[str]
) -> Portrait:
    """Means and standard deviations, given covariances ``(K, d, d)`` or variances ``(K, d)``."""
    variances = np.diagonal(spread, axis1=-2, axis2=-1) if spread.ndim == 3 else spread
    sd = np.sqrt(variances)
    cells = []
    for j in range(means.shape[1]):
        d = digits(sd[:, j])
        pairs = zip(means[:, j].tolist(), sd[:, j].tolist(), strict=True)
        cells.append([f"{fixed(m, d)} ± {fixed(s, d)}" for m, s in pairs])
    every = np.arange(means.shape[1], dtype=np.int64)
    legend = "mean ± standard deviation"
    return Portrait(weights, names, cells, every, means, spread, legend=legend)


def factor_portrait(params: FactorParameters, names: Sequence[str]) -> Portrait:
    """Means and standard deviations, and below them what each column has of each factor."""
    own = normal_portrait(params.weights, params.means, params.covariances(), names)
    features = [*own.features, *(f"{name}, loadings" for name in names)]
    cells = [*own.cells, *(_numbers(params.loadings[:, j]) for j in range(len(names)))]
    return replace(own, features=features, cells=cells)


def alike(values: FloatArray) -> list[str]:
    """Numbers with the same decimals, which show the largest of them in four figures."""
    most = np.abs(values[np.isfinite(values)]).max(initial=0.0)
    if not 1e-3 <= most < 1e6:
        return [f"{v:.3g}" for v in values.tolist()]
    decimals = int(np.clip(3 - np.floor(np.log10(most)), 0, 6))
    return [fixed(v, decimals) for v in values.tolist()]


def digits(values: FloatArray) -> int:
    """Decimals that show the smallest of these in two figures, for all of them alike.

    One far below the largest, as where a floor holds it up, does not lengthen all the others.
    """
    some = np.abs(values[np.isfinite(values) & (values != 0)])
    if not len(some):
        return 2
    least = max(some.min(), NEGLIGIBLE * some.max())
    return int(np.clip(1 - np.floor(np.log10(least)), 0, 8))


def fixed(value: float, decimals: int) -> str:
    """A number with so many decimals; zero has no sign."""
    return f"{round(value, decimals) + 0.0:,.{decimals}f}"


def centre_portrait(centres: FloatArray, names: Sequence[str]) -> Portrait:
    """k-means has centres and nothing else: shares are in the statistics."""
    spread = np.maximum(np.ptp(centres, axis=0), 1e-12 * np.abs(centres).max(axis=0))
    cells = [
        [fixed(v, digits(s[None] / 10)) for v in column.tolist()]
        for column, s in zip(centres.T, spread, strict=True)
    ]
    shares = np.full(len(centres), np.nan)
    return Portrait(shares, names, cells, _NO_COLUMNS, legend="centres")


def column_portrait(
    weights: FloatArray, columns: Columns, params: Any, names: Sequence[str]
) -> Portrait:
    """The parameters of columns of any family."""
    found = by_column(columns, params)
    keys = list(found)
    cells = [_words(found[key]) for key in keys]
    labels = [names[c] for c in sorted(c for g in columns.groups for c in g.columns.tolist())]
    which, means, variances = [], [], []
    levels: dict[str, FloatArray] = {}
    for group in columns.groups:
        theta, own = group.read(params), group.columns.tolist()
        if group.family.nominal:
            levels |= {names[c]: theta[..., place, :] for place, c in enumerate(own)}
        else:
            which += own
            means.append(group.family.mean(theta, np.ones(1)))
            variances.append(group.family.variance(theta))
    if not which:
        return Portrait(weights, labels, cells, _NO_COLUMNS, levels=levels)
    picked = np.argsort(which)
    return Portrait(
        weights,
        labels,
        cells,
        np.array(which, dtype=np.int64)[picked],
        np.concatenate(means, axis=-1)[:, picked],
        np.concatenate(variances, axis=-1)[:, picked],
        levels,
    )


def _words(arrays: Mapping[str, FloatArray]) -> list[str]:
    """One column's parameters in each component, few words; the same decimals in all."""
    texts = [[f"{name} {text}" for text in _numbers(values)] for name, values in arrays.items()]
    return [", ".join(parts) for parts in zip(*texts, strict=True)]


def _numbers(values: FloatArray) -> list[str]:
    """The first numbers of each component, ``(K,)`` or ``(K, n)``."""
    values = np.asarray(values).reshape(len(values), -1)
    more = " …" if values.shape[1] > MOST_NUMBERS else ""
    texts = np.reshape(alike(values[:, :MOST_NUMBERS].ravel()), (len(values), -1))
    return [" ".join(row) + more for row in texts.tolist()]


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
