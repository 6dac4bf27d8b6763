"""A table whose columns each have a family of their own, any entry of which may be missing.

`Columns` is what mixed-type mixtures and Markov chains share: given the component (or state), the
columns are independent. Its features are those of each family, zero where a value is missing, and
for columns with missing values an indicator that carries the normaliser A: what was not seen
neither counts nor costs. Statistics are ``observed`` (the mass of each such column) and
``moments``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self, final

import numpy as np
from array_api_compat import array_namespace, device

from emfed.core.configuration import nearest
from emfed.core.errors import DataError, SettingsError
from emfed.core.protocols import FloatArray, IntArray, Names, Parameters, Summaries
from emfed.core.registry import stored
from emfed.core.wording import Setting, Wording
from emfed.models.families import EXPOSURE, FAMILIES, Family, Gaussian, make_family
from emfed.models.mixture import blocks, to_numpy
from emfed.models.naming import column_name, row_name
from emfed.models.parameters import check_sizes
from emfed.models.rows import combine_seen, seen_moments, total_weight

FIRST = ("gaussian", "poisson", "bernoulli", "exponential", "gamma", "categorical")
"""The families of release 0.1, whose model files have statistics in this order. Others follow, as
the table has them: not by when they were registered, which differs between sites."""


@dataclass(frozen=True, init=False)
class ColumnParameters(Parameters):
    """An array of parameters for each family, of its columns in the order of the table.

    It has the family's name: ``(K, c)`` for ``poisson``, whose only parameter is the rate,
    ``(K, c, 2)`` for ``gaussian``, which has two, and ``(K, n)`` for ``categorical``, the
    probabilities of one column after the other. All may share leading axes.
    """

    families: Mapping[str, FloatArray]

    def __init__(self, families: Mapping[str, Any], **others: Any) -> None:
        if unknown := [name for name in families if name not in FAMILIES]:
            raise SettingsError(
                f"there is no family {unknown[0]!r}; {nearest(unknown[0], list(FAMILIES))}"
            )
        found = {name: np.asarray(a, dtype=np.float64) for name, a in families.items()}
        object.__setattr__(self, "families", found)
        for name, value in others.items():
            object.__setattr__(self, name, np.asarray(value, dtype=np.float64))

    def __getattr__(self, name: str) -> FloatArray:
        found: FloatArray | None = self.__dict__.get("families", {}).get(name)
        if found is None:
            raise AttributeError(f"{type(self).__name__} has no {name!r}")
        return found

    def arrays(self) -> dict[str, FloatArray]:
        names = [f.name for f in dataclasses.fields(self) if f.name != "families"]
        return {**self.families, **{name: getattr(self, name) for name in names}}

    def take(self, index: Any) -> Self:
        return self.with_arrays({name: array[index] for name, array in self.arrays().items()})

    def with_arrays(self, arrays: Mapping[str, FloatArray]) -> Self:
        """The parameters with these arrays in place of their own."""
        made: Any = type(self)
        same: Self = made(**{**self.arrays(), **arrays})
        return same


@final
@dataclass(frozen=True)
class FamilyColumns:
    """Columns of one family, and of their exposures; where their parameters and features lie."""

    family: Family
    columns: IntArray
    exposures: IntArray | None
    places: IntArray
    """Where their parameters are in the family's array, on its axis of columns."""

    @property
    def width(self) -> int:
        """All features of the group."""
        return len(self.columns) * self.family.width

    def read(self, params: ColumnParameters) -> FloatArray:
        """theta of the group, ``(..., K, c, size)``."""
        whole = params.families[self.family.name]
        if len(self.family.names) > 1:
            return whole[..., self.places, :]
        part = whole[..., self.places]
        return part.reshape(*part.shape[:-1], len(self.columns), self.family.size)


@stored("columns/bound")
@final
@dataclass(frozen=True, eq=False)
class ColumnBound:
    """What is known of the columns from the opening exchange."""

    observed: FloatArray
    origin: FloatArray
    scale: FloatArray
    typical: tuple[FloatArray, ...]
    """The mean of t(z) over all data, group by group."""
    mean: FloatArray
    spread: FloatArray
    """Mean and standard deviation of each column's values, whatever its family."""


