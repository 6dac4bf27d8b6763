"""Who is asked: the declared probabilities are the true ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import emfed
from emfed.algorithms.participation import PARTICIPATIONS
from emfed.core.protocols import Participation
from tests.helpers import plain_fit

N = 40
SCHEMES: list[Any] = [
    emfed.algorithms.Everyone(),
    emfed.algorithms.Bernoulli(0.3),
    emfed.algorithms.Bernoulli(1.0),
    emfed.algorithms.Bernoulli(np.linspace(0.05, 1.0, N)),
    emfed.algorithms.FixedSize(7),
    emfed.algorithms.FixedSize(N),
    emfed.algorithms.Schedule([range(0, N, 2), range(1, N, 2)], 0.5),
]


def test_every_scheme_is_tried() -> None:
    assert {type(s) for s in SCHEMES} == set(PARTICIPATIONS.values())


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: repr(s)[:40])
def test_frequencies_are_the_declared_probabilities(scheme: Participation) -> None:
    rounds = 4000
    hits = np.zeros(N)
    pairs = 0.0
    for round_ in range(1, rounds + 1):
        drawn = scheme.draw(3, round_, N)
        assert np.all(np.diff(drawn) > 0)
        hits[drawn] += 1
        pairs += float(np.isin([0, 1], drawn).all())
    p = scheme.probabilities(np.arange(N), N)
    error = np.abs(hits / rounds - p) / np.sqrt(p * (1 - p) / rounds + 1e-12)
    assert error.max() < 5 or isinstance(scheme, emfed.algorithms.Schedule)
    np.testing.assert_allclose(hits / rounds, p, atol=0.04)
    if isinstance(scheme, emfed.algorithms.Bernoulli):  # independent draws, as the theorem assumes
        both = p[0] * p[1]
        assert abs(pairs / rounds - both) < 5 * np.sqrt(both * (1 - both) / rounds) + 1e-9


@given(st.integers(0, 2**40), st.integers(1, 10**9), st.floats(1e-6, 1), st.integers(1, 3000))
def test_bernoulli_draws_are_valid_and_repeatable(seed: int, round_: int, p: float, n: int) -> None:
    scheme = emfed.algorithms.Bernoulli(p)
    drawn = scheme.draw(seed, round_, n)
    np.testing.assert_array_equal(drawn, scheme.draw(seed, round_, n))
    assert np.all(np.diff(drawn) > 0)
    assert len(drawn) == 0 or (drawn[0] >= 0 and drawn[-1] < n)


def test_rounds_differ_and_seeds_differ() -> None:
    scheme = emfed.algorithms.Bernoulli(0.5)
    base = scheme.draw(1, 1, 1000)
    assert not np.array_equal(base, scheme.draw(1, 2, 1000))
    assert not np.array_equal(base, scheme.draw(2, 1, 1000))


def test_a_round_without_anyone_is_a_round() -> None:
    tables = [np.random.default_rng(i).normal(size=(9, 2)) for i in range(2)]
    result = plain_fit(
        emfed.gaussian_mixture(2, "diag"),
        tables,
        emfed.FedEM(emfed.Dithering(), step_size=0.2),
        participation=emfed.algorithms.Bernoulli(0.05),
        rounds=50,
    )
    answered = result.records.column("answered")[1:]
    assert (answered == 0).any()
    assert np.isfinite(result.statistics).all()
