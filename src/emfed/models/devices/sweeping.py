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


KINDS = {"d": torch.float64, "f": torch.float32, "e": torch.float16, "i": torch.int32}
MATRIX_COLUMNS = range(12, 65)
"""Numbers of columns for which a matrix product for each component beats products of columns."""


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
    """The fastest of those tried on an H200 (10,000,000 x 20, K=10 and 160), as are those below."""
    if cells > 2048:
        return Launch(16, 4, 4)
    if fast:
        return Launch(64, 2, 8) if cells <= 512 else Launch(64, 1, 8)
    return Launch(32, 1, 16) if cells <= 512 else Launch(16, 1, 8)


def phase_launches(fast: bool, kp: int) -> tuple[Launch, Launch]:
    """Settings of `kernels.shares` and `kernels.moments`."""
    if kp > 128:
        return Launch(16, 8, 8, tile=32), Launch(32, 4, 2, tile=32)
    if kp > 32:
        return Launch(32, 4, 8, tile=32), Launch(32, 4, 2, tile=32)
    if fast:
        return Launch(64, 2, 16, tile=64), Launch(32, 4, 2, tile=32)
    return Launch(64, 2, 16, stages=3, tile=64), Launch(32, 1, 2, stages=3, tile=32)


def matrix_launches(fast: bool, dp: int) -> tuple[Launch, Launch]:
    """Settings of `kernels.quadratic` and `kernels.scatter`."""
    if fast and dp <= 32:
        return Launch(64, 4, 8, stages=2), Launch(32, 2, 16)
    if fast:
        return Launch(128, 4, 8, stages=3), Launch(64, 4, 16)
    if dp <= 32:
        return Launch(64, 2, 8), Launch(32, 1, 16)
    return Launch(64, 4, 8, stages=3), Launch(32, 2, 16, stages=3)


def _padded(size: int) -> int:
    """The next power of two, at least what a tensor core takes: what kernels can tile."""
    return max(16, 1 << (size - 1).bit_length())


def _processors(x: Any) -> int:
    if x.device.type != "cuda":  # the interpreter: two ranges, so that partial sums are summed
        return 1
    return int(torch.cuda.get_device_properties(x.device).multi_processor_count)


def _ship(rows: Ragged, *arrays: Any) -> list[Any]:
    """Arrays beside the rows, flat, in one copy."""
    parts = [np.ascontiguousarray(a).tobytes() for a in arrays]
    padded = [part + bytes(-len(part) % 16) for part in parts]  # kernels read 16 bytes at a time
    there = rows.put(np.frombuffer(bytearray(b"".join(padded)), dtype=np.uint8))
    kinds = [KINDS[a.dtype.char] for a in arrays]
    pieces = there.split([len(part) for part in padded])
    return [piece.view(kind) for piece, kind in zip(pieces, kinds, strict=True)]


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
    if workers == 1:
        return partial.sum(dim=0, keepdim=True)
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
    cells = _padded(given.components) * _padded(len(f.origin)) * (1 + (f.second == "squares"))
    if f.second != "products" and cells <= FUSED_CELLS:
        found = _fused(rows, given, values, launch or fused_launch(rows.fast, cells))
    else:
        kind = _MatrixPhases if _wide(given) else _Phases
        found = _in_two(kind, rows, given, values, *(launch or kind.launches(rows, given)))
    if rows.fast and not all(np.all(np.isfinite(part)) for part in found):
        return sweep(dataclasses.replace(rows, precision="double"), given, values)
    return found


def _wide(given: Pass) -> bool:
    return len(given.features.origin) in MATRIX_COLUMNS and given.features.second == "products"


