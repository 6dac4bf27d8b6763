"""What an imputation gives: estimates, trends, intervals, draws; written on request."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, final

import numpy as np

from emfed.artifacts.result import Result
from emfed.core.errors import DataError, SettingsError, check_count, check_range
from emfed.core.ledger import Ledger
from emfed.core.protocols import BoolArray, FloatArray, IntArray, plural
from emfed.core.records import Records
from emfed.core.streams import Purpose, uniform_row
from emfed.imputation.choice import Choice
from emfed.imputation.families import CellMoments
from emfed.imputation.index import Index, index_of, write_frame
from emfed.imputation.lowrank import Cells, TableParameters, in_parts
from emfed.imputation.posterior import Posterior
from emfed.imputation.sweeps import Solver
from emfed.imputation.table import FieldTable

Of = Literal["record", "mean"]


@final
@dataclass(frozen=True, eq=False)
class Imputation:
    """A fitted table, with estimates in the user's scale: counts, or reporting rates (Bernoulli).

    Estimates and bounds are those of the posterior about the optimum (`Posterior`): an estimate is
    the mean of what a new record may be, so that estimates add up to totals; medians are there
    where they are asked for.

    Examples
    --------
    >>> import emfed
    >>> from emfed.imputation import simulate_table
    >>> table = simulate_table(600, observers=40, sites=12, months=24, groups=4, seed=0)
    >>> fit = emfed.impute(table, rank=1, penalty=3.0, draws=10)
    >>> fit.predict(["site00", "site01"], 0).shape
    (2,)
    """

    mode: str
    """The mode of the fit."""
    params: TableParameters
    """The optimum."""
    solver: Solver
    """What fits cells, with its family and structure."""
    table: FieldTable
    """The table that was fitted."""
    cells: Cells = field(repr=False)
    """The weights and sums of cells as the server knows them."""
    records: Records
    """One record for each round; a single one where workers sent sums once."""
    ledger: Ledger
    """Every byte by worker, direction and kind."""
    stopped: str
    """The limit that was met, "callback" or "interrupted"; "fitted" where workers sent sums
    once."""
    seed: int
    """The seed of the fit."""
    choice: Choice | None = None
    """The structures that were tried, where one was chosen."""
    result: Result | None = None
    """In mode "site-owner", what a model file for the owners holds; see `from_result`."""
    draw_count: int = 0
    """How many draws estimates and bounds rest on; 0 leaves it to the size of the table."""

    def __repr__(self) -> str:
        rows, columns = self.params.shape
        return (
            f"<Imputation of {rows} sites x {columns} {self.table.bins.unit}s, mode {self.mode!r}, "
            f"rank {self.params.rank}, {plural(self.rounds, 'round')}, {self.bytes_up} bytes up>"
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
    def posterior(self) -> Posterior:
        """Draws of everything that was estimated; made when they are first asked for."""
        return self._drawn(self.draw_count)

    def _drawn(self, count: int, progress: Callable[[str, float], None] | None = None) -> Posterior:
        given = self.solver, self.cells, self.params, self.seed
        drawn = Posterior(*given, count, progress)
        if self.table.effort is not None and self.table.effort_parts is not None:
            drawn.move(*self.table.effort_parts, self.table.effort.covariance)
        return drawn

    def sampled(self, progress: Callable[[str, float], None] | None = None) -> Imputation:
        """Make the draws, and say how far they are.

        Ctrl-C keeps the estimates of the optimum, without bounds.

        Parameters
        ----------
        progress : callable, optional
            A function of what is done, in words, and the share that is done.

        Returns
        -------
        Imputation
            The same with its draws made.
        """
        if self.plain:
            return self
        try:
            drawn = self._drawn(self.draw_count, progress)
        except KeyboardInterrupt:
            return replace(self, stopped="interrupted")
        self.__dict__["posterior"] = drawn  # where the cached property keeps it
        return self

    def coefficients(self) -> list[dict[str, Any]]:
        """Tell the standardised coefficients of covariates, with errors and bounds.

        Returns
        -------
        list of dict
            One entry for each covariate.
        """
        drawn = self.posterior.coefficients
        names = self.params.covariates.names or tuple(map(str, range(drawn.shape[1])))
        low, high = np.quantile(drawn, (0.025, 0.975), axis=0) if drawn.size else ((), ())
        rows = zip(names, drawn.mean(axis=0), drawn.std(axis=0, ddof=1), low, high, strict=True)
        keys = ("name", "coefficient", "error", "lower", "upper")
        return [dict(zip(keys, (row[0], *map(float, row[1:])), strict=True)) for row in rows]

    @property
    def spread(self) -> float:
        """The variance of one record (Gaussian), or a in the variance mu + a mu^2 of counts.

        Under family "poisson" it is that of counts like the median of the fit.
        """
        return self.posterior.spread

    @property
    def plain(self) -> bool:
        """Whether estimates are those of the optimum: as printed, cut short, or without a cell."""
        return self.mode == "paper" or self.stopped == "interrupted" or self.cells.size == 0

    def _moments(self, rows: IntArray, columns: IntArray) -> CellMoments:
        if not self.plain:
            return self.posterior.moments(rows, columns)
        return self._at(self.params.theta(rows, columns))

    def moments_of(self, sites: IntArray) -> CellMoments:
        """Compute means and variances of theta and of the expected record, at all times.

        Parameters
        ----------
        sites : array of int
            The indices of the sites.

        Returns
        -------
        CellMoments
            The means and variances, one row for each site.
        """
        return (
            self._at(self.params.dense(sites))
            if self.plain
            else self.posterior.dense_moments(sites)
        )

    def _at(self, theta: FloatArray) -> CellMoments:
        """At the optimum, as if it were sure."""
        sure = np.zeros_like(theta)
        return CellMoments(theta, sure, self.solver.family.value(theta, self._spread()), sure)

    def theta(self, sites: Any, times: Any) -> FloatArray:
        """Compute the natural parameter at cells named by site and time, or by their indices.

        Parameters
        ----------
        sites : str, int or sequence of these
            The sites, by name or index.
        times : str, int or sequence of these
            The times, by label or index; one for each site, or one for all.

        Returns
        -------
        array
            The natural parameters.
        """
        return self.params.theta(*self._indices(sites, times))

    def predict(
        self, sites: Any, times: Any, statistic: Literal["mean", "median"] = "mean"
    ) -> FloatArray:
        """Estimate cells named by site and time, or by their indices.

        Parameters
        ----------
        sites : str, int or sequence of these
            The sites, by name or index.
        times : str, int or sequence of these
            The times, by label or index; one for each site, or one for all.
        statistic : {"mean", "median"}
            Whether the estimate is the mean of a new record, or its median. For Bernoulli the mean
            is the reporting rate: how often a record reports the species, not how likely the
            species is there.

        Returns
        -------
        array
            The estimates.
        """
        if statistic not in ("mean", "median"):
            raise SettingsError(f"statistic must be 'mean' or 'median'; got {statistic!r}.")
        at = self._moments(*self._indices(sites, times))
        if statistic == "mean":
            return at.value
        spread = self._spread() if self.plain else self.posterior.spread_at(at.theta)
        return self.solver.family.quantiles(at, spread, (0.5, 0.5))[0]

    def _spread(self) -> float:
        if not self.plain:
            return self.posterior.spread
        cells, family = self.cells, self.solver.family
        if cells.size == 0 or not family.quadratic:
            return 0.0
        theta = self.params.theta(cells.sites, cells.times)
        return float(np.mean(2 * family.deviance(theta, cells.sums, cells.weights)))

    def score(self, held: Cells) -> float:
        """Compute the root mean squared error of cells that were held out, in the family's scale.

        For Poisson and Bernoulli it is the square root of the mean deviance.

        Parameters
        ----------
        held : Cells
            The cells that were held out, as `FieldTable.split` gives them.

        Returns
        -------
        float
            The error.
        """
        theta = self.params.theta(held.sites, held.times)
        deviance = self.solver.family.deviance(theta, held.sums, held.weights)
        return float(np.sqrt(2 * deviance.sum() / held.weights.sum()))

    def intervals(
        self, sites: Any, times: Any, level: float = 0.9, of: Of | None = None
    ) -> tuple[FloatArray, FloatArray]:
        """Compute where a new record of each cell, or its mean, lies with probability ``level``.

        Parameters
        ----------
        sites : str, int or sequence of these
            The sites, by name or index.
        times : str, int or sequence of these
            The times, by label or index; one for each site, or one for all.
        level : float
            The probability of an interval.
        of : {"record", "mean"} or None
            What the interval is of. Left out it is the record; under Bernoulli, whose records are 0
            or 1 and nothing between, the mean.

        Returns
        -------
        tuple of two arrays
            The lower and the upper ends.
        """
        check_range("level", level, 0, 1, open_low=True, open_high=True)
        return self._bounds(self.posterior.moments(*self._indices(sites, times)), level, of)

    def _bounds(
        self, at: CellMoments, level: float, of: Of | None = None
    ) -> tuple[FloatArray, FloatArray]:
        family = self.solver.family
        if of not in ("record", "mean", None):
            raise SettingsError(f"of must be 'record' or 'mean'; got {of!r}.")
        if of == "record" or (of is None and family.name != "bernoulli"):
            spread = self.posterior.spread_at(at.theta)
            return family.quantiles(at, spread, ((1 - level) / 2, (1 + level) / 2))
        half = self.posterior.reach(level) * np.sqrt(at.variance)
        middle, most = self.posterior.spread, self.posterior.largest
        low, high = (family.value(at.theta + side, middle) for side in (-half, half))
        return np.minimum(low, most), np.minimum(high, most)

    def draws(self, sites: Any, times: Any, count: int = 20) -> FloatArray:
        """Draw sets of records that these cells might have held: multiple imputation.

        Parameters are taken from the posterior, evenly along its chain, then records are drawn.

        Parameters
        ----------
        sites : str, int or sequence of these
            The sites, by name or index.
        times : str, int or sequence of these
            The times, by label or index; one for each site, or one for all.
        count : int
            The number of sets.

        Returns
        -------
        array of shape (count, cells)
            The records.
        """
        check_count("count", count)
        rows, columns = self._indices(sites, times)
        out = np.empty((count, len(rows)))
        posterior = self.posterior
        if count > posterior.count:
            posterior = self._drawn(count)
        places = np.linspace(0, posterior.count - 1, count).round().astype(np.int64)
        for index, place in enumerate(places):
            u = uniform_row(self.seed, index, Purpose.FIELD_RECORDS, len(rows))
            theta = posterior.params(place).theta(rows, columns)
            theta = posterior.capped(theta)
            out[index] = self.solver.family.draw(theta, posterior.spread_at(theta, place), u)
        return out

    @property
    def empty(self) -> BoolArray:
        """The times that no record is of."""
        seen = np.bincount(self.cells.times[self.cells.weights > 0], minlength=self.params.shape[1])
        return seen == 0

    def trend(self, level: float = 0.9) -> dict[str, Any]:
        """Add the estimates up over all sites, and count the cells without a record, by time.

        Sites are taken some at a time: the table is never there as a whole.

        Parameters
        ----------
        level : float
            The probability of the bounds.

        Returns
        -------
        dict
            The columns time, estimate, missing, ``empty`` (times without any record, whose
            estimates rest on their neighbours alone), and ``lower`` and ``upper`` of the sum of
            means.
        """
        check_range("level", level, 0, 1, open_low=True, open_high=True)
        rows, columns = self.params.shape
        seen = np.bincount(self.cells.times[self.cells.weights > 0], minlength=columns)
        estimate = np.zeros(columns)
        for sites in self._site_parts():
            estimate += self.moments_of(sites).value.sum(axis=0)
        out: dict[str, Any] = {
            "time": self.table.bins.labels(),
            "estimate": estimate,
            "missing": (rows - seen).astype(np.int64),
            "empty": self.empty,
        }
        if not self.plain:
            sums = self.posterior.totals(np.arange(rows))
            out["lower"], out["upper"] = self.posterior.bounds(sums, level, self.empty)
        return out

    def site_totals(self, level: float = 0.9) -> dict[str, Any]:
        """Add the estimates up over the times that have records, by site.

        Parameters
        ----------
        level : float
            The probability of the bounds.

        Returns
        -------
        dict
            The columns site, estimate, lower and upper.
        """
        check_range("level", level, 0, 1, open_low=True, open_high=True)
        times = np.flatnonzero(~self.empty)
        estimate = np.empty(self.params.shape[0])
        for sites in self._site_parts():
            estimate[sites] = self.moments_of(sites).value[:, times].sum(axis=1)
        low, high = self.posterior.bounds(self.posterior.site_totals(times), level)
        names = list(self.table.sites)
        return {"site": names, "estimate": estimate, "lower": low, "upper": high}

    def index(
        self,
        base: str | int | None = None,
        level: float = 0.9,
        *,
        strata: Any = None,
        least: int = 1,
    ) -> Index:
        """Compute totals in per cent of a base time, as rtrim gives them, with errors and a slope.

        Parameters
        ----------
        base : str or int, optional
            The time that is 100, by its label or number; the first with a record if left out.
        level : float
            The probability of the bounds.
        strata : mapping, sequence or data frame, optional
            A stratum of each site (a frame has ``site`` and one more column); each has an index of
            its own beside that of all sites.
        least : int
            Sites with fewer records are left out.

        Returns
        -------
        Index
            The totals, the index and the slopes.
        """
        return index_of(self, self.posterior, base, level, strata, least)

    def write_trend(self, paths: Iterable[str | Path], level: float = 0.9) -> None:
        """Write the trend as CSV or Parquet, by the ending of each path.

        Parameters
        ----------
        paths : iterable of str or Path
            Where it is written.
        level : float
            The probability of the bounds.
        """
        import polars as pl

        frame = pl.DataFrame(self.trend(level=level))
        for path in paths:
            write_frame(frame, Path(path))

    def _site_parts(self) -> list[IntArray]:
        rows, columns = self.params.shape
        return in_parts(np.arange(rows), columns)

    def frames(self, level: float | None = None) -> Iterator[Any]:
        """Give the filled table as long polars frames, some sites at a time.

        Parameters
        ----------
        level : float, optional
            The probability of the bounds; without it there are none.

        Yields
        ------
        polars.DataFrame
            The columns site, time, records (their number or exposure), observed (their mean),
            estimate and, with a ``level``, lower and upper of a new record, and those of the mean.
        """
        import polars as pl

        columns = self.params.shape[1]
        labels = np.array(self.table.bins.labels())
        names = np.array(self.table.sites, dtype=object)
        own = self.cells.keys
        for sites in self._site_parts():
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
            }
            at = self.moments_of(sites).ravel()
            data["estimate"] = at.value
            if level is not None and not self.plain:
                data["lower"], data["upper"] = self._bounds(at, level)
                of_mean = self._bounds(at, level, "mean")
                data["mean_lower"], data["mean_upper"] = of_mean
            yield pl.DataFrame(data).with_columns(pl.col("observed").fill_nan(None))

    def write(self, path: str | Path, level: float | None = None) -> None:
        """Write the filled table as CSV or Parquet, some sites at a time.

        Parameters
        ----------
        path : str or Path
            Where it is written; its ending says how.
        level : float, optional
            The probability of the bounds; without it there are none.
        """
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
        """Carry the fit to other sites or dates, without moving what was fitted.

        Sites of ``table`` that the fit has no records of get rows from their own records and the
        fitted times. Dates outside the fit continue it by the penalties along time, which the model
        must have (``smoothing`` or ``seasonality``).

        Parameters
        ----------
        table : FieldTable
            The records of the other sites or dates.

        Returns
        -------
        Imputation
            The fit with these sites and dates.
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
