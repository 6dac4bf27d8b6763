"""Long tables in: one row per record, checked line by line, reduced to cells as they stream."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, final

import numpy as np

from emfed.core.configuration import check_keys
from emfed.core.errors import DataError, EmfedWarning, SettingsError
from emfed.core.wording import ByFace, Setting, Wording
from emfed.data.faults import Faults, TableFault
from emfed.data.files import scan_file
from emfed.data.schema import ColumnKind, as_number, is_kind, plain_text
from emfed.imputation.bins import EPOCH, Bins, Unit, check_unit, ordinal
from emfed.imputation.effort import Effort, effort_parts, fit_effort
from emfed.imputation.families import DEFAULT_FAMILY, CellFamily, GaussianCells, as_family
from emfed.imputation.skill import ObserverSkill, as_workers
from emfed.imputation.table import FieldTable, Grid, IntakeReport, build_table
from emfed.models.observers import COLUMNS as SKILL_COLUMNS

_SHOWN = 5
"""Bad rows that the report of what was read keeps."""
_DATES = Wording(
    "write the year first: 2004-07-31, 2004-07 or 2004; a whole number goes with {}",
    Setting("bins", "index"),
)


@final
@dataclass(frozen=True)
class Origin:
    """Where records came from, as their faults name it."""

    file: str
    lines: bool
    """Whether rows have lines; else they are counted from 0."""
    columns: Mapping[str, str]
    """The columns that hold site, date, value, observer, worker and exposure."""

    def fault(self, reason: str, row: int, cell: str | None, times: int, family: CellFamily) -> Any:
        """What is wrong with a record, whose place is ``row``."""
        advice, problem = "fill it in", f"the {reason} is missing"
        if cell is not None:
            kinds = {"date": "date", "value": family.expected.removeprefix("a ")}
            problem = f"is no {kinds.get(reason, 'number > 0')}"
            advice = _DATES if reason == "date" else "mend it"
        hint = Wording("{}; {} leaves such rows out", advice, Setting("bad_rows", "skip"))
        line, place = (row, None) if self.lines else (None, row)
        column = self.columns.get(reason, reason)
        return TableFault(self.file, problem, hint, line, place, column, cell, times)


@final
@dataclass(frozen=True)
class ColumnNames:
    """Which columns of a long table say what.

    Parameters
    ----------
    site : str
        The column of the site.
    date : str or pair of str
        A column of dates (``2004-07-31``, ``2004-07`` or ``2004``), or two columns for year and
        month; with ``bins="index"`` a column of whole numbers.
    value : str
        The column of the value.
    observer : str or None
        The column of the observer, if there is one.
    worker : str or None
        The column of who holds a record: by default its observer, or its site where there is no
        observer.
    exposure : str or None
        A column with a known size of each record.
    effort : tuple of str
        Columns of numbers whose coefficients are fitted, ``log(minutes)`` for the logarithm of one.

    Examples
    --------
    >>> from emfed.imputation import ColumnNames
    >>> ColumnNames(date=("year", "month"), observer=None).names()
    ['site', 'year', 'month', 'count']
    """

    site: str = "site"
    date: str | tuple[str, str] = "date"
    value: str = "count"
    observer: str | None = "observer"
    worker: str | None = None
    exposure: str | None = None
    effort: tuple[str, ...] = ()

    @property
    def holder(self) -> str:
        """The column that names a record's worker."""
        return self.worker or self.observer or self.site

    def names(self) -> list[str]:
        """All of them, each once."""
        date = [self.date] if isinstance(self.date, str) else list(self.date)
        effort = [_inside_log(name)[0] for name in self.effort]
        some = [self.site, *date, self.value, self.observer, self.worker, self.exposure, *effort]
        return list(dict.fromkeys(name for name in some if name is not None))


