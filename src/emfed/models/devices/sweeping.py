"""A pass over rows on a device: which kernel runs, with what, and what its sums are called."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch

from emfed.core.protocols import FloatArray
from emfed.models.devices import kernels
from emfed.models.devices.halves import SHRINK, halves
from emfed.models.devices.passes import Features, Pass, Sums
from emfed.models.devices.ragged import Ragged

FUSED_CELLS = 8192
"""Sums that one program of the fused kernel keeps in registers."""
ANSWER_BYTES = 1 << 30
"""Responsibilities written down at once by the kernels that write them."""


@final
@dataclass(frozen=True)
class Launch:
    """Rows of a block, warps of a program, programs a multiprocessor, loads ahead, features."""

    block: int
    warps: int
    programs: int
    stages: int = 1
    tile: int = 32


def fused_launch(fast: bool, cells: int) -> Launch:
    """Chosen by `python -m benchmarks gpu --tune` on an H200."""
    if cells > 2048:
        return Launch(32, 8, 2)
    if fast:
        return Launch(64, 1, 8) if cells <= 512 else Launch(32, 1, 8)
    return Launch(32, 1, 8) if cells <= 1024 else Launch(32, 2, 8)


def phase_launches(fast: bool, kp: int) -> tuple[Launch, Launch]:
    """Of `kernels.shares` and `kernels.moments`; chosen like the ones above."""
    if kp > 128:
        return Launch(16, 8, 8, tile=32), Launch(32, 4, 2, tile=32)
    if kp > 32:
        return Launch(32, 4, 8, tile=32), Launch(32, 4, 2, tile=32)
    if fast:
        return Launch(64, 2, 16, tile=64), Launch(32, 1, 2, tile=32)
    return Launch(64, 2, 16, stages=3, tile=64), Launch(32, 1, 2, stages=3, tile=32)


def _padded(size: int) -> int:
    """The next power of two, at least what a tensor core takes: what kernels can tile."""
    return max(16, 1 << (size - 1).bit_length())


def _processors(x: Any) -> int:
    if x.device.type != "cuda":  # the interpreter: two ranges, so that partial sums are summed
        return 1
    return int(torch.cuda.get_device_properties(x.device).multi_processor_count)


def _ship(rows: Ragged, *arrays: Any) -> list[Any]:
    """Arrays beside the rows, in one copy."""
    edges = np.cumsum([0, *(-(-a.nbytes // 16) * 16 for a in arrays)])
    buffer = np.zeros(int(edges[-1]), dtype=np.uint8)
    for a, start in zip(arrays, edges[:-1].tolist(), strict=True):
        buffer[start : start + a.nbytes] = np.ascontiguousarray(a).view(np.uint8).reshape(-1)
    there = rows.put(buffer)
    kinds = {"float64": torch.float64, "float32": torch.float32, "float16": torch.float16}
    kinds["int32"] = torch.int32
    return [
        there[start : start + a.nbytes].view(kinds[a.dtype.name]).reshape(a.shape)
        for a, start in zip(arrays, edges[:-1].tolist(), strict=True)
    ]


def _frame(features: Features, width: int, fast: bool, single: bool) -> list[Any]:
    """Origin, what float32 lost of it, and inverse scale; column d becomes 1, further ones 0."""
    d, kind = len(features.origin), np.dtype(np.float32 if fast and single else np.float64)
    origin, inverse = np.zeros(width), np.zeros(width)
    origin[:d], inverse[:d] = features.origin, 1 / features.scale
    if width > d:
        origin[d], inverse[d] = -1.0, 1.0
    first = origin.astype(kind)
    return [first, (origin - first).astype(kind), inverse.astype(kind)]


def _intercepts(given: Pass, kp: int, fast: bool) -> Any:
    """``(workers or 1, kp)``; those that only fill up are finite, so that 0 times them is 0."""
    c = np.atleast_2d(given.intercepts)
    out = np.full((len(c), kp), -1e30 if fast else -1e300)
    out[:, : c.shape[1]] = c
    return out.astype(np.float32) if fast else out


def _slopes(given: Pass, fp: int, kp: int) -> FloatArray:
    """``(workers or 1, kp, fp)``."""
    b = given.slopes.reshape(-1, *given.slopes.shape[-2:])
    out = np.zeros((len(b), kp, fp))
    out[:, : b.shape[1], : b.shape[2]] = b
    return out


def _reduced(partial: Any, ends: Any, workers: int) -> Any:
    """Sums over each worker's programs."""
    width = partial.shape[1]
    out = torch.empty((workers, width), dtype=torch.float64, device=partial.device)
    kernels.gather[(workers * -(-width // 32),)](partial, ends, out, width, 64, 32)
    return out


def _heaviest(rows: Ragged) -> float:
    if rows.weights is None:
        return 1.0
    if "heaviest" not in rows.memo:
        rows.memo["heaviest"] = max(float(rows.weights.max()), 1e-300)
    return float(rows.memo["heaviest"])


def sweep(rows: Ragged, given: Pass, values: bool = False, launch: Any = None) -> Sums:
    """Sums over the rows of each worker, with leading axis (workers,)."""
    f = given.features
    cells = _padded(given.components) * _padded(len(f.origin)) * (1 + f.squared)
    if (f.linear or f.squared) and cells <= FUSED_CELLS:
        found = _fused(rows, given, values, launch or fused_launch(rows.fast, cells))
    else:
        pair = launch or phase_launches(rows.fast, _padded(given.components))
        found = _in_two(rows, given, values, *pair)
    if rows.fast and not all(np.all(np.isfinite(part)) for part in found):
        return sweep(dataclasses.replace(rows, precision="double"), given, values)
    return found


def _fused(rows: Ragged, given: Pass, values: bool, at: Launch) -> Sums:
    f, k, fast, x = given.features, given.components, rows.fast, rows.rows
    d, squared = len(f.origin), int(f.squared)
    dp, kp = _padded(d), _padded(k)
    spare = dp > d
    intercepts = _intercepts(given, kp, fast)
    flat = _slopes(given, d * (1 + squared), kp)
    slopes: Any = np.zeros((len(flat), 1 + squared, kp, dp))
    slopes[..., :d] = np.swapaxes(flat.reshape(len(flat), kp, 1 + squared, d), 1, 2)
    factors = np.ones(1, dtype=np.float32)
    if fast:
        slopes[:, 1:] /= SHRINK
        slopes, factors = halves(slopes)
    elif spare:
        slopes[:, 0, :, d] = intercepts
    frame = _frame(f, dp, fast, x.dtype == torch.float32)
    shipped = _ship(rows, slopes, factors, intercepts, *frame)
    table, ends = rows.programs(at.programs * _processors(x), at.block)
    width = kp * dp * (1 + squared) + kp + 2
    sums = torch.empty((len(table), width), dtype=torch.float64, device=x.device)
    weight = _heaviest(rows) if fast else 1.0
    kernels.fused[(len(table),)](
        x,
        x if rows.weights is None else rows.weights,
        table,
        *shipped,
        sums,
        int(given.intercepts.ndim > 1),
        1 / weight,
        D=d,
        DP=dp,
        KP=kp,
        SQUARES=squared,
        SHRINK=SHRINK,
        HARD=given.hard,
        WEIGHTED=rows.weights is not None,
        VALUES=values,
        FAST=int(fast),
        SPARE=spare,
        BLOCK=at.block,
        num_warps=at.warps,
        num_stages=at.stages,
    )
    host = _reduced(sums, ends, len(rows.starts)).cpu().numpy()
    cells = host[:, : -kp - 2].reshape(-1, 1 + squared, kp, dp)[:, :, :k] * weight
    mass = cells[:, 0, :, d] if spare else host[:, -kp - 2 : -2][:, :k]
    if squared and fast:
        cells[:, 1] /= SHRINK
    moments = np.concatenate([cells[:, part, :, :d] for part in range(1 + squared)], axis=-1)
    return Sums(mass.copy(), moments, host[:, -2].copy(), host[:, -1].copy())


@final
class _Phases:
    """What both phases of a pass need beside the rows."""

    def __init__(self, rows: Ragged, given: Pass, tile: int) -> None:
        f, self.fast = given.features, rows.fast
        self.given, self.d, self.count = given, len(f.origin), len(f.left)
        self.kp, self.fp = _padded(given.components), -(-(self.count + 1) // tile) * tile
        left, right = (np.full(self.fp, self.d, dtype=np.int32) for _ in range(2))
        left[: self.count], right[: self.count] = f.left, f.right
        self.products = bool(np.any(f.right != self.d))
        self.shrink = SHRINK if self.products and self.fast else 1.0
        slopes: Any = _slopes(given, self.fp, self.kp) / self.shrink
        factors = np.ones(1, dtype=np.float32)
        if self.fast:
            slopes, factors = halves(slopes[:, None])
        intercepts = _intercepts(given, self.kp, self.fast)
        frame = _frame(f, self.d + 1, self.fast, rows.rows.dtype == torch.float32)
        shipped = _ship(rows, left, right, slopes, factors, intercepts, *frame)
        self.columns, self.natural, self.frame = shipped[:2], shipped[2:5], shipped[5:]

    def parts(self, rows: Ragged) -> Iterator[Ragged]:
        """The rows in parts whose responsibilities fit the buffer, in order."""
        most = max(1 << 16, ANSWER_BYTES // (8 * self.kp))
        starts, counts = rows.starts, rows.counts
        if int(counts.sum()) <= most:
            yield rows
            return
        while counts.any():
            take = np.clip(most - (np.cumsum(counts) - counts), 0, counts)
            yield dataclasses.replace(rows, starts=starts, counts=take, memo={})
            starts, counts = starts + take, counts - take

    def shares(self, rows: Ragged, values: bool, each: bool, at: Launch) -> tuple[Any, Any, Any]:
        """Responsibilities ``(rows, kp)``, log sums of each row if asked, and sums of values."""
        x, busy = rows.rows, rows.counts > 0
        low = int(rows.starts[busy].min())
        span = int((rows.starts + rows.counts)[busy].max()) - low
        kind = torch.float32 if self.fast else torch.float64
        answers = torch.empty((span, self.kp), dtype=kind, device=x.device)
        densities = torch.empty(span if each else 1, dtype=torch.float64, device=x.device)
        table, ends = rows.programs(at.programs * _processors(x), at.block)
        told = torch.empty((len(table), 2), dtype=torch.float64, device=x.device)
        kernels.shares[(len(table),)](
            x,
            x if rows.weights is None else rows.weights,
            table,
            *self.columns,
            *self.natural,
            *self.frame,
            answers,
            densities,
            told,
            int(self.given.intercepts.ndim > 1),
            low,
            D=self.d,
            FP=self.fp,
            KP=self.kp,
            PRODUCTS=self.products,
            SHRINK=self.shrink,
            HARD=self.given.hard,
            WEIGHTED=rows.weights is not None,
            VALUES=values,
            ROWS=each,
            FAST=int(self.fast),
            BLOCK=at.block,
            FT=at.tile,
            num_warps=at.warps,
            num_stages=at.stages,
        )
        return answers, densities, _reduced(told, ends, len(rows.starts)) if values else None

    def moments(self, rows: Ragged, answers: Any, at: Launch, weight: float) -> Any:
        """Sums of responsibility times feature, ``(workers, kp fp)``."""
        x, kt = rows.rows, min(self.kp, 64)
        table, ends = rows.programs(at.programs * _processors(x), at.block)
        sums = torch.empty((len(table), self.kp * self.fp), dtype=torch.float64, device=x.device)
        tiles = (self.fp // at.tile) * (self.kp // kt)
        kernels.moments[(len(table) * tiles,)](
            x,
            table,
            *self.columns,
            *self.frame,
            answers,
            sums,
            int(rows.starts[rows.counts > 0].min()),
            1 / weight,
            D=self.d,
            FP=self.fp,
            KP=self.kp,
            PRODUCTS=self.products,
            SHRINK=self.shrink,
            FAST=int(self.fast),
            BLOCK=at.block,
            FT=at.tile,
            KT=kt,
            num_warps=at.warps,
            num_stages=at.stages,
        )
        return _reduced(sums, ends, len(rows.starts))


def _in_two(rows: Ragged, given: Pass, values: bool, first: Launch, second: Launch) -> Sums:
    """Responsibilities written down, then sums of them and the features."""
    phases = _Phases(rows, given, max(first.tile, second.tile))
    workers, weight = len(rows.starts), _heaviest(rows) if rows.fast else 1.0
    total: Any = 0.0
    told: Any = 0.0
    for part in phases.parts(rows):
        answers, _, scores = phases.shares(part, values, False, first)
        total = total + phases.moments(part, answers, second, weight)
        told = told + scores if values else told
    host = total.cpu().numpy().reshape(workers, phases.kp, phases.fp)[:, : given.components]
    host = host * (weight / phases.shrink)
    scores = told.cpu().numpy() if values else np.zeros((workers, 2))
    mass, moments = host[..., phases.count].copy(), host[..., : phases.count].copy()
    return Sums(mass, moments, scores[:, 0], scores[:, 1])


def answers(rows: Ragged, given: Pass) -> Iterator[tuple[Any, Any]]:
    """Responsibilities ``(rows, K)`` and log sums ``(rows,)``, part by part, where the rows are."""
    at, _ = phase_launches(rows.fast, _padded(given.components))
    phases = _Phases(rows, given, at.tile)
    for part in phases.parts(rows):
        shares, densities, _ = phases.shares(part, False, True, at)
        yield shares[:, : given.components], densities
