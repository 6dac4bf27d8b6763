"""Timing on a noisy machine: interleave what is compared, take the best of many. And memory."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def best_times(tasks: dict[str, Callable[[], object]], seconds: float = 2.0) -> dict[str, float]:
    """Seconds of a processor for each task: the smallest of many, in turn, so that noise hits all.

    Tasks run in one thread, and what waits for a core that others use computes nothing: by the
    clock on the wall a pass took ten times as long on two cores with a load of 11.
    """
    best = dict.fromkeys(tasks, float("inf"))
    for run in tasks.values():
        run()
    end = time.perf_counter() + seconds * len(tasks)
    while True:
        for name, run in tasks.items():
            began = time.process_time()
            run()
            best[name] = min(best[name], time.process_time() - began)
        if time.perf_counter() > end:
            return best


def peak_memory() -> int:
    """The largest resident size of this process so far, in bytes."""
    status = Path("/proc/self/status")
    if status.exists():  # what getrusage says of a child includes its parent's size at the fork
        line = next(x for x in status.read_text().splitlines() if x.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def apart(module: str, call: str) -> Any:
    """What ``module.call`` returns, computed in a process of its own."""
    script = f"import json; from {module} import *; print(json.dumps({call}))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr or f"{call} ended with code {done.returncode}")
    return json.loads(done.stdout)
