"""A pass over rows on a device: which kernel runs, with what, and what its sums are called."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple, final

import numpy as np
import torch
from triton.runtime.errors import OutOfResources

from emfed.core.errors import SettingsError
from emfed.core.protocols import FloatArray, IntArray
from emfed.models.devices import kernels
from emfed.models.devices.halves import UPWARD, halves
from emfed.models.devices.passes import Features, Pass, Sums
from emfed.models.devices.placing import COPY_THREADS, copy_rows
from emfed.models.devices.ragged import Ragged

FUSED_CELLS = 8192
"""Sums that one program of the fused kernel keeps in registers."""
LOG2E = 1.4426950408889634
ANSWER_BYTES = 1 << 30
"""Responsibilities written down at once by the kernels that write them."""
PARTIAL_BYTES = 1 << 28
"""Partial sums that programs write at most: of 257 columns, full, K=10 a range of rows has 4 MB. A
range has then so many tiles that 16,384 programs are left or more, and 132 processors are busy."""

BEYOND = "beyond half precision"
"""What is remembered of rows whose fast pass gave no finite sums: theirs are made in doubles."""
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

    def smaller(self) -> Launch | None:
        """What takes less shared memory: no loads ahead, then half the rows, which are 16 or more.

        A tensor core takes no fewer.
        """
        if self.stages > 1:
            return dataclasses.replace(self, stages=1)
        return dataclasses.replace(self, block=self.block // 2) if self.block > 16 else None


_FOUND: dict[Any, tuple[Launch, ...]] = {}
"""Settings that fit a card whose shared memory is smaller than that of the one they were tuned on,
by the card, the kind of pass and the settings that did not fit."""


def _fitting(
    rows: Ragged, given: Pass, values: bool, run: Callable[..., Any], *launches: Launch
) -> Any:
    """Run kernels with these settings, or with the largest that fit the card.

    The settings decide the order of sums, so one card always gives the same bits.
    """
    x, f = rows.rows, given.features
    shape = (len(f.origin), f.second, given.components, given.hard, rows.weights is None)
    key = (x.device, x.dtype, rows.fast, values, *shape, launches)
    now = _FOUND.get(key, launches)
    while True:
        try:
            found = run(*now)
        except OutOfResources as error:
            less = tuple(launch.smaller() or launch for launch in now)
            if less == now:
                raise SettingsError(
                    f"the kernels do not fit this card ({error}): leave device out, or take fewer "
                    "columns or components."
                ) from None
            now = less
            continue
        if now != launches:
            _FOUND[key] = now
        return found


def _on(x: Any) -> Any:
    """Within, kernels are started on the card that has the rows: Triton takes the current one."""
    return torch.cuda.device(x.device) if x.device.type == "cuda" else contextlib.nullcontext()


def fused_launch(fast: bool, cells: int, kp: int) -> Launch:
    """The fastest of those tried on an H200, as are those below.

    Tied and diagonal: 10,000,000 x 20, K=10; tied: 2,000,000 x 64, K=32, 1,000,000 x 128, K=64 and
    2,000,000 x 20, K=160; diagonal: 2,000,000 x 32, K=32.
    """
    if cells > 2048:
        if fast:
            return Launch(64, 8 if kp > 64 else 4, 2)
        return Launch(32 if cells <= 128 * kp else 16, 8, 2)  # more does not fit shared memory
    if cells > 1024:
        return Launch(64, 2, 4) if fast else Launch(32, 2, 4)
    if fast:
        return Launch(32, 1, 24) if cells <= 512 else Launch(64, 2, 8)
    return Launch(16, 1, 24)


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


def _tiles(d: int, squared: bool) -> tuple[int, int, IntArray, int | None]:
    """Columns of a tile of features, tiles, the places of features, and that of 1, if any.

    Columns and their squares take two tiles of the next power of two; or three of half of it, if
    what is beyond the half, its squares and 1 fit one.
    """
    width, columns = _padded(d), np.arange(d)
    half = width // 2
    left = d - half
    if squared and half >= 16 and 2 * left < half and d % 4 == 0:
        near, beyond = columns[:half], 2 * half + np.arange(2 * left)
        place = np.concatenate([near, beyond[:left], half + near, beyond[left:]])
        return half, 3, place, 2 * d
    place = np.concatenate([columns, width + columns][: 1 + squared])
    return width, 1 + squared, place, None if d == width else d


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


def _reduced(sums: Any, ends: Any, out: Any, order: Any = None, factors: Any = None) -> Any:
    """Sums over each worker's programs: of all numbers, or of some, times factors."""
    (programs, stride), (workers, width) = sums.shape, out.shape
    chunk = min(512, max(16, _padded(programs // workers)))
    tile = 2048 // chunk
    picked = order is not None
    kernels.gather[(workers * -(-width // tile),)](
        sums,
        ends,
        out,
        order if picked else ends,
        factors if picked else sums,
        stride,
        width,
        PICKED=picked,
        CHUNK=chunk,
        TILE=tile,
    )
    return out


def _heaviest(rows: Ragged) -> float:
    if rows.weights is None:
        return 1.0
    if "heaviest" not in rows.memo:
        rows.memo["heaviest"] = max(float(rows.weights.max()), 1e-300)
    return float(rows.memo["heaviest"])


def sweep(rows: Ragged, given: Pass, values: bool = False, launch: Any = None) -> Sums:
    """Sums over the rows of each worker, with leading axis (workers,)."""
    if rows.fast and BEYOND in rows.memo:
        rows = dataclasses.replace(rows, precision="double")
    f = given.features
    kp = _padded(given.components)
    cells = kp * _padded(len(f.origin)) * (1 + (f.second == "squares"))
    with _on(rows.rows):
        if f.second != "products" and cells <= FUSED_CELLS:
            at: tuple[Any, ...] = (launch or fused_launch(rows.fast, cells, kp),)
            run: Any = partial(_fused, rows, given, values)
        else:
            kind = _MatrixPhases if _wide(given) else _Phases
            at = launch or kind.launches(rows, given)
            run = partial(_in_two, kind, rows, given, values)
        found = _fitting(rows, given, values, run, *at)
    if rows.fast and not np.isfinite(sum(float(part.sum()) for part in found)):
        rows.memo[BEYOND] = True
        return sweep(rows, given, values)
    return found


def _wide(given: Pass) -> bool:
    return len(given.features.origin) in MATRIX_COLUMNS and given.features.second == "products"


class _Shape(NamedTuple):
    """What a fused pass is made for: another thread would write into the same memory."""

    thread: int
    device: Any
    starts: bytes
    counts: bytes
    columns: int
    components: int
    parameters: int
    """How many sets of parameters there are: one, or one for each worker."""
    squared: bool
    hard: bool
    weighted: bool
    values: bool
    fast: bool
    single: bool
    """Whether rows are float32."""
    at: Launch


@final
class _Fused:
    """A pass that is made again and again over rows of one shape: its memory, here and there.

    Between call and answer the host writes the parameters into pinned memory, starts three things
    on the card and waits; the last of them writes the sums into pinned memory.
    """

    def __init__(self, shape: _Shape) -> None:
        self.shape, at, d = shape, shape.at, shape.columns
        width, tiles, self.place, self.one = _tiles(d, shape.squared)
        kp, lead = _padded(shape.components), shape.parameters
        k, features = shape.components, len(self.place)
        size = k * (features + 1) + 2
        sizes = [lead * kp * tiles * width, lead * kp, 4 * width, size]
        self.staging = _pinned(sum(sizes), shape.device)
        self.there = torch.empty_like(self.staging, device=shape.device)
        pieces = [piece.numpy() for piece in self.staging.split(sizes)]
        slopes, intercepts, frame, self.factors = pieces
        never = -1e30 if shape.fast else -1e300  # of no component; finite: 0 times it is 0
        slopes[:], intercepts[:], frame[:] = 0.0, never, 0.0
        self.slopes = slopes.reshape(lead, kp, tiles * width)
        if self.one is not None and not shape.fast:
            self.slopes[..., self.one] = never
        self.slopes = self.slopes[:, :k]
        self.intercepts = intercepts.reshape(lead, kp)[:, :k]
        self.frame = frame.reshape(2, 2, width)
        self.known = Features(np.empty(0), np.empty(0), "none")
        *self.parameters, self.back = self.there.split(sizes)
        starts, counts = (np.frombuffer(b, np.int64) for b in (shape.starts, shape.counts))
        rows = Ragged(self.there, starts, counts)
        self.table, self.ends = rows.programs(at.programs * _processors(self.there), at.block)
        whole = kp * tiles * width  # then kp masses and two values
        order = np.empty((k, features + 1), dtype=np.int64)
        order[:, :-1] = np.arange(k)[:, None] * tiles * width + self.place
        order[:, -1] = whole + np.arange(k)
        if self.one is not None:
            order[:, -1] = np.arange(k) * tiles * width + self.one
        self.order = rows.put(np.append(order, [whole + kp, whole + kp + 1]))
        inside = (len(self.table), whole + kp + 2)
        self.sums = torch.empty(inside, dtype=torch.float64, device=shape.device)
        self.out = _pinned(len(starts) * size, shape.device).reshape(-1, size)
        self.seen: Any = None
        self.graph: Any = None
        self.constants: dict[str, Any] = {
            "D": d,
            "W": width,
            "TILES": tiles,
            "KP": kp,
            "HARD": shape.hard,
            "WEIGHTED": shape.weighted,
            "VALUES": shape.values,
            "FAST": int(shape.fast),
            "BLOCK": at.block,
            "num_warps": at.warps,
            "num_stages": at.stages,
        }

    def __call__(self, rows: Ragged, given: Pass) -> Sums:
        """The sums at these parameters."""
        x, weights = rows.rows, rows.weights
        unit = 1 / _heaviest(rows) if self.shape.fast else 1.0
        self._write(given, unit)
        what = (x.data_ptr(), x.dtype, None if weights is None else weights.data_ptr(), unit)
        if x.is_cuda and what == self.seen:
            self._replay(x, weights, unit)
        else:
            self.graph = None
            self._launch(x, weights, unit)
        self.seen = what
        if x.is_cuda:
            torch.cuda.current_stream(x.device).synchronize()
        host = self.out.numpy().copy()
        sums = host[:, :-2].reshape(len(host), given.components, -1)
        mass, moments = sums[..., -1], sums[..., :-1]
        if self.shape.fast:
            self._move_back(mass[..., None], moments)
        return Sums(mass, moments, host[:, -2], host[:, -1])

    def _move_back(self, mass: FloatArray, moments: FloatArray) -> None:
        """Sums about the origin that the kernel took to those about the frame's own."""
        d, by = self.shape.columns, self.moved
        if self.shifted:
            first, second = moments[..., :d], moments[..., d:]
            if self.shape.squared:
                second -= by * (2 * first - by * mass)
            first -= by * mass

    def _launch(self, x: Any, weights: Any, unit: float) -> None:
        self.there.copy_(self.staging, non_blocking=True)
        kernels.fused[(len(self.table),)](
            x,
            x if weights is None else weights,
            self.table,
            *self.parameters,
            self.sums,
            int(self.shape.parameters > 1),
            unit,
            **self.constants,
        )
        _reduced(self.sums, self.ends, self.out, self.order, self.back)

    def _replay(self, x: Any, weights: Any, unit: float) -> None:
        """The launches of the last pass as one: over the same rows they differ in nothing."""
        if self.graph is None:
            self.graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream(x.device)
            side.wait_stream(torch.cuda.current_stream(x.device))
            with torch.cuda.stream(side):
                self.graph.capture_begin(capture_error_mode="thread_local")
                self._launch(x, weights, unit)
                self.graph.capture_end()
        self.graph.replay()

    def _write(self, given: Pass, unit: float) -> None:
        """The parameters for the kernel: of powers of two; in doubles for rows without a scale."""
        fast, f = self.shape.fast, given.features
        old = self.known
        if not (np.array_equal(f.origin, old.origin) and np.array_equal(f.scale, old.scale)):
            self._set_frame(f)
        slopes, k, d = given.slopes, given.components, self.shape.columns
        slopes = slopes.reshape(-1, *slopes.shape[-2:])
        intercepts = given.intercepts.reshape(-1, k)
        if fast:
            np.divide(self.back_to_frame, unit * UPWARD, out=self.factors[:-2])
            if self.shifted:  # z = z' - moved, of which the kernel sees z'
                first, second = slopes[..., :d], slopes[..., d:]
                if self.shape.squared:
                    intercepts = intercepts - (first - second * self.moved) @ self.moved
                    moved = first - 2 * self.moved * second
                    slopes = np.concatenate([moved, second], axis=-1)
                else:
                    intercepts = intercepts - first @ self.moved
        self.factors[-2:] = 1 / unit
        self.slopes[..., self.place] = slopes * self.scale
        self.intercepts[:] = intercepts * LOG2E
        if self.one is not None and not fast:
            self.slopes[..., self.one] = self.intercepts

    def _set_frame(self, f: Features) -> None:
        """Rows become y - origin in doubles; where fast y * inverse - origin, without rounding.

        Then the inverse is a power of two near that of the frame's scale, and the origin one that
        float32 knows.
        """
        width, d = self.frame.shape[-1], self.shape.columns
        origin, inverse = f.origin, 1 / f.scale
        if self.shape.fast:
            inverse = np.ldexp(1.0, -np.frexp(f.scale)[1])
            near = origin.astype(np.float32).astype(np.float64) if self.shape.single else origin
            self.moved = (origin - near) / f.scale
            self.shifted = bool(self.moved.any())
            origin = near * inverse
        columns, place = np.tile(np.arange(d), 1 + self.shape.squared), self.place
        if self.one is not None:
            place, columns = np.append(place, self.one), np.append(columns, d)
        tile = (place >= 2 * width).astype(np.int64)
        self.frame[tile, 0, place % width] = np.append(origin, -1.0)[columns]
        self.frame[tile, 1, place % width] = np.append(inverse, 1.0)[columns]
        # What one unit of the kernel's features is in the frame's.
        unit = 1 / (f.scale * inverse) if self.shape.fast else 1 / f.scale
        scale = np.concatenate([unit, unit**2])[: len(self.place)]
        self.back_to_frame = np.tile(np.append(scale, 1.0), self.shape.components)
        self.factors[:-2] = self.back_to_frame
        self.scale, self.known = scale * LOG2E, f


@lru_cache(maxsize=16)
def _plan(shape: _Shape) -> _Fused:
    """One for each shape of late: blocks of a stream and rounds of a fit have the same."""
    return _Fused(shape)


def _fused(rows: Ragged, given: Pass, values: bool, at: Launch) -> Sums:
    """One read of the rows."""
    f, k = given.features, given.components
    shape = _Shape(
        threading.get_ident(),
        rows.rows.device,
        rows.starts.astype(np.int64).tobytes(),
        rows.counts.astype(np.int64).tobytes(),
        len(f.origin),
        k,
        given.intercepts.size // k,
        f.second == "squares",
        given.hard,
        rows.weights is not None,
        values,
        rows.fast,
        rows.rows.dtype == torch.float32,
        at,
    )
    return _plan(shape)(rows, given)


def _pinned(size: int, device: Any) -> Any:
    return torch.empty(size, dtype=torch.float64, pin_memory=device.type == "cuda")


def _room(rows: Ragged, width: int) -> Any:
    size = (len(rows.starts), width)
    return torch.empty(size, dtype=torch.float64, device=rows.rows.device)


def _home(tensor: Any) -> FloatArray:
    """A tensor as numpy, through pinned memory that torch keeps: new pages cost more than bytes."""
    if tensor.device.type != "cuda":
        return np.asarray(tensor.numpy())
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return np.asarray(host.copy_(tensor).numpy())


class _Phases:
    """What both phases of a pass need beside the rows."""

    upward = UPWARD
    """What the largest weight is scaled to in half precision."""

    @staticmethod
    def launches(rows: Ragged, given: Pass) -> tuple[Launch, Launch]:
        return phase_launches(rows.fast, _padded(given.components))

    def __init__(self, rows: Ragged, given: Pass, tile: int) -> None:
        f, self.fast = given.features, rows.fast
        self.given, self.d, self.count = given, len(f.origin), len(f.left)
        self.kp, self.fp = _padded(given.components), -(-(self.count + 1) // tile) * tile
        left, right = (np.full(self.fp, self.d, dtype=np.int32) for _ in range(2))
        left[: self.count], right[: self.count] = f.left, f.right
        self.products = bool(np.any(f.right != self.d))
        slopes: Any = _slopes(given, self.fp, self.kp)
        factors = np.ones(1, dtype=np.float32)
        if self.fast:
            slopes, factors = halves(slopes)
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
        answers, densities, tally, low = end
        kernels.shares[(len(table),)](
            x,
            x if rows.weights is None else rows.weights,
            table,
            *self.columns,
            *self.natural,
            *self.frame,
            answers,
            densities,
            tally,
            int(self.given.intercepts.ndim > 1),
            low,
            D=self.d,
            FP=self.fp,
            KP=self.kp,
            PRODUCTS=self.products,
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
        tally = torch.empty((len(table), 2), dtype=torch.float64, device=x.device)
        end = (answers, densities, tally, low)
        self._call((x, rows, table), end, values=values, each=each, at=at)
        if not values:
            return answers, densities, None
        return answers, densities, _reduced(tally, ends, _room(rows, 2))

    def moments(self, rows: Ragged, answers: Any, at: Launch, weight: float) -> Any:
        """Sums of responsibility times features and 1, ``(workers, K, at least F + 1)``."""
        x, kt = rows.rows, min(self.kp, 64)
        most = min(at.programs * _processors(x), PARTIAL_BYTES // (8 * self.kp * self.fp))
        table, ends = rows.programs(max(1, most), at.block)
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
            FAST=int(self.fast),
            BLOCK=at.block,
            FT=at.tile,
            KT=kt,
            num_warps=at.warps,
            num_stages=at.stages,
        )
        found = _reduced(sums, ends, _room(rows, sums.shape[1])).reshape(-1, self.kp, self.fp)
        return found[:, : self.given.components]


@final
class _MatrixPhases(_Phases):
    """All products of many columns: a matrix for each component instead of a table of products."""

    upward = 64.0  # weights times columns: of more than 1,000 standard deviations they overflow

    @staticmethod
    def launches(rows: Ragged, given: Pass) -> tuple[Launch, Launch]:
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
            matrices, factors = halves(whole.reshape(len(flat) * k, 1, -1))
            first = first.astype(np.float32)
        intercepts = _intercepts(given, self.kp, self.fast)
        frame = _frame(given.features, self.dp, self.fast, rows.rows.dtype == torch.float32)
        shipped = _ship(rows, matrices, factors, first, intercepts, *frame)
        self.natural, self.wide_frame = shipped[:4], shipped[4:]

    def _call(self, start: Any, end: Any, *, values: bool, each: bool, at: Launch) -> None:
        x, rows, table = start
        answers, densities, tally, low = end
        kernels.quadratic[(len(table),)](
            x,
            x if rows.weights is None else rows.weights,
            table,
            *self.natural,
            *self.wide_frame,
            answers,
            densities,
            tally,
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
        found = _reduced(sums, ends, _room(rows, sums.shape[1])).reshape(-1, k, self.dp, self.dp)
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
    workers, weight = len(rows.starts), _heaviest(rows) / kind.upward if rows.fast else 1.0
    total: Any = 0.0
    tally: Any = 0.0
    for part in phases.parts(rows):
        answers, _, scores = phases.shares(part, values, False, first)
        total = total + phases.moments(part, answers, second, weight)
        tally = tally + scores if values else tally
    host, count = _home(total), len(given.features.left)
    host *= weight
    scores = _home(tally) if values else np.zeros((workers, 2))
    return Sums(host[..., count], host[..., :count], scores[:, 0], scores[:, 1])


def answers(rows: Ragged, given: Pass) -> Iterator[tuple[Any, Any]]:
    """Responsibilities ``(rows, K)`` and log sums ``(rows,)``, part by part, where the rows are."""
    kind = _MatrixPhases if _wide(given) else _Phases
    first, _ = kind.launches(rows, given)
    phases = kind(rows, given, first.tile)
    for part in phases.parts(rows):
        with _on(rows.rows):
            ask = partial(phases.shares, part, False, True)
            shares, densities, _ = _fitting(rows, given, False, ask, first)
        yield shares[:, : given.components], densities


def labels(rows: Ragged, given: Pass) -> IntArray:
    """The component of the largest responsibility of each row, in the order of the rows.

    What costs is memory that the host has not used yet: 60 ms for the labels of 10,000,000 rows by
    one thread. So they are written down once, and two bytes of each come over the bus.
    """
    out, done = np.empty(int(rows.counts.sum()), dtype=np.int64), 0
    with ThreadPoolExecutor(COPY_THREADS) as pool:
        for shares, _ in answers(rows, given):
            found = _home(shares.argmax(dim=1).to(torch.int16))
            copy_rows(pool, out[done : done + len(found)], found)
            done += len(found)
    return out
