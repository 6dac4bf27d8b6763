"""What is left of a series whose terms fall at a steady rate: the one estimate of convergence.

Near an optimum the gains of EM's steps fall by a factor of rho^2 each, rho being how much shorter
each step is than the one before. A few terms tell the rate, and the rate tells the sum of all
terms to come.

*What it is worth.* The sum is exact where every ratio of two terms is the same, and no less than
the truth where no later ratio exceeds the rate. EM has a series for each direction, and ratios of
their sum can only rise towards that of the slowest: far from the end the estimate is then too
small. So nobody says "converged" on this alone: a bold step or a full pass has the last word
(`emfed.fitting.convergence`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from emfed.core.protocols import FloatArray

NOISY, EXACT = 0.99, 0.9999
"""The largest rates that terms with and without noise are trusted to tell: beyond, a little noise
in the rate would change the sum without bounds. A larger EXACT has no use: a series that slow is
found by the bold step."""


def rate(terms: Sequence[float] | FloatArray, places: Sequence[int] | None = None) -> float:
    """The ratio of neighbouring terms, by least squares of their logarithms.

    ``places`` are the terms' numbers in the series, where some are not known.
    """
    at = np.arange(len(terms)) if places is None else np.asarray(places)
    middle = at - at.mean()
    logs = np.log(np.maximum(terms, 1e-300))
    return float(np.exp(np.minimum(middle @ logs / (middle @ middle), 700.0)))


def left(following: float, rate: float, slowest: float = NOISY) -> float:
    """The sum of all terms to come, the first of which is ``following``."""
    return following / (1 - min(rate, slowest))
