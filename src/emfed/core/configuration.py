"""Tables of a TOML file to settings: every key known, every value of its type, errors in words."""

from __future__ import annotations

import difflib
import json
import re
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeVar

from emfed.core.errors import EmfedError, SettingsError
from emfed.core.wording import UNSET, Face, Setting, Wording

Kind = TypeVar("Kind")


def read_settings(values: Mapping[str, Any], where: str, kind: type[Kind]) -> Kind:
    """Settings from a table of a configuration, each key and type checked."""
    hints = typing.get_type_hints(kind)
    check_keys(values, hints, where)
    fields = {name: _checked(name, value, where, hints[name]) for name, value in values.items()}
    try:
        return kind(**fields)
    except SettingsError as error:
        raise at(where, error.on(TOML)) from None


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


class TomlFace(Face):
    """Settings as a TOML file writes them: ``missing = true``."""

    name = "toml"

    def setting(self, mentioned: Setting) -> str:
        """A key, and its value if there is one."""
        kind = f'kind = "{mentioned.of.replace("_", "-")}" and ' if mentioned.of else ""
        if mentioned.value is UNSET:
            return kind + mentioned.name
        return f"{kind}{mentioned.name} = {self.value(mentioned.value)}"

    def value(self, value: Any) -> str:
        """A value in TOML."""
        if isinstance(value, (bool, str)):
            return json.dumps(value)
        if isinstance(value, Mapping):
            pairs = (f"{_key(str(key))} = {self.value(each)}" for key, each in value.items())
            return "{" + ", ".join(pairs) + "}"
        return super().value(value)


TOML = TomlFace()


def _key(name: str) -> str:
    return name if re.fullmatch(r"[\w-]+", name, re.ASCII) else json.dumps(name)


def at(where: str, error: Exception) -> SettingsError:
    """The error as one of a place in a file."""
    said = error.message if isinstance(error, EmfedError) else error
    return SettingsError(Wording("{}: {}", where, said))
