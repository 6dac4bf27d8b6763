"""``python -m benchmarks occupancy``: presence and detection beside unmarked, and known truths.

Crossbills of the Swiss breeding bird survey 1999 (267 squares, 3 visits), the data set of
unmarked's guide to species distributions, with its model `occu(~date ~ele + I(ele^2) + forest)`. R
and unmarked are called where they are at hand (`R_LIBS` may name a folder that holds unmarked): the
data are unmarked's, and are not copied here. Elsewhere the comparison is left out, and said to be.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import emfed
from emfed.models import Occupancy

VISITS, WORKERS = 3, 5
NAMES = ("presence: 1", "presence: ele", "presence: ele^2", "presence: forest", "detection: 1",
         "detection: date")  # fmt: skip
SCRIPT = """
suppressMessages(library(unmarked))
data(crossbill)
y <- as.matrix(crossbill[, c("det991", "det992", "det993")])
date <- as.matrix(crossbill[, c("date991", "date992", "date993")])
date <- (date - mean(date, na.rm = TRUE)) / sd(date, na.rm = TRUE)
ele <- as.numeric(scale(crossbill$ele)); forest <- as.numeric(scale(crossbill$forest))
umf <- unmarkedFrameOccu(y, siteCovs = data.frame(ele, forest), obsCovs = list(date = date))
fm <- suppressWarnings(occu(~ date ~ ele + I(ele^2) + forest, umf))
folder <- commandArgs(TRUE)[1]
write.table(cbind(y, ele, ele^2, forest, date), file.path(folder, "rows.csv"), sep = ",",
            row.names = FALSE, col.names = FALSE, na = "nan")
write.table(cbind(coef(fm), SE(fm)), file.path(folder, "fit.csv"), sep = ",", row.names = FALSE,
            col.names = FALSE)
cat(as.character(packageVersion("unmarked")), logLik(fm)[1])
"""
PRESENCE, DETECTION = np.array([-0.3, 0.9]), np.array([0.2, -0.7])


def bench_unmarked() -> dict[str, Any]:
    """Estimates and errors beside those of unmarked, or why not."""
    if shutil.which("Rscript") is None:
        return {"left out": "R is not here (Rscript is not on the path)"}
    with tempfile.TemporaryDirectory() as folder:
        command = ["Rscript", "-e", SCRIPT, folder]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            return {"left out": f"R has no unmarked: {done.stderr.strip().splitlines()[-1:]}"}
        rows = np.loadtxt(Path(folder, "rows.csv"), delimiter=",")
        peer = np.loadtxt(Path(folder, "fit.csv"), delimiter=",")
    version, likelihood = done.stdout.split()[-2:]
    rows = rows[np.isfinite(rows[:, :VISITS]).any(axis=1)]  # unmarked leaves the others out, too
    values, errors, total = fitted(Occupancy(VISITS, 3, 1, ridge=0.0), rows)
    return {
        "unmarked": version,
        "places": len(rows),
        "log-likelihood": (total, float(likelihood)),
        "rows": [
            {"name": name, "emfed": v, "error": e, "unmarked": p[0], "its error": p[1]}
            for name, v, e, p in zip(NAMES, values, errors, peer, strict=True)
        ],
    }


def fitted(model: Occupancy, rows: Any) -> tuple[Any, Any, float]:
    """Estimates, their errors and the log-likelihood, of rows that several workers hold."""
    tables = [rows[k::WORKERS] for k in range(WORKERS)]
    options: dict[str, Any] = {"start": "moments", "rounds": 4000, "tol": 1e-12, "errors": True}
    result = emfed.fit(model, tables, emfed.EM(), **options)
    values, errors = result.errors_of(
        lambda params: np.concatenate([params.presence, params.detection])
    )
    total = float(result.model.log_likelihood(rows, result.params)) * len(rows)
    return values, errors, total


def simulated(count: int, seed: int, visits: int = 4) -> Any:
    """Places with known coefficients; a fifth of the visits were not made."""
    rng = np.random.default_rng(seed)
    x, w = rng.normal(size=(count, 1)), rng.normal(size=(count, visits))
    there = rng.random(count) < 1 / (1 + np.exp(-(PRESENCE[0] + PRESENCE[1] * x[:, 0])))
    seen = rng.random((count, visits)) < 1 / (1 + np.exp(-(DETECTION[0] + DETECTION[1] * w)))
    y = (seen & there[:, None]).astype(float)
    y[rng.random((count, visits)) < 0.2] = np.nan
    return np.column_stack([y, x, w])


def bench_coverage_of_errors(tables: int = 200, places: int = 400) -> list[dict[str, Any]]:
    """How often estimates +- 1.64 and 1.96 errors hold the truth."""
    truth = np.concatenate([PRESENCE, DETECTION])
    found = [fitted(Occupancy(4, 1, 1, ridge=0.0), simulated(places, k)) for k in range(tables)]
    values, errors = (np.array([part[k] for part in found]) for k in (0, 1))
    names = ("presence: 1", "presence: x", "detection: 1", "detection: w")
    return [
        {
            "name": name,
            "truth": truth[k],
            "mean": float(values[:, k].mean()),
            "spread": float(values[:, k].std(ddof=1)),
            "mean error": float(errors[:, k].mean()),
            **{
                f"{level}%": float((np.abs(values[:, k] - truth[k]) < z * errors[:, k]).mean())
                for level, z in ((90, 1.645), (95, 1.96))
            },
        }
        for k, name in enumerate(names)
    ]
