"""``emfed impute``: a long table of records in, a trend and a filled table out."""

from __future__ import annotations

import json
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from emfed.cli.help import Options, spoken
from emfed.compressors.words import parse_compressor
from emfed.core.errors import DataError, EmfedWarning, SettingsError
from emfed.core.settings.declaring import declared
from emfed.fitting.progress import progress
from emfed.imputation import (
    Checklists,
    ColumnNames,
    FieldTable,
    Imputation,
    ImputeSettings,
    IntakeReport,
    impute,
    read_ebird,
    read_records,
)
from emfed.imputation.ebird import COVARIATES
from emfed.imputation.fit import THEN
from emfed.imputation.report import write_report
from emfed.imputation.space import places_of


def run_impute(options: Options) -> bool:
    """Read, fit, write, print; returns whether Ctrl-C cut it short."""
    if options.filled is not None and Path(options.filled).suffix not in (".csv", ".parquet"):
        raise SettingsError(f"--filled must end in .csv or .parquet; got {options.filled}.")
    console = Console(stderr=True, quiet=options.json_output)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", EmfedWarning)
        with console.status("reading the records"):
            table = _read(options)
        result = _fit(table, options)
    if result.stopped == "interrupted":  # at once: figures take seconds
        console.print("interrupted: writing what was reached")
    remarks = [spoken(w.message.args[0]) for w in caught if isinstance(w.message, EmfedWarning)]
    summary = _summary(result, options, remarks)
    _write(result, summary, options)
    if options.json_output:
        print(json.dumps(summary))  # noqa: T201
    else:
        _print(Console(), result, summary, options)
    return result.stopped == "interrupted"


def _columns(options: Options) -> ColumnNames:
    """The columns as the command line names them: empty is none, a comma parts year and month."""
    year, _, month = options.date.partition(",")
    return ColumnNames(
        site=options.site,
        date=(year.strip(), month.strip()) if month else options.date,
        value=options.value,
        observer=options.observer or None,
        worker=options.worker or None,
        exposure=options.exposure or None,
        effort=_listed(options.effort),
    )


def _checklists(options: Options) -> Checklists:
    """Which checklists of eBird count, and which effort is fitted."""
    some = () if options.effort == "none" else _listed(options.effort) or COVARIATES
    limits = options.max_minutes, options.max_km, options.max_observers
    return Checklists(_listed(options.protocols) or None, *limits, some)


