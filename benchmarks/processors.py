"""Whether members with other linear algebra follow one fit: sums of one replayed under another.

Masked fits are made in this process, and what every sum was about is kept. Processes whose OpenBLAS
and numpy use the kernels of other processors are sent the same sums, and compare what they would
ask. A fit that parts at one place is compared at the next ones, as sites do.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.datasets import load_breast_cancer, load_digits, load_iris, load_wine

import emfed
from emfed.core.sums import Finish, Sum, finished
from emfed.data.held import HeldWorkers
from emfed.fitting.in_process import begin
from emfed.fitting.settings import FitSettings

KERNELS: dict[str, dict[str, str]] = {
    "Prescott, no AVX2": {
        "OPENBLAS_CORETYPE": "Prescott",
        "NPY_DISABLE_CPU_FEATURES": "AVX2 FMA3 AVX512F AVX512CD AVX512_SKX",
    },
    "Sandybridge": {"OPENBLAS_CORETYPE": "Sandybridge"},
    "Haswell": {"OPENBLAS_CORETYPE": "Haswell"},
    "SkylakeX": {"OPENBLAS_CORETYPE": "SkylakeX"},
}
PLACES = 3
"""Places at which sites compare before a fit ends."""
ROUNDS = 300


def tables() -> dict[str, Any]:
    """Real tables, and one with heavy tails."""
    rng = np.random.default_rng(0)
    digits = load_digits().data[:, 20:40]
    return {
        "iris": load_iris().data,
        "wine": load_wine().data,
        "wdbc": load_breast_cancer().data,
        "digits": digits + 0.1 * rng.normal(size=digits.shape),
        "tails": rng.standard_t(3, size=(3000, 8)) @ rng.normal(size=(8, 8)),
    }


def settings() -> dict[str, FitSettings]:
    """Masked fits of models of several kinds, a range and standard errors among them."""
    common: dict[str, Any] = {"masks": True, "seed": 1, "rounds": ROUNDS}
    found = {
        f"{kind}, K={k}": FitSettings.read(emfed.gaussian_mixture(k, kind), **common)
        for k, kind in product((2, 5), ("full", "tied", "diag", "spherical"))
    }
    others = {
        "k-means": (emfed.k_means(4), {}),
        "factors": (emfed.factor_analysis(2), {"errors": True}),
        "two analysers": (emfed.factor_analysis(2, n_components=2), {}),
        "2 to 4": (emfed.gaussian_mixture(1), {"n_components": "2:4"}),
        "with errors": (emfed.gaussian_mixture(3, "tied"), {"errors": True}),
    }
    more = {n: FitSettings.read(model, **common, **own) for n, (model, own) in others.items()}
    return found | more


def fits() -> Iterator[tuple[str, Any]]:
    """Every fit, begun."""
    for (table, rows), (name, own) in product(tables().items(), settings().items()):
        workers = emfed.data.as_workers(rows, np.arange(len(rows)) % 4)
        yield f"{table}: {name}", begin(own, HeldWorkers(workers))


def recorded(folder: Path) -> None:
    """Make every fit, and keep its sums and what they were about."""
    for j, (_, begun) in enumerate(fits()):
        kept: dict[str, Any] = {}
        program, course, count = begun.program, begun.course, 0
        try:
            ask = next(program)
            while True:
                reason = course.refuses(ask)
                if reason is not None:
                    kept["end"] = np.array(count)
                    finished(program, Finish(reason))
                    break
                found = course.answer(ask)
                kept[f"{count}/value"] = found.value
                kept[f"{count}/rows"] = np.array([found.rows, found.noise])
                kept[f"{count}/about"] = np.frombuffer(_compared(ask), dtype=np.uint8)
                count += 1
                ask = program.send(found)
        except StopIteration:
            kept["end"] = np.array(count)
        np.savez(folder / f"{j}.npz", **kept)


def _compared(ask: Any) -> bytes:
    return b"".join(ask.digest(bytes([place])) for place in range(PLACES))


def replayed(folder: Path) -> list[dict[str, Any]]:
    """Follow every fit, and compare what is asked with what was."""
    rows = []
    for j, (name, begun) in enumerate(fits()):
        with np.load(folder / f"{j}.npz") as kept:
            again, at, parted = 0, 0, False
            try:
                ask = next(begun.program)
                while at < int(kept["end"]):
                    here, there = _compared(ask), kept[f"{at}/about"].tobytes()
                    alike = [here[p : p + 16] == there[p : p + 16] for p in range(0, len(here), 16)]
                    parted = not any(alike)
                    if parted:
                        break
                    again += not alike[0]
                    told, noise = kept[f"{at}/rows"].tolist()
                    ask = begun.program.send(Sum(kept[f"{at}/value"], told, noise))
                    at += 1
            except StopIteration:
                parted = at + 1 != int(kept["end"])
            rows.append({"fit": name, "sums": int(kept["end"]), "again": again, "parted": parted})
    return rows


def bench_processors() -> Iterator[dict[str, Any]]:
    """A row for each processor: fits that were followed, and comparisons that were made again."""
    with tempfile.TemporaryDirectory() as folder:
        recorded(Path(folder))
        for name, variables in KERNELS.items():
            command = [sys.executable, "-m", "benchmarks.processors", folder]
            told = subprocess.run(
                command, env=os.environ | variables, capture_output=True, text=True, check=True
            )
            rows = json.loads(told.stdout)
            yield {
                "processor": name,
                "fits": len(rows),
                "sums": sum(row["sums"] for row in rows),
                "compared_again": sum(row["again"] for row in rows),
                "parted": [row["fit"] for row in rows if row["parted"]],
            }


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps(replayed(Path(sys.argv[1]))))
