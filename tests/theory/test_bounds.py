"""The theorems' numbers: against the formulas as printed, and against runs that must obey them."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import emfed
from emfed import theory
from emfed.models import LinearGaussian, Location
from emfed.theory import FedEMBounds, Problem, VRBounds
from tests.helpers import first, plain_fit

constants = st.fixed_dictionaries(
    {
        "workers": st.integers(1, 500),
        "lipschitz": st.floats(0.01, 10),
        "smoothness": st.floats(0.01, 10),
        "gap": st.floats(0.01, 100),
        "v_min": st.floats(0.1, 1),
        "v_max": st.floats(1, 10),
        "variance": st.floats(0, 10),
    }
)
omegas = st.floats(0.01, 50)


@given(constants, omegas)
def test_theorem_1_as_printed(c: dict[str, Any], w: float) -> None:
    problem, n = Problem(**c), c["workers"]
    bounds = FedEMBounds(problem, w)
    limit = bounds.step_limit
    assert limit.smoothness == pytest.approx(c["v_min"] / (2 * c["smoothness"]))
    printed = sqrt(n) / (2 * sqrt(2) * c["lipschitz"] * (1 + w) * sqrt(w))
    assert limit.compression == pytest.approx(printed)
    step = 0.7 * limit.largest
    left = c["v_min"] * (1 - step * c["smoothness"] / c["v_min"])
    right = c["gap"] / (step * 50) + step * c["smoothness"] * (1 + 5 * w) / n * c["variance"]
    assert bounds.bound(step, 50) == pytest.approx(right / left)


@given(constants, omegas, st.floats(0.01, 1))
def test_partial_participation_as_printed(c: dict[str, Any], w: float, p: float) -> None:
    problem, n = Problem(**c), c["workers"]
    inner = w + (1 - p) * (1 + w) / p
    assert theory.participating(w, p) == pytest.approx(inner)
    printed = p * sqrt(n) / (2 * sqrt(2) * c["lipschitz"] * (1 + w) * sqrt(inner))
    assert FedEMBounds(problem, w, p).step_limit.compression == pytest.approx(printed)


@given(constants, omegas, st.integers(1, 200))
def test_theorem_3_as_printed(c: dict[str, Any], w: float, inner: int) -> None:
    problem, n = Problem(**c), c["workers"]
    bounds = VRBounds(problem, w, inner)
    assert bounds.batch_size == max(1, int(np.ceil(inner / (1 + w) ** 2 - 1e-9)))
    steep = c["v_max"] / c["smoothness"] * c["lipschitz"] / sqrt(n) * (1 + w)
    printed = c["v_min"] / c["smoothness"] / (1 + 4 * sqrt(2) * steep * sqrt(w + (1 + 10 * w) / 8))
    # At b = k_in / (1 + omega)^2 without rounding; a whole b can only be larger, and gamma with it.
    step = bounds.step
    assert step >= printed * (1 - 1e-9)
    if inner / (1 + w) ** 2 > 1:
        assert step == pytest.approx(printed, rel=0.5)
    field, h = bounds.means(step, 7)
    assert field == pytest.approx(2 * c["gap"] / (c["v_min"] * step * inner * 7))
    ratio = step**2 * c["lipschitz"] ** 2 * inner / bounds.batch_size / n
    assert h == pytest.approx(2 * (1 + ratio) * field)


@given(constants, omegas, st.integers(1, 10**6))
def test_the_corollary_is_theorem_1_at_its_own_step(c: dict[str, Any], w: float, k: int) -> None:
    bounds = FedEMBounds(Problem(**c), w)
    step = bounds.step(k)
    assert step <= bounds.step_limit.largest
    assert bounds.bound(step, k) <= bounds.corollary(k) * 1.001


@given(constants, omegas, st.floats(1e-6, 1e-1), st.floats(0.05, 1))
def test_rounds_to_epsilon_solve_the_corollary(
    c: dict[str, Any], w: float, epsilon: float, p: float
) -> None:
    bounds = FedEMBounds(Problem(**c), w, p)
    rounds = bounds.rounds(epsilon).needed
    assert bounds.corollary(rounds) <= epsilon * 1.001
    if rounds > 100:
        assert bounds.corollary(rounds // 2) > epsilon


@given(constants, st.integers(1, 100), st.floats(0.01, 10))
def test_unequal_workers_of_equal_weight_are_equal(c: dict[str, Any], k: int, w: float) -> None:
    n = c["workers"]
    lists = c | {
        "workers": [float(k)] * n,
        "lipschitz": [c["lipschitz"]] * n,
        "variance": [c["variance"]] * n,
    }
    same, other = FedEMBounds(Problem(**c), w), FedEMBounds(Problem(**lists), w)
    step = same.step_limit.largest
    assert other.step_limit.largest == pytest.approx(step)
    bound = same.bound(step * 0.9, 10)
    assert other.bound(step * 0.9, 10) == pytest.approx(bound)


def test_regimes_table() -> None:
    quiet = Problem(10_000, 1.0, 1.0, 1.0, variance=0.0)
    assert FedEMBounds(quiet, 3.0).slowdown(1e-3) == 1  # many workers, low noise: x 1
    few = Problem(4, 1.0, 1.0, 1.0, variance=0.0)
    ratio = FedEMBounds(few, 400.0).slowdown(1e-3) / FedEMBounds(few, 100.0).slowdown(1e-3)
    assert ratio == pytest.approx(8, rel=0.02)  # x omega^(3/2) / sqrt(n)
    more = Problem(16, 1.0, 1.0, 1.0, variance=0.0)
    halved = FedEMBounds(few, 400.0).slowdown(1e-3) / FedEMBounds(more, 400.0).slowdown(1e-3)
    assert halved == pytest.approx(2)
    noisy = Problem(10_000, 1.0, 1.0, 1.0, variance=1e6)
    assert FedEMBounds(noisy, 3.0).rounds(1e-6).regime == "high noise"
    ratio = FedEMBounds(noisy, 8.0).slowdown(1e-6) / FedEMBounds(noisy, 4.0).slowdown(1e-6)
    assert ratio == pytest.approx(41 / 21)  # x omega


def test_inner_rounds_minimise_the_conditional_expectations() -> None:
    omega, m, n = 2.0, 5000, 10

    def cost(inner: float) -> float:
        return n * (m / inner + 2 * inner / (1 + omega) ** 2)

    best = theory.vr_inner_rounds(m, omega)
    assert cost(best) <= min(cost(k) for k in range(1, 1000)) * 1.001
    bounds = VRBounds(Problem(n, 1.0, 1.0, 1.0), omega, best)
    rounding = 2 * n * best * (bounds.batch_size - best / 9)  # a batch is a whole number
    printed = bounds.evaluations(best, m, skipped=False)
    assert printed == pytest.approx(best * cost(best) + rounding)
    bounds = VRBounds(Problem(100, 1.0, 1.0, 1.0), omega, 4, batch=20)
    ours = bounds.evaluations(4, 100)  # one outer loop of four inner rounds
    assert ours == 100 * (100 + 3 * 2 * 20)
    assert bounds.evaluations(4, 100, skipped=False) / ours == pytest.approx(1.18, abs=0.01)


@given(constants, omegas, st.floats(0.05, 1), st.floats(0, 10), st.floats(0, 10))
def test_recursions_on_memories_as_printed(
    c: dict[str, Any], w: float, p: float, error: float, field: float
) -> None:
    bounds, n = FedEMBounds(Problem(**c), w, p), c["workers"]
    silent, rate = w + (1 - p) * (1 + w) / p, 1 / (1 + w)
    noise = silent / n * (error * n + c["variance"]) + c["variance"] / n
    assert bounds.variance(error) == pytest.approx(noise)
    step = 0.5 * bounds.step_limit.largest
    steep = 2 * step**2 * c["lipschitz"] ** 2 / (rate * p)
    printed = (1 - rate * p / 2 + steep * silent / n) * error * n + steep * field
    printed += (2 * rate * p + steep * (1 + silent) / n) * c["variance"]
    found = bounds.memory_step(step, error, field)
    assert found == pytest.approx(printed / n)


@given(constants, omegas, st.floats(0.05, 1), st.floats(0, 0.9))
def test_falling_steps_are_bounded_and_constant_ones_no_worse_than_theorem_1(
    c: dict[str, Any], w: float, p: float, power: float
) -> None:
    bounds = FedEMBounds(Problem(**c), w, p)
    largest = 0.9 * bounds.step_limit.largest
    constant = bounds.decreasing_bound(np.full(40, largest))
    assert constant <= bounds.bound(largest, 40) * 1.001
    falling = bounds.decreasing_bound(largest / np.arange(1, 41) ** power)
    assert np.isfinite(falling)
    with pytest.raises(emfed.SettingsError, match="never grow"):
        bounds.decreasing_bound(np.array([0.1, 0.2]) * largest)
    limit = bounds.step_limit.compression
    with pytest.raises(emfed.SettingsError, match="gamma_max"):
        bounds.decreasing_bound(np.array([1.1 * limit]))


@given(constants, omegas, st.floats(0.05, 1), st.floats(0, 0.9), st.floats(0, 10))
def test_falling_steps_follow_from_the_recursions(
    c: dict[str, Any], w: float, p: float, power: float, error: float
) -> None:
    """Step by step: W + C_k G falls by what |h|^2 weighs, up to the noise (proof of Theorem 1)."""
    problem, smooth = Problem(**c), c["smoothness"]
    bounds = FedEMBounds(problem, w, p)
    # The decrement of W and the growth of C G, with |h|^2 = 1 or sigma^2 = 1 alone.
    field, noise = (FedEMBounds(replace(problem, variance=v), w, p) for v in (0.0, 1.0))
    silent, learnt = theory.participating(w, p), p / (1 + w)
    steps = 0.9 * bounds.step_limit.largest / np.arange(1, 21) ** power
    left, right = 0.0, c["gap"] + 2 * smooth / learnt * silent * steps[0] ** 2 * error
    for step in steps:
        price = 2 * smooth / learnt * silent * step**2  # C_k, of G / n
        field_price = step * c["v_min"] - step**2 * smooth / 2
        field_price -= price * field.memory_step(step, 0.0, 1.0)
        noise_price = step**2 * smooth / 2 * noise.variance(0.0)
        noise_price += price * noise.memory_step(step, 0.0, 0.0)
        # What is left of the error of memories must be paid for by their contraction.
        kept = price * field.memory_step(step, 1.0, 0.0)
        assert step**2 * smooth / 2 * silent + kept <= price * (1 + 1e-9) + 1e-300
        left, right = left + field_price, right + noise_price * c["variance"]
    found = bounds.decreasing_bound(steps, memory_error=error)
    assert found == pytest.approx(right / left, rel=1e-9)


@pytest.mark.parametrize("p", [1.0, 0.4])
def test_the_recursions_hold_for_a_literal_run(p: float) -> None:
    """h affine, h_i(s) = kappa (c_i - s): Algorithm 1 by hand, 4,000 copies side by side."""
    n, d, kappa, keep, sigma = 6, 8, 0.5, 2, 0.3
    dice = np.random.default_rng(4)
    omega, rate, copies = d / keep - 1, keep / d, 4000
    centres = 3 * dice.normal(size=(n, d))
    bounds = FedEMBounds(Problem(n, kappa, kappa, 1.0, variance=d * sigma**2), omega, p)
    step = bounds.step_limit.largest
    here, memory = np.zeros((copies, d)), np.zeros((copies, n, d))
    for _ in range(30):
        fields = kappa * (centres - here[:, None])
        before = float(((memory - fields) ** 2).sum(axis=-1).mean() / n)
        squared_h = float((fields.mean(axis=1) ** 2).sum(axis=-1).mean())
        delta = fields + sigma * dice.normal(size=fields.shape) - memory
        kept = np.argsort(dice.random(fields.shape), axis=-1) < keep
        sent = np.where(kept, delta * d / keep, 0.0) * (dice.random((copies, n, 1)) < p)
        guess = memory.mean(axis=1) + sent.mean(axis=1) / p
        variance = float(((guess - fields.mean(axis=1)) ** 2).sum(axis=-1).mean())
        assert variance <= 1.05 * bounds.variance(before)
        assert variance >= 0.5 * bounds.variance(before)  # no idle bound
        here, memory = here + step * guess, memory + rate * sent
        fields = kappa * (centres - here[:, None])
        after = float(((memory - fields) ** 2).sum(axis=-1).mean() / n)
        assert after <= 1.02 * bounds.memory_step(step, before, squared_h)


def test_memories_of_vr_fedem_obey_their_cesaro_bound() -> None:
    """Algorithm 2 by hand at Theorem 3's settings, 500 copies: the mean of G is below its bound."""
    n, m, d, kappa, keep, inner, outer = 5, 16, 8, 0.5, 4, 8, 12
    dice = np.random.default_rng(5)
    omega, copies = d / keep - 1, 500
    rows = dice.normal(size=(n, m, d)) + 3 * dice.normal(size=(n, 1, d))
    means = rows.mean(axis=1)
    gap = 0.5 * kappa * float((means.mean(axis=0) ** 2).sum())
    bounds, rate = VRBounds(Problem(n, kappa, kappa, gap), omega, inner), keep / d
    step = bounds.step
    here, memory = np.zeros((copies, d)), np.zeros((copies, n, d))
    start = theory.memory_error(np.full(n, 1 / n), kappa * means, 0.0)
    errors, checked = [], 0
    for _ in range(outer):
        held, before, moved = here[:, None] * (1 - kappa) + kappa * means, here, 0.0
        for _ in range(inner):
            # s-bar_ij(T(s)) = (1 - kappa) s + kappa y_ij: differences do not depend on the rows
            held = held + (1 - kappa) * (here - before)[:, None]
            delta = held - here[:, None] - memory
            kept = np.argsort(dice.random(delta.shape), axis=-1) < keep
            sent = np.where(kept, delta * d / keep, 0.0)
            guess = memory.mean(axis=1) + sent.mean(axis=1)
            fields = kappa * (means - here[:, None])
            error = ((memory - fields) ** 2).sum(axis=-1).mean(axis=1) / n
            size = float((guess**2).sum(axis=-1).mean())
            blur = float(((guess - fields.mean(axis=1)) ** 2).sum(axis=-1).mean())
            bound = bounds.variance(step, float(error.mean()), moved)
            assert blur <= 1.05 * bound
            before, here, memory = here, here + step * guess, memory + rate * sent
            fields = kappa * (means - here[:, None])
            after = float((((memory - fields) ** 2).sum(axis=-1).mean(axis=1) / n).mean())
            promised = bounds.memory_step(step, float(error.mean()), size, moved)
            assert after <= 1.02 * promised
            checked += 1
            moved += size
            errors.append(after)
    assert checked == inner * outer
    assert np.mean(errors) <= bounds.memory_bound(outer, start)
    assert np.mean(errors) >= 0.05 * bounds.memory_bound(outer, start)


