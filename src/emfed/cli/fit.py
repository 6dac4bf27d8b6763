"""``emfed fit``: tables in, a model file out."""

from __future__ import annotations

import contextlib
import inspect
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from emfed.artifacts.fits import not_served, served
from emfed.artifacts.model_card import size
from emfed.artifacts.result import Result, ending
from emfed.cli.commands import SHAPES
from emfed.cli.help import Options, spoken
from emfed.cli.intake import Intake, read_workers
from emfed.cli.tables import PIPE, check_output
from emfed.core.configuration import nearest
from emfed.core.errors import SettingsError
from emfed.core.protocols import ModelWords, plural
from emfed.core.settings.declaring import declared
from emfed.core.settings.fit import FitFields
from emfed.core.wording import Setting, Wording
from emfed.data.placing import check_precision
from emfed.data.workers import to_device
from emfed.fitting import face
from emfed.fitting.fitted import Watch
from emfed.fitting.progress import progress
from emfed.fitting.selection import with_setting
from emfed.fitting.settings import FitSettings, read_range
from emfed.fitting.words import WORDS, read_words
from emfed.models import MODELS
from emfed.network import StackedFederation

COMPONENTS, FACTORS = "2", 2
"""Components of a mixture and factors of a factor analysis where the user gives no number."""


def run_fit(options: Options) -> tuple[bool, bool]:
    """Read, fit, write, print; returns whether it was interrupted, and ended without doubts."""
    _check(options)
    intake = read_workers(options, options.data, options.types)
    settings = make_settings(options, intake)
    _check_holes(intake, settings, options)
    path = None if options.checkpoint is None else Path(options.checkpoint)
    silent = options.quiet or options.json_output
    with (
        face.threads_of(options.threads),
        contextlib.nullcontext() if silent else progress(settings.limits) as show,
    ):
        watch = Watch((show,) if show else (), None, path, 100, options.resume, curve=options.curve)
        workers = to_device(intake.workers, options.device, options.precision)
        fitted = face.run(settings, StackedFederation(workers), watch)
    result = fitted.result
    if intake.categories:  # what codes mean, so that predictions read the same words
        kept = {name: list(values) for name, values in intake.categories.items()}
        result = with_setting(result, "categories", kept)
    remarks = [spoken(remark) for remark in (*fitted.remarks, fitted.shortfall) if remark]
    if remarks:  # as the terminal said it
        result = with_setting(result, "remarks", remarks)
    result = with_setting(result, "source", [Path(path).name for path in options.data])
    result.save(options.out, names=options.names)
    if options.report is not None:
        result.report(options.report, title=options.title)
    tried = [] if fitted.selection is None else [dict(row) for row in fitted.selection.table]
    summary = summarise(result, options, remarks, tried)
    if options.json_output:
        print(json.dumps(summary, allow_nan=False))  # noqa: T201
    elif not options.quiet:
        _print(summary, result.model.words())
        if result.validation is not None:
            print(f"\n{result.validation}")  # noqa: T201
    return result.stopped == "interrupted", not summary["doubts"]


def _check(options: Options) -> None:
    """Everything that is wrong before a row is read."""
    words = {name: known.option_words for name, known in declared(FitFields).items()}
    for option, allowed in {**words, "covariance_type": SHAPES}.items():
        value = getattr(options, option, None)
        if allowed and value is not None and value.lower() not in map(str.lower, allowed):
            raise SettingsError(setting=option, must=f"be one of {', '.join(allowed)}", got=value)
    if options.out == PIPE or not options.out:
        raise SettingsError(f"--out must be the path of a file; got {options.out!r}.")
    data = [str(path) for path in options.data]
    check_output(options.out, "--out", (), data)
    if options.report is not None:
        check_output(options.report, "--report", (".html",), [*data, options.out])
    _check_applies(options)
    if options.resume and options.checkpoint is None:
        raise SettingsError("--resume needs --checkpoint, the file to go on from.")
    if kind_of(options) == "regression-mixture" and options.target is None:
        raise SettingsError("--model regression-mixture needs --target, the column to explain.")
    read_range(options.n_components or COMPONENTS, "--n-components")
    check_precision(options.device, options.precision)
    _, fit = _given(options)  # whatever the model: it may need the columns
    _settings(options, {"kind": "gaussian-mixture", "n_components": 1}, fit)


OF_MODELS = (
    "n_components",
    "covariance_type",
    "covariance_floor",
    "missing",
    "n_factors",
    "target",
)
"""Options that are settings of models: a model that has one takes it."""
OF_ALGORITHMS = {
    "follow_em": ("auto",),
    "compressor": ("FedEM", "VR-FedEM"),
    "batch_size": ("auto", "FedEM", "VR-FedEM"),
}


