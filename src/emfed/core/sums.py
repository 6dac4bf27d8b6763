"""The contract between a fit and its workers: a fit asks for sums (docs/decisions/001).

A fit is a generator without I/O. It yields an `Ask` and is sent the `Sum` over all workers; its
return value is what the fit came to. Whoever drives it decides how the sum comes about: a loop in
one process, stacked arrays, Ray's actors, or sites that each follow the same fit and add their
parts through a relay. The fit cannot tell the difference.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from emfed.core.errors import SettingsError
from emfed.core.objects import BoolArray as BoolArray
from emfed.core.objects import FloatArray as FloatArray
from emfed.core.objects import IntArray as IntArray
from emfed.core.wire.payload import decode_floats, encode_floats

T = TypeVar("T")

Mean = Callable[[Any, Any], FloatArray]
"""From a block of rows ``(workers, rows, ...)`` and its weights ``(workers, rows)``, or None where
all are 1, to the weighted mean over the rows of each worker, ``(workers, numbers)``."""


Stated = bytes | NDArray[Any]
AGREED_BITS = 18
"""Numbers agree where they differ by 2^-18 of the largest one beside them. Roundings of linear
algebra, which differ between processors, are about 2^-45; another choice is far more
(`python -m benchmarks processors`)."""
ONCE_BITS = 10
"""The same where numbers are compared once, so that a cut between two of them must be very rare:
where nothing is masked, and with what a checkpoint holds."""


def agreed_digest(place: bytes, *told: Stated, bits: int = AGREED_BITS) -> bytes:
    """16 bytes of what members tell, equal where bytes and whole numbers are, and doubles agree.

    Doubles are cut to multiples of 2^-``bits`` of the largest of all. ``place`` says where
    the cuts lie: two numbers that agree and have a cut between them at one place, which is rare,
    have none at nearly all others.
    """
    found = hashlib.blake2b(digest_size=16)
    where = hashlib.blake2b(place, digest_size=8).digest()
    cut = int.from_bytes(where, "little") / 2.0**64
    doubles = [one for one in told if isinstance(one, np.ndarray) and one.dtype.kind == "f"]
    most = max(
        (float(np.abs(one[np.isfinite(one)]).max(initial=0.0)) for one in doubles), default=0
    )
    unit = np.ldexp(1.0, round(float(np.log2(most))) - bits) if most > 0 else 1.0
    for one in told:
        data = one
        if isinstance(data, np.ndarray) and data.dtype.kind == "f":
            finite = np.isfinite(data)
            cuts = np.floor(np.where(finite, data, 0.0) / unit + cut).astype(np.int64)
            data = np.where(finite, cuts, np.iinfo(np.int64).max)
        if isinstance(data, np.ndarray):
            data = np.ascontiguousarray(data).tobytes()
        found.update(len(data).to_bytes(8, "little") + data)
    return found.digest()


class Pick(Protocol):
    """Which rows of a worker are meant, by their numbers there: every worker knows by itself.

    It is hashable, and equal picks pick the same.
    """

    def __call__(self, count: int) -> BoolArray:
        """Which of so many rows."""

    def __hash__(self) -> int: ...


class Rows(Protocol):
    """The rows that one driver holds: of one site, or of all workers in one process."""

    @property
    def total(self) -> float:
        """The sum of the rows' weights, which is their number where they have none."""

    @property
    def count(self) -> int:
        """How many rows have a weight."""

    @property
    def squares(self) -> float:
        """The sum over rows of how often they stand for themselves, times that squared which a
        worker counts more for than they do. The square of ``total`` over it is how many rows of
        equal weight the rows are worth."""

    def sum(self, mean: Mean, ragged: bool = False) -> FloatArray:
        """The weighted sum over all rows of a function that gives means over blocks of rows.

        ``ragged`` says that the function takes the rows of many workers on a device at once.
        """


@runtime_checkable
class HoldsTables(Protocol):
    """Rows that are known worker by worker to whoever holds them."""

    def tables(self) -> Iterator[tuple[int, FloatArray]]:
        """The number of rows of each worker, and some of them."""


