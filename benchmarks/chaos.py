"""``python -m benchmarks.chaos [--engine websocket] [--harm kill] [--kills 100] [--seed 0]``.

First the guide, as it is written (over Flower also our app under ``flwr run``). Then, undisturbed:
FedEM and the imputation end where a run in one process ends, VR-FedEM near it. Last, FedEM while
processes of server and sites are killed with signal 9, at times and in an order that the seed
decides, from the opening and the search for a start on: the run must end, memories must be exact,
and, as every round is a full pass of all sites, the answer must be that of the undisturbed run.
Other harms than ``kill``: ``stop`` (a process stands still, as on a machine that sleeps), ``disk``
(its writes fail, as on a full disk), ``cut`` (connections end in mid-message), ``slow`` (bytes take
0.4 s more), each for up to three seconds; ``all`` does one after the other. ``--json FILE`` keeps
the figures. ``--keep FILE`` makes portions of one campaign: each call adds its runs, with a seed of
their own, to those of the file, and judges all of them; the quiet runs are made once.
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
import polars as pl
from rich.console import Console
from tests.network.doors import Door

from benchmarks.__main__ import show
from benchmarks.deployments import FEDEM, MIXTURE, Deployment, difference, mixture_tables
from benchmarks.guide import follow_guide
from emfed.models.site_owner import COLUMNS

SITES = 3
COMMON = """
[fit]
tol = 0.0
rounds = {rounds}
seed = 5

