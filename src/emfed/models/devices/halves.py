"""Numbers as two half-precision parts of 11 bits each, for passes that are fast instead of exact.

v is about high + low. Of a product of two such numbers three of four terms are taken, so it is off
by 2^-22 of the largest in its row. Half precision has no numbers below 2^-25: slopes and
responsibilities are scaled by a power of two to about `UPWARD`, and rows in their frame are of size
1. A square beyond 65,504 (a row 256 standard deviations from its frame's origin) leaves its range
and gives no finite sum; such a pass is done again in doubles.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from emfed.core.protocols import FloatArray

UPWARD = 4096.0
"""What the largest slope of a component is scaled to: sixteen times it is still in range."""


def halves(slopes: FloatArray) -> tuple[Any, Any]:
    """``(w, K, f)`` as ``(w, 2, K, f)`` float16 parts and ``(w, K)`` factors."""
    most = np.abs(slopes).max(axis=-1)
    _, exponent = np.frexp(np.where(most > 0, most, 1.0))
    unit = np.ldexp(1 / UPWARD, exponent)
    scaled = slopes / unit[..., None]
    high = scaled.astype(np.float16)
    low = (scaled - high.astype(np.float64)).astype(np.float16)
    return np.stack([high, low], axis=1), unit.astype(np.float32)
