"""L, L_W, v_min, v_max, sigma^2 and the gap, measured on data for a given model.

The theorems ask for constants that hold on all of R^q. For a mixture there are none: B grows
without bound where a component's mass goes to zero. What is measured here are the constants along
the path that EM takes from the start, by differences in every direction the statistics can move:
local values, smaller than any global constant. They say which regime one is in and how settings
compare; they are no guarantee.

B needs no formula of its own: the gradient of W is -B h with B the derivative of phi(T(s))
(differentiate psi + R - <s, phi> at its minimum), and the surrogate is linear in s with slope -phi.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, final

import numpy as np

from emfed.algorithms import FedEM
from emfed.core.errors import DataError, check_count
from emfed.core.protocols import FloatArray, IdentityMetric, IntArray, Layout, Metric, Model
from emfed.core.streams import Purpose, choose_distinct, uniforms
from emfed.data.sources import Source, chunks
from emfed.data.tables import Workers, gather
from emfed.data.workers import WorkerData, as_workers, stack_tables
from emfed.fitting.by_hand import open_run
from emfed.theory.problem import Problem

_DIFFERENCE = 1e-4
"""Half the width of a central difference, in a norm in which statistics are of order one."""
_PATIENCE = 300
"""EM rounds after which the end of the path counts as reached."""


@final
@dataclass(frozen=True, eq=False)
class Estimate:
    """The constants that were measured, with the points and rows they were measured on.

    Examples
    --------
    >>> import emfed
    >>> data = emfed.data.synthetic_federation(workers=4, rows_per_worker=25)
    >>> found = emfed.theory.estimate_problem(emfed.gaussian_mixture(2, "tied"), data)
    >>> found.samples, found.rows
    (25, 100)
    """

    problem: Problem
    """The constants, with full local passes."""
    sample_variance: FloatArray
    """E|s-bar_ij - s-bar_i|^2 of one row, for each worker: mini-batches have sigma_i^2 = this / b,
    ``(workers,)``."""
    layout: Layout
    """The layout of the statistics."""
    samples: int
    """The mean number of rows of a worker."""
    memory_error: float = 0.0
    """The sum of w_i^2 |h_i(S_0)|^2, which is G_0 / n for memories that start at zero."""
    points: int = 0
    """The number of points of EM's path that were looked at."""
    rows: int = 0
    """The number of rows that were looked at."""
    directions: int = 0
    """The number of directions that were looked at."""

    def with_batch(self, batch: int | None) -> Problem:
        """The problem with the oracle noise of this batch size; None for full passes."""
        if batch is None:
            return self.problem
        return self.problem.with_batch(batch, self.sample_variance)


@dataclass(frozen=True, eq=False)
class _Local:
    """What one point of the path says."""

    lipschitz: FloatArray
    sample_lipschitz: float
    smoothness: float
    eigenvalues: FloatArray


