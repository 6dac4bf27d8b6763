"""``emfed serve`` and ``emfed join`` as real processes over TLS: kills, signals, locks, words."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.deployments import COMMAND, FEDEM, MIXTURE, Deployment, difference, mixture_tables

from emfed import Dithering, FedEM, fit, gaussian_mixture
from emfed.fitting import RoundRecord
from emfed.network import RemoteFederation
from emfed.network.addresses import terminated_as_interrupted
from emfed.network.keys import make_server_keys, make_site_key, remove_site
from tests.helpers import first
from tests.network.processes import real_sites

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="these tests read /proc")
CONFIG = (
    MIXTURE
    + FEDEM
    + """
[fit]
tol = 0.0
rounds = {rounds}
seed = 3

[sites]
expected = 3
minimum = 3
deadline = 20.0
attempts = 20
"""
)
LARGEST_SITE = 200_000_000
"""Bytes of memory that a site's process may take."""


def wait_until(ready: Callable[[], bool], seconds: float = 20.0) -> None:
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


def test_a_run_ends_where_an_undisturbed_one_ends_through_kills_of_both_sides(
    tmp_path: Path,
) -> None:
    """One run for all that is asked of it."""
    config = CONFIG.format(rounds=100)
    with Deployment(tmp_path / "deployment", mixture_tables(3), config) as deployment:
        folder = deployment.folder
        deployment.start()
        deployment.wait_for_round(5, 60)
        for who, round_number in (("join s1", 15), ("serve", 30), ("join s0", 45), ("serve", 60)):
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
        assert summary["rounds"] == 100
        assert difference(summary, deployment.here()) < 1e-12
        assert deployment.memory_gap() < 1e-12
        assert run(deployment, "status", "run.toml").returncode == 0
        wait_until(lambda: "the run ended after 100 rounds" in deployment.output("s2"))

        # The site's journal has every reply; the connection's story is in its log.
        lines = (folder / "site-s2" / "messages.jsonl").read_text().splitlines()
        replies = [e for e in map(json.loads, lines) if e["kind"] == "masked"]
        assert {entry["round"] for entry in replies} >= set(range(1, 101))
        assert "connected to" in (folder / "site-s2" / "logs" / "join.log").read_text()
        for name in ("serve", "s0", "s1", "s2"):
            assert "Traceback" not in deployment.output(name)


def test_signals_wrong_keys_and_refusals_in_words(tmp_path: Path) -> None:
    config = CONFIG.format(rounds=3000)
    with Deployment(tmp_path / "deployment", mixture_tables(3), config) as deployment:
        folder = deployment.folder
        make_server_keys(folder / "other", ["127.0.0.1"])
        for name in ("stranger", "misled"):
            make_site_key(folder, name)
            deployment.tables["s0"].write_parquet(folder / f"{name}.parquet")
        deployment.start()
        deployment.wait_for_round(3, 60)
        deployment.join("stranger")
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

        # A key that is removed takes its site out at once.
        remove_site(deployment.keys, "s1")
        wait_until(lambda: "have removed this site's key" in deployment.output("s1"))

        # Ctrl-C and SIGTERM end both sides with code 130, at once and in words.
        processes = deployment._processes
        began = time.monotonic()
        processes["s0"].send_signal(signal.SIGINT)
        processes["s2"].send_signal(signal.SIGTERM)
        processes["serve"].send_signal(signal.SIGINT)
        for name in ("s0", "s2", "serve"):
            assert processes[name].wait(60) == 130
        assert time.monotonic() - began < 6
        assert "the same command goes on from here" in deployment.output("serve")
        assert "what was sent is in" in deployment.output("s0")
        status = run(deployment, "status", "run.toml")
        assert (status.returncode, "no server works on it now" in status.stdout) == (1, True)
        for name in processes:
            assert "Traceback" not in deployment.output(name)
        for name in ("stranger", "misled", "twin"):
            assert not (folder / f"site-{name}" / "messages.jsonl").exists()


def test_a_rehearsal_shows_what_would_be_sent_and_ends(tmp_path: Path) -> None:
    config = CONFIG.format(rounds=3)
    with Deployment(tmp_path / "deployment", mixture_tables(3), config) as deployment:
        deployment.serve()
        first = deployment.join("s0", "--dry-run")
        for name in ("s1", "s2"):
            deployment.join(name)
        assert first.wait(60) == 0, deployment.output("s0")
        said = deployment.output("s0")
        assert "would send: join" in said
        assert "would send: reply" in said
        assert said.splitlines()[-1].endswith(
            "nothing but a refusal was sent; in this run such numbers leave masked, as parts of "
            "sums over all sites"
        )
        assert not (deployment.folder / "site-s0" / "messages.jsonl").exists()
        os.kill(deployment._processes["serve"].pid, signal.SIGTERM)
        assert deployment._processes["serve"].wait(60) == 130


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
    """The round waits for it: nothing of it has happened, on either side, until it answers."""
    tables = {name: table.to_numpy() for name, table in mixture_tables(3).items()}
    settings: dict[str, Any] = {"rounds": 12, "seed": 2, "start": "moments", "tol": 0}
    model, algorithm = gaussian_mixture(2), FedEM(Dithering(4), step_size=0.5)
    children: dict[str, Any] = {}
    with real_sites(tables, tmp_path, children) as transport:
        federation = RemoteFederation(
            transport, minimum=3, deadline=0.5, attempts=30, pause=0.05, masks=False
        )

        def strike(record: RoundRecord) -> None:
            if record.round in (3, 7):
                mend = harm(children["s1"].pid)
                threading.Timer(1.2, mend).start()

        found = fit(model, None, algorithm, federation=federation, callbacks=[strike], **settings)
        assert sum(record.seconds for record in found.records) > 2
        assert not federation.refusals
    here = fit(model, tables, algorithm, federation="loop", **settings)
    np.testing.assert_allclose(found.statistics, here.statistics, rtol=1e-9, atol=1e-10)
    assert [r.answered for r in found.records[1:]] == [3] * 12


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