def _listed(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _frame(file: str | None) -> Any:
    """A small table of covariates or strata."""
    if file is None:
        return None
    import polars as pl

    path = Path(file)
    if not path.is_file():
        raise DataError(f"{path}: there is no such file.")
    if path.suffix == ".parquet":
        return pl.read_parquet(path)
    frame = pl.read_csv(path)
    keys = [name for name in ("site", "time") if name in frame.columns]
    return frame.with_columns(pl.col(keys).cast(pl.String))


def _read(options: Options) -> FieldTable:
    data = Path(options.data)
    common = {name: getattr(options, name) for name in ("bins", "since", "until", "groups", "seed")}
    common["family"] = options.family or ("poisson" if options.mode == "observed" else "log1p")
    common["observer_effects"] = options.observer_effects
    common["bad_rows"] = "skip" if options.skip_bad else "raise"
    if options.ebird:
        common |= {"species": options.species, "region": options.region}
        sampling = None if options.sampling is None else Path(options.sampling)
        return read_ebird(data, sampling, checklists=_checklists(options), **common)
    for name in ("sampling", "species", "region"):
        if getattr(options, name) is not None:
            raise SettingsError(f"--{name} goes with --ebird.")
    duplicates: Any = "keep" if options.keep_duplicates else "raise"
    return read_records(data, _columns(options), duplicates=duplicates, **common)


FRAMES = ("coordinates", "site_covariates", "time_covariates")
"""Settings that are tables, which the command line reads from files."""


def _fit(table: FieldTable, options: Options) -> Imputation:
    given = {
        name: getattr(options, name)
        for name, known in declared(ImputeSettings).items()
        if known.panel and getattr(options, name) is not None
    }
    if "compressor" in given:
        given["compressor"] = parse_compressor(given["compressor"])
    given |= {name: _frame(given[name]) for name in FRAMES if name in given}
    limits = ImputeSettings(options.mode, rounds=options.rounds).stop
    bar_of = nullcontext() if options.json_output else progress(limits, then=THEN)
    with bar_of as bar:
        result = impute(
            table,
            **given,
            callbacks=[bar] if bar and options.mode != "observed" else [],
            progress=bar.stage if bar else None,
        )
        return result.sampled(bar.stage if bar else None)


def _summary(result: Imputation, options: Options, remarks: list[str]) -> dict[str, Any]:
    table, workers = result.table, len(result.table.workers)
    return {
        "seed": options.seed,
        "mode": result.mode,
        "family": table.family.describe(),
        "sites": len(table.sites),
        "times": table.bins.count,
        "first": table.bins.label(0),
        "last": table.bins.label(table.bins.count - 1),
        "workers": workers,
        "observed_cells": int(result.cells.size),
        "intake": table.intake.describe(),
        "structure": vars(result.solver.structure),
        "rank": result.params.rank,
        "spread": None if result.plain else result.spread,
        "draws": 0 if result.plain else result.posterior.count,
        "effort": [] if table.effort is None else table.effort.describe(),
        "observers": None if table.skill is None else table.skill.describe(),
        "coefficients": [] if result.plain else result.coefficients(),
        "rounds": result.rounds,
        "stopped": result.stopped,
        "bytes_up_per_worker": result.bytes_up / workers,
        "bytes_down_per_worker": result.bytes_down / workers,
        "remarks": remarks,
    }


def _write(result: Imputation, summary: dict[str, Any], options: Options) -> None:
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    result.write_trend([out / "trend.csv", out / "trend.parquet"], level=options.level)
    index = None
    if not result.plain and result.solver.family.describe() != {
        "family": "gaussian",
        "scale": "identity",
    }:
        strata = _frame(options.strata)
        index = result.index(options.base, options.level, strata=strata, least=options.least)
        index.write([out / "index.csv", out / "index.parquet", out / "index.png"])
        summary["slopes"] = [
            {key: None if value != value else value for key, value in slope.items()}  # no NaN
            | {"words": index.words(slope)}
            for slope in index.slopes
        ]
    places = None
    if options.coordinates is not None:
        where, _ = places_of(_frame(options.coordinates), result.table.sites)
        places = dict(zip(result.table.sites, map(tuple, where.tolist()), strict=True))
    title = Path(options.data).name
    write_report(
        result, out / "report.html", options.level, index=index, places=places, title=title
    )
    result.records.to_csv(out / "records.csv")
    result.records.to_parquet(out / "records.parquet")
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    if options.filled is not None:
        result.write(Path(options.filled), options.level)


def _intake(intake: IntakeReport) -> dict[str, int]:
    """What became of the rows, in words."""
    return {
        "zeros from complete checklists": intake.zeros,
        "added up: subspecies": intake.summed,
        "left out: without a value": intake.missing,
        "left out: bad rows": sum(intake.bad.values()),
        "left out: incomplete checklists": intake.incomplete,
        "left out: shared with a group": intake.shared,
        "left out: X, present and not counted": intake.uncounted,
        **{f"left out: {why}": number for why, number in intake.filtered.items()},
    }


def _print(console: Console, result: Imputation, summary: dict[str, Any], options: Options) -> None:
    table = Table(title=f"{summary['sites']} sites x {summary['times']} times", show_header=False)
    cells = summary["sites"] * summary["times"]
    intake = result.table.intake
    for name, value in (
        ("from, to", f"{summary['first']}, {summary['last']}"),
        ("records read, used", f"{intake.rows}, {intake.used}"),
        *((what, str(number)) for what, number in _intake(intake).items() if number),
        (
            "cells observed",
            f"{summary['observed_cells']} ({summary['observed_cells'] / cells:.2%})",
        ),
        ("workers", str(summary["workers"])),
        ("mode, family", f"{summary['mode']}, {summary['family']['family']}"),
        ("rank", str(summary["rank"])),
        *([("rounds", str(summary["rounds"]))] if summary["mode"] != "observed" else []),
        ("kB up per worker", f"{summary['bytes_up_per_worker'] / 1000:.2f}"),
    ):
        table.add_row(name, value)
    console.print(table)
    for row in summary["effort"] + summary["coefficients"]:
        told = f"{row['name']}: {row['coefficient']:.3g} +- {row['error']:.2g}"
        console.print(told, highlight=False)
    if summary["observers"] is not None:
        told = f"skill of observers: 1 +- {summary['observers']['spread']:.2g} among them"
        console.print(told, highlight=False)
    for row in summary.get("slopes", []):
        console.print(f"{row['stratum']}: {row['words']}", highlight=False)
    for remark in summary["remarks"]:
        console.print(f"note: {remark}", highlight=False)
    console.print(f"report.html, trend, index, records and summary.json are in {options.out}/")
    if options.filled is not None:
        console.print(f"The filled table is {options.filled}.")
