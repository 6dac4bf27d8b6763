"""What an imputation gives: estimates, trends, intervals, draws; written on request."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, final

import numpy as np
from scipy.special import ndtri

from emfed.artifacts.result import Result
from emfed.core.errors import DataError, SettingsError, check_count, check_range
from emfed.core.ledger import Ledger
from emfed.core.protocols import FloatArray, IntArray
from emfed.core.records import Records
from emfed.core.streams import Purpose, normals, uniforms
from emfed.imputation.choice import Choice
from emfed.imputation.lowrank import Cells, TableParameters
from emfed.imputation.rows import newton
from emfed.imputation.sweeps import Solver
from emfed.imputation.table import FieldTable
from emfed.models.sides import Side

_CHUNK = 1 << 20
"""Cells computed at once."""
_STRATA = 200
_ZERO = np.zeros(1, dtype=np.int64)
GIBBS = 5
"""Sweeps between draws."""
NEWTON = 3
"""Damped steps to the mode that a draw is made about."""


@final
class Uncertainty:
    """How sure a fit is: what the cells say about each row, given the rows of the other side.

    The penalties are read as a prior: rows of sites and times are Gaussian with the penalty as
    precision, in units of the dispersion.
    """

    def __init__(self, solver: Solver, cells: Cells, params: TableParameters) -> None:
        self.solver, self.cells, self.params = solver, cells, params
        if cells.size == 0:
            raise DataError(
                "no cell is known here, so how sure an estimate is cannot be told: an owner's "
                "table, `transform(table)`, has what it takes."
            )
        theta = params.theta(cells.sites, cells.times)
        gain = cells.weights * solver.family.variance(theta)
        freedom = 1.0
        blocks = []
        sides = solver.sides(cells, params)
        for side, rows in zip(sides, (params.sites, params.times), strict=True):
            information = side.information(gain, len(rows))
            precision = information + np.diag(side.ridge + 1e-9)
            for lag, strength in side.lags:  # neighbours held fixed
                tied = np.zeros(len(rows))
                tied[lag:] += strength
                tied[:-lag] += strength
                precision = precision + tied[:, None, None] * np.eye(rows.shape[1])
            covariance = np.linalg.inv(precision) if rows.shape[1] else precision
            freedom += float(np.einsum("jik,jki->", covariance, information))
            blocks.append(covariance)
        self._sites, self._times = blocks
        score = cells.sums - cells.weights * solver.family.mean(theta)
        left = max(cells.size - freedom, 0.1 * cells.size)
        pearson = float((score**2 / np.maximum(gain, 1e-12)).sum() / left)
        self.dispersion = self._clean(pearson)

    def _clean(self, pearson: float) -> float:
        """A Bernoulli cell has none of its own; a Poisson one is not below 1."""
        if self.solver.family.name == "bernoulli":
            return 1.0
        return pearson if self.solver.family.quadratic else max(1.0, pearson)

    def variance(self, sites: IntArray, times: IntArray) -> FloatArray:
        """The variance of theta at these cells, each side given the other."""
        left = _regressors(self.params.times, self.params.effects)[times]
        right = _regressors(self.params.sites, self.params.effects)[sites]
        total = np.einsum("ni,nij,nj->n", left, self._sites[sites], left)
        total += np.einsum("ni,nij,nj->n", right, self._times[times], right)
        return self.dispersion * total

    def draw(self, params: TableParameters, seed: int, index: int) -> TableParameters:
        """Further Gibbs sweeps from ``params``: for the Gaussian, exact conditional draws."""
        for sweep in range(GIBBS):
            place = 2 * (GIBBS * index + sweep)
            site, _ = self.solver.sides(self.cells, params)
            params = replace(params, sites=self._conditional(site, params, True, seed, place))
            _, time = self.solver.sides(self.cells, params)
            params = replace(params, times=self._conditional(time, params, False, seed, place + 1))
        return params

    def _conditional(
        self, side: Side, params: TableParameters, of_sites: bool, seed: int, place: int
    ) -> FloatArray:
        """One side's rows drawn given the other's: about their mode, with its curvature."""
        cells, family = self.cells, self.solver.family
        rows = params.sites if of_sites else params.times
        theta = params.theta(cells.sites, cells.times)
        if not family.quadratic:  # an undamped step from a draw far out would run away
            rest = theta - side.contribution(rows)
            for _ in range(NEWTON):
                rows = newton(side, family, rows, rest, cells.weights, cells.sums)
            theta = rest + side.contribution(rows)
        score = cells.sums - cells.weights * family.mean(theta)
        information = side.information(cells.weights * family.variance(theta), len(rows))
        step = side.gradient(score, rows) if family.quadratic else np.zeros_like(rows)
        noise = normals(seed, place, Purpose.IMPUTATION, _ZERO, max(1, rows.size))[0]
        noise = np.sqrt(self.dispersion) * noise[: rows.size].reshape(rows.shape)
        return rows + side.solve(information, step, noise)


def _regressors(rows: FloatArray, effects: bool) -> FloatArray:
    """What the other side's rows are multiplied by: factors, and 1 for the effect."""
    out = rows.copy()
    if effects:
        out[:, -1] = 1.0
    return out


