"""What docs/between-machines.md and examples/deploy tell an operator to do works as written."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.guide import follow_guide

DEPLOY = Path(__file__).parents[2] / "examples" / "deploy"
UNITS = sorted(DEPLOY.glob("*.service"))


def test_the_guide_by_the_letter(tmp_path: Path) -> None:
    found = follow_guide(tmp_path, 120)
    assert found["converged"]
    assert found["components"] == 2, "as many as the lesson's rows were made with"
    said = (tmp_path / "terminal1.out").read_text()
    assert "as tromso" in said
    assert "sent: masked, round 1" in said
    assert said.count("the run ended after") == 3, "sites end by themselves"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not at hand")
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_units_are_sound_and_hardened(unit: Path, tmp_path: Path) -> None:
    copy = tmp_path / unit.name
    copy.write_text(unit.read_text().replace("/opt/emfed/bin/emfed", sys.executable))
    for command in (["verify"], ["security", "--offline=yes", "--threshold=30"]):  # 3.0 of 10
        done = subprocess.run(
            ["systemd-analyze", "--no-pager", *command, str(copy)], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout[-300:] + done.stderr


def test_the_units_and_the_container_need_no_extra() -> None:
    assert len(UNITS) == 2
    for path in DEPLOY.iterdir():
        assert "flower" not in path.read_text()
