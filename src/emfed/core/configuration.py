"""Tables of a TOML file to settings: every key known, every value of its type, errors in words."""

from __future__ import annotations

import difflib
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypeVar

from emfed.core.errors import SettingsError

Kind = TypeVar("Kind")


def read_settings(values: Mapping[str, Any], where: str, kind: type[Kind]) -> Kind:
    """Settings from a table of a configuration, each key and type checked."""
    hints = typing.get_type_hints(kind)
    check_keys(values, hints, where)
    fields = {name: _checked(name, value, where, hints[name]) for name, value in values.items()}
    try:
        return kind(**fields)
    except SettingsError as error:
        raise SettingsError(f"{where}: {error}") from None


def check_keys(values: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    """Refuse an unknown key, and name the one it is nearest to."""
    names = list(known)
    for key in values:
        if key not in names:
            raise SettingsError(f"{where}: unknown key {key!r}; {nearest(key, names)}")


def nearest(word: str, names: list[str]) -> str:
    """What to say of a word that is none of these names."""
    near = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else f"choose among {', '.join(names)}."


def _checked(name: str, value: Any, where: str, hint: Any) -> Any:
    """A value of the type that its field is declared with."""
    if typing.get_origin(hint) is Literal:
        options = [str(option) for option in typing.get_args(hint)]
        if value not in options:
            hint_text = nearest(str(value), options)
            raise SettingsError(f"{where}: {name} cannot be {value!r}; {hint_text}")
        return value
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if float in kinds and type(value) is int:
        return float(value)
    if type(value) not in kinds:
        wanted = " or ".join(k.__name__ for k in kinds if k is not types.NoneType)
        raise SettingsError(f"{where}: {name} must be of type {wanted}; got {value!r}.")
    return value


def reworded(
    message: str, names: Mapping[str, str], write: Callable[[str, str | None], str]
) -> str:
    """A message in the words of the face that was called: each setting by its name there.

    ``write`` puts a name and the value after it (``start='moments'``), if any, as the face does. A
    name that is an English word too is a setting only where a value or "must" follows.
    """

    def said(found: re.Match[str]) -> str:
        name, value = found[1], found[2]
        plain = "_" not in name and name != "tol"
        if plain and value is None and not message[found.end() :].startswith(" must "):
            return found[0]
        return write(names[name], value)

    value = r"=(True|False|None|'[^']*'|[\w.+:-]*\w)"
    return re.sub(rf"(?<![\w.'\"-])({'|'.join(names)})\b(?:{value})?", said, message)


def with_family(message: str, write: Callable[[str, str], str]) -> str:
    """A message in which ``write`` puts the advice to give a column another family."""
    asked = r"mixed_mixture\(families=\{([^:{}]+): ([^{}]+)\}\)"
    return re.sub(asked, lambda found: write(found[1], found[2]), message)


def as_toml(name: str, value: str | None) -> str:
    """``missing = true``: a setting as a TOML file writes it."""
    if value is None:
        return name
    quoted = '"' + value[1:-1] + '"' if value.startswith("'") else value
    return f"{name} = {quoted.lower() if value in ('True', 'False') else quoted}"
