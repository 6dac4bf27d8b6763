"""What a release says about itself in several places is the same everywhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import emfed

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def test_the_version_is_told_alike() -> None:
    assert f"\nversion: {emfed.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    minor = emfed.__version__.rpartition(".")[0]
    assert f"| {minor}.x" in (ROOT / "SECURITY.md").read_text()


@pytest.mark.skipif(sys.platform == "win32", reason="the workflow's job runs on Linux")
def test_the_release_workflow_lets_the_tag_of_this_version_pass_and_no_other() -> None:
    workflow = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    (step,) = re.findall(r"The tag is the version\n +run: \|\n((?: {10}.*\n)+)", workflow)

    def passes(tag: str) -> bool:
        environment = {**os.environ, "GITHUB_REF_NAME": tag}
        done = subprocess.run(["bash", "-e", "-c", step], cwd=ROOT, env=environment, check=False)
        return done.returncode == 0

    tag = f"v{emfed.__version__}"
    assert passes(tag)
    assert not passes(tag[:-1])
    assert not passes(tag.replace(".", "x"))


def test_nobody_is_told_to_install_from_an_index_what_is_not_there() -> None:
    if "Nothing has been released yet" not in (ROOT / "SECURITY.md").read_text():
        pytest.skip("there is a release")
    folders = [ROOT / name for name in ("src", "docs", "examples", "benchmarks")]
    files = [*ROOT.glob("*.md"), *(path for folder in folders for path in folder.rglob("*"))]
    wrong = [
        str(path)
        for path in files
        if path.suffix in (".md", ".py", ".service", "")
        and path.is_file()
        and re.search(r"pip install (-\S+ )*'?emfed\b(?!-)", path.read_text(encoding="utf-8"))
    ]
    assert wrong == []


def test_a_site_installs_what_emfed_needs_without_drawing_and_estimators() -> None:
    site = tomllib.loads((ROOT / "packaging/site/pyproject.toml").read_text(encoding="utf-8"))
    left_out = {"matplotlib", "jinja2", "scikit-learn"}
    all_of_it = {re.split(r"[<>=]", one)[0]: one for one in PROJECT["dependencies"]}
    kept = {one for name, one in all_of_it.items() if name not in left_out}
    assert set(site["project"]["dependencies"]) == kept
    for key in ("requires-python", "license", "scripts"):
        assert site["project"][key] == PROJECT[key]


def test_nothing_that_users_install_has_an_upper_bound() -> None:
    extras = [one for each in PROJECT["optional-dependencies"].values() for one in each]
    bounded = [
        one
        for one in (*PROJECT["dependencies"], *extras)
        if re.search(r"<|==|~=", one.partition(";")[0])
    ]
    assert bounded == [], "if something breaks, CONTRIBUTING.md says what"
    assert all(">=" in one for one in PROJECT["dependencies"]), "make lowest tries them"


def test_workflows_try_every_python_that_we_name_and_pin_what_they_use() -> None:
    tests = (ROOT / ".github" / "workflows" / "tests.yml").read_text()
    (matrix,) = re.findall(r"python: \[(.*)\]", tests)
    tried = re.findall(r"3\.\d+", matrix)
    named = re.findall(r":: (3\.\d+)", " ".join(PROJECT["classifiers"]))
    assert tried == named
    assert f">={tried[0]}" == PROJECT["requires-python"]
    assert len(WORKFLOWS) >= 2
    for path in WORKFLOWS:
        for used in re.findall(r"uses: (\S+)", path.read_text()):
            assert used.startswith("./") or re.search(r"@[0-9a-f]{40}$", used), (path.name, used)
