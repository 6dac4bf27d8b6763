"""Timing on a noisy machine: interleave what is compared, take the best of many."""

from __future__ import annotations

import time
from collections.abc import Callable


def best_times(tasks: dict[str, Callable[[], object]], seconds: float = 2.0) -> dict[str, float]:
    """Seconds of each task: the smallest of many, in turn so that noise hits all alike."""
    best = dict.fromkeys(tasks, float("inf"))
    for run in tasks.values():
        run()
    end = time.perf_counter() + seconds * len(tasks)
    while True:
        for name, run in tasks.items():
            began = time.perf_counter()
            run()
            best[name] = min(best[name], time.perf_counter() - began)
        if time.perf_counter() > end:
            return best
