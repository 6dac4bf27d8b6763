"""What a run reached, and what can be asked of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np

from fedem.datasets.reading import match_columns, read_table
from fedem.datasets.sources import ParquetRows, Source
from fedem.errors import SettingsError, check_count, check_range
from fedem.ledger import Ledger
from fedem.protocols import FloatArray, IntArray
from fedem.random import check_seed
from fedem.records import Records


@final
@dataclass(frozen=True, eq=False)
class Result:
    """What a run reached. ``params`` are in the user's units; ``model`` knows its data."""

    model: Any
    params: Any
    records: Records
    stopped: str
    """The limit that was met, ``callback`` or ``interrupted``."""
    seed: int
    statistics: FloatArray
    ledger: Ledger
    """Every byte by worker, direction and kind; payload and envelope apart."""
    columns: tuple[str, ...] | None = None
    """Names of the data's columns, where it had any."""

    def __repr__(self) -> str:
        traffic = f"{self.bytes_up} bytes up, {self.bytes_down} down"
        return f"<Result of {self.rounds} rounds, stopped by {self.stopped!r}, {traffic}>"

    @property
    def rounds(self) -> int:
        """The number of the last round."""
        return self.records[-1].round

    @property
    def bytes_up(self) -> int:
        """All bytes that workers sent."""
        return self.ledger.total("up")

    @property
    def bytes_down(self) -> int:
        """All bytes that workers were sent."""
        return self.ledger.total("down")

    @property
    def converged(self) -> bool:
        """Whether the run ended because little was left to gain, and not at another limit."""
        return self.stopped in ("nats", "tolerance")

    @property
    def guard_hits(self) -> int:
        """How often a step had to be halved to stay where T is defined."""
        return sum(record.guard_hits for record in self.records)

    def log_likelihood(self, data: Any) -> float:
        """The mean log-likelihood of rows, per sample, in the user's units."""
        return float(self.model.log_likelihood(*self._inner(data)))

    def score_samples(self, data: Any) -> FloatArray:
        """The log-likelihood of each row, in the user's units."""
        return np.asarray(self.model.score_samples(*self._inner(data)))

    def predict_proba(self, data: Any) -> FloatArray:
        """p(component | row)."""
        return np.asarray(self.model.responsibilities(*self._inner(data)))

    def predict(self, data: Any) -> IntArray:
        """The most likely component of each row."""
        return np.argmax(self.predict_proba(data), axis=-1).astype(np.int64)

    def impute(self, data: Any) -> FloatArray:
        """Rows with NaN replaced by posterior means (of categories: the likeliest code)."""
        return np.asarray(self._imputable().impute(*self._inner(data)))

    def impute_draws(self, data: Any, draws: int = 5, seed: int = 0) -> FloatArray:
        """Random completions from the posterior, ``(draws, rows, columns)``."""
        draws, seed = check_count("draws", draws), check_seed(seed)
        return np.asarray(self._imputable().draw(*self._inner(data), draws, seed))

    def impute_intervals(self, data: Any, level: float = 0.9) -> tuple[FloatArray, FloatArray]:
        """Lower and upper ends of central predictive intervals of what is NaN."""
        check_range("level", level, 0, 1, open_low=True, open_high=True)
        return self._imputable().intervals(*self._inner(data), level)

    def _imputable(self) -> Any:
        if not hasattr(self.model, "impute"):
            raise SettingsError(
                "this model has no missing values to impute: use mixed_mixture(...) or "
                "gaussian_mixture(..., missing=True)."
            )
        return self.model

    def _inner(self, data: Any) -> tuple[Any, Any]:
        """Checked rows, and the parameters in the units of the statistics.

        Columns that the fit did not have, such as the workers' names, are left out.
        """
        if isinstance(data, (str, Path)):
            data = ParquetRows(data, self.columns)
        if isinstance(data, Source):
            data = data.read(0, data.shape[0])
        elif self.columns is not None and set(self.columns) < set(getattr(data, "columns", ())):
            data = data[list(self.columns)]
        rows, columns = read_table(data, "the data")
        if columns is not None and self.columns is not None:
            rows = match_columns(rows, columns, self.columns, "the data")
        self.model.check(rows, "the data", self.columns or columns)
        return rows, self.model.maximize(self.statistics)
