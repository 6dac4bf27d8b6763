"""What models with components share: weights, and components that die."""

from __future__ import annotations

from emfed.core.protocols import FloatArray, Layout

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