def test_steps_beyond_the_theorem_are_refused() -> None:
    problem = Problem(10, 1.0, 1.0, 1.0)
    bounds = FedEMBounds(problem, 1.0)
    largest = bounds.step_limit.largest
    with pytest.raises(emfed.SettingsError, match="gamma_max"):
        bounds.bound(1.01 * largest, 10)
    with pytest.raises(emfed.SettingsError, match="1 / \\(1 \\+ omega\\)"):
        FedEMBounds(problem, 1.0, rate=0.6)
    with pytest.raises(emfed.SettingsError, match="Lambda_star"):
        VRBounds(problem, 1.0, 10, 3).means(10.0, 10)
    for bad in ({"v_min": 0.0}, {"gap": -1.0}, {"variance": [1.0, 2.0]}, {"lipschitz": np.nan}):
        with pytest.raises(emfed.SettingsError):
            Problem(**({"workers": 3, "lipschitz": 1.0, "smoothness": 1.0, "gap": 1.0} | bad))


def test_omega_and_its_norm() -> None:
    model = emfed.gaussian_mixture(2, "tied")
    run = emfed.fitting.open_run(model, np.random.default_rng(0).normal(size=(50, 2)))
    layout = run.model.layout
    exact = theory.omega_of(emfed.RandomSparsification(0.5), layout, in_metric=True)
    assert exact == theory.Omega(1.0, "metric", True)
    assert theory.omega_of(emfed.SubtractiveDithering(0.3), layout).exact
    bound = theory.omega_of(emfed.block_quantization(4), layout)
    assert bound.value == pytest.approx(1.0)
    assert bound.norm == "euclidean"
    assert not bound.exact
    assert theory.omega_of(emfed.Identity(), 7) == theory.Omega(0.0, "euclidean", True)


