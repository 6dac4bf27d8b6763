"""Real processes on this machine, TLS on: the answer of a run in one process, through a crash."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from benchmarks.deployments import Deployment, difference, mixture_tables

from fedem.federations.flower.keys import make_server_keys, make_site_key

pytestmark = pytest.mark.xdist_group("flower")
CONFIG = """
[model]
kind = "gaussian-mixture"
n_components = 2

[algorithm]
kind = "fedem"
compressor = "dithering:4"
step_size = 0.5

[run]
rounds = 8
seed = 3

[sites]
expected = 3
minimum = 3
deadline = 60.0
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Three sites, a stranger, one with another authority's certificate, and one kill -9."""
    folder = tmp_path_factory.mktemp("flower")
    with Deployment(folder, mixture_tables(3), CONFIG) as deployment:
        make_site_key(deployment.folder, "stranger")
        make_server_keys(deployment.folder / "other", ["127.0.0.1"])
        make_site_key(deployment.folder, "misled")
        for name in ("stranger", "misled"):
            deployment.tables["s0"].write_parquet(deployment.folder / f"{name}.parquet")
        deployment.start()
        deployment.wait_for_round(1, 120)
        deployment.join("stranger")
        misled = deployment.join("misled", "--ca", str(deployment.folder / "other" / "ca.pem"))
        deployment.wait_for_round(3, 60)
        assert deployment.kill("resident s1")
        summary = deployment.wait(150)
        yield {
            "deployment": deployment,
            "summary": summary,
            "misled": misled.wait(60),
        }
    end = time.monotonic() + 10
    while (left := deployment.pids()) and time.monotonic() < end:
        time.sleep(0.2)
    assert not left, "processes outlived their deployment"


def test_the_answer_is_that_of_one_process(run: dict[str, Any]) -> None:
    assert run["summary"]["rounds"] == 8
    assert difference(run["summary"], run["deployment"].here()) < 1e-9


def test_memories_are_exact_after_a_kill(run: dict[str, Any]) -> None:
    assert run["deployment"].memory_gap() < 1e-12


def test_the_ledger_holds_what_crossed(run: dict[str, Any]) -> None:
    summary = run["summary"]
    assert summary["bytes_up"] == summary["crossed"]["up"]
    assert summary["bytes_down"] == summary["crossed"]["down"]


def test_a_site_logs_every_message_it_sent(run: dict[str, Any]) -> None:
    folder: Path = run["deployment"].folder / "site-s0"
    lines = [json.loads(line) for line in (folder / "messages.jsonl").read_text().splitlines()]
    kinds = [line["kind"] for line in lines]
    assert kinds[0] == "join"
    assert kinds.count("reply") == 8
    assert all(line["bytes"] > 0 and line["content"] for line in lines)


def test_an_unregistered_site_is_refused(run: dict[str, Any]) -> None:
    assert "does not know this site's key" in run["deployment"].output("stranger")
    assert not (run["deployment"].folder / "site-stranger" / "messages.jsonl").exists()


def test_another_authority_is_refused(run: dict[str, Any]) -> None:
    assert run["misled"] == 1
    assert "not the server that ca.pem stands for" in run["deployment"].output("misled")
