"""Options from a TOML file: ``--config fit.toml``. The command line has the last word."""

from __future__ import annotations

import difflib
import tomllib
from pathlib import Path
from typing import Any

import typer

from emfed.core.errors import SettingsError


def read_config(context: typer.Context, path: Path | None) -> Path | None:
    """The callback of ``--config``: what the file says becomes the default of each option."""
    if path is None or context.resilient_parsing:
        return path
    try:
        options = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} is not TOML: {error}.") from None
    names = _names(context)
    found: dict[str, Any] = {}
    for key, value in options.items():
        name = names.get(key.replace("_", "-"))
        if name is None or isinstance(value, dict):
            near = difflib.get_close_matches(key.replace("_", "-"), names, 1, 0.5)
            hint = (
                f"did you mean {near[0]!r}?" if near else f"there are {', '.join(sorted(names))}."
            )
            raise SettingsError(f"{path}: there is no option {key!r}; {hint}")
        found[name] = value
    context.default_map = {**(context.default_map or {}), **found}
    return path


def _names(context: typer.Context) -> dict[str, str]:
    """Long options and arguments of the command, as a file writes them, to their parameters."""
    names: dict[str, str] = {}
    for param in context.command.params:
        if param.name in ("config", "help"):
            continue
        if param.param_type_name == "argument":
            names[param.name] = param.name
        for option in param.opts:
            if option.startswith("--"):
                names[option.removeprefix("--")] = param.name
    return names
