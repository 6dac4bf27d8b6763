"""The eBird Basic Dataset: tab-separated observations, and the sampling events behind them.

What is particular to it: a count of ``X`` says present and not counted; a checklist shared by a
group is there once for each member; and an absence is only known from a complete checklist that
does not name the species, which is in the sampling-event file alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, final

from emfed.core.errors import DataError, SettingsError
from emfed.core.wording import Setting, Wording
from emfed.imputation.families import CellFamily, as_family
from emfed.imputation.intake import Origin, ReadSettings, collect, columns_in, reduce_records, scan
from emfed.imputation.table import FieldTable, IntakeReport

_PLACE = ("COUNTRY", "COUNTRY CODE", "STATE", "STATE CODE")
_EVENT = (
    "LOCALITY ID",
    "OBSERVATION DATE",
    "OBSERVER ID",
    "SAMPLING EVENT IDENTIFIER",
    "GROUP IDENTIFIER",
)
_SPECIES = ("COMMON NAME", "SCIENTIFIC NAME")
_MINUTES, _KM, _PEOPLE = "DURATION MINUTES", "EFFORT DISTANCE KM", "NUMBER OBSERVERS"
_START = "TIME OBSERVATIONS STARTED"
_PROTOCOLS = ("PROTOCOL NAME", "PROTOCOL TYPE")
"""The column's names in newer and in older downloads."""
_EFFORT = (_MINUTES, _KM, _PEOPLE, _START, *_PROTOCOLS)
COVARIATES = ("duration", "distance", "observers", "protocol", "hour")
_COUNT, _COMPLETE = "OBSERVATION COUNT", "ALL SPECIES REPORTED"


@final
@dataclass(frozen=True)
class Checklists:
    """Which checklists count, by the customary limits of auk, and which effort is fitted.

    A limit of None lets everything pass; a limit applies where the download has its column.

    Parameters
    ----------
    protocols : tuple of str or None
        The protocols that count.
    minutes : float or None
        The longest duration.
    km : float or None
        The longest distance.
    observers : int or None
        The most observers.
    effort : tuple of str
        What enters as covariates of a record, where it is there: the logarithms of minutes
        ("duration") and of "observers", log(1 + km) ("distance"), whether one travelled
        ("protocol"), and the "hour" of the day as one wave. It goes with counts, and with
        "bernoulli" where sampling events tell visits without the species; otherwise records are
        taken as they are.

    Examples
    --------
    >>> from emfed.imputation import Checklists
    >>> Checklists(minutes=120).km
    5.0
    """

    protocols: tuple[str, ...] | None = ("Stationary", "Traveling")
    minutes: float | None = 300.0
    km: float | None = 5.0
    observers: int | None = 10
    effort: tuple[str, ...] = COVARIATES

    def __post_init__(self) -> None:
        unknown = [name for name in self.effort if name not in COVARIATES]
        if unknown:
            raise SettingsError(
                f"effort must be among {', '.join(COVARIATES)}; got {unknown[0]!r}."
            )

    def reasons(self, present: Sequence[str]) -> dict[str, Any]:
        """An expression for each limit that says which rows it leaves out."""
        import polars as pl

        out: dict[str, Any] = {}
        protocol = _protocol(present)
        if self.protocols is not None and protocol is not None:
            some = [name.lower() for name in self.protocols]
            own = pl.col(protocol).str.strip_chars().str.to_lowercase()
            # "eBird - Traveling Count" is the older spelling.
            known = pl.any_horizontal(own.str.contains(name, literal=True) for name in some)
            out["protocol"] = ~known.fill_null(False)
        for name, most, what in (
            (_MINUTES, self.minutes, "duration"),
            (_KM, self.km, "distance"),
            (_PEOPLE, self.observers, "observers"),
        ):
            if most is not None and name in present:
                out[what] = (_measure(name) > most).fill_null(False)
        return out

    def covariates(self, present: Sequence[str]) -> dict[str, Any]:
        """Numbers of a record's effort, by name; missing where a checklist does not tell them."""
        import polars as pl

        protocol, out = _protocol(present), dict[str, Any]()
        if "duration" in self.effort and _MINUTES in present:
            out["log(duration)"] = pl.when(_measure(_MINUTES) > 0).then(_measure(_MINUTES).log())
        if "distance" in self.effort and _KM in present:
            out["log(1 + km)"] = _measure(_KM).fill_null(0.0).log1p()
        if "observers" in self.effort and _PEOPLE in present:
            out["log(observers)"] = _measure(_PEOPLE).fill_null(1.0).clip(1.0).log()
        if "protocol" in self.effort and protocol is not None:
            moving = pl.col(protocol).str.to_lowercase().str.contains("travel", literal=True)
            out["travelling"] = moving.fill_null(False).cast(pl.Float64)
        if "hour" in self.effort and _START in present:
            parts = [
                pl.col(_START).str.strip_chars().str.slice(first, 2).cast(pl.Float64, strict=False)
                for first in (0, 3)
            ]
            turn = 2 * math.pi * (parts[0] + parts[1].fill_null(0.0) / 60) / 24
            out["cos(hour)"], out["sin(hour)"] = turn.cos(), turn.sin()
        return {f"effort {name}": value for name, value in out.items()}


