"""Sums that are not masked: innovations to memories on one lattice, and rounded sums down.

Every worker sends what its part has that its memory does not foretell, on a lattice that all
share, entropy coded. The adder may round the sum once more before it goes down; everyone, the adder
too, goes on from the rounded sum, and the next one has what the rounding left out. That is the
compressed broadcast of the paper, without a memory of its own. Absent workers stand for themselves
with what they sent last.

This file has the codec and the books. `emfed.aggregation.unmasked` is all members in one process;
between machines the analyst is the adder (`emfed.network.exchange.heard`).
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from emfed.aggregation.codes import (
    Coded,
    apart,
    decode_floats,
    floats,
    framed,
    framed_sizes,
    off_lattice,
    on_lattice,
    scaled,
    scaled_values,
    short_floats,
    unscaled,
)
from emfed.algorithms.memories import Counted, columns, settle
from emfed.core.errors import NumericalError, SettingsError, WireError
from emfed.core.objects import GRID
from emfed.core.streams import Purpose, uniforms
from emfed.core.sums import (
    Ask,
    AskedWorkers,
    FloatArray,
    IntArray,
    OfWorkers,
    Several,
    States,
    Sum,
)
from emfed.core.wire import decode_count, encode_count

DIGEST_BYTES = 4
"""Bytes of every message that say which state it is about. Nobody here is kept from a forgery by
them: parts and sums are signed."""
LOSS = 1e-6
"""Nats a row that short floats of an opening may cost."""
FEWEST_BITS, MOST_BITS = 3, 28
"""Digits of a short float after the first: so many are tried at least, and kept at most."""
LEAST_RATE = 0.1
"""The smallest rate at which a memory moves. Not tuned: at 0 a memory under much noise would never
move."""
ADDER = np.zeros(1, dtype=np.int64)
"""The stream of the dither of the sum that goes down."""
_ANEW, _ROWS, _MISSING, _PASSES = 1, 2, 4, 8
"""Flags of a message down: memories begin anew, rows are told, somebody is missing, passes are
told."""


class Forgotten(Exception):
    """The adder has lost the memories' sum: all must begin anew, and answer again."""


