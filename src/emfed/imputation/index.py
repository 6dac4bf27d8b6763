"""An index of totals as rtrim gives it: a base time at 100, errors, an overall slope and its class.

A total is what was observed where there is a record, and what is expected elsewhere. Its error
comes from draws of the parameters, and from how far records of missing cells would have varied.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import numpy as np
from scipy.special import ndtri

from emfed.artifacts.figures import Figure, Panel, Series, render
from emfed.core.errors import DataError, SettingsError, check_count, check_range
from emfed.core.protocols import FloatArray, IntArray
from emfed.core.streams import Purpose, normal_row
from emfed.imputation.bins import Bins
from emfed.imputation.lowrank import in_parts
from emfed.imputation.posterior import Posterior
from emfed.models.sides import add_up

if TYPE_CHECKING:
    from emfed.imputation.result import Imputation

ALL = "all"
"""The name of the stratum of all sites."""
NO_SLOPE = "no slope"
"""The class where fewer than three times, or no season twice, leave nothing to compare."""
PER_YEAR = {"year": 1.0, "month": 12.0, "week": 365.25 / 7, "index": 1.0}


@final
@dataclass(frozen=True, eq=False)
class Index:
    """Totals and index by stratum and time, and the slope of each stratum.

    Examples
    --------
    >>> import emfed
    >>> from emfed.imputation import simulate_table
    >>> table = simulate_table(600, observers=40, sites=12, months=24, groups=4, seed=0)
    >>> fit = emfed.impute(table, rank=1, penalty=3.0, draws=10)
    >>> index = fit.index()
    >>> round(float(index.table["index"][0]))
    100
    """

    table: dict[str, Any]
    """The columns stratum, time, total, total_error, index, error, lower, upper, observed and
    empty."""
    slopes: list[dict[str, Any]]
    """For each stratum the yearly factor (``slope``), its error, bounds at 95%, and the class.
    Totals of months and weeks are compared with the same season of other years alone; within one
    year there is no slope."""
    base: str
    """The time that is 100."""
    per: str = "year"
    """What a slope is of: a "year", or a "step" where times are numbers."""

    def __getitem__(self, column: str) -> Any:
        return self.table[column]

    def frame(self) -> Any:
        """The table as a polars frame."""
        import polars as pl

        return pl.DataFrame(self.table)

    def write(self, paths: str | Path | Iterable[str | Path]) -> None:
        """Write CSV, Parquet or a figure (PNG, SVG, PDF), by the ending of each path."""
        some = [paths] if isinstance(paths, (str, Path)) else list(paths)
        for path in map(Path, some):
            if path.suffix in (".png", ".svg", ".pdf"):
                path.write_bytes(render(self.figure(), path.suffix[1:]))
            else:
                write_frame(self.frame(), path)

    def words(self, slope: Mapping[str, Any]) -> str:
        """A slope in words: its class, the factor and its error."""
        if not np.isfinite(slope["slope"]):
            return NO_SLOPE
        return f"{slope['class']}, {slope['slope']:.3f} ± {slope['error']:.3f} a {self.per}"

    def figure(self) -> Figure:
        """The index with its bounds; times without any record are grey."""
        panels = []
        names = list(dict.fromkeys(self.table["stratum"]))
        for name, slope in zip(names, self.slopes, strict=True):
            own = np.array([s == name for s in self.table["stratum"]])
            labels = np.array(self.table["time"])[own]
            x = np.array([axis_place(label) for label in labels])
            y, low, high, empty = (
                np.asarray(self.table[c])[own] for c in ("index", "lower", "upper", "empty")
            )
            shown = np.where(empty, np.nan, y)
            series = [Series("index", x, shown, np.where(empty, np.nan, low), high, points=True)]
            if empty.any():
                series.append(
                    Series("no record", x[empty], y[empty], points=True, line=False, reference=True)
                )
            title = f"{name}: {self.words(slope)}"
            along = f"index ({self.base} = 100)"
            panels.append(Panel(series, "time", along, title, log="", whole="x"))
        caption = f"Totals in per cent of {self.base}, with bounds: observed where there is a "
        caption += "record, estimated elsewhere."
        return Figure(caption, panels, apart=True)


def write_frame(frame: Any, path: Path) -> None:
    """A polars frame as CSV or Parquet, by the ending of the path."""
    if path.suffix == ".parquet":
        frame.write_parquet(path)
    elif path.suffix == ".csv":
        frame.write_csv(path)
    else:
        raise SettingsError(f"{path}: expected a name that ends in .csv or .parquet.")


def index_of(
    fit: Imputation,
    posterior: Posterior,
    base: str | int | None = None,
    level: float = 0.9,
    strata: Any = None,
    least: int = 1,
) -> Index:
    """The index of a fit; see `Imputation.index`."""
    check_range("level", level, 0, 1, open_low=True, open_high=True)
    check_count("least", least, 0)
    labels, empty = fit.table.bins.labels(), fit.empty
    origin = _origin(labels, base, empty | _without_any(fit))
    groups = _strata(strata, fit.table.sites)
    records = np.bincount(fit.cells.sites, fit.cells.weights, minlength=len(fit.table.sites))
    table: dict[str, list[Any]] = {}
    slopes = []
    for name, sites in groups.items():
        kept = sites[records[sites] >= least]
        if len(kept) == 0:
            raise DataError(f"stratum {name!r} has no site with {least} records or more.")
        estimate, sums, observed = totals(fit, posterior, kept)
        _check_totals(name, estimate, labels, origin)
        # Where every site was seen and none counted anything the index is 0 without error;
        # a line through logarithms takes what was expected there.
        none, expected = estimate <= 0, posterior.totals(kept)
        sums[:, none] = expected[:, none]
        scale = np.log(np.maximum(sums, 1e-12))
        relative = np.where(none, 0.0, scale - scale[:, [origin]])
        half = float(ndtri((1 + level) / 2)) * relative.std(axis=0, ddof=1)
        middle = np.full(len(estimate), -np.inf)
        np.log(estimate / estimate[origin], out=middle, where=~none)
        columns = {
            "stratum": [name] * len(labels),
            "time": labels,
            "total": estimate,
            "total_error": np.where(none, 0.0, sums.std(axis=0, ddof=1)),
            "index": 100 * np.exp(middle),
            "error": 100 * np.exp(middle) * relative.std(axis=0, ddof=1),
            "lower": 100 * np.exp(middle - half),
            "upper": 100 * np.exp(middle + half),
            "observed": observed,
            "empty": empty,
        }
        for column, values in columns.items():
            table.setdefault(column, []).extend(list(values))
        likely = np.log(np.maximum(expected, 1e-12))
        through = np.where(none, likely.mean(axis=0), scale.mean(axis=0))
        slope = slope_of(fit.table.bins, through, likely, ~empty)
        slopes.append({"stratum": name, "sites": len(kept), **slope})
    arrays = {
        name: values if name in ("stratum", "time") else np.array(values)
        for name, values in table.items()
    }
    per = "step" if fit.table.bins.unit == "index" else "year"
    return Index(arrays, slopes, labels[origin], per)


def _without_any(fit: Imputation) -> Any:
    """Times of which every record is 0."""
    if fit.solver.family.quadratic:
        return np.zeros(fit.params.shape[1], dtype=bool)
    return np.bincount(fit.cells.times, fit.cells.sums, minlength=fit.params.shape[1]) <= 0


def _check_totals(name: str, estimate: FloatArray, labels: Sequence[str], origin: int) -> None:
    """Refuse totals below 0, and one of 0 as the base."""
    if estimate.min() < 0:
        raise DataError(
            f"stratum {name!r} has a total of {estimate.min():.3g}: an index is a ratio of totals "
            "above 0, as those of counts are."
        )
    if estimate[origin] <= 0:
        raise DataError(
            f"stratum {name!r} has a total of 0 at {labels[origin]}, which is to be 100: name "
            "another base time."
        )


def totals(
    fit: Imputation, posterior: Posterior, sites: IntArray
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Totals over these sites by time: their estimate, draws of them, and the share of cells seen.

    Where there is a record it is its mean, elsewhere the expected record and, in the draws, normal
    noise with the variance of the records that were never made.
    """
    family, columns = fit.solver.family, fit.params.shape[1]
    own = fit.cells.take(np.flatnonzero(np.isin(fit.cells.sites, sites)))
    mean = family.backward(own.sums / own.weights)
    known = add_up(own.times, mean, columns)
    seen = np.bincount(own.times, minlength=columns) / len(sites)
    estimate, sums = known.copy(), np.tile(known, (posterior.count, 1))
    noise = np.zeros_like(sums)
    place = np.full(fit.params.shape[0], -1)
    for some in in_parts(sites, columns):
        place[:] = -1
        place[some] = np.arange(len(some))
        missing = np.ones((len(some), columns))
        inside = place[own.sites] >= 0
        missing[place[own.sites[inside]], own.times[inside]] = 0.0
        estimate += (missing * posterior.dense_moments(some).value).sum(axis=0)
        for index in range(posterior.count):
            theta = posterior.params(index).dense(some)
            sums[index] += (missing * posterior.value(theta, index)).sum(axis=0)
            theta = posterior.capped(theta)
            spread = posterior.spread_at(theta, index)
            noise[index] += (missing * family.record_variance(theta, spread)).sum(axis=0)
    z = normal_row(fit.seed, 1, Purpose.FIELD_RECORDS, noise.size).reshape(noise.shape)
    # Relative noise, so that a total of counts stays positive.
    root = np.sqrt(noise) / np.maximum(np.abs(sums), 1e-12)
    return estimate, np.where(sums > 0, sums * np.exp(root * z), sums), seen


