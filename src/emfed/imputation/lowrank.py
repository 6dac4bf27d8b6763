"""The parameters of a table, and the observed cells they are fitted to.

theta_jl = offset + x_j beta + x_l gamma + a_j + b_l + u_j . v_l, for site j and time l; a and b are
the effects, x the covariates, u and v the factors. Nothing here is ever sites x times large.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import final

import numpy as np

from emfed.core.errors import check_count, check_range
from emfed.core.protocols import FloatArray, IntArray
from emfed.models.sides import FREE, Graph

_EMPTY = np.empty((0, 0))


CELLS_AT_ONCE = 1 << 20
"""Cells of a table that are computed together: 8 MB as doubles."""


def in_parts(sites: IntArray, times: int) -> list[IntArray]:
    """These sites some at a time, so that the whole table is never in memory."""
    return np.array_split(sites, max(1, -(-len(sites) * times // CELLS_AT_ONCE)))


@final
@dataclass(frozen=True)
class Structure:
    """The rank, and what is penalised how much: half the penalty times the sum of squares.

    Penalties are in units of the weight of one observation.

    Parameters
    ----------
    rank : int
        The number of factors.
    penalty : float
        The penalty of the factors.
    site_penalty : float
        The penalty of the effects of sites.
    time_penalty : float
        The penalty of the effects of times.
    smoothing : float
        The penalty of differences of neighbouring times, of effects and factors alike.
    seasonality : float
        The penalty of differences of times 12 apart.
    effects : bool
        Whether sites and times have effects; the paper has none.
    spatial : float
        The penalty of differences of neighbouring sites, of effects and factors alike.
    covariate_penalty : float
        The penalty of the coefficients of covariates, which are standardised.

    Examples
    --------
    >>> from emfed.imputation import Structure
    >>> Structure(rank=2, penalty=5.0).width
    3
    """

    rank: int = 2
    penalty: float = 2.0
    site_penalty: float = 0.5
    time_penalty: float = 0.5
    smoothing: float = 0.0
    seasonality: float = 0.0
    effects: bool = True
    spatial: float = 0.0
    covariate_penalty: float = FREE

    def __post_init__(self) -> None:
        check_count("rank", self.rank, 0)
        for name in vars(self).keys() - {"rank", "effects"}:
            check_range(name, getattr(self, name), 0, np.inf, open_high=True)

    @property
    def width(self) -> int:
        """Unknowns of a site, and of a time: its factors and its effect."""
        return self.rank + int(self.effects)

    @property
    def smooth(self) -> bool:
        """Whether times are tied to each other."""
        return self.smoothing > 0 or self.seasonality > 0

    def ridge(self, effect: float) -> FloatArray:
        """The penalty of each unknown of a row."""
        tail = [effect] if self.effects else []
        return np.array([self.penalty] * self.rank + tail)


@final
@dataclass(frozen=True, eq=False)
class Cells:
    """Cells of a table, each with its weight and the sum of its values.

    Examples
    --------
    >>> import emfed
    >>> from emfed.imputation import simulate_table
    >>> table = simulate_table(600, observers=40, sites=12, months=24, groups=4, seed=0)
    >>> table.pooled.size <= 12 * 24
    True
    """

    sites: IntArray
    """The site of each cell, ``(cells,)``."""
    times: IntArray
    """The time of each cell, ``(cells,)``."""
    weights: FloatArray
    """How often each was seen, or the exposure, ``(cells,)``."""
    sums: FloatArray
    """The sums of the values, ``(cells,)``."""
    shape: tuple[int, int]
    """The number of sites and of times."""

    @property
    def size(self) -> int:
        """How many there are."""
        return len(self.sites)

    @cached_property
    def keys(self) -> IntArray:
        """Positions in the table, row by row."""
        return self.sites * self.shape[1] + self.times

    def take(self, index: IntArray) -> Cells:
        """Some of them."""
        return Cells(
            self.sites[index],
            self.times[index],
            self.weights[index],
            self.sums[index],
            self.shape,
        )


@final
@dataclass(frozen=True, eq=False)
class Covariates:
    """What is known of sites and of times beforehand: one row each, standardised by the caller."""

    sites: FloatArray = field(default_factory=lambda: _EMPTY)
    times: FloatArray = field(default_factory=lambda: _EMPTY)
    names: tuple[str, ...] = ()
    graph: Graph | None = None
    """Which sites are neighbours, where their coordinates are known."""

    @property
    def count(self) -> int:
        """How many coefficients they have."""
        return self.sites.shape[1] + self.times.shape[1]

    def design(self, sites: IntArray, times: IntArray) -> FloatArray:
        """One row per cell named."""
        parts = []
        if self.sites.shape[1]:
            parts.append(self.sites[sites])
        if self.times.shape[1]:
            parts.append(self.times[times])
        return np.concatenate(parts, axis=1) if parts else np.empty((len(sites), 0))


@final
@dataclass(frozen=True, eq=False)
class TableParameters:
    """The parameters theta of a table: factors, effects and coefficients.

    A row of a site or time holds its factors and, with effects, its effect as the last entry.

    Examples
    --------
    >>> import numpy as np
    >>> from emfed.imputation import TableParameters
    >>> params = TableParameters(1.0, np.ones((3, 1)), np.ones((4, 1)), effects=False)
    >>> params.dense(np.array([0])).shape
    (1, 4)
    """

    offset: float
    """What all cells share."""
    sites: FloatArray
    """The rows of sites, ``(sites, width)``."""
    times: FloatArray
    """The rows of times, ``(times, width)``."""
    effects: bool
    """Whether rows end in an effect."""
    coefficients: FloatArray = field(default_factory=lambda: np.empty(0))
    """The coefficients of the covariates of sites, then of times."""
    covariates: Covariates = field(default_factory=Covariates)
    """What is known of sites and times beforehand."""

    @property
    def rank(self) -> int:
        """The number of factors."""
        return self.sites.shape[1] - int(self.effects)

    @property
    def shape(self) -> tuple[int, int]:
        """Sites and times."""
        return len(self.sites), len(self.times)

    def base(self, sites: IntArray, times: IntArray) -> FloatArray:
        """The offset and what covariates add."""
        out = np.full(len(sites), self.offset)
        if len(self.coefficients):
            out += self.covariates.design(sites, times) @ self.coefficients
        return out

    def theta(self, sites: IntArray, times: IntArray) -> FloatArray:
        """theta at the cells named."""
        out, rank = self.base(sites, times), self.rank
        for k in range(rank):
            out += self.sites[sites, k] * self.times[times, k]
        if self.effects:
            out += self.sites[sites, rank] + self.times[times, rank]
        return out

    def dense(self, sites: IntArray) -> FloatArray:
        """theta of these sites at all times: ``(len(sites), times)``."""
        rank, out = self.rank, np.full((len(sites), len(self.times)), self.offset)
        out += self.sites[sites, :rank] @ self.times[:, :rank].T
        if self.effects:
            out += self.sites[sites, rank:] + self.times[:, rank]
        split = self.covariates.sites.shape[1]
        if split:
            out += (self.covariates.sites[sites] @ self.coefficients[:split])[:, None]
        if self.covariates.times.shape[1]:
            out += self.covariates.times @ self.coefficients[split:]
        return out
