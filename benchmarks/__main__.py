"""``python -m benchmarks [--json FILE]``: every figure in one table, one thread."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from pathlib import Path

import numpy as np
import scipy
import sklearn
from rich.console import Console
from rich.table import Table
from threadpoolctl import threadpool_limits

import fedem
from benchmarks.esteps import bench_esteps
from benchmarks.rounds import bench_rounds


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    arguments = parser.parse_args()
    machine = {
        "processor": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "fedem": fedem.__version__,
        "numpy": np.__version__,
        "scipy": scipy.__version__,
        "scikit-learn": sklearn.__version__,
        "threads": 1,
    }
    with threadpool_limits(1):
        rounds, esteps = bench_rounds(), bench_esteps()
    table = Table(title="fedem benchmarks, one thread, best of many")
    for heading in ("what", "ms", "ratio", "to"):
        table.add_column(heading, justify="left" if heading in ("what", "to") else "right")
    base = rounds["floor (numpy)"]
    for name, seconds in rounds.items():
        table.add_row(f"round, {name}", f"{1e3 * seconds:.2f}", f"{seconds / base:.2f}", "floor")
    for kind, times in esteps.items():
        ours, theirs = times["fedem"], times["scikit-learn"]
        table.add_row(
            f"E+M pass, {kind}",
            f"{1e3 * ours:.1f}",
            f"{theirs / ours:.2f}",
            "times as fast as sklearn",
        )
    Console().print(table)
    if arguments.json:
        figures = {"machine": machine, "round_seconds": rounds, "pass_seconds": esteps}
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
