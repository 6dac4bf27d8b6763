"""The default engine: time of a round, bytes on the wire, a thousand connections; beside gRPC.

Every byte between sites and server goes through a line in a process of its own, which counts and
may delay it, TLS and all. Sites are processes of their own (`benchmarks.peers`). gRPC carries the
same messages over one bidirectional stream a site, with certificates of both ends; without grpcio
its rows are left out.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from itertools import pairwise, product
from pathlib import Path
from typing import Any, final

import numpy as np

import emfed
from benchmarks.deployments import mixture_tables
from benchmarks.lines import Line
from benchmarks.masks import SIZES, rounds_of
from emfed.network.keys import make_server_keys, make_site_key
from emfed.network.websocket.background import ServerLine
from emfed.network.websocket.reception import Reception, SiteCall

ROUNDS, FITTED = 60, 20
TURNS = 5
"""Fits without masks and with them that are timed in turn, so that both meet the same load."""
COLUMNS, COMPONENTS, ROWS = 10, 10, 500
QUESTION, ANSWER = 200, 17
"""Bytes of a message to a site and back, where nothing is computed."""
CROWD, CROWD_PROCESSES = 1000, 4
FITS = ((3, 0.0), (10, 0.0), (30, 0.0), (3, 0.05), (10, 0.05))
"""Sites, and seconds that a line holds all bytes each way."""
PROCESSES = 10
"""Processes that sites are in, at most."""


@contextlib.contextmanager
def peers(kind: str, port: int, folder: Path, groups: list[list[str]]) -> Iterator[None]:
    """Processes of sites, one for each group of names."""
    started = []
    try:
        for names in groups:
            command = [sys.executable, "-m", "benchmarks.peers", kind, str(port), str(folder)]
            variables = {
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": os.pathsep.join(
                    [str(Path(emfed.__file__).parents[1]), str(Path.cwd())]
                ),
            }
            started.append(subprocess.Popen([*command, *names], env=variables))
        yield
    finally:
        for process in started:
            process.send_signal(signal.SIGTERM)
        for process in started:
            process.wait(20)


def make_keys(folder: Path, sites: int) -> list[str]:
    """Keys of a server and of so many sites."""
    make_server_keys(folder / "keys", [])
    names = [f"s{number}" for number in range(sites)]
    for name in names:  # `add_site` compares with all others, which a thousand make slow
        make_site_key(folder, name)[1].rename(folder / "keys" / "sites" / f"{name}.pub")
    return names


@final
class WebSocketPeer(Reception[SiteCall]):
    """The connections of a relay, and nothing that is said over them."""

    def __init__(self, keys: Path) -> None:
        self._answers: queue.SimpleQueue[tuple[str, bytes]] = queue.SimpleQueue()
        super().__init__("127.0.0.1", 0, keys)

    def _meet(self, name: str, process: bytes, digest: bytes, line: ServerLine) -> SiteCall:
        return SiteCall(name, process, digest, line)

    async def _converse(self, link: SiteCall) -> None:
        async for data in link.line:
            assert isinstance(data, bytes)
            self._answers.put((link.name, data))

    def deliver(
        self, messages: Mapping[str, bytes], deadline: float
    ) -> Iterator[tuple[str, bytes]]:
        """Send a message to each site, and take what they answer."""
        links = self._links

        async def send() -> None:
            await asyncio.gather(*(links[name].line.send(one) for name, one in messages.items()))

        self._background.run(send())
        for _ in messages:
            yield self._answers.get(timeout=deadline)


def listening(kind: str, folder: Path) -> Any:
    """A server of either kind."""
    if kind == "grpc":
        from benchmarks.grpc_peer import GrpcServer

        return GrpcServer(folder / "keys")
    return WebSocketPeer(folder / "keys")


def carrying(kind: str, sites: int, rounds: int = ROUNDS) -> dict[str, Any]:
    """Rounds in which nothing is computed: milliseconds, and bytes of one site in one round."""
    with tempfile.TemporaryDirectory(prefix="emfed-network-") as name:
        folder = Path(name)
        names = make_keys(folder, sites)
        with (
            listening(kind, folder) as server,
            Line(server.port) as line,
            peers(kind, line.port, folder, [names]),
        ):
            server.wait_for(sites, 60)
            time.sleep(0.3)
            opening = (line.up, line.down)
            seconds = []
            for _ in range(rounds):
                began = time.perf_counter()
                found = dict(server.deliver(dict.fromkeys(names, b"q" * QUESTION), 20))
                seconds.append(time.perf_counter() - began)
                assert len(found) == sites
            time.sleep(0.1)
            each = sites * rounds
            return {
                "engine": kind,
                "sites": sites,
                "milliseconds": 1e3 * statistics.median(seconds),
                "up": (line.up - opening[0]) / each,
                "down": (line.down - opening[1]) / each,
                "opening_up": opening[0] / sites,
                "opening_down": opening[1] / sites,
            }


@contextlib.contextmanager
def real_sites(
    tables: Mapping[str, Any], processes: int, columns: Any, delay: float = 0.0
) -> Iterator[tuple[Any, Line, Path]]:
    """Sites that have called a relay in this process over a line."""
    with tempfile.TemporaryDirectory(prefix="emfed-network-") as name:
        folder = Path(name)
        names = make_keys(folder, len(tables))
        for site, table in zip(sorted(names), tables.values(), strict=True):
            table.write_parquet(folder / f"{site}.parquet")
        groups = [group for i in range(processes) if (group := names[i::processes])]
        with (
            emfed.network.listen("127.0.0.1:0", keys=folder / "keys", columns=columns) as sites,
            Line(sites.port, delay) as line,
            peers("sites", line.port, folder, groups),
        ):
            sites.wait_for(len(names), 300)
            time.sleep(0.5)
            yield sites, line, folder


def fitting(
    sites: int, delay: float = 0.0, turns: int = TURNS, rounds: int = FITTED
) -> list[dict[str, Any]]:
    """Real fits, without masks and with them in turn: what a round takes, and how much of it the
    slowest site computed.

    ``ratio`` is a whole round with masks over one without, the median over turns, of which the
    first is left out: connections and caches are new in it.
    """
    found: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    tables = mixture_tables(sites, ROWS, COLUMNS)
    columns = next(iter(tables.values())).columns
    with real_sites(tables, PROCESSES, columns, delay) as (server, line, folder):
        for turn, masks in product(range(turns + 1), found):
            told = one_fit(server, line, masks, rounds, folder)
            found[masks] += [told] if turn else []
    rows = []
    for masks, own in found.items():
        medians = {name: statistics.median(t[name] for t in own) for name in own[0]}
        rows.append({"sites": sites, "delay": delay, "masks": masks, **medians})
    pairs = zip(found[True], found[False], strict=True)
    rows[1]["ratio"] = statistics.median(a["milliseconds"] / b["milliseconds"] for a, b in pairs)
    return rows


def one_fit(server: Any, line: Line, masks: bool, rounds: int, folder: Path) -> dict[str, float]:
    """Milliseconds of a round, those besides the slowest site's pass, and bytes of a site.

    A round is what passes from the beginning of one pass at a site to that of the next.
    """
    with warnings.catch_warnings(), line.watched() as seen:
        warnings.simplefilter("ignore", emfed.EmfedWarning)  # bytes and times, not the fit
        result = emfed.fit(
            emfed.gaussian_mixture(COMPONENTS, "full"),
            server,
            rounds=rounds,
            seed=1,
            tol=0,
            moves=0,
            masks=masks,
        )
    spans = [_spans(path) for path in sorted(folder.glob("*.passes"))]
    times, sites = [began for began, _ in spans[0][-rounds:]], len(spans)
    whole = [b - a for a, b in pairwise(times)]
    passes = [_within(own, times) for own in spans]
    beside = [a - max(b) for a, b in zip(whole, zip(*passes, strict=True), strict=True)]
    records = [record for record in result.records if record.round > 0]
    ours = [sum(getattr(r, f"bytes_{way}") for r in records) for way in ("up", "down")]
    clock, *counts = np.array(seen).T
    wire = [np.diff(np.interp([times[0], times[-1]], clock, count)).item() for count in counts]
    return {
        "milliseconds": 1e3 * statistics.median(whole),
        "beside": 1e3 * statistics.median(beside),
        "up": ours[0] / sites / len(records),
        "down": ours[1] / sites / len(records),
        "wire_up": wire[0] / sites / len(whole),
        "wire_down": wire[1] / sites / len(whole),
    }


def _spans(path: Path) -> list[tuple[float, float]]:
    """When a site's passes began and ended."""
    lines = [line.split() for line in path.read_text(encoding="utf-8").splitlines()]
    return [(float(began), float(ended)) for began, ended in lines]


