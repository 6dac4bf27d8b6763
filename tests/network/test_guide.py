"""What README, docs/between-machines.md and examples/deploy tell people to do works as written."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from benchmarks.guide import blocks, follow_guide, shell

from emfed.network.addresses import free_port

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "examples" / "deploy"
README = (ROOT / "README.md").read_text(encoding="utf-8")
UNITS = sorted(DEPLOY.glob("*.service"))


def alike(shown: str, found: str) -> bool:
    """Whether two lines have the same words, and numbers that differ by a fifth at most.

    No member alone chooses the seed of masked sums, so every run has another one.
    """
    number = r"\d+(?:\.\d+)?"
    ratios = np.divide(*(np.array(re.findall(number, line), float) for line in (found, shown)))
    return re.sub(number, "", shown) == re.sub(number, "", found) and np.all(abs(ratios - 1) <= 0.2)


def test_the_guide_by_the_letter(tmp_path: Path) -> None:
    found = follow_guide(tmp_path, 120)
    assert found["converged"]
    assert found["components"] == 2, "as many as the lesson's rows were made with"
    said = (tmp_path / "terminal1.out").read_text()
    assert "as tromso" in said
    assert "sent: part" in said
    assert said.count("the run ended after") == 3, "sites end by themselves"


def test_the_readme_by_the_letter(tmp_path: Path) -> None:
    """What is pasted ends with the model of the first example, masked."""
    (text,) = (block for block in blocks("sh", ROOT / "README.md") if "emfed serve" in block)
    done = shell(text.replace("9400", str(free_port())), tmp_path)
    said, _ = done.communicate(timeout=300)  # 20 s on a machine with nothing else to do
    assert done.returncode == 0, said
    (shown,) = re.findall(r"^finished: .*", README, re.MULTILINE)
    (found,) = re.findall(r"^finished: .*", said, re.MULTILINE)
    assert alike(shown, found)
    assert "component,probability" in said, "the last lines predict"
    assert "all sites have signed the model in" in said, "and show the end of a site's log"
    trial = tmp_path / "trial"
    journal = (trial / "site-oslo" / "messages.jsonl").read_text()
    assert '"kind": "part"' in journal
    names: dict[str, object] = {}
    exec(compile(blocks("python", ROOT / "README.md")[0], "README.md", "exec"), names)
    (shown,) = re.findall(r"^<Result: .*", README, re.MULTILINE)
    assert alike(shown, repr(names["mixture"].result_))
    here = np.sort(names["mixture"].means_, axis=0)
    there = json.loads((trial / "model" / "summary.json").read_text())["parameters"]["means"]
    np.testing.assert_allclose(np.sort(there, axis=0), here, rtol=0.02)


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


def test_the_container_has_no_root_and_the_wheel_that_is_made() -> None:
    """It is read here, not built: no engine of containers is at hand where tests run.

    ``docs/deploy-files.md`` says how it was built, and how a server and three sites ran in it.
    """
    text = (DEPLOY / "Containerfile").read_text()
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    said = [line.split(" ", 1) for line in lines]
    kinds = [kind for kind, _ in said]
    assert {*kinds} <= {"ARG", "FROM", "COPY", "RUN", "USER", "WORKDIR", "ENTRYPOINT"}
    (user,) = (rest for kind, rest in said if kind == "USER")
    assert user.isdigit()
    assert int(user) > 0
    assert f"--uid {user}" in text
    assert kinds.index("USER") > max(n for n, kind in enumerate(kinds) if kind == "RUN")
    (start,) = (rest for kind, rest in said if kind == "ENTRYPOINT")
    assert json.loads(start) == ["emfed"]
    assert ":latest" not in text
    (copied,) = (rest.split()[0] for kind, rest in said if kind == "COPY")
    assert re.search(r"--outdir dist\b", (ROOT / "Makefile").read_text())
    assert copied == "dist/emfed-*.whl"


def test_the_units_and_the_container_need_no_extra() -> None:
    assert len(UNITS) == 2
    for path in DEPLOY.iterdir():
        assert "flower" not in path.read_text()
