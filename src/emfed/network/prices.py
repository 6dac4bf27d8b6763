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
    View,
)
from emfed.core.registry import plain
from emfed.core.wire import (
    BUNDLE_FRAME,
    ENVELOPE,
    JOIN_ENVELOPE,
    QUESTION_ENVELOPE,
    REPLY_ENVELOPE,
    REQUEST_ENVELOPE,
    cells_size,
    floats_size,
)
from emfed.models.binding import Bound, flatten_params
from emfed.network import texts

COUNT = 8
"""Bytes of a number of rows."""


@final
class Prices:
    """Charges a ledger with the messages of every worker of a simulation."""

    def __init__(self, ledger: Ledger, workers: int) -> None:
        self.ledger, self._everyone = ledger, np.arange(workers, dtype=np.int64)
        self._constants, self._settings = 0, 0
        self._knows_constants: BoolArray = np.zeros(workers, dtype=np.bool_)
        self._knows_settings: BoolArray = np.zeros(workers, dtype=np.bool_)

    def open(
        self, model: Model, opening: Opening, bound: Bound, asked: Sequence[str] | None
    ) -> None:
        """Hello to everyone, and everyone joins."""
        hello = texts.as_json(texts.hello(plain(model.describe()), asked))
        weighted = opening.totals is not None
        supports = opening.supports
        told = texts.join_about(opening.columns, bound.shapes, weighted, supports is not None)
        about = texts.as_json(told)
        numbers = sum(int(np.prod(shape)) for shape in bound.shapes.values()) + weighted
        self.ledger.add("opening", "down", self._everyone, 0, ENVELOPE + len(hello))
        payload: int | IntArray = COUNT + floats_size(numbers)
        envelope = JOIN_ENVELOPE + len(about)
        if supports is not None:
            assert isinstance(model, HasSupports)
            each = (supports.of_worker(worker) for worker in self._everyone.tolist())
            sizes = [cells_size(keys, weights, model.cells) for keys, weights in each]
            payload = payload + np.array(sizes)
        self.ledger.add("opening", "up", self._everyone, payload, envelope)
        self._constants = floats_size(len(bound.constants))

    def state(self) -> dict[str, BoolArray]:
        """Who knows what, for a checkpoint."""
        return {"constants": self._knows_constants, "settings": self._knows_settings}

    def restore(self, state: Mapping[str, BoolArray]) -> None:
        """The inverse of `state`."""
        self._knows_constants, self._knows_settings = state["constants"], state["settings"]

    def begin(self, view: View, algorithm: Algorithm, seed: int, phase: int, since: int) -> None:
        """A phase whose settings nobody knows yet."""
        told = texts.settings(view, algorithm, seed, phase, since)
        self._settings = len(texts.as_json(told))
        self._knows_settings[:] = False

    def _news(self, workers: IntArray, settings: bool) -> None:
        """What goes along with a message to those who perhaps do not know it."""
        constants = ~self._knows_constants[workers]
        rules = settings & ~self._knows_settings[workers]
        payload = constants * self._constants
        envelope = constants * (BUNDLE_FRAME + ENVELOPE)
        envelope = envelope + rules * (BUNDLE_FRAME + ENVELOPE + self._settings)
        some = np.flatnonzero(constants | rules)
        around = envelope[some] + ENVELOPE + BUNDLE_FRAME
        self.ledger.add("opening", "down", workers[some], payload[some], around)

    def ask(self, question: Question, width: int) -> None:
        """A question to everyone, and everyone's answer."""
        text = texts.as_json({"kind": question.kind, **question.view.describe()})
        self._news(self._everyone, settings=False)
        payload = floats_size(len(flatten_params(question.params)))
        envelope = QUESTION_ENVELOPE + len(text)
        self.ledger.add(question.purpose, "down", self._everyone, payload, envelope)
        self.ledger.add(question.purpose, "up", self._everyone, floats_size(width), ENVELOPE)
        self._knows_constants[:] = True

    def request(self, kind: str, workers: IntArray, payload: IntArray) -> None:
        """A round's requests."""
        self._news(workers, settings=True)
        self.ledger.add(kind, "down", workers, payload, REQUEST_ENVELOPE)

    def reply(self, kind: str, workers: IntArray, payload: IntArray, lost: IntArray) -> None:
        """What came back: uploads, and the word of those whose memory is lost."""
        self.ledger.add(kind, "up", workers, payload, REPLY_ENVELOPE)
        self.ledger.add(kind, "up", lost, 0, ENVELOPE)
        self._knows_constants[workers] = self._knows_settings[workers] = True
