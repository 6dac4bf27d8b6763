"""The theorems as numbers: Theorem 1 (FedEM), 3 (VR-FedEM) and 4 (FedEM, partial participation).

Symbols: ``step`` is gamma, ``rate`` alpha (None: 1 / (1 + omega)), ``p`` the smallest probability
that a worker takes part, ``rounds`` k_max, ``inner`` k_in, ``outer`` k_out, ``batch`` b. For
unequal workers L / sqrt(n) reads (sum w_i^2 L_i^2)^(1/2), and sigma^2 / n reads
sum w_i^2 sigma_i^2.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, inf, sqrt
from typing import Literal, final

import numpy as np

from emfed.core.errors import SettingsError, check_count, check_range
from emfed.core.protocols import FloatArray
from emfed.theory.problem import Problem, participating

Regime = Literal["smoothness", "compression"]


@final
@dataclass(frozen=True)
class StepLimit:
    """The largest step size that a theorem allows, in its two parts (Theorems 1 and 4).

    Parameters
    ----------
    smoothness : float
        The part that the smoothness of the objective W sets.
    compression : float
        The part that compression and partial participation set.

    Examples
    --------
    >>> from emfed.theory import StepLimit
    >>> limit = StepLimit(smoothness=0.25, compression=0.1)
    >>> limit.largest, limit.regime
    (0.1, 'compression')
    """

    smoothness: float
    compression: float

    @property
    def largest(self) -> float:
        """gamma_max, the smaller of the two parts."""
        return min(self.smoothness, self.compression)

    @property
    def regime(self) -> Regime:
        """The part that limits the step."""
        return "smoothness" if self.smoothness <= self.compression else "compression"


@final
@dataclass(frozen=True)
class RoundsNeeded:
    """The rounds to epsilon-stationarity, K_opt(epsilon), as two terms (below Corollary 2).

    Parameters
    ----------
    noise : float
        The term in sigma^2 / epsilon^2, which the noise of mini-batches makes.
    step : float
        The term in 1 / (gamma_max epsilon), which the largest step makes.

    Examples
    --------
    >>> from emfed.theory import RoundsNeeded
    >>> rounds = RoundsNeeded(noise=120.5, step=80.0)
    >>> rounds.needed, rounds.regime
    (121, 'high noise')
    """

    noise: float
    step: float

    @property
    def needed(self) -> int:
        """The larger term, rounded up."""
        return max(1, ceil(max(self.noise, self.step)))

    @property
    def regime(self) -> Literal["high noise", "low noise"]:
        """Whether sigma^2 / epsilon^2 or 1 / (gamma_max epsilon) dominates."""
        return "high noise" if self.noise > self.step else "low noise"


def memory_rate(omega: float) -> float:
    """Give the recommended memory rate alpha, 1 / (1 + omega) (Theorem 1).

    It is also the largest that the proof allows (Appendix C.4).

    Parameters
    ----------
    omega : float
        The constant of the compression operator (A6); 0 for no compression.

    Returns
    -------
    float
        The rate alpha.

    Examples
    --------
    >>> from emfed.theory import memory_rate
    >>> memory_rate(3.0)
    0.25
    """
    check_range("omega", omega, 0, np.inf, open_high=True)
    return 1 / (1 + omega)


def _rate(rate: float | None, omega: float) -> float:
    largest = memory_rate(omega)
    if rate is None:
        return largest
    hint = "The theorems need rate <= 1 / (1 + omega)."
    return check_range("rate", rate, 0, largest * (1 + 1e-12), open_low=True, hint=hint)


# FedEM: Theorem 1 and its version with partial participation.


def fedem_step_limit(
    problem: Problem, omega: float, p: float = 1.0, rate: float | None = None
) -> StepLimit:
    """Compute the largest step of FedEM, gamma_max (Theorem 1; with p < 1 Theorem 4).

    The two parts are v_min / (2 L_W) and alpha p sqrt(n) / (2 sqrt(2) L sqrt(omega_p)). For a rate
    other than 1 / (1 + omega) they follow from step 2 of the proofs (Appendices C.4 and D.4).

    Parameters
    ----------
    problem : Problem
        The constants of the model and its data.
    omega : float
        The constant of the compression operator (A6); 0 for no compression.
    p : float
        The smallest probability that a worker takes part in a round.
    rate : float or None
        The memory rate alpha; None stands for 1 / (1 + omega), the largest that is allowed.

    Returns
    -------
    StepLimit
        Both parts, and which of them limits the step.

    Examples
    --------
    >>> from emfed.theory import Problem, fedem_step_limit
    >>> problem = Problem(workers=10, lipschitz=1.0, smoothness=2.0, gap=1.0)
    >>> limit = fedem_step_limit(problem, omega=1.0)
    >>> round(limit.largest, 4), limit.regime
    (0.25, 'smoothness')
    """
    noise = participating(omega, p)
    smooth = problem.v_min / (2 * problem.smoothness)
    steep = problem.spread_lipschitz * sqrt(noise)
    return StepLimit(smooth, _rate(rate, omega) * p / (2 * sqrt(2) * steep) if steep else inf)


def fedem_bound(
    problem: Problem,
    step: float,
    rounds: int,
    omega: float,
    p: float = 1.0,
    rate: float | None = None,
    memory_error: float = 0.0,
) -> float:
    """Bound the mean over rounds of E|h(S_k)|^2 of FedEM (Theorem 1; with p < 1 Theorem 4).

    Memories that do not start at the mean field add the term in G_0 of step 3 of the proofs
    (Appendices C.4 and D.4). Without compression and with everyone there, the sharper bound of the
    case omega = 0 holds up to gamma = 2 v_min / L_W.

    Parameters
    ----------
    problem : Problem
        The constants of the model and its data.
    step : float
        The step size gamma.
    rounds : int
        The number of rounds, k_max.
    omega : float
        The constant of the compression operator (A6); 0 for no compression.
    p : float
        The smallest probability that a worker takes part in a round.
    rate : float or None
        The memory rate alpha; None stands for 1 / (1 + omega), the largest that is allowed.
    memory_error : float
        The error of the first memories, G_0 / n; see `memory_error`.

    Returns
    -------
    float
        The bound.

    Raises
    ------
    SettingsError
        If the step is larger than the theorem allows.

    Examples
    --------
    >>> from emfed.theory import Problem, fedem_bound
    >>> problem = Problem(workers=10, lipschitz=1.0, smoothness=2.0, gap=1.0, variance=1.0)
    >>> round(fedem_bound(problem, step=0.1, rounds=1000, omega=1.0), 4)
    0.1625
    """
    check_count("rounds", rounds)
    noise, smooth = participating(omega, p), problem.smoothness
    if noise == 0:
        check_range("step", step, 0, 2 * problem.v_min / smooth, open_low=True, open_high=True)
        left = problem.v_min * (1 - step * smooth / (2 * problem.v_min))
        right = problem.gap / (step * rounds) + step * smooth * problem.spread_variance / 2
        return right / left
    limit = fedem_step_limit(problem, omega, p, rate).largest
    hint = "The theorem says nothing beyond gamma_max."
    check_range("step", step, 0, limit * (1 + 1e-12), open_low=True, hint=hint)
    start = problem.gap + step**2 * 2 * smooth / (_rate(rate, omega) * p) * noise * memory_error
    stay = step * smooth * (1 + 5 * noise) * problem.spread_variance
    left = problem.v_min * (1 - step * smooth / problem.v_min)
    return (start / (step * rounds) + stay) / left


def fedem_step(problem: Problem, rounds: int, omega: float, p: float = 1.0) -> float:
    """Compute the step that Corollary 2 takes for this many rounds.

    Parameters
    ----------
    problem : Problem
        The constants of the model and its data.
    rounds : int
        The number of rounds, k_max.
    omega : float
        The constant of the compression operator (A6); 0 for no compression.
    p : float
        The smallest probability that a worker takes part in a round.

    Returns
    -------
    float
        The step gamma, at most gamma_max.

    Examples
    --------
    >>> from emfed.theory import Problem, fedem_step
    >>> problem = Problem(workers=10, lipschitz=1.0, smoothness=2.0, gap=1.0, variance=1.0)
    >>> round(fedem_step(problem, rounds=1000, omega=1.0), 4)
    0.0289
    """
    check_count("rounds", rounds)
    noise, limit = participating(omega, p), fedem_step_limit(problem, omega, p).largest
    blur = rounds * problem.smoothness * (1 + 5 * noise) * problem.spread_variance
    return min(limit, sqrt(problem.gap / blur)) if blur and problem.gap else limit


def fedem_corollary(problem: Problem, rounds: int, omega: float, p: float = 1.0) -> float:
    """Bound the mean over rounds of E|h|^2 at the step of `fedem_step` (Corollary 2).

    Parameters
    ----------
    problem : Problem
        The constants of the model and its data.
    rounds : int
        The number of rounds, k_max.
    omega : float
        The constant of the compression operator (A6); 0 for no compression.
    p : float
        The smallest probability that a worker takes part in a round.

    Returns
    -------
    float
        The bound.

    Examples
    --------
    >>> from emfed.theory import Problem, fedem_corollary
    >>> problem = Problem(workers=10, lipschitz=1.0, smoothness=2.0, gap=1.0, variance=1.0)
    >>> round(fedem_corollary(problem, rounds=1000, omega=1.0), 4)
    0.1386
    """
    noise, limit = participating(omega, p), fedem_step_limit(problem, omega, p).largest
    check_count("rounds", rounds)
    blur = problem.smoothness * (1 + 5 * noise) * problem.spread_variance
    return 4 / problem.v_min * max(sqrt(problem.gap * blur / rounds), problem.gap / limit / rounds)


def fedem_rounds(problem: Problem, epsilon: float, omega: float, p: float = 1.0) -> RoundsNeeded:
    """Solve the bound of Corollary 2 for the number of rounds, K_opt(epsilon), constants kept.

    Parameters
    ----------
    problem : Problem
        The constants of the model and its data.
    epsilon : float
        The accuracy: the mean over rounds of E|h|^2 that is to be reached.
    omega : float
        The constant of the compression operator (A6); 0 for no compression.
    p : float
        The smallest probability that a worker takes part in a round.

    Returns
    -------
    RoundsNeeded
        Both terms, and which of them dominates.

    Examples
    --------
    >>> from emfed.theory import Problem, fedem_rounds
    >>> problem = Problem(workers=10, lipschitz=1.0, smoothness=2.0, gap=1.0, variance=1.0)
    >>> fedem_rounds(problem, epsilon=0.1, omega=1.0).needed
    1921
    """
    check_range("epsilon", epsilon, 0, np.inf, open_low=True, open_high=True)
    noise, limit = participating(omega, p), fedem_step_limit(problem, omega, p).largest
    blur = problem.smoothness * (1 + 5 * noise) * problem.spread_variance
    return RoundsNeeded(
        16 * problem.gap * blur / (problem.v_min * epsilon) ** 2,
        4 * problem.gap / (problem.v_min * limit * epsilon),
    )


def slowdown(problem: Problem, epsilon: float, omega: float, p: float = 1.0) -> float:
    """Divide K_opt(epsilon) with this compression by K_opt(epsilon) without.

    Section 2 of the paper has these factors as a table, below Corollary 2.

    Parameters
    ----------
    problem : Problem
        The constants of the model and its data.
    epsilon : float
        The accuracy: the mean over rounds of E|h|^2 that is to be reached.
    omega : float
        The constant of the compression operator (A6); 0 for no compression.
    p : float
        The smallest probability that a worker takes part in a round.

    Returns
    -------
    float
        The factor by which compression multiplies the rounds of FedEM; 1 at the optimum.

    Examples
    --------
    >>> from emfed.theory import Problem, slowdown
    >>> problem = Problem(workers=10, lipschitz=1.0, smoothness=2.0, gap=1.0)
    >>> round(slowdown(problem, epsilon=0.1, omega=8.0), 2)
    5.69
    """
    if problem.gap == 0:  # at the optimum no rounds are needed, with compression or without
        return 1.0
    ours, free = (fedem_rounds(problem, epsilon, w, p) for w in (omega, 0.0))
    return max(ours.noise, ours.step) / max(free.noise, free.step)


def fedem_start(problem: Problem, omega: float, p: float, memory_error: float) -> Problem:
    """The problem with the extra term of memories that do not start at h_i(S_0) in its gap.

    The term grows with gamma, so it is taken at gamma_max: a bound for every step (proof of
    Theorem 4, step 3).
    """
    limit, noise = fedem_step_limit(problem, omega, p).largest, participating(omega, p)
    if noise == 0 or memory_error == 0:
        return problem
    term = limit**2 * 2 * problem.smoothness / (memory_rate(omega) * p) * noise * memory_error
    return replace(problem, gap=problem.gap + term)


def fedem_variance(problem: Problem, omega: float, memory_error: float, p: float = 1.0) -> float:
    """Bound E|H - h(S)|^2 of FedEM, given the error of the memories.

    The bound is omega_p (G + sigma^2) / n + sigma^2 / n (Propositions 8 and 10; with p < 1
    Propositions 13 and 14).

    Parameters
    ----------
    problem : Problem
        The constants of the model and its data.
    omega : float
        The constant of the compression operator (A6); 0 for no compression.
    memory_error : float
        The error of the memories in this round, G / n.
    p : float
        The smallest probability that a worker takes part in a round.

    Returns
    -------
    float
        The bound.

    Examples
    --------
    >>> from emfed.theory import Problem, fedem_variance
    >>> problem = Problem(workers=10, lipschitz=1.0, smoothness=2.0, gap=1.0, variance=1.0)
    >>> round(fedem_variance(problem, omega=1.0, memory_error=0.1), 6)
    0.3
    """
    noise = participating(omega, p)
    return noise * memory_error + (1 + noise) * problem.spread_variance


def fedem_memory_step(
    problem: Problem,
    step: float,
    omega: float,
    memory_error: float,
    squared_h: float,
    p: float = 1.0,
    rate: float | None = None,
) -> float:
    """Bound the error of the memories after a round of FedEM, given that before it.

    This is the recursion of Proposition 11, and with p < 1 of Proposition 15. The latter is
    printed with omega_p / n in its last term; its proof, and its use in the next step, have
    (1 + omega_p) / n, which stands here.

    Parameters
    ----------
    problem : Problem
        The constants of the model and its data.
    step : float
        The step size gamma.
    omega : float
        The constant of the compression operator (A6); 0 for no compression.
    memory_error : float
        The error of the memories before the round, G / n.
    squared_h : float
        |h|^2 before the round.
    p : float
        The smallest probability that a worker takes part in a round.
    rate : float or None
        The memory rate alpha; None stands for 1 / (1 + omega), the largest that is allowed.

    Returns
    -------
    float
        The bound on G / n after the round.

    Examples
    --------
    >>> from emfed.theory import Problem, fedem_memory_step
    >>> problem = Problem(workers=10, lipschitz=1.0, smoothness=2.0, gap=1.0)
    >>> round(fedem_memory_step(problem, 0.1, omega=1.0, memory_error=0.1, squared_h=0.0), 6)
    0.0754
    """
    noise, learnt = participating(omega, p), _rate(rate, omega) * p
    steep = 2 * (step * problem.spread_lipschitz) ** 2 / learnt
    stay = (1 - learnt / 2 + steep * noise) * memory_error
    return stay + steep * squared_h + (2 * learnt + steep * (1 + noise)) * problem.spread_variance


def fedem_decreasing_bound(
    problem: Problem,
    steps: FloatArray,
    omega: float,
    p: float = 1.0,
    rate: float | None = None,
    memory_error: float = 0.0,
) -> float:
    """Bound a mean over rounds of E|h(S_k)|^2 of FedEM for steps that never grow.

    Round k counts in proportion to gamma (1 - gamma L_W / (2 v_min) (1 + 8 gamma^2 L^2 omega_p /
    (alpha^2 p^2 n))), which is about gamma (Appendices C.4 and D.4, step 3, before steps are
    taken constant; printed there with omega in place of omega_p once). For constant steps it
    is a little sharper than `fedem_bound`.

    Parameters
    ----------
    problem : Problem
        The constants of the model and its data.
    steps : array of shape (rounds,)
        The step of each round.
    omega : float
        The constant of the compression operator (A6); 0 for no compression.
    p : float
        The smallest probability that a worker takes part in a round.
    rate : float or None
        The memory rate alpha; None stands for 1 / (1 + omega), the largest that is allowed.
    memory_error : float
        The error of the first memories, G_0 / n; see `memory_error`.

    Returns
    -------
    float
        The bound.

    Raises
    ------
    SettingsError
        If steps grow, are not positive, or are larger than the theorem allows.

    Examples
    --------
    >>> import numpy as np
    >>> from emfed.theory import Problem, fedem_decreasing_bound
    >>> problem = Problem(workers=10, lipschitz=1.0, smoothness=2.0, gap=1.0, variance=1.0)
    >>> steps = 0.2 / np.sqrt(np.arange(1, 1001))
    >>> round(fedem_decreasing_bound(problem, steps, omega=1.0), 4)
    0.108
    """
    steps = np.asarray(steps, dtype=np.float64)
    if steps.ndim != 1 or not len(steps) or np.any(steps <= 0) or np.any(np.diff(steps) > 0):
        raise SettingsError("steps must be positive numbers, one a round, that never grow.")
    noise, smooth = participating(omega, p), problem.smoothness
    learnt = _rate(rate, omega) * p
    limit = fedem_step_limit(problem, omega, p, rate)
    largest = limit.compression if noise else inf
    hint = "The theorem says nothing beyond gamma_max."
    check_range("steps", float(steps[0]), 0, largest * (1 + 1e-12), open_low=True, hint=hint)
    bent = 8 * (steps * problem.spread_lipschitz / learnt) ** 2 * noise
    shares = steps * (1 - steps * smooth / (2 * problem.v_min) * (1 + bent))
    if np.any(shares <= 0):
        raise SettingsError(
            f"steps must stay below about 2 v_min / L_W; got {steps.max():g}. {hint}"
        )
    start = problem.gap + steps[0] ** 2 * 2 * smooth / learnt * noise * memory_error
    blur = 4 * smooth * steps**2 * (noise + (1 + noise) / 8 * (1 + bent))
    return float((start + blur.sum() * problem.spread_variance) / (problem.v_min * shares.sum()))


# VR-FedEM: Theorem 3 and the proposition behind it. The paper proves them for p = 1 only.


def vr_batch(inner: int, omega: float) -> int:
    """Compute the batch size of Theorem 3, ceil(k_in / (1 + omega)^2).

    Parameters
    ----------
    inner : int
        The number of inner rounds of an outer loop, k_in.
    omega : float
        The constant of the compression operator (A6); 0 for no compression.

    Returns
    -------
    int
        The number of rows of a mini-batch.

    Examples
    --------
    >>> from emfed.theory import vr_batch
    >>> vr_batch(inner=20, omega=1.0)
    5
    """
    return max(1, ceil(check_count("inner", inner) * memory_rate(omega) ** 2 - 1e-9))


def vr_inner_rounds(samples: int, omega: float) -> int:
    """Compute the inner rounds that minimise K_CE, (1 + omega) sqrt(m / 2) (Appendix E.2).

    Parameters
    ----------
    samples : int
        The number of rows of a worker, m.
    omega : float
        The constant of the compression operator (A6); 0 for no compression.

    Returns
    -------
    int
        The number of inner rounds of an outer loop, k_in.

    Examples
    --------
    >>> from emfed.theory import vr_inner_rounds
    >>> vr_inner_rounds(samples=200, omega=1.0)
    20
    """
    check_count("samples", samples)
    return max(1, round(sqrt(samples / 2) / memory_rate(omega)))


def _vr_blur(
    problem: Problem, omega: float, inner: int, batch: int, rate: float | None
) -> tuple[float, float]:
    """alpha, and the a_star of the proof (proof of Theorem 3)."""
    check_count("inner", inner)
    check_count("batch", batch)
    alpha = _rate(rate, omega)
    inside = omega + inner * alpha**2 / (8 * batch) * (1 + 10 * omega)
    steep = problem.largest_eigenvalue * problem.spread_sample_lipschitz
    return alpha, 2 * sqrt(2) * steep / alpha * sqrt(inside)


def lambda_star(
    problem: Problem, omega: float, inner: int, batch: int, rate: float | None = None
) -> float:
    """Compute Lambda_star of Proposition 25, which Theorem 3 follows from.

    Parameters
    ----------
    problem : Problem
        The constants of the model and its data.
    omega : float
        The constant of the compression operator (A6); 0 for no compression.
    inner : int
        The number of inner rounds of an outer loop, k_in.
    batch : int
        The number of rows of a mini-batch, b.
    rate : float or None
        The memory rate alpha; None stands for 1 / (1 + omega), the largest that is allowed.

    Returns
    -------
    float
        Lambda_star: steps must be smaller than its inverse.

    Examples
    --------
    >>> from emfed.theory import Problem, lambda_star
    >>> problem = Problem(workers=10, lipschitz=1.0, smoothness=2.0, gap=1.0)
    >>> round(lambda_star(problem, omega=1.0, inner=20, batch=5), 3)
    3.757
    """
    _, blur = _vr_blur(problem, omega, inner, batch, rate)
    return problem.smoothness / (2 * problem.v_min) + blur / problem.v_min


def vr_step(
    problem: Problem,
    omega: float,
    inner: int,
    batch: int | None = None,
    rate: float | None = None,
) -> float:
    """Compute the step of VR-FedEM, 1 / (2 Lambda_star).

    Theorem 3 prints it for b = k_in / (1 + omega)^2. A batch rounded up to a whole number allows a
    little more.

    Parameters
    ----------
    problem : Problem
        The constants of the model and its data.
    omega : float
        The constant of the compression operator (A6); 0 for no compression.
    inner : int
        The number of inner rounds of an outer loop, k_in.
    batch : int or None
        The number of rows of a mini-batch; None stands for that of `vr_batch`.
    rate : float or None
        The memory rate alpha; None stands for 1 / (1 + omega), the largest that is allowed.

    Returns
    -------
    float
        The step gamma.

    Examples
    --------
    >>> from emfed.theory import Problem, vr_step
    >>> problem = Problem(workers=10, lipschitz=1.0, smoothness=2.0, gap=1.0)
    >>> round(vr_step(problem, omega=1.0, inner=20), 4)
    0.1331
    """
    batch = vr_batch(inner, omega) if batch is None else batch
    return 1 / (2 * lambda_star(problem, omega, inner, batch, rate))


def vr_regime(problem: Problem, omega: float, inner: int, batch: int) -> Regime:
    """Say which part of Lambda_star dominates (below Theorem 3).

    Parameters
    ----------
    problem : Problem
        The constants of the model and its data.
    omega : float
        The constant of the compression operator (A6); 0 for no compression.
    inner : int
        The number of inner rounds of an outer loop, k_in.
    batch : int
        The number of rows of a mini-batch, b.

    Returns
    -------
    {"smoothness", "compression"}
        What limits the step of VR-FedEM.

    Examples
    --------
    >>> from emfed.theory import Problem, vr_regime
    >>> problem = Problem(workers=10, lipschitz=1.0, smoothness=2.0, gap=1.0)
    >>> vr_regime(problem, omega=1.0, inner=20, batch=5)
    'compression'
    """
    _, blur = _vr_blur(problem, omega, inner, batch, None)
    return "smoothness" if blur <= problem.smoothness / 2 else "compression"


def vr_start(
    problem: Problem,
    omega: float,
    inner: int,
    batch: int,
    memory_error: float,
    rate: float | None = None,
) -> Problem:
    """The problem with the extra term of memories that do not start at h_i in its gap."""
    if omega == 0 or memory_error == 0:
        return problem
    alpha, blur = _vr_blur(problem, omega, inner, batch, rate)
    term = 2 * omega * problem.largest_eigenvalue**2 / (alpha * blur) * memory_error
    return replace(problem, gap=problem.gap + term)


def vr_bounds(
    problem: Problem,
    step: float,
    inner: int,
    outer: int,
    omega: float,
    batch: int,
    rate: float | None = None,
    memory_error: float = 0.0,
) -> tuple[float, float]:
    """Bound the means over rounds of E|H|^2 and of E|h|^2 of VR-FedEM (Proposition 25).

    Theorem 3 is its case of one batch size. The factor of ``memory_error`` is in Appendix E.4.

    Parameters
    ----------
    problem : Problem
        The constants of the model and its data.
    step : float
        The step size gamma.
    inner : int
        The number of inner rounds of an outer loop, k_in.
    outer : int
        The number of outer loops, k_out.
    omega : float
        The constant of the compression operator (A6); 0 for no compression.
    batch : int
        The number of rows of a mini-batch, b.
    rate : float or None
        The memory rate alpha; None stands for 1 / (1 + omega), the largest that is allowed.
    memory_error : float
        The error of the first memories, G_0 / n; see `memory_error`.

    Returns
    -------
    tuple of two floats
        The bound on the mean of E|H|^2, and that on the mean of E|h|^2.

    Raises
    ------
    SettingsError
        If the step is not below 1 / Lambda_star.

    Examples
    --------
    >>> from emfed.theory import Problem, vr_bounds, vr_step
    >>> problem = Problem(workers=10, lipschitz=1.0, smoothness=2.0, gap=1.0)
    >>> step = vr_step(problem, omega=1.0, inner=20, batch=5)
    >>> [round(bound, 3) for bound in vr_bounds(problem, step, 20, 50, omega=1.0, batch=5)]
    [0.015, 0.03]
    """
    check_count("outer", outer)
    steepness = lambda_star(problem, omega, inner, batch, rate)
    hint = "The proposition needs gamma < 1 / Lambda_star."
    check_range("step", step, 0, 1 / steepness, open_low=True, open_high=True, hint=hint)
    start = vr_start(problem, omega, inner, batch, memory_error, rate).gap
    field = start / (step * inner * outer) / (problem.v_min * (1 - step * steepness))
    drift = step**2 * problem.spread_sample_lipschitz**2 * inner / batch
    return field, 2 * (1 + drift) * field


def vr_rounds(problem: Problem, epsilon: float, omega: float, inner: int, batch: int) -> int:
    """Compute K_opt(epsilon) of VR-FedEM: inner rounds until the bound on E|h|^2 is epsilon.

    The step is that of `vr_step`.

    Parameters
    ----------
    problem : Problem
        The constants of the model and its data.
    epsilon : float
        The accuracy: the mean over rounds of E|h|^2 that is to be reached.
    omega : float
        The constant of the compression operator (A6); 0 for no compression.
    inner : int
        The number of inner rounds of an outer loop, k_in.
    batch : int
        The number of rows of a mini-batch, b.

    Returns
    -------
    int
        The number of inner rounds in all, a multiple of ``inner``.

    Examples
    --------
    >>> from emfed.theory import Problem, vr_rounds
    >>> problem = Problem(workers=10, lipschitz=1.0, smoothness=2.0, gap=1.0)
    >>> vr_rounds(problem, epsilon=0.01, omega=1.0, inner=20, batch=5)
    3040
    """
    check_range("epsilon", epsilon, 0, np.inf, open_low=True, open_high=True)
    step = vr_step(problem, omega, inner, batch)
    _, bound = vr_bounds(problem, step, inner, 1, omega, batch)
    return inner * max(1, ceil(bound / epsilon))


def vr_variance(
    problem: Problem,
    step: float,
    omega: float,
    batch: int,
    memory_error: float,
    moved: float,
) -> float:
    """Bound E|H - h(S)|^2 of VR-FedEM, given G / n and the sum of |H|^2 in this outer loop.

    The bound is (1 + 2 omega) gamma^2 L^2 / (n b) sum |H|^2 + 2 omega G / n (Propositions 20
    and 24).

    Parameters
    ----------
    problem : Problem
        The constants of the model and its data.
    step : float
        The step size gamma.
    omega : float
        The constant of the compression operator (A6); 0 for no compression.
    batch : int
        The number of rows of a mini-batch, b.
    memory_error : float
        The error of the memories in this round, G / n.
    moved : float
        The sum of |H|^2 over the earlier rounds of this outer loop.

    Returns
    -------
    float
        The bound.

    Examples
    --------
    >>> from emfed.theory import Problem, vr_variance
    >>> problem = Problem(workers=10, lipschitz=1.0, smoothness=2.0, gap=1.0)
    >>> round(vr_variance(problem, 0.1, omega=1.0, batch=5, memory_error=0.1, moved=1.0), 6)
    0.2006
    """
    drift = (step * problem.spread_sample_lipschitz) ** 2 / batch * moved
    return (1 + 2 * omega) * drift + 2 * omega * memory_error


def vr_memory_step(
    problem: Problem,
    step: float,
    omega: float,
    batch: int,
    memory_error: float,
    squared_H: float,
    moved: float,
    rate: float | None = None,
) -> float:
    """Bound the error of the memories after an inner round of VR-FedEM (Proposition 22).

    Parameters
    ----------
    problem : Problem
        The constants of the model and its data.
    step : float
        The step size gamma.
    omega : float
        The constant of the compression operator (A6); 0 for no compression.
    batch : int
        The number of rows of a mini-batch, b.
    memory_error : float
        The error of the memories before the round, G / n.
    squared_H : float
        |H|^2 of this round.
    moved : float
        The sum of |H|^2 over the earlier rounds of this outer loop.
    rate : float or None
        The memory rate alpha; None stands for 1 / (1 + omega), the largest that is allowed.

    Returns
    -------
    float
        The bound on G / n after the round.

    Examples
    --------
    >>> from emfed.theory import Problem, vr_memory_step
    >>> problem = Problem(workers=10, lipschitz=1.0, smoothness=2.0, gap=1.0)
    >>> round(vr_memory_step(problem, 0.1, 1.0, 5, memory_error=0.1, squared_H=0.0, moved=0.0), 6)
    0.075
    """
    alpha = _rate(rate, omega)
    steep = (step * problem.spread_sample_lipschitz) ** 2
    stay = (1 - alpha / 2) * memory_error
    return stay + 2 / alpha * steep * squared_H + 2 * alpha / batch * steep * moved


def vr_memory_bound(
    problem: Problem, omega: float, inner: int, outer: int, memory_error: float = 0.0
) -> float:
    """Bound the mean over rounds of G / n, at the step, batch and rate of Theorem 3.

    The bound is 2 (1 + omega) G_0 / (k_in k_out) + 16 gamma (1 + omega)^2 L^2 (W(S_0) - min W) /
    (v_min k_in k_out): memories come to hold h_i, in the sense of Cesaro (Proposition 26).

    Parameters
    ----------
    problem : Problem
        The constants of the model and its data.
    omega : float
        The constant of the compression operator (A6); 0 for no compression.
    inner : int
        The number of inner rounds of an outer loop, k_in.
    outer : int
        The number of outer loops, k_out.
    memory_error : float
        The error of the first memories, G_0 / n; see `memory_error`.

    Returns
    -------
    float
        The bound.

    Examples
    --------
    >>> from emfed.theory import Problem, vr_memory_bound
    >>> problem = Problem(workers=10, lipschitz=1.0, smoothness=2.0, gap=1.0)
    >>> round(vr_memory_bound(problem, omega=1.0, inner=20, outer=50), 6)
    0.000852
    """
    rounds = check_count("inner", inner) * check_count("outer", outer)
    step = vr_step(problem, omega, inner)
    steep = (problem.spread_sample_lipschitz * (1 + omega)) ** 2
    begun = 2 * (1 + omega) * memory_error
    return (begun + 16 * step * steep / problem.v_min * problem.gap) / rounds


# Conditional expectations computed, over all workers (supplement).


def fedem_evaluations(rounds: float, workers: int, batch: float, p: float = 1.0) -> float:
    """Count the conditional expectations that FedEM computes, K_CE: p n b in each round.

    Parameters
    ----------
    rounds : float
        The number of rounds.
    workers : int
        The number of workers, n.
    batch : float
        The number of rows that a worker looks at in a round, b.
    p : float
        The probability that a worker takes part in a round.

    Returns
    -------
    float
        The number of conditional expectations, over all workers.

    Examples
    --------
    >>> from emfed.theory import fedem_evaluations
    >>> fedem_evaluations(rounds=100, workers=10, batch=20)
    20000.0
    """
    return rounds * p * workers * batch


def vr_evaluations(
    rounds: float,
    inner: int,
    workers: int,
    samples: float,
    batch: float,
    p: float = 1.0,
    *,
    skipped: bool = True,
) -> float:
    """Count the conditional expectations that VR-FedEM computes, K_CE.

    They are n m for each outer loop and 2 n b for each inner round (Appendix E.2). In the
    first inner round of an outer loop both terms of the difference are the same, S_{t,0} =
    S_{t,-1}: our workers skip it, the paper counts it. With p < 1 a worker makes
    its full pass at its first active round of an outer loop, if it has one.

    Parameters
    ----------
    rounds : float
        The number of inner rounds in all.
    inner : int
        The number of inner rounds of an outer loop, k_in.
    workers : int
        The number of workers, n.
    samples : float
        The number of rows of a worker, m.
    batch : float
        The number of rows of a mini-batch, b.
    p : float
        The probability that a worker takes part in a round.
    skipped : bool
        Whether the first inner round of an outer loop is left out, as our workers do.

    Returns
    -------
    float
        The number of conditional expectations, over all workers.

    Examples
    --------
    >>> from emfed.theory import vr_evaluations
    >>> vr_evaluations(rounds=100, inner=20, workers=10, samples=100, batch=5, skipped=False)
    15000.0
    """
    once = 1 - (1 - p) ** check_count("inner", inner)
    differences = p - once / inner if skipped else p
    return workers * rounds * (samples * once / inner + 2 * batch * differences)


# Beyond bounds: where h is affine, what |h|^2 settles at.


def noise_floor(
    step: float, kappa: float, variance: float, n: int, omega: float, p: float = 1.0
) -> float:
    """Compute where E|h|^2 of FedEM settles, for h affine with slope -kappa and small steps.

        gamma kappa (1 + 2 omega_p) sigma^2 / (n (2 - gamma kappa)),   alpha = 1 / (1 + omega)

    The memories hover around h_i with E|V_i - h_i|^2 = sigma^2, so an innovation has the size
    2 sigma^2, of which compression and silence make noise omega_p times. `settled_mean_field`
    does without small steps. The formula is ours, not the paper's.

    Parameters
    ----------
    step : float
        The step size gamma.
    kappa : float
        The slope of -h.
    variance : float
        The variance sigma^2 of a worker's oracle.
    n : int
        The number of workers.
    omega : float
        The constant of the compression operator (A6); 0 for no compression.
    p : float
        The smallest probability that a worker takes part in a round.

    Returns
    -------
    float
        The level at which E|h|^2 settles.

    Examples
    --------
    >>> from emfed.theory import noise_floor
    >>> round(noise_floor(step=0.1, kappa=1.0, variance=1.0, n=10, omega=1.0), 5)
    0.01579
    """
    noise = participating(omega, p)
    return step * kappa * (1 + 2 * noise) * variance / (n * (2 - step * kappa))


def settled_mean_field(
    step: float,
    kappa: float,
    variance: float,
    n: int,
    omega: float,
    p: float = 1.0,
    rate: float | None = None,
) -> float:
    """Compute exactly where E|h|^2 of FedEM settles, for h affine with slope -kappa.

    For n equal workers and an operator with E|Q(x) - x|^2 = omega |x|^2 the second moments of
    e = S - S_star and g_i = V_i - h_i close: with u_i the upload (0 if silent), eta = H - h,

        e'   = (1 - gamma kappa) e + gamma eta
        g_i' = g_i + alpha u_i + gamma kappa (eta - kappa e)

    and E|e|^2, E<e, g_i>, E|g_i|^2 solve a linear system. The paper does not have this.

    Parameters
    ----------
    step : float
        The step size gamma.
    kappa : float
        The slope of -h.
    variance : float
        The variance sigma^2 of a worker's oracle.
    n : int
        The number of workers.
    omega : float
        The constant of the compression operator (A6); 0 for no compression.
    p : float
        The smallest probability that a worker takes part in a round.
    rate : float or None
        The memory rate alpha; None stands for 1 / (1 + omega), the largest that is allowed.

    Returns
    -------
    float
        The level at which E|h|^2 settles; infinity where the step is too large to settle.

    Examples
    --------
    >>> from emfed.theory import settled_mean_field
    >>> round(settled_mean_field(step=0.1, kappa=1.0, variance=1.0, n=10, omega=1.0), 5)
    0.01611
    """
    noise, alpha = participating(omega, p), memory_rate(omega) if rate is None else rate
    gk = step * kappa

    def moments(a: float, c: float, g: float, s: float) -> np.ndarray:
        blur = (noise * g + (1 + noise) * s) / n  # E|eta|^2
        cross = ((1 + omega) * (g + s) - p * g) / n  # E<u_i, eta>
        stay = 1 - alpha * p
        moved = g * (1 - 2 * alpha * p) + alpha**2 * p * (1 + omega) * (g + s)
        return np.array(
            [
                (1 - gk) ** 2 * a + step**2 * blur,
                (1 - gk) * (stay * c - kappa * gk * a) + step * (alpha * cross + gk * blur),
                moved
                + kappa**2 * gk**2 * a
                + gk**2 * blur
                - 2 * kappa * gk * stay * c
                + 2 * gk * alpha * cross,
            ]
        )

    constant = moments(0, 0, 0, variance)
    units = ((1, 0, 0), (0, 1, 0), (0, 0, 1))
    linear = np.stack([moments(a, c, g, 0) for a, c, g in units], axis=1)
    if np.abs(np.linalg.eigvals(linear)).max() >= 1:
        return inf
    return float(kappa**2 * np.linalg.solve(np.eye(3) - linear, constant)[0])
