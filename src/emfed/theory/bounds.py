"""The theorems as numbers: Theorem 1 (FedEM), 2 (VR-FedEM) and 3 (FedEM, partial participation).

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
    """gamma_max and its two parts; the smaller one decides (Theorems 1 and 3)."""

    smoothness: float
    compression: float

    @property
    def largest(self) -> float:
        """gamma_max."""
        return min(self.smoothness, self.compression)

    @property
    def regime(self) -> Regime:
        """What limits the step."""
        return "smoothness" if self.smoothness <= self.compression else "compression"


@final
@dataclass(frozen=True)
class Rounds:
    """K_opt(epsilon), rounds to epsilon-stationarity, as two terms (corollary of Theorem 1)."""

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
    """The largest and recommended alpha, 1 / (1 + omega) (end of the proof of Theorem 1)."""
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
    """gamma_max = v_min / (2 L_W)  and  alpha p sqrt(n) / (2 sqrt(2) L sqrt(omega_p)).

    Theorem 1; with p Theorem 3; for any alpha the last steps of their proofs.
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
    """Bounds the mean over rounds of E|h(S_k)|^2 (Theorem 1; with p Theorem 3).

    ``memory_error`` is G_0 / n, the sum of w_i^2 |V_i - h_i(S_0)|^2: zero for memories started at
    the mean field; otherwise it adds the term in G_0 of step 3 of their proofs. Without compression
    and with everyone there, the sharper bound at the end of the proof of Theorem 1 holds up to
    gamma = 2 v_min / L_W.
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
    """The corollary's gamma for this many rounds."""
    check_count("rounds", rounds)
    noise, limit = participating(omega, p), fedem_step_limit(problem, omega, p).largest
    blur = rounds * problem.smoothness * (1 + 5 * noise) * problem.spread_variance
    return min(limit, sqrt(problem.gap / blur)) if blur and problem.gap else limit


def fedem_corollary(problem: Problem, rounds: int, omega: float, p: float = 1.0) -> float:
    """The corollary's bound on the mean over rounds of E|h|^2, at its own gamma."""
    noise, limit = participating(omega, p), fedem_step_limit(problem, omega, p).largest
    check_count("rounds", rounds)
    blur = problem.smoothness * (1 + 5 * noise) * problem.spread_variance
    return 4 / problem.v_min * max(sqrt(problem.gap * blur / rounds), problem.gap / limit / rounds)


def fedem_rounds(problem: Problem, epsilon: float, omega: float, p: float = 1.0) -> Rounds:
    """K_opt(epsilon): the corollary's bound solved for the number of rounds, constants kept."""
    check_range("epsilon", epsilon, 0, np.inf, open_low=True, open_high=True)
    noise, limit = participating(omega, p), fedem_step_limit(problem, omega, p).largest
    blur = problem.smoothness * (1 + 5 * noise) * problem.spread_variance
    return Rounds(
        16 * problem.gap * blur / (problem.v_min * epsilon) ** 2,
        4 * problem.gap / (problem.v_min * limit * epsilon),
    )


def slowdown(problem: Problem, epsilon: float, omega: float, p: float = 1.0) -> float:
    """K_opt(epsilon) with this compression over K_opt(epsilon) without: the regimes table."""
    if problem.gap == 0:  # at the optimum no rounds are needed, with compression or without
        return 1.0
    ours, free = (fedem_rounds(problem, epsilon, w, p) for w in (omega, 0.0))
    return max(ours.noise, ours.step) / max(free.noise, free.step)


def fedem_start(problem: Problem, omega: float, p: float, memory_error: float) -> Problem:
    """The problem with the extra term of memories that do not start at h_i(S_0) in its gap.

    The term grows with gamma, so it is taken at gamma_max: a bound for every step (proof of
    Theorem 3, step 3).
    """
    limit, noise = fedem_step_limit(problem, omega, p).largest, participating(omega, p)
    if noise == 0 or memory_error == 0:
        return problem
    term = limit**2 * 2 * problem.smoothness / (memory_rate(omega) * p) * noise * memory_error
    return replace(problem, gap=problem.gap + term)


def fedem_variance(problem: Problem, omega: float, memory_error: float, p: float = 1.0) -> float:
    """Bounds E|H - h(S)|^2, given the memories' error G / n.

    omega_p (G + sigma^2) / n + sigma^2 / n (supplement, the propositions on H and on Delta, with
    p = 1 and with partial participation).
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
    """Bounds G / n after a round, given G / n and |h|^2 before it: the recursion on memories.

    Supplement, the proposition on the memory terms, with p = 1 and with partial participation. The
    latter is printed with omega_p / n in its last term; its proof, and its use in the next step,
    have (1 + omega_p) / n, which stands here.
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
    """Bounds a mean over rounds of E|h(S_k)|^2 for steps that never grow.

    Round k counts in proportion to gamma (1 - gamma L_W / (2 v_min) (1 + 8 gamma^2 L^2 omega_p /
    (alpha^2 p^2 n))), which is about gamma (supplement, proof of Theorem 1, step 3, before steps
    are taken constant; printed there with omega in place of omega_p once). For constant steps it
    is a little sharper than `fedem_bound`.
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


# VR-FedEM: Theorem 2 and the proposition behind it. The paper proves them for p = 1 only.


def vr_batch(inner: int, omega: float) -> int:
    """Theorem 2's b = ceil(k_in / (1 + omega)^2)."""
    return max(1, ceil(check_count("inner", inner) * memory_rate(omega) ** 2 - 1e-9))


