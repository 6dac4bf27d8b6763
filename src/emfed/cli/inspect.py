"""``emfed inspect`` and ``emfed report``: what a file holds, for people and for scripts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from emfed.artifacts.cards import bullets, card_markdown
from emfed.artifacts.result import load
from emfed.cli.fit import write_report
from emfed.cli.tables import check_output, write_table
from emfed.core.errors import CheckpointError, ModelFileError
from emfed.core.storage import load_checkpoint

DIGESTS = ("weights", "data", "workers", "start")
"""What a checkpoint recognises without holding it."""
MOST_WORKERS = 30
"""Rows of the table of workers on a screen; --json and --workers FILE give all."""


def run_inspect(file: str, workers: str | None, as_json: bool) -> None:
    """The model card, and a table of workers."""
    if workers is not None:
        check_output(workers, "--workers")
    try:
        result = load(file)
    except ModelFileError as error:
        found = _checkpoint(file)
        if found is None:
            raise error from None
        print(json.dumps(found) if as_json else _checkpoint_text(found))  # noqa: T201
        return
    table = result.workers()
    if workers is not None:
        write_table(table, workers)
    if as_json:
        told = {"kind": "model", "card": result.card, "workers": table}
        print(json.dumps(told, allow_nan=False))  # noqa: T201
    elif workers != "-":
        print(card_markdown(result.card))  # noqa: T201
        print(_markdown_table(table))  # noqa: T201


def run_report(model: str, out: str, as_json: bool) -> None:
    """The page of a fit, from its model file alone."""
    check_output(out, "--out", (".html",), [model])
    write_report(load(model), out)
    if as_json:
        told = {"model": model, "report": out, "bytes": Path(out).stat().st_size}
        print(json.dumps(told))  # noqa: T201
    else:
        print(f"The report is {out}.")  # noqa: T201


def _checkpoint(file: str) -> dict[str, Any] | None:
    """What a checkpoint says of itself; None if the file is none."""
    try:
        _, description = load_checkpoint(file)
    except CheckpointError:
        return None
    return {"kind": "checkpoint", **description}


def _checkpoint_text(found: dict[str, Any]) -> str:
    told = {
        f"{name} (digest)" if name in DIGESTS else name: value
        for name, value in found.get("fingerprint", {}).items()
    }
    return "\n".join(["# Checkpoint", "", *bullets({"next round": found.get("round"), **told})])


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    return "" if value is None else str(value).replace("|", "\\|")


def _markdown_table(table: dict[str, list[Any]]) -> str:
    """The first workers as Markdown."""
    names, count = list(table), len(table["worker"])
    rows = list(zip(*table.values(), strict=True))[:MOST_WORKERS]
    lines = ["## workers", "", "| " + " | ".join(n.replace("_", " ") for n in names) + " |"]
    lines.append("|" + " --- |" * len(names))
    for row in rows:
        lines.append("| " + " | ".join(_cell(value) for value in row) + " |")
    if count > MOST_WORKERS:
        lines.append(f"\n{count - MOST_WORKERS} more: --workers FILE writes all.")
    return "\n".join(lines)
