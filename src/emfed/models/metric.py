"""The Fisher metric of a Gaussian mixture's statistics.

Weights, means and second moments live on different scales; whitened per component by parameters
that both ends know, one quantisation scale fits all. With Sigma = L L^T and weight pi:

    mass'   = mass / sqrt(pi)
    first'  = L^-1 (first - mu mass) / sqrt(pi)
    second' = [L^-1 (second - mu first^T - first mu^T + mu mu^T mass) L^-T - mass I] / sqrt(pi),
              its diagonal also / sqrt(2)

A second moment that all components share (``total``) goes the same way, summed over them, with
weight one; where it is a constant, `Stiffness` says what that changes. pi is floored at 0.02 / K so
that a dying component does not dominate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self, final

import numpy as np

from emfed.core.protocols import FloatArray, Layout, Metric
from emfed.models.matrices import outer, pack, triangle, unpack
from emfed.models.parameters import GaussianParameters


def floored(weights: FloatArray) -> FloatArray:
    """Weights of at least 0.02 / K: a dying component must not dominate."""
    return np.maximum(weights, 0.02 / weights.shape[-1])


def lightest(weights: FloatArray, samples: float) -> float:
    """`Metric.lightest` of components with these weights.

    Noise of variance v per coordinate is v `floored` pi in a first moment in units of the spread,
    so the mean moves by sqrt(v floored(pi)) / pi spreads. Components of less than one sample do
    not count: `keep_dying` holds them.
    """
    alive = weights * samples >= 1
    ratio = weights**2 / floored(weights)
    return float(np.min(ratio, where=alive, initial=1.0))


NO_COLUMNS = np.empty(0)
NARROW = 1e-4
"""The variance of a column, where 1 is that of all on average, from which on it is narrow: what is
nothing beside the unit that all columns share may be more than such a column holds."""


def narrow_columns(variances: FloatArray) -> FloatArray:
    """The spread of narrow columns, and 1 for the others and for those that do not vary."""
    narrow = (variances > 0) & (variances < NARROW)
    return np.where(narrow, np.sqrt(np.where(narrow, variances, 1.0)), 1.0)


MOST_MODES = 400
"""Sizes of the matrix S beyond which `Stiffness` is not worth its time (20 directions: 210)."""


@final
@dataclass(frozen=True, eq=False)
class Stiffness:
    """What a tied covariance adds to the metric: it loses what moves the means.

    With the second moment of all data fixed, Sigma' = Sigma - sum of the scatter of the means, and
    the curvature of the complete-data likelihood has one more term, |L^-1 dSigma L^-T|^2 / 2. With
    outliers, or clusters far apart, it is most of it. In the coordinates (mass', first') with
    n_k = sqrt(pi_k) L^-1 mu_k = Z_k U^T (U a basis of where the means differ) it is I + A^T A:

        across U:  P (1 + s^2) P^T     for the SVD Z = P s,
        along U:   |first'^T Z + Z^T first' + sum mass'_k Z_k Z_k^T / sqrt(pi_k)|^2 / 2.

    `apply` multiplies by the root, or its inverse.
    """

    basis: FloatArray
    """U, ``(d, R)``."""
    turn: FloatArray
    """P, ``(K, R)``."""
    stretch: FloatArray
    modes: FloatArray
    """Along U: orthonormal, ``(K (1 + R), modes)``."""
    scale: FloatArray

    @classmethod
    def of(cls, roots: FloatArray, means: FloatArray) -> Self | None:
        """At whitened means ``(K, d)``; None where they do not differ."""
        turn, spread, basis = np.linalg.svd(roots[:, None] * means, full_matrices=False)
        kept = spread > 1e-9
        size = int(kept.sum())
        if size == 0 or size * (size + 1) // 2 > MOST_MODES:
            return None
        turn, spread, basis = turn[:, kept], spread[kept], basis[kept].T
        z = turn * spread
        moved = np.zeros((len(z), 1 + size, size, size))
        moved[:, 0] = outer(z, z) / roots[:, None, None]
        for j in range(size):
            moved[:, 1 + j, j] += z
            moved[:, 1 + j, :, j] += z
        _, _, diagonal = triangle(size)
        along = (pack(moved) * np.where(diagonal, 2.0**-0.5, 1.0)).reshape(len(z) * (1 + size), -1)
        modes, lengths, _ = np.linalg.svd(along, full_matrices=False)
        return cls(basis, turn, np.sqrt(1 + spread**2), modes, np.sqrt(1 + lengths**2))

    def apply(
        self, mass: FloatArray, first: FloatArray, power: float
    ) -> tuple[FloatArray, FloatArray]:
        """The root to this power, 1 or -1, times (mass', first')."""
        along = first @ self.basis
        across = first - along @ self.basis.T
        grown = (self.stretch**power - 1)[:, None] * (self.turn.T @ across)
        across = across + self.turn @ grown
        flat = np.concatenate([mass[..., None], along], axis=-1).reshape(*mass.shape[:-1], -1)
        flat = flat + ((flat @ self.modes) * (self.scale**power - 1)) @ self.modes.T
        both = flat.reshape(*mass.shape, -1)
        return both[..., 0], across + both[..., 1:] @ self.basis.T


@final
@dataclass(frozen=True, eq=False)
class GaussianMetric(Metric):
    """The metric at one set of parameters (no leading axes)."""

    kind: str
    layout: Layout
    root_weights: FloatArray
    means: FloatArray
    root: FloatArray
    """L for matrices, standard deviations otherwise, in the covariances' shape."""
    inverse_root: FloatArray
    narrow: FloatArray | float = 1.0
    """Spreads of columns over the one of a spherical component, where they are less: ``(K, d)``."""
    lightest: float = 1.0
    stiffness: Stiffness | None = None

    @classmethod
    def at(
        cls,
        params: GaussianParameters,
        kind: str,
        layout: Layout,
        samples: float = np.inf,
        variances: FloatArray = NO_COLUMNS,
    ) -> Self:
        """The metric at these parameters, fitted to so many samples.

        With the ``variances`` of its columns a spherical model resolves each column as finely as
        that column varies: what is nothing beside the one spread that all columns share may be
        more than a narrow column holds.
        """
        narrow: FloatArray | float = 1.0
        root_weights = np.sqrt(floored(params.weights))
        if kind in ("full", "tied", "known"):
            root: FloatArray = np.linalg.cholesky(params.covariances).astype(np.float64)
            inverse: FloatArray = np.linalg.inv(root).astype(np.float64)
        else:
            root = np.asarray(np.sqrt(params.covariances), dtype=np.float64)
            if kind == "spherical":
                root = root[..., None]
            inverse = np.reciprocal(root)
        if len(variances):
            narrow = np.minimum(np.sqrt(np.where(variances > 0, variances, np.inf)) / root, 1.0)
        light = lightest(params.weights, samples)
        stiff = None
        if kind == "tied" and "total" not in layout.slices:
            stiff = Stiffness.of(root_weights, params.means @ inverse.T)
        return cls(kind, layout, root_weights, params.means, root, inverse, narrow, light, stiff)

    def _apply(self, factor: FloatArray, vectors: FloatArray) -> FloatArray:
        """L or L^-1 times ``(..., K, d)`` vectors, component by component."""
        if self.kind in ("tied", "known"):
            return vectors @ factor.T
        if self.kind == "full":
            return np.einsum("kij,...kj->...ki", factor, vectors)
        return vectors * factor

    def _conjugate(self, factor: FloatArray, matrices: FloatArray) -> FloatArray:
        return factor @ matrices @ np.swapaxes(factor, -1, -2)

    def whiten(self, vectors: FloatArray) -> FloatArray:
        parts = self.layout.split(vectors)
        mass, first = parts["mass"], parts["first"]
        mu, roots = self.means, self.root_weights
        out = {
            "mass": mass / roots,
            "first": self._apply(self.inverse_root, first - mu * mass[..., None])
            / (roots[:, None] * self.narrow),
        }
        if self.stiffness is not None:
            out["mass"], out["first"] = self.stiffness.apply(out["mass"], out["first"], 1.0)
        if "second" in parts:
            out["second"] = self._whiten_second(mass, first, parts["second"])
        if "total" in parts:
            centred = unpack(parts["total"], mu.shape[-1]) - self._total_shift(mass, first)
            white = self._conjugate(self.inverse_root, centred)
            out["total"] = self._halve(pack(white - self._total_mass(mass)))
        return self.layout.join(out)

    def _total_shift(self, mass: FloatArray, first: FloatArray) -> FloatArray:
        """What sum of (y - mu)(y - mu)^T over components lacks of y y^T."""
        crossed = np.swapaxes(first, -1, -2) @ self.means
        weighted = self.means * mass[..., None]
        return crossed + np.swapaxes(crossed, -1, -2) - np.swapaxes(weighted, -1, -2) @ self.means

    def _total_mass(self, mass: FloatArray) -> FloatArray:
        return np.eye(self.means.shape[-1]) * mass.sum(axis=-1)[..., None, None]

    def _halve(self, packed: FloatArray, power: float = -0.5) -> FloatArray:
        """The diagonal over (or, with another power, times) the root of two."""
        _, _, diagonal = triangle(self.means.shape[-1])
        return packed * np.where(diagonal, 2.0**power, 1.0)

    def _whiten_second(self, mass: FloatArray, first: FloatArray, second: FloatArray) -> FloatArray:
        mu, roots = self.means, self.root_weights
        d = mu.shape[-1]
        if self.kind == "full":
            crossed = outer(mu, first)
            centred = unpack(second, d) - crossed - np.swapaxes(crossed, -1, -2)
            centred = centred + outer(mu, mu) * mass[..., None, None]
            white = self._conjugate(self.inverse_root, centred)
            packed = pack(white - np.eye(d) * mass[..., None, None])
            return self._halve(packed) / roots[:, None]
        centred = second - self._sum(2 * mu * first - mu**2 * mass[..., None])
        if self.kind == "spherical":
            white = centred * self.inverse_root[..., 0] ** 2 - d * mass
            return white / (np.sqrt(2 * d) * roots)
        white = centred * self.inverse_root**2 - mass[..., None]
        return white / (np.sqrt(2) * roots[:, None])

    def _sum(self, squares: FloatArray) -> FloatArray:
        return squares.sum(axis=-1) if self.kind == "spherical" else squares

    def unwhiten(self, vectors: FloatArray) -> FloatArray:
        parts = self.layout.split(vectors)
        mu, roots = self.means, self.root_weights
        if self.stiffness is not None:
            mass, first = self.stiffness.apply(parts["mass"], parts["first"], -1.0)
            parts = {**parts, "mass": mass, "first": first}
        mass = parts["mass"] * roots
        first = parts["first"] * (roots[:, None] * self.narrow)
        first = self._apply(self.root, first) + mu * mass[..., None]
        out = {"mass": mass, "first": first}
        if "second" in parts:
            out["second"] = self._unwhiten_second(mass, first, parts["second"])
        if "total" in parts:
            white = unpack(self._halve(parts["total"], 0.5), mu.shape[-1])
            centred = self._conjugate(self.root, white + self._total_mass(mass))
            out["total"] = pack(centred + self._total_shift(mass, first))
        return self.layout.join(out)

    def _unwhiten_second(
        self, mass: FloatArray, first: FloatArray, white: FloatArray
    ) -> FloatArray:
        mu, roots = self.means, self.root_weights
        d = mu.shape[-1]
        if self.kind == "full":
            packed = self._halve(white, 0.5) * roots[:, None]
            inner = unpack(packed, d) + np.eye(d) * mass[..., None, None]
            crossed = outer(mu, first)
            centred = self._conjugate(self.root, inner)
            return pack(
                centred
                + crossed
                + np.swapaxes(crossed, -1, -2)
                - outer(mu, mu) * mass[..., None, None]
            )
        shift = self._sum(2 * mu * first - mu**2 * mass[..., None])
        if self.kind == "spherical":
            inner = white * (np.sqrt(2 * d) * roots) + d * mass
            return inner * self.root[..., 0] ** 2 + shift
        inner = white * (np.sqrt(2) * roots[:, None]) + mass[..., None]
        return inner * self.root**2 + shift
