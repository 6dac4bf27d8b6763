"""What is looked at before a run may say that it has converged."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

import emfed
from emfed.fitting import rounds
from emfed.fitting.verifying import lifted

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


def at(params: Any, model: Any, data: Any) -> rounds.Run:
    return emfed.fitting.open_run(model, data, start=params, start_statistics="parameters")


def test_a_share_near_zero_that_em_brings_back_is_raised() -> None:
    run = at(STATES, CHAIN, CHILDREN)
    there = lifted(run)
    assert there is not None
    raised = run.model.to_user(run.model.maximize(there)).categorical[0, 1]
    assert 1e-3 < raised < 0.05
    told = run.session.ask("values", run.view, run.model.maximize(there))[0, 0]
    assert told > run.session.ask("values", run.view, run.params)[0, 0]
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
    assert lifted(at(ended.params, model, data)) is None


def test_models_without_shares_are_asked_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = np.random.default_rng(0).normal(np.repeat([[-3.0], [3.0]], 100, axis=0), 1, (200, 2))
    run = emfed.fitting.open_run(
        emfed.gaussian_mixture(2, "full"), {"a": rows[::2], "b": rows[1::2]}
    )
    monkeypatch.setattr(run.session, "ask", None)
    assert lifted(run) is None