@runtime_checkable
class PicksRows(Rows, Protocol):
    """Rows of which an ask may be about some."""

    def picked(self, pick: Pick) -> Rows:
        """Some of these rows."""


def picked(rows: Rows, pick: Pick) -> Rows:
    """Some of these rows."""
    if not isinstance(rows, PicksRows):
        raise SettingsError("these rows cannot be asked for in parts: leave validate out.")
    return rows.picked(pick)


@dataclass(frozen=True)
class Precision:
    """How fine a sum must be, and where it is expected: one number each, or one a coordinate.

    Parameters
    ----------
    step : array
        The unit that the sum is rounded to, a power of two.
    centre : array
        The value that the fit expects.
    reach : array
        How far from it the sum may be. A sum beyond is noticed and asked for again with more
        bits, so this is a matter of bytes and never of the answer.
    down : float
        How much noise the sum may get on its way down to the workers, squared and as a share of
        its squared distance from the centre. Sums that are masked are told as they are.
    """

    step: FloatArray
    centre: FloatArray
    reach: FloatArray
    down: float = 0.0

    @property
    def bits(self) -> NDArray[np.int64]:
        """The bits that each number takes where only the sum must have room."""
        room = 2 * np.asarray(self.reach) / np.asarray(self.step) + 2
        return np.ceil(np.log2(room)).astype(np.int64)


class Ask(ABC):
    """What every worker computes from its rows at the state that the fit has reached.

    `part` is a sum over rows of a function of the row and of that state, and depends on nothing
    else: that is what makes masked sums tell the sum alone.
    """

    purpose: str
    """The kind of message in the ledger: opening, start, round or closing."""
    precision: Precision | None
    """How fine the sum must be; None: exact to 64-bit floats, as in the opening."""
    counted: ClassVar[bool] = True
    """Whether a fit's first sum tells the weight of all rows, too."""
    noise: ClassVar[float] = 0.0
    """The variance of the noise that each worker adds to each number, in steps squared."""

    @property
    @abstractmethod
    def size(self) -> int:
        """How many numbers the sum has."""

    @abstractmethod
    def part(self, rows: Rows) -> FloatArray:
        """The sum over these rows, ``(size,)``."""

    def loss(self, exact: FloatArray, rounded: FloatArray, parts: int) -> float:
        """Nats a row that rounding costs where the precision is None and nothing is masked.

        ``exact`` is the sum, or one of so many ``parts`` of it whose errors average out. Infinite:
        28 bits of every number are kept.
        """
        return float("inf")

    @property
    def heads(self) -> IntArray | None:
        """Numbers that give all others their `units` where rounding has a price; None: all."""
        return None

    def units(self, heads: FloatArray) -> FloatArray:
        """How large the other numbers may be, given those."""
        return np.ones(self.size - len(heads))

    @abstractmethod
    def words(self) -> str:
        """What is asked, for the owner's journal."""

    @abstractmethod
    def about(self) -> tuple[Stated, ...]:
        """What all members must agree on before they add: the state that the ask is about."""

    def digest(self, place: bytes = b"", bits: int = AGREED_BITS) -> bytes:
        """16 bytes of it, which members compare at a place of the fit; see `agreed_digest`."""
        return agreed_digest(place, *self.about(), bits=bits)


@dataclass(frozen=True, eq=False)
class Sum:
    """What a fit is sent: the sum over all workers that took part.

    Parameters
    ----------
    value : array of shape (size,)
        The sum.
    rows : float
        The sum of the weights of all rows in it.
    noise : float
        The variance that rounding and privacy noise added to each number, in units of its step
        squared.
    missing : int
        Workers that are part of the fit and not of this sum.
    bytes : int
        What the exchange took, up and down, over all workers.
    up : int or None
        The part of it that went up; None: half.
    """

    value: FloatArray
    rows: float
    noise: float = 0.0
    missing: int = 0
    bytes: int = 0
    up: int | None = None


Fit = Generator[Ask, Sum, T]
"""A fit in progress."""


