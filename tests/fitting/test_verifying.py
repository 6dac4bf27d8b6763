"""What is looked at before a run may say that it has converged."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

import emfed
from tests.helpers import make_data, make_model

WHEEZE = (355, 16, 23, 6, 27, 3, 13, 7, 31, 6, 6, 3, 10, 4, 9, 18)
"""Children of Steubenville, Ohio, by whether they wheezed at age 7, 8, 9 and 10 (Ware et al. 1984,
as in R's data set `ohio`): from never to always."""
ROWS = np.repeat(np.array(list(product((0.0, 1.0), repeat=4))), WHEEZE, axis=0)[..., None]
CHILDREN = {str(j): np.random.default_rng(0).permutation(ROWS)[j::4] for j in range(4)}
CHAIN = emfed.hidden_markov(2, emfed.models.Categorical(2))
STATES = replace(
    emfed.fit(CHAIN, CHILDREN, rounds=1).params,
    initial=np.array([0.723, 0.277]),
    transitions=np.array([[0.934, 0.066], [0.281, 0.719]]),
    categorical=np.array([[1 - 2e-5, 2e-5], [0.379, 0.621]]),
)
"""Healthy children never wheeze here: a saddle, from which EM is 100 steps in getting away."""


def test_a_share_near_zero_that_em_brings_back_is_raised() -> None:
    result = emfed.fit(CHAIN, CHILDREN, start=STATES, start_statistics="parameters")
    best = emfed.fit(CHAIN, [ROWS], "em", start=STATES, tol=0, rounds=400)
    assert result.converged
    assert result.log_likelihood(ROWS) > best.log_likelihood(ROWS) - 1e-3
    assert best.params.categorical[0, 1] > 0.03


def test_a_share_that_belongs_at_zero_stays_there() -> None:
    """Nobody of the second kind says yes to the first question: nothing rises."""
    rng = np.random.default_rng(0)
    kind = rng.random((400, 1)) < 0.5
    rows = np.asarray(rng.random((400, 4)) < np.where(kind, 0.7, 0.2), dtype=float)
    rows[:, 0] = np.where(kind[:, 0], rows[:, 0], 0.0)
    model = emfed.mixed_mixture(2, [emfed.models.Categorical(2)] * 4, missing=False)
    data = {str(j): rows[j::4] for j in range(4)}
    ended = emfed.fit(model, data, seed=0)
    assert ended.converged
    assert ended.params.arrays()["categorical"].min() < 1e-3


def saddle() -> list[np.ndarray]:
    """Two clusters, and a start half-way between them, where EM hardly moves."""
    rng = np.random.default_rng(0)
    rows = np.concatenate([rng.normal(-2, 1, (400, 2)), rng.normal(2, 1, (400, 2))])
    return np.array_split(rows[rng.permutation(800)], 4)


@pytest.mark.parametrize("algorithm", ["auto", "em"])
def test_a_saddle_is_no_end(algorithm: str) -> None:
    tables = saddle()
    rows = np.concatenate(tables)
    shift = 0.1 * np.array([[1.0, 1.0], [-1.0, -1.0]])
    start = emfed.models.GaussianParameters(
        np.full(2, 0.5), rows.mean(axis=0) + shift, np.cov(rows.T, bias=True)
    )
    model = emfed.gaussian_mixture(2, "tied")
    result = emfed.fit(model, tables, algorithm, start=start, tol=1e-6, rounds=500)
    assert result.converged
    assert np.abs(result.params.means).min() > 1.5


def test_a_small_field_by_chance_is_not_convergence() -> None:
    """A tolerance so coarse that any field meets it ends the run, but nobody says converged."""
    vague = emfed.VRFedEM(emfed.SubtractiveDithering(0.25), in_metric=True, batch_size=8)
    result = emfed.fit(
        make_model("full"),
        make_data(2, sizes=(60, 80, 50, 70)),
        vague,
        start="moments",
        field_tol=1e3,
        rounds=50,
    )
    assert result.stopped == "tolerance"
    assert not result.converged


@pytest.mark.parametrize("shift", [0.05, 0.01, 0.003])
def test_alone_a_saddle_is_no_end_either(shift: float) -> None:
    rows = np.concatenate(saddle())
    means = rows.mean(axis=0) + shift * np.array([[1.0, 1.0], [-1.0, -1.0]])
    start = emfed.models.GaussianParameters(np.full(2, 0.5), means, np.cov(rows.T, bias=True))
    result = emfed.fit(emfed.gaussian_mixture(2, "tied"), [rows], start=start, tol=1e-6, rounds=99)
    assert result.converged
    assert np.abs(result.params.means).min() > 1.5
