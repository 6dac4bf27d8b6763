"""The numpy twin of the kernels, everywhere; the kernels themselves, where torch and triton are.

`make gpu-interpreted` runs the latter in Triton's interpreter, `make gpu` on a GPU.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import numpy as np
import pytest

from emfed.data.tables import WorkerTables
from emfed.fitting.starts import sketch
from emfed.fitting.starts.own import own_sketch
from emfed.models import (
    Categorical,
    factor_analysis,
    gaussian_mixture,
    k_means,
    mixed_mixture,
    ppca,
)
from emfed.models.devices import Ragged
from tests.models.devices import twin
from tests.models.devices.passes import CASES, Case, off, plain

BOUND = {"double": 1e-12, "fast": 1e-6}


def places() -> str | None:
    """Where kernels can run: on a GPU, in the interpreter, or nowhere."""
    try:
        import torch
        import triton  # noqa: F401
    except ImportError:
        return None
    if torch.cuda.is_available():
        return "cuda"
    return "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else None


WHERE = places()
kernels = pytest.mark.skipif(
    WHERE is None, reason="kernels need torch and triton: run make gpu-interpreted, or make gpu"
)


def placed(rows: Ragged) -> Ragged:
    import torch

    weights = None if rows.weights is None else torch.as_tensor(rows.weights, device=WHERE)
    there = torch.as_tensor(rows.rows, device=WHERE)
    return dataclasses.replace(rows, rows=there, weights=weights, memo={})


@pytest.mark.parametrize("precision", ["double", "fast"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_twin_gives_the_sums_of_the_formulas(case: Case, precision: str) -> None:
    rows, given = case.make(precision)
    found = twin.sweep(rows, given, values=True)
    assert off(found, plain(rows, given), case.hard) < BOUND[precision]


@kernels
@pytest.mark.parametrize("precision", ["double", "fast"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_kernel_gives_the_sums_of_the_formulas(case: Case, precision: str) -> None:
    from emfed.models.devices import sweep

    if WHERE == "cpu" and case.second == "products" and case.d > 100:
        pytest.skip("thousands of tiles take the interpreter minutes: make gpu runs it")
    rows, given = case.make(precision)
    there = placed(rows)
    found = sweep(there, given, values=True)
    assert off(found, plain(rows, given), case.hard) < BOUND[precision]
    again = sweep(there, given, values=True)
    assert all(np.array_equal(a, b) for a, b in zip(found, again, strict=True))


@kernels
@pytest.mark.parametrize("case", CASES[:8], ids=lambda case: case.name)
def test_rows_are_answered_for_one_by_one(case: Case) -> None:
    from emfed.models.devices import answers

    rows, given = case.make()
    parts = list(answers(placed(rows), given))
    shares = np.concatenate([part for part, _ in parts])
    mass, _, density, _ = plain(rows, given)
    assert np.allclose(shares.sum(axis=0), mass[0], rtol=1e-12)
    if not case.hard:
        assert np.isclose(sum(float(part.sum()) for _, part in parts), density[0], rtol=1e-12)


@kernels
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_what_half_precision_cannot_hold_is_done_again_in_doubles() -> None:
    from emfed.models.devices import sweep

    rows, given = Case("outlier", 200, 3, 2, "squares").make("fast")
    rows.rows[5, 1] = 3e8
    assert not np.all(np.isfinite(twin.sweep(rows, given).moments))
    found: Any = sweep(placed(rows), given, values=True)
    assert off(found, plain(rows, given), False) < 1e-12


@kernels
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("precision", ["double", "fast"])
def test_rows_that_come_in_blocks_give_the_statistics_of_the_whole(
    precision: Any, weighted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each block counts by its rows, or by their weights."""
    import torch

    from emfed.data.placing import Streamed
    from emfed.data.tables import WorkerTables

    monkeypatch.setattr("emfed.models.devices.placing.STREAM_BYTES", 2000)
    table = 3 * np.random.default_rng(8).normal(size=(300, 4)) + 9
    weights = [np.random.default_rng(9).random(300)] if weighted else None
    model: Any = gaussian_mixture(3, "diag")
    model = model.bind(model.summary(table[None]), np.array([300]), np.ones(1))
    params = model.start(0)
    source = Streamed(table, torch.device(WHERE or "cpu"))
    workers = WorkerTables([source], ["a"], None, weights, precision)
    found, blocks = 0.0, 0
    for piece in workers.pieces(np.arange(1)):
        values = model.expected_statistics(piece.rows, params, piece.padding)
        found, blocks = found + piece.share * values[0], blocks + 1
    want = model.expected_statistics(table, params, None if weights is None else weights[0])
    assert blocks == 5
    assert float(np.abs(found - want).max() / np.abs(want).max()) < BOUND[precision]


