"""Rounds of the exchange of sums over TLS on this machine: masked or not, and over a slow line.

``python -m benchmarks engine [--sites N]``.
"""

from __future__ import annotations

import tempfile
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any, final

import numpy as np
from tests.network.doors import Door
from tests.network.exchanges import Toy
from tests.network.processes import make_keys

from emfed.data import as_workers
from emfed.data.summing import HeldRows
from emfed.network.exchange.followed import Consent, Ended, MemberStore
from emfed.network.exchange.frames import new_run
from emfed.network.exchange.identities import KeySigner, KnownMembers
from emfed.network.exchange.member import Follower
from emfed.network.exchange.member_line import MemberLine
from emfed.network.exchange.member_runs import MemberRuns, RunMember
from emfed.network.exchange.member_thread import Watcher
from emfed.network.exchange.relay_server import RelayServer
from emfed.network.exchange.statements import Agreement
from emfed.network.exchange.transcript import Stage
from emfed.network.keys import ANALYST, read_site_keys

NUMBERS = 330
"""Numbers of a sum: those of Beijing's table."""


@final
class _Clock(Watcher):
    """Notes when a member's transcript had grown, and what a door had let through."""

    def __init__(self, door: Door) -> None:
        self.door, self.times, self.bytes = door, list[float](), list[int]()
        self._due = (-1, 0)

    def said(self, follower: Follower, post: bytes) -> None: ...

    def moved(self, follower: Follower) -> None:
        about = follower.transcript
        if about.stage is Stage.RUNNING and about.due != self._due:
            self._due = about.due
            self.times.append(time.perf_counter())
            self.bytes.append(self.door.up + self.door.down)

    def ended(self, end: Ended) -> None: ...

    def troubled(self, words: str) -> None:
        raise OSError(words)


def rounds(sites: int, masked: bool, exchanges: int, delay: float = 0.0) -> dict[str, float]:
    """Seconds of a round, the median, and bytes of one by site, frames and TLS included.

    All members are threads of this process, so that a round's seconds are those of one processor.
    """
    names = [f"site-{number:02d}" for number in range(sites)]
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        make_keys(names, folder)
        keys, program = folder / "keys", Toy(exchanges, size=NUMBERS)
        known = KnownMembers(read_site_keys(keys)[0], keys / "ca.pem")
        settings = Agreement(
            tuple(names), (ANALYST,), masked, run=new_run(), program={"rounds": exchanges}
        )
        stop, sites_runs, lines = threading.Event(), list[MemberRuns](), list[threading.Thread]()
        with RelayServer("127.0.0.1", 0, keys, known, folder / "runs") as relay:
            door = Door(relay.port, delay=delay)
            clock = _Clock(door)

            def site(name: str) -> MemberRuns:
                rows = HeldRows(as_workers([rng.normal(size=(20, 2))]))
                signer = KeySigner.of_site(folder / f"{name}.key")
                salt = signer.secret(b"rows")

                def make(store: MemberStore) -> Follower:
                    accept = Consent(lambda _: program)
                    return Follower(signer, known, store, accept, rows=rows, commitment=salt)

                runs: MemberRuns
                line = MemberLine(
                    f"127.0.0.1:{door.port}",
                    lambda message: runs.received(message),
                    lambda: runs.connected(),
                    key=folder / f"{name}.key",
                    authority=keys / "ca.pem",
                    name=name,
                    proxy=None,
                )
                looks = clock if name == names[0] else _Clock(door)
                member = RunMember(folder / f"{name}.sqlite", make, looks)
                runs = MemberRuns(line.send, lambda run: member)
                lines.append(threading.Thread(target=line.run, args=(stop,), daemon=True))
                return runs

            def analyst(store: MemberStore) -> Follower:
                accept = Consent(lambda _: program)
                signer = KeySigner.of_analyst(keys)
                return Follower(signer, known, store, accept, settings=settings)

            sites_runs += [site(name) for name in names]
            for line in lines:
                line.start()
            reader: MemberRuns
            reader = MemberRuns(relay.attach(ANALYST, lambda message: reader.received(message)))
            member = RunMember(folder / "analyst.sqlite", analyst, _Clock(door))
            reader.start(settings.run, member).over.wait(600)
            for runs in sites_runs:
                runs.members[settings.run].over.wait(600)
            stop.set()
            for line in lines:
                line.join()
            door.close()
    spent = np.diff(clock.times)[2:]
    bytes_ = np.diff(clock.bytes)[2:] / sites
    return {"seconds": median(spent.tolist()), "bytes": median(bytes_.tolist())}


def bench_engine(sites: int = 10, exchanges: int = 60) -> dict[str, Any]:
    """Masked and unmasked rounds on loopback, then masked ones over a line of 100 ms."""
    pairs = [(rounds(sites, True, exchanges), rounds(sites, False, exchanges)) for _ in range(3)]
    masked, plain = min((m["seconds"] for m, _ in pairs)), min((p["seconds"] for _, p in pairs))
    slow = rounds(3, True, 20, delay=0.05)
    return {
        "sites": sites,
        "numbers": NUMBERS,
        "masked round, ms": 1e3 * masked,
        "unmasked round, ms": 1e3 * plain,
        "ratio": masked / plain,
        "bytes a masked round and site": pairs[0][0]["bytes"],
        "round at 100 ms of round trip, ms": 1e3 * slow["seconds"],
    }
