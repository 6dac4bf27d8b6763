"""The kernels in numpy: the same ranges of rows, blocks, parts and order of sums.

For tests, and for readers: what `kernels` computes, without a device.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from emfed.core.protocols import FloatArray
from emfed.models.devices.halves import UPWARD, halves
from emfed.models.devices.passes import Pass, Sums
from emfed.models.devices.ragged import Ragged


def split(values: Any) -> tuple[Any, Any]:
    """High and low parts, float16."""
    single = np.asarray(values, dtype=np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        high = single.astype(np.float16)
        return high, (single - high.astype(np.float32)).astype(np.float16)


def _product(a: tuple[Any, Any], b: tuple[Any, Any]) -> Any:
    """Three of four products of numbers in two parts, float32."""
    (a_high, a_low), (b_high, b_low) = (tuple(p.astype(np.float32) for p in v) for v in (a, b))
    with np.errstate(over="ignore", invalid="ignore"):  # what is no number is done again in doubles
        return a_high @ b_high + (a_high @ b_low + a_low @ b_high)


def _features(y: Any, given: Pass, fast: bool) -> Any:
    """f(z) of raw rows, ``(m, F + 1)``, the last one 1: float64, or float32 where ``fast``."""
    f = given.features
    kind: Any = np.float32 if fast and y.dtype == np.float32 else np.float64
    first = f.origin.astype(kind)
    rest = ((f.origin - first) / f.scale).astype(kind)
    z = (y.astype(kind) - first) * (1 / f.scale).astype(kind) - rest
    z = np.concatenate([z, np.ones((len(z), 1), kind)], axis=1)
    z = z.astype(np.float32) if fast else z
    last = len(f.origin)
    return z[:, np.append(f.left, last)] * z[:, np.append(f.right, last)]


def _block(
    y: Any, given: Pass, worker: int, w: Any, fast: bool, heaviest: float
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Sums of responsibility times features ``(K, F + 1)``; log sums and entropies of the rows."""
    own = given.intercepts.ndim > 1
    c = given.intercepts[worker] if own else given.intercepts
    b = given.slopes[worker] if own else given.slopes
    phi = _features(y, given, fast)
    if fast:
        parts, factors = halves(b[None])
        pieces = split(phi.T)
        logits = _product((parts[0, 0], parts[0, 1]), (pieces[0][:-1], pieces[1][:-1]))
        logits = logits * factors[0][:, None] + c.astype(np.float32)[:, None]
    else:
        logits = b @ phi[:, :-1].T + c[:, None]
    top = logits.max(axis=0)
    if given.hard:
        shares = (np.arange(len(c))[:, None] == logits.argmax(axis=0)).astype(logits.dtype)
    else:
        shares = np.exp(logits - top)
    total = shares.sum(axis=0)
    whole = np.log(total) + top
    spread = whole - (shares * logits).sum(axis=0) / total
    r = shares * (w.astype(logits.dtype) / total)
    if not fast:
        return r @ phi, whole, spread
    high, low = pieces
    unit = heaviest / UPWARD
    sums = _product(split(r / np.float32(unit)), (high.T, low.T))
    return sums.astype(np.float64) * unit, whole, spread


def sweep(rows: Ragged, given: Pass, values: bool = False, programs: int = 2) -> Sums:
    """What `emfed.models.devices.sweep` gives, of rows (and weights) that are numpy arrays."""
    k, f, n = given.components, len(given.features.left), len(rows.starts)
    sums, tally, block = np.zeros((n, k, f + 1)), np.zeros((n, 2)), 32
    heaviest = 1.0 if rows.weights is None else max(float(rows.weights.max()), 1e-300)
    table, _ = rows.ranges(programs, block)
    for start, stop, worker in table.tolist():
        part, scores = np.zeros((k, f + 1)), np.zeros(2)
        for begin in range(start, stop, block):
            here = slice(begin, min(begin + block, stop))
            w = np.ones(here.stop - begin) if rows.weights is None else rows.weights[here]
            added, whole, spread = _block(rows.rows[here], given, worker, w, rows.fast, heaviest)
            part += added
            scores += [whole @ w, spread @ w]
        sums[worker] += part
        tally[worker] += scores
    tally = tally if values else 0 * tally
    return Sums(sums[..., -1], sums[..., :-1], tally[:, 0], tally[:, 1])
