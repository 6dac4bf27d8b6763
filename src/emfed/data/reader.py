"""The one reader of tables: files, frames and arrays become the rows of workers.

A file is read in three steps. `open_tables` finds the cells and the faults of a file's form; a
`Schema` says which columns are wanted and of which kind; `read` makes numbers of them and raises
`FaultyTable` with all faults of all files at once. Parquet files of numbers and lazy frames are
left where they are, and are read block by block.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, final

import numpy as np

from emfed.core.errors import DataError, SettingsError
from emfed.core.protocols import FloatArray
from emfed.data.faults import WIDEST, Faults, TableFault, repeated
from emfed.data.files import (
    FIRST_LINE,
    PLAIN,
    FileCells,
    TextForm,
    file_format,
    open_bytes,
    open_file,
)
from emfed.data.reading import levels, unknown_category
from emfed.data.schema import Column, Schema, advise, as_number, is_kind, plain_text
from emfed.data.sources import ParquetRows, Source, is_number, parquet_schema
from emfed.data.tables import Workers
from emfed.data.workers import as_workers, of_file


@final
@dataclass(frozen=True)
class ParquetCells:
    """A Parquet file that is left where it is."""

    path: Path

    @property
    def where(self) -> str:
        """What messages call it."""
        return str(self.path)

    @cached_property
    def schema(self) -> Mapping[str, Any]:
        """Types by column."""
        return dict(parquet_schema(self.path))

    @property
    def columns(self) -> list[str]:
        """The names of the columns."""
        return list(self.schema)


@final
@dataclass(frozen=True, eq=False)
class DataTable:
    """What a `Schema` wanted of a table.

    Examples
    --------
    >>> import emfed
    >>> table = emfed.data.read(b"ward,age\\nicu,40\\nhome,50\\n", emfed.data.Schema(groups="ward"))
    >>> table.columns, table.workers.names
    (('age',), ['home', 'icu'])
    """

    parts: Mapping[str, Any]
    """The rows of each file or worker: numbers, or a `Source`."""
    columns: tuple[str, ...] | None
    """The names of the columns; None where the tables themselves have them."""
    groups: Any = None
    """The worker of each row, or the column of a `Source` that names it."""
    levels: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """The categories of columns in the order of their codes."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Columns that hold no numbers, and why."""
    first_line: int | None = None
    """The line of the first row of text files."""
    cells: Any = None
    """Of one file, all its cells as they were written."""

    @property
    def rows(self) -> Any:
        """The rows of the only part."""
        (rows,) = self.parts.values()
        return rows

    @cached_property
    def workers(self) -> Workers:
        """The rows worker by worker: by ``groups``, else each part is one's."""
        tables = {
            name: rows if isinstance(rows, Source) or self.columns is None else self._named(rows)
            for name, rows in self.parts.items()
        }
        alone = next(iter(tables.values()))
        if self.groups is not None:
            found = as_workers(alone, self.groups)
        else:
            found = as_workers(tables if len(tables) > 1 else alone)
        return of_file(found, self.first_line, self.left_out)

    def _named(self, rows: FloatArray) -> Any:
        import polars as pl

        return pl.DataFrame(rows, schema=list(self.columns or ()))


def open_tables(
    source: Any, form: TextForm = PLAIN, *, as_cells: bool = False
) -> dict[str, FileCells | ParquetCells]:
    """Open a file, its bytes, or several files, one for each worker; all faults at once.

    With ``as_cells`` Parquet files are read whole, as tables with categories must be.
    """
    files = list(source) if isinstance(source, (list, tuple)) else [source]
    names = list(map(str, source)) if isinstance(source, Mapping) else _names(files)
    files = list(source.values()) if isinstance(source, Mapping) else files
    faults, found = Faults(), dict[str, FileCells | ParquetCells]()
    for name, file in zip(names, files, strict=True):
        with faults.collecting():
            if isinstance(file, bytes):
                found[name] = open_bytes(file, form)
            elif as_cells or file_format(Path(file)) != "parquet" or not Path(file).is_file():
                found[name] = open_file(Path(file), form)
            else:
                found[name] = ParquetCells(Path(file))
    faults.check()
    return found


def _names(files: Sequence[Any]) -> list[str]:
    """Workers are called like their files; by the whole path where two are alike."""
    paths = ["the input" if isinstance(file, bytes) else str(file) for file in files]
    stems = [Path(path).name.split(".")[0] for path in paths]
    path, times = Counter(paths).most_common(1)[0]
    if times > 1:
        raise SettingsError(f"the file {path} was given twice.")
    return stems if len(set(stems)) == len(stems) else paths


