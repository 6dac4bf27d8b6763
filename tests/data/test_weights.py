"""A row's weight is how often it counts, wherever rows are summed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import emfed
from emfed.data import tables as tables_module
from emfed.data.sources import Source
from tests.helpers import KINDS, make_data, make_model, plain_fit
from tests.registry import REGISTRY

TABLES = make_data(1, sizes=(30, 45, 20))
RNG = np.random.default_rng(0)
WEIGHTS = [RNG.integers(0, 4, size=len(t)).astype(float) for t in TABLES]
REPEATED = [np.repeat(t, w.astype(int), axis=0) for t, w in zip(TABLES, WEIGHTS, strict=True)]


def reached(model: Any, data: Any, algorithm: Any = None, **options: Any) -> Any:
    return plain_fit(model, data, algorithm, rounds=12, seed=2, **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("federation", ["stacked", "loop"])
def test_weights_repeat_rows(kind: str, federation: Any) -> None:
    weighted = reached(make_model(kind), TABLES, sample_weight=WEIGHTS, federation=federation)
    repeated = reached(make_model(kind), REPEATED, federation=federation)
    np.testing.assert_allclose(weighted.statistics, repeated.statistics, atol=1e-10)
    np.testing.assert_allclose(weighted.worker_weights, repeated.worker_weights)
    assert weighted.samples == repeated.samples == sum(w.sum() for w in WEIGHTS)


@pytest.mark.parametrize(
    "name", [n for n in REGISTRY if "chain" not in n and ("NaN" in n or "factors" in n)]
)
def test_weights_repeat_rows_of_every_kind_of_model(name: str) -> None:
    entry = REGISTRY[name]
    weights = [1.0 + (np.arange(len(t)) % 3) for t in entry.tables]
    pairs = zip(entry.tables, weights, strict=True)
    repeated = [np.repeat(t, w.astype(int), axis=0) for t, w in pairs]
    first = reached(entry.make(), entry.tables, sample_weight=weights)
    second = reached(entry.make(), repeated)
    np.testing.assert_allclose(first.statistics, second.statistics, atol=1e-7)


def test_every_way_to_give_them() -> None:
    rows = np.concatenate(TABLES)
    flat = np.concatenate(WEIGHTS)
    sites = np.repeat(["b", "a", "c"], [30, 45, 20])
    by_name = {"b": 0, "a": 1, "c": 2}
    order = np.random.default_rng(3).permutation(len(rows))
    reference = reached(
        make_model("full"),
        {name: TABLES[j] for name, j in by_name.items()},
        sample_weight={name: WEIGHTS[j] for name, j in by_name.items()},
    )
    mixed = reached(make_model("full"), rows[order], groups=sites[order], sample_weight=flat[order])
    np.testing.assert_allclose(mixed.log_likelihood(rows), reference.log_likelihood(rows))
    alone = reached(make_model("full"), rows, sample_weight=flat)
    pooled = reached(make_model("full"), np.repeat(rows, flat.astype(int), axis=0))
    np.testing.assert_allclose(alone.statistics, pooled.statistics, atol=1e-10)
    scaled = reached(make_model("full"), rows, sample_weight=0.01 * flat)
    np.testing.assert_allclose(alone.statistics, scaled.statistics, atol=1e-10)


def test_compressed_runs_weigh_too() -> None:
    algorithm = emfed.FedEM(emfed.SubtractiveDithering(0.05), in_metric=True)
    options: dict[str, Any] = {"rounds": 80, "seed": 1}
    weighted = plain_fit(make_model("diag"), TABLES, algorithm, sample_weight=WEIGHTS, **options)
    repeated = plain_fit(make_model("diag"), REPEATED, algorithm, **options)
    rows = np.concatenate(REPEATED)
    assert weighted.log_likelihood(rows) == pytest.approx(repeated.log_likelihood(rows), abs=1e-6)


class InThrees(Source):
    """An array that is read three rows at a time."""

    def __init__(self, rows: Any) -> None:
        self._rows = rows

    @property
    def shape(self) -> tuple[int, int]:
        return self._rows.shape

    def read(self, start: int, stop: int) -> Any:
        return self._rows[start:stop]

    def blocks(self) -> Any:
        for start in range(0, len(self._rows), 3):
            yield self._rows[start : start + 3]


def test_rows_read_in_blocks_keep_their_weights() -> None:
    apart = tables_module.WorkerTables([InThrees(t) for t in TABLES], row_weights=WEIGHTS)
    in_blocks = reached(make_model("full"), apart)
    whole = reached(make_model("full"), TABLES, sample_weight=WEIGHTS)
    np.testing.assert_allclose(in_blocks.statistics, whole.statistics, atol=1e-10)


def test_bad_weights_are_refused_in_words() -> None:
    rows = TABLES[0]
    cases: list[tuple[Any, Any, str]] = [
        (rows, np.ones(29), "expected 30"),
        (rows, np.full(30, np.nan), "finite numbers >= 0"),
        (rows, -np.ones(30), "finite numbers >= 0"),
        (rows, np.zeros(30), "all weights are zero"),
        (rows, ["x"] * 30, "must be numbers"),
        (TABLES, WEIGHTS[:2], "a list of 3"),
        (TABLES, [WEIGHTS[0], WEIGHTS[1], 0 * WEIGHTS[2]], "worker '2'.*zero"),
        ({"a": rows}, [WEIGHTS[0]], "a dict with the workers"),
        ({"a": rows}, {"b": WEIGHTS[0]}, "a dict with the workers"),
        ([emfed.data.Stream(lambda k: rows)], np.ones(30), "tables in memory"),
    ]
    for data, weights, words in cases:
        with pytest.raises(emfed.DataError, match=words):
            plain_fit(make_model("full"), data, sample_weight=weights, rounds=1)
    with pytest.raises(emfed.SettingsError, match="full passes"):
        plain_fit(make_model("full"), rows, emfed.FedEM(batch_size=5), sample_weight=np.ones(30))
    network = emfed.network.StackedFederation(emfed.data.as_workers(TABLES))
    with pytest.raises(emfed.SettingsError, match="its own data"):
        plain_fit(make_model("full"), None, federation=network, sample_weight=WEIGHTS)
