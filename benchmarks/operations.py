"""``python -m benchmarks.operations [--events 100] [--keep FILE]``: operators' nights.

Four sites and a server as processes, over TLS, and in a random order all that happens to such a
thing: kills, a minute's standstill, full disks, clocks that jump, lines that are cut or slow, keys
removed and put back or rotated, backups of the server or of a site put back, a site expelled and
let back in, one that goes and comes back, a pause. A night has as many events as there are kinds,
each once, and at its end one site leaves for good. The run must end, tell its sites, and leave the
model of those who stayed; it must never stand still for more than a minute without saying why; and
the logs must tell what happened. ``--keep FILE`` keeps what nights have found: the same command
goes on with the next one, until there are ``--events`` in all or ``--minutes`` are over.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tests.network.doors import Door

from benchmarks.chaos import harmed
from benchmarks.deployments import FEDEM, MIXTURE, Deployment, mixture_tables
from emfed import fit, gaussian_mixture, load
from emfed.deployment.orders import change_orders
from emfed.deployment.status import REPEAT_SECONDS
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
LONGEST_SILENCE, EXPLAINED_SECONDS = 60.0, 40.0
"""The second: until an event is to be told. A site calls again after half a minute at most, and the
server looks for keys every four seconds."""


STANDSTILL_SECONDS = 60.0
PATIENCE_SECONDS = 600.0
"""Until a night counts as one that never ends; silence is measured apart."""
SLOW_SECONDS = 2.0
"""What a slow line adds to every message."""
CLOCK = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1")
"""Debian's faketime: a clock of one's own for a process, which a file sets while it runs."""
TOLD = {
    "killed_site": r"WHO (is gone|is connected|called again)",
    "killed_server": r"the server before it said last",
    "stopped_site": r"WHO (is silent|left)|no answer from",
    "stopped_server": r"WHO (is silent|is connected)|lost.*trying again",
    "full_disk_at_site": r"File too large|could not be (answered|worked out)",
    "full_disk_at_server": r"File too large|the server before it said last",
    "cut_line": r"WHO (is gone|is connected|called again)",
    "slow_line": r"WHO took \d",
    "clock_jump": r"the clock here jumped by",
    "removed_and_returned_key": r"WHO (is shut out|left)|its key was removed",
    "rotated_key": r"WHO (is gone|is connected|called again)|next key",
    "restored_server": r"ahead|start at zero|begins again",
    "restored_site": r"WHO.*memory|WHO (left|is back)",  # a slow start: it counts anew
    "expelled_and_readmitted": r"WHO (left|is back|refuses)|a trial",
    "went_and_came_back": r"WHO (left|is back)",
    "paused": r"paused",
}
"""What the logs or the terminals must say after each. WHO is a site's name; any site's, if it was
the server that was hit."""


class Evening:
    """One deployment, and what may happen to it."""

    def __init__(self, deployment: Deployment, door: Door, seed: int) -> None:
        self.deployment, self.source = deployment, np.random.Generator(np.random.Philox(key=seed))
        self.door, self.run = door, deployment.folder / "run"
        self.said: list[str] = []
        self.unexplained: list[str] = []
        self.silence, self.hit = 0.0, False
        """The longest silence of a server that was not itself hit."""

    def _told(self) -> list[Path]:
        """Logs and terminals."""
        folder = self.deployment.folder
        return sorted([*folder.glob("*/logs/*.log"), *folder.glob("*.out")])

    def _read(self, path: Path) -> str:
        return path.read_text(errors="replace")

    def lengths(self) -> dict[Path, int]:
        """How much each has said by now."""
        return {path: len(self._read(path)) for path in self._told()}

    def text_since(self, before: dict[Path, int]) -> str:
        """What came since then."""
        return "\n".join(self._read(path)[before.get(path, 0) :] for path in self._told())

    def killed_site(self) -> str:
        name = self.site()
        self.process(name).kill()
        self.process(name).wait()
        self.join(name)
        return name

    def killed_server(self) -> str:
        with self.server_hit():
            self.deployment.kill("serve")
        return "server"

    def stopped_site(self) -> str:
        return self.harm("stop", self.site(), STANDSTILL_SECONDS)

    def stopped_server(self) -> str:
        with self.server_hit():
            return self.harm("stop", "serve", STANDSTILL_SECONDS)

    def full_disk_at_site(self) -> str:
        return self.harm("disk", self.site(), self.source.uniform(1.0, 5.0))

    def full_disk_at_server(self) -> str:
        with self.server_hit():
            return self.harm("disk", "serve", self.source.uniform(1.0, 5.0))

    def cut_line(self) -> str:
        end = time.monotonic() + PATIENCE_SECONDS
        while "s2" not in self.deployment.status.get("online", ()) and time.monotonic() < end:
            time.sleep(0.2)  # there is no line to cut while it pauses between two calls
        return self.harm("cut", "s2", 1.0)  # it calls through the door

    def slow_line(self) -> str:
        before, end = self.lengths(), time.monotonic() + REPEAT_SECONDS + 5 * SLOW_SECONDS
        self.door.delay = SLOW_SECONDS
        time.sleep(5 * SLOW_SECONDS)
        while "s2 took" not in self.text_since(before) and time.monotonic() < end:
            time.sleep(1.0)  # it was told of s2 less than a minute before
        self.door.delay = 0.0
        return "s2"

    def clock_jump(self) -> str:
        for offset in ("+3h", "-2h", "+0"):  # at the site that has a clock of its own, s1
            (self.deployment.folder / "clock").write_text(f"{offset}\n")
            time.sleep(5.0)  # sites look every four seconds
        return "s1"

    def went_and_came_back(self) -> str:
        name = self.site()
        self.deployment.stop(name)
        with contextlib.suppress(TimeoutError):
            self.deployment.wait_for_round(self.deployment.status.get("round", 0) + 15, 60)
        self.join(name)
        return name

    def process(self, name: str) -> Any:
        return self.deployment.process(name if name == "serve" else f"join {name}")

    def harm(self, what: str, who: str, seconds: float) -> str:
        with harmed(what, self.process(who).pid, self.door):
            time.sleep(seconds)
        if who == "serve":
            self.deployment.process("serve")  # one that gave up is started again
        elif self.process_ended(who):
            self.join(who)
        return "server" if who == "serve" else who

    def process_ended(self, name: str) -> bool:
        return self.deployment._processes[name].poll() is not None

    @contextlib.contextmanager
    def server_hit(self) -> Iterator[None]:
        """While the server itself stands still it can say nothing."""
        self.hit = True
        try:
            yield
            end = time.monotonic() + PATIENCE_SECONDS
            while time.time() - self.deployment.status.get("time", 0) > 2 < end - time.monotonic():
                self.deployment.process("serve")  # one that gave up late is started again, too
                time.sleep(0.1)
        finally:
            self.hit = False

    def join(self, name: str) -> None:
        deployment, told = self.deployment, os.environ.copy()
        deployment.called = self.door.port if name == "s2" else deployment.port
        if name == "s1" and CLOCK.exists():
            place = str(deployment.folder / "clock")
            os.environ |= {"LD_PRELOAD": str(CLOCK), "FAKETIME_TIMESTAMP_FILE": place}
            os.environ |= {"FAKETIME_NO_CACHE": "1", "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
        deployment.join(name, "--rules", "rules.toml")
        os.environ.clear()
        os.environ |= told

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
        clock = [self.clock_jump] if CLOCK.exists() else []
        return [
            self.killed_site,
            self.killed_server,
            self.stopped_site,
            self.stopped_server,
            self.full_disk_at_site,
            self.full_disk_at_server,
            self.cut_line,
            self.slow_line,
            *clock,
            self.went_and_came_back,
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
            status = self.deployment.status
            if "time" in status and not self.hit:
                said = max(status["time"], status.get("beat", 0.0))
                self.silence = max(self.silence, time.time() - said)


def evening(folder: Path, events: int, seed: int) -> dict[str, Any]:
    """All of it, and what came out."""
    began, over = time.monotonic(), threading.Event()
    with (
        Deployment(folder, mixture_tables(4), CONFIG) as deployment,
        Door(deployment.port) as door,
    ):
        night = Evening(deployment, door, seed)
        (folder / "rules.toml").write_text(RULES, encoding="utf-8")
        (folder / "clock").write_text("+0\n")
        deployment.serve()
        for name in deployment.tables:
            night.join(name)
        deployment.wait_for_round(5, PATIENCE_SECONDS)
        threading.Thread(target=night.watch, args=(over,), daemon=True).start()
        kinds = night.events
        order = night.source.permutation(len(kinds))[:events]
        for happens in (kinds[number] for number in order):
            before = night.lengths()
            who = happens()
            deployment.wait_for_round(deployment.status.get("round", 0) + 20, PATIENCE_SECONDS)
            name = happens.__name__
            words = TOLD[name].replace("WHO", "s[0-3]" if who == "server" else who)
            night.said.append(f"{name} {who}")
            found, end = None, time.monotonic() + EXPLAINED_SECONDS
            while found is None and time.monotonic() < end:
                found = re.search(f".*({words}).*", night.text_since(before))
                time.sleep(0.2)
            if found is None:
                night.unexplained.append(night.said[-1])
            told = "NOT EXPLAINED" if found is None else found[0][-110:]
            print(f"{time.monotonic() - began:6.1f} s: {night.said[-1]}: {told}", flush=True)
        deployment.stop("s3")  # for good
        deployment.wait_for_round(deployment.status.get("round", 0) + 60, PATIENCE_SECONDS)
        change_orders(night.run, finish=True)
        summary = deployment.wait(PATIENCE_SECONDS)
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
            "unexplained": night.unexplained,
            "without_model": without,
        }


def good(found: dict[str, Any]) -> bool:
    """Whether a night kept what is promised."""
    silent = found["longest_silence"] > LONGEST_SILENCE
    lost = found["without_model"] or found["unexplained"]
    return not (found["difference"] > FARTHEST or silent or lost)


def main() -> None:
    """Run, show, judge."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.operations")
    parser.add_argument("--events", type=int, default=16, help="in all, over all nights")
    parser.add_argument("--most", type=int, default=16, help="events of a night")
    parser.add_argument("--minutes", type=float, default=np.inf, help="no night begins later")
    parser.add_argument("--keep", type=Path, help="a file of nights, to go on from")
    options = parser.parse_args()
    if not CLOCK.exists():
        print("clocks do not jump in these nights: install Debian's faketime", flush=True)
    keep, began = options.keep, time.monotonic()
    nights = json.loads(keep.read_text()) if keep is not None and keep.exists() else []
    while (done := sum(len(night["events"]) for night in nights)) < options.events:
        if time.monotonic() - began > 60 * options.minutes:
            print(f"{done} events so far; the same command goes on")
            return
        with tempfile.TemporaryDirectory(prefix="emfed-operations-") as name:
            many = min(options.most, options.events - done)
            nights.append(evening(Path(name) / "d", many, len(nights)))
        print(json.dumps(nights[-1], indent=1), flush=True)
        if keep is not None:
            keep.parent.mkdir(parents=True, exist_ok=True)
            keep.write_text(json.dumps(nights, indent=1) + "\n", encoding="utf-8")
    print(
        f"{done} events in {len(nights)} nights of {sum(n['rounds'] for n in nights)} rounds and "
        f"{sum(n['seconds'] for n in nights):.0f} s: largest difference "
        f"{max(n['difference'] for n in nights):.1e}, longest silence "
        f"{max(n['longest_silence'] for n in nights):.0f} s"
    )
    missing = TOLD.keys() - {event.split()[0] for night in nights for event in night["events"]}
    if missing and options.events >= len(TOLD):
        sys.exit(f"operations: these never happened: {', '.join(sorted(missing))}")
    if not all(map(good, nights)):
        sys.exit("operations: a bound does not hold")


if __name__ == "__main__":
    main()