@kernels
def test_passes_of_one_shape_over_other_rows_in_another_frame_do_not_meet() -> None:
    """What is kept between passes is written anew by each."""
    from emfed.models.devices import sweep

    for far in (100.0, -3.0, 100.0):
        rows, given = Case("again", 90, 5, 3, "squares", far=far, dtype=np.float64).make()
        assert off(sweep(placed(rows), given, values=True), plain(rows, given), False) < 1e-12


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", ["tied", "diag", "full", "k-means"])
@pytest.mark.parametrize("where", ["twin", pytest.param("kernel", marks=kernels)])
def test_starts_that_are_tried_on_a_device_are_those_tried_here(
    where: str, kind: str, weighted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All starts are then workers of one launch, each with parameters of its own."""
    g = np.random.default_rng(2)
    table = (3 * g.integers(0, 3, size=(60, 1)) + g.normal(size=(60, 2))).astype(np.float32)
    model: Any = k_means(3) if kind == "k-means" else gaussian_mixture(3, kind)
    model = model.bind(model.summary(table[None]), np.array([60]), np.ones(1))
    weights = [g.integers(0, 4, 60).astype(np.float64)] if weighted else None
    monkeypatch.setattr(sketch, "FIRST_STEPS", 2)
    monkeypatch.setattr(sketch, "STEPS", 2)
    launches = []

    def copied(rows: Any, weights: Any, count: int) -> Ragged:
        launches.append(count)
        starts, counts = np.arange(count) * len(rows), np.full(count, len(rows))
        own = None if weights is None else np.tile(weights, count)
        return Ragged(np.tile(rows, (count, 1)), starts, counts, own)

    if where == "twin":
        monkeypatch.setattr(sketch, "copies", copied)
        for name in ("mixture", "clusters", "gaussian"):
            monkeypatch.setattr(f"emfed.models.{name}.sweep", twin.sweep)
        monkeypatch.setattr(sketch, "sweep", twin.sweep)
    here = own_sketch(WorkerTables([table], ["a"], None, weights), model, 0)
    if where == "twin":
        there = dataclasses.replace(here, there=here.rows)
    else:
        import torch

        tensor = torch.as_tensor(table, device=WHERE)
        there = own_sketch(WorkerTables([tensor], ["a"], None, weights), model, 0)
        assert there.there.dtype == torch.float32
    want, got = (
        [model.statistics_of(p) for p in found.starts([model], 2, 0)[0]] for found in (here, there)
    )
    np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-12)
    assert launches == ([10, 10, 3] if where == "twin" else [])


@kernels
@pytest.mark.parametrize("kind", ["tied", "full", "k-means"])
def test_labels_alone_come_back_from_a_device(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In order, from several parts."""
    import torch

    from emfed.models.devices import sweeping

    monkeypatch.setattr(sweeping._Phases, "parts", lambda self, rows: rows.parts(128))
    table = 3 * np.random.default_rng(8).normal(size=(300, 4)) + 9
    model: Any = k_means(3) if kind == "k-means" else gaussian_mixture(3, kind)
    model = model.bind(model.summary(table[None]), np.array([300]), np.ones(1))
    found = model.labels(torch.as_tensor(table, device=WHERE), model.start(0))
    assert found.dtype == np.int64
    np.testing.assert_array_equal(found, model.labels(table, model.start(0)))


FAMILIES = ["gaussian", "poisson", "bernoulli", Categorical(3), "exponential", "gamma"]


def mixed_table(seed: int, holes: float) -> Any:
    g = np.random.default_rng(seed)
    n = 240
    columns = [
        3 * g.normal(size=n) + 50,
        g.poisson(3, n),
        g.random(n) < 0.3,
        g.integers(0, 3, n),
        g.exponential(2, n) + 1e-3,
        g.gamma(3, 2, n) + 1e-3,
    ]
    table = np.stack(columns, axis=1).astype(np.float64)
    table[g.random(table.shape) < holes] = np.nan
    return table


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("holes", [0.0, 0.2])
@pytest.mark.parametrize("where", ["twin", pytest.param("kernel", marks=kernels)])
def test_mixed_columns_are_a_pass_over_written_features(
    where: str, holes: float, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever families columns have, and with values missing, in one piece or in parts."""
    table = mixed_table(3, holes)
    model = mixed_mixture(3, FAMILIES, missing=holes > 0)
    model = model.bind(model.summary(table[None]), np.array([len(table)]), np.ones(1))
    params = model.start(1)
    weights = np.random.default_rng(4).random(len(table)) + 0.1
    if where == "twin":
        monkeypatch.setattr("emfed.models.mixture.sweep", twin.sweep)
    if parts > 1:
        monkeypatch.setattr("emfed.models.devices._table_bytes", lambda x: 0)
        monkeypatch.setattr("emfed.models.devices.TABLE_BYTES", 0)
        monkeypatch.setattr("emfed.models.devices.FEWEST_TABLE_ROWS", 100)
    counts = np.array([60, 180])
    rows = Ragged(table, np.cumsum(counts) - counts, counts, weights)
    rows = rows if where == "twin" else placed(rows)
    found = model.evaluate(rows, params)
    split = [slice(0, 60), slice(60, 240)]
    want = [model.evaluate(table[part], params, weights[part]) for part in split]
    for got, each in zip(found, zip(*want, strict=True), strict=True):
        np.testing.assert_allclose(got, np.stack(each), rtol=1e-12, atol=1e-12)
    again = model.evaluate(rows, params)  # from the table that was kept
    np.testing.assert_array_equal(found[0], again[0])


@kernels
def test_rows_of_mixed_columns_are_scored_and_shared_out_on_the_device() -> None:
    import torch

    table = mixed_table(5, 0.1)
    model = mixed_mixture(3, FAMILIES)
    model = model.bind(model.summary(table[None]), np.array([len(table)]), np.ones(1))
    params, there = model.start(1), torch.as_tensor(table, device=WHERE)
    for method in ("score_samples", "responsibilities"):
        got, want = (getattr(model, method)(rows, params) for rows in (there, table))
        np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-13)


MODELS: dict[str, Any] = {
    "tied": lambda k, d: gaussian_mixture(k, "tied"),
    "diag": lambda k, d: gaussian_mixture(k, "diag"),
    "spherical": lambda k, d: gaussian_mixture(k, "spherical"),
    "full": lambda k, d: gaussian_mixture(k, "full"),
    "known": lambda k, d: gaussian_mixture(k, "known", known_covariance=2 * np.eye(d)),
    "k-means": lambda k, d: k_means(k),
    "ppca": lambda k, d: ppca(min(k, d)),
    "factors": lambda k, d: factor_analysis(min(k, d)),
    "mixed": lambda k, d: mixed_mixture(k, ["gaussian"] * d, missing=False),
}


@kernels
@pytest.mark.parametrize("shape", [(1, 3, 2), (35, 1, 1), (33, 13, 3)], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_has_the_same_statistics_on_a_device(name: str, shape: Any) -> None:
    """One row, an odd number of rows, one column, one component; far from 0, with weights."""
    import torch

    n, d, k = shape
    g = np.random.default_rng(4)
    table = g.normal(size=(40, d)) * np.linspace(1, 4, d) + 1e4
    table[:, -1] += table[:, 0]
    model: Any = MODELS[name](k, d)
    model = model.bind(model.summary(table[None]), np.array([40]), np.ones(1))
    params, rows, weights = model.start(0), table[:n], g.random(n) + 0.1
    for own in (None, weights):
        want = model.evaluate(rows, params, own)
        got = model.evaluate(torch.as_tensor(rows, device=WHERE), params, own)
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12 * max(1, np.abs(b).max()))


class Smaller:
    """A kernel on a card with room for blocks of so many rows."""

    def __init__(self, kernel: Any, most: int) -> None:
        self.kernel, self.most, self.tried = kernel, most, []

    def __getitem__(self, grid: Any) -> Any:
        def run(*arguments: Any, **options: Any) -> None:
            from triton.runtime.errors import OutOfResources

            self.tried.append(options["BLOCK"])
            if options["BLOCK"] > self.most:
                raise OutOfResources(300_000, 100_000, "shared memory")
            self.kernel[grid](*arguments, **options)

        return run


@kernels
@pytest.mark.parametrize(
    ("name", "case"), [("fused", "rows"), ("shares", "products"), ("scatter", "matrices")]
)
def test_a_card_with_less_shared_memory_gets_smaller_blocks(
    name: str, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from emfed.core.errors import SettingsError
    from emfed.models.devices import kernels as found
    from emfed.models.devices import sweep, sweeping

    rows, given = next(c for c in CASES if c.name == case).make("fast")
    there, small = placed(rows), Smaller(getattr(found, name), 16)
    monkeypatch.setattr(sweeping, "_FOUND", {})
    monkeypatch.setattr(found, name, small)
    assert off(sweep(there, given, values=True), plain(rows, given), False) < BOUND["fast"]
    assert small.tried[0] > 16
    assert small.tried[-1] == 16
    before = len(small.tried)
    sweep(there, given, values=True)
    assert set(small.tried[before:]) == {16}  # what did not fit is not tried again
    small.most = 8
    with pytest.raises(SettingsError, match="do not fit this card .*leave device out"):
        sweep(there, given)


def test_rows_far_apart_are_parts_that_span_little() -> None:
    """What kernels write for each row has room for all between the first and the last."""
    counts = np.array([5, 3, 40, 2])
    starts = np.array([0, 900, 500, 903])
    rows = Ragged(np.zeros((1000, 1)), starts, counts)
    seen = np.zeros(1000, dtype=int)
    for part in rows.parts(32):
        low, end = part.span()
        assert end - low <= 32
        for start, count in zip(part.starts, part.counts, strict=True):
            seen[start : start + count] += 1
    assert seen.sum() == counts.sum()
    assert seen.max() == 1
    assert list(rows.parts(905)) == [rows]


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module with what is asked of cupy here: arrays that hand out their memory."""
    import sys
    from types import ModuleType

    import torch

    class Array:
        ndim = 2

        def __init__(self, rows: Any) -> None:
            self.rows = torch.as_tensor(rows)
            self.shape, self.dtype = tuple(self.rows.shape), self.rows.dtype

        def __dlpack__(self, **options: Any) -> Any:
            return self.rows.__dlpack__(**options)

        def __dlpack_device__(self) -> Any:
            return self.rows.__dlpack_device__()

    module: Any = ModuleType("cupy")
    module.ndarray, module.asarray = Array, Array
    monkeypatch.setitem(sys.modules, "cupy", module)
    return module


@kernels
def test_arrays_of_cupy_are_tensors_in_the_same_memory(cupy: Any) -> None:
    import emfed
    from emfed.fitting.estimators import FederatedGaussianMixture

    g = np.random.default_rng(3)
    table = 6 * g.integers(0, 2, size=(60, 1)) + g.normal(size=(60, 2))
    given = cupy.asarray(table)
    found = emfed.data.as_workers(given).worker(0)
    assert found.data_ptr() == given.rows.data_ptr()
    weights = g.random(60) + 0.5
    options: dict[str, Any] = {"rounds": 2, "seed": 0, "sample_weight": weights}
    model = emfed.gaussian_mixture(2, "diag")
    here, there = (emfed.fit(model, x, **options) for x in (table, given))
    np.testing.assert_allclose(there.statistics, here.statistics, rtol=1e-10)
    mixture = FederatedGaussianMixture(2, covariance_type="diag", random_state=0)
    np.testing.assert_array_equal(mixture.fit(given).labels_, mixture.fit(table).labels_)


@kernels
@pytest.mark.parametrize("kind", ["parquet", "lazy", "source"])
def test_files_stream_to_a_device_and_end_where_rows_here_end(
    kind: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pl = pytest.importorskip("polars")
    import torch

    from emfed.data import LazyRows, ParquetRows
    from emfed.data.placing import Streamed
    from emfed.data.sources import Source
    from emfed.models.devices.placing import place_blocks

    monkeypatch.setattr("emfed.models.devices.placing.STREAM_BYTES", 2000)
    table = 3 * np.random.default_rng(8).normal(size=(300, 4)) + 9
    path = tmp_path / "rows.parquet"
    pl.DataFrame(table, schema=list("abcd")).write_parquet(path, row_group_size=70)

    class Own(Source):
        shape = table.shape

        def read(self, start: int, stop: int) -> Any:
            return table[start:stop]

    sources = {
        "parquet": ParquetRows(path),
        "lazy": LazyRows(pl.scan_parquet(path)),
        "source": Own(),
    }
    where = torch.device(WHERE or "cpu")
    streamed = Streamed(sources[kind], where)
    assert torch.equal(
        place_blocks(streamed.blocks(), streamed.shape, where), torch.as_tensor(table, device=where)
    )
    model: Any = gaussian_mixture(3, "tied")
    model = model.bind(model.summary(table[None]), np.array([300]), np.ones(1))
    params, found = model.start(0), 0.0
    for piece in WorkerTables([streamed], ["a"], None).pieces(np.arange(1)):
        found += piece.share * model.expected_statistics(piece.rows, params, piece.padding)[0]
    want = model.expected_statistics(table, params)
    assert float(np.abs(found - want).max() / np.abs(want).max()) < 1e-12
