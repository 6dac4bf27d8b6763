"""Random fault plans on small runs over a network, many at a time.

``python -m benchmarks faults [--masks] [--plans N] [--first S] [--keep FILE] [--minutes M]``; the
file holds a line for each plan that was tried, and the next call goes on after them.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import time
import warnings
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tests.network.networks import Outcome, try_plan

from emfed import EmfedError, EmfedWarning


def _try(seed: int, masks: bool) -> Outcome:
    logging.disable(logging.CRITICAL)  # refusals and spoiled messages are what is being tried
    warnings.simplefilter("ignore", EmfedWarning)
    try:
        return try_plan(seed, masks)
    except EmfedError:  # it never ended
        return Outcome(seed, np.inf, np.inf, 0, 0, 0, False)


def bench_faults(
    plans: int,
    first: int = 0,
    masks: bool = False,
    keep: Path | None = None,
    minutes: float = np.inf,
) -> dict[str, Any]:
    """What became of so many plans; ``failed`` are the seeds of those that broke a promise.

    With ``masks`` sites tell sums alone, and vanish between the two exchanges of each, too.
    """
    began = time.perf_counter()
    outcomes = [o for o in _kept(keep, masks) if first <= o.seed < first + plans]
    known = {o.seed for o in outcomes}
    seeds = [seed for seed in range(first, first + plans) if seed not in known]
    # Each process starts afresh: a fork would copy the threads of the linear algebra. There are as
    # many as `taskset` allows.
    with multiprocessing.get_context("spawn").Pool(len(os.sched_getaffinity(0))) as pool:
        for one in pool.imap_unordered(partial(_try, masks=masks), seeds, chunksize=5):
            outcomes.append(one)
            if keep is not None:
                with keep.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"masks": masks, **asdict(one)}) + "\n")
            if time.perf_counter() - began > 60 * minutes:
                break
    compared = [o.error for o in outcomes if o.error == o.error]
    return {
        "plans": len(outcomes),
        "seconds": time.perf_counter() - began,
        "rounds": sum(o.rounds for o in outcomes),
        "kills": sum(o.kills for o in outcomes),
        "plans_with_a_kill": sum(o.kills > 0 for o in outcomes),
        "new_generations": sum(o.generations for o in outcomes),
        "largest_gap": max(o.gap for o in outcomes),
        "answers_compared": len(compared),
        "largest_error": max(compared, default=0.0),
        "failed": sorted(o.seed for o in outcomes if not o.good),
    }


def _kept(keep: Path | None, masks: bool) -> list[Outcome]:
    """What earlier calls tried."""
    if keep is None or not keep.exists():
        return []
    lines = [json.loads(line) for line in keep.read_text(encoding="utf-8").splitlines()]
    return [Outcome(**line) for line in lines if line.pop("masks") is masks]
