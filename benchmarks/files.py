"""A Parquet file of 10 GB, fitted in little memory.

The file has 20 columns of doubles, uncompressed, in row groups of 250,000 rows (40 MB). It is
written to a temporary folder and removed. The fit (tied, K=10, three rounds of EM) runs in a
process of its own, whose peak memory is reported; so is the time of one pass over the file.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

import emfed
from benchmarks.timing import apart, peak_memory

COLUMNS, GROUP = 20, 250_000


def make_file(path: Path, gigabytes: float) -> int:
    """Write the file, a few row groups again and again; returns its size."""
    rng = np.random.default_rng(0)
    centres = 2 * rng.normal(size=(10, COLUMNS))
    parts = []
    for _ in range(4):
        rows = rng.normal(size=(GROUP, COLUMNS)) + centres[rng.integers(10, size=GROUP)]
        parts.append(pl.DataFrame(rows, schema=[f"x{i}" for i in range(COLUMNS)]).lazy())
    count = max(1, round(gigabytes * 1e9 / (8 * COLUMNS * GROUP)))
    whole = pl.concat([parts[i % 4] for i in range(count)])
    whole.sink_parquet(path, compression="uncompressed", row_group_size=GROUP)
    return path.stat().st_size


def measure(path: str, rounds: int = 3) -> dict[str, float]:
    """Fit the file in this process."""
    began = time.perf_counter()
    result = emfed.fit(emfed.gaussian_mixture(10, "tied"), path, rounds=rounds, threads=1)
    return {
        "rows": result.model.constants.samples,
        "seconds": time.perf_counter() - began,
        "pass_seconds": result.records[1:].average("seconds"),
        "peak_bytes": peak_memory(),
    }


def bench_files(gigabytes: float = 10.0) -> dict[str, Any]:
    """Write, fit, remove."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "large.parquet"
        size = make_file(path, gigabytes)
        return {"file_bytes": size, **apart("benchmarks.files", f"measure({str(path)!r})")}
