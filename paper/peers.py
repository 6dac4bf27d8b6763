"""Methods that a reader would ask about, for Gaussian mixtures with tied or full covariances.

FedAvg (McMahan et al. 2017) and SCAFFOLD (Karimireddy et al. 2020) climb the likelihood by local
gradient steps and average parameters; local fits are averaged once, after their components were
matched. All begin at parameters that everyone knows, and send 32-bit floats.

The gradient methods get a chart that is kind to them: parameters without constraints, about the
start and in its units, with steps divided by the start's weights. A step of size 1 from there is
then about a step of EM, and one step size suits all coordinates.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

import numpy as np

from emfed.core.protocols import FloatArray, IntArray
from emfed.core.wire import floats_size
from emfed.data.workers import WorkerData
from emfed.models import GaussianParameters
from emfed.models.matrices import is_positive_definite, outer, unpack

PSEUDO_ROWS = 2.0
"""Times the columns: rows that the start is worth to each component of a local fit. Without them a
component that a worker has no rows for would have no covariance."""


@final
@dataclass(frozen=True, eq=False)
class ComponentMoments:
    """Mean responsibilities, and first and second moments by component; leading axes are workers.

    Of tied covariances ``second`` is that of all rows, with one component.
    """

    mass: FloatArray
    first: FloatArray
    second: FloatArray


@final
@dataclass(frozen=True, eq=False)
class Tables:
    """The rows of all workers as one stack, padded, and the model they are for."""

    model: Any
    rows: FloatArray
    mask: FloatArray
    shares: FloatArray
    """The share of all rows that each worker has."""
    counts: FloatArray

    @classmethod
    def of(cls, model: Any, data: WorkerData) -> Tables:
        """All rows of a federation."""
        counts = data.counts.astype(np.float64)
        rows = np.zeros((data.size, int(counts.max()), data.rows.shape[1]))
        mask = np.zeros(rows.shape[:2])
        for worker in range(data.size):
            own = data.worker(worker)
            rows[worker, : len(own)], mask[worker, : len(own)] = own, 1.0
        return cls(model, rows, mask, counts / counts.sum(), counts)

    @cached_property
    def second_moment(self) -> FloatArray:
        """The second moment of each worker's rows, in the frame."""
        frame = self.model.constants.frame
        y = (self.rows - frame.origin) / frame.scale * self.mask[..., None]
        return np.asarray(np.swapaxes(y, 1, 2) @ y / self.counts[:, None, None])

    def moments(self, params: GaussianParameters) -> ComponentMoments:
        """Everyone's, each at its own parameters: one pass over all rows."""
        statistics = self.model.expected_statistics(self.rows, params, self.mask)
        found = self.model.layout.split(statistics)
        d = self.rows.shape[-1]
        tied = "second" not in found
        second = self.second_moment[:, None] if tied else unpack(found["second"], d)
        return ComponentMoments(found["mass"], found["first"], second)


