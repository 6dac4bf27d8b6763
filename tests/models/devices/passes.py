"""Random passes over random rows, for tests of kernels and of their numpy twins."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from emfed.models.devices import Features, Pass, Ragged, Second


@dataclass(frozen=True)
class Case:
    name: str
    rows: int
    d: int
    k: int
    second: Second
    counts: tuple[int, ...] = ()
    dtype: Any = np.float32
    weighted: bool = False
    hard: bool = False
    own: bool = False
    far: float = 100.0
    empty: bool = False
    """Whether the last component is so unlikely that no row has any share in it."""

    def make(self, precision: Any = "double") -> tuple[Ragged, Pass]:
        """Rows about ``far`` with spread 3, and a pass in a frame near theirs."""
        g = np.random.default_rng(7)
        rows = (3 * g.normal(size=(self.rows, self.d)) + self.far).astype(self.dtype)
        counts = np.array(self.counts or (self.rows,))
        starts = np.cumsum(counts) - counts
        origin = np.full(self.d, self.far) + 0.3 * g.normal(size=self.d)
        features = Features(origin, np.full(self.d, 3.1), self.second)
        lead = (len(counts),) if self.own else ()
        slopes = 0.5 * g.normal(size=(*lead, self.k, len(features.left))) / np.sqrt(self.d)
        intercepts = g.normal(size=(*lead, self.k))
        if self.empty:
            intercepts[..., -1] = -1e4
        given = Pass(features, intercepts, slopes, self.hard)
        weights = g.random(self.rows) * 3 if self.weighted else None
        return Ragged(rows, starts, counts, weights, precision), given


CASES = [
    Case("rows", 333, 5, 3, "none"),
    Case("squares", 333, 5, 3, "squares"),
    Case("products", 333, 5, 3, "products"),
    Case("one component", 100, 2, 1, "none"),
    Case("one column", 100, 1, 2, "products"),
    Case("one row", 1, 3, 2, "squares"),
    Case("many columns", 70, 257, 3, "none"),
    Case("many components", 150, 3, 100, "none", hard=True),
    Case("no padding", 97, 16, 16, "squares", dtype=np.float64),
    Case("three tiles", 77, 20, 3, "squares", weighted=True),
    Case("three wide tiles", 60, 40, 2, "squares"),
    Case("no padding of rows", 97, 32, 5, "none", weighted=True),
    Case("workers", 300, 9, 2, "none", counts=(1, 7, 292), weighted=True),
    Case("workers, products", 300, 4, 2, "products", counts=(1, 7, 292), weighted=True),
    Case("own parameters", 200, 9, 3, "squares", counts=(50, 150), own=True),
    Case("own parameters, products", 200, 9, 3, "products", counts=(50, 150), own=True),
    Case("matrices", 150, 24, 3, "products", counts=(40, 110), weighted=True),
    Case("own matrices, no padding", 90, 32, 2, "products", counts=(40, 50), own=True),
    Case("nearest", 130, 20, 3, "none", hard=True),
    Case("far off", 257, 6, 3, "squares", far=1e6, dtype=np.float64),
    Case("far off, float32", 257, 6, 3, "products", far=1e5),
    Case("far off, matrices", 67, 13, 2, "products", far=1e6, dtype=np.float64),
    Case("one component, products", 37, 4, 1, "products", weighted=True),
    Case("one component, matrices", 35, 12, 1, "products"),
    Case("one column", 101, 1, 3, "none", weighted=True),
    Case("one column, squares", 33, 1, 1, "squares"),
    Case("one row", 1, 1, 1, "none"),
    Case("one row, products", 1, 2, 2, "products", weighted=True),
    Case("one row, matrices", 1, 12, 2, "products"),
    Case("many columns, squares", 35, 257, 2, "squares", weighted=True),
    Case("more columns than matrices have", 17, 66, 2, "products", weighted=True),
    Case("many columns, products", 17, 257, 2, "products"),
    Case("many columns, nearest", 35, 257, 3, "none", hard=True, weighted=True),
    Case("many columns, many components", 19, 257, 17, "none"),
    Case("an empty component", 65, 5, 3, "squares", empty=True, weighted=True),
    Case("an empty component, products", 65, 5, 3, "products", empty=True),
    Case("an empty component, matrices", 65, 14, 3, "products", empty=True),
]


def plain(rows: Ragged, given: Pass) -> tuple[Any, ...]:
    """The sums by the formulas themselves."""
    f, out = given.features, []
    z = (rows.rows.astype(np.float64) - f.origin) / f.scale
    z = np.concatenate([z, np.ones((len(z), 1))], axis=1)
    for i, (start, count) in enumerate(zip(rows.starts, rows.counts, strict=True)):
        own = given.intercepts.ndim > 1
        c = given.intercepts[i] if own else given.intercepts
        b = given.slopes[i] if own else given.slopes
        part = z[start : start + count]
        phi = part[:, f.left] * part[:, f.right]
        logits = phi @ b.T + c
        w = np.ones(count) if rows.weights is None else rows.weights[start : start + count]
        whole = np.logaddexp.reduce(logits, axis=1)
        soft = np.exp(logits - whole[:, None])
        r = np.eye(given.components)[logits.argmax(axis=1)] if given.hard else soft
        r = r * w[:, None]
        spread = whole - (soft * logits).sum(axis=1)
        out.append((r.sum(axis=0), r.T @ phi, whole @ w, spread @ w))
    return tuple(np.stack(part) for part in zip(*out, strict=True))


def off(found: Any, wanted: Any, hard: bool) -> float:
    """The largest difference relative to the largest number, of each kind of sums.

    An entropy is the difference of two sums of logits: its errors are relative to those.
    """
    pairs = list(zip(found, wanted, strict=True))[: 2 if hard else 4]
    sizes = [max(float(np.abs(b).max()), 1e-3) for _, b in pairs]
    if not hard:
        sizes[3] = max(sizes[2:])
    gaps = [float(np.abs(a - b).max()) for a, b in pairs]
    return max(gap / size for gap, size in zip(gaps, sizes, strict=True))
