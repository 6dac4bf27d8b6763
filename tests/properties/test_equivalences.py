"""The algorithms fall together where the paper says they do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import emfed
from emfed.algorithms.steps import batch_indices
from emfed.core.streams import Purpose, uniforms
from tests.helpers import KINDS, bind, fit, make_data, make_model
from tests.literal import literal_fedem, literal_vr_fedem

kinds = st.sampled_from(KINDS)
seeds = st.integers(0, 2**32)


@settings(max_examples=30)
@given(
    kind=kinds,
    seed=seeds,
    rate=st.floats(0, 1),
    start=st.sampled_from(["zero", "mean-field"]),
    weights=st.sampled_from(["samples", "uniform"]),
)
def test_uncompressed_full_fedem_is_em_for_any_memory_rate(
    kind: str, seed: int, rate: float, start: Any, weights: str
) -> None:
    tables = make_data(seed % 50)
    options: dict[str, Any] = {"rounds": 15, "seed": seed, "weights": weights}
    em = fit(make_model(kind), tables, emfed.EM(), **options)
    algorithm = emfed.FedEM(memory_rate=rate, memory_start=start)
    got = fit(make_model(kind), tables, algorithm, **options)
    np.testing.assert_allclose(got.statistics, em.statistics, atol=1e-9)


@settings(max_examples=30)
@given(
    kind=kinds,
    seed=seeds,
    inner=st.integers(1, 7),
    p=st.floats(0.3, 1),
    start=st.sampled_from(["zero", "mean-field"]),
)
def test_full_batch_vr_fedem_is_fedem_with_full_passes(
    kind: str, seed: int, inner: int, p: float, start: Any
) -> None:
    tables = make_data(seed % 50)
    common: dict[str, Any] = {
        "compressor": emfed.Dithering(4, block="row"),
        "step_size": 0.1,
        "memory_start": start,
    }
    options: dict[str, Any] = {
        "rounds": 12,
        "seed": seed,
        "participation": emfed.algorithms.Bernoulli(p),
    }
    plain = fit(make_model(kind), tables, emfed.FedEM(**common), **options)
    reduced = emfed.VRFedEM(batch_size=60, inner_rounds=inner, replacement=False, **common)
    got = fit(make_model(kind), tables, reduced, **options)
    np.testing.assert_allclose(got.statistics, plain.statistics, rtol=1e-7, atol=1e-7)


def spider_em(
    model: Any, rows: Any, statistics: Any, gamma: float, inner: int, rounds: int, batch: Any
) -> Any:
    """SPIDER-EM (Fort, Moulines, Wai 2020) for one data set, as its authors write it."""
    previous = model.maximize(statistics)
    for k in range(rounds):
        params = model.maximize(statistics)
        if k % inner == 0:
            estimate = model.expected_statistics(rows, params)
        else:
            picked = rows[batch(k + 1)]
            estimate = (
                estimate
                + model.expected_statistics(picked, params)
                - model.expected_statistics(picked, previous)
            )
        previous = params
        statistics = statistics + gamma * (estimate - statistics)
    return statistics


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("replacement", [True, False])
def test_one_worker_without_compression_is_spider_em(kind: str, replacement: bool) -> None:
    rows = make_data(5, sizes=(80,))[0]
    seed, gamma, inner, rounds = 11, 0.3, 6, 25
    algorithm = emfed.VRFedEM(
        step_size=gamma, batch_size=10, inner_rounds=inner, replacement=replacement
    )
    run = emfed.fitting.open_run(
        make_model(kind), [rows], algorithm, seed=seed, start="moments", tol=0
    )
    start = run.statistics
    for _ in range(rounds):
        run.step()

    def batch(round_: int) -> Any:
        zero = np.zeros(1, dtype=np.int64)
        return batch_indices(seed, round_, zero, np.array([80]), 10, replacement)[0][0]

    want = spider_em(run.model, rows, start, gamma, inner, rounds, batch)
    np.testing.assert_allclose(run.statistics, want, atol=1e-11)


@pytest.mark.parametrize("name", ["FedEM", "VR-FedEM"])
@pytest.mark.parametrize("weights", ["uniform", "samples"])
@pytest.mark.parametrize("replacement", [True, False])
def test_literal_transcription_of_the_paper(name: str, weights: str, replacement: bool) -> None:
    """A second implementation, written from the paper alone, gives the same trajectory."""
    tables = make_data(8, sizes=(12, 20, 9, 15, 30))
    n, k, d, rounds, seed, size, inner = 5, 3, 2, 20, 77, 6, 4
    probabilities = np.array([0.9, 0.5, 1.0, 0.7, 0.6])
    participation = emfed.algorithms.Bernoulli(probabilities)
    operator = emfed.Dithering(2, np.inf, block=4)
    common: dict[str, Any] = {
        "compressor": operator,
        "step_size": 0.2,
        "memory_rate": 0.4,
        "memory_start": "mean-field",
        "batch_size": size,
        "replacement": replacement,
    }
    algorithm = (
        emfed.FedEM(**common) if name == "FedEM" else emfed.VRFedEM(inner_rounds=inner, **common)
    )
    run = emfed.fitting.open_run(
        make_model("known"),
        tables,
        algorithm,
        seed=seed,
        start="moments",
        weights=weights,
        participation=participation,
        tol=0,
    )
    frame = run.model.constants.frame
    inside = [(t - frame.origin) / frame.scale for t in tables]
    sigma = run.params.covariances
    s0 = run.statistics
    theta = run.params
    v0 = [run.model.expected_statistics(t, theta) - s0 for t in tables]

    def quantise(round_: int, worker: int, x: Any) -> Any:
        u = uniforms(seed, round_, Purpose.COMPRESSION, np.array([worker]), len(x))
        return operator.decompress(operator.compress(x[None], u), u, len(x))[0]

    def batch(round_: int, worker: int) -> Any:
        count = np.array([len(tables[worker])])
        indices, _ = batch_indices(seed, round_, np.array([worker]), count, size, replacement)
        return indices[0].tolist()

    def active(round_: int) -> Any:
        return participation.draw(seed, round_, n).tolist()

    arguments = (inside, run.weights, probabilities, sigma, k, s0, v0, 0.2, 0.4, rounds)
    if name == "FedEM":
        want = literal_fedem(*arguments, active, batch, quantise)
    else:
        want = literal_vr_fedem(*arguments, inner, active, batch, quantise)
    for round_ in range(rounds):
        record = run.step()
        np.testing.assert_allclose(run.statistics, want["S"][round_], atol=1e-9)
        np.testing.assert_allclose(run.memory, want["V"][round_], atol=1e-9)
        h = want["H"][round_]
        assert record.squared_H == pytest.approx(float(h @ h), rel=1e-6, abs=1e-12)
    assert d * k + k == run.model.layout.size


def test_statistics_travel_in_the_frame() -> None:
    """Compression acts on standardised statistics: units do not change the answer."""
    tables = make_data(1)
    algorithm = emfed.FedEM(emfed.Dithering(2), step_size=0.3)
    a = fit(make_model("full"), tables, algorithm, rounds=20)
    b = fit(make_model("full"), [t * [1e3, 1e-3] + 5 for t in tables], algorithm, rounds=20)
    np.testing.assert_allclose(a.statistics, b.statistics, atol=1e-8)
    np.testing.assert_allclose(a.params.means * [1e3, 1e-3] + 5, b.params.means, rtol=1e-8)
    assert bind(make_model("full"), tables).layout.size == len(a.statistics)
