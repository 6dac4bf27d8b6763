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
from emfed.models.columns import ColumnParameters, Columns, FamilyColumns
from emfed.models.components import SMALLEST_MASS, held_at
from emfed.models.families import positive


def _collect(columns: Columns, parts: list[FloatArray]) -> dict[str, FloatArray]:
    """Parameters group by group, ``(..., K, c, size)``, as the arrays of `ColumnParameters`."""
    lead = parts[0].shape[:-2]
    out = {name: np.empty((*lead, *shape)) for name, shape in columns.array_shapes().items()}
    for group, theta in zip(columns.groups, parts, strict=True):
        if len(group.family.names) > 1:
            out[group.family.name][..., group.places, :] = theta
        else:
            out[group.family.name][..., group.places] = theta.reshape(*lead, -1)
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
    return _collect(columns, parts)


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
    return _collect(columns, parts)


def excess(columns: Columns, params: Any, component: int) -> FloatArray:
    """The variance of each column over the one that a component's family gives it; 0 of codes."""
    known = columns.constants
    out = np.zeros(len(known.spread))
    for group in columns.groups:
        if not group.family.nominal:
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

    Where `begin` draws at random it goes as far as the centres lie.
    """
    parts = []
    for group, typical in zip(columns.groups, columns.constants.typical, strict=True):
        near = centres[:, group.columns] * _nearness(columns, group)[:, 0]
        parts.append(group.family.begin_at(near, variances[group.columns], typical))
    return _collect(columns, parts)


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
    return _collect(columns, parts)


def from_user(columns: Columns, params: Any, components: int) -> dict[str, FloatArray]:
    """Checked parameters in the units of the statistics."""
    _check_shapes(columns, params, components)
    parts = []
    for group in columns.groups:
        theta = group.read(params)
        if not (np.isfinite(theta).all() and group.family.proper(theta)):
            raise SettingsError(
                f"start {group.family.name}: got values that are no "
                f"{' and '.join(group.family.names)}."
            )
        parts.append(group.family.enter(theta, *_frame(columns, group)))
    return _collect(columns, parts)


def _check_shapes(columns: Columns, params: Any, components: int) -> None:
    for name, shape in columns.array_shapes().items():
        whole, got = (components, *shape), np.shape(params.families.get(name, ()))
        if got != whole:
            raise SettingsError(f"start {name}: expected shape {whole}; got {got}.")


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


# Statistics that are counts of rows: what the rule on small groups looks at.


def code_shares(
    columns: Columns, mass: FloatArray, moments: FloatArray, observed: FloatArray
) -> FloatArray:
    """The share of rows with each code of each column in each component, ``(..., groups)``."""
    found = [np.empty((*mass.shape[:-1], 0))]
    for _, group, masses, part in columns.pieces(mass, moments, observed):
        shares = group.family.code_shares(masses, part)
        if shares is not None:
            found.append(shares.reshape(*mass.shape[:-1], -1))
    return np.concatenate(found, axis=-1)
