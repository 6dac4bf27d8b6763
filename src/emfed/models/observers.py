"""Observers of different skill, whose effects never leave the worker that has their records.

    y_r ~ Poisson(w_r g_o exp(m + a_j + b_l + c_q)),    g_o ~ Gamma, mean 1 and variance 1 / k

for record r of observer o at site j and time l, with exposure w_r. The skill of o is g_o exp(c_q).
Given the records of o, g_o is Gamma(k + Y_o, k + M_o), Y_o what o counted and M_o what an average
observer would have: its mean is shrunk towards 1, the more the fewer records there are.

c_q is what observers of one cohort have in common: those whose records lie about the same time.
Without it a shrunken effect would give a part of growing skill to the times, as any random effect
does that hangs together with a covariate (Mundlak 1978): 7% a year of 10% were left. Cohorts are
held at zero by `_COHORT` records each, times by far less, so that growth goes to the times where
the two cannot be told apart: where every observer was there for one season.

The complete log-likelihood has exp(a_j + b_l + c_q), which ties sites to times. By the inequality
of the means exp(a + b + c) is at most a third of the sum of exp(3a - 3a' + s) and its like, with
s = a' + b' + c' and equal at (a', b', c'): so

    site_j = sum over records at j of E[g_o] w_r exp(m + s_r - 3a'_j)

and the same by time and cohort are all that T needs of the records, beside totals of the
opening and one number about the spread of skill. An observer's name, number and effect stay where
they are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self, final

import numpy as np

from emfed.core.errors import DataError, check_count, check_range, known
from emfed.core.protocols import (
    FloatArray,
    IntArray,
    Layout,
    Model,
    ModelWords,
    Names,
    Parameters,
    Summaries,
)
from emfed.core.registry import register_model
from emfed.core.streams import Purpose, normal_row
from emfed.models.sides import add_up

COLUMNS = ("site", "time", "observer", "weight", "total")
"""A worker's rows: site and time as indices, a number for the observer (the worker's own), and
weight and sum of that observer's records of the cell."""
_FARTHEST = 20.0
"""Logarithms beyond this are no effects."""
_LEAST = 1e-12
"""The least number that is divided by."""
_COHORTS = 12
"""Cohorts at most; no more than there are times. With 12 a cohort of a 12-year table is a year."""
_COHORT = 0.5
"""The records' worth of the pull of a cohort to zero. Chosen on one simulated table (seed 0 of
tests/imputation/test_skill.py), where skill grew by 0.1 a year: a pull of 10 records left 0.04 of
that in the trend."""
_SHAPES = (0.05, 1e4)
"""The bounds of k: skill of variance 20, and all alike."""


@final
@dataclass(frozen=True)
class ObserverParameters(Parameters):
    """What observers' records are compared by.

    Parameters
    ----------
    sites : array of shape (sites,)
        The logarithm of what an average observer counts at each site, relative to all.
    times : array of shape (times,)
        The same for each time.
    cohorts : array of shape (cohorts,)
        The logarithm of the skill that observers of one time have in common.
    shape : array of shape (1,)
        One over the variance of skill among observers of one cohort (k).

    Examples
    --------
    >>> import numpy as np
    >>> from emfed.models import ObserverParameters
    >>> ObserverParameters(np.zeros(2), np.zeros(3), np.zeros(3), np.array([4.0])).shape
    array([4.])
    """

    sites: FloatArray
    times: FloatArray
    cohorts: FloatArray
    shape: FloatArray

    @property
    def effects(self) -> FloatArray:
        """Those of sites, times and cohorts, one after the other."""
        return np.concatenate([self.sites, self.times, self.cohorts], axis=-1)


