"""What a worker's rows fall into by themselves: its own clusters, for a start that merges all.

A worker runs k-means on its own rows, in the frame that all share, and tells share and mean of each
cluster once, quantised with a dither that both ends know. The server draws its sketch of all rows
from everybody's clusters (`emfed.fitting.starts`). This is no sum: it tells what one worker's rows
are like, so runs with masks do without it, and an owner may refuse it (`SiteRules.own_clusters`).
No cluster is told that has fewer rows than the smallest group.

Decision: docs/decisions/018-starts-and-sketches.md
"""

from __future__ import annotations

from typing import Any

import numpy as np

from emfed.compressors import SubtractiveDithering
from emfed.core.protocols import Compressed, FloatArray
from emfed.core.streams import Purpose, uniforms
from emfed.core.wire import decode_payload, encode_payload
from emfed.models.clusters import Buckets, lloyd, seed_centres
from emfed.models.mixture import to_numpy

SMALLEST = 10
"""Rows of a cluster, at least, where an owner says nothing: as of `SiteRules.smallest_rows`."""
MOST_ROWS = 5000
"""Rows of a worker that take part, evenly spread."""
LLOYD_STEPS = 20
"""Steps of Lloyd's algorithm on a worker's own rows. Not tuned: they cost no message."""
QUANTISER = SubtractiveDithering(0.05)
"""A twentieth of what is told is noise."""


def clusters_width(model: Buckets) -> int:
    """Numbers that a worker tells: share and mean of each cluster."""
    return model.layout.size


def encoded_clusters(
    model: Buckets, rows: Any, weights: FloatArray, number: int, smallest: int
) -> bytes:
    """One worker's answer about these rows."""
    vector = _own(model, rows, weights, number, smallest)
    u = _uniforms(model, number)
    dither = QUANTISER.dither(u, len(vector))[0]
    message = QUANTISER.compress(vector[None], u).take(0)
    return encode_payload(message, QUANTISER.form(len(vector)), dither)


def decode_clusters(told: bytes, model: Buckets, number: int) -> FloatArray:
    """The inverse, but for the noise."""
    width, u = clusters_width(model), _uniforms(model, number)
    message = decode_payload(told, QUANTISER.form(width), QUANTISER.dither(u, width)[0])
    whole = Compressed(message.reals[None], message.symbols[None])
    return np.asarray(QUANTISER.decompress(whole, u, width)[0])


def _uniforms(model: Buckets, number: int) -> FloatArray:
    return uniforms(model.seed, 0, Purpose.CLUSTERS, np.array([number]), clusters_width(model))


def _own(model: Buckets, rows: Any, weights: FloatArray, number: int, smallest: int) -> FloatArray:
    """Shares of clusters, in units of an even one, and their means.

    Who has fewer than were asked for tells some of them several times, with a part of the share.
    """
    frame = model.inner.frame
    assert frame is not None
    rows = to_numpy(rows).astype(np.float64)
    points = np.nan_to_num((rows - frame.origin) / frame.scale)
    mass = weights / weights.sum()
    most, least = model.most, min(smallest, len(points))
    begun = min(most, len(points) // least)
    centres = seed_centres(mass, points, begun, model.seed, [(1 << 20) + number])[0]
    while True:  # a cluster that is too small goes to its neighbours
        labels, centres, _ = lloyd(mass, points, centres, LLOYD_STEPS)
        rows_each = np.bincount(labels, minlength=len(centres))
        if len(centres) == 1 or rows_each.min() >= least:
            break
        few = np.argsort(rows_each, kind="stable")[: np.count_nonzero(rows_each < least)]
        # A half at a time: one at a time, 500 clusters of 5,000 rows took 13 s.
        centres = np.delete(centres, few[: -(-len(few) // 2)], axis=0)
    order = np.argsort(-rows_each, kind="stable")
    slots = order[np.arange(most) % len(order)]
    shares = np.bincount(labels, mass, len(centres)) / np.bincount(slots, minlength=len(centres))
    return np.concatenate([most * shares[slots], np.ravel(centres[slots])])
