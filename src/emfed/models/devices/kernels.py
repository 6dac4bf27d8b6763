"""The kernels of a pass over rows, in Triton; `emfed.models.devices.twin` says the same in numpy.

Each program walks through the blocks of its own range of rows and writes its own partial sums, so
nothing is atomic and sums have one order. Products of doubles run on the tensor cores that data
centre GPUs have for them. ``FAST`` kernels cut every factor into two half-precision numbers of 11
bits each and multiply three of the four pairs (the fourth is below 2^-22); the sums of a block are
float32, those over blocks double.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOW = tl.constexpr(2048.0)
"""2^11: the second half-precision part is stored that much larger."""


@triton.jit
def _halves(v):
    high = v.to(tl.float16)
    return high, ((v - high.to(tl.float32)) * LOW).to(tl.float16)


@triton.jit
def _product(a_high, a_low, b_high, b_low):
    """A product of numbers in two parts, float32."""
    small = tl.dot(a_high, b_low)
    small = tl.dot(a_low, b_high, small)
    return tl.dot(a_high, b_high) + small * (1 / LOW)


@triton.jit
def _soften(logits, top, weight, HARD: tl.constexpr, K: tl.constexpr):
    """Weighted responsibilities, shares before they are divided by their sum, and that sum.

    Components stand before rows: then responsibilities lie in registers as the next product
    needs them.
    """
    if HARD:
        nearest = tl.argmax(logits, 0)
        shares = (tl.arange(0, K)[:, None] == nearest[None, :]).to(logits.dtype)
        total = top * 0 + 1
    else:
        shares = tl.exp(logits - top[None, :])
        total = tl.sum(shares, 0)
    return shares * (weight / total)[None, :], shares, total


@triton.jit
def fused(
    x,
    weights,
    table,
    slopes,
    factors,
    intercepts,
    origin,
    rest,
    inverse,
    sums,
    own,
    heaviest,
    D: tl.constexpr,
    DP: tl.constexpr,
    KP: tl.constexpr,
    SQUARES: tl.constexpr,
    SHRINK: tl.constexpr,
    HARD: tl.constexpr,
    WEIGHTED: tl.constexpr,
    VALUES: tl.constexpr,
    FAST: tl.constexpr,
    ROWS_FIRST: tl.constexpr,
    SPARE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Features z or (z, z^2) of few columns and components: one read of the rows, and sums.

    With a ``SPARE`` column beyond the rows' own, that column is 1 and its moments are the masses.
    """
    program = tl.program_id(0)
    start, stop = tl.load(table + 3 * program), tl.load(table + 3 * program + 1)
    worker = tl.load(table + 3 * program + 2) * own
    columns, components = tl.arange(0, DP), tl.arange(0, KP)
    PARTS: tl.constexpr = (1 + SQUARES) * (1 + FAST)
    b = slopes + worker * PARTS * DP * KP + components[:, None] * DP + columns[None, :]
    c = tl.load(intercepts + worker * KP + components)[:, None]
    T: tl.constexpr = c.dtype
    o = tl.load(origin + columns)[None, :]
    s = tl.load(inverse + columns)[None, :]
    b1 = tl.load(b)
    moments = tl.zeros((KP, DP), tl.float64)
    squares = tl.zeros((KP, DP), tl.float64)
    mass = tl.zeros((KP,), tl.float64)
    density = tl.zeros((BLOCK,), tl.float64)
    entropy = tl.zeros((BLOCK,), tl.float64)
    if SQUARES:
        b2 = tl.load(b + (1 + FAST) * DP * KP)
    if FAST:
        o2 = tl.load(rest + columns)[None, :]
        b1_low = tl.load(b + DP * KP)
        times = tl.load(factors + worker * (1 + SQUARES) * KP + components)[:, None]
        if SQUARES:
            b2_low = tl.load(b + 3 * DP * KP)
            times2 = tl.load(factors + (2 * worker + 1) * KP + components)[:, None]
    for begin in range(start, stop, BLOCK):
        rows = begin + tl.arange(0, BLOCK)
        inside = rows < stop
        there = inside[:, None] & (columns < D)[None, :]
        y = tl.load(x + rows[:, None] * D + columns[None, :], mask=there, other=0.0)
        if WEIGHTED:
            weight = tl.load(weights + rows, mask=inside, other=0.0)
        else:
            weight = inside.to(T)
        if FAST:
            z = ((y.to(o.dtype) - o - o2) * s).to(tl.float32)
            z = tl.where(inside[:, None], z, 0.0)  # 0 - origin may be beyond half precision
            z_high, z_low = _halves(z)
            logits = _product(b1, b1_low, tl.trans(z_high), tl.trans(z_low)) * times + c
            if SQUARES:
                zz_high, zz_low = _halves(z * z * SHRINK)
                logits += _product(b2, b2_low, tl.trans(zz_high), tl.trans(zz_low)) * times2
        else:
            z = (y.to(T) - o) * s
            if ROWS_FIRST:  # few components: the same numbers, in registers that suit doubles
                logits = tl.dot(z, tl.trans(b1), out_dtype=T)
                if SQUARES:
                    logits = tl.dot(z * z, tl.trans(b2), logits, out_dtype=T)
                logits = tl.trans(logits)
            else:
                logits = tl.dot(b1, tl.trans(z), out_dtype=T)
                if SQUARES:
                    logits = tl.dot(b2, tl.trans(z * z), logits, out_dtype=T)
            if not SPARE:  # else the intercepts are the slopes of the column that is 1
                logits += c
        top = tl.max(logits, 0)
        r, shares, total = _soften(logits, top, weight.to(T), HARD, KP)
        if VALUES:
            whole = tl.log(total) + top
            spread = whole - tl.sum(shares * logits, 0) / total
            density += whole.to(tl.float64) * weight
            entropy += spread.to(tl.float64) * weight
        if not SPARE:
            mass += tl.sum(r, 1).to(tl.float64)
        if FAST:
            r_high, r_low = _halves(r * heaviest)
            moments += _product(r_high, r_low, z_high, z_low).to(tl.float64)
            if SQUARES:
                squares += _product(r_high, r_low, zz_high, zz_low).to(tl.float64)
        else:
            moments = tl.dot(r, z, moments, out_dtype=tl.float64)
            if SQUARES:
                squares = tl.dot(r, z * z, squares, out_dtype=tl.float64)
    width: tl.constexpr = KP * DP * (1 + SQUARES) + KP + 2
    out = sums + program.to(tl.int64) * width
    cells = components[:, None] * DP + columns[None, :]
    tl.store(out + cells, moments)
    if SQUARES:
        tl.store(out + KP * DP + cells, squares)
    out += KP * DP * (1 + SQUARES)
    tl.store(out + components, mass)
    tl.store(out + KP, tl.sum(density, 0))
    tl.store(out + KP + 1, tl.sum(entropy, 0))


