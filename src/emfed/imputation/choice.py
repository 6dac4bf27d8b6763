"""Rank and penalties by cross-validation on what the server knows: it costs no bytes.

The cells are cut at random into folds; each structure is fitted to all folds but one and judged on
that one by its deviance. The search goes one setting at a time, from a middling structure on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, final

import numpy as np

from emfed.core.errors import check_count
from emfed.core.streams import Purpose, uniform_row
from emfed.imputation.families import CellFamily
from emfed.imputation.lowrank import Cells, Covariates, Structure, TableParameters
from emfed.imputation.sweeps import Solver
from emfed.models.sides import FREE

logger = logging.getLogger(__name__)
RANKS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Tried upward until two in a row do not pay. A weekly table gained 2% at rank 24."""
ABOUT = 36
"""Structures that a search tries, roughly: for those who show how far it is."""
_STAGE = "choosing rank and penalties"
SHARES = (0.1, 0.2, 0.35, 0.6, 1.0)
"""Penalties of the factors, in units of the largest singular value that noise alone would have."""
EFFECTS = (0.1, 0.5, 2.0)
"""Penalties of effects that are tried, for one observation."""
SMOOTHING = ((0.0, 0.0), (10.0, 0.0), (10.0, 30.0), (30.0, 30.0), (100.0, 100.0))
"""Penalties of effects, and of differences along time (lag 1, lag 12), for one observation."""
SPATIAL = (0.3, 1.0, 3.0, 10.0, 30.0)
"""Penalties of differences of neighbouring sites that are tried, for one observation. With 5 to 10
neighbours each, the largest makes a site with ten records follow those around it."""
COEFFICIENTS = (1.0, 10.0, 100.0, 1000.0)
"""Penalties of the coefficients of covariates that are tried beside `FREE`: the largest holds them
near zero on a table of some thousand records."""
_GAIN = 1e-3
"""A further factor must lower the deviance by this share to be worth having."""


_TIES_GAIN = 0.01
"""Ties between neighbouring sites must lower the held-out deviance by this share. It was chosen on
the simulated maps of tests/imputation/test_space.py: with no such bar, chance took ties on rough
maps, which then predicted worse."""


@final
@dataclass(frozen=True)
class Choice:
    """The structure chosen, and every one that was tried with its held-out deviance.

    Examples
    --------
    >>> from emfed.imputation import Choice, Structure
    >>> Choice(Structure(rank=1), ((Structure(rank=1), 0.5),)).describe()[0]["deviance"]
    0.5
    """

    structure: Structure
    """The structure with the least held-out deviance."""
    tried: tuple[tuple[Structure, float], ...] = field(repr=False)
    """Each structure that was tried, and its held-out deviance."""

    def describe(self) -> list[dict[str, Any]]:
        """One row per structure tried."""
        return [{**vars(structure), "deviance": score} for structure, score in self.tried]