# Runs on the model whose constants are known.

D, M, KAPPA = 10, 40, 0.5


def _workers(n: int, seed: int) -> tuple[emfed.data.WorkerData, float]:
    """Heterogeneous workers, and sigma^2 of one row, the same for all of them."""
    rows = np.random.default_rng(seed).normal(size=(n, M, D))
    rows = (rows - rows.mean(axis=1, keepdims=True)) / rows.std(axis=1, keepdims=True)
    rows += 3 * np.random.default_rng(seed + 1).normal(size=(n, 1, D))
    return emfed.data.WorkerData(rows.reshape(n * M, D), np.arange(0, n * M + 1, M)), KAPPA**2 * D


def _averages(
    algorithm: Any, data: emfed.data.WorkerData, seeds: int, rounds: int, p: float
) -> Any:
    """Means over rounds and seeds of |h|^2 and |H|^2."""
    values = []
    for seed in range(seeds):
        records = plain_fit(
            LinearGaussian(KAPPA),
            data,
            algorithm,
            start=Location(np.full(D, 3.0)),
            start_statistics="parameters",
            participation=emfed.algorithms.Bernoulli(p),
            rounds=rounds,
            seed=seed,
            monitor=emfed.fitting.Monitor(objective=False),
        ).records
        values.append([records.average("squared_h"), records.average("squared_H")])
    return np.mean(values, axis=0)


