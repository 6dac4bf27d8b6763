"""A metric for the statistics of independent columns: each in units of its own spread.

Given parameters that both ends know, with weight pi of a component, share o of a column that was
seen, and mean e and covariance C = L L^T of its t(z):

    mass'     = mass / sqrt(pi)
    observed' = (observed - o mass) / sqrt(pi o (1 - o))
    moments'  = L^-1 (moments - e observed) / sqrt(pi o)

Small weights and variances are floored, so that a dying component does not dominate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self, final

import numpy as np

from emfed.core.protocols import FloatArray, Layout, Metric
from emfed.models.columns import Columns
from emfed.models.metric import floored, lightest


@final
@dataclass(frozen=True, eq=False)
class ColumnMetric(Metric):
    """The metric at one set of parameters (no leading axes)."""

    columns: Columns
    layout: Layout
    root_weights: FloatArray
    means: tuple[FloatArray, ...]
    """e of each group, ``(K, c, width)``."""
    roots: tuple[FloatArray, ...]
    """L of each group with sqrt(pi o), ``(K, c, width, width)``."""
    inverses: tuple[FloatArray, ...]
    extra: dict[str, FloatArray]
    """What other pieces of the layout are divided by."""
    lightest: float = 1.0

    @classmethod
    def at(
        cls,
        columns: Columns,
        layout: Layout,
        params: Any,
        weights: FloatArray,
        extra: dict[str, FloatArray] | None = None,
        samples: float = np.inf,
    ) -> Self:
        """The metric at these parameters, fitted to so many samples."""
        heavy = floored(weights)
        means, roots = [], []
        for group in columns.groups:
            theta = group.read(params)
            scale = columns.constants.scale[group.columns]
            seen = np.clip(columns.constants.observed[group.columns], 0.01, 1.0)
            size = (heavy[:, None] * seen)[..., None, None]
            means.append(group.family.expected(theta))
            covariance = size * group.family.covariance(theta, scale)
            roots.append(np.asarray(np.linalg.cholesky(covariance), dtype=np.float64))
        inverses = tuple(np.asarray(np.linalg.inv(root), dtype=np.float64) for root in roots)
        own = {} if extra is None else extra
        return cls(
            columns,
            layout,
            np.sqrt(heavy),
            tuple(means),
            tuple(roots),
            inverses,
            own,
            lightest(weights, samples),
        )

    def _shares(self) -> tuple[FloatArray, FloatArray]:
        """o of the observed masses, and the spread of those that are of one component."""
        parts = [
            self.columns.constants.observed[g.columns][p]
            for g, p in zip(self.columns.groups, self.columns.partial, strict=True)
        ]
        seen = np.minimum(np.concatenate(parts), 1.0)
        return seen, np.sqrt(np.maximum(seen * (1 - seen), 0.01))

    def _moved(
        self, mass: FloatArray, moments: FloatArray, observed: FloatArray, sign: float
    ) -> FloatArray:
        """Moments about (or, with sign 1, from) e observed, whitened (or not)."""
        out = []
        for index, group, masses, part in self.columns.pieces(mass, moments, observed):
            if not group.family.divides:  # no mass of their own: as much as was seen on average
                masses = masses * np.minimum(self.columns.constants.observed[group.columns], 1.0)
            shift = self.means[index] * masses[..., None]
            if sign < 0:
                new = np.einsum("kcij,...kcj->...kci", self.inverses[index], part - shift)
            else:
                new = np.einsum("kcij,...kcj->...kci", self.roots[index], part) + shift
            width = new.shape[-2] * new.shape[-1]
            out.append(new.reshape(*mass.shape, width))
        return np.concatenate(out, axis=-1)

    def whiten(self, vectors: FloatArray) -> FloatArray:
        parts = self.layout.split(vectors)
        mass = parts["mass"]
        observed = parts.get("observed", np.empty((*mass.shape, 0)))
        moments = self._moved(mass, parts["moments"], observed, -1.0)
        seen, spread = self._shares()
        white = (observed - seen * mass[..., None]) / (spread * self.root_weights[:, None])
        out = {"mass": mass / self.root_weights, "moments": moments, "observed": white}
        return self.layout.join(out | {n: parts[n] / by for n, by in self.extra.items()})

    def unwhiten(self, vectors: FloatArray) -> FloatArray:
        parts = self.layout.split(vectors)
        mass = parts["mass"] * self.root_weights
        seen, spread = self._shares()
        white = parts.get("observed", np.empty((*mass.shape, 0)))
        observed = white * (spread * self.root_weights[:, None]) + seen * mass[..., None]
        moments = self._moved(mass, parts["moments"], observed, 1.0)
        out = {"mass": mass, "moments": moments, "observed": observed}
        return self.layout.join(out | {n: parts[n] * by for n, by in self.extra.items()})
