"""How sure a fit is: draws of everything that it estimated, given the cells.

A chain of Gibbs sweeps over the rows of sites, the rows of times, the offset and coefficients, the
spread of records, and the strengths of the penalties, which are read as precisions of normal
priors. Rows are drawn exactly for the Gaussian. For other families a row is proposed from the
normal about its mode and kept by the rule of Metropolis and Hastings; rows that are tied along time
are proposed and kept together. Counts are negative binomial in the chain,
whatever was fitted: their spread tends to 0 where they are Poisson. Under family "poisson" the
spread of a cell falls with a power of its mean, between 0 and 1, that is drawn, too: records of the
oystercatcher have a relative deviation of 1.9 where 60 birds are expected, and of 0.5 where 5,000
are. One spread for all gave large flocks no weight, and all estimates added up to 1.36 times what
was counted.

The penalties that cross-validation chose are where the strengths begin, with the weight of two
rows. Holding them fixed gave bounds that were too narrow: `python -m benchmarks field-bounds`.

A factor u v' has one size, the standard deviation of u; v has unit variance a priori. The size has
a gamma prior of shape 2, which is 0 at 0 and falls for large sizes (Chung and others 2013). Its
mean is 1/2 for one factor of counts and rates, half the deviation of a record for the Gaussian, and
less where there are several, so that all of them together are as large. Two precisions with priors
of their logarithms put much weight on no factor at all, and bounds of cells were too narrow where
records are too noisy to show one. A half-Cauchy prior made bounds of rates too wide: records of 0
and 1 tell little of three factors, and 50% bounds held .54 of cells.

Decision: docs/decisions/020-imputation.md
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import final

import numpy as np
from scipy.linalg import cholesky_banded
from scipy.special import gammaincinv, stdtrit

from emfed.core.errors import DataError, check_count
from emfed.core.protocols import BoolArray, FloatArray, IntArray
from emfed.core.streams import (
    Purpose,
    normal_row,
    to_normals,
    to_uniforms,
    word_source,
)
from emfed.imputation.families import CellFamily, CellMoments, Counts, GaussianCells, fallen
from emfed.imputation.lowrank import Cells, TableParameters, in_parts
from emfed.imputation.rows import damped, objective
from emfed.imputation.sweeps import Solver
from emfed.models.sides import Side, Strength, drift_of, lags_of, line

DRAWS = 200
"""Draws that are kept; at least half as many sweeps come before the first."""
_BURN_IN = 60
"""Sweeps before the first draw. Spread and strengths are stationary after 10 to 30."""
_WORK = 4e7
"""Cells times draws that a chain of the default length is worth: about ten minutes of counts."""
_FEWEST = 40
"""Draws at least, however large the table: fewer have no quantiles."""
_NEWTON = 6
"""Newton's steps at most from the last mode to the one that rows are proposed about."""
_CLOSE = 1.0
"""The square of a Newton step, in deviations of what it moves, below which no other is needed."""
_PRIOR = 1.0
"""Half the number of rows that the penalty of the fit counts as, when its strength is drawn."""
_STEP = 0.4
"""The step of random walks: logarithms of strengths along time and of the spread of counts."""
SPARE = 1
"""Factors that the chain has beyond those of the fit."""
_WEAK = 0.3
"""The size that spare factors begin with, in units of theta, or of the spread of records."""
_TIE = 0.1
"""The tie of neighbouring times that factors begin with where the fit has none; `_DOUBT` holds."""
_DOUBT = 2.0
"""The standard deviation of the logarithm of a strength along time, about that of the fit."""
_LOOSE = 0.02
"""The precision that effects of times begin with where they are tied to each other, in units of
theta whatever the counts: in units of their dispersion the level of counts of a million had a
deviation of thousands, no proposal found it, and bounds were a tenth as wide as they should be."""
_HELD = 1e6
"""A penalty from here on holds its unknown at zero, and is not drawn."""
_SCALES = (_STEP, _STEP / 4, _STEP / 16)
"""Steps of the walk of a spread of counts: 10,000 counts tell it to 2%, 200 to 20%."""
_SIZE_RATE = 4.0
"""The rate of the prior of a factor's size, whose shape is 2, times the root of their number."""
_SIZES = (1.0, 0.25)
"""Steps of the walk of the logarithm of a factor's size, which records tell badly or well."""
_LOOKED_AT = 997
"""Cells from which the tails of all are read: the median over so many is known to 0.02."""


@dataclass
class _State:
    params: TableParameters
    spread: float
    site_ridge: FloatArray
    time_ridge: FloatArray
    lags: tuple[tuple[int, Strength], ...]
    power: float = 1.0
    """The power of the weights in the size of counts; see `NegativeBinomialCells`."""
    fall: float = 0.0
    """The power of the mean by which the spread of a count falls."""