def _problem(data: emfed.data.WorkerData, variance: float) -> tuple[Problem, float]:
    """All constants in closed form, and G_0 / n for memories at zero."""
    means = data.rows.reshape(data.size, M, D).mean(axis=1)
    start = np.full(D, 3.0)
    gap = KAPPA * float(((means.mean(axis=0) - start) ** 2).sum()) / 2
    zero = theory.memory_error(np.full(data.size, 1 / data.size), KAPPA * (means - start))
    return Problem(data.size, KAPPA, KAPPA, gap, variance=variance), zero


@pytest.mark.parametrize(("n", "p", "start"), first([(5, 0.5, "zero"), (20, 1.0, "mean-field")]))
def test_theorem_1_holds_in_runs(n: int, p: float, start: Any) -> None:
    data, sigma2 = _workers(n, n)
    problem, zero = _problem(data, sigma2 / 4)
    bounds = FedEMBounds(problem, 1.0, p)
    operator = emfed.RandomSparsification(5)  # omega = 1, exactly
    for share in (1.0, 0.2):
        step = share * bounds.step_limit.largest
        algorithm = emfed.FedEM(
            operator, step_size=step, batch_size=4, replacement=True, memory_start=start
        )
        measured, _ = _averages(algorithm, data, 8, 200, p)
        error = 0.0 if start == "mean-field" else zero
        bound = bounds.bound(step, 200, memory_error=error)
        assert measured <= bound
        assert measured >= bound / 100  # the bound is not empty either


