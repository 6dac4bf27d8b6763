"""Real tables that tests read from the folder of real data."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np

import emfed

HEART: dict[str, Any] = {
    "age": "gaussian",
    "sex": "bernoulli",
    "cp": emfed.models.Categorical(4),
    "trestbps": "gaussian",
    "chol": "gaussian",
    "fbs": "bernoulli",
    "restecg": emfed.models.Categorical(3),
    "thalach": "gaussian",
    "exang": "bernoulli",
    "oldpeak": "gaussian",
    "slope": emfed.models.Categorical(3),
    "ca": emfed.models.Categorical(4),
    "thal": emfed.models.Categorical(3),
    "num": emfed.models.Categorical(5),
}
"""The columns of the four hospitals' table and their families."""
CODES = {"cp": (1, 2, 3, 4), "slope": (1, 2, 3), "thal": (3, 6, 7)}
DISGUISED = ("chol", "trestbps")
"""Columns in which 0 means that nobody measured."""


def heart_disease(folder: Path) -> dict[str, Any]:
    """The rows of each hospital; codes counted from 0, zeros that mean nothing as NaN."""
    import polars as pl

    path = folder / "heart_disease_4hospitals.csv.gz"
    frame = pl.read_csv(path, schema_overrides=dict.fromkeys(HEART, pl.Float64))
    columns = []
    for name in HEART:
        values = frame[name].to_numpy().astype(float)
        if name in DISGUISED:
            values = np.where(values == 0, np.nan, values)
        if name in CODES:
            codes = np.array(CODES[name], dtype=float)
            found = np.searchsorted(codes, values).astype(float)
            values = np.where(np.isnan(values), np.nan, found)
        columns.append(values)
    rows, hospitals = np.stack(columns, axis=1), frame["hospital"].to_numpy()
    return {str(name): rows[hospitals == name] for name in np.unique(hospitals)}


AIR = ["PM2.5", "PM10", "SO2", "NO2", "CO", "O3", "TEMP", "PRES", "DEWP", "RAIN", "WSPM"]
"""The numeric columns of the Beijing air quality table."""


def air_quality(folder: Path) -> dict[str, emfed.data.ParquetRows]:
    """The rows of each of the twelve stations, left in their file."""
    import polars as pl

    path = folder / "beijing_air_quality.parquet"
    names = pl.read_parquet(path, columns=["station"])["station"].to_numpy()
    cuts = np.flatnonzero(names[1:] != names[:-1]) + 1
    ends = [0, *cuts.tolist(), len(names)]
    return {
        str(names[first]): emfed.data.ParquetRows(path, AIR, [(first, last)])
        for first, last in itertools.pairwise(ends)
    }
