"""The theorems as numbers: Theorem 1 (FedEM), 3 (VR-FedEM) and 4 (FedEM, partial participation).

For unequal workers L / sqrt(n) reads (sum w_i^2 L_i^2)^(1/2), and sigma^2 / n reads
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
BEYOND = "The theorem says nothing beyond gamma_max."


@final
@dataclass(frozen=True)
class StepLimit:
    """The largest step size that a theorem allows, in its two parts (Theorems 1 and 4).

    Examples
    --------
    >>> from emfed.theory import StepLimit
    >>> limit = StepLimit(smoothness=0.25, compression=0.1)
    >>> limit.largest, limit.regime
    (0.1, 'compression')
    """

    smoothness: float
    """The part that the smoothness of the objective W sets."""
    compression: float
    """The part that compression and partial participation set."""

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

    Examples
    --------
    >>> from emfed.theory import RoundsNeeded
    >>> rounds = RoundsNeeded(noise=120.5, step=80.0)
    >>> rounds.needed, rounds.regime
    (121, 'high noise')
    """

    noise: float
    """The term in sigma^2 / epsilon^2, which the noise of mini-batches makes."""
    step: float
    """The term in 1 / (gamma_max epsilon), which the largest step makes."""

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


@final
@dataclass(frozen=True)
class FedEMBounds:
    """What Theorem 1, with p < 1 Theorem 4, and Corollary 2 promise of FedEM.

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

    Notes
    -----
    Of the arguments of methods ``step`` is the step size gamma, ``rounds`` the number of rounds
    k_max, ``epsilon`` the mean over rounds of E|h|^2 that is to be reached, and ``memory_error``
    the error G / n of the memories: of the first ones in a bound (`memory_error`), of those before
    the round in a recursion. What the theorems do not cover raises `SettingsError`.

    Examples
    --------
    >>> from emfed.theory import FedEMBounds, Problem
    >>> problem = Problem(workers=10, lipschitz=1.0, smoothness=2.0, gap=1.0, variance=1.0)
    >>> bounds = FedEMBounds(problem, omega=1.0)
    >>> round(bounds.step_limit.largest, 4), bounds.step_limit.regime
    (0.25, 'smoothness')
    >>> round(bounds.bound(step=0.1, rounds=1000), 4)
    0.1625
    >>> round(bounds.step(rounds=1000), 4), round(bounds.corollary(rounds=1000), 4)
    (0.0289, 0.1386)
    >>> bounds.rounds(epsilon=0.1).needed
    1921
    """

    problem: Problem
    omega: float
    p: float = 1.0
    rate: float | None = None

    def __post_init__(self) -> None:
        participating(self.omega, self.p)
        _rate(self.rate, self.omega)

    @property
    def omega_p(self) -> float:
        """omega, with silence counted as more compression (`participating`)."""
        return participating(self.omega, self.p)

    @property
    def memory_rate(self) -> float:
        """The memory rate alpha."""
        return _rate(self.rate, self.omega)

    @property
    def step_limit(self) -> StepLimit:
        """The largest step gamma_max (Theorem 1; with p < 1 Theorem 4).

        The two parts are v_min / (2 L_W) and alpha p sqrt(n) / (2 sqrt(2) L sqrt(omega_p)). For a
        rate other than 1 / (1 + omega) they follow from step 2 of the proofs (Appendices C.4 and
        D.4).
        """
        smooth = self.problem.v_min / (2 * self.problem.smoothness)
        steep = self.problem.spread_lipschitz * sqrt(self.omega_p)
        return StepLimit(
            smooth, self.memory_rate * self.p / (2 * sqrt(2) * steep) if steep else inf
        )

    def bound(self, step: float, rounds: int, memory_error: float = 0.0) -> float:
        """Bound the mean over rounds of E|h(S_k)|^2 (Theorem 1; with p < 1 Theorem 4).

        Memories that do not start at the mean field add the term in G_0 of step 3 of the proofs
        (Appendices C.4 and D.4). Without compression and with everyone there, the sharper bound of
        the case omega = 0 holds up to gamma = 2 v_min / L_W.
        """
        check_count("rounds", rounds)
        problem, noise, smooth = self.problem, self.omega_p, self.problem.smoothness
        if noise == 0:
            check_range("step", step, 0, 2 * problem.v_min / smooth, open_low=True, open_high=True)
            left = problem.v_min * (1 - step * smooth / (2 * problem.v_min))
            right = problem.gap / (step * rounds) + step * smooth * problem.spread_variance / 2
            return right / left
        largest = self.step_limit.largest * (1 + 1e-12)
        check_range("step", step, 0, largest, open_low=True, hint=BEYOND)
        learnt = self.memory_rate * self.p
        start = problem.gap + step**2 * 2 * smooth / learnt * noise * memory_error
        stay = step * smooth * (1 + 5 * noise) * problem.spread_variance
        left = problem.v_min * (1 - step * smooth / problem.v_min)
        return (start / (step * rounds) + stay) / left

    def decreasing_bound(self, steps: FloatArray, memory_error: float = 0.0) -> float:
        """Bound a mean over rounds of E|h(S_k)|^2 for steps, one a round, that never grow.

        Round k counts in proportion to gamma (1 - gamma L_W / (2 v_min) (1 + 8 gamma^2 L^2 omega_p
        / (alpha^2 p^2 n))), which is about gamma (Appendices C.4 and D.4, step 3, before steps are
        taken constant; printed there with omega in place of omega_p once). For constant steps it
        is a little sharper than `bound`.
        """
        steps = np.asarray(steps, dtype=np.float64)
        if steps.ndim != 1 or not len(steps) or np.any(steps <= 0) or np.any(np.diff(steps) > 0):
            raise SettingsError("steps must be positive numbers, one a round, that never grow.")
        problem, noise, smooth = self.problem, self.omega_p, self.problem.smoothness
        learnt = self.memory_rate * self.p
        largest = self.step_limit.compression * (1 + 1e-12) if noise else inf
        check_range("steps", float(steps[0]), 0, largest, open_low=True, hint=BEYOND)
        bent = 8 * (steps * problem.spread_lipschitz / learnt) ** 2 * noise
        shares = steps * (1 - steps * smooth / (2 * problem.v_min) * (1 + bent))
        if np.any(shares <= 0):
            raise SettingsError(
                f"steps must stay below about 2 v_min / L_W; got {steps.max():g}. {BEYOND}"
            )
        start = problem.gap + steps[0] ** 2 * 2 * smooth / learnt * noise * memory_error
        blur = 4 * smooth * steps**2 * (noise + (1 + noise) / 8 * (1 + bent))
        weight = problem.v_min * shares.sum()
        return float((start + blur.sum() * problem.spread_variance) / weight)

    def step(self, rounds: int) -> float:
        """Compute the step that Corollary 2 takes for this many rounds, at most gamma_max."""
        blur = check_count("rounds", rounds) * self._blur
        limit, gap = self.step_limit.largest, self.problem.gap
        return min(limit, sqrt(gap / blur)) if blur and gap else limit

    def corollary(self, rounds: int) -> float:
        """Bound the mean over rounds of E|h|^2 at the step of `step` (Corollary 2)."""
        check_count("rounds", rounds)
        gap, limit = self.problem.gap, self.step_limit.largest
        return 4 / self.problem.v_min * max(sqrt(gap * self._blur / rounds), gap / limit / rounds)

    def rounds(self, epsilon: float) -> RoundsNeeded:
        """Solve the bound of Corollary 2 for the number of rounds, K_opt(epsilon)."""
        check_range("epsilon", epsilon, 0, np.inf, open_low=True, open_high=True)
        gap, aim = self.problem.gap, self.problem.v_min * epsilon
        return RoundsNeeded(
            16 * gap * self._blur / aim**2, 4 * gap / (aim * self.step_limit.largest)
        )

    @property
    def _blur(self) -> float:
        return self.problem.smoothness * (1 + 5 * self.omega_p) * self.problem.spread_variance

    def slowdown(self, epsilon: float) -> float:
        """Divide K_opt(epsilon) with this compression by K_opt(epsilon) without.

        Section 2 of the paper has these factors as a table, below Corollary 2.
        """
        if self.problem.gap == 0:  # no rounds are needed, with compression or without
            return 1.0
        ours, free = (b.rounds(epsilon) for b in (self, FedEMBounds(self.problem, 0.0, self.p)))
        return max(ours.noise, ours.step) / max(free.noise, free.step)

    def variance(self, memory_error: float) -> float:
        """Bound E|H - h(S)|^2 in a round, given the error of the memories in it.

        The bound is omega_p (G + sigma^2) / n + sigma^2 / n (Propositions 8 and 10; with p < 1
        Propositions 13 and 14).
        """
        return self.omega_p * memory_error + (1 + self.omega_p) * self.problem.spread_variance

    def memory_step(self, step: float, memory_error: float, squared_h: float) -> float:
        """Bound the error of the memories after a round, given that and |h|^2 before it.

        This is the recursion of Proposition 11, and with p < 1 of Proposition 15. The latter is
        printed with omega_p / n in its last term; its proof, and its use in the next step, have
        (1 + omega_p) / n, which stands here.
        """
        noise, learnt = self.omega_p, self.memory_rate * self.p
        steep = 2 * (step * self.problem.spread_lipschitz) ** 2 / learnt
        stay = (1 - learnt / 2 + steep * noise) * memory_error
        fresh = (2 * learnt + steep * (1 + noise)) * self.problem.spread_variance
        return stay + steep * squared_h + fresh

    def with_memories(self, memory_error: float) -> FedEMBounds:
        """Return the same, with the term of memories that do not start at h_i(S_0) in the gap.

        The term grows with gamma, so it is taken at gamma_max: a bound for every step (proof of
        Theorem 4, step 3).
        """
        if self.omega_p == 0 or memory_error == 0:
            return self
        price = 2 * self.problem.smoothness / (self.memory_rate * self.p) * self.omega_p
        term = self.step_limit.largest**2 * price * memory_error
        return replace(self, problem=replace(self.problem, gap=self.problem.gap + term))

    def evaluations(self, rounds: float, batch: float) -> float:
        """Count the conditional expectations, K_CE: p n b in each round."""
        return rounds * self.p * len(self.problem.weights) * batch


