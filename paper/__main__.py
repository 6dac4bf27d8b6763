"""``python -m paper``: the paper's experiments and ablations, with progress and a verdict table."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from emfed.core.errors import EmfedError, SettingsError, check_count
from paper import JOBS, NAMES, Job, Reproduction, load_experiment, reproduce
from paper.report import number
from paper.runner import Notify

EXAMPLES = """\
examples:
  python -m paper synthetic
  python -m paper mnist --quick
  python -m paper all --out results --jobs 4

The folder gets report.html, figures, records and summary.json. If a run is cut short, the same
command keeps the parts that were finished. MNIST is read from the folder that EMFED_DATA names, or
downloaded. Exit code 1 if a claim fails, or if data are missing."""


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line; errors are one line on stderr and an exit code."""
    parser = _parser()
    given = parser.parse_args(arguments)
    if given.list:
        _list_experiments()
        sys.exit(0)
    try:
        sys.exit(0 if run(given) else 1)
    except SettingsError as error:
        parser.error(str(error))  # exit code 2
    except (EmfedError, OSError) as error:
        message, code = str(error), 1
    except KeyboardInterrupt:
        message, code = "interrupted; the same command keeps the runs that were finished", 130
    print(f"paper: {message}", file=sys.stderr)
    sys.exit(code)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m paper",
        description="Redo the paper's experiments, and ablations of what it argues in words.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="an experiment (--list), or all")
    parser.add_argument("--out", type=Path, help="folder; reproduction/NAME if left out")
    parser.add_argument("--quick", action="store_true", help="a small version, in seconds")
    parser.add_argument("--seed", type=int, default=0, help="the first of the seeds")
    parser.add_argument("--jobs", type=int, help="processes; one a core if left out")
    parser.add_argument("--config", type=Path, help="your own config.toml for one experiment")
    parser.add_argument("--list", action="store_true", help="name the experiments")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON alone")
    return parser


def run(given: argparse.Namespace) -> bool:
    """Run, write, print; returns whether everything was run and every claim holds."""
    if not given.names:
        raise SettingsError(f"name an experiment: all, {', '.join(NAMES)}. See --list.")
    if given.config is not None and not given.config.is_file():
        raise SettingsError(f"--config: there is no file {given.config}.")
    processes = os.cpu_count() or 1 if given.jobs is None else check_count("--jobs", given.jobs)
    everything = "all" in given.names
    chosen = list(NAMES) if everything else list(dict.fromkeys(given.names))
    out = given.out or Path("reproduction", "all" if everything else "-".join(chosen))
    experiments = [load_experiment(name, given.quick, given.config) for name in chosen]
    jobs = [job for experiment in experiments for job in experiment.jobs(given.seed)]
    with _progress(jobs, out, Console(stderr=True, quiet=given.json)) as show:
        result = reproduce(
            chosen,
            out,
            quick=given.quick,
            seed=given.seed,
            processes=processes,
            config=given.config,
            notify=show,
        )
    if given.json:
        print(json.dumps(result.summary))
    else:
        _print(result, out)
    return result.holds


def _list_experiments() -> None:
    table = Table(box=None, show_header=False)
    for name in NAMES:
        table.add_row(name, load_experiment(name).title)
    Console().print(table)


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


if __name__ == "__main__":
    main()
