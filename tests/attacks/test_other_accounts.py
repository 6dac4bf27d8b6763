"""Another account of the same machine: it reads what it may read, and calls what listens."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from benchmarks.deployments import MIXTURE, Deployment, mixture_tables

NOBODY = 65534
pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0, reason="needs root, to become somebody else"
)
CONFIG = (
    MIXTURE
    + """
[fit]
tol = 0.0
start = "moments"
rounds = {rounds}
seed = 3
[sites]
expected = 3
"""
)
ATTACK = """
import glob, json, os, re, ssl, sys
import http.client
folder, port, ca, account = sys.argv[1:]
context = ssl.create_default_context(cafile=ca)
os.setgroups([]); os.setgid(int(account)); os.setuid(int(account))

found = {"lines": [], "readable": [], "answers": {}}
for name in glob.glob("/proc/[0-9]*/cmdline"):  # what ps shows to everybody
    try:
        line = open(name, "rb").read().replace(b"\\0", b" ").decode(errors="replace")
    except OSError:
        continue
    if folder in line:
        found["lines"].append(line)
    try:
        found["lines"].append(open(name.replace("cmdline", "environ")).read())
    except OSError:
        pass
for where, _, names in os.walk(folder):
    for name in names:
        try:
            open(os.path.join(where, name), "rb").close()
            found["readable"].append(os.path.relpath(os.path.join(where, name), folder))
        except OSError:
            pass

def call(path, **headers):
    line = http.client.HTTPSConnection("127.0.0.1", int(port), context=context, timeout=10)
    try:
        line.request("POST", path, body=b"", headers=headers)
        return line.getresponse().status
    except Exception as error:
        return type(error).__name__
    finally:
        line.close()

paths = ["/v1/control/" + n for n in "list-nodes stop-run start-run start-automation".split()]
for path in paths:
    found["answers"][path] = call(path)
print(json.dumps(found))
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that everybody may enter; pytest's own are closed to others."""
    path = Path(tempfile.mkdtemp(prefix="emfed-accounts-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path, ignore_errors=True)


def attack(deployment: Deployment) -> dict[str, Any]:
    """What an account without rights finds; it starts as ours, only to load its programs."""
    place, ca = str(deployment.folder), str(deployment.keys / "ca.pem")
    line = [sys.executable, "-c", ATTACK, place, str(deployment.port), ca, str(NOBODY)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


def secrets_of(folder: Path) -> dict[str, str]:
    """All that must stay with its owner, by its place."""
    names = ("*/page.secret", "*.key", "keys/*.key")
    paths = (path for name in names for path in folder.glob(name))
    return {str(path.relative_to(folder)): path.read_text() for path in paths}


PUBLIC = ("run.toml", "rules.toml", "ca.pem", "server.pem", ".pub", ".parquet", ".out")
"""What the tests put there themselves, public keys, and what the terminals showed."""


def check(found: dict[str, Any], folder: Path) -> None:
    """No secret in the list of processes, and no file of a run or a site that others may open."""
    private = [
        n for n in found["readable"] if not n.endswith(PUBLIC) and not n.startswith("model/")
    ]
    assert not private, private
    assert found["lines"], "the processes were not seen at all"
    for place, secret in secrets_of(folder).items():
        assert not any(secret.strip() in line for line in found["lines"]), place


def test_another_account_finds_no_secret_and_no_state(folder: Path) -> None:
    with Deployment(folder / "d", mixture_tables(3), CONFIG.format(rounds=100_000)) as deployment:
        deployment.start()
        deployment.wait_for_round(2, 180)
        found = attack(deployment)
        check(found, deployment.folder)
        assert {"run/page.secret", "site-s0/page.secret"} <= {*secrets_of(deployment.folder)}
        assert 200 not in found["answers"].values()
