from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cli.shell import Shell, wards


@pytest.fixture
def emfed_shell(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> Shell:
    shell = Shell(tmp_path, capsys, monkeypatch)
    shell.write("wards.csv", wards())
    return shell
