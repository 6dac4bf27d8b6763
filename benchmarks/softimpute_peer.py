"""fancyimpute's SoftImpute as a peer, in an environment of its own.

``python -m benchmarks.softimpute_peer`` makes that environment in build/softimpute: fancyimpute
0.7 does not run with scikit-learn 1.6 and later. Without it the peer is left out.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

HOME = Path("build/softimpute")
PYTHON = HOME / "bin" / "python"
SCRIPT = """
import json, sys, time, warnings
import numpy as np
from fancyimpute import SoftImpute
warnings.simplefilter("ignore")
data = np.load(sys.argv[1])
table = np.full(tuple(data["shape"]), np.nan)
table[data["sites"], data["times"]] = data["values"]
centre = np.nanmean(table)
began, best = time.perf_counter(), None
cells = np.flatnonzero(~np.isnan(table).ravel())
hidden = np.random.default_rng(0).choice(cells, len(cells) // 10, replace=False)
inner = table.copy()
inner.ravel()[hidden] = np.nan
def fill(array, shrinkage):
    model = SoftImpute(shrinkage_value=shrinkage, max_rank=8, max_iters=50, verbose=False)
    return model.fit_transform(array - centre) + centre
for shrinkage in (2, 5, 15):
    error = np.mean((fill(inner, shrinkage).ravel()[hidden] - table.ravel()[hidden]) ** 2)
    if best is None or error < best[0]:
        best = error, shrinkage
filled = fill(table, best[1])
out = filled[data["held_sites"], data["held_times"]]
print(json.dumps({"seconds": time.perf_counter() - began, "values": out.tolist()}))
"""


def softimpute(train: Any, held: Any) -> tuple[np.ndarray, float] | None:
    """Estimates of held-out cells and seconds; shrinkage by hold-out; None without the peer."""
    if not PYTHON.exists():
        return None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "table.npz"
        np.savez(
            path,
            shape=train.shape,
            sites=train.sites,
            times=train.times,
            values=train.sums / train.weights,
            held_sites=held.sites,
            held_times=held.times,
        )
        done = subprocess.run(
            [PYTHON, "-c", SCRIPT, path], capture_output=True, text=True, check=True
        )
    answer = json.loads(done.stdout.splitlines()[-1])
    return np.array(answer["values"]), answer["seconds"]


def install() -> None:
    began = time.perf_counter()
    subprocess.run([sys.executable, "-m", "venv", HOME], check=True)
    packages = ["fancyimpute==0.7.0", "scikit-learn<1.6", "numpy<2.3"]
    subprocess.run([PYTHON, "-m", "pip", "install", "--quiet", *packages], check=True)
    print(f"fancyimpute is in {HOME} ({time.perf_counter() - began:.0f} s)")


if __name__ == "__main__":
    install()