def test_theorem_3_holds_in_runs() -> None:
    data, _ = _workers(20, 3)
    problem, zero = _problem(data, 0.0)
    inner = theory.vr_inner_rounds(M, 1.0)
    bounds = VRBounds(problem, 1.0, inner)
    step = bounds.step
    for start in ("mean-field", "zero"):
        algorithm = emfed.VRFedEM(
            emfed.RandomSparsification(5),
            step_size=step,
            batch_size=bounds.batch_size,
            inner_rounds=inner,
            memory_start=start,
        )
        h, field = _averages(algorithm, data, 10, 10 * inner, 1.0)
        error = 0.0 if start == "mean-field" else zero
        on_field, on_h = bounds.means(step, 10, error)
        assert on_field / 100 <= field <= on_field
        assert on_h / 100 <= h <= on_h


@pytest.mark.parametrize(
    ("step", "omega", "n", "p"),
    first(
        [
            (0.05, 1.0, 10, 0.5),
            (0.2, 3.0, 40, 1.0),
            (0.05, 0.25, 10, 1.0),
            (0.2, 0.25, 10, 1.0),
            (0.05, 1.0, 10, 1.0),
            (0.2, 1.0, 40, 1.0),
            (0.1, 0.25, 40, 0.3),
            (0.05, 3.0, 40, 0.5),
        ]
    ),
)
def test_the_noise_floor(step: float, omega: float, n: int, p: float) -> None:
    """|h|^2 settles within 15% of the formula, and within 8% of the exact moments."""
    data, sigma2 = _workers(n, 7)
    operator = emfed.SubtractiveDithering(omega)
    algorithm = emfed.FedEM(operator, step_size=step, batch_size=1, replacement=True)
    records = plain_fit(
        LinearGaussian(KAPPA),
        data,
        algorithm,
        participation=emfed.algorithms.Bernoulli(p),
        rounds=8000,
        seed=1,
        monitor=emfed.fitting.Monitor(objective=False),
    ).records
    measured = records[2000:].average("squared_h")
    assert measured == pytest.approx(theory.noise_floor(step, KAPPA, sigma2, n, omega, p), rel=0.15)
    exact = theory.settled_mean_field(step, KAPPA, sigma2, n, omega, p)
    assert measured == pytest.approx(exact, rel=0.08)


def test_exact_moments_are_the_formula_for_small_steps() -> None:
    for omega, p in ((0.5, 1.0), (4.0, 0.3)):
        args = (1e-4, 0.7, 2.0, 30, omega, p)
        assert theory.settled_mean_field(*args) == pytest.approx(theory.noise_floor(*args), 1e-2)
    assert theory.settled_mean_field(1.9, 1.0, 1.0, 1, 50.0) == np.inf


def test_without_memory_noise_the_floor_would_be_missed() -> None:
    """The 2 of 1 + 2 omega_p is the memories': the test above would fail without it."""
    step, omega, n = 0.05, 3.0, 40
    right = theory.noise_floor(step, KAPPA, 1.0, n, omega)
    wrong = step * KAPPA * (1 + omega) / (n * (2 - step * KAPPA))
    assert abs(wrong / right - 1) > 0.15