def read(source: Any, schema: Schema | None = None) -> DataTable:
    """Read a table, whatever it is, as a schema wants it.

    Parameters
    ----------
    source : path, bytes, frame, array, Source, list, dict or what `open_tables` opened
        A CSV, TSV, Excel or Parquet file, or a table in memory; a list or dict has one for each
        worker.
    schema : Schema, optional
        The columns that are wanted; by default all, as numbers.

    Returns
    -------
    DataTable
        The rows, and what was found out about their columns.

    Raises
    ------
    FaultyTable
        If a table cannot be used: ``report`` has all faults with line, column, value and advice.

    Examples
    --------
    >>> import emfed
    >>> emfed.data.read(b"age,ward\\n40,icu\\n50,home\\n", emfed.data.Schema(["age"])).rows
    array([[40.],
           [50.]])
    """
    schema = schema or Schema()
    files = _files(source, schema.form)
    if files is None:
        return DataTable({"": source}, None, schema.groups)
    first = next(iter(files.values()))
    wanted = schema.of(first.columns)
    text = [file for file in files.values() if isinstance(file, FileCells)]
    known = _levels(wanted, text, schema)
    faults, left, parts = Faults(), dict[str, str](), {}
    for name, file in files.items():
        part = _cells_part if isinstance(file, FileCells) else _parquet_part
        parts[name], out = part(file, wanted, known, schema, faults)
        left |= out
    groups: Any = schema.groups
    if groups is not None and isinstance(first, FileCells):
        groups = _labels(first, groups, faults)
    faults.check()
    if len(left) == len(wanted):
        why = next(iter(left.values()))
        raise DataError(f"{first.where}: no column holds numbers: {why}.")
    columns = tuple(c.name for c in wanted if c.name not in left)
    cells = text[0].frame if text and len(files) == 1 else None
    return DataTable(parts, columns, groups, known, left, _first_line(files.values()), cells)


def _first_line(files: Collection[FileCells | ParquetCells]) -> int | None:
    """The line of the first row, if each row is one line of a text file."""
    text = [file for file in files if isinstance(file, FileCells) and file.lines is None]
    plain = len(text) == len(files) and all(file.first_line == FIRST_LINE for file in text)
    return FIRST_LINE if plain else None


def _files(source: Any, form: TextForm) -> dict[str, FileCells | ParquetCells] | None:
    """The files of a source, opened; None if it is no file."""
    parts = list(source.values()) if isinstance(source, dict) else source
    parts = list(parts) if isinstance(parts, (list, tuple)) else [parts]
    if all(isinstance(part, (FileCells, ParquetCells)) for part in parts):
        return (
            dict(source) if isinstance(source, dict) else {str(k): p for k, p in enumerate(parts)}
        )
    if parts and all(isinstance(part, (str, Path, bytes)) for part in parts):
        return open_tables(source, form)
    return None


def _levels(
    wanted: Sequence[Column], files: Sequence[FileCells], schema: Schema
) -> dict[str, list[str]]:
    """The words of every column of categories over all files."""
    import polars as pl

    found: dict[str, list[str]] = {}
    for column in wanted:
        if column.kind != "category":
            continue
        if column.levels is not None:
            found[column.name] = list(column.levels)
            continue
        text = plain_text(pl.col(column.name), schema.missing)
        have = [file.frame for file in files if column.name in file.columns]
        found[column.name] = levels([frame.select(text).to_series() for frame in have])
    return found


def _present(
    file: FileCells | ParquetCells, wanted: Sequence[Column], faults: Faults
) -> list[Column]:
    """The columns that are there; those that are not are faults."""
    absent = [column.name for column in wanted if column.name not in file.columns]
    hint = f"it has {', '.join(map(repr, file.columns[:12]))}"
    faults.add(TableFault(file.where, f"there is no column {name!r}", hint) for name in absent)
    return [column for column in wanted if column.name not in absent]


def _parquet_part(
    file: Any,
    wanted: Sequence[Column],
    known: Mapping[str, Sequence[str]],
    schema: Schema,
    faults: Faults,
) -> tuple[Any, dict[str, str]]:
    """The rows of a Parquet file that is left where it is, and the columns that are left out."""
    present = _present(file, wanted, faults)
    out = _without_numbers(file, present, schema, faults)
    names = [column.name for column in present if column.name not in out]
    fine = len(present) == len(wanted) and (not out or schema.leave_out)
    return ParquetRows(file.path, names) if fine and names else None, out


def _cells_part(
    file: Any,
    wanted: Sequence[Column],
    known: Mapping[str, Sequence[str]],
    schema: Schema,
    faults: Faults,
) -> tuple[Any, dict[str, str]]:
    """The numbers of a file's cells, and the columns that are left out."""
    faults.add(file.faults)
    out, columns = dict[str, str](), list[FloatArray]()
    for column in _present(file, wanted, faults):
        values, wrong = _values(file, column, known, schema)
        if schema.leave_out and wrong and wrong[0].problem.startswith("is no "):
            out[column.name] = f"column {column.name!r} holds {_what(wrong[0])}"
            continue
        faults.add(wrong)
        columns.append(values)
    rows = np.stack(columns, axis=1) if columns else np.empty((file.frame.height, 0))
    return rows, out


