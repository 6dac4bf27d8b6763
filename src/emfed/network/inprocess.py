"""Federations in this process: the store of worker rows, and workers driven alone or together."""

from __future__ import annotations

import hashlib
import json
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from math import prod
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from emfed.algorithms.steps import settled
from emfed.core.errors import SettingsError
from emfed.core.noise import NoiseKey
from emfed.core.privacy import discrete_gaussian
from emfed.core.protocols import (
    Algorithm,
    Federation,
    FloatArray,
    IntArray,
    Latent,
    Model,
    Names,
    Opening,
    Oracle,
    Phase,
    Question,
    Replies,
    Request,
    SimulatesLatents,
    StateField,
    Task,
    WorkerStates,
)
from emfed.core.wording import Setting, Wording
from emfed.data.held import HeldWorkers
from emfed.data.summing import check_rows_held, plain_rows
from emfed.data.tables import Piece, Workers, apart
from emfed.data.workers import as_workers, with_columns
from emfed.models.binding import Bound, of_columns, rounded_opening
from emfed.models.bounded import Asked, to_integers, whole_sums
from emfed.models.clusters import Buckets
from emfed.models.side_by_side import SideBySide
from emfed.network.masking import SMALLEST_SET
from emfed.network.own_clusters import clusters_of, clusters_width
from emfed.network.scoring import scores_of, scores_width
from emfed.network.validation import VALIDATION, LeftOut, validation_of

ACTIVE_ELEMENTS = 1 << 20
"""Statistics and picked rows of the workers driven at once: what stays in the cache is quick."""


@final
class StateStore:
    """Columns of state for every worker that has been active.

    A worker gets its place when its rows are first written, so a million registered workers cost
    what the active ones use, and rows written together lie together.
    """

    def __init__(self, columns: dict[str, StateField], n: int) -> None:
        self._columns = columns
        self._places: IntArray = np.full(n, -1, dtype=np.int64)
        self._owners: IntArray = np.empty(0, dtype=np.int64)
        self._room = 0
        self._arrays: WorkerStates = {
            name: self._fresh(column, 0) for name, column in columns.items()
        }
        self._complete = False
        """Whether row i of the arrays is worker i."""

    @staticmethod
    def _fresh(column: StateField, count: int) -> NDArray[Any]:
        shape = (count, *column.shape)
        if column.fill == 0:
            return np.zeros(shape, dtype=column.dtype)
        return np.full(shape, column.fill, dtype=column.dtype)

    def take(self, workers: IntArray) -> WorkerStates:
        """Rows of these workers (sorted, each once); treat them as read-only."""
        if self._complete and len(workers) == len(self._places):
            return dict(self._arrays)
        places = self._places[workers]
        known = places >= 0
        if known.all():
            return {name: array[places] for name, array in self._arrays.items()}
        out = {name: self._fresh(column, len(workers)) for name, column in self._columns.items()}
        for name, array in self._arrays.items():
            out[name][known] = array[places[known]]
        return out

    def put(self, workers: IntArray, rows: WorkerStates) -> None:
        """Write rows back."""
        self._settle(workers)
        whole = self._complete and len(workers) == len(self._places)
        index = slice(None) if whole else self._places[workers]
        for name, array in self._arrays.items():
            if rows[name] is not array:
                array[index] = rows[name]

    def _settle(self, workers: IntArray) -> None:
        """Give those who have none a place."""
        new = workers[self._places[workers] < 0]
        if len(new) == 0:
            return
        used, n = len(self._owners), len(self._places)
        needed = used + len(new)
        if needed > self._room:
            self._room = min(max(needed, 2 * used), n)
            for name, column in self._columns.items():
                grown = self._fresh(column, self._room)
                grown[:used] = self._arrays[name][:used]
                self._arrays[name] = grown
        self._places[new] = np.arange(used, needed)
        self._owners = np.concatenate([self._owners, new])
        self._complete = needed == n and bool(np.all(self._owners[1:] > self._owners[:-1]))

    def export(self) -> tuple[IntArray, WorkerStates]:
        """All rows ever written, with their workers."""
        workers = np.sort(self._owners)
        return workers, {name: array[self._places[workers]] for name, array in self._arrays.items()}


