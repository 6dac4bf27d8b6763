"""Tables in files: small ones as data frames, large ones left where they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from emfed.core.errors import DataError
from emfed.data.sources import ParquetRows, parquet_schema

MOST_RANGES = 4
"""Places of one file that a worker's rows may be spread over, on average."""


def read_frame(path: Path) -> Any:
    """A CSV or Parquet file as a polars data frame."""
    import polars as pl
    from polars.exceptions import PolarsError

    suffix = path.suffix.lower() if path.suffix.lower() != ".gz" else Path(path.stem).suffix.lower()
    if suffix not in (".csv", ".tsv", ".parquet"):
        raise DataError(f"{path}: expected a .csv, .tsv or .parquet file.")
    try:
        if suffix == ".parquet":
            return pl.scan_parquet(path, glob=False).collect()
        frame = pl.read_csv(path, separator="," if suffix == ".csv" else "\t", glob=False)
    except PolarsError as error:
        raise DataError(f"{path}: not a readable {suffix[1:]} file ({error}).") from None
    if frame.height == 0:
        raise DataError(f"{path} has no rows.")
    return frame


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
    labels = pl.scan_parquet(path, glob=False).select(_named(groups)).collect()[groups]
    missing = labels.is_null() | (labels.is_nan() if schema[groups].is_float() else False)
    if missing.any():
        row = int(missing.arg_max() or 0)
        raise DataError(f"{path}: row {row} has no worker in column {groups!r}.")
    return labels


def _named(name: str) -> Any:
    """One column by its very name, which polars would otherwise read as a pattern."""
    from polars import selectors

    return selectors.by_name(name)
