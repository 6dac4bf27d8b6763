"""A server that follows the protocol's bytes and none of its intentions: it asks what it likes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from emfed import ParticipationError
from emfed.core.protocols import WHOLE, Algorithm, FloatArray, Model, Phase, Question, Request, View
from emfed.fitting.session import Session
from emfed.network import LocalTransport, RemoteFederation, Site


class Server:
    """A malicious server's end of a run: phases, rounds and questions, at any statistics."""

    def __init__(
        self, sites: Mapping[str, Site], model: Model, *, columns: Any = None, **settings: Any
    ) -> None:
        self.federation = RemoteFederation(LocalTransport(dict(sites)), attempts=1, **settings)
        self.session = Session(model, self.federation, columns=columns)
        self.model = self.session.view(WHOLE)
        self.round, self.seed = 0, 0

    def begin(self, algorithm: Algorithm, view: View = WHOLE, seed: int = 0) -> None:
        """A new phase."""
        self.model, self.seed = self.session.view(view), seed
        self.algorithm = algorithm.resolve(self.model.layout)
        self.session.begin(Phase(view, self.algorithm, seed, self.session.phase + 1))
        self.round, self.accepted = 0, np.full(self.federation.size, -1)

    def ask(self, statistics: FloatArray) -> dict[str, FloatArray]:
        """What each site uploads in one round at these statistics; memories stay at zero."""
        self.round += 1
        everyone = np.arange(self.federation.size)
        request = Request(
            self.round,
            0,
            "round",
            statistics,
            self.model.maximize(statistics),
            everyone,
            self.accepted.copy(),
            encode=True,
        )
        try:
            replies = self.federation.exchange(request)
        except ParticipationError:  # nobody answers
            return {}
        self.accepted[replies.workers] = self.round
        keys = self.federation.members.keys
        told = zip(replies.workers.tolist(), replies.values, strict=True)
        return {keys[number]: values for number, values in told}

    def question(self, kind: Any, params: Any) -> FloatArray:
        """The sum of the answers to a question at any parameters."""
        question = replace(Question("values", WHOLE, params), kind=kind)
        return self.federation.ask(question, self.session.weights)