def slope_of(bins: Bins, scale: FloatArray, draws: FloatArray, used: Any) -> dict[str, Any]:
    """The yearly factor by a straight line through the logarithms of totals, and its class.

    ``draws`` are logarithms of expected totals, which the error comes from: records vary where all
    sites were seen, too, and a slope is of what they are records of. (With draws of totals, which
    are sure there, a complete table had a slope without error.)

    Months and weeks have an effect of their season beside the line, so that only the same season
    of different years is compared: a line alone takes a season for a trend, even over whole years
    (a peak in January gives three constant years a slope of -4% a year).
    """
    x = np.flatnonzero(used) / PER_YEAR[bins.unit]
    season = np.unique(bins.seasons()[used], return_inverse=True)[1]
    x = x - (np.bincount(season, x) / np.bincount(season))[season]
    size = float(x @ x)
    if int(used.sum()) < 3 or size < 1e-9:  # nothing to compare, or no season twice
        return {**dict.fromkeys(("slope", "error", "lower", "upper"), np.nan), "class": NO_SLOPE}
    middle = float(scale[used] @ x) / size
    error = float((draws[:, used] @ x / size).std(ddof=1))
    low, high = (float(np.exp(middle + sign * float(ndtri(0.975)) * error)) for sign in (-1, 1))
    slope = float(np.exp(middle))
    return {
        "slope": slope,
        "error": slope * error,
        "lower": low,
        "upper": high,
        "class": trend_class(low, high),
    }


