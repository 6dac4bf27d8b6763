"""Columns and rows by their names in messages: models count them, readers know names."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar

_NAMES: ContextVar[Sequence[str] | None] = ContextVar("columns", default=None)
_ROWS: ContextVar[Callable[[int], str] | None] = ContextVar("rows", default=None)


@contextlib.contextmanager
def columns_named(names: Sequence[str] | None) -> Iterator[None]:
    """Within, `column_name` knows these: `Model.bind` is given sums, which have no names."""
    token = _NAMES.set(names)
    try:
        yield
    finally:
        _NAMES.reset(token)


def column_name(column: int) -> str:
    """The column's name in quotes; its number, from 0, where it has none."""
    names = _NAMES.get()
    return str(column) if names is None else repr(names[column])


def counted() -> str:
    """How numbers are meant, where columns have no names."""
    return " (counting from 0)" if _NAMES.get() is None else ""


@contextlib.contextmanager
def rows_named(name: Callable[[int], str]) -> Iterator[None]:
    """Within, `row_name` is this: what the user's table or file calls a row."""
    token = _ROWS.set(name)
    try:
        yield
    finally:
        _ROWS.reset(token)


def row_name(row: int) -> str:
    """``row 3``, counting from 0; ``line 5`` where the row came from a file."""
    name = _ROWS.get()
    return f"row {row}" if name is None else name(row)
