"""``python -m benchmarks.chaos [--harm kill] [--kills 100] [--minutes 10] [--seed 0]``.

First the guide, as it is written, and an undisturbed run. Then masked fits with a range of numbers
of components and moves, one after the other, whose processes of server and sites are killed with
signal 9, at times and in an order that the seed decides, from the opening and the search for a
start on: each fit must end, and choose what one process chooses with the seed that the sites agreed
on. Other harms than ``kill``: ``stop`` (a process stands still, as on a machine that sleeps),
``disk`` (its writes fail, as on a full disk), ``cut`` (connections end in mid-message), ``slow``
(bytes take 0.4 s more), each for up to three seconds; ``all`` does one after the other. ``--json
FILE`` keeps the figures. ``--keep FILE`` makes portions of one campaign: each call adds its runs,
with a seed of their own, to those of the file, and judges all.
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

import emfed
from benchmarks.__main__ import show
from benchmarks.deployments import Deployment, mixture_tables
from benchmarks.guide import follow_guide

SITES, ROWS = 3, 200
CONFIG = """[model]
kind = "gaussian-mixture"
n_components = "1:4"

[fit]
seed = {seed}

[sites]
expected = 3
minimum = 3
wait_for = 600.0
"""
KILLS = 100
"""How often harm is done."""
LULL = 1.0
"""Seconds between two kills, at most."""
EARLY = 5
"""Kills before the first round of a fit, at least: then they wait for it."""
HARMS = ("kill", "stop", "disk", "cut", "slow")
BOUND = 1e-5
"""Nats a row that a model may be away from that of one process, whose sums have other roundings."""


def away(deployment: Deployment, summary: dict[str, Any]) -> float:
    """Nats a row between the model and that of one process; infinite for another number chosen."""
    alone = deployment.here(summary["seed"])
    found = emfed.load(deployment.config.place("output") / "model.emfed")
    rows = np.concatenate([table.to_numpy() for table in deployment.tables.values()])
    if found.model.n_components != alone.model.n_components:
        return np.inf
    return abs(found.log_likelihood(rows) - alone.log_likelihood(rows))


def quiet(folder: Path) -> dict[str, Any]:
    """An undisturbed run beside that of one process."""
    config = CONFIG.format(seed=5)
    with Deployment(folder / "quiet", mixture_tables(SITES, ROWS), config) as deployment:
        began = time.monotonic()
        deployment.start()
        summary = deployment.wait(600, (0, 3))
        return {
            "run": "undisturbed",
            "fits": 1,
            "rounds": summary["rounds"],
            "kills": 0,
            "seconds": time.monotonic() - began,
            "difference": away(deployment, summary),
        }


def by_hand(folder: Path) -> dict[str, Any]:
    """The guide by the letter."""
    place = folder / "by-hand"
    place.mkdir()
    about = {"fits": 1, "kills": 0, "difference": 0.0, "run": "docs/between-machines.md"}
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


def disturbed(
    folder: Path, kills: int, seed: int, harm: str, minutes: float = np.inf
) -> dict[str, Any]:
    """Fits whose processes come to harm, until it was done so often."""
    source = np.random.Generator(np.random.Philox(key=seed))
    began, done = time.monotonic(), list[dict[str, Any]]()
    summaries, apart = list[dict[str, Any]](), list[float]()
    while len(done) < kills and time.monotonic() - began < 60 * minutes:
        config = CONFIG.format(seed=seed + len(apart))
        place = folder / f"chaos-{harm}-{len(apart)}"
        with (
            Deployment(place, mixture_tables(SITES, ROWS), config) as deployment,
            Door(deployment.port) as door,
        ):
            if harm in ("cut", "slow"):
                deployment.called = door.port
            deployment.start()
            for told in harms(deployment, harm, source, door):
                done.append({"fit": len(apart), "second": time.monotonic() - began, **told})
                print("{second:7.1f} s, fit {fit}, round {round}: {who}".format(**done[-1]))
                sys.stdout.flush()
                if len(done) == kills or time.monotonic() - began > 60 * minutes:
                    break  # and it may end in peace
            summaries.append(deployment.wait(600, (0, 3)))
            apart.append(away(deployment, summaries[-1]))
    return {
        "run": harm,
        "fits": len(apart),
        "rounds": sum(summary["rounds"] for summary in summaries),
        "kills": len(done),
        "seconds": time.monotonic() - began,
        "difference": max(apart),
        "killed": done,
    }


def harms(
    deployment: Deployment, harm: str, source: np.random.Generator, door: Door
) -> Iterator[dict[str, Any]]:
    """Harm to one process after the other, until the fit ends."""
    done = 0
    while deployment.status.get("state") != "finished":
        here = deployment.status.get("round") or 0
        if not here and done < EARLY:  # in the opening and the search for a start
            time.sleep(source.uniform(0.0, 4 * LULL))
        elif source.random() < 0.7:  # else while the last one still hurts
            with contextlib.suppress(TimeoutError):
                deployment.wait_for_round(here + 1, 60)
        time.sleep(source.uniform(0.0, LULL))
        site = f"join {source.choice(list(deployment.tables))}"
        who = "serve" if source.random() < 0.5 else site
        at = deployment.status.get("round")
        if strike(deployment, harm, who, door, source.uniform(0.1, 3.0)):
            done += 1
            yield {"who": who, "round": at}


def main() -> None:
    """Run, show, judge."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos")
    parser.add_argument("--harm", choices=[*HARMS, "all"], default="kill")
    parser.add_argument("--kills", type=int, default=KILLS, help="how often it is done")
    parser.add_argument("--minutes", type=float, default=np.inf, help="do no harm later")
    parser.add_argument("--alone", action="store_true", help="leave out the guide and quiet runs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--keep", type=Path, help="a file of earlier portions, to be added to")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="emfed-chaos-") as name:
        folder, kills = Path(name), options.kills
        rows = []
        if options.keep and options.keep.exists():
            rows = json.loads(options.keep.read_text(encoding="utf-8"))
        elif not options.alone:
            rows = [by_hand(folder), quiet(folder)]
        seed = options.seed + len(rows)
        for harm in HARMS if options.harm == "all" else [options.harm]:
            rows.append(disturbed(folder, kills, seed, harm, options.minutes))
            if options.keep:
                options.keep.write_text(json.dumps(rows) + "\n", encoding="utf-8")
    lines = [
        (
            row["run"],
            row["fits"],
            row["rounds"],
            row["kills"],
            f"{row['seconds']:.0f}",
            f"{row['difference']:.1e}",
        )
        for row in rows
    ]
    done = sum(row["kills"] for row in rows)
    lines.append(("all", "", "", done, f"{sum(row['seconds'] for row in rows):.0f}", ""))
    headings = ("run, 3 sites", "fits", "rounds", "harms", "s", "nats")
    show(Console(), "Beside the same run in one process", headings, lines)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    held = all(row["difference"] < BOUND for row in rows)
    harmed_now = rows[-len(HARMS) if options.harm == "all" else -1 :]
    enough = options.minutes < np.inf or all(row["kills"] >= kills for row in harmed_now)
    if not (held and enough):
        sys.exit("chaos: a bound does not hold" if enough else "chaos: the run ended too soon")


if __name__ == "__main__":
    main()
