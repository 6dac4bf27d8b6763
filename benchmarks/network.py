"""The default engine: time of a round, bytes on the wire, a thousand connections; beside gRPC.

Every byte between sites and server goes through a counter in this process, TLS and all. Sites are
processes of their own (`benchmarks.peers`). gRPC carries the same messages over one bidirectional
stream a site, with certificates of both ends; without grpcio its rows are left out.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import emfed
from benchmarks.deployments import mixture_tables
from emfed.network.keys import make_server_keys, make_site_key
from emfed.network.websocket.server import WebSocketTransport

ROUNDS = 60
TURNS = 5
"""Fits without masks and with them that are timed in turn, so that both meet the same load."""
COLUMNS, COMPONENTS, ROWS = 10, 10, 500
QUESTION, ANSWER = 200, 17
"""Bytes of a request and a reply of a typical round."""
CROWD, CROWD_PROCESSES = 1000, 4


class Counter:
    """A door that counts what passes through it, both ways."""

    def __init__(self, port: int) -> None:
        self._target, self.up, self.down = port, 0, 0
        self._door = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.port = int(self._door.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._door.accept()
                try:
                    far = socket.create_connection(("127.0.0.1", self._target))
                except OSError:
                    near.close()
                    continue
                for source, sink, name in ((near, far, "up"), (far, near, "down")):
                    arguments = (source, sink, name)
                    threading.Thread(target=self._copy, args=arguments, daemon=True).start()

    def _copy(self, source: socket.socket, sink: socket.socket, name: str) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                setattr(self, name, getattr(self, name) + len(data))
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._door.close()


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


def listening(kind: str, folder: Path) -> Any:
    """A server of either kind."""
    if kind == "grpc":
        from benchmarks.grpc_peer import GrpcServer

        return GrpcServer(folder / "keys")
    return WebSocketTransport("127.0.0.1", 0, folder / "keys")


def carrying(kind: str, sites: int, rounds: int = ROUNDS) -> dict[str, Any]:
    """Rounds in which nothing is computed: milliseconds, and bytes of one site in one round."""
    with tempfile.TemporaryDirectory(prefix="emfed-network-") as name:
        folder = Path(name)
        names = make_keys(folder, sites)
        with listening(kind, folder) as server:
            counter = Counter(server.port)
            with peers(kind, counter.port, folder, [names]):
                server.wait_for(sites, 60)
                time.sleep(0.3)
                opening = (counter.up, counter.down)
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
                    "reply": (counter.up - opening[0]) / each,
                    "request": (counter.down - opening[1]) / each,
                    "opening_up": opening[0] / sites,
                    "opening_down": opening[1] / sites,
                }


def fitting(sites: int, rounds: int = ROUNDS // TURNS) -> list[dict[str, Any]]:
    """Real fits, without masks and with them in turn: what a round takes, and how much of it the
    slowest site computed and synced.

    With masks a site is asked twice in a round: for its numbers, and for their masked form. The
    rest of a round is its transport; ``ratio`` is that with masks over that without, the median
    over turns, of which the first is left out: connections and caches are new in it.
    """
    found: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    with tempfile.TemporaryDirectory(prefix="emfed-network-") as name:
        folder = Path(name)
        names = make_keys(folder, sites)
        for site, table in mixture_tables(sites, ROWS, COLUMNS).items():
            table.write_parquet(folder / f"{site}.parquet")
        with WebSocketTransport("127.0.0.1", 0, folder / "keys") as server:
            counter = Counter(server.port)
            with peers("site", counter.port, folder, [[name] for name in names]):
                server.wait_for(sites, 60)
                time.sleep(0.3)
                for turn, masks in product(range(TURNS + 1), found):
                    told = one_fit(server, counter, masks, rounds, [folder / n for n in names])
                    found[masks] += [told] if turn else []
    rows = []
    for masks, turns in found.items():
        medians = {name: statistics.median(t[name] for t in turns) for name in turns[0]}
        rows.append({"sites": sites, "masks": masks, **medians})
    pairs = zip(found[True], found[False], strict=True)
    rows[1]["ratio"] = statistics.median(a["beside"] / b["beside"] for a, b in pairs)
    return rows


def one_fit(
    server: WebSocketTransport, counter: Counter, masks: bool, rounds: int, sites: list[Path]
) -> dict[str, float]:
    """Milliseconds of a round, those beside the slowest site's steps, and bytes of a site."""
    moved: list[tuple[int, int]] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", emfed.EmfedWarning)  # bytes and times, not the fit
        result = emfed.fit(
            emfed.gaussian_mixture(COMPONENTS, "full"),
            None,
            emfed.FedEM(emfed.Dithering(4), step_size=0.3),
            federation=emfed.network.RemoteFederation(server, minimum=len(sites)),
            rounds=rounds,
            seed=1,
            tol=0,
            masks=masks,
            callbacks=[lambda record: moved.append((counter.up, counter.down))],
        )
    asked = rounds * (1 + masks)
    logs = (site.with_suffix(".steps").read_text(encoding="utf-8").split() for site in sites)
    steps = [list(map(float, lines[-asked:])) for lines in logs]
    waits = [max(each) for each in zip(*steps, strict=True)]
    slowest = [sum(waits[at : at + 1 + masks]) for at in range(0, asked, 1 + masks)]
    records = [record for record in result.records if record.round > 0]
    whole = [record.seconds for record in records]
    beside = [a - b for a, b in zip(whole, slowest, strict=True)][1:]
    each = len(sites) * (len(records) - 1)
    ours = [sum(getattr(r, f"bytes_{way}") for r in records[1:]) / each for way in ("up", "down")]
    wire = [(moved[-1][way] - moved[-len(records)][way]) / each for way in (0, 1)]
    return {
        "milliseconds": 1e3 * statistics.median(whole),
        "beside": 1e3 * statistics.median(beside),
        "up": ours[0],
        "down": ours[1],
        "wire_up": wire[0],
        "wire_down": wire[1],
    }


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


def bench_network(sizes: tuple[int, ...] = (3, 10)) -> dict[str, Any]:
    """All of it."""
    kinds = ["websocket"] + (["grpc"] if find_spec("grpc") else [])
    return {
        "carrying": [carrying(kind, sites) for kind in kinds for sites in sizes],
        "fitting": [row for sites in sizes for row in fitting(sites)],
        "crowd": [crowd(kind) for kind in kinds],
    }
