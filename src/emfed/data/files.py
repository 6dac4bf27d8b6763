"""Tables in files: CSV, TSV, Excel and Parquet as data frames; large Parquet left where it is.

Cells of a text file are text until a column is used: nothing is guessed from its first rows, names
of workers stay as they are written (007 is not 7), and a cell that is no number is named by line.
A line is what an editor calls it: the header is line 1.
"""

from __future__ import annotations

import csv
import gzip
import io
import re
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np

from emfed.core.errors import DataError, ExtraError, SettingsError
from emfed.data.faults import FaultyTable, TableFault, refuse
from emfed.data.sources import (
    ParquetRows,
    check_columns,
    check_fits,
    free_memory,
    parquet_rows,
    parquet_schema,
    pick_columns,
)

MOST_RANGES = 4
"""Places of one file that a worker's rows may be spread over, on average."""
ENDINGS = ("csv", "tsv", "xlsx", "parquet")
FIRST_LINE = 2
"""The line of the first row: the header is line 1."""
SEPARATORS = {"tab": "\t", "\\t": "\t", "comma": ",", "semicolon": ";", "space": " "}


@final
@dataclass(frozen=True)
class TextForm:
    """How a text file is written: ``--separator``, ``--decimal`` and ``--encoding``.

    Parameters
    ----------
    separator : str, optional
        Between columns; left out, a comma, in .tsv files a tab.
    decimal : {".", ","}
        The mark in numbers.
    encoding : str
        As Python names it.
    categories : str
        Columns of words and their words in the order of the codes: ``ward=icu|surgery,sex=f|m``.

    Examples
    --------
    >>> import emfed
    >>> form = emfed.data.TextForm(";", ",")
    >>> emfed.data.read(b"a;b\\n1,5;2\\n", emfed.data.Schema(form=form)).rows
    array([[1.5, 2. ]])
    """

    separator: str | None = None
    decimal: str = "."
    encoding: str = "utf-8"
    categories: str = ""

    @property
    def words(self) -> dict[str, list[str]]:
        """The categories by column."""
        found = {}
        for part in next(csv.reader([self.categories], skipinitialspace=True), []):
            name, _, words = part.partition("=")
            found[name.strip()] = [word.strip() for word in words.split("|")]
        return found

    def __post_init__(self) -> None:
        parts = self.separator
        if parts is not None:
            object.__setattr__(self, "separator", parts := SEPARATORS.get(parts, parts))
            if len(parts) != 1 or not parts.isascii() or parts in '"\r\n':
                raise SettingsError(
                    f"--separator must be one character, such as ';' or tab; got {parts!r}."
                )
        if self.decimal not in (".", ","):
            raise SettingsError(f"--decimal must be . or , (a comma); got {self.decimal!r}.")
        if self.decimal == "," and parts == ",":
            raise SettingsError("--decimal , needs another --separator, such as ';'.")
        for name, words in self.words.items():
            if not name or len({*words}) < max(2, len(words)) or "" in words:
                raise SettingsError(
                    "--categories must name columns with their words in the order of the codes, "
                    f"such as ward=icu|surgery,sex=f|m; got {self.categories!r}."
                )
        try:
            "".encode(self.encoding)
        except LookupError:
            raise SettingsError(
                f"--encoding: {self.encoding!r} is not known; try utf-8, latin-1, cp1252 or utf-16."
            ) from None


PLAIN = TextForm()


def file_format(path: Path) -> str:
    """The format of a file by its ending; ``.gz`` may follow that of a text file."""
    suffixes = [s.lower() for s in path.suffixes if s.lower() != ".gz"]
    kind = suffixes[-1][1:] if suffixes else ""
    if kind not in ENDINGS:
        hint = "expected a .csv, .tsv, .xlsx or .parquet file (or - for a pipe)"
        raise refuse(str(path), "a file of an unknown kind", hint)
    return kind


@final
@dataclass(frozen=True, eq=False)
class FileCells:
    """A file whose cells are as they were written, and what is wrong with its form."""

    frame: Any
    """Of polars; the cells of a text file are text."""
    where: str
    form: TextForm = PLAIN
    first_line: int | None = FIRST_LINE
    """The line of the first row; None where a file has no lines."""
    faults: tuple[TableFault, ...] = ()
    lines: Sequence[int] | None = None
    """The line of each row, where cells of several lines part them."""

    @property
    def columns(self) -> list[str]:
        """The names of the columns."""
        return list(self.frame.columns)

    def fault(
        self,
        row: int,
        column: str,
        problem: str,
        hint: str,
        value: str | None = None,
        times: int = 1,
    ) -> TableFault:
        """What is wrong with a cell."""
        line = None
        if self.first_line is not None:
            line = row + self.first_line if self.lines is None else self.lines[row]
        place = row if line is None else None
        return TableFault(self.where, problem, hint, line, place, column, value, times)


