"""A site looks for its own mistakes: units, codes, dates and columns unlike everyone else's.

The server tells every site the summary of all rows together (`emfed.models.binding`). A site takes
its own rows out of it, which leaves mean and spread of each column at the others, and asks what
change to its own column would make it like theirs: another unit, another origin, another coding, or
another column. A site is warned only where its column is far from the others' as it is and close to
them after a change that people are known to forget. All of this happens at the site. It warns its
own operator, and the server learns nothing.

How far two columns are apart is the divergence of two normal distributions with their means and
spreads, in both directions (Jeffreys 1946): zero where they agree, about half the squared distance
of the means in units of the spread where they differ in that alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from emfed.core.protocols import FloatArray, IntArray, Names, Opening, Summaries
from emfed.data.tables import Workers, gather
from emfed.models.matrices import unpack
from emfed.models.mixture import to_numpy
from emfed.models.rows import mean_length

FAR = 6.0
"""Divergence from which a column is suspicious. Over the tables of ../shared/data by group the
loudest ordinary differences are above it too: what counts is that a known change explains them."""
FAR_OF_TAILS = 1e5
"""The same for a column of which a few rows make up mean and spread."""
NEAR = 0.1
"""Divergence up to which a change explains a column (`python -m benchmarks mistakes` prints what
this and `FAR` find and what they cry wolf at)."""
EXPLAINED, MOST_LEFT = 0.02, 1.5
"""What may be left besides, as a share of what there was, and at most: sites differ anyhow."""
MOST_CAUSES = 3
"""Causes that are named where several explain a column: sites differ, so 10 may look like 12."""
FEWEST = 10
"""Rows of a site below which its means say too little."""
LOOKED_AT = 10_000
"""Rows that are looked at for codes."""


MISFIT = (
    "the common model fits the rows here clearly worse than it expects of its own: other units, "
    "codes, instruments or people?"
)
"""What an owner is told where no single column is to blame."""


class Change(NamedTuple):
    """x -> factor x + offset, which would turn this site's numbers into the others'."""

    factor: float
    offset: float
    words: str


def _both(factor: float, large: str, small: str) -> list[Change]:
    """``large`` is ``factor`` times ``small``: either may have been used here."""
    return [
        Change(factor, 0.0, f"it looks like {large} where the others have {small}"),
        Change(1 / factor, 0.0, f"it looks like {small} where the others have {large}"),
    ]


def _shift(offset: float, words: str) -> list[Change]:
    return [Change(1.0, offset, words), Change(1.0, -offset, words)]


COMMON = 20
"""Changes at the head of the list: powers of ten, pounds, millimetres of mercury, inches."""
CHANGES: tuple[Change, ...] = (
    *(
        change
        for k in (1, 2, 3, 4, 5, 6, 9)
        for change in (
            Change(
                10.0**k, 0.0, f"it looks {10**k:,} times too small: another unit (such as kg for g)"
            ),
            Change(
                10.0**-k,
                0.0,
                f"it looks {10**k:,} times too large: another unit (such as g for kg)",
            ),
        )
    ),
    *_both(2.20462, "kilograms", "pounds"),
    *_both(7.50062, "kilopascals", "millimetres of mercury"),
    *_both(2.54, "inches", "centimetres"),
    *_both(3.28084, "metres", "feet"),
    *_both(1.609344, "miles", "kilometres"),
    *_both(28.3495, "ounces", "grams"),
    *_both(18.018, "glucose in mmol/l", "mg/dl"),
    *_both(38.67, "cholesterol in mmol/l", "mg/dl"),
    *_both(88.42, "creatinine in mg/dl", "µmol/l"),
    *_both(12.0, "years", "months"),
    *_both(365.25, "years", "days"),
    *_both(24.0, "days", "hours"),
    *_both(60.0, "hours (or minutes)", "minutes (or seconds)"),
    *_both(3600.0, "hours", "seconds"),
    *_both(86400.0, "days", "seconds"),
    Change(-1.0, 0.0, "its sign looks the other way round (such as west for east)"),
    Change(1.8, 32.0, "it looks like degrees Celsius where the others have Fahrenheit"),
    Change(5 / 9, -160 / 9, "it looks like degrees Fahrenheit where the others have Celsius"),
    *_shift(273.15, "it looks like Celsius for kelvin, or the other way round"),
    *_shift(1900.0, "years with two digits and with four"),
    *_shift(2000.0, "years with two digits and with four"),
    *_shift(25569.0, "dates as days since 1900 (a spreadsheet's) and since 1970"),
    *_shift(1462.0, "dates as days since 1900 and since 1904 (spreadsheets differ)"),
    *_shift(2440587.5, "dates as Julian days and as days since 1970"),
    *_shift(2415018.5, "dates as Julian days and as days since 1900 (a spreadsheet's)"),
    *_shift(719163.0, "dates as days since the year 1 and since 1970"),
    *_shift(693594.0, "dates as days since the year 1 and since 1900"),
    *_shift(10957.0, "dates as days since 1970 and since 2000"),
    *_shift(946684800.0, "dates as seconds since 1970 and since 2000"),
    *_shift(2208988800.0, "dates as seconds since 1900 and since 1970"),
)
"""What people forget, the most common first."""
UNCOMMON = np.where(np.arange(len(CHANGES)) < COMMON, 0.0, 0.3)
"""Divergence by which a rare cause must explain more than a common one to be named before it."""


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
    plain = [there[j] > FAR_OF_TAILS or not _tailed(values[:, j]) for j in strange.tolist()]
    strange = strange[plain]
    far = strange[there[strange] > FAR]
    names = columns or [str(j) for j in range(len(own.mean))]
    found, swapped = [], _swapped(own, others, there, strange)
    for a, b in swapped:
        found.append(f"columns {names[a]!r} and {names[b]!r} look exchanged")
    done = {column for pair in swapped for column in pair}
    for column in range(len(own.mean)):
        mine = values[:, column]
        words = _codes(mine, others.mean[column], others.variance[column])
        words = words or _sentinel(mine, others.mean[column], others.variance[column])
        words = words or _counted(mine, share)
        if words is None and column in far and column not in done:
            words = _changed(own, others, column, _is_code(mine))
        if words is not None:
            found.append(
                f"column {names[column]!r}: {words} (mean {own.mean[column]:.4g} here, "
                f"{others.mean[column]:.4g} elsewhere)"
            )
    return found


def first_rows(data: Workers, place: int) -> FloatArray:
    """The first rows of a worker, as many as are looked at."""
    count = min(LOOKED_AT, int(data.counts_of(np.array([place]))[0]))
    return to_numpy(gather(data.worker(place), np.arange(count, dtype=np.int64)))


def of_workers(
    opening: Opening, whole: Mapping[str, FloatArray], weights: FloatArray, data: Workers
) -> list[str]:
    """What each worker of a simulation would be warned of, by name; the first few."""
    found: list[str] = []
    if Moments.read(whole) is None or data.streaming:
        return found
    for place in range(min(len(weights), MOST_WORKERS)):
        own = {name: values[place] for name, values in opening.summaries.items()}
        rows = first_rows(data, place)
        words = suspicions(own, whole, float(weights[place]), rows, data.columns)
        found += [f"worker {data.name(place)!r}: {said}" for said in words]
    more = len(found) - MOST_TOLD
    return found if more <= 0 else [*found[:MOST_TOLD], f"{more} more warnings of this kind."]


MOST_WORKERS = 1000
"""Workers of a simulation that are looked at."""
MOST_TOLD = 8
"""Warnings that are told; the others are counted."""


def _changed(own: Moments, others: Moments, column: int, code: bool) -> str | None:
    """The change that explains a column, or an origin that nobody knows."""
    mean, variance = own.mean[column], own.variance[column]
    other_mean, other = others.mean[column], others.variance[column]
    if not code:
        factors = np.array([change.factor for change in CHANGES])
        offsets = np.array([change.offset for change in CHANGES])
        left = divergence(factors * mean + offsets, factors**2 * variance, other_mean, other)
        apart, spread = abs(mean - other_mean), np.sqrt(max(variance, other))
        least = np.where(factors == 1.0, MOVED, np.where(_large(factors), 0.0, SCALED))
        left = np.where(apart >= least * spread, left, np.inf)
        # A unit changes mean and spread alike; skewed columns would hide that in their spread.
        beside = np.abs(factors * mean + offsets - other_mean)
        clear = abs(other_mean) > 0.2 * np.sqrt(other)
        left[beside > (0.35 * abs(other_mean) if clear else 0.5 * np.sqrt(other))] = np.inf
        if not clear and abs(mean) <= 0.2 * np.sqrt(variance):
            left[factors != 1.0] = np.inf  # about zero, an outlier at the others does the same
        before = float(divergence(mean, variance, other_mean, other))
        good = left < NEAR + min(EXPLAINED * before, MOST_LEFT)
        if good.any():
            order = np.argsort(left + UNCOMMON, kind="stable")
            words = [CHANGES[j].words for j in order if good[j]]
            return "; or ".join(list(dict.fromkeys(words))[:MOST_CAUSES])
        alike = 1 / 9 < variance / other < 9
        if alike and apart > ORIGIN * spread:
            by = mean - other_mean
            return f"it is about {by:.4g} away from the others: dates or scores of another origin?"
    return None


ORIGIN = 30.0
"""Spreads between means beyond which a column of the same spread has another origin."""
MOVED = 8.0
"""Spreads between means that a known origin explains: below, people and places differ as much."""
SCALED = 1.5
"""The same for small factors: skewed columns (incomes, populations) differ by these by nature."""


def _large(factors: FloatArray) -> Any:
    return np.abs(np.log(np.abs(factors))) > np.log(9.9)


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


SENTINELS = tuple(sign * (10.0**k - 1) for k in range(1, 7) for sign in (-1, 1))
"""-9, 9, -99, 99, ... -999999, 999999: what tables hold where a value is not known."""
OUTSIDE = 8.0
"""Spreads of the others' column from its mean beyond which a sentinel is none of its values. Over
`benchmarks mistakes` it cries wolf nowhere."""


def _sentinel(values: FloatArray, mean: float, variance: float) -> str | None:
    """Several rows at one such number, far outside of what this site and the others have."""
    some = values[np.isfinite(values)]
    for code in SENTINELS:
        count, away = int((some == code).sum()), abs(code - mean)
        if count < 2 or count == len(some) or not 0 < OUTSIDE * np.sqrt(variance) < away:
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
