"""What rows may say where every row's say is bounded: clipped, in whole numbers, of length one.

A private answer is a sum over rows of a vector that no row can make longer than one. Of a mixture
it is made of the moments of each component k about that component: u = A_k (y - mu_k), white by
the parameters that the question gives, scaled into a ball of radius R. With responsibilities r that
sum to one at most, the vector of all (a r, b r u, c r uu') of a row is no longer than
sqrt(a^2 + b^2 R^2 + c^2 R^4). About the components themselves noise costs least: it is small where
a component is narrow. The blocks count by the shares that minimise the noise in nats: errors of a
mass, of a mean and of a product cost alike where components are white, so a block of q numbers of
size up to B gets a share proportional to sqrt(q) B.

Sums are exact. Responsibilities, rows and products are cut to multiples of a grid toward zero,
which makes no length longer, and sums of so few multiples are exact in doubles in whatever order
they are taken. What is cut follows from each row alone (`_White`). So no rounding error depends on
the other rows, and no bound has to be padded.

Mixtures are compared by the log-densities that each row has under them, less that under the first:
a vector too, which is scaled into a ball.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self, final

import numpy as np

from emfed.core.errors import SettingsError, WireError
from emfed.core.protocols import FloatArray, IntArray
from emfed.models.matrices import triangle
from emfed.models.parameters import GaussianParameters

SHARES, FINE, COARSE = 0.5**14, 0.5**16, 0.5**9
"""Grids of responsibilities, of rows in means and of rows in products. White rows have a spread of
one: a 500th of it moves a covariance by 0.2%."""
UNIT = 0.5**32
"""All sums are multiples of it, and are added up as integers."""
BLOCK = 1 << 11
"""Rows whose sums are taken at once, in doubles: 14 bits of a responsibility, two times 13 of a row
and 11 of these make 51, which doubles hold exactly."""
ROOM = 1 << 22
"""Numbers that rows times components may take: a server that names many has fewer rows at once."""
MOST_ROWS = 1 << 22
"""Rows of a site: so many sums of products have room in 64 bits."""
MOST_RIVALS = 64
"""Mixtures that one question compares with the first."""
LARGEST_RADIUS = 16.0
"""The largest radius of rows, in the frame of a private fit: what a server may name is bounded."""
KINDS = ("tied", "full", "diag", "spherical")
CENTRES = "centres"
"""Tied, without products: of many components, for a sketch."""
_POWERS = {"mass": 0, "first": 1, "second": 2}


@final
@dataclass(frozen=True, eq=False)
class Asked:
    """A question that is answered with noise: sums over rows, each number on a common lattice.

    With ``edges``, ``(columns, bins + 1)``: how many rows have a value in each bin of each column;
    whatever lies outside counts in the bins at the ends. With ``rivals``: how much more log-density
    rows have under each of them than under ``params``. Otherwise the statistics of a Gaussian
    mixture with ``params`` in the frame.
    """

    step: float
    """The lattice, where the vector of one row has a length of at most one."""
    shares: int = 1
    """How many workers' noise is in what the server learns, at least: what the price counts on."""
    edges: FloatArray | None = None
    kind: str = "full"
    params: Any = None
    origin: FloatArray = field(default_factory=lambda: np.empty(0))
    matrix: FloatArray = field(default_factory=lambda: np.empty((0, 0)))
    radius: float = 1.0
    rivals: tuple[GaussianParameters, ...] = ()

    @property
    def size(self) -> int:
        """How many numbers an answer has."""
        return len(self.scales)

    @property
    def columns(self) -> int:
        """The number of columns of the rows that it is about."""
        return len(self.origin) if self.edges is None else len(self.edges)

    @property
    def scales(self) -> FloatArray:
        """What each number is multiplied by, so that a row's vector has length one at most."""
        if self.edges is not None:
            columns, edges = self.edges.shape
            return np.full(columns * (edges - 1), columns**-0.5)
        if self.rivals:
            return np.full(len(self.rivals), 1 / self.radius)
        k, d = self.params.means.shape
        sizes, out = {}, []
        for name, (count, q) in self.shapes.items():
            # Products that all components share tell of k times as many rows.
            sizes[name] = np.sqrt(q) * self.radius ** _POWERS[name] * count / k
        for name, (count, q) in self.shapes.items():
            each = np.sqrt(sizes[name] / sum(sizes.values())) / self.radius ** _POWERS[name]
            block = np.full(q, each)
            if name == "second" and self.kind in ("full", "tied"):
                block[~triangle(d)[2]] *= 2**0.5  # off the diagonal products stand for two
            out.append(np.tile(block, count))
        return np.concatenate(out)

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """Mass, first and second moments, each with a row a component; tied products have one."""
        k, d = self.params.means.shape
        products = d * (d + 1) // 2
        seconds = {
            "full": (k, products),
            "tied": (1, products),
            "diag": (k, d),
            "spherical": (k, 1),
        }
        means = {"mass": (k, 1), "first": (k, d)}
        return means if self.kind == CENTRES else means | {"second": seconds.get(self.kind, (k, 1))}

    def split(self, vector: FloatArray) -> dict[str, FloatArray]:
        """An answer by the names of its parts."""
        out, start = {}, 0
        for name, (k, q) in self.shapes.items():
            out[name] = vector[start : start + k * q].reshape(k, q)
            start += k * q
        return out

    @property
    def roots(self) -> FloatArray:
        """L with L L' the covariance of each component, ``(components, d, d)``."""
        k, d = self.params.means.shape
        given = self.params.covariances
        if self.kind == "diag":
            given = given[:, :, None] * np.eye(d)
        elif self.kind == "spherical":
            given = given[:, None, None] * np.eye(d)
        try:
            return np.broadcast_to(np.linalg.cholesky(given), (k, d, d))
        except np.linalg.LinAlgError:
            raise WireError("a private question has covariances that are none.") from None

    @property
    def inverses(self) -> FloatArray:
        """The maps that make each component white."""
        return np.asarray(np.linalg.inv(self.roots), dtype=np.float64)

    # To the wire and back.

    def describe(self) -> tuple[dict[str, Any], FloatArray]:
        """Plain JSON types, and numbers; the text is equally long whatever rows said before."""
        if self.edges is not None:
            columns = {"shares": self.shares, "columns": len(self.edges)}
            return columns, np.concatenate([[self.step], self.edges.ravel()])
        k, d = self.params.means.shape
        about: dict[str, Any] = {"shares": self.shares, "columns": d, "components": k}
        about["covariance"] = self.kind
        rivals = [len(rival.weights) for rival in self.rivals]
        arrays = [np.array([self.step, self.radius]), self.origin, self.matrix]
        arrays += [a for one in (self.params, *self.rivals) for a in one.arrays().values()]
        numbers = np.concatenate([np.ravel(a) for a in arrays])
        return about | ({"rivals": rivals} if rivals else {}), numbers

    @classmethod
    def read(cls, about: Mapping[str, Any], numbers: FloatArray) -> Self:
        """The inverse of `describe`; raises `WireError` for anything else."""
        d, k = about.get("columns"), about.get("components", 0)
        shares, rivals = about.get("shares"), about.get("rivals", [])
        listed = isinstance(rivals, list) and len(rivals) <= MOST_RIVALS
        counts = [d, k, shares, *(rivals if listed else ["no list"])]
        small = all(type(n) is int and 0 <= n <= 1 << 20 for n in counts)
        fine = len(numbers) > 1 and np.isfinite(numbers).all() and 0 < numbers[0] < 1
        if not (small and fine and d and shares):
            raise WireError("a private question gives its lattice, columns and components.")
        step, radius = float(numbers[0]), float(numbers[1])
        if not k:
            return cls(step, shares, _edges(numbers[1:], d))
        kind = about.get("covariance")
        if kind not in (*KINDS, CENTRES) or not 0 < radius <= LARGEST_RADIUS:
            raise WireError("a private question names a kind of covariance and a radius.")
        shapes: list[tuple[int, ...]] = [(d,), (d, d)]
        for count in (k, *rivals):
            ends = {"full": (count, d, d), "diag": (count, d), "spherical": (count,)}
            shapes += [(count,), (count, d), ends.get(kind, (d, d))]
        origin, matrix, *theta = _in_shapes(numbers[2:], shapes)
        params, *others = (GaussianParameters(*theta[j : j + 3]) for j in range(0, len(theta), 3))
        return cls(step, shares, None, kind, params, origin, matrix, radius, tuple(others))