def _fused(rows: Ragged, given: Pass, values: bool, at: Launch) -> Sums:
    f, k, fast, x = given.features, given.components, rows.fast, rows.rows
    d, squared = len(f.origin), int(f.second == "squares")
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
        ROWS_FIRST=not fast and kp <= 32,
        SPARE=spare,
        BLOCK=at.block,
        num_warps=at.warps,
        num_stages=at.stages,
    )
    found = _reduced(sums, ends, len(rows.starts))
    cells = found[:, : -kp - 2].reshape(-1, 1 + squared, kp, dp)[:, :, :k, : d + spare]
    wanted = [cells.reshape(len(found), -1), found[:, -kp - 2 : -2][:, :k], found[:, -2:]]
    host = _home(torch.cat(wanted, dim=1))  # what the answer needs, in one copy
    whole = host[:, : -k - 2].reshape(-1, 1 + squared, k, d + spare)
    if weight != 1:
        whole *= weight
    mass = whole[:, 0, :, d] if spare else host[:, -k - 2 : -2]
    moments = whole[:, 0, :, :d]
    if squared:
        second = whole[:, 1, :, :d] / (SHRINK if fast else 1.0)
        moments = np.concatenate([moments, second], axis=-1)
    return Sums(mass, moments, host[:, -2], host[:, -1])


def _home(tensor: Any) -> FloatArray:
    """A tensor as numpy, through pinned memory that torch keeps: new pages cost more than bytes."""
    if tensor.device.type != "cuda":
        return np.asarray(tensor.numpy())
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return np.asarray(host.copy_(tensor).numpy())


