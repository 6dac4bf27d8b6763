"""Tables in files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedem.errors import DataError


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
