"""A system without what only Linux and macOS have: sites and servers import and work there.

No Windows is at hand: what it lacks is taken away from a Python of this machine, and its locks are
stood in for. What Windows itself does differently is not tried here.
"""

from __future__ import annotations

import errno
import subprocess
import sys
import types
from pathlib import Path

import pytest

from emfed.network import addresses
from emfed.network.addresses import alone

ELSEWHERE = """
import os, pkgutil, sys, tempfile
for name in ("fcntl", "grp", "pwd", "resource", "termios", "tty", "pty"):
    sys.modules[name] = None
for name in ("fchmod", "fork", "geteuid", "getuid", "killpg", "setsid", "sysconf"):
    if hasattr(os, name):
        delattr(os, name)
import importlib
import numpy as np
import emfed
import emfed.cli.main
for found in pkgutil.walk_packages(emfed.network.__path__, "emfed.network."):
    if ".flower" not in found.name and not found.name.endswith(".cluster"):
        importlib.import_module(found.name)
from emfed.network import LocalSites
rows = np.random.default_rng(0).normal(size=(3, 40, 2))
with tempfile.TemporaryDirectory() as folder:
    sites = LocalSites(dict(zip("abc", rows)), directory=folder)
    result = emfed.fit(emfed.gaussian_mixture(1, "diag"), sites, rounds=2)
    assert np.allclose(result.params.means, rows.mean(axis=(0, 1)), atol=1e-3)
    with emfed.network.listen("127.0.0.1:0", insecure=True) as server:
        assert server.port
print("works")
"""


def test_a_site_and_a_server_work_without_what_windows_lacks() -> None:
    line = [sys.executable, "-c", ELSEWHERE]
    done = subprocess.run(line, capture_output=True, text=True, timeout=180, check=False)
    assert done.stdout.strip().endswith("works"), done.stderr


def test_locks_are_those_of_windows_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held: set[tuple[int, int]] = set()
    windows = types.ModuleType("msvcrt")

    def locking(handle: int, mode: int, many: int) -> None:
        about = addresses.os.fstat(handle)
        if (about.st_dev, about.st_ino) in held:
            raise PermissionError(errno.EACCES, "Permission denied")
        held.add((about.st_dev, about.st_ino))

    vars(windows).update(LK_NBLCK=2, locking=locking)
    monkeypatch.setitem(sys.modules, "msvcrt", windows)
    monkeypatch.setattr(addresses.sys, "platform", "win32")
    with alone(tmp_path / "lock") as first, alone(tmp_path / "lock") as second:
        assert (first, second) == (True, False)