def _within(spans: list[tuple[float, float]], times: list[float]) -> list[float]:
    """Seconds that passes took between each two of these times."""
    return [
        sum(max(0.0, min(end, after) - max(begin, before)) for begin, end in spans)
        for before, after in pairwise(times)
    ]


def resident() -> int:
    """Bytes of memory that this process holds now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def crowd(kind: str = "websocket", sites: int = CROWD) -> dict[str, Any]:
    """Memory of the server with many connections, and the time of a round of all."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(8 * sites, limit[1]), limit[1]))
    with tempfile.TemporaryDirectory(prefix="emfed-network-") as name:
        folder = Path(name)
        names = make_keys(folder, sites)
        groups = [names[i::CROWD_PROCESSES] for i in range(CROWD_PROCESSES)]
        with listening(kind, folder) as server:
            before = resident()
            with peers(kind, server.port, folder, groups):
                began = time.perf_counter()
                server.wait_for(sites, 300)
                connecting = time.perf_counter() - began
                seconds = []
                for _ in range(8):
                    began = time.perf_counter()
                    found = dict(server.deliver(dict.fromkeys(names, b"q" * QUESTION), 60))
                    seconds.append(time.perf_counter() - began)
                    assert len(found) == sites
                return {
                    "engine": kind,
                    "sites": sites,
                    "megabytes": (resident() - before) / 1e6,
                    "connecting": connecting,
                    "milliseconds": 1e3 * statistics.median(seconds),
                }


def bench_network(quick: bool = False) -> dict[str, Any]:
    """All of it; ``quick`` is for a look at whether it runs."""
    kinds = ["websocket"] + (["grpc"] if find_spec("grpc") else [])
    fits = FITS[:1] if quick else FITS
    return {
        "carrying": [carrying(kind, n) for kind in kinds for n in ((3,) if quick else (3, 10))],
        "fitting": [row for n, delay in fits for row in fitting(n, delay, 1 if quick else TURNS)],
        "masks": [rounds_of(*size) for size in SIZES],
        "crowd": [crowd(kind, 20 if quick else CROWD) for kind in kinds],
    }