def open_file(path: Path, form: TextForm = PLAIN) -> FileCells:
    """Read the cells of a file: CSV, TSV, Excel or Parquet."""
    kind = file_format(path)
    if not path.is_file():
        raise refuse(str(path), "there is no such file", "look at the name and the folder")
    if path.stat().st_size == 0:
        raise refuse(str(path), "the file is empty", "expected a header and rows")
    return open_cells(path if kind == "parquet" else path.read_bytes(), kind, str(path), form)


def scan_file(path: Path) -> tuple[Any, int | None]:
    """A lazy frame of a file of any size, its text cells as text, and the line of the first row.

    Columns are parted by what the first line has of a comma, a semicolon and a tab; where it is a
    semicolon, a comma is a decimal point. Tab-separated files quote nothing, as eBird's do not.
    """
    import polars as pl

    kind = path.name.lower().removesuffix(".gz").rpartition(".")[2]
    if kind not in ("csv", "tsv", "txt", "parquet"):
        hint = "expected a .csv, .tsv, .txt or .parquet file"
        raise refuse(str(path), "a file of an unknown kind", hint)
    if not path.is_file():
        raise refuse(str(path), "there is no such file", "look at the name and the folder")
    if kind == "parquet":
        return pl.scan_parquet(path, glob=False), None
    separator = "\t"
    if kind == "csv":
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            first = file.readline(1 << 16)
        separator = next((mark for mark in ",;\t" if mark.encode() in first), ",")
    quote = None if separator == "\t" else '"'
    frame = pl.scan_csv(path, separator=separator, infer_schema=False, quote_char=quote, glob=False)
    if separator == ";":
        frame = frame.with_columns(pl.all().str.replace(r"^(\s*[-+]?\d+),(\d+\s*)$", "${1}.${2}"))
    return frame, FIRST_LINE


def open_bytes(content: bytes, form: TextForm = PLAIN, where: str = "the input") -> FileCells:
    """Read the cells of a file from its bytes, whose format the first of them tell."""
    if not content:
        raise refuse(where, "it is empty", "expected CSV, Excel or Parquet")
    kind = {b"PAR1": "parquet", b"PK\x03\x04": "xlsx"}.get(content[:4], "csv")
    return open_cells(content, kind, where, form)


def open_cells(content: Any, kind: str, where: str, form: TextForm = PLAIN) -> FileCells:
    """The same of content of a known format: bytes, or of Parquet also a path."""
    import polars as pl
    from polars.exceptions import PolarsError

    try:
        if kind == "parquet":
            glob: Any = {"glob": False} if isinstance(content, Path) else {}
            source = content if isinstance(content, Path) else io.BytesIO(content)
            schema = pl.scan_parquet(source, **glob).collect_schema()
            check_columns(len(schema), where)
            check_fits(8 * len(schema) * parquet_rows(source), where)
            found = FileCells(pl.read_parquet(source, **glob), where, form, None)
        elif kind == "xlsx":
            found = _read_sheet(content, where)
        else:
            found = _read_text(content, form.separator or "\t,"[kind == "csv"], where, form)
    except PolarsError as error:
        first = str(error).strip().split("\n")[0]
        raise refuse(where, f"not a readable {kind} file ({first})", "write it anew") from None
    if found.frame.height == 0:
        raise refuse(where, "it has a header but no rows", "expected at least one")
    return found


def _read_sheet(content: bytes, where: str) -> FileCells:
    """The first sheet of an Excel file, by whichever engine is installed."""
    import polars as pl
    from polars.exceptions import PolarsError

    try:
        with zipfile.ZipFile(io.BytesIO(content)) as parts:
            check_fits(sum(part.file_size for part in parts.infolist()), where)
    except zipfile.BadZipFile as error:
        raise DataError(f"{where}: not a readable Excel file ({error}).") from None
    for engine in ("calamine", "openpyxl"):
        try:
            # The header by itself: polars would give a second 'a' another name.
            sheets: Any = pl.read_excel(
                io.BytesIO(content),
                engine=engine,
                sheet_id=0,
                has_header=False,
                infer_schema_length=0,
                raise_if_empty=False,
            )
            names, faults = _names(_one_header(sheets, where), where)
            frame: Any = pl.read_excel(
                io.BytesIO(content), engine=engine, infer_schema_length=None, drop_empty_rows=False
            )
        except ModuleNotFoundError:
            continue
        except (DataError, PolarsError):
            raise
        except Exception as error:  # each engine has its own
            first = str(error).split("\n")[0]
            raise DataError(f"{where}: not a readable Excel file ({first}).") from None
        frame.columns = names
        return FileCells(frame, where, faults=faults)
    raise ExtraError(
        f"{where}: reading .xlsx takes an engine: pip install fastexcel, or save it as CSV."
    )


