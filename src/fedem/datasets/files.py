"""Tables in files: small ones as data frames, large ones left where they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from fedem.datasets.sources import ParquetRows
from fedem.errors import DataError

MOST_RANGES = 1000
"""Places of one file that a worker's rows may be spread over."""


def read_frame(path: Path) -> Any:
    """A CSV or Parquet file as a polars data frame."""
    import polars as pl
    from polars.exceptions import PolarsError

    suffix = path.suffix.lower() if path.suffix.lower() != ".gz" else Path(path.stem).suffix.lower()
    if suffix not in (".csv", ".tsv", ".parquet"):
        raise DataError(f"{path}: expected a .csv, .tsv or .parquet file.")
    try:
        if suffix == ".parquet":
            return pl.read_parquet(path)
        return pl.read_csv(path, separator="," if suffix == ".csv" else "\t")
    except PolarsError as error:
        raise DataError(f"{path}: not a readable {suffix[1:]} file ({error}).") from None


def parquet_workers(
    path: str | Path, groups: Any
) -> tuple[list[ParquetRows], list[str], tuple[str, ...]]:
    """One file, one worker per value of its column ``groups``: tables, names, columns.

    Only that column is read, once. The rows of a worker should lie together, or each pass would
    read the file over and over.
    """
    import polars as pl

    if not isinstance(groups, str):
        raise DataError("with the path of a file, groups is the name of one of its columns.")
    whole = ParquetRows(path, ())
    schema = pl.read_parquet_schema(whole.path)
    if groups not in schema:
        raise DataError(f"{path}: groups={groups!r} is not one of its columns {list(schema)}.")
    labels = pl.scan_parquet(whole.path).select(groups).collect()[groups]
    if labels.null_count():
        missing = int(labels.is_null().arg_max() or 0)
        raise DataError(f"{path}: row {missing} has no worker in column {groups!r}.")
    rest = tuple(name for name in schema if name != groups)
    runs = labels.rle().struct.unnest()
    ends = np.cumsum(runs["len"].to_numpy())
    starts = ends - runs["len"].to_numpy()
    values = runs["value"].to_list()
    spans: dict[Any, list[tuple[int, int]]] = {}
    for value, start, stop in zip(values, starts.tolist(), ends.tolist(), strict=True):
        spans.setdefault(value, []).append((start, stop))
    worst = max(len(parts) for parts in spans.values()) if spans else 0
    if worst > MOST_RANGES:
        raise DataError(
            f"{path}: a worker's rows lie in {worst} places; sort the file by {groups!r} first."
        )
    names = sorted(spans)
    return [ParquetRows(path, rest, spans[n]) for n in names], [str(n) for n in names], rest