@dataclass(frozen=True)
class LastSum:
    """What the last exchange said to the fit that asks: for records, and for who looks on.

    Parameters
    ----------
    hits : int
        How often the step was halved to stay where the model is defined.
    left : float
        Nats a row that may be left to gain.
    squared : float or None
        |H|^2, where workers are heard one by one.
    step_size : float
        The step that was taken.
    gain : float or None
        What an EM step is worth in nats a row, where such rounds tell it.
    generation : int
        The generation of memories.
    """

    hits: int
    left: float
    squared: float | None = None
    step_size: float = 1.0
    gain: float | None = None
    generation: int = 0


class RowsOfWorkers(Protocol):
    """Rows that are known worker by worker, for what is not masked.

    Workers have numbers from 0; ``workers`` is an increasing array of them.
    """

    @property
    def totals(self) -> FloatArray:
        """The sum of the rows' weights of every worker."""

    @property
    def counts(self) -> IntArray:
        """The number of rows of every worker."""

    def one(self, worker: int) -> Rows:
        """The rows of one worker."""

    def which(self, worker: int, most: int) -> IntArray:
        """Numbers of so many rows of a worker at most, evenly spread over those with a weight."""

    def some(self, worker: int, most: int) -> tuple[Any, FloatArray]:
        """So many rows of a worker at most, evenly spread over those with a weight, and weights."""

    def means(
        self, mean: Callable[[Any, Any, IntArray, int], FloatArray], workers: IntArray
    ) -> Any:
        """Weighted means over the rows of these workers, ``(workers, numbers)``.

        ``mean`` takes a block ``(some, rows, ...)``, its weights, which of ``workers`` these are,
        and how many of their rows come before the block.
        """

    def take(self, workers: IntArray, indices: IntArray) -> Any:
        """Rows ``(workers, b, ...)`` at each worker's own ``indices`` ``(workers, b)``."""

    def fresh(self, model: Any, round_: int, workers: IntArray) -> RowsOfWorkers:
        """The rows of a round, checked by the model: others each time where they are a stream."""


States = dict[str, NDArray[Any]]
"""What workers keep between exchanges: one row of each column for each worker."""


@runtime_checkable
class OfWorkers(Protocol):
    """An ask whose parts are of workers and not of rows: they are never masked.

    What a worker sends is told apart from what it sent before (its memory), so it must say how.
    """

    @property
    def memory(self) -> Hashable:
        """Which memory this is about: asks of one ascent have one, and no two ascents the same."""

    def fields(self) -> dict[str, Any]:
        """What a worker keeps: a number or an array that each column begins with."""

    def parts(self, rows: RowsOfWorkers, workers: IntArray, states: States) -> FloatArray:
        """The parts of these workers, ``(workers, size)``; their states are changed in place."""

    def origin(self, totals: FloatArray) -> FloatArray:
        """The memories of workers of these weights that foretell a part of zero."""

    def foretold(self, memories: FloatArray, totals: FloatArray) -> FloatArray:
        """What parts would be if nothing had changed since workers were remembered."""

    def kept(self, parts: FloatArray) -> FloatArray:
        """What memories change by where parts change by this."""


@runtime_checkable
class Several(Protocol):
    """Several asks in one exchange."""

    @property
    def asks(self) -> Sequence[Ask]:
        """The asks, in the order of their numbers."""


