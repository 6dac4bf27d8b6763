"""What is wanted of a table: which columns, of which kinds, and how a missing value is written."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, final

from emfed.core.errors import SettingsError
from emfed.core.wording import Setting, Wording
from emfed.data.files import PLAIN, TextForm

MISSING = ("", "NA", "N/A", "n/a", "#N/A", "<NA>", "NaN", "nan", "null", "NULL", "None")
"""What text files write for no value."""
ColumnKind = Literal["number", "count", "amount", "weight", "category"]
EXPECTED: Mapping[str, str] = {
    "number": "number",
    "count": "whole number >= 0",
    "amount": "number >= 0",
    "weight": "number > 0",
}
"""Kinds of numbers, and what a cell of each must be."""
_DATE = re.compile(r"\d{1,4}([-/.])\d{1,2}\1\d{1,4}|\b(Date|Datetime|Duration|Time)\b")


@final
@dataclass(frozen=True)
class Column:
    """A column that is wanted.

    Parameters
    ----------
    name : str
        Its name.
    kind : str
        "number"; "count", "amount" (>= 0) and "weight" (> 0) are numbers with limits; "category".
    levels : sequence of str, optional
        The categories in the order of their codes; left out, those that the table holds.
    required : bool
        Whether an empty cell is a fault.

    Examples
    --------
    >>> from emfed.data import Column
    >>> Column("ward", "category", ("icu", "surgery")).kind
    'category'
    """

    name: str
    kind: ColumnKind = "number"
    levels: Sequence[str] | None = None
    required: bool = False

    def __post_init__(self) -> None:
        if self.kind not in ColumnKind.__args__:  # type: ignore[attr-defined]
            raise SettingsError(
                f"a column's kind must be one of {', '.join(ColumnKind.__args__)}; "  # type: ignore[attr-defined]
                f"got {self.kind!r}."
            )


@final
@dataclass(frozen=True)
class Schema:
    """What is wanted of a table.

    Parameters
    ----------
    columns : sequence of str or Column, optional
        The columns in the order that is wanted, numbers where no kind is said; left out, all but
        ``groups``.
    groups : str, optional
        The column that names the worker of each row.
    missing : sequence of str
        What text files write for no value.
    form : TextForm
        How text files are written.
    leave_out : bool
        Whether columns that hold no numbers are left out, and their names kept with the reason.
    otherwise : str
        What to do about a column that holds no numbers, ``{name}`` for its name.
    if_wrong : str
        What to do about a cell that is no number among others that are.
    if_empty : str
        What to do about an empty cell of a required column.

    Examples
    --------
    >>> import emfed
    >>> schema = emfed.data.Schema(["age", emfed.data.Column("ward", "category")])
    >>> emfed.data.read(b"ward,age\\nicu,40\\nhome,50\\n", schema).rows
    array([[40.,  1.],
           [50.,  0.]])
    """

    columns: Sequence[str | Column] | None = None
    groups: str | None = None
    missing: Sequence[str] = MISSING
    form: TextForm = PLAIN
    leave_out: bool = False
    otherwise: str = "choose other columns"
    if_wrong: str = "write it as one, or leave it empty and say --missing if its value is not known"
    if_empty: str = "fill it in, or leave the row out"

    def of(self, present: Sequence[str]) -> tuple[Column, ...]:
        """The columns that are wanted of a table with these."""
        wanted: Sequence[str | Column] | None = self.columns
        if wanted is None:
            wanted = [name for name in present if name != self.groups]
        return tuple(c if isinstance(c, Column) else Column(c) for c in wanted)


def plain_text(column: Any, missing: Sequence[str] = MISSING) -> Any:
    """An expression of polars for a column's text, null where there is no value."""
    import polars as pl

    text = column.cast(pl.String).str.strip_chars()
    return pl.when(text.is_in(list(missing))).then(None).otherwise(text)


def as_number(text: Any, decimal: str = ".") -> Any:
    """An expression for the number that text is written for, null where it is none."""
    import polars as pl

    if decimal == ",":  # a point is then no part of a number
        text = text.str.replace_all(".", " ", literal=True).str.replace(",", ".", literal=True)
    return text.cast(pl.Float64, strict=False)


def is_kind(number: Any, kind: str) -> Any:
    """An expression for whether a number, null where text was none, is one of this kind."""
    some = number.is_not_null()
    if kind == "number":
        return some
    some = some & number.is_finite()
    if kind == "weight":
        return some & (number > 0)
    some = some & (number >= 0)
    return some & (number == number.round()) if kind == "count" else some


def advise(cell: str, kind: str, schema: Schema) -> tuple[str, str]:
    """What is wrong with a cell that is no number of this kind, and what to do."""
    if marked := _marked(cell, schema.form):
        return marked
    hint = schema.if_wrong
    if _DATE.search(cell):
        hint = "turn dates into numbers, such as days since a date"
    return f"is no {EXPECTED[kind]}", hint


def _marked(cell: str, form: TextForm) -> tuple[str, str] | None:
    """What to say of a number with the mark that is not the decimal one; None if it is no number.

    1,001 is a thousand and one to some and one and a thousandth to others, so it is refused.
    """
    mark, word = (",", "comma") if form.decimal == "." else (".", "point")
    between = "has marks between thousands"
    if found := re.fullmatch(rf"([+-]?\d{{1,3}}([{mark} '\u00a0\u2019\u202f])\d{{3}}.*)", cell):
        plain = cell.replace(found[2], "")
        if re.fullmatch(rf"[+-]?\d+[{form.decimal}]?\d*", plain) and (
            found[2] != mark or form.decimal in plain
        ):
            return between, f"write {plain}"
    whole, *groups = cell.lstrip("+-").split(mark)
    if not (groups and whole.isdigit() and all(part.isdigit() for part in groups)):
        return None
    plain = whole + "".join(groups)
    if len(groups) > 1:
        return between, f"write {plain}"
    other: Any = "leave {} out", Setting("decimal")
    if mark == ",":
        other = "say {}", Setting("decimal", ",")
    if len(groups[0]) == 3 and len(whole) <= 3:
        return (
            f"may be the number {plain} or {whole}.{groups[0]}",
            Wording("write {} if it is the first; {} if it is the second", plain, Wording(*other)),
        )
    hint = Wording("{} (or write it with a {!r})", Wording(*other), form.decimal)
    return f"has a decimal {word}", hint