def kind_of(options: Options) -> str:
    """The name of the model; --types makes it a mixture of columns of any family."""
    known = {name.lower(): name for name in MODELS}
    kind = known.get(options.model.lower())
    if kind is None:
        raise SettingsError(
            f"--model: unknown {options.model!r}; {nearest(options.model, list(known))}"
        )
    if options.types is None:
        return kind
    if kind not in ("gaussian-mixture", "mixed-mixture"):
        raise SettingsError(f"--types goes with --model mixed-mixture, not {kind}.")
    return "mixed-mixture"


def words_of(kind: str) -> Mapping[str, Any]:
    """The settings that a registered model takes, by name."""
    return inspect.signature(MODELS[kind]).parameters


def _check_applies(options: Options) -> None:
    """Refuse what would have no effect: whoever says it expects one."""
    kind = kind_of(options)
    why = "" if options.types is None else " (which --types makes it)"
    of_models = {name: [model for model in MODELS if name in words_of(model)] for name in OF_MODELS}
    for what, chosen, table in (
        ("model", kind, of_models),
        ("algorithm", options.algorithm, OF_ALGORITHMS),
    ):
        for name, fitting in table.items():
            value = getattr(options, name)
            said = value is not None and value is not False
            if said and chosen.lower() not in {f.lower() for f in fitting}:
                raise SettingsError(
                    Wording(
                        "{} goes with --{} {}, not with {}{}: leave it out, or choose that.",
                        *(Setting(name), what, " or ".join(fitting), chosen),
                        why if what == "model" else "",
                    )
                )


def _check_holes(intake: Intake, settings: FitSettings, options: Options) -> None:
    """Missing values that no option speaks of, in the words of the command line."""
    workers, kind = intake.workers, kind_of(options)
    rows = getattr(workers, "rows", None)
    if settings.candidates()[0].allows_missing or not isinstance(rows, np.ndarray):
        return
    places = np.argwhere(np.isnan(rows))
    if len(places):
        row, column = map(int, places[0])
        worker = int(np.searchsorted(np.cumsum(workers.counts), row, side="right"))
        line = workers.row_name(worker, row - int(workers.counts[:worker].sum()))
        count = (
            "one cell is empty, in"
            if len(places) == 1
            else f"{len(places)} cells are empty, one in"
        )
        remedy = f"--model {kind} takes none. Fill them in first (emfed impute --model)"
        if "missing" in words_of(kind):
            shapes = options.covariance_type in (None, "full", "diag")
            also = "" if shapes else ", with --covariance-type full or diag,"
            remedy = f"say --missing{also} if they are missing at random"
        raise SettingsError(
            f"{count} {line}, column {intake.columns[column]!r}: {remedy}, or leave those columns "
            "or rows out."
        )


def make_settings(options: Options, intake: Intake) -> FitSettings:
    """The settings that the options describe."""
    kind = kind_of(options)
    own, fit = _given(options)
    asked = {name: getattr(options, name) for name in OF_MODELS}
    asked |= {"missing": options.missing or None, "families": intake.families or None}
    first = {"n_components": COMPONENTS, "n_factors": FACTORS, "families": "gaussian"}
    takes = words_of(kind)
    bare = [name for name, word in takes.items() if word.default is word.empty]
    words = {**{n: v for n, v in first.items() if n in bare}, **own}
    words |= {name: value for name, value in asked.items() if value is not None}
    if lacking := [f"--set {name}=..." for name in bare if name not in words]:
        raise SettingsError(f"--model {kind} needs {' and '.join(lacking)}.")
    return _settings(options, {"kind": kind, **words}, fit)


def _given(options: Options) -> tuple[dict[str, Any], dict[str, Any]]:
    """What --set says of the model, and of the fit."""
    model: dict[str, Any] = {}
    fit: dict[str, Any] = {}
    for said in options.more or ():
        name, equals, value = said.partition("=")
        name = name.strip().replace("-", "_")
        if not (equals and name):
            raise SettingsError(f"--set takes NAME=VALUE, as in rank=2; got {said!r}.")
        if name in (*OF_MODELS, *SETTINGS):
            raise SettingsError(f"--set {name}: it has an option of its own; see emfed fit --help.")
        try:
            read = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            read = value.strip()  # a word without quotes
        (fit if name in WORDS else model)[name] = read
    return model, fit


