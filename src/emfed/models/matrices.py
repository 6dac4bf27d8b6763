"""Symmetric matrices: packing, positive definiteness, and the floor on eigenvalues.

Decision: docs/decisions/013-floor-domain-and-guard.md
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from emfed.core.protocols import BoolArray, FloatArray


@lru_cache(maxsize=64)
def triangle(d: int) -> tuple[Any, Any, BoolArray]:
    """Row and column of each entry of the packed upper triangle, and which are diagonal."""
    rows, columns = np.triu_indices(d)
    return rows, columns, rows == columns


@lru_cache(maxsize=64)
def _positions(d: int) -> Any:
    rows, columns, _ = triangle(d)
    where = np.empty((d, d), dtype=np.int64)
    where[rows, columns] = where[columns, rows] = np.arange(len(rows))
    return where


def pack(matrices: FloatArray) -> FloatArray:
    """``(..., d, d)`` symmetric to ``(..., d(d+1)/2)``, the upper triangle by rows."""
    rows, columns, _ = triangle(matrices.shape[-1])
    return matrices[..., rows, columns]


def unpack(packed: FloatArray, d: int) -> FloatArray:
    """The inverse of `pack`."""
    return packed[..., _positions(d)]


def outer(left: FloatArray, right: FloatArray) -> FloatArray:
    """``(..., d)`` and ``(..., d)`` to ``(..., d, d)``."""
    return left[..., :, None] * right[..., None, :]


def is_positive_definite(matrices: FloatArray) -> bool:
    """Whether all of ``(..., d, d)`` are positive definite."""
    try:
        np.linalg.cholesky(matrices)
    except np.linalg.LinAlgError:
        return False
    return True


def raise_eigenvalues(matrices: FloatArray, floor: float) -> FloatArray:
    """The matrices with eigenvalues below ``floor`` raised to it; untouched where none is.

    This is the exact minimiser of log det(X) + <X^-1, matrix> over X >= floor * I, so EM with it
    still never raises its objective.
    """
    if floor <= 0 or is_positive_definite(matrices - floor * np.eye(matrices.shape[-1])):
        return matrices
    values, vectors = np.linalg.eigh(matrices)
    lifted = (vectors * np.maximum(values, floor)[..., None, :]) @ np.swapaxes(vectors, -1, -2)
    short = np.asarray((values < floor).any(axis=-1))[..., None, None]
    return np.where(short, lifted, matrices)


def axes(matrix: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Eigenvalues and eigenvectors, whose signs follow from the matrix and from no processor."""
    values, vectors = np.linalg.eigh(matrix)
    along = np.sqrt(2.0 + np.arange(len(matrix))) @ vectors  # of no vector that symmetry makes it 0
    return values, np.where(along < 0, -vectors, vectors)
