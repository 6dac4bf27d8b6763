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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np

from emfed.core.errors import DataError, ExtraError, SettingsError
from emfed.core.protocols import FloatArray
from emfed.data.reading import codes
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
MISSING = ("", "NA", "N/A", "n/a", "#N/A", "<NA>", "NaN", "nan", "null", "NULL", "None")
"""What CSV files write for no value."""
FIRST_LINE = 2
"""The line of the first row: the header is line 1."""
SEPARATORS = {"tab": "\t", "\\t": "\t", "comma": ",", "semicolon": ";", "space": " "}


@final
@dataclass(frozen=True)
class TextForm:
    """How a text file is written: ``--separator``, ``--decimal`` and ``--encoding``."""

    separator: str | None = None
    """Between columns; None: a comma, in .tsv files a tab."""
    decimal: str = "."
    encoding: str = "utf-8"
    categories: str = ""
    """Columns of words and their words in the order of the codes: ``ward=icu|surgery,sex=f|m``."""

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
        raise DataError(f"{path}: expected a .csv, .tsv, .xlsx or .parquet file (or - for a pipe).")
    return kind


def read_cells(path: Path, form: TextForm = PLAIN) -> Any:
    """A file as a polars frame; cells of a text file are text."""
    kind = file_format(path)
    if not path.is_file():
        raise DataError(f"there is no file {path}.")
    if path.stat().st_size == 0:
        raise DataError(f"{path} is empty: expected a header and rows.")
    content: Any = path if kind == "parquet" else path.read_bytes()
    return parse_cells(content, kind, str(path), form)


def parse_cells(content: Any, kind: str, where: str, form: TextForm = PLAIN) -> Any:
    """The same of bytes that were read already (of Parquet, also a path)."""
    import polars as pl
    from polars.exceptions import PolarsError

    try:
        if kind == "parquet":
            glob: Any = {"glob": False} if isinstance(content, Path) else {}
            source = content if isinstance(content, Path) else io.BytesIO(content)
            schema = pl.scan_parquet(source, **glob).collect_schema()
            check_columns(len(schema), where)
            check_fits(8 * len(schema) * parquet_rows(source), where)
            frame = pl.read_parquet(source, **glob)
        elif kind == "xlsx":
            frame = _read_sheet(content, where)
        else:
            frame = _read_text(content, form.separator or "\t,"[kind == "csv"], where, form)
    except PolarsError as error:
        first = str(error).strip().split("\n")[0]
        raise DataError(f"{where}: not a readable {kind} file ({first}).") from None
    if frame.height == 0:
        raise DataError(f"{where} has a header but no rows.")
    return frame


def _read_sheet(content: bytes, where: str) -> Any:
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
            names = _names(_one_header(sheets, where), where)
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
        return frame
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
            raise DataError(f"{where}: not a whole .gz file ({error}).") from None
    wide = content[:2] in (b"\xff\xfe", b"\xfe\xff") and form.encoding == PLAIN.encoding
    try:
        text = "" if wide else content.decode(form.encoding)
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise DataError(
            f"{where}: line {line} is not {form.encoding.upper()}: save it as UTF-8, or say "
            "--encoding latin-1 (or cp1252, utf-16: as it was written)."
        ) from None
    if wide:
        raise DataError(f"{where} is UTF-16: save it as UTF-8, or say --encoding utf-16.")
    if "\0" in text:
        raise DataError(f"{where} is not a text file: it holds zero bytes.")
    text = _without_blank_end(text.removeprefix("\ufeff"))
    return text if "\n" in text else text.replace("\r", "\n")  # lines as old Macs end them


def _without_blank_end(text: str) -> str:
    """The text without lines at its end that hold nothing, or spaces: they are no rows."""
    end = len(text.rstrip(" \r\n"))
    lines = text[end:].splitlines()
    return text[:end] + (lines[0] if lines else "")  # spaces of the last row stay


