"""Random fault plans on small runs over a network, many at a time."""

from __future__ import annotations

import logging
import multiprocessing
import os
import time
import warnings
from functools import partial
from typing import Any

from tests.network.networks import Outcome, try_plan

from emfed import EmfedWarning


def _try(seed: int, masks: bool) -> Outcome:
    logging.disable(logging.CRITICAL)  # refusals and spoiled messages are what is being tried
    warnings.simplefilter("ignore", EmfedWarning)
    return try_plan(seed, masks)


def bench_faults(plans: int, first: int = 0, masks: bool = False) -> dict[str, Any]:
    """What became of so many plans; ``failed`` are the seeds of those that broke a promise.

    With ``masks`` sites tell sums alone, and vanish between the two exchanges of each, too.
    """
    began = time.perf_counter()
    # Each process starts afresh: a fork would copy the threads of the linear algebra.
    with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
        seeds = range(first, first + plans)
        outcomes = list(pool.imap_unordered(partial(_try, masks=masks), seeds, chunksize=20))
    compared = [o.error for o in outcomes if o.error == o.error]
    return {
        "plans": plans,
        "seconds": time.perf_counter() - began,
        "rounds": sum(o.rounds for o in outcomes),
        "kills": sum(o.kills for o in outcomes),
        "plans_with_a_kill": sum(o.kills > 0 for o in outcomes),
        "new_generations": sum(o.generations for o in outcomes),
        "largest_gap": max(o.gap for o in outcomes),
        "answers_compared": len(compared),
        "largest_error": max(compared),
        "failed": sorted(o.seed for o in outcomes if not o.good),
    }
