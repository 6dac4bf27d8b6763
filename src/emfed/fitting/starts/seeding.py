"""k-means of weighted points at the server: of cells, which are aggregates and no records."""

from __future__ import annotations

import numpy as np

from emfed.core.protocols import FloatArray, IntArray
from emfed.core.streams import Purpose, uniforms

TRIALS = 4
"""Centres tried at each step of the seeding, of which the best is kept."""


def seed_centres(
    mass: FloatArray, cells: FloatArray, count: int, seed: int, attempt: int
) -> FloatArray:
    """k-means++ (Arthur, Vassilvitskii 2007), greedy: ``count`` of the cells, far from each other.

    A cell is drawn with probability proportional to its mass times its squared distance to the
    centres so far; of a few drawn the one that lowers the distances most is taken.
    """
    address = np.array([attempt], dtype=np.int64)
    draws = uniforms(seed, 0, Purpose.SEEDING, address, 1 + TRIALS * (count - 1))[0]
    first = int(np.searchsorted(np.cumsum(mass)[:-1], draws[0] * mass.sum(), side="right"))
    chosen = [first]
    distances = ((cells - cells[first]) ** 2).sum(axis=-1)
    for step in range(count - 1):
        below = np.cumsum(mass * distances)
        u = draws[1 + TRIALS * step : 1 + TRIALS * (step + 1)] * below[-1]
        picks = np.minimum(np.searchsorted(below, u, side="right"), len(cells) - 1)
        tried = ((cells[None] - cells[picks][:, None]) ** 2).sum(axis=-1)
        tried = np.minimum(tried, distances)
        best = int(np.argmin(tried @ mass))
        chosen.append(int(picks[best]))
        distances = tried[best]
    return cells[chosen]


def assign(cells: FloatArray, centres: FloatArray) -> tuple[IntArray, FloatArray]:
    """The nearest centre of each cell, and the squared distance to it."""
    scores = cells @ centres.T - 0.5 * (centres**2).sum(axis=-1)
    nearest = np.argmax(scores, axis=-1).astype(np.int64)
    return nearest, ((cells - centres[nearest]) ** 2).sum(axis=-1)


def lloyd(
    mass: FloatArray, cells: FloatArray, centres: FloatArray, steps: int = 50
) -> tuple[IntArray, FloatArray, float]:
    """Labels, centres and weighted inertia where Lloyd's algorithm ends."""
    count, labels = len(centres), np.full(len(cells), -1, dtype=np.int64)
    distances = np.zeros(len(cells))
    for _ in range(steps):
        nearest, distances = assign(cells, centres)
        if np.array_equal(nearest, labels):
            break
        labels = nearest
        member = np.zeros((count, len(cells)))
        member[labels, np.arange(len(cells))] = mass
        total = member.sum(axis=-1)
        held = total > 0
        centres = centres.copy()
        centres[held] = (member[held] @ cells) / total[held, None]
    return labels, centres, float(mass @ distances)


def best_partition(
    mass: FloatArray, cells: FloatArray, count: int, seed: int, attempts: range
) -> tuple[FloatArray, FloatArray]:
    """Masses and centres of the best of some attempts."""
    found = []
    for attempt in attempts:
        labels, centres, inertia = lloyd(
            mass, cells, seed_centres(mass, cells, count, seed, attempt)
        )
        found.append((inertia, attempt, labels, centres))
    _, _, labels, centres = min(found, key=lambda entry: entry[:2])
    member = labels == np.arange(count)[:, None]
    return np.where(member, mass, 0.0).sum(axis=-1), centres
