"""Parameters of factor analysers, what they say of z given y, and the rotation users see."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np

from emfed.core.protocols import FloatArray, Parameters


@final
@dataclass(frozen=True)
class FactorParameters(Parameters):
    """The parameters of a mixture of factor analysers.

    Parameters
    ----------
    weights : array of shape (K,)
        The shares of the components.
    means : array of shape (K, d)
        Their means.
    loadings : array of shape (K, d, r)
        The loadings of the factors.
    noise : array of shape (K, d)
        The noise variances of the columns.

    Examples
    --------
    >>> import numpy as np
    >>> from emfed.models import FactorParameters
    >>> params = FactorParameters([1.0], [[0.0, 0.0]], np.ones((1, 2, 1)), [[0.5, 0.5]])
    >>> params.covariances()[0]
    array([[1.5, 1. ],
           [1. , 1.5]])
    """

    weights: FloatArray
    means: FloatArray
    loadings: FloatArray
    noise: FloatArray

    def __post_init__(self) -> None:
        for name, value in self.arrays().items():
            object.__setattr__(self, name, np.asarray(value, dtype=np.float64))

    def covariances(self) -> FloatArray:
        """L L^T + psi, ``(K, d, d)``."""
        spread = self.loadings @ np.swapaxes(self.loadings, -1, -2)
        return spread + self.noise[..., None] * np.eye(self.noise.shape[-1])


@dataclass(frozen=True)
class FactorPosterior:
    """z given y is normal with mean R (U y - u) and covariance R R^T: R^-T R^-1 = I + L^T L / psi.

    ``white`` is U, ``(..., K, r, d)``; ``offset`` is u, ``(..., K, r)``; ``root`` is R.
    """

    white: FloatArray
    offset: FloatArray
    root: FloatArray
    log_det: FloatArray

    @classmethod
    def at(cls, params: FactorParameters) -> FactorPosterior:
        """Work it out by the Cholesky root of the r x r precision."""
        scaled = np.swapaxes(params.loadings, -1, -2) / params.noise[..., None, :]
        precision = scaled @ params.loadings + np.eye(params.loadings.shape[-1])
        lower = np.linalg.cholesky(precision)
        inverse = np.linalg.inv(lower)
        white = inverse @ scaled
        offset = (white @ params.means[..., None])[..., 0]
        log_det = 2 * np.log(np.diagonal(lower, axis1=-2, axis2=-1)).sum(axis=-1)
        log_det = log_det + np.log(params.noise).sum(axis=-1)
        return cls(white, offset, np.swapaxes(inverse, -1, -2), log_det)


def rotate(loadings: FloatArray, noise: FloatArray) -> FloatArray:
    """Loadings turned so that L^T psi^-1 L is diagonal and falling, largest entries positive."""
    scaled = np.swapaxes(loadings, -1, -2) / noise[..., None, :]
    _, vectors = np.linalg.eigh(scaled @ loadings)
    turned = loadings @ vectors[..., ::-1]
    largest = np.argmax(np.abs(turned), axis=-2)[..., None, :]
    sign = np.sign(np.take_along_axis(turned, largest, axis=-2))
    return turned * np.where(sign == 0, 1.0, sign)
