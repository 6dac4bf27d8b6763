"""T(S): the parameters that minimise the penalised negative log-likelihood of cell sums.

An additive fit, then the leading factors of its sparse residual, then alternating sweeps until the
objective no longer falls. Every step costs cells x rank^2 operations; the factors of a sparse
matrix come from matrix-vector products.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, final

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.linalg import svds

from emfed.core.errors import NumericalError
from emfed.core.protocols import FloatArray, IntArray
from emfed.core.streams import Purpose, normal_row
from emfed.imputation.families import CellFamily
from emfed.imputation.lowrank import Cells, Covariates, Structure, TableParameters
from emfed.imputation.rows import newton, site_side, time_side
from emfed.models.sides import Side

_SMALL = 10_000
"""Entries of a matrix up to which all of its factors take less time than the leading ones."""


@final
class Solver:
    """T for one family and structure."""

    def __init__(
        self,
        family: CellFamily,
        structure: Structure,
        covariates: Covariates | None = None,
        *,
        sweeps: int = 30,
        tolerance: float = 1e-5,
        seed: int = 0,
    ) -> None:
        self.family, self.structure = family, structure
        self.covariates = covariates or Covariates()
        self.sweeps, self.tolerance, self.seed = sweeps, tolerance, seed

    def fit(self, cells: Cells, warm: TableParameters | None = None) -> TableParameters:
        """Sweeps from ``warm``, or from the additive fit and the factors of its residual."""
        start = self.start(cells) if warm is None else warm
        return self.descend(cells, start)

    def additive(self, cells: Cells) -> TableParameters:
        """The fit of rank 0 under the same penalties."""
        return self.descend(cells, self._nothing(cells), replace(self.structure, rank=0))

    def start(self, cells: Cells, additive: TableParameters | None = None) -> TableParameters:
        """The additive fit, and the leading factors of what it leaves."""
        additive = self.additive(cells) if additive is None else additive
        if self.structure.rank == 0:
            return additive
        theta = additive.theta(cells.sites, cells.times)
        gain = np.maximum(self.family.gain(theta, cells.sums, cells.weights), 1e-12)
        score = self._score(cells, theta)
        # Shrunk one by one: a cell's own step under the penalty its factors will pay.
        residual = score / (gain + self.structure.penalty + 1e-3)
        left, values, right = leading(
            csr_array((residual, (cells.sites, cells.times)), shape=cells.shape),
            self.structure.rank,
            self.seed,
        )
        root = np.sqrt(values)
        tail = slice(0, additive.sites.shape[1])
        return replace(
            additive,
            sites=np.concatenate([left * root, additive.sites[:, tail]], axis=1),
            times=np.concatenate([right * root, additive.times[:, tail]], axis=1),
        )

    def descend(
        self, cells: Cells, params: TableParameters, structure: Structure | None = None
    ) -> TableParameters:
        """Sweeps until the objective falls by less than the tolerance, relatively, or they end."""
        structure = self.structure if structure is None else structure
        value = self.objective(cells, params, structure)
        quiet = 0
        for _ in range(self.sweeps):
            params = self.sweep(cells, params, structure)
            new = self.objective(cells, params, structure)
            if not np.isfinite(new):
                raise NumericalError(
                    "the low-rank fit gave a number that is not finite: raise the penalties, or "
                    "look for values far outside the others."
                )
            # Twice in a row: the first sweeps out of a bad start may stand still once.
            quiet = quiet + 1 if value - new <= self.tolerance * (abs(new) + 1e-12) else 0
            value = new
            if quiet == 2:
                break
        return params

    def sweep(self, cells: Cells, params: TableParameters, structure: Structure) -> TableParameters:
        """Offset and coefficients, sites, times; then factors balanced between the two sides."""
        family, weights = self.family, cells.weights
        params = self._common(cells, params, structure.covariate_penalty)
        base = params.base(cells.sites, cells.times)
        if structure.width:
            side = site_side(
                structure, cells.sites, cells.times, params.times, self.covariates.graph
            )
            rest = base + _fixed_effect(params.times, cells.times, structure)
            params = replace(
                params, sites=newton(side, family, params.sites, rest, weights, cells.sums)
            )
            side = time_side(structure, cells.sites, cells.times, params.sites, cells.shape[1])
            rest = base + _fixed_effect(params.sites, cells.sites, structure)
            params = replace(
                params, times=newton(side, family, params.times, rest, weights, cells.sums)
            )
        return params if structure.smooth or structure.spatial else _balance(params)

    def objective(
        self, cells: Cells, params: TableParameters, structure: Structure | None = None
    ) -> float:
        """The penalised negative log-likelihood, up to what does not depend on the parameters."""
        structure = self.structure if structure is None else structure
        theta = params.theta(cells.sites, cells.times)
        loss = self.family.loss(theta, cells.sums, cells.weights).sum()
        none: IntArray = np.empty(0, dtype=np.int64)
        sites = (
            site_side(structure, none, none, params.times, self.covariates.graph)
            .price(params.sites)
            .sum()
        )
        side = time_side(structure, none, none, params.sites, len(params.times))
        prior = 0.5 * structure.covariate_penalty * float(params.coefficients @ params.coefficients)
        return float(loss + sites + side.price(params.times).sum() + prior)

    def sides(self, cells: Cells, params: TableParameters) -> tuple[Side, Side]:
        """The two half-sweeps at these parameters."""
        count = cells.shape[1]
        return (
            site_side(
                self.structure, cells.sites, cells.times, params.times, self.covariates.graph
            ),
            time_side(self.structure, cells.sites, cells.times, params.sites, count),
        )

    def _nothing(self, cells: Cells) -> TableParameters:
        """The offset alone."""
        effects = self.structure.effects
        total = float(cells.weights.sum())
        mean = float(self.family.project(cells.sums, cells.weights).sum()) / total if total else 0.0
        rows, columns = cells.shape
        return TableParameters(
            self.family.link(mean),
            np.zeros((rows, int(effects))),
            np.zeros((columns, int(effects))),
            effects,
            np.zeros(self.covariates.count),
            self.covariates,
        )

    def _score(self, cells: Cells, theta: FloatArray) -> FloatArray:
        return self.family.score(theta, cells.sums, cells.weights)

    def _common(self, cells: Cells, params: TableParameters, penalty: float) -> TableParameters:
        """A Newton step of the offset and the coefficients, damped like a row's."""
        theta = params.theta(cells.sites, cells.times)
        family, sums, weights = self.family, cells.sums, cells.weights
        score, gain = family.slopes(theta, sums, weights)
        extra = self.covariates.count
        design = np.ones((cells.size, 1 + extra))
        if extra:
            design[:, 1:] = self.covariates.design(cells.sites, cells.times)
        ridge = np.diag([1e-12, *[penalty] * extra])
        here = np.concatenate([[params.offset], params.coefficients])
        slope = design.T @ score - ridge @ here
        step = np.linalg.solve(design.T @ (gain[:, None] * design) + ridge, slope)

        def value(point: FloatArray, at: FloatArray) -> float:
            loss = float(family.loss(at, sums, weights).sum())
            return loss + 0.5 * float(point @ ridge @ point)

        before = value(here, theta)
        for _ in range(1 if family.quadratic else 30):
            after = value(here + step, theta + design @ step)
            if family.quadratic or after <= before + 1e-12 * abs(before):
                return replace(
                    params,
                    offset=params.offset + float(step[0]),
                    coefficients=params.coefficients + step[1:],
                )
            step = step / 2
        return params


