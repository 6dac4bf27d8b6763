"""A fit without masks over real processes, which are killed, is that of a simulation."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.deployments import MIXTURE, Deployment, difference, mixture_tables

from emfed import load
from emfed.network.exchange.statements import StatementKind
from tests.network.test_processes import kinds

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="these tests read /proc")
CONFIG = (
    MIXTURE
    + """
[algorithm]
{algorithm}

[fit]
tol = 0.0
rounds = 30
seed = 3

[privacy]
masks = false

[sites]
expected = 3
minimum = 3
"""
)


class Unmasked(Deployment):  # type: ignore[misc]
    """Sites whose owners allow it."""

    def join(self, name: str, *more: str) -> Any:
        (self.folder / f"{name}.toml").write_text("unmasked = true\n")
        return super().join(name, "--rules", f"{name}.toml", *more)


@pytest.mark.parametrize("algorithm", ["", 'kind = "fedem"'], ids=["auto", "FedEM"])
def test_kills_of_both_sides_change_no_memory(tmp_path: Path, algorithm: str) -> None:
    config = CONFIG.format(algorithm=algorithm)
    with Unmasked(tmp_path / "deployment", mixture_tables(3), config) as deployment:
        deployment.start()
        for who, round_number in (("join s1", 8), ("serve", 14), ("join s0", 20)):
            deployment.wait_for_round(round_number - 5, 60)
            assert deployment.kill(who)
        summary = deployment.wait(120)
        assert summary["rounds"] == 30
        assert difference(summary, deployment.here(3)) < 1e-12
        entries = kinds(deployment.folder / "run")
        assert StatementKind.SUM not in entries
        assert entries.count(StatementKind.TOLD) > 30
        found = load(deployment.config.place("output") / "model.emfed")
        for name in deployment.tables:
            mine = load(deployment.folder / f"site-{name}" / "model.emfed")
            assert np.array_equal(mine.statistics, found.statistics)