@final
@dataclass(frozen=True, eq=False)
class Imputation:
    """A fitted table. Estimates are in the user's scale: counts, or probabilities of presence."""

    mode: str
    params: TableParameters
    solver: Solver
    table: FieldTable
    cells: Cells = field(repr=False)
    """Weights and sums of cells as the server knows them."""
    records: Records
    ledger: Ledger
    stopped: str
    seed: int
    choice: Choice | None = None
    result: Result | None = None
    """Of mode ``site-owner``: what a model file for the owners holds; see `from_result`."""

    def __repr__(self) -> str:
        rows, columns = self.params.shape
        return (
            f"<Imputation of {rows} sites x {columns} {self.table.bins.unit}s, mode {self.mode!r}, "
            f"rank {self.params.rank}, {self.rounds} rounds, {self.bytes_up} bytes up>"
        )

    @property
    def rounds(self) -> int:
        """The number of the last round."""
        return self.records[-1].round

    @property
    def bytes_up(self) -> int:
        """All bytes that workers sent, the opening included."""
        return self.ledger.total("up")

    @property
    def bytes_down(self) -> int:
        """All bytes that workers were sent."""
        return self.ledger.total("down")

    @cached_property
    def uncertainty(self) -> Uncertainty:
        """Dispersion, variances and draws."""
        return Uncertainty(self.solver, self.cells, self.params)

    @property
    def dispersion(self) -> float:
        """The variance of one observation (Gaussian), or its multiple of the family's."""
        return self.uncertainty.dispersion

    def theta(self, sites: Any, times: Any) -> FloatArray:
        """The natural parameter at cells named by site and time, or by their indices."""
        return self.params.theta(*self._indices(sites, times))

    def predict(self, sites: Any, times: Any) -> FloatArray:
        """The estimate at cells named by site and time, or by their indices.

        Under log1p this is the median count; for Bernoulli the probability of presence.
        """
        return self._estimate(self.theta(sites, times))

    def _estimate(self, theta: FloatArray) -> FloatArray:
        family = self.solver.family
        return family.backward(family.mean(theta)) if family.quadratic else family.mean(theta)

    def score(self, held: Cells) -> float:
        """The root mean squared error of cells that were held out, in the family's scale.

        For Poisson and Bernoulli the square root of the mean deviance.
        """
        theta = self.params.theta(held.sites, held.times)
        deviance = self.solver.family.deviance(theta, held.sums, held.weights)
        return float(np.sqrt(2 * deviance.sum() / held.weights.sum()))

    def intervals(
        self, sites: Any, times: Any, level: float = 0.9
    ) -> tuple[FloatArray, FloatArray]:
        """Where a new record of each cell lies with probability ``level``, approximately."""
        check_range("level", level, 0, 1, open_low=True, open_high=True)
        rows, columns = self._indices(sites, times)
        theta = self.params.theta(rows, columns)
        spread = self.uncertainty.variance(rows, columns)
        family, tails = self.solver.family, ((1 - level) / 2, (1 + level) / 2)
        if family.quadratic:
            half = float(ndtri(tails[1])) * np.sqrt(spread + self.dispersion)
            return family.backward(theta - half), family.backward(theta + half)
        # theta is normal and the record follows the family: a sample over equal strata of both.
        middle = (np.arange(_STRATA) + 0.5) / _STRATA
        order = np.argsort(uniforms(self.seed, 0, Purpose.IMPUTATION, _ZERO, _STRATA)[0])
        shifts, draws = np.asarray(ndtri(middle)), middle[order]
        sample = np.stack(
            [
                family.draw(theta + np.sqrt(spread) * z, self.dispersion, np.full(len(theta), u))
                for z, u in zip(shifts, draws, strict=True)
            ]
        )
        low, high = np.quantile(sample, tails, axis=0, method="inverted_cdf")
        return low, high

    def draws(self, sites: Any, times: Any, count: int = 20) -> FloatArray:
        """Multiple imputation: ``count`` sets of records that these cells might have held.

        Parameters are drawn from their approximate posterior (Gibbs sweeps), then records.
        """
        check_count("count", count)
        rows, columns = self._indices(sites, times)
        out = np.empty((count, len(rows)))
        for index, params in enumerate(self._parameters(count)):
            u = uniforms(self.seed, index, Purpose.FIELD_RECORDS, _ZERO, len(rows))[0]
            theta = params.theta(rows, columns)
            out[index] = self.solver.family.draw(theta, self.dispersion, u)
        return out

    def _parameters(self, count: int) -> Iterator[TableParameters]:
        """A chain of parameters from the fit on."""
        params = self.params
        for index in range(count):
            params = self.uncertainty.draw(params, self.seed, index)
            yield params

    def trend(self, draws: int = 0, level: float = 0.9) -> dict[str, Any]:
        """The sum of estimates over all sites, and the cells without a record, by time.

        With ``draws``, bounds ``lower`` and ``upper`` from so many draws of the parameters. Sites
        are taken some at a time: the table is never there as a whole.
        """
        rows, columns = self.params.shape
        seen = np.bincount(self.cells.times[self.cells.weights > 0], minlength=columns)
        out: dict[str, Any] = {
            "time": self.table.bins.labels(),
            "estimate": self._sum(self.params),
            "missing": (rows - seen).astype(np.int64),
        }
        if draws:
            check_count("draws", draws, 2)
            check_range("level", level, 0, 1, open_low=True, open_high=True)
            sums = np.stack([self._sum(params) for params in self._parameters(draws)])
            out["lower"], out["upper"] = np.quantile(
                sums, ((1 - level) / 2, (1 + level) / 2), axis=0
            )
        return out

    def write_trend(self, paths: Iterable[str | Path], draws: int = 0, level: float = 0.9) -> None:
        """The trend as CSV or Parquet, by the ending of each path."""
        import polars as pl

        frame = pl.DataFrame(self.trend(draws, level))
        for path in map(Path, paths):
            if path.suffix == ".parquet":
                frame.write_parquet(path)
            elif path.suffix == ".csv":
                frame.write_csv(path)
            else:
                raise SettingsError(f"{path}: expected a name that ends in .csv or .parquet.")

    def _sum(self, params: TableParameters) -> FloatArray:
        """Estimates added over sites, by time."""
        total = np.zeros(params.shape[1])
        for sites in self._site_chunks():
            total += self._estimate(params.dense(sites).ravel()).reshape(len(sites), -1).sum(axis=0)
        return total

    def _site_chunks(self) -> Iterator[IntArray]:
        rows, columns = self.params.shape
        size = max(1, _CHUNK // columns)
        for start in range(0, rows, size):
            yield np.arange(start, min(start + size, rows))

    def frames(self, level: float | None = None) -> Iterator[Any]:
        """The filled table as long polars frames, some sites at a time.

        Columns: site, time, records (their number or exposure), observed (their mean), estimate
        and, with a ``level``, lower and upper.
        """
        import polars as pl

        columns = self.params.shape[1]
        labels = np.array(self.table.bins.labels())
        names = np.array(self.table.sites, dtype=object)
        own = self.cells.keys
        for sites in self._site_chunks():
            row, time = np.repeat(sites, columns), np.tile(np.arange(columns), len(sites))
            keys = row * columns + time
            place = np.minimum(np.searchsorted(own, keys), len(own) - 1)
            seen = own[place] == keys
            weight = np.where(seen, self.cells.weights[place], 0.0)
            safe = np.where(weight > 0, weight, 1.0)
            mean = np.where(seen, self.cells.sums[place] / safe, np.nan)
            data = {
                "site": names[row].tolist(),
                "time": labels[time].tolist(),
                "records": weight,
                "observed": np.where(seen, self.solver.family.backward(mean), np.nan),
                "estimate": self._estimate(self.params.theta(row, time)),
            }
            if level is not None:
                data["lower"], data["upper"] = self.intervals(row, time, level)
            yield pl.DataFrame(data).with_columns(pl.col("observed").fill_nan(None))

    def write(self, path: str | Path, level: float | None = None) -> None:
        """The filled table as CSV or Parquet, streamed: site, time, records, observed, estimate."""
        path = Path(path)
        if path.suffix == ".csv":
            with path.open("wb") as file:
                for number, frame in enumerate(self.frames(level)):
                    frame.write_csv(file, include_header=number == 0)
        elif path.suffix == ".parquet":
            import polars as pl

            pl.concat([frame.lazy() for frame in self.frames(level)]).sink_parquet(path)
        else:
            raise SettingsError(f"{path}: expected a name that ends in .csv or .parquet.")

    def _indices(self, sites: Any, times: Any) -> tuple[IntArray, IntArray]:
        """Sites and times as indices, of one length."""
        rows = _lookup(sites, self._site_places, len(self.table.sites), "site")
        columns = _lookup(times, self._time_places, self.table.bins.count, "time")
        rows, columns = np.broadcast_arrays(rows, columns)
        return rows.ravel(), columns.ravel()

    @cached_property
    def _site_places(self) -> dict[str, int]:
        return {name: index for index, name in enumerate(self.table.sites)}

    @cached_property
    def _time_places(self) -> dict[str, int]:
        return {name: index for index, name in enumerate(self.table.bins.labels())}

    def transform(self, table: FieldTable) -> Imputation:
        """The fit carried to other sites or dates, without moving what was fitted.

        Sites of ``table`` that the fit has no records of get rows from their own records and the
        fitted times. Dates outside the fit continue it by the penalties along time, which the model
        must have (``smoothing`` or ``seasonality``).
        """
        from emfed.imputation.extend import extend

        params, merged = extend(self.solver, self.params, self.table, table)
        return replace(self, params=params, table=merged, cells=merged.pooled)


def _lookup(values: Any, places: dict[str, int], size: int, what: str) -> IntArray:
    """Names or indices as indices."""
    array = np.atleast_1d(np.asarray(values))
    if array.dtype.kind in "iu":
        if array.size and (array.min() < 0 or array.max() >= size):
            raise DataError(f"{what} indices must lie in 0..{size - 1}; got {array.max()}.")
        return array.astype(np.int64)
    try:
        return np.array([places[str(name)] for name in array.ravel()], dtype=np.int64)
    except KeyError as error:
        raise DataError(
            f"no {what} {error.args[0]!r}; the first is {next(iter(places))!r}."
        ) from None
