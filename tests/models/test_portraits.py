"""Portraits of fitted models: moments that are right, and axes that need no rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import emfed
from emfed.models.component_summaries import Portrait, portray, principal_plane, width_of
from tests.helpers import plain_fit
from tests.registry import REGISTRY


def fitted(name: str) -> tuple[emfed.Result, Any]:
    entry = REGISTRY[name]
    return plain_fit(entry.make(), entry.tables, rounds=20), np.concatenate(entry.tables)


@pytest.mark.parametrize("name", REGISTRY)
def test_every_model_has_a_portrait(name: str) -> None:
    result, rows = fitted(name)
    assert width_of(result.model) == rows.shape[-1]
    portrait = portray(result.model, result.params)
    assert portrait.weights.sum() == pytest.approx(1, abs=1e-8)
    assert len(portrait.features) == len(portrait.cells)
    assert {len(cells) for cells in portrait.cells} == {len(portrait.weights)}


@pytest.mark.parametrize(
    "name", [n for n in REGISTRY if "NaN" not in n and "chain" not in n and "regress" not in n]
)
def test_moments_are_those_of_rows_that_the_model_draws(name: str) -> None:
    if name == "exposed mixture":
        pytest.skip("counts per unit of exposure, drawn with the exposure of a typical row")
    result, _ = fitted(name)
    portrait = portray(result.model, result.params)
    if portrait.means is None:
        assert "categorical" in name
        return
    rows, labels = result.sample(60_000, seed=1)
    for k, weight in enumerate(portrait.weights):
        mine = rows[labels == k][:, portrait.columns]
        if name == "mixed mixture":  # its second column has an exposure
            mine = np.delete(mine, 1, axis=1)
        if weight < 0.05:
            continue
        means, spread = portrait.means[k], portrait.covariances[k]
        variances = np.diagonal(spread) if spread.ndim == 2 else spread
        if name == "mixed mixture":
            means, variances = np.delete(means, 1), np.delete(variances, 1)
        error = np.sqrt(variances / len(mine))
        assert np.all(np.abs(mine.mean(axis=0) - means) < 6 * error + 1e-9)
        np.testing.assert_allclose(mine.var(axis=0), variances, rtol=0.15)


def test_the_plane_is_that_of_principal_components() -> None:
    """PCA of many rows that the mixture draws, standardised, finds the same plane."""
    rng = np.random.default_rng(2)
    k, d, n = 3, 5, 400_000
    weights = np.array([0.5, 0.3, 0.2])
    means = 4 * rng.normal(size=(k, d)) * [1, 10, 1, 0.1, 1]
    roots = rng.normal(size=(k, d, d)) * np.array([1, 10, 1, 0.1, 1])[:, None]
    spread = roots @ np.swapaxes(roots, 1, 2)
    blank = np.arange(d, dtype=np.int64)
    portrait = Portrait(weights, ["x"] * d, [], blank, means, spread)
    axes, shares, centres, covariances = principal_plane(portrait)
    labels = rng.choice(k, size=n, p=weights)
    rows = means[labels] + np.einsum("nij,nj->ni", roots[labels], rng.normal(size=(n, d)))
    white = (rows - rows.mean(axis=0)) / rows.std(axis=0)
    values, vectors = np.linalg.eigh(np.cov(white.T))
    for j in (0, 1):
        assert abs(vectors[:, -1 - j] @ axes[j]) == pytest.approx(1, abs=1e-3)
        assert values[-1 - j] / values.sum() == pytest.approx(shares[j], abs=3e-3)
    flat = white @ axes.T
    for c in range(k):
        np.testing.assert_allclose(flat[labels == c].mean(axis=0), centres[c], atol=0.02)
        np.testing.assert_allclose(np.cov(flat[labels == c].T), covariances[c], atol=0.03)


def test_variances_and_full_covariances_agree() -> None:
    rng = np.random.default_rng(0)
    weights, means = np.array([0.4, 0.6]), rng.normal(size=(2, 4))
    variances = rng.uniform(0.5, 2, size=(2, 4))
    blank = np.arange(4, dtype=np.int64)
    full = np.stack([np.diag(v) for v in variances])
    one, other = (
        principal_plane(Portrait(weights, [], [], blank, means, s)) for s in (variances, full)
    )
    for a, b in zip(one, other, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-12)
