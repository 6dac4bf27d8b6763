"""The eBird Basic Dataset: tab-separated observations, and the sampling events behind them.

What is particular to it: a count of ``X`` says present and not counted; a checklist shared by a
group is there once for each member; and an absence is only known from a complete checklist that
does not name the species, which is in the sampling-event file alone.
"""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from emfed.core.errors import DataError
from emfed.imputation.families import Family, as_family
from emfed.imputation.intake import ReadSettings, collect, reduce_records, scan
from emfed.imputation.table import FieldTable, Intake

_PLACE = ("COUNTRY", "COUNTRY CODE", "STATE", "STATE CODE")
_EVENT = (
    "LOCALITY ID",
    "OBSERVATION DATE",
    "OBSERVER ID",
    "SAMPLING EVENT IDENTIFIER",
    "GROUP IDENTIFIER",
)
_SPECIES = ("COMMON NAME", "SCIENTIFIC NAME")
_COUNT, _COMPLETE = "OBSERVATION COUNT", "ALL SPECIES REPORTED"


def read_ebird(
    observations: str | Path,
    sampling: str | Path | None = None,
    *,
    species: str | None = None,
    region: str | None = None,
    complete: bool | None = None,
    **options: Any,
) -> FieldTable:
    """A download of the eBird Basic Dataset as the cells of each observer.

    ``species`` is a common or scientific name, ``region`` a country or state by name or code
    (``France``, ``FR``, ``FR-75``). With the ``sampling`` file, complete checklists that do not
    name the species count as zeros, and incomplete ones, whose absences nobody knows, do not count
    (``table.intake.incomplete``); ``complete`` True or False asks for that, or against it, with or
    without the file. Rows of several subspecies on a checklist are added up; then a checklist
    shared by a group counts once, for the member whose checklist has the smallest identifier among
    those with a number. ``X``, also of one subspecies among several, is presence under
    ``family="bernoulli"``; elsewhere it has no number, is left out and counted in
    ``table.intake.uncounted``. ``options`` are the fields of `ReadSettings` but ``duplicates``: an
    observer may keep several checklists of a day.
    """
    known = (f.name for f in fields(ReadSettings) if f.name != "duplicates")
    settings = replace(ReadSettings.read(options, *known), duplicates="keep")
    family = as_family(settings.family)
    if complete is None:
        complete = sampling is not None
    frame, seen, extra = _observations(observations, species, region, family, complete)
    if sampling is not None:
        frame, extra = _with_absences(frame, sampling, region, seen, extra)
    return reduce_records(frame, settings, "line", extra)


def _observations(
    path: str | Path, species: str | None, region: str | None, family: Family, complete: bool
) -> tuple[Any, Any, Intake]:
    """Rows of one species, each checklist once; all checklists that name it; what was left out."""
    import polars as pl

    names = [*_SPECIES, _COUNT, *_PLACE, *_EVENT, *([_COMPLETE] if complete else [])]
    frame, _ = scan(path, names)
    frame = _inside(frame, region)
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
        raise DataError(f"{path}: several species ({some}): name one with species=.")
    frame = _keyed(frame)
    seen = frame.select("key").unique()  # a friend's incomplete list is no absence either
    rows = [int(collect(frame.select(pl.len())).item())]
    if complete:
        frame = frame.filter(_is_complete())
    checklists = _summed(frame)
    once = checklists.group_by("key").agg(
        pl.all().sort_by(["uncounted", "SAMPLING EVENT IDENTIFIER"]).first()
    )
    rows += [int(collect(some.select(pl.len())).item()) for some in (frame, checklists, once)]
    incomplete, summed, shared = (a - b for a, b in pairwise(rows))
    number = pl.col(_COUNT)
    uncounted = 0
    if family.name == "bernoulli":
        number = pl.when(pl.col("uncounted")).then(pl.lit("1")).otherwise(number)
    else:
        uncounted = int(collect(once.select(pl.col("uncounted").sum())).item())
    kept = once if family.name == "bernoulli" else once.filter(~pl.col("uncounted"))
    left_out = Intake(
        incomplete + summed + shared + uncounted,
        0,
        uncounted=uncounted,
        shared=shared,
        summed=summed,
        incomplete=incomplete,
    )
    return _named(kept, number), seen, left_out


def _summed(frame: Any) -> Any:
    """Each checklist once, its rows of one species added up; X where one of them is X (as auk)."""
    import polars as pl

    text = pl.col(_COUNT).str.strip_chars()
    number = text.cast(pl.Int64, strict=False)
    alone = frame.sort("line").group_by("SAMPLING EVENT IDENTIFIER", maintain_order=True)
    told = (
        pl.when((text == "X").any())
        .then(pl.lit("X"))
        .when((pl.len() == 1) | number.is_null().any())  # what is no number is told as it stands
        .then(text.sort_by(number.is_not_null()).first())
        .otherwise(number.sum().cast(pl.String))
    )
    rest = pl.all().exclude(_COUNT).first()
    return alone.agg(rest, told.alias(_COUNT)).with_columns(uncounted=pl.col(_COUNT) == "X")


def _is_complete() -> Any:
    import polars as pl

    return pl.col(_COMPLETE).str.strip_chars().str.to_lowercase().is_in(["1", "true"])


def _with_absences(
    frame: Any, path: str | Path, region: str | None, seen: Any, intake: Intake
) -> tuple[Any, Intake]:
    """A zero for each complete checklist that does not name the species, shared ones once."""
    import polars as pl

    events, _ = scan(path, [*_PLACE, *_EVENT, _COMPLETE])
    without = _keyed(_inside(events, region).filter(_is_complete())).join(
        seen, on="key", how="anti"
    )
    once = without.group_by("key").agg(pl.all().sort_by("SAMPLING EVENT IDENTIFIER").first())
    sizes = collect(without.select(rows=pl.len(), keys=pl.col("key").n_unique())).row(0)
    shared = int(sizes[0] - sizes[1])
    counted = replace(
        intake,
        rows=intake.rows + shared,
        shared=intake.shared + shared,
        zeros=int(sizes[1]),
    )
    return pl.concat([frame, _named(once, pl.lit("0"))]), counted


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


def _named(frame: Any, number: Any) -> Any:
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
    )