def _settings(options: Options, model: dict[str, Any], more: dict[str, Any]) -> FitSettings:
    algorithm = {
        "kind": options.algorithm,
        **{n: v for n in ("compressor", "batch_size") if (v := getattr(options, n)) is not None},
    }
    fit = {name: getattr(options, name) for name in SETTINGS} | {"scores": True} | more
    return read_words(model, algorithm, fit)


SETTINGS = [name for name, known in declared(FitFields).items() if known.panel and known.toml]
"""Options that are settings of a fit under the same name."""


def summarise(
    result: Result, options: Options, remarks: list[str], tried: list[dict[str, Any]]
) -> dict[str, Any]:
    """What is printed, as plain JSON types."""
    facts = result.facts
    assert facts is not None
    names, workers, known = result.workers()["worker"], facts.workers, facts.by_worker
    bad = [] if known is None else [names[i] for i in known.badly_served.tolist()]
    describe, words, value = result.model.describe(), result.model.words(), facts.log_likelihood
    return {
        "model": options.out,
        "report": options.report,
        "kind": describe["model"],
        "components": describe.get("n_components"),
        "seed": result.seed,
        "workers": workers,
        "rows": facts.rows,
        "columns": result.card["data"]["columns"],
        "rounds": result.rounds,
        "stopped": result.stopped,
        "converged": result.converged,
        "doubts": result.doubts,
        words.key: None if value is None else words.factor * value,
        "privacy": None if result.privacy is None else dict(result.privacy),
        "bytes_up": result.bytes_up,
        "bytes_down": result.bytes_down,
        "curve_bytes": sum(
            result.ledger.summary()["monitor"][way][part]
            for way in ("up", "down")
            for part in ("payload", "envelope")
        ),
        "raw_bytes": result.raw_bytes,
        "bytes_up_per_worker": result.bytes_up / workers,
        "bytes_down_per_worker": result.bytes_down / workers,
        "guard_hits": result.guard_hits,
        "badly_served": None if known is None else bad,
        "validation": None if result.validation is None else result.validation.table,
        "served": served(result) if not_served(result) else "",
        "tried": tried,
        "remarks": remarks,
    }


def _beside_raw(summary: dict[str, Any]) -> str:
    """All bytes, and what sending the rows themselves would have taken."""
    total = summary["bytes_up"] + summary["bytes_down"]
    raw = summary["raw_bytes"]
    return size(total) + ("" if raw is None else f" (the rows themselves: {size(raw)})")


def _print(summary: dict[str, Any], words: ModelWords) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    title = f"{words.title}: {plural(summary['rows'], words.row)}"
    table = Table(title=title, show_header=False)
    score, private = summary[words.key], summary["privacy"]
    ended: tuple[tuple[str, str], ...] = (
        ("converged", "yes" if summary["converged"] else "no"),
        (f"{words.score} per {words.row}", "not known" if score is None else f"{score:.6g}"),
        ("sent by a worker", size(summary["bytes_up_per_worker"])),
        ("sent to a worker", size(summary["bytes_down_per_worker"])),
        ("sent in all", _beside_raw(summary)),
    )
    if summary["curve_bytes"]:
        ended += (("more for the report's curve", size(summary["curve_bytes"])),)
    if private:  # nothing was asked that the budget does not hold, convergence neither
        spent = ("private", "no")
        if private["private"]:
            spent = ("epsilon, delta", f"{private['epsilon']:.4g}, {private['delta']:g}")
        ended = (spent,)
    for name, value in (
        ("workers", f"{summary['workers']}"),
        *([("columns", f"{columns}")] if (columns := summary["columns"]) else []),
        *([(f"{words.part}s", f"{parts}")] if (parts := summary["components"] or 1) > 1 else []),
        ("rounds", f"{summary['rounds']} ({ending(summary['stopped'])})"),
        *ended,
        ("seed", str(summary["seed"])),
    ):
        table.add_row(name, value)
    console.print(table)
    if private:
        console.print(f"{private['words']}.", markup=False)
    for row in summary["tried"]:
        fallen = " (one has collapsed)" if row.get("collapsed") else ""
        parts = plural(row["n_components"], words.part)
        console.print(f"  {parts}: BIC {row['bic']:,.1f}{fallen}")
    if summary["served"]:
        some = len(summary["badly_served"] or ()) < summary["workers"]
        console.print(f"note: {summary['served']}{' See emfed adapt.' * some}", markup=False)
    for remark in summary["remarks"]:
        console.print(f"note: {remark}", markup=False)
    console.print(f"The model is {summary['model']}.", markup=False)
    if summary["report"]:
        console.print(f"The report is {summary['report']}.", markup=False)
