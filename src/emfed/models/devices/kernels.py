"""The kernels of a pass over rows, in Triton; tests/models/devices/twin.py says the same in numpy.

Each program walks through the blocks of its own range of rows and writes its own partial sums, so
nothing is atomic and sums have one order. Products of doubles run on the tensor cores that data
centre GPUs have for them. ``FAST`` kernels cut every factor into two half-precision numbers of 11
bits each and multiply three of the four pairs (the fourth is below 2^-22); the sums of a block are
float32, those over blocks double. Logits are powers of two instead of e inside. ``own`` says at run
time whether workers have parameters of their own: rounds and starts side by side share one compiled
kernel, which for sm_90 has as many registers and instructions as if it knew.
"""

from __future__ import annotations

import triton
import triton.language as tl

from emfed.models.devices import halves

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
UPWARD = tl.constexpr(halves.UPWARD)


@triton.jit
def _halves(v):
    high = v.to(tl.float16)
    return high, (v - high.to(tl.float32)).to(tl.float16)


@triton.jit
def _product(a_high, a_low, b_high, b_low, start=None):
    """A product of numbers in two parts, float32, and what it starts with."""
    if start is None:
        small = tl.dot(a_high, b_low)
    else:
        small = tl.dot(a_high, b_low, start)
    return tl.dot(a_high, b_high, tl.dot(a_low, b_high, small))


@triton.jit
def _power(v):
    """2^v of v <= 0; of doubles by a polynomial of degree 11 (2e-17 from it), 0 below 2^-1023.

    The function of the library takes a third more instructions, and branches.
    """
    if v.dtype == tl.float64:
        v = tl.maximum(v, -1023.0)
        shifted = v + 6755399441055744.0  # 1.5 * 2^52: its last bits are the nearest whole number
        f = v - (shifted - 6755399441055744.0)
        p = f * 4.454960598186495e-10 + 7.072585949269223e-09
        p = p * f + 1.0178062445845774e-07
        p = p * f + 1.321544258792169e-06
        p = p * f + 1.525273382983612e-05
        p = p * f + 0.0001540353044173605
        p = p * f + 0.0013333558146416936
        p = p * f + 0.009618129107606888
        p = p * f + 0.0555041086648216
        p = p * f + 0.24022650695910097
        p = p * f + 0.6931471805599453
        p = p * f + 1.0
        raised = p.to(tl.int64, bitcast=True) + (shifted.to(tl.int64, bitcast=True) << 52)
        out = raised.to(tl.float64, bitcast=True)
    else:
        out = tl.exp2(v)
    return out


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
        shares = _power(logits - top[None, :])
        total = tl.sum(shares, 0)
    return shares * (weight / total)[None, :], shares, total


@triton.jit
def _values(logits, shares, total, top):
    """The log of the sum of exp(logits), and the entropy of the responsibilities, of each row."""
    whole = tl.log2(total) + top
    spread = whole - tl.sum(shares * logits, 0) / total
    return whole.to(tl.float64) * LN2, spread.to(tl.float64) * LN2


@triton.jit
def _parts(b, most):
    """Slopes (doubles) as two half-precision parts without powers of two, and those powers."""
    exponents = tl.maximum(most, 1e-200).to(tl.int64, bitcast=True) & 0x7FF0000000000000
    unit = exponents.to(tl.float64, bitcast=True) * (1 / UPWARD)
    scaled = b / unit[:, None]
    high = scaled.to(tl.float16)
    return high, (scaled - high.to(tl.float64)).to(tl.float16), unit.to(tl.float32)[:, None]


@triton.jit
def _framed(y, frame, FAST: tl.constexpr):
    """Rows in their frame: in doubles without its scale, else by a power of two, both exactly."""
    origin, inverse = frame
    if FAST:
        z = (y.to(origin.dtype) * inverse - origin).to(tl.float32)
    else:
        z = y.to(tl.float64) - origin
    return z


@triton.jit
def _logits(f, b, start, FAST: tl.constexpr, ROWS_FIRST: tl.constexpr):
    """Products of features and slopes, added to those of other features; rows first if so."""
    if FAST:
        if ROWS_FIRST:
            logits = _product(f[0], f[1], tl.trans(b[0]), tl.trans(b[1]), start)
        else:
            logits = _product(b[0], b[1], tl.trans(f[0]), tl.trans(f[1]), start)
    elif ROWS_FIRST:
        logits = tl.dot(f, tl.trans(b), start, out_dtype=tl.float64)
    else:
        logits = tl.dot(b, tl.trans(f), start, out_dtype=tl.float64)
    return logits


