"""What models with components share: weights, and components that die."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from emfed.core.errors import DataError
from emfed.core.protocols import BoolArray, FloatArray, HeldUp, IntArray, Layout
from emfed.core.wording import Setting, Wording

SMALLEST_MASS = 1e-12
"""T is not defined where a component has no mass; below this it counts as none."""


def check_rows_suffice(n_components: int, counts: IntArray, what: str = "components") -> int:
    """The number of all samples, which is that of the components at least."""
    samples = int(counts.sum())
    if n_components > samples:
        raise DataError(
            Wording(
                "{}, but all workers together have {} rows: use fewer {}.",
                *(Setting(f"n_{what}", n_components), samples, what),
            )
        )
    return samples


def normalised(mass: FloatArray, pseudo: float) -> FloatArray:
    """Weights: masses with what a Dirichlet prior adds to each, summing to one."""
    weights = mass + pseudo
    return weights / weights.sum(axis=-1, keepdims=True)


def keep_dying(
    layout: Layout,
    before: FloatArray,
    after: FloatArray,
    samples: float,
    common: tuple[str, ...] = (),
) -> FloatArray:
    """Components that are to have no mass keep their parameters and a quarter of what they had.

    Where that was less than one sample they keep a trace. Otherwise the guard would shorten every
    step of all others for the sake of a dying one. Every piece of the layout but the ``common``
    ones has the components as its first axis; the first piece is ``mass``. Copies of the heaviest
    (`as_copies`) stay what they are.
    """
    after = keep_copies(layout, before, after)
    mass = before[layout.slices["mass"]]
    dying = ~(after[layout.slices["mass"]] >= 2 * SMALLEST_MASS)
    if not dying.any():
        return after
    old, new = layout.split(before), layout.split(after)
    share = np.where(mass[dying] < 1 / samples, 2 * SMALLEST_MASS / mass[dying], 0.25)
    out = {name: value.copy() for name, value in new.items()}
    for name, value in out.items():
        if name not in common:
            extra = (None,) * (value.ndim - 1)
            value[dying] = old[name][dying] * share[(..., *extra)]
    return layout.join(out)


TRACE = 1e-9
"""The mass of a component that has no rows: too small to change any result."""


def as_copies(layout: Layout, statistics: FloatArray, empty: BoolArray) -> FloatArray:
    """Statistics whose ``empty`` components are copies of the heaviest, with a trace of mass.

    The density stays as it is, and so does EM: copies share rows by their masses, for ever. Where
    the layout has nothing but ``mass`` and ``first`` the others come first, as k-means gives a row
    to the first of equal centres.
    """
    parts = {name: value.copy() for name, value in layout.split(statistics).items()}
    order = np.arange(len(empty))
    if set(parts) == {"mass", "first"}:
        order = np.argsort(empty, kind="stable")
    source = int(np.argmax(np.where(empty, -1.0, parts["mass"])))
    share = _trace_of(parts["mass"][source])
    for name, value in parts.items():
        if name != "total":  # that of all components
            value[empty] = value[source] * share
            value[:] = value[order]
    return layout.join(parts)


def passed_on(
    layout: Layout, statistics: FloatArray, empty: BoolArray, loss: Callable[[FloatArray], float]
) -> FloatArray:
    """Statistics in which other components have what ``empty`` ones held.

    That may be nearly half a row each: of a table of six rows a twelfth. The component gets it by
    which the ``loss`` (infinite outside the domain) grows least, or no component does.
    """
    out = statistics.copy()
    for place in np.flatnonzero(empty).tolist():
        gifts = []
        for other in np.flatnonzero(~empty).tolist():
            parts = layout.split(np.zeros_like(statistics))
            for name, value in layout.split(statistics).items():
                if name != "total":  # that of all components
                    parts[name][other] = value[place]
            gifts.append(layout.join(parts))
        losses = [loss(as_copies(layout, statistics + gift, empty)) for gift in gifts]
        best = int(np.argmin(losses))
        if np.isfinite(losses[best]):
            out += gifts[best]
    return out


def _trace_of(mass: float) -> float:
    """The part of so much mass that is a trace: a power of two, so that copies are exact."""
    return float(2.0 ** np.floor(np.log2(TRACE / mass)))


def keep_copies(layout: Layout, before: FloatArray, after: FloatArray) -> FloatArray:
    """Components that were copies of the heaviest are copies of what it is now.

    Else noise of the messages would be all that says where they are.
    """
    mass = before[layout.slices["mass"]]
    copies = (mass >= TRACE / 4) & (mass <= 2 * TRACE)
    if not copies.any() or copies.all():
        return after
    parts = {name: value.copy() for name, value in layout.split(after).items()}
    source = int(np.argmax(np.where(copies, -1.0, mass)))
    if not parts["mass"][source] > SMALLEST_MASS:
        return after
    share = _trace_of(parts["mass"][source])
    for name, value in parts.items():
        if name != "total":
            value[copies] = value[source] * share
    return layout.join(parts)


SMALLEST_COMPONENT = 3
"""The fewest rows of all workers together that a component of a masked sum has, unless owners say
otherwise: of one or two, the rows follow from its mean. Not tuned; of 96 masked fits of the tables
of `benchmarks estimators` five had such components, all with a common covariance and hardly any
rows for so many components."""


def thin(shares: FloatArray, rows: float, least: float = SMALLEST_COMPONENT) -> BoolArray:
    """Which components have some of so many rows, but fewer than owners tell of.

    A trace of mass counts as none.
    """
    return np.asarray((shares > 2 * TRACE) & (shares * rows < least - 1e-9))


def without_thin(layout: Layout, statistics: FloatArray, few: BoolArray) -> FloatArray:
    """Statistics whose components with ``few`` rows have none, see `as_copies`.

    The heaviest takes their rows, so that sums over all components stay as they are.
    """
    parts = {name: value.copy() for name, value in layout.split(statistics).items()}
    heaviest = int(np.argmax(parts["mass"]))
    few = few & (np.arange(len(few)) != heaviest)
    for name, value in parts.items():
        if name != "total":
            value[heaviest] += value[few].sum(axis=0)
    return as_copies(layout, layout.join(parts), few)


def halved(size: FloatArray, empty: BoolArray, attempt: int) -> tuple[IntArray, IntArray]:
    """Empty components, and those that give each of them a half: the largest, by turns."""
    order = np.argsort(-np.where(empty, -1.0, size), kind="stable")[: int((~empty).sum())]
    places = np.flatnonzero(empty)
    return places, order[(attempt + np.arange(len(places))) % len(order)]


LEANS = (0.5, 0.25, 0.125, 0.0625)
"""How far halves of a component lean towards the statistics of all rows, and away from them. Not
tuned: the longest is taken whose halves both stay inside; together they are what was halved."""


def split_leaning(
    layout: Layout,
    statistics: FloatArray,
    empty: BoolArray,
    attempt: int,
    inside: Callable[[FloatArray], bool],
) -> FloatArray:
    """Statistics whose ``empty`` components are halves of heavy ones, for any family.

    One half leans towards the statistics of all rows, which convex domains allow, and the other as
    far away from them; where no such half exists (a narrow gamma) it stays. Where a component has
    all rows there is nothing to lean towards, and nothing changes.
    """
    if (~empty).sum() < 2:
        return statistics
    whole = layout.split(statistics)
    mass, parts = whole["mass"], {name: value.copy() for name, value in whole.items()}
    for new, old in zip(*halved(mass, empty, attempt), strict=True):
        half = parts["mass"][old] / 2
        for towards, back in (*((lean, lean) for lean in LEANS), (LEANS[-1], 0.0)):
            tried = {name: value.copy() for name, value in parts.items()}
            for name, value in whole.items():
                own = value[old] / mass[old]
                rest = value[~empty].sum(axis=0) / mass[~empty].sum() - own
                tried[name][new] = half * (own + towards * rest)
                tried[name][old] = half * (own - back * rest)
            if inside(layout.join(tried)):
                parts = tried
                break
    return layout.join(parts)


NEAR_FLOOR = 1.001
"""Spreads up to so many times the floor stand on it: T raises them there, to rounding."""


def held_at(
    weights: FloatArray, values: FloatArray, spread: FloatArray, low: BoolArray
) -> tuple[HeldUp, ...]:
    """Values of columns on which components sit, where their spread is ``low``, ``(K, columns)``.

    ``values`` are the components' means and ``spread`` the columns' standard deviations, both in
    the user's units. Means within a hundredth of it are one value.
    """
    found: dict[tuple[int, float], list[int]] = {}
    for k, j in np.argwhere(low).tolist():
        found.setdefault((j, round(float(values[k, j] / spread[j]), 2)), []).append(k)
    digits = 4 - np.floor(np.log10(spread)).astype(np.int64)  # the rest is noise of the fit
    return tuple(
        HeldUp(
            tuple(own),
            float(weights[own].sum()),
            (j,),
            round(float(values[own[0], j]), int(digits[j])) + 0.0,
        )
        for (j, _), own in found.items()
    )


def held_in(
    weights: FloatArray,
    values: FloatArray,
    spread: FloatArray,
    covariances: FloatArray,
    low: float,
) -> tuple[HeldUp, ...]:
    """The same from whole covariances in the frame: combinations of columns are found as well."""
    flat = np.diagonal(covariances, axis1=-2, axis2=-1) <= low
    oblique = []
    for k, matrix in enumerate(covariances):
        rest = np.flatnonzero(~flat[k])
        inner = matrix[np.ix_(rest, rest)]
        if len(rest) and np.linalg.eigvalsh(inner)[0] <= low:
            columns = tuple(rest[list(flattest(inner))].tolist())
            oblique.append(HeldUp((k,), float(weights[k]), columns))
    return (*held_at(weights, values, spread, flat), *oblique)


def flattest(matrix: FloatArray) -> tuple[int, ...]:
    """The columns whose combination has the least variance."""
    direction = np.abs(np.linalg.eigh(matrix)[1][:, 0])
    return tuple(np.flatnonzero(direction > 0.3 * direction.max()).tolist())
