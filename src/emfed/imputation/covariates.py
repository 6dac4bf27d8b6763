"""What a user knows of sites and times, matched by name and standardised."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from emfed.core.errors import DataError
from emfed.core.protocols import FloatArray
from emfed.imputation.lowrank import Covariates
from emfed.imputation.table import FieldTable, Grid


def read_covariates(table: FieldTable | Grid, sites: Any | None, times: Any | None) -> Covariates:
    """Covariates of all sites and all times of a table.

    Each is an array with one row per site (or time) in the table's order, or a polars or pandas
    frame with a column ``site`` (or ``time``, labelled as the table's bins are).
    """
    labels = table.bins.labels()
    return Covariates(
        _read(sites, table.sites, "site"),
        _read(times, labels, "time"),
    )


def _read(values: Any | None, names: Sequence[str], what: str) -> FloatArray:
    if values is None:
        return np.empty((len(names), 0))
    if hasattr(values, "columns"):
        array = _from_frame(values, names, what)
    else:
        array = np.asarray(values, dtype=np.float64)
        array = array[:, None] if array.ndim == 1 else array
    if array.ndim != 2 or len(array) != len(names):
        raise DataError(
            f"covariates of {what}s: expected {len(names)} rows, one per {what}; got shape "
            f"{array.shape}."
        )
    if not np.isfinite(array).all():
        row = int(np.flatnonzero(~np.isfinite(array).all(axis=1))[0])
        raise DataError(f"covariates of {what} {names[row]!r} are not all finite.")
    spread = array.std(axis=0)
    return np.asarray((array - array.mean(axis=0)) / np.where(spread > 0, spread, 1.0))


def _from_frame(frame: Any, names: Sequence[str], what: str) -> FloatArray:
    """Rows matched by name."""
    if what not in frame.columns:
        raise DataError(f"covariates of {what}s need a column {what!r} that names them.")
    keys = [str(name) for name in frame[what].to_list()] if hasattr(frame[what], "to_list") else []
    places = {name: row for row, name in enumerate(keys)}
    absent = [name for name in names if name not in places]
    if absent:
        raise DataError(f"covariates of {what}s: {len(absent)} are absent, first {absent[0]!r}.")
    order = np.array([places[name] for name in names])
    columns = [name for name in frame.columns if name != what]
    try:
        parts = [np.asarray(frame[name].to_numpy(), dtype=np.float64) for name in columns]
    except (TypeError, ValueError):
        raise DataError(f"covariates of {what}s must be numbers.") from None
    return np.stack(parts, axis=1)[order] if parts else np.empty((len(names), 0))