def estimate_problem(
    model: Model,
    data: Any,
    *,
    groups: Any | None = None,
    weights: Literal["samples", "uniform"] = "samples",
    start: Any = "moments",
    in_metric: bool = False,
    points: int = 3,
    rows: int = 20_000,
    directions: int = 256,
    seed: int = 0,
) -> Estimate:
    """Measure the constants of the theorems along EM's path on a sample of the workers' rows.

    At most 50 workers are looked at; the others are taken to be like these. The constants are
    local values: they compare settings and tell regimes, and are no guarantee.

    Parameters
    ----------
    model : Model
        The model.
    data : table, mapping or Workers
        The rows, in any form that `fit` takes.
    groups : array or str, optional
        The worker of each row, as in `fit`.
    weights : {"samples", "uniform"}
        Whether workers count by their rows, or all alike as in the paper.
    start : str or Model parameters
        Where EM's path starts, as in `fit`.
    in_metric : bool
        Whether everything is measured in the norm of the model's metric at the end of the path, the
        norm in which ``FedEM(in_metric=True)`` compresses.
    points : int
        The number of points of the path that are looked at.
    rows : int
        The largest number of rows that are looked at.
    directions : int
        The largest number of directions that are looked at.
    seed : int
        The seed of all draws.

    Returns
    -------
    Estimate
        The constants.

    Raises
    ------
    DataError
        If T is not smooth on the path, because a component has collapsed or a column is constant.

    Examples
    --------
    >>> import emfed
    >>> data = emfed.data.synthetic_federation(workers=4, rows_per_worker=25)
    >>> found = emfed.theory.estimate_problem(emfed.gaussian_mixture(2, "tied"), data)
    >>> emfed.theory.FedEMBounds(found.problem, omega=1.0).step_limit.regime
    'smoothness'
    """
    check_count("points", points)
    whole = as_workers(data, groups)
    sample, chosen = _sample(model, whole, check_count("rows", rows), seed)
    counts = whole.counts
    share = counts / counts.sum() if weights == "samples" else np.full(len(counts), 1 / len(counts))
    run = open_run(
        model,
        sample,
        FedEM(step_size=1.0, memory_rate=0.0),  # exact EM
        weights=share[chosen],
        start=start,
        seed=seed,
        rounds=_PATIENCE,
        field_tol=1e-10,
    )
    path = [run.statistics, *(run.statistics for _ in run)]
    bound, w = run.model, run.weights
    metric = bound.metric(bound.maximize(path[-1])) if in_metric else IdentityMetric()
    probe = _Probe(bound, sample, metric, w, check_count("directions", directions), seed)
    gap = max(0.0, probe.objective(path[0]) - probe.objective(path[-1]))
    picked = np.unique(np.geomspace(1, len(path), points).round().astype(int)) - 1
    local = [probe.at(path[k]) for k in picked]
    last = np.concatenate([point.eigenvalues for point in local])
    lipschitz = np.max([point.lipschitz for point in local], axis=0)
    if not last.min() > 0:
        raise DataError(
            "T is not smooth on EM's path here, so the theorems' constants do not exist: some "
            "component has collapsed onto the covariance floor, or a column is constant. Use fewer "
            "components, drop the column, or start elsewhere."
        )
    variance, fields = probe.spread(path[-1]), probe.fields(path[0])
    problem = Problem(
        share,
        _everyone(lipschitz**2, chosen, len(counts)) ** 0.5,
        max(point.smoothness for point in local),
        gap,
        float(last.min()),
        float(last.max()),
        0.0,
        max(point.sample_lipschitz for point in local),
        "metric" if in_metric else "euclidean",
    )
    return Estimate(
        problem,
        _everyone(variance, chosen, len(counts)),
        bound.layout,
        max(1, round(float(counts.mean()))),
        float(share**2 @ _everyone((fields**2).sum(axis=-1), chosen, len(counts))),
        len(picked),
        int(sample.counts.sum()),
        probe.width,
    )


def _everyone(values: FloatArray, chosen: IntArray, n: int) -> FloatArray:
    """Values of the chosen workers, and their mean for the others."""
    out = np.full(n, values.mean())
    out[chosen] = values
    return out


