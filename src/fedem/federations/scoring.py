"""How well a model fits each worker's rows, beside what the model itself would lead one to expect.

Log-likelihoods of two workers cannot be compared: rows of a rare or wide component have a lower one
however well they fit. So a worker's mean stands beside that of rows which the model draws, with as
many of each component as the worker has.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from array_api_compat import array_namespace

from fedem.datasets.tables import Piece
from fedem.errors import SettingsError
from fedem.protocols import FloatArray, Model

DRAWS = 4000
"""Rows that the model draws to say what it expects."""


def expectation(model: Any, params: Any) -> FloatArray | None:
    """Mean of the log-likelihood and of its square in each component, ``(K, 2)``.

    None for models that draw no samples.
    """
    try:
        rows, _ = model.sample(params, DRAWS, 0)
        scores, shares = model.score_samples(rows, params), model.responsibilities(rows, params)
    except (SettingsError, AttributeError):
        return None
    powers = np.stack([scores, scores**2], axis=1)
    return np.asarray((shares.T @ powers) / np.maximum(shares.sum(axis=0), 1e-12)[:, None])


def score(model: Any, params: Any, piece: Piece, expected: FloatArray | None) -> FloatArray:
    """Mean of the log-likelihood, of its square, and both as expected, ``(workers, 4)``."""
    if not hasattr(model, "score_samples"):  # a model of the user's that only has the mean
        mean = np.asarray(model.log_likelihood(piece.rows, params, piece.padding))
        return np.stack([mean, *np.full((3, len(mean)), np.nan)], axis=1)
    values = np.asarray(model.score_samples(piece.rows, params))
    inside = np.ones(values.shape) if piece.padding is None else np.asarray(piece.padding)
    inside = inside / inside.sum(axis=-1, keepdims=True)
    powers = np.stack([values, values**2], axis=-1)
    found = (inside[..., None] * powers).sum(axis=-2)
    if expected is None:
        return np.concatenate([found, np.full_like(found, np.nan)], axis=-1)
    shares = (inside[..., None] * model.responsibilities(piece.rows, params)).sum(axis=-2)
    return np.concatenate(
        [found, np.where(_torn(model, piece), np.nan, shares @ expected)], axis=-1
    )


def _torn(model: Model, piece: Piece) -> Any:
    """Workers with missing values: the model draws whole rows, which do not compare with theirs."""
    if not model.allows_missing:
        return False
    xp = array_namespace(piece.rows)
    flat = xp.reshape(piece.rows, (piece.rows.shape[0], -1))
    return np.asarray(xp.any(xp.isnan(flat), axis=-1))[:, None]


def means_and_spreads(moments: FloatArray) -> FloatArray:
    """First and second moments, in pairs, as means and standard deviations."""
    out = moments.copy()
    for j in (1, 3):
        out[:, j] = np.sqrt(np.maximum(moments[:, j] - moments[:, j - 1] ** 2, 0.0))
    return out
