"""Whether anything is left to gain: the one test of convergence.

Near an optimum the gains of EM's steps fall at a steady rate, |H'|^2 / |H|^2 in the metric, where H
and H' are two steps in a row. Two points that EM led through tell the last gain and the rate, and
these tell the sum of all gains to come. The estimate is too small while a slow direction still
hides behind fast ones, so it does not decide alone: when it is below the tolerance, a bold step
along the last EM step finds out whether the likelihood rises farther along. Only if it does not has
the fit converged.
"""

from __future__ import annotations

import numpy as np

from emfed.core.sums import FloatArray

SLOWEST = 0.9999
"""The largest rate that two steps are trusted to tell; the bold step finds what is slower."""
WORTH = 10.0
"""What a bold step would gain where all is straight, in units of the tolerance. It must gain half
of it to be kept."""
LONGEST = 0.5
"""The length of a bold step in the metric: beyond, the likelihood is not straight."""


def left(gain: float, before: FloatArray, after: FloatArray) -> float:
    """Nats a row that EM will still gain after a step that gained ``gain``.

    ``before`` and ``after`` are two EM steps in a row, in the metric.
    """
    first, second = float(before @ before), float(after @ after)
    if second == 0:
        return 0.0
    rate = min(second / first, SLOWEST) if first > 0 else SLOWEST
    return max(gain, first / 2) * rate / (1 - rate)


def bold(step: FloatArray, tolerance: float) -> float:
    """How many times an EM step, in the metric, a bold step is."""
    squared = float(step @ step)
    if squared == 0:
        return 1.0
    return max(1.0, min(WORTH * tolerance / squared, LONGEST / float(np.sqrt(squared))))
