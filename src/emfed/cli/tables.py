"""Tables in and out: files, and pipes."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from emfed.cli.help import EXIT_CLOSED_PIPE, Options, option
from emfed.core.errors import SettingsError

PIPE = "-"
READ = "How text files are written"
Separator = Annotated[
    str | None,
    option(
        "Between columns: ';', tab, ...; a comma if left out, in .tsv files a tab.", READ, "CHAR"
    ),
]
Decimal = Annotated[str, option("In numbers: . or , (a comma).", READ, "CHAR")]
Encoding = Annotated[str, option("utf-8, latin-1, cp1252, ...", READ, "NAME")]


def form_of(options: Options) -> Any:
    """Return how text files are written, as those three options say."""
    from emfed.data.files import TextForm

    return TextForm(options.separator, options.decimal, options.encoding)


def source_of(path: str) -> Path | bytes:
    """A file, or what is piped in for ``-``."""
    return sys.stdin.buffer.read() if path == PIPE else Path(path)


def safe(text: str) -> str:
    """Text of a file that others made, without what could command a terminal."""
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text)


def _no_formulas(frame: Any) -> Any:
    """Cells of text that a spreadsheet would work out get an apostrophe before them.

    Numbers stay: a text is a formula if it begins as one and is no number.
    """
    import polars as pl
    from polars import selectors

    text = selectors.string().as_expr()
    formula = text.str.contains(r"^[=+\-@\t\r]") & text.cast(pl.Float64, strict=False).is_null()
    return frame.with_columns(pl.when(formula).then("'" + text).otherwise(text).name.keep())


def write_table(columns: Mapping[str, Any], path: str) -> None:
    """Write to a .csv or .parquet file, whole or not at all; to stdout as CSV for ``-``."""
    import polars as pl

    from emfed.core.storage import write_atomic

    frame = pl.DataFrame(dict(columns), nan_to_null=True)
    if path == PIPE:
        _print(_no_formulas(frame).write_csv().encode())
        return
    buffer = io.BytesIO()
    if Path(path).suffix.lower() == ".parquet":
        frame.write_parquet(buffer)
    else:
        _no_formulas(frame).write_csv(buffer)
    write_atomic(Path(path), buffer.getvalue())


def _print(content: bytes) -> None:
    """Print to stdout; if whoever read it has gone, that is no error worth words."""
    try:
        sys.stdout.buffer.write(content)
        sys.stdout.buffer.flush()
    except BrokenPipeError:  # what is left in buffers has no reader either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(EXIT_CLOSED_PIPE) from None


def check_output(
    path: str,
    option: str,
    suffixes: Sequence[str] = (".csv", ".parquet"),
    keep: Sequence[str] = (),
) -> None:
    """Say before the work begins that its result cannot be written, or would replace ``keep``."""
    if path == PIPE:
        return
    for other in keep:
        if other != PIPE and Path(other).resolve() == Path(path).resolve():
            raise SettingsError(f"{option} {path} would replace {other}: choose another name.")
    if suffixes and Path(path).suffix.lower() not in suffixes:
        raise SettingsError(f"{option} must end in {' or '.join(suffixes)}; got {path!r}.")
    if Path(path).exists() and not Path(path).is_file():
        raise SettingsError(f"{option} must be the path of a file; {path} is none.")
    if not Path(path).absolute().parent.is_dir():
        raise SettingsError(f"{option} {path}: there is no folder {Path(path).absolute().parent}.")


def listed(text: str) -> list[str]:
    """``a, b`` to its parts; a name with a comma is written in quotes."""
    import csv

    return [part.strip() for part in next(csv.reader([text], skipinitialspace=True), [])]
