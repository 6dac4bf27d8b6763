"""Rows as workers have them: arrays of any order, files larger than memory, streams."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

import emfed
from emfed.data import sources
from emfed.models.devices.placing import read_ahead
from tests.helpers import KINDS, bind, first, make_data, make_model, plain_fit

EITHER = pytest.mark.parametrize("federation", ["loop", "stacked"])


def frame(rows: np.ndarray, **more: Any) -> pl.DataFrame:
    return pl.DataFrame({f"c{i}": rows[:, i] for i in range(rows.shape[1])} | more)


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, list[np.ndarray]]:
    """A file sorted by its column ``site``, in small row groups, read in small blocks."""
    monkeypatch.setattr(sources, "BLOCK_ELEMENTS", 64)
    monkeypatch.setattr("emfed.data.workers.SMALL_BYTES", 0)
    parts = make_data(3)
    names = np.repeat([f"s{i}" for i in range(len(parts))], [len(p) for p in parts])
    path = tmp_path / "sites.parquet"
    frame(np.concatenate(parts), site=names).write_parquet(path, row_group_size=25)
    return path, parts


@EITHER
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_gives_what_its_rows_give(table: Any, kind: str, federation: Any) -> None:
    path, parts = table
    options: dict[str, Any] = {"rounds": 5, "seed": 2, "federation": federation}
    monitor = emfed.fitting.Monitor()
    model = make_model(kind)
    inside = plain_fit(model, parts, monitor=monitor, **options)
    outside = plain_fit(model, path, groups="site", monitor=monitor, **options)
    np.testing.assert_allclose(outside.statistics, inside.statistics, atol=1e-9)
    assert outside.records[-1].objective == pytest.approx(inside.records[-1].objective)
    assert outside.columns == ("c0", "c1")
    books = [result.ledger.summary() for result in (inside, outside)]
    assert books[0]["round"] == books[1]["round"]  # of the opening, columns have names


@EITHER
@pytest.mark.parametrize(
    "algorithm",
    [
        emfed.FedEM(emfed.Dithering(4), batch_size=5, replacement=True),
        emfed.FedEM(emfed.Dithering(4), batch_size=20),
        emfed.VRFedEM(emfed.Dithering(4), batch_size=3, inner_rounds=3),
    ],
)
def test_mini_batches_of_a_file_are_those_of_its_rows(
    table: Any, algorithm: Any, federation: Any
) -> None:
    path, parts = table
    options: dict[str, Any] = {"rounds": 7, "seed": 2, "federation": federation}
    model = make_model("full")
    inside = plain_fit(model, parts, algorithm, **options)
    outside = plain_fit(model, path, algorithm, groups="site", **options)
    np.testing.assert_allclose(outside.statistics, inside.statistics, atol=1e-9)


def test_one_file_per_worker_and_columns_in_any_order(tmp_path: Path) -> None:
    parts = make_data(4)
    names = []
    for index, rows in enumerate(parts):
        names.append(tmp_path / f"{index}.parquet")
        table = frame(rows.astype(np.float32))
        table = table.select("c1", "c0") if index == 1 else table
        table.write_parquet(names[-1])
    model = make_model("diag")
    inside = plain_fit(model, [p.astype(np.float32) for p in parts], rounds=3)
    for data in (
        names,
        {p.stem: str(p) for p in names},
        [emfed.data.ParquetRows(p) for p in names],
    ):
        outside = plain_fit(model, data, rounds=3)
        np.testing.assert_allclose(outside.statistics, inside.statistics, atol=1e-9)
    assert emfed.data.ParquetRows(names[0]).dtype == np.float32


def test_a_worker_may_be_spread_over_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("emfed.data.workers.SMALL_BYTES", 0)
    monkeypatch.setattr("emfed.data.files.MOST_RANGES", 40)
    parts = make_data(5, sizes=(40, 40))
    path = tmp_path / "mixed.parquet"
    mixed = np.stack(parts, axis=1).reshape(-1, 2)
    frame(mixed, site=["b", "a"] * 40).write_parquet(path)
    model = make_model("full")
    inside = plain_fit(model, {"a": parts[1], "b": parts[0]}, rounds=3)
    outside = plain_fit(model, path, groups="site", rounds=3)
    np.testing.assert_allclose(outside.statistics, inside.statistics, atol=1e-9)


def test_bad_files_are_refused_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "BLOCK_ELEMENTS", 16)
    monkeypatch.setattr("emfed.data.workers.SMALL_BYTES", 0)
    model, rows = make_model("full"), make_data(0)[1]
    good = tmp_path / "good.parquet"
    frame(rows, site=["a"] * 20 + ["b"] * 25).write_parquet(good)

    def refused(data: Any, message: str, **options: Any) -> None:
        with pytest.raises(emfed.DataError, match=message):
            plain_fit(model, data, rounds=1, **options)

    refused(good, "column 'site': it holds String")
    refused(good, "groups='ward' is not one", groups="ward")
    refused(good, "name of one of its columns", groups=["a"] * 45)
    refused(tmp_path, "is a folder")
    with pytest.raises(emfed.DataError, match="named twice"):
        emfed.data.ParquetRows(good, ["c0", "c0"])
    with pytest.raises(emfed.DataError, match="list of names"):
        emfed.data.ParquetRows(good, "c0")
    for wrong in ([(10, 100)], [(30, 10)], [(-1, 5)]):
        with pytest.raises(emfed.DataError, match="has 45 rows"):
            plain_fit(model, [emfed.data.ParquetRows(good, ["c0", "c1"], wrong)], rounds=1)
    with pytest.raises(emfed.DataError, match="of 45"):
        emfed.data.ParquetRows(good, ["c0"]).take(np.array([-1]))
    torn = tmp_path / "torn.parquet"
    torn.write_bytes(good.read_bytes()[:200])
    refused(torn, "not a readable Parquet")
    with pytest.raises(OSError, match="none.parquet"):
        plain_fit(model, tmp_path / "none.parquet", rounds=1)
    holes = rows.copy()
    holes[33, 1] = np.nan
    frame(holes).write_parquet(good)
    refused([good], "worker '?0'?: row 33, column 'c1' is nan")
    frame(rows).with_columns(c0=pl.when(pl.col("c0") > 0).then("c0")).write_parquet(good)
    refused({"w": good}, "worker 'w': row .* column 'c0' is nan")
    frame(rows).clear().write_parquet(good)
    refused([good, rows], "some workers name their columns")
    other = tmp_path / "other.parquet"
    frame(rows).write_parquet(other)
    refused([other, good], "worker '1' has no rows")
    frame(rows).rename({"c1": "x"}).write_parquet(good)
    refused([other, good], "expected the columns")
    monkeypatch.setattr("emfed.data.files.MOST_RANGES", 3)
    frame(rows[:40], site=["a", "b"] * 20).write_parquet(good)
    refused(good, "sort the file by 'site'", groups="site")
    frame(rows[:4], site=["a", None, "b", "b"]).write_parquet(good)
    refused(good, "row 1 has no worker", groups="site")
    frame(rows[:4], site=[1.0, 2.0, np.nan, 2.0]).write_parquet(good)
    refused(good, "row 2 has no worker", groups="site")
    frame(rows[:2], site=[[1], [2]]).write_parquet(good)
    refused(good, "not names", groups="site")


def test_names_of_files_and_columns_are_no_patterns(tmp_path: Path) -> None:
    rows = make_data(0)[1]
    pl.DataFrame({"*": rows[:, 0], "^b$": rows[:, 1], "b": 1.0}).write_parquet(
        tmp_path / "d[1].parquet"
    )
    frame(rows[:7]).write_parquet(tmp_path / "d1.parquet")
    source = emfed.data.ParquetRows(tmp_path / "d[1].parquet", ["^b$", "*"])
    assert source.shape == (45, 2)
    np.testing.assert_array_equal(source.read(3, 9), rows[3:9, ::-1])
    assert source.read(4, 4).shape == (0, 2)


def test_columns_of_a_grouped_file_can_be_picked(tmp_path: Path) -> None:
    rows = make_data(0)[1]
    path = tmp_path / "sites.parquet"
    frame(rows, site=["a"] * 20 + ["b"] * 25, note=["?"] * 45).write_parquet(path)
    picked = emfed.data.as_workers(emfed.data.ParquetRows(path, ["c1", "c0"]), "site")
    assert picked.columns == ("c1", "c0")
    np.testing.assert_array_equal(picked.worker(1), rows[20:, ::-1])


def test_a_file_that_changes_under_way_is_noticed(table: Any) -> None:
    path, parts = table
    run = emfed.fitting.open_run(make_model("diag"), path, groups="site")
    run.step()
    names = np.repeat(["s0", "s1", "s2", "s3"], [len(p) for p in parts])
    frame(np.concatenate(parts) + 100, site=names).write_parquet(path)
    with pytest.raises(emfed.DataError, match="was changed"):
        run.step()


def test_one_small_worker_does_not_bring_the_large_ones_into_memory(tmp_path: Path) -> None:
    large = np.lib.format.open_memmap(
        tmp_path / "large.npy", mode="w+", dtype=np.float32, shape=(2_000_000, 5)
    )
    kept = emfed.data.as_workers([large, np.zeros((10, 5), dtype=np.float32)])
    assert isinstance(kept, emfed.data.WorkerTables)
    assert np.shares_memory(kept.worker(0), large)


@pytest.mark.parametrize("kind", KINDS)
def test_summaries_of_parts_combine(kind: str) -> None:
    tables = make_data(1)
    model = make_model(kind)
    parts = [model.summary(t) for t in tables]
    counts = np.array([len(t) for t in tables])
    stacked = {name: np.stack([p[name] for p in parts]) for name in parts[0]}
    whole = model.summary(np.concatenate(tables))
    for name, values in model.combine(stacked, counts / counts.sum()).items():
        np.testing.assert_allclose(values, whole[name], atol=1e-12)


def test_rows_are_not_copied() -> None:
    rng = np.random.default_rng(0)
    big = [rng.normal(size=(5000, 3)), np.asfortranarray(rng.normal(size=(6000, 3)))]
    kept = emfed.data.as_workers(big)
    assert all(np.shares_memory(kept.worker(i), rows) for i, rows in enumerate(big))
    single = rng.normal(size=(100, 3)).astype(np.float32)
    assert np.shares_memory(emfed.data.as_workers(single).worker(0), single)
    groups = np.repeat([3, 5], 50)
    assert np.shares_memory(emfed.data.as_workers(single, groups).worker(1), single)


@EITHER
def test_order_and_mapping_of_the_rows_do_not_matter(tmp_path: Path, federation: Any) -> None:
    rows = np.random.default_rng(1).normal(size=(9000, 3)) + np.arange(3)
    np.save(tmp_path / "rows.npy", rows)
    mapped = np.load(tmp_path / "rows.npy", mmap_mode="r")
    halves = [rows[:4500], rows[4500:]]
    model = make_model("tied", d=3)
    reference = plain_fit(model, halves, rounds=4, federation=federation).statistics
    for data in (
        [np.asfortranarray(half) for half in halves],
        [mapped[:4500], mapped[4500:]],
        {"a": mapped[:4500], "b": halves[1]},
    ):
        got = plain_fit(model, data, rounds=4, federation=federation).statistics
        np.testing.assert_allclose(got, reference, atol=1e-11)


SAMPLED = """
import threading, time
import emfed, polars as pl
from pathlib import Path
from emfed.data import *
from emfed.fitting.estimators import FederatedGaussianMixture