@stored("columns")
@final
@dataclass(frozen=True, eq=False)
class Columns:
    """The families of a table's columns; `bind` gives the ones that know their frame."""

    families: tuple[Family | str, ...]
    names: tuple[str, ...] | None = None
    floor: float = 1e-6
    missing: bool = True
    every: bool = False
    """Whether the one family is that of every column, however many there are."""
    bound: ColumnBound | None = None

    @classmethod
    def of(cls, given: Any, floor: float, missing: bool = True) -> Columns:
        """Read a dict of names and families, a list of families, or one for every column.

        What `describe` gives is read too: pairs for a dict, and a family's settings for the family.
        """
        if isinstance(given, (str, Family)) or _has_settings(given):
            return cls((_family(given),), None, floor, missing, every=True)
        if isinstance(given, list) and given and isinstance(given[0], list):
            given = dict(given)
        names, values = None, list(given)
        if isinstance(given, Mapping):
            exposed = [f.exposure for f in given.values() if isinstance(f, Family)]
            given = {**given, **{e: EXPOSURE for e in exposed if isinstance(e, str)}}
            names, values = tuple(given), list(given.values())
        places = (f"the family of column {name!r}" for name in names or range(len(values)))
        found = tuple(map(_family, values, places))
        if not found:
            raise SettingsError("families must be a list or dict with one family per column.")
        return cls(found, names, floor, missing)

    def __post_init__(self) -> None:
        for group in self.groups:  # exposures are found, and are exposures
            for position in () if group.exposures is None else group.exposures.tolist():
                if self.families[position] != EXPOSURE:
                    raise SettingsError(
                        f"{type(group.family).__name__}(exposure={position}): that column must "
                        f"have the family {EXPOSURE!r}; it has {self.families[position]!r}."
                    )
        if not self.groups:
            raise SettingsError("families: expected at least one column that is no exposure.")

    def among(self, names: Sequence[Any]) -> Columns:
        """The families of a table with these columns: Gaussian where a dict names none."""
        if self.names is None or self.names == tuple(names):
            return self
        if self.by_position and not all(isinstance(name, int) for name in names):
            return self
        if absent := [name for name in self.names if name not in names]:
            raise SettingsError(
                f"families names {absent[0]!r}, which is not among the columns {list(names)}."
            )
        given = dict(zip(self.names, self.families, strict=True))
        families = tuple(given.get(name, Gaussian()) for name in names)
        return dataclasses.replace(self, families=families, names=tuple(names))

    def describe(self) -> Any:
        """The families as they were given: one, a list, or pairs with names; plain JSON types."""
        plain = [f if isinstance(f, str) else f.describe() for f in self.families]
        if self.names is not None:
            return [list(pair) for pair in zip(self.names, plain, strict=True)]
        return plain[0] if self.every else plain

    def family_words(self) -> list[str]:
        """The families that there are, each once, as people write them."""
        found = [family for family in self.families if isinstance(family, Family)]
        return list(dict.fromkeys(f.title or f.name.replace("_", " ") for f in found))

    @property
    def key(self) -> tuple[str, bytes]:
        """A key that differs between families, and between frames."""
        known = self.constants
        frame = np.stack([known.origin, known.scale, known.observed])
        return f"{self.missing} {self.describe()}", frame.tobytes()

    @property
    def by_position(self) -> bool:
        """Whether a dict named columns by where they stand."""
        return self.names is not None and all(isinstance(name, int) for name in self.names)

    @property
    def width(self) -> int | None:
        """The number of columns of a table; None: any."""
        return None if self.every or self.by_position else self.count

    @property
    def count(self) -> int:
        """The number of columns."""
        return len(self.families)

    def fit_to(self, width: int) -> Columns:
        """The families of a table of this width: where a dict names positions, the exceptions."""
        if self.every:
            return dataclasses.replace(self, families=self.families * width, every=False)
        if not self.by_position:
            return self
        places = tuple(range(width))
        return dataclasses.replace(self.among(places), names=None)

    def _exposure(self, position: int) -> int:
        """The position of a column's exposure."""
        family, where = self.families[position], list(self.names or ())
        assert isinstance(family, Family)
        column = family.exposure
        if isinstance(column, str) and column in where:
            return where.index(column)
        if not isinstance(column, str) and column is not None and 0 <= column < self.count:
            return int(column)
        raise SettingsError(
            f"{type(family).__name__}(exposure={column!r}): there is no such column."
        )

    @cached_property
    def groups(self) -> tuple[FamilyColumns, ...]:
        """Columns that are computed together: those of equal families, apart from exposures.

        Columns of categories are each alone, as model files have them.
        """
        found: dict[tuple[Family, int], list[int]] = {}
        places: dict[int, IntArray] = {}
        ends: dict[str, int] = {}
        for position, family in enumerate(self.families):
            if isinstance(family, Family):
                alike: Any = family
                if family.exposure is not None:
                    alike = dataclasses.replace(alike, exposure="")
                key = alike, position if family.nominal else 0
                found.setdefault(key, []).append(position)
                first = ends.get(family.name, 0)
                ends[family.name] = first + (1 if len(family.names) > 1 else family.size)
                places[position] = np.arange(first, ends[family.name])
        groups = []
        for (family, _), positions in sorted(found.items(), key=lambda item: _rank(item[0][0])):
            exposures = None
            if family.exposure is not None:
                exposures = np.array([self._exposure(position) for position in positions])
            own = np.concatenate([places[position] for position in positions])
            groups.append(FamilyColumns(family, np.array(positions), exposures, own))
        return tuple(groups)

    def array_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each family's array of parameters for one component."""
        found: dict[str, tuple[int, ...]] = {}
        for group in self.groups:
            name, names = group.family.name, group.family.names
            count = found.get(name, (0,))[0] + len(group.places)
            found[name] = (count, len(names)) if len(names) > 1 else (count,)
        return found

    def free_parameters(self) -> int:
        """The number for one component, where probabilities of categories sum to one."""
        return sum(len(g.columns) * (g.family.size - g.family.nominal) for g in self.groups)

    # The opening exchange.

    def check(self, data: Any, where: str, columns: Names, first: int) -> None:
        """Raise `DataError` unless every entry is NaN or one its family can give."""
        if columns is not None and self.names is not None and tuple(columns) != self.names:
            raise DataError(
                f"{where}: expected the columns {list(self.names)} in this order; got "
                f"{list(columns)}."
            )
        xp = array_namespace(data)
        for rows, _ in blocks(data, None, data.shape[-1]):
            at = where, columns if self.names is None else self.names, first
            for group in self.groups:
                y = xp.astype(_columns(xp, rows, group.columns), xp.float64, copy=False)
                bad = ~group.family.allowed(xp, y)
                bad = bad & ~xp.isnan(y) if self.missing else bad
                self._complain(rows, bad, group.columns, group.family.support, at)
                if group.exposures is not None:
                    e = xp.astype(_columns(xp, rows, group.exposures), xp.float64, copy=False)
                    bad = ~(xp.isnan(e) | ((e > 0) & (e <= 1e140)))
                    words = "a positive exposure"
                    self._complain(rows, bad, group.exposures, words, at)
            first += rows.shape[-2]

    def _complain(
        self, rows: Any, bad: Any, columns: IntArray, words: str, at: tuple[str, Names, int]
    ) -> None:
        """Name the first bad entry of ``(..., m, c)``; whose rows, and from which on, is ``at``."""
        if not bool(array_namespace(bad).any(bad)):
            return
        *_, row, which = np.argwhere(to_numpy(bad) != 0)[0].tolist()
        column = int(columns[which])
        where, names, first = at
        name = str(column) if names is None else repr(names[column])
        value = float(to_numpy(rows)[..., row, column].ravel()[0])
        tail = "or NaN for a missing value"
        if not self.missing:
            tail = Wording("and no NaN (say {})", Setting("missing", True))
        raise DataError(
            Wording(
                "{}: {}, column {} is {}; expected {}, {}.",
                *(where, row_name(first + row), name, value, words, tail),
            )
        )

    def summary(self, data: Any, weights: Any | None) -> dict[str, FloatArray]:
        """Shares of values seen, means and variances of each column, and what families add."""
        observed, mean, scatter = seen_moments(data, weights)
        xp = array_namespace(data)
        extra: list[Any] = [0.0] * len(self.groups)
        for rows, w in blocks(data, weights, data.shape[-1]):
            for i, group in enumerate(self.groups):
                y = xp.astype(_columns(xp, rows, group.columns), xp.float64)
                seen = ~xp.isnan(y)
                values = group.family.extra(xp, xp.where(seen, y, group.family.filler))
                if values is not None:
                    values = xp.where(seen, values, 0.0)
                    values = values if w is None else values * w[..., None]
                    extra[i] = extra[i] + xp.sum(values, axis=-2)
        total = total_weight(data, weights)[..., None]
        parts = []
        for i, group in enumerate(self.groups):
            if not isinstance(extra[i], float):
                sums = np.moveaxis(to_numpy(extra[i]), 0, -1)  # (..., c, e)
                seen_share = np.maximum(observed[..., group.columns], 1e-300)[..., None]
                parts.append((sums / total[..., None] / seen_share).reshape(*sums.shape[:-2], -1))
        out = {"observed": observed, "mean": mean, "scatter": scatter}
        return out | ({"extra": np.concatenate(parts, axis=-1)} if parts else {})

    def owners(self) -> IntArray:
        """The column of each number of ``extra``."""
        return np.concatenate([np.repeat(g.columns, g.family.extra_width) for g in self.groups])

    def extras(self, summary: Summaries) -> Iterator[tuple[FamilyColumns, FloatArray]]:
        """Each group with its part of ``extra``, ``(c, e)``."""
        done = 0
        for group in self.groups:
            c, width = len(group.columns), group.family.extra_width
            own = summary["extra"][done : done + c * width] if width else np.empty(0)
            done += c * width
            yield group, own.reshape(c, width)

    def combine(self, summaries: Summaries, shares: FloatArray) -> dict[str, FloatArray]:
        """The summary of a union: means are weighted by what was seen."""
        out = combine_seen(summaries, shares)
        if "extra" in summaries:
            seen = (shares[:, None] * summaries["observed"])[:, self.owners()]
            total = np.maximum(seen.sum(axis=0), 1e-300)
            out["extra"] = (seen * summaries["extra"]).sum(axis=0) / total
        return out

    def bind(self, summaries: Summaries, weights: FloatArray) -> Columns:
        """Origin and scale of each column, and typical statistics."""
        whole = self.combine(summaries, weights)
        never = [j for j in range(self.count) if whole["observed"][j] <= 0]
        if never:
            name = repr(self.names[never[0]]) if self.names else column_name(never[0])
            raise DataError(f"nobody has a single value in column {name}: leave it out.")
        check_sizes(whole["mean"], whole["scatter"])
        origin, scale = np.zeros(self.count), np.ones(self.count)
        for j, family in enumerate(self.families):
            if family == EXPOSURE:
                scale[j] = whole["mean"][j]
        typical = []
        for group, extra in self.extras(whole):
            c = group.columns
            origin[c], scale[c] = group.family.frame(whole["mean"][c], whole["scatter"][c])
            centre = (whole["mean"][c] - origin[c]) / scale[c]
            typical.append(group.family.typical(centre, extra, scale[c]))
        spread = np.sqrt(np.where(whole["scatter"] > 0, whole["scatter"], 1.0))
        bound = ColumnBound(whole["observed"], origin, scale, tuple(typical), whole["mean"], spread)
        return dataclasses.replace(self, bound=bound)

    @property
    def constants(self) -> ColumnBound:
        """What `bind` found."""
        assert self.bound is not None
        return self.bound

    # Features and natural parameters.

    @cached_property
    def partial(self) -> tuple[IntArray, ...]:
        """Group by group, which of its columns need a mass of their own: with NaN, all that can."""
        return tuple(
            np.arange(len(g.columns) if self.missing and g.family.divides else 0, dtype=np.int64)
            for g in self.groups
        )

    @cached_property
    def widths(self) -> tuple[int, int]:
        """The numbers of moments and of masses of columns."""
        return sum(g.width for g in self.groups), sum(len(p) for p in self.partial)

    def features(self, xp: Any, rows: Any) -> Any:
        """``(m, columns)`` to moments' features, then masses, ``(features, m)``."""
        moments, masses = self.widths
        shape = (moments + masses, rows.shape[0])
        out = xp.empty(shape, dtype=xp.float64, device=device(rows))  # filled once, never joined
        place, mass = 0, moments
        for group, partial in zip(self.groups, self.partial, strict=True):
            _, seen, z, exposure = self._placed(xp, rows, group)
            found = list(group.family.expand(xp, z, exposure))
            there = None if seen is True else xp.astype(seen, xp.float64)
            for number, part in enumerate(found):
                lines = slice(place + number, place + group.width, len(found))
                out[lines, :] = part if there is None else part * there
            place += group.width
            if len(partial):
                out[mass : mass + len(partial), :] = 1.0 if there is None else there
                mass += len(partial)
        return out

    def nearest(self, rows: FloatArray) -> FloatArray:
        """The values that the families can give, near these; exposures are typical ones."""
        out = np.broadcast_to(self.constants.mean, rows.shape).copy()
        for group in self.groups:
            own = group.columns
            out[:, own] = group.family.nearest(rows[:, own], self.constants.mean[own])
        return out

    def _placed(self, xp: Any, rows: Any, group: FamilyColumns) -> tuple[Any, Any, Any, Any]:
        """Raw values, whether seen (True: all), values in the frame, and exposures; ``(c, m)``."""
        known, where = self.constants, device(rows)
        y = _by_column(xp, rows, group.columns)
        origin, scale = known.origin[group.columns], known.scale[group.columns]
        z = y
        if np.any(origin != 0) or np.any(scale != 1):
            z = y - xp.asarray(origin[:, None], device=where)
            z *= xp.asarray(1 / scale[:, None], device=where)
        seen: Any = True
        if self.missing:
            seen = ~xp.isnan(y)
            if bool(xp.all(seen)):
                seen = True
            else:
                z = xp.where(seen, z, group.family.filler)
        if group.exposures is None:
            return y, seen, z, None
        exposure = _by_column(xp, rows, group.exposures)
        exposure = exposure / xp.asarray(known.scale[group.exposures][:, None], device=where)
        if self.missing:  # a count without its exposure says nothing
            seen = ~xp.isnan(exposure) & seen
            exposure = xp.where(seen, exposure, 1.0)
        return y, seen, z, exposure

    def base(self, xp: Any, rows: Any) -> Any:
        """The part of log p of each row that no parameter changes, ``(m,)``."""
        total: Any = 0.0
        for group in self.groups:
            y, seen, _, exposure = self._placed(xp, rows, group)
            scale = xp.asarray(
                self.constants.scale[group.columns][:, None], device=device(rows), dtype=xp.float64
            )
            if seen is True:
                value = group.family.base(xp, y, exposure, scale)
            else:
                value = group.family.base(xp, xp.where(seen, y, 0.0), exposure, scale)
                value = xp.where(seen, value, 0.0)
            total = total + xp.sum(value, axis=0)
        return total

    def natural(self, params: ColumnParameters) -> tuple[FloatArray, FloatArray]:
        """What the columns add to intercepts ``(..., K)``, and slopes ``(..., K, features)``."""
        slopes, masses, intercept = [], [], 0.0
        for group, partial in zip(self.groups, self.partial, strict=True):
            theta = group.read(params)
            a, slope = group.family.natural(theta, self.constants.scale[group.columns])
            complete = np.setdiff1d(np.arange(len(group.columns)), partial)
            intercept = intercept - a[..., complete].sum(axis=-1)
            masses.append(-a[..., partial])
            slopes.append(slope.reshape(*slope.shape[:-2], -1))
        return np.asarray(intercept), np.concatenate([*slopes, *masses], axis=-1)

    def pieces(
        self, mass: FloatArray, moments: FloatArray, observed: FloatArray
    ) -> Iterator[tuple[int, FamilyColumns, FloatArray, FloatArray]]:
        """Each group with its masses ``(..., K, c)`` and moments ``(..., K, c, width)``."""
        at = seen = 0
        for index, (group, partial) in enumerate(zip(self.groups, self.partial, strict=True)):
            c = len(group.columns)
            part = moments[..., at : at + group.width]
            part = part.reshape(*part.shape[:-1], c, group.family.width)
            masses = np.repeat(mass[..., None], c, axis=-1)
            masses[..., partial] = observed[..., seen : seen + len(partial)]
            at, seen = at + group.width, seen + len(partial)
            yield index, group, masses, part


