"""``python -m benchmarks.operations [--events 8] [--seed 0] [--json FILE]``: an operator's evening.

Four sites and a server as processes, over TLS, while at random a key is removed and put back, a key
is rotated, a backup of the server or of a site is put back, a site is expelled and let back in, and
the run is paused. Then one site leaves for good. The run must end, tell its sites, and leave the
model of those who stayed; and it must never stand still for more than a minute without saying why.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.deployments import FEDEM, MIXTURE, Deployment, mixture_tables
from emfed import fit, gaussian_mixture, load
from emfed.network.deployment.orders import change_orders
from emfed.network.keys import add_site, remove_site, rotate_site_key, take_rotation

CONFIG = (
    MIXTURE
    + FEDEM
    + """
[fit]
tol = 0.0
rounds = 100000
seed = 5
[privacy]
masks = false
[sites]
expected = 4
minimum = 2
deadline = 20.0
attempts = 40
deliver = true
farewell = 5.0
"""
)
RULES = (
    "unmasked = true\nlargest_rounds = false\nlargest_choices = false\nlargest_changes = false\n"
)
"""The evening has more rounds and changes than careful owners answer to."""
FARTHEST = 0.05
"""Largest difference of a mean from that of EM over the rows of those who stayed: the last rounds
are quantised."""
LONGEST_SILENCE = 60.0


class Evening:
    """One deployment, and what may happen to it."""

    def __init__(self, deployment: Deployment, seed: int) -> None:
        self.deployment, self.source = deployment, np.random.Generator(np.random.Philox(key=seed))
        self.run = deployment.folder / "run"
        self.said: list[str] = []
        self.silence = 0.0

    def join(self, name: str) -> None:
        self.deployment.join(name, "--rules", "rules.toml")

    def site(self) -> str:
        return str(self.source.choice(list(self.deployment.tables)))

    def removed_and_returned_key(self) -> str:
        name = self.site()
        public = self.deployment.folder / f"{name}.pub"
        remove_site(self.deployment.keys, name)
        self.rest()
        add_site(self.deployment.keys, public)
        return name

    def rotated_key(self) -> str:
        name = self.site()
        told = rotate_site_key(self.deployment.folder / f"{name}.key")
        take_rotation(self.deployment.keys, told)
        current = self.deployment.keys / "sites" / f"{name}.pub"
        for place in (self.deployment.folder, self.deployment.folder / "roster"):  # all pin it
            shutil.copyfile(current, place / f"{name}.pub")
        return name

    def restored_server(self) -> str:
        backup = self.deployment.folder / "backup"
        shutil.rmtree(backup, ignore_errors=True)
        shutil.copytree(self.run / "fit", backup)
        self.rest()
        self.deployment.stop("serve")
        shutil.rmtree(self.run / "fit")
        shutil.copytree(backup, self.run / "fit")
        self.deployment.serve()
        return "server"

    def restored_site(self) -> str:
        name = self.site()
        memory = self.deployment.folder / f"site-{name}" / "memory"
        backup = self.deployment.folder / f"backup-{name}"
        shutil.rmtree(backup, ignore_errors=True)
        shutil.copytree(memory, backup)
        self.rest()
        self.deployment.stop(name)
        shutil.rmtree(memory)
        shutil.copytree(backup, memory)
        self.join(name)
        return name

    def expelled_and_readmitted(self) -> str:
        name = self.site()
        change_orders(self.run, expelled={name: "a trial"})
        self.rest()
        change_orders(self.run, expelled={})
        return name

    def paused(self) -> str:
        change_orders(self.run, paused=True)
        self.rest()
        change_orders(self.run, paused=False)
        return "server"

    @property
    def events(self) -> list[Callable[[], str]]:
        return [
            self.removed_and_returned_key,
            self.rotated_key,
            self.restored_server,
            self.restored_site,
            self.expelled_and_readmitted,
            self.paused,
        ]

    def rest(self) -> None:
        time.sleep(self.source.uniform(0.5, 3.0))

    def watch(self, over: threading.Event) -> None:
        """The longest time in which the status said nothing."""
        while not over.wait(0.2):
            said = self.deployment.status.get("time")
            if said is not None:
                self.silence = max(self.silence, time.time() - said)


def evening(folder: Path, events: int, seed: int) -> dict[str, Any]:
    """All of it, and what came out."""
    began, over = time.monotonic(), threading.Event()
    with Deployment(folder, mixture_tables(4), CONFIG) as deployment:
        night = Evening(deployment, seed)
        (folder / "rules.toml").write_text(RULES, encoding="utf-8")
        deployment.serve()
        for name in deployment.tables:
            night.join(name)
        deployment.wait_for_round(5, 120)
        threading.Thread(target=night.watch, args=(over,), daemon=True).start()
        for number in range(events):
            kinds = night.events
            happens = kinds[number % len(kinds)]
            who = happens()
            deployment.wait_for_round(deployment.status.get("round", 0) + 20, 120)
            night.said.append(f"{happens.__name__} {who}")
            print(f"{time.monotonic() - began:6.1f} s: {night.said[-1]}", flush=True)
        deployment.stop("s3")  # for good
        deployment.wait_for_round(deployment.status.get("round", 0) + 60, 180)
        change_orders(night.run, finish=True)
        summary = deployment.wait(120)
        over.set()
        stayed = {name: t for name, t in deployment.tables.items() if name != "s3"}
        without = [n for n in stayed if not (folder / f"site-{n}" / "model.emfed").exists()]
        for name in without:
            print(f"{name} got no model: {deployment.output(name)[-800:]}", flush=True)
            print((night.run / "logs" / "serve.log").read_text(encoding="utf-8")[-3000:])
        delivered = load(folder / "model" / "model.emfed")
        pooled = fit(gaussian_mixture(2), stayed, "em", rounds=300, seed=5)
        means = (np.sort(found.params.means, axis=0) for found in (delivered, pooled))
        first, second = means
        return {
            "events": night.said,
            "rounds": summary["rounds"],
            "seconds": time.monotonic() - began,
            "difference": float(np.abs(first - second).max()),
            "longest_silence": night.silence,
            "without_model": without,
        }


def main() -> None:
    """Run, show, judge."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.operations")
    parser.add_argument("--events", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="emfed-operations-") as name:
        found = evening(Path(name) / "d", options.events, options.seed)
    print(json.dumps(found, indent=1))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    silent = found["longest_silence"] > LONGEST_SILENCE
    if found["difference"] > FARTHEST or silent or found["without_model"]:
        sys.exit("operations: a bound does not hold")


if __name__ == "__main__":
    main()
