"""A site looks for its own mistakes: units, origins, codes and columns unlike everyone else's.

Everyone knows the summary of all rows together (`emfed.models.binding`). A site takes its own rows
out of it, which leaves mean and spread of each column at the others. A hint needs evidence that
sites which differ by nature do not give:

- *Another unit.* Numbers are at least nine times as large as elsewhere, or as small, mean and
  spread alike, and that is many times what rows differ by: four and a half standard deviations of
  their logarithms. Kilograms for pounds are not seen: species and regions differ by as much.
- *Another origin or sign.* Means are thirty spreads apart and spreads are alike; or one mean is the
  other with its sign changed, and many spreads from zero.
- *Codes*: 0 and 1 where the others have 1 and 2. *Stand-ins*: several rows at -999 or the like, far
  from all others. *Numbers of rows*: a column that grows by one from row to row.
- *Exchanged columns*: each of two is like the other one elsewhere, and like no third.

All of this happens at the site, which warns its own operator. Others may learn how many sites doubt
(`emfed.fitting.doubts`). `python -m benchmarks doubts` counts false alarms.

How far two columns are apart is the divergence of two normal distributions with their means and
spreads, in both directions (Jeffreys 1946): zero where they agree, about half the squared distance
of the means in units of the spread where they differ in that alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from emfed.core.protocols import FloatArray, IntArray, Names, Summaries
from emfed.data.tables import Workers, gather, tables
from emfed.models.matrices import unpack
from emfed.models.mixture import to_numpy
from emfed.models.rows import mean_length

FAR = 6.0
"""Divergence from which columns may be exchanged."""
NEAR = 0.1
"""Divergence up to which a column is like another one."""
EXPLAINED, MOST_LEFT = 0.02, 1.5
"""What may be left besides, as a share of what there was, and at most: sites differ anyhow."""
FEWEST = 10
"""Rows of a site below which its means say too little."""
LOOKED_AT = 10_000
"""Rows that are looked at for codes."""
LARGE = 9.0
"""Factor from which numbers may be in another unit. Of ordinary tables cut by one of their columns
(`python -m benchmarks doubts`) a tenth have smaller ones."""
UNLIKELY = 4.5
"""Standard deviations of the logarithm that the factor must be."""
WIDEST = 1.5
"""Relative spread beyond which a few rows may make up a mean."""
ALIKE = 1.6
"""Factor between two relative spreads that are called alike."""
ORIGIN = 30.0
"""Spreads between means beyond which a column of the same spread has another origin."""
SIGN = 4.0
"""Spreads that a mean is from zero where its sign may be wrong."""


class Moments(NamedTuple):
    """Share of values seen, mean and variance of each column."""

    observed: FloatArray
    mean: FloatArray
    variance: FloatArray

    @classmethod
    def read(cls, summary: Summaries) -> Moments | None:
        """Read the summary of any model that tells means and second moments about them."""
        if not {"mean", "scatter"} <= {*summary}:
            return None
        mean, scatter = np.ravel(summary["mean"]), np.ravel(summary["scatter"])
        d = len(mean)
        if len(scatter) != d:
            if len(scatter) != d * (d + 1) // 2:
                return None
            scatter = np.diagonal(unpack(scatter, d))
        seen = np.ravel(summary["observed"]) if "observed" in summary else np.ones(d)
        return cls(seen, mean, scatter)

    def without(self, own: Moments, share: float) -> Moments:
        """The moments of the others, of all rows less a share of them."""
        mine = share * own.observed
        seen = np.maximum(self.observed - mine, 1e-12)
        away = own.mean - self.mean
        mean = -mine * away / seen  # about the mean of all: dates would cancel otherwise
        second = (self.observed * self.variance - mine * (own.variance + away**2)) / seen
        return Moments(seen / (1 - share), self.mean + mean, second - mean**2)


def divergence(
    mean: FloatArray, variance: FloatArray, other_mean: FloatArray, other: FloatArray
) -> FloatArray:
    """Jeffreys' divergence of normal distributions."""
    with np.errstate(all="ignore"):
        ratio = variance / other
        apart = (mean - other_mean) ** 2 * (1 / variance + 1 / other)
        return np.asarray((ratio + 1 / ratio - 2 + apart) / 2)