def _rank(family: Family) -> tuple[int, bool]:
    """Where a group comes among the statistics; those of equal rank in the order of the table."""
    known = family.name in FIRST
    return FIRST.index(family.name) if known else len(FIRST), family.exposure is not None


def _family(given: Any, what: str = "a column's family") -> Family | str:
    if isinstance(given, Family):
        return given
    if isinstance(given, str) and given == EXPOSURE:
        return EXPOSURE
    settings = dict(given) if isinstance(given, Mapping) else {"family": given}
    name = settings.pop("family", None)
    if isinstance(name, str) and name in FAMILIES and (settings or not FAMILIES[name].nominal):
        return make_family(name, settings, what)
    plain = [name for name, family in FAMILIES.items() if not family.nominal]
    raise SettingsError(
        setting=what,
        must=f"be one of {', '.join(plain)}, {EXPOSURE}, Categorical(n) or Poisson(exposure=...)",
        got=given,
    )


def _has_settings(given: Any) -> bool:
    """Whether it is one family with its settings, numbers or None, not families by column."""
    return isinstance(given, Mapping) and any(
        value is None or isinstance(value, (int, float)) for value in given.values()
    )


def _by_column(xp: Any, rows: Any, columns: IntArray) -> Any:
    """Some columns of ``(m, d)`` as float64 ``(c, m)``, each contiguous: what follows is by row."""
    picked = xp.astype(xp.matrix_transpose(_columns(xp, rows, columns)), xp.float64, copy=False)
    return xp.reshape(xp.reshape(picked, (-1,)), picked.shape)


def _columns(xp: Any, rows: Any, columns: IntArray) -> Any:
    """Some columns of ``(..., m, d)``; a view where they lie side by side."""
    low, high = int(columns[0]), int(columns[-1]) + 1
    if high - low == len(columns):
        return rows[..., low:high]
    return xp.take(rows, xp.asarray(columns, device=device(rows)), axis=-1)
