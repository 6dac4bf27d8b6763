"""From files and options to what `emfed.fit` takes: workers, columns, families."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from emfed.cli.help import Options
from emfed.cli.tables import PIPE, form_of, listed, source_of
from emfed.core.errors import DataError, SettingsError
from emfed.data import Column, Schema, read
from emfed.data.reader import open_tables
from emfed.models.families import EXPOSURE, FAMILIES, Family, read_family

OTHERWISE = (
    "choose others with --columns, name it as the workers' with --groups, or say "
    "--types {name}=categorical"
)
"""What to do about a column that holds no numbers."""


@dataclass(frozen=True)
class Intake:
    """Workers, and what their columns are."""

    workers: Any
    columns: tuple[str, ...]
    families: Mapping[str, Any] = field(default_factory=dict)
    """The family of columns that are not Gaussian."""
    categories: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Names of categories in the order of their codes."""


def read_workers(options: Options, paths: Sequence[str], types: str | None = None) -> Intake:
    """One file with a column of workers, or one worker per file."""
    groups, form = options.groups, form_of(options)
    if len(paths) > 1 and (groups is not None or PIPE in paths):
        raise SettingsError(
            "several files are one worker each: leave --groups out, and pipe only one table."
        )
    chosen = None if options.columns is None else listed(options.columns)
    given = parse_types(types)
    sources = [source_of(path) for path in paths]
    files = open_tables(sources, form, as_cells=bool(given))
    have = next(iter(files.values())).columns
    wanted = chosen or [name for name in have if name != groups]
    _check_names(wanted, have, groups, given, paths[0])
    columns = [
        Column(name, "category" if given.get(name) in FAMILIES else "number") for name in wanted
    ]
    table = read(files, Schema(columns, groups, form=form, otherwise=OTHERWISE))
    families = {name: _family(name, said, table.levels) for name, said in given.items()}
    return Intake(table.workers, tuple(wanted), families, table.levels)


def parse_types(types: str | None) -> dict[str, Family | str]:
    """``stays=poisson:days, ward=categorical`` by column; a name for categories, to be counted."""
    found: dict[str, Family | str] = {}
    for part in [] if types is None else listed(types):
        name, equals, family = part.partition("=")
        try:
            made = read_family(family)
        except SettingsError as error:
            problem = str(error) if equals else f"{part!r} has no '='."
            raise SettingsError(
                f"--types must be like age=gaussian,stays=poisson:days,ward=categorical: {problem}"
            ) from None
        found[name.strip()] = made
        if isinstance(made, Family) and isinstance(made.exposure, str):
            found[made.exposure] = EXPOSURE
    return found


def _check_names(
    wanted: Sequence[str], have: Sequence[str], groups: str | None, given: Any, where: str
) -> None:
    for option, names in (
        ("--groups", [] if groups is None else [groups]),
        ("--columns", wanted),
        ("--types", given),
    ):
        for name in names:
            if name not in have:
                raise SettingsError(
                    f"{option}: {where} has no column {name!r}; it has {', '.join(have)}."
                )
    if unused := [name for name in given if name not in wanted]:
        raise SettingsError(f"--types names {unused[0]!r}, which is not among the columns used.")
    if groups in wanted:
        raise SettingsError(f"--columns names {groups!r}, which is the column of workers.")
    if not wanted:
        raise DataError(f"{where} has no column beside the one of workers.")


def _family(name: str, said: Family | str, categories: Mapping[str, Sequence[str]]) -> Any:
    if name not in categories:
        return said
    if len(categories[name]) < 2:
        raise DataError(f"column {name!r} has one category only: leave it out.")
    made: Any = FAMILIES[str(said)]
    return made(len(categories[name]))