@triton.jit
def _added(total, r, f, FAST: tl.constexpr):
    """Sums, and responsibilities times features."""
    if FAST:
        total += _product(r[0], r[1], f[0], f[1]).to(tl.float64)
    else:
        total = tl.dot(r, f, total, out_dtype=tl.float64)
    return total


@triton.jit
def _block(
    rows,
    weight,
    slopes,
    intercepts,
    frames,
    power,
    sums,
    KP: tl.constexpr,
    TILES: tl.constexpr,
    HARD: tl.constexpr,
    VALUES: tl.constexpr,
    FAST: tl.constexpr,
    ROWS_FIRST: tl.constexpr,
    ONE: tl.constexpr,
):
    """The sums of `fused`, with those of one block of rows added."""
    times, c = intercepts
    first, second, third, mass, density, entropy = sums
    f1 = _framed(rows[0], frames[0], FAST)
    f2, f3 = f1, f1
    if TILES > 1:
        f2 = f1 * f1
    if TILES > 2:
        f3 = _framed(rows[1], frames[1], FAST)
        f3 = tl.where(power, f3 * f3, f3)
    if FAST:
        f1, f2, f3 = _halves(f1), _halves(f2), _halves(f3)
    logits = _logits(f1, slopes[0], None, FAST, ROWS_FIRST)
    if TILES > 1:
        logits = _logits(f2, slopes[1], logits, FAST, ROWS_FIRST)
    if TILES > 2:
        logits = _logits(f3, slopes[2], logits, FAST, ROWS_FIRST)
    if ROWS_FIRST:
        logits = tl.trans(logits)
    if FAST:
        logits = logits * times + c
    elif not ONE:  # else the intercepts are the slopes of the column that is 1
        logits += c
    top = tl.max(logits, 0)
    share = weight.to(c.dtype) * (UPWARD if FAST else 1.0)
    r, shares, total = _soften(logits, top, share, HARD, KP)
    if VALUES:
        whole, spread = _values(logits, shares, total, top)
        density += whole * weight
        entropy += spread * weight
    if not ONE:
        mass += tl.sum(r, 1).to(tl.float64)
    if FAST:
        r = _halves(r)
    first = _added(first, r, f1, FAST)
    if TILES > 1:
        second = _added(second, r, f2, FAST)
    if TILES > 2:
        third = _added(third, r, f3, FAST)
    return first, second, third, mass, density, entropy


@triton.jit
def _frame_of(frame, kind: tl.constexpr, W: tl.constexpr, FAST: tl.constexpr):
    """Origin and inverse scale of a tile's columns, of the type of the rows where fast."""
    columns = tl.arange(0, W)
    origin, inverse = tl.load(frame + columns)[None, :], tl.load(frame + W + columns)[None, :]
    if FAST:
        origin, inverse = origin.to(kind), inverse.to(kind)
    return origin, inverse


