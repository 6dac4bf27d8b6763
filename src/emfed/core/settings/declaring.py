"""A setting is a field: its default, its check, its help, and the faces that it appears on."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from math import inf
from typing import Any, TypeVar

from emfed.core.errors import check_choice, check_count, check_range

WIDTH = 96
"""Columns of a docstring's text."""
KINDS: Mapping[str, type] = {"bool": bool, "int": int, "float": float}
Kind = TypeVar("Kind", bound=type)


@dataclass(frozen=True, kw_only=True)
class Declared:
    """What all faces know of a setting."""

    help: str
    """What it is, for the command line's help and for docstrings."""
    more: str = ""
    """What docstrings say besides."""
    option_more: str = ""
    """What the command line's help says besides."""
    takes: str = ""
    """The values that it takes, as numpydoc writes a type."""
    words: tuple[str, ...] = ()
    """The words that it may be."""
    low: float | None = None
    """The least value."""
    panel: str = ""
    """The heading under which the command line has an option for it; "" gives it none."""
    names: str = ""
    """The option's names, where one is short."""
    metavar: str = ""
    """What the option's value is called."""
    kind: type | None = None
    """The type of the option's value, if not that of the field."""
    option_words: tuple[str, ...] | None = None
    """The words that the option may be, where these are not ``words``."""
    toml: bool = True
    """Whether ``[fit]`` of ``run.toml`` and ``--set`` take it."""

    def docstring(self, name: str) -> str:
        """The setting's entry under Parameters."""
        text = " ".join(filter(None, (self.help, self.more)))
        entry = textwrap.wrap(text, WIDTH, break_long_words=False, break_on_hyphens=False)
        return f"{name} : {self.takes}\n" + textwrap.indent("\n".join(entry), "    ")


def setting(default: Any, help: str, /, **more: Any) -> Any:
    """Declare a setting: a field with its default and what `Declared` holds of it."""
    return field(default=default, metadata={"declared": Declared(help=help, **more)})


def declared(kind: type) -> dict[str, Declared]:
    """The settings that a dataclass declares, by name."""
    return {f.name: f.metadata["declared"] for f in fields(kind) if "declared" in f.metadata}


def kind_of(kind: type, name: str) -> type:
    """The type of an option's value: as declared, or the first of the field's that is a number."""
    (found,) = (f for f in fields(kind) if f.name == name)
    given: type | None = found.metadata["declared"].kind
    parts = [part.strip() for part in str(found.type).split("|")]
    return given or next((KINDS[part] for part in parts if part in KINDS), str)


def check_declared(values: Any) -> None:
    """Raise a `SettingsError` if a setting is not what its declaration takes; None may stand."""
    for name, known in declared(type(values)).items():
        value = getattr(values, name)
        if value is None:
            continue
        if known.words and (isinstance(value, str) or known.takes[0] == "{"):
            check_choice(name, value, known.words)
        if known.low is not None:
            if kind_of(type(values), name) is int:
                check_count(name, value, int(known.low))
            else:
                check_range(name, value, known.low, inf, open_high=True)


def documented(made: Kind) -> Kind:
    """Decorate a dataclass: ``{settings}`` in its docstring becomes all that it declares."""
    entries = (known.docstring(name) for name, known in declared(made).items())
    return fill(made, {"settings": "\n".join(entries)})


def fill(made: Kind, entries: Mapping[str, str]) -> Kind:
    """Put entries of numpydoc into a class's docstring, each in place of its name in braces."""
    if made.__doc__:  # Python may have been asked to drop it
        text = inspect.cleandoc(made.__doc__)
        for name, entry in entries.items():
            text = text.replace(f"{{{name}}}", entry)
        made.__doc__ = text
    return made