@final
class Search:
    """Structures of one table, judged by held-out deviance, each once.

    Parameters
    ----------
    cells : Cells
        The cells of all workers, as the server knows them.
    family : CellFamily
        The family of a record.
    covariates : Covariates, optional
        What is known of sites and times.
    folds : int
        The number of parts of the cross-validation.
    seed : int
        The seed of the parts.
    report : callable, optional
        A function of what is done, in words, and the share that is done.

    Examples
    --------
    >>> import emfed
    >>> from emfed.imputation import simulate_table
    >>> table = simulate_table(600, observers=40, sites=12, months=24, groups=4, seed=0)
    >>> search = emfed.imputation.Search(table.pooled, table.family)
    >>> search.choose(rank=0, smoothing=0.0, seasonality=0.0).structure.rank
    0
    """

    def __init__(
        self,
        cells: Cells,
        family: CellFamily,
        covariates: Covariates | None = None,
        *,
        folds: int = 3,
        seed: int = 0,
        report: Callable[[str, float], None] | None = None,
    ) -> None:
        check_count("folds", folds, 2)
        self.cells, self.family, self.covariates, self.seed = cells, family, covariates, seed
        self.report = report or (lambda stage, share: None)
        self.interrupted = False
        u = uniform_row(seed, 0, Purpose.CELLS, cells.size)
        self._fold = (u * folds).astype(np.int64)
        self._folds, self.tried = folds, dict[Structure, float]()
        self._starts = dict[tuple[Structure, int], TableParameters]()

    def score(self, structure: Structure) -> float:
        """Mean deviance per unit of weight on cells that were left out."""
        if structure not in self.tried:
            total = 0.0
            for fold in range(self._folds):
                out = self.cells.take(np.flatnonzero(self._fold == fold))
                rest = self.cells.take(np.flatnonzero(self._fold != fold))
                solver = self._solver(structure)
                start = solver.start(rest, self._additive(solver, fold, rest))
                theta = solver.descend(rest, start).theta(out.sites, out.times)
                total += float(self.family.deviance(theta, out.sums, out.weights).sum())
            self.tried[structure] = total / float(self.cells.weights.sum())
            share = len(self.tried) / (len(self.tried) + max(2, ABOUT - len(self.tried)))
            self.report(_STAGE, share)
            logger.debug("%s: held-out deviance %.5f", structure, self.tried[structure])
        return self.tried[structure]

    def _additive(self, solver: Solver, fold: int, rest: Cells) -> TableParameters:
        """The additive fit that structures of other ranks and factor penalties share."""
        key = replace(solver.structure, rank=0, penalty=0.0), fold
        if key not in self._starts:
            self._starts[key] = solver.additive(rest)
        return self._starts[key]

    def _solver(self, structure: Structure) -> Solver:
        return Solver(
            self.family, structure, self.covariates, sweeps=25, tolerance=1e-4, seed=self.seed
        )

    def units(self) -> tuple[float, float]:
        """What one unit of penalty is: for effects, and for factors.

        For effects the dispersion of the additive fit (1 for the Gaussian, whose penalties are
        ratios of variances). For factors the largest singular value of noise on these cells: the
        root mean square of their scores times sqrt(cells per site) + sqrt(cells per time).
        """
        solver = self._solver(Structure(rank=0))
        params = solver.fit(self.cells)
        theta = params.theta(self.cells.sites, self.cells.times)
        known = self.cells.sums, self.cells.weights
        score, gain = self.family.score(theta, *known), self.family.gain(theta, *known)
        rows, columns = (len(np.unique(i)) for i in (self.cells.sites, self.cells.times))
        root = np.sqrt(self.cells.size)
        noise = float(np.sqrt(np.mean(score**2)) * root * (rows**-0.5 + columns**-0.5))
        spread = float((score**2).sum() / gain.sum())
        return 1.0 if self.family.quadratic else max(1.0, spread), max(noise, 1e-9)

    def choose(
        self,
        *,
        rank: int | None = None,
        penalty: float | None = None,
        smoothing: float | None = None,
        seasonality: float | None = None,
        spatial: float | None = None,
        covariate_penalty: float | None = None,
        seasons: bool = True,
        hints: tuple[Structure, ...] = (),
    ) -> Choice:
        """The structure with the least held-out deviance, but for what is given.

        ``hints`` are structures to go on from, if they are better than the first. Ctrl-C ends the
        search with the best so far.
        """
        try:
            unit, noise = self.units()
            ties = _lags(seasons, unit, smoothing, seasonality)
            here = Structure(
                rank=min(2, min(self.cells.shape) - 1) if rank is None else rank,
                penalty=float(0.35 * noise if penalty is None else penalty),
                site_penalty=0.5 * unit,
                time_penalty=0.5 * unit,
                spatial=float(spatial or 0.0),
                covariate_penalty=FREE if covariate_penalty is None else covariate_penalty,
                **ties[0],
            )
            here = self._best(here, iter(hints))
            free = rank is None, penalty is None
            best = self._search(here, free, ties, (unit, noise))
            known = self.covariates or Covariates()
            if covariate_penalty is None and known.count:
                some = (replace(best, covariate_penalty=s * unit) for s in COEFFICIENTS)
                best = self._best(best, some)
            if spatial is None and known.graph is not None:
                best = self._tied(best, free[0], unit)
        except KeyboardInterrupt:
            self.interrupted = True
            plain = Structure(rank=rank or 0)
            best = min(self.tried, key=lambda one: self.tried[one], default=plain)
        self.report(_STAGE, 1.0)
        return Choice(best, tuple(self.tried.items()))

    def _search(
        self,
        here: Structure,
        free: tuple[bool, bool],
        ties: list[dict[str, Any]],
        units: tuple[float, float],
    ) -> Structure:
        """One setting at a time; ``free`` says whether rank and penalty are to be chosen."""
        unit, noise = units
        here = self._best(here, (replace(here, **tie) for tie in ties))
        if free[0]:
            here = self._climb(here)
        if free[1] and here.rank:
            here = self._best(here, (replace(here, penalty=s * noise) for s in SHARES))
        if free[0] and here.rank:
            here = self._climb(here)
        here = self._best(here, (replace(here, **tie) for tie in ties))
        here = self._best(here, (replace(here, site_penalty=s * unit) for s in EFFECTS))
        return self._best(here, (replace(here, time_penalty=s * unit) for s in EFFECTS))

    def _tied(self, here: Structure, free_rank: bool, unit: float) -> Structure:
        """Sites tied to their neighbours, if that pays; else what was found without."""
        loose = replace(here, site_penalty=EFFECTS[0] * unit)  # ties shrink, too
        ties = [s * unit for s in SPATIAL]
        tied = min((replace(loose, spatial=s) for s in ties), key=self.score)
        if self.score(tied) >= self.score(here):
            return here
        if free_rank:
            tied = self._climb(tied)
            tied = self._best(tied, (replace(tied, spatial=s) for s in ties))
        return tied if self.score(tied) < (1 - _TIES_GAIN) * self.score(here) else here

    def _best(self, here: Structure, others: Iterator[Structure]) -> Structure:
        """The best of these; ``here`` among equals."""
        return min([here, *others], key=self.score)

    def _climb(self, here: Structure) -> Structure:
        """Ranks upward while they pay, from 0 on: fewer factors among near equals."""
        best, stale = replace(here, rank=0), 0
        if here.rank and self.score(here) < (1 - _GAIN) * self.score(best):
            best = here  # a start that was better already is not forgotten
        for rank in RANKS:
            if rank >= min(self.cells.shape):
                break
            other = replace(here, rank=rank)
            if self.score(other) < (1 - _GAIN) * self.score(best):
                best, stale = other, 0
            elif rank > best.rank:
                stale += 1
            if stale == 2:
                break
        return best


def _lags(
    seasons: bool, unit: float, smoothing: float | None, seasonality: float | None
) -> list[dict[str, Any]]:
    """Penalties along time to try: lag 12 where there are seasons, and what is given as it is."""
    pairs = dict.fromkeys(
        (
            s * unit if smoothing is None else smoothing,
            (t * unit if seasons else 0.0) if seasonality is None else seasonality,
        )
        for s, t in SMOOTHING
    )
    return [{"smoothing": s, "seasonality": t} for s, t in pairs]
