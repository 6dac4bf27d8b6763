"""What the messages of a run weigh where a simulation makes none of them.

A simulated run sends the very messages that sites would get, so its ledger holds, byte for byte,
what the same run charges over a network: `tests/network/test_parity.py` compares the two. Sizes
that follow from numbers alone are computed; texts are built by the functions of `texts.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy as np

from emfed.core.ledger import Ledger
from emfed.core.privacy import Privacy
from emfed.core.protocols import (
    BoolArray,
    IntArray,
    Model,
    Names,
    Opening,
    Phase,
    Question,
    Replies,
    Request,
)
from emfed.core.registry import plain
from emfed.core.wire import (
    ANSWER_ENVELOPE,
    ENVELOPE,
    Kind,
    count_sizes,
    encode_floats,
    encode_question,
    encode_text,
    envelopes,
    floats_size,
    join_size,
    payload_size,
    reply_envelopes,
    request_fronts,
    worker_loss,
)
from emfed.models.binding import Bound, Shapes, told_parameters
from emfed.models.bounded import Asked
from emfed.network import texts
from emfed.network.masking import FOLLOWING_SET, MEMBER, packed_size, roster_size
from emfed.network.sums import (
    FIRST_QUESTION,
    LATTICE_SIZE,
    PRIVATE_BITS,
    answer_shape,
    opening_shape,
    private_shape,
    shape_size,
)

FRESH = 8
"""Bytes of the fresh number that a worker is ready with."""


@final
class Prices:
    """Charges a ledger with the messages of every worker of a simulation."""

    def __init__(self, ledger: Ledger, workers: int, masks: bool = False) -> None:
        self._masks, self._roster = masks, 0
        self._last_set: BoolArray = np.zeros(workers, dtype=np.bool_)
        self._knows_roster: BoolArray = np.zeros(workers, dtype=np.bool_)
        self.ledger, self._everyone = ledger, np.arange(workers, dtype=np.int64)
        self._constants, self._settings = 0, 0
        self._counts: IntArray = self._everyone
        self._knows_constants: BoolArray = np.zeros(workers, dtype=np.bool_)
        self._knows_settings: BoolArray = np.zeros(workers, dtype=np.bool_)

    def open(
        self, model: Model, opening: Opening, bound: Bound, asked: Names, uniform: bool = False
    ) -> None:
        """Hello to everyone, and everyone joins."""
        workers = len(self._everyone)
        loss = None if opening.sizes is None else worker_loss(workers, model.fixed_data)
        content = texts.hello(plain(model.describe()), asked, loss, self._masks, uniform=uniform)
        hello = encode_text(content)
        weighted = opening.totals is not None and not self._masks  # masked, it is in the sum
        told = texts.join_about(opening.columns, bound.shapes, weighted)
        numbers = sum(int(np.prod(shape)) for shape in bound.shapes.values())
        self.ledger.add("opening", "down", self._everyone, 0, ENVELOPE + len(hello))
        self._counts = opening.counts
        self.rebind(bound, 0)
        if self._masks:
            self._open_masked(told, bound, opening.names)
            return
        exact = np.full(len(self._everyone), floats_size(numbers))
        summaries = exact if opening.sizes is None else opening.sizes
        envelope, payload = join_size(told, opening.counts, summaries)
        self.ledger.add("opening", "up", self._everyone, payload, ANSWER_ENVELOPE + envelope)

    def rebind(self, bound: Bound, phase: int) -> None:
        """Constants under another number, which nobody knows yet."""
        self._constants = int(count_sizes(np.array(phase))) + len(bound.wire)
        self._knows_constants[:] = False

    def open_private(
        self, model: Model, shapes: Shapes, columns: tuple[Names, Names], privacy: Privacy
    ) -> None:
        """Hello to everyone, and everyone joins with its key and no number of its rows.

        ``columns`` are those that the server asked for, and those that workers have.
        """
        asked, told = columns
        content = texts.hello(plain(model.describe()), asked, None, self._masks, privacy)
        self.ledger.add("opening", "down", self._everyone, 0, ENVELOPE + len(encode_text(content)))
        about = texts.join_about(told, shapes, False)
        if self._masks:
            self._join_masked(about, self.ledger.names)
            return
        ones = np.ones(len(self._everyone), dtype=np.int64)
        around, payload = join_size({**about, "private": True}, ones, 0 * ones)
        self.ledger.add("opening", "up", self._everyone, payload, ANSWER_ENVELOPE + around)

    def release(self, asked: Asked, purpose: str) -> None:
        """A question that is answered with noise, to everyone, and the answers."""
        about, numbers = asked.describe()
        body = encode_question("private", about, encode_floats(numbers))
        payload = payload_size(Kind.QUESTION, body)
        self._news(self._everyone, settings=False, constants=False)
        around = envelopes(FIRST_QUESTION, 0, 0, np.zeros(len(self._everyone), dtype=np.bool_))
        down = around + len(body) - payload
        self.ledger.add(purpose, "down", self._everyone, payload, down)
        if not self._masks:
            size = packed_size(asked.size, PRIVATE_BITS)
            self.ledger.add(purpose, "up", self._everyone, size, ANSWER_ENVELOPE)
            return
        size = shape_size(private_shape(asked.size))
        sizes = np.full(len(self._everyone), size)
        self._masked(purpose, self._everyone, around, sizes, private=True)

    def _join_masked(self, told: dict[str, Any], names: Sequence[str] | None) -> None:
        """Keys instead of numbers."""
        called = [str(i) for i in self._everyone.tolist()] if names is None else list(names)
        self._roster = 1 + roster_size(called)  # after its number
        ones = np.ones(len(called), dtype=np.int64)
        own = np.array([roster_size([name]) for name in called])
        around, payload = join_size({**told, "key": True}, ones, own)
        self.ledger.add("opening", "up", self._everyone, payload, ANSWER_ENVELOPE + around)

    def _open_masked(self, told: dict[str, Any], bound: Bound, names: Sequence[str] | None) -> None:
        """Keys instead of numbers, then one masked sum."""
        self._join_masked(told, names)
        unknown = np.zeros(len(self._everyone), dtype=np.bool_)
        self._news(self._everyone, settings=False, constants=False)
        text = len(encode_text({"kind": "opening"}))
        asked = envelopes(FIRST_QUESTION, 0, 0, unknown) + 1 + text
        self.ledger.add("opening", "down", self._everyone, 0, asked)
        size = shape_size(opening_shape(bound.shapes))
        set_envelope = envelopes(FIRST_QUESTION, 0, 0, unknown)
        self._masked("opening", self._everyone, set_envelope, np.full(len(unknown), size))

    def _masked(
        self,
        kind: str,
        workers: IntArray,
        envelope: IntArray,
        sizes: IntArray,
        private: bool = False,
    ) -> None:
        """All are ready, the server names them, and each answers; in short after the same set."""
        chosen = np.isin(self._everyone, workers)
        follows = not private and np.array_equal(chosen, self._last_set)
        members = FOLLOWING_SET if follows else MEMBER * len(workers)
        fresh = np.where(self._last_set[workers] & (not private), 0, FRESH)
        self.ledger.add(kind, "up", workers, 0, ANSWER_ENVELOPE + fresh)
        self.ledger.add(kind, "down", workers, 0, envelope + members)
        self.ledger.add(kind, "up", workers, sizes, ANSWER_ENVELOPE)
        self._last_set = chosen

    def state(self) -> dict[str, BoolArray]:
        """Who knows what, for a checkpoint."""
        known = {"constants": self._knows_constants, "settings": self._knows_settings}
        sums = {"roster": self._knows_roster, "last_set": self._last_set}
        return known | (sums if self._masks else {})

    def restore(self, state: Mapping[str, BoolArray]) -> None:
        """The inverse of `state`."""
        self._knows_constants, self._knows_settings = state["constants"], state["settings"]
        self._knows_roster = state.get("roster", self._knows_roster)
        self._last_set = state.get("last_set", self._last_set)

    def begin(self, phase: Phase) -> None:
        """A phase whose settings nobody knows yet."""
        self._settings = len(encode_text(texts.settings(phase)))
        self._knows_settings[:] = False

    def _news(self, workers: IntArray, settings: bool, constants: bool = True) -> None:
        """What goes along with a message to those who perhaps do not know it."""
        unknown = constants & ~self._knows_constants[workers]
        keys = self._masks & ~self._knows_roster[workers]
        rules = settings & ~self._knows_settings[workers]
        frames = 1 + count_sizes(np.array([self._constants, self._settings, self._roster]))
        payload = unknown * self._constants
        envelope = 1 + unknown * frames[0] + rules * (frames[1] + self._settings)
        envelope = envelope + keys * (frames[2] + self._roster)
        some = np.flatnonzero(unknown | rules | keys)
        self._knows_roster[workers] = True
        self.ledger.add("opening", "down", workers[some], payload[some], envelope[some])

    def ask(
        self,
        question: Question,
        width: int,
        asked: IntArray,
        heard: IntArray,
        sizes: IntArray | None = None,
    ) -> None:
        """A question to some, and the answers of those who were heard: of 64-bit floats, or of
        these many bytes."""
        text = len(encode_text({"kind": question.kind, **question.view.describe()}))
        self._news(asked, settings=False)
        payload = np.full(len(asked), len(told_parameters(question)))
        if question.informed is not None:
            payload[np.isin(asked, question.informed)] = 0
        envelope = envelopes(FIRST_QUESTION, 0, 0, self._knows_constants[asked])
        envelope = envelope + text + int(count_sizes(np.array(text)))
        self.ledger.add(question.purpose, "down", asked, payload, envelope)
        self._knows_constants[heard] = True
        if self._masks:
            around = envelopes(FIRST_QUESTION, 0, 0, self._knows_constants[heard])
            sizes = np.full(len(heard), shape_size(answer_shape(width)))
            self._masked(question.purpose, heard, around, sizes)
            return
        told = floats_size(width) if sizes is None else sizes[heard]
        self.ledger.add(question.purpose, "up", heard, told, ANSWER_ENVELOPE)

    def request(self, request: Request, payload: IntArray) -> None:
        """A round's requests."""
        workers, round_ = request.workers, request.round
        self._news(workers, settings=True)
        known = self._knows_constants[workers]
        envelope = envelopes(round_, request.phase, request.generation, known)
        envelope = envelope + request_fronts(round_, request.accepted)
        payload = payload if request.lattice is None else payload + LATTICE_SIZE
        self.ledger.add(request.purpose, "down", workers, payload, envelope)

    def reply(self, request: Request, replies: Replies) -> None:
        """What came back: uploads, and the word of those whose memory is lost."""
        workers, kind = replies.workers, request.purpose
        if request.lattice is None:
            envelope = reply_envelopes(replies.evaluations, self._counts[workers])
            self.ledger.add(kind, "up", workers, replies.bytes_up, envelope)
        else:
            known = np.ones(len(workers), dtype=np.bool_)
            around = envelopes(request.round, request.phase, request.generation, known)
            self._masked(kind, workers, around, replies.bytes_up)
        self.ledger.add(kind, "up", replies.lost_memory, 0, ANSWER_ENVELOPE)
        self._knows_constants[workers] = self._knows_settings[workers] = True