def _edges(numbers: FloatArray, columns: int) -> FloatArray:
    """Edges of bins as they came, ``(columns, bins + 1)``."""
    edges = numbers.reshape(columns if len(numbers) % columns == 0 else 1, -1)
    if len(edges) != columns or edges.shape[1] < 2 or not (np.diff(edges) > 0).all():
        raise WireError("bins of a private question have edges that grow.")
    return edges


def _in_shapes(numbers: FloatArray, shapes: Sequence[tuple[int, ...]]) -> list[FloatArray]:
    """Arrays of these shapes, one after the other, which take all the numbers."""
    ends = list(itertools.accumulate(math.prod(shape) for shape in shapes))  # no overflow
    if ends[-1] != len(numbers):
        few = "few" if ends[-1] > len(numbers) else "many"
        raise WireError(f"a private question has too {few} numbers.")
    parts = np.split(numbers, ends[:-1])
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


def clipped(rows: FloatArray, radius: float) -> FloatArray:
    """Rows scaled into a ball; what is not finite counts as the middle."""
    with np.errstate(all="ignore"):
        length = np.sqrt((rows**2).sum(axis=1, keepdims=True))
        # A hair inside, so that rounding of the length itself leaves none outside.
        inside = np.minimum(1.0, radius * (1 - 1e-12) / np.maximum(length, 1e-300))
        scaled = np.asarray(rows * inside)
    scaled[~np.isfinite(scaled).all(axis=1)] = 0.0
    return scaled