def suspicions(
    summary: Summaries,
    whole: Mapping[str, FloatArray],
    share: float,
    rows: Any,
    columns: Names = None,
) -> list[str]:
    """What the operator of a site should look at, in words; nothing if all is well.

    ``summary`` is the site's, ``whole`` that of all rows together, of which the site has ``share``;
    ``rows`` are the site's, ``(..., columns)``.
    """
    own, every = Moments.read(summary), Moments.read(whole)
    share = share * mean_length(summary) / mean_length(whole)
    values = np.asarray(rows, dtype=np.float64)
    values = values.reshape(-1, values.shape[-1])
    if own is None or every is None or share >= 1 or len(values) < FEWEST:
        return []
    others = every.without(own, share)
    usable = (own.variance > 0) & (others.variance > 0) & (others.observed > 1e-6)
    there = divergence(own.mean, own.variance, others.mean, others.variance)
    strange = np.flatnonzero(usable & (there > ALONE) & np.isfinite(there))
    plain = [not _tailed(values[:, j]) for j in strange.tolist()]
    names = columns or [str(j) for j in range(len(own.mean))]
    found, swapped = [], _swapped(own, others, there, strange[plain])
    for a, b in swapped:
        found.append(f"columns {names[a]!r} and {names[b]!r} look exchanged")
    done = {column for pair in swapped for column in pair}
    for column in range(len(own.mean)):
        mine = values[:, column]
        words = _codes(mine, others.mean[column], others.variance[column])
        words = words or _stand_in(mine, others.mean[column], others.variance[column])
        words = words or _counted(mine, share)
        if words is None and usable[column] and column not in done and not _is_code(mine):
            words = _changed(own, others, column)
        if words is not None:
            found.append(
                f"column {names[column]!r}: {words} (mean {own.mean[column]:.4g} here, "
                f"{others.mean[column]:.4g} elsewhere)"
            )
    return found


def suspicions_of(
    rows: Any, count: int, whole: Summaries, total: float, columns: Names = None
) -> list[str]:
    """The same of a worker with so many rows, of which these are some, and of ``total`` rows."""
    every = Moments.read(whole)
    if every is None:
        return []
    values = np.asarray(rows, dtype=np.float64).reshape(-1, len(every.mean))
    seen = np.isfinite(values)
    known = np.maximum(seen.sum(axis=0), 1)
    away = np.where(seen, values - every.mean, 0.0)  # dates would cancel otherwise
    first = away.sum(axis=0) / known
    own = {
        "observed": seen.mean(axis=0),
        "mean": every.mean + first,
        "scatter": (away**2).sum(axis=0) / known - first**2,
    }
    all_rows = {"observed": every.observed, "mean": every.mean, "scatter": every.variance}
    return suspicions(own, all_rows, count / total, values, columns)


def first_rows(data: Workers, place: int) -> FloatArray:
    """The first rows of a worker, as many as are looked at."""
    count = min(LOOKED_AT, int(data.counts_of(np.array([place]))[0]))
    return to_numpy(gather(data.worker(place), np.arange(count, dtype=np.int64)))


def of_workers(data: Workers, whole: Summaries, total: float) -> list[str]:
    """What each worker of a simulation would be warned of, by name; the first few."""
    found: list[str] = []
    for place, (count, rows) in enumerate(tables(data, range(min(data.size, MOST_WORKERS)))):
        words = suspicions_of(rows, count, whole, total, data.columns)
        found += [f"worker {data.name(place)!r}: {said}" for said in words]
    more = len(found) - MOST_TOLD
    return found if more <= 0 else [*found[:MOST_TOLD], f"{more} more warnings of this kind."]


MOST_WORKERS = 1000
"""Workers of a simulation that are looked at."""
MOST_TOLD = 8
"""Warnings that are told; the others are counted."""


def _changed(own: Moments, others: Moments, column: int) -> str | None:
    """Another unit, sign or origin, with the evidence."""
    mean, spread = float(own.mean[column]), float(np.sqrt(own.variance[column]))
    other, wide = float(others.mean[column]), float(np.sqrt(others.variance[column]))
    apart, widest = abs(mean - other), max(spread, wide)
    if not 1 / 3 < spread / wide < 3 and mean * other > 0:
        return _scaled(mean / other, spread / wide, spread / abs(mean), wide / abs(other))
    turned = mean * other < 0 and abs(mean + other) < 0.35 * abs(other)
    if turned and min(abs(mean), abs(other)) > SIGN * widest:
        return "its sign looks the other way round (such as west for east)"
    if 1 / 3 < spread / wide < 3 and apart > ORIGIN * widest:
        return f"it is about {mean - other:.4g} away from the others: dates of another origin?"
    return None


def _scaled(means: float, spreads: float, here: float, elsewhere: float) -> str | None:
    """Mean and spread that are alike larger, or smaller, than rows differ by.

    ``here`` and ``elsewhere`` are relative spreads.
    """
    factor = means if means > 1 else 1 / means
    widest = max(here, elsewhere)
    width = np.sqrt(np.log1p(widest**2))
    if factor < LARGE or widest > WIDEST or not 1 / ALIKE < here / elsewhere < ALIKE:
        return None
    if np.log(factor) < UNLIKELY * width:
        return None
    which, such = ("large", "g for kg") if means > 1 else ("small", "kg for g")
    beside = spreads if means > 1 else 1 / spreads
    return (
        f"it looks {_rounded(factor)} times too {which}, and its spread {_rounded(beside)} times: "
        f"another unit (such as {such})?"
    )


