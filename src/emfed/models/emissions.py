"""T, domain, starts and units of independent columns, each of its own family.

What mixtures and Markov chains of such columns share beyond their features. The prior is the
conjugate one of each family: as if every component had also seen ``prior_rows`` rows with the
average statistics of all data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from emfed.core.errors import SettingsError
from emfed.core.protocols import FloatArray, HeldUp, Layout
from emfed.models.categories import Categorical
from emfed.models.columns import ARRAYS, ColumnParameters, Columns, FamilyColumns
from emfed.models.components import SMALLEST_MASS, held_at
from emfed.models.families import positive


def _collect(
    columns: Columns, lead: tuple[int, ...], parts: list[FloatArray]
) -> dict[str, FloatArray]:
    """Parameters group by group, ``(*lead, K, c, size)``, as the arrays of `ColumnParameters`."""
    found: dict[str, list[FloatArray]] = {name: [] for name in ARRAYS}
    for group, theta in zip(columns.groups, parts, strict=True):
        if group.array == Categorical.name:
            theta = theta[..., 0, :]
        elif group.family.size == 1:
            theta = theta[..., 0]
        found[group.array].append(theta)
    out = {}
    for name, thetas in found.items():
        axis = -2 if name in ("gaussian", "gamma") else -1
        empty = np.empty((*lead, 0, 2) if axis == -2 else (*lead, 0))
        out[name] = np.concatenate(thetas, axis=axis) if thetas else empty
    return out


def estimate(
    columns: Columns, mass: FloatArray, moments: FloatArray, observed: FloatArray, prior: float
) -> dict[str, FloatArray]:
    """T: the arrays of `ColumnParameters` from mean statistics."""
    parts = []
    for index, group, masses, part in columns.pieces(mass, moments, observed):
        typical = columns.constants.typical[index]
        theta = group.family.estimate(masses + prior, part + prior * typical, columns.floor)
        parts.append(theta)
    return _collect(columns, mass.shape, parts)


def defined(
    columns: Columns, mass: FloatArray, moments: FloatArray, observed: FloatArray, prior: float
) -> bool:
    """Whether T is defined at these statistics."""
    if np.any(observed + prior < SMALLEST_MASS):
        return False
    return all(
        group.family.valid(
            masses + prior, part + prior * columns.constants.typical[index], columns.floor
        )
        for index, group, masses, part in columns.pieces(mass, moments, observed)
    )


def possible(columns: Columns, layout: Layout, before: FloatArray, after: FloatArray) -> FloatArray:
    """``after`` with moments that no rows can have replaced: noise alone leads there."""
    old, new = layout.split(before), layout.split(after)
    empty = np.empty((*new["mass"].shape, 0))
    found = {}
    if "observed" in new:
        mass, was = new["mass"], old["mass"]
        found["observed"] = _possible(positive, mass, new["observed"], was, old["observed"])
    pairs = zip(
        columns.pieces(old["mass"], old["moments"], old.get("observed", empty)),
        columns.pieces(new["mass"], new["moments"], found.get("observed", empty)),
        strict=True,
    )
    parts = [
        _possible(group.family.possible, now, part, then, past).reshape(*empty.shape[:-1], -1)
        for (_, group, then, past), (_, _, now, part) in pairs
    ]
    return layout.join({**new, **found, "moments": np.concatenate(parts, axis=-1)})


def _possible(
    repair: Callable[[FloatArray, FloatArray], FloatArray],
    mass: FloatArray,
    moments: FloatArray,
    was: FloatArray,
    past: FloatArray,
) -> FloatArray:
    """Moments whose means were repaired; all others as they are, to the last bit."""
    known = ((mass >= SMALLEST_MASS) & (was >= SMALLEST_MASS))[..., None]
    means = moments / np.where(known, mass[..., None], 1.0)
    repaired = repair(means, past / np.where(known, was[..., None], 1.0))
    return np.where(known & (repaired != means), repaired * mass[..., None], moments)


def cross_entropy(
    columns: Columns, params: Any, mass: FloatArray, moments: FloatArray, observed: FloatArray
) -> FloatArray:
    """psi - <s, phi> of the columns: minus the expected log density, ``(...)``."""
    intercept, slopes = columns.natural(params)
    both = np.concatenate([moments, observed], axis=-1)
    return -(mass * intercept).sum(axis=-1) - (both * slopes).sum(axis=(-1, -2))


def penalty(columns: Columns, params: Any, prior: float) -> float:
    """R: ``prior`` times minus the log density of rows with typical statistics, all components."""
    value = 0.0
    for group, typical in zip(columns.groups, columns.constants.typical, strict=True):
        scale = columns.constants.scale[group.columns]
        a, slopes = group.family.natural(group.read(params), scale)
        value += float(a.sum() - (slopes * typical).sum())
    return prior * value


def expected(columns: Columns, params: Any, mass: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Moments and observed masses when the model draws rows and as much is missing as now."""
    moments, observed = [], []
    for group, partial in zip(columns.groups, columns.partial, strict=True):
        seen = np.minimum(columns.constants.observed[group.columns], 1.0)
        share = mass[..., None] * seen
        whole = group.family.expected(group.read(params)) * share[..., None]
        moments.append(whole.reshape(*mass.shape, -1))
        observed.append(share[..., partial])
    return np.concatenate(moments, axis=-1), np.concatenate(observed, axis=-1)