class Gather(ABC):
    """What workers are asked one by one, without masks: replies that do not add up.

    Operators of the paper that depend on a worker's own norm, mini-batches, partial participation
    and scores of single workers are of this kind. One member, the adder, reads the replies. All go
    on from what it makes of them (`concluded`), which is what the fit is sent.
    """

    purpose: str
    """The kind of message in the ledger."""
    workers: IntArray
    """Who is asked, increasing."""
    last: LastSum | None = None
    """What the last exchange said."""
    memory: Hashable = None
    """Which states of the workers this is about: gathers of one ascent have one."""

    def words(self) -> str:
        """What is asked, for the owner's journal."""
        return f"what {type(self).__name__.lower()} tell of this site's rows"

    def digest(self, place: bytes = b"", bits: int = AGREED_BITS) -> bytes:
        """What all members must agree on before they answer; see `agreed_digest`."""
        arrays = self.state.arrays().values() if isinstance(self, Resumable) else ()
        told = (type(self).__name__.encode(), self.workers, *arrays)
        return agreed_digest(place, *told, bits=bits)

    @abstractmethod
    def fields(self) -> dict[str, Any]:
        """What a worker keeps: a number or an array that each column begins with."""

    @abstractmethod
    def answer(self, rows: RowsOfWorkers, workers: IntArray, states: States) -> Answers:
        """What some of these workers reply; their states are changed in place."""

    def encoded(
        self, rows: RowsOfWorkers, workers: IntArray, states: States
    ) -> tuple[Answers, list[bytes]]:
        """The same, with the message of each; ``sizes`` are the lengths of these."""
        found = self.answer(rows, workers, states)
        return found, [encode_floats(values) for values in found.values]

    def decoded(self, worker: int, data: bytes) -> tuple[FloatArray, float]:
        """The values of a message, and the rate at which the worker's memory moves."""
        return decode_floats(data), 1.0

    def concluded(
        self, answers: Answers, memory: FloatArray | None
    ) -> tuple[Any, bytes, FloatArray]:
        """What the fit is sent, the message that tells it, and what the adder keeps.

        ``memory`` is what it kept of the gather before, zeros in the first one; None: that is lost.
        """
        return answers.values, encode_floats(answers.values), np.zeros(0)

    def told(self, data: bytes, workers: IntArray) -> Any:
        """What the fit is sent, from the message and from who replied; others may be lost."""
        return np.reshape(decode_floats(data), (len(workers), -1 if len(workers) else 0))


@runtime_checkable
class Resumable(Protocol):
    """A gather whose fit is sent states of one type: a checkpoint has the last of them."""

    memory: Hashable

    @property
    def state(self) -> Any:
        """What the fit knows at this ask; it has `arrays`, and its type makes it `of` these."""


@dataclass(frozen=True, eq=False)
class Answers:
    """What single workers sent: arrays with one row for each that replied.

    Parameters
    ----------
    workers : array of int
        Who replied, increasing.
    values : array of shape (workers, numbers)
        What the receiver decoded.
    rates : array
        The rate at which the worker's memory moves by what it sent.
    sizes : array of int
        The length of each message.
    lost : array of int
        Workers that cannot go on, because their memory is not what was counted.
    totals : array
        The sum of the rows' weights of each worker that replied.
    passes : array of int
        How often each evaluated a row.
    """

    workers: IntArray
    values: FloatArray
    rates: FloatArray
    sizes: IntArray
    lost: IntArray
    totals: FloatArray
    passes: IntArray

    def of(self, workers: IntArray) -> Answers:
        """Those of some workers."""
        at = np.isin(self.workers, workers)
        if at.all() and not len(self.lost):
            return self
        return Answers(
            self.workers[at],
            self.values[at],
            self.rates[at],
            self.sizes[at],
            np.intersect1d(self.lost, workers),
            self.totals[at],
            self.passes[at],
        )


class SummedWorkers(Protocol):
    """Workers of whom sums are asked."""

    @property
    def totals(self) -> FloatArray:
        """What each worker counts for, in rows."""

    def sum(self, ask: Ask) -> FloatArray:
        """The exact sum of all parts."""


