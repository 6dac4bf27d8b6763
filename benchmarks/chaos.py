"""``python -m benchmarks.chaos [--harm kill] [--kills 100] [--seed 0]``.

First the guide, as it is written, and an undisturbed run. Then a fit whose processes of server and
sites are killed with signal 9, at times and in an order that the seed decides, from the opening
and the search for a start on: the run must end, and the answer must be that of a run in one process
with the seed that the sites agreed on. Other harms than ``kill``: ``stop`` (a process stands still,
as on a machine that sleeps), ``disk`` (its writes fail, as on a full disk), ``cut`` (connections
end in mid-message), ``slow`` (bytes take 0.4 s more), each for up to three seconds; ``all`` does
one after the other. ``--json FILE`` keeps the figures. ``--keep FILE`` makes portions of one
campaign: each call adds its runs, with a seed of their own, to those of the file, and judges all.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from tests.network.doors import Door

from benchmarks.__main__ import show
from benchmarks.deployments import MIXTURE, Deployment, difference, mixture_tables
from benchmarks.guide import follow_guide

SITES = 3
COMMON = """
[fit]
tol = 0.0
rounds = {rounds}
seed = 5

[sites]
expected = 3
minimum = 3
wait_for = 600.0
"""
KILLS, ROUNDS = 100, 40
"""How often harm is done, and rounds of the disturbed run for each time: it is to last until all
have happened."""
LULL = 1.0
"""Seconds between two kills, at most."""
HARMS = ("kill", "stop", "disk", "cut", "slow")
BOUND = 1e-6
"""Largest difference of a parameter to the run in one process: sums are rounded otherwise there."""


def quiet(folder: Path, rounds: int) -> dict[str, Any]:
    """An undisturbed run beside that of one process."""
    config = MIXTURE + COMMON.format(rounds=rounds)
    with Deployment(folder / "quiet", mixture_tables(SITES), config) as deployment:
        began = time.monotonic()
        deployment.start()
        summary = deployment.wait(120 + 30 * rounds, (0, 3))
        return {
            "run": "undisturbed",
            "rounds": summary["rounds"],
            "kills": 0,
            "seconds": time.monotonic() - began,
            "difference": difference(summary, deployment.here(summary["seed"])),
        }


def by_hand(folder: Path) -> dict[str, Any]:
    """The guide by the letter."""
    place = folder / "by-hand"
    place.mkdir()
    about = {"kills": 0, "difference": 0.0, "run": "docs/between-machines.md"}
    return {**about, **follow_guide(place)}


@contextlib.contextmanager
def harmed(harm: str, pid: int, door: Door) -> Iterator[None]:
    """While it lasts a process stands still or cannot write, or a line is slow or has been cut."""
    limits = resource.RLIMIT_FSIZE, resource.RLIM_INFINITY
    try:
        if harm == "stop":
            os.kill(pid, signal.SIGSTOP)
        elif harm == "disk":
            resource.prlimit(pid, limits[0], (0, limits[1]))
        elif harm == "slow":
            door.delay = 0.4
        else:
            door.cut_after(20)
        yield
    finally:
        door.delay = 0.0
        with contextlib.suppress(ProcessLookupError):
            if harm == "stop":
                os.kill(pid, signal.SIGCONT)
            elif harm == "disk":
                resource.prlimit(pid, limits[0], (limits[1], limits[1]))


def strike(deployment: Deployment, harm: str, who: str, door: Door, seconds: float) -> bool:
    """Do one harm; False if there was nobody to do it to."""
    if harm == "kill":
        return deployment.kill(who)
    process = deployment.process(who)
    if process.poll() is not None:
        return False
    with harmed(harm, process.pid, door):
        time.sleep(seconds)
    deployment.process(who)  # one that gave up is started again
    return True


def disturbed(folder: Path, rounds: int, kills: int, seed: int, harm: str) -> dict[str, Any]:
    """A fit whose processes come to harm."""
    source = np.random.Generator(np.random.Philox(key=seed))
    config = MIXTURE + COMMON.format(rounds=rounds)
    with (
        Deployment(folder / f"chaos-{harm}", mixture_tables(SITES), config) as deployment,
        Door(deployment.port) as door,
    ):
        if harm in ("cut", "slow"):
            deployment.called = door.port
        began = time.monotonic()
        deployment.start()
        done: list[dict[str, Any]] = []
        while len(done) < kills and deployment.status.get("state") != "finished":
            here = deployment.status.get("round", 0)
            if here == 0 and len(done) < kills // 5:  # in the opening and the search for a start
                time.sleep(source.uniform(0.0, 4 * LULL))
            elif source.random() < 0.7:  # else while the last one still hurts
                with contextlib.suppress(TimeoutError):
                    deployment.wait_for_round(here + 1, 60)
            time.sleep(source.uniform(0.0, LULL))
            site = f"join {source.choice(list(deployment.tables))}"
            who = "serve" if source.random() < 0.5 else site
            at = deployment.status.get("round")
            if strike(deployment, harm, who, door, source.uniform(0.1, 3.0)):
                done.append({"who": who, "round": at, "second": time.monotonic() - began})
                print(f"{done[-1]['second']:7.1f} s, after round {at}: {harm} of {who}", flush=True)
        summary = deployment.wait(600 + 0.3 * rounds, (0, 3))
        return {
            "run": harm,
            "rounds": summary["rounds"],
            "kills": len(done),
            "seconds": time.monotonic() - began,
            "difference": difference(summary, deployment.here(summary["seed"])),
            "killed": done,
        }


def main() -> None:
    """Run, show, judge."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos")
    parser.add_argument("--harm", choices=[*HARMS, "all"], default="kill")
    parser.add_argument("--kills", type=int, default=KILLS, help="how often it is done")
    parser.add_argument("--quiet-rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--keep", type=Path, help="a file of earlier portions, to be added to")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="emfed-chaos-") as name:
        folder, kills = Path(name), options.kills
        rows = []
        if options.keep and options.keep.exists():
            rows = json.loads(options.keep.read_text(encoding="utf-8"))
        elif options.quiet_rounds:
            rows = [by_hand(folder), quiet(folder, options.quiet_rounds)]
        seed = options.seed + len(rows)
        for harm in HARMS if options.harm == "all" else [options.harm]:
            rows.append(disturbed(folder, ROUNDS * kills, kills, seed, harm))
            if options.keep:
                options.keep.write_text(json.dumps(rows) + "\n", encoding="utf-8")
    lines = [
        (
            row["run"],
            row["rounds"],
            row["kills"],
            f"{row['seconds']:.0f}",
            f"{row['difference']:.1e}",
        )
        for row in rows
    ]
    done = sum(row["kills"] for row in rows)
    lines.append(("all", "", done, f"{sum(row['seconds'] for row in rows):.0f}", ""))
    headings = ("run, 3 sites", "rounds", "harms", "s", "difference")
    show(Console(), "Beside the same run in one process", headings, lines)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    held = all(row["difference"] < BOUND for row in rows)
    harmed_now = rows[-len(HARMS) if options.harm == "all" else -1 :]
    enough = all(row["kills"] >= kills for row in harmed_now)
    if not (held and enough):
        sys.exit("chaos: a bound does not hold" if enough else "chaos: the run ended too soon")


if __name__ == "__main__":
    main()
