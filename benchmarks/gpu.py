"""Passes, fits and streams on a GPU, beside plain torch and scikit-learn on torch, in one run.

``python -m benchmarks gpu``, or ``python -m benchmarks.gpu`` where polars is not installed.
"""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from threadpoolctl import threadpool_info

from emfed.fitting import driver
from emfed.fitting.estimators import FederatedGaussianMixture, base
from emfed.models import gaussian_mixture

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


def available() -> str | None:
    """Why there is nothing to measure, or None."""
    try:
        import torch
        import triton  # noqa: F401
    except ImportError:
        return "no torch and triton here: pip install 'emfed[gpu]'."
    return None if torch.cuda.is_available() else "torch finds no GPU here."


def device() -> dict[str, Any]:
    import torch
    import triton

    x = torch.empty(1 << 28, device="cuda")
    y = torch.empty_like(x)
    seconds = timed(lambda: y.copy_(x))
    threads = [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"]
    return {
        "device": torch.cuda.get_device_name(),
        "copy TB/s": round(2 * x.numel() * 4 / seconds / 1e12, 2),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "threads of numpy's products": max(threads, default=1),
    }


def timed(run: Callable[[], object], repeats: int = 50, warm: float = 0.3) -> float:
    """Seconds from the call to the answer on the host: the median of many.

    Before that the card works for a while: its clock is slow when it comes from doing nothing.
    """
    import torch

    run(), run()
    ends = time.perf_counter() + warm
    while time.perf_counter() < ends:
        run()
    found = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        torch.cuda.synchronize()
        found.append(time.perf_counter() - began)
    return float(np.median(found))


def clusters(n: int, d: int, k: int) -> Any:
    """Float32 rows around k centres, on the GPU."""
    import torch

    g = torch.Generator(device="cuda").manual_seed(1)
    centres = 1.5 * torch.randn((k, d), device="cuda", generator=g)
    labels = torch.randint(0, k, (n,), device="cuda", generator=g)
    return centres[labels] + torch.randn((n, d), device="cuda", generator=g)


def bound(kind: str, x: Any, k: int) -> tuple[Any, Any]:
    """A mixture that knows the rows, and parameters near their clusters."""
    model = gaussian_mixture(k, kind)
    one = np.ones(1)
    model = model.bind(model.summary(x[None]), np.array([len(x)]), one)
    return model, model.start(0)


def launched(sweep: Callable[[], object]) -> float:
    """Seconds that the kernels of a pass take, without what the host does around them."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    sweep()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(5):
            sweep()
        torch.cuda.synchronize()
    return sum(event.device_time_total for event in seen.key_averages()) / 5 / 1e6


def bench_passes() -> list[dict[str, Any]]:
    """A pass for statistics: seconds in all, in kernels, and whether numpy says the same."""
    import dataclasses

    from emfed.models.devices import ragged, sweep

    rows: list[dict[str, Any]] = []
    x: Any = None
    for kind, n, d, k, precision, goal in PASSES:
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
                "pass": f"{kind}, {n:,} x {d}, K={k}, {precision}",
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

    n, k = 2 * MILLION, 10
    g = torch.Generator(device="cuda").manual_seed(2)
    numbers = torch.randn((n, 6), device="cuda", generator=g, dtype=torch.float64)
    counts = torch.poisson(torch.full((n, 4), 3.0, device="cuda"), generator=g)
    flags = (torch.rand((n, 4), device="cuda", generator=g) < 0.3).double()
    codes = torch.randint(0, 5, (n, 2), device="cuda", generator=g).double()
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

    n, d, k = 10 * MILLION, 20, 10
    x = clusters(n, d, k)
    model, params = bound("tied", x, k)
    given = model.as_pass(params)
    out = {}
    g = np.random.default_rng(0)
    cuts = np.sort(g.choice(n, 999, replace=False))
    sizes = {
        "one worker": np.array([n]),
        "1,000 workers of 10,000 rows": np.full(1000, 10_000),
        "1,000 workers of random sizes": np.diff(np.concatenate([[0], cuts, [n]])),
    }
    for name, counts in sizes.items():
        rows = Ragged(x, np.cumsum(counts) - counts, counts)
        out[name] = 1e3 * timed(lambda rows=rows: sweep(rows, given))
    return out


def plain_torch(x: Any, k: int) -> Callable[[], object]:
    """The tied E-step in three float32 operations, as anybody would write it."""
    import torch

    b = torch.randn((x.shape[1], k), device="cuda")

    def run() -> object:
        r = torch.softmax(x @ b, dim=1)
        return r.sum(dim=0), r.T @ x

    return run


def sklearn_round(kind: str, x: Any, k: int) -> float:
    """Seconds of a round of scikit-learn on torch: what twenty more of them cost."""
    import torch
    from sklearn import config_context
    from sklearn.mixture import GaussianMixture

    def fit(rounds: int) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        GaussianMixture(
            k,
            covariance_type=kind,
            max_iter=rounds,
            tol=0,
            init_params="random_from_data",
            random_state=0,
        ).fit(x)
        torch.cuda.synchronize()
        return time.perf_counter() - began

    with config_context(array_api_dispatch=True), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit(2)
        return float(np.median([(fit(22) - fit(2)) / 20 for _ in range(3)]))


def bench_peers() -> dict[str, float]:
    x = clusters(10 * MILLION, 20, 10)
    out = {"plain torch, tied, 10,000,000 x 20, K=10, float32": 1e3 * timed(plain_torch(x, 10))}
    for kind, n, d, k in PEERS:
        x = clusters(n, d, k)
        out[f"scikit-learn on torch, {kind}, {n:,} x {d}, K={k}, float32"] = 1e3 * sklearn_round(
            kind, x, k
        )
    return out


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
        ("of it start", driver, "search"),
        ("of it labels", base.MixtureMethods, "_label"),
    )
    with ExitStack() as stack:
        for name, owner, method in places:
            call = watched(name, getattr(owner, method))
            stack.enter_context(patch.object(owner, method, call))
        yield found


def bench_fits() -> list[dict[str, Any]]:
    """Whole fits by default of rows on the GPU; both log-likelihoods by one function."""
    import torch
    from sklearn import config_context
    from sklearn.mixture import GaussianMixture

    n, d, k = 10 * MILLION, 20, 10
    x, out = clusters(n, d, k), []
    for kind in ("tied", "diag", "full"):
        seconds = {}
        for attempt in range(2):
            torch.cuda.synchronize()
            with parts_of_a_fit() as parts:
                began = time.perf_counter()
                ours = FederatedGaussianMixture(k, covariance_type=kind).fit(x)
                seconds["first" if attempt == 0 else "emfed"] = time.perf_counter() - began
        seconds.update(parts)
        with config_context(array_api_dispatch=True), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(2):
                torch.cuda.synchronize()
                began = time.perf_counter()
                peer = GaussianMixture(
                    k, covariance_type=kind, init_params="random_from_data", random_state=0
                ).fit(x)
                torch.cuda.synchronize()
                seconds["scikit-learn"] = time.perf_counter() - began
            theirs = float(peer.score(x[:MILLION]))
        out.append(
            {
                "fit": kind,
                **seconds,
                "emfed log-likelihood": float(ours.score(x[:MILLION])),
                "scikit-learn log-likelihood": theirs,
            }
        )
    return out


def bench_stream(gigabytes: float = 8.0) -> list[dict[str, Any]]:
    """Passes over rows in pinned memory, on a disk, in its cache and in memory, and what they may.

    A disk is read by eight threads for comparison, past the cache, which is emptied for the pass.
    """
    import torch

    d, k = 20, 10
    n = int(gigabytes * 1e9 / (4 * d))
    pinned = torch.empty(1 << 26, pin_memory=True)
    there = torch.empty(1 << 26, device="cuda")
    bus = pinned.numel() * 4 / timed(lambda: there.copy_(pinned, non_blocking=True)) / 1e9
    x = clusters(MILLION, d, k)
    given = bound("tied", x, k)
    table = torch.empty((n, d), pin_memory=True)
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
        out.append(_streamed("a file, from the disk", given, mapped, disk))
        out.append(_streamed("the same, from its cache", given, mapped, bus))
        del mapped
    few = table[: n // 4].numpy().copy()
    return [*out, _streamed("memory that is not pinned", given, few, bus)]


def _streamed(name: str, given: tuple[Any, Any], table: Any, most: float) -> dict[str, Any]:
    """A pass over a table that streams, GB/s, beside what its source gives."""
    import torch

    from emfed.data.placing import Streamed
    from emfed.data.tables import WorkerTables
    from emfed.network import StackedFederation

    model, params = given

    def run(rows: Any) -> None:
        workers = WorkerTables([Streamed(rows, torch.device("cuda"))], ["a"], None)
        for piece in StackedFederation(workers).pieces(workers, np.arange(1)):
            model.expected_statistics(piece.rows, params, piece.padding)

    run(np.zeros((1000, table.shape[1]), np.float32))  # compiles
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
        file = os.open(path, os.O_RDONLY | os.O_DIRECT)
        try:
            for start in range(number * step, size, threads * step):
                os.preadv(file, [buffer], start)
        finally:
            os.close(file)

    began = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(read, range(threads)))
    return size / (time.perf_counter() - began) / 1e9


def show(title: str, rows: list[dict[str, Any]]) -> None:
    """A table in markdown, as docs/benchmarks.md keeps it."""
    names = list(rows[0])
    print(f"\n{title}\n")
    print("| " + " | ".join(names) + " |")
    print("|" + " --- |" * len(names))
    for row in rows:
        print("| " + " | ".join(_cell(row[name]) for name in names) + " |")


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.1e}" if 0 < abs(value) < 1e-3 else f"{value:.4g}"
    return str(value)


def bench_gpu() -> dict[str, Any] | None:
    """Everything, printed as it comes."""
    why = available()
    if why is not None:
        print(f"gpu: {why}")
        return None
    found: dict[str, Any] = {"device": device()}
    print(", ".join(f"{name} {value}" for name, value in found["device"].items()), flush=True)
    found["passes"] = bench_passes()
    show("A pass for statistics", found["passes"])
    found["mixed"] = bench_mixed()
    show("Mixed columns, 2,000,000 rows x 16, K=10, ms with host", [found["mixed"]])
    found["workers"] = bench_workers()
    show("Workers in one launch, tied, exact, ms with host", [found["workers"]])
    found["peers"] = bench_peers()
    show("A round of others", [{"what": k, "ms": v} for k, v in found["peers"].items()])
    found["fits"] = bench_fits()
    show("Whole fits by default, seconds", found["fits"])
    found["streams"] = bench_stream(float(os.environ.get("EMFED_STREAM_GB", "8")))
    show("Streaming", found["streams"])
    return found


if __name__ == "__main__":
    sys.exit(0 if bench_gpu() is not None else 1)
