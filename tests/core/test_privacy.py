"""The accountant against Google's, and the sampler against its distribution."""

from __future__ import annotations

from functools import partial, reduce

import numpy as np
import pytest
from scipy.stats import chisquare, kstest

from emfed.core.errors import SettingsError
from emfed.core.noise import NoiseKey
from emfed.core.privacy import (
    DEVIATION,
    Bits,
    Privacy,
    delta_of,
    discrete_gaussian,
    epsilon_of,
    kept_square,
    mu_squared_of,
    price,
    price_on,
    step_for,
)
from emfed.core.streams import Purpose, word_source


def bits(seed: int) -> partial[np.ndarray]:
    return partial(word_source(seed, 0, Purpose.TESTING, 0))


@pytest.mark.parametrize("m", [1, 2, 4])
def test_small_noise_has_the_probabilities_of_a_discrete_gaussian(m: int) -> None:
    drawn = discrete_gaussian(200_000, bits(m), m)
    values = np.arange(-4 * 2**m, 4 * 2**m + 1)
    weights = np.exp(-(values**2) / (2 * 4.0**m))
    inside = drawn[np.abs(drawn) <= values[-1]]
    found = np.bincount(inside - values[0], minlength=len(values))
    assert chisquare(found, weights / weights.sum() * len(inside)).pvalue > 1e-3


@pytest.mark.parametrize("words", [bits(7), NoiseKey.of(b"k" * 32).words(b"about")])
def test_the_noise_that_is_drawn_is_gaussian_to_the_eye(words: Bits) -> None:
    """From the words of a simulation, and from those that a site draws by its secret."""
    drawn = discrete_gaussian(100_000, words) / DEVIATION
    assert kstest(drawn, "norm").pvalue > 1e-3
    assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 0.01


def test_the_noise_is_the_same_from_the_same_words_and_other_for_another_worker() -> None:
    one, two = (discrete_gaussian(50, word_source(3, 0, Purpose.TESTING, w)) for w in (0, 1))
    again = discrete_gaussian(50, word_source(3, 0, Purpose.TESTING, 0))
    assert np.array_equal(one, again)
    assert not np.array_equal(one, two)


@pytest.mark.parametrize("epsilon", [0.01, 0.3, 1.0, 3.0, 10.0])
@pytest.mark.parametrize("delta", [1e-4, 1e-6, 1e-9])
def test_epsilon_and_mu_are_inverse(epsilon: float, delta: float) -> None:
    mu_squared = mu_squared_of(epsilon, delta)
    assert epsilon_of(mu_squared, delta) == pytest.approx(epsilon, rel=1e-9)
    assert delta_of(mu_squared**0.5, epsilon) == pytest.approx(delta, rel=1e-6)


@pytest.mark.parametrize("rounds", [1, 14, 30])
@pytest.mark.parametrize("multiplier", [2.0, 14.0])
def test_gaussian_rounds_cost_what_the_library_says_to_a_millionth(
    rounds: int, multiplier: float
) -> None:
    mechanism = pytest.importorskip("dp_accounting.pld.privacy_loss_mechanism")
    loss = mechanism.GaussianPrivacyLoss(multiplier / rounds**0.5)
    for epsilon in (0.1, 0.5, 1.0):
        mine = delta_of(rounds**0.5 / multiplier, epsilon)
        assert mine == pytest.approx(loss.get_delta_for_epsilon(epsilon), abs=1e-9, rel=1e-6)
        if 1e-12 < mine < 0.4:
            assert epsilon_of(rounds / multiplier**2, mine) == pytest.approx(epsilon, abs=1e-6)


@pytest.mark.parametrize(("deviation", "steps"), [(8, 1), (16, 3), (64, 20)])
def test_integers_never_cost_more_than_the_accountant_says(deviation: int, steps: int) -> None:
    pld = pytest.importorskip("dp_accounting.pld.privacy_loss_distribution")
    exact = pld.from_discrete_gaussian_mechanism(
        deviation, steps, pessimistic_estimate=False, value_discretization_interval=1e-4
    ).self_compose(8)
    cost = 8 * price(steps, 1, deviation)
    for epsilon in (0.2, 1.0, 3.0):
        assert delta_of(cost**0.5, epsilon) >= exact.get_delta_for_epsilon(epsilon) - 1e-12


@pytest.mark.parametrize(("shares", "steps"), [(2, 1), (3, 12), (9, 30)])
def test_sums_of_draws_never_cost_more_than_the_accountant_says(shares: int, steps: int) -> None:
    """What a masked sum has: a draw of each honest site, by the exact convolution of all."""
    pld = pytest.importorskip("dp_accounting.pld.privacy_loss_distribution")
    one = np.exp(-(np.arange(-80, 81) ** 2) / (2 * 8.0**2))
    sums = reduce(np.convolve, [one / one.sum()] * shares)
    with_row, without = (
        {place + moved: float(np.log(chance)) for place, chance in enumerate(sums) if chance > 0}
        for moved in (steps, 0)
    )
    exact = pld.from_two_probability_mass_functions(
        without, with_row, pessimistic_estimate=False, value_discretization_interval=1e-4
    )
    cost = price(steps, shares, 8)
    for epsilon in (0.05, 0.5, 2.0):
        assert delta_of(cost**0.5, epsilon) >= exact.get_delta_for_epsilon(epsilon) - 1e-12


def test_a_lattice_costs_what_it_was_made_for() -> None:
    for q, cost, shares in ((1, 1e-4, 1), (5_000, 1e-3, 9), (660, 0.2, 3)):
        step = step_for(q, cost, shares)
        assert price_on(step, q, shares) <= cost
        assert price_on(step, q, shares) == pytest.approx(cost, rel=1e-6)


@pytest.mark.parametrize(("epsilon", "delta"), [(0, 1e-6), (-1, 1e-6), (1, 0), (1, 0.7)])
def test_budgets_that_are_none_are_refused(epsilon: float, delta: float) -> None:
    with pytest.raises(SettingsError):
        Privacy(epsilon, delta)


@pytest.mark.parametrize(("radius", "d"), [(1.0, 1), (5.1, 20), (2.0, 3), (30.0, 10)])
def test_what_clipping_leaves_of_white_rows_is_what_a_simulation_finds(
    radius: float, d: int
) -> None:
    rows = np.random.Generator(np.random.Philox(4)).normal(size=(20_000, d))
    squares = np.minimum((rows**2).sum(axis=1), radius**2)
    assert kept_square(radius, d) == pytest.approx(squares.mean() / d, rel=0.02)