@triton.jit(do_not_specialize=["own"])
def fused(
    x,
    weights,
    table,
    slopes,
    intercepts,
    frame,
    sums,
    own,
    unit,
    D: tl.constexpr,
    W: tl.constexpr,
    TILES: tl.constexpr,
    KP: tl.constexpr,
    HARD: tl.constexpr,
    WEIGHTED: tl.constexpr,
    VALUES: tl.constexpr,
    FAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Features z or (z, z^2) of few columns and components: one read of the rows, and sums.

    Features come in ``TILES`` of W columns: z; the squares of z; and, where W is less than D, the
    columns that are left, their squares and 1 in one tile. A column beyond the rows' own is 1, and
    its moments are the masses. In doubles the slopes carry the scale of the frame; in half
    precision rows must be of size 1, and are scaled by powers of two. Blocks are read one ahead of
    their use, and all but the last are whole and need no masks; large ones leave no registers for
    that.
    """
    ONE: tl.constexpr = W != D  # whether a column is 1
    LEFT: tl.constexpr = D - W if TILES > 2 else 1
    ROWS_FIRST: tl.constexpr = KP <= 32
    AHEAD: tl.constexpr = KP * W <= 2048
    kind: tl.constexpr = x.dtype.element_ty
    program = tl.program_id(0)
    start, stop = tl.load(table + 3 * program), tl.load(table + 3 * program + 1)
    worker = tl.load(table + 3 * program + 2) * own
    columns, components, lines = tl.arange(0, W), tl.arange(0, KP), tl.arange(0, BLOCK)
    c = tl.load(intercepts + worker * KP + components)[:, None]
    cells = components[:, None] * (TILES * W) + columns[None, :]
    slopes += worker * KP * TILES * W
    b1 = tl.load(slopes + cells)
    b2, b3 = b1, b1
    frame1 = _frame_of(frame, kind, W, FAST)
    frame3 = frame1
    others = columns
    if TILES > 1:
        b2 = tl.load(slopes + W + cells)
    if TILES > 2:
        b3 = tl.load(slopes + 2 * W + cells)
        frame3 = _frame_of(frame + 2 * W, kind, W, FAST)
        others = tl.where(columns < 2 * LEFT, W + columns % LEFT, D)
        others = tl.max_contiguous(tl.multiple_of(others, 4), 4)  # so that they are read by fours
    power = ((columns >= LEFT) & (columns < 2 * LEFT))[None, :]
    heights = (c, c)
    natural = (b1, b2, b3)
    if FAST:
        most = tl.maximum(tl.max(tl.abs(b1), 1), tl.max(tl.abs(b2), 1))
        most = tl.maximum(most, tl.max(tl.abs(b3), 1))
        high1, low1, times = _parts(b1, most)
        high2, low2, _ = _parts(b2, most)
        high3, low3, _ = _parts(b3, most)
        heights = (times, c.to(tl.float32))
        natural = ((high1, low1), (high2, low2), (high3, low3))
    zero, none = tl.zeros((KP, W), tl.float64), tl.zeros((BLOCK,), tl.float64)
    total = (zero, zero, zero, tl.zeros((KP,), tl.float64), none, none)
    x += start * D
    at1, at3 = lines[:, None] * D + columns[None, :], lines[:, None] * D + others[None, :]
    some1, some3 = (columns < D)[None, :], (others < D)[None, :]
    count = (stop - start).to(tl.int32)
    whole = 0
    if AHEAD:
        whole = count // BLOCK * BLOCK
        any_whole = (lines < whole)[:, None]  # as a column: the interpreter of Triton 3.9 takes no
        ahead1 = tl.load(x + at1, mask=some1 & any_whole, other=0.0)  # scalar in a mask
        ahead3 = ahead1
        if TILES > 2:
            ahead3 = tl.load(x + at3, mask=some3 & any_whole, other=0.0)
        for begin in range(0, whole, BLOCK):
            rows = (ahead1, ahead3)
            following = tl.minimum(begin + BLOCK, whole - BLOCK) * D
            ahead1 = tl.load(x + following + at1, mask=some1, other=0.0)
            ahead3 = ahead1
            if TILES > 2:
                ahead3 = tl.load(x + following + at3, mask=some3, other=0.0)
            weight = tl.full((BLOCK,), 1.0, heights[1].dtype)
            if WEIGHTED:
                weight = tl.load(weights + start + begin + lines) * unit
            total = _block(
                *(rows, weight, natural, heights, (frame1, frame3), power, total),
                *(KP, TILES, HARD, VALUES, FAST, ROWS_FIRST, ONE),
            )
    for begin in range(whole, count, BLOCK):
        inside = begin + lines < count
        there = tl.minimum(begin + lines, count - 1)[:, None] * D  # what is not counts for nothing
        y1 = tl.load(x + there + columns[None, :], mask=some1, other=0.0)
        y3 = y1
        if TILES > 2:
            y3 = tl.load(x + there + others[None, :], mask=some3, other=0.0)
        weight = inside.to(heights[1].dtype)
        if WEIGHTED:
            weight = tl.load(weights + start + begin + lines, mask=inside, other=0.0) * unit
        total = _block(
            *((y1, y3), weight, natural, heights, (frame1, frame3), power, total),
            *(KP, TILES, HARD, VALUES, FAST, ROWS_FIRST, ONE),
        )
    first, second, third, mass, density, entropy = total
    out = sums + program.to(tl.int64) * (KP * TILES * W + KP + 2)
    tl.store(out + cells, first)
    if TILES > 1:
        tl.store(out + W + cells, second)
    if TILES > 2:
        tl.store(out + 2 * W + cells, third)
    out += KP * TILES * W
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


@triton.jit(do_not_specialize=["own"])
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
        # A tensor core cuts off what it adds to: sums over many tiles are doubles, outside of it.
        logits = tl.zeros((KP, BLOCK), tl.float64)
        for tile in range(0, FP, FT):
            f = tile + tl.arange(0, FT)
            li, ri = tl.load(left + f), tl.load(right + f)
            z = _features(x, rows, inside, li, ri, origin, rest, inverse, D, PRODUCTS, FAST)
            cells = components[:, None] * FP + f[None, :]
            b = tl.load(slopes + cells)
            if FAST:
                z_high, z_low = _halves(z)
                b_low = tl.load(slopes + FP * KP + cells)
                logits += _product(b, b_low, tl.trans(z_high), tl.trans(z_low)).to(tl.float64)
            else:
                logits = tl.dot(b, tl.trans(z), logits, out_dtype=tl.float64)
        if FAST:
            logits *= tl.load(factors + worker * KP + components)[:, None]
        logits = ((logits + c) * LOG2E).to(T)
        if WEIGHTED:
            weight = tl.load(weights + rows, mask=inside, other=0.0)
        else:
            weight = inside.to(T)
        top = tl.max(logits, 0)
        r, raw, total = _soften(logits, top, weight.to(T), HARD, KP)
        whole, spread = _values(logits, raw, total, top)
        if VALUES:
            density += whole * weight
            entropy += spread * weight
        if ROWS:
            tl.store(densities + rows - offset, whole, mask=inside)
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
    unit,
    D: tl.constexpr,
    FP: tl.constexpr,
    KP: tl.constexpr,
    PRODUCTS: tl.constexpr,
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
            r_high, r_low = _halves(r * unit)
            z_high, z_low = _halves(z)
            total += _product(r_high, r_low, z_high, z_low).to(tl.float64)
        else:
            total = tl.dot(r, z, total, out_dtype=tl.float64)
    out = sums + program.to(tl.int64) * KP * FP
    tl.store(out + k[:, None] * FP + f[None, :], total)


@triton.jit
def _rows(x, rows, inside, columns, origin, rest, inverse, D: tl.constexpr, FAST: tl.constexpr):
    """All columns of a block of rows in the frame; column D, if there is one, is 1."""
    return _column(x, rows[:, None] * D, inside, columns, origin, rest, inverse, D, FAST)


@triton.jit(do_not_specialize=["own"])
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
        logits = (logits + c) * LOG2E
        if WEIGHTED:
            weight = tl.load(weights + rows, mask=inside, other=0.0)
        else:
            weight = inside.to(T)
        top = tl.max(logits, 0)
        r, raw, total = _soften(logits, top, weight.to(T), HARD, KP)
        whole, spread = _values(logits, raw, total, top)
        if VALUES:
            density += whole * weight
            entropy += spread * weight
        if ROWS:
            tl.store(densities + rows - offset, whole, mask=inside)
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
    unit,
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
            a_high, a_low = _halves(z * (r * unit)[:, None])
            z_high, z_low = _halves(z)
            part = _product(tl.trans(a_high), tl.trans(a_low), z_high, z_low)
            total += part.to(tl.float64)
        else:
            total = tl.dot(tl.trans(z * r[:, None]), z, total, out_dtype=tl.float64)
    out = sums + (program.to(tl.int64) * K + k) * DP * DP
    tl.store(out + columns[:, None] * DP + columns[None, :], total)


@triton.jit
def gather(
    partial,
    ends,
    out,
    order,
    factors,
    stride,
    width,
    PICKED: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Sums of the partial sums of each worker's programs, in their order.

    Where some are ``PICKED``, of those alone, times their factors.
    """
    tiles = tl.cdiv(width, TILE)
    worker = tl.program_id(0) // tiles
    cells = (tl.program_id(0) % tiles) * TILE + tl.arange(0, TILE)
    start, stop = tl.load(ends + worker), tl.load(ends + worker + 1)
    places = cells
    if PICKED:
        places = tl.load(order + cells, mask=cells < width, other=0)
    total = tl.zeros((TILE,), tl.float64)
    for begin in range(start, stop, CHUNK):
        programs = begin + tl.arange(0, CHUNK)
        here = (programs < stop)[:, None] & (cells < width)[None, :]
        at = programs[:, None].to(tl.int64) * stride + places[None, :]
        total += tl.sum(tl.load(partial + at, mask=here, other=0.0), 0)
    if PICKED:
        total *= tl.load(factors + cells, mask=cells < width, other=0.0)
    tl.store(out + worker.to(tl.int64) * width + cells, total, mask=cells < width)
