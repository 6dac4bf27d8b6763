"""A sketch of all data in a few rounds: cells with their shares and means, and nothing else.

One cell holds everything. In each round every cell sends out new centres at random around its own;
workers answer with the share and the sum of their rows nearest to each centre, so that cells
settle where rows are. A handful of rounds gives several times as many cells as there will be
components. The server then runs k-means++ and Lloyd's algorithm on the cells as often as it likes:
attempts cost no messages, and no raw point ever leaves a worker.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from emfed.core.protocols import FloatArray, Model, StartsFromClusters
from emfed.core.streams import Purpose, normals

BRANCHES = 4
"""Centres that each cell sends out in a round."""
CELLS_PER_COMPONENT, FEWEST_PER_COMPONENT = 16, 4
FEWEST, MOST = 32, 256
ROWS_PER_CELL = 5
SETTLING = 2
"""Rounds of Lloyd's algorithm on the final cells."""

Ask = Callable[[Model, FloatArray], FloatArray]
"""One round: the statistics of all workers for clusters with these statistics."""


def grow_cells(
    model: StartsFromClusters, ask: Ask, components: int, rows: float | None, seed: int
) -> tuple[FloatArray, FloatArray]:
    """Masses and means of cells, in the frame of the model; empty cells are left out.

    ``rows`` is what a worker has on average, None where there is one worker alone, who can hide
    nothing from itself. Otherwise cells are so few that each holds several of a worker's rows, if
    that leaves some for every component, and a worker is silent about a cell with a single row.
    """
    size = min(max(CELLS_PER_COMPONENT * components, FEWEST), MOST)
    if rows is not None:
        size = min(size, max(FEWEST_PER_COMPONENT * components, int(rows) // ROWS_PER_CELL))
    smallest = 1 if rows is None else 2
    mass, centres = np.ones(1), np.zeros((1, _columns(model)))
    for round_ in range(2 + int(np.ceil(np.log(size) / np.log(BRANCHES)))):
        if len(centres) >= size:
            break  # else cells keep dying: the rows lie in fewer places than that
        sent = _branches(mass, centres, _spread(mass, centres), size, seed, round_)
        mass, centres = _settle(model, ask, sent, smallest)
    for _ in range(SETTLING):
        mass, centres = _settle(model, ask, centres, smallest)
    return mass, centres


def _columns(model: StartsFromClusters) -> int:
    return int(model.clusters(1).n_features)


def _spread(mass: FloatArray, centres: FloatArray) -> FloatArray:
    """Standard deviations within cells, column by column: those of all rows are 1 in the frame."""
    between = mass @ centres**2
    return np.sqrt(np.maximum(1 - between, 0.05))


def _branches(
    mass: FloatArray, centres: FloatArray, spread: FloatArray, size: int, seed: int, round_: int
) -> FloatArray:
    """Centres around each cell, more where there is more mass, ``size`` at most."""
    wanted = min(size, BRANCHES * len(centres))
    each = np.minimum(np.maximum(1, np.round(wanted * mass)), 2 * BRANCHES).astype(np.int64)
    d, total = centres.shape[1], int(each.sum())
    address = np.array([round_], dtype=np.int64)
    draws = normals(seed, 0, Purpose.CELLS_SPLIT, address, total * d).reshape(total, d)
    lengths = np.sqrt((draws**2).sum(axis=1, keepdims=True))
    moves = draws / lengths * np.sqrt(d) ** 0.5  # near the cell, or in many columns none is nearest
    alone = np.repeat(each == 1, each)[:, None]
    return np.repeat(centres, each, axis=0) + np.where(alone, 0.0, 0.7 * spread * moves)


def _settle(
    model: StartsFromClusters, ask: Ask, centres: FloatArray, smallest: int
) -> tuple[FloatArray, FloatArray]:
    """Where the rows nearest to each centre lie: one round. If nobody says, they stay."""
    clusters = dataclasses.replace(model.clusters(len(centres)), smallest=smallest)
    statistics = ask(clusters, clusters.statistics_of(clusters.start_at(None, centres, None)))
    parts = clusters.layout.split(statistics)
    # Uploads are rounded where there are many workers: the mean of a small cell is then noise.
    held = parts["mass"] > (1e-9 if smallest == 1 else 0.2 / len(centres))
    if not held.any():
        return np.full(len(centres), 1 / len(centres)), centres
    mass = parts["mass"][held]
    return mass / mass.sum(), parts["first"][held] / mass[:, None]