def _protocol(present: Sequence[str]) -> str | None:
    return next((name for name in _PROTOCOLS if name in present), None)


def _measure(name: str) -> Any:
    import polars as pl

    return pl.col(name).str.strip_chars().cast(pl.Float64, strict=False)


def read_ebird(
    observations: str | Path,
    sampling: str | Path | None = None,
    *,
    species: str | None = None,
    region: str | None = None,
    complete: bool | None = None,
    checklists: Checklists | None = None,
    **options: Any,
) -> FieldTable:
    """Read a download of the eBird Basic Dataset as the cells of each observer.

    Rows of several subspecies on a checklist are added up; then a checklist shared by a group
    counts once, for the member whose checklist has the smallest identifier among those with a
    number. ``X``, also of one subspecies among several, is presence under ``family="bernoulli"``;
    elsewhere it has no number, is left out and counted in ``table.intake.uncounted``.

    Parameters
    ----------
    observations : str or Path
        The file of observations.
    sampling : str or Path, optional
        The file of checklists. With it, complete checklists that do not name the species count as
        zeros, and incomplete ones, which say nothing of absences, do not count.
    species : str, optional
        A common or scientific name.
    region : str, optional
        A country or state by name or code (``France``, ``FR``, ``FR-75``).
    complete : bool, optional
        Whether incomplete checklists are left out (``table.intake.incomplete``); by default with
        the sampling file.
    checklists : Checklists, optional
        Limits of effort, and which effort has fitted coefficients: ``table.intake.filtered`` says
        what the limits left out, ``table.effort`` holds the coefficients, and estimates are of a
        checklist of median effort.
    **options : object
        The fields of `ReadSettings` but ``duplicates``: an observer may keep several checklists of
        a day.

    Returns
    -------
    FieldTable
        The cells of each observer.

    Raises
    ------
    DataError
        If a file cannot be read, or has no such species or region.

    Examples
    --------
    A download is several gigabytes, and comes on request from eBird:

    >>> from emfed.imputation import read_ebird
    >>> table = read_ebird("ebd_FR.txt", "sampling_FR.txt", species="Mallard")  # doctest: +SKIP
    >>> callable(read_ebird)
    True
    """
    known = (f.name for f in fields(ReadSettings) if f.name != "duplicates")
    settings = replace(ReadSettings.read(options, *known), duplicates="keep")
    family = as_family(settings.family)
    if complete is None:
        complete = sampling is not None
    limits = checklists or Checklists()
    if family.quadratic or (family.name == "bernoulli" and sampling is None):
        limits = replace(limits, effort=())  # presences alone have nothing to fit effort to
    files = [observations] if sampling is None else [observations, sampling]
    for path, more in zip(files, ((*_SPECIES, _COUNT), ()), strict=False):
        _check_format(path, (*more, *_PLACE, *_EVENT))
    present = [name for name in _EFFORT if all(name in columns_in(path) for path in files)]
    effort = _EffortOf(limits, present)
    source, _ = scan(
        observations,
        [*_SPECIES, _COUNT, *_PLACE, *_EVENT, *([_COMPLETE] if complete else []), *present],
    )
    frame = _of_species(_inside(source, region), observations, species, region)
    kept, seen, extra = _observations(frame, family, complete, effort)
    if sampling is not None:
        kept, extra = _with_absences(kept, (sampling, region), seen, extra, effort)
    called = {"site": "LOCALITY ID", "date": "OBSERVATION DATE", "value": _COUNT}
    called |= {"observer": "OBSERVER ID", "worker": "OBSERVER ID"}
    return reduce_records(kept, settings, Origin(str(observations), True, called), extra)


