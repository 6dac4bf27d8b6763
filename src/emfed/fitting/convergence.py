"""Whether anything is left to gain: the one test of convergence.

Near an optimum the gains of EM's steps fall at a steady rate, |H'|^2 / |H|^2 in the metric, where H
and H' are two steps in a row. Two points that EM led through tell the last gain and the rate, and
these tell the sum of all gains to come. The estimate is too small while a slow direction still
hides behind fast ones, so it does not decide alone: when it is below the tolerance, a bold step
along the last EM step finds out whether the likelihood rises farther along. Only if it does not has
the fit converged.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

import numpy as np

from emfed.core.sums import FloatArray

SLOWEST = 0.9999
"""The largest rate that two steps are trusted to tell; the bold step finds what is slower."""
WORTH = 10.0
"""What a bold step would gain where all is straight, in units of the tolerance. It must gain half
of it to be kept."""
LONGEST = 0.5
"""The length of a bold step in the metric: beyond, the likelihood is not straight."""
PLAIN, MOST_PLAIN, STRAIGHT = 2, 12, 0.99
"""EM steps before the bold one, which leave the slowest direction alone: so many, and more while
the cosine between two of them is less."""
SMALL_ROUNDS = 3
"""Steps in a row in which the mean field must be small, where a tolerance is given for it."""


@final
@dataclass(frozen=True)
class Tolerance:
    """What may be left where a fit has converged.

    Parameters
    ----------
    nats : float
        Nats a row; with 0 they do not end a fit.
    squared_field : float or None
        The square of the mean field.
    """

    nats: float
    squared_field: float | None = None


@final
@dataclass
class Convergence:
    """What the steps of one ascent have said so far of what is left."""

    tolerance: Tolerance
    left: float = field(default=np.inf, init=False)
    """Nats a row that EM will still gain, as its last two steps tell."""
    calm: int = field(default=0, init=False)
    """EM steps in a row after which little seemed to be left."""
    small: int = field(default=0, init=False)
    """EM steps in a row with a small mean field."""
    most: float = field(default=np.inf, init=False)
    """The same, should gains fall at the slowest rate from here on."""
    steps: int = field(default=0, init=False)
    """EM steps that were noted."""
    straight: bool = field(default=False, init=False)
    """Whether EM's steps have stopped turning."""

    def note(self, gain: float, before: FloatArray, after: FloatArray, squared: float) -> None:
        """After an EM step that gained so much; ``squared`` is the mean field's square now.

        ``before`` and ``after`` are the mean field in the metric at both ends of it.
        """
        self.steps += 1
        self.left = remaining(gain, before, after)
        self.most = float(after @ after) / 2 / (1 - SLOWEST)
        self.straight = float(before @ after) >= STRAIGHT * length(before) * length(after)
        self.calm = self.calm + 1 if 0 < self.tolerance.nats >= self.left else 0
        bound = self.tolerance.squared_field
        self.small = self.small + 1 if bound is not None and squared <= bound else 0

    def disturb(self) -> None:
        """After a step that was not EM's."""
        self.calm = 0

    @property
    def field_is_small(self) -> bool:
        """Whether the mean field alone says that the fit has converged."""
        return self.small >= SMALL_ROUNDS

    @property
    def due(self) -> bool:
        """Whether a bold step is to decide now: nothing else may hide, or it would gain nothing."""
        hidden = not self.straight and self.most > self.tolerance.nats
        return self.calm > PLAIN and (not hidden or self.calm > MOST_PLAIN)

    @property
    def expected(self) -> float:
        """`left`, where it can be believed: no slow direction hides behind fast ones any more."""
        return self.left if self.straight or self.steps > MOST_PLAIN else np.inf

    @property
    def least_gain(self) -> float:
        """What a bold step must gain to be kept."""
        return WORTH * self.tolerance.nats / 2

    def bold(self, step: FloatArray) -> float:
        """How many times an EM step, in the metric, the bold step is."""
        squared = float(step @ step)
        longest = LONGEST / float(np.sqrt(squared))
        return max(1.0, min(WORTH * self.tolerance.nats / squared, longest))


def remaining(gain: float, before: FloatArray, after: FloatArray) -> float:
    """Nats a row that EM will still gain after a step that gained ``gain``.

    ``before`` and ``after`` are two EM steps in a row, in the metric. Half the square of the first
    is what it gained, too; it tells gains that are less than the unit of the log-likelihood.
    """
    first, second = float(before @ before), float(after @ after)
    if second == 0:
        return 0.0
    rate = min(second / first, SLOWEST) if first > 0 else SLOWEST
    return max(gain, first / 2) * rate / (1 - rate)


def length(white: FloatArray) -> float:
    """The length of a vector in the metric."""
    return float(np.sqrt(white @ white))
