"""How long a user waits before anything happens: new processes, the best of many, in turn."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

SCRIPTS = {
    "python -c pass": "pass",
    "import emfed": "import emfed",
    "import emfed; emfed.fit": "import emfed; emfed.fit",
    "from emfed import FederatedGaussianMixture": "from emfed import FederatedGaussianMixture",
    "the same of scikit-learn": "from sklearn.mixture import GaussianMixture",
}
REPEATS = 5


def _spent(command: list[str]) -> tuple[float, float]:
    """Seconds of a whole process, and of a processor in it, which other programs hardly change."""
    began = time.perf_counter()
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, code, used = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(code)
    if child.returncode:
        raise RuntimeError(f"{' '.join(command)} ends with code {child.returncode}.")
    return time.perf_counter() - began, used.ru_utime + used.ru_stime


def bench_startup() -> dict[str, dict[str, float]]:
    """Wall and processor seconds of each, its compiled modules in the cache."""
    commands = {name: [sys.executable, "-c", script] for name, script in SCRIPTS.items()}
    for words in ("--help", "fit --help"):
        program = str(Path(sys.executable).parent / "emfed")
        commands[f"emfed {words}"] = [program, *words.split()]
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
    for _ in range(1 + REPEATS):
        for name, command in commands.items():
            found[name].append(_spent(command))
    return {
        name: {"wall": min(wall for wall, _ in runs[1:]), "processor": min(cpu for _, cpu in runs)}
        for name, runs in found.items()
    }
