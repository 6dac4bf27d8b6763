"""``python -m benchmarks.hours [--hours 6] [--masks]``: hours of operation on a network in memory.

The server's program and the sites are the real ones, with their folders, keys and logs; network,
clock and the faults of disks are simulated, so hours take minutes: the clock stands still until
somebody waits or a message travels. At random times happens what happens to an operator: processes
killed or stopped for a minute, answers lost, slow lines, full disks, clocks that are set, keys
removed and put back, old backups put back, a disk lost, a site expelled, one away for a quarter of
an hour, a pause; at last one leaves for good. The run must end with the model of those who stayed,
say something at least once a minute (of the simulated clock) while its server lives, stand still
for no more than five where enough sites are there, and its log must tell of every event.
``--masks`` leaves out what ends a site's part in a masked run.
"""

from __future__ import annotations

import argparse
import contextlib
import heapq
import json
import logging
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from tests.network.disks import Killed

from benchmarks.deployments import FEDEM, MIXTURE, mixture_tables
from emfed import fit, gaussian_mixture, load
from emfed.core.errors import CheckpointError
from emfed.core.storage import Disk, ScratchDisk
from emfed.deployment import serving
from emfed.deployment.config import read_config
from emfed.deployment.orders import change_orders, read_orders
from emfed.deployment.serving import serve_run
from emfed.deployment.status import Status, logging_to
from emfed.network import Site, SiteRules, Transport
from emfed.network.keys import add_site, make_server_keys, make_site_key, remove_site
from emfed.network.masking import SiteIdentity

logger = logging.getLogger("emfed.hours")
CONFIG = """
[fit]
tol = 0.0
rounds = 10000000
seed = 5
[privacy]
masks = {masks}
[sites]
expected = {sites}
minimum = {minimum}
deadline = 20.0
attempts = 40
deliver = true
farewell = 5.0
"""
SECONDS_BETWEEN = 150.0
"""Mean time from one event to the next: the one before has often healed, and often not."""
LONGEST_SILENCE, EXPLAINED_SECONDS, FARTHEST = 60.0, 480.0, 1e-3
"""The second: three minutes and the longest pause, in which nobody is asked and nobody can tell."""
LONGEST_STANDSTILL = 300.0
"""Without a round, though as many sites as a round needs are there and nobody paused the run: full
disks and lost sums heal within it."""
RESTART_SECONDS = 10.0
"""What systemd waits before it starts a server again."""
ROUND_SECONDS = 2.0, 2.9
"""What lines and steps of sites take, at least and at most: less than what is logged as slow."""
GONE_SECONDS, DEAD_SECONDS = 15.0, 24.0
"""How long the engine waits for a site that is away, and takes to notice a dead line."""


class Clock:
    """Seconds that pass when somebody waits; things happen at their time."""

    def __init__(self) -> None:
        self.now, self.set_by = 1000.0, 0.0
        """Seconds, and how far the clock on the wall was set."""
        self._began = time.time()
        self._order, self._plans = count(), list[tuple[float, int, Callable[[], None]]]()

    def at(self, when: float, happens: Callable[[], None]) -> None:
        heapq.heappush(self._plans, (when, next(self._order), happens))

    def wait(self, seconds: float) -> None:
        end = self.now + seconds
        while self._plans and self._plans[0][0] <= end:
            when, _, happens = heapq.heappop(self._plans)
            self.now = max(self.now, when)
            happens()
        self.now = max(self.now, end)

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self._began + self.now + self.set_by

    @contextlib.contextmanager
    def everywhere(self) -> Iterator[None]:
        """Within, this is the time of the process."""
        with (
            mock.patch.object(time, "monotonic", self.monotonic),
            mock.patch.object(time, "sleep", self.wait),
            mock.patch.object(time, "time", self.wall),
        ):
            yield