def _read_text(content: bytes, separator: str, where: str, form: TextForm) -> Any:
    """All cells as text under the header's own names, none of them twice."""
    import polars as pl

    text = _decoded(content, form, where)
    _, head = next(_lines(text, separator, where), (1, []))
    parts = (";", "\t", "|", " ") if len(head) == 1 else ()
    if other := next((mark for mark in parts if mark != separator and mark in head[0].strip()), ""):
        word = {"\t": "tab", " ": "space"}.get(other, f"'{other}'")
        more = " (and --decimal , if it writes 1,5 for one and a half)" if other == ";" else ""
        if other == ";" or _columns_of(text, other) > 1:  # a name may hold a space or a bar
            raise DataError(
                f"{where}: its columns seem to be parted by {word}: say --separator {word}{more}."
            )
    names = _names(head, where)
    source = io.BytesIO(text.encode())
    options: dict[str, Any] = {"separator": separator, "infer_schema": False, "glob": False}
    try:
        frame = pl.read_csv(source, has_header=True, **options)
    except pl.exceptions.ComputeError:
        _check_lengths(text, separator, len(names), where)
        raise
    if frame.height and len(names) > 1 and frame.to_series(-1).null_count():
        _check_lengths(text, separator, len(names), where)  # polars fills up short rows
    frame.columns = names
    return frame


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
        raise DataError(f"{where}, line {line}: no readable row ({error}).") from None


def _names(head: Sequence[str], where: str) -> list[str]:
    check_columns(len(head), where)
    names = [name.removeprefix("\ufeff").strip() for name in head]
    for name, times in Counter(names).items():
        if times > 1:
            what = f"two columns called {name!r}" if name else "two columns without a name"
            raise DataError(f"{where} has {what}: give each its own.")
    _check_header(names, where)
    return names


def _check_header(names: Sequence[str], where: str) -> None:
    """Refuse a first row in the place of the names; years and 0, 1, 2 may be names."""
    if all(re.fullmatch(r"\d+", name) for name in names):
        found = [int(name) for name in names]
        numbers_alone = found != sorted(found)
    else:
        numbers_alone = all(_NUMBER.fullmatch(name) for name in names)
    if numbers_alone:
        raise DataError(
            f"{where}: the first line holds numbers ({names[0]} ...), no names of columns: put a "
            "line of names above the rows."
        )


_FEW = 0.05
"""Cells that are no numbers, for each one that is, up to which a column is taken for one of numbers
with slips of the pen."""
_NUMBER = re.compile(r"[+-]?(\d+[.,]?\d*|[.,]\d+)([eE][+-]?\d+)?")
_DATE = re.compile(r"\d{1,4}([-/.])\d{1,2}\1\d{1,4}|\b(Date|Datetime|Duration|Time)\b")


def _check_lengths(text: str, separator: str, width: int, where: str) -> None:
    """Name the first row that has other cells than the header."""
    for line, row in _lines(text, separator, where):
        if len(row) != width:
            what = f"{len(row)} cells" if len(row) > 1 else "one cell" if row else "no cell"
            hint = (
                "quote cells that hold the separator"
                if len(row) > width
                else "the file may be cut short, or a quote not closed; an empty cell needs its "
                "separator, too"
            )
            raise DataError(f"{where}, line {line}: {what}, where the header has {width}: {hint}.")


def numbers(
    frame: Any,
    columns: Sequence[str],
    where: str,
    categories: Mapping[str, Sequence[str]] | None = None,
    form: TextForm = PLAIN,
) -> FloatArray:
    """These columns as float64, missing values as NaN, categories as their codes."""
    categories = categories or form.words
    if absent := [name for name in columns if name not in frame.columns]:
        raise DataError(f"{where} has no column {absent[0]!r}; it has {list(frame.columns)}.")
    parts = [
        codes(text_of(frame[name]), categories[name], f"{where}: column {name!r}", FIRST_LINE)
        if name in categories
        else _column(frame[name], where, form)
        for name in columns
    ]
    return np.stack(parts, axis=1) if parts else np.empty((frame.height, 0))


