"""The plain objects that models, compressors, algorithms and federations hand each other.

numpy only, immutable, and with a leading worker axis where there are many workers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf, prod
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
class View:
    """The model that some rounds or a question work with, told by reference to the run's model.

    A run opens with one model, or with several candidates side by side. A view names some of them
    by position, so that starts that compete, candidates that are left, and the k-means of a start
    travel in a few bytes, and both ends build the same model from the same constants.
    """

    parts: tuple[int, ...] | None = None
    """Candidates by position, each perhaps several times (starts that compete); None: the run's
    model as it is."""
    watched: bool = False
    """Whether the log-likelihood and entropy of each part are among the statistics."""
    clusters: int | None = None
    """The growing k-means of at most so many clusters that starts the first part, in its place."""
    smallest: int = 1
    """Clusters with fewer of a worker's rows are left out of what it says."""
    seed: int = 0
    """Where those clusters grow to."""
    folds: bool = False
    """Whether each part is fitted without some workers, see `emfed.network.validation`."""

    def describe(self) -> dict[str, Any]:
        """The fields that say something, as plain JSON types."""
        names = ("clusters", "folds", "smallest", "watched", "seed")
        said = {name: getattr(self, name) for name in names}
        told: dict[str, Any] = {n: v for n, v in said.items() if v != getattr(View, n)}
        return told if self.parts is None else {"parts": list(self.parts), **told}

    @classmethod
    def read(cls, description: Any) -> View:
        """The inverse of `describe`; raises ValueError for anything else."""
        names = [f.name for f in dataclasses.fields(cls)]
        if not isinstance(description, Mapping) or not {*description} <= {*names}:
            raise ValueError(f"a view is described by {', '.join(names)}.")
        view, parts = cls(**description), description.get("parts")
        if parts is not None and not _positions(parts):
            raise ValueError("the parts of a view are a list of positions.")
        if not _counts(view.seed, 0, 1 << 64):
            raise ValueError("the seed of a view is a number of 64 bits.")
        counts = [view.smallest] if view.clusters is None else [view.smallest, view.clusters]
        flags = (view.watched, view.folds)
        if not all(_counts(n, 1) for n in counts) or {*map(type, flags)} != {bool}:
            raise ValueError("watched and folds are true or false, clusters and smallest counts.")
        if view.folds and (parts is None or view.watched or view.clusters is not None):
            raise ValueError("folds are parts of a view, and nothing else.")
        return dataclasses.replace(view, parts=None if parts is None else tuple(parts))


def _counts(value: Any, least: int, end: float = inf) -> bool:
    """Tell whether it is a whole number of that range; True and False are none."""
    return type(value) is int and least <= value < end


def _positions(value: Any) -> bool:
    fits = isinstance(value, (list, tuple)) and 0 < len(value) <= MOST_PARTS
    return fits and all(_counts(j, 0, MOST_PARTS) for j in value)


WHOLE = View()
"""The run's model as it is."""
MOST_PARTS = 1 << 12
"""More candidates and starts than any run has: what hostile bytes may name is bounded."""


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


@dataclass(frozen=True)
class Question:
    """What everyone is asked at given parameters, outside the rounds of an algorithm."""

    kind: Literal["statistics", "values", "scores", "validation", "clusters"]
    """Exact statistics; the mean log-likelihood and entropy of each part, ``(parts, 2)``; how well
    the model fits a worker's rows, see `emfed.network.scoring`; how well it fits rows that it was
    not fitted to, see `emfed.network.validation`; or a worker's own clusters, see
    `emfed.network.own_clusters`."""
    view: View
    params: Any
    """None: the answer depends on none."""
    purpose: str = "question"
    """The kind of message that the ledger counts it as."""
    everyone: bool = False
    """Whether the answer needs every worker: a start does, a diagnosis does not."""
    informed: IntArray | None = None
    """Workers that need not be told the parameters: those of the last round that they answered."""
    statistics: FloatArray | None = None
    """S on a grid, where the parameters are T(S): that is shorter to tell."""


@dataclass(frozen=True)
class Lattice:
    """The integers that workers round to where only their sum is told.

    Worker i tells k_i = floor(w_i x_i / step + u_i) modulo 2^bits: then step (sum k_i - sum (u_i -
    1/2)) is the weighted sum, and the dither is taken off it. Nobody's k_i is clipped. The sum
    alone must have room, and a sum that had none is noticed (`wrap_check`).
    """

    step: float
    bits: int
    rate: float
    """alpha, of all workers."""

    @classmethod
    def fine(cls, rate: float) -> Lattice:
        """One that hardly rounds: of statistics in a model's metric, which are of the size of 1."""
        return cls(2.0**-32, 56, rate)


ENERGY_UNIT = 1 / 16
"""A share of q step^2: in this unit a worker tells how long its innovation was, with its upload."""

RequestKind = Literal["start", "round", "local", "fine"]


