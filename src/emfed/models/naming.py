"""Columns by their names in messages: models count columns, readers know names."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar

_NAMES: ContextVar[Sequence[str] | None] = ContextVar("columns", default=None)


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
