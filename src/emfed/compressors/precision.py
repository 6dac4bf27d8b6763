"""Numbers in fewer bits, without bias.

A scale may be any number at least as large as the norm that it bounds: a quantiser that divides and
multiplies by the same scale stays unbiased. Scales are therefore rounded *up* to float32 or
bfloat16, and the codec sends them in 4 or 2 bytes, exactly. Numbers that stand for themselves are
rounded up or down at random, with the mean they had.

Outside the normal range of float32 (below 1e-37 or above 1e38 in size) numbers stay float64.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from emfed.core.errors import SettingsError
from emfed.core.protocols import FloatArray

FloatPrecision = Literal["float64", "float32", "bfloat16"]
ULP: dict[str, float] = {"float64": 0.0, "float32": 2.0**-23, "bfloat16": 2.0**-7}
"""The largest relative distance of neighbouring numbers."""
_STEP = {"float32": np.uint32(1), "bfloat16": np.uint32(1 << 16)}


def check_precision(name: str, precision: str) -> None:
    """Refuse anything but the three names."""
    if precision not in ULP:
        raise SettingsError(f"{name} must be one of {', '.join(ULP)}; got {precision!r}.")


def _below(size: FloatArray, precision: str) -> NDArray[np.uint32]:
    """Bits of the largest float32 (or bfloat16) number not above each positive number."""
    near = size.astype(np.float32)
    bits = near.view(np.uint32) - (near > size).astype(np.uint32)
    return bits & ~(_STEP[precision] - np.uint32(1))


def _value(bits: NDArray[np.uint32]) -> FloatArray:
    return bits.view(np.float32).astype(np.float64)


def _in_range(size: FloatArray) -> NDArray[np.bool_]:
    return (size > 1e-37) & (size < 1e38)


def round_up(scales: FloatArray, precision: FloatPrecision) -> FloatArray:
    """The smallest number of the precision that is not below each scale (scales are >= 0)."""
    if precision == "float64":
        return scales
    normal = _in_range(scales)
    size = np.where(normal, scales, 1.0)
    low = _below(size, precision)
    return np.where(normal, _value(low + (_value(low) < size) * _STEP[precision]), scales)


def round_randomly(
    values: FloatArray, precision: FloatPrecision, uniforms: FloatArray
) -> FloatArray:
    """One of the two neighbours of the precision, with each value as the mean."""
    if precision == "float64":
        return values
    magnitude = np.abs(values)
    normal = _in_range(magnitude)
    size = np.where(normal, magnitude, 1.0)
    bits = _below(size, precision)
    low, high = _value(bits), _value(bits + _STEP[precision])
    picked = np.where(uniforms * (high - low) < size - low, high, low)
    return np.where(normal, np.copysign(picked, values), values)