[sites]
expected = 3
minimum = 3
deadline = {deadline}
attempts = 40
"""
ALGORITHMS = {
    "FedEM": FEDEM,
    "VR-FedEM": FEDEM.replace("FedEM", "VR-FedEM") + "batch_size = 10\ninner_rounds = 5\n",
}
RULES = 'mini_batches = true\nmodels = ["*"]\n'
"""VR-FedEM asks about mini-batches, and imputation does not tell the rows behind its numbers."""
SERVER = {"websocket": ("serve",), "flower": ("superlink", "superexec", "server app", "serve")}
SITE = {"websocket": ("join",), "flower": ("supernode", "site_process", "join")}
KILLS = {"websocket": 100, "flower": 20}
HARMS = ("kill", "stop", "disk", "cut", "slow")
ROUNDS = {"websocket": 40, "flower": 2}
"""Rounds of the disturbed run for each kill: it is to last until all have happened."""
LULL = {"websocket": 1.0, "flower": 8.0}
"""Seconds between two kills, at most."""
BOUNDS = {"quiet": 1e-9, "chaos": 1e-8, "batches": 1e-2, "gap": 1e-12}
"""Of VR-FedEM only the end is alike: secrets of the sites choose the rows of mini-batches."""


def owner_tables(times: int = 6) -> dict[str, pl.DataFrame]:
    """Sites of a low-rank table, each owned by one worker, two thirds of their cells seen."""
    tables = {}
    for i in range(SITES):
        source = np.random.Generator(np.random.Philox(key=90 + i))
        factors = source.standard_normal((8, 2))
        loadings = np.random.Generator(np.random.Philox(key=3)).standard_normal((times, 2))
        seen = np.argwhere(source.random((8, times)) < 0.67)
        values = (factors @ loadings.T)[tuple(seen.T)] + 0.1 * source.standard_normal(len(seen))
        weight = np.ones(len(seen))
        tables[f"s{i}"] = pl.DataFrame(
            np.column_stack([seen[:, 0] + 8 * i, seen[:, 1], weight, values]), schema=list(COLUMNS)
        )
    return tables


def quiet(folder: Path, rounds: int, engine: str) -> list[dict[str, Any]]:
    """Undisturbed runs beside those of one process."""
    rows = []
    owner = '[model]\nkind = "site-owner"\ntimes = 6\nrank = 2\n'
    plans = [
        *((name, MIXTURE + text, mixture_tables(SITES)) for name, text in ALGORITHMS.items()),
        ("imputation, site-owner", owner + ALGORITHMS["FedEM"], owner_tables()),
    ]
    for number, (name, text, tables) in enumerate(plans):
        config = text + COMMON.format(rounds=rounds, deadline=60.0)
        with Deployment(folder / f"quiet{number}", tables, config, engine) as deployment:
            began = time.monotonic()
            rules = deployment.folder / "rules.toml"
            rules.write_text(RULES, encoding="utf-8")
            deployment.serve()
            for site in tables:
                deployment.join(site, "--rules", str(rules))
            summary = deployment.wait(120 + 30 * rounds)
            rows.append(
                {
                    "run": name,
                    "rounds": summary["rounds"],
                    "kills": 0,
                    "seconds": time.monotonic() - began,
                    "difference": difference(summary, deployment.here()),
                    "gap": deployment.memory_gap(),
                }
            )
    return rows


def by_hand(folder: Path, engine: str) -> list[dict[str, Any]]:
    """The guide by the letter, or our app under Flower's own commands."""
    nothing = {"kills": 0, "difference": 0.0, "gap": 0.0}
    place = folder / "by-hand"
    place.mkdir()
    if engine == "websocket":
        return [{**nothing, "run": "docs/between-machines.md", **follow_guide(place)}]
    from benchmarks.stock import run_stock

    return [{**nothing, "run": "flwr run, stock SuperNodes", "rounds": 4, **run_stock(place)}]


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
    folder: Path, rounds: int, kills: int, seed: int, engine: str, harm: str
) -> dict[str, Any]:
    """FedEM, from a sketch and for three numbers of components, while processes come to harm."""
    source = np.random.Generator(np.random.Philox(key=seed))
    several = MIXTURE.replace("n_components = 2", 'n_components = "1:3"')
    config = several + ALGORITHMS["FedEM"] + COMMON.format(rounds=rounds, deadline=25.0)
    with (
        Deployment(folder / f"chaos-{harm}", mixture_tables(SITES), config, engine) as deployment,
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
                time.sleep(source.uniform(0.0, 4 * LULL[engine]))
            elif source.random() < 0.7:  # else while the last one still hurts
                with contextlib.suppress(TimeoutError):
                    deployment.wait_for_round(here + 1, 60)
            time.sleep(source.uniform(0.0, LULL[engine]))
            if source.random() < 0.5:
                who = str(source.choice(SERVER[engine]))
            else:
                who = f"{source.choice(SITE[engine])} {source.choice(list(deployment.tables))}"
            at = deployment.status.get("round")
            if strike(deployment, harm, who, door, source.uniform(0.1, 3.0)):
                done.append({"who": who, "round": at, "second": time.monotonic() - began})
                print(f"{done[-1]['second']:7.1f} s, after round {at}: {harm} of {who}", flush=True)
        summary = deployment.wait(600 + 0.3 * rounds)
        return {
            "run": f"FedEM, 1 to 3 components, {harm}",
            "rounds": summary["rounds"],
            "kills": len(done),
            "seconds": time.monotonic() - began,
            "difference": difference(summary, deployment.here()),
            "gap": deployment.memory_gap(),
            "killed": done,
        }


def _bound(row: dict[str, Any]) -> str:
    return "batches" if row["run"] == "VR-FedEM" else "chaos" if row["kills"] else "quiet"


def main() -> None:
    """Run, show, judge."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos")
    parser.add_argument("--engine", choices=sorted(KILLS), default="websocket")
    parser.add_argument("--harm", choices=[*HARMS, "all"], default="kill")
    parser.add_argument("--kills", type=int, help="how often it is done")
    parser.add_argument("--quiet-rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--keep", type=Path, help="a file of earlier portions, to be added to")
    options = parser.parse_args()
    engine, kills = options.engine, options.kills or KILLS[options.engine]
    with tempfile.TemporaryDirectory(prefix="emfed-chaos-") as name:
        folder = Path(name)
        rows = []
        if options.keep and options.keep.exists():
            rows = json.loads(options.keep.read_text(encoding="utf-8"))
        elif options.quiet_rounds:
            rows = by_hand(folder, engine) + quiet(folder, options.quiet_rounds, engine)
        seed = options.seed + len(rows)
        for harm in HARMS if options.harm == "all" else [options.harm]:
            many = ROUNDS[engine] * kills
            rows.append(disturbed(folder, many, kills, seed, engine, harm))
            if options.keep:
                options.keep.write_text(json.dumps(rows) + "\n", encoding="utf-8")
    lines = [
        (
            row["run"],
            row["rounds"],
            row["kills"],
            f"{row['seconds']:.0f}",
            f"{row['difference']:.1e}",
            f"{row['gap']:.1e}",
        )
        for row in rows
    ]
    done = sum(row["kills"] for row in rows)
    lines.append(("all", "", done, f"{sum(row['seconds'] for row in rows):.0f}", "", ""))
    headings = (f"run over {engine}, 3 sites", "rounds", "harms", "s", "difference", "memory gap")
    show(Console(), "Beside the same run in one process", headings, lines)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    held = all(
        row["difference"] < BOUNDS[_bound(row)] and row["gap"] < BOUNDS["gap"] for row in rows
    )
    harmed_now = rows[-len(HARMS) if options.harm == "all" else -1 :]
    enough = all(row["kills"] >= kills for row in harmed_now)
    if not (held and enough):
        sys.exit("chaos: a bound does not hold" if enough else "chaos: the run ended too soon")


if __name__ == "__main__":
    main()
