"""What models with components share: weights, and components that die."""

from __future__ import annotations

import numpy as np

from emfed.core.protocols import BoolArray, FloatArray, HeldUp, Layout

SMALLEST_MASS = 1e-12
"""T is not defined where a component has no mass; below this it counts as none."""


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
    """Components that explain less than one sample keep their parameters and a trace of mass.

    Otherwise the guard would shorten every step of all others for the sake of a dying one. Every
    piece of the layout but the ``common`` ones has the components as its first axis; the first
    piece is ``mass``.
    """
    mass = before[layout.slices["mass"]]
    dying = (mass < 1 / samples) & ~(after[layout.slices["mass"]] >= 2 * SMALLEST_MASS)
    if not dying.any():
        return after
    old, new = layout.split(before), layout.split(after)
    share = 2 * SMALLEST_MASS / mass[dying]
    out = {name: value.copy() for name, value in new.items()}
    for name, value in out.items():
        if name not in common:
            extra = (None,) * (value.ndim - 1)
            value[dying] = old[name][dying] * share[(..., *extra)]
    return layout.join(out)


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
    digits = 4 - np.floor(np.log10(spread)).astype(np.int64)  # noise of the fit is not told
    return tuple(
        HeldUp(
            tuple(own),
            float(weights[own].sum()),
            (j,),
            round(float(values[own[0], j]), int(digits[j])) + 0.0,
        )
        for (j, _), own in found.items()
    )
