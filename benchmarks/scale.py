"""One million registered workers beside ten thousand: time of a round, and memory.

A tied mixture with K=10, d=19 (q = 200), ten rows a worker, 1,000 workers active a round, four
levels. Each size runs in a process of its own, so that its peak memory is its own. Rows are
float32, as large simulations hold them.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

import emfed
from benchmarks.timing import apart, peak_memory

K, D, ROWS, ACTIVE = 10, 19, 10, 1000


def measure(workers: int, rounds: int = 40) -> dict[str, float]:
    """Processor seconds of a round (the median) and peak memory of this process."""
    rng = np.random.default_rng(0)
    rows = rng.standard_normal(size=(workers * ROWS, D), dtype=np.float32)
    rows += 2 * rng.standard_normal(size=(K, D), dtype=np.float32)[rng.integers(K, size=len(rows))]
    data = emfed.data.WorkerData(rows, np.arange(0, workers * ROWS + 1, ROWS))
    run = emfed.fitting.open_run(
        emfed.gaussian_mixture(K, "tied"),
        data,
        emfed.FedEM(emfed.Dithering(4), step_size=0.1),
        participation=emfed.algorithms.FixedSize(ACTIVE),
        tol=0,
    )
    times = []
    for _ in range(rounds):
        began = time.process_time()
        run.step()
        times.append(time.process_time() - began)
    return {"round_seconds": float(np.median(times)), "peak_bytes": float(peak_memory())}


def bench_scale() -> list[dict[str, Any]]:
    """Both sizes, in turn, three times; the best time of each."""
    sizes = (10_000, 1_000_000)
    runs = [[apart("benchmarks.scale", f"measure({n})") for n in sizes] for _ in range(3)]
    rows = []
    for position, workers in enumerate(sizes):
        best = min((run[position] for run in runs), key=lambda run: run["round_seconds"])
        rows.append({"workers": workers, **best})
    return rows
