"""Sums that are not masked: innovations to memories on one lattice, and rounded sums down.

Every worker sends what its part has that its memory does not foretell, on a lattice that all
share, entropy coded. The adder may round the sum once more before it goes down; everyone, the adder
too, goes on from the rounded sum, and the next one has what the rounding left out. That is the
compressed broadcast of the paper, without a memory of its own. Absent workers stand for themselves
with what they sent last.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np

from emfed.aggregation.codes import Coded, floats_size, on_lattice, scaled, short_floats
from emfed.algorithms.memories import Total, columns, settle
from emfed.core.errors import NumericalError
from emfed.core.ledger import Ledger
from emfed.core.messages import GRID
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

ENVELOPE_UP, ENVELOPE_DOWN = 6, 8
"""Bytes of a part beside its numbers: the exchange and a digest of the state that it is about. And
of a sum: the exchange, whom it counts (all, or a list that is charged apart), and the digest."""
NAME_BYTES = 4
"""Bytes of a worker in the list of those that a sum does not count."""
LOSS = 1e-6
"""Nats a row that short floats of an opening may cost."""
FEWEST_BITS, MOST_BITS = 3, 28
"""Digits of a short float after the first: so many are tried at least, and kept at most."""
LEAST_RATE = 0.1
"""The smallest rate at which a memory moves. Not tuned: at 0 a memory under much noise would never
move."""
SERVER = np.zeros(1, dtype=np.int64)
"""The stream of the dither of the sum that goes down."""


def _none() -> IntArray:
    return np.zeros(0, dtype=np.int64)


@final
@dataclass(frozen=True)
class Present:
    """Who hears an ask, and whose parts of it arrive: increasing numbers of workers.

    Parameters
    ----------
    asked : array of int
        Who hears it.
    arrived : array of int
        Whose part arrives.
    wiped : array of int
        Who has lost all that it kept, before it hears the ask.
    again : array of int
        Who hears it twice.
    crashed : bool
        Whether the adder crashes before it keeps what arrived.
    """

    asked: IntArray
    arrived: IntArray
    wiped: IntArray = field(default_factory=_none)
    again: IntArray = field(default_factory=_none)
    crashed: bool = False


Presence = Callable[[Any, int], Present]
"""From an ask and the number of its exchange to who is there."""


@final
@dataclass
class Remembered:
    """The memories of one ascent: what its workers keep, and what the adder does."""

    states: States
    total: Total

    @classmethod
    def begun(cls, ask: OfWorkers, workers: int) -> Remembered:
        """Memories that nobody has sent anything to."""
        fields = ask.fields()
        total = Total(workers, len(fields["memory"]))
        made = fields | columns(total.size)
        return cls({name: np.stack([np.asarray(v)] * workers) for name, v in made.items()}, total)

    def of(self, workers: IntArray) -> States:
        """A copy of what these workers keep."""
        return {name: column[workers] for name, column in self.states.items()}

    def put(self, workers: IntArray, states: States) -> None:
        """Keep what these workers have changed."""
        for name, column in states.items():
            self.states[name][workers] = column

    def wipe(self, ask: OfWorkers, workers: IntArray) -> None:
        """These workers have lost all that they kept."""
        if len(workers):
            for name, blank in (ask.fields() | columns(self.total.size)).items():
                self.states[name][workers] = blank

    def settle(self, asked: IntArray) -> IntArray:
        """Tell workers what was counted; return those that cannot go on."""
        mine = self.of(asked)
        lost = settle(mine, self.total.counted[asked], self.total.generation)
        self.put(asked, mine)
        return asked[lost]


@final
@dataclass(frozen=True)
class _OneSum:
    """What one ask of an exchange came to: the sum, its rows, and the bytes of each that came."""

    value: FloatArray
    rows: float
    up: IntArray
    down: int


@final
@dataclass
class CodedSums:
    """Unmasked sums over the workers of a simulation, as they are between machines.

    Parameters
    ----------
    rows : AskedWorkers
        All workers.
    seed : int
        The seed of the dithers, which all members share.
    present : callable, optional
        From an ask and the number of the exchange to who is there; None: always everyone.
    ledger : Ledger, optional
        What counts the bytes; None: a new one.

    Examples
    --------
    >>> import emfed
    >>> from emfed.data.held import HeldWorkers
    >>> from emfed.core.sums import drive
    >>> from emfed.fitting.opening import pool
    >>> data = emfed.data.synthetic_federation(workers=4, rows_per_worker=50)
    >>> model = emfed.gaussian_mixture(2, "tied")
    >>> sums = CodedSums(HeldWorkers(data))
    >>> shapes = {n: v.shape[1:] for n, v in model.summary(data.worker(0)[None]).items()}
    >>> drive(pool(model, shapes), sums).rows
    200.0
    """

    rows: AskedWorkers
    seed: int = 0
    present: Presence | None = None
    ledger: Ledger | None = None
    exchanges: int = field(default=0, init=False)
    kept: dict[Hashable, Remembered] = field(default_factory=dict, init=False)
    """The memories of each ascent that was part of the last round."""
    counted: Ledger = field(init=False)
    """The ledger."""

    def __post_init__(self) -> None:
        self.counted = self.ledger or Ledger(len(self.rows.totals))

    def __call__(self, ask: Ask) -> Sum:
        """The sum over all workers that are there, and over the memories of others.

        Each ascent of an exchange that several share has its own memory and its own lattice. The
        memory is dropped when its ascent has no part any more.
        """
        self.exchanges += 1
        n = len(self.rows.totals)
        everyone = np.arange(n, dtype=np.int64)
        who = Present(everyone, everyone)
        if self.present is not None:
            who = self.present(ask, self.exchanges)
        asks = list(ask.asks) if isinstance(ask, Several) else [ask]
        named = {one.memory for one in asks if isinstance(one, OfWorkers)}
        if named:
            self.kept = {name: kept for name, kept in self.kept.items() if name in named}
        ends = np.cumsum([one.size for one in asks]).tolist()
        told = [
            self._remembered(one, who, slice(end - one.size, end))
            if isinstance(one, OfWorkers)
            else self._plain(one, who, slice(end - one.size, end))
            for one, end in zip(asks, ends, strict=True)
        ]
        rows = told[0].rows
        value = np.concatenate([one.value * (rows / one.rows) for one in told])
        up = np.sum([one.up for one in told], axis=0)
        size = self._count(ask.purpose, who, up, sum(one.down for one in told))
        return Sum(value, rows, len(who.arrived) / 12, n - len(who.arrived), size)

    def repeat(self, ask: Ask, known: Sum) -> Sum:
        """A sum that was made before: memories follow from rows, so workers compute it again."""
        self(ask)
        return known

    def _plain(self, ask: Ask, who: Present, cut: slice) -> _OneSum:
        """Parts as they are, where nothing foretells them."""
        at, totals = who.arrived, self.rows.totals[who.arrived]
        parts = self.rows.each(ask, at)
        if ask.precision is None:
            told = self._short(ask, parts, self._dither(at, cut))
            u = self._dither(SERVER, cut, Purpose.BROADCAST)[0]
            value, size = _shortened(ask, told.values.sum(axis=0), 1, u)
        else:
            step = np.broadcast_to(ask.precision.step, (ask.size,))
            centre = np.broadcast_to(ask.precision.centre, (ask.size,))
            shares = totals[:, None] / self.rows.totals.sum()
            told = on_lattice(parts - shares * centre, step, self._dither(at, cut))
            value, size = self._down(ask, told.values.sum(axis=0) + shares.sum() * centre, cut)
        return _OneSum(value, float(totals.sum()), told.sizes, size)

    def _short(self, ask: Ask, parts: FloatArray, u: FloatArray) -> Coded:
        """Parts as short numbers: as few digits as cost little, each worker by itself."""
        told = [_shortened(ask, part, len(parts), own) for part, own in zip(parts, u, strict=True)]
        values, sizes = zip(*told, strict=True)
        return Coded(np.stack(values), np.array(sizes, dtype=np.int64))

    def _remembered(self, ask: OfWorkers, who: Present, cut: slice) -> _OneSum:
        """Innovations to the memories of the workers."""
        assert isinstance(ask, Ask)
        assert ask.precision is not None
        kept = self.kept.get(ask.memory)
        if kept is None:
            kept = self.kept[ask.memory] = Remembered.begun(ask, len(self.rows.totals))
        total = kept.total
        kept.wipe(ask, who.wiped)
        if len(kept.settle(who.asked)):
            total.begin_anew()
            kept.settle(who.asked)
        workers, rest, sizes = self._sent(ask, kept, who.asked, cut)
        came = np.isin(workers, who.arrived)
        at = workers[came]
        total.add(self.exchanges, at, kept.states["pending"][at])
        rows = float(self.rows.totals[total.heard].sum())
        exact = ask.foretold(total.value[None], np.array([rows]))[0] + rest[came].sum(axis=0)
        value, size = self._down(ask, exact, cut)
        return _OneSum(value, rows, sizes[came], size)

    def _sent(
        self, ask: OfWorkers, kept: Remembered, asked: IntArray, cut: slice
    ) -> tuple[IntArray, FloatArray, IntArray]:
        """Innovations of those that have not answered this exchange yet.

        Who they are, what of their innovations no memory keeps, and the bytes.
        """
        assert isinstance(ask, Ask)
        assert ask.precision is not None
        step = np.broadcast_to(ask.precision.step, (ask.size,))
        fresh = asked[kept.states["pending_at"][asked] != self.exchanges]
        mine, totals = kept.of(fresh), self.rows.totals[fresh]
        parts = self.rows.parts(ask, fresh, mine)
        if not np.isfinite(parts).all():
            worker = int(fresh[~np.isfinite(parts).all(axis=1)][0])
            raise NumericalError(f"worker {worker}: the E-step gave a number that is not finite.")
        new = (mine["counted_at"] < 0)[:, None]
        memory = np.where(new, ask.origin(totals), mine["memory"])
        dither = self._dither(fresh, cut)
        told = on_lattice(parts - ask.foretold(memory, totals), step, dither)
        rates = _rates(told.values, step)[:, None]
        mine["pending"] = memory - mine["memory"] + ask.kept(rates * told.values)
        mine["pending_at"] = np.full(len(fresh), self.exchanges)
        kept.put(fresh, mine)
        return fresh, (1 - rates) * told.values, told.sizes

    def _dither(
        self, workers: IntArray, cut: slice, purpose: Purpose = Purpose.COMPRESSION
    ) -> FloatArray:
        """The dither of some numbers of an exchange."""
        return uniforms(self.seed, self.exchanges, purpose, workers, cut.stop)[:, cut]

    def _down(self, ask: Ask, exact: FloatArray, cut: slice) -> tuple[FloatArray, int]:
        """The sum as everyone is told it: on a lattice of its own where the ask allows it."""
        precision = ask.precision
        assert precision is not None
        step = np.array(np.broadcast_to(precision.step, exact.shape))
        away = exact - precision.centre
        if precision.down:
            first = step == step[0]  # values after the statistics are told as they are
            wanted = np.sqrt(12 * precision.down * np.mean(away[first] ** 2)) / self._unit
            place = int(np.clip(np.searchsorted(GRID, wanted), 1, len(GRID) - 1))
            step[first] = np.maximum(step[first], GRID[place] * self._unit)
        u = self._dither(SERVER, cut, Purpose.BROADCAST)
        told = on_lattice(away[None], step, u)
        return told.values[0] + precision.centre, int(told.sizes[0]) + bool(precision.down)

    @property
    def _unit(self) -> float:
        return float(self.rows.totals.sum())

    def _count(self, purpose: str, who: Present, up: IntArray, down: int) -> int:
        names = NAME_BYTES * (len(self.rows.totals) - len(who.arrived))
        sent = self.counted.add(purpose, "up", who.arrived, up, ENVELOPE_UP)
        told = self.counted.add(purpose, "down", who.asked, down, ENVELOPE_DOWN + names)
        return sum(sent) + sum(told)


def _shortened(ask: Ask, exact: FloatArray, parts: int, u: FloatArray) -> tuple[FloatArray, int]:
    """Numbers with as few digits as cost little, and the bytes of them."""
    for bits in range(FEWEST_BITS, MOST_BITS):
        if ask.heads is None:
            value = short_floats(exact, bits, u)
            size = floats_size(value, bits)
        else:
            value, size = scaled(exact, ask.heads, ask.units, bits, u)
        if ask.loss(exact, value, parts) <= LOSS:
            return value, size
    value = short_floats(exact, MOST_BITS)
    return value, floats_size(value, MOST_BITS)


def _rates(values: FloatArray, step: FloatArray) -> FloatArray:
    """The rate at which each memory moves: 1 - noise / |Q|^2, which both ends know.

    A memory that took all of a noisy innovation would have to send the noise back.
    """
    coarse = step == step[0]
    square = (values[:, coarse] ** 2).sum(axis=1)
    noise = float((step[coarse] ** 2).sum()) / 12
    return np.clip(1 - noise / np.maximum(square, 1e-300), LEAST_RATE, 1.0)