@dataclass(frozen=True)
class Request:
    """One round's message from the server to a batch of workers.

    ``params`` is always T(statistics): a wire may send either (the paper's server sends both, to
    all workers: Algorithm 1, line 17). ``accepted[r]`` is the last round
    of ``workers[r]`` that the server accepted (-1: none in this generation of memories). A round is
    ``"local"`` where workers may go on by themselves before they answer, and ``"fine"`` where they
    answer with little noise.
    """

    round: int
    generation: int
    kind: RequestKind
    statistics: FloatArray
    params: Any
    workers: IntArray
    accepted: IntArray
    count_bytes: bool = True
    """Whether a simulation measures what it would send."""
    purpose: str = "round"
    """The kind of message that the ledger counts it as."""
    phase: int = 0
    """Which phase of the run it belongs to: each has a model and an algorithm of its own."""
    lattice: Lattice | None = None
    """Where only sums are told: what workers round to."""
    weights: FloatArray | None = None
    """w_i of these workers, with a lattice."""
    encode: bool = False
    """Whether a batch of one makes its upload into bytes (the column ``payload`` of its rows)."""

    def take(self, index: Any) -> Request:
        """The same message to fewer workers."""
        weights = None if self.weights is None else self.weights[index]
        workers, accepted = self.workers[index], self.accepted[index]
        return dataclasses.replace(self, workers=workers, accepted=accepted, weights=weights)


@dataclass(frozen=True, eq=False)
class WorkerCells:
    """The cells of a large table that one worker observed, and what it tells of them."""

    keys: IntArray
    """Positions in the table, row by row, increasing."""
    weights: FloatArray
    """How often each was observed, or the exposure."""
    sums: FloatArray
    """Sums of the values."""


@dataclass(frozen=True)
class Replies:
    """Uploads of a batch of workers, decoded: row r is what ``workers[r]`` sent in ``rounds[r]``.

    ``lost_memory`` names workers whose memory does not match what the server accepted from them
    (a lost disk); they upload nothing.
    """

    workers: IntArray
    rounds: IntArray
    values: FloatArray
    rates: FloatArray
    evaluations: IntArray
    bytes_up: IntArray
    """The payload of each reply."""
    lost_memory: IntArray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    energies: FloatArray | None = None
    """With a lattice: |w_i Delta_i|^2 of each in the metric, in `ENERGY_UNIT` q step^2."""
    overflow: float = 0.0
    """With a lattice that had no room for the sum: the sum of all energies. Then nobody is here."""

    _ROWS = ("workers", "rounds", "values", "rates", "evaluations", "bytes_up")

    def take(self, index: Any) -> Replies:
        """Index the rows."""
        energies = None if self.energies is None else self.energies[index]
        rows = {name: getattr(self, name)[index] for name in self._ROWS}
        return dataclasses.replace(self, **rows, energies=energies)

    @classmethod
    def join(cls, batches: Sequence[Replies], q: int) -> Replies:
        """All rows of several batches, in order."""
        told = [batch.energies for batch in batches if batch.energies is not None]
        batches = [cls.empty(q), *batches]
        rows = {n: np.concatenate([getattr(b, n) for b in batches]) for n in cls._ROWS}
        return cls(
            **rows,
            lost_memory=np.concatenate([b.lost_memory for b in batches]),
            energies=np.concatenate(told) if told else None,
            overflow=max(batch.overflow for batch in batches),
        )

    @classmethod
    def empty(cls, q: int) -> Replies:
        """No replies."""
        none = np.empty(0, dtype=np.int64)
        return cls(none, none, np.empty((0, q)), np.empty(0), none, none)


@dataclass(frozen=True)
class Heard:
    """What the server has when a round ends: request, replies, w_i and p_i of those who came.

    Each worker is in ``replies`` at most once, and they are sorted.
    """

    request: Request
    replies: Replies
    weights: FloatArray
    probabilities: FloatArray


@dataclass(frozen=True)
class Opening:
    """The opening exchange: every worker's count and summary."""

    counts: IntArray
    summaries: dict[str, FloatArray]
    columns: tuple[str, ...] | None = None
    """Names of the data's columns, where it has any."""
    names: Sequence[str] | None = None
    """Names of the workers, where they have any."""
    totals: FloatArray | None = None
    """What each worker counts for, where rows have weights; else its count."""
    effective: float | None = None
    """With masks, where counts and summaries are everybody's alone: `Crowd.effective`."""
    sizes: IntArray | None = None
    """Bytes of each summary; None: of 64-bit floats."""
    whole: Mapping[str, FloatArray] | None = None
    """With masks: the summary of all rows."""


@dataclass(frozen=True)
class ServerState:
    """What the server must remember between rounds; the next round is ``round``."""

    round: int
    generation: int
    statistics: FloatArray
    memory: FloatArray
    extras: Mapping[str, FloatArray] = field(default_factory=dict)
    """What the algorithm adds."""


@dataclass(frozen=True)
class StepInfo:
    """What a server step saw: for the record, not for the next step."""

    squared_mean_field: float
    step_size: float
    guard_hits: int
    broadcast_bytes: int = 0
    """Payload of the quantised step to the new statistics, where workers are sent steps."""
    broadcast: bytes = b""
    """That step itself, where messages are made into bytes; empty if there was no movement."""
    gain: float | None = None
    """What an EM step from here is worth: nats per sample, to second order."""
    objective: float | None = None
    """The objective at the parameters reached, where the step works them out."""


@dataclass(frozen=True)
class StateField:
    """One field of a worker's state: its shape, dtype and starting value."""

    shape: tuple[int, ...]
    dtype: Any
    fill: float = 0
