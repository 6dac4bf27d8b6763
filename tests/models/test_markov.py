"""Hidden Markov models: hmmlearn, and all paths counted one by one, are the judges."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import numpy as np
import pytest
from scipy.stats import norm, poisson

import emfed
from emfed.models.chains import filtered_log_densities, smooth
from tests.helpers import bind, plain_fit


def sequences(seed: int = 0, counts: bool = False, k: int = 3) -> list[list[Any]]:
    """Four workers with sequences of unequal length and no missing values."""
    rng = np.random.default_rng(seed)
    stay = 0.7 * np.eye(k) + 0.3 / k
    centres = 3 * rng.normal(size=(k, 2))
    rates = rng.uniform(1, 25, size=(k, 2))
    workers: list[list[Any]] = []
    for count in (8, 5, 12, 3):
        workers.append([])
        for _ in range(count):
            labels = [int(rng.integers(k))]
            for _ in range(int(rng.integers(5, 40))):
                labels.append(int(rng.choice(k, p=stay[labels[-1]])))
            rows = centres[labels] + rng.normal(size=(len(labels), 2))
            workers[-1].append(rng.poisson(rates[labels]).astype(float) if counts else rows)
    return workers


def judge_of(kind: str, start: Any, rounds: int) -> Any:
    """hmmlearn from the same start, without its default priors."""
    hmm = pytest.importorskip("hmmlearn.hmm")  # which has no wheels for Python 3.14
    k = len(start.initial)
    common = {"n_components": k, "n_iter": rounds, "tol": 0.0, "init_params": ""}
    if kind == "gaussian":
        judge = hmm.GaussianHMM(
            covariance_type="diag", covars_prior=0.0, min_covar=0.0, implementation="log", **common
        )
        judge.means_, judge.covars_ = start.gaussian[..., 0], start.gaussian[..., 1]
    else:
        judge = hmm.PoissonHMM(**common)
        judge.lambdas_ = start.poisson
    judge.startprob_, judge.transmat_ = start.initial, start.transitions
    return judge


@pytest.mark.parametrize("kind", ["gaussian", "poisson"])
@pytest.mark.parametrize("rounds", [1, 5, 60])
def test_the_trajectory_is_hmmlearns(kind: str, rounds: int) -> None:
    lists = sequences(1, counts=kind == "poisson")
    tables = emfed.data.pad_sequences(lists)
    flat = [s for worker in lists for s in worker]
    model = emfed.hidden_markov(3, kind, floor=0.0)
    opened = bind(model, tables)
    start = opened.to_user(opened.start(4))
    judge = judge_of(kind, start, rounds)
    rows = np.concatenate(flat)
    if kind == "poisson":
        rows = rows.astype(int)
    sizes = [len(s) for s in flat]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        judge.fit(rows, sizes)
        want = judge.score(rows, sizes)
        posteriors = judge.predict_proba(rows, sizes)
    got = plain_fit(model, tables, emfed.FedEM(), start=start, rounds=rounds - 1)
    whole = np.concatenate(tables)
    assert got.log_likelihood(whole) * len(flat) == pytest.approx(want, rel=1e-9)
    np.testing.assert_allclose(got.params.transitions, judge.transmat_, atol=1e-8)
    np.testing.assert_allclose(got.params.initial, judge.startprob_, atol=1e-8)
    mine = got.predict_proba(whole)
    alive = ~np.isnan(whole).all(axis=-1)
    np.testing.assert_allclose(mine[alive], posteriors, atol=1e-6)
    assert np.all(mine[~alive] == 0)


def brute_force(sequence: Any, user: Any) -> tuple[float, Any, Any]:
    """log p, state posteriors and pair sums over all paths."""
    t, k = len(sequence), len(user.initial)
    total, states, pairs = 0.0, np.zeros((t, k)), np.zeros((k, k))
    for path in itertools.product(range(k), repeat=t):
        p = user.initial[path[0]]
        for before, after in itertools.pairwise(path):
            p *= user.transitions[before, after]
        for step, state in enumerate(path):
            g, rate = user.gaussian[state, 0], user.poisson[state, 0]
            y, count = sequence[step]
            p *= 1 if np.isnan(y) else norm(g[0], np.sqrt(g[1])).pdf(y)
            p *= 1 if np.isnan(count) else poisson(rate).pmf(count)
        total += p
        for step, state in enumerate(path):
            states[step, state] += p
        for before, after in itertools.pairwise(path):
            pairs[before, after] += p
    return float(np.log(total)), states / total, pairs / total


def test_missing_values_and_padding_against_all_paths() -> None:
    nan = np.nan
    lists = [
        [
            np.array([[0.1, 3], [nan, 2], [nan, nan], [2.0, nan], [1.0, 7]]),
            np.array([[1.5, 4]]),
            np.array([[nan, nan], [0.2, 1], [-1.0, 0]]),
        ]
    ]
    tables = emfed.data.pad_sequences(lists)
    model = bind(emfed.hidden_markov(2, ["gaussian", "poisson"]), tables)
    params = model.start(3)
    params = type(params)(
        **{
            **params.arrays(),
            "initial": np.array([0.3, 0.7]),
            "transitions": np.array([[0.6, 0.4], [0.1, 0.9]]),
        }
    )
    user = model.to_user(params)
    want = [brute_force(sequence, user) for sequence in lists[0]]
    np.testing.assert_allclose(
        model.score_samples(tables[0], params), [w[0] for w in want], rtol=1e-10
    )
    shares = model.responsibilities(tables[0], params)
    parts = model.layout.split(model.expected_statistics(tables[0], params))
    for mine, (_, states, _) in zip(shares, want, strict=True):
        np.testing.assert_allclose(mine[: len(states)], states, atol=1e-10)
        assert np.all(mine[len(states) :] == 0)
    pairs = sum(w[2] for w in want) / (3 * model.length)
    np.testing.assert_allclose(parts["transitions"], pairs, atol=1e-10)
    initial = sum(w[1][0] for w in want) / 3
    np.testing.assert_allclose(parts["initial"], initial, atol=1e-10)


def test_long_sequences_do_not_underflow() -> None:
    rng = np.random.default_rng(0)
    logs = -500 + 300 * rng.normal(size=(3, 2, 3000))
    transitions = np.array([[0.9, 0.1, 1e-9], [0.2, 0.7, 0.1], [1e-9, 0.5, 0.5]])
    transitions /= transitions.sum(axis=1, keepdims=True)
    got = smooth(logs, np.full(3, 1 / 3), transitions, np.full(2, 3000.0))
    assert np.isfinite(got.log_densities).all()
    np.testing.assert_allclose(got.states.sum(axis=0), 1, atol=1e-9)
    assert got.pairs.sum() == pytest.approx(2 * 2999)


def test_blocks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = emfed.data.pad_sequences(sequences())
    rows = np.concatenate(tables)
    model = bind(emfed.hidden_markov(3), tables)
    params = model.start(0)
    whole = model.expected_statistics(rows, params), model.score_samples(rows, params)
    monkeypatch.setattr("emfed.models.markov.BLOCK_ELEMENTS", 100)
    np.testing.assert_allclose(model.expected_statistics(rows, params), whole[0], atol=1e-13)
    np.testing.assert_allclose(model.score_samples(rows, params), whole[1], atol=1e-10)


def test_the_size_of_sequences_counts_every_step_of_them() -> None:
    lengths = (20, 35, 50)
    sequences = {
        name: [np.random.default_rng(0).normal(size=(n, 2)) for n in lengths] for name in "ab"
    }
    result = emfed.fit(emfed.hidden_markov(2), emfed.data.pad_sequences(sequences), rounds=2, tol=0)
    assert result.raw_bytes == 8 * 2 * 2 * sum(lengths)


def test_sequences_are_padded_and_bad_ones_told() -> None:
    short, long = np.ones((2, 1)), np.zeros((4, 1))
    alone = emfed.data.pad_sequences([short, long])
    assert alone.shape == (2, 4, 1)
    assert np.isnan(alone[0, 2:]).all()
    named = emfed.data.pad_sequences({"a": [short], "b": [long, short]})
    assert {name: array.shape for name, array in named.items()} == {"a": (1, 4, 1), "b": (2, 4, 1)}
    for bad, words in (
        ([], "expected a list of sequences"),
        ([np.ones(3)], r"expected sequences \(time, columns\)"),
        ([np.ones((2, 1)), np.ones((2, 2))], "different numbers of columns"),
    ):
        with pytest.raises(emfed.DataError, match=words):
            emfed.data.pad_sequences(bad)
    model = emfed.hidden_markov(2, "poisson")
    for data, words in (
        (np.ones((5, 2)), r"expected sequences \(sequences, time, columns\)"),
        (np.full((3, 2, 1), np.nan), "sequence 0 has no value at all"),
        (np.full((3, 2, 1), 0.5), "sequence 0: row 0, column 0 is 0.5"),
        (np.ones((3, 1, 1)), "no chain to fit"),
    ):
        with pytest.raises(emfed.DataError, match=words):
            plain_fit(model, [data])


@pytest.mark.parametrize("own", [False, True], ids=["shared", "own"])
@pytest.mark.parametrize("steps", [128, 401, 1000, 5000])
def test_long_sequences_cut_into_pieces_give_the_same(
    steps: int, own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(steps)
    logs = 3 * rng.normal(size=(2, 4, 3, steps))
    length = rng.integers(1, steps + 1, size=(2, 3)).astype(float)
    length[0, 0] = steps
    logs *= (np.arange(steps) < length[..., None])[:, None]
    lead = (2,) if own else ()
    transitions = rng.dirichlet(np.ones(4), size=(*lead, 4))
    initial = rng.dirichlet(np.ones(4), size=lead)
    weights = rng.uniform(size=(2, 3))
    cut = smooth(logs, initial, transitions, length, weights)
    value = filtered_log_densities(logs, initial, transitions)
    monkeypatch.setattr("emfed.models.chains.SIDE_BY_SIDE", 1)
    whole = smooth(logs, initial, transitions, length, weights)
    for mine, theirs in zip(cut, whole, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(value, whole.log_densities, rtol=1e-10)


def test_hostile_emissions_give_what_scaling_each_step_gives() -> None:
    rng = np.random.default_rng(3)
    steps, k = 600, 3
    logs = 40 * rng.normal(size=(k, 2, steps))
    transitions = np.array(
        [[0.5, 0.5, 0.0], [0.0, 0.5, 0.5], [0.5, 0.0, 0.5]]
    )  # some are impossible
    initial = np.array([1.0, 0.0, 0.0])
    got = smooth(logs, initial, transitions, np.full(2, float(steps)))
    log_alpha = np.log(initial + 1e-320)[:, None] + logs[..., 0]
    with np.errstate(divide="ignore"):
        moves = np.log(transitions)[:, :, None]
    for t in range(1, steps):
        log_alpha = np.logaddexp.reduce(log_alpha[:, None] + moves, axis=0) + logs[..., t]
    want = np.logaddexp.reduce(log_alpha, axis=0)
    np.testing.assert_allclose(got.log_densities, want, rtol=1e-10)
    np.testing.assert_allclose(got.states.sum(axis=0), 1, atol=1e-9)
    assert got.pairs.sum() == pytest.approx(2 * (steps - 1))


def test_families_name_the_exceptions_alone() -> None:
    rng = np.random.default_rng(0)
    steps = np.stack([rng.normal(size=(20, 6)), rng.poisson(3, (20, 6))], axis=-1)
    model = emfed.hidden_markov(2, {1: "poisson"})
    fitted = emfed.fit(model, [steps[:8], steps[8:]], rounds=3, tol=0)
    assert fitted.params.gaussian.shape == (2, 1, 2)
    assert fitted.params.poisson.shape == (2, 1)
    with pytest.raises(emfed.SettingsError, match="families names 2, which is not among"):
        emfed.fit(emfed.hidden_markov(2, {2: "poisson"}), steps)
    named = emfed.hidden_markov(2, {"visits": "poisson"}).among(["heat", "visits"])
    assert [family.name for family in named.columns.families] == ["gaussian", "poisson"]
