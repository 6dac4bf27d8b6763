"""``python -m benchmarks [speed] [bytes] [--json FILE]``: every figure, one thread."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from pathlib import Path
from typing import Any

import numpy as np
import scipy
import sklearn
from rich.console import Console
from rich.table import Table
from threadpoolctl import threadpool_limits

import fedem
from benchmarks.esteps import bench_esteps
from benchmarks.ledger import bench_ledger, bench_mnist
from benchmarks.messages import bench_messages
from benchmarks.rounds import bench_rounds


def speed(console: Console) -> dict[str, Any]:
    """Rounds and full passes."""
    rounds, esteps = bench_rounds(), bench_esteps()
    table = Table(title="Speed, one thread, best of many")
    for heading in ("what", "ms", "ratio", "to"):
        table.add_column(heading, justify="left" if heading in ("what", "to") else "right")
    base = rounds["floor (numpy)"]
    for name, seconds in rounds.items():
        table.add_row(f"round, {name}", f"{1e3 * seconds:.2f}", f"{seconds / base:.2f}", "floor")
    for kind, times in esteps.items():
        ours, theirs = times["fedem"], times["scikit-learn"]
        ratio = f"{theirs / ours:.2f}"
        table.add_row(f"E+M pass, {kind}", f"{1e3 * ours:.1f}", ratio, "times as fast as sklearn")
    console.print(table)
    return {"round_seconds": rounds, "pass_seconds": esteps}


def bytes_(console: Console) -> dict[str, Any]:
    """Encoded sizes, the ledger's cost, and MNIST to the pooled answer."""
    messages = bench_messages()
    table = Table(title="Bytes of a message: mean over each run")
    for heading in ("run", "operator", "entropy", "+ scales", "encoded", "limit", "enc/s", "dec/s"):
        table.add_column(heading, justify="left" if heading in ("run", "operator") else "right")
    for row in messages:
        numbers = (row["entropy"], row["entropy"] + row["scales"], row["encoded"], row["limit"])
        speeds = (row["encode_per_second"], row["decode_per_second"])
        table.add_row(
            row["run"],
            row["operator"],
            *(f"{value:.1f}" for value in numbers),
            *(f"{value:.0f}" for value in speeds),
        )
    console.print(table)
    ledger = bench_ledger()
    table = Table(title="A stacked round, ledger off and on")
    for heading in ("operator", "off, ms", "on, ms", "ratio"):
        table.add_column(heading, justify="left" if heading == "operator" else "right")
    for label in sorted({name.split(", ledger")[0] for name in ledger}):
        off, on = (1e3 * ledger[f"{label}, ledger {state}"] for state in ("off", "on"))
        table.add_row(label, f"{off:.2f}", f"{on:.2f}", f"{on / off:.2f}")
    console.print(table)
    mnist = bench_mnist(figure=Path("docs/mnist-bytes.png"))
    if not mnist:
        console.print("No MNIST: set FEDEM_DATA to a folder with mnist.npz (images, labels).")
    table = Table(title="MNIST tied, 100 workers: to within 1e-3 nats of pooled EM, kept")
    for heading in ("run", "rounds", "bytes up", "bytes down", "gap at the end"):
        table.add_column(heading, justify="left" if heading == "run" else "right")
    for row in mnist:
        reached = row["rounds"] is not None
        table.add_row(
            row["run"],
            str(row["rounds"]) if reached else "not reached",
            f"{row['payload_up_per_worker']:.0f}" if reached else "-",
            f"{row['payload_down_per_worker']:.0f}" if reached else "-",
            f"{row['gap_at_end']:.1e}",
        )
    console.print(table)
    return {"messages": messages, "ledger_seconds": ledger, "mnist": mnist}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("what", nargs="*", choices=["speed", "bytes", []], help="all if none")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    arguments = parser.parse_args()
    figures: dict[str, Any] = {
        "processor": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "fedem": fedem.__version__,
        "numpy": np.__version__,
        "scipy": scipy.__version__,
        "scikit-learn": sklearn.__version__,
        "threads": 1,
    }
    console = Console(width=110)
    with threadpool_limits(1):
        for name, bench in (("speed", speed), ("bytes", bytes_)):
            if name in (arguments.what or ["speed", "bytes"]):
                figures[name] = bench(console)
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