class _Phases:
    """What both phases of a pass need beside the rows."""

    @staticmethod
    def launches(rows: Ragged, given: Pass) -> tuple[Launch, Launch]:
        """The settings of both."""
        return phase_launches(rows.fast, _padded(given.components))

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
        return rows.parts(max(1 << 16, ANSWER_BYTES // (8 * self.kp)))

    def _call(self, start: Any, end: Any, *, values: bool, each: bool, at: Launch) -> None:
        """The kernel of the first phase."""
        x, rows, table = start
        answers, densities, told, low = end
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

    def shares(self, rows: Ragged, values: bool, each: bool, at: Launch) -> tuple[Any, Any, Any]:
        """Responsibilities ``(rows, kp)``, log sums of each row if asked, and sums of values."""
        x, (low, last) = rows.rows, rows.span()
        span = last - low
        kind = torch.float32 if self.fast else torch.float64
        answers = torch.empty((span, self.kp), dtype=kind, device=x.device)
        densities = torch.empty(span if each else 1, dtype=torch.float64, device=x.device)
        table, ends = rows.programs(at.programs * _processors(x), at.block)
        told = torch.empty((len(table), 2), dtype=torch.float64, device=x.device)
        end = (answers, densities, told, low)
        self._call((x, rows, table), end, values=values, each=each, at=at)
        return answers, densities, _reduced(told, ends, len(rows.starts)) if values else None

    def moments(self, rows: Ragged, answers: Any, at: Launch, weight: float) -> Any:
        """Sums of responsibility times features and 1, ``(workers, K, at least F + 1)``."""
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
            rows.span()[0],
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
        found = _reduced(sums, ends, len(rows.starts)).reshape(-1, self.kp, self.fp)
        return found[:, : self.given.components]


@final
class _MatrixPhases(_Phases):
    """All products of many columns: a matrix for each component instead of a table of products."""

    @staticmethod
    def launches(rows: Ragged, given: Pass) -> tuple[Launch, Launch]:
        """The settings of both phases."""
        return matrix_launches(rows.fast, _padded(len(given.features.origin)))

    def __init__(self, rows: Ragged, given: Pass, tile: int) -> None:
        d = len(given.features.origin)
        linear = Features(given.features.origin, given.features.scale, "none")
        super().__init__(
            rows, dataclasses.replace(given, features=linear, slopes=given.slopes[..., :d]), 32
        )
        self.dp, k = _padded(d), given.components
        flat = given.slopes.reshape(-1, k, given.slopes.shape[-1])
        above, beside = (side[d:] for side in (given.features.left, given.features.right))
        whole = np.zeros((len(flat), k, self.dp, self.dp))
        whole[..., above, beside] += 0.5 * flat[..., d:]
        whole[..., beside, above] += 0.5 * flat[..., d:]
        first = np.zeros((len(flat), k, self.dp))
        first[..., :d] = flat[..., :d]
        factors: Any = np.ones(1, dtype=np.float32)
        matrices: Any = whole
        if self.fast:
            split, factors = halves(whole.reshape(len(flat) * k, 1, 1, -1))
            matrices, first = split[:, 0], first.astype(np.float32)
        intercepts = _intercepts(given, self.kp, self.fast)
        frame = _frame(given.features, self.dp, self.fast, rows.rows.dtype == torch.float32)
        shipped = _ship(rows, matrices, factors, first, intercepts, *frame)
        self.natural, self.wide_frame = shipped[:4], shipped[4:]

    def _call(self, start: Any, end: Any, *, values: bool, each: bool, at: Launch) -> None:
        x, rows, table = start
        answers, densities, told, low = end
        kernels.quadratic[(len(table),)](
            x,
            x if rows.weights is None else rows.weights,
            table,
            *self.natural,
            *self.wide_frame,
            answers,
            densities,
            told,
            int(self.given.intercepts.ndim > 1),
            low,
            D=self.d,
            DP=self.dp,
            K=self.given.components,
            KP=self.kp,
            HARD=self.given.hard,
            WEIGHTED=rows.weights is not None,
            VALUES=values,
            ROWS=each,
            FAST=int(self.fast),
            BLOCK=at.block,
            num_warps=at.warps,
            num_stages=at.stages,
        )

    def moments(self, rows: Ragged, answers: Any, at: Launch, weight: float) -> Any:
        """Sums of z z^T of each component, and with them of z."""
        x, k, d = rows.rows, self.given.components, self.d
        most = max(1, at.programs * _processors(x) // k)
        table, ends = rows.programs(most, at.block)
        size = (len(table), k * self.dp * self.dp)
        sums = torch.empty(size, dtype=torch.float64, device=x.device)
        kernels.scatter[(len(table) * k,)](
            x,
            table,
            *self.wide_frame,
            answers,
            sums,
            rows.span()[0],
            1 / weight,
            D=d,
            DP=self.dp,
            K=k,
            KP=self.kp,
            FAST=int(self.fast),
            BLOCK=at.block,
            num_warps=at.warps,
            num_stages=at.stages,
        )
        found = _reduced(sums, ends, len(rows.starts)).reshape(-1, k, self.dp, self.dp)
        if "upper" not in rows.memo:
            above, beside = np.triu_indices(d)
            rows.memo["upper"] = rows.put(above * self.dp + beside)
        second = found.reshape(-1, k, self.dp * self.dp)[..., rows.memo["upper"]]
        if self.dp > d:  # column d is 1: its products are the columns and the masses
            first = found[..., : d + 1, d]
        else:
            first = super().moments(rows, answers, Launch(32, 2, 2, tile=32), weight)
        return torch.cat([first[..., :d], second, first[..., d : d + 1]], dim=-1)


def _in_two(
    kind: type[_Phases], rows: Ragged, given: Pass, values: bool, first: Launch, second: Launch
) -> Sums:
    """Responsibilities written down, then sums of them and the features."""
    phases = kind(rows, given, max(first.tile, second.tile))
    workers, weight = len(rows.starts), _heaviest(rows) if rows.fast else 1.0
    total: Any = 0.0
    told: Any = 0.0
    for part in phases.parts(rows):
        answers, _, scores = phases.shares(part, values, False, first)
        total = total + phases.moments(part, answers, second, weight)
        told = told + scores if values else told
    host, count = _home(total), len(given.features.left)
    host *= weight / phases.shrink
    scores = _home(told) if values else np.zeros((workers, 2))
    return Sums(host[..., count], host[..., :count], scores[:, 0], scores[:, 1])


def answers(rows: Ragged, given: Pass) -> Iterator[tuple[Any, Any]]:
    """Responsibilities ``(rows, K)`` and log sums ``(rows,)``, part by part, where the rows are."""
    kind = _MatrixPhases if _wide(given) else _Phases
    at, _ = kind.launches(rows, given)
    phases = kind(rows, given, at.tile)
    for part in phases.parts(rows):
        shares, densities, _ = phases.shares(part, False, True, at)
        yield shares[:, : given.components], densities