def _check_format(path: str | Path, names: Sequence[str]) -> None:
    """Refuse a file of another kind."""
    found = columns_in(path)
    absent = [name for name in names if name not in found]
    if absent:
        raise DataError(
            f"{path}: no column {absent[0]!r}, which the eBird Basic Dataset has; there are "
            f"{', '.join(map(repr, found[:12]))}."
        )


@dataclass(frozen=True)
class _EffortOf:
    """The limits, and the columns of effort that the files have."""

    limits: Checklists
    present: list[str]

    def filtered(self, frame: Any) -> tuple[Any, dict[str, int]]:
        """Rows within the limits, and how many each limit left out, the first that applies."""

        left: dict[str, int] = {}
        for reason, out in self.limits.reasons(self.present).items():
            number = int(collect(frame.select(out.sum())).item() or 0)
            if number:
                left[reason] = number
            frame = frame.filter(~out)
        return frame, left

    def named(self, frame: Any, number: Any) -> Any:
        """The columns that `reduce_records` takes."""
        import polars as pl

        observer = pl.col("OBSERVER ID").str.strip_chars()
        return frame.select(
            "line",
            site=pl.col("LOCALITY ID").str.strip_chars(),
            date=pl.col("OBSERVATION DATE").str.strip_chars(),
            value=number.str.strip_chars(),
            observer=observer,
            worker=observer,
            exposure=pl.lit(1.0),
            **self.limits.covariates(self.present),
        )


def _of_species(frame: Any, path: str | Path, species: str | None, region: str | None) -> Any:
    """Rows of the one species."""
    import polars as pl

    if species is not None:
        wanted = species.strip().lower()
        frame = frame.filter(
            pl.any_horizontal(pl.col(name).str.to_lowercase() == wanted for name in _SPECIES)
        )
    names = collect(frame.select("SCIENTIFIC NAME").unique().head(6))["SCIENTIFIC NAME"].to_list()
    if not names:
        raise DataError(
            f"{path}: no observation of {species or 'any species'} in {region or 'any region'}."
        )
    if len(names) > 1:
        some = ", ".join(repr(name) for name in sorted(map(str, names))[:5])
        raise DataError(
            Wording("{}: several species ({}): name one with {}.", path, some, Setting("species"))
        )
    return frame


