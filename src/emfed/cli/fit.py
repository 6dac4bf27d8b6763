"""``emfed fit``: tables in, a model file out."""

from __future__ import annotations

import dataclasses
import json
import warnings
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from emfed.algorithms import Bernoulli, Everyone
from emfed.artifacts.result import Result
from emfed.cli.commands import NAMES
from emfed.cli.help import spoken
from emfed.cli.intake import Intake, read_workers
from emfed.cli.progress import progress, size
from emfed.cli.tables import PIPE, check_output
from emfed.cli.tape import Tape
from emfed.compressors.words import parse_compressor
from emfed.core.errors import EmfedWarning, SettingsError
from emfed.core.protocols import Algorithm, Model
from emfed.data.placing import to_device
from emfed.fitting.closing import with_scores
from emfed.fitting.driver import NATS, fit, threads_of
from emfed.fitting.opening import choose_algorithm
from emfed.fitting.selection import select_components, within_rows
from emfed.models import (
    factor_analysis,
    gaussian_mixture,
    mixed_mixture,
    ppca,
    regression_mixture,
)
from emfed.network import StackedFederation

ROUNDS, TOLERANCE, FACTORS = 2000, 1e-8, 2


@dataclass(frozen=True)
class Options:
    """What the command line and the configuration said."""

    data: list[str]
    out: str
    groups: str | None
    columns: str | None
    types: str | None
    missing: bool
    components: str
    model: str
    covariance: str | None
    factors: int | None
    target: str | None
    algorithm: str
    follow_em: bool
    compressor: str | None
    participation: float
    batch: int | None
    weights: str
    start: str
    starts: int
    rounds: int | None
    nats: float | None
    tolerance: float | None
    max_bytes: int | None
    seconds: float | None
    curve: bool
    checkpoint: Path | None
    resume: bool
    report: str | None
    names: bool
    seed: int
    threads: int | None
    device: str | None
    precision: str
    quiet: bool
    json_output: bool


def run_fit(options: Options) -> tuple[bool, bool]:
    """Read, fit, write, print; returns whether it was interrupted and whether it converged."""
    _check(options)
    numbers = component_range(options.components)
    said = _said(options)
    intake = read_workers(options.data, options.groups, options.columns, options.types)
    _check_holes(intake, options)
    algorithm = _algorithm(options, intake.workers.size, said)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", EmfedWarning)
        rows = int(intake.workers.counts.sum())
        numbers = within_rows(make_model(options, intake, numbers[0]), numbers, rows)
        result, tried = _fit(intake, options, algorithm, numbers)
    if intake.categories:  # what codes mean, so that predictions read the same words
        kept = {name: list(values) for name, values in intake.categories.items()}
        result = with_setting(result, "categories", kept)
    result.save(options.out, names=options.names)
    if options.report is not None:
        write_report(result, options.report)
    told = [spoken(str(w.message)) for w in caught if issubclass(w.category, EmfedWarning)]
    remarks = list(dict.fromkeys(told))  # candidates side by side say the same
    summary = summarise(result, options, remarks, tried)
    if options.json_output:
        print(json.dumps(summary, allow_nan=False))  # noqa: T201
    elif not options.quiet:
        _print(summary)
    return result.stopped == "interrupted", bool(summary["converged"])


def write_report(result: Result, path: str) -> None:
    """The page of a fit, whole or not at all."""
    from emfed.artifacts import fit_page, render_page
    from emfed.core.storage import write_atomic

    write_atomic(Path(path), render_page(fit_page(result)).encode())


def _check(options: Options) -> None:
    """Everything that is wrong before a row is read."""
    for option, allowed in NAMES.items():
        value = getattr(options, option)
        if value is not None and value not in allowed:
            raise SettingsError(f"--{option} must be one of {', '.join(allowed)}; got {value!r}.")
    if options.out == PIPE or not options.out:
        raise SettingsError(f"--out must be the path of a file; got {options.out!r}.")
    data = [str(path) for path in options.data]
    check_output(options.out, "--out", (), data)
    if options.report is not None:
        check_output(options.report, "--report", (".html",), [*data, options.out])
    if options.types is not None and options.model not in ("gaussian", "mixed"):
        raise SettingsError(f"--types goes with --model mixed, not {options.model}.")
    _check_applies(options)
    if options.resume and options.checkpoint is None:
        raise SettingsError("--resume needs --checkpoint, the file to go on from.")
    if options.model == "regression" and options.target is None:
        raise SettingsError("--model regression needs --target, the column to explain.")