def _what(fault: TableFault) -> str:
    return f"{(fault.value or '')[:WIDEST]!r} in {fault.place}, which {fault.problem}"


def _without_numbers(
    file: ParquetCells, wanted: Sequence[Column], schema: Schema, faults: Faults
) -> dict[str, str]:
    """Columns of a Parquet file that hold no numbers, and why; faults unless they are left out."""
    kinds = {column.name: file.schema[column.name] for column in wanted}
    bad = {
        name: kind for name, kind in kinds.items() if not is_number(kind) and str(kind) != "Null"
    }
    if not schema.leave_out:
        faults.add(_typed(file.where, name, kind, schema) for name, kind in bad.items())
    return {name: f"column {name!r} holds {kind}, which is no number" for name, kind in bad.items()}


def _typed(where: str, name: str, kind: Any, schema: Schema) -> TableFault:
    """A column whose type is none of numbers."""
    hint = schema.otherwise.format(name=name)
    if str(kind).startswith(("Date", "Time", "Duration")):
        hint = "turn dates into numbers, such as days since a date, or choose other columns"
    return TableFault(where, f"it holds {kind}, no numbers", hint, column=name)


def _values(
    file: FileCells, column: Column, known: Mapping[str, Sequence[str]], schema: Schema
) -> tuple[FloatArray, list[TableFault]]:
    """A column as numbers, NaN where there is no value, and its faults."""
    import polars as pl

    series = file.frame[column.name]
    typed = series.dtype != pl.String
    if typed and column.kind != "category":
        if not (series.dtype.is_numeric() or series.dtype in (pl.Boolean, pl.Null)):
            return np.empty(0), [_typed(file.where, column.name, series.dtype, schema)]
        number = series.cast(pl.Float64)
        missing, text = number.is_null() | number.is_nan(), series.cast(pl.String)
        bad = ~missing & ~pl.select(is_kind(pl.lit(number), column.kind)).to_series()
    else:
        text = pl.select(plain_text(pl.lit(series), schema.missing)).to_series()
        missing = text.is_null()
        number = _codes(text, known[column.name]) if column.kind == "category" else None
        if number is None:
            number = _numbers(text, schema.form)
        good = number.is_not_null()
        if column.kind != "category":
            good = pl.select(is_kind(pl.lit(number), column.kind)).to_series()
        bad = ~missing & ~good
    faults = list[TableFault]()
    if bad.any():
        faults += _bad_cells(file, column, text, bad, known, schema)
    if column.required and missing.any():
        faults += [
            file.fault(row, column.name, "the cell is empty", schema.if_empty)
            for row in missing.arg_true().to_list()
        ]
    return number.fill_null(float("nan")).to_numpy(), faults


def _numbers(text: Any, form: TextForm) -> Any:
    """Text as numbers, null where it is none; a column of true and false alone is 1 and 0."""
    import polars as pl

    truth = text.str.to_lowercase().replace_strict({"true": 1.0, "false": 0.0}, default=None)
    if (truth.is_not_null() | text.is_null()).all():
        return truth.cast(pl.Float64)
    return pl.select(as_number(pl.lit(text), form.decimal)).to_series()


def _codes(text: Any, known: Sequence[str]) -> Any:
    """The place of each word among the categories, null where it is none of them."""
    import polars as pl

    codes = {str(word): float(code) for code, word in enumerate(known)}
    return text.replace_strict(codes, default=None, return_dtype=pl.Float64)


def _bad_cells(
    file: FileCells,
    column: Column,
    text: Any,
    bad: Any,
    known: Mapping[str, Sequence[str]],
    schema: Schema,
) -> list[TableFault]:
    """The faults of the cells of a column that are wrong."""

    def fault(row: int, cell: str, times: int, most: bool) -> TableFault:
        if column.kind == "category":
            problem, hint = unknown_category(known[column.name])
        else:
            problem, hint = advise(cell, column.kind, schema)
            if most and hint == schema.if_wrong:
                hint = schema.otherwise.format(name=column.name)
        return file.fault(row, column.name, problem, hint, cell, times)

    rows = bad.arg_true()
    good = int((~bad & text.is_not_null()).sum())
    cells = zip(rows.to_list(), text.gather(rows).to_list(), strict=True)
    return repeated(cells, np.inf if column.kind == "category" else good, fault)


def _labels(file: FileCells, groups: str, faults: Faults) -> Any:
    """The worker of each row, as it is written."""
    import polars as pl

    if groups not in file.columns:
        hint = f"it has {', '.join(map(repr, file.columns[:12]))}"
        faults.add([TableFault(file.where, f"there is no column {groups!r}", hint)])
        return None
    labels = file.frame[groups].cast(pl.String)
    missing = labels.is_null() | (labels == "")
    hint = "every row belongs to one: fill it in, or leave the row out"
    faults.add(
        file.fault(row, groups, "the row has no worker", hint)
        for row in missing.arg_true().to_list()
    )
    return np.array(labels.to_list())
