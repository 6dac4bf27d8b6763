"""The metric in which statistics of owned factors are compressed.

With w_l the loadings of column l, m_l the share seen of it, sigma^2 the noise and N the cells of a
sample, the coordinates of statistics (G, p, s) are

    cross'  = (p_l - G_l w_l) / (sigma sqrt(m_l))
    square' = (s - sum_l (2 w_l . p_l - w_l G_l w_l + sigma^2 m'_l)) / (sigma^2 sqrt(2 N))
    latent' = G_l / sqrt(m_l), its diagonal also / sqrt(2),

m'_l the moment of the constant in G_l. To first order a move by (G, p, s) moves w_l by
G_l^-1 (p_l - G_l w_l) and sigma^2 by what square' says, so half their squares are the nats per
sample that it is worth; G itself moves nothing, and is measured by its own spread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import numpy as np

from emfed.core.protocols import FloatArray, Layout, Metric

LEAST_SHARE = 0.02
"""Of the average: a column that hardly anyone saw does not dominate."""


@final
@dataclass(frozen=True, eq=False)
class FactorMetric(Metric):
    """The metric at one set of parameters (no leading axes)."""

    layout: Layout
    loadings: FloatArray
    noise: float
    mass: FloatArray
    cells: float

    def _scales(self) -> tuple[FloatArray, FloatArray, float]:
        """Of cross, latent and square."""
        root = np.sqrt(np.maximum(self.mass, LEAST_SHARE * self.mass.mean()))[:, None]
        i, j = np.triu_indices(self.loadings.shape[1])
        pairs = np.where((i == j) & (i < self.loadings.shape[1] - 1), np.sqrt(2.0), 1.0)
        square = self.noise * float(np.sqrt(2 * self.cells))
        return root * np.sqrt(self.noise), root * pairs, square

    def _turned(self, latent: FloatArray) -> FloatArray:
        """G_l w_l."""
        width = self.loadings.shape[1]
        full = np.zeros((*latent.shape[:-1], width, width))
        i, j = np.triu_indices(width)
        full[..., i, j] = full[..., j, i] = latent
        return (full @ self.loadings[..., None])[..., 0]

    def _explained(self, latent: FloatArray, cross: FloatArray, turned: FloatArray) -> Any:
        """What s has without a change of sigma^2, ``(..., 1)``."""
        fitted = ((2 * cross - turned) * self.loadings).sum(axis=(-1, -2))
        return (fitted + self.noise * latent[..., -1].sum(axis=-1))[..., None]

    def whiten(self, vectors: FloatArray) -> FloatArray:
        """``(..., q)`` into the metric's coordinates."""
        parts, (a, b, c) = self.layout.split(vectors), self._scales()
        latent, cross = parts["latent"], parts["cross"]
        turned = self._turned(latent)
        square = parts["square"] - self._explained(latent, cross, turned)
        return self.layout.join(
            {"latent": latent / b, "cross": (cross - turned) / a, "square": square / c}
        )

    def unwhiten(self, vectors: FloatArray) -> FloatArray:
        """The inverse of `whiten`."""
        parts, (a, b, c) = self.layout.split(vectors), self._scales()
        latent = parts["latent"] * b
        turned = self._turned(latent)
        cross = parts["cross"] * a + turned
        square = parts["square"] * c + self._explained(latent, cross, turned)
        return self.layout.join({"latent": latent, "cross": cross, "square": square})
