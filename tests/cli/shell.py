"""The command line, run in this process or as a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from emfed.cli.main import main

START = "import sys; sys.argv[0] = 'emfed'; from emfed.cli.main import main; main()"


class Shell:
    """Runs ``emfed`` in a folder; a process only where pipes and signals matter."""

    def __init__(self, folder: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self._capsys = folder, capsys
        monkeypatch.chdir(folder)

    def __call__(self, *arguments: Any) -> tuple[int, str, str]:
        self._capsys.readouterr()
        try:
            main([str(a) for a in arguments])
        except SystemExit as end:
            code = end.code
        out, err = self._capsys.readouterr()
        assert isinstance(code, int)
        assert "Traceback" not in out + err
        if code in (1, 2):
            assert err.count("\n") == 1 or " faults\n" in err, err
            assert err.startswith("emfed: ")
        return code, out, err

    def process(self, *arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        settings: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(
            [sys.executable, "-c", START, *map(str, arguments)],
            cwd=self.folder,
            env={**os.environ, **options.pop("env", {})},
            **{**settings, **options},
        )

    def write(self, name: str, text: str | bytes) -> Path:
        path = self.folder / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path


def wards(seed: int = 0, sizes: tuple[int, ...] = (60, 45, 80)) -> str:
    """A table of hospitals, two kinds of patients, a count, a word."""
    rng = np.random.default_rng(seed)
    lines = ["hospital,age,pressure,stays,ward"]
    for name, size in zip(("north", "Sankt Anna", "007"), sizes, strict=True):
        for young in rng.random(size) < 0.4:
            age, pressure = rng.normal((40, 110) if young else (70, 150), (6, 8))
            ward = rng.choice(["icu", "er"], p=[0.8, 0.2] if young else [0.3, 0.7])
            lines.append(f"{name},{age:.2f},{pressure:.1f},{rng.poisson(2 if young else 6)},{ward}")
    return "\n".join(lines) + "\n"
