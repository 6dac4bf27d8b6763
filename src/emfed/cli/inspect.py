"""``emfed inspect`` and ``emfed report``: what a file holds, for people and for scripts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from emfed.artifacts.fits import features
from emfed.artifacts.model_card import bullets, card_markdown
from emfed.artifacts.result import Result, load
from emfed.cli.apply import read_rows
from emfed.cli.help import Options
from emfed.cli.tables import check_output, safe, write_table
from emfed.core.errors import CheckpointError, ModelFileError
from emfed.core.storage import load_checkpoint

MOST_WORKERS = 30
"""Rows of the table of workers on a screen; --json and --workers FILE give all."""


def run_inspect(file: str, workers: str | None, as_json: bool, params: bool = False) -> None:
    """The model card and a table of workers; with ``params``, the fitted parameters."""
    if workers is not None:
        check_output(workers, "--workers")
    try:
        result = load(file)
    except ModelFileError as error:
        found = _checkpoint(file)
        if found is None or params:
            raise error from None
        print(json.dumps(found) if as_json else safe(_checkpoint_text(found)))  # noqa: T201
        return
    if params:
        print(_params_json(result) if as_json else safe(_params_text(result)))  # noqa: T201
        return
    table = result.workers()
    more: dict[str, Any] = {} if result.uncertainty is None else {"summary": result.summary()}
    more |= {} if result.validation is None else {"validation": result.validation}
    if workers is not None:
        write_table(table, workers)
    if as_json:
        told = {"kind": "model", "card": result.card, "workers": table}
        told |= {name: shown.table for name, shown in more.items()}
        print(json.dumps(told, allow_nan=False))  # noqa: T201
    elif workers != "-":
        print(safe(card_markdown(result.card)))  # noqa: T201
        print(_markdown_table(table))  # noqa: T201
        for name, shown in more.items():
            print(safe(f"\n## {name}\n\n```\n{shown}\n```"))  # noqa: T201


def _params_json(result: Result) -> str:
    """Every array of the parameters, in the units of the data."""
    arrays = {name: value.tolist() for name, value in result.params.arrays().items()}
    return json.dumps({"columns": result.columns, "params": arrays}, allow_nan=False)


def _params_text(result: Result) -> str:
    """One row a feature, one column a component, as the report has them."""
    heads, rows, legend = features(result)
    return "\n".join(_markdown_rows([legend, *heads], rows))


def run_report(model: str, out: str, as_json: bool, title: str | None = None) -> None:
    """The page of a fit, from its model file alone."""
    check_output(out, "--out", (".html",), [model])
    load(model).report(out, title=title)
    if as_json:
        told = {"model": model, "report": out, "bytes": Path(out).stat().st_size}
        print(json.dumps(told))  # noqa: T201
    else:
        print(f"The report is {out}.")  # noqa: T201


def run_own_report(options: Options) -> None:
    """The page of one site's rows, which stays there."""
    model, data, out = options.model, options.data, options.out
    check_output(out, "--out", (".html",), [model, data])
    result = load(model)
    own = result.own_rows(read_rows(result, options)[1])
    own.report(out, title=options.title)
    if options.json_output:
        names = [name.replace(", ", "_").replace(" ", "_") for name in own.table["figure"]]
        told = dict(zip(names, own.table["value"], strict=True))
        print(json.dumps({"model": model, "report": out, **told}))  # noqa: T201
    else:
        print(f"{own}\nThe report is {out}.")  # noqa: T201


def _checkpoint(file: str) -> dict[str, Any] | None:
    """What a checkpoint says of itself; None if the file is none."""
    try:
        _, description = load_checkpoint(file)
    except CheckpointError:
        return None
    return {"kind": "checkpoint", **description}


def _checkpoint_text(found: dict[str, Any]) -> str:
    told = {"next round": found.get("round"), **found.get("about", {})}
    return "\n".join(["# Checkpoint", "", *bullets(told)])


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    return "" if value is None else safe(str(value)).replace("|", "\\|")


def _markdown_rows(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """A table, its columns as wide as their widest cell."""
    cells = [list(heads), *([_cell(value) for value in row] for row in rows)]
    widths = [max(3, *map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |"
        for row in cells
    ]
    return [lines[0], "| " + " | ".join("-" * w for w in widths) + " |", *lines[1:]]


def _markdown_table(table: dict[str, list[Any]]) -> str:
    """The first workers as Markdown."""
    names, count = list(table), len(table["worker"])
    rows = list(zip(*table.values(), strict=True))[:MOST_WORKERS]
    lines = ["## workers", "", *_markdown_rows([n.replace("_", " ") for n in names], rows)]
    if count > MOST_WORKERS:
        lines.append(f"\n{count - MOST_WORKERS} more: --workers FILE writes all.")
    return "\n".join(lines)
