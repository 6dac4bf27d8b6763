"""Random dithering in blocks, with any number of levels and any norm.

    Q(x) = |x|_r / s * sign(x) * floor(s |x| / |x|_r + u),     u uniform on [0, 1)^q

on each block (paper, section 2, below A6). One level is the block-p-quantization of
its Appendix B; one block of all q numbers is the dithering of QSGD (Alistarh et al. 2017).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf, isinf, sqrt
from typing import Any, Literal, final

import numpy as np

from emfed.compressors.precision import ULP, FloatPrecision, check_precision, round_up
from emfed.core.errors import SettingsError, check_count, check_range
from emfed.core.protocols import Compressed, Compressor, FloatArray, Form, IntArray, Layout

BlockSizes = int | tuple[int, ...] | Literal["all", "field", "row"]


@lru_cache(maxsize=256)
def _edges(block: BlockSizes, q: int) -> tuple[IntArray, IntArray]:
    """Start and size of each block of a q-vector."""
    if block in ("field", "row"):
        raise SettingsError(f"block={block!r} needs a layout: call resolve() first.")
    if isinstance(block, str):
        sizes = [q]
    elif isinstance(block, tuple):
        sizes = list(block)
        if sum(sizes) != q:
            raise SettingsError(
                f"block sizes {block} add up to {sum(sizes)}, but the dimension is {q}."
            )
    else:
        sizes = [min(block, q - start) for start in range(0, q, block)]
    widths = np.array(sizes, dtype=np.int64)
    return np.concatenate([[0], np.cumsum(widths)[:-1]]).astype(np.int64), widths


def _block_norms(vectors: FloatArray, starts: IntArray, widths: IntArray, r: float) -> FloatArray:
    """The r-norm of each block, ``(..., blocks)``, safe from overflow and underflow."""
    size = vectors if r == 2 else np.abs(vectors)
    if r in (1, 2, inf):
        with np.errstate(over="ignore", under="ignore"):
            norms = _plain_norms(size, starts, r)
        if r != 2 or (norms.min(initial=1.0) > 1e-140 and norms.max(initial=1.0) < 1e150):
            return norms
    size = np.abs(vectors)
    top = np.maximum.reduceat(size, starts, axis=-1)
    scaled = size / np.repeat(np.where(top > 0, top, 1.0), widths, axis=-1)
    return top * _plain_norms(scaled, starts, r)


def _plain_norms(size: FloatArray, starts: IntArray, r: float) -> FloatArray:
    if isinf(r):
        return np.maximum.reduceat(size, starts, axis=-1)
    if r == 1:
        return np.add.reduceat(size, starts, axis=-1)
    if r == 2:
        return np.sqrt(np.add.reduceat(size * size, starts, axis=-1))
    return np.asarray(np.add.reduceat(size**r, starts, axis=-1) ** (1 / r))


def _omega(d: int, s: int, r: float) -> float:
    """sup over x in R^d of E|Q(x) - x|^2 / |x|^2, or a bound of it.

    With a_j = s |x_j| / |x|_r and f the fractional part, a coordinate's variance is
    (|x|_r / s)^2 f (1 - f). As a function of t = a^2, f (1 - f) lies below the concave function
    g(t) = sqrt(t) - t for t <= 1/4 and 1/4 beyond (for s = 1, a <= 1 and sqrt(t) - t holds
    throughout), so by Jensen the ratio is at most (d / v) g(v / d) with v = (s |x|_2 / |x|_r)^2,
    which falls with v.

    * r <= 2: v >= s^2 d^(1 - 2/r), with equality for constant vectors. For s = 1 this is
      d^(1/r) - 1 (the paper has it for r = 2); it is tighter than QSGD's min(d/s^2, sqrt(d)/s).
    * r = inf: one coordinate has a = s and no variance; optimising over the others gives
      (sqrt(s^2 + d - 1) - s) / (2 s), attained by (1, t, ..., t). For s = 1 it is the
      (sqrt(d) - 1) / 2 of Mishchenko et al. 2019.
    * 2 < r < inf: |x|_r <= |x|_2^(2/r) |x|_inf^(1 - 2/r), and |x|_2^2 plus the sum of
      (|x|_r / s)^2 g(a_j^2) is log-convex in log |x|_r. So 1 + omega is at most the weighted
      geometric mean of the bounds by g for r = 2 and for r = inf. In the latter the largest
      coordinate counts 1/4 too (but for s = 1, where g may go on to a = 1).
    """
    if d == 1:
        return 0.0
    if isinf(r):
        return (sqrt(s * s + d - 1) - s) / (2 * s)
    if r > 2:
        four = 4 * s * s
        by_g = (sqrt((four + 1) ** 2 + 4 * four * (d - 1)) - four + 1) / (2 * four)
        largest = _omega(d, s, inf) if s == 1 else by_g
        return float((1 + _omega(d, s, 2.0)) ** (2 / r) * (1 + largest) ** (1 - 2 / r) - 1)
    v = s * s * (d ** (1 - 2 / r) if r < 2 else 1.0)
    if s == 1 or v / d <= 0.25:
        return max(0.0, sqrt(d / v) - 1)
    return d / (4 * v)


@final
@dataclass(frozen=True)
class Dithering(Compressor):
    """Random dithering with ``levels`` s >= 1 and a norm r >= 1, on blocks (section 2, below A6).

    Parameters
    ----------
    levels : int
        The number of levels s: more levels mean less noise and more bytes.
    norm : float
        The norm r that scales a block; infinity is allowed.
    block : {"all", "field", "row"}, int or tuple of int
        One block of all numbers, blocks of one size, of several sizes, or those of the model's
        layout: one for each named statistic ("field"), or one for each component of it ("row").
    scales : {"float64", "float32", "bfloat16"}
        What the norms are rounded up to, 8, 4 or 2 bytes a block. That adds no bias.

    Examples
    --------
    >>> import emfed
    >>> round(emfed.Dithering(levels=4).omega(16), 3)
    0.25
    """

    levels: int = 1
    norm: float = 2.0
    block: BlockSizes = "all"
    scales: FloatPrecision = "float32"

    def __post_init__(self) -> None:
        check_precision("scales", self.scales)
        check_count("levels", self.levels)
        if self.levels >= 2**30:
            raise SettingsError(f"levels must be below 2**30; got {self.levels}.")
        check_range("norm", self.norm, 1, inf)
        if isinstance(self.block, str):
            if self.block not in ("all", "field", "row"):
                raise SettingsError(
                    "block must be a size, a tuple of sizes, 'all', 'field' or 'row'; "
                    f"got {self.block!r}."
                )
        else:
            for size in self.block if isinstance(self.block, tuple) else (self.block,):
                check_count("block", size)

    def resolve(self, layout: Layout) -> Dithering:
        """Blocks named by the layout become sizes; sizes are checked against q."""
        if self.block in ("field", "row"):
            return replace(self, block=layout.block_sizes(self.block))
        _edges(self.block, layout.size)
        return self

    def draws(self, q: int) -> int:
        return q

    def compress(self, vectors: FloatArray, uniforms: FloatArray) -> Compressed:
        """Norms of the blocks, and signed levels."""
        starts, widths = _edges(self.block, vectors.shape[-1])
        norms = round_up(_block_norms(vectors, starts, widths, self.norm), self.scales)
        spread = np.repeat(np.where(norms > 0, norms, 1.0), widths, axis=-1)
        levels = np.abs(vectors)
        levels /= spread
        if self.levels != 1:
            levels *= self.levels
        levels += uniforms
        np.floor(levels, out=levels)
        # Rounding may put |x| / |x|_r an ulp above 1.
        np.minimum(levels, self.levels, out=levels)
        return Compressed(norms, np.copysign(levels, vectors).astype(np.int32))

    def decompress(self, message: Compressed, uniforms: FloatArray, q: int) -> FloatArray:
        """Levels times the block's norm over s."""
        _, widths = _edges(self.block, q)
        step = message.reals / self.levels if self.levels != 1 else message.reals
        return np.multiply(message.symbols, np.repeat(step, widths, axis=-1), dtype=np.float64)

    def omega(self, q: int) -> float:
        """The largest over the blocks; see the derivation in the source of ``_omega``.

        A scale too large by the factor 1 + e divides v there by (1 + e)^2 and, for the sup norm,
        leaves the largest coordinate a variance of at most e |x|^2 (1 + e)^2: together no more than
        3 e (1 + omega) on top of omega.
        """
        _, widths = _edges(self.block, q)
        exact = max(_omega(int(d), self.levels, self.norm) for d in set(widths.tolist()))
        return exact + 3 * ULP[self.scales] * (1 + exact)

    def form(self, q: int) -> Form:
        return Form(len(_edges(self.block, q)[1]), q, int(self.levels))

    def variance(self, vectors: FloatArray) -> FloatArray:
        """E|Q(x) - x|^2; with one level, sum of |x_l|_1 |x_l|_r - |x_l|_2^2 (the paper)."""
        starts, widths = _edges(self.block, vectors.shape[-1])
        norms = round_up(_block_norms(vectors, starts, widths, self.norm), self.scales)
        step = np.repeat(norms, widths, axis=-1) / self.levels
        safe = np.where(step > 0, step, 1.0)
        part = np.modf(np.abs(vectors) / safe)[0]
        return np.asarray((step**2 * part * (1 - part)).sum(axis=-1))

    def describe(self) -> dict[str, Any]:
        return {
            "compressor": "dithering",
            "levels": self.levels,
            "norm": "inf" if isinf(self.norm) else self.norm,
            "block": list(self.block) if isinstance(self.block, tuple) else self.block,
            "scales": self.scales,
        }

    @classmethod
    def examples(cls) -> Iterator[Compressor]:
        """Few and many levels, all norms, all kinds of blocks."""
        yield cls()
        yield block_quantization(4)
        yield cls(levels=4, norm=inf)
        yield cls(levels=16, norm=1, block=3)
        yield cls(levels=2, norm=3.5, block=5)
        yield cls(levels=3, norm=1.5, scales="float64")
        yield cls(levels=2, norm=inf, block=3, scales="bfloat16")


def block_quantization(
    block: BlockSizes, p: float = 2.0, scales: FloatPrecision = "float32"
) -> Dithering:
    """Make the block-p-quantization of the paper (Appendix B): dithering with one level.

    Its omega is sqrt(block) - 1 for p = 2 (Lemma 5).

    Parameters
    ----------
    block : int, tuple of int or str
        The size of a block, or blocks as in `Dithering`.
    p : float
        The norm that scales a block.
    scales : {"float64", "float32", "bfloat16"}
        What the norms are rounded up to.

    Returns
    -------
    Dithering
        The operator.

    Examples
    --------
    >>> import emfed
    >>> round(emfed.block_quantization(4).omega(20), 3)
    1.0
    """
    return Dithering(levels=1, norm=p, block=block, scales=scales)