def _column(series: Any, where: str, form: TextForm) -> FloatArray:
    import polars as pl

    if series.dtype != pl.String:
        if not (series.dtype.is_numeric() or series.dtype in (pl.Boolean, pl.Null)):
            raise NotNumbers(series.name, f"{series.dtype}", where)
        return series.cast(pl.Float64).fill_null(float("nan")).to_numpy()
    text = series.str.strip_chars()
    missing = text.is_null() | text.is_in(list(MISSING))
    truth = text.str.to_lowercase().replace_strict({"true": 1.0, "false": 0.0}, default=None)
    if (truth.is_not_null() | missing).all():
        return truth.cast(pl.Float64).fill_null(float("nan")).to_numpy()
    values = text
    if form.decimal == ",":  # a point is then no part of a number
        values = text.str.replace_all(".", " ", literal=True).str.replace(",", ".", literal=True)
    values = values.cast(pl.Float64, strict=False)
    bad = values.is_null() & ~missing
    if bad.any():
        row = int(bad.arg_max() or 0)
        place, cell = f"line {row + FIRST_LINE}", str(text[row])
        rare = int(bad.sum()) <= _FEW * int(values.is_not_null().sum())
        raise _marked(series.name, cell, place, where, form) or NotNumbers(
            series.name, f"{cell[:40]!r} in {place}", where, rare
        )
    return values.fill_null(float("nan")).to_numpy()


def _marked(name: str, cell: str, place: str, where: str, form: TextForm) -> DataError | None:
    """What to say of a number with the mark that is not the decimal one; None if it is no number.

    1,001 is a thousand and one to some and one and a thousandth to others: nobody guesses.
    """
    mark, word = (",", "comma") if form.decimal == "." else (".", "point")
    if found := re.fullmatch(rf"([+-]?\d{{1,3}}([{mark} '\u00a0\u2019\u202f])\d{{3}}.*)", cell):
        plain = cell.replace(found[2], "")
        if re.fullmatch(rf"[+-]?\d+[{form.decimal}]?\d*", plain) and (
            found[2] != mark or form.decimal in plain
        ):
            told = f"write {cell!r} as {plain}, without marks between thousands"
            return DataError(f"{where}, {place}, column {name!r}: {told}.")
    whole, *groups = cell.lstrip("+-").split(mark)
    if not (groups and whole.isdigit() and all(part.isdigit() for part in groups)):
        return None
    here, plain = f"{where}, {place}, column {name!r}", whole + "".join(groups)
    if len(groups) > 1:
        return DataError(f"{here}: write {cell!r} as {plain}, without marks between thousands.")
    other = "say --decimal ," if mark == "," else "leave --decimal out"
    if len(groups[0]) == 3 and len(whole) <= 3:
        return DataError(
            f"{here}: is {cell!r} the number {plain} or {whole}.{groups[0]}? Write {plain} if it "
            f"is the first; {other} if it is the second."
        )
    return DataError(f"{here}: {cell!r} has a decimal {word}: {other}, or write it otherwise.")


@final
class NotNumbers(DataError):
    """A column that holds something else."""

    def __init__(self, name: str, what: str, where: str, rare: bool = False) -> None:
        """``rare``: nearly all of its cells hold numbers."""
        self.reason = f"column {name!r} holds {what}, which is no number"
        if _DATE.search(what):
            advice = (
                "Turn it into a number, such as days since a date, or choose others with --columns"
            )
        elif rare:
            advice = "Nearly all of its cells are numbers: write this one as a number, or leave it "
            advice += "empty and say --missing if its value is not known"
        else:
            advice = "Choose others with --columns, name it as the workers' with --groups, or say "
            advice += f"--types {name}=categorical"
        super().__init__(f"{where}: {self.reason}. {advice}.")


def without_numbers(path: Path) -> dict[str, str]:
    """Columns of a Parquet file that hold no numbers, and why."""
    return {
        name: f"column {name!r} holds {kind}, which is no number"
        for name, kind in parquet_schema(path).items()
        if not (kind.is_numeric() or str(kind) in ("Boolean", "Null"))
    }


def text_of(series: Any) -> Any:
    """A column as text, None where a value is missing."""
    import polars as pl

    text = series.cast(pl.String).str.strip_chars()
    return text.set(text.is_in(list(MISSING)), None)


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
