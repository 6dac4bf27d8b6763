"""Filling in missing values from a fitted mixture: means, random completions, intervals."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from emfed.core.protocols import FloatArray, IntArray
from emfed.core.streams import Purpose, uniforms
from emfed.models.columns import ColumnParameters, Columns, FamilyColumns
from emfed.models.families import Family
from emfed.models.sampling import draw_components


def pick(shares: FloatArray, u: FloatArray) -> IntArray:
    """A component for each row from ``(rows, K)`` shares and ``(rows,)`` uniforms."""
    below = np.cumsum(shares, axis=-1)[..., :-1]
    return np.asarray((u[..., None] >= below).sum(axis=-1), dtype=np.int64)


def latent_numbers(seed: int, draw: int, rows: int, count: int) -> FloatArray:
    """Uniforms in (0, 1) of one completion: each row has a stream of its own."""
    numbers = uniforms(seed, draw, Purpose.COMPLETION, np.arange(rows, dtype=np.int64), count)
    return np.clip(numbers, 2.0**-53, 1 - 2.0**-53)


def mixture_quantile(
    cdf: Callable[[FloatArray], FloatArray],
    shares: FloatArray,
    ends: FloatArray,
    level: float,
    whole: bool = False,
) -> FloatArray:
    """The smallest y with sum_k share_k cdf_k(y) >= level, by bisection.

    ``ends`` are the components' own quantiles ``(n, K)``: those of the mixture lie between.
    """
    low, high = ends.min(axis=-1), ends.max(axis=-1)
    for _ in range(60):
        middle = 0.5 * (low + high)
        reached = (shares * cdf(middle)).sum(axis=-1) >= level
        low, high = np.where(reached, low, middle), np.where(reached, middle, high)
    return np.floor(high + 1e-6) if whole else high


def _holes(
    columns: Columns, data: FloatArray
) -> Iterator[tuple[FamilyColumns, int, int, IntArray, FloatArray]]:
    """Group, position in it, column, rows and exposures of what is missing, column by column."""
    for group in columns.groups:
        for which, column in enumerate(group.columns.tolist()):
            rows = np.flatnonzero(np.isnan(data[:, column]))
            if len(rows) == 0:
                continue
            exposure = np.ones(len(rows))
            if group.exposures is not None:
                given = data[rows, group.exposures[which]]
                typical = columns.constants.scale[group.exposures[which]]
                exposure = np.where(np.isnan(given), typical, given)
            yield group, which, column, rows, exposure


def mean_columns(
    columns: Columns, params: ColumnParameters, data: FloatArray, shares: FloatArray
) -> FloatArray:
    """Posterior means; of categories, the likeliest."""
    out = np.array(data, dtype=np.float64)
    for group, which, column, rows, exposure in _holes(columns, data):
        theta = group.read(params)[:, which, :]
        if group.family.nominal:
            out[rows, column] = np.argmax(shares[rows] @ theta, axis=-1)
        else:
            each = group.family.mean(theta, exposure[:, None])
            out[rows, column] = (shares[rows] * each).sum(axis=-1)
    return out


def draw_columns(
    columns: Columns,
    params: ColumnParameters,
    data: FloatArray,
    shares: FloatArray,
    draws: int,
    seed: int,
) -> FloatArray:
    """Completions: a component for each row, then each missing value from its family."""
    out = np.repeat(np.asarray(data, dtype=np.float64)[None], draws, axis=0)
    for draw in range(draws):
        u = latent_numbers(seed, draw, len(data), 1 + columns.count)
        labels = pick(shares, u[:, 0])
        for group, which, column, rows, exposure in _holes(columns, data):
            theta = group.read(params)[labels[rows], which, :]
            out[draw, rows, column] = group.family.draw(theta, exposure, u[rows, 1 + column])
    return out


def _distribution(
    family: Family, theta: FloatArray, exposure: FloatArray
) -> Callable[[FloatArray], FloatArray]:
    """The components' distribution functions, ``(n,) -> (n, K)``."""
    return lambda y: family.cdf(theta, exposure, y[:, None])


def interval_columns(
    columns: Columns,
    params: ColumnParameters,
    data: FloatArray,
    shares: FloatArray,
    level: float,
) -> tuple[FloatArray, FloatArray]:
    """Central intervals of each missing value; of categories there are none (NaN)."""
    ends = []
    for q in (0.5 - level / 2, 0.5 + level / 2):
        out = np.array(data, dtype=np.float64)
        for group, which, column, rows, exposure in _holes(columns, data):
            family = group.family
            if family.nominal:
                continue
            theta, e = group.read(params)[:, which, :], exposure[:, None]
            own = family.draw(theta, e, np.full((len(rows), len(theta)), q))
            cdf = _distribution(family, theta, e)
            out[rows, column] = mixture_quantile(cdf, shares[rows], own, q, family.whole)
        ends.append(out)
    return ends[0], ends[1]


def sample_columns(
    columns: Columns, params: ColumnParameters, weights: FloatArray, count: int, seed: int
) -> tuple[FloatArray, IntArray]:
    """Rows of mixed columns and their components; exposures are those of a typical row."""
    u = uniforms(seed, 2, Purpose.SAMPLE, np.arange(count, dtype=np.int64), columns.count)
    u = np.clip(u, 2.0**-53, 1 - 2.0**-53)
    labels = draw_components(weights, count, seed)
    out = np.tile(columns.constants.scale, (count, 1))  # of exposures, the typical one
    blank = out.copy()
    for group in columns.groups:
        blank[:, group.columns] = np.nan
    for group, which, column, _, exposure in _holes(columns, blank):
        theta = group.read(params)[labels, which, :]
        out[:, column] = group.family.draw(theta, exposure, u[:, column])
    return out, labels
