"""Another account of the same machine: it reads what it may read, and calls what listens."""

from __future__ import annotations

import importlib.util
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
from benchmarks.deployments import FEDEM, MIXTURE, Deployment, mixture_tables

NOBODY = 65534
pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0, reason="needs root, to become somebody else"
)
CONFIG = (
    MIXTURE
    + FEDEM
    + """
[fit]
tol = 0.0
start = "moments"
rounds = {rounds}
seed = 3
[sites]
expected = 3
deadline = 60.0
deliver = true
"""
)
ATTACK = """
import glob, json, os, re, ssl, sys
import http.client
folder, port, ca, account = sys.argv[1:]
context = ssl.create_default_context(cafile=ca)
flower = None
try:
    from flwr.proto import runtime_pb2 as asked
    from flwr.supercore.interceptors.http import RuntimeTokenHttpInterceptor
    from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor
    from flwr.supercore.runtime.runtime_http_client import RuntimeHttpClient as flower
except ImportError:
    pass
os.setgroups([]); os.setgid(int(account)); os.setuid(int(account))

found = {"lines": [], "readable": [], "tokens": [], "answers": {}}
for name in glob.glob("/proc/[0-9]*/cmdline"):  # what ps shows to everybody
    try:
        line = open(name, "rb").read().replace(b"\\0", b" ").decode(errors="replace")
    except OSError:
        continue
    if folder in line:
        found["lines"].append(line)
        found["tokens"] += re.findall("--token[ =]([^ ]+)", line)
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
for token in found["tokens"]:
    with flower.from_server_address(
        "127.0.0.1:" + port, False, ca,
        interceptors=[RuntimeVersionHttpInterceptor(component_name="ServerApp"),
                      RuntimeTokenHttpInterceptor(token)],
    ) as client:
        for name in ("PullTaskInput", "GetNodes", "StartAutomation", "PushTaskOutput"):
            kind = getattr(asked, name + "Request", None)
            if kind is None:
                from flwr.proto import control_pb2
                kind = getattr(control_pb2, name + "Request")
            try:
                getattr(client, name)(kind())
                found["answers"][name] = "done"
            except Exception as error:
                response = getattr(error, "response", None)
                found["answers"][name] = getattr(response, "status_code", str(error)[:200])
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
    names = ("*/control.secret", "*/exec.secret", "*/page.secret", "*.key", "keys/*.key")
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


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("flwr") is None, reason="flower is not installed")
def test_under_flower_a_token_from_the_list_of_processes_is_of_no_use(folder: Path) -> None:
    """Without `LocalOnly` in front of the SuperLink, the stolen token is answered."""
    text = CONFIG.format(rounds=6)
    with Deployment(folder / "d", mixture_tables(3), text, "flower") as deployment:
        deployment.start()
        deployment.wait_for_round(2, 300)
        found = attack(deployment)
        check(found, deployment.folder)
        assert found["tokens"], "Flower no longer shows its token: the guard may go"
        assert {*found["answers"].values()} == {403}, found["answers"]
        assert deployment.wait(180)["rounds"] == 6