class AskedWorkers(Protocol):
    """All workers of one driver, and what they answer: their rows are here or in other processes.

    Workers have numbers from 0, and ``workers`` is an increasing array of them.
    """

    names: Sequence[str] | None
    """What the workers are called, where they have names."""
    columns: tuple[str, ...] | None
    """What the columns are called, where they have names."""
    totals: FloatArray
    """What each worker counts for, in rows."""
    counts: IntArray
    """How many rows of each worker have a weight."""
    streaming: bool
    """Whether some worker gives fresh rows each round."""

    def view(
        self, columns: tuple[str, ...] | None, counts_for: FloatArray | None = None
    ) -> AskedWorkers:
        """The same workers with these columns alone, who count for this; None: as they are."""

    def everywhere(self, function: Callable[[Any], T]) -> list[T]:
        """What a function of a `Workers` gives, in each process that has some of the workers."""

    def sum(self, ask: Ask) -> FloatArray:
        """The exact sum of all parts."""

    def each(self, ask: Ask, workers: IntArray) -> FloatArray:
        """The parts of these workers, ``(workers, size)``."""

    def parts(self, ask: OfWorkers, workers: IntArray, states: States) -> FloatArray:
        """The parts of these workers, where they keep states; these are changed in place."""

    def answers(self, ask: Gather, workers: IntArray, states: States) -> Answers:
        """What these workers reply; their states are changed in place."""


class SiteWorkers(AskedWorkers, Protocol):
    """Workers whose messages are made, and not only measured."""

    def encoded(
        self, ask: Gather, workers: IntArray, states: States
    ) -> tuple[Answers, list[bytes]]:
        """What these workers reply, with the message of each."""


@dataclass(frozen=True, eq=False)
class Heard:
    """What an exchange of gathers came to.

    Parameters
    ----------
    told : object
        What the fit is sent: of several gathers a list.
    workers : array of int
        Who replied.
    passes : int
        How often all of them evaluated a row.
    bytes, up : int
        What the exchange took, and the part of it that went up.
    """

    told: Any
    workers: IntArray
    passes: int
    bytes: int
    up: int


Gathering = Generator[Gather, Any, T]
"""A fit that hears workers one by one."""


@dataclass(frozen=True)
class Gathers:
    """Several gathers in one exchange, each of its own workers: a fit is sent a list."""

    gathers: Sequence[Gather]

    @property
    def purpose(self) -> str:
        """A round, where one of them is; else that of the first."""
        purposes = [one.purpose for one in self.gathers]
        return "round" if "round" in purposes else purposes[0]

    def words(self) -> str:
        """What is asked, for the owner's journal."""
        return "; ".join(one.words() for one in self.gathers)

    def digest(self, place: bytes = b"", bits: int = AGREED_BITS) -> bytes:
        """Those of all of them."""
        return agreed_digest(b"", *(one.digest(place, bits) for one in self.gathers))

    @property
    def workers(self) -> IntArray:
        """All who are asked for something."""
        return np.unique(np.concatenate([one.workers for one in self.gathers]))

    @property
    def last(self) -> LastSum | None:
        """What the last exchange said to all of them."""
        told = [one.last for one in self.gathers if one.last is not None]
        if not told:
            return None
        gains = [one.gain for one in told if one.gain is not None]
        return replace(
            told[0],
            hits=sum(one.hits for one in told),
            squared=sum(one.squared or 0.0 for one in told),
            gain=sum(gains) if gains else None,
        )


Unmasked = Generator[Any, Any, T]
"""A part of a `Fit` that yields gathers, too. Masked fits have none."""


class Finish(Exception):
    """Raised inside a fit at an ask that is not answered: it returns what it has reached.

    A fit that has reached nothing yet lets it pass.
    """


def finished(fit: Fit[T], finish: Finish) -> T:
    """What a fit has reached; it may try to ask again, and is told the same."""
    try:
        while True:
            fit.throw(finish)
    except StopIteration as end:
        return end.value


def drive(
    fit: Fit[T], answer: Callable[[Ask], Sum], stop: Callable[[Ask], str | None] | None = None
) -> T:
    """Run a fit to its end, with a function that makes the sums.

    ``stop`` is asked before each exchange; where it gives a reason the ask is not answered, and the
    fit ends what it was at (`Finish`).

    Examples
    --------
    >>> def two_sums():
    ...     first = yield "ask"
    ...     second = yield "another"
    ...     return first + second
    >>> drive(two_sums(), len)
    10
    """
    try:
        ask = next(fit)
        while True:
            reason = None if stop is None else stop(ask)
            ask = fit.send(answer(ask)) if reason is None else fit.throw(Finish(reason))
    except StopIteration as end:
        return end.value