def _observations(
    frame: Any, family: CellFamily, complete: bool, effort: _EffortOf
) -> tuple[Any, Any, IntakeReport]:
    """Rows of one species, each checklist once; all checklists that name it; what was left out."""
    import polars as pl

    frame = _keyed(frame)
    seen = frame.select("key").unique()  # a friend's incomplete list is no absence either
    rows = [int(collect(frame.select(pl.len())).item())]
    if complete:
        frame = frame.filter(_is_complete())
    rows.append(int(collect(frame.select(pl.len())).item()))
    frame, left = effort.filtered(frame)
    checklists = _summed(frame)
    once = checklists.group_by("key").agg(
        pl.all().sort_by(["uncounted", "SAMPLING EVENT IDENTIFIER"]).first()
    )
    rows += [int(collect(some.select(pl.len())).item()) for some in (frame, checklists, once)]
    incomplete, beyond, summed, shared = (a - b for a, b in pairwise(rows))
    number = pl.col(_COUNT)
    uncounted = 0
    if family.name == "bernoulli":
        number = pl.when(pl.col("uncounted")).then(pl.lit("1")).otherwise(number)
    else:
        uncounted = int(collect(once.select(pl.col("uncounted").sum())).item())
    kept = once if family.name == "bernoulli" else once.filter(~pl.col("uncounted"))
    left_out = IntakeReport(
        incomplete + beyond + summed + shared + uncounted,
        0,
        uncounted=uncounted,
        shared=shared,
        summed=summed,
        incomplete=incomplete,
        filtered=left,
    )
    return effort.named(kept, number), seen, left_out


def _summed(frame: Any) -> Any:
    """Each checklist once, its rows of one species added up; X where one of them is X (as auk)."""
    import polars as pl

    text = pl.col(_COUNT).str.strip_chars()
    number = text.cast(pl.Int64, strict=False)
    alone = frame.sort("line").group_by("SAMPLING EVENT IDENTIFIER", maintain_order=True)
    count = (
        pl.when((text == "X").any())
        .then(pl.lit("X"))
        .when((pl.len() == 1) | number.is_null().any())  # what is no number stays as it is
        .then(text.sort_by(number.is_not_null()).first())
        .otherwise(number.sum().cast(pl.String))
    )
    rest = pl.all().exclude(_COUNT).first()
    return alone.agg(rest, count.alias(_COUNT)).with_columns(uncounted=pl.col(_COUNT) == "X")


def _is_complete() -> Any:
    import polars as pl

    return pl.col(_COMPLETE).str.strip_chars().str.to_lowercase().is_in(["1", "true"])


def _with_absences(
    frame: Any,
    of: tuple[str | Path, str | None],
    seen: Any,
    intake: IntakeReport,
    effort: _EffortOf,
) -> tuple[Any, IntakeReport]:
    """A zero for each complete checklist that does not name the species, shared ones once."""
    import polars as pl

    path, region = of
    events, _ = scan(path, [*_PLACE, *_EVENT, _COMPLETE, *effort.present])
    without = _keyed(_inside(events, region).filter(_is_complete())).join(
        seen, on="key", how="anti"
    )
    without, left = effort.filtered(without)
    once = without.group_by("key").agg(pl.all().sort_by("SAMPLING EVENT IDENTIFIER").first())
    sizes = collect(without.select(rows=pl.len(), keys=pl.col("key").n_unique())).row(0)
    shared, beyond = int(sizes[0] - sizes[1]), sum(left.values())
    reasons = {
        name: intake.filtered.get(name, 0) + left.get(name, 0) for name in (*intake.filtered, *left)
    }
    counted = replace(
        intake,
        rows=intake.rows + shared + beyond,
        shared=intake.shared + shared,
        zeros=int(sizes[1]),
        filtered=reasons,
    )
    return pl.concat([frame, effort.named(once, pl.lit("0"))]), counted


def _inside(frame: Any, region: str | None) -> Any:
    """Rows of a country or state, by name or code."""
    import polars as pl

    if region is None:
        return frame
    wanted = region.strip().lower()
    return frame.filter(
        pl.any_horizontal(pl.col(name).str.to_lowercase() == wanted for name in _PLACE)
    )


def _keyed(frame: Any) -> Any:
    """Rows with the name that all copies of a shared checklist have."""
    import polars as pl

    group = pl.col("GROUP IDENTIFIER").str.strip_chars()
    own = pl.col("SAMPLING EVENT IDENTIFIER")
    return frame.with_columns(key=pl.when(group.str.len_chars() > 0).then(group).otherwise(own))
