"""``emfed reproduce``: the paper's experiments and ablations, with progress and a verdict table."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
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

from emfed.core.errors import SettingsError
from emfed.theory.experiments import JOBS, NAMES, Job, Reproduction, load_experiment, reproduce
from emfed.theory.experiments.report import number
from emfed.theory.experiments.runner import Notify


def list_experiments() -> None:
    """Name and title of each."""
    table = Table(box=None, show_header=False)
    for name in NAMES:
        table.add_row(name, load_experiment(name).title)
    Console().print(table)


def run_reproduce(
    names: list[str],
    out: Path | None,
    quick: bool,
    seed: int,
    processes: int | None,
    config: Path | None,
    json_output: bool,
) -> bool:
    """Run, write, print; returns whether everything was run and every claim holds."""
    if not names:
        raise SettingsError(f"name an experiment: all, {', '.join(NAMES)}. See --list.")
    chosen = list(NAMES) if "all" in names else list(dict.fromkeys(names))
    if out is None:
        out = Path("reproduction", "all" if "all" in names else "-".join(chosen))
    jobs = [job for name in chosen for job in load_experiment(name, quick, config).jobs(seed)]
    with _progress(jobs, out, Console(stderr=True, quiet=json_output)) as show:
        result = reproduce(
            chosen,
            out,
            quick=quick,
            seed=seed,
            processes=processes or os.cpu_count() or 1,
            config=config,
            notify=show,
        )
    if json_output:
        print(json.dumps(result.summary))  # noqa: T201
    else:
        _print(result, out)
    return result.holds


@contextlib.contextmanager
def _progress(jobs: list[Job], out: Path, console: Console) -> Iterator[Notify]:
    """A bar with the time left; jobs weigh what they cost, those done already nothing."""
    costs = {j.file: j.settings.cost for j in jobs if not (out / JOBS / j.file).exists()}
    shares, there = dict.fromkeys(costs, 0.0), len(jobs) - len(costs)
    columns = (
        BarColumn(),
        TextColumn("{task.fields[done]}/{task.fields[jobs]} jobs"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[what]}"),
    )
    with Progress(*columns, console=console) as progress:
        total = sum(costs.values())
        bar = progress.add_task("", total=total, what="", done=there, jobs=len(jobs))

        def show(job: Job, share: float) -> None:
            if job.file not in shares:
                return
            shares[job.file] = share
            progress.update(
                bar,
                completed=sum(cost * shares[file] for file, cost in costs.items()),
                done=there + sum(share == 1 for share in shares.values()),
                what=f"{job.experiment}: {job.run}, seed {job.seed}",
            )

        yield show
        progress.update(bar, completed=total, what="")


def _print(result: Reproduction, out: Path) -> None:
    """The verdicts."""
    console = Console()
    table = Table(title=f"Verdicts, seeds {result.summary['facts']['seeds']}")
    table.add_column("claim")
    table.add_column("value", justify="right")
    table.add_column("expected")
    table.add_column("verdict")
    for outcome in result.outcomes:
        table.add_section()
        table.add_row(f"[bold]{outcome.experiment.name}[/bold]")
        for v in outcome.verdicts:
            word = "[green]holds[/green]" if v.holds else "[bold red]fails[/bold red]"
            table.add_row(f"  {v.name}", number(v.value), v.expected, word)
    console.print(table)
    for words in result.missing:
        console.print(words, style="bold red", markup=False)
    console.print(f"The report is {out / 'report.html'}; figures and records are beside it.")
