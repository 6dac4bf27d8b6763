"""``emfed serve``, ``emfed join`` and ``emfed relay`` as real processes over TLS."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from benchmarks.deployments import COMMAND, MIXTURE, Deployment, difference, mixture_tables

from emfed import load
from emfed.aggregation.masks import Part
from emfed.core.errors import FederationError
from emfed.network.addresses import terminated_as_interrupted
from emfed.network.exchange.relay import Relay
from emfed.network.exchange.statements import Added, Entry, StatementKind
from emfed.network.keys import make_server_keys, make_site_key, remove_site
from tests.deployment.deployed import Deployed
from tests.helpers import first

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="these tests read /proc")
CONFIG = (
    MIXTURE
    + """
[fit]
tol = 0.0
rounds = {rounds}
seed = 3

[sites]
expected = 3
minimum = 3
"""
)
LARGEST_SITE = 220_000_000
"""Bytes of memory that a site's process may take."""


def wait_until(ready: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def memory(pid: int) -> int:
    """The most that a process has taken."""
    text = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(re.findall(r"VmHWM:\s+(\d+)", text)[0])


def run(deployment: Deployment, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command of ours that ends soon."""
    return subprocess.run(
        [*COMMAND, *arguments], cwd=deployment.folder, capture_output=True, text=True, timeout=60
    )


def kinds(folder: Path) -> list[StatementKind]:
    """The entries of a relay's transcript."""
    path = next((folder / "runs").glob("*.sqlite"))
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as file:
        rows = file.execute("SELECT data FROM entries ORDER BY place").fetchall()
    return [StatementKind(Entry.decode(data).kind) for (data,) in rows]


def same_everywhere(deployment: Deployment) -> None:
    """All members wrote the same model."""
    found = load(deployment.config.place("output") / "model.emfed")
    for name in deployment.tables:
        mine = load(deployment.folder / f"site-{name}" / "model.emfed")
        assert np.array_equal(mine.statistics, found.statistics)


def test_a_run_ends_where_one_in_a_single_process_ends_through_kills_of_both_sides(
    tmp_path: Path,
) -> None:
    """One run for all that is asked of it."""
    config = CONFIG.format(rounds=60)
    with Deployment(tmp_path / "deployment", mixture_tables(3), config) as deployment:
        folder = deployment.folder
        deployment.start()
        deployment.wait_for_round(3, 60)
        for who, round_number in (("join s1", 10), ("serve", 18), ("join s0", 26), ("serve", 34)):
            assert deployment.kill(who)
            deployment.wait_for_round(round_number, 60)

        # One process at each end, small, with no secret in its command line or environment.
        pids = deployment.pids()
        assert len(pids) == 4
        for pid in pids:
            line = Path(f"/proc/{pid}/cmdline").read_bytes().decode()
            variables = Path(f"/proc/{pid}/environ").read_bytes().decode()
            for path in (*folder.glob("*.key"), *deployment.keys.glob("*.key")):
                secret = path.read_text().splitlines()[1]
                assert secret not in line + variables
            assert memory(pid) < LARGEST_SITE

        summary = deployment.wait(120)
        assert summary["rounds"] == 60
        assert difference(summary, deployment.here(summary["seed"])) < 1e-5
        assert run(deployment, "status", "run.toml").returncode == 0
        wait_until(lambda: "the run ended after 60 rounds" in deployment.output("s2"))
        same_everywhere(deployment)
        entries = kinds(folder / "run")
        assert entries.count(StatementKind.HELLO) >= 8
        assert StatementKind.CHANGE not in entries, "everyone was back in time"

        # The site's journal has every part; the connection's story is in its log.
        lines = (folder / "site-s2" / "messages.jsonl").read_text().splitlines()
        parts = [e for e in map(json.loads, lines) if e["kind"] == "part"]
        assert len(parts) > 60
        assert "connected to" in (folder / "site-s2" / "logs" / "join.log").read_text()
        for name in ("serve", "s0", "s1", "s2"):
            assert "Traceback" not in deployment.output(name)


def test_ctrl_c_ends_a_run_with_what_it_has_reached(tmp_path: Path) -> None:
    config = CONFIG.format(rounds=30_000)
    with Deployment(tmp_path / "deployment", mixture_tables(3), config) as deployment:
        deployment.start()
        deployment.wait_for_round(5, 60)
        deployment._processes["serve"].send_signal(signal.SIGINT)
        summary = deployment.wait(60)
        assert 5 <= summary["rounds"] < 30_000
        said = deployment.output("serve")
        assert "ends after the exchange under way; Ctrl-C once more stops at once" in said
        assert "finished: ended by the operator, round " in said
        for name in deployment.tables:
            assert deployment._processes[name].wait(60) == 0, deployment.output(name)
        same_everywhere(deployment)


def test_signals_wrong_keys_and_refusals_in_words(tmp_path: Path) -> None:
    config = CONFIG.format(rounds=30_000)
    with Deployment(tmp_path / "deployment", mixture_tables(4), config) as deployment:
        folder = deployment.folder
        make_server_keys(folder / "other", ["127.0.0.1"])
        for name in ("stranger", "misled"):
            make_site_key(folder, name)
            deployment.tables["s0"].write_parquet(folder / f"{name}.parquet")
        deployment.start()
        deployment.wait_for_round(3, 60)
        roster = ("--roster", str(folder / "roster"))
        deployment.join("stranger", *roster)
        misled = deployment.join("misled", "--ca", str(folder / "other" / "ca.pem"))
        assert misled.wait(60) == 1
        assert "not the server that ca.pem stands for" in deployment.output("misled")
        words = "does not know this site's key"
        wait_until(lambda: words in deployment.output("stranger"))
        assert "may not join, SHA256:" in (folder / "run" / "logs" / "serve.log").read_text()

        join = ("join", f"127.0.0.1:{deployment.port}", "--data", "s0.parquet")
        keys = ("--ca", str(deployment.keys / "ca.pem"), "--key", "s0.key")
        # A holder of the same key with another folder is refused, and the first goes on.
        second = deployment.spawn("twin", *join, *keys, "--folder", "twin")
        wait_until(lambda: "another process is connected" in deployment.output("twin"))
        second.terminate()
        assert second.wait(60) == 130

        # A key that is removed takes its site out at once; the others go on.
        remove_site(deployment.keys, "s1")
        wait_until(lambda: "have removed this site's key" in deployment.output("s1"))
        wait_until(lambda: "s1 is out: its key was removed" in deployment.output("serve"))
        wait_until(lambda: deployment.status["counted"]["sites"] == 3)

        # SIGTERM ends both sides with code 130, at once and in words; so does Ctrl-C at a site.
        processes = deployment._processes
        began = time.monotonic()
        processes["s0"].send_signal(signal.SIGINT)
        processes["s2"].send_signal(signal.SIGTERM)
        processes["serve"].send_signal(signal.SIGTERM)
        for name in ("s0", "s2", "serve"):
            assert processes[name].wait(60) == 130
        assert time.monotonic() - began < 8
        assert "the same command goes on from here" in deployment.output("serve")
        assert "what was sent is in" in deployment.output("s0")
        status = run(deployment, "status", "run.toml")
        assert (status.returncode, "no server works on it now" in status.stdout) == (1, True)
        # Its key is gone, and what it signed can still be read.
        deployment.serve()
        wait_until(lambda: deployment.output("serve").count("round ") > 3)
        for name in processes:
            assert "Traceback" not in deployment.output(name)
        for name in ("stranger", "misled", "twin"):
            assert not (folder / f"site-{name}" / "messages.jsonl").exists()


def test_a_relay_of_its_own_needs_no_authority_and_no_model(tmp_path: Path) -> None:
    config = CONFIG.format(rounds=300).replace("tol = 0.0", "tol = 1e-4")
    with Deployment(tmp_path / "deployment", mixture_tables(3), config) as deployment:
        theirs = deployment.folder / "relay-keys"
        (theirs / "sites").mkdir(parents=True)
        for name in ("ca.pem", "server.pem", "server.key"):
            (theirs / name).write_bytes((deployment.keys / name).read_bytes())
        (theirs / "server.key").chmod(0o600)
        for path in (deployment.keys / "sites").iterdir():
            (theirs / "sites" / path.name).write_bytes(path.read_bytes())
        address, port = f"127.0.0.1:{deployment.port}", str(deployment.port)
        relay = deployment.spawn("relay", "relay", str(theirs), "--port", port)
        serve = deployment.spawn("serve", "serve", "run.toml", "--relay", address)
        for name in deployment.tables:
            deployment.join(name)
        assert serve.wait(90) == 0, deployment.output("serve")
        for name in deployment.tables:
            assert deployment._processes[name].wait(60) == 0, deployment.output(name)
        same_everywhere(deployment)
        modules = Path(f"/proc/{relay.pid}/maps").read_text()
        assert not re.search("/(scipy|polars)/", modules)
        relay.send_signal(signal.SIGINT)
        assert relay.wait(30) == 130
        assert f"a relay listens on {address}" in deployment.output("relay")


class LyingRelay(Relay):
    """Adds one to the first number of each sum after the fifth."""

    def _added(self) -> Entry:
        entry = super()._added()
        added = Added.decode(entry.added)
        if added.exchange < 5:
            return entry
        part = Part.decode(added.part)
        numbers = bytes([part.numbers[0] ^ 1]) + part.numbers[1:]
        return Entry.sum(replace(added, part=replace(part, numbers=numbers).encode()))


def test_a_relay_that_alters_sums_is_noticed_and_leaves_no_model(tmp_path: Path) -> None:
    with Deployed(tmp_path) as deployed:
        server, sites = deployed.serve(make=LyingRelay), deployed.join_all()
        with pytest.raises(FederationError, match="sums are forged"):
            server.wait()
        for name, outcome in deployed.outcomes(sites).items():
            assert "sums are forged" in outcome.failed[0]
            assert not (tmp_path / f"site-{name}" / "model.emfed").exists()
        assert not (tmp_path / "model" / "model.emfed").exists()


def stopped(pid: int) -> Callable[[], object]:
    """A process that stands still, as on a machine that sleeps; returns what lets it go on."""
    os.kill(pid, signal.SIGSTOP)
    return lambda: os.kill(pid, signal.SIGCONT)


def without_disk(pid: int) -> Callable[[], object]:
    """A process whose writes fail, as on a full disk; returns what makes room."""
    before = resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    return lambda: resource.prlimit(pid, resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("harm", first([without_disk, stopped]))
def test_a_site_that_stands_still_or_cannot_write_for_a_while_changes_nothing(
    harm: Callable[[int], Callable[[], object]], tmp_path: Path
) -> None:
    """The others wait for it: nothing of it has happened, on either side, until it answers."""
    with Deployment(tmp_path / "d", mixture_tables(3), CONFIG.format(rounds=40)) as deployment:
        deployment.start()
        deployment.wait_for_round(3, 60)
        mend = harm(deployment._processes["s1"].pid)
        threading.Timer(1.5, mend).start()
        summary = deployment.wait(90)
        assert difference(summary, deployment.here(summary["seed"])) < 1e-5
        assert deployment.status["counted"] == {"sites": 3, "rows": 180}


def test_a_signal_that_comes_while_a_generator_is_thrown_away_is_not_lost() -> None:
    """A destructor swallows what is raised in it: a server went on after SIGTERM."""

    def answers() -> Iterator[int]:
        try:
            yield 1
            yield 2
        finally:
            signal.raise_signal(signal.SIGTERM)

    def left_early() -> None:
        with terminated_as_interrupted():
            for _ in answers():
                break  # its destructor runs here
            time.sleep(5.0)

    with pytest.raises(KeyboardInterrupt):
        left_early()
