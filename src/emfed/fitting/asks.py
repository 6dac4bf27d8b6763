"""What a fit asks of its workers: summaries, statistics and log-likelihoods, all sums over rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import prod
from typing import Any, final

import numpy as np

from emfed.core.protocols import Metric, Model
from emfed.core.sums import Ask, FloatArray, IntArray, LastSum, Precision, Rows, Stated, Sum
from emfed.models.matrices import unpack

LIKELIHOOD_STEP = 2.0**-23
"""The unit, in nats a row, that log-likelihoods are rounded to: a step that gains more is seen to
gain. 1e-7 nats are a tenth of the smallest tolerance that a fit is asked for."""
LIKELIHOOD_REACH = 2.0**12
"""Nats a row: a log-likelihood farther from the expected one is asked for again, with more bits."""


def power_of_two(values: Any) -> FloatArray:
    """The largest powers of two that are at most these values."""
    return np.asarray(2.0 ** np.floor(np.log2(values)))


@final
@dataclass(frozen=True, eq=False)
class Statistics(Ask):
    """Sums of E[s(y, z) | y; T(S)] - S in the metric at S, and of the log-likelihood and entropy.

    Divided by the number of rows they are the mean field h(S) in the metric, and what the model
    says of the rows at T(S).

    Parameters
    ----------
    model : Model
        The bound model.
    statistics : array of shape (q,)
        S.
    precision : Precision
        How fine the sum must be.
    purpose : str
        The kind of message in the ledger.
    values : bool
        Whether the log-likelihood and the entropy are among the numbers.
    last : LastSum, optional
        How far the fit that asks has come.
    """

    model: Model
    statistics: FloatArray
    precision: Precision
    purpose: str = "round"
    values: bool = True
    last: LastSum | None = None

    @property
    def size(self) -> int:
        """The statistics, and two values."""
        return len(self.statistics) + 2 * self.values

    @cached_property
    def params(self) -> Any:
        """T(S)."""
        return self.model.maximize(self.statistics)

    @cached_property
    def metric(self) -> Metric:
        """The metric at S."""
        return self.model.metric(self.params)

    def part(self, rows: Rows) -> FloatArray:
        """The sum over these rows."""
        sums = rows.sum(self._mean, ragged=self.model.sweeps)
        q = len(self.statistics)
        white = self.metric.whiten(sums[:q] - rows.total * self.statistics)
        return np.concatenate([white, sums[q:]])

    def _mean(self, block: Any, weights: Any) -> FloatArray:
        if not self.values:
            return self.model.expected_statistics(block, self.params, weights)
        statistics, likelihood, entropy = self.model.evaluate(block, self.params, weights)
        both = np.stack([likelihood, entropy], axis=-1)
        return np.concatenate([statistics, both], axis=-1)

    def words(self) -> str:
        """What is asked, for the owner's journal."""
        more = " and the log-likelihood" if self.values else ""
        return f"{len(self.statistics)} statistics of {self.model.words().name}{more}"

    def about(self) -> tuple[Stated, ...]:
        """S."""
        return (self.statistics,)


@final
@dataclass(frozen=True, eq=False)
class Exact(Ask):
    """Sums of E[s(y, z) | y; theta] at some parameters, exact: for a start at parameters, and for
    standard errors.
    """

    model: Model
    params: tuple[Any, ...]
    purpose: str = "closing"
    precision: Precision | None = None

    @property
    def size(self) -> int:
        """Statistics at each of the parameters."""
        return len(self.params) * self.model.layout.size

    def part(self, rows: Rows) -> FloatArray:
        """The sum over these rows."""
        return np.concatenate([rows.sum(partial(self._mean, at)) for at in self.params])

    def _mean(self, params: Any, block: Any, weights: Any) -> FloatArray:
        return self.model.expected_statistics(block, params, weights)

    def words(self) -> str:
        """What is asked, for the owner's journal."""
        name = self.model.words().name
        return f"{self.model.layout.size} statistics of {name} at {len(self.params)} places"

    def about(self) -> tuple[Stated, ...]:
        """How many parameters, and the first: the others follow from these."""
        return bytes([len(self.params) % 256]), *self.params[0].arrays().values()


@final
@dataclass(frozen=True, eq=False)
class Joint(Ask):
    """Several asks in one exchange."""

    asks: tuple[Ask, ...]
    purpose: str
    precision: Precision | None

    @classmethod
    def of(cls, asks: Sequence[Ask]) -> Joint:
        """Join asks: the sum is exact if one of them must be."""
        found = [ask.precision for ask in asks]
        pairs = [(one, ask.size) for one, ask in zip(found, asks, strict=True) if one]
        joined = None
        if len(pairs) == len(found):
            step, centre, reach = (
                np.concatenate([np.broadcast_to(getattr(one, name), (n,)) for one, n in pairs])
                for name in ("step", "centre", "reach")
            )
            joined = Precision(step, centre, reach)
        return cls(tuple(asks), asks[0].purpose, joined)

    @property
    def size(self) -> int:
        """All numbers."""
        return sum(ask.size for ask in self.asks)

    def part(self, rows: Rows) -> FloatArray:
        """The sums of all asks over these rows."""
        return np.concatenate([ask.part(rows) for ask in self.asks])

    def split(self, answer: Sum) -> list[Sum]:
        """The sum of each ask; the bytes are counted with the first."""
        ends = np.cumsum([ask.size for ask in self.asks])[:-1]
        values = np.split(answer.value, ends)
        return [
            replace(answer, value=value, bytes=answer.bytes if j == 0 else 0)
            for j, value in enumerate(values)
        ]

    def words(self) -> str:
        """What is asked, for the owner's journal."""
        return "; ".join(ask.words() for ask in self.asks)

    def about(self) -> tuple[Stated, ...]:
        """What all asks are about."""
        return tuple(told for ask in self.asks for told in ask.about())


