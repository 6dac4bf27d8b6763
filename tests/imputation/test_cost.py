"""Time and memory follow observations and rank, never sites x times."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc

import numpy as np
import pytest

from emfed.imputation import FieldTable, Imputation, Structure, impute
from emfed.imputation.bins import Bins
from emfed.imputation.families import as_family
from emfed.imputation.table import Grid, IntakeReport, build_table

LARGE = """
import numpy as np
from tests.imputation.test_cost import fit, random_table
done = fit(random_table(100_000, 1_000, 1_000_000, workers=100))
# Not ru_maxrss, which a child inherits from whoever started it.
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(int(status["VmHWM"].split()[0]) // 1024, done.rounds)
"""


def random_table(sites: int, times: int, records: int, workers: int = 10) -> FieldTable:
    rng = np.random.default_rng(0)
    return build_table(
        Grid([str(j) for j in range(sites)], Bins("week", 0, times), as_family("gaussian")),
        [str(c) for c in range(workers)],
        rng.integers(0, workers, records),
        rng.integers(0, sites, records),
        rng.integers(0, times, records),
        np.ones(records),
        rng.normal(size=records),
        IntakeReport(records, records),
    )


def fit(table: FieldTable) -> Imputation:
    return impute(table, structure=Structure(2, 5.0, smoothing=1.0))


@pytest.mark.long
def test_a_million_records_of_a_hundred_million_cells_fit_in_a_gibibyte() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LARGE], capture_output=True, text=True, check=True, timeout=300
    )
    mebibytes, rounds = map(int, done.stdout.split())
    assert rounds == 1
    assert mebibytes < 1024


def test_memory_does_not_depend_on_sites_times_times() -> None:
    peaks = []
    for sites, times in ((6_000, 1_000), (3_500, 3_500)):  # twice the cells, as many rows
        table = random_table(sites, times, 20_000)
        tracemalloc.start()
        fit(table)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.25 * peaks[0]
    assert peaks[1] < 3_500 * 3_500  # not even a byte per cell
