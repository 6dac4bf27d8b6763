"""Real tables with real holes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np

import emfed
from tests.helpers import plain_fit
from tests.real import AIR, air_quality

SCRIPT = """
import json, sys
from pathlib import Path
import polars, scipy.special
import emfed
from benchmarks.timing import peak_memory
from tests.real import AIR, air_quality

stations = air_quality(Path(sys.argv[1]))
model = emfed.gaussian_mixture(4, "full", missing=True)
algorithm = emfed.FedEM(emfed.Dithering(8, block="row"), in_metric=True, step_size=0.5)
emfed.fit(model, {"one": next(iter(stations.values()))}, algorithm, start="moments", rounds=2)
before = peak_memory()
# Rows stay in their file.
workers = emfed.data.WorkerTables(list(stations.values()), list(stations), tuple(AIR))
result = emfed.fit(model, workers, algorithm, start="moments", rounds=8, seed=1)
print(json.dumps({
    "rows": int(sum(rows.shape[0] for rows in stations.values())),
    "before": before,
    "after": peak_memory(),
    "finite": bool(abs(result.statistics).max() < 1e6),
}))
"""


def test_all_hours_of_twelve_stations_in_flat_memory(data_dir: Path) -> None:
    """Twelve stations, read from their file, take hardly more memory than one."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(data_dir)],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["rows"] == 420_768
    assert told["finite"]
    table = 420_768 * len(AIR) * 8
    assert told["after"] - told["before"] < table / 2


def test_air_quality_is_imputed_better_than_by_means(data_dir: Path) -> None:
    rng = np.random.default_rng(0)
    sites = {name: rows.read(0, 1200) for name, rows in air_quality(data_dir).items()}
    rows = np.concatenate(list(sites.values()))
    held = (rng.random(rows.shape) < 0.05) & ~np.isnan(rows)
    torn = np.where(held, np.nan, rows)
    cuts = np.cumsum([len(part) for part in sites.values()])[:-1]
    stations = dict(zip(sites, np.split(torn, cuts), strict=True))
    errors = {}
    for k in (1, 4):
        model = emfed.gaussian_mixture(k, "full", missing=True)
        result = plain_fit(model, stations, emfed.FedEM(), rounds=25)
        spread = np.nanstd(torn, axis=0)
        gap = ((result.impute(torn) - rows) / spread)[held]
        errors[k] = float((gap**2).mean())
        low, high = result.impute_intervals(torn[:4000], level=0.9)
        inside = (rows[:4000] >= low) & (rows[:4000] <= high)
        errors[f"cover {k}"] = float(inside[held[:4000]].mean())
    plain = ((np.nanmean(torn, axis=0) - rows) / np.nanstd(torn, axis=0))[held]
    assert errors[1] < 0.5 * float((plain**2).mean())
    assert errors[4] < errors[1]
    assert 0.84 < errors["cover 4"] < 0.97
