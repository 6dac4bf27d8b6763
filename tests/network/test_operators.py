"""What an operator lives with: ends that are told, keys, orders, pages, journals; real processes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from benchmarks.deployments import Deployment, mixture_tables

from emfed import load

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
