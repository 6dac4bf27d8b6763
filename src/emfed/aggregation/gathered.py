"""Answers of single workers: what is not masked and does not add up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from emfed.aggregation.coded import DIGEST_BYTES, Adder, Books, News
from emfed.aggregation.codes import apart, framed
from emfed.core.errors import WireError
from emfed.core.sums import (
    Answers,
    FloatArray,
    Gather,
    Gathers,
    Heard,
    IntArray,
    SiteWorkers,
    States,
)
from emfed.core.wire import count_sizes, decode_count, encode_count

ENVELOPE_UP, ENVELOPE_DOWN = DIGEST_BYTES + 2, DIGEST_BYTES + 26
"""About what messages of a round of FedEM take besides their vectors, for plans."""


@final
class CodedGather:
    """One exchange of gathers as all members see it before anybody answers.

    A worker's message has a piece for each gather that asks it: the rows that it evaluated, and
    what it replies; nothing, where it has lost its memory.

    Parameters
    ----------
    ask : Gather or Gathers
        What is asked.
    books : Books
        What is known of the exchanges before.
    """

    def __init__(self, ask: Gather | Gathers, books: Books) -> None:
        self.ask, self.books = ask, books
        self.gathers: Sequence[Gather] = ask.gathers if isinstance(ask, Gathers) else [ask]
        self.names = [books.name(one.memory) for one in self.gathers]

    @property
    def asked(self) -> IntArray:
        """Who is asked."""
        return self.ask.workers

    # A worker's side.

    def fresh(self, states: Mapping[str, States], workers: int) -> dict[str, States]:
        """What so many workers keep now: columns that begin are added."""
        found = dict(states)
        for name, one in zip(self.names, self.gathers, strict=True):
            if not found.get(name):
                found[name] = {n: _of_all(blank, workers) for n, blank in one.fields().items()}
        return found

    def message(self, rows: SiteWorkers, worker: int, states: Mapping[str, States]) -> bytes:
        """What one worker sends; its states are changed in place."""
        who, pieces = np.array([worker]), []
        for name, one in zip(self.names, self.gathers, strict=True):
            if worker in one.workers:
                found, codes = rows.encoded(one, who, states[name])
                sent = [encode_count(int(found.passes[0])) + code for code in codes]
                pieces.append(b"".join(sent))
        return framed(pieces)

    def sizes(self, answers: Sequence[Answers]) -> IntArray:
        """The bytes of everyone's `message`."""
        total = np.zeros(self.books.workers, dtype=np.int64)
        last = np.zeros_like(total)
        seen = np.zeros(self.books.workers, dtype=bool)
        for one, found in zip(self.gathers, answers, strict=True):
            own: IntArray = np.zeros(self.books.workers, dtype=np.int64)
            own[found.workers] = found.sizes + count_sizes(found.passes)
            asked = one.workers
            total[asked] += own[asked] + np.where(seen[asked], count_sizes(last[asked]), 0)
            last[asked], seen[asked] = own[asked], True
        return total

    # The adder's side.

    def read(self, messages: Mapping[int, bytes], totals: FloatArray) -> list[Answers]:
        """The answers in everyone's messages; raises `WireError` for what none can be."""
        pieces = {
            worker: iter(apart(data, sum(worker in one.workers for one in self.gathers)))
            for worker, data in messages.items()
        }
        return [
            _answers(one, {w: next(pieces[w]) for w in sorted(pieces) if w in one.workers}, totals)
            for one in self.gathers
        ]

    def add(
        self, adder: Adder, arrived: IntArray, answers: Sequence[Answers], up: int
    ) -> tuple[bytes, list[Any]]:
        """The message down, and what the fit is sent."""
        codes, told = [], []
        for name, one, found in zip(self.names, self.gathers, answers, strict=True):
            memory = adder.memories.get(name)
            if memory is None and name not in self.books.begun:
                memory = np.zeros_like(one.fields().get("memory", np.zeros(0)))
            reached, code, adder.memories[name] = one.concluded(found, memory)
            codes.append(code)
            told.append(reached)
        passes = int(sum(found.passes.sum() for found in answers))
        news = News(arrived, self.books.rows, up, passes)
        return news.encode(self.asked, self.books.rows) + framed(codes), told

    # Everyone.

    def told(self, data: bytes) -> tuple[Heard, News]:
        """What the fit is sent by a message down; raises `WireError` for what none can be."""
        news, body = News.decode(data, self.asked, self.books.rows)
        pieces = apart(body, len(self.gathers))
        told = [
            one.told(piece, np.intersect1d(one.workers, news.arrived))
            for one, piece in zip(self.gathers, pieces, strict=True)
        ]
        return self.heard(told, news, len(data)), news

    def heard(self, told: list[Any], news: News, size: int) -> Heard:
        """What the fit is sent, with what it took."""
        self.books.begun |= {*self.names}
        taken = news.up + self.books.workers * (DIGEST_BYTES + size)
        sent = told if isinstance(self.ask, Gathers) else told[0]
        return Heard(sent, news.arrived, news.passes, taken, news.up)


def _of_all(blank: Any, workers: int) -> NDArray[Any]:
    """A column that begins with the same for all. Zeros take no memory until they are written."""
    first = np.asarray(blank)
    column = np.zeros((workers, *first.shape), dtype=first.dtype)
    if first.any():
        column[:] = first
    return column


def _answers(one: Gather, pieces: Mapping[int, bytes], totals: FloatArray) -> Answers:
    """The answers to one gather, of the workers that it asks."""
    here = [worker for worker, data in pieces.items() if data]
    values, rates, sizes, passes = [], [], [], []
    for worker in here:
        seen, at = decode_count(pieces[worker])
        value, rate = one.decoded(worker, pieces[worker][at:])
        values.append(value)
        rates.append(rate)
        passes.append(seen)
        sizes.append(len(pieces[worker]) - at)
    if len({len(value) for value in values}) > 1:
        raise WireError("answers of different lengths.")
    workers = np.array(here, dtype=np.int64)
    lost = np.array([worker for worker, data in pieces.items() if not data], dtype=np.int64)
    return Answers(
        workers,
        np.array(values).reshape(len(here), -1 if here else 0),
        np.array(rates),
        np.array(sizes, dtype=np.int64),
        lost,
        totals[workers],
        np.array(passes, dtype=np.int64),
    )