@final
@dataclass(frozen=True)
class ReadSettings:
    """How records become cells.

    Parameters
    ----------
    family : str or CellFamily
        "poisson", "negative-binomial", "zero-inflated", "log1p", "gaussian" or "bernoulli".
    bins : {"month", "week", "year", "index"}
        The bins of time; "index" where times are whole numbers.
    since : str or None
        The first date that counts.
    until : str or None
        The last date that counts.
    bad_rows : {"raise", "skip"}
        Whether rows that cannot be read raise a `DataError` naming their lines, or are counted in
        ``table.intake``, with a warning.
    duplicates : {"raise", "keep"}
        Whether a second record of one observer at one site on one day is refused; without an
        observer, of one worker at one site.
    groups : int or None
        The number of groups that workers are put into at random (the paper puts 2,465 observers
        into 10).
    seed : int
        The seed of the groups.
    effort : Effort or None
        Coefficients that were fitted elsewhere; left out, they are fitted to these records.
    observer_effects : bool or ObserverSkill
        Whether each observer has a shrunken effect, fitted to these records, or by a fit from
        elsewhere. Effects go with families of counts.

    Examples
    --------
    >>> from emfed.imputation import ReadSettings
    >>> ReadSettings(bins="year").family
    'poisson'
    """

    family: str | CellFamily = DEFAULT_FAMILY
    bins: Unit = "month"
    since: str | None = None
    until: str | None = None
    bad_rows: Literal["raise", "skip"] = "raise"
    duplicates: Literal["raise", "keep"] = "raise"
    groups: int | None = None
    seed: int = 0
    effort: Effort | None = None
    observer_effects: bool | ObserverSkill = False

    def __post_init__(self) -> None:
        check_unit(self.bins)
        if not isinstance(self.observer_effects, (bool, ObserverSkill)):
            raise SettingsError(
                setting="observer_effects",
                must="be True, False or an ObserverSkill",
                got=self.observer_effects,
            )
        if self.observer_effects and not as_family(self.family).counts:
            raise SettingsError(
                Wording(
                    "{} goes with families of counts (poisson), not {}.",
                    *(Setting("observer_effects", True), as_family(self.family).name),
                )
            )
        for name, other in (("bad_rows", "skip"), ("duplicates", "keep")):
            value = getattr(self, name)
            if value not in ("raise", other):
                raise SettingsError(f"{name} must be one of raise, {other}; got {value!r}.")

    @classmethod
    def read(cls, options: Mapping[str, Any], *known: str) -> ReadSettings:
        """Read keyword arguments; an unknown one is an error."""
        check_keys(options, known or (f.name for f in fields(cls)), "reading records")
        return cls(**options)


def read_records(source: Any, columns: ColumnNames | None = None, **options: Any) -> FieldTable:
    """Read a long table (observer, site, date, count) as the cells of each worker.

    Files are read lazily: a table larger than memory streams, and only its cells stay. Rows without
    a value are counted as missing.

    Parameters
    ----------
    source : str, Path or data frame
        A CSV, TSV (perhaps gzipped) or Parquet file, a polars frame, lazy or not, or a pandas
        frame.
    columns : ColumnNames, optional
        Which columns say what.
    **options : object
        The fields of `ReadSettings`.

    Returns
    -------
    FieldTable
        The cells of each worker.

    Raises
    ------
    DataError
        If a column is missing, or rows cannot be read.

    Examples
    --------
    >>> import polars as pl
    >>> from emfed.imputation import read_records
    >>> frame = pl.DataFrame(
    ...     {
    ...         "observer": ["ann", "ann", "bob"],
    ...         "site": ["pond", "pond", "lake"],
    ...         "date": ["2004-07-31", "2004-08-02", "2004-07-09"],
    ...         "count": [3, 0, 5],
    ...     }
    ... )
    >>> read_records(frame)
    <FieldTable of 2 sites x 2 months, 2 workers, 3 cells, 3 records>
    """
    settings = ReadSettings.read(options)
    named, origin = _named(source, columns or ColumnNames(), settings)
    return reduce_records(named, settings, origin)


