"""Passes, fits and streams on a GPU, beside plain torch and scikit-learn on torch, in one run.

``python -m benchmarks gpu``, or ``python -m benchmarks.gpu`` where polars is not installed. The
latter runs the tests of kernels first (``--tests``) and keeps what it prints (``--out``), with the
device, the date and each goal beside what was found. ``--rehearse`` walks the same way without a
GPU, over a few rows in Triton's interpreter, so that nothing breaks where there is one.
"""

from __future__ import annotations

import argparse
import mmap
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from threadpoolctl import threadpool_info

from emfed.fitting import in_process, starting
from emfed.fitting.estimators import FederatedGaussianMixture, base
from emfed.models import gaussian_mixture
from emfed.models.devices import placing

os.environ.setdefault("SCIPY_ARRAY_API", "1")  # scikit-learn takes torch arrays only with it

MILLION = 1_000_000
PASSES = (
    # covariance, rows, columns, components, precision, the goal in milliseconds
    ("tied", 10 * MILLION, 20, 10, "double", 1.2),
    ("tied", 10 * MILLION, 20, 10, "fast", 0.6),
    ("diag", 10 * MILLION, 20, 10, "double", 2.0),
    ("diag", 10 * MILLION, 20, 10, "fast", 0.6),
    ("spherical", 10 * MILLION, 20, 10, "double", None),
    ("full", 2 * MILLION, 20, 10, "double", 6.0),
    ("full", 2 * MILLION, 20, 10, "fast", 3.0),
    ("full", 2 * MILLION, 64, 32, "double", None),
    ("full", 2 * MILLION, 64, 32, "fast", None),
)
PEERS = (
    ("diag", 10 * MILLION, 20, 10),
    ("full", 2 * MILLION, 20, 10),
    ("full", 2 * MILLION, 64, 32),
)


@dataclass
class Place:
    """Where it runs: on a GPU, or a rehearsal over few rows without one."""

    device: str = "cuda"

    @property
    def rehearsal(self) -> bool:
        return self.device == "cpu"

    def shape(self, n: int, d: int, k: int) -> tuple[int, int, int]:
        return (48, min(d, 20), min(k, 3)) if self.rehearsal else (n, d, k)

    def synchronize(self) -> None:
        import torch

        if not self.rehearsal:
            torch.cuda.synchronize()


HERE = Place()


def available() -> str | None:
    """Why there is nothing to measure, or None."""
    try:
        import torch
        import triton  # noqa: F401
    except ImportError:
        return "no torch and triton here: pip install torch."
    if HERE.rehearsal:
        said = os.environ.get("TRITON_INTERPRET") == "1"
        return None if said else "a rehearsal needs TRITON_INTERPRET=1."
    return None if torch.cuda.is_available() else "torch finds no GPU here."


