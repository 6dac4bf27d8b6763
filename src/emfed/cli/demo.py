"""``emfed demo``: the synthetic experiment of the paper, small enough to watch."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from threadpoolctl import threadpool_limits

from emfed.algorithms import Bernoulli, FedEM, VRFedEM
from emfed.artifacts import draw, trajectories
from emfed.artifacts.result import Result
from emfed.compressors import Dithering
from emfed.core.errors import SettingsError
from emfed.core.records import RoundRecord
from emfed.data.synthetic import START, TRUTH, synthetic_federation
from emfed.fitting.face import fit
from emfed.fitting.stopping import Monitor
from emfed.models import gaussian_mixture

CHANNEL: Mapping[str, Any] = {
    "compressor": Dithering(1, block=4),
    "step_size": 1e-2,
    "memory_rate": 1e-2,
    "memory_start": "mean-field",
    "replacement": True,
}
ALGORITHMS = {
    "FedEM": FedEM(batch_size=20, **CHANNEL),
    "VR-FedEM": VRFedEM(batch_size=5, inner_rounds=20, **CHANNEL),
}
"""The paper's settings (section 4); omega is 1. `paper/synthetic/config.toml` has them, too."""


def run_demo(
    out: Path, epochs: float, seed: int, split: str, threads: int, json_output: bool
) -> bool:
    """Fit both, write and print what came out; returns whether Ctrl-C cut it short."""
    if split not in ("random", "sorted"):
        raise SettingsError(f"--split must be 'random' or 'sorted'; got {split!r}.")
    if not np.isfinite(epochs):
        raise SettingsError("--epochs must be a finite number.")
    out.mkdir(parents=True, exist_ok=True)
    console = Console(stderr=json_output, quiet=json_output)
    data = synthetic_federation(seed, split="sorted" if split == "sorted" else "random")
    results: dict[str, Result] = {}
    summary: dict[str, Any] = {"seed": seed, "epochs": epochs, "split": split, "algorithms": {}}
    with threadpool_limits(threads), _progress(console) as progress:
        for name, algorithm in ALGORITHMS.items():
            task = progress.add_task(name, total=epochs, detail="")

            def show(record: RoundRecord, task: Any = task) -> None:
                if record.round % 25 == 0:
                    text = f"round {record.round}  |H|² {record.squared_H:.1e}"
                    progress.update(task, completed=record.epochs, detail=text)

            began = time.perf_counter()
            results[name] = fit(
                gaussian_mixture(2, "known", known_covariance=TRUTH.covariances),
                data,
                algorithm,
                epochs=epochs,
                tol=0.0,  # FedEM stays at its floor: that is what the demo shows
                start=START,
                weights="uniform",
                participation=Bernoulli(0.75),
                seed=seed,
                monitor=Monitor(every=10, objective=False),
                callbacks=[show],
            )
            last = results[name].records[-1]
            progress.update(task, completed=epochs, detail=f"round {last.round}")
            seconds = time.perf_counter() - began
            summary["algorithms"][name] = _summarise(results[name], data.size, seconds)
            results[name].records.to_csv(out / f"{name}.csv")
            results[name].records.to_parquet(out / f"{name}.parquet")
            if results[name].stopped == "interrupted":
                break
    draw(trajectories({name: r.records for name, r in results.items()}), out / "trajectories")
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    if json_output:
        print(json.dumps(summary))  # noqa: T201
    else:
        _print(console, summary, out)
    return any(r.stopped == "interrupted" for r in results.values())


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description:<9}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[detail]}"),
        console=console,
    )


def _summarise(result: Result, workers: int, seconds: float) -> dict[str, Any]:
    squared_h = result.records.column("squared_h")
    squared_h = squared_h[np.isfinite(squared_h)]
    tail = squared_h[len(squared_h) // 2 :]
    return {
        "rounds": result.records[-1].round,
        "epochs": result.records[-1].epochs,
        "squared_h_last": float(squared_h[-1]) if len(squared_h) else None,
        "squared_h_mean_of_last_half": float(tail.mean()) if len(tail) else None,
        "bytes_up_per_worker": result.bytes_up / workers,
        "bytes_down_per_worker": result.bytes_down / workers,
        "guard_hits": result.guard_hits,
        "seconds": seconds,
        "weights": result.params.weights.tolist(),
        "means": result.params.means.tolist(),
    }


def _print(console: Console, summary: dict[str, Any], out: Path) -> None:
    table = Table(title=f"Synthetic mixture, {summary['split']} split, seed {summary['seed']}")
    for heading in ("", "rounds", "|h|²", "kB up", "weights", "seconds"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, row in summary["algorithms"].items():
        table.add_row(
            name,
            str(row["rounds"]),
            "-" if row["squared_h_last"] is None else f"{row['squared_h_last']:.1e}",
            f"{row['bytes_up_per_worker'] / 1000:.0f}",
            " ".join(f"{w:.3f}" for w in row["weights"]),
            f"{row['seconds']:.1f}",
        )
    console.print(table)
    drawn = " ".join(f"{w:.3f}" for w in TRUTH.weights)
    console.print("|h|² is the squared mean field at the end: 0 at a fixed point of EM.")
    console.print(f"kB up is per worker. The data were drawn with weights {drawn}.")
    console.print(f"Figure, tables and summary.json are in {out}/")