@triton.jit
def _column(x, at, inside, index, origin, rest, inverse, D: tl.constexpr, FAST: tl.constexpr):
    """Columns ``index`` of rows in the frame; column D is 1."""
    here = inside[:, None] & (index < D)[None, :]
    y = tl.load(x + at + index[None, :], mask=here, other=0.0)
    o, s = tl.load(origin + index)[None, :], tl.load(inverse + index)[None, :]
    if FAST:
        z = ((y.to(o.dtype) - o - tl.load(rest + index)[None, :]) * s).to(tl.float32)
        z = tl.where(inside[:, None], z, 0.0)  # 0 - origin may be beyond half precision
    else:
        z = (y.to(tl.float64) - o) * s
    return z


@triton.jit
def _features(
    x,
    rows,
    inside,
    left,
    right,
    origin,
    rest,
    inverse,
    D: tl.constexpr,
    PRODUCTS: tl.constexpr,
    FAST: tl.constexpr,
):
    """Features of a block: z_left, or z_left times z_right."""
    at = rows[:, None] * D
    z = _column(x, at, inside, left, origin, rest, inverse, D, FAST)
    if PRODUCTS:
        z = z * _column(x, at, inside, right, origin, rest, inverse, D, FAST)
    return z


@triton.jit
def shares(
    x,
    weights,
    table,
    left,
    right,
    slopes,
    factors,
    intercepts,
    origin,
    rest,
    inverse,
    answers,
    densities,
    values,
    own,
    offset,
    D: tl.constexpr,
    FP: tl.constexpr,
    KP: tl.constexpr,
    PRODUCTS: tl.constexpr,
    SHRINK: tl.constexpr,
    HARD: tl.constexpr,
    WEIGHTED: tl.constexpr,
    VALUES: tl.constexpr,
    ROWS: tl.constexpr,
    FAST: tl.constexpr,
    BLOCK: tl.constexpr,
    FT: tl.constexpr,
):
    """Responsibilities of every row, by features of any number, written down; and their values."""
    program = tl.program_id(0)
    start, stop = tl.load(table + 3 * program), tl.load(table + 3 * program + 1)
    worker = tl.load(table + 3 * program + 2) * own
    components = tl.arange(0, KP)
    c = tl.load(intercepts + worker * KP + components)[:, None]
    T: tl.constexpr = c.dtype
    slopes += worker * (1 + FAST) * FP * KP
    density = tl.zeros((BLOCK,), tl.float64)
    entropy = tl.zeros((BLOCK,), tl.float64)
    for begin in range(start, stop, BLOCK):
        rows = begin + tl.arange(0, BLOCK)
        inside = rows < stop
        logits = tl.zeros((KP, BLOCK), T)
        for tile in range(0, FP, FT):
            f = tile + tl.arange(0, FT)
            li, ri = tl.load(left + f), tl.load(right + f)
            z = _features(x, rows, inside, li, ri, origin, rest, inverse, D, PRODUCTS, FAST)
            cells = components[:, None] * FP + f[None, :]
            b = tl.load(slopes + cells)
            if FAST:
                z_high, z_low = _halves(z * SHRINK)
                logits += _product(
                    b, tl.load(slopes + FP * KP + cells), tl.trans(z_high), tl.trans(z_low)
                )
            else:
                logits = tl.dot(b, tl.trans(z), logits, out_dtype=T)
        if FAST:
            logits *= tl.load(factors + worker * KP + components)[:, None]
        logits += c
        if WEIGHTED:
            weight = tl.load(weights + rows, mask=inside, other=0.0)
        else:
            weight = inside.to(T)
        top = tl.max(logits, 0)
        r, raw, total = _soften(logits, top, weight.to(T), HARD, KP)
        whole = tl.log(total) + top
        if VALUES:
            spread = whole - tl.sum(raw * logits, 0) / total
            density += whole.to(tl.float64) * weight
            entropy += spread.to(tl.float64) * weight
        if ROWS:
            tl.store(densities + rows - offset, whole.to(tl.float64), mask=inside)
        place = (rows[None, :] - offset) * KP + components[:, None]
        tl.store(answers + place, r, mask=inside[None, :])
    tl.store(values + 2 * program, tl.sum(density, 0))
    tl.store(values + 2 * program + 1, tl.sum(entropy, 0))