def _one_header(sheets: dict[str, Any], where: str) -> list[str]:
    """The header of the first sheet, if no other has the same: its rows would be passed over."""
    heads = {title: sheet.row(0) for title, sheet in sheets.items() if sheet.height}
    first = next(iter(sheets))
    if first not in heads:
        raise DataError(f"{where}: its first sheet, {first!r}, is empty.")
    alike = [repr(title) for title, head in heads.items() if head == heads[first]]
    if len(alike) > 1:
        raise DataError(
            f"{where}: the sheets {', '.join(alike)} have the same columns, and only the first "
            "would be read: put all rows on one sheet, or save each as a file of its own."
        )
    return [str(name or "") for name in heads[first]]


def _unpacked(content: bytes, where: str) -> bytes:
    """The content of a .gz file, as far as there is room for it: a few bytes may claim any size."""
    room, parts, size = free_memory() // 4, [], 0
    with gzip.GzipFile(fileobj=io.BytesIO(content)) as file:
        while part := file.read(1 << 22):
            size += len(part)
            check_fits(size, where, room)
            parts.append(part)
    return b"".join(parts)


def _decoded(content: bytes, form: TextForm, where: str) -> str:
    """The text of a file, or what to do where it is written in other bytes than was said."""
    if content[:2] == b"\x1f\x8b":
        try:
            content = _unpacked(content, where)
        except (OSError, EOFError, zlib.error) as error:
            raise refuse(where, f"not a whole .gz file ({error})", "copy it again") from None
    wide = content[:2] in (b"\xff\xfe", b"\xfe\xff") and form.encoding == PLAIN.encoding
    try:
        text = "" if wide else content.decode(form.encoding)
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        hint = "save it as UTF-8, or say --encoding latin-1 (or cp1252, utf-16: as it was written)"
        raise refuse(where, f"not {form.encoding.upper()}", hint, line=line) from None
    if wide:
        raise refuse(where, "it is UTF-16", "save it as UTF-8, or say --encoding utf-16")
    if "\0" in text:
        raise refuse(where, "not a text file", "it holds zero bytes")
    text = _without_blank_end(text.removeprefix("\ufeff"))
    return text if "\n" in text else text.replace("\r", "\n")  # lines as old Macs end them


def _without_blank_end(text: str) -> str:
    """The text without lines at its end that hold nothing, or spaces: they are no rows."""
    end = len(text.rstrip(" \r\n"))
    lines = text[end:].splitlines()
    return text[:end] + (lines[0] if lines else "")  # spaces of the last row stay


def _read_text(content: bytes, separator: str, where: str, form: TextForm) -> FileCells:
    """All cells as text under the header's own names."""
    import polars as pl

    text = _decoded(content, form, where)
    _, head = next(_lines(text, separator, where), (1, []))
    if len(head) == 1:
        _check_separator(text, head[0].strip(), separator, where)
    names, faults = _names(head, where)
    source = io.BytesIO(text.encode())
    options: dict[str, Any] = {"separator": separator, "infer_schema": False, "glob": False}
    try:
        frame = pl.read_csv(source, has_header=True, **options)
        whole = len(names) == 1 or not frame.height or not frame.to_series(-1).null_count()
    except pl.exceptions.ComputeError:
        frame, whole = None, False
    if not whole:  # polars fills up short rows
        faults += tuple(_ragged(text, separator, len(names), where))
    if frame is None:
        source.seek(0)
        frame = pl.read_csv(source, has_header=True, truncate_ragged_lines=True, **options)
    frame.columns = names
    lines = None
    if text.count("\n") != frame.height and '"' in text:  # some cell has several lines
        ends = [line for line, _ in _lines(text, separator, where)]
        lines = [end + 1 for end in ends[:-1]]
    return FileCells(frame, where, form, FIRST_LINE, faults, lines)


def _check_separator(text: str, head: str, separator: str, where: str) -> None:
    """Refuse a table of one column whose header seems to have several."""
    other = next((mark for mark in ";\t| " if mark != separator and mark in head), "")
    # A name may hold a space or a bar.
    if other == ";" or (other and _columns_of(text, other) > 1):
        word = {"\t": "tab", " ": "space"}.get(other, f"'{other}'")
        more = " (and --decimal , if it writes 1,5 for one and a half)" if other == ";" else ""
        problem = f"its columns seem to be parted by {word}"
        raise refuse(where, problem, f"say --separator {word}{more}")