def observer_rows(
    source: Any, grid: Grid, columns: ColumnNames | None = None, **options: Any
) -> Any:
    """Make one worker's records rows that `ObserverSkill.fit` takes: observers are numbers there.

    Parameters
    ----------
    source : str, Path or data frame
        The worker's records, as for `read_records`.
    grid : Grid
        What all workers agree on.
    columns : ColumnNames, optional
        Which columns say what.
    **options : object
        The fields of `ReadSettings` but ``observer_effects``; bins and family are the grid's.

    Returns
    -------
    data frame
        A polars frame with the columns `emfed.models.observers.COLUMNS`.

    Examples
    --------
    >>> import polars as pl
    >>> from emfed.imputation import observer_rows, read_records
    >>> frame = pl.DataFrame(
    ...     {"observer": ["ann"], "site": ["pond"], "date": ["2004-07-31"], "count": [3]}
    ... )
    >>> observer_rows(frame, read_records(frame).grid)["total"].to_list()
    [3.0]
    """
    import polars as pl

    settings = ReadSettings.read({**options, "bins": grid.bins.unit, "family": grid.family})
    named, origin = _named(source, columns or ColumnNames(), settings)
    _, good, *_ = _prepared(named, settings, origin, None)
    cells = _by_observer(good, grid.family)
    places = {name: number for number, name in enumerate(grid.sites)}
    unknown = [name for name in cells["site"] if name not in places]
    time = cells["time"].to_numpy().astype(np.int64) - grid.bins.first
    if unknown or time.min() < 0 or time.max() >= grid.bins.count:
        what = f"site {unknown[0]!r}" if unknown else "a date"
        raise DataError(f"{what} lies outside the grid: agree on one that holds all records.")
    site = [places[name] for name in cells["site"]]
    rows = np.column_stack([site, time, cells.select("number", "exposure", "total").to_numpy()])
    return pl.DataFrame(rows, schema=list(SKILL_COLUMNS)).sort(SKILL_COLUMNS[:3])


def _named(source: Any, columns: ColumnNames, settings: ReadSettings) -> tuple[Any, Origin]:
    """The columns that `reduce_records` takes, and where they came from."""
    import polars as pl

    family = as_family(settings.family)
    if columns.exposure is not None and not family.counts:
        raise SettingsError(
            Wording(
                "{} goes with families of counts (poisson), not with {}.",
                *(Setting("exposure"), family.name),
            )
        )
    if settings.observer_effects and columns.observer is None:
        raise SettingsError(
            Wording("{} needs a column of observers: name it.", Setting("observer_effects", True))
        )
    frame, lines = scan(source, columns.names(), columns.value)
    named = frame.select(
        "line",
        site=_text(columns.site),
        date=_date(columns.date),
        value=_text(columns.value),
        observer=_text(columns.observer or columns.holder),
        worker=_text(columns.holder),
        exposure=_number(columns.exposure) if columns.exposure else pl.lit(1.0),
        **{f"effort {name}": _effort(name) for name in columns.effort},
    )
    if columns.effort and family.quadratic:
        raise SettingsError(
            "effort goes with families of counts (poisson) and with bernoulli, not with "
            f"{family.describe().get('scale', family.name)}."
        )
    date = columns.date if isinstance(columns.date, str) else " and ".join(columns.date)
    called = {"site": columns.site, "date": date, "value": columns.value}
    called |= {"observer": columns.observer or columns.holder, "worker": columns.holder}
    called |= {"exposure": columns.exposure or "exposure"}
    file = str(source) if isinstance(source, (str, Path)) else "the table"
    return named, Origin(file, lines, called)


def scan(source: Any, names: Sequence[str], value: str | None = None) -> tuple[Any, bool]:
    """A lazy frame of the columns named, with ``line``, and whether rows have lines."""
    import polars as pl
    from polars.exceptions import PolarsError

    first: int | None = None
    if isinstance(source, (str, Path)):
        frame, first = scan_file(Path(source))
    elif isinstance(source, pl.LazyFrame):
        frame = source
    elif isinstance(source, pl.DataFrame):
        frame = source.lazy()
    elif hasattr(source, "columns") and hasattr(source, "to_numpy"):
        frame = _from_pandas(source, names).lazy()
    else:
        raise DataError(
            "expected a file, a polars or a pandas frame with one row per record; got "
            f"{type(source).__name__}."
        )
    try:
        present = frame.collect_schema().names()
    except (PolarsError, OSError) as error:
        raise DataError(f"{source}: cannot be read ({error}).") from None
    absent = [name for name in names if name not in present]
    if absent:
        raise DataError(_absence(value if value in absent else absent[0], present, value))
    if "line" in names:
        raise DataError("a column called 'line' cannot be used: rename it first.")
    return frame.select(*names).with_row_index("line", offset=first or 0), first is not None


