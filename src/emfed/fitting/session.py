"""A federation that was opened for one fit: what all phases of the fit share."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal, final

import numpy as np

from emfed.core.errors import SettingsError
from emfed.core.ledger import Ledger
from emfed.core.protocols import (
    Algorithm,
    Federation,
    FloatArray,
    IntArray,
    Model,
    Question,
    View,
)
from emfed.fitting.settings import worker_weights
from emfed.models.binding import Bound
from emfed.models.naming import columns_named
from emfed.network.inprocess import answer_width
from emfed.network.prices import Prices


@final
class Session:
    """The opening exchange, the ledger, and questions to everyone.

    Where a federation makes no bytes, every message is priced as a network would send it.
    """

    def __init__(
        self,
        model: Model,
        federation: Federation,
        *,
        weights: str | Sequence[float] | FloatArray = "samples",
        columns: Sequence[str] | None = None,
        seed: int = 0,
        count_bytes: bool = True,
        masks: bool = False,
        rounded: bool = False,
    ) -> None:
        self.model, self.federation, self.seed = model, federation, seed
        self.masks = federation.masks = masks or federation.masks
        """Whether workers round to a common lattice, and a network is told sums alone."""
        if self.masks and weights != "samples":
            raise SettingsError("with masks workers count by their rows: leave weights out.")
        rounded = rounded and not self.masks  # sums of integers are rounded already
        opening = self.opening = federation.open(model, columns, rounded)
        self.counts = opening.counts
        self.samples = int(opening.counts.sum())
        totals = opening.counts if opening.totals is None else opening.totals
        self.total = float(totals.sum())
        """The sum of the rows' weights, their number where they have none."""
        self.supports = opening.supports
        """Where workers have statistics of their own: which. Then sums add up, with weights 1."""
        self.weights = np.ones(len(totals)) if opening.supports else worker_weights(weights, totals)
        if self.masks and (opening.supports is not None or opening.totals is not None):
            raise SettingsError("masks go with statistics that all workers share, and plain rows.")
        effective = opening.effective
        self.effective = 1 / float(self.weights @ self.weights) if effective is None else effective
        """How many workers of equal weight they are worth."""
        self.bound = Bound.told(model, opening, self.weights, rounded)
        federation.bind(self.bound)
        self.summary: Mapping[str, FloatArray] = model.combine(opening.summaries, self.weights)
        """What the opening exchange told of all rows together."""
        self.ledger = Ledger(federation.size, opening.names)
        self.count_bytes = count_bytes
        self.prices: Prices | None = None
        if federation.carries_bytes:
            federation.attach(self.ledger)
        elif count_bytes:
            self.prices = Prices(self.ledger, federation.size)
            self.prices.open(model, opening, self.bound, columns)
        self.phase = federation.last_phase
        self.evaluations = 0
        """Conditional expectations computed before the rounds of the fit."""

    @property
    def columns(self) -> tuple[str, ...] | None:
        """Names of the data's columns, where it has any."""
        return self.opening.columns

    @property
    def everyone(self) -> IntArray:
        """All workers."""
        return np.arange(self.federation.size, dtype=np.int64)

    def adopt(self, model: Model) -> None:
        """Go on with a model that knows other data already: nothing is bound anew."""
        self.bound = Bound.given(model)
        self.federation.bind(self.bound)

    def view(self, view: View) -> Any:
        """The model that a view names; errors name its columns."""
        with columns_named(self.columns):
            return self.bound.view(view)

    def begin(
        self, view: View, algorithm: Algorithm, seed: int, phase: int, since: int | None = None
    ) -> None:
        """A phase: rounds of this model and algorithm follow."""
        self.federation.begin(view, algorithm, seed, phase, since)
        self.phase = max(self.phase, phase)
        if self.prices is not None:
            self.prices.begin(view, algorithm, seed, phase, phase if since is None else since)

    def ask(
        self,
        kind: Literal["statistics", "values"],
        view: View,
        params: Any,
        purpose: str = "question",
        everyone: bool = False,
        informed: IntArray | None = None,
    ) -> FloatArray:
        """The weighted sum of everyone's answer; values come as ``(parts, 2)``."""
        question = Question(kind, view, params, purpose, everyone, informed)
        told = self.federation.ask(question, self.weights)
        if self.prices is not None:
            self.prices.ask(question, answer_width(question, self.view(view)))
        return told.reshape(-1, 2) if kind == "values" else told

    def scores(
        self, view: View, params: Any, kind: Literal["scores", "validation"] = "scores"
    ) -> FloatArray:
        """How well the model fits each worker's rows, ``(workers, 4)``; or rows held out."""
        question = Question(kind, view, params, "closing")
        told = self.federation.scores(question)
        if self.prices is not None:
            self.prices.ask(question, answer_width(question, self.view(view)))
        return told

    def fingerprint(self) -> dict[str, Any]:
        """What tells this session from one with other data, weights or workers."""
        data = hashlib.blake2b(self.counts.tobytes(), digest_size=16)
        for name in sorted(self.opening.summaries):
            data.update(np.ascontiguousarray(self.opening.summaries[name]).data.cast("B"))
        names = self.opening.names
        return {
            "model": self.model.describe(),
            "weights": digest(self.weights.tobytes()),
            "data": data.hexdigest(),
            "workers": None if names is None else digest("\0".join(names).encode()),
        }


def digest(data: bytes) -> str:
    """32 hexadecimal digits that stand for bytes."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()