@register_model("observer-effects")
@final
@dataclass(frozen=True, eq=False)
class ObserverEffects(Model):
    """Counts of observers whose skill differs, with a latent effect of each observer.

    The rows of a worker have the columns `emfed.models.observers.COLUMNS`; all records of an
    observer are with one worker. `emfed.imputation.read_records` fits it (``observer_effects``).

    Parameters
    ----------
    sites : int
        The number of places.
    times : int
        The number of time stamps.
    ridge : float
        The records' worth of a pull of sites and times to the mean of all: a place where nothing
        was counted would otherwise have no estimate.
    rows : float or None
        The number of rows, which binding fills in.
    origin_rate : float or None
        The logarithm of the mean count, which binding fills in.
    totals : array or None
        What was counted by site, time and cohort, and the number of observers, which binding fills
        in.

    Examples
    --------
    >>> import numpy as np
    >>> import emfed
    >>> rows = np.array([[0, 0, 0, 1, 3], [1, 0, 0, 1, 8], [0, 0, 1, 1, 1], [1, 1, 1, 1, 3.0]])
    >>> model = emfed.models.ObserverEffects(sites=2, times=2)
    >>> result = emfed.fit(model, [rows], "em", tol=0, rounds=20)
    >>> result.model.effects(rows, result.params).round(1)
    array([1.3, 0.6])
    """

    sites: int
    times: int
    ridge: float = 0.02
    rows: float | None = None
    origin_rate: float | None = None
    totals: FloatArray | None = None

    def __post_init__(self) -> None:
        check_count("sites", self.sites)
        check_count("times", self.times)
        check_range("ridge", self.ridge, 0, np.inf, open_low=True, open_high=True)

    @property
    def cohorts(self) -> int:
        """How many there are."""
        return min(self.times, _COHORTS)

    @property
    def _sizes(self) -> tuple[int, int, int]:
        return self.sites, self.times, self.cohorts

    @property
    def layout(self) -> Layout:
        names = ("site", "time", "cohort", "skill")
        return Layout(
            tuple((name, (size,)) for name, size in zip(names, (*self._sizes, 1), strict=True))
        )

    def check(self, data: Any, where: str, columns: Names = None, first: int = 0) -> None:
        """Five columns of finite numbers inside the table; weights above 0, totals at least 0."""
        rows = np.asarray(data)
        if rows.ndim != 2 or rows.shape[1] != len(COLUMNS) or not np.isfinite(rows).all():
            raise DataError(f"{where}: expected finite columns {COLUMNS}; got {rows.shape}.")
        if len(rows) == 0:
            raise DataError(f"{where} has no rows; leave it out.")
        low, high = rows.min(axis=0), rows.max(axis=0)
        if low[:2].min() < 0 or high[0] >= self.sites or high[1] >= self.times:
            raise DataError(
                f"{where}: sites must lie below {self.sites}, times below {self.times}."
            )
        if low[3] <= 0 or low[4] < 0:
            raise DataError(f"{where}: weights must be above 0, totals at least 0.")

    def summary(self, data: Any, weights: Any | None = None) -> dict[str, FloatArray]:
        """Totals by site, time and cohort, weights, and the observers; means over rows."""
        return _each(data, weights, self._summary)

    def _summary(self, rows: FloatArray) -> dict[str, FloatArray]:
        weight, total = rows[:, 3], rows[:, 4]
        here = len(np.unique(rows[weight > 0, 2]))
        totals = [
            add_up(index, total, size)
            for index, size in zip(self._groups(rows), self._sizes, strict=True)
        ]
        sizes = np.array([weight.sum(), here])
        return {"totals": np.concatenate(totals), "sizes": sizes}

    def _groups(self, rows: FloatArray) -> tuple[IntArray, IntArray, IntArray]:
        """The site, the time and the cohort of each row: where the mean of its observer's lies."""
        site, time = rows[:, :2].astype(np.int64).T
        place, count = _observers(rows)
        weight = rows[:, 3]
        mean = add_up(place, weight * time, count) / np.maximum(
            add_up(place, weight, count), _LEAST
        )
        cohort = ((mean + 0.5) * self.cohorts / self.times).astype(np.int64)
        return site, time, np.minimum(cohort, self.cohorts - 1)[place]

    def combine(self, summaries: Summaries, shares: FloatArray) -> dict[str, FloatArray]:
        return {name: shares @ values for name, values in summaries.items()}

    def bind(self, summaries: Summaries, counts: IntArray, weights: FloatArray) -> Self:
        totals, sizes = (weights @ summaries[name] for name in ("totals", "sizes"))
        counted = totals[: self.sites].sum()
        if counted <= 0:
            raise DataError("all counts are 0: observers cannot be compared.")
        return dataclasses.replace(
            self,
            rows=float(np.sum(counts)),
            origin_rate=float(np.log(counted / sizes[0])),
            totals=np.concatenate([totals, sizes[1:]]),
        )

    def _theta(self, rows: FloatArray, params: ObserverParameters) -> FloatArray:
        site, time, cohort = self._groups(rows)
        shared = params.sites[site] + params.times[time] + params.cohorts[cohort]
        return known(self.origin_rate) + shared

    def _means(self, rows: FloatArray, params: ObserverParameters) -> FloatArray:
        """What an average observer of the cohort would have counted."""
        return rows[:, 3] * np.exp(self._theta(rows, params))

    def _by_observer(
        self, rows: FloatArray, params: ObserverParameters
    ) -> tuple[IntArray, FloatArray, FloatArray]:
        """The place of each row's observer, and what each counted and was to count."""
        place, count = _observers(rows)
        mean = add_up(place, self._means(rows, params), count)
        return place, add_up(place, rows[:, 4], count), mean

    def effects(self, rows: FloatArray, params: ObserverParameters) -> FloatArray:
        """Estimate the skill of each observer of these rows, in the order of their numbers.

        Parameters
        ----------
        rows : array
            One worker's rows.
        params : ObserverParameters
            The fitted parameters.

        Returns
        -------
        array
            The expected skill, E[g_o] exp(c_q); 1 is the average observer.
        """
        rows = np.asarray(rows, dtype=np.float64)
        place, seen, mean = self._by_observer(rows, params)
        cohort = np.zeros(len(seen), dtype=np.int64)
        cohort[place] = self._groups(rows)[2]
        k = float(params.shape[0])
        return np.asarray((k + seen) / (k + mean) * np.exp(params.cohorts[cohort]))

    def expected_statistics(
        self, data: Any, params: ObserverParameters, weights: Any | None = None
    ) -> FloatArray:
        return _each(data, weights, self._expected, params)["s"]

    def _expected(self, rows: FloatArray, params: ObserverParameters) -> dict[str, FloatArray]:
        from scipy.special import digamma

        place, seen, mean = self._by_observer(rows, params)
        k = float(params.shape[0])
        skill = (k + seen) / (k + mean)
        expected = skill[place] * self._means(rows, params)
        # A pad has no observer: its sums are 0, and it would count as one of average skill.
        here = np.bincount(place, rows[:, 3] > 0) > 0
        gap = skill - 1 - digamma(k + seen) + np.log(k + mean)
        parts = [
            add_up(index, expected * np.exp(-3 * effect[index]), len(effect))
            for index, effect in zip(
                self._groups(rows), (params.sites, params.times, params.cohorts), strict=True
            )
        ]
        return {"s": np.concatenate([*parts, [gap[here].sum()]])}

    def _parts(self, statistics: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray, float]:
        """What multiplies exp(3 effect) / 3 and effect, the gap of skill, and observers."""
        statistics, totals = np.asarray(statistics, dtype=np.float64), known(self.totals)
        slopes = statistics[..., :-1] + self._pull
        return slopes, totals[:-1] + self._pull, statistics[..., -1], float(totals[-1])

    @property
    def _pull(self) -> FloatArray:
        sizes = np.array([self.ridge, self.ridge, _COHORT]) / known(self.rows)
        return np.repeat(sizes, self._sizes)

    def maximize(self, statistics: FloatArray) -> ObserverParameters:
        slopes, totals, gap, observers = self._parts(statistics)
        effects = np.clip(np.log(totals / slopes) / 3, -_FARTHEST, _FARTHEST)
        return self._params(effects, _shape_of(gap / observers)[..., None])

    def _params(self, effects: FloatArray, shape: FloatArray) -> ObserverParameters:
        sites, times, cohorts = np.split(effects, np.cumsum(self._sizes)[:-1], axis=-1)
        return ObserverParameters(sites, times, cohorts, shape)

    def surrogate(self, statistics: FloatArray, params: ObserverParameters) -> FloatArray:
        from scipy.special import gammaln

        slopes, totals, gap, observers = self._parts(statistics)
        effects = params.effects
        value = (slopes * np.exp(3 * effects) / 3 - totals * effects).sum(axis=-1)
        k = params.shape[..., 0]
        return np.asarray(value + observers * (gammaln(k) - k * np.log(k) + k) + k * gap)

    def log_likelihood(
        self, data: Any, params: ObserverParameters, weights: Any | None = None
    ) -> FloatArray:
        """The mean over rows of log p(totals), skill integrated out, but for factorials."""
        return _each(data, weights, self._likelihood, params)["v"]

    def _likelihood(self, rows: FloatArray, params: ObserverParameters) -> dict[str, FloatArray]:
        from scipy.special import gammaln

        _, seen, mean = self._by_observer(rows, params)
        k = float(params.shape[0])
        theta = self._theta(rows, params)
        own = float(rows[:, 4] @ theta)  # less log(total!), which no parameter moves
        skill = gammaln(k + seen) - gammaln(k) + k * np.log(k) - (k + seen) * np.log(k + mean)
        return {"v": np.asarray(own + skill.sum())}

    def penalty(self, params: ObserverParameters) -> float:
        effects = params.effects
        return float(self._pull @ (np.exp(3 * effects) / 3 - effects))

    def inside(self, statistics: FloatArray) -> bool:
        if not np.isfinite(statistics).all():
            return False
        return bool(np.all(self._parts(statistics)[0] > 0))

    def start(self, seed: int) -> ObserverParameters:
        """Nearly all alike."""
        count = sum(self._sizes)
        z = 0.01 * normal_row(seed, 0, Purpose.START, count)
        return self._params(z, np.array([5.0]))

    def statistics_of(self, params: ObserverParameters) -> FloatArray:
        """What T takes to these parameters."""
        from scipy.special import digamma

        pull, totals = self._pull, known(self.totals)
        slopes = (totals[:-1] + pull) * np.exp(-3 * params.effects) - pull
        k = np.clip(params.shape, *_SHAPES)
        return np.concatenate([slopes, totals[-1] * (np.log(k) - digamma(k))], axis=-1)

    def words(self) -> ModelWords:
        return ModelWords("model of observer effects")

    def describe(self) -> dict[str, Any]:
        names = ("sites", "times", "ridge")
        return {"model": "observer-effects", **{name: getattr(self, name) for name in names}}