def _absence(name: str | None, present: Sequence[str], value: str | None) -> str:
    """That a column is not there, and what may be done."""
    shown = ", ".join(map(repr, present[:12]))
    problem = f"no column {name!r}{' of counts' if name == value else ''}; there are {shown}."
    naming = ByFace(
        "Name the columns with ColumnNames(...).",
        command="Name the columns with --site, --date, --value, --observer and --worker.",
    )
    alike = [other for other in present if other.lower() == str(name).lower()]
    more: Any = ""
    if alike:
        more = f" Capitals count: {alike[0]!r} is there."
    elif name == "observer":
        more = Wording(
            " Where nobody is named, use {}.", Setting("observer", None, of="ColumnNames")
        )
    elif name == value and sum(other[:4].isdigit() for other in present) > 1:
        more = (
            " The table seems to have a column for each time: make it long first, one row for each "
            "record with its site, date and count."
        )
    elif name == value:
        more = (
            " Records that only say where a species was seen (presence only, as GBIF's without "
            "individualCount) cannot be used: they do not say where it was not found, "
            "or where there was no visit. Add the visits that found none, with a count of 0."
        )
    return Wording("{} {}{}", problem, naming, more)


def columns_in(path: str | Path) -> list[str]:
    """The names of a file's columns."""
    return list(scan_file(Path(path))[0].collect_schema().names())


def _from_pandas(source: Any, names: Sequence[str]) -> Any:
    """The columns named as a polars frame, without pyarrow."""
    import polars as pl

    columns: dict[str, Any] = {}
    for name in source.columns:
        if str(name) in names:
            series = source[name]
            plain = series.to_numpy()
            if plain.dtype.kind == "O":
                missing = series.isna()
                plain = [None if gone else str(v) for v, gone in zip(series, missing, strict=True)]
            columns[str(name)] = plain
    return pl.DataFrame(columns)


def reduce_records(
    frame: Any, settings: ReadSettings, origin: Origin, extra: IntakeReport | None = None
) -> FieldTable:
    """Checked rows (line, site, date, value, observer, worker, exposure) to a table."""
    import polars as pl

    family = as_family(settings.family)
    rows, good, intake, effort = _prepared(frame, settings, origin, extra)
    every = collect(rows.select("site").unique()).drop_nulls()["site"].sort()
    good, skill = _with_skill(good, every, settings)
    columns = () if effort is None else tuple(f"effort {name}" for name in effort.names)
    cells = collect(
        good.group_by("worker", "site", "time").agg(
            pl.col("exposure").sum(),
            _forward(family).sum().alias("total"),
            pl.col(list(columns)).mean(),
        )
    )
    if cells.height == 0:
        raise DataError("the table has no record with a value: nothing can be fitted.")
    workers = cells["worker"].unique().sort()
    time = cells["time"].to_numpy().astype(np.int64)
    span = Bins(settings.bins, int(time.min()), int(time.max() - time.min()) + 1)
    table = build_table(
        Grid(every.to_list(), span, family),
        workers.to_list(),
        workers.search_sorted(cells["worker"]).to_numpy().astype(np.int64),
        every.search_sorted(cells["site"]).to_numpy().astype(np.int64),
        time - span.first,
        cells["exposure"].to_numpy().astype(np.float64),
        cells["total"].to_numpy().astype(np.float64),
        intake,
    )
    table = replace(table, effort=effort, skill=skill)
    if effort is not None:
        above = cells.select(columns).to_numpy() - np.array(effort.centre)
        at = every.search_sorted(cells["site"]).to_numpy(), time - span.first
        parts = effort_parts(above, cells["exposure"].to_numpy(), *at, table.shape)
        table = replace(table, effort_parts=parts)
    return table if settings.groups is None else table.regroup(settings.groups, settings.seed)


def _by_observer(good: Any, family: CellFamily) -> Any:
    """Cells of each observer, with a number of the observer."""
    import polars as pl

    cells = collect(
        good.group_by("worker", "observer", "site", "time").agg(
            pl.col("exposure").sum(), _forward(family).sum().alias("total")
        )
    ).sort("worker", "observer", "site", "time")
    if cells.height == 0:
        raise DataError("the table has no record with a value: nothing can be fitted.")
    return cells.with_columns(number=pl.col("observer").rank("dense").cast(pl.Int64) - 1)