def _sample(
    model: Model, data: Workers, rows: int, seed: int, workers: int = 50
) -> tuple[WorkerData, IntArray]:
    """An equal share of rows of some workers, in order, without replacement."""
    chosen = np.arange(data.size)
    if data.size > workers:
        u = uniforms(seed, 0, Purpose.PILOT, np.zeros(1, np.int64), workers)
        chosen = np.sort(choose_distinct(u, np.array([data.size]))[0])
    parts = []
    for worker in chosen.tolist():
        table = data.worker(worker)
        for first, block in chunks(table):
            model.check(block, f"worker {data.name(worker)!r}", data.columns, first)
        share = max(1, rows // len(chosen))
        if table.shape[0] > share:
            u = uniforms(seed, 1, Purpose.PILOT, np.array([worker]), share)
            picks = np.sort(choose_distinct(u, np.array([table.shape[0]]))[0])
            table = gather(table, picks)
        elif isinstance(table, Source):
            table = table.read(0, table.shape[0])
        parts.append(table)
    return stack_tables(parts), chosen


@final
class _Probe:
    """Differences of the mean fields and of phi(T) around a point, in a metric's coordinates."""

    def __init__(
        self,
        model: Model,
        data: WorkerData,
        metric: Metric,
        weights: FloatArray,
        directions: int,
        seed: int,
    ) -> None:
        self.model, self.data, self.metric, self.weights = model, data, metric, weights
        self.rows = data.rows[:, None, ...]  # every row as a worker of its own
        self.limit, self.seed, self.width = directions, seed, 0
        self.basis: FloatArray | None = None

    def statistics(self, params: Any) -> FloatArray:
        """s-bar_i of every worker."""
        out = np.empty((self.data.size, self.model.layout.size))
        for piece in self.data.stacks(np.arange(self.data.size)):
            values = self.model.expected_statistics(piece.rows, params, piece.padding)
            out[piece.positions] = values
        return out

    def objective(self, point: FloatArray) -> float:
        """The penalised negative log-likelihood a row."""
        params, total = self.model.maximize(point), 0.0
        for piece in self.data.stacks(np.arange(self.data.size)):
            likelihood = self.model.evaluate(piece.rows, params, piece.padding)[1]
            total += float(self.weights[piece.positions] @ likelihood)
        return float(self.model.penalty(params)) - total

    def fields(self, point: FloatArray) -> FloatArray:
        return self.metric.whiten(self.statistics(self.model.maximize(point)) - point)

    def each(self, params: Any, rows: Any) -> FloatArray:
        return self.metric.whiten(self.model.expected_statistics(rows, params))

    def spread(self, point: FloatArray) -> FloatArray:
        """E|s-bar_ij - s-bar_i|^2 of every worker."""
        params = self.model.maximize(point)
        out = np.empty(self.data.size)
        for worker in range(self.data.size):
            part = slice(int(self.data.offsets[worker]), int(self.data.offsets[worker + 1]))
            values = self.each(params, self.rows[part])
            out[worker] = ((values - values.mean(axis=0)) ** 2).sum(axis=-1).mean()
        return out

    def _directions(self, params: Any) -> FloatArray:
        """Orthonormal directions, ``(q, width)``, in which the statistics of rows differ.

        The masses of a mixture sum to one, so one direction is never taken; B is singular there.
        """
        if self.basis is None:
            q = self.model.layout.size
            values = self.each(params, self.rows[:: max(1, len(self.rows) // (8 * q))])
            values = values - values.mean(axis=0)
            if q > self.limit:  # random directions among those that rows take
                stream = np.arange(len(values), dtype=np.int64)
                u = uniforms(self.seed, 2, Purpose.PILOT, stream, self.limit) - 0.5
                values = (values.T @ u).T
            sizes, axes = np.linalg.eigh(values.T @ values)
            self.basis = np.asarray(axes[:, sizes > 1e-13 * sizes[-1]][:, -self.limit :])
            self.width = self.basis.shape[1]
        return self.basis

    def at(self, point: FloatArray) -> _Local:
        """Jacobians of h_i and h_ij, the Hessian of W and the spectrum of B at this point."""
        model, params = self.model, self.model.maximize(point)
        basis = self._directions(params)
        steps = self.metric.unwhiten(basis.T)
        few = self.rows[:: max(1, len(self.rows) // 64)]
        near = model.metric(params)
        sides: list[tuple[FloatArray, ...]] = []
        for direction in steps:
            width = self._width(point, direction, near)
            ends = [self._look(point + side * width * direction, steps, few) for side in (1, -1)]
            sides.append(tuple((a - b) / (2 * width) for a, b in zip(*ends, strict=True)))
        jacobian, single, phi, gradient = (
            np.stack([side[k] for side in sides], axis=-1) for k in range(4)
        )
        eye = np.eye(basis.shape[1])
        return _Local(
            np.linalg.norm(basis.T @ jacobian - eye, 2, axis=(-2, -1)),
            float(np.sqrt((np.linalg.norm(basis.T @ single - eye, 2, axis=(-2, -1)) ** 2).mean())),
            float(np.abs(np.linalg.eigvalsh((gradient + gradient.T) / 2)).max()),
            np.linalg.eigvalsh((phi + phi.T) / 2).astype(np.float64),
        )

    def _width(self, point: FloatArray, direction: FloatArray, near: Metric) -> float:
        """Half the width of a difference: short where components are sharp, and inside."""
        width = _DIFFERENCE / max(1.0, float(np.linalg.norm(near.whiten(direction))))
        while not all(self.model.inside(point + s * width * direction) for s in (1, -1)):
            width /= 2
        return width

    def _look(
        self, point: FloatArray, steps: FloatArray, few: Any
    ) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
        """s-bar_i, s-bar_ij of some rows, phi(T) and the gradient of W in these directions."""
        model, params = self.model, self.model.maximize(point)
        statistics = self.statistics(params)
        field = self.weights @ statistics - point
        width = self._width(point, field, model.metric(params))
        ahead, behind = (
            self._phi(model.maximize(point + side * width * field), steps) for side in (1, -1)
        )
        return (
            self.metric.whiten(statistics),
            self.each(params, few),
            self._phi(params, steps),
            (behind - ahead) / (2 * width),  # -B h
        )

    def _phi(self, params: Any, steps: FloatArray) -> FloatArray:
        zero = np.zeros_like(steps[0])
        return self.model.surrogate(zero, params) - self.model.surrogate(steps, params)
