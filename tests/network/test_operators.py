"""What an operator lives with: ends that are told, keys, orders, pages, journals; real processes."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.deployments import Deployment, mixture_tables

from emfed import fit, gaussian_mixture, load
from emfed.network import LocalTransport, Site, SiteRules
from emfed.network.deployment.config import read_config
from emfed.network.deployment.orders import change_orders
from emfed.network.deployment.serving import serve_run
from emfed.network.deployment.status import Status

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="these tests read /proc")
CONFIG = """
[model]
kind = "gaussian-mixture"
n_components = 2
[algorithm]
kind = "FedEM"
compressor = "dithering:4"
step_size = 0.5
[fit]
tol = 0.0
rounds = {rounds}
seed = 3
[sites]
expected = {sites}
minimum = 2
deliver = true
farewell = 2.0
"""


def configured(rounds: int = 3, sites: int = 2, more: str = "") -> str:
    return CONFIG.format(rounds=rounds, sites=sites) + more


def test_at_the_end_sites_are_told_get_the_model_and_end(tmp_path: Path) -> None:
    with Deployment(tmp_path / "d", mixture_tables(3), configured(sites=3)) as deployment:
        serve = deployment.serve()
        sites = {name: deployment.join(name) for name in ("s0", "s1")}
        stays = deployment.join("s2", "--stay")
        assert serve.wait(60) == 0, deployment.output("serve")
        model = (deployment.folder / "model" / "model.emfed").read_bytes()
        for name, site in sites.items():
            assert site.wait(20) == 0, deployment.output(name)
            assert (deployment.folder / f"site-{name}" / "model.emfed").read_bytes() == model
            assert "the run ended after 3 rounds (rounds); took its model" in deployment.output(name)
            assert "nothing listens" not in deployment.output(name)
        assert load(deployment.folder / "site-s0" / "model.emfed").params.weights.shape == (2,)
        assert json.loads((deployment.folder / "run" / "status.json").read_text())["untold"] == []
        assert stays.poll() is None


class Ordered:
    """A run in this process whose operator says things when a round is reached."""

    def __init__(self, folder: Path, orders: dict[int, Callable[[], object]], more: str = "") -> None:
        (folder / "run.toml").write_text(configured(40, 3, more))
        self.config = read_config(folder / "run.toml")
        self.folder = self.config.place("folder")
        self.folder.mkdir()
        self.tables = {name: table.to_numpy() for name, table in mixture_tables(3).items()}
        rules = SiteRules.loosest()
        self.sites = {
            name: Site(table, folder / name, rules=rules) for name, table in self.tables.items()
        }
        self.said: list[dict[str, Any]] = []
        self._orders = orders

    def report(self, status: dict[str, Any]) -> None:
        self.said.append(status)
        if status["state"] == "running" and status.get("round") in self._orders:
            self._orders.pop(status["round"])()

    def run(self) -> dict[str, Any]:
        serve_run(LocalTransport(self.sites), self.config, Status(self.folder, self.report))
        return json.loads((self.config.place("output") / "summary.json").read_text())


def test_who_is_expelled_counts_no_longer_and_may_return(tmp_path: Path) -> None:
    def expel() -> None:
        change_orders(tmp_path / "run", expelled={"s2": "expelled by the operator"})

    run = Ordered(tmp_path, {5: expel})
    summary = run.run()
    assert "s2" in summary["refusals"]
    others = {name: run.tables[name] for name in ("s0", "s1")}
    pooled = fit(gaussian_mixture(2), others, "em", rounds=300, seed=3)
    found = load(run.config.place("output") / "model.emfed")
    close = np.allclose(np.sort(found.params.means, 0), np.sort(pooled.params.means, 0), atol=0.05)
    assert close, (found.params.means, pooled.params.means)
    assert run.said[-1]["sites"]["s2"]["refusal"] == "expelled by the operator"

    (tmp_path / "again").mkdir()

    def readmit() -> None:
        change_orders(tmp_path / "again" / "run", expelled={})

    def expel_there() -> None:
        change_orders(tmp_path / "again" / "run", expelled={"s2": "for a while"})

    back = Ordered(tmp_path / "again", {5: expel_there, 12: readmit})
    assert "s2" not in back.run()["refusals"]
    answers = [s["answered"] for s in back.said if s["state"] == "running" and "answered" in s]
    assert min(answers[6:12]) == 2
    assert answers[-1] == 3


def test_a_run_is_paused_extended_and_finished_by_the_operator(tmp_path: Path) -> None:
    folder = tmp_path / "run"

    def pause() -> None:
        change_orders(folder, paused=True)
        threading.Timer(0.5, change_orders, (folder,), {"paused": False}).start()

    run = Ordered(
        tmp_path,
        {
            5: pause,
            10: lambda: change_orders(folder, rounds=60),
            50: lambda: change_orders(folder, finish=True),
        },
    )
    summary = run.run()
    assert any(status["state"] == "paused" for status in run.said)
    assert summary["rounds"] == 50
    assert run.said[-1]["state"] == "finished"