class Harms:
    """What waits to do harm. It is an event once it does: of the rest there is nothing to tell."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[str, str], Callable[[], None]] = {}

    def wait(self, name: str, who: str, strikes: Callable[[], None]) -> None:
        self._waiting[name, who] = strikes

    def strike(self, name: str, who: str) -> None:
        self._waiting.pop((name, who), lambda: None)()

    def strike_all(self, *names: str) -> None:
        for name, who in [pair for pair in self._waiting if pair[0] in names]:
            self.strike(name, who)


class FaultyDisk(Disk):
    """A disk that may be full, and a process that may die at a write; without syncs, for speed."""

    def __init__(self, refused: Callable[[], None]) -> None:
        self.full, self.fuse, self._refused = False, -1, refused

    def create(self, path: Path, data: bytes) -> Path:
        self.fuse -= self.fuse >= 0
        if self.fuse == 0:
            raise Killed
        if self.full:
            self._refused()
            raise OSError(28, "No space left on device", str(path))
        return super().create(path, data)

    def sync(self, path: Path) -> None:
        """Leave it to the system."""


class Place:
    """One site: its folder, its process, its line."""

    def __init__(self, name: str, rows: Any, folder: Path, identity: Any, harms: Harms) -> None:
        self.name, self._rows, self.folder, self._identity = name, rows, folder, identity
        self.disk = FaultyDisk(lambda: harms.strike("full_disk_at_site", name))
        self.away_since = self.stopped_since = None
        self.slow, self.cut, self.gone = 0.0, False, False
        self.start()

    away_since: float | None
    stopped_since: float | None

    @property
    def well(self) -> bool:
        """Whether it is there: who is away comes to no more harm."""
        return not self.gone and self.away_since is None and self.stopped_since is None

    def start(self) -> None:
        self.disk.fuse, self.away_since = -1, None
        rules = SiteRules.loosest()
        self.site = Site(
            self._rows, self.folder, rules=rules, disk=self.disk, identity=self._identity
        )


class Line(Transport):
    """The engine, in memory: it says who is gone and who is connected, as the real one does."""

    def __init__(
        self, places: Mapping[str, Place], clock: Clock, harms: Harms, masks: bool, seed: int
    ) -> None:
        self.places, self.clock, self._masks = dict(places), clock, masks
        self.strike = harms.strike
        self.source = np.random.Generator(np.random.Philox(key=seed))
        self.kill_server = self.server_full = False

    @property
    def between_machines(self) -> bool:
        return self._masks

    def workers(self) -> list[str]:
        return [n for n, p in self.places.items() if p.away_since is None and not p.gone]

    def deliver(
        self, messages: Mapping[str, bytes], deadline: float
    ) -> Iterator[tuple[str, bytes]]:
        self.check()
        self.clock.wait(float(self.source.uniform(*ROUND_SECONDS)))
        end = self.clock.now + deadline
        for key in sorted(messages, key=self._lateness):  # all work at once; here, one by one
            answer = self._answer(self.places[key], messages[key], end)
            self.check()
            if answer is not None:
                yield key, answer

    def _lateness(self, key: str) -> tuple[bool, float]:
        place = self.places[key]
        return (place.away_since or place.stopped_since) is not None, place.slow

    def check(self) -> None:
        """Die, if it is time."""
        if self.kill_server:
            self.kill_server = False
            self.strike("killed_server", "server")
            raise Killed

    def _answer(self, place: Place, message: bytes, end: float) -> bytes | None:
        if place.stopped_since is not None:
            self.strike("stopped_site", place.name)
        self._wait_for(place, end)
        if place.gone or place.away_since is not None or place.stopped_since is not None:
            return None
        if place.slow:
            self.strike("slow_line", place.name)
            self.clock.wait(min(place.slow, max(0.0, end - self.clock.now)))
        for name in ("lost_disk", "restored_site"):
            self.strike(name, place.name)
        try:
            answer = place.site.step(message)
        except Killed:
            self.strike("killed_site", place.name)
            logger.warning("%s is gone", place.name)
            place.away_since = self.clock.now
            self.clock.at(self.clock.now + RESTART_SECONDS, lambda: back(place))
            return None
        if place.cut:
            place.cut = False
            self.strike("cut_line", place.name)
            logger.warning("%s is gone, and is connected again", place.name)
            return None
        return answer

    def _wait_for(self, place: Place, end: float) -> None:
        """As the engine does: some seconds for one that just went, more for a line not yet dead."""
        for since, seconds in (
            (place.away_since, GONE_SECONDS),
            (place.stopped_since, DEAD_SECONDS),
        ):
            while since is not None and self.clock.now < min(since + seconds, end):
                self.clock.wait(0.5)
                if (place.away_since, place.stopped_since) == (None, None):
                    return


def back(place: Place) -> None:
    if place.away_since is not None and not place.gone:
        place.start()
        logger.info("%s is connected", place.name)


TOLD = {
    "killed_site": r"WHO is (gone|connected)",
    "killed_server": r"the server starts",
    "stopped_site": r"no answer from .*WHO|WHO (left|took)",
    "stopped_server": r"",
    "full_disk_at_site": r"No space left|no answer from .*WHO|WHO",
    "full_disk_at_server": r"No space left|the server's program ends",
    "cut_line": r"WHO is gone",
    "slow_line": r"WHO took \d",
    "clock_set": r"",
    "removed_and_returned_key": r"WHO.*(left|its key was removed)|its key was removed",
    "restored_server": r"ahead|start at zero|begins again",
    "restored_site": r"WHO.*(memory|no answer waits|say hello|not the last)|WHO (left|is back)",
    "lost_disk": r"WHO.*(memory|no answer waits|say hello)|WHO (left|is back)",
    "expelled_and_readmitted": r"WHO.*(left|is back|a trial)|a trial",
    "went_and_came_back": r"WHO (left|is back|is gone)",
    "paused": r"pauses the run|paused",
}
"""What the log or the status must say. A standstill of all and another time of day are the engine's
to tell, in `benchmarks.operations`."""
LEAVES = ("removed_and_returned_key", "expelled_and_readmitted", "went_and_came_back")
"""What ends a site's part in a masked run; and a lost disk or an old backup is a change of keys."""


