"""Tables in and out: CSV, TSV and Parquet files, and pipes.

Cells of a CSV file are text until a column is used: nothing is guessed from its first rows, names
of workers stay as they are written (007 is not 7), and a cell that is no number is named by row.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from emfed.cli.help import EXIT_CLOSED_PIPE
from emfed.core.errors import DataError, SettingsError
from emfed.core.protocols import FloatArray

PIPE = "-"
MISSING = ("", "NA", "N/A", "NaN", "nan", "null", "NULL", "None")
"""What CSV files write for no value."""


def read_cells(path: str) -> Any:
    """A file, or what is piped in for ``-``, as a polars frame."""
    import polars as pl
    from polars.exceptions import PolarsError

    where, source, kind = _source(path)
    try:
        if kind == "parquet":
            frame = (
                pl.read_parquet(source, glob=False)
                if isinstance(source, Path)
                else (pl.read_parquet(source))
            )
        else:
            frame = _read_csv(source, "\t" if kind == "tsv" else ",", where)
    except PolarsError as error:
        first = str(error).strip().split("\n")[0]
        raise DataError(f"{where}: not a readable {kind} file ({first}).") from None
    if frame.height == 0:
        raise DataError(f"{where} has a header but no rows.")
    return frame


def _source(path: str) -> tuple[str, Any, str]:
    """What to call it in messages, what to read, and its format."""
    if path == PIPE:
        content = sys.stdin.buffer.read()
        kind = "parquet" if content[:4] == b"PAR1" else "csv"
        if not content:
            raise DataError("the input is empty: expected CSV or Parquet on the pipe.")
        return "the input", io.BytesIO(content), kind
    file = Path(path)
    suffixes = [s.lower() for s in file.suffixes if s.lower() != ".gz"]
    kind = suffixes[-1][1:] if suffixes else ""
    if kind not in ("csv", "tsv", "parquet"):
        raise DataError(f"{path}: expected a .csv, .tsv or .parquet file, or - for a pipe.")
    if not file.is_file():
        raise DataError(f"there is no file {path}.")
    if file.stat().st_size == 0:
        raise DataError(f"{path} is empty: expected a header and rows.")
    return path, file, kind


def _read_csv(source: Any, separator: str, where: str) -> Any:
    """All cells as text under the header's own names, none of them twice."""
    import polars as pl

    options: dict[str, Any] = {"separator": separator, "infer_schema": False, "glob": False}
    head_only: Any = {**options, "truncate_ragged_lines": True}  # decimal commas part rows anew
    head = pl.read_csv(source, has_header=False, n_rows=1, **head_only)
    names = [str(name or "").removeprefix("\ufeff").strip() for name in head.row(0)]
    if len(names) == 1 and ";" in names[0]:
        raise DataError(
            f"{where}: its columns are parted by semicolons. Save it with commas between columns "
            "and points in numbers (1.5, not 1,5)."
        )
    for name in names:
        if names.count(name) > 1:
            what = f"two columns called {name!r}" if name else "two columns without a name"
            raise DataError(f"{where} has {what}: give each its own.")
    if hasattr(source, "seek"):
        source.seek(0)
    frame = pl.read_csv(source, has_header=True, **options)
    frame.columns = names
    return frame


def numbers(
    frame: Any,
    columns: Sequence[str],
    where: str,
    categories: Mapping[str, Sequence[str]] | None = None,
) -> FloatArray:
    """These columns as float64, missing values as NaN, categories as their codes."""
    categories = categories or {}
    if absent := [name for name in columns if name not in frame.columns]:
        raise DataError(f"{where} has no column {absent[0]!r}; it has {list(frame.columns)}.")
    parts = [
        _codes(frame[name], categories[name], where)
        if name in categories
        else _column(frame[name], where)
        for name in columns
    ]
    return np.stack(parts, axis=1) if parts else np.empty((frame.height, 0))


def _column(series: Any, where: str) -> FloatArray:
    import polars as pl

    if series.dtype != pl.String:
        if not (series.dtype.is_numeric() or series.dtype in (pl.Boolean, pl.Null)):
            raise _not_numbers(series.name, f"{series.dtype}", where)
        return series.cast(pl.Float64).fill_null(float("nan")).to_numpy()
    text = series.str.strip_chars()
    missing = text.is_null() | text.is_in(list(MISSING))
    values = text.cast(pl.Float64, strict=False)
    bad = values.is_null() & ~missing
    if bad.any():
        row = int(bad.arg_max() or 0)
        cell = str(text[row])
        digits = cell.replace(",", "", 1).replace("-", "", 1)
        if "," in cell and digits.isdigit():
            raise DataError(
                f"{where}, row {row + 1}, column {series.name!r}: {cell!r} has a decimal comma. "
                "Write numbers with points (1.5, not 1,5)."
            )
        raise _not_numbers(series.name, f"{cell[:40]!r} in row {row + 1}", where)
    return values.fill_null(float("nan")).to_numpy()


def _not_numbers(name: str, what: str, where: str) -> DataError:
    return DataError(
        f"{where}: column {name!r} holds {what}, which is no number. Choose others with --columns, "
        f"name it as the workers' with --groups, or say --types {name}=categorical."
    )


def text_of(series: Any) -> Any:
    """A column as text, None where a value is missing."""
    import polars as pl

    text = series.cast(pl.String).str.strip_chars()
    return text.set(text.is_in(list(MISSING)), None)


def _codes(series: Any, names: Sequence[str], where: str) -> FloatArray:
    """Category names as codes, in the order the model knows them."""
    place = {name: code for code, name in enumerate(names)}
    out = np.full(len(series), np.nan)
    for row, value in enumerate(text_of(series).to_list()):
        if value is None:
            continue
        if value not in place:
            raise DataError(
                f"{where}, row {row + 1}: the model does not know the category {value!r} of "
                f"column {series.name!r}; it knows {', '.join(map(repr, names[:12]))}."
            )
        out[row] = place[value]
    return out


def write_table(columns: Mapping[str, Any], path: str) -> None:
    """To a .csv or .parquet file, whole or not at all; to stdout as CSV for ``-``."""
    import polars as pl

    from emfed.core.storage import write_atomic

    frame = pl.DataFrame(dict(columns), nan_to_null=True)
    if path == PIPE:
        _print(frame.write_csv().encode())
        return
    buffer = io.BytesIO()
    if Path(path).suffix.lower() == ".parquet":
        frame.write_parquet(buffer)
    else:
        frame.write_csv(buffer)
    write_atomic(Path(path), buffer.getvalue())


def _print(content: bytes) -> None:
    """To stdout; if whoever read it has gone, that is no error worth words."""
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
