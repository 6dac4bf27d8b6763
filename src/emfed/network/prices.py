"""What the messages of a run weigh where a simulation makes none of them.

A simulated run sends the very messages that sites would get, so its ledger holds, byte for byte,
what the same run charges over a network: `tests/network/test_parity.py` compares the two. Sizes
that follow from numbers alone are computed; texts are built by the functions of `texts.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

import numpy as np

from emfed.core.ledger import Ledger
from emfed.core.protocols import (
    Algorithm,
    BoolArray,
    HasSupports,
    IntArray,
    Model,
    Opening,
    Question,
    Replies,
    Request,
    View,
)
from emfed.core.registry import plain
from emfed.core.wire import (
    ANSWER_ENVELOPE,
    ENVELOPE,
    cells_size,
    count_sizes,
    encode_text,
    envelopes,
    floats_size,
    join_size,
    reply_envelopes,
    request_fronts,
)
from emfed.models.binding import Bound, flatten_params
from emfed.network import texts


def first_question(bits: int) -> int:
    """The number of a run's first question, at random, so that all of them take four bytes."""
    return 1 << 27 | bits >> 38


@final
class Prices:
    """Charges a ledger with the messages of every worker of a simulation."""

    def __init__(self, ledger: Ledger, workers: int) -> None:
        self.ledger, self._everyone = ledger, np.arange(workers, dtype=np.int64)
        self._constants, self._settings = 0, 0
        self._counts: IntArray = self._everyone
        self._knows_constants: BoolArray = np.zeros(workers, dtype=np.bool_)
        self._knows_settings: BoolArray = np.zeros(workers, dtype=np.bool_)

    def open(
        self, model: Model, opening: Opening, bound: Bound, asked: Sequence[str] | None
    ) -> None:
        """Hello to everyone, and everyone joins."""
        workers = None if opening.sizes is None else len(self._everyone)
        hello = encode_text(texts.hello(plain(model.describe()), asked, workers))
        weighted = opening.totals is not None
        supports = opening.supports
        told = texts.join_about(opening.columns, bound.shapes, weighted, supports is not None)
        numbers = sum(int(np.prod(shape)) for shape in bound.shapes.values())
        self.ledger.add("opening", "down", self._everyone, 0, ENVELOPE + len(hello))
        exact = np.full(len(self._everyone), floats_size(numbers))
        summaries = exact if opening.sizes is None else opening.sizes
        envelope, payload = join_size(told, opening.counts, summaries)
        if supports is not None:
            assert isinstance(model, HasSupports)
            each = (supports.of_worker(worker) for worker in self._everyone.tolist())
            sizes = [cells_size(keys, weights, model.cells) for keys, weights in each]
            payload = payload + np.array(sizes)
        self.ledger.add("opening", "up", self._everyone, payload, ANSWER_ENVELOPE + envelope)
        self._counts = opening.counts
        self.rebind(bound, 0)

    def rebind(self, bound: Bound, phase: int) -> None:
        """Constants under another number, which nobody knows yet."""
        self._constants = int(count_sizes(np.array(phase))) + len(bound.wire)
        self._knows_constants[:] = False

    def state(self) -> dict[str, BoolArray]:
        """Who knows what, for a checkpoint."""
        return {"constants": self._knows_constants, "settings": self._knows_settings}

    def restore(self, state: Mapping[str, BoolArray]) -> None:
        """The inverse of `state`."""
        self._knows_constants, self._knows_settings = state["constants"], state["settings"]

    def begin(self, view: View, algorithm: Algorithm, seed: int, phase: int, since: int) -> None:
        """A phase whose settings nobody knows yet."""
        told = texts.settings(view, algorithm, seed, phase, since)
        self._settings = len(encode_text(told))
        self._knows_settings[:] = False

    def _news(self, workers: IntArray, settings: bool) -> None:
        """What goes along with a message to those who perhaps do not know it."""
        constants = ~self._knows_constants[workers]
        rules = settings & ~self._knows_settings[workers]
        frames = 1 + count_sizes(np.array([self._constants, self._settings]))
        payload = constants * self._constants
        envelope = 1 + constants * frames[0] + rules * (frames[1] + self._settings)
        some = np.flatnonzero(constants | rules)
        self.ledger.add("opening", "down", workers[some], payload[some], envelope[some])

    def ask(self, question: Question, width: int, asked: IntArray, heard: IntArray) -> None:
        """A question to some, and the answers of those who were heard."""
        text = len(encode_text({"kind": question.kind, **question.view.describe()}))
        self._news(asked, settings=False)
        payload = np.full(len(asked), floats_size(len(flatten_params(question.params))))
        if question.informed is not None:
            payload[np.isin(asked, question.informed)] = 0
        envelope = envelopes(first_question(0), 0, 0, self._knows_constants[asked])
        envelope = envelope + text + int(count_sizes(np.array(text)))
        self.ledger.add(question.purpose, "down", asked, payload, envelope)
        self.ledger.add(question.purpose, "up", heard, floats_size(width), ANSWER_ENVELOPE)
        self._knows_constants[heard] = True

    def request(self, request: Request, payload: IntArray) -> None:
        """A round's requests."""
        workers, round_ = request.workers, request.round
        self._news(workers, settings=True)
        known = self._knows_constants[workers]
        envelope = envelopes(round_, request.phase, request.generation, known)
        envelope = envelope + request_fronts(round_, request.accepted)
        self.ledger.add(request.purpose, "down", workers, payload, envelope)

    def reply(self, kind: str, replies: Replies) -> None:
        """What came back: uploads, and the word of those whose memory is lost."""
        workers = replies.workers
        envelope = reply_envelopes(replies.evaluations, self._counts[workers])
        self.ledger.add(kind, "up", workers, replies.bytes_up, envelope)
        self.ledger.add(kind, "up", replies.lost_memory, 0, ANSWER_ENVELOPE)
        self._knows_constants[workers] = self._knows_settings[workers] = True
