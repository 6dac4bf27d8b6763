"""Numbers as two half-precision parts of 11 bits each, for passes that are fast instead of exact.

v is about high + low / 2048. Of a product of two such numbers three of four terms are taken, so it
is off by 2^-22 of the largest in its row. What could leave the range of half precision is scaled
by a power of two first: slopes by the largest of their component, products of columns by `SHRINK`
(rows in the frame of N rows are below sqrt(N)). What leaves it still gives no finite sum, and the
pass is done again in doubles.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from emfed.core.protocols import FloatArray

LOW = 2048.0
"""The low part of a number is stored so many times larger: 2^11 is the precision of the high
part."""
SHRINK = 2.0**-10
"""Squares are stored that much smaller: they may reach 6e7, and are known to 1.5e-8."""


def split(values: Any) -> tuple[Any, Any]:
    """High and low parts, float16."""
    single = np.asarray(values, dtype=np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        high = single.astype(np.float16)
        return high, ((single - high.astype(np.float32)) * np.float32(LOW)).astype(np.float16)


def halves(slopes: FloatArray) -> tuple[Any, Any]:
    """``(w, p, K, f)`` as ``(w, p, 2, K, f)`` float16 parts and ``(w, p, K)`` factors."""
    most = np.abs(slopes).max(axis=-1)
    _, exponent = np.frexp(np.where(most > 0, most, 1.0))
    scaled = np.ldexp(slopes, -exponent[..., None])
    high = scaled.astype(np.float16)
    low = ((scaled - high.astype(np.float64)) * LOW).astype(np.float16)
    return np.stack([high, low], axis=2), np.ldexp(1.0, exponent).astype(np.float32)
