"""The units of examples/deploy under a systemd of their own, in namespaces that end with it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from benchmarks.deployments import MIXTURE, mixture_tables

import emfed
from emfed.deployment.status import read_status
from emfed.network.addresses import free_port
from emfed.network.keys import add_site, make_server_keys, make_site_key

UNITS = sorted((Path(__file__).parents[2] / "examples" / "deploy").glob("*.service"))
SYSTEMD, GROUPS = Path("/lib/systemd/systemd"), Path("/sys/fs/cgroup/systemd")
ACCOUNT = 991
"""Of the user emfed, in a copy of /etc/passwd that only the namespace sees."""
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        sys.platform != "linux"
        or os.geteuid() != 0
        or not SYSTEMD.exists()
        or not os.access(GROUPS / "cgroup.procs", os.W_OK)
        or shutil.which("nsenter") is None,
        reason="needs root, systemd and a hierarchy of control groups that it may use",
    ),
]
CONFIG = (
    MIXTURE
    + """
[fit]
tol = 0.0
rounds = 100000
[privacy]
masks = false
[sites]
expected = 1
minimum = 1
deliver = true
[server]
report = false
port = {port}
"""
)
OUTER = """
mkdir -p {group}; echo $$ > {group}/cgroup.procs
exec unshare --mount --pid --cgroup --uts --ipc --fork --kill-child --mount-proc sh {home}/inner
"""
INNER = """
set -e
mount --make-rprivate /
mkdir -p /var/lib/emfed /opt
mount --bind {home}/state /var/lib/emfed
mount -t tmpfs -o mode=755 tmpfs /opt
mkdir -p /opt/emfed /opt/python /opt/site /opt/src
mount --bind {home}/program /opt/emfed
mount --bind {base} /opt/python
mount --bind {site} /opt/site
mount --bind {src} /opt/src
mount --bind {home}/passwd /etc/passwd
mount --bind {home}/console /dev/console
umount -l /sys/fs/cgroup
mount -t tmpfs -o mode=755 tmpfs /sys/fs/cgroup
mkdir /sys/fs/cgroup/systemd
mount -t cgroup -o none,name=systemd cgroup /sys/fs/cgroup/systemd
mount -t tmpfs -o mode=755 tmpfs /run
mkdir /run/units
cp {home}/units/* /run/units
container=trial SYSTEMD_UNIT_PATH=/run/units exec {systemd} --system --unit=trial.target \
    --log-target=console --show-status=0
"""
COMMAND = """#!/bin/sh
LD_LIBRARY_PATH=/opt/python/lib exec /opt/python/bin/python3 /opt/emfed/emfed "$@"
"""
PROGRAM = """
import sys
sys.path[:0] = ["/opt/src", "/opt/site"]
from emfed.cli.main import main
main()
"""


class Machine:
    """A server and a site as units."""

    def __init__(self, home: Path) -> None:
        self.home, self.state = home, home / "state"
        for name in ("state", "program/bin", "units"):
            (home / name).mkdir(parents=True)
        self._files(free_port())
        self._units()
        self.group = GROUPS / f"emfed-{os.getpid()}"
        places = {
            "home": home,
            "group": self.group,
            "systemd": SYSTEMD,
            "base": sys.base_prefix,
            "site": Path(pytest.__file__).parents[1],
            "src": Path(emfed.__file__).parents[1],
        }
        for name, text in (("outer", OUTER), ("inner", INNER)):
            (home / name).write_text(text.format(**places))
        self._process = subprocess.Popen(["sh", str(home / "outer")])

    def _files(self, port: int) -> None:
        (self.state / "run.toml").write_text(CONFIG.format(port=port))
        (self.state / "rules.toml").write_text("unmasked = true\nlargest_rounds = false\n")
        make_server_keys(self.state / "keys", [])
        add_site(self.state / "keys", make_site_key(self.state, "oslo")[1])
        shutil.copy(self.state / "keys" / "ca.pem", self.state)
        mixture_tables(1)["s0"].write_parquet(self.state / "rows.parquet")
        self.address = f"127.0.0.1:{port}"
        for path in (self.state, *self.state.rglob("*")):
            os.chown(path, ACCOUNT, ACCOUNT)
        (self.home / "program" / "emfed").write_text(PROGRAM)
        command = self.home / "program" / "bin" / "emfed"
        command.write_text(COMMAND)
        command.chmod(0o755)
        passwd = f"emfed:x:{ACCOUNT}:{ACCOUNT}::/var/lib/emfed:/usr/sbin/nologin\n"
        (self.home / "passwd").write_text(Path("/etc/passwd").read_text() + passwd)
        (self.home / "console").touch()

    def _units(self) -> None:
        for unit in UNITS:
            text = unit.read_text().replace("em.example.org:9400", self.address)
            (self.home / "units" / unit.name).write_text(text)
        bare = "[Unit]\nDefaultDependencies=no\n"
        for name in ("sysinit", "basic", "shutdown", "network-online", "multi-user"):
            (self.home / "units" / f"{name}.target").write_text(bare)
        wants = f"Wants={' '.join(unit.name for unit in UNITS)}\n"
        (self.home / "units" / "trial.target").write_text(bare + wants)

    def pid(self, word: str) -> int | None:
        """The process of a unit."""
        done = subprocess.run(
            ["ps", "-u", str(ACCOUNT), "-o", "pid=,args="], capture_output=True, text=True
        )
        found = [line.split()[0] for line in done.stdout.splitlines() if f"emfed {word}" in line]
        return int(found[0]) if found else None

    def control(self, *command: str) -> str:
        """What systemctl says."""
        children = subprocess.run(
            ["ps", "--ppid", str(self._process.pid), "-o", "pid="], capture_output=True, text=True
        )
        inside = ["nsenter", "-t", children.stdout.split()[0], "-a", "systemctl", *command]
        return subprocess.run(inside, capture_output=True, text=True, check=True).stdout

    @property
    def round(self) -> int:
        return int(read_status(self.state / "run").get("round", 0))

    def until(self, ready: Callable[[], bool], seconds: float = 60.0) -> None:
        end = time.monotonic() + seconds
        while not ready():
            assert time.monotonic() < end, (self.home / "console").read_text()[-2000:]
            time.sleep(0.2)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self.until(lambda: self.pid("serve") is None and self.pid("join") is None)
        for path in sorted(self.group.rglob("*"), reverse=True):
            if path.is_dir():
                path.rmdir()
        self.group.rmdir()


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    started = Machine(tmp_path)
    try:
        yield started
    finally:
        started.end()


def test_units_run_are_started_again_and_end_well(machine: Machine) -> None:
    machine.until(lambda: machine.round > 3)
    for word in ("serve", "join"):
        before, reached = machine.pid(word), machine.round
        assert before is not None
        os.kill(before, signal.SIGKILL)
        machine.until(lambda: machine.pid(word) not in (None, before))  # noqa: B023
        machine.until(lambda: machine.round > reached + 3)  # noqa: B023
    machine.control("stop", "emfed-serve.service")
    told = machine.control("show", "-p", "Result,ExecMainStatus,NRestarts", "emfed-serve.service")
    assert {*told.split()} == {"Result=success", "ExecMainStatus=130", "NRestarts=1"}
    (machine.state / "run" / "orders.json").write_text('{"finish": true}')
    machine.control("start", "emfed-serve.service")
    machine.until(lambda: (machine.state / "site-oslo" / "model.emfed").exists())
    machine.until(lambda: machine.pid("serve") is None and machine.pid("join") is None)
    for unit in UNITS:
        told = machine.control("show", "-p", "Result,ExecMainStatus", unit.name)
        assert {*told.split()} == {"Result=success", "ExecMainStatus=0"}, unit.name