OF_MODELS = {
    "covariance": ("gaussian",),
    "missing": ("gaussian", "mixed"),
    "factors": ("factors", "ppca"),
    "target": ("regression",),
}
"""Options that speak of some models only."""
OF_ALGORITHMS = {
    "follow_em": ("auto",),
    "compressor": ("FedEM", "VR-FedEM"),
    "batch": ("auto", "FedEM", "VR-FedEM"),
}


def _check_applies(options: Options) -> None:
    """Refuse what would have no effect: whoever says it expects one."""
    model = "mixed" if options.types is not None else options.model
    why = " (which --types makes it)" if options.types is not None else ""
    for what, chosen, table in (
        ("model", model, OF_MODELS),
        ("algorithm", options.algorithm, OF_ALGORITHMS),
    ):
        for name, fitting in table.items():
            if getattr(options, name) and chosen not in fitting:
                raise SettingsError(
                    f"--{name.replace('_', '-')} goes with --{what} {' or '.join(fitting)}, not "
                    f"with {chosen}{why if what == 'model' else ''}: leave it out, or choose that."
                )


def component_range(text: str) -> list[int]:
    """``3`` or ``2:8``."""
    low, colon, high = text.partition(":")
    try:
        ends = int(low), int(high if colon else low)
    except ValueError:
        ends = 0, 0
    if not 1 <= ends[0] <= ends[1]:
        raise SettingsError(f"--components must be a number or a range like 2:8; got {text!r}.")
    return list(range(ends[0], ends[1] + 1))


def _check_holes(intake: Intake, options: Options) -> None:
    """Missing values that no option speaks of, in the words of the command line."""
    rows = getattr(intake.workers, "rows", None)
    allowed = options.missing or intake.families or options.model == "mixed"
    if allowed or not isinstance(rows, np.ndarray):
        return
    holes = np.isnan(rows)
    if holes.any():
        column = intake.columns[int(np.flatnonzero(holes.any(axis=0))[0])]
        raise SettingsError(
            f"{int(holes.sum())} cells are empty, the first in column {column!r}: say --missing "
            "if they are missing at random, or leave those columns or rows out."
        )


def make_model(options: Options, intake: Intake, components: int) -> Model:
    """The model that the options describe."""
    if intake.families or options.model == "mixed":
        families: Any = intake.families or dict.fromkeys(intake.columns, "gaussian")
        return mixed_mixture(components, families)
    if options.model == "gaussian":
        return gaussian_mixture(components, options.covariance or "full", missing=options.missing)
    if options.model in ("factors", "ppca"):
        make = ppca if options.model == "ppca" else factor_analysis
        return make(options.factors or FACTORS, components)
    if options.target not in intake.columns:
        raise SettingsError(f"--target {options.target!r} is not among the columns used.")
    return regression_mixture(components, intake.columns.index(options.target))


def _said(options: Options) -> dict[str, Any]:
    """What was said of the algorithm beside its name."""
    said: dict[str, Any] = {}
    if options.compressor is not None:
        said["compressor"] = parse_compressor(options.compressor)
    if options.batch is not None:
        said["batch_size"] = options.batch
    return said


def _algorithm(options: Options, workers: int, said: dict[str, Any]) -> Algorithm:
    """The one named; alone EM, unless batches or rounds left out ask for what EM has not."""
    if said or options.participation < 1:
        workers = max(2, workers)
    found: Any = choose_algorithm(options.algorithm, workers, options.follow_em)
    return dataclasses.replace(found, **said) if said else found


def criteria(options: Options) -> tuple[float | None, float | None]:
    """Nats and tolerance: as given, or what suits the algorithm.

    Only EM and AutoEM tell what a round gains; others are watched by |H|^2.
    """
    if options.nats is not None or options.tolerance is not None:
        return options.nats, options.tolerance
    return (NATS, None) if options.algorithm in ("auto", "em") else (None, TOLERANCE)