def begin(columns: Columns, components: int, draws: FloatArray) -> dict[str, FloatArray]:
    """Starting parameters from ``components * moments`` standard normal numbers."""
    parts, at = [], 0
    for group, typical in zip(columns.groups, columns.constants.typical, strict=True):
        size = components * group.width
        shape = (components, len(group.columns), group.family.width)
        own = draws[at : at + size].reshape(shape) * _nearness(columns, group)
        parts.append(group.family.begin(own, typical))
        at += size
    return _collect(columns, (components,), parts)


def excess(columns: Columns, params: Any, component: int) -> FloatArray:
    """The variance of each column over the one that a component's family gives it; 0 of codes."""
    known = columns.constants
    out = np.zeros(len(known.spread))
    for group in columns.groups:
        if not isinstance(group.family, Categorical):
            own, scale = group.columns, known.scale[group.columns]
            given = group.family.covariance(group.read(params)[component], scale)[..., 0, 0]
            out[own] = known.spread[own] ** 2 / np.maximum(given * scale**2, 1e-300)
    return out


def _nearness(columns: Columns, group: FamilyColumns) -> FloatArray:
    """The factor ``(c, 1)`` of draws where a factor of two is more than a column varies by.

    Counts of 10,000 vary by a hundredth: rates twice as far apart would leave all rows to one
    component, for good.
    """
    known = columns.constants
    far = group.family.stretch * np.abs(known.mean[group.columns])
    near = np.minimum(known.spread[group.columns], far)
    return np.divide(near, far, out=np.ones_like(far), where=far > 0)[:, None]


def begin_at(columns: Columns, centres: FloatArray, variances: FloatArray) -> dict[str, FloatArray]:
    """Starting parameters near clusters, whose centres are in standard deviations of each column.

    Where `begin` draws at random it goes as far as the centres lie; probabilities of categories
    are tilted towards the codes on the centre's side.
    """
    k, known, parts = len(centres), columns.constants, []
    for group, typical in zip(columns.groups, known.typical, strict=True):
        z = centres[:, group.columns][..., None]
        draws = np.repeat(z, group.family.width, axis=-1)
        if isinstance(group.family, Categorical):
            codes = np.arange(group.family.width) - known.mean[group.columns][:, None]
            draws = draws * codes / known.spread[group.columns][:, None]
        theta = group.family.begin(draws * _nearness(columns, group), typical)
        if group.array == "gaussian":
            theta[..., 1] = variances[group.columns]
        parts.append(theta)
    return _collect(columns, (k,), parts)


def _frame(columns: Columns, group: FamilyColumns) -> tuple[FloatArray, FloatArray]:
    """Origin and scale of the parameters; rates are per unit of exposure."""
    known = columns.constants
    scale = known.scale[group.columns]
    if group.exposures is not None:
        scale = scale / known.scale[group.exposures]
    return known.origin[group.columns], scale


def to_user(columns: Columns, params: Any) -> dict[str, FloatArray]:
    """Parameters in the user's units."""
    parts = [g.family.leave(g.read(params), *_frame(columns, g)) for g in columns.groups]
    lead = getattr(params, columns.groups[0].array).shape
    axes = 2 if columns.groups[0].array in ("gaussian", "gamma") else 1
    return _collect(columns, lead[: len(lead) - axes], parts)


def from_user(columns: Columns, params: Any, components: int) -> dict[str, FloatArray]:
    """Checked parameters in the units of the statistics."""
    _check_shapes(columns, params, components)
    parts = []
    for group in columns.groups:
        theta = group.read(params)
        if not (np.isfinite(theta).all() and group.family.proper(theta)):
            raise SettingsError(
                f"start {group.array}: got values that are no {' and '.join(group.family.names)}."
            )
        parts.append(group.family.enter(theta, *_frame(columns, group)))
    return _collect(columns, (components,), parts)


def _check_shapes(columns: Columns, params: Any, components: int) -> None:
    ends = dict.fromkeys(ARRAYS, 0)
    for group in columns.groups:
        alone = group.array == Categorical.name
        ends[group.array] += group.family.size if alone else len(group.columns)
    for name, end in ends.items():
        shape = (components, end, 2) if name in ("gaussian", "gamma") else (components, end)
        got = getattr(params, name).shape
        if end and got != shape:
            raise SettingsError(f"start {name}: expected shape {shape}; got {got}.")


def held_up(columns: Columns, params: Any, weights: FloatArray) -> tuple[HeldUp, ...]:
    """Columns and values on which components of these weights sit."""
    found: list[HeldUp] = []
    for group in columns.groups:
        theta, family = group.read(params), group.family
        low = family.at_floor(theta, columns.floor)
        if low.any():
            values = family.mean(family.leave(theta, *_frame(columns, group)), np.ones(1))
            spread = columns.constants.spread[group.columns]
            held = held_at(weights, values, spread, low)
            own = group.columns.tolist()
            found += [replace(h, columns=(own[h.columns[0]],)) for h in held]
    return tuple(found)


def by_column(columns: Columns, params: ColumnParameters) -> dict[str, Mapping[str, FloatArray]]:
    """Parameters in the user's units, column by column: name to arrays ``(K, ...)``."""
    found: dict[int, Mapping[str, FloatArray]] = {}
    for group in columns.groups:
        theta = group.read(params)
        for which, column in enumerate(group.columns.tolist()):
            mine = theta[..., which, :]
            names = group.family.names
            found[column] = (
                {names[0]: mine}
                if len(names) < mine.shape[-1]
                else {name: mine[..., i] for i, name in enumerate(names)}
            )
    label = columns.names or tuple(map(str, range(columns.count)))
    return {label[column]: found[column] for column in sorted(found)}