def _cut(values: FloatArray, grid: float) -> FloatArray:
    return np.asarray(np.trunc(values / grid) * grid)


def whole_sums(asked: Asked, blocks: Iterable[FloatArray]) -> FloatArray:
    """The exact sums over rows that a question asks for, before its scales."""
    if asked.edges is not None:
        return _counts(asked.edges, blocks)
    tell = _gains if asked.rivals else _moments
    theirs, count = tell(asked), 0
    total = np.zeros(asked.size, dtype=np.int64)
    components = max(len(own.weights) for own in (asked.params, *asked.rivals))
    size = max(1, min(BLOCK, ROOM // max(1, components)))
    for block in blocks:
        count += len(block)
        if count > MOST_ROWS:
            raise SettingsError(f"a site has at most {MOST_ROWS} rows in a private run.")
        for start in range(0, len(block), size):
            rows = np.asarray(block[start : start + size], dtype=np.float64)
            with np.errstate(all="ignore"):
                moved = _times(rows - asked.origin, asked.matrix)
            total += np.rint(theirs(moved) / UNIT).astype(np.int64)
    return np.asarray(total * UNIT)


def _gains(asked: Asked) -> Callable[[FloatArray], FloatArray]:
    """Sums of log-densities under each rival, less those under the first mixture."""
    parts = [_White(replace(asked, params=own, rivals=())) for own in (asked.params, *asked.rivals)]

    def of(moved: FloatArray) -> FloatArray:
        with np.errstate(all="ignore"):  # of a row far away, densities may be anything
            densities = [np.logaddexp.reduce(part.logits(moved), axis=1) for part in parts]
            gains = np.stack(densities[1:], axis=1) - densities[0][:, None]
        return np.asarray(_cut(clipped(gains, asked.radius), FINE).sum(axis=0))

    return of


def _moments(asked: Asked) -> Callable[[FloatArray], FloatArray]:
    """Sums of moments about each component."""
    white = _White(asked)

    def of(moved: FloatArray) -> FloatArray:
        with np.errstate(all="ignore"):  # of a row far away, the logits may be anything
            logits = white.logits(moved)
            r = np.exp(logits - logits.max(axis=1, keepdims=True))
            r /= r.sum(axis=1, keepdims=True)
        r = _cut(np.where(np.isfinite(r), r, 0.0), SHARES)
        return _about_components(asked, moved, r, white)

    return of


@final
class _White:
    """Rows about each component, white; every row by itself, whatever rows are beside it.

    Products of matrices by a library are not so: it rounds a row otherwise that is alone, or in the
    rest of a block. Where many rows lie on an edge of the grid (columns of whole numbers, a frame
    that the server chose), one row more would then move others, and sums by more than its part.
    """

    def __init__(self, asked: Asked) -> None:
        self._means, self._inverses = asked.params.means, asked.inverses
        self._common = asked.kind in ("tied", CENTRES)
        if self._common:
            self._centres = _times(self._means, self._inverses[0])
        with np.errstate(all="ignore"):
            volumes = np.log(np.diagonal(self._inverses, axis1=1, axis2=2)).sum(axis=1)
            self._sizes = np.log(asked.params.weights) + volumes

    def about(self, k: int, moved: FloatArray) -> FloatArray:
        """Rows about component k; of a common covariance, rows that `turned` gave."""
        if self._common:
            return moved - self._centres[k]
        return _times(moved - self._means[k], self._inverses[k])

    def turned(self, moved: FloatArray) -> FloatArray:
        return _times(moved, self._inverses[0]) if self._common else moved

    def logits(self, moved: FloatArray) -> FloatArray:
        """Log-densities of rows and components, less a constant, ``(rows, components)``."""
        moved = self.turned(moved)
        squares = [(self.about(k, moved) ** 2).sum(axis=1) for k in range(len(self._means))]
        return self._sizes - 0.5 * np.stack(squares, axis=1)


def _times(rows: FloatArray, matrix: FloatArray) -> FloatArray:
    """Rows times the transpose of a matrix, column by column: each row is rounded alike.

    The result has one row after the other in memory, whatever their number: sums over columns are
    taken in an order that depends on it.
    """
    columns = np.ascontiguousarray(rows.T)
    total = np.zeros((len(matrix), len(rows)))
    for j, column in enumerate(columns):
        some = np.flatnonzero(matrix[:, j])
        if len(some):  # most matrices here are triangular
            part = slice(int(some[0]), int(some[-1]) + 1)
            total[part] += matrix[part, j, None] * column
    return np.ascontiguousarray(total.T)


def _about_components(asked: Asked, moved: FloatArray, r: FloatArray, white: _White) -> FloatArray:
    """Sums over a block of rows with these responsibilities."""
    first, second = [], []
    with np.errstate(all="ignore"):
        turned = white.turned(moved)
    for k in range(r.shape[1]):
        own = np.flatnonzero(r[:, k])  # most rows have a share in few components
        with np.errstate(all="ignore"):
            about = white.about(k, turned[own])
        u = clipped(about, asked.radius)
        first.append(r[own, k] @ _cut(u, FINE))
        if asked.kind != CENTRES:
            second.append(_products(_cut(u, COARSE), r[own, k], asked.kind))
    if asked.kind == "tied":
        second = [np.sum(second, axis=0)]
    return np.concatenate([r.sum(axis=0), *first, *second])


def _products(u: FloatArray, r: FloatArray, kind: str) -> FloatArray:
    if kind in ("full", "tied"):
        i, j, _ = triangle(u.shape[1])
        return np.asarray(((u * r[:, None]).T @ u)[i, j])
    squares = r @ u**2
    return np.asarray(squares if kind == "diag" else squares.sum(keepdims=True))


def _counts(edges: FloatArray, blocks: Iterable[FloatArray]) -> FloatArray:
    """Rows in each bin of each column."""
    columns, bins = len(edges), edges.shape[1] - 1
    total = np.zeros((columns, bins))
    for block in blocks:
        for j in range(columns):
            place = np.searchsorted(edges[j], np.asarray(block[:, j], np.float64), "right") - 1
            total[j] += np.bincount(np.clip(place, 0, bins - 1), minlength=bins)
    return total.ravel()


def to_integers(asked: Asked, sums: FloatArray) -> IntArray:
    """A worker's sums on the lattice, before noise."""
    return np.rint(sums * (asked.scales / asked.step)).astype(np.int64)


def from_integers(asked: Asked, total: IntArray) -> FloatArray:
    """The sums over all rows, with noise, in their own units."""
    return np.asarray(total.astype(np.float64) * (asked.step / asked.scales))


def check_private(model: Any) -> None:
    """Refuse a model whose rows have no bounded say."""
    described = model.describe()
    kind = described.get("covariance_type")
    mixture = described.get("model") == "gaussian-mixture" and kind in KINDS
    if not mixture and not needs_moments_alone(model):
        raise SettingsError(
            "epsilon goes with Gaussian mixtures (full, tied, diag, spherical) and with factor "
            "analysis and ppca of one component, whose statistics are bounded once rows are "
            "clipped; this model's are not covered yet. Leave epsilon out, or use one of these."
        )
    if described.get("covariance_prior") is not None:
        raise SettingsError("epsilon goes with no covariance_prior: leave one of the two out.")


def needs_moments_alone(model: Any) -> bool:
    """Whether the mean and covariance of all rows are all that a model needs."""
    described = model.describe()
    factors = described.get("model") in ("factor-analysis", "ppca")
    return factors and described.get("n_components") == 1