@final
@dataclass
class Books:
    """What all members know of the exchanges so far: it follows from the messages down.

    Parameters
    ----------
    workers : int
        How many there are.
    """

    workers: int
    exchange: int = 0
    """How many there were."""
    weight: float = 0.0
    """The weight of the rows in the first sum; 0 before it."""
    rows: float = 0.0
    """That of the rows in the last sum."""
    weighed: NDArray[np.bool_] = field(init=False)
    """Whose weight the adder knows."""
    missed: IntArray = field(init=False)
    """How often in a row each was asked and did not answer."""
    counted: dict[str, Counted] = field(default_factory=dict)
    """Of each ascent that was part of the last exchange in which memories are named."""
    begun: set[str] = field(default_factory=set)
    """Memories of gathers that were part of some exchange."""
    _names: dict[Hashable, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.weighed = np.zeros(self.workers, dtype=bool)
        self.missed = np.zeros(self.workers, dtype=np.int64)

    def name(self, memory: Hashable) -> str:
        """What a memory is called: the same at every member, and after a restart."""
        if isinstance(memory, int):
            return str(memory)
        return self._names.setdefault(memory, f"sum{len(self._names)}")

    def copy(self) -> Books:
        """These books, while others go on."""
        found = replace(self)
        found.weighed, found.missed = self.weighed.copy(), self.missed.copy()
        found.counted = copy.deepcopy(self.counted)
        return found

    def begin_anew(self) -> None:
        """Memories of sums begin at zero, at every worker and at the adder."""
        for one in self.counted.values():
            one.begin_anew()

    def close(self, asked: IntArray, news: News) -> None:
        """Take what a message down says of an exchange."""
        for one in self.counted.values():
            one.at[news.arrived] = self.exchange
        if news.anew:
            self.begin_anew()
        self.missed[asked] += 1
        self.missed[news.arrived] = 0
        self.weighed[news.arrived] = True
        self.rows = news.rows
        self.weight = self.weight or self.rows
        self.exchange += 1


@final
@dataclass
class Adder:
    """What the adder alone knows: weights of workers, and the sum of each kind of memories."""

    totals: FloatArray
    memories: dict[str, FloatArray] = field(default_factory=dict)


def encode_weight(weight: float) -> bytes:
    """The weight of rows: a number of rows takes few bytes."""
    if weight == int(weight) < 2**60:
        return encode_count(2 * int(weight))
    return encode_count(1) + np.array([weight], "<f8").tobytes()


def decode_weight(data: bytes, at: int = 0) -> tuple[float, int]:
    """The inverse of `encode_weight`, and where the next field begins."""
    number, at = decode_count(data, at)
    if number % 2 == 0:
        return float(number // 2), at
    if len(data) < at + 8:
        raise WireError("a message ends inside a weight.")
    weight = float(np.frombuffer(data[at : at + 8], "<f8")[0])
    if not (np.isfinite(weight) and weight >= 0):
        raise WireError("a weight of rows that is no number.")
    return weight, at + 8


class News(NamedTuple):
    """What a message down says beside its numbers.

    Parameters
    ----------
    arrived : array of int
        Whose answers it counts, increasing.
    rows : float
        The weight of the rows in the sum.
    up : int
        Bytes of all answers.
    passes : int
        How often all workers evaluated a row, where that is known to them alone.
    anew : bool
        Whether memories begin at zero after it.
    """

    arrived: IntArray
    rows: float
    up: int
    passes: int = 0
    anew: bool = False

    def encode(self, asked: IntArray, known: float) -> bytes:
        """In few bytes, where everyone who was asked answers."""
        missing = np.setdiff1d(asked, self.arrived)
        flags = _ANEW * self.anew + _ROWS * (self.rows != known) + _MISSING * (len(missing) > 0)
        flags += _PASSES * (self.passes > 0)
        found = [bytes([flags]), encode_count(self.up)]
        if self.passes:
            found.append(encode_count(self.passes))
        if flags & _ROWS:
            found.append(encode_weight(self.rows))
        if len(missing):
            places = np.diff(np.searchsorted(asked, missing), prepend=-1) - 1
            found += [encode_count(number) for number in (len(missing), *places.tolist())]
        return b"".join(found)

    @classmethod
    def decode(cls, data: bytes, asked: IntArray, known: float) -> tuple[News, bytes]:
        """The inverse of `encode`, and what follows."""
        if not data or data[0] > _ANEW + _ROWS + _MISSING + _PASSES:
            raise WireError("a message down begins with flags.")
        flags, rows, passes = data[0], known, 0
        up, at = decode_count(data, 1)
        if flags & _PASSES:
            passes, at = decode_count(data, at)
        if flags & _ROWS:
            rows, at = decode_weight(data, at)
        missing = np.zeros(0, dtype=np.int64)
        if flags & _MISSING:
            count, at = decode_count(data, at)
            if count > len(asked):
                raise WireError(f"{count} workers are missing, and {len(asked)} were asked.")
            places, place = [], -1
            for _ in range(count):
                gap, at = decode_count(data, at)
                place += gap + 1
                places.append(place)
            if place >= len(asked):
                raise WireError("a worker is missing that was not asked.")
            missing = np.array(places, dtype=np.int64)
        news = cls(np.delete(asked, missing), rows, up, passes, bool(flags & _ANEW))
        return news, data[at:]


class Parts(NamedTuple):
    """What workers send in an exchange: values as they are decoded, and bytes."""

    values: FloatArray
    sizes: IntArray
    pieces: list[Coded]

    def encode(self, j: int) -> bytes:
        """The message of one worker."""
        return framed([one.encode(j) for one in self.pieces])


class _Piece(NamedTuple):
    """One ask of an exchange that several may share."""

    ask: Ask
    cut: slice
    name: str | None
    """The name of the memories that its parts are told against, where they are."""

    @property
    def step(self) -> FloatArray:
        assert self.ask.precision is not None
        return np.broadcast_to(self.ask.precision.step, (self.ask.size,))


@final
class CodedSum:
    """One exchange as all members see it before anybody answers.

    Each ascent of an exchange that several share has its own memory and its own lattice. A memory
    is dropped when its ascent has no part any more.

    Parameters
    ----------
    ask : Ask
        What is asked.
    books : Books
        What is known of the exchanges before.
    seed : int
        The seed of the dithers, which all members share.
    """

    def __init__(self, ask: Ask, books: Books, seed: int) -> None:
        if ask.noise or not ask.counted:
            raise SettingsError("sums of a private fit are not told worker by worker.")
        self.ask, self.books, self._seed = ask, books, seed
        asks = list(ask.asks) if isinstance(ask, Several) else [ask]
        ends = np.cumsum([one.size for one in asks]).tolist()
        self._pieces = [
            _Piece(one, slice(end - one.size, end), self._name(one))
            for one, end in zip(asks, ends, strict=True)
        ]
        if self.names:
            known = books.counted
            books.counted = {n: known.get(n) or Counted(books.workers) for n in self.names}

    def _name(self, ask: Ask) -> str | None:
        return self.books.name(ask.memory) if isinstance(ask, OfWorkers) else None

    @property
    def names(self) -> list[str]:
        """The memories that this exchange is about."""
        return [one.name for one in self._pieces if one.name is not None]

    # A worker's side.

    def fresh(self, states: Mapping[str, States], workers: int) -> dict[str, States]:
        """What so many workers keep now: columns that begin are added, others may be over."""
        found = {n: kept for n, kept in states.items() if n.isdigit() or not self.names}
        for one in self._pieces:
            if isinstance(one.ask, OfWorkers) and one.name is not None:
                made = one.ask.fields()
                made |= columns(len(made["memory"]))
                blank = {n: np.stack([np.asarray(v)] * workers) for n, v in made.items()}
                found[one.name] = states.get(one.name) or blank
        return found

    def settle(self, workers: IntArray, states: Mapping[str, States]) -> NDArray[np.bool_]:
        """Tell workers what was counted; which of them cannot go on."""
        lost = np.zeros(len(workers), dtype=bool)
        for name in self.names:
            known = self.books.counted[name]
            lost[settle(states[name], known.at[workers], known.generation)] = True
        return lost

    def parts(
        self,
        rows: AskedWorkers,
        workers: IntArray,
        totals: FloatArray,
        states: Mapping[str, States],
    ) -> Parts:
        """What workers of these weights send; their states, which are settled, change in place."""
        found = []
        for one in self._pieces:
            exact = self._exact(one, rows, workers, totals, states)
            if not np.isfinite(exact).all():
                worker = int(workers[~np.isfinite(exact).all(axis=1)][0])
                raise NumericalError(
                    f"worker {worker}: the E-step gave a number that is not finite."
                )
            coded = self._coded(one, exact, workers)
            if one.name is not None:
                self._keep(one, coded.values, totals, states[one.name])
            found.append(coded)
        values = np.concatenate([one.values for one in found], axis=1)
        return Parts(values, framed_sizes([one.sizes for one in found]), found)

    def _exact(
        self,
        one: _Piece,
        rows: AskedWorkers,
        workers: IntArray,
        totals: FloatArray,
        states: Mapping[str, States],
    ) -> FloatArray:
        """What is told: parts less what the sum's centre or memories foretell of them."""
        if not len(workers):
            return np.zeros((0, one.ask.size))
        if isinstance(one.ask, OfWorkers) and one.name is not None:
            mine = states[one.name]
            parts = rows.parts(one.ask, workers, mine)
            new = (mine["counted_at"] < 0)[:, None]
            memory = np.where(new, one.ask.origin(totals), mine["memory"])
            return parts - one.ask.foretold(memory, totals)
        parts = rows.each(one.ask, workers)
        return parts - self._shares(totals)[:, None] * self._centre(one)

    def _keep(self, one: _Piece, values: FloatArray, totals: FloatArray, mine: States) -> None:
        """What a worker sent is pending until it hears that it was counted."""
        mine["pending"] = self._moves(one, values, totals, mine["counted_at"] < 0)
        mine["pending_at"] = np.full(len(values), self.books.exchange)

    def _coded(self, one: _Piece, exact: FloatArray, workers: IntArray) -> Coded:
        u = self._dither(workers, one.cut)
        if one.ask.precision is not None:
            return on_lattice(exact, one.step, u)
        told = [
            _shortened(one.ask, part, self.books.workers, own)
            for part, own in zip(exact, u, strict=True)
        ]
        values = np.reshape([each.values[0] for each in told], exact.shape)
        sizes = np.array([each.sizes[0] for each in told], dtype=np.int64)
        return Coded(values, sizes, lambda j: told[j].encode(0))

    # What both ends know.

    def _dither(
        self, workers: IntArray, cut: slice, purpose: Purpose = Purpose.COMPRESSION
    ) -> FloatArray:
        return uniforms(self._seed, self.books.exchange, purpose, workers, cut.stop)[:, cut]

    def _centre(self, one: _Piece) -> FloatArray:
        precision = one.ask.precision
        centre = np.zeros(1) if precision is None else precision.centre
        return np.broadcast_to(centre, (one.ask.size,))

    def _shares(self, totals: FloatArray) -> FloatArray:
        return totals / self.books.weight if self.books.weight else 0 * totals

    def _moves(
        self, one: _Piece, values: FloatArray, totals: FloatArray, new: NDArray[np.bool_]
    ) -> FloatArray:
        """What the memories of workers move by, if these are counted."""
        assert isinstance(one.ask, OfWorkers)
        if not len(values):
            return values
        moved = one.ask.kept(_rates(values, one.step)[:, None] * values)
        return moved + np.where(new[:, None], one.ask.origin(totals), 0.0)

    # The adder's side.

    def read(self, data: bytes, worker: int) -> FloatArray:
        """The values of one worker's message; raises `WireError` for what none can be."""
        values, who = np.empty(self.ask.size), np.array([worker])
        for one, piece in zip(self._pieces, apart(data, len(self._pieces)), strict=True):
            u = self._dither(who, one.cut)[0]
            if one.ask.precision is not None:
                values[one.cut] = off_lattice(piece, one.step, u)
            else:
                values[one.cut] = _lengthened(one.ask, piece, u)
        return values

    def add(
        self, adder: Adder, arrived: IntArray, values: FloatArray, up: int, anew: bool
    ) -> bytes:
        """The message down, for those that answered; raises `Forgotten`."""
        known = self.books.counted
        if any(name not in adder.memories and len(known[name].heard) for name in self.names):
            raise Forgotten
        totals = adder.totals[arrived]
        found, rows = [], 0.0
        for one in self._pieces:
            own = values[:, one.cut]
            value, weight = (
                self._plain(one, own, totals)
                if one.name is None
                else self._remembered(one, adder, arrived, own)
            )
            rows = rows or weight
            found.append(self._down(one, value * (rows / (weight or 1.0))))
        news = News(arrived, rows, up, 0, anew)
        if anew:
            adder.memories = {n: v for n, v in adder.memories.items() if n not in self.names}
        return news.encode(self.asked, self.books.rows) + framed(found)

    @property
    def asked(self) -> IntArray:
        """Everyone."""
        return np.arange(self.books.workers, dtype=np.int64)

    def _plain(
        self, one: _Piece, values: FloatArray, totals: FloatArray
    ) -> tuple[FloatArray, float]:
        share = float(self._shares(totals).sum())
        return values.sum(axis=0) + share * self._centre(one), float(totals.sum())

    def _remembered(
        self, one: _Piece, adder: Adder, arrived: IntArray, values: FloatArray
    ) -> tuple[FloatArray, float]:
        """Memories as they are with what is counted, and what of it no memory keeps."""
        assert isinstance(one.ask, OfWorkers)
        assert one.name is not None
        known = self.books.counted[one.name]
        moved = self._moves(one, values, adder.totals[arrived], known.at[arrived] < 0)
        total = adder.memories.get(one.name, 0.0) + moved.sum(axis=0)
        adder.memories[one.name] = total
        rows = float(adder.totals[np.union1d(known.heard, arrived)].sum())
        rest = (1 - _rates(values, one.step))[:, None] * values
        return one.ask.foretold(total[None], np.array([rows]))[0] + rest.sum(axis=0), rows

    def _down(self, one: _Piece, exact: FloatArray) -> bytes:
        """The sum as everyone is told it: on a lattice of its own where the ask allows it."""
        u = self._dither(ADDER, one.cut, Purpose.BROADCAST)
        precision = one.ask.precision
        if precision is None:
            return _shortened(one.ask, exact, 1, u[0]).encode(0)
        away, head, place = exact - precision.centre, b"", 0
        if precision.down:
            first = one.step == one.step[0]  # values after the statistics are told as they are
            wanted = np.sqrt(12 * precision.down * np.mean(away[first] ** 2)) / self._unit
            place = int(np.clip(np.searchsorted(GRID, wanted), 1, len(GRID) - 1))
            head = bytes([place])
        return head + on_lattice(away[None], self._coarser(one, place), u).encode(0)

    @property
    def _unit(self) -> float:
        return self.books.weight or 1.0

    def _coarser(self, one: _Piece, place: int) -> FloatArray:
        step = np.array(one.step)
        if place:
            first = step == step[0]
            step[first] = np.maximum(step[first], GRID[place] * self._unit)
        return step

    # Everyone.

    def told(self, data: bytes) -> tuple[Sum, News]:
        """The sum of a message down; raises `WireError` for what none can be."""
        news, body = News.decode(data, self.asked, self.books.rows)
        value = np.empty(self.ask.size)
        for one, piece in zip(self._pieces, apart(body, len(self._pieces)), strict=True):
            u = self._dither(ADDER, one.cut, Purpose.BROADCAST)[0]
            precision = one.ask.precision
            if precision is None:
                value[one.cut] = _lengthened(one.ask, piece, u)
                continue
            place = 0
            if precision.down:
                if not piece or piece[0] >= len(GRID):
                    raise WireError("a sum lacks the step that it is rounded to.")
                place, piece = piece[0], piece[1:]
            value[one.cut] = off_lattice(piece, self._coarser(one, place), u) + precision.centre
        here, n = len(news.arrived), self.books.workers
        size = news.up + n * (DIGEST_BYTES + len(data))
        return Sum(value, news.rows, here / 12, n - here, size, news.up), news


def _shortened(ask: Ask, exact: FloatArray, parts: int, u: FloatArray) -> Coded:
    """Numbers with as few digits as cost little, by halving the range of how many."""
    heads, few, enough = ask.heads, FEWEST_BITS, MOST_BITS
    if not np.isfinite(ask.loss(exact, exact, parts)):  # nothing is known of what digits cost
        few = enough
    while few < enough:
        bits = (few + enough) // 2
        if heads is None:
            rounded = short_floats(exact, bits, u)
        else:
            rounded = scaled_values(exact, heads, ask.units, bits, u)
        cheap = ask.loss(exact, rounded, parts) <= LOSS
        few, enough = (few, bits) if cheap else (bits + 1, enough)
    if heads is None:  # all bits are to the nearest: numbers of rows are exact
        return floats(exact, enough, None if enough == MOST_BITS else u)
    return scaled(exact, heads, ask.units, enough, u)


def _lengthened(ask: Ask, data: bytes, u: FloatArray) -> FloatArray:
    if ask.heads is None:
        return decode_floats(data, ask.size)
    return unscaled(data, ask.size, ask.heads, ask.units, u)


def _rates(values: FloatArray, step: FloatArray) -> FloatArray:
    """The rate at which each memory moves: 1 - noise / |Q|^2, which both ends know.

    A memory that took all of a noisy innovation would have to send the noise back.
    """
    coarse = step == step[0]
    square = (values[:, coarse] ** 2).sum(axis=1)
    noise = float((step[coarse] ** 2).sum()) / 12
    return np.clip(1 - noise / np.maximum(square, 1e-300), LEAST_RATE, 1.0)
