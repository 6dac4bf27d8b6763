"""What a private answer costs, and the noise in it: an accountant and a sampler, nothing else.

Every private answer is a vector of integers with noise added to each: a *discrete Gaussian* of
deviation `DEVIATION`, always the same distribution. How much privacy it buys follows from how far
one row can move the vector, in units of its lattice. So there is one sampler to test, and it works
on integers alone: it compares random integers with integers, and no floating-point number ever
takes part (the attacks of Mironov, 2012, and of Jin et al., 2022, read rows from the low bits of
floating-point noise).

**Accounting.** The neighbours of a table are those with one row more or less. If a row moves the
vector by at most D in Euclidean length and noise of deviation s is added, the answer is mu-GDP with
mu = D / s for Gaussian noise (Dong, Roth and Su, 2022), answers compose by adding mu squared, and
delta(epsilon) has a closed form, which is exact. For the integers that are really drawn it is a
bound, by this argument. Draw y from the continuous Gaussian of variance s^2 - 4 around the integer
vector v, then round each y_j at random to the integers by a discrete Gaussian of variance 4 around
y_j. By Poisson summation the result has, at every point, the probability of the discrete Gaussian
of variance s^2 around v, up to a factor within 1 +- 3 exp(-8 pi^2) = 1 +- 2e-34 for each number.
Rounding is post-processing, so the integers tell no more than the Gaussian of variance s^2 - 4
does. The same summation shows that a sum of h independent draws is a draw of variance h s^2, up to
such factors. `SLACK` covers them for as many numbers as will ever be sent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import exp, inf, sqrt
from typing import final

import numpy as np
from numpy.typing import NDArray

from emfed.core.errors import SettingsError, check_count, check_range
from emfed.core.protocols import IntArray

DEVIATION_BITS = 20
DEVIATION = 1 << DEVIATION_BITS
"""The deviation of the noise, in units of a lattice. Rounding moves a vector of q numbers by up to
sqrt(q): with 2^20, for q = 5,000 and a noise multiplier of 30, that is 0.2% of what a row does."""
_ROUNDED = 4.0
"""The variance that the argument above spends on rounding."""
SLACK = 1e-9
"""By this factor mu squared is rounded up: for floating-point numbers in the accounting itself, and
for factors of 1 +- 2e-34 a number."""
Bits = Callable[[int], NDArray[np.uint64]]
"""Gives so many random words of 64 bits."""


# The accountant.


def delta_of(mu: float, epsilon: float) -> float:
    """The smallest delta for which mu-GDP is (epsilon, delta)-private (Balle and Wang, 2018)."""
    if mu <= 0:
        return 0.0
    from scipy.special import log_ndtr, ndtr

    tail = epsilon + log_ndtr(-epsilon / mu - mu / 2)
    return max(0.0, float(ndtr(-epsilon / mu + mu / 2)) - exp(min(tail, 0.0)))


def epsilon_of(mu_squared: float, delta: float) -> float:
    """The epsilon that answers have cost whose mu squared add up to this."""
    from scipy.optimize import brentq  # here, because most programs never need it

    check_delta(delta)
    if mu_squared <= 0:
        return 0.0
    mu = sqrt(mu_squared)
    if delta_of(mu, 0.0) <= delta:
        return 0.0
    top = mu * mu / 2 + mu * 10 + 1.0
    while delta_of(mu, top) > delta:
        top *= 2
    return float(brentq(lambda e: delta_of(mu, e) - delta, 0.0, top, xtol=1e-13, rtol=1e-13))


def mu_squared_of(epsilon: float, delta: float) -> float:
    """The sum of mu squared that answers may have for an epsilon: the inverse of `epsilon_of`."""
    from scipy.optimize import brentq

    check_range("epsilon", epsilon, 0, inf, open_low=True, open_high=True)
    check_delta(delta)
    top = 1.0
    while delta_of(top, epsilon) < delta:
        top *= 2
    found = brentq(lambda mu: delta_of(mu, epsilon) - delta, 1e-12, top, xtol=1e-15, rtol=1e-13)
    return float(found) ** 2


def check_delta(delta: float) -> None:
    """Refuse a delta that is no small probability."""
    if not 0 < delta < 0.5:
        small = "be a small probability, well below one in the number of rows, such as 1e-6"
        raise SettingsError(setting="delta", must=small, got=delta)


def price(steps: float, shares: int, deviation: float = DEVIATION) -> float:
    """Mu squared of one answer, if a row moves its integers by so many steps at most.

    ``shares`` is how many independent draws of the noise are in what the server learns: of a
    masked sum, those of the honest sites in it; of one site's own answer, one.
    """
    if not deviation > 2 * sqrt(_ROUNDED):
        raise SettingsError(f"noise of deviation {deviation} is too narrow to be accounted for.")
    return (1 + SLACK) * steps**2 / (shares * (deviation**2 - _ROUNDED))


def step_for(q: int, mu_squared: float, shares: int) -> float:
    """The lattice on which an answer of q numbers costs ``mu_squared``, if a row moves it by 1.

    Rounding may move each number by one step besides.
    """
    most = sqrt(mu_squared * shares * (DEVIATION**2 - _ROUNDED) / (1 + SLACK))
    room = most - sqrt(q)
    if room <= 0:
        raise SettingsError(
            f"noise of deviation {DEVIATION} is too narrow for {q} numbers at this budget: ask for "
            "fewer components, or a larger epsilon."
        )
    return (1 + SLACK) / room


def price_on(step: float, q: int, shares: int) -> float:
    """Mu squared of an answer of q numbers on a lattice: the inverse of `step_for`."""
    return price(1 / step + sqrt(q), shares)


def chi_quantile(share: float, d: int) -> float:
    """The radius within which this share of white Gaussian rows of d columns lies."""
    from scipy.special import gammaincinv

    return float(sqrt(2 * gammaincinv(d / 2, share)))


def kept_square(radius: float, d: int) -> float:
    """The share of their squared length that white Gaussian rows of d columns keep when they are
    scaled into a ball of this radius."""
    from scipy.special import gammainc

    inside, outside = gammainc(d / 2 + 1, radius**2 / 2), 1 - gammainc(d / 2, radius**2 / 2)
    return float(inside + radius**2 / d * outside)


# The sampler.


def discrete_gaussian(count: int, bits: Bits, deviation_bits: int = DEVIATION_BITS) -> IntArray:
    """Integers with probability proportional to exp(-x^2 / (2 s^2)), s = 2^deviation_bits.

    Canonne, Kamath and Steinke (2020), algorithm 3, over arrays: a discrete Laplace proposal of
    scale s is accepted with probability exp(-(|x| - s)^2 / (2 s^2)). With s a power of two all
    probabilities are exp(-F / 2^k) for integers F, of which `_exponential` makes exact coins.
    """
    m = deviation_bits
    scale = np.uint64(1 << m)
    out = np.empty(count, dtype=np.int64)
    pending = np.arange(count)
    while len(pending):
        low = bits(len(pending)) >> np.uint64(64 - m)
        fine = _exponential(low, m, bits)
        pending_now = pending[fine]
        low = low[fine]
        high = _geometric(len(low), bits)
        size = low + scale * high
        negative = (bits(len(low)) >> np.uint64(63)).astype(bool)
        kept = ~(negative & (size == 0))  # zero has one sign
        # Beyond 2^10 deviations the chance to be accepted is below exp(-500,000).
        kept &= high < np.uint64(1 << 10)
        size, negative, pending_now = size[kept], negative[kept], pending_now[kept]
        off = np.where(size > scale, size - scale, scale - size)
        accepted = _exponential(off * off, 2 * m + 1, bits)
        done = pending_now[accepted]
        values = size[accepted].astype(np.int64)
        out[done] = np.where(negative[accepted], -values, values)
        left = np.ones(count, dtype=bool)
        left[done] = False
        pending = pending[left[pending]]
    return out


def _geometric(count: int, bits: Bits) -> NDArray[np.uint64]:
    """How often a coin of exp(-1) shows heads in a row."""
    out = np.zeros(count, dtype=np.uint64)
    going = np.arange(count)
    while len(going):
        going = going[_fraction(np.ones(len(going), dtype=np.uint64), 0, bits)]
        out[going] += np.uint64(1)
    return out


def _exponential(numerators: NDArray[np.uint64], k: int, bits: Bits) -> NDArray[np.bool_]:
    """Coins of exp(-F / 2^k): one of exp(-1) for every whole, and one of the rest."""
    wholes = numerators >> np.uint64(k)
    out = _fraction(numerators & np.uint64((1 << k) - 1), k, bits)
    going = np.flatnonzero(out & (wholes > 0))
    while len(going):
        heads = _fraction(np.ones(len(going), dtype=np.uint64), 0, bits)
        out[going[~heads]] = False
        wholes[going] -= np.uint64(1)
        going = going[heads]
        going = going[wholes[going] > 0]
    return out


def _fraction(numerators: NDArray[np.uint64], k: int, bits: Bits) -> NDArray[np.bool_]:
    """Coins of exp(-F / 2^k), F at most 2^k: von Neumann's, from coins of F / (2^k j)."""
    odd = np.ones(len(numerators), dtype=bool)
    going, j = np.arange(len(numerators)), 1
    while len(going):
        below = np.ones(len(going), dtype=bool)
        if k:
            below = bits(len(going)) >> np.uint64(64 - k) < numerators[going]
        going = going[below & _one_in(j, len(going), bits)]
        odd[going] = j % 2 == 0
        j += 1
    return odd


def _one_in(j: int, count: int, bits: Bits) -> NDArray[np.bool_]:
    """Coins of 1 / j, exactly: words beyond the last multiple of j are drawn again."""
    if j == 1:
        return np.ones(count, dtype=bool)
    limit = np.uint64((1 << 64) // j * j - 1)
    words = bits(count)
    while (again := np.flatnonzero(words > limit)).size:
        words[again] = bits(len(again))
    return words % np.uint64(j) == 0


@final
@dataclass(frozen=True)
class Privacy:
    """What a run may tell of any one row: epsilon and delta, of all its answers together.

    ``colluders`` is how many of the other sites a row is protected from, together with the server,
    where answers are masked sums: their noise is not counted on.
    """

    epsilon: float
    delta: float = 1e-6
    colluders: int = 1

    def __post_init__(self) -> None:
        check_count("colluders", self.colluders, 0)
        self.mu_squared  # noqa: B018 (it checks both)

    @property
    def mu_squared(self) -> float:
        """What all answers may cost."""
        return mu_squared_of(self.epsilon, self.delta)

    def shares(self, workers: int, masked: bool) -> int:
        """Draws of the noise that protect a row: of a masked sum, those of the honest."""
        return max(1, workers - self.colluders) if masked and workers > 1 else 1
