"""How long a user waits before anything happens: new processes, the best of many, in turn."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.timing import best_times

SCRIPTS = {
    "python -c pass": "pass",
    "import emfed": "import emfed",
    "import emfed; emfed.fit": "import emfed; emfed.fit",
    "from emfed import FederatedGaussianMixture": "from emfed import FederatedGaussianMixture",
    "the same of scikit-learn": "from sklearn.mixture import GaussianMixture",
}


def bench_startup() -> dict[str, float]:
    """Seconds of a whole process, its compiled modules in the cache."""
    commands = {name: [sys.executable, "-c", script] for name, script in SCRIPTS.items()}
    for words in ("--help", "fit --help"):
        program = str(Path(sys.executable).parent / "emfed")
        commands[f"emfed {words}"] = [program, *words.split()]
    tasks: dict[str, Callable[[], object]] = {
        name: partial(subprocess.run, command, check=True, stdout=subprocess.DEVNULL)
        for name, command in commands.items()
    }
    return best_times(tasks, 3.0)