@final
class Posterior:
    """Draws of the parameters of a table, as arrays with the draw as their first axis.

    Parameters
    ----------
    solver : Solver
        What fits cells, with its family and structure.
    cells : Cells
        The cells, as the server knows them.
    params : TableParameters
        Where the chain begins: the optimum.
    seed : int
        The seed.
    draws : int
        The number of draws; 0 leaves it to the size of the table.
    progress : callable, optional
        A function of what is done, in words, and the share that is done.

    Raises
    ------
    DataError
        If no cell is known here.

    Examples
    --------
    >>> import emfed
    >>> from emfed.imputation import simulate_table
    >>> table = simulate_table(600, observers=40, sites=12, months=24, groups=4, seed=0)
    >>> fit = emfed.impute(table, rank=1, penalty=3.0, draws=10)
    >>> fit.posterior.count
    10
    """

    def __init__(
        self,
        solver: Solver,
        cells: Cells,
        params: TableParameters,
        seed: int,
        draws: int = 0,
        progress: Callable[[str, float], None] | None = None,
    ) -> None:
        if cells.size == 0:
            raise DataError(
                "no cell is known here, so estimates have no bounds: an owner's "
                "table, `transform(table)`, has what it takes."
            )
        self.family, self.seed = solver.family, seed
        if draws:
            check_count("draws", draws, 2)
        else:
            draws = int(np.clip(_WORK / cells.size, _FEWEST, DRAWS))
        chain = _Chain(solver, cells, params, seed)
        (rows, columns), width = params.shape, chain.state.params.sites.shape[1]
        self._like, self._typical = params, chain.typical
        self._identity = self.family.describe() == GaussianCells().describe()
        mean = self.family.backward(cells.sums / cells.weights)
        self.largest = np.inf if self._identity else float(max(mean.max(), 1.0))
        """The largest record of a cell, which no cell is expected to exceed; at least 1."""
        self.offsets, self.spreads, self.falls = np.empty((3, draws))
        self.coefficients = np.empty((draws, len(params.coefficients)))
        # Halves of the memory, and seven digits of a draw are more than it has.
        self.sites = np.empty((draws, rows, width), dtype=np.float32)
        self.times = np.empty((draws, columns, width), dtype=np.float32)
        before = max(_BURN_IN, draws // 2)
        for index in range(-before, draws):
            chain.adapting = index < 0
            chain.sweep()
            if progress is not None:
                progress("drawing for the bounds", (index + 1 + before) / (before + draws))
            if index < 0:
                continue
            state = chain.state
            self.offsets[index], self.spreads[index] = state.params.offset, state.spread
            self.falls[index] = state.fall
            self.coefficients[index] = state.params.coefficients
            self.sites[index], self.times[index] = state.params.sites, state.params.times
        self.kept = chain.kept / (draws + before)
        self.part = chain._part[1]

    @property
    def count(self) -> int:
        """How many draws there are."""
        return len(self.offsets)

    @property
    def spread(self) -> float:
        """The median spread of records: of counts, where the fit has a typical one."""
        return float(np.median(self.spreads))

    def spread_at(self, theta: FloatArray, index: int | None = None) -> float | FloatArray:
        """The spread of records of cells with this theta, by one draw or by the median draw."""
        if index is None:
            spread, fall = self.spread, float(np.median(self.falls))
        else:
            spread, fall = float(self.spreads[index]), float(self.falls[index])
        return spread if fall == 0 else spread * fallen(fall, theta - self._typical)

    def reach(self, level: float) -> float:
        """Standard deviations of theta to either side that hold it with this probability.

        Draws of cells are mixtures over the strengths of factors, with longer tails than a normal:
        of rates, whose records tell little, the middle half lies within 0.64 deviations instead of
        0.67. So they are Student's, with the kurtosis of draws: one for all cells, the median of
        many, as 200 draws tell that of a single cell to 0.35.
        """
        return _reach(self._kurtosis, level)

    @cached_property
    def _kurtosis(self) -> float:
        """The median excess kurtosis of theta, of cells spread over the table."""
        rows, columns = self._like.shape
        places = np.unique(np.linspace(0, rows * columns - 1, _LOOKED_AT).astype(np.int64))
        some = places // columns, places % columns
        theta = np.stack([self.params(index).theta(*some) for index in range(self.count)])
        return _kurtosis_of(theta)

    def params(self, index: int) -> TableParameters:
        """One draw."""
        return replace(
            self._like,
            offset=float(self.offsets[index]),
            sites=self.sites[index],
            times=self.times[index],
            coefficients=self.coefficients[index],
        )

    def move(self, sites: FloatArray, times: FloatArray, covariance: FloatArray) -> None:
        """Move effects as far as coefficients of effort, which were fitted before, are not known.

        ``sites`` and ``times`` are their effort beyond the central one.
        """
        if not self._like.effects:
            return
        # Roots of a matrix that may be singular: coefficients of what does not vary are 0.
        values, vectors = np.linalg.eigh(covariance)
        z = normal_row(self.seed, 0, Purpose.IMPUTATION, self.count * len(values))
        by = z.reshape(self.count, -1) * np.sqrt(np.maximum(values, 0.0)) @ vectors.T
        self.sites[:, :, -1] -= by @ sites.T
        self.times[:, :, -1] -= by @ times.T

    def moments(self, sites: IntArray, times: IntArray) -> CellMoments:
        """Means and variances over draws at the cells named."""
        return self._moments(lambda params: params.theta(sites, times))

    def dense_moments(self, sites: IntArray) -> CellMoments:
        """The same of these sites at all times: ``(len(sites), times)``."""
        return self._moments(lambda params: params.dense(sites))

    def _moments(self, theta_of: Callable[[TableParameters], FloatArray]) -> CellMoments:
        """One draw at a time (Welford).

        The mean of the expected record is taken over draws and not from those of theta: where
        nothing was ever seen theta has a long tail below, and exp(mean + variance / 2) was 9% above
        the held-out total of the wood thrush where this was 2%.
        """
        means, squares = list[FloatArray](), list[FloatArray]()
        for index in range(self.count):
            both = [theta_of(self.params(index))]
            if not self._identity:
                both.append(self.value(both[0], index))
            for k, new in enumerate(both):
                if index == 0:
                    means.append(new.astype(np.float64))
                    squares.append(np.zeros_like(means[k]))
                    continue
                ahead = new - means[k]
                means[k] += ahead / (index + 1)
                squares[k] += ahead * (new - means[k])
        spread = [square / max(1, self.count - 1) for square in squares]
        return CellMoments(means[0], spread[0], means[-1], spread[-1])

    def capped(self, theta: FloatArray) -> FloatArray:
        """The same theta, at most that of the largest record."""
        if self._identity or self.family.name == "bernoulli":
            return theta
        return np.minimum(theta, np.log1p(self.largest))

    def value(self, theta: FloatArray, index: int) -> FloatArray:
        """The expected record of cells with this theta by one draw, at most the largest of all.

        Where a site was hardly seen at such times a draw may lie anywhere, and its exponential is
        no count: one cell of the oystercatcher was expected to hold 4 million birds of log1p.
        """
        expected = self.family.value(theta, float(self.spreads[index]))
        return expected if self._identity else np.minimum(expected, self.largest)

    def totals(self, sites: IntArray) -> FloatArray:
        """Expected records added over these sites, by draw and time."""
        out = np.zeros((self.count, len(self._like.times)))
        for index in range(self.count):
            params = self.params(index)
            for some in in_parts(sites, out.shape[1]):
                out[index] += self.value(params.dense(some), index).sum(axis=0)
        return out

    def site_totals(self, times: IntArray) -> FloatArray:
        """Expected records added over these times, by draw and site."""
        rows, columns = self._like.shape
        out = np.empty((self.count, rows))
        for index in range(self.count):
            params = self.params(index)
            for some in in_parts(np.arange(rows), columns):
                out[index, some] = self.value(params.dense(some)[:, times], index).sum(axis=1)
        return out

    def bounds(
        self, sums: FloatArray, level: float, empty: BoolArray | None = None
    ) -> tuple[FloatArray, FloatArray]:
        """Bounds of sums over draws, on the scale where their errors are symmetric.

        They are Student's, as `reach` is, and need fewer draws than quantiles: the 5% quantile of
        200 draws is their tenth. Sums that are ``empty`` of records have tails of their own: how
        far a walk goes ahead of all records hangs on a strength that is badly known.
        """
        scale = self.family.widen(sums)
        middle, half = scale.mean(axis=0), scale.std(axis=0, ddof=1)
        groups = [slice(None)] if empty is None else [~empty, empty]
        for group in groups:
            if half[group].size:
                half[group] *= _reach(_kurtosis_of(scale[:, group]), level)
        return self.family.narrow(middle - half), self.family.narrow(middle + half)


def _reach(kurtosis: float, level: float) -> float:
    """Standard deviations to either side that hold Student's of this excess kurtosis."""
    freedom = 4 + 6 / min(max(kurtosis, 1e-3), 6.0)  # at least 5; normal draws have thousands
    return float(stdtrit(freedom, (1 + level) / 2)) * (1 - 2 / freedom) ** 0.5


def _kurtosis_of(draws: FloatArray) -> float:
    """The median excess kurtosis of columns."""
    away = draws - draws.mean(axis=0)
    squares = np.maximum((away**2).mean(axis=0), 1e-300)
    return float(np.median((away**4).mean(axis=0) / squares**2)) - 3


def dispersion(family: CellFamily, cells: Cells, params: TableParameters) -> float:
    """How many times the variance of the family records have, at least once."""
    at = params.theta(cells.sites, cells.times), cells.sums, cells.weights
    return max(1.0, float((family.score(*at) ** 2).sum() / family.gain(*at).sum()))


@final
class _Chain:
    """Gibbs sweeps from the fit on."""

    def __init__(self, solver: Solver, cells: Cells, params: TableParameters, seed: int) -> None:
        self.solver, self.cells = solver, cells
        self._words = word_source(seed, 1, Purpose.IMPUTATION, 0)
        self._quadratic = solver.family.quadratic
        spread = self._start(params)
        self.typical = float(np.median(params.theta(cells.sites, cells.times)))
        """The theta whose counts have the spread of the state."""
        self._scale = spread if self._quadratic else 1.0
        """The square of what theta is measured in."""
        self._unit = spread if self._quadratic else dispersion(solver.family, cells, params)
        """What a penalty is divided by to be a precision, at the start.

        Penalties are chosen in this unit (`Search.units`). Taken as precisions they held effects of
        the oystercatcher, whose counts have hundreds of times Poisson's variance, that much too
        tight.
        """
        self._begin = self._first(params, spread)
        if isinstance(solver.family, Counts):
            self._begin = self._likeliest(solver.family)
        params = self._begin.params
        self.state = replace(self._begin)
        self._size_rate = _SIZE_RATE * max(1, params.rank) ** 0.5
        self._modes = [params.sites, params.times]
        self._graph = solver.covariates.graph if solver.structure.spatial > 0 else None
        everyone = np.arange(params.shape[0])
        # Tied sites are drawn together, so that those without a record count, too.
        self._seen = np.unique(cells.sites) if self._graph is None else everyone
        penalties = solver.structure.ridge(solver.structure.site_penalty) + 1e-9
        ties = np.zeros(params.sites.shape[1])
        ties[len(ties) - len(penalties) :] = solver.structure.spatial / penalties
        self._ties = ties
        """How strongly neighbours are tied, in units of the pull to zero."""
        self._ridge = solver.structure.covariate_penalty / self._unit
        self._drift = drift_of(params.effects, params.shape[1]) / self._scale
        known = params.covariates
        self._site_covariates = known.sites.shape[1]
        self._designs = (
            _with_constant(known.sites, params.shape[0])[self._seen],
            _with_constant(known.times, params.shape[1]),
        )
        self._part, self.adapting = [1.0, 1.0], True
        """How far tied rows go, and whether that is still being learned."""
        self.kept = np.zeros(2)
        """Proposals of sites and of times, the share that was kept, added over sweeps."""

    def _first(self, params: TableParameters, spread: float) -> _State:
        """The fit, its penalties as precisions, and spare factors.

        Cross-validation takes a factor only where it is sure to pay. A weak one is part of what is
        not known, so the chain has one more, and times may be tied where the fit ties none.
        """
        structure, (rows, columns) = self.solver.structure, params.shape
        unit = self._unit
        spare = SPARE if structure.effects and min(rows, columns) > params.rank + SPARE else 0
        site, time = (
            np.concatenate([np.ones(spare), (structure.ridge(effect) + 1e-9) / unit])
            for effect in (structure.site_penalty, structure.time_penalty)
        )
        chosen = dict(lags_of(structure.smoothing, structure.seasonality, columns))
        lags = dict(chosen)
        if structure.effects and columns > 3:
            lags.setdefault(1, structure.time_penalty)
        if structure.effects and lags:
            # Tied effects need no pull to zero but to be determined: a random walk widens with its
            # lead, where a pulled one comes back.
            time[-1] = min(time[-1], _LOOSE / self._scale)
        weak = _WEAK * self._scale**0.5
        z = self._normals((rows + columns) * spare)
        more = z[: rows * spare].reshape(rows, spare), z[rows * spare :].reshape(columns, spare)
        params = replace(
            params,
            sites=np.concatenate([weak * more[0], params.sites], axis=1),
            times=np.concatenate([more[1], params.times], axis=1),
        )
        ties = {lag: np.full(len(time), strength / unit) for lag, strength in lags.items()}
        if not structure.effects:
            return _State(params, spread, site, time, tuple(ties.items()))
        params, factors = _unit_times(params), slice(0, params.rank)
        for lag, strength in ties.items():
            strength[factors] = _TIE
            if structure.penalty > 0 and lag in chosen:
                strength[spare : params.rank] = lags[lag] / structure.penalty
        size = np.maximum(np.mean(params.sites[:, factors] ** 2, axis=0), weak**2)
        site[factors] = np.where(site[factors] * unit < _HELD, 1 / size, site[factors])
        time[factors] = 1.0
        return _State(params, spread, site, time, tuple(ties.items()))

    def _likeliest(self, counts: Counts) -> _State:
        """The likeliest spread of counts at the fit, on a grid.

        From a spread that is far too small all factors grow to follow single records, and a chain
        takes hundreds of sweeps to find back.
        """
        begin, cells = self._begin, self.cells
        theta = begin.params.theta(cells.sites, cells.times)
        falls = (0.0,) if counts.even_spread else (0.05, 0.35, 0.65, 0.95)
        grid = [(spread, fall) for spread in np.geomspace(1e-3, 30, 14) for fall in falls]
        spread, fall = max(
            grid, key=lambda one: self._likelihood(counts, theta, one[0], begin.power, one[1])
        )
        return replace(begin, spread=float(spread), fall=fall)

    def _likelihood(
        self, counts: Counts, theta: FloatArray, spread: float, power: float, fall: float
    ) -> float:
        """The log density of a spread of counts where theta is known; its prior has mean 1."""
        family = counts.in_chain(spread, power, fall, self.typical)
        known = self.cells.sums, self.cells.weights
        inner = family.normaliser(*known) - float(family.loss(theta, *known).sum())
        return float(inner - spread + np.log(spread))

    def _start(self, params: TableParameters) -> float:
        if not self._quadratic:
            return 0.0  # that of counts follows
        cells = self.cells
        residual = cells.sums / cells.weights - params.theta(cells.sites, cells.times)
        return max(1e-12, float(np.mean(cells.weights * residual**2)))

    def _family(self) -> CellFamily:
        """The likelihood that the rows see."""
        family = self.solver.family
        if not isinstance(family, Counts):
            return family
        state = self.state
        return family.in_chain(state.spread, state.power, state.fall, self.typical)

    def _in_units(self) -> tuple[FloatArray, FloatArray]:
        """Weights and sums in units of the spread."""
        cells, unit = self.cells, self.state.spread
        if not self._quadratic:
            return cells.weights, cells.sums
        return cells.weights / unit, cells.sums / unit

    def _normals(self, size: int) -> FloatArray:
        return to_normals(self._words(size))

    def _uniforms(self, size: int) -> FloatArray:
        return to_uniforms(self._words(size))

    def _gamma(self, shape: float, rate: float) -> float:
        return max(1e-12, float(gammaincinv(shape, self._uniforms(1)[0]))) / rate

    def sweep(self) -> None:
        """Everything once."""
        self._draw_spread()
        self._draw_strengths()
        self._draw_common()
        self._draw_sites()
        self._draw_times()
        self._rescale()
        self._shift()

    def _draw_spread(self) -> None:
        """Conjugate for the Gaussian; for counts a random walk of its logarithm."""
        state, cells = self.state, self.cells
        theta = state.params.theta(cells.sites, cells.times)
        if self._quadratic:
            residual = cells.sums / cells.weights - theta
            squares = float((cells.weights * residual**2).sum())
            state.spread = 1 / self._gamma(
                _PRIOR + cells.size / 2, _PRIOR * self._begin.spread + squares / 2
            )
        elif isinstance(counts := self.solver.family, Counts):
            tries = len(_SCALES)
            moves, chances = self._normals(3 * tries).reshape(tries, 3), self._uniforms(tries)
            now = self._likelihood(counts, theta, state.spread, state.power, state.fall)
            for scale, move, chance in zip(_SCALES, moves, chances, strict=True):
                other = float(np.clip(state.spread * np.exp(scale * move[0]), 1e-5, 1e3))
                power, fall = (
                    float(np.abs((x + scale / 2 * z + 1) % 2 - 1))  # reflected at 0 and at 1
                    for x, z in ((state.power, move[1]), (state.fall, move[2]))
                )
                if counts.even_spread:
                    fall = 0.0
                there = self._likelihood(counts, theta, other, power, fall)
                if np.log(chance + 1e-300) < there - now:
                    state.spread, state.power, state.fall, now = other, power, fall, there

    def _draw_strengths(self) -> None:
        """Precisions of the priors: of each factor and effect of sites, and of effects of times.

        Rows of sites without a record are left out, as they only repeat what was drawn.
        """
        state, begin = self.state, self._begin
        rows = state.params.sites[self._seen]
        ridge = state.site_ridge.copy()
        for k in range(rows.shape[1]):
            if begin.site_ridge[k] * self._unit >= _HELD:
                continue
            squares = float((rows[:, k] ** 2).sum())
            if self._graph is not None:
                squares += self._ties[k] * float(rows[:, k] @ (self._graph.laplacian @ rows[:, k]))
            if state.params.effects and k < state.params.rank:
                ridge[k] = self._draw_size(len(rows), squares, ridge[k])
            else:
                ridge[k] = self._gamma(
                    _PRIOR + len(rows) / 2, _PRIOR / begin.site_ridge[k] + squares / 2
                )
        state.site_ridge = ridge
        if state.params.effects:
            self._draw_time_strengths()

    def _draw_size(self, count: int, squares: float, here: float) -> float:
        """The precision of a factor of so many sites, given their squares.

        Proposed by what the sites say, and kept by what the prior adds to it.
        """
        shape = max(count / 2 - 1, 0.5)
        other = self._gamma(shape, max(squares, 1e-12) / 2)

        def weight(precision: float) -> float:
            size = (precision * self._scale) ** -0.5
            return (count / 2 - 1 - shape) * np.log(precision) - self._size_rate * size

        chance = np.log(self._uniforms(1)[0] + 1e-300)
        return other if chance < weight(other) - weight(here) else here

    def _draw_time_strengths(self) -> None:
        """The precisions of each column of times: to zero, and to each neighbour it is tied to.

        A factor's precision to zero stays 1: its size is that of the sites.
        """
        state, begin, values = self.state, self._begin, self.state.params.times
        names, (count, width) = [lag for lag, _ in state.lags], values.shape
        squares = _forms(values, values, names)
        # Effects have a line that costs nothing: products with it, and its squares.
        x = line(count)[:, None] if self._drift else np.zeros((count, 1))
        cross, own = _forms(x, values[:, -1:], names)[0], _forms(x, x, names)[0]
        first, here = (
            np.log(np.stack([one.time_ridge, *(s for _, s in one.lags)], axis=1))
            for one in (begin, state)
        )

        def value(logs: FloatArray) -> FloatArray:
            strengths = np.exp(logs)
            inner = _log_determinants(count, strengths, names)
            price = (strengths * squares).sum(axis=1)
            if self._drift:
                size = float(strengths[-1] @ own) + self._drift
                inner[-1] -= np.log(size)
                price[-1] -= float(strengths[-1] @ cross) ** 2 / size
            return np.asarray((inner - price - (((logs - first) / _DOUBT) ** 2).sum(axis=1)) / 2)

        tries, steps = 4, np.full(here.shape, _STEP)
        steps[: state.params.rank, 0] = 0.0
        moves = self._normals(tries * here.size).reshape(tries, *here.shape)
        chances = np.log(self._uniforms(tries * width) + 1e-300).reshape(tries, width)
        now = value(here)
        for move, chance in zip(moves, chances, strict=True):
            other = here + steps * move
            there = value(other)
            keep = chance < there - now
            here, now = np.where(keep[:, None], other, here), np.where(keep, there, now)
        strengths = np.exp(here)
        state.time_ridge = strengths[:, 0]
        state.lags = tuple((lag, strengths[:, 1 + j]) for j, lag in enumerate(names))

    def _draw_common(self) -> None:
        """The offset and the coefficients."""
        cells, params, family = self.cells, self.state.params, self._family()
        weights, sums = self._in_units()
        theta = params.theta(cells.sites, cells.times)
        design = np.ones((cells.size, 1 + len(params.coefficients)))
        if len(params.coefficients):
            design[:, 1:] = params.covariates.design(cells.sites, cells.times)
        ridge = np.diag([1e-9 / self._scale, *[self._ridge] * len(params.coefficients)])
        here = np.concatenate([[params.offset], params.coefficients])
        mode = here
        for _ in range(1 if family.quadratic else 2):
            at = theta + design @ (mode - here)
            score, gain = family.slopes(at, sums, weights)
            precision = design.T @ (gain[:, None] * design) + ridge
            slope = design.T @ score - ridge @ mode
            mode = mode + np.clip(np.linalg.solve(precision, slope), -1.0, 1.0)
        if family.quadratic:
            mode = here + np.linalg.solve(precision, slope)
        jump = np.linalg.solve(np.linalg.cholesky(precision).T, self._normals(len(here)))
        new = mode + jump

        def value(point: FloatArray, at: FloatArray) -> float:
            away = point - mode
            left = float(family.loss(at, sums, weights).sum()) + 0.5 * float(point @ ridge @ point)
            return 0.5 * float(away @ precision @ away) - left

        if not family.quadratic:
            ratio = value(new, theta + design @ (new - here)) - value(here, theta)
            if np.log(self._uniforms(1)[0] + 1e-300) >= ratio:
                return
        self.state.params = replace(params, offset=float(new[0]), coefficients=new[1:])

    def _draw_sites(self) -> None:
        cells, params = self.cells, self.state.params
        ridge = self.state.site_ridge
        known = (cells.sites, cells.times, params.times, params.effects, ridge)
        side = Side(*known, graph=self._graph, tie=self._ties * ridge)
        rest = params.base(cells.sites, cells.times)
        if params.effects:
            rest = rest + params.times[cells.times, params.rank]
        self.state.params = replace(params, sites=self._rows(side, params.sites, rest, 0))

    def _draw_times(self) -> None:
        cells, params, state = self.cells, self.state.params, self.state
        known = (cells.times, cells.sites, params.sites, params.effects)
        side = Side(*known, state.time_ridge, state.lags, self._drift)
        rest = params.base(cells.sites, cells.times)
        if params.effects:
            rest = rest + params.sites[cells.sites, params.rank]
        state.params = replace(params, times=self._rows(side, params.times, rest, 1))

    def _rows(self, side: Side, rows: FloatArray, rest: FloatArray, which: int) -> FloatArray:
        """One side's rows drawn given the other's."""
        if rows.size == 0:
            return rows
        family, (weights, sums) = self._family(), self._in_units()
        noise = self._normals(side.noises(len(rows)))
        if family.quadratic:
            theta = rest + side.contribution(rows)
            score = family.score(theta, sums, weights)
            information = side.information(family.gain(theta, sums, weights), len(rows))
            return rows + side.solve(information, side.gradient(score, rows), noise)
        mode, information, step = self._mode(side, family, rest, noise, which)
        # Tied rows stand or fall together: they go a part of the way where few would stand. This
        # move is reversible for the normal about the mode, so the rule needs no other term.
        part = self._part[which] if side.tied else 1.0
        new = mode + np.sqrt(1 - part**2) * (rows - mode) + part * step

        def value(point: FloatArray) -> FloatArray:
            """Log density less that of the proposal, by row."""
            away = point - mode
            inner = np.einsum("ji,jik,jk->j", away, information, away) / 2 + side.price(away)
            theta = rest + side.contribution(point)
            return np.asarray(inner - objective(side, family, point, theta, weights, sums))

        ratio = value(new) - value(rows)
        if side.tied:  # tied rows: all or none
            ratio = np.full(len(rows), ratio.sum())
            chance = np.full(len(rows), self._uniforms(1)[0])
            if self.adapting:
                likely = float(np.exp(min(0.0, ratio[0])))
                part = part * float(np.exp(0.3 * (likely - 0.4)))
                self._part[which] = float(np.clip(part, 0.02, 1.0))
        else:
            chance = self._uniforms(len(rows))
        keep: BoolArray = np.log(chance + 1e-300) < ratio
        self.kept[which] += float(keep.mean())
        return np.where(keep[:, None], new, rows)

    def _mode(
        self, side: Side, family: CellFamily, rest: FloatArray, noise: FloatArray, which: int
    ) -> tuple[FloatArray, FloatArray, FloatArray]:
        """About where rows are proposed: near their mode, the information there, and a draw.

        Steps go from the last mode on, as long as they are large. It need not be the very mode:
        the rule that keeps proposals takes their density into account.
        """
        (weights, sums), mode = self._in_units(), self._modes[which]
        for _ in range(_NEWTON):
            theta = rest + side.contribution(mode)
            score, gain = family.slopes(theta, sums, weights)
            information = side.information(gain, len(mode))
            slope = side.gradient(score, mode)
            step, jump = side.solve_and_draw(information, slope, noise)
            ahead = (slope * step).sum(axis=1)
            far = float(ahead.sum() if side.tied else ahead.max())
            if far < _CLOSE:
                mode = mode + step
                break
            mode = damped(side, family, mode, step, rest, weights, sums)
        self._modes[which] = mode
        return mode, information, jump

    def _rescale(self) -> None:
        """A walk of each factor's size, its sites along with it.

        Given the sites a size is known to one part in ten, so that drawing the two in turn leaves a
        factor that began small small for long (Yu and Meng 2011 move both ways in turn, too).
        """
        state, cells, family = self.state, self.cells, self._family()
        if not state.params.effects:
            return
        weights, sums = self._in_units()
        theta = state.params.theta(cells.sites, cells.times)
        now = float(family.loss(theta, sums, weights).sum())
        moves = self._normals(2 * state.params.rank).reshape(-1, 2)
        chances = self._uniforms(2 * state.params.rank).reshape(-1, 2)
        for k in range(state.params.rank):
            if self._begin.site_ridge[k] * self._unit >= _HELD:
                continue
            params, size = state.params, (state.site_ridge[k] * self._scale) ** -0.5
            part = params.sites[cells.sites, k] * params.times[cells.times, k]
            by = 1.0
            for scale, move, chance in zip(_SIZES, moves[k], chances[k], strict=True):
                other = by * float(np.exp(scale * move))
                there = float(family.loss(theta + (other - by) * part, sums, weights).sum())
                prior = 2 * np.log(other / by) - self._size_rate * size * (other - by)
                if np.log(chance + 1e-300) < now - there + prior:
                    theta, now, by = theta + (other - by) * part, there, other
            sites, ridge = params.sites.copy(), state.site_ridge.copy()
            sites[:, k] *= by
            ridge[k] /= by**2
            self._modes[0] = self._modes[0].copy()
            self._modes[0][:, k] *= by
            state.params, state.site_ridge = replace(params, sites=sites), ridge

    def _shift(self) -> None:
        """Exact moves along which the cells tell nothing: between offset, coefficients and effects.

        Without them offset and coefficients creep, and their errors come out too small.
        """
        state, params = self.state, self.state.params
        if not params.effects:
            return
        sites, times, split = params.sites.copy(), params.times.copy(), self._site_covariates
        offset, beta = params.offset, params.coefficients.copy()
        tie = self._ties[-1:] * state.site_ridge[-1:]
        side = Side.penalty(state.site_ridge[-1:], graph=self._graph, tie=tie)
        by = self._along(side, sites[self._seen, -1:], self._designs[0], beta[:split])
        sites[self._seen, -1] -= self._designs[0] @ by
        # Modes go along, or the next proposals would have to find the way.
        self._modes[0] = self._modes[0].copy()
        self._modes[0][self._seen, -1] -= self._designs[0] @ by
        offset, beta[:split] = offset + float(by[0]), beta[:split] + by[1:]
        ties = tuple((lag, np.asarray(strength)[-1:]) for lag, strength in state.lags)
        side = Side.penalty(state.time_ridge[-1:], ties, self._drift)
        by = self._along(side, times[:, -1:], self._designs[1], beta[split:])
        times[:, -1] -= self._designs[1] @ by
        self._modes[1] = self._modes[1].copy()
        self._modes[1][:, -1] -= self._designs[1] @ by
        offset, beta[split:] = offset + float(by[0]), beta[split:] + by[1:]
        state.params = replace(params, offset=offset, sites=sites, times=times, coefficients=beta)

    def _along(
        self, side: Side, effects: FloatArray, design: FloatArray, beta: FloatArray
    ) -> FloatArray:
        """How much of the effects goes to (1, covariates): normal, by the prior of the effects."""
        ridge = np.diag([1e-9 / self._scale, *[self._ridge] * len(beta)])
        pulled = np.concatenate([side.pull(column[:, None]) for column in design.T], axis=1)
        precision = design.T @ pulled + ridge
        right = pulled.T @ effects[:, 0] - ridge @ np.concatenate([[0.0], beta])
        noise = np.linalg.solve(np.linalg.cholesky(precision).T, self._normals(len(precision)))
        return np.asarray(np.linalg.solve(precision, right) + noise)


def _with_constant(covariates: FloatArray, count: int) -> FloatArray:
    own = covariates if len(covariates) == count else np.empty((count, 0))
    return np.concatenate([np.ones((count, 1)), own], axis=1)


def _unit_times(params: TableParameters) -> TableParameters:
    """The same product with factors of times of unit size."""
    rank = params.rank
    size = np.sqrt(np.mean(params.times[:, :rank] ** 2, axis=0))
    size = np.concatenate([np.where(size > 0, size, 1.0), np.ones(params.sites.shape[1] - rank)])
    return replace(params, sites=params.sites * size, times=params.times / size)


def _forms(left: FloatArray, right: FloatArray, lags: list[int]) -> FloatArray:
    """left' P right of each column: for the strength to zero, and for that at each lag."""
    ties = [((left[lag:] - left[:-lag]) * (right[lag:] - right[:-lag])).sum(axis=0) for lag in lags]
    return np.stack([(left * right).sum(axis=0), *ties], axis=1)


@lru_cache(maxsize=16)
def _differences(count: int) -> FloatArray:
    """The eigenvalues of squared differences of neighbours: those of a path of ``count`` places."""
    out: FloatArray = 2 - 2 * np.cos(np.pi * np.arange(count) / count)
    out.flags.writeable = False  # all callers share it
    return out


def _log_determinants(count: int, strengths: FloatArray, lags: list[int]) -> FloatArray:
    """The log-determinant of the prior's precision along time, for each row of strengths."""
    if not lags:
        return np.asarray(count * np.log(strengths[:, 0]))
    if lags == [1]:
        values = strengths[:, :1] + strengths[:, 1:] * _differences(count)
        return np.asarray(np.log(values).sum(axis=1))
    return np.array([_log_determinant(count, each, lags) for each in strengths])


def _log_determinant(count: int, strengths: FloatArray, lags: list[int]) -> float:
    """The same of one row, by its banded factor."""
    band = np.zeros((max(lags) + 1, count))
    band[-1] = strengths[0]
    for lag, strength in zip(lags, strengths[1:], strict=True):
        band[-1, lag:] += strength
        band[-1, :-lag] += strength
        band[-1 - lag, lag:] -= strength
    return 2 * float(np.log(cholesky_banded(band)[-1]).sum())
