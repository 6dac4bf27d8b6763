"""All members of an unmasked federation in one process: the same messages, priced and not sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np

from emfed.aggregation.coded import DIGEST_BYTES, Adder, Books, CodedSum, News, encode_weight
from emfed.aggregation.gathered import CodedGather
from emfed.core.ledger import Ledger
from emfed.core.sums import (
    Answers,
    Ask,
    AskedWorkers,
    Gather,
    Gathers,
    Heard,
    IntArray,
    States,
    Sum,
)


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
    """

    asked: IntArray
    arrived: IntArray
    wiped: IntArray = field(default_factory=_none)


Presence = Callable[[Any, int], Present]
"""From an ask and the number of its exchange, from 1, to who is there."""


@final
@dataclass
class UnmaskedWorkers:
    """The workers of a simulation whose sums are not masked, and who may be heard one by one.

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
    patience : int, optional
        How often in a row a worker may be missing before sums go on without its rows.

    Examples
    --------
    >>> import emfed
    >>> from emfed.data.held import HeldWorkers
    >>> from emfed.core.sums import drive
    >>> from emfed.fitting.opening import pool
    >>> data = emfed.data.synthetic_federation(workers=4, rows_per_worker=50)
    >>> model = emfed.gaussian_mixture(2, "tied")
    >>> sums = UnmaskedWorkers(HeldWorkers(data))
    >>> shapes = {n: v.shape[1:] for n, v in model.summary(data.worker(0)[None]).items()}
    >>> drive(pool(model, shapes), sums).rows
    200.0
    """

    rows: AskedWorkers
    seed: int = 0
    present: Presence | None = None
    ledger: Ledger | None = None
    patience: int | None = None
    books: Books = field(init=False)
    adder: Adder = field(init=False)
    states: dict[str, States] = field(default_factory=dict, init=False)
    """What the workers keep, by the name of the memory."""
    counted: Ledger = field(init=False)
    """The ledger."""

    def __post_init__(self) -> None:
        n = len(self.rows.totals)
        self.books, self.adder = Books(n), Adder(self.rows.totals)
        self.counted = self.ledger or Ledger(n)

    def __call__(self, ask: Any) -> Any:
        """The sum over all workers, or what is concluded from answers of single ones."""
        heard = isinstance(ask, (Gather, Gathers))
        return self.heard(ask).told if heard else self.sum(ask)

    def sum(self, ask: Ask) -> Sum:
        """The sum over all workers that are there, and over the memories of others."""
        coded = CodedSum(ask, self.books, self.seed)
        who = self._who(ask, coded.asked)
        self._begin(coded, who)
        asked = {name: self._of(name, who.asked) for name in coded.names}
        lost = coded.settle(who.asked, asked)
        self._put(asked, who.asked)
        able, mine = who.asked[~lost], {}
        for name in coded.names:
            mine[name] = self._of(name, able)
        parts = coded.parts(self.rows, able, self.rows.totals[able], mine)
        self._put(mine, able)
        came = np.isin(able, who.arrived)
        arrived, sizes = able[came], parts.sizes[came] + self._weights(able[came])
        told_lost = np.intersect1d(who.asked[lost], who.arrived)
        up = int(sizes.sum()) + DIGEST_BYTES * (len(arrived) + len(told_lost))
        anew = len(told_lost) > 0 or goes_without(self.books, coded.names, arrived, self.patience)
        data = coded.add(self.adder, arrived, parts.values[came], up, anew)
        found, news = coded.told(data)
        self._count(ask.purpose, np.append(arrived, told_lost), sizes, len(data))
        self.books.close(coded.asked, news)
        return found

    def heard(self, ask: Gather | Gathers) -> Heard:
        """What is concluded from what the asked workers reply."""
        coded = CodedGather(ask, self.books)
        who = self._who(ask, ask.workers)
        self._begin(coded, who)
        answers = [
            self._replied(name, one, np.intersect1d(one.workers, who.asked))
            for name, one in zip(coded.names, coded.gathers, strict=True)
        ]
        arrived = np.intersect1d(who.asked, who.arrived)
        sizes = coded.sizes(answers)[arrived] + self._weights(arrived)
        up = int(sizes.sum()) + DIGEST_BYTES * len(arrived)
        data, told = coded.add(self.adder, arrived, [one.of(arrived) for one in answers], up)
        news = News.decode(data, coded.asked, self.books.rows)[0]
        found = coded.heard(told, news, len(data))
        self._count(ask.purpose, arrived, sizes, len(data))
        self.books.close(coded.asked, news)
        return found

    def repeat(self, ask: Ask, known: Sum) -> Sum:
        """A sum that was made before: memories follow from rows, so workers compute it again."""
        self.sum(ask)
        return known

    def _who(self, ask: Any, asked: IntArray) -> Present:
        if self.present is None:
            return Present(asked, asked)
        who = self.present(ask, self.books.exchange + 1)
        here = np.intersect1d(asked, who.asked)
        return Present(here, np.intersect1d(here, who.arrived), who.wiped)

    def _begin(self, coded: CodedSum | CodedGather, who: Present) -> None:
        """Columns that begin with an exchange, and workers that have lost all that they kept."""
        n = self.books.workers
        self.states = coded.fresh(self.states, n)
        if len(who.wiped):
            blank = coded.fresh({}, n)
            for name, states in blank.items():
                for column, values in states.items():
                    self.states[name][column][who.wiped] = values[who.wiped]

    def _of(self, name: str, workers: IntArray) -> States:
        return {column: values[workers] for column, values in self.states[name].items()}

    def _put(self, states: Mapping[str, States], workers: IntArray) -> None:
        for name, columns in states.items():
            for column, values in columns.items():
                self.states[name][column][workers] = values

    def _replied(self, name: str, one: Gather, workers: IntArray) -> Answers:
        mine = self._of(name, workers)
        found = self.rows.answers(one, workers, mine)
        self._put({name: mine}, workers)
        return found

    def _weights(self, workers: IntArray) -> IntArray:
        """Bytes of weights, of those that have not told them."""
        found = np.zeros(len(workers), dtype=np.int64)
        for place in np.flatnonzero(~self.books.weighed[workers]).tolist():
            found[place] = len(encode_weight(float(self.rows.totals[workers[place]])))
        return found

    def _count(self, purpose: str, senders: IntArray, sizes: IntArray, down: int) -> None:
        payload = np.zeros(len(senders), dtype=np.int64)
        payload[: len(sizes)] = sizes
        everyone = np.arange(self.books.workers)
        self.counted.add(purpose, "up", senders, payload, DIGEST_BYTES)
        self.counted.add(purpose, "down", everyone, down, DIGEST_BYTES)

    # Checkpoints.

    def save(self) -> dict[str, Any]:
        """All that is kept of rounds in which workers are heard, as arrays by name."""
        kept = {
            f"states/{name}/{column}": values
            for name, columns in self.states.items()
            if name.isdigit()
            for column, values in columns.items()
        }
        own = {f"adder/{n}": v for n, v in self.adder.memories.items() if n.isdigit()}
        return kept | own | {"exchanges": np.array(self.books.exchange)}

    def restore(self, arrays: Mapping[str, Any]) -> None:
        """The inverse of `save`."""
        self.books.exchange = int(arrays["exchanges"])
        for key, values in arrays.items():
            kind, *rest = key.split("/")
            if kind == "adder":
                self.adder.memories[rest[0]] = values
                self.books.begun.add(rest[0])
            elif kind == "states":
                self.states.setdefault(rest[0], {})[rest[1]] = values


def goes_without(books: Books, names: list[str], arrived: IntArray, patience: int | None) -> bool:
    """Whether sums go on without rows of workers that have been missing for too long.

    The more often memories have begun again the longer that is: where messages are lost by chance,
    some worker out of many misses a few exchanges in a row all the time.
    """
    if patience is None or not names:
        return False
    begun = 1 + max(one.generation for one in books.counted.values())
    late = books.missed + 1 >= patience * begun
    late[arrived] = False
    heard = np.unique(np.concatenate([books.counted[name].heard for name in names]))
    return bool(late[heard].any())
