"""The plain objects that models, compressors and algorithms hand each other.

numpy only, immutable, and with a leading worker axis where there are many workers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]
WorkerStates = dict[str, NDArray[Any]]
"""The states of some workers: the name of a field -> an array with a leading worker axis."""
Summaries = Mapping[str, FloatArray]
"""What workers say of their rows in the opening: name -> array with a leading worker axis."""
Names = Sequence[str] | None
"""Names of columns, where there are any."""

# 2**0, 2**(1/4), 2**(1/2) and 2**(3/4), written out: powers may round differently elsewhere.
_ROOTS = (1.0, 1.189207115002721, 1.4142135623730951, 1.681792830507429)
GRID: FloatArray = np.array([0.0, *(_ROOTS[j % 4] * 2.0 ** (j // 4 - 44) for j in range(255))])
"""Positive numbers that take one byte: 0 and the powers of 2**(1/4) from 2**-44 to 2**19."""
GRID.flags.writeable = False


@dataclass(frozen=True)
class Layout:
    """Names and shapes of the pieces of a statistics vector in R^q, in order."""

    fields: tuple[tuple[str, tuple[int, ...]], ...]

    @cached_property
    def size(self) -> int:
        """The dimension q."""
        return sum(prod(shape) for _, shape in self.fields)

    @cached_property
    def slices(self) -> dict[str, slice]:
        """Where each piece lies in the vector."""
        out, start = {}, 0
        for name, shape in self.fields:
            out[name] = slice(start, start + prod(shape))
            start += prod(shape)
        return out

    def split(self, vector: FloatArray) -> dict[str, FloatArray]:
        """``(..., q)`` to its named pieces, each ``(..., *shape)``."""
        lead = vector.shape[:-1]
        return {
            name: vector[..., self.slices[name]].reshape(*lead, *shape)
            for name, shape in self.fields
        }

    def join(self, parts: Mapping[str, FloatArray]) -> FloatArray:
        """Named pieces back to one ``(..., q)`` vector."""
        flat = []
        for name, shape in self.fields:
            part = parts[name]
            lead = part.shape[: part.ndim - len(shape)]
            flat.append(part.reshape(*lead, prod(shape)))
        return np.concatenate(flat, axis=-1)

    def block_sizes(self, per: Literal["field", "row"]) -> tuple[int, ...]:
        """Sizes of consecutive blocks: one per named piece, or one per row of each piece."""
        sizes: list[int] = []
        for _, shape in self.fields:
            if per == "field" or len(shape) < 2:
                sizes.append(prod(shape))
            else:
                sizes.extend([prod(shape[1:])] * shape[0])
        return tuple(sizes)


@dataclass(frozen=True)
class Parameters:
    """theta: a frozen dataclass of arrays that may share leading axes."""

    def take(self, index: Any) -> Self:
        """Index the leading axis of every array."""
        picked = {f.name: getattr(self, f.name)[index] for f in dataclasses.fields(self)}
        return dataclasses.replace(self, **picked)

    def arrays(self) -> dict[str, FloatArray]:
        """The arrays by name."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    def with_arrays(self, arrays: Mapping[str, FloatArray]) -> Self:
        """The parameters with these arrays in place of their own."""
        return dataclasses.replace(self, **arrays)


@dataclass(frozen=True)
class Compressed:
    """What a compressor sends: a few reals and many small integers, with shared leading axes."""

    reals: FloatArray
    symbols: NDArray[np.int32]

    def take(self, index: Any) -> Compressed:
        """Index the leading axis."""
        return Compressed(self.reals[index], self.symbols[index])


@dataclass(frozen=True)
class Crowd:
    """What an algorithm may know of the workers when it chooses its settings."""

    effective: float
    """1 / sum w_i^2: how many workers of equal weight they are worth."""
    probability: float
    """The smallest p_i."""


ALONE = Crowd(1.0, 1.0)


@dataclass(frozen=True)
class Form:
    """What both ends know of a compressed message before it arrives."""

    reals: int
    symbols: int
    bound: int = 0
    """No symbol is larger than this in size."""
    on_grid: bool = False
    """Whether the reals are numbers of `GRID`."""


@dataclass(frozen=True)
class HeldUp:
    """Rows whose spread in a column stands at a model's floor: their components sit on one value.

    Where the rows are many, the column has an atom; where they are few, a component has collapsed.
    """

    components: tuple[int, ...]
    share: float
    """Their rows, as a share of all."""
    columns: tuple[int, ...]
    """One column; several where a combination of them has no spread."""
    value: float | None = None
    """That of the column, in the user's units; None where components differ in it."""
    rows_per_sample: float = 1.0
    """Rows of one sample: the steps of a sequence, which a state has some of."""
    on_a_line: bool = False
    """Whether what has no spread are the distances of a target from a regression line."""


@dataclass(frozen=True, eq=False)
class WorkerCells:
    """The cells of a large table that one worker observed, and what it tells of them."""

    keys: IntArray
    """Positions in the table, row by row, increasing."""
    weights: FloatArray
    """How often each was observed, or the exposure."""
    sums: FloatArray
    """Sums of the values."""