def vr_inner_rounds(samples: int, omega: float) -> int:
    """k_in = (1 + omega) sqrt(m / 2), which minimises K_CE (supplement); m rows a worker."""
    check_count("samples", samples)
    return max(1, round(sqrt(samples / 2) / memory_rate(omega)))


def _vr_blur(
    problem: Problem, omega: float, inner: int, batch: int, rate: float | None
) -> tuple[float, float]:
    """alpha, and the a_star of the proof (proof of Theorem 2)."""
    check_count("inner", inner)
    check_count("batch", batch)
    alpha = _rate(rate, omega)
    inside = omega + inner * alpha**2 / (8 * batch) * (1 + 10 * omega)
    steep = problem.largest_eigenvalue * problem.spread_sample_lipschitz
    return alpha, 2 * sqrt(2) * steep / alpha * sqrt(inside)


def lambda_star(
    problem: Problem, omega: float, inner: int, batch: int, rate: float | None = None
) -> float:
    """Lambda_star of the general proposition (supplement, "Proof of Theorem 2")."""
    _, blur = _vr_blur(problem, omega, inner, batch, rate)
    return problem.smoothness / (2 * problem.v_min) + blur / problem.v_min


def vr_step(
    problem: Problem,
    omega: float,
    inner: int,
    batch: int | None = None,
    rate: float | None = None,
) -> float:
    """gamma = 1 / (2 Lambda_star), which Theorem 2 prints for b = k_in / (1 + omega)^2.

    A batch rounded up to a whole number allows a little more.
    """
    batch = vr_batch(inner, omega) if batch is None else batch
    return 1 / (2 * lambda_star(problem, omega, inner, batch, rate))


def vr_regime(problem: Problem, omega: float, inner: int, batch: int) -> Regime:
    """Which part of Lambda_star dominates (below Theorem 2)."""
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
    """Bounds on the means over rounds of E|H|^2 and of E|h|^2 (Theorem 2, general form).

    ``memory_error`` is G_0 / n as in `fedem_bound`; its factor C is in the proof of Theorem 2.
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
    """K_opt(epsilon): inner rounds until the bound on E|h|^2 is epsilon, at gamma of `vr_step`."""
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
    """Bounds E|H - h(S)|^2 of VR-FedEM, given G / n and the sum of |H|^2 in this outer loop.

    (1 + 2 omega) gamma^2 L^2 / (n b) sum |H|^2 + 2 omega G / n (supplement, the propositions on H
    and on Delta of VR-FedEM).
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
    """Bounds G / n after an inner round of VR-FedEM: the recursion on memories.

    ``squared_H`` is that of this round, ``moved`` the sum over the rounds of this outer loop that
    came before it.
    """
    alpha = _rate(rate, omega)
    steep = (step * problem.spread_sample_lipschitz) ** 2
    stay = (1 - alpha / 2) * memory_error
    return stay + 2 / alpha * steep * squared_H + 2 * alpha / batch * steep * moved


def vr_memory_bound(
    problem: Problem, omega: float, inner: int, outer: int, memory_error: float = 0.0
) -> float:
    """Bounds the mean over rounds of G / n, at Theorem 2's step, batch and rate.

    2 (1 + omega) G_0 / (k_in k_out) + 16 gamma (1 + omega)^2 L^2 (W(S_0) - min W) / (v_min k_in
    k_out): memories come to hold h_i, in the sense of Cesaro (supplement, "On the convergence of
    the V").
    """
    rounds = check_count("inner", inner) * check_count("outer", outer)
    step = vr_step(problem, omega, inner)
    steep = (problem.spread_sample_lipschitz * (1 + omega)) ** 2
    begun = 2 * (1 + omega) * memory_error
    return (begun + 16 * step * steep / problem.v_min * problem.gap) / rounds


# Conditional expectations computed, over all workers (supplement).


def fedem_evaluations(rounds: float, workers: int, batch: float, p: float = 1.0) -> float:
    """K_CE of FedEM: p n b for each round."""
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
    """K_CE of VR-FedEM: n m for each outer loop, 2 n b for each inner round (supplement, "Computed
    conditional expectations complexity").

    In the first inner round of an outer loop both terms of the difference are the same, S_{t,0} =
    S_{t,-1}: our workers skip it (``skipped``), the paper counts it. With p < 1 a worker makes its
    full pass at its first active round of an outer loop, if it has one.
    """
    once = 1 - (1 - p) ** check_count("inner", inner)
    differences = p - once / inner if skipped else p
    return workers * rounds * (samples * once / inner + 2 * batch * differences)


# Beyond bounds: where h is affine, what |h|^2 settles at.


def noise_floor(
    step: float, kappa: float, variance: float, n: int, omega: float, p: float = 1.0
) -> float:
    """E|h|^2 of FedEM once settled, for h affine with slope -kappa and small steps.

        gamma kappa (1 + 2 omega_p) sigma^2 / (n (2 - gamma kappa)),   alpha = 1 / (1 + omega)

    The memories hover around h_i with E|V_i - h_i|^2 = sigma^2, so an innovation has the size
    2 sigma^2, of which compression and silence make noise omega_p times. `settled_mean_field`
    does without small steps.
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
    """E|h|^2 of FedEM once settled, for h affine with slope -kappa: exact.

    For n equal workers and an operator with E|Q(x) - x|^2 = omega |x|^2 the second moments of
    e = S - S_star and g_i = V_i - h_i close: with u_i the upload (0 if silent), eta = H - h,

        e'   = (1 - gamma kappa) e + gamma eta
        g_i' = g_i + alpha u_i + gamma kappa (eta - kappa e)

    and E|e|^2, E<e, g_i>, E|g_i|^2 solve a linear system. Returns inf where it has no stationary
    solution: the step is too large.
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
