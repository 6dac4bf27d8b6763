"""The Fisher metric of a factor analyser's statistics: those of a regression of y on (z, 1).

With w_j = (loadings, mean) and noise psi_j of column j, G = [[latent, factor], [factor^T, mass]]:

    mass', factor' and (latent - mass I)'  over sqrt(pi), the diagonal of latent also / sqrt(2)
    (cross, first)_j' = ((cross, first)_j - G w_j) / sqrt(pi psi_j)
    squares_j'        = (squares_j - 2 w_j (cross, first)_j + w_j G w_j - psi_j mass)
                        / (psi_j sqrt(2 pi)).

What z looks like says nothing of the parameters, but must arrive all the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self, final

import numpy as np

from emfed.core.protocols import FloatArray, Layout, Metric
from emfed.models.loadings import FactorParameters
from emfed.models.matrices import pack, triangle, unpack
from emfed.models.metric import floored, lightest


@final
@dataclass(frozen=True, eq=False)
class FactorMetric(Metric):
    """The metric at one set of parameters (no leading axes)."""

    layout: Layout
    roots: FloatArray
    lines: FloatArray
    """w, ``(K, r + 1, d)``."""
    noise: FloatArray
    lightest: float = 1.0

    @classmethod
    def at(cls, params: FactorParameters, layout: Layout, samples: float) -> Self:
        """The metric at these parameters, fitted to so many samples."""
        lines = np.concatenate([params.loadings, params.means[..., None]], axis=-1)
        roots = np.sqrt(floored(params.weights))
        light = lightest(params.weights, samples)
        return cls(layout, roots, np.swapaxes(lines, -1, -2), params.noise, light)

    def _halves(self) -> FloatArray:
        """The root of two on the diagonal of ``latent``."""
        _, _, diagonal = triangle(self.lines.shape[1] - 1)
        return np.where(diagonal, np.sqrt(2.0), 1.0)

    def _mass_of_latent(self, mass: FloatArray) -> FloatArray:
        return mass[..., None] * pack(np.eye(self.lines.shape[1] - 1))

    def _fitted(self, latent: FloatArray, factor: FloatArray, mass: FloatArray) -> FloatArray:
        """G w, ``(..., K, r + 1, d)``."""
        r = self.lines.shape[1] - 1
        top = np.concatenate([unpack(latent, r), factor[..., None]], axis=-1)
        last = np.concatenate([factor, mass[..., None]], axis=-1)[..., None, :]
        return np.concatenate([top, last], axis=-2) @ self.lines

    def whiten(self, vectors: FloatArray) -> FloatArray:
        """``(..., q)`` into the metric's coordinates."""
        parts, roots, w = self.layout.split(vectors), self.roots, self.lines
        mass, column = parts["mass"], roots[:, None]
        fitted = self._fitted(parts["latent"], parts["factor"], mass)
        both = np.concatenate([parts["cross"], parts["first"][..., None, :]], axis=-2)
        squares = parts["squares"] + (w * (fitted - 2 * both)).sum(axis=-2)
        white = (both - fitted) / (column * np.sqrt(self.noise))[:, None, :]
        latent = (parts["latent"] - self._mass_of_latent(mass)) / (column * self._halves())
        return self.layout.join(
            {
                "mass": mass / roots,
                "latent": latent,
                "factor": parts["factor"] / column,
                "first": white[..., -1, :],
                "cross": white[..., :-1, :],
                "squares": (squares / self.noise - mass[..., None]) / (np.sqrt(2) * column),
            }
        )

    def unwhiten(self, vectors: FloatArray) -> FloatArray:
        """The inverse of `whiten`."""
        parts, roots, w = self.layout.split(vectors), self.roots, self.lines
        mass, column = parts["mass"] * roots, roots[:, None]
        factor = parts["factor"] * column
        latent = parts["latent"] * (column * self._halves()) + self._mass_of_latent(mass)
        fitted = self._fitted(latent, factor, mass)
        white = np.concatenate([parts["cross"], parts["first"][..., None, :]], axis=-2)
        both = white * (column * np.sqrt(self.noise))[:, None, :] + fitted
        squares = (parts["squares"] * (np.sqrt(2) * column) + mass[..., None]) * self.noise
        squares = squares - (w * (fitted - 2 * both)).sum(axis=-2)
        return self.layout.join(
            {
                "mass": mass,
                "latent": latent,
                "factor": factor,
                "first": both[..., -1, :],
                "cross": both[..., :-1, :],
                "squares": squares,
            }
        )