def _with_skill(good: Any, every: Any, settings: ReadSettings) -> tuple[Any, ObserverSkill | None]:
    """Records whose exposure holds the skill of their observer, and the fit of skill."""
    import polars as pl

    skill = settings.observer_effects
    if skill is False:
        return good, None
    family = as_family(settings.family)
    cells = _by_observer(good, family)
    time, number = (cells[name].to_numpy().astype(np.int64) for name in ("time", "number"))
    workers = cells["worker"].unique().sort()
    worker = workers.search_sorted(cells["worker"]).to_numpy().astype(np.int64)
    values = cells.select("exposure", "total").to_numpy().astype(np.float64)
    if not isinstance(skill, ObserverSkill):
        span = Bins(settings.bins, int(time.min()), int(time.max() - time.min()) + 1)
        site = every.search_sorted(cells["site"]).to_numpy()
        rows = np.column_stack([site, time - span.first, number, values]).astype(np.float64)
        some = as_workers(workers.to_list(), worker, rows)
        skill = ObserverSkill.fit(Grid(every.to_list(), span, family), some, seed=settings.seed)
    effects = skill.effects(worker, number, cells["site"].to_list(), time, values)
    each = cells.select("worker", "observer").with_columns(skill=pl.Series(effects)).unique()
    joined = good.join(each.lazy(), on=("worker", "observer"))
    return joined.with_columns(exposure=pl.col("exposure") * pl.col("skill")), skill


def _prepared(
    frame: Any, settings: ReadSettings, origin: Origin, extra: IntakeReport | None
) -> tuple[Any, Any, IntakeReport, Effort | None]:
    """All rows, those that count with their time and effort, what became of them, and effort."""
    import polars as pl

    family = as_family(settings.family)
    rows = _checked(frame, family, settings.bins)
    for bound, text in (("since", settings.since), ("until", settings.until)):
        if text is not None:
            day = _day(bound, text)
            inside = pl.col("day") >= day if bound == "since" else pl.col("day") <= day
            rows = rows.filter(inside | pl.col("day").is_null())
    intake = _count(rows, family, settings.bad_rows == "skip", origin, extra or IntakeReport(0, 0))
    good = rows.filter(pl.col("reason").is_null() & ~pl.col("missing"))
    if settings.duplicates == "raise":
        _refuse_duplicates(good, "line" if origin.lines else "row")
    _refuse_two_workers(good)
    _advise_bins(good, settings.bins)
    number = ordinal(pl.col("day"), settings.bins)
    good, effort, without = _with_effort(good, number, settings.effort, family)
    if without:
        reason = "effort is missing, or 0 where its logarithm counts"
        filtered = {**intake.filtered, reason: without}
        intake = replace(intake, used=intake.used - without, filtered=filtered)
    return rows, good.with_columns(time=number), intake, effort


def _inside_log(name: str) -> tuple[str, bool]:
    """The column of a covariate of effort, and whether it enters by its logarithm."""
    inner = name.removeprefix("log(").removesuffix(")")
    return (inner, True) if name == f"log({inner})" else (name, False)


def _effort(name: str) -> Any:
    """A covariate of effort; what is no number, or has no logarithm, becomes missing."""
    import polars as pl

    column, log = _inside_log(name)
    number = _number(column)
    if not log:
        return number
    return pl.when(number > 0).then(number.log())


