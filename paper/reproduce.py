"""Experiments from their names to records, figures, verdicts and a report in a folder."""

from __future__ import annotations

import importlib
import json
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, final

from emfed.artifacts import draw, render_page
from emfed.core.errors import DataError, SettingsError, check_count
from emfed.core.storage import write_atomic
from emfed.core.streams import check_seed
from emfed.core.version import __version__
from paper.config import Experiment, load_experiment
from paper.digits import NO_WRITERS, VARIABLE
from paper.findings import Findings
from paper.jobs import prepare_mnist
from paper.report import report_page
from paper.runner import Notify, run_jobs
from paper.settings import ExperimentSettings, as_plain
from paper.smoothing import check_loess
from paper.traces import Traces, read_trace, write_records
from paper.verdicts import Verdict, finite, judge, not_judged

JOBS = "jobs"
"""The folder of what jobs left: as long as it is there, nothing is computed twice."""


@final
@dataclass(frozen=True)
class Outcome:
    """One experiment, done."""

    experiment: Experiment
    findings: Findings
    verdicts: Sequence[Verdict]
    not_judged: Sequence[str]
    """Claims about data that are not here."""
    processor_seconds: float
    """What its runs took, in this call and in earlier ones."""


@final
@dataclass(frozen=True)
class Reproduction:
    """All that was asked for: what came out, and what could not be run and why."""

    outcomes: Sequence[Outcome]
    skipped: Mapping[str, str]
    summary: Mapping[str, Any]

    @property
    def verdicts(self) -> list[Verdict]:
        """The verdicts of all experiments."""
        return [verdict for outcome in self.outcomes for verdict in outcome.verdicts]

    @property
    def holds(self) -> bool:
        """Whether everything was run and every claim holds.

        A full run that could not judge a claim does not hold; a quick one needs no data.
        """
        judged = self.summary["quick"] or not any(o.not_judged for o in self.outcomes)
        return judged and not self.skipped and all(verdict.holds for verdict in self.verdicts)

    @property
    def missing(self) -> list[str]:
        """What was not run, and what was not judged, in sentences."""
        words = [f"Not run: {name}. {reason}" for name, reason in self.skipped.items()]
        words += [
            f"Not judged: {len(outcome.not_judged)} claims of {outcome.experiment.name}, since "
            f"{VARIABLE} names no folder with their data."
            for outcome in self.outcomes
            if outcome.not_judged
        ]
        return words


def reproduce(
    names: Sequence[str],
    out: str | Path,
    *,
    quick: bool = False,
    seed: int = 0,
    processes: int = 1,
    config: Path | None = None,
    notify: Notify = lambda job, share: None,
) -> Reproduction:
    """Run experiments and write to ``out``; what an earlier call has finished there is kept.

    Writes ``NAME.parquet``, ``NAME.csv`` and figures for each experiment, ``summary.json`` and
    ``report.html`` for all. Seeds count from ``seed`` on. ``config`` is a configuration to use in
    place of the packaged one, for a single experiment. An experiment whose data are not to be had
    is skipped, and told of, if others were asked for too; alone it raises `DataError`.
    """
    check_seed(seed)
    check_count("processes", processes)
    if config is not None and len(names) != 1:
        raise SettingsError("a configuration of your own goes with one experiment.")
    began, out = time.perf_counter(), Path(out)
    experiments = [load_experiment(name, quick, config) for name in names]
    for experiment in experiments:
        check_seed(seed + experiment.seeds - 1)
    (out / JOBS).mkdir(parents=True, exist_ok=True)
    skipped: dict[str, str] = {}
    for experiment in experiments:
        try:
            _check_data(experiment, out / JOBS)
        except DataError as error:
            if len(names) == 1:
                raise
            skipped[experiment.name] = str(error)
    runnable = [e for e in experiments if e.name not in skipped]
    run_jobs([j for e in runnable for j in e.jobs(seed)], out / JOBS, processes, notify)
    outcomes = [_conclude(experiment, seed, out) for experiment in runnable]
    summary = _summarise(outcomes, skipped, quick, seed, time.perf_counter() - began)
    result = Reproduction(outcomes, skipped, summary)
    write_atomic(out / "summary.json", (json.dumps(summary, indent=2) + "\n").encode())
    sections = [(o.experiment, o.findings, o.verdicts) for o in outcomes]
    page = report_page(sections, result.missing, summary["facts"], result.holds)
    write_atomic(out / "report.html", render_page(page).encode())
    return result


def _check_data(experiment: Experiment, folder: Path) -> None:
    """Fetch what the experiment needs, or raise."""
    if experiment.name == "ebird":
        check_loess()
    if not experiment.needs_mnist:
        return
    digits = prepare_mnist(folder)
    if digits.writers is None and any(
        isinstance(s, ExperimentSettings) and s.sizes == "writers" for s in experiment.runs.values()
    ):
        raise DataError(NO_WRITERS)


def _conclude(experiment: Experiment, seed: int, out: Path) -> Outcome:
    """Read the traces, write tables and figures, judge."""
    traces = Traces([read_trace(job, out / JOBS) for job in experiment.jobs(seed)])
    write_records(traces, out / experiment.name)
    analysis = importlib.import_module(f"paper.{experiment.name}")
    findings: Findings = analysis.analyse(traces)
    for name, figure in findings.figures.items():
        draw(figure, out / f"{experiment.name}-{name}")
    lenient = experiment.source is not None
    verdicts = judge(experiment.name, findings.measures, experiment.quick, lenient)
    missing = [] if lenient else not_judged(experiment.name, findings.measures, experiment.quick)
    seconds = sum(trace.processor_seconds for trace in traces.all)
    return Outcome(experiment, findings, verdicts, missing, seconds)


def _summarise(
    outcomes: Sequence[Outcome],
    skipped: Mapping[str, str],
    quick: bool,
    seed: int,
    seconds: float,
) -> dict[str, Any]:
    """Everything a program may want to know, as JSON types."""
    seeds = max((o.experiment.seeds for o in outcomes), default=0)
    source = next((o.experiment.source for o in outcomes), None)
    libraries = ("numpy", "scipy", "polars", "scikit-learn", "matplotlib")
    return {
        "facts": {
            "version": "quick" if quick else "full",
            **({"configuration": source} if source else {}),
            "seeds": ", ".join(str(seed + k) for k in range(seeds)),
            "seconds of this call": f"{seconds:.0f}",
            "processor seconds of all runs": f"{sum(o.processor_seconds for o in outcomes):.0f}",
            "emfed": __version__,
            "Python": platform.python_version(),
            "libraries": ", ".join(f"{name} {version(name)}" for name in libraries),
            "machine": f"{platform.system()} {platform.machine()}",
        },
        "quick": quick,
        "verdicts": [verdict.plain() for o in outcomes for verdict in o.verdicts],
        "skipped": dict(skipped),
        "not_judged": {o.experiment.name: list(o.not_judged) for o in outcomes if o.not_judged},
        "experiments": {
            o.experiment.name: {
                "title": o.experiment.title,
                "seeds": list(range(seed, seed + o.experiment.seeds)),
                "processor_seconds": round(o.processor_seconds, 1),
                "measures": {
                    name: [finite(float(value)) for value in values]
                    for name, values in o.findings.measures.items()
                },
                "runs": {run: as_plain(s) for run, s in o.experiment.runs.items()},
            }
            for o in outcomes
        },
    }
