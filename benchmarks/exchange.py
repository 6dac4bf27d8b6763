"""Random fault plans on the exchange of sums, over a network in memory: thousands an hour.

``python -m benchmarks exchange [--plans N] [--first S] [--minutes M]``.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import time
from typing import Any

import numpy as np
from tests.network.exchanges import Tried, try_plan


def _try(seed: int) -> Tried:
    logging.disable(logging.CRITICAL)  # what is refused is what is being tried
    return try_plan(seed)


def bench_exchange(plans: int, first: int = 0, minutes: float = np.inf) -> dict[str, Any]:
    """What became of so many plans; ``failed`` are the seeds of those that broke a promise."""
    began, tried = time.perf_counter(), list[Tried]()
    with multiprocessing.get_context("spawn").Pool(len(os.sched_getaffinity(0))) as pool:
        for one in pool.imap_unordered(_try, range(first, first + plans), chunksize=5):
            tried.append(one)
            if time.perf_counter() - began > 60 * minutes:
                break
    return {
        "plans": len(tried),
        "seconds": time.perf_counter() - began,
        "entries": sum(one.entries for one in tried),
        "kills": sum(one.kills for one in tried),
        "plans with a kill": sum(one.kills > 0 for one in tried),
        "longest without an entry, s": max(one.largest_gap for one in tried),
        "failed": sorted(one.seed for one in tried if one.wrong),
    }