def _rounded(factor: float) -> str:
    """A factor in words: a power of ten, where it is about one."""
    power = round(np.log10(factor))
    near = abs(np.log10(factor) - power) < 0.1 and power > 0
    return f"{10**power:,}" if near else f"{factor:.2g}" if factor < 100 else f"{factor:,.0f}"


MIDDLE = 1.5
"""Standard deviations that the middle nine tenths of a column span at least, if means and spreads
describe it: 3.3 of a normal, 2.9 of an exponential, 1.3 of a lognormal column with sigma 1.5."""


def _tailed(values: FloatArray) -> bool:
    """Whether a few rows make up mean and spread of a column: those of sites differ by chance."""
    some = values[np.isfinite(values)]
    low, high = np.quantile(some, [0.05, 0.95])
    return bool(high - low < MIDDLE * some.std())


def _is_code(values: FloatArray) -> bool:
    """Whether a column holds a few whole numbers."""
    some = values[np.isfinite(values)][:LOOKED_AT]
    return bool(len(some)) and len(np.unique(some)) <= 10 and bool(np.all(some == np.floor(some)))


def _codes(values: FloatArray, mean: float, variance: float) -> str | None:
    """0/1 where the others have 1/2, or the other way round: variances of two codes are p(1-p)."""
    for mine, theirs in ((0.0, 1.0), (1.0, 0.0)):
        share = mean - theirs
        binary = share * (1 - share)
        if not (0.01 < share < 0.99 and abs(variance - binary) < 0.02 * binary):
            continue
        some = np.unique(values[np.isfinite(values)])
        if np.array_equal(some, [mine, mine + 1]):
            return (
                f"it holds {mine:g} and {mine + 1:g} where the others seem to have {theirs:g} and "
                f"{theirs + 1:g}"
            )
    return None


STAND_INS = tuple(sign * (10.0**k - 1) for k in range(1, 7) for sign in (-1, 1))
"""-9, 9, -99, 99, ... -999999, 999999: what tables hold where a value is not known."""
OUTSIDE = 8.0
"""Spreads of the others' column from its mean beyond which such a number is none of its values."""


def _stand_in(values: FloatArray, mean: float, variance: float) -> str | None:
    """Several rows at one such number, far outside of what this site and the others have."""
    some = values[np.isfinite(values)]
    for code in STAND_INS:
        count, away = int((some == code).sum()), abs(code - mean)
        if count < 2 or count == len(some) or not 0 < OUTSIDE * np.sqrt(max(variance, 0.0)) < away:
            continue
        if np.abs(some[some != code] - mean).max() < away / 2:
            return (
                f"{count} rows hold {code:.0f}, far from all others: if it stands for a value that "
                "is not known, empty those cells"
            )
    return None


def _counted(values: FloatArray, share: float) -> str | None:
    """Whole numbers that grow from row to row as a count of this site's rows, or of all, does."""
    steps = np.diff(values)
    if not (np.all(np.isfinite(values)) and np.all(steps >= 1) and np.all(values % 1 == 0)):
        return None
    for each in (1.0, 1 / share):  # in a file of its own, or among the rows of all
        if 0 <= values[0] <= 5 * each and abs(steps.mean() / each - 1) < 0.1:
            return "it counts the rows: if it is a number of rows or people, leave it out"
    return None


ALONE = 2.0
"""Divergence from which two columns are told apart. Of columns that resemble each other (pixels,
questions of one form) some are always like others by chance, where sites differ."""


def _swapped(
    own: Moments, others: Moments, there: FloatArray, strange: IntArray
) -> list[tuple[int, int]]:
    """Pairs of columns that are like each other's at the others.

    Exchanging must be a clear explanation. Either the site has no other strange column, or each of
    the pair is like no third column and pairs explain at least half of what is strange.
    """
    cross = divergence(
        own.mean[:, None], own.variance[:, None], others.mean[None], others.variance[None]
    )
    cross = np.where(np.isfinite(cross), cross, np.inf)
    slack = np.minimum(EXPLAINED * there, MOST_LEFT / 3)
    like = (cross < NEAR + slack[:, None]) & np.isin(np.arange(len(there)), strange)
    like, alone = like & like.T, (cross < ALONE).sum(axis=1) == 1
    pairs: list[tuple[int, int]] = []
    used: set[int] = set()
    for a in strange[there[strange] > FAR].tolist():
        for b in np.flatnonzero(like[a]).tolist():
            if a != b and not {a, b} & used:
                pairs.append((min(a, b), max(a, b)))
                used |= {a, b}
    left = len({*strange.tolist()} - used)
    if left:
        pairs = [pair for pair in pairs if alone[[*pair]].all()]
    return pairs if 2 * len(pairs) >= left else []
