"""``fedem reproduce``: the paper's experiments and ablations, with progress and a verdict table."""

from __future__ import annotations

import json
import os
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from fedem.errors import SettingsError
from fedem.experiments import NAMES, Job, Reproduction, load_experiment, reproduce
from fedem.experiments.report import number


def list_experiments() -> None:
    """Name and title of each."""
    table = Table(box=None, show_header=False)
    for name in NAMES:
        table.add_row(name, load_experiment(name).title)
    Console().print(table)


def run_reproduce(
    names: list[str],
    out: Path,
    quick: bool,
    seed: int,
    jobs: int | None,
    config: Path | None,
    json_output: bool,
) -> bool:
    """Run, write, print; returns whether everything was run and every claim holds."""
    if not names:
        raise SettingsError(f"name an experiment: all, {', '.join(NAMES)}. See --list.")
    chosen = list(NAMES) if "all" in names else list(dict.fromkeys(names))
    experiments = [load_experiment(name, quick, config) for name in chosen]
    costs = {job.file: job.settings.cost for e in experiments for job in e.jobs(seed)}
    console = Console(stderr=True, quiet=json_output)
    with _progress(console) as progress:
        bar = progress.add_task("", total=sum(costs.values()), what="", done=0, jobs=len(costs))
        shares = dict.fromkeys(costs, 0.0)

        def show(job: Job, share: float) -> None:
            shares[job.file] = share
            done = sum(cost * shares[file] for file, cost in costs.items())
            whole = sum(share == 1 for share in shares.values())
            what = f"{job.experiment}: {job.run}, seed {job.seed}"
            progress.update(bar, completed=done, what=what, done=whole)

        result = reproduce(
            chosen,
            out,
            quick=quick,
            seed=seed,
            processes=jobs or os.cpu_count() or 1,
            config=config,
            notify=show,
        )
        progress.update(bar, completed=sum(costs.values()), what="")
    if json_output:
        print(json.dumps(result.summary))  # noqa: T201
    else:
        _print(result, out)
    return result.holds


def _progress(console: Console) -> Progress:
    return Progress(
        BarColumn(),
        TextColumn("{task.fields[done]}/{task.fields[jobs]} jobs"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[what]}"),
        console=console,
    )


def _print(result: Reproduction, out: Path) -> None:
    """The verdicts."""
    console = Console()
    table = Table(title=f"Verdicts, seeds {result.summary['facts']['seeds']}")
    table.add_column("claim")
    table.add_column("value", justify="right")
    table.add_column("expected")
    table.add_column("")
    for outcome in result.outcomes:
        table.add_section()
        table.add_row(f"[bold]{outcome.experiment.name}[/bold]")
        for v in outcome.verdicts:
            word = "[green]holds[/green]" if v.holds else "[bold red]fails[/bold red]"
            table.add_row(f"  {v.name}", number(v.value), v.expected, word)
    console.print(table)
    for name, reason in result.skipped.items():
        console.print(f"[bold red]not run:[/bold red] {name}. {reason}")
    console.print(f"Report, figures, records and summary.json are in {out}/")