@final
class WorkerRows(Oracle):
    """Rows of a batch of workers; ``streams`` are their numbers where random numbers are drawn."""

    def __init__(
        self,
        model: Model,
        data: Workers,
        workers: IntArray,
        pieces: Any,
        streams: IntArray,
        lasting: bool = True,
    ) -> None:
        self._model, self._data, self._workers, self._pieces = model, data, workers, pieces
        self._streams, self.lasting = streams, lasting
        self.counts = data.counts_of(workers)

    def full(
        self, params: Any, subset: IntArray, latent: Latent | None = None, each: bool = False
    ) -> FloatArray:
        """s-bar_i(theta), piece by piece."""
        workers = self._workers[subset]
        out = np.zeros((len(workers), self._model.layout.size))
        sweeps = latent is None and self._model.sweeps
        for piece in _whole(self._pieces(self._data, workers), sweeps):
            if latent is None:
                theta = params.take(piece.positions) if each else params
                values = self._model.expected_statistics(piece.rows, theta, piece.padding)
            else:
                streams = self._streams[subset][piece.positions]
                values = self._simulate(params, piece, streams, latent)
            out[piece.positions] += piece.share * values
        return out

    def _simulate(self, params: Any, piece: Piece, workers: IntArray, latent: Latent) -> FloatArray:
        """The E-step by simulation, a block of rows at a time: uniforms are never all there."""
        model, m = self._model, piece.rows.shape[1]
        assert isinstance(model, SimulatesLatents)  # or there would be no uniforms
        block = max(1, SIMULATED_ROWS // len(workers))
        total: Any = 0.0
        for start in range(0, m, block):
            part = slice(start, min(start + block, m))
            rows = piece.rows[:, part, ...]
            u = latent(workers, piece.first + start, rows.shape[1])
            if piece.padding is None:
                share: Any = rows.shape[1] / m
                values = model.simulated_statistics(rows, params, u)
            else:  # of workers without rows in this block nothing counts
                padding = piece.padding[:, part]
                share = (padding.sum(axis=1) / piece.padding.sum(axis=1))[:, None]
                padding = np.where(share > 0, padding, 1.0)
                values = model.simulated_statistics(rows, params, u, padding)
            total = total + share * values
        return np.asarray(total)

    def take(self, indices: IntArray, subset: IntArray) -> Any:
        """Picked rows."""
        return self._data.take(self._workers[subset], indices)


def narrow(rows: WorkerStates, columns: Mapping[str, StateField], places: IntArray) -> WorkerStates:
    """A state of workers with these of the statistics alone, in every column that has them all."""
    vectors = {name for name, column in columns.items() if column.shape}
    return {n: a[:, places] if n in vectors else a for n, a in rows.items()}


def answer(
    question: Question, model: Model, pieces: Iterable[Piece], weights: FloatArray
) -> FloatArray:
    """The weighted sum of what workers' rows, piece by piece, say to a question."""
    total = np.zeros(())
    for piece in pieces:
        values = _said(question, model, piece.rows, piece.padding)
        total = total + piece.share * (weights[piece.positions] @ values)
    return total


def answer_width(question: Question, model: Model) -> int:
    """How many numbers an answer has."""
    if question.kind == "statistics":
        return model.layout.size
    if question.kind == "scores":
        return scores_width(model)
    if question.kind == "validation":
        return VALIDATION
    if isinstance(model, Buckets):
        return clusters_width(model)
    return 2 * (len(model.models) if isinstance(model, SideBySide) else 1)


def _said(question: Question, model: Model, rows: Any, padding: Any | None) -> FloatArray:
    """What rows say, ``(workers, width)``."""
    if question.kind == "statistics":
        return model.expected_statistics(rows, question.params, padding)
    parts: Iterable[tuple[Model, Any]] = [(model, question.params)]
    if isinstance(model, SideBySide):
        parts = zip(model.models, question.params.parts, strict=True)
    told = [np.stack(part.evaluate(rows, own, padding)[1:], axis=-1) for part, own in parts]
    return np.concatenate(told, axis=-1)


def stand_in(model: Model, width: int) -> Opening:
    """The opening of made-up rows with so many columns: as any site's of a private run looks."""
    return StackedFederation(as_workers([np.eye(width + 1, width)])).open(model)


def check_suits(data: Workers, algorithm: Algorithm) -> None:
    """Refuse an algorithm that these data cannot serve."""
    if data.streaming and algorithm.revisits_rows:
        raise SettingsError(
            "a Stream gives each row once, and this algorithm needs rows again: use FedEM."
        )
    if data.row_weights is not None and algorithm.rows_at_once:
        raise SettingsError(
            Wording(
                "sample_weight goes with full passes: leave {} out, or the weights.",
                Setting("batch_size"),
            )
        )


def fresh_rows(model: Model, data: Workers, round_: int, places: IntArray) -> Workers:
    """The data of a round; what is fresh in it is looked at first."""
    fresh = data.fresh(round_, places)
    if fresh is not data:
        for worker in places.tolist():
            where = f"worker {data.name(worker)!r}, round {round_}"
            model.check(fresh.worker(worker), where, fresh.columns)
    return fresh


SIMULATED_ROWS = 1 << 14
"""Rows whose latent variables are drawn at once."""


def _whole(pieces: Iterable[Piece], sweeps: bool) -> Iterator[Piece]:
    """Pieces as they are, or those of ragged rows one worker at a time."""
    for piece in pieces:
        yield from [piece] if sweeps else apart(piece)


def _summaries(
    model: Model, pieces: Iterable[Piece]
) -> Iterator[tuple[IntArray, float, dict[str, FloatArray]]]:
    """Positions, share and summary of each piece."""
    for piece in pieces:
        yield piece.positions, piece.share, model.summary(piece.rows, piece.padding)


class InProcessFederation(Federation):
    """A federation whose workers' data and state are all in this process.

    Parameters
    ----------
    data : Workers
        The rows of all workers.
    first : int
        The number of the first worker: a shard of a larger federation keeps its workers' numbers,
        and with them their random numbers.

    Examples
    --------
    `LoopFederation` and `StackedFederation` are its two kinds:

    >>> from emfed.network import FEDERATIONS, InProcessFederation
    >>> all(issubclass(kind, InProcessFederation) for kind in FEDERATIONS.values())
    True
    """

    stacked = True
    """Whether workers of equal size are asked together; if not, one after the other."""

    def __init__(self, data: Workers, first: int = 0) -> None:
        self.data, self.first = data, first
        self._bound: Any = None
        self._model: Any = None
        self._algorithm: Any = None
        self._store = StateStore({}, 0)
        self._begun: Phase | None = None
        self._noise: NoiseKey | None = None
        """The key of the private fit that was opened last."""

    @abstractmethod
    def batches(self, workers: IntArray) -> Iterator[IntArray]:
        """Positions of the workers that are driven together."""

    @abstractmethod
    def pieces(self, data: Workers, workers: IntArray) -> Iterator[Piece]:
        """All rows of these workers, as many at a time as the federation likes."""

    @property
    @final
    def size(self) -> int:
        """The number of workers."""
        return self.data.size

    @property
    @final
    def workers(self) -> HeldWorkers:
        """The workers, as a fit on sums asks them."""
        return HeldWorkers(self.data, stacked=self.stacked, first=self.first)

    @property
    @final
    def columns(self) -> tuple[str, ...] | None:
        """Names of the columns, where the data have any."""
        return self.data.columns

    @property
    @final
    def everyone(self) -> IntArray:
        """All workers, by their places in the data."""
        return np.arange(self.size, dtype=np.int64)

    @final
    def open(self, model: Model, columns: Names = None, rounded: bool = False) -> Opening:
        """Check the data and gather the summaries."""
        self._begun = None
        if columns is not None:
            self.data = with_columns(self.data, tuple(columns))
        data = self.data
        model = of_columns(model, data.columns)
        if data.streaming and model.fixed_data:
            raise SettingsError(
                "this model needs a constant of the data that a stream does not have: use "
                "gaussian_mixture(..., 'tied', second_moment='statistic')."
            )
        check_rows_held(model, data)
        gathered: dict[str, FloatArray] = {}
        found = _whole(self.pieces(data, self.everyone), False)
        for _, group in groupby(found, key=lambda piece: int(piece.positions[0])):
            parts = list(_summaries(model, group))
            positions, _, summary = parts[0]
            if len(parts) > 1:
                shares = np.array([share for _, share, _ in parts])
                whole = {
                    name: np.concatenate([part[name] for *_, part in parts]) for name in summary
                }
                summary = {name: v[None] for name, v in model.combine(whole, shares).items()}
            for name, values in summary.items():
                if name not in gathered:
                    gathered[name] = np.empty((self.size, *values.shape[1:]))
                gathered[name][positions] = values
        totals = None if data.row_weights is None else data.totals
        counts, names = data.positive_counts, data.names
        opening = Opening(counts, gathered, data.columns, names, totals)
        return rounded_opening(opening, model) if rounded else opening

    @final
    def open_private(
        self,
        model: Model,
        columns: Names,
        privacy: Any,
        masks: bool | None = None,
        noise_seed: int | None = None,
    ) -> tuple[int, tuple[str, ...] | None, Sequence[str] | None]:
        self._noise = NoiseKey(noise_seed)
        self.masks = self.size >= SMALLEST_SET and masks is not False
        if columns is not None:
            self.data = with_columns(self.data, tuple(columns))
        check_rows_held(model, self.data)
        return self.data.worker(0).shape[1], self.data.columns, self.data.names

    @property
    def noise_seed(self) -> int | None:
        return None if self._noise is None else self._noise.seed

    @final
    def release(self, asked: Asked, purpose: str, number: int) -> IntArray:
        """The sum of everyone's answer with noise.

        A worker's noise follows from the key of this fit, the question with its lattice, its number
        and the exact answer. The lattice must be among them: with the same noise at two scales, two
        answers would be two equations for two unknowns.
        """
        assert self._noise is not None  # `open_private` drew it
        about, numbers = asked.describe()
        question = json.dumps([about, number], sort_keys=True).encode() + numbers.tobytes()
        total = np.zeros(asked.size, dtype=np.int64)
        for worker in range(self.size):
            exact = to_integers(asked, whole_sums(asked, plain_rows(self.data, worker)))
            own = (self.first + worker).to_bytes(8, "little") + exact.astype("<i8").tobytes()
            words = self._noise.words(hashlib.sha256(question).digest() + own)
            total += exact + discrete_gaussian(asked.size, words)
        return total

    def oracle(self, request: Request) -> Oracle:
        """The data of the asked workers."""
        places = request.workers - self.first
        data = fresh_rows(self._model, self.data, request.round, places)
        lasting = not self.data.streaming
        rows = WorkerRows(self._model, data, places, self.pieces, request.workers, lasting)
        folds = self._begun is not None and self._begun.view.folds
        return LeftOut(rows, self._model, request) if folds else rows

    def _where(self, place: int) -> str:
        return f"worker {self.data.name(place)!r}"

    @final
    def bind(self, bound: Bound) -> None:
        """Keep what binds the model."""
        self._bound = bound

    @final
    def begin(self, phase: Phase) -> None:
        """Fresh state for everyone, or what belongs to the parts that are left."""
        check_suits(self.data, phase.algorithm)
        model = self._bound.view(phase.view)
        before, columns = self._begun, phase.algorithm.state_fields(model.layout.size)
        store = StateStore(columns, self.size)
        if before is not None and 0 < phase.since <= before.number:
            workers, rows = self._store.export()
            columns = self._algorithm.state_fields(self._model.layout.size)
            store.put(workers, narrow(rows, columns, self._bound.kept(before.view, phase.view)))
        self._begun, self._store = phase, store
        self._model, self._algorithm, self._seed = model, phase.algorithm, phase.seed

    @final
    def exchange(self, request: Request) -> Replies:
        """Drive the asked workers and write their rows back."""
        out = []
        for positions in self.batches(request.workers):
            part = request if len(positions) == len(request.workers) else request.take(positions)
            places = part.workers - self.first
            if part.lattice is not None:
                part = replace(part, statistics=settled(part.statistics))
            rows = self._store.take(places)
            try:
                task = Task(self._model, self._seed, rows, part, self.oracle(part))
                rows, replies = self._algorithm.worker_step(task)
            except Exception as error:
                if len(positions) == 1:
                    error.add_note(f"while driving {self._where(int(places[0]))}")
                raise
            self._store.put(places, rows)
            out.append(replies)
        return out[0] if len(out) == 1 else Replies.join(out, len(request.statistics))

    @final
    def ask(self, question: Question, weights: FloatArray) -> FloatArray:
        """The weighted sum of what every worker's rows say."""
        model = self._bound.view(question.view)
        pieces = _whole(self.pieces(self.data, self.everyone), model.sweeps)
        return answer(question, model, pieces, weights)

    @final
    def scores(self, question: Question) -> FloatArray:
        """How well the model fits each worker's rows, or others; or its own clusters."""
        model, numbers = self._bound.view(question.view), self.everyone + self.first
        if isinstance(model, Buckets):
            return clusters_of(model, self.data, numbers, question.view.smallest)
        if question.kind == "validation":
            total = float(self._bound.constants[0])
            return validation_of(model, question.params, self.data, numbers, total)
        pieces = _whole(self.pieces(self.data, self.everyone), False)
        return scores_of(model, question.params, pieces, self.size)

    @final
    def worker_states(self) -> tuple[IntArray, WorkerStates]:
        """State of every worker that has been active."""
        places, rows = self._store.export()
        return places + self.first, rows

    @final
    def restore_states(self, workers: IntArray, rows: WorkerStates) -> None:
        """Put back what `worker_states` gave."""
        self._store.put(workers - self.first, rows)


@final
class LoopFederation(InProcessFederation):
    """A federation that drives one worker after the other, as a network would run them.

    It is slow and simple, and names the worker that fails: the readable twin of
    `StackedFederation`.

    Parameters
    ----------
    data : Workers
        The rows of all workers.
    first : int
        The number of the first worker: a shard of a larger federation keeps its workers' numbers,
        and with them their random numbers.

    Examples
    --------
    >>> import emfed
    >>> data = emfed.data.synthetic_federation(workers=4, rows_per_worker=50)
    >>> model = emfed.gaussian_mixture(2, "tied")
    >>> emfed.fit(model, emfed.network.LoopFederation(data), "em", rounds=2).rounds
    2
    """

    stacked = False

    def batches(self, workers: IntArray) -> Iterator[IntArray]:
        """One at a time."""
        for position in range(len(workers)):
            yield np.array([position])

    def pieces(self, data: Workers, workers: IntArray) -> Iterator[Piece]:
        """One at a time."""
        return data.pieces(workers)


@final
class StackedFederation(InProcessFederation):
    """A federation that drives many workers at once, whatever their numbers of rows.

    Parameters
    ----------
    data : Workers
        The rows of all workers.
    first : int
        The number of the first worker: a shard of a larger federation keeps its workers' numbers,
        and with them their random numbers.

    Examples
    --------
    >>> import emfed
    >>> data = emfed.data.synthetic_federation(workers=4, rows_per_worker=50)
    >>> model = emfed.gaussian_mixture(2, "tied")
    >>> emfed.fit(model, emfed.network.StackedFederation(data), "em", rounds=2).rounds
    2
    """

    def batches(self, workers: IntArray) -> Iterator[IntArray]:
        """All at once, up to a bound on memory."""
        if len(workers) == 0:
            return
        row = prod(self.data.worker(int(workers[0]) - self.first).shape[1:])
        each = self._model.layout.size + self._algorithm.rows_at_once * row
        size = max(1, ACTIVE_ELEMENTS // max(1, each))
        for start in range(0, len(workers), size):
            yield np.arange(start, min(start + size, len(workers)))

    def pieces(self, data: Workers, workers: IntArray) -> Iterator[Piece]:
        """Grouped by size."""
        return data.stacks(workers)


FEDERATIONS: dict[str, type[InProcessFederation]] = {
    "loop": LoopFederation,
    "stacked": StackedFederation,
}
"""In-process federations by name."""
