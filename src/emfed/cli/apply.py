"""``emfed predict``, ``adapt`` and ``impute --model``: what a model file and a table give."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from emfed.artifacts.result import Result, load
from emfed.cli.help import Options
from emfed.cli.tables import PIPE, check_output, form_of, source_of, write_table
from emfed.core.errors import DataError, SettingsError
from emfed.core.protocols import AssignsRows, FillsRows, FloatArray, plural
from emfed.data import Column, Schema, read
from emfed.data.reader import open_tables
from emfed.data.schema import plain_text
from emfed.fitting.face import threads_of
from emfed.models.markov import HiddenMarkov


def run_predict(options: Options) -> None:
    """Component, its probability and the score of every row, called as the model calls them."""
    model, data, out = options.model, options.data, options.out
    _check_streams(out, options.json_output, [model, data])
    result = load(model)
    words = result.model.words()
    if not isinstance(result.model, AssignsRows):
        raise SettingsError(f"{model} has no components to tell: {result.model.describe()}.")
    frame, rows = read_rows(result, options)
    with threads_of(options.threads):
        shares, scores = result.predict_proba(rows), words.factor * result.score_samples(rows)
    best = np.argmax(shares, axis=1)
    told: dict[str, Any] = {
        words.part: best,
        "probability": shares[np.arange(len(best)), best],
        words.key: scores,
    }
    if options.proba:
        told |= {f"probability_{k}": shares[:, k] for k in range(shares.shape[1])}
    write_table(_beside(frame, told) if options.keep else told, out)
    if options.json_output:
        summary = {
            "model": model,
            "seed": result.seed,
            "rows": len(best),
            f"{words.part}s": np.bincount(best, minlength=shares.shape[1]).tolist(),
            words.key: float(scores.mean()),
            "out": out,
        }
        print(json.dumps(summary, allow_nan=False))  # noqa: T201
    elif not options.quiet and out != PIPE:
        print(f"The {words.part}s of {plural(len(best), 'row')} are in {out}.")  # noqa: T201


def run_adapt(options: Options) -> None:
    """The model fitted to one worker's rows, in a file of its own."""
    model, data, out = options.model, options.data, options.out
    check_output(out, "--out", suffixes=(), keep=[model, data])
    if out == PIPE:
        raise SettingsError("--out must be a file: a model is not text.")
    result = load(model)
    _, rows = read_rows(result, options)
    with threads_of(options.threads):
        adapted = result.adapt(rows, options.worth)
        words = result.model.words()
        before, after = (words.factor * r.log_likelihood(rows) for r in (result, adapted))
    adapted.save(out)
    if options.json_output:
        summary = {
            "model": model,
            "rows": len(rows),
            "worth": options.worth,
            f"{words.key}_before": before,
            words.key: after,
            "out": out,
        }
        print(json.dumps(summary, allow_nan=False))  # noqa: T201
    elif not options.quiet:
        print(  # noqa: T201
            f"{words.score} of {plural(len(rows), 'row')}: {before:.6g} before, {after:.6g} now, "
            "per row\n"
            f"The adapted model is {out}."
        )


def run_fill(options: Options) -> None:
    """A table with its empty cells filled in by a fitted model."""
    model, out, draws = options.model, options.filled or PIPE, options.draws
    _check_streams(out, options.json_output, [model, options.data], "--filled")
    if draws and options.intervals:
        raise SettingsError("--draws and --intervals do not go together: draws are the intervals.")
    result = load(model)
    if not isinstance(result.model, FillsRows):
        raise SettingsError(f"{model} knows no missing values: fit it with --missing or --types.")
    frame, rows = read_rows(result, options)
    names = _columns_of(result, frame)
    with threads_of(options.threads):
        if draws:
            each = result.impute_draws(rows, draws, options.seed)
            tables = [_filled(result, frame, names, one) for one in each]
            told: dict[str, Any] = {"draw": np.repeat(np.arange(draws), len(rows))}
            for name in tables[0]:
                told[name] = [value for table in tables for value in table[name]]
        else:
            told = _filled(result, frame, names, result.impute(rows))
            if options.intervals:
                low, high = result.impute_intervals(rows, options.level)
                for j, name in enumerate(names):
                    told |= {f"{name}_low": low[:, j], f"{name}_high": high[:, j]}
    write_table(told, out)
    if options.json_output:
        summary = {
            "model": model,
            "rows": len(rows),
            "filled": int(np.isnan(rows).sum()),
            "draws": draws,
            "seed": options.seed,
            "out": out,
        }
        print(json.dumps(summary, allow_nan=False))  # noqa: T201


def _check_streams(out: str, as_json: bool, keep: Sequence[str], option: str = "--out") -> None:
    check_output(out, option, keep=keep)
    if as_json and out == PIPE:
        raise SettingsError(f"--json takes stdout: write the table to a file with {option}.")


def _columns_of(result: Result, frame: Any) -> Sequence[str]:
    return result.columns if result.columns is not None else list(frame.columns)


def read_rows(result: Result, options: Options) -> tuple[Any, FloatArray]:
    """All cells, and the columns that the model knows as numbers."""
    if isinstance(result.model, HiddenMarkov):
        raise SettingsError("a hidden Markov model reads sequences: use emfed.load in Python.")
    form = form_of(options)
    (file,) = open_tables(source_of(options.data), form, as_cells=True).values()
    known = {} if result.facts is None else result.facts.settings.get("categories", {})
    width = result.card["data"]["columns"]
    if result.columns is None and width != len(file.columns):
        raise DataError(f"{file.where} has {len(file.columns)} columns; the model knows {width}.")
    required = not result.model.allows_missing
    columns = [
        Column(name, "category" if name in known else "number", known.get(name), required)
        for name in (result.columns if result.columns is not None else file.columns)
    ]
    fitted = "the model was fitted to numbers there"
    without = (
        "the model was fitted without missing values: leave such rows out, or fit it with --missing"
    )
    table = read(
        file, Schema(columns, form=form, otherwise=fitted, if_wrong=fitted, if_empty=without)
    )
    return table.cells, table.rows


def _beside(frame: Any, told: dict[str, Any]) -> dict[str, Any]:
    """The input's columns, then what was told; names that are taken get an underscore."""
    columns = {name: frame[name] for name in frame.columns}
    for name, values in told.items():
        while name in columns:
            name += "_"
        columns[name] = values
    return columns


def _filled(result: Result, frame: Any, names: Sequence[str], rows: FloatArray) -> dict[str, Any]:
    """The input with the model's columns whole: what was there stays as it was written."""
    import polars as pl

    known = {} if result.facts is None else result.facts.settings.get("categories", {})
    out: dict[str, Any] = {name: frame[name] for name in frame.columns}
    for j, name in enumerate(names):
        values: list[Any] = rows[:, j].tolist()
        if name in known:
            values = [known[name][int(code)] for code in values]
        series = frame[name]
        if series.dtype == pl.String:
            was = frame.select(plain_text(pl.col(name))).to_series().to_list()
            out[name] = [
                new if old is None else old for old, new in zip(was, map(str, values), strict=True)
            ]
        else:
            out[name] = values
    return out