@triton.jit
def moments(
    x,
    table,
    left,
    right,
    origin,
    rest,
    inverse,
    answers,
    sums,
    offset,
    heaviest,
    D: tl.constexpr,
    FP: tl.constexpr,
    KP: tl.constexpr,
    PRODUCTS: tl.constexpr,
    SHRINK: tl.constexpr,
    FAST: tl.constexpr,
    BLOCK: tl.constexpr,
    FT: tl.constexpr,
    KT: tl.constexpr,
):
    """Sums of responsibility times feature: each program a tile of components and features."""
    tiles = FP // FT
    parts = tiles * (KP // KT)  # neighbours read the same rows: one brings them into the cache
    program, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    start, stop = tl.load(table + 3 * program), tl.load(table + 3 * program + 1)
    f = (part % tiles) * FT + tl.arange(0, FT)
    k = (part // tiles) * KT + tl.arange(0, KT)
    li, ri = tl.load(left + f), tl.load(right + f)
    total = tl.zeros((KT, FT), tl.float64)
    for begin in range(start, stop, BLOCK):
        rows = begin + tl.arange(0, BLOCK)
        inside = rows < stop
        z = _features(x, rows, inside, li, ri, origin, rest, inverse, D, PRODUCTS, FAST)
        place = (rows[:, None] - offset) * KP + k[None, :]
        r = tl.trans(tl.load(answers + place, mask=inside[:, None], other=0.0))
        if FAST:
            r_high, r_low = _halves(r * heaviest)
            z_high, z_low = _halves(z * SHRINK)
            total += _product(r_high, r_low, z_high, z_low).to(tl.float64)
        else:
            total = tl.dot(r, z, total, out_dtype=tl.float64)
    out = sums + program.to(tl.int64) * KP * FP
    tl.store(out + k[:, None] * FP + f[None, :], total)


@triton.jit
def _rows(x, rows, inside, columns, origin, rest, inverse, D: tl.constexpr, FAST: tl.constexpr):
    """All columns of a block of rows in the frame; column D, if there is one, is 1."""
    return _column(x, rows[:, None] * D, inside, columns, origin, rest, inverse, D, FAST)


@triton.jit
def quadratic(
    x,
    weights,
    table,
    matrices,
    factors,
    linear,
    intercepts,
    origin,
    rest,
    inverse,
    answers,
    densities,
    values,
    own,
    offset,
    D: tl.constexpr,
    DP: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    HARD: tl.constexpr,
    WEIGHTED: tl.constexpr,
    VALUES: tl.constexpr,
    ROWS: tl.constexpr,
    FAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`shares` for all products of many columns: logits are c + <(A z + b), z>, one matrix each."""
    program = tl.program_id(0)
    start, stop = tl.load(table + 3 * program), tl.load(table + 3 * program + 1)
    worker = tl.load(table + 3 * program + 2) * own
    columns, components = tl.arange(0, DP), tl.arange(0, KP)
    c = tl.load(intercepts + worker * KP + components)[:, None]
    T: tl.constexpr = c.dtype
    cells = columns[:, None] * DP + columns[None, :]
    density = tl.zeros((BLOCK,), tl.float64)
    entropy = tl.zeros((BLOCK,), tl.float64)
    for begin in range(start, stop, BLOCK):
        rows = begin + tl.arange(0, BLOCK)
        inside = rows < stop
        z = _rows(x, rows, inside, columns, origin, rest, inverse, D, FAST)
        logits = tl.zeros((KP, BLOCK), T)
        if FAST:
            z_high, z_low = _halves(z)
        for k in range(0, K):
            at = worker * K + k
            b = tl.load(linear + at * DP + columns)[None, :]
            a = matrices + at * (1 + FAST) * DP * DP + cells
            if FAST:
                t = _product(z_high, z_low, tl.load(a), tl.load(a + DP * DP))
                t = t * tl.load(factors + at)
            else:
                t = tl.dot(z, tl.load(a), out_dtype=T)
            value = tl.sum((t + b) * z, 1)
            logits = tl.where(components[:, None] == k, value[None, :], logits)
        logits += c
        if WEIGHTED:
            weight = tl.load(weights + rows, mask=inside, other=0.0)
        else:
            weight = inside.to(T)
        top = tl.max(logits, 0)
        r, raw, total = _soften(logits, top, weight.to(T), HARD, KP)
        whole = tl.log(total) + top
        if VALUES:
            spread = whole - tl.sum(raw * logits, 0) / total
            density += whole.to(tl.float64) * weight
            entropy += spread.to(tl.float64) * weight
        if ROWS:
            tl.store(densities + rows - offset, whole.to(tl.float64), mask=inside)
        place = (rows[None, :] - offset) * KP + components[:, None]
        tl.store(answers + place, r, mask=inside[None, :])
    tl.store(values + 2 * program, tl.sum(density, 0))
    tl.store(values + 2 * program + 1, tl.sum(entropy, 0))


@triton.jit
def scatter(
    x,
    table,
    origin,
    rest,
    inverse,
    answers,
    sums,
    offset,
    heaviest,
    D: tl.constexpr,
    DP: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    FAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sums of responsibility times z z^T: each program one component."""
    program, k = tl.program_id(0) // K, tl.program_id(0) % K
    start, stop = tl.load(table + 3 * program), tl.load(table + 3 * program + 1)
    columns = tl.arange(0, DP)
    total = tl.zeros((DP, DP), tl.float64)
    for begin in range(start, stop, BLOCK):
        rows = begin + tl.arange(0, BLOCK)
        inside = rows < stop
        z = _rows(x, rows, inside, columns, origin, rest, inverse, D, FAST)
        r = tl.load(answers + (rows - offset) * KP + k, mask=inside, other=0.0)
        if FAST:
            a_high, a_low = _halves(z * (r * heaviest)[:, None])
            z_high, z_low = _halves(z)
            part = _product(tl.trans(a_high), tl.trans(a_low), z_high, z_low)
            total += part.to(tl.float64)
        else:
            total = tl.dot(tl.trans(z * r[:, None]), z, total, out_dtype=tl.float64)
    out = sums + (program.to(tl.int64) * K + k) * DP * DP
    tl.store(out + columns[:, None] * DP + columns[None, :], total)


@triton.jit
def gather(partial, ends, out, width, CHUNK: tl.constexpr, TILE: tl.constexpr):
    """Sums of the partial sums of each worker's programs, in their order."""
    tiles = tl.cdiv(width, TILE)
    worker = tl.program_id(0) // tiles
    cells = (tl.program_id(0) % tiles) * TILE + tl.arange(0, TILE)
    start, stop = tl.load(ends + worker), tl.load(ends + worker + 1)
    total = tl.zeros((TILE,), tl.float64)
    for begin in range(start, stop, CHUNK):
        programs = begin + tl.arange(0, CHUNK)
        here = (programs < stop)[:, None] & (cells < width)[None, :]
        at = programs[:, None].to(tl.int64) * width + cells[None, :]
        total += tl.sum(tl.load(partial + at, mask=here, other=0.0), 0)
    tl.store(out + worker.to(tl.int64) * width + cells, total, mask=cells < width)
