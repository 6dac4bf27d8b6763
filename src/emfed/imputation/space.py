"""Which sites are neighbours on a map.

Sites are tied to their nearest neighbours by the penalty `Structure.spatial` on the differences of
their effects and factors, as times are by `smoothing`: a graph's Laplacian, whose draws are those
of an intrinsic Gaussian field. A site with few records then follows those around it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.spatial import cKDTree

from emfed.core.errors import DataError
from emfed.core.protocols import FloatArray
from emfed.imputation.table import matched
from emfed.models.sides import Graph

NEAREST = 5
"""Neighbours of a site. In the plane 4 to 8 tell about the same; not tuned."""
_DEGREES = (("longitude", "lon", "lng"), ("latitude", "lat"))


def places_of(coordinates: Any, sites: Sequence[str]) -> tuple[FloatArray, bool]:
    """The coordinates of sites in the order of ``sites``, and whether they are degrees.

    A frame has a column ``site`` and two more: ``longitude`` and ``latitude``, in degrees, or any
    two on a map. An array has two columns on a map, in the order of the sites.
    """
    degrees = False
    if hasattr(coordinates, "columns"):
        names = [str(name) for name in coordinates.columns if name != "site"]
        low = {name.lower(): name for name in names}
        found = [next((low[n] for n in some if n in low), None) for some in _DEGREES]
        degrees = None not in found
        if not degrees and len(names) != 2:
            raise DataError(
                "coordinates need a column 'site' and longitude and latitude, or two columns of "
                f"places on a map; got {', '.join(map(repr, names))}."
            )
        wanted = found if degrees else names
        coordinates = coordinates[["site", *wanted]]
    places = matched(coordinates, sites, "site", "coordinates")
    if places.shape[1] != 2:
        raise DataError(f"coordinates have two columns; got {places.shape[1]}.")
    if degrees and (np.abs(places) > (360.0, 90.0)).any():
        row = int(np.flatnonzero((np.abs(places) > (360.0, 90.0)).any(axis=1))[0])
        raise DataError(f"coordinates of site {sites[row]!r} are no degrees: {places[row]}.")
    return places, degrees


def neighbours(places: FloatArray, degrees: bool = False) -> Graph:
    """Each site and its nearest ones.

    A pair counts 1; one that is farther apart than the median pair less, by the square of the ratio
    of distances, so that an island is not held as one of its coast.
    """
    points = _on_sphere(places) if degrees else places
    count, few = len(points), min(NEAREST, len(points) - 1)
    if few < 1:
        nothing = np.empty(0, dtype=np.int64)
        return Graph(count, nothing, nothing, np.empty(0))
    distance, index = cKDTree(points).query(points, k=few + 1)
    own = np.repeat(np.arange(count), few + 1)
    # Sites at one place may come in any order: a site is not always its own nearest.
    other, far = index.ravel().astype(np.int64), distance.ravel()
    kept = own != other
    low, high = np.minimum(own, other)[kept], np.maximum(own, other)[kept]
    keys, first = np.unique(low * count + high, return_index=True)
    far = far[kept][first]
    middle = float(np.median(far))
    ratio = np.divide(middle, far, out=np.ones_like(far), where=far > middle)
    return Graph(count, keys // count, keys % count, np.minimum(ratio, 1.0) ** 2)


def _on_sphere(places: FloatArray) -> FloatArray:
    """Points on the unit sphere: their straight distance orders as that on the ground."""
    longitude, latitude = np.radians(places).T
    flat = np.cos(latitude)
    points = (flat * np.cos(longitude), flat * np.sin(longitude), np.sin(latitude))
    return np.stack(points, axis=1)