@final
@dataclass(frozen=True, eq=False)
class FreeChart:
    """Vectors without constraints to mixtures: the start is zero, and its covariances the units."""

    start: GaussianParameters

    @cached_property
    def roots(self) -> FloatArray:
        """Cholesky factors of the start's covariances, ``(K or 1, d, d)``."""
        d = self.start.means.shape[1]
        return np.asarray(np.linalg.cholesky(self.start.covariances.reshape(-1, d, d)), np.float64)

    @property
    def size(self) -> int:
        """Numbers in a vector."""
        k, d = self.start.means.shape
        return k + k * d + len(self.roots) * d * (d + 1) // 2

    def parts(self, x: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Logits ``(..., K)``, shifts of means ``(..., K, d)`` and factors ``(..., K or 1, d, d)``.

        Factors are lower triangles, and the logarithms of their diagonals are in the vector.
        """
        k, d = self.start.means.shape
        lead = x.shape[:-1]
        low = np.tril_indices(d)
        factors = np.zeros((*lead, len(self.roots), d, d))
        factors[..., low[0], low[1]] = x[..., k + k * d :].reshape(*lead, len(self.roots), -1)
        each = np.arange(d)
        factors[..., each, each] = np.exp(factors[..., each, each])
        return x[..., :k], x[..., k : k + k * d].reshape(*lead, k, d), factors

    def parameters(self, x: FloatArray) -> GaussianParameters:
        """The mixture that a vector stands for."""
        logits, shifts, factors = self.parts(x)
        joint = self.start.weights * np.exp(logits - logits.max(axis=-1, keepdims=True))
        means = self.start.means + (self.roots @ shifts[..., None])[..., 0]
        root = self.roots @ factors
        covariances = root @ np.swapaxes(root, -1, -2)
        if self.start.covariances.ndim == 2:
            covariances = covariances[..., 0, :, :]
        return GaussianParameters(joint / joint.sum(axis=-1, keepdims=True), means, covariances)

    def direction(self, x: FloatArray, moments: ComponentMoments) -> FloatArray:
        """The gradient of the mean log-likelihood, divided by the start's weights."""
        _, _, factors = self.parts(x)
        params, one = self.parameters(x), len(self.roots) == 1
        mass, d = moments.mass, self.start.means.shape[1]
        away = moments.first - mass[..., None] * params.means
        inverse = np.linalg.inv(self.roots @ factors)
        turned = np.swapaxes(np.linalg.inv(factors), -1, -2)
        shifts = (turned @ inverse @ away[..., None])[..., 0]
        # sum first mu' + mu first' - mass mu mu', of each component or of all together
        gone = moments.first - 0.5 * mass[..., None] * params.means
        if one:
            crossed = (np.swapaxes(params.means, -1, -2) @ gone)[..., None, :, :]
            total = np.ones((1, 1, 1))
        else:
            crossed, total = outer(params.means, gone), mass[..., None, None]
        between = crossed + np.swapaxes(crossed, -1, -2)
        white = inverse @ (moments.second - between) @ np.swapaxes(inverse, -1, -2)
        slopes = turned @ (white - total * np.eye(d))
        each = np.arange(d)
        slopes[..., each, each] *= factors[..., each, each]  # of logarithms
        scale = self.start.weights
        low = np.tril_indices(d)
        packed = slopes[..., low[0], low[1]] / (1.0 if one else scale[:, None])
        lead = x.shape[:-1]
        whole = [(mass - params.weights) / scale, shifts / scale[:, None], packed]
        return np.concatenate([part.reshape(*lead, -1) for part in whole], axis=-1)


@final
@dataclass(frozen=True, eq=False)
class PeerRound:
    """Where a method is after a round, and what that round took of every worker."""

    params: GaussianParameters
    epochs: float
    vector_bytes: int
    """Bytes of the parameters, which a worker is sent and sends."""


def averaging(
    tables: Tables, start: GaussianParameters, step: float, local: int, corrected: bool
) -> Iterator[PeerRound]:
    """FedAvg, or SCAFFOLD where local steps are corrected: rounds without end, if none diverges.

    SCAFFOLD's controls are those of its option II, which the server knows from the parameters that
    are sent; so it sends no more than FedAvg.
    """
    chart = FreeChart(start)
    n, x = len(tables.rows), np.zeros(chart.size)
    controls, common = np.zeros((n, chart.size)), np.zeros(chart.size)
    upload = floats_size(chart.size, "float32")
    while True:
        own = np.tile(x, (n, 1))
        try:
            with np.errstate(over="ignore", invalid="ignore"):
                for _ in range(local):
                    slope = chart.direction(own, tables.moments(chart.parameters(own)))
                    own = own + step * (slope + common - controls)
        except np.linalg.LinAlgError:  # the steps are too long
            return
        if not np.isfinite(own).all():
            return
        sent = (own - x).astype(np.float32).astype(np.float64)
        if corrected:
            controls = controls - common + sent / (local * step)
            common = tables.shares @ controls
        x = x + tables.shares @ sent
        with np.errstate(over="ignore", invalid="ignore"):
            params = chart.parameters(x)
        if not is_positive_definite(params.covariances):
            return
        yield PeerRound(params, float(local), upload)


def averaged_fits(tables: Tables, start: GaussianParameters, passes: int) -> PeerRound:
    """Everyone fits the mixture to its own rows by EM, and tells it once; the server averages.

    Components are matched with those of the start by the distance of means, and count with the
    rows that they explain.
    """
    k, d = start.means.shape
    n = len(tables.rows)
    worth = PSEUDO_ROWS * d * k / tables.counts[:, None]
    prior = worth * start.weights
    held = start.covariances.reshape(-1, d, d)
    params = GaussianParameters(
        *(np.tile(a, (n,) + (1,) * a.ndim) for a in start.arrays().values())
    )
    for _ in range(passes):
        found = tables.moments(params)
        mass = found.mass + prior
        first = found.first + prior[..., None] * start.means
        means = first / mass[..., None]
        known = prior[..., None, None] * (held + outer(start.means, start.means))
        spread = mass[..., None, None] * outer(means, means)
        if start.covariances.ndim == 2:
            total = found.second[:, 0] + (known - spread).sum(axis=1)
            covariances = total / (1 + worth)[..., None]
        else:
            covariances = (found.second + known - spread) / mass[..., None, None]
        params = GaussianParameters(mass / (1 + worth), means, covariances)
    order = np.array([matched(own, start) for own in params.means])
    each = np.arange(n)[:, None]
    shares = tables.shares[:, None] * params.weights[each, order]
    weights = shares.sum(axis=0)
    parts = shares / weights
    means = np.einsum("nk,nkd->kd", parts, params.means[each, order])
    if start.covariances.ndim == 2:
        covariances = np.einsum("n,nij->ij", tables.shares, params.covariances)
    else:
        covariances = np.einsum("nk,nkij->kij", parts, params.covariances[each, order])
    upload = floats_size(FreeChart(start).size, "float32")
    return PeerRound(GaussianParameters(weights, means, covariances), float(passes), upload)


def matched(means: FloatArray, start: GaussianParameters) -> IntArray:
    """Which of the means belongs to each component of the start: the nearest in all, one to one."""
    from scipy.optimize import linear_sum_assignment

    apart = means[None] - start.means[:, None]
    turned = np.linalg.inv(FreeChart(start).roots)[:, None] @ apart[..., None]
    return np.asarray(linear_sum_assignment((turned[..., 0] ** 2).sum(axis=-1))[1])
