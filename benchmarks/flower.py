"""Rounds over Flower, ours and empty ones, side by side: seconds, our bytes, Flower's bytes.

Every byte between sites and server goes through a counter in this process, TLS and all. The empty
app sends and gives back as many bytes as a request of ours has. Both wait for answers in the same
way, poll at the same intervals, and have TLS and node keys.
"""

from __future__ import annotations

import contextlib
import csv
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.deployments import Deployment, mixture_tables
from benchmarks.network import Counter
from emfed.network.addresses import free_port
from emfed.network.flower.deployment import Link
from emfed.network.flower.processes import (
    Child,
    console_script,
    environment,
    flower_command,
    make_tools,
    port_open,
    stop_all,
    wait_until,
)
from emfed.network.keys import make_server_keys, make_site_key, read_public_key

ROUNDS = 6
COLUMNS, COMPONENTS = 10, 10
ROWS = 2000
"""Of a site: a careful owner tells 660 statistics of no fewer rows than that."""
CONFIG = """
[model]
kind = "gaussian-mixture"
n_components = {components}

[algorithm]
kind = "FedEM"
compressor = "dithering:4"
step_size = 0.3

[privacy]
masks = false

[fit]
tol = 0.0
start = "moments"
rounds = {rounds}

[sites]
expected = {nodes}
minimum = {nodes}
"""


def _median(values: list[float]) -> float:
    return statistics.median(values)


def ours(folder: Path, nodes: int) -> dict[str, Any]:
    """A run of ours."""
    text = CONFIG.format(components=COMPONENTS, rounds=ROUNDS + 1, nodes=nodes)
    with Deployment(folder, mixture_tables(nodes, ROWS, COLUMNS), text, "flower") as deployment:
        # An empty app has no masks, and one site has nobody to add up with.
        shutil.rmtree(deployment.folder / "roster")
        (deployment.folder / "rules.toml").write_text("unmasked = true\n", encoding="utf-8")
        counter = Counter(deployment.port)
        deployment.serve()
        wait_until(lambda: port_open("127.0.0.1", deployment.port), [], 60, "the server")
        deployment.called = counter.port
        for name in deployment.tables:
            deployment.join(name, "--rules", "rules.toml")
        deployment.wait_for_round(1, 300)
        before = (counter.up, counter.down)
        # Ten components of two clusters leave doubts, which do not matter here.
        summary = deployment.wait(120 + 60 * ROUNDS, (0, 3))
        wire = (counter.up - before[0], counter.down - before[1])
        counter.close()
        with (deployment.config.place("output") / "rounds.csv").open() as file:
            rows = [row for row in csv.DictReader(file) if int(row["round"]) > 1]
        up, down = (sum(int(row[f"bytes_{d}"]) for row in rows) for d in ("up", "down"))
        each = nodes * len(rows)
        assert summary["rounds"] == ROUNDS + 1
        return {
            "seconds": _median([float(row["seconds"]) for row in rows]),
            "up": up / each,
            "down": down / each,
            "wire_up": wire[0] / each,
            "wire_down": wire[1] / each,
        }


@contextlib.contextmanager
def flower(folder: Path, nodes: int) -> Iterator[tuple[Link, Counter]]:
    """A SuperLink, the keys of its nodes, and a counter in front of it."""
    keys = folder / "keys"
    make_server_keys(keys, ["127.0.0.1"])
    link = Link("127.0.0.1", free_port(), keys, folder / "server")
    counter, children = Counter(link.port), [link.superlink()]
    try:
        children[0].start()
        wait_until(lambda: port_open("127.0.0.1", link.port), children, 60, "the SuperLink")
        children.append(link.superexec())
        children[1].start()
        names = [f"s{number}" for number in range(nodes)]
        link.control.admit(
            {name: read_public_key(make_site_key(folder, name)[1]) for name in names}
        )
        yield link, counter
    finally:
        stop_all(children)
        counter.close()


def stock_node(folder: Path, number: int, port: int, own: str = "") -> Child:
    """A SuperNode with Flower's own executor and a process for each message."""
    home = folder / f"node{number}"
    names = ("flower-superexec", "flwr-clientapp")
    tools = make_tools(home / "bin", {name: console_script(name) for name in names})
    command = [
        *flower_command("flower-supernode"),
        *("--superlink", f"127.0.0.1:{port}", "--port", str(free_port())),
        *("--root-certificates", str(folder / "keys" / "ca.pem")),
        *("--auth-supernode-private-key", str(folder / f"s{number}.key")),
        *(("--node-config", own) if own else ()),
    ]
    return Child("supernode", command, environment(home, PATH=str(tools)), home / "log")


def empty(folder: Path, nodes: int, size: int) -> dict[str, Any]:
    """A run with nothing in it."""
    folder.mkdir(parents=True)
    log = folder / "rounds.jsonl"
    app = Path(__file__).parent / "empty_app"
    settings = f'nodes={nodes} rounds={ROUNDS} bytes={size} log="{log}"'
    stock: list[Child] = []
    with flower(folder, nodes) as (link, counter), contextlib.ExitStack() as ending:
        ending.callback(stop_all, stock)
        for number in range(nodes):
            stock.append(stock_node(folder, number, counter.port))
            stock[-1].start()
        link.control.start_run(app, settings)
        before, end = None, time.monotonic() + 120 + 60 * ROUNDS
        while True:
            lines = log.read_text().splitlines() if log.exists() else []
            if lines and before is None:
                before = (counter.up, counter.down)
            if len(lines) > ROUNDS:
                break
            assert time.monotonic() < end, "the empty app did not end"
            time.sleep(0.05)
        assert before is not None
        wire = (counter.up - before[0], counter.down - before[1])
    seconds = [json.loads(line)["seconds"] for line in lines[1:]]
    each = nodes * ROUNDS
    return {
        "seconds": _median(seconds),
        "up": float(size),
        "down": float(size),
        "wire_up": wire[0] / each,
        "wire_down": wire[1] / each,
    }


def bench_flower(sizes: tuple[int, ...] = (1, 3, 10)) -> list[dict[str, Any]]:
    """One row per number of nodes; bytes are of one site in one round."""
    rows = []
    for nodes in sizes:
        with tempfile.TemporaryDirectory(prefix="emfed-network-") as name:
            folder = Path(name)
            mine = ours(folder / "ours", nodes)
            bare = empty(folder / "empty", nodes, round(mine["down"]))
        rows.append(
            {
                "nodes": nodes,
                "emfed": mine,
                "empty": bare,
                "ratio": mine["seconds"] / bare["seconds"],
                "overhead_up": mine["wire_up"] - mine["up"],
                "overhead_down": mine["wire_down"] - mine["down"],
            }
        )
    return rows
