"""One record per round, and the table they make."""

from __future__ import annotations

import csv
import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from emfed.core.errors import SettingsError
from emfed.core.protocols import FloatArray


@dataclass(frozen=True)
class RoundRecord:
    """Everything a plot or a report needs of one round.

    Round 0 is the opening: summaries, the start S_0, and the memories' start.

    Examples
    --------
    >>> import emfed
    >>> data = emfed.data.synthetic_federation(workers=4, rows_per_worker=50)
    >>> model = emfed.gaussian_mixture(2, "tied")
    >>> record = emfed.fit(model, data, "em", rounds=3).records[-1]
    >>> record.round, record.asked, record.answered
    (3, 4, 4)
    """

    round: int
    """The number of the round."""
    generation: int
    """The generation of memories: it grows when a lost memory makes all begin anew."""
    asked: int
    """How many workers were asked."""
    answered: int
    """How many of them answered."""
    squared_H: float | None
    """|H|^2, with H the server's estimate of the mean field."""
    step_size: float
    """The step that was taken."""
    guard_hits: int
    """How often the step was halved to stay where T is defined."""
    bytes_up: int
    """All bytes that workers sent, payload and envelope."""
    bytes_down: int
    """All bytes that workers were sent, payload and envelope."""
    payload_up: int
    """Those of the bytes up that depend on data."""
    payload_down: int
    """Those of the bytes down that depend on data."""
    evaluations: int
    """The conditional expectations computed in this round."""
    epochs: float
    """The conditional expectations computed since the start, in units of all samples."""
    seconds: float
    """The seconds that the round took."""
    squared_h: float | None = None
    """The true |h(S)|^2 before the step; only a `Monitor` computes it, by a full pass."""
    objective: float | None = None
    """The penalised negative log-likelihood at T(S); only where it was asked for."""
    gain: float | None = None
    """What an EM step from here is worth in nats per sample, to second order: |H|^2 / 2 in the
    model's metric. Only algorithms that work in the metric tell it."""
    left: float | None = None
    """Nats per sample that EM may still gain, where the fit has an estimate of them."""


_FIELDS = {f.name: f.type for f in dataclasses.fields(RoundRecord)}


class Records(Sequence[RoundRecord]):
    """All records of a run, as a sequence and as a typed table.

    Parameters
    ----------
    records : iterable of RoundRecord
        The records, in the order of the rounds.

    Examples
    --------
    >>> import emfed
    >>> data = emfed.data.synthetic_federation(workers=4, rows_per_worker=50)
    >>> model = emfed.gaussian_mixture(2, "tied")
    >>> records = emfed.fit(model, data, "em", rounds=3).records
    >>> len(records), records.column("round")
    (4, array([0., 1., 2., 3.]))
    """

    def __init__(self, records: Iterable[RoundRecord] = ()) -> None:
        self._records = list(records)

    def append(self, record: RoundRecord) -> None:
        """Add the newest."""
        self._records.append(record)

    @overload
    def __getitem__(self, index: int) -> RoundRecord: ...
    @overload
    def __getitem__(self, index: slice) -> Records: ...
    def __getitem__(self, index: int | slice) -> RoundRecord | Records:
        if isinstance(index, slice):
            return Records(self._records[index])
        return self._records[index]

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[RoundRecord]:
        return iter(self._records)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Records) and self._records == other._records

    def __repr__(self) -> str:
        return f"<Records of {len(self)} rounds>"

    def column(self, name: str) -> FloatArray:
        """One column as floats; NaN where a value was not computed."""
        values = [getattr(record, name) for record in self._records]
        return np.array([math.nan if v is None else v for v in values], dtype=np.float64)

    def average(self, name: str) -> float:
        """The mean of a column over all rounds but the opening, where it was computed.

        For ``squared_h`` this is what the theorems bound: |h(S_K)|^2 at a round K drawn at random.
        NaN where nothing was computed: ``squared_h`` and ``objective`` need a `Monitor`.
        """
        if name not in _FIELDS:
            raise SettingsError(f"records have no column {name!r}; they have {', '.join(_FIELDS)}.")
        values = self.column(name)[self.column("round") > 0]
        values = values[np.isfinite(values)]
        return float(values.mean()) if len(values) else math.nan

    def columns(self) -> dict[str, list[Any]]:
        """All columns by name, None where a value was not computed."""
        return {name: [getattr(r, name) for r in self._records] for name in _FIELDS}

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """All columns as arrays, integers as int64; NaN where a value was not computed."""
        return {
            name: self.column(name).astype(np.int64) if kind == "int" else self.column(name)
            for name, kind in _FIELDS.items()
        }

    @classmethod
    def from_arrays(cls, arrays: dict[str, NDArray[Any]]) -> Records:
        """The inverse of `to_arrays`."""
        missing = np.full(len(arrays["round"]), np.nan)  # a column that came later
        columns = {name: arrays.get(name, missing).tolist() for name in _FIELDS}
        for name, kind in _FIELDS.items():
            if kind == "float | None":
                columns[name] = [None if math.isnan(v) else v for v in columns[name]]
        return cls.from_columns(columns)

    @classmethod
    def from_columns(cls, columns: dict[str, list[Any]]) -> Records:
        """The inverse of `columns`."""
        rows = zip(*(columns[name] for name in _FIELDS), strict=True)
        return cls(RoundRecord(*row) for row in rows)

    def to_frame(self) -> Any:
        """A polars data frame with typed columns."""
        import polars as pl

        types = {"int": pl.Int64, "float": pl.Float64, "float | None": pl.Float64}
        schema = {name: types[str(kind)] for name, kind in _FIELDS.items()}
        return pl.DataFrame(self.columns(), schema=schema)

    def to_csv(self, path: str | Path) -> None:
        """Comma-separated, with a header; empty where a value was not computed."""
        with Path(path).open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(_FIELDS)
            for record in self._records:
                writer.writerow("" if v is None else v for v in dataclasses.astuple(record))

    def to_parquet(self, path: str | Path) -> None:
        """Parquet, typed."""
        self.to_frame().write_parquet(path)