found, over = [], threading.Event()

def watch():
    while not over.wait(0.005):
        lines = Path("/proc/self/status").read_text().splitlines()
        found.append(int(next(x for x in lines if x.startswith("RssAnon")).split()[1]))

watching = threading.Thread(target=watch)
watching.start()
try:
    {script}
    time.sleep(0.02)
finally:
    over.set()
    watching.join()
print(max(found))
"""


def peak(script: str) -> float:
    """The largest memory of its own of a process that runs this, MB.

    It is sampled: the system keeps a peak only with the pages of files that are mapped, as polars
    1.32 reads them (64 MB: 8 MB of its own, 45 of the file), which it takes back when it needs
    them.
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SAMPLED.format(script=script)],
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout.split()[-1]) / 1024


def write_rows(path: Path, repeats: int, rows: int) -> None:
    """A file of so many row groups of 20 columns, without compression; none is ever all there."""
    part = frame(np.random.default_rng(0).normal(size=(rows, 20)))
    part.write_parquet(path.with_name("part.parquet"))
    scan = pl.scan_parquet([path.with_name("part.parquet")] * repeats)
    scan.sink_parquet(path, compression="uncompressed", row_group_size=rows)


FACES = {
    "fit": "emfed.fit(emfed.gaussian_mixture(3, 'tied'), Path({path!r}), rounds=1)",
    "estimator": "FederatedGaussianMixture(3, covariance_type='tied', max_iter=1).fit({path!r})",
    "lazy": "emfed.fit(emfed.gaussian_mixture(3, 'tied'), pl.scan_parquet({path!r}), rounds=1)",
}


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
@pytest.mark.parametrize("face", first(list(FACES)))
def test_memory_is_flat_in_the_rows_of_a_file(tmp_path: Path, face: str) -> None:
    """A fit of 64 MB stays within 30 MB of one of 8 MB; both are read in parts of 1 MB."""
    peaks, few = (
        [],
        "emfed.data.sources.BLOCK_ELEMENTS = 1 << 17; emfed.data.workers.SMALL_BYTES = 0",
    )
    for repeats in (4, 32):
        path = tmp_path / f"{repeats}.parquet"
        write_rows(path, repeats, 12_500)
        peaks.append(peak(f"{few}; {FACES[face].format(path=str(path))}"))
    assert peaks[1] - peaks[0] < 30, peaks


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_half_a_gigabyte_is_fitted_in_a_fraction_of_it(tmp_path: Path) -> None:
    """`emfed fit`, the estimators and lazy frames, with the blocks that users have."""
    path = tmp_path / "big.parquet"
    write_rows(path, 32, 100_000)
    size = path.stat().st_size / 1e6
    assert size > 500
    idle = peak("0")
    for face, script in FACES.items():
        assert peak(script.format(path=str(path))) - idle < size / 2, face
    command = ["fit", str(path), "--n-components", "3", "--rounds", "1", "--quiet"]
    command += ["--covariance-type", "diag", "--out", str(tmp_path / "m.emfed")]
    script = f"import emfed_command, sys; sys.argv[1:] = {command!r}"
    run = "from emfed.cli.main import main\ntry: main()\nexcept SystemExit: pass"
    assert peak(f"{script}; exec({run!r})") - idle < size / 2