def _with_effort(
    rows: Any, time: Any, known: Effort | None, family: CellFamily
) -> tuple[Any, Effort | None, int]:
    """Rows whose exposure is what they are worth, effort's coefficients, and rows without any.

    The coefficients are fitted to the rows unless they are known.
    """
    import polars as pl

    names = [name for name in rows.collect_schema().names() if name.startswith("effort ")]
    if not names:
        return rows, None, 0
    every = collect(rows.with_columns(time=time))
    frame = every.filter(pl.all_horizontal(pl.col(names).is_finite()))
    if frame.height == 0:
        raise DataError("no record has all of its effort: nothing can be fitted.")
    values = frame.select(names).to_numpy()
    covariates = tuple(name.removeprefix("effort ") for name in names)
    site = frame["site"].cast(pl.Categorical).to_physical().to_numpy().astype(np.int64)
    at = site, frame["time"].to_numpy().astype(np.int64)
    counts = family.forward(frame["number"].to_numpy().astype(np.float64))
    if known is None:
        known = fit_effort(covariates, values, counts, *at, rates=not family.counts)
    elif known.names != covariates:
        raise DataError(
            f"the effort is of {', '.join(known.names)}; the records have {covariates}."
        )
    own = known.exposure(values) if family.counts else known.worth(values, counts, *at)
    exposure = frame["exposure"].to_numpy() * own
    lazy = frame.with_columns(exposure=pl.Series(exposure)).lazy()
    return lazy, known, every.height - frame.height


def _advise_bins(rows: Any, unit: Unit) -> None:
    """Say where dates are coarser than the bins: most bins would be empty."""
    import polars as pl

    if unit not in ("month", "week"):
        return
    day = pl.col("day")
    about = collect(
        rows.select(
            length=pl.col("date").str.len_chars().max(),
            months=day.dt.month().n_unique(),
            years=day.dt.year().n_unique(),
        )
    ).row(0, named=True)
    if about["length"] == 4:
        raise DataError(
            Wording(
                "the dates are years alone, and bins of a {} would nearly all be empty: use {}.",
                *(unit, Setting("bins", "year")),
            )
        )
    if about["months"] == 1 and about["years"] > 2:
        warnings.warn(
            Wording(
                "all records are of one month of {} years, so most {}s have none: {} may be what "
                "you want.",
                *(about["years"], unit, Setting("bins", "year")),
            ),
            EmfedWarning,
            stacklevel=4,
        )


def collect(frame: Any) -> Any:
    """Run a lazy query in batches."""
    from polars.exceptions import PolarsError

    try:
        return frame.collect(engine="streaming")
    except PolarsError as error:
        advice = ": save it as UTF-8" if "utf-8" in str(error).lower() else ""
        raise DataError(f"the table cannot be read ({error}){advice}.") from None


def _text(name: str) -> Any:
    import polars as pl

    return plain_text(pl.col(name))


def _number(name: str) -> Any:
    return as_number(_text(name))


def _date(name: str | tuple[str, str]) -> Any:
    """ISO text: of one column, or of year and month."""
    import polars as pl

    if isinstance(name, str):
        return _text(name)
    year, month = (_text(part) for part in name)
    return pl.concat_str([year, month.str.zfill(2)], separator="-")


def _day(name: str, text: str) -> Any:
    """A bound of the dates."""
    import datetime

    try:
        return datetime.date.fromisoformat(text)
    except (TypeError, ValueError):
        raise SettingsError(f"{name} must be a date like '2004-07-31'; got {text!r}.") from None


def _checked(frame: Any, family: CellFamily, unit: Unit) -> Any:
    """Rows with their day, number, whether the value is missing, and why they are bad."""
    import polars as pl

    shaped = pl.col("date").str.contains(r"^(1[5-9]|2[01])\d\d(-\d\d(-\d\d([T ].*)?)?)?$")
    whole = pl.when(shaped).then(pl.col("date").str.slice(0, 10))
    padded = (
        pl.when(whole.str.len_chars() == 4)
        .then(whole + "-01-01")
        .when(whole.str.len_chars() == 7)
        .then(whole + "-01")
        .otherwise(whole)
    )
    number = as_number(pl.col("value"))
    log = isinstance(family, GaussianCells) and family.scale == "log1p"
    limits: ColumnKind = "amount" if log or family.name == "bernoulli" else "number"
    right = is_kind(number, "count" if family.counts else limits) & number.is_finite()
    day = padded.str.to_date("%Y-%m-%d", strict=False)
    if unit == "index":
        number_of_day = pl.col("date").cast(pl.Float64, strict=False)
        whole_number = number_of_day.is_finite() & (number_of_day == number_of_day.round())
        steps = pl.when(whole_number).then(number_of_day.cast(pl.Int64, strict=False))
        day = pl.lit(EPOCH) + pl.duration(days=steps)
    rows = frame.with_columns(day=day, number=number, missing=pl.col("value").is_null())
    wrong = {name: pl.col(name).is_null() for name in ("site", "observer", "worker")}
    wrong["date"] = pl.col("day").is_null()
    wrong["value"] = ~pl.col("missing") & ~right.fill_null(value=False)
    wrong["exposure"] = ~is_kind(pl.col("exposure"), "weight")
    reasons = [pl.when(bad).then(pl.lit(name)) for name, bad in wrong.items()]
    return rows.with_columns(reason=pl.coalesce(reasons))