# The opening.

COUNTS = 2
"""Numbers at the head of the first sum: the rows that have a weight, and `Rows.squares`."""
SEEN_MOMENTS = ("mean", "scatter", "extra")
"""Parts of a summary that are means over what was seen of a column."""


@final
@dataclass(frozen=True, eq=False)
class SummaryAsk(Ask):
    """The summaries of all rows, as sums: in the first exchange counts and first moments, in the
    second one the scatter about the common mean.

    Two exchanges in place of raw second moments: those would cancel where a column's mean is large
    beside its spread.
    """

    model: Model
    shapes: Mapping[str, tuple[int, ...]]
    owners: Sequence[int]
    """The column that each number of ``extra`` is about."""
    mean: FloatArray | None = None
    """The common mean, in the second exchange."""
    purpose: str = "opening"
    precision: Precision | None = None

    @property
    def size(self) -> int:
        """How many numbers the sum has."""
        if self.mean is not None:
            return prod(self.shapes.get("scatter", (0,)))
        d, e = prod(self.shapes.get("mean", (0,))), len(self.owners)
        others = sum(prod(self.shapes[name]) for name in self._others)
        return COUNTS + 1 + 2 * d + e + others

    @property
    def _others(self) -> list[str]:
        known = (*SEEN_MOMENTS, "observed", "length")
        return [name for name in sorted(self.shapes) if name not in known]

    def part(self, rows: Rows) -> FloatArray:
        """The sum over these rows."""
        sums = rows.sum(self._mean)
        if self.mean is not None:
            return sums
        return np.concatenate([[rows.count, rows.squares], sums])

    def _mean(self, block: Any, weights: Any) -> FloatArray:
        """Sums divided by the rows' weight, worker by worker."""
        found = self.model.summary(block, weights)
        count = len(next(iter(found.values())))
        flat = {name: np.reshape(value, (count, -1)) for name, value in found.items()}
        mean = flat.get("mean", np.empty((count, 0)))
        steps = flat.get("length", np.ones((count, 1)))
        seen = steps * flat.get("observed", np.ones_like(mean))
        if self.mean is not None:
            return _scatter(flat["scatter"], mean - self.mean, seen)
        extra = flat.get("extra", np.empty((count, 0))) * seen[:, list(self.owners)]
        others = [flat[name] for name in self._others]
        return np.concatenate([steps, seen, seen * mean, extra, *others], axis=1)

    @property
    def heads(self) -> IntArray | None:
        """Variances, where covariances are told with them."""
        d = 0 if self.mean is None else len(self.mean)
        if self.size in (0, d) or self.mean is None:
            return None
        return np.ravel(np.flatnonzero(np.equal(*np.triu_indices(d))))

    def units(self, heads: FloatArray) -> FloatArray:
        """Products of standard deviations."""
        spread = np.sqrt(np.abs(heads))
        rows, columns = np.triu_indices(len(heads))
        return np.asarray((spread[rows] * spread[columns])[rows != columns])

    def loss(self, exact: FloatArray, rounded: FloatArray, parts: int) -> float:
        """What other variances and covariances cost a Gaussian; counts and means are exact."""
        if self.mean is None:
            return np.inf
        return _nats(exact, rounded, len(self.mean), parts)

    def words(self) -> str:
        """What is asked, for the owner's journal."""
        return "the number of rows, means" if self.mean is None else "variances and covariances"

    def about(self) -> tuple[Stated, ...]:
        """The common mean."""
        return () if self.mean is None else (self.mean,)


NARROW = 0.1
"""Variances are at least so large in other directions, beside the diagonal, where the scatter of
one of many workers says how finely it must be told: its few rows may lie in a plane."""


def _nats(exact: FloatArray, rounded: FloatArray, d: int, parts: int) -> float:
    """|D|^2 / 4 for S + D in place of S, in the metric of S; errors of many parts average out."""
    if len(exact) == d:
        exact, rounded = np.diag(exact), np.diag(rounded)
    else:
        exact, rounded = unpack(exact, d), unpack(rounded, d)
    if parts > 1:
        wider = NARROW * np.diag(np.diag(exact))
        exact, rounded = exact + wider, rounded + wider
    units = np.sqrt(np.where(np.diag(exact) > 0, np.diag(exact), 1.0))
    try:
        root = np.linalg.inv(np.linalg.cholesky(exact / units / units[:, None]))
    except np.linalg.LinAlgError:
        return float(np.inf)
    white = root @ ((rounded - exact) / units / units[:, None]) @ root.T
    return float((white**2).sum()) / (4 * parts)


def _scatter(scatter: FloatArray, away: FloatArray, seen: FloatArray) -> FloatArray:
    """Second moments about the common mean, from which workers' own means are ``away``."""
    d = away.shape[1]
    if scatter.shape[1] == d:
        return seen * (scatter + away**2)
    rows, columns = np.triu_indices(d)
    return seen[:, rows] * (scatter + away[:, rows] * away[:, columns])