def device() -> dict[str, Any]:
    import torch
    import triton

    x = torch.empty(1 << (10 if HERE.rehearsal else 28), device=HERE.device)
    y = torch.empty_like(x)
    seconds = timed(lambda: y.copy_(x))
    threads = [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"]
    rehearsed = "none: a rehearsal in Triton's interpreter, whose times mean nothing"
    return {
        "device": rehearsed if HERE.rehearsal else torch.cuda.get_device_name(),
        "date": datetime.now(UTC).strftime("%d %B %Y, %H:%M UTC"),
        "copy TB/s": round(2 * x.numel() * 4 / seconds / 1e12, 2),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "threads of numpy's products": max(threads, default=1),
    }


def timed(run: Callable[[], object], repeats: int = 50, warm: float = 0.3) -> float:
    """Seconds from the call to the answer on the host: the median of many.

    Before that the card works for a while: its clock is slow when it comes from doing nothing.
    """
    if HERE.rehearsal:
        repeats, warm = 1, 0.0
    else:
        run(), run()
    ends = time.perf_counter() + warm
    while time.perf_counter() < ends:
        run()
    found = []
    for _ in range(repeats):
        HERE.synchronize()
        began = time.perf_counter()
        run()
        HERE.synchronize()
        found.append(time.perf_counter() - began)
    return float(np.median(found))


def clusters(n: int, d: int, k: int) -> Any:
    """Float32 rows around k centres, on the GPU."""
    import torch

    g = torch.Generator(device=HERE.device).manual_seed(1)
    centres = 1.5 * torch.randn((k, d), device=HERE.device, generator=g)
    labels = torch.randint(0, k, (n,), device=HERE.device, generator=g)
    return centres[labels] + torch.randn((n, d), device=HERE.device, generator=g)


def bound(kind: str, x: Any, k: int) -> tuple[Any, Any]:
    """A mixture that knows the rows, and parameters near their clusters."""
    model = gaussian_mixture(k, kind)
    one = np.ones(1)
    model = model.bind(model.summary(x[None]), np.array([len(x)]), one)
    return model, model.start(0)


def launched(sweep: Callable[[], object]) -> float:
    """Seconds that the kernels of a pass take, without what the host does around them."""
    from torch.profiler import ProfilerActivity, profile

    if HERE.rehearsal:
        return timed(sweep)
    sweep()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(5):
            sweep()
        HERE.synchronize()
    return sum(event.device_time_total for event in seen.key_averages()) / 5 / 1e6


def bench_passes() -> list[dict[str, Any]]:
    """A pass for statistics: seconds in all, in kernels, and whether numpy says the same."""
    import dataclasses

    from emfed.models.devices import ragged, sweep

    rows: list[dict[str, Any]] = []
    x: Any = None
    for kind, *full, precision, goal in PASSES:
        n, d, k = HERE.shape(*full)
        if x is None or x.shape != (n, d):
            x = clusters(n, d, k)
        model, params = bound(kind, x, k)
        given, base = model.as_pass(params), ragged(x)
        assert base is not None
        there = dataclasses.replace(base, precision=precision)
        part = x[:20_000]
        few = dataclasses.replace(ragged(part), precision=precision)
        want = model.expected_statistics(part.cpu().numpy(), params)
        got = model.expected_statistics(few, params)[0]
        error = float(np.abs(got - want).max() / np.abs(want).max())
        seconds = timed(lambda there=there, given=given: sweep(there, given))
        inside = launched(lambda there=there, given=given: sweep(there, given))
        rows.append(
            {
                "pass": f"{kind}, {full[0]:,} x {full[1]}, K={full[2]}, {precision}",
                "ms": 1e3 * inside,
                "ms with host": 1e3 * seconds,
                "TB/s of X": n * d * 4 / inside / 1e12,
                "goal ms": goal,
                "error": error,
            }
        )
    return rows


def bench_mixed() -> dict[str, float]:
    """A pass over mixed columns: features written down once, then read by the kernel; ms."""
    import dataclasses

    import torch

    from emfed.models import Categorical, mixed_mixture
    from emfed.models.devices import ragged

    n, _, k = HERE.shape(2 * MILLION, 16, 10)
    g = torch.Generator(device=HERE.device).manual_seed(2)
    numbers = torch.randn((n, 6), device=HERE.device, generator=g, dtype=torch.float64)
    counts = torch.poisson(torch.full((n, 4), 3.0, device=HERE.device), generator=g)
    flags = (torch.rand((n, 4), device=HERE.device, generator=g) < 0.3).double()
    codes = torch.randint(0, 5, (n, 2), device=HERE.device, generator=g).double()
    x = torch.cat([numbers, counts.double(), flags, codes], dim=1)
    families = ["gaussian"] * 6 + ["poisson"] * 4 + ["bernoulli"] * 4 + [Categorical(5)] * 2
    model = mixed_mixture(k, families, missing=False)
    model = model.bind(model.summary(x[None]), np.array([n]), np.ones(1))
    params, out = model.start(0), {}
    for precision in ("double", "fast"):
        rows = dataclasses.replace(ragged(x), precision=precision, memo={})
        out[precision] = 1e3 * timed(lambda rows=rows: model.expected_statistics(rows, params))
    few = x[:20_000]
    want = model.expected_statistics(few.cpu().numpy(), params)
    got = model.expected_statistics(few, params)
    out["error"] = float(np.abs(got - want).max() / np.abs(want).max())
    return out


def bench_workers() -> dict[str, float]:
    """1,000 workers of 10,000 rows and of ragged sizes, beside one with all rows."""
    from emfed.models.devices import Ragged, sweep

    n, d, k = HERE.shape(10 * MILLION, 20, 10)
    x = clusters(n, d, k)
    model, params = bound("tied", x, k)
    given = model.as_pass(params)
    out = {}
    g = np.random.default_rng(0)
    many = 10 if HERE.rehearsal else 1000
    cuts = np.sort(g.choice(np.arange(1, n), many - 1, replace=False))
    sizes = {
        "one worker": np.array([n]),
        "1,000 workers of 10,000 rows": np.full(many, n // many),
        "1,000 workers of random sizes": np.diff(np.concatenate([[0], cuts, [n]])),
    }
    for name, counts in sizes.items():
        rows = Ragged(x, np.cumsum(counts) - counts, counts)
        out[name] = 1e3 * timed(lambda rows=rows: sweep(rows, given))
    return out


def plain_torch(x: Any, k: int) -> Callable[[], object]:
    """The tied E-step in three float32 operations, as anybody would write it."""
    import torch

    b = torch.randn((x.shape[1], k), device=HERE.device)

    def run() -> object:
        r = torch.softmax(x @ b, dim=1)
        return r.sum(dim=0), r.T @ x

    return run


def sklearn_round(kind: str, x: Any, k: int) -> float:
    """Seconds of a round of scikit-learn on torch: what twenty more of them cost."""
    from sklearn import config_context
    from sklearn.mixture import GaussianMixture

    def fit(rounds: int) -> float:
        HERE.synchronize()
        began = time.perf_counter()
        GaussianMixture(
            k,
            covariance_type=kind,
            max_iter=rounds,
            tol=0,
            init_params="random_from_data",
            random_state=0,
        ).fit(x)
        HERE.synchronize()
        return time.perf_counter() - began

    with config_context(array_api_dispatch=True), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit(2)
        return float(np.median([(fit(22) - fit(2)) / 20 for _ in range(3)]))


def bench_peers() -> dict[str, float]:
    n, d, k = HERE.shape(10 * MILLION, 20, 10)
    x = clusters(n, d, k)
    out = {"plain torch, tied, 10,000,000 x 20, K=10, float32": 1e3 * timed(plain_torch(x, k))}
    for kind, n, d, k in PEERS:
        rows, columns, components = HERE.shape(n, d, k)
        x = clusters(rows, columns, components)
        seconds = sklearn_round(kind, x, components)
        out[f"scikit-learn on torch, {kind}, {n:,} x {d}, K={k}, float32"] = 1e3 * seconds
    return out


RAPIDS = (("cuML", "cuml.mixture"), ("cuVS", "cuvs.cluster.gmm"))
"""Where others would keep mixtures on a GPU; in 26.10 neither has them in Python."""


def rapids(x: Any, k: int) -> dict[str, Any]:
    """Seconds of their fits, or a sentence for each that is not to be had."""
    found: dict[str, Any] = {}
    for name, module in RAPIDS:
        try:
            kind = import_module(module).GaussianMixture
        except ImportError as error:
            found[name] = f"not measured: {error}."
        except AttributeError:
            found[name] = f"not measured: {module} has no GaussianMixture."
        else:
            began = time.perf_counter()
            kind(n_components=k).fit(x)
            HERE.synchronize()
            found[name] = time.perf_counter() - began
    return found


FITS = 5
"""Fits whose median is told, after the first one, which compiles."""


@contextmanager
def parts_of_a_fit() -> Iterator[dict[str, float]]:
    """Seconds that fits within spend on the search for a start and on labels of the rows."""
    found = {"of it start": 0.0, "of it labels": 0.0}

    def watched(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            began = time.perf_counter()
            answer = call(*arguments, **options)
            found[name] += time.perf_counter() - began
            return answer

        return run

    places = (
        ("of it start", in_process, "own_sketch"),
        ("of it start", starting, "_tried"),
        ("of it labels", base.MixtureMethods, "_label"),
    )
    with ExitStack() as stack:
        for name, owner, method in places:
            call = watched(name, getattr(owner, method))
            stack.enter_context(patch.object(owner, method, call))
        yield found


def bench_fits() -> list[dict[str, Any]]:
    """Whole fits by default of rows on the GPU; both log-likelihoods by one function."""
    from sklearn import config_context
    from sklearn.mixture import GaussianMixture

    n, d, k = HERE.shape(10 * MILLION, 20, 10)
    x, out = clusters(n, 4 if HERE.rehearsal else d, k), []
    for kind in ("tied", "diag", "full"):
        seconds: dict[str, list[float]] = {}
        for attempt in range(2 if HERE.rehearsal else 1 + FITS):
            HERE.synchronize()
            with parts_of_a_fit() as parts:
                began = time.perf_counter()
                ours = FederatedGaussianMixture(k, covariance_type=kind).fit(x)
                parts["emfed" if attempt else "first"] = time.perf_counter() - began
            for name, value in parts.items():
                seconds.setdefault(name, []).append(value)
        with config_context(array_api_dispatch=True), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(1 if HERE.rehearsal else 1 + FITS):
                HERE.synchronize()
                began = time.perf_counter()
                peer = GaussianMixture(
                    k, covariance_type=kind, init_params="random_from_data", random_state=0
                ).fit(x)
                HERE.synchronize()
                seconds.setdefault("scikit-learn", []).append(time.perf_counter() - began)
            theirs = float(peer.score(x[:MILLION]))
        out.append(
            {
                "fit": kind,
                **{name: float(np.median(values)) for name, values in seconds.items()},
                "emfed log-likelihood": float(ours.score(x[:MILLION])),
                "scikit-learn log-likelihood": theirs,
                **(rapids(x, k) if kind == "full" else dict.fromkeys(dict(RAPIDS), "-")),
            }
        )
    return out


def bench_stream(gigabytes: float = 8.0) -> list[dict[str, Any]]:
    """Passes over rows in pinned memory, on a disk, in its cache and in memory, and what they may.

    A disk is read by eight threads for comparison, past the cache, which is emptied for the pass.
    """
    import torch

    d, k = 20, 10
    n = 200 if HERE.rehearsal else int(gigabytes * 1e9 / (4 * d))
    pinned = torch.empty(1 << (10 if HERE.rehearsal else 26), pin_memory=not HERE.rehearsal)
    there = torch.empty_like(pinned, device=HERE.device)
    bus = pinned.numel() * 4 / timed(lambda: there.copy_(pinned, non_blocking=True)) / 1e9
    x = clusters(min(n, MILLION), d, k)
    given = bound("tied", x, k)
    table = torch.empty((n, d), pin_memory=not HERE.rehearsal)
    for start in range(0, n, MILLION):
        table[start : start + MILLION].copy_(x[: min(MILLION, n - start)])
    out = [_streamed("pinned memory", given, table, bus)]
    with tempfile.TemporaryDirectory(dir=os.environ.get("EMFED_STREAM_DIR")) as folder:
        path = Path(folder) / "rows.npy"
        mapped: Any = np.lib.format.open_memmap(path, "w+", np.float32, (n, d))
        del mapped
        with path.open("r+b") as file:
            file.seek(path.stat().st_size - 4 * n * d)
            table.numpy().tofile(file)
            file.flush()
            os.fsync(file.fileno())
        _forget(path)
        disk = _raw(path)
        _forget(path)
        mapped = np.load(path, mmap_mode="r")
        with patch.object(placing, "CACHED_SHARE", 0.0):  # as a file that memory cannot hold
            out.append(_streamed("a file, from the disk, past the cache", given, mapped, disk))
        out.append(_streamed("the same, into the cache", given, mapped, disk))
        out.append(_streamed("the same, out of the cache", given, mapped, bus))
        out.extend(_parquet(given, mapped[: n // 4], Path(folder)))
        del mapped
    few = table[: n // 4].numpy().copy()
    return [*out, _streamed("memory that is not pinned", given, few, bus)]


def _parquet(given: tuple[Any, Any], rows: Any, folder: Path) -> list[dict[str, Any]]:
    """A Parquet file of these rows, from its cache, beside decoding it alone."""
    try:
        import polars as pl

        from emfed.data import ParquetRows
    except ImportError:
        return []
    path = folder / "rows.parquet"
    names = [f"c{i}" for i in range(rows.shape[1])]
    pl.DataFrame(np.asarray(rows), schema=names).write_parquet(path, compression="uncompressed")
    source = ParquetRows(path)
    began = time.perf_counter()
    for start, stop in source.cuts():
        source.read(start, stop)
    decoded = 4 * rows.size / (time.perf_counter() - began) / 1e9
    return [_streamed("a Parquet file, from its cache", given, source, decoded)]


def _streamed(name: str, given: tuple[Any, Any], table: Any, most: float) -> dict[str, Any]:
    """A pass over a table that streams, GB/s, beside what its source gives."""
    import torch

    from emfed.data.placing import Streamed
    from emfed.data.summing import HeldRows
    from emfed.data.tables import WorkerTables

    model, params = given

    def run(rows: Any) -> None:
        workers = WorkerTables([Streamed(rows, torch.device(HERE.device))], ["a"], None)
        HeldRows(workers).sum(
            lambda block, weights: model.expected_statistics(block, params, weights)
        )

    run(np.zeros((100, table.shape[1]), np.float32))  # compiles
    began = time.perf_counter()
    run(table)
    size = 4 * table.shape[0] * table.shape[1]
    speed = size / (time.perf_counter() - began) / 1e9
    return {
        "rows in": name,
        "GB": size / 1e9,
        "pass, GB/s": speed,
        "source, GB/s": most,
        "share": speed / most,
    }


def _forget(path: Path) -> None:
    """The file's pages leave the cache."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _raw(path: Path, threads: int = 8, step: int = 1 << 24) -> float:
    """Reading a file as a whole by several threads, past the cache, GB/s."""
    from concurrent.futures import ThreadPoolExecutor

    size = path.stat().st_size

    def read(number: int) -> None:
        buffer = mmap.mmap(-1, step)  # aligned, as reading past the cache needs it
        try:
            file = os.open(path, os.O_RDONLY | os.O_DIRECT)
        except OSError:  # a file system in memory knows nothing past the cache
            file = os.open(path, os.O_RDONLY)
        try:
            for start in range(number * step, size, threads * step):
                os.preadv(file, [buffer], start)
        finally:
            os.close(file)

    began = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(read, range(threads)))
    return size / (time.perf_counter() - began) / 1e9


def as_table(title: str, rows: list[dict[str, Any]]) -> str:
    """A table in markdown, as docs/benchmarks.md keeps it."""
    title = f"(A rehearsal of 48 rows.) {title}" if HERE.rehearsal else title
    names = list(rows[0])
    lines = ["| " + " | ".join(names) + " |", "|" + " --- |" * len(names)]
    lines += ["| " + " | ".join(_cell(row[name]) for name in names) + " |" for row in rows]
    return f"{title}\n\n" + "\n".join(lines)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.1e}" if 0 < abs(value) < 1e-3 else f"{value:.4g}"
    return str(value)


def verdicts(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Every goal beside what was found, and whether it was reached.

    A pass is judged by what its kernels take; the host's part is told beside it.
    """
    out: list[dict[str, Any]] = []

    def judge(work: str, goal: str, told: str, reached: bool) -> None:
        word = "rehearsed" if HERE.rehearsal else "pass" if reached else "MISS"
        out.append({"work": work, "goal": goal, "found": told, "": word})

    full = [f"full, {2 * MILLION:,} x 64, K=32, {p}" for p in ("double", "fast")]
    for row in found.get("passes", ()):
        told = f"{row['ms']:.3g} ms ({row['ms with host']:.3g} with the host)"
        if row["goal ms"] is not None:
            judge(row["pass"], f"{row['goal ms']} ms", told, row["ms"] <= row["goal ms"])
        bound = 1e-12 if row["pass"].endswith("double") else 1e-6
        judge(f"{row['pass']}: error", f"{bound}", f"{row['error']:.1e}", row["error"] <= bound)
        peer = found.get("peers", {}).get(f"scikit-learn on torch, {full[0][:-8]}, float32")
        if row["pass"] in full and peer is not None:
            times = peer / row["ms with host"]
            judge(row["pass"], "5 x scikit-learn", f"{times:.3g} x", times >= 5)
    if "workers" in found:
        one, *more = found["workers"].values()
        for name, ms in zip(list(found["workers"])[1:], more, strict=True):
            judge(name, "1.3 x one worker", f"{ms / one:.3g} x", ms <= 1.3 * one)
    for row in found.get("fits", ()):
        times = row["scikit-learn"] / row["emfed"]
        gain = row["emfed log-likelihood"] - row["scikit-learn log-likelihood"]
        told = f"{times:.3g} x, {gain:+.3g} nats"
        judge(f"whole fit, {row['fit']}", "5 x, no lower", told, times >= 5 and gain >= -1e-6)
    for row in found.get("streams", ()):
        if row["rows in"] in ("pinned memory", "a file, from the disk, past the cache"):
            told = f"{row['share']:.0%}"
            judge(
                f"streaming {row['GB']:.3g} GB, {row['rows in']}", "80%", told, row["share"] >= 0.8
            )
    return out


def run_tests() -> dict[str, Any]:
    """The tests of the kernels where they run: their last line."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "tests/models/devices",
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    print(done.stdout, flush=True)
    return {"tests": done.stdout.strip().splitlines()[-1], "passed": done.returncode == 0}


STEPS: dict[str, tuple[str, Callable[[], Any]]] = {
    "passes": ("A pass for statistics", bench_passes),
    "mixed": ("Mixed columns, 2,000,000 rows x 16, K=10, ms with host", bench_mixed),
    "workers": ("Workers in one launch, tied, exact, ms with host", bench_workers),
    "peers": ("A round of others, ms", bench_peers),
    "fits": ("Whole fits by default, seconds", bench_fits),
    "streams": (
        "Streaming",
        lambda: bench_stream(float(os.environ.get("EMFED_STREAM_GB", "8"))),
    ),
}


def bench_gpu(tests: bool = False, out: Path | None = None) -> dict[str, Any] | None:
    """Everything, printed as it comes and kept; what fails is told, and the rest goes on."""
    why = available()
    if why is not None:
        print(f"gpu: {why}")
        return None
    found: dict[str, Any] = {"device": device()}
    told = [", ".join(f"{name} {value}" for name, value in found["device"].items())]
    found["failed"] = []

    def tell(text: str) -> None:
        told.append(text)
        print(f"\n{text}", flush=True)
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text("\n\n".join(told) + "\n", encoding="utf-8")

    tell(told.pop())
    if tests:
        found["tests"] = run_tests()
        tell(f"Tests of the kernels: {found['tests']['tests']}")
        found["failed"] += [] if found["tests"]["passed"] else ["tests"]
    for name, (title, step) in STEPS.items():
        try:
            found[name] = step()
        except Exception as error:
            found["failed"].append(name)
            tell(f"{title}: failed with {type(error).__name__}: {error}")
            continue
        rows = found[name]
        if name == "peers":
            rows = [{"what": k, "ms": v} for k, v in rows.items()]
        tell(as_table(title, rows if isinstance(rows, list) else [rows]))
    found["goals"] = verdicts(found)
    if found["goals"]:
        tell(as_table("Goals", found["goals"]))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rehearse", action="store_true", help="a few rows, without a GPU")
    parser.add_argument("--tests", action="store_true", help="run the tests of the kernels first")
    parser.add_argument("--out", type=Path, help="a file that keeps what is printed")
    options = parser.parse_args()
    if options.rehearse:
        HERE.device = "cpu"
    found = bench_gpu(options.tests, options.out)
    return int(found is None or bool(found["failed"]))


if __name__ == "__main__":
    sys.exit(main())