def _observers(rows: FloatArray) -> tuple[IntArray, int]:
    """The place of each row's observer, and how many there are; pads are one of their own."""
    numbers = np.where(rows[:, 3] > 0, rows[:, 2], -np.inf)
    place = np.unique(numbers, return_inverse=True)[1]
    return place, int(place.max()) + 1


def _shape_of(gap: Any) -> FloatArray:
    """k with log k - digamma(k) = gap, within its bounds: Minka's start and Newton's steps."""
    from scipy.special import digamma, polygamma

    low, high = (np.log(k) - digamma(k) for k in _SHAPES)
    gap = np.clip(gap, high, low)
    k = (3 - gap + np.sqrt((gap - 3) ** 2 + 24 * gap)) / (12 * gap)
    for _ in range(5):
        k = 1 / (1 / k + (np.log(k) - digamma(k) - gap) / (k**2 * (1 / k - polygamma(1, k))))
    return np.asarray(np.clip(k, *_SHAPES))


def _each(
    data: Any,
    weights: Any | None,
    function: Callable[..., dict[str, FloatArray]],
    params: ObserverParameters | None = None,
) -> dict[str, FloatArray]:
    """A function of one worker's rows, over leading axes of rows and of parameters.

    A row of weight 2 counts as if it came twice; a pad has weight 0 and says nothing.
    """
    rows = np.asarray(data, dtype=np.float64)
    scale = np.ones(rows.shape[:-1]) if weights is None else np.asarray(weights, dtype=np.float64)
    each: list[tuple[Any, Any, ObserverParameters | None]]
    if params is not None and params.shape.ndim > 1:
        if rows.ndim == 2:  # the same rows at several parameters
            count = len(params.shape)
            rows, scale = (np.broadcast_to(x, (count, *x.shape)) for x in (rows, scale))
        each = [(r, w, params.take(i)) for i, (r, w) in enumerate(zip(rows, scale, strict=True))]
    elif rows.ndim > 2:
        each = [(r, w, params) for r, w in zip(rows, scale, strict=True)]
    else:
        rows = np.concatenate([rows[:, :3], rows[:, 3:] * scale[:, None]], axis=1)
        found = function(rows) if params is None else function(rows, params)
        total = max(float(scale.sum()), _LEAST)
        return {name: values / total for name, values in found.items()}
    parts = [_each(r, w, function, own) for r, w, own in each]
    return {name: np.stack([part[name] for part in parts]) for name in parts[0]}
