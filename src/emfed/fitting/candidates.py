"""Which numbers of components can still be chosen: a run drops the others.

Candidates that are fitted side by side converge at their own pace, and those with too many
components are the slowest; as messages hold all of them, their noise also keeps the others from
converging. What a candidate may still gain is estimated from its own steps. One whose criterion
would be worse than the best's even after several times that gain is dropped, at both ends; the
memories of the others stay as they are.

It is an estimate, as convergence is: EM may leave a plateau on which it gained next to nothing.
Hence `hope` is generous.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from emfed.artifacts.result import criterion
from emfed.core.protocols import FloatArray, IdentityMetric, free_parameters
from emfed.core.records import Records, RoundRecord
from emfed.core.wire import ENVELOPE, floats_size
from emfed.fitting.rounds import Run
from emfed.fitting.stopping import remaining
from emfed.models.several import VALUES, Several

SEVERAL, LASTING, LEAST = 20.0, 1e4, 1e-3
"""Times its remaining gain, rounds of its present gain, and nats per row that a candidate is
granted: the largest of the three."""
FIRST, PAUSE = 16, 1.5
"""The first round after which everyone is asked how the candidates fit, and the next over the
last: each question is a message to and from everyone. Earlier, as for starts, likelihoods say
little about where they lead."""


def hope(told: Records) -> float:
    """Nats per row that a candidate with these records of its own is granted still to gain."""
    left = remaining(told)
    if left == math.inf:
        return left
    return max(LEAST, SEVERAL * left, LASTING * max(record.gain or 0.0 for record in told[-3:]))


def contenders(
    models: Sequence[Any],
    params: Sequence[Any],
    values: FloatArray,
    hopes: Sequence[float],
    rows: float,
    by: str,
) -> list[int]:
    """Positions of the candidates that can still be chosen, the best of now among them.

    ``values`` are log-likelihood and entropy of each, ``hopes`` what its log-likelihood is granted
    to gain, all per row. An entropy may fall to zero; a candidate with a collapsed component is not
    chosen if there is any other, but may recover.
    """
    charged, hoped = [], []
    for model, (likelihood, entropy), gain in zip(models, values.tolist(), hopes, strict=True):
        free = free_parameters(model)
        charged.append(criterion(by, likelihood, entropy, rows, free))
        hoped.append(criterion(by, likelihood + gain, 0.0, rows, free))
    sound = [j for j, (m, p) in enumerate(zip(models, params, strict=True)) if not m.remarks(p)]
    best = min(sound or range(len(models)), key=lambda j: charged[j])
    return [j for j in range(len(models)) if j == best or not hoped[j] > charged[best]]


@dataclass(frozen=True)
class Dropped:
    """A candidate where it was left."""

    model: Any
    statistics: FloatArray
    values: FloatArray
    """Its log-likelihood and entropy there."""


@final
class Rivals:
    """A callback of `emfed.fit` that drops the models of a `Several` which cannot be chosen."""

    def __init__(self, by: str) -> None:
        self._by = by
        self._run: Run | None = None
        self.dropped: dict[int, Dropped] = {}
        """By their place among all."""
        self.alive: list[int] = []

    def attach(self, run: Run) -> None:
        """Watch this run, if its steps tell gains in nats and its federation can drop."""
        several: Any = run.model
        metrics = several.metric(run.params).metrics
        self.alive = list(range(len(several.models)))
        if any(isinstance(metric, IdentityMetric) for metric in metrics) or not run.narrows:
            return
        self._run, self._asked = run, run.state.statistics
        self._told = [Records() for _ in self.alive]
        self._next = FIRST

    def __call__(self, record: RoundRecord) -> None:
        """After a round."""
        run = self._run
        if run is None or len(self.alive) == 1:
            return
        several: Any = run.model
        self._follow(run, several, record)
        if record.round < self._next:
            return
        hopes = [hope(told) for told in self._told]
        if min(hopes) == math.inf:
            return
        self._next = int(PAUSE * record.round)
        values = self._ask(run, several)
        able = contenders(several.models, run.params.parts, values, hopes, run.total, self._by)
        if len(able) < len(hopes):
            self._drop(run, several, values, able)

    def _follow(self, run: Run, several: Several, record: RoundRecord) -> None:
        """The gain of each candidate's own step, as that of the whole run is told in records.

        The server moved by step x H, where an EM step is H, and by those who answered alone.
        """
        before, self._asked = self._asked, run.state.statistics
        metric = several.metric(several.maximize(before))
        moved = self._asked - before
        step = min(1.0, record.step_size) * record.answered / run.federation.size
        for cut, part, told in zip(several.cuts, metric.metrics, self._told, strict=True):
            white = part.whiten(moved[cut]) / (step or 1.0)
            gain = float(white @ white) / 2 if step else None
            told.append(dataclasses.replace(record, gain=gain))

    def _ask(self, run: Run, several: Several) -> FloatArray:
        """Log-likelihood and entropy of each candidate now: one exchange, which is charged."""
        watched = dataclasses.replace(several, watched=True)
        everyone = np.arange(run.federation.size, dtype=np.int64)
        up = floats_size(VALUES * len(several.models))
        if run.count_bytes:
            run.ledger.add("round", "down", everyone, run.payloads(everyone), ENVELOPE)
            run.ledger.add("round", "up", everyone, up, ENVELOPE)
        run.evaluations += run.samples
        told = run.federation.mean_statistics(watched, run.params, run.weights)
        return np.asarray(watched.values(told))

    def _drop(self, run: Run, several: Several, values: FloatArray, able: list[int]) -> None:
        """Go on without the others; everyone is told who they are, a bit for each."""
        for j, place in enumerate(self.alive):
            if j not in able:
                statistics = run.state.statistics[several.cuts[j]]
                self.dropped[place] = Dropped(several.models[j], statistics, values[j])
        everyone = np.arange(run.federation.size, dtype=np.int64)
        if run.count_bytes:
            run.ledger.add("round", "down", everyone, -(-len(self.alive) // 8), ENVELOPE)
        kept = np.concatenate([np.arange(c.start, c.stop) for c in (several.cuts[j] for j in able)])
        run.narrow(
            dataclasses.replace(several, models=tuple(several.models[j] for j in able)), kept
        )
        self._asked = run.state.statistics
        self._told = [self._told[j] for j in able]
        self.alive = [self.alive[j] for j in able]