def trend_class(low: float, high: float) -> str:
    """The words of rtrim for bounds (95%) of a yearly factor: 5% a year is strong."""
    if low > 1.05:
        return "strong increase"
    if low > 1:
        return "moderate increase"
    if high < 0.95:
        return "steep decline"
    if high < 1:
        return "moderate decline"
    return "stable" if low > 0.95 and high < 1.05 else "uncertain"


def _origin(labels: Sequence[str], base: str | int | None, empty: Any) -> int:
    if base is None:
        return int(np.flatnonzero(~empty)[0]) if not np.all(empty) else 0
    if isinstance(base, str):
        if base not in labels:
            raise DataError(f"no time {base!r}; the first is {labels[0]!r}.")
        return list(labels).index(base)
    if not 0 <= base < len(labels):
        raise DataError(f"time indices must lie in 0..{len(labels) - 1}; got {base}.")
    return base


def _strata(strata: Any, names: Sequence[str]) -> dict[str, IntArray]:
    """Sites by stratum, from a mapping by name, a frame with one more column, or a list."""
    everything = {ALL: np.arange(len(names))}
    if strata is None:
        return everything
    if hasattr(strata, "columns"):
        strata = _by_site(strata)
    if isinstance(strata, Mapping):
        absent = [name for name in names if name not in strata]
        if absent:
            raise DataError(f"strata: {len(absent)} sites are absent, first {absent[0]!r}.")
        strata = [strata[name] for name in names]
    values = np.array([str(value) for value in strata])
    if len(values) != len(names):
        raise DataError(f"strata: expected {len(names)}, one per site; got {len(values)}.")
    return everything | {str(v): np.flatnonzero(values == v) for v in np.unique(values)}


def _by_site(frame: Any) -> dict[str, str]:
    """The stratum of each site, from a frame with its name."""
    columns = [name for name in frame.columns if name != "site"]
    if "site" not in frame.columns or len(columns) != 1:
        raise DataError("strata: expected a frame with 'site' and one other column.")
    pairs = zip(frame["site"], frame[columns[0]], strict=True)
    return {str(site): str(value) for site, value in pairs}


def axis_place(label: str) -> float:
    """A label on an axis of years."""
    year, month, day = (*map(int, label.split("-")), 1, 1)[:3]
    return year + (month - 1) / 12 + (day - 1) / 365.25
