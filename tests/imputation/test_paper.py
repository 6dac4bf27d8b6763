"""Mode ``paper`` against the printed pseudo-code, written out with dense tables."""

from __future__ import annotations

from math import isqrt
from typing import Any

import numpy as np
import pytest

import emfed
from emfed.core.streams import Purpose, choose_distinct, uniforms
from emfed.imputation import FieldTable, Structure, impute
from emfed.imputation.paper import PaperRun
from emfed.imputation.sweeps import Solver
from tests.imputation.tables import small_table

GAMMA, ALPHA, BATCH, RANK, SEED = 0.3, 0.2, 16, 2, 11
QUANTISER = emfed.block_quantization(4)


def literal(table: FieldTable, rounds: int) -> tuple[Any, Any, Any, Any]:
    """Lines 3890-3925, variable by variable."""
    n, (rows, columns) = len(table.workers), table.shape
    observed = np.zeros((n, rows, columns), dtype=bool)
    y = np.zeros((n, rows, columns))
    for c in range(n):
        part = slice(table.offsets[c], table.offsets[c + 1])
        observed[c, table.site[part], table.time[part]] = True
        y[c, table.site[part], table.time[part]] = table.values[part] / table.weights[part]
    s, theta = np.zeros((rows, columns)), np.zeros((rows, columns))
    v_c, v = np.zeros((n, rows, columns)), np.zeros((rows, columns))
    for k in range(1, rounds + 1):
        quantised = np.zeros((n, rows, columns))
        for c in range(n):
            one = np.array([c])
            high = isqrt(BATCH)
            wide = BATCH // high
            u = uniforms(SEED, k, Purpose.BATCH, one, high + wide)
            some_sites = np.sort(choose_distinct(u[:, :high], np.array([rows]))[0])
            some_times = np.sort(choose_distinct(u[:, high:], np.array([columns]))[0])
            delta = []
            for i in some_sites:
                for j in some_times:
                    estimate = y[c, i, j] if observed[c, i, j] else theta[i, j]
                    delta.append(estimate - s[i, j] - v_c[c, i, j])
            u = uniforms(SEED, k, Purpose.COMPRESSION, one, QUANTISER.draws(len(delta)))
            message = QUANTISER.compress(np.array([delta]), u)
            sent = QUANTISER.decompress(message, u, len(delta))[0]
            quantised[c][np.ix_(some_sites, some_times)] = sent.reshape(high, wide)
            v_c[c] = v_c[c] + ALPHA * quantised[c]
        h = v + quantised.mean(axis=0)
        s = s + GAMMA * h
        v = v + ALPHA * quantised.mean(axis=0)
        left, values, right = np.linalg.svd(s)
        theta = (left[:, :RANK] * values[:RANK]) @ right[:RANK]
    return s, v, v_c, theta


def dense(grown: Any, shape: tuple[int, int]) -> Any:
    out = np.zeros(shape)
    out.ravel()[grown.keys] = grown.values
    return out


def run_of(table: FieldTable, **options: Any) -> PaperRun:
    structure = Structure(RANK, 0.0, effects=False)
    return PaperRun(table, Solver(table.family, structure), SEED, **options)


def test_it_equals_the_printed_pseudo_code_entry_by_entry() -> None:
    table = small_table(sites=10, months=12, workers=3, records=90)
    run = run_of(table, compressor=QUANTISER, step_size=GAMMA, memory_rate=ALPHA, batch_size=BATCH)
    for _ in range(40):
        run.step()
    s, v, v_c, theta = literal(table, 40)
    shape = table.shape
    assert np.abs(theta).max() > 0.1  # it moved
    assert np.allclose(dense(run.statistics, shape), s, atol=1e-9)
    assert np.allclose(dense(run.memory, shape), v, atol=1e-9)
    for c, memory in enumerate(run.memories):
        assert np.allclose(dense(memory, shape), v_c[c], atol=1e-9)
    assert np.allclose(run.params.dense(np.arange(shape[0])), theta, atol=1e-8)


def test_the_settings_of_the_paper_hardly_move() -> None:
    table = emfed.imputation.simulate_table(5980, seed=0)
    result = impute(table, mode="paper", rounds=15)
    assert result.records[-1].step_size == 1e-4
    assert np.abs(result.params.sites).max() * np.abs(result.params.times).max() < 1e-2
    moved = impute(table, mode="paper", rounds=15, batch="observations")
    assert 0 < np.abs(moved.params.sites).max() * np.abs(moved.params.times).max() < 1e-2


def test_what_it_refuses() -> None:
    table = small_table()
    with pytest.raises(emfed.SettingsError, match="batch must be one of grid, obs"):
        run_of(table, batch="rows")
    with pytest.raises(emfed.SettingsError, match="full participation"):
        impute(table, mode="paper", participation=emfed.algorithms.Bernoulli(0.5))
    with pytest.raises(emfed.SettingsError, match="Gaussian .*, with factors alone"):
        impute(small_table("poisson"), mode="paper", rounds=1)
