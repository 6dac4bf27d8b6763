"""From files and options to what `emfed.fit` takes: workers, columns, families."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from emfed.cli.help import Options
from emfed.cli.tables import PIPE, form_of, listed, read_cells
from emfed.core.errors import DataError, SettingsError
from emfed.data.files import FIRST_LINE, TextForm, file_format, numbers, text_of
from emfed.data.reading import levels
from emfed.data.sources import ParquetRows, parquet_schema
from emfed.data.workers import as_workers, of_file
from emfed.models import Categorical, Poisson

FAMILIES = ("gaussian", "poisson", "bernoulli", "categorical", "exponential", "gamma", "exposure")


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
    if all(Path(p).suffix.lower() == ".parquet" for p in paths) and not given:
        return _parquet(paths, groups, chosen)
    frames = {name: read_cells(path, form) for name, path in zip(_names(paths), paths, strict=True)}
    first = next(iter(frames.values()))
    wanted = chosen or [name for name in first.columns if name != groups]
    _check_names(wanted, first.columns, groups, given, paths[0])
    categories = _categories(given, list(frames.values()))
    tables = {
        name: _table(frame, wanted, path, categories, form)
        for (name, frame), path in zip(frames.items(), paths, strict=True)
    }
    only = next(iter(tables.values()))
    if groups is not None:
        workers = as_workers(only, _labels(first[groups], groups, paths[0]))
    else:
        workers = as_workers(tables if len(tables) > 1 else only)
    if all(path == PIPE or file_format(Path(path)) != "parquet" for path in paths):
        workers = of_file(workers, FIRST_LINE)
    families = {name: _family(name, said, categories) for name, said in given.items()}
    return Intake(workers, tuple(wanted), families, categories)


def _categories(given: Mapping[str, str], frames: Sequence[Any]) -> dict[str, Any]:
    """Collect the words of every categorical column over all files."""
    return {
        name: levels([text_of(frame[name]) for frame in frames if name in frame.columns])
        for name, family in given.items()
        if family == "categorical"
    }


def parse_types(types: str | None) -> dict[str, str]:
    """``stays=poisson:days, ward=categorical`` by column."""
    found: dict[str, str] = {}
    for part in [] if types is None else listed(types):
        name, equals, family = part.partition("=")
        kind, _, exposure = family.partition(":")
        if not equals or kind not in FAMILIES or (exposure and kind != "poisson"):
            raise SettingsError(
                f"--types must be like age=gaussian,stays=poisson:days,ward=categorical, with "
                f"families {', '.join(FAMILIES)}; got {part!r}."
            )
        found[name.strip()] = family
        if exposure:
            found[exposure] = "exposure"
    return found


def _names(paths: Sequence[str]) -> list[str]:
    """Workers are called like their files; by the whole path where two are alike."""
    stems = [Path(path).name.split(".")[0] for path in paths]
    twice = Counter(paths).most_common(1)[0]
    if twice[1] > 1:
        raise SettingsError(f"the file {twice[0]} was given twice.")
    return stems if len(set(stems)) == len(stems) else list(paths)


def _parquet(paths: Sequence[str], groups: str | None, chosen: list[str] | None) -> Intake:
    """Parquet files stay where they are if they are large."""
    for path in paths:
        if not Path(path).is_file():
            raise DataError(f"there is no file {path}.")
    have = list(parquet_schema(Path(paths[0])))
    wanted = chosen or [name for name in have if name != groups]
    _check_names(wanted, have, groups, {}, paths[0])
    sources = [ParquetRows(path, wanted) for path in paths]
    if groups is not None:
        return Intake(as_workers(sources[0], groups), tuple(wanted))
    tables = dict(zip(_names(paths), sources, strict=True))
    return Intake(as_workers(tables if len(tables) > 1 else sources[0]), tuple(wanted))


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


def _table(frame: Any, wanted: Sequence[str], where: str, categories: Any, form: TextForm) -> Any:
    import polars as pl

    return pl.DataFrame(numbers(frame, wanted, where, categories, form), schema=list(wanted))


def _labels(series: Any, groups: str, where: str) -> Any:
    """The worker of each row, as it is written."""
    import polars as pl

    labels = series.cast(pl.String)
    missing = labels.is_null() | (labels == "")
    if missing.any():
        line = int(missing.arg_max() or 0) + FIRST_LINE
        raise DataError(f"{where}, line {line}: no worker in column {groups!r}.")
    return np.array(labels.to_list())


def _family(name: str, said: str, categories: Mapping[str, Sequence[str]]) -> Any:
    """The family of a column that --types names."""
    kind, _, exposure = said.partition(":")
    if kind == "categorical":
        if len(categories[name]) < 2:
            raise DataError(f"column {name!r} has one category only: leave it out.")
        return Categorical(len(categories[name]))
    return Poisson(exposure=exposure) if exposure else kind