def leading(matrix: Any, rank: int, seed: int) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Leading singular triplets of a sparse matrix or linear operator, largest first.

    The start of the iteration is a function of the seed, and signs are fixed, so that the same
    table gives the same factors.
    """
    rows, columns = matrix.shape
    few = min(rows, columns)
    probe = normal_row(seed, 0, Purpose.START, columns)
    if not np.any(matrix @ probe):  # nothing in it: the iteration would have no start
        return np.zeros((rows, rank)), np.zeros(rank), np.zeros((columns, rank))
    if rank >= few or rows * columns <= _SMALL:  # the iteration needs room, and takes longer
        whole = matrix @ np.eye(columns) if columns <= rows else (matrix.T @ np.eye(rows)).T
        left, values, right = np.linalg.svd(whole, full_matrices=False)
        pad = max(0, rank - few)
        left = np.pad(left, ((0, 0), (0, pad)))[:, :rank]
        right = np.pad(right.T, ((0, 0), (0, pad)))[:, :rank]
        values = np.pad(values, (0, pad))[:rank]
    else:
        begin = normal_row(seed, 0, Purpose.START, few)
        left, values, right = svds(matrix, k=rank, v0=begin, tol=1e-9)
        order = np.argsort(-values, kind="stable")
        left, values, right = left[:, order], values[order], right[order].T
    peak = np.argmax(np.abs(right), axis=0)
    signs = np.where(right[peak, np.arange(rank)] < 0, -1.0, 1.0)
    return left * signs, values, right * signs


def _fixed_effect(rows: FloatArray, index: IntArray, structure: Structure) -> FloatArray | float:
    return rows[index, structure.rank] if structure.effects else 0.0


def _balance(params: TableParameters) -> TableParameters:
    """The same product with the least sum of squared factors: u = p sqrt(d), v = q sqrt(d)."""
    rank = params.rank
    if rank == 0:
        return params
    p, left = np.linalg.qr(params.sites[:, :rank])
    q, right = np.linalg.qr(params.times[:, :rank])
    if p.shape[1] < rank or q.shape[1] < rank:  # fewer rows than factors
        return params
    a, values, b = np.linalg.svd(left @ right.T)
    root = np.sqrt(values)
    sites, times = params.sites.copy(), params.times.copy()
    sites[:, :rank], times[:, :rank] = p @ (a * root), q @ (b.T * root)
    return replace(params, sites=sites, times=times)