def _forward(family: CellFamily) -> Any:
    """What a record adds to the sum of its cell: `Family.forward` as an expression."""
    import polars as pl

    number = pl.col("number")
    if family.name == "bernoulli":  # a record of other effort is worth more or less than one
        return (number > 0).cast(pl.Float64) * pl.col("exposure")
    if isinstance(family, GaussianCells) and family.scale == "log1p":
        return number.log1p()
    return number


def _count(
    rows: Any, family: CellFamily, skip: bool, origin: Origin, intake: IntakeReport
) -> IntakeReport:
    """What became of the rows; raises for bad ones unless they are to be skipped."""
    import polars as pl

    sums = collect(
        rows.select(
            rows=pl.len(),
            missing=(pl.col("missing") & pl.col("reason").is_null()).sum(),
            used=(~pl.col("missing") & pl.col("reason").is_null()).sum(),
        )
    ).row(0, named=True)
    intake = replace(
        intake,
        rows=intake.rows + sums["rows"],
        used=int(sums["used"]),
        missing=intake.missing + int(sums["missing"]),
    )
    bad = rows.filter(pl.col("reason").is_not_null())
    names = ("site", "observer", "worker", "date", "value", "exposure")
    cells = [pl.when(pl.col("reason") == n).then(pl.col(n).cast(pl.String)) for n in names]
    each = collect(
        bad.group_by("reason", cell=pl.coalesce(cells))
        .agg(pl.col("line").min(), times=pl.len())
        .sort("line")
    )
    if each.height == 0:
        return intake
    faults = Faults()
    faults.add(
        origin.fault(reason, line, cell, times, family)
        for reason, cell, line, times in each.iter_rows()
    )
    if not skip:
        faults.check()
    report = faults.report()
    total = int(each["times"].sum())
    message = f"{total} of {intake.rows} rows cannot be used, and were left out. {report}"
    warnings.warn(message, EmfedWarning, stacklevel=4)
    counts = dict(each.group_by("reason").agg(pl.col("times").sum()).sort("reason").iter_rows())
    return replace(intake, bad=counts, examples=tuple(map(str, report.faults[:_SHOWN])))


def _refuse_duplicates(rows: Any, unit: str) -> None:
    """One observer, one site, one day: one record."""
    import polars as pl

    keys = ["observer", "site", "day"]
    twice = collect(
        rows.group_by(keys)
        .agg(
            pl.len().alias("times"),
            pl.col("line").min().alias("first"),
            pl.col("line").max().alias("last"),
        )
        .filter(pl.col("times") > 1)
    )
    if twice.height:
        row = twice.sort("first").row(0, named=True)
        raise DataError(
            Wording(
                "{} keys are there more than once: observer {!r} at site {!r} on {} has {} records "
                "({}s {} to {}). Add them up beforehand, or use {} to take each as a record of its "
                "own.",
                *(twice.height, row["observer"], row["site"], row["day"], row["times"]),
                *(unit, row["first"], row["last"], Setting("duplicates", "keep")),
            )
        )


def _refuse_two_workers(rows: Any) -> None:
    """An observer's records are in one place."""
    import polars as pl

    split = collect(
        rows.group_by("observer")
        .agg(pl.col("worker").unique().alias("workers"))
        .filter(pl.col("workers").list.len() > 1)
    )
    if split.height:
        row = split.sort("observer").row(0, named=True)
        names = ", ".join(repr(name) for name in sorted(row["workers"])[:3])
        raise DataError(
            f"observer {row['observer']!r} is in {len(row['workers'])} workers ({names}): an "
            f"observer's records belong to one. {split.height} observers are like that; give each "
            "a name per worker, or name another column of workers."
        )