@final
@dataclass(frozen=True)
class VRBounds:
    """What Theorem 3, and Proposition 25 that it follows from, promise of VR-FedEM.

    The paper proves them for p = 1 only.

    Parameters
    ----------
    problem : Problem
        The constants of the model and its data.
    omega : float
        The constant of the compression operator (A6); 0 for no compression.
    inner : int
        The number of inner rounds of an outer loop, k_in.
    batch : int or None
        The number of rows b of a mini-batch; None stands for that of Theorem 3,
        ceil(k_in / (1 + omega)^2).
    rate : float or None
        The memory rate alpha; None stands for 1 / (1 + omega), the largest that is allowed.

    Notes
    -----
    Of the arguments of methods ``step`` is the step size gamma, ``outer`` the number of outer
    loops k_out, ``epsilon`` the mean over rounds of E|h|^2 that is to be reached, ``moved`` the sum
    of |H|^2 over the earlier rounds of this outer loop, and ``memory_error`` the error G / n of
    the memories: of the first ones in a bound (`memory_error`), of those before the round in a
    recursion. What the theorems do not cover raises `SettingsError`.

    Examples
    --------
    >>> from emfed.theory import Problem, VRBounds
    >>> problem = Problem(workers=10, lipschitz=1.0, smoothness=2.0, gap=1.0)
    >>> bounds = VRBounds(problem, omega=1.0, inner=20)
    >>> bounds.batch_size, round(bounds.step, 4), bounds.regime
    (5, 0.1331, 'compression')
    >>> [round(bound, 3) for bound in bounds.means(bounds.step, outer=50)]
    [0.015, 0.03]
    >>> bounds.rounds(epsilon=0.01)
    3040
    """

    problem: Problem
    omega: float
    inner: int
    batch: int | None = None
    rate: float | None = None

    def __post_init__(self) -> None:
        check_count("inner", self.inner)
        if self.batch is not None:
            check_count("batch", self.batch)
        _rate(self.rate, self.omega)

    @property
    def batch_size(self) -> int:
        """The batch b; by default that of Theorem 3."""
        if self.batch is not None:
            return self.batch
        return max(1, ceil(self.inner * memory_rate(self.omega) ** 2 - 1e-9))

    @property
    def memory_rate(self) -> float:
        """The memory rate alpha."""
        return _rate(self.rate, self.omega)

    @property
    def _blur(self) -> float:
        """The a_star of the proof of Theorem 3."""
        alpha, omega = self.memory_rate, self.omega
        inside = omega + self.inner * alpha**2 / (8 * self.batch_size) * (1 + 10 * omega)
        steep = self.problem.largest_eigenvalue * self.problem.spread_sample_lipschitz
        return 2 * sqrt(2) * steep / alpha * sqrt(inside)

    @property
    def lambda_star(self) -> float:
        """Lambda_star of Proposition 25: steps must be smaller than its inverse."""
        return self.problem.smoothness / (2 * self.problem.v_min) + self._blur / self.problem.v_min

    @property
    def regime(self) -> Regime:
        """The part of Lambda_star that dominates, and so limits the step (below Theorem 3)."""
        return "smoothness" if self._blur <= self.problem.smoothness / 2 else "compression"

    @property
    def step(self) -> float:
        """The step 1 / (2 Lambda_star).

        Theorem 3 prints it for b = k_in / (1 + omega)^2. A batch rounded up to a whole number
        allows a little more.
        """
        return 1 / (2 * self.lambda_star)

    def means(self, step: float, outer: int, memory_error: float = 0.0) -> tuple[float, float]:
        """Bound the means over rounds of E|H|^2 and of E|h|^2 (Proposition 25).

        Theorem 3 is its case of one batch size. The factor of ``memory_error`` is in Appendix E.4.
        """
        check_count("outer", outer)
        steepness = self.lambda_star
        hint = "The proposition needs gamma < 1 / Lambda_star."
        check_range("step", step, 0, 1 / steepness, open_low=True, open_high=True, hint=hint)
        start = self.with_memories(memory_error).problem.gap
        field = start / (step * self.inner * outer) / (self.problem.v_min * (1 - step * steepness))
        drift = step**2 * self.problem.spread_sample_lipschitz**2 * self.inner / self.batch_size
        return field, 2 * (1 + drift) * field

    def rounds(self, epsilon: float) -> int:
        """Compute K_opt(epsilon): inner rounds in all, until the bound on E|h|^2 is epsilon."""
        check_range("epsilon", epsilon, 0, np.inf, open_low=True, open_high=True)
        _, bound = self.means(self.step, 1)
        return self.inner * max(1, ceil(bound / epsilon))

    def variance(self, step: float, memory_error: float, moved: float) -> float:
        """Bound E|H - h(S)|^2 in a round, given the error of the memories in it.

        The bound is (1 + 2 omega) gamma^2 L^2 / (n b) sum |H|^2 + 2 omega G / n (Propositions 20
        and 24).
        """
        drift = (step * self.problem.spread_sample_lipschitz) ** 2 / self.batch_size * moved
        return (1 + 2 * self.omega) * drift + 2 * self.omega * memory_error

    def memory_step(
        self, step: float, memory_error: float, squared_H: float, moved: float
    ) -> float:
        """Bound the error of the memories after an inner round, given |H|^2 of that round.

        This is Proposition 22.
        """
        alpha = self.memory_rate
        steep = (step * self.problem.spread_sample_lipschitz) ** 2
        stay = (1 - alpha / 2) * memory_error
        return stay + 2 / alpha * steep * squared_H + 2 * alpha / self.batch_size * steep * moved

    def memory_bound(self, outer: int, memory_error: float = 0.0) -> float:
        """Bound the mean over rounds of G / n, at the step, batch and rate of Theorem 3.

        The bound is 2 (1 + omega) G_0 / (k_in k_out) + 16 gamma (1 + omega)^2 L^2 (W(S_0) - min W)
        / (v_min k_in k_out): memories come to hold h_i, in the sense of Cesaro (Proposition 26).
        """
        rounds = self.inner * check_count("outer", outer)
        step = replace(self, batch=None, rate=None).step
        steep = (self.problem.spread_sample_lipschitz * (1 + self.omega)) ** 2
        begun = 2 * (1 + self.omega) * memory_error
        return (begun + 16 * step * steep / self.problem.v_min * self.problem.gap) / rounds

    def with_memories(self, memory_error: float) -> VRBounds:
        """Return the same, with the term of memories that do not start at h_i in the gap."""
        if self.omega == 0 or memory_error == 0:
            return self
        price = 2 * self.omega * self.problem.largest_eigenvalue**2
        term = price / (self.memory_rate * self._blur) * memory_error
        return replace(self, problem=replace(self.problem, gap=self.problem.gap + term))

    def evaluations(
        self, rounds: float, samples: float, p: float = 1.0, *, skipped: bool = True
    ) -> float:
        """Count the conditional expectations, K_CE, of so many inner rounds in all.

        They are n m for each outer loop, m the rows of a worker (``samples``), and 2 n b for each
        inner round (Appendix E.2). In the first inner round of an outer loop both terms of the
        difference are the same, S_{t,0} = S_{t,-1}: our workers skip it, the paper counts it
        (``skipped=False``). With p < 1 a worker makes its full pass at its first active round of
        an outer loop, if it has one.
        """
        once = 1 - (1 - p) ** self.inner
        differences = p - once / self.inner if skipped else p
        workers = len(self.problem.weights)
        return workers * rounds * (samples * once / self.inner + 2 * self.batch_size * differences)


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