class Operation:
    """The run, and what happens to it."""

    def __init__(self, folder: Path, seed: int, masks: bool) -> None:
        many = 5 if masks else 4
        self.folder, self.clock, self.masks, self.harms = folder, Clock(), masks, Harms()
        minimum = many if masks else 2
        text = CONFIG.format(masks=str(masks).lower(), sites=many, minimum=minimum)
        (folder / "run.toml").write_text(MIXTURE + FEDEM + text, encoding="utf-8")
        self.config = read_config(folder / "run.toml")
        self.run = self.config.place("folder")
        self.run.mkdir()
        self.tables = mixture_tables(many)
        known = SiteIdentity.everybody(self.tables)
        self.keys = self.config.place("keys")
        make_server_keys(self.keys, [])
        for name in self.tables:
            add_site(self.keys, make_site_key(folder, name)[1])
        self.places = {
            name: Place(name, table.to_numpy(), folder / f"site-{name}", known[name], self.harms)
            for name, table in self.tables.items()
        }
        self.line = Line(self.places, self.clock, self.harms, masks, seed)
        self.source = np.random.Generator(np.random.Philox(key=seed + 1))
        self.events: list[tuple[float, float, str, str]] = []
        """When each was planned and when it did harm, what it was, and to whom."""
        self.said: list[tuple[float, str]] = []
        self.down, self.silence, self.last, self.rounds, self.starts = False, 0.0, None, 0, 0
        self.silent_at, self.moved, self.standstill = "", self.clock.now, 0.0
        """Where it was silent; when a round was last made, or could not be; the longest since."""
        self.left: set[str] = set()
        """Who is not asked for a while: what happens to it meanwhile, nobody can tell."""

    last: float | None

    # What is looked at.

    def report(self, status: dict[str, Any]) -> None:
        now = self.clock.now
        if self.last is not None and now - self.last > self.silence:
            self.silence, self.silent_at = now - self.last, f"{now:.0f} s, {status['state']}"
        state, before = status["state"], self.rounds
        self.last, self.rounds = now, status.get("round", 0)
        if state == "paused" or self.rounds != before or not self._enough():
            self.moved = now
        self.standstill = max(self.standstill, now - self.moved)
        self.harms.strike_all("expelled_and_readmitted", "paused", "stopped_server", "clock_set")
        if state != "paused":  # it looks at the keys when it asks
            self.harms.strike_all("removed_and_returned_key")
        words = f"{state}: {status.get('why', '')} " if state != "running" else ""
        words += " ".join(f"{k}: {v}" for k, v in (status.get("refusals") or {}).items())
        if words and (not self.said or self.said[-1][1] != words or now - self.said[-1][0] > 60):
            self.said.append((now, words))
        self.line.check()

    def _enough(self) -> bool:
        """Whether as many as a round needs could answer one."""
        out, keys = read_orders(self.run).expelled, self.keys / "sites"
        there = [n for n, place in self.places.items() if place.well and n not in out]
        many = sum((keys / f"{name}.pub").exists() for name in there)
        return many >= self.config.sites.minimum

    def unexplained(self) -> list[str]:
        """Events of which neither log nor status tell."""
        heard = list(self.said)
        for path in sorted((self.run / "logs").glob("serve.log*")):
            for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
                with contextlib.suppress(ValueError, KeyError):
                    told = json.loads(line)
                    heard.append((told["at"], told["message"]))
        missing = []
        for planned, when, name, who in self.events:
            words = TOLD[name].replace("WHO", who)
            near = (w for at, w in heard if planned - 1 <= at <= when + EXPLAINED_SECONDS)
            if words and not any(re.search(words, text) for text in near):
                missing.append(f"{when:.0f} s: {name} {who}")
        return missing

    def hear(self, record: logging.LogRecord) -> bool:
        """Stamp a line of the log with the simulated time, and note who leaves and is back."""
        record.at = self.clock.now
        if found := re.match(r"(s\d) (left|is back)", record.getMessage()):
            (self.left.add if found[2] == "left" else self.left.discard)(found[1])
        return True

    # What happens.

    def happen(self) -> None:
        """One event at random, and when the next comes."""
        names = [name for name in TOLD if not (self.masks and name in LEAVES)]
        name = str(self.source.choice(names))
        well = [n for n, p in self.places.items() if p.well and n not in self.left]
        who = str(self.source.choice(well or [*self.places]))
        getattr(self, name)(self.places[who])
        self.clock.at(self.clock.now + self.source.exponential(SECONDS_BETWEEN), self.happen)

    def later(self, seconds: float, happens: Callable[[], None]) -> None:
        self.clock.at(self.clock.now + seconds, happens)

    def set(self, thing: Any, name: str, value: Any, then: Any, seconds: float) -> None:
        setattr(thing, name, value)
        self.later(seconds, lambda: setattr(thing, name, then))

    def expect(self, name: str, who: str = "server") -> None:
        """It is an event once it does harm."""
        planned = self.clock.now
        self.harms.wait(name, who, lambda: self.happened(name, who, planned))

    def happened(self, name: str, who: str, planned: float | None = None) -> None:
        now = self.clock.now
        self.events.append((now if planned is None else planned, now, name, who))

    def killed_site(self, place: Place) -> None:
        self.expect("killed_site", place.name)
        place.disk.fuse = int(self.source.integers(1, 5))

    def killed_server(self, _: Place) -> None:
        self.expect("killed_server")
        self.line.kill_server = True

    def stopped_site(self, place: Place) -> None:
        self.expect("stopped_site", place.name)
        self.set(place, "stopped_since", self.clock.now, None, 60.0)

    def stopped_server(self, _: Place) -> None:
        self.expect("stopped_server")
        self.last = None  # it can say nothing
        self.clock.now += 60.0

    def full_disk_at_site(self, place: Place) -> None:
        self.expect("full_disk_at_site", place.name)
        self.set(place.disk, "full", True, False, self.source.uniform(1.0, 60.0))

    def full_disk_at_server(self, _: Place) -> None:
        self.expect("full_disk_at_server")
        self.set(self.line, "server_full", True, False, self.source.uniform(1.0, 60.0))

    def cut_line(self, place: Place) -> None:
        self.expect("cut_line", place.name)
        place.cut = True

    def slow_line(self, place: Place) -> None:
        self.expect("slow_line", place.name)
        self.set(place, "slow", self.source.uniform(4.0, 15.0), 0.0, 60.0)

    def clock_set(self, _: Place) -> None:
        self.expect("clock_set")
        self.set(self.clock, "set_by", self.source.uniform(-1e4, 1e4), 0.0, 100.0)

    def removed_and_returned_key(self, place: Place) -> None:
        self.expect("removed_and_returned_key", place.name)
        remove_site(self.keys, place.name)
        public = self.folder / f"{place.name}.pub"

        def put_back() -> None:
            if not (self.keys / "sites" / public.name).exists():
                add_site(self.keys, public)

        self.later(self.source.uniform(5.0, 120.0), put_back)

    def expelled_and_readmitted(self, place: Place) -> None:
        self.expect("expelled_and_readmitted", place.name)
        change_orders(self.run, expelled={place.name: "a trial"})
        self.later(
            self.source.uniform(5.0, 120.0), lambda: change_orders(self.run, expelled={}) and None
        )

    def paused(self, _: Place) -> None:
        if not read_orders(self.run).paused:  # else nothing is new
            self.expect("paused")
        change_orders(self.run, paused=True)
        self.later(
            self.source.uniform(5.0, 300.0), lambda: change_orders(self.run, paused=False) and None
        )

    def went_and_came_back(self, place: Place) -> None:
        self.happened("went_and_came_back", place.name)
        place.away_since = self.clock.now
        logger.info("%s is gone", place.name)
        self.later(self.source.uniform(60.0, 900.0), lambda: back(place))

    def lost_disk(self, place: Place) -> None:
        self.expect("lost_disk", place.name)
        shutil.rmtree(place.folder, ignore_errors=True)
        place.start()

    def restored_site(self, place: Place) -> None:
        backup, reached = self.folder / f"backup-{place.name}", self.rounds
        shutil.rmtree(backup, ignore_errors=True)
        shutil.copytree(place.folder, backup)

        def put_back() -> None:
            shutil.rmtree(place.folder, ignore_errors=True)
            shutil.copytree(backup, place.folder)
            place.start()
            if self.rounds > reached:  # else it is no old one
                self.expect("restored_site", place.name)

        self.later(self.source.uniform(10.0, 60.0), put_back)

    def restored_server(self, _: Place) -> None:
        backup, reached = self.folder / "backup", self.rounds
        shutil.rmtree(backup, ignore_errors=True)
        shutil.copytree(self.run / "fit", backup)

        def put_back() -> None:
            if self.rounds > reached:  # else it is no old one
                self.happened("restored_server", "server")
            self.line.kill_server, self._put_back = True, backup

        self.later(self.source.uniform(10.0, 60.0), put_back)

    _put_back: Path | None = None

    # All of it.

    def serve(self) -> None:
        """The server, started again whenever it dies, until the run is over."""
        real = Disk.create

        def create(disk: Disk, path: Path, data: bytes) -> Path:
            told = path.name == "orders.json"  # an operator says it again
            if self.line.server_full and self.run in path.parents and not told:
                self.harms.strike("full_disk_at_server", "server")
                raise OSError(28, "No space left on device", str(path))
            return real(disk, path, data)

        with (
            mock.patch.object(Disk, "create", create),
            mock.patch.object(Disk, "sync", ScratchDisk.sync),
            mock.patch.multiple(serving, DETAIL_SECONDS=60.0, COMPONENTS_SECONDS=600.0),  # speed
            mock.patch.object(Status, "while_waiting", return_value=contextlib.nullcontext()),
        ):
            while True:
                self.starts += 1
                logger.info("the server starts")
                try:
                    serve_run(self.line, self.config, Status(self.run, self.report), True)
                    return
                except Killed:
                    self.last = None
                except (CheckpointError, OSError) as error:
                    logger.warning("the server's program ends: %s", error)
                    self.last = None
                if self._put_back is not None:
                    shutil.rmtree(self.run / "fit")
                    shutil.copytree(self._put_back, self.run / "fit")
                    self._put_back = None
                self.clock.wait(RESTART_SECONDS)

    def calm(self) -> None:
        """No more events: what is wrong heals, one site leaves for good, and the run ends."""
        self.happen = lambda: None  # type: ignore[method-assign]
        if not self.masks:
            gone = self.places[f"s{len(self.places) - 1}"]
            self.later(1000.0, lambda: setattr(gone, "gone", True))
        self.later(1600.0, lambda: change_orders(self.run, finish=True) and None)

    def go(self, hours: float) -> dict[str, Any]:
        began = time.perf_counter()
        self.clock.at(self.clock.now + 60.0, lambda: self.happen())
        self.clock.at(self.clock.now + 3600.0 * hours, self.calm)
        with self.clock.everywhere(), logging_to(self.run / "logs" / "serve.log", True):
            handler = logging.getLogger("emfed").handlers[-1]
            handler.addFilter(self.hear)
            plain = handler.format
            handler.format = lambda r: json.dumps({"at": r.at, "message": plain(r)})  # type: ignore
            self.serve()
        stayed = {n: t.to_numpy() for n, t in self.tables.items() if not self.places[n].gone}
        found = load(self.config.place("output") / "model.emfed").params.means
        pooled = fit(gaussian_mixture(2), stayed, "em", rounds=300, seed=5).params.means
        delivered = [(self.places[n].folder / "model.emfed").exists() for n in stayed]
        happened = Counter(name for *_, name, _ in self.events)
        return {
            "hours": (self.clock.now - 1000.0) / 3600.0,
            "masks": self.masks,
            "rounds": self.rounds,
            "starts_of_the_server": self.starts,
            "events": dict(sorted(happened.items())),
            "difference": float(np.abs(np.sort(found, 0) - np.sort(pooled, 0)).max()),
            "longest_silence": self.silence,
            "silent_at": self.silent_at,
            "longest_standstill": self.standstill,
            "unexplained": self.unexplained(),
            "delivered": sum(delivered),
            "of": len(stayed),
            "seconds": time.perf_counter() - began,
        }


def good(found: Mapping[str, Any]) -> bool:
    """Whether the hours kept what is promised."""
    silent = found["longest_silence"] > LONGEST_SILENCE
    silent = silent or found["longest_standstill"] > LONGEST_STANDSTILL
    told = not found["unexplained"] and found["delivered"] == found["of"]
    return found["difference"] < FARTHEST and told and not silent


def main() -> None:
    """Run, show, judge."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hours")
    parser.add_argument("--hours", type=float, default=6.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--masks", action="store_true")
    parser.add_argument("--keep", type=Path, help="a folder for what is left, in place of none")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="emfed-hours-") as name:
        folder = Path(name) if options.keep is None else options.keep
        folder.mkdir(parents=True, exist_ok=True)
        found = Operation(folder, options.seed, options.masks).go(options.hours)
    print(json.dumps(found, indent=1))
    if not good(found):
        sys.exit("hours: a bound does not hold")


if __name__ == "__main__":
    main()
