"""Records of many observers, reduced to cells: what each worker knows of its own table.

A worker's cell has a weight (how many records, or their exposure) and the sum of their values in
the scale of the family. That is all a fit needs, and it is all that is kept of the records.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, final

import numpy as np

from emfed.core.errors import DataError, EmfedWarning, SettingsError, check_count, check_range
from emfed.core.protocols import FloatArray, IntArray, WorkerCells
from emfed.core.streams import Purpose, check_seed, uniform_row
from emfed.core.wording import Setting, Wording
from emfed.imputation.bins import Bins
from emfed.imputation.effort import Effort
from emfed.imputation.families import CellFamily
from emfed.imputation.lowrank import Cells, Covariates
from emfed.imputation.skill import ObserverSkill
from emfed.models.sides import add_up

_MANY_ONES = 10
"""Cells with a count of 1 from which on a lack of zeros is odd: counts that reach 1 reach 0."""
_FEW_CELLS = 20
"""Cells below which half of all birds in one is not odd."""


@final
@dataclass(frozen=True)
class IntakeReport:
    """What became of the rows that were read: nothing is dropped without being counted here.

    Examples
    --------
    >>> import emfed
    >>> from emfed.imputation import simulate_table
    >>> table = simulate_table(600, observers=40, sites=12, months=24, groups=4, seed=0)
    >>> table.intake.used
    600
    """

    rows: int
    """The rows read, after the filters that were asked for."""
    used: int
    """The rows that are in the table."""
    missing: int = 0
    """The rows without a value."""
    uncounted: int = 0
    """The rows that say present and give no number (eBird's X), where a number is needed."""
    shared: int = 0
    """The rows that repeat a checklist shared by a group (eBird)."""
    summed: int = 0
    """The rows of another subspecies, added to the first of their checklist (eBird)."""
    incomplete: int = 0
    """The rows of incomplete checklists, left out because their absences are not known (eBird)."""
    zeros: int = 0
    """The zeros filled in from complete checklists without the species (eBird)."""
    filtered: dict[str, int] = field(default_factory=dict)
    """The checklists left out by the filters of effort, by reason (eBird)."""
    bad: dict[str, int] = field(default_factory=dict)
    """The rows that could not be read, by reason."""
    examples: tuple[str, ...] = ()
    """The first of them, with their line numbers."""

    def describe(self) -> dict[str, Any]:
        """Plain types."""
        return {**vars(self), "examples": list(self.examples)}


@final
@dataclass(frozen=True, eq=False)
class Grid:
    """What all workers agree on before a table is fitted: its sites, its time bins, the family.

    Parameters
    ----------
    sites : sequence of str
        The names of the sites.
    bins : Bins
        The bins of time.
    family : CellFamily
        The family of a record.

    Examples
    --------
    >>> import emfed
    >>> from emfed.imputation import simulate_table
    >>> table = simulate_table(600, observers=40, sites=12, months=24, groups=4, seed=0)
    >>> table.grid.shape
    (12, 24)
    """

    sites: Sequence[str]
    bins: Bins
    family: CellFamily

    @property
    def shape(self) -> tuple[int, int]:
        """Sites and times."""
        return len(self.sites), self.bins.count

    def rows(self, table: FieldTable) -> FloatArray:
        """One worker's own records as rows of `emfed.models.site_owner.COLUMNS` on this grid."""
        numbers = {name: number for number, name in enumerate(self.sites)}
        own = table.family.name, table.bins.unit, len(table.workers)
        if own != (self.family.name, self.bins.unit, 1):
            raise DataError(
                f"expected one worker's table of family {self.family.name!r} in "
                f"{self.bins.unit}s; got family {own[0]!r}, {own[1]}s, {own[2]} workers."
            )
        unknown = [name for name in table.sites if name not in numbers]
        time = table.time + table.bins.first - self.bins.first
        if unknown or time.min() < 0 or time.max() >= self.bins.count:
            what = f"site {unknown[0]!r}" if unknown else "a date"
            raise DataError(f"{what} lies outside the grid: agree on one that holds all records.")
        site = np.array([numbers[name] for name in table.sites])[table.site]
        rows = np.stack([site, time, table.weights, table.values], axis=1).astype(np.float64)
        return rows[np.lexsort((time, site))]

    def covariates(self, sites: Any | None, times: Any | None) -> Covariates:
        """What a user knows of all sites and all times, matched by name and standardised.

        Each is an array with one row per site (or time) in the grid's order, or a polars or pandas
        frame with a column ``site`` (or ``time``, labelled as the bins are).
        """
        parts = (sites, self.sites, "site"), (times, self.bins.labels(), "time")
        of_sites, of_times = (_covariates(*part) for part in parts)
        names = [
            name
            for (values, _, what), array in zip(parts, (of_sites, of_times), strict=True)
            for name in _covariate_names(values, what, array.shape[1])
        ]
        return Covariates(of_sites, of_times, tuple(names))


@final
@dataclass(frozen=True, eq=False)
class FieldTable:
    """The cells of every worker, worker by worker, each sorted by site and then time.

    Worker c holds the cells ``offsets[c]`` to ``offsets[c + 1]``.

    Examples
    --------
    >>> import emfed
    >>> from emfed.imputation import simulate_table
    >>> table = simulate_table(600, observers=40, sites=12, months=24, groups=4, seed=0)
    >>> table.shape, len(table.workers)
    ((12, 24), 4)
    """

    family: CellFamily
    """The family of a record."""
    sites: Sequence[str]
    """The names of the sites."""
    bins: Bins
    """The bins of time."""
    workers: Sequence[str]
    """The names of the workers."""
    offsets: IntArray
    """Where the cells of each worker begin, and their number at the end, ``(workers + 1,)``."""
    site: IntArray
    """The site of each cell, ``(cells,)``."""
    time: IntArray
    """The time of each cell, ``(cells,)``."""
    weights: FloatArray
    """The number of records of each cell, or their exposure, ``(cells,)``."""
    values: FloatArray
    """The sums over the records of each cell, in the scale of the family, ``(cells,)``."""
    intake: IntakeReport
    """What became of the rows that were read."""
    effort: Effort | None = None
    """The coefficients by which effort entered the weights, where it did."""
    skill: ObserverSkill | None = None
    """The fit by which the skill of observers entered the weights, where it did."""
    effort_parts: tuple[FloatArray, FloatArray] | None = field(default=None, repr=False)
    """The effort of each site and of each time, beyond the central one."""

    def __repr__(self) -> str:
        rows, columns = self.shape
        return (
            f"<FieldTable of {rows} sites x {columns} {self.bins.unit}s, {len(self.workers)} "
            f"workers, {len(self.site)} cells, {self.intake.used} records>"
        )

    @property
    def grid(self) -> Grid:
        """Sites, times and family."""
        return Grid(self.sites, self.bins, self.family)

    @property
    def shape(self) -> tuple[int, int]:
        """Sites and times."""
        return len(self.sites), self.bins.count

    @property
    def records(self) -> int:
        """Records that are in the table."""
        return self.intake.used

    @property
    def rows(self) -> FloatArray:
        """The rows of all workers, in the order of `emfed.models.site_owner.COLUMNS`."""
        columns = (self.site, self.time, self.weights, self.values)
        return np.stack(columns, axis=1).astype(np.float64)

    @cached_property
    def keys(self) -> IntArray:
        """Position of each cell in the table, row by row."""
        return self.site * self.bins.count + self.time

    @cached_property
    def pooled(self) -> Cells:
        """All workers' cells together: what a federation must not see, for comparisons."""
        keys, place = np.unique(self.keys, return_inverse=True)
        return Cells(
            keys // self.bins.count,
            keys % self.bins.count,
            add_up(place, self.weights, len(keys)),
            add_up(place, self.values, len(keys)),
            self.shape,
        )

    def split(self, share: float = 0.1, seed: int = 0) -> tuple[FieldTable, Cells]:
        """The table without a random share of its observed cells, and those cells."""
        check_range("share", share, 0, 1, open_low=True, open_high=True)
        cells = self.pooled
        u = uniform_row(check_seed(seed), 0, Purpose.HOLDOUT, cells.size)
        count = max(1, round(share * cells.size))
        if count >= cells.size:
            raise SettingsError(f"share={share} of {cells.size} observed cells leaves none to fit.")
        out = np.zeros(cells.size, dtype=np.bool_)
        out[np.argpartition(u, count)[:count]] = True
        held = cells.take(np.flatnonzero(out))
        return self.keep(~np.isin(self.keys, held.keys)), held

    def keep(self, kept: Any) -> FieldTable:
        """Some of the cells; a worker with none of them leaves."""
        owner = np.repeat(np.arange(len(self.workers)), np.diff(self.offsets))[kept]
        left, counts = np.unique(owner, return_counts=True)
        return replace(
            self,
            workers=[self.workers[c] for c in left],
            offsets=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
            site=self.site[kept],
            time=self.time[kept],
            weights=self.weights[kept],
            values=self.values[kept],
        )

    def regroup(self, count: int, seed: int = 0) -> FieldTable:
        """The workers put at random into ``count`` groups, each a worker from now on."""
        check_count("groups", count)
        n = len(self.workers)
        if count > n:
            raise SettingsError(f"{n} workers cannot make {count} groups.")
        order = np.argsort(uniform_row(check_seed(seed), 0, Purpose.GROUPING, n))
        group = np.empty(n, dtype=np.int64)
        group[order] = np.arange(n) % count  # sizes differ by one at most
        owner = np.repeat(group, np.diff(self.offsets))
        names = [str(number) for number in range(count)]
        cells = (self.site, self.time, self.weights, self.values)
        table = build_table(self.grid, names, owner, *cells, self.intake)
        known = {name: getattr(self, name) for name in ("effort", "skill", "effort_parts")}
        return replace(table, **known)

    def warn(self) -> None:
        """Say what a user should know before a fit: gaps, a lone worker, odd counts."""
        if self.family.counts:
            for remark in self._odd_counts():
                warnings.warn(remark, EmfedWarning, stacklevel=3)
        rows, columns = self.shape
        empty = rows - len(np.unique(self.site)), columns - len(np.unique(self.time))
        for number, what, names, seen in (
            (empty[0], "site", self.sites, self.site),
            (empty[1], self.bins.unit, self.bins.labels() if empty[1] else (), self.time),
        ):
            if number:
                first = np.setdiff1d(np.arange(len(names)), seen)[0]
                warnings.warn(
                    f"{number} of {len(names)} {what}s have no record, the first {names[first]!r}: "
                    "their estimates rest on the rest of the table alone.",
                    EmfedWarning,
                    stacklevel=3,
                )
        if len(self.workers) == 1:
            warnings.warn(
                f"one worker, {self.workers[0]!r}, holds every record: nothing is federated. Name "
                "the column of the workers if there are several.",
                EmfedWarning,
                stacklevel=3,
            )

    def _odd_counts(self) -> Iterator[str]:
        """Counts that end at 1, and one that outweighs all others."""
        ones, zeros = (int((self.values == k).sum()) for k in (1, 0))
        if ones >= _MANY_ONES and zeros == 0:
            yield (
                f"{ones} cells hold a count of 1 and none a 0: the records seem to tell only of "
                "visits that found the species, so estimates are of such visits alone, and a trend "
                "of how often it is found is lost. Add the visits that found none (of eBird the "
                "sampling events)."
            )
        largest, total = int(np.argmax(self.values)), float(self.values.sum())
        if len(self.values) >= _FEW_CELLS and self.values[largest] > total / 2:
            place = self.sites[self.site[largest]], self.bins.label(int(self.time[largest]))
            yield (
                Wording(
                    "one cell, {!r} in {}, holds {:.0%} of all that was counted, and estimates "
                    "follow it: see whether it is right. {} gives large counts less weight.",
                    *(*place, self.values[largest] / total),
                    Setting("family", "negative-binomial"),
                )
            )


def build_table(
    grid: Grid,
    workers: Sequence[str],
    worker: IntArray,
    site: IntArray,
    time: IntArray,
    weights: FloatArray,
    values: FloatArray,
    intake: IntakeReport,
) -> FieldTable:
    """A table from rows ``(worker, site, time, weight, value)``, cells seen twice added up."""
    if len(worker) == 0:
        raise DataError("the table has no record with a value: nothing can be fitted.")
    rows, columns = grid.shape
    keys = site * columns + time
    order = np.lexsort((keys, worker))
    worker, keys = worker[order], keys[order]
    first = np.flatnonzero(np.r_[True, (np.diff(worker) > 0) | (np.diff(keys) > 0)])
    cells, owner = keys[first], worker[first]
    if cells.min() < 0 or cells.max() >= rows * columns:
        raise DataError(f"a record lies outside the {rows} x {columns} table.")
    present, counts = np.unique(owner, return_counts=True)
    return FieldTable(
        grid.family,
        grid.sites,
        grid.bins,
        [workers[c] for c in present],
        np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        cells // columns,
        cells % columns,
        np.add.reduceat(weights[order], first),
        np.add.reduceat(values[order], first),
        intake,
    )


def known_table(
    grid: Grid, names: Sequence[str] = (), parts: Sequence[WorkerCells] = ()
) -> FieldTable:
    """What a server knows of a table elsewhere: the cells that each worker sent, if any did."""
    nothing: FloatArray = np.empty(0)
    keys = np.concatenate([part.keys for part in parts] or [nothing.astype(np.int64)])
    weights, sums = (
        np.concatenate([getattr(part, name) for part in parts] or [nothing])
        for name in ("weights", "sums")
    )
    offsets = np.cumsum([0, *(len(part.keys) for part in parts)])
    records, times = round(float(weights.sum())), grid.bins.count
    return FieldTable(
        grid.family,
        grid.sites,
        grid.bins,
        list(names),
        offsets,
        keys // times,
        keys % times,
        weights,
        sums,
        IntakeReport(records, records),
    )


def _covariate_names(values: Any, what: str, count: int) -> list[str]:
    if hasattr(values, "columns"):
        return [f"{what}: {name}" for name in values.columns if name != what]
    return [f"{what}: {number}" for number in range(count)]


def _covariates(values: Any | None, names: Sequence[str], what: str) -> FloatArray:
    if values is None:
        return np.empty((len(names), 0))
    array = matched(values, names, what)
    spread = array.std(axis=0)
    return np.asarray((array - array.mean(axis=0)) / np.where(spread > 0, spread, 1.0))


def matched(values: Any, names: Sequence[str], what: str, kind: str = "covariates") -> FloatArray:
    """Finite numbers, one row per name: of a frame by name, of an array in its order."""
    if hasattr(values, "columns"):
        array = _from_frame(values, names, what, kind)
    else:
        array = np.asarray(values, dtype=np.float64)
        array = array[:, None] if array.ndim == 1 else array
    if array.ndim != 2 or len(array) != len(names):
        raise DataError(
            f"{kind} of {what}s: expected {len(names)} rows, one per {what}; got shape "
            f"{array.shape}."
        )
    if not np.isfinite(array).all():
        row = int(np.flatnonzero(~np.isfinite(array).all(axis=1))[0])
        raise DataError(f"{kind} of {what} {names[row]!r} are not all finite.")
    return array


def _from_frame(frame: Any, names: Sequence[str], what: str, kind: str) -> FloatArray:
    """Rows matched by name."""
    if what not in frame.columns:
        raise DataError(f"{kind} of {what}s need a column {what!r} that names them.")
    keys = [str(name) for name in frame[what].to_list()] if hasattr(frame[what], "to_list") else []
    places = {name: row for row, name in enumerate(keys)}
    absent = [name for name in names if name not in places]
    if absent:
        raise DataError(f"{kind} of {what}s: {len(absent)} are absent, first {absent[0]!r}.")
    order = np.array([places[name] for name in names])
    columns = [name for name in frame.columns if name != what]
    try:
        parts = [np.asarray(frame[name].to_numpy(), dtype=np.float64) for name in columns]
    except (TypeError, ValueError):
        raise DataError(f"{kind} of {what}s must be numbers.") from None
    return np.stack(parts, axis=1)[order] if parts else np.empty((len(names), 0))
