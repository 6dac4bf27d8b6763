"""LOESS, by scikit-misc's wrapping of Cleveland's own code."""

from __future__ import annotations

import numpy as np

from emfed.core.errors import DataError
from emfed.core.protocols import FloatArray

SPAN = 0.5
"""The share of points in a neighbourhood."""


def check_loess() -> None:
    """Say what to install, if it is not there."""
    try:
        import skmisc.loess  # noqa: F401
    except ImportError:
        raise DataError("the figure needs LOESS: pip install scikit-misc.") from None


def loess(x: FloatArray, y: FloatArray, span: float = SPAN) -> FloatArray:
    """y smoothed by local quadratic regression."""
    check_loess()
    from skmisc.loess import loess as fit

    if len(x) < 10:  # too few for local fits: leave them as they are
        return y
    model = fit(x - x.mean(), y, span=max(span, 10 / len(x)))
    model.fit()
    return np.asarray(model.outputs.fitted_values, dtype=np.float64)