def test_the_next_block_of_a_file_is_read_while_this_one_is_used(table: Any) -> None:
    import threading

    path, parts = table
    source = emfed.data.ParquetRows(path, ["c0", "c1"])
    seen: list[tuple[int, int]] = []

    def read(start: int, stop: int) -> Any:
        assert threading.current_thread() is not threading.main_thread()
        seen.append((start, stop))
        return source.read(start, stop)

    cuts = source.cuts()
    for number, block in enumerate(read_ahead(read, cuts)):
        assert len(seen) <= number + 2  # memory holds two blocks
        np.testing.assert_array_equal(block, np.concatenate(parts)[slice(*cuts[number])])
    assert seen == cuts
    np.testing.assert_array_equal(np.concatenate(list(source.blocks())), np.concatenate(parts))


def test_a_lazy_frame_is_read_block_by_block(table: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A query with a filter, too, and in the same blocks with an older polars."""
    path, parts = table
    scan = pl.scan_parquet(path).filter(pl.col("site") != "s1").select("c1", "c0")
    want = np.concatenate([parts[0], *parts[2:]])[:, ::-1]
    workers = emfed.data.as_workers(scan)
    rows = workers.worker(0)
    assert isinstance(rows, emfed.data.LazyRows)
    assert rows.shape == want.shape
    blocks = list(rows.blocks())
    assert [len(b) for b in blocks] == [stop - start for start, stop in rows.cuts()]
    np.testing.assert_array_equal(np.concatenate(blocks), want)
    np.testing.assert_array_equal(
        rows.with_columns(["c0"]).take(np.array([7, 2])), want[[7, 2], 1:]
    )
    found = plain_fit(make_model("diag"), scan, rounds=3)
    inside = plain_fit(make_model("diag"), want, rounds=3)
    # Means of blocks are weighed and added, and sums of all rows are not: the last bits differ.
    np.testing.assert_allclose(found.statistics, inside.statistics, rtol=1e-12, atol=1e-13)
    monkeypatch.delattr(pl.LazyFrame, "collect_batches", raising=False)
    for block, again in zip(blocks, rows.blocks(), strict=True):
        np.testing.assert_array_equal(block, again)


def test_lazy_frames_that_change_or_hold_words_are_told_apart(table: Any) -> None:
    path, parts = table
    names = emfed.data.as_workers(pl.scan_parquet(path).select("c0", "c1"), None)
    assert isinstance(names.worker(0), emfed.data.LazyRows)
    with pytest.raises(emfed.DataError, match="column 'site': it holds String"):
        emfed.data.LazyRows(pl.scan_parquet(path))
    with pytest.raises(emfed.DataError, match="'site': it holds String"):  # collected, as it was
        emfed.data.as_workers(pl.scan_parquet(path))
    grouped = emfed.data.as_workers(pl.scan_parquet(path), "site")
    assert grouped.size == len(parts)
    times = iter(range(40, 20, -1))
    made = lambda _: frame(np.ones((next(times), 2)))  # noqa: E731
    other = frame(parts[0]).lazy().map_batches(made, projection_pushdown=False)
    rows = emfed.data.LazyRows(other)
    with pytest.raises(emfed.DataError, match=r"gave \d+ rows where \d+ were expected"):
        list(rows.blocks())


def test_estimators_take_files_and_lazy_frames(table: Any) -> None:
    from emfed.fitting.estimators import FederatedGaussianMixture

    path, parts = table
    whole = frame(np.concatenate(parts))
    names = np.repeat([f"s{i}" for i in range(len(parts))], [len(p) for p in parts])
    scan = pl.scan_parquet(path).select("c0", "c1")
    make = lambda: FederatedGaussianMixture(2, covariance_type="diag", random_state=1)  # noqa: E731
    here = make().fit(whole)
    there = make().fit(scan)
    assert there.n_features_in_ == 2
    assert list(there.feature_names_in_) == ["c0", "c1"]
    np.testing.assert_allclose(there.means_, here.means_, rtol=1e-9)
    np.testing.assert_array_equal(there.labels_, here.labels_)
    for name in ("score", "bic", "aic", "icl"):
        told = [getattr(m, name)(x) for m, x in ((there, path), (there, scan), (here, whole))]
        np.testing.assert_allclose(told, told[-1], rtol=1e-9)
    np.testing.assert_allclose(there.predict_proba(path), here.predict_proba(whole), atol=1e-9)
    sites = make().fit(path, groups="site")
    assert [str(n) for n in sites.result_.workers()["worker"]] == ["s0", "s1", "s2", "s3"]
    # What sites send is rounded, and a last bit may turn one of the symbols: not to 1e-9.
    np.testing.assert_allclose(sites.means_, make().fit(whole, groups=names).means_, rtol=1e-3)
    several = make().fit({"a": emfed.data.ParquetRows(path, ["c0", "c1"]), "b": scan})
    assert [len(found) for found in several.labels_] == [len(whole)] * 2
    with pytest.raises(emfed.DataError, match="expected 2 columns, as in the fit; got 1"):
        make().fit(whole.to_numpy()).predict(emfed.data.ParquetRows(path, ["c0"]))


def test_a_file_is_answered_for_block_by_block(table: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path, parts = table
    rows = np.concatenate(parts)
    result = plain_fit(make_model("full"), frame(rows), rounds=3)
    want = result.predict_proba(rows), result.log_likelihood(rows), result.icl(rows)
    read, most = emfed.data.ParquetRows.read, sources.BLOCK_ELEMENTS // 2

    def some(self: Any, start: int, stop: int) -> Any:
        assert stop - start <= most
        return read(self, start, stop)

    monkeypatch.setattr(emfed.data.ParquetRows, "read", some)
    np.testing.assert_allclose(result.predict_proba(path), want[0], rtol=1e-12, atol=1e-14)
    assert result.log_likelihood(path) == pytest.approx(want[1], rel=1e-12)
    assert result.icl(path) == pytest.approx(want[2], rel=1e-12)


def test_columns_of_any_source_can_be_picked() -> None:
    class Named(emfed.data.Source):
        columns = ("a", "b", "c")
        shape = (30, 3)

        def read(self, start: int, stop: int) -> Any:
            return np.arange(start, stop)[:, None] + np.array([0.0, 100.0, 200.0])

    found = emfed.data.with_columns(emfed.data.WorkerTables([Named()], None, Named.columns), ("c",))
    rows = found.worker(0)
    assert rows.shape == (30, 1)
    np.testing.assert_array_equal(rows.read(3, 5), [[203], [204]])
    np.testing.assert_array_equal(np.concatenate(list(rows.blocks()))[:, 0], np.arange(30) + 200)
    np.testing.assert_array_equal(rows.take(np.array([4, 1])), [[204], [201]])


# Streams.


def normal_stream(worker: int, size: int = 50) -> emfed.data.Stream:
    """Two clusters whose shares depend on the worker; a function of the round."""

    def draw(round_: int) -> np.ndarray:
        rng = np.random.default_rng([worker, round_])
        right = rng.random(size) < (0.2 if worker % 2 else 0.8)
        return rng.normal(size=(size, 2)) + np.where(right, 2.5, -2.5)[:, None]

    return emfed.data.Stream(draw)


@EITHER
@pytest.mark.parametrize("kind", first(["streamed", "full", "known"]))
def test_online_em_finds_the_distribution(kind: str, federation: Any) -> None:
    workers = {f"w{i}": normal_stream(i) for i in range(6)}
    options = {"second_moment": "statistic"} if kind == "streamed" else {}
    if kind == "known":
        options = {"known_covariance": np.eye(2)}
    model = emfed.gaussian_mixture(2, "tied" if kind == "streamed" else kind, **options)
    algorithm = emfed.FedEM(emfed.Dithering(8), step_size=emfed.algorithms.Decreasing(1.0, 0.8))
    result = plain_fit(model, workers, algorithm, rounds=400, seed=1, federation=federation)
    means = np.sort(result.params.means[:, 0])
    np.testing.assert_allclose(means, [-2.5, 2.5], atol=0.1)
    covariances = result.params.covariances
    np.testing.assert_allclose(covariances, np.broadcast_to(np.eye(2), covariances.shape), atol=0.1)
    assert result.records[-1].evaluations == 300


def test_streams_give_the_same_trajectory_everywhere(tmp_path: Path) -> None:
    workers = [normal_stream(i, 20 + i) for i in range(5)]
    algorithm = emfed.FedEM(emfed.Dithering(4), batch_size=10, step_size=0.3)
    model = emfed.gaussian_mixture(2, "diag")
    participation = emfed.algorithms.Bernoulli(0.6)
    common: dict[str, Any] = {"participation": participation, "seed": 4}
    runs = [
        plain_fit(model, workers, algorithm, rounds=20, federation=name, **common)
        for name in ("loop", "stacked")
    ]
    np.testing.assert_allclose(runs[0].statistics, runs[1].statistics, atol=1e-9)
    path = tmp_path / "run.emfed"
    plain_fit(model, workers, algorithm, rounds=8, checkpoint=path, **common)
    resumed = plain_fit(
        model, workers, algorithm, rounds=20, checkpoint=path, resume=True, **common
    )
    np.testing.assert_array_equal(resumed.statistics, runs[1].statistics)


def test_streams_and_what_they_cannot_do() -> None:
    workers = [normal_stream(0), normal_stream(1)]
    with pytest.raises(emfed.SettingsError, match="second_moment='statistic'"):
        plain_fit(emfed.gaussian_mixture(2, "tied"), workers, rounds=1)
    with pytest.raises(emfed.SettingsError, match="use FedEM"):
        plain_fit(emfed.gaussian_mixture(2), workers, emfed.VRFedEM(), rounds=1)
    with pytest.raises(emfed.DataError, match="function"):
        emfed.data.Stream(np.zeros((3, 2)))
    with pytest.raises(emfed.SettingsError, match="second_moment"):
        emfed.gaussian_mixture(2, "tied", second_moment="both")

    def broken(round_: int) -> np.ndarray:
        rows = np.random.default_rng(round_).normal(size=(10, 2))
        rows[7, 1] = np.inf if round_ == 3 else 0.0
        return rows[:, :1] if round_ == 5 else rows

    data = {"good": normal_stream(0), "bad": emfed.data.Stream(broken)}
    run = emfed.fitting.open_run(emfed.gaussian_mixture(2), data, emfed.FedEM(), start="moments")
    run.step()
    run.step()
    with pytest.raises(emfed.DataError, match="worker 'bad', round 3: row 7, column 1 is inf"):
        run.step()

    def turning(round_: int) -> Any:
        rows = np.random.default_rng(round_).normal(size=(9, 2))
        return frame(rows).select("c1", "c0") if round_ else rows

    run = emfed.fitting.open_run(
        emfed.gaussian_mixture(2), {"w": emfed.data.Stream(turning)}, emfed.FedEM()
    )
    with pytest.raises(emfed.DataError, match="some tables name their columns"):
        run.step()
    with pytest.raises(emfed.SettingsError, match="second_moment"):
        emfed.gaussian_mixture(2, "full", second_moment="statistic")
    narrow = emfed.data.Stream(
        lambda k: np.random.default_rng(k).normal(size=(9, 2 if k < 2 else 1))
    )
    run = emfed.fitting.open_run(emfed.gaussian_mixture(2), {"bad": narrow}, emfed.FedEM())
    run.step()
    with pytest.raises(emfed.DataError, match="worker 'bad', round 2: expected 2 columns; got 1"):
        run.step()


# E-steps by simulation.


@pytest.mark.parametrize("kind", KINDS)
def test_simulated_statistics_are_unbiased_and_their_noise_falls_as_draws_rise(kind: str) -> None:
    tables = make_data(2)
    model = bind(make_model(kind), tables)
    params = model.start(1)
    rows = np.concatenate(tables)
    exact = model.expected_statistics(rows, params)
    rng = np.random.default_rng(0)
    spread = {}
    for draws in (1, 8):
        u = rng.random((400, len(rows), draws))
        stack = np.broadcast_to(rows, (400, *rows.shape))
        values = model.simulated_statistics(stack, params, u)
        errors = values - exact
        spread[draws] = float((errors**2).sum(axis=-1).mean())
        assert np.linalg.norm(errors.mean(axis=0)) < 3 * np.sqrt(spread[draws] / 400)
    assert spread[1] / spread[8] == pytest.approx(8, rel=0.15)


def test_simulation_agrees_between_federations_and_sources(table: Any) -> None:
    path, parts = table
    model = make_model("full")
    for settings in ({}, {"batch_size": 8}):
        algorithm = emfed.FedEM(emfed.Dithering(4), step_size=0.2, simulations=3, **settings)
        runs = [
            plain_fit(model, parts, algorithm, rounds=6, federation="loop"),
            plain_fit(model, parts, algorithm, rounds=6, federation="stacked"),
            plain_fit(model, path, algorithm, rounds=6, groups="site"),
        ]
        for run in runs[1:]:
            np.testing.assert_allclose(run.statistics, runs[0].statistics, atol=1e-9)
        exact = emfed.FedEM(emfed.Dithering(4), step_size=0.2, **settings)
        other = plain_fit(model, parts, exact, rounds=6)
        assert np.abs(other.statistics - runs[0].statistics).max() > 1e-4


def test_simulated_em_settles_at_the_pooled_answer() -> None:
    tables = make_data(7, sizes=(200, 300, 100), spread=8.0)
    model = make_model("known")
    start = plain_fit(model, tables, rounds=5).params
    pooled = plain_fit(model, tables, start=start, rounds=300)
    algorithm = emfed.FedEM(step_size=emfed.algorithms.Decreasing(1.0, 0.7), simulations=2)
    simulated = plain_fit(model, tables, algorithm, start=start, rounds=600)
    np.testing.assert_allclose(simulated.params.means, pooled.params.means, atol=0.05)


def test_simulation_is_refused_where_there_is_none() -> None:
    with pytest.raises(emfed.SettingsError, match="no E-step by simulation"):
        plain_fit(emfed.models.LinearGaussian(), make_data(0), emfed.FedEM(simulations=1), rounds=1)
    with pytest.raises(emfed.SettingsError, match="simulations"):
        emfed.FedEM(simulations=0)


def test_threads_do_not_change_the_answer() -> None:
    rows = np.random.default_rng(3).normal(size=(60_000, 12)) + np.arange(12)
    data = np.array_split(rows, 7)
    for kind in ("tied", "full"):
        runs = [
            plain_fit(emfed.gaussian_mixture(4, kind), data, rounds=5, threads=threads).statistics
            for threads in (1, 2)
        ]
        np.testing.assert_allclose(runs[0], runs[1], atol=1e-9)
