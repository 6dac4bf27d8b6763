"""What jobs left, as arrays; and the few ways in which all experiments look at them."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, final

import numpy as np

from emfed.core.errors import DataError
from emfed.core.protocols import FloatArray
from emfed.core.storage import write_atomic
from paper.config import Job
from paper.settings import ExperimentSettings


@final
@dataclass(frozen=True, eq=False)
class Trace:
    """The records of one job; columns are floats, NaN where nothing was computed."""

    job: Job
    columns: dict[str, FloatArray]
    extra: dict[str, FloatArray] = field(default_factory=dict)
    """The trend of a table, by time."""

    @property
    def settings(self) -> ExperimentSettings:
        """The settings of a run on mixtures."""
        assert isinstance(self.job.settings, ExperimentSettings)
        return self.job.settings

    def __getitem__(self, name: str) -> FloatArray:
        return self.columns[name]

    @property
    def processor_seconds(self) -> float:
        """What the job took; 0 in files of earlier versions, which do not say."""
        return float(self.columns.get("processor_seconds", np.zeros(1))[0])

    @cached_property
    def _known(self) -> Any:
        return np.isfinite(self["squared_h"])

    def at_h(self, name: str) -> FloatArray:
        """A column where |h|^2 is known."""
        return self[name][self._known]

    @property
    def final_h(self) -> float:
        """The last |h|^2 computed."""
        return float(self.at_h("squared_h")[-1])

    @property
    def floor(self) -> float:
        """The mean |h|^2 of the last half: where a noisy run has settled."""
        values = self.at_h("squared_h")
        return float(values[len(values) // 2 :].mean())

    @property
    def flatness(self) -> float:
        """The mean |h|^2 of the last quarter over that of the quarter before: 1 at a floor."""
        values = self.at_h("squared_h")
        half, last = len(values) // 2, 3 * len(values) // 4
        return float(values[last:].mean() / values[half:last].mean())

    def first_below(self, target: float, column: str) -> float:
        """The value of a column when |h|^2 is first at or below the target; infinite if never."""
        there = np.flatnonzero(self.at_h("squared_h") <= target)
        return float(self.at_h(column)[there[0]]) if len(there) else np.inf

    def last_above(self, target: float, column: str) -> float:
        """The value of a column when |h|^2 falls below the target for good; infinite if never."""
        above = np.flatnonzero(self.at_h("squared_h") > target)
        first = int(above[-1]) + 1 if len(above) else 0
        values = self.at_h(column)
        return float(values[first]) if first < len(values) else np.inf


@final
@dataclass(frozen=True)
class Traces:
    """All traces of an experiment, in the order of its jobs."""

    all: Sequence[Trace]

    def of(self, run: str, **settings: Any) -> list[Trace]:
        """A run's traces by seed; of a run that is varied, those whose settings are these."""
        return [
            trace
            for trace in self.where(**settings)
            if trace.job.run == run or trace.job.run.startswith(f"{run}, ")
        ]

    def where(self, **settings: Any) -> list[Trace]:
        """Traces whose settings have these values, by seed."""
        return [
            trace
            for trace in self.all
            if all(getattr(trace.job.settings, name) == value for name, value in settings.items())
        ]

    def values(self, setting: str) -> list[Any]:
        """The different values of a setting, in order."""
        return list(dict.fromkeys(getattr(trace.job.settings, setting) for trace in self.all))


def each(traces: Iterable[Trace], measure: Callable[[Trace], float]) -> FloatArray:
    """A measure of every trace."""
    return np.array([measure(trace) for trace in traces])


def ratio(over: FloatArray, under: FloatArray) -> FloatArray:
    """Element by element; NaN, which no claim allows, where both are infinite."""
    with np.errstate(invalid="ignore"):
        return np.asarray(over / under)


def tracking(trace: Trace) -> float:
    """The median over rounds of |H|^2 / |h|^2: 1 where the server sees what is there."""
    return float(np.median(trace.at_h("squared_H") / trace.at_h("squared_h")))


def read_trace(job: Job, folder: Path) -> Trace:
    """Read the file that the job left."""
    import polars as pl

    try:
        frame = pl.read_parquet(folder / job.file)
    except pl.exceptions.PolarsError:
        raise DataError(
            f"{folder / job.file} is damaged: delete it, and it is computed anew."
        ) from None
    columns = {name: frame[name].to_numpy().astype(np.float64) for name in frame.columns}
    if "payload_up" in columns:
        columns["bytes_up_sum"] = np.cumsum(columns["payload_up"])
    extra: dict[str, FloatArray] = {}
    if (folder / trend_file(job)).exists():
        trend = pl.read_parquet(folder / trend_file(job))
        extra = {name: trend[name].to_numpy() for name in trend.columns}
    return Trace(job, columns, extra)


def trend_file(job: Job) -> str:
    """Where a job on a table leaves its trend."""
    return job.file.replace(".parquet", ".trend.parquet")


def write_records(traces: Traces, path: Path) -> None:
    """All records with their run and seed, as Parquet and CSV."""
    import polars as pl

    frames = [
        pl.DataFrame(
            {"run": [t.job.run] * len(t["round"]), "seed": [t.job.seed] * len(t["round"])}
            | {n: v for n, v in t.columns.items() if n != "bytes_up_sum"}
        )
        for t in traces.all
    ]
    whole = pl.concat(frames, how="diagonal")
    whole = whole.with_columns(pl.col(pl.Float64).fill_nan(None))
    write_frame(whole, path.with_suffix(".parquet"))
    write_frame(whole, path.with_suffix(".csv"))
    trends = [
        pl.DataFrame({"run": [t.job.run] * len(t.extra["time"]), "seed": t.job.seed, **t.extra})
        for t in traces.all
        if t.extra
    ]
    if trends:
        trend = pl.concat(trends, how="diagonal")
        write_frame(trend, path.with_name(f"{path.name}-trends.csv"))


def write_frame(frame: Any, path: Path) -> None:
    """Write a table of polars, as CSV or Parquet by its name, whole or not at all."""
    buffer = io.BytesIO()
    if path.suffix == ".csv":
        frame.write_csv(buffer)
    else:
        frame.write_parquet(buffer)
    write_atomic(path, buffer.getvalue())


def slope(x: Sequence[float], samples: Sequence[FloatArray]) -> FloatArray:
    """For each seed, the exponent of the power law of x that fits the samples best."""
    return np.asarray(np.polyfit(np.log(x), np.log(np.stack(samples)), 1)[0])