def _columns_of(text: str, separator: str) -> int:
    """The columns that the first lines have with a separator, if they agree; else one."""
    widths = {len(line.split(separator)) for line in text.splitlines()[:20] if line.strip()}
    return widths.pop() if len(widths) == 1 else 1


def _lines(text: str, separator: str, where: str) -> Iterator[tuple[int, list[str]]]:
    """The cells of each row, and the line on which it ends."""
    reader = csv.reader(io.StringIO(text), delimiter=separator)
    try:
        for row in reader:
            yield reader.line_num, row
    except csv.Error as error:  # say, a quote that is not closed swallows the file
        line = reader.line_num or 1
        hint = "a quote may not be closed, or a line end in another way than the rest"
        raise refuse(where, f"no readable row ({error})", hint, line=line) from None


def _names(head: Sequence[str], where: str) -> tuple[list[str], tuple[TableFault, ...]]:
    """The names of the columns, each once, and those that the header has twice."""
    check_columns(len(head), where)
    names = [name.removeprefix("\ufeff").strip() for name in head]
    _check_header(names, where)
    faults, seen = [], Counter[str]()
    for place, name in enumerate(names):
        seen[name] += 1
        if seen[name] == 2:
            what = f"two columns called {name!r}" if name else "two columns without a name"
            faults.append(TableFault(where, what, "give each its own", 1, column=name or None))
        if seen[name] > 1:
            names[place] = f"{name} ({seen[name]})"
    return names, tuple(faults)


def _check_header(names: Sequence[str], where: str) -> None:
    """Refuse a first row in the place of the names; years and 0, 1, 2 may be names."""
    if all(re.fullmatch(r"\d+", name) for name in names):
        found = [int(name) for name in names]
        numbers_alone = found != sorted(found)
    else:
        numbers_alone = all(_NUMBER.fullmatch(name) for name in names)
    if numbers_alone:
        problem = f"the first line holds numbers ({names[0]} ...), no names of columns"
        raise refuse(where, problem, "put a line of names above the rows")


_NUMBER = re.compile(r"[+-]?(\d+[.,]?\d*|[.,]\d+)([eE][+-]?\d+)?")


def _ragged(text: str, separator: str, width: int, where: str) -> Iterator[TableFault]:
    """Rows that have other cells than the header, and where no row can be read any more."""
    rows = _lines(text, separator, where)
    try:
        for line, row in rows:
            if len(row) != width:
                what = f"{len(row)} cells" if len(row) > 1 else "one cell" if row else "no cell"
                hint = (
                    "quote cells that hold the separator"
                    if len(row) > width
                    else "the file may be cut short, or a quote not closed; an empty cell needs "
                    "its separator, too"
                )
                yield TableFault(where, f"{what}, where the header has {width}", hint, line)
    except FaultyTable as error:
        yield from error.report.faults


def parquet_workers(
    whole: ParquetRows, groups: str, labels: Any
) -> tuple[list[ParquetRows], list[str], tuple[str, ...] | None]:
    """One file, one worker per value of its column ``groups``: tables, names, columns.

    The rows of a worker should lie together, or each pass would read the file over and over.
    """
    runs = labels.rle().struct.unnest()
    most = MOST_RANGES * max(1, labels.n_unique())
    lengths = runs["len"].to_numpy()
    if len(lengths) > most:
        raise DataError(
            f"{whole.path}: the workers' rows lie in {len(lengths)} places; sort the file by "
            f"{groups!r} first."
        )
    ends = np.cumsum(lengths)
    spans: dict[Any, list[tuple[int, int]]] = {}
    for value, stop, length in zip(runs["value"], ends.tolist(), lengths.tolist(), strict=True):
        spans.setdefault(value, []).append((stop - length, stop))
    names = sorted(spans)
    return [whole.at(spans[n]) for n in names], [str(n) for n in names], whole.columns


def parquet_labels(path: Path, groups: Any) -> Any:
    """The column that names the worker of each row, none missing."""
    import polars as pl

    if not isinstance(groups, str):
        raise DataError("with the path of a file, groups is the name of one of its columns.")
    schema = parquet_schema(path)
    if groups not in schema:
        raise DataError(f"{path}: groups={groups!r} is not one of its columns {list(schema)}.")
    if schema[groups].is_nested():
        raise DataError(f"{path}: column {groups!r} holds {schema[groups]}, not names.")
    labels = pick_columns(pl.scan_parquet(path, glob=False), [groups]).collect()[groups]
    if labels.is_empty():
        raise DataError(f"{path} has a header but no rows.")
    missing = labels.is_null() | (labels.is_nan() if schema[groups].is_float() else False)
    if missing.any():
        row = int(missing.arg_max() or 0)
        raise DataError(f"{path}: row {row} has no worker in column {groups!r}.")
    return labels