def _fit(
    intake: Intake, options: Options, algorithm: Any, numbers: list[int]
) -> tuple[Result, list[dict[str, Any]]]:
    """One fit, or the best of a range; and what was tried."""
    nats, tolerance = criteria(options)
    rounds = ROUNDS if options.rounds is None else options.rounds
    everyone = options.participation == 1
    kind: Any = options.precision
    workers = to_device(intake.workers, options.device, kind)
    common: dict[str, Any] = {
        "weights": options.weights,
        "participation": Everyone() if everyone else Bernoulli(options.participation),
        "start": options.start,
        "n_init": options.starts,
        "rounds": rounds,
        "tolerance": tolerance,
        "nats": nats,
        "max_bytes": options.max_bytes,
        "seconds": options.seconds,
        "seed": options.seed,
        "threads": options.threads,
        "checkpoint": options.checkpoint,
        "resume": options.resume,
        "federation": (tape := Tape(StackedFederation(workers))),
    }
    with progress(options.quiet or options.json_output, nats, tolerance, rounds) as show:
        common["callbacks"] = [show]
        tried: list[dict[str, Any]] = []
        if len(numbers) == 1:
            result = fit(make_model(options, intake, numbers[0]), None, algorithm, **common)
            place = slice(0, result.model.layout.size)
        else:
            make = partial(make_model, options, intake)
            common["algorithm"] = algorithm
            found = select_components(make, None, numbers, criterion="bic", **common)
            sizes = [found.results[k].model.layout.size for k in numbers]
            chosen = numbers.index(found.n_components)
            place = slice(sum(sizes[:chosen]), sum(sizes[: chosen + 1]))
            tried = [dict(row) for row in found.table]
            result = with_setting(found.best, "selection", {"criterion": "bic", "tried": tried})
        with threads_of(options.threads):
            result = with_scores(result, tape)
            if options.curve and result.stopped != "interrupted":
                result = tape.curve(result, place)
    return result, tried


def with_setting(result: Result, name: str, value: Any) -> Result:
    """The result with one more thing that its file tells."""
    assert result.facts is not None
    settings = {**result.facts.settings, name: value}
    return dataclasses.replace(result, facts=dataclasses.replace(result.facts, settings=settings))


def summarise(
    result: Result, options: Options, remarks: list[str], tried: list[dict[str, Any]]
) -> dict[str, Any]:
    """What is printed, as plain JSON types."""
    facts = result.facts
    assert facts is not None
    names, workers = result.workers()["worker"], len(facts.rows)
    bad = [names[i] for i in facts.badly_served().tolist()]
    describe = result.model.describe()
    return {
        "model": options.out,
        "report": options.report,
        "kind": describe["model"],
        "components": describe.get("n_components"),
        "seed": result.seed,
        "workers": workers,
        "rows": int(facts.rows.sum()),
        "columns": result.card["data"]["columns"],
        "rounds": result.rounds,
        "stopped": result.stopped,
        "converged": result.converged,
        "log_likelihood": facts.log_likelihood,
        "bytes_up": result.bytes_up,
        "bytes_down": result.bytes_down,
        "bytes_up_per_worker": result.bytes_up / workers,
        "bytes_down_per_worker": result.bytes_down / workers,
        "guard_hits": result.guard_hits,
        "badly_served": bad,
        "tried": tried,
        "remarks": remarks,
    }


def _print(summary: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    table = Table(title=f"{summary['kind']} of {summary['rows']} rows", show_header=False)
    fit_words = summary["log_likelihood"]
    for name, value in (
        ("workers, columns", f"{summary['workers']}, {summary['columns']}"),
        ("components", str(summary["components"])),
        ("rounds", f"{summary['rounds']} (stopped by {summary['stopped']})"),
        ("converged", "yes" if summary["converged"] else "no"),
        ("log-likelihood per row", "not known" if fit_words is None else f"{fit_words:.6g}"),
        ("sent by a worker", size(summary["bytes_up_per_worker"])),
        ("sent to a worker", size(summary["bytes_down_per_worker"])),
        ("seed", str(summary["seed"])),
    ):
        table.add_row(name, value)
    console.print(table)
    for row in summary["tried"]:
        many = "s" if row["n_components"] > 1 else ""
        console.print(f"  {row['n_components']} component{many}: BIC {row['bic']:.7g}")
    if summary["badly_served"]:
        names = ", ".join(summary["badly_served"][:8])
        note = f"note: the model fits these workers clearly worse: {names}; see emfed adapt"
        console.print(note, markup=False)
    for remark in summary["remarks"]:
        console.print(f"note: {remark}", markup=False)
    console.print(f"The model is {summary['model']}.", markup=False)
    if summary["report"]:
        console.print(f"The report is {summary['report']}.", markup=False)
