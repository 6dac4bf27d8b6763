"""Real sites on one machine: as many `emfed join` processes as asked, and one `emfed serve`.

Everything is as an operator has it: TLS, keys, a roster, masks, state on disk, a page each. Memory
is read from ``/proc``: what a process has resident (libraries that all share count in each), and
its part where shared pages are shared out among those who share them.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.deployments import MIXTURE, Deployment, difference, mixture_tables

ROUNDS, ROWS, COLUMNS = 20, 200, 5
CONFIG = """
[fit]
tol = 0.0
rounds = {rounds}
seed = 5
[sites]
expected = {sites}
farewell = 30.0
"""


def memory(pid: int) -> dict[str, float]:
    """Resident now, resident at most, and the process's own share of it, in GB."""
    found = {}
    for name in ("status", "smaps_rollup"):
        for line in Path(f"/proc/{pid}/{name}").read_text().splitlines():
            key, _, rest = line.partition(":")
            found.setdefault(key, rest)
    return {
        "resident": int(found["VmRSS"].split()[0]) / 1e6,
        "most": int(found["VmHWM"].split()[0]) / 1e6,
        "share": int(found["Pss"].split()[0]) / 1e6,
    }


def bench_sites(sites: int) -> dict[str, Any]:
    """A masked fit with so many sites; what it takes of time and memory."""
    text = MIXTURE + CONFIG.format(rounds=ROUNDS, sites=sites)
    tables = mixture_tables(sites, ROWS, COLUMNS)
    with (
        tempfile.TemporaryDirectory(prefix="emfed-sites-") as name,
        Deployment(Path(name) / "d", tables, text) as deployment,
    ):
        began = time.monotonic()
        serve = deployment.serve()
        joined = [deployment.join(site) for site in tables]
        deployment.wait_for_round(3, 290)
        met = time.monotonic()
        deployment.wait_for_round(ROUNDS - 3, 290)
        here = [memory(process.pid) for process in joined]
        server = memory(serve.pid)
        while deployment.status.get("state") != "finished":
            time.sleep(0.05)
        ended, summary = time.monotonic(), deployment.wait(120, (0, 3))
        codes = [process.wait(60) for process in joined]
        seconds = time.monotonic() - began
        return {
            "sites": sites,
            "seconds": seconds,
            "round_seconds": (ended - met) / (summary["rounds"] - 3),
            "site": {key: max(one[key] for one in here) for key in here[0]},
            "median_site": {key: statistics.median(o[key] for o in here) for key in here[0]},
            "server": server,
            "ended_well": sum(code in (0, 3) for code in codes),
            "difference": difference(summary, deployment.here(summary["seed"])),
        }
